"""Compile one launch as Triton's runtime would, and say what is wrong with the result."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import traceback
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tools.compile_kernels.launches import TARGETS, Launch
from vattn.quantization.formats import KV_FORMATS

GPU_TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 90, 100)}
GPU_TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
PACKED_FORMATS = tuple(name for name, fmt in KV_FORMATS.items() if fmt.packed)

SPILLS, EXACT_SPILLS = 96, 256
"""Bytes of a thread's registers that may go to memory: two dozen values, and more in exact fp32 products, which hold
their operands in registers and are not the fast path anywhere."""

UNTUNED_SPILLS = 512
"""On targets where no kernel has run: no tile is tuned there, so only large spills point at a mistake in a kernel."""

PACKED_SPILLS = 1024
"""In the general kernel over packed caches on sm_90, whose fast kernels are others. Heads of 512 take 560."""

_DTYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float64: "fp64", torch.bool: "i1",
}  # fmt: skip
_DIVISIBLE = [["tt.divisibility", 16]]
_COMPLAINTS = re.compile(r"warning|serializ|unknown constraint|C75\d\d", re.IGNORECASE)
_DROPPED_LIMIT = "Too many maxnreg specified"


def source_of(launch: Launch) -> ASTSource:
    """Return what the runtime would compile for a launch, its specialisation of arguments included."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        signature[name] = "constexpr"
        if parameter.is_constexpr or value is None:
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _DTYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = _DIVISIBLE
        elif hasattr(value, "block_shape"):
            box, layout = f"{_DTYPES[value.base.dtype]}{list(value.block_shape)}", getattr(value, "layout", None)
            signature[name] = f"tensordesc<{box}>" if layout is None else f"tensordesc<{box},{layout!r}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            constants[name] = value
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = _DIVISIBLE
    if launch.kernel.is_gluon():
        return GluonASTSource(launch.kernel, signature, constants, attributes)
    return ASTSource(launch.kernel, signature, constants, attributes)


def problems_of(launch: Launch) -> list[str]:
    """Compile one launch and return what is wrong with it."""
    log = io.StringIO()
    options = {name: value for name, value in launch.options.items() if value is not None}
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            compiled = triton.compile(source_of(launch), target=GPU_TARGETS[launch.target], options=options)
    except Exception:
        return [traceback.format_exc(limit=-3) + log.getvalue()[-2000:]]
    problems = complaints(log.getvalue(), launch.drops_limit)
    shared, limit = compiled.metadata.shared, TARGETS[launch.target].shared_bytes
    if shared > limit:
        problems.append(f"{shared} bytes of shared memory, the limit is {limit}")
    return problems + spills(log.getvalue(), compiled, allowance(launch))


def complaints(log: str, drops_limit: bool = False) -> list[str]:
    """Return the lines of a compiler's log that are errors here."""
    lines = [line for line in log.splitlines() if _COMPLAINTS.search(line)]
    return [line for line in lines if not (drops_limit and _DROPPED_LIMIT in line)]


def spills(log: str, compiled: Any, allowed: int) -> list[str]:
    """Return the register spills over what is allowed."""
    stores = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    if "amdgcn" in compiled.asm:
        stores += [4 * int(n) for n in re.findall(r"\.vgpr_spill_count:\s*(\d+)", str(compiled.asm["amdgcn"]))]
    return [f"{n} bytes of registers spill, {allowed} may" for n in stores if n > allowed]


def allowance(launch: Launch) -> int:
    """Return how many bytes of a thread's registers may spill."""
    if launch.spills is not None:
        return launch.spills
    tuned, latent = launch.target == "sm_90", launch.kernel.__name__ == "mla_attention_kernel"
    exact = launch.arguments.get("DTYPE" if latent else "COMPUTE") == tl.float32
    packed = any(name in launch.name for name in PACKED_FORMATS)
    # Untuned tiles of kernels that are not the fast path may spill without bound.
    if (latent and not tuned) or (packed and (exact or not tuned)):
        return sys.maxsize
    if packed:
        return PACKED_SPILLS
    if not tuned:
        return UNTUNED_SPILLS
    return EXACT_SPILLS if exact else SPILLS
