"""Compile the latent decode path's kernels ahead of time for sm_90, on a machine with no GPU.

`python -m tools.compile_kernels.mla` compiles two layers, which ones `VATTN_FUZZ_SEED` says; `--all` compiles all.
Register spills, shared memory over the limit and warnings of the compilers are errors, but one: the narrow kernel's one
warpgroup gets all registers there are, and the compiler says that it takes no note of the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # Before Triton is imported: interpreted kernels cannot be compiled.
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"

import torch
import triton

from tools.compile_kernels import hopper as compile_all
from tools.compile_kernels.attention import TARGETS, Launch
from tools.compile_kernels.triton import _COMPLAINTS, GPU_TARGETS
from tools.compile_kernels.triton import source_of as plain_source_of
from vattn.cache.mla_layout import mla_cache_dtype
from vattn.config.mla import MLAConfig
from vattn.kernels import variants
from vattn.kernels.hopper.mla import launch as mla_launch
from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch
from vattn.kernels.hopper.mla import reduce as mla_reduce
from vattn.kernels.hopper.mla import sparse_launch as mla_sparse
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

SPILL_ALLOWANCE = 512
"""Bytes of a thread's registers that may go to memory: Triton 3.9 keeps more there than 3.6, outside of the loops."""

SHARED_BYTES = 227 << 10
DECODE = ("mla_decode_kernel", "mla_decode_wide_kernel", "mla_decode_fp8_kernel")
TURNS = "mla_decode_turns_kernel"
GLUON = (*DECODE, TURNS, "mla_prefill_gluon_kernel")
KERNELS = ("mla_schedule_kernel", *DECODE, TURNS)
MERGE = "mla_merge_parts_kernel"
HARMLESS = "Too many maxnreg specified"


def configs() -> Iterator[tuple[MLAConfig, int]]:
    """Yield layers and tokens of the query that between them reach every branch of the kernels."""
    base = MLAConfig(16, 128, 64, 128, 512, 0.07, "bfloat16", "bfloat16", 64, lse=True)
    for heads, tokens in ((16, 1), (32, 1), (128, 1), (16, 4)):
        yield base.replace(num_heads=heads), tokens
        yield base.replace(num_heads=heads, block_size=16, lse=False), tokens
    yield base.replace(block_size=128), 1
    yield base, 40  # a step of different lengths
    codes = base.replace(kv_cache_dtype="fp8_e4m3", kv_scale="tensor")
    for heads, block_size in ((16, 64), (32, 64), (8, 16), (128, 32)):
        layer = codes.replace(num_heads=heads, block_size=block_size, lse=heads == 16)
        yield layer, 1
        if heads < 32:
            yield layer.replace(query_format="fp8_e4m3"), 1
    yield base.replace(num_heads=64, block_size=32, dtype="float16", kv_cache_dtype="float16"), 1


def turns() -> Iterator[tuple[MLAConfig, int]]:
    """Yield what `configs` does, where 64 rows of the query are attended at a time from a cache of values."""
    for config, tokens in configs():
        wide = mla_launch.rows_per_program(config, tokens) == 64
        if wide and config.kv_cache_dtype == config.dtype:
            yield config, tokens


def prompts() -> Iterator[MLAConfig]:
    """Yield layers that between them reach every branch of the kernel of expanded prompts."""
    base = MLAConfig(16, 128, 64, 128, 512, 0.07, "bfloat16", "bfloat16", 64, lse=True)
    yield base
    yield base.replace(num_heads=3, block_size=16, dtype="float16", kv_cache_dtype="float16", lse=False)
    yield base.replace(block_size=256, output_format="fp8_static")
    yield base.replace(output_format="fp8_group64", output_arithmetic="divide")
    yield base.replace(output_format="nvfp4", lse=False)
    yield base.replace(output_format="nvfp4_swizzled")
    narrow = base.replace(qk_nope_head_dim=64, v_head_dim=64)
    yield narrow
    yield narrow.replace(output_format="nvfp4", block_size=16)
    yield narrow.replace(output_format="fp8_group64")


