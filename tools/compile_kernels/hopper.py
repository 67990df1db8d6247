"""Compile the Gluon kernels ahead of time for sm_90, their only target, on a machine with no GPU.

`python -m tools.compile_kernels.hopper` compiles a sample, drawn by a printed seed (`VATTN_FUZZ_SEED` or `--seed`);
`--all` compiles everything. Register spills beyond a few values and any warning of the compilers (that matrix
instructions are serialised, above all) are errors. Triton 3.6 spills a value at most; 3.9 keeps up to a hundred in
memory where an FP8 cache takes registers for its converter warps or a head of 256 computes scales.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # Before Triton is imported: interpreted kernels cannot be compiled.
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tools.compile_kernels import small_m as few_rows_cases
from tools.compile_kernels import triton as triton_compile_all
from tools.compile_kernels.attention import Launch
from tools.compile_kernels.triton import source_of as plain_source_of
from vattn.cache.layout import kv_cache_shape
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper import fp4_rows
from vattn.kernels.hopper.prefill import launch as prefill_launch
from vattn.kernels.hopper.prefill.launch import Cut
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS

TARGET = "sm_90"
HOPPER = DeviceInfo("cuda", hopper.CAPABILITY, "a Hopper GPU")
SPILL_ALLOWANCE = 512
"""Bytes of a thread's registers that may go to memory: Triton 3.9 keeps up to a hundred values there where an output
computes scales and the log-sum-exp is wanted too; Triton 3.6, with which these kernels were timed, a value at most."""

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.int16: "i16"}


class _Kernel:
    """Stand in for a jitted kernel and keep what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arguments = kernel, dict[str, Any]()

    def __getitem__(self, grid: tuple[int, ...]) -> _Kernel:
        return self

    def __call__(self, **arguments: Any) -> None:
        self.arguments = arguments


