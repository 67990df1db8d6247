"""Compile the Triton kernels ahead of time for every target that they declare, on a machine with no GPU.

`python -m tools.compile_kernels.triton` compiles a sample, drawn by a printed seed (`VATTN_FUZZ_SEED` or `--seed`);
`--all` compiles everything. Register spills, shared memory over the target's limit and any warning of the compilers are
errors.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # Before Triton is imported: interpreted kernels cannot be compiled.

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from tools.compile_kernels.attention import TARGETS, Launch, all_launches
from vattn.quantization.formats import KV_FORMATS

GPU_TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
PACKED_FORMATS = tuple(name for name, fmt in KV_FORMATS.items() if fmt.packed)
UNTUNED_TARGETS, UNTUNED_SPILL_ALLOWANCE = ("gfx942", "sm_80", "sm_100"), 512
"""Where no kernel has run yet, so no tile is tuned: only large spills there point at a mistake in a kernel."""

SPILL_ALLOWANCE, EXACT_SPILL_ALLOWANCE = 96, 256
"""Bytes of a thread's registers that may go to memory: two dozen values, and more in exact fp32 products, which hold
their operands in registers and are not the fast path anywhere."""

PACKED_SPILL_ALLOWANCE = 1024
"""In the general kernel on packed caches on sm_90, whose fast kernels are others. Heads of 512 have taken 560."""

UNTUNED_KERNEL_SPILL_ALLOWANCE = sys.maxsize
"""No bound for kernels whose tiles nobody has tuned yet: the general kernel on packed caches in exact fp32 or on other
targets than sm_90, and plain latent attention on those. It makes them slow; their fast kernels are others."""

_DIVISIBLE = [["tt.divisibility", 16]]
_COMPLAINTS = re.compile(r"warning|serializ|unknown constraint|C75\d\d", re.IGNORECASE)


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
            signature[name] = _TYPES[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = _DIVISIBLE
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            constants[name] = value
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = _DIVISIBLE
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Launch) -> list[str]:
    """Compile one launch and return what is wrong with it."""
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            compiled = triton.compile(source_of(launch), target=GPU_TARGETS[launch.target], options=launch.options)
    except Exception:
        return [traceback.format_exc(limit=-3) + log.getvalue()[-2000:]]
    problems = [line for line in log.getvalue().splitlines() if _COMPLAINTS.search(line)]
    shared, limit = compiled.metadata.shared, TARGETS[launch.target].shared_bytes
    if shared > limit:
        problems.append(f"{shared} bytes of shared memory, {limit} there are")
    latent = launch.kernel.__name__ == "mla_attention_kernel"
    exact = launch.arguments.get("DTYPE" if latent else "COMPUTE") == tl.float32
    latent_elsewhere = latent and launch.target != "sm_90"
    packed = any(name in launch.name for name in PACKED_FORMATS)
    if latent_elsewhere or (packed and (exact or launch.target != "sm_90")):
        allowance = UNTUNED_KERNEL_SPILL_ALLOWANCE
    elif packed:
        allowance = PACKED_SPILL_ALLOWANCE
    elif launch.target in UNTUNED_TARGETS:
        allowance = UNTUNED_SPILL_ALLOWANCE
    else:
        allowance = EXACT_SPILL_ALLOWANCE if exact else SPILL_ALLOWANCE
    return problems + _spills(log.getvalue(), compiled, allowance)


def _spills(log: str, compiled: Any, allowance: int) -> list[str]:
    stores = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    if "amdgcn" in compiled.asm:
        stores += [4 * int(n) for n in re.findall(r"\.vgpr_spill_count:\s*(\d+)", str(compiled.asm["amdgcn"]))]
    return [f"{n} bytes of registers spill, {allowance} may" for n in stores if n > allowance]


def distinct_launches() -> list[Launch]:
    """Return every launch that the compiler can tell from the others."""
    found: dict[tuple[Any, ...], Launch] = {}
    for launch in all_launches():
        source = source_of(launch)
        key = (launch.target, source.hash(), tuple(sorted(launch.options.items())))
        found.setdefault(key, launch)
    return list(found.values())


_jobs: list[Launch] = []


def _run(index: int) -> tuple[int, float, list[str]]:
    start = time.monotonic()
    return index, time.monotonic() - start, compile_launch(_jobs[index])


def _sample(launches: list[Launch], count: int, seed: int) -> list[Launch]:
    """Draw launches so that every kernel meets every target."""
    groups: dict[tuple[str, str], list[Launch]] = {}
    for launch in launches:
        groups.setdefault((launch.kernel.__name__, launch.target), []).append(launch)
    rng = random.Random(seed)
    chosen = [rng.choice(group) for group in groups.values()]
    heavy = [launch for launch in launches if launch.kernel.__name__ == "attention_kernel"]
    return chosen + rng.sample(heavy, max(0, count - len(chosen)))


def main() -> int:
    """Compile and report; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile everything")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VATTN_FUZZ_SEED", "1")))
    parser.add_argument("--count", type=int, default=48, help="how many to compile without --all")
    parser.add_argument("--only", default="", help="compile those whose name or target contains this text")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    launches = [x for x in distinct_launches() if options.only in f"{x.name} {x.target}"]
    total = len(launches)
    if not options.all:
        launches = _sample(launches, min(options.count, total), options.seed)
    print(f"compiling {len(launches)} of {total} kernel variants, seed {options.seed}", flush=True)
    _jobs.extend(launches)
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        # A fresh cache: what a cached kernel was warned of is not said again.
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
        with multiprocessing.get_context("fork").Pool(options.processes) as pool:
            for index, _, problems in pool.imap_unordered(_run, range(len(_jobs))):
                if problems:
                    failed += 1
                    print(f"FAILED {_jobs[index].target} {_jobs[index].name}", *problems, sep="\n    ", flush=True)
    print(f"{len(launches) - failed} compiled, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