def corrected() -> Iterator[MLAConfig]:
    """Yield layers of prompts that between them reach every branch of the quantisation by corrected products."""
    base = MLAConfig(16, 128, 64, 128, 512, 0.07, "bfloat16", "bfloat16", 64, lse=True)
    yield base.replace(output_format="fp8_static", output_arithmetic="divide")
    yield base.replace(output_format="fp8_group128", output_arithmetic="divide", lse=False)
    yield base.replace(output_format="nvfp4", output_arithmetic="divide", lse=False)
    yield base.replace(
        output_format="nvfp4_swizzled", output_arithmetic="divide", dtype="float16", kv_cache_dtype="float16"
    )
    narrow = base.replace(qk_nope_head_dim=64, v_head_dim=64, output_arithmetic="divide")
    yield narrow.replace(output_format="fp8_group64", dtype="float16", kv_cache_dtype="float16")
    yield narrow.replace(output_format="nvfp4")


def lists() -> Iterator[MLAConfig]:
    """Yield sparse layers that between them reach every branch of the kernels that gather."""
    base = MLAConfig(128, 128, 64, 128, 512, 0.07, "bfloat16", "bfloat16", 64, lse=True, sparse=True)
    yield base
    codes = base.replace(kv_cache_dtype="fp8_e4m3", kv_scale="tensor")
    yield codes
    yield codes.replace(num_heads=16, query_format="fp8_e4m3", lse=False)