def prefill_launch_of(config: AttentionConfig, cut: Cut, early: bool = False) -> Launch:
    """Return the launch of a prefill step of a config."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    dtype, heads = MODEL_DTYPES[config.dtype], config.num_heads
    stored = KV_FORMATS[config.kv_cache_dtype].storage_dtype
    query = empty(160, heads, config.head_size, dtype=torch.float8_e4m3fn if config.takes_fp8_query else dtype)
    fmt = OUTPUT_FORMATS[config.output_format]
    output, block_scale = fmt.allocate(query, config.head_size, dtype)

    def scale(kind: str) -> Tensor | None:
        sizes = {"none": 0, "tensor": 1, "head": config.num_kv_heads}
        return empty(sizes[kind], dtype=torch.float32) if sizes[kind] else None

    kv_scale = scale(config.kv_scale)
    args = AttentionArgs(
        query, empty(*kv_cache_shape(config, 6), dtype=stored), empty(3), empty(2), empty(2, 48), output, block_scale,
        empty(160, heads, dtype=torch.float32) if config.lse else None,
        empty(1, dtype=torch.float32) if fmt.static_scale else None, scale(config.query_scale), kv_scale, kv_scale,
        None, empty(heads, dtype=torch.float32) if config.sinks else None, None, None, None, None, None, [], None,
        config.encode(),
    )  # fmt: skip
    recorder = _Kernel(prefill_launch.prefill_kernel)
    with mock.patch.object(prefill_launch, "prefill_kernel", recorder):
        prefill_launch.launch(args, config, empty(9, 8), args.output, 132, cut, early)
    name = " ".join(["prefill", str(cut), *config.encode().split()[1:]])
    options = prefill_launch.launch_options(config, cut)
    return Launch(name, TARGET, recorder.kernel, recorder.arguments, options)


FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"lse": True},
    {"sliding_window": 1024, "sinks": True, "lse": True},
    {"logits_soft_cap": 30.0, "sliding_window": 4096},
    {"output_format": "fp8_static", "sinks": True},
    {"output_format": "fp8_group64_pow2_col", "output_arithmetic": "multiply", "lse": True},
    {"output_format": "fp8_group128", "output_arithmetic": "approximate_divide"},
)


CACHES: tuple[dict[str, Any], ...] = (
    {},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor", "query_format": "fp8_e4m3", "query_scale": "tensor"},
    {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head", "query_format": "fp8_e4m3", "query_scale": "head"},
)


def all_launches() -> Iterator[Launch]:
    """Yield every case."""
    blocks = prefill_launch.BLOCK_SIZES.values
    for dtype, layout, block_size in itertools.product(prefill_launch.DTYPES, ("NHD", "HND"), blocks):
        for head_size, cache, features in itertools.product(prefill_launch.HEAD_SIZES.values, CACHES, FEATURES):
            config = AttentionConfig(
                32, 8, head_size, head_size, head_size**-0.5, dtype, block_size=block_size, kv_cache_layout=layout,
                **{"kv_cache_dtype": dtype, **cache, **features},
            )  # fmt: skip
            if prefill_launch.refusals(config, HOPPER):
                continue
            for groups in sorted({prefill_launch.warpgroups(config, rows) for rows in (64, 8192)}):
                yield prefill_launch_of(config, Cut(groups))
    yield from _other_cuts()
    yield from _narrow_windows()
    yield from _fp4_rows()
    yield from few_rows_cases.launches()


def _other_cuts() -> Iterator[Launch]:
    """Yield what steps between decode and prefill take, and cuts that a benchmark tries."""
    for head_size, cache, features in itertools.product(prefill_launch.HEAD_SIZES.values, CACHES, FEATURES[::2]):
        for heads in (8, 32, 128) if features in FEATURES[:3] else (32,):
            config = AttentionConfig(
                heads, 8, head_size, head_size, head_size**-0.5, "bfloat16", block_size=16,
                **{"kv_cache_dtype": "bfloat16", **cache, **features},
            )  # fmt: skip
            if prefill_launch.refusals(config, HOPPER):
                continue
            for groups in (1, 2):
                cut = Cut(groups, prefill_launch.packs(config), ahead=True)
                yield prefill_launch_of(config, cut, early=groups == 2)
            if heads == 32:
                uneven = config.replace(num_heads=40)
                yield prefill_launch_of(uneven, Cut(1, prefill_launch.padded_pack(uneven), ahead=True))
            if config.takes_fp8_query:
                yield prefill_launch_of(config, Cut(2, turn=64))
                if head_size == 128:
                    yield prefill_launch_of(config, Cut(2, halves=True))
            # Beside the results of wide heads there are no registers for more converters.
            if config.takes_fp8_query and head_size < 256:
                for cut in (Cut(2, converters=4), Cut(2, converters=4, turn=64)):
                    yield prefill_launch_of(config, cut)
            if cache and head_size == 64 and triton.__version__.startswith("3.6."):
                yield prefill_launch_of(config, Cut(3))


def _narrow_windows() -> Iterator[Launch]:
    """Yield what prompts take where row tiles see few keys."""
    for cache, features in itertools.product(CACHES, FEATURES):
        config = AttentionConfig(
            64, 8, 64, 64, 0.125, "bfloat16", block_size=16,
            **{"kv_cache_dtype": "bfloat16", **cache, **features, "sliding_window": 128},
        )  # fmt: skip
        if prefill_launch.sees_few_keys(config):
            yield prefill_launch_of(config, prefill_launch.cut_of(config, 8192, 1, 132))


def _fp4_rows() -> Iterator[Launch]:
    """Yield what quantises the rows of other kernels to NVFP4."""
    formats, arithmetics = ("nvfp4", "nvfp4_swizzled"), ("divide", "approximate_divide")
    for dtype, fmt, arithmetic, heads in itertools.product(prefill_launch.DTYPES, formats, arithmetics, (3, 32, 128)):
        size = 80 if heads == 3 else 128
        config = AttentionConfig(
            heads, 1, size, size, 0.1, dtype, kv_cache_dtype=dtype, output_format=fmt, output_arithmetic=arithmetic
        )
        values = torch.empty(5, heads, size, dtype=MODEL_DTYPES[dtype])
        output, scales = OUTPUT_FORMATS[fmt].allocate(values, size, values.dtype)
        nothing = dict.fromkeys(AttentionArgs._fields)
        given = {"query": values, "output": output, "output_block_scale": scales, "output_scale": torch.empty(1)}
        arguments = fp4_rows.kernel_arguments(AttentionArgs(**{**nothing, **given}), config, values)  # type: ignore[arg-type]
        options = {"num_warps": arguments.pop("num_warps")}
        yield Launch(f"fp4_rows {heads} {config.encode()}", TARGET, fp4_rows.fp4_rows_kernel, arguments, options)


def source_of(launch: Launch) -> ASTSource:
    """Return what the runtime would compile for a launch; tensor maps are described, the rest is as for Triton."""
    boxes = {name: value for name, value in launch.arguments.items() if isinstance(value, TensorDescriptor)}
    plain = {name: 0 if name in boxes else value for name, value in launch.arguments.items()}
    source = plain_source_of(Launch(launch.name, launch.target, launch.kernel, plain, launch.options))
    attributes = dict(source.attrs)
    for index, parameter in enumerate(launch.kernel.params):
        if parameter.name in boxes:
            box = boxes[parameter.name]
            shape = ",".join(map(str, box.block_shape))
            source.signature[parameter.name] = f"tensordesc<{_DTYPES[box.base.dtype]}[{shape}],{box.layout!r}>"
            attributes.pop((index,), None)
    constants = {name[0] if isinstance(name, tuple) else name: value for name, value in source.constants.items()}
    by_name = {launch.kernel.arg_names[k] if isinstance(k, int) else k: v for k, v in constants.items()}
    return GluonASTSource(launch.kernel, source.signature, by_name, attributes)


_jobs: list[Launch] = []


def problems_of(index: int) -> list[str]:
    """Compile one job and return what is wrong with it; jobs reach the workers by forking."""
    with (
        mock.patch.object(triton_compile_all, "source_of", source_of),
        mock.patch.object(triton_compile_all, "SPILL_ALLOWANCE", SPILL_ALLOWANCE),
    ):
        return triton_compile_all.compile_launch(_jobs[index])


def main() -> int:
    """Compile and report; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile everything")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VATTN_FUZZ_SEED", "1")))
    parser.add_argument("--only", default="", help="compile those whose name contains this text")
    parser.add_argument("--count", type=int, default=6, help="how many to compile without --all")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    launches = [launch for launch in all_launches() if options.only in launch.name]
    total = len(launches)
    if not options.all:
        launches = random.Random(options.seed).sample(launches, min(options.count, total))
    print(f"compiling {len(launches)} of {total} Gluon variants, seed {options.seed}, Triton {triton.__version__}")
    _jobs.extend(launches)
    failed, total_jobs = 0, len(launches)
    # A fresh cache: what a cached kernel was warned of is not said again.
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
        multiprocessing.get_context("fork").Pool(options.processes) as pool,
    ):
        for launch, problems in zip(launches, pool.imap(problems_of, range(total_jobs)), strict=True):
            if problems:
                failed += 1
                print(f"FAILED {launch.name}", *problems, sep="\n    ", flush=True)
    print(f"{len(launches) - failed} compiled, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
