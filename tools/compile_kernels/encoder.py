"""Compile the encoder kernel ahead of time for every NVIDIA target, on a machine with no GPU.

`python -m tools.compile_kernels.encoder --all` compiles every head size in both formats; without `--all` a sample,
drawn by `VATTN_FUZZ_SEED`. Spills, shared memory over the target's limit and compiler warnings are errors.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "0"  # Before Triton is imported: interpreted kernels cannot be compiled.

from unittest import mock

import torch

from tools.compile_kernels.attention import TARGETS, Launch
from tools.compile_kernels.triton import compile_launch
from vattn.config.attention import AttentionConfig
from vattn.kernels.triton.attention import encoder
from vattn.ops.arguments import VarlenAttentionArgs

SAMPLE = 6


def configs() -> Iterator[AttentionConfig]:
    """Yield every head size in both 16-bit dtypes and in FP8, some with a quantised output."""
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor", "query_format": "fp8_e4m3", "query_scale": "tensor"}
    for size, dtype, formats in itertools.product(encoder.HEAD_SIZES, ("bfloat16", "float16"), ({}, fp8)):
        base = AttentionConfig(16, 8, size, size, size**-0.5, dtype, dtype, block_size=0, causality="bidirectional")
        yield base.replace(**formats)
        if size in (72, 128):
            yield base.replace(**formats, output_format="fp8_static")


def launch_of(config: AttentionConfig, target: str) -> Launch:
    """Return the launch of one call, recorded on tensors without storage: views of one projection, or FP8."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, size, dtype = 4096, config.head_size, getattr(torch, config.dtype)
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    if config.query_format == "none":
        query, key, value = empty(tokens, sum(heads), size, dtype=dtype).split(heads, dim=1)
        scale = None
    else:
        query, key, value = (empty(tokens, count, size, dtype=torch.float8_e4m3fn) for count in heads)
        scale = empty(1)
    starts = empty(9, dtype=torch.int32)
    static = config.output_format != "none"
    output = empty(tokens, config.num_heads, size, dtype=torch.float8_e4m3fn if static else dtype)
    args = VarlenAttentionArgs(
        query, key, value, starts, starts, output, None, None, empty(1) if static else None, scale, scale, scale,
        None, None, None, None, None, None, [], None, config.encode(),
    )  # fmt: skip
    recorder = mock.MagicMock()
    with mock.patch.object(encoder, "encoder_kernel", recorder):
        encoder.attend(args, config, TARGETS[target])
    given = recorder.__getitem__.return_value.call_args.kwargs
    arguments = {name: value for name, value in given.items() if name in encoder.encoder_kernel.arg_names}
    options = {name: value for name, value in given.items() if name not in arguments}
    return Launch(config.encode(), target, encoder.encoder_kernel, arguments, options)


def main() -> int:
    """Compile and report; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile everything")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VATTN_FUZZ_SEED", "1")))
    options = parser.parse_args()
    chosen = list(itertools.product(configs(), (name for name in TARGETS if name.startswith("sm_"))))
    if not options.all:
        chosen = random.Random(options.seed).sample(chosen, SAMPLE)
    failures = 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
        for config, target in chosen:
            for problem in compile_launch(launch_of(config, target)):
                failures += 1
                print(f"{target} {config.encode()}: {problem}", flush=True)
    print(f"{len(chosen)} kernels compiled, {failures} problems")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