class Recorder:
    """Stand in for a jitted kernel and keep what it is launched with."""

    def __init__(self, kernel: Any, title: str, found: list[Launch]) -> None:
        self.kernel, self.title, self.found = kernel, title, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*args: Any, **kwargs: Any) -> None:
            given = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
            arguments = {name: value for name, value in given.items() if name in self.kernel.arg_names}
            options = {name: value for name, value in given.items() if name not in arguments}
            options |= {"num_warps": given["num_warps"]}
            self.found.append(Launch(f"{self.kernel.__name__} {self.title}", "sm_90", self.kernel, arguments, options))

        return record


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a tensor without values."""
    return torch.empty(shape, dtype=dtype)


def recorded_prompts(config: MLAConfig, tokens: int = 700) -> list[Launch]:
    """Return the launches of a step of prompts behind the expansion of its keys."""
    found: list[Launch] = []
    dtype, heads = MODEL_DTYPES[config.dtype], config.num_heads
    query = empty(tokens, heads, config.qk_head_dim, dtype=dtype)
    output, scales = OUTPUT_FORMATS[config.output_format].allocate(query, config.v_head_dim, dtype)
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    args = MLAAttentionArgs(**{
        **none, "query": query, "kv_cache": empty(8, config.block_size, config.head_size, dtype=dtype),
        "query_start_loc": empty(5), "seq_lens": empty(4), "block_table": empty(4, 64), "output": output,
        "output_block_scale": scales, "output_scale": empty(1, dtype=torch.float32),
        "lse": empty(tokens, heads, dtype=torch.float32) if config.lse else None,
    })  # fmt: skip
    kernel = mla_prefill_launch.mla_prefill_gluon_kernel
    recorder = Recorder(kernel, config.encode(), found)
    plan = Recorder(mla_prefill_launch.prefill_plan_kernel, config.encode(), [])
    with (
        mock.patch.object(mla_prefill_launch, "mla_prefill_gluon_kernel", recorder),
        mock.patch.object(mla_prefill_launch, "prefill_plan_kernel", plan),
    ):
        width = heads * (config.qk_nope_head_dim + config.v_head_dim)
        room, ropes = empty(1024 * width, dtype=dtype), empty(1024 * config.qk_rope_head_dim, dtype=dtype)
        mla_prefill_launch.attend_expanded(args, config, empty(5), room, ropes, None, 42, TARGETS["sm_90"], 132)
    return found


def recorded_lists(config: MLAConfig, tokens: int = 4) -> list[Launch]:
    """Return the launches of a sparse decode."""
    found: list[Launch] = []
    asked = MODEL_DTYPES[config.dtype] if config.query_format == "none" else torch.float8_e4m3fn
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    args = MLAAttentionArgs(**{
        **none, "kv_cache": empty(8, config.block_size, config.head_size, dtype=mla_cache_dtype(config)),
        "query_start_loc": empty(3), "seq_lens": empty(2), "block_table": empty(2, 64),
        "topk_indices": empty(tokens, 2048),
        "lse": empty(tokens, config.num_heads, dtype=torch.float32) if config.lse else None,
        "k_scale": None if config.kv_scale == "none" else empty(1, dtype=torch.float32),
        "q_scale": None if config.query_format == "none" else empty(1, dtype=torch.float32),
    })  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module, names in ((mla_sparse, ("mla_slots_kernel", *DECODE[1:])), (mla_reduce, (MERGE,))):
            for name in names:
                recorder = Recorder(getattr(module, name), f"lists {config.encode()}", found)
                stack.enter_context(mock.patch.object(module, name, recorder))
        mla_sparse.attend_latents(empty(tokens, config.num_heads, config.head_size, dtype=asked), args, config, 132)
    return found


def recorded(
    config: MLAConfig, tokens: int, reqs: int = 4, uneven: bool = False, scores: str = "first"
) -> list[Launch]:
    """Return the launches of a step, recorded on tensors without values.

    `uneven`: with a row more. `scores`: see `vattn.kernels.variants`.
    """
    found: list[Launch] = []
    title = f"{'uneven ' if uneven else ''}{scores} tokens={tokens} {config.encode()}"
    dtype, rows = MODEL_DTYPES[config.dtype], tokens * reqs + uneven
    stored = mla_cache_dtype(config)
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    args = MLAAttentionArgs(**{
        **none, "kv_cache": empty(8, config.block_size, config.head_size, dtype=stored),
        "query_start_loc": empty(reqs + 1), "seq_lens": empty(reqs), "block_table": empty(reqs, 64),
        "lse": empty(rows, config.num_heads, dtype=torch.float32) if config.lse else None, "plan": [],
        "k_scale": None if config.kv_scale == "none" else empty(1, dtype=torch.float32),
        "q_scale": None if config.query_format == "none" else empty(1, dtype=torch.float32),
    })  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(variants.using(latent_scores=scores))
        stack.enter_context(mock.patch.object(mla_launch, "_multiprocessors", lambda device: 132))
        for module, names in ((mla_launch, KERNELS), (mla_reduce, (MERGE,))):
            for name in names:
                stack.enter_context(mock.patch.object(module, name, Recorder(getattr(module, name), title, found)))
        # What cuts requests is compiled with the plain kernels.
        stack.enter_context(mock.patch.object(mla_launch, "cut_requests"))
        asked = dtype if config.query_format == "none" else torch.float8_e4m3fn
        mla_launch.attend_latents(empty(rows, config.num_heads, config.head_size, dtype=asked), args, config)
    return found


def problems_of(launch: Launch) -> list[str]:
    """Compile one launch and return what is wrong with it."""
    is_gluon = launch.kernel.__name__ in GLUON
    source, log = (compile_all.source_of if is_gluon else plain_source_of)(launch), io.StringIO()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        compiled = triton.compile(source, target=GPU_TARGETS[launch.target], options=launch.options)
    lines = log.getvalue().splitlines()
    problems = [line for line in lines if _COMPLAINTS.search(line) and HARMLESS not in line]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log.getvalue())]
    problems += [f"{n} bytes of registers spill, {SPILL_ALLOWANCE} may" for n in spills if n > SPILL_ALLOWANCE]
    if compiled.metadata.shared > SHARED_BYTES:
        problems.append(f"{compiled.metadata.shared} bytes of shared memory, {SHARED_BYTES} there are")
    return problems


def main() -> int:
    """Compile and report; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile everything")
    parser.add_argument("--only", default="", help="compile layers whose config contains this text")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VATTN_FUZZ_SEED", "1")))
    options = parser.parse_args()
    cases = [partial(recorded, *case) for case in configs() if options.only in case[0].encode()]
    cases += [
        partial(recorded, *case, scores="turns") for case in turns() if options.only in "turns " + case[0].encode()
    ]
    few = [case for case, tokens in configs() if tokens == 1]
    cases += [partial(recorded, case, 1, uneven=True) for case in few if options.only in "uneven " + case.encode()]
    cases += [partial(recorded_lists, case) for case in lists() if options.only in "lists " + case.encode()]
    cases += [partial(recorded_prompts, case) for case in prompts() if options.only in "prompts " + case.encode()]
    cases += [partial(recorded_prompts, case) for case in corrected() if options.only in "corrected " + case.encode()]
    if not options.all:
        cases = random.Random(options.seed).sample(cases, min(2, len(cases)))
    failed = 0
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        for case in cases:
            for launch in case():
                problems = problems_of(launch)
                if problems:
                    failed += 1
                    print(f"FAILED {launch.name}", *problems, sep="\n    ", flush=True)
    print(f"{len(cases)} layers compiled by Triton {triton.__version__}, {failed} kernels failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
