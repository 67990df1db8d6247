"""Compile the decode kernel that turns and writes for itself ahead of time for Hopper, on a machine with no GPU.

`python -m vattn.ops.triton.compile_rope --all` compiles every rotation and format; without `--all` a fifth of them,
which one `VATTN_FUZZ_SEED` says. What counts as a problem is what `compile_decode` calls one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # Before Triton is imported: interpreted kernels cannot be compiled.

import torch

from vattn.config import AttentionConfig
from vattn.formats import OUTPUT_FORMATS
from vattn.ops.arguments import RopeAttentionArgs
from vattn.ops.cache_layout import kv_cache_dtype, kv_cache_shape
from vattn.ops.triton import decode_fast, decode_rope, launch
from vattn.ops.triton.compile_decode import HOPPER, problems_of
from vattn.rope_config import RopeConfig


@dataclass(frozen=True)
class Case:
    """One specialisation of the kernel.

    Attributes:
        num_reqs: rows of the step.
        positions: whether tables are looked up.
        full: whether they are as wide as what turns.
    """

    config: AttentionConfig
    rope: RopeConfig
    num_reqs: int = 2
    positions: bool = True
    full: bool = False


def cases() -> Iterator[Case]:
    """Yield cases that between them reach every branch of the kernel."""
    base = AttentionConfig(32, 8, 128, 128, 128**-0.5, "bfloat16", "bfloat16", lse=True)
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
    query: dict[str, Any] = {"query_format": "fp8_e4m3", "query_scale": "head"}
    features: dict[str, Any] = {"sliding_window": 1024, "logits_soft_cap": 30.0, "sinks": True}
    plain, normed = RopeConfig(128), RopeConfig(128, norm="rms", norm_eps=1e-6)
    divided = RopeConfig(128, round_query=False, query_arithmetic="approximate_divide")
    for formats in ({}, fp8, {"dtype": "float16", "kv_cache_dtype": "float16"}):
        config = base.replace(**formats)
        yield Case(config, plain, 2, positions=False)
        yield Case(config.replace(**query), divided, 32 if formats is fp8 else 8)
        yield Case(config.replace(**features, output_format="fp8_static"), RopeConfig(64, "interleaved"), 8, full=True)
        yield Case(config.replace(output_format="fp8_static", **query), normed, 2, positions=False)
        yield Case(config.replace(num_heads=64), RopeConfig(96), 2)
        one_head: dict[str, Any] = {"num_heads": 7, "num_kv_heads": 1, "head_size": 64, "head_size_v": 64}
        yield Case(config.replace(**one_head), RopeConfig(64, "interleaved", "rms_one_plus", 1e-6), 2, False)
        uneven: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_size": 64, "head_size_v": 64}
        yield Case(config.replace(**uneven, **query), RopeConfig(34, "interleaved", norm="rms"), 4)


def arguments_of(case: Case) -> dict[str, Any]:
    """Return the arguments of a launch, recorded on tensors without storage."""
    config, rope, rows = case.config, case.rope, case.num_reqs

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype = getattr(torch, config.dtype)
    sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    query, key, value = empty(rows, sum(sizes), config.head_size, dtype=dtype).split(sizes, dim=1)
    table = empty(4096 if case.positions else rows, rope.rotary_dim // (1 if case.full else 2))
    weight = None if rope.norm == "none" else empty(config.head_size, dtype=dtype)
    q_scale = None if config.query_scale == "none" else empty(config.num_kv_heads)
    scale = empty(config.num_kv_heads) if config.kv_scale != "none" else None
    lengths = empty(rows, dtype=torch.int32)
    slots = empty(rows, dtype=torch.int64)
    output, block_scale = OUTPUT_FORMATS[config.output_format].allocate(query, config.head_size_v, dtype)
    sinks = empty(config.num_heads) if config.sinks else None
    args = RopeAttentionArgs(
        query, key, value, table, table, slots if case.positions else None,
        torch.empty(kv_cache_shape(config, 64), dtype=kv_cache_dtype(config), device="meta"), slots, weight, weight,
        q_scale, empty(rows + 1, dtype=torch.int32), lengths, empty(rows, 8, dtype=torch.int32), output, block_scale,
        empty(rows, config.num_heads), empty(1), q_scale, scale, scale, None, sinks, None, None, None, None, None, [],
        None, rope.encode(), config.encode(),
    )  # fmt: skip
    turned = empty(*query.shape, dtype=torch.float8_e4m3fn if config.query_format != "none" else dtype)
    recorder = mock.MagicMock()
    with (
        mock.patch.object(decode_fast, "_multiprocessors", lambda device: 132),
        mock.patch.object(decode_fast, "plan_kernel", mock.MagicMock()),
        mock.patch.object(decode_fast, "reduce_kernel", mock.MagicMock()),
        mock.patch.object(launch, "_launch_finish"),  # Compiled with the general kernel.
        mock.patch.object(decode_rope, "rope_decode_kernel", recorder),
    ):
        decode_rope.decode(*args.parts(turned), rope, config)
    given: dict[str, Any] = recorder.__getitem__.return_value.call_args.kwargs
    return given


def main() -> int:
    """Compile and report; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile everything")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VATTN_FUZZ_SEED", "1")))
    options = parser.parse_args()
    chosen = [case for case in cases() if not decode_rope.refusals(case.rope, case.config, HOPPER)]
    if not options.all:
        chosen = chosen[options.seed % 5 :: 5]
    failures = 0
    for case in chosen:
        for problem in problems_of(decode_rope.rope_decode_kernel, arguments_of(case)):
            failures += 1
            print(f"{case.num_reqs} rows, {case.rope.encode()}, {case.config.encode()}: {problem}", flush=True)
    print(f"{len(chosen)} kernels compiled, {failures} problems")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
