"""Compile the kernels ahead of time for every target that they declare, on a machine without a GPU.

`python -m tools.compile_kernels` compiles a sample, drawn by a printed seed (`VATTN_FUZZ_SEED` or `--seed`): every
kernel once for each of its targets, and some more. `--all` compiles everything. Register spills over a launch's
allowance, shared memory over the target's limit and compiler warnings are errors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # Before Triton is imported: interpreted kernels cannot be compiled.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set.

import triton

from tools.compile_kernels import attention, decode, mla, prefill
from tools.compile_kernels.compiling import problems_of, source_of
from tools.compile_kernels.launches import Launch

EXTRA = 60
"""Launches of a sample beside one of each kernel for each target."""

_jobs: list[Launch] = []


def distinct_launches() -> list[Launch]:
    """Return every launch that the compiler can tell from the others."""
    found: dict[tuple[object, ...], Launch] = {}
    for family in (attention, decode, prefill, mla):
        for launch in family.all_launches():
            options = {name: value for name, value in launch.options.items() if value is not None}
            key = launch.target, source_of(launch).hash(), tuple(sorted(options.items()))
            found.setdefault(key, launch)
    return list(found.values())


def sample(launches: list[Launch], extra: int, seed: int) -> list[Launch]:
    """Draw one launch of each kernel for each target, and `extra` others."""
    rng, groups = random.Random(seed), dict[tuple[str, ...], list[Launch]]()
    for launch in launches:
        groups.setdefault((launch.kernel.module, launch.kernel.__name__, launch.target), []).append(launch)
    chosen = [rng.choice(group) for group in groups.values()]
    taken = {id(launch) for launch in chosen}
    others = [launch for launch in launches if id(launch) not in taken]
    return chosen + rng.sample(others, min(extra, len(others)))


def _compile(index: int) -> list[str]:
    return problems_of(_jobs[index])


def main() -> int:
    """Compile and report; return 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="compile everything")
    parser.add_argument("--only", default="", help="compile launches whose name or target contains this text")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VATTN_FUZZ_SEED", "1")))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    launches = [launch for launch in distinct_launches() if options.only in f"{launch.name} {launch.target}"]
    total = len(launches)
    if not options.all:
        launches = sample(launches, EXTRA, options.seed)
    print(
        f"compiling {len(launches)} of {total} launches, seed {options.seed}, Triton {triton.__version__}", flush=True
    )
    _jobs.extend(launches)
    failed = 0
    # A fresh cache: the compiler does not repeat its warnings for a cached kernel.
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache, TRITON_DUMP_PTXAS_LOG="1"),
        multiprocessing.get_context("fork").Pool(options.processes) as pool,
    ):
        for launch, problems in zip(launches, pool.imap(_compile, range(len(launches))), strict=True):
            if problems:
                failed += 1
                print(f"FAILED {launch.target} {launch.name}", *problems, sep="\n    ", flush=True)
    print(f"{len(launches) - failed} compiled, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
