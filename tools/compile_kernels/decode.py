"""Compile the fast decode path's kernels ahead of time for Hopper, on a machine with no GPU.

`python -m tools.compile_kernels.decode --all` compiles every tuning that `choose_tuning` hands out, in each format;
without `--all` a quarter of them, which one `VATTN_FUZZ_SEED` says. Spills, shared memory over the limit and compiler
warnings are errors.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # Before Triton is imported: interpreted kernels cannot be compiled.

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vattn.cache.layout import kv_cache_dtype, kv_cache_shape
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode_packed import launch as decode_packed
from vattn.kernels.triton.attention import launch
from vattn.kernels.triton.common.epilogue import groups_fit_heads
from vattn.kernels.variants import using
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import KV_FORMATS, OUTPUT_FORMATS

TARGET = GPUTarget("cuda", 90, 32)
HOPPER = DeviceInfo("cuda", hopper.CAPABILITY)
SHARED_BYTES = 227 << 10
SPILL_ALLOWANCE = 120
"""Bytes of a thread's registers that may go to memory. Head size 256, wide groups and codes of three bits keep some
outside of the loop."""

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.float8_e4m3fn: "fp8e4nv",
}
_COMPLAINTS = re.compile(r"warning|serializ|unknown constraint|C75\d\d", re.IGNORECASE)
_HARMLESS = re.compile("FP_FUSION|Too many maxnreg")
"""Of a CTA of eight warps there are more registers for a thread than a thread can name."""

_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")


def configs() -> Iterator[AttentionConfig]:
    """Yield layers that between them reach every branch of the kernels."""
    base = AttentionConfig(32, 8, 128, 128, 128**-0.5, "bfloat16", "bfloat16", lse=True)
    fp8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}
    features: dict[str, Any] = {"sliding_window": 1024, "logits_soft_cap": 30.0, "sinks": True}
    for formats in ({}, fp8, {"dtype": "float16", "kv_cache_dtype": "float16"}):
        yield base.replace(**formats)
        yield base.replace(**formats, **features, output_format="fp8_static")
        yield base.replace(**formats, output_format="fp8_group64", output_arithmetic="approximate_divide")
        yield base.replace(**formats, output_format="nvfp4")
        load = "multiply" if "dtype" in formats else "approximate_divide"
        for query_load in ("plain", load):
            yield base.replace(**formats, query_format="fp8_e4m3", query_scale="head", query_load=query_load)
        yield base.replace(**formats, num_heads=128)
        yield base.replace(**formats, num_heads=8, num_kv_heads=1)
        yield base.replace(**formats, num_heads=64, head_size=64, head_size_v=64, num_kv_heads=1 if formats else 8)
    wide = base.replace(head_size=256, head_size_v=256)
    yield wide
    yield wide.replace(**fp8, **features, num_heads=16, output_format="fp8_group128")
    yield wide.replace(**fp8, num_heads=16, num_kv_heads=2)
    yield wide.replace(**fp8, num_heads=16, num_kv_heads=1)
    for fmt in KV_FORMATS.values():
        kind = "head" if fmt.quantised else "none"
        packed = base.replace(kv_cache_dtype=fmt.name, kv_scale=kind) if fmt.packed else base
        if not decode_packed.refusals(packed, HOPPER):
            yield packed
            yield packed.replace(num_heads=64)
            narrow = packed.replace(head_size=64, head_size_v=64)
            size = 128 if decode_packed.refusals(narrow, HOPPER) else 64
            yield packed.replace(**features, head_size=size, head_size_v=size, output_format="fp8_static")


def rows_per_request(config: AttentionConfig, num_reqs: int) -> list[int]:
    """Return how many rows a request may have in a step; more than the kernel attends at a time in small steps."""
    if KV_FORMATS[config.kv_cache_dtype].packed:
        return [1]
    if not decode_fast.attends_drafts(config) or config.query_load != "plain":
        return [1]
    most = decode_fast.MAX_GROUP_SIZE // config.group_size
    chunked = {2 * most} if most > 1 and num_reqs * config.num_kv_heads <= 64 else set()
    return sorted({1, max(1, min(2, most)), max(1, most)} | chunked)


def recorded(config: AttentionConfig, num_reqs: int, tokens: int = 1) -> list[tuple[Any, dict[str, Any]]]:
    """Return the launches of a decode step, recorded on tensors without storage."""
    found: list[tuple[Any, dict[str, Any]]] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def record(*args: Any, **kwargs: Any) -> None:
                found.append((self.kernel, {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}))

            return record

    from vattn.kernels.hopper import mixed_launch
    from vattn.kernels.hopper.decode import cluster_launch as decode_cluster_launch
    from vattn.kernels.hopper.decode import gluon_kernel as gluon_decode

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype = getattr(torch, config.dtype)
    quantised = config.kv_scale != "none"
    rows = (num_reqs * tokens, config.num_heads, config.head_size)
    scale = empty(config.num_kv_heads) if quantised else None
    q_scale = None if config.query_scale == "none" else empty(config.num_kv_heads)
    lengths = empty(num_reqs, dtype=torch.int32)
    query = empty(*rows, dtype=torch.float8_e4m3fn if config.takes_fp8_query else dtype)
    output, block_scale = OUTPUT_FORMATS[config.output_format].allocate(query, config.head_size_v, dtype)
    args = AttentionArgs(
        query, torch.empty(kv_cache_shape(config, 64), dtype=kv_cache_dtype(config), device="meta"),
        empty(num_reqs + 1, dtype=torch.int32), lengths, empty(num_reqs, 8, dtype=torch.int32),
        output, block_scale, empty(*rows[:2]) if config.lse else None, empty(1), q_scale,
        scale, scale, None, empty(config.num_heads) if config.sinks else None, None, None, None, None, None, [], None,
        config.encode(),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(decode_fast, "_multiprocessors", lambda device: 132))
        for module, name in (
            (decode_fast, "plan_kernel"), (decode_fast, "decode_kernel"), (decode_fast, "reduce_kernel"),
            (gluon_decode, "decode_kernel"), (decode_packed, "decode_packed_kernel"), (decode_packed, "reduce_kernel"),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, Recorder(getattr(module, name))))
        stack.enter_context(mock.patch.object(launch, "_launch_finish"))  # Compiled with the general kernel.
        stack.enter_context(using(few_requests="split"))  # Clusters are recorded by themselves.
        if KV_FORMATS[config.kv_cache_dtype].packed:
            decode_packed.decode(args, config)
            return found
        decode_fast.decode(args, config)
        if tokens == 1:
            # As many multiprocessors as requests have pairs of heads.
            pairs = max(1, num_reqs * config.num_kv_heads // 2)
            with mock.patch.object(decode_fast, "_multiprocessors", lambda device: pairs):
                tuning = decode_fast.whole_tuning(args, config)
            if tuning is not None:
                decode_fast.decode(args, config, tuning)
        if num_reqs == decode_fast.FEW_REQUESTS and tokens == 1 and not decode_cluster_launch.refusals(args, config):
            finished = OUTPUT_FORMATS[config.output_format].group_size == 0 or groups_fit_heads(config)
            written = config if finished else config.with_plain_output()
            for size in (8, 16):
                arguments = decode_cluster_launch.kernel_arguments(args, written, output, size)
                found.append((decode_cluster_launch.decode_cluster_kernel, arguments))
        if num_reqs > 4 and tokens == mixed_launch.short_rows(config):
            # A step that the prefill kernel shares, and that starts before that one has ended.
            tuning = mixed_launch.tuning_of(config, num_reqs, "overlapped")
            schedule = empty(1, 8, dtype=torch.int32)
            grouped = OUTPUT_FORMATS[config.output_format].group_size > 0
            with using(mixed_rows="eight"):
                fewer = mixed_launch.rows_at_once(config)
            for at_once in sorted({fewer, tokens}):
                sizes = decode_fast.sizing(config, num_reqs, tuning, query.device, at_once, longest=tokens)
                decode_fast.plan(args.query_start_loc, lengths, schedule, config, tuning, at_once, longest=tokens)
                result = output
                if grouped and not decode_fast.computes_scales(config, num_reqs, tuning, at_once):
                    result = empty(*rows, dtype=dtype)  # Quantised afterwards, as `mixed_launch.attend` does.
                decode_fast.launch(args, config, schedule, result, tuning, sizes, at_once)
    return found


def source_of(kernel: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what the runtime would compile for a launch, and its options."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    options = {name: arguments[name] for name in _OPTIONS if arguments.get(name) is not None}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        signature[name] = "constexpr"
        if parameter.is_constexpr or value is None:
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            box = f"{_TYPES[value.base.dtype]}{list(value.block_shape)}"
            layout = getattr(value, "layout", None)
            signature[name] = f"tensordesc<{box}>" if layout is None else f"tensordesc<{box},{layout!r}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes), options
    return ASTSource(kernel, signature, constants, attributes), options


def problems_of(kernel: Any, arguments: dict[str, Any]) -> list[str]:
    """Compile one launch and return what is wrong with it."""
    source, options = source_of(kernel, arguments)
    log = io.StringIO()
    with (
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
        mock.patch.dict(os.environ, {"TRITON_DUMP_PTXAS_LOG": "1"}),
    ):
        compiled = triton.compile(source, target=TARGET, options=options)
    found = [line for line in log.getvalue().splitlines() if _COMPLAINTS.search(line) and not _HARMLESS.search(line)]
    if compiled.metadata.shared > SHARED_BYTES:
        found.append(f"{compiled.metadata.shared} bytes of shared memory")
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log.getvalue())]
    return found + [f"{n} bytes of registers spill" for n in spills if n > SPILL_ALLOWANCE]


def main() -> int:
    """Compile and report; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile everything")
    parser.add_argument("--only", default="", help="compile layers whose config contains this text")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VATTN_FUZZ_SEED", "1")))
    options_given = parser.parse_args()
    layers = [config for config in configs() if options_given.only in config.encode()]
    chosen = layers if options_given.all else layers[options_given.seed % 4 :: 4]
    failures, seen = 0, set()
    for config in chosen:
        steps = [(num_reqs, tokens) for num_reqs in (4, 32, 64) for tokens in rows_per_request(config, num_reqs)]
        for num_reqs, tokens in steps:
            for kernel, arguments in recorded(config, num_reqs, tokens):
                source, options = source_of(kernel, arguments)
                key = (source.hash(), str(options))
                if key in seen:
                    continue
                seen.add(key)
                for problem in problems_of(kernel, arguments):
                    failures += 1
                    print(f"{kernel.__name__} for {num_reqs} x {tokens} rows, {config.encode()}: {problem}")
    print(f"{len(seen)} kernels compiled, {failures} problems")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
