"""The ahead-of-time compile finds what it must. In processes of its own, as it turns the interpreter off."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

UNITS = """
from itertools import islice
from types import SimpleNamespace
from vattn.ops.triton import compile_all, compile_cases

nothing = SimpleNamespace(asm={})
assert compile_all._spills("0 bytes spill stores, 0 bytes spill loads", nothing, 64) == []
assert compile_all._spills("96 bytes spill stores, 90 bytes spill loads", nothing, 95)
assert compile_all._spills("", SimpleNamespace(asm={"amdgcn": ".vgpr_spill_count: 40"}), 64)
for line in ("Potential Performance Loss: wgmma.mma_async instructions are serialized due to", "ptxas warning : x"):
    assert compile_all._COMPLAINTS.search(line)
launches = list(islice(compile_cases.all_launches(), 6000))
kernels = {launch.kernel.__name__ for launch in launches}
wanted = {"attention_kernel", "finish_kernel", "cache_update_kernel", "merge_kernel", "rope_update_kernel"}
wanted |= {"round_query_kernel", "planned_rows_kernel", "mla_attention_kernel", "mla_merge_kernel", "mla_update_kernel"}
wanted |= {"mla_project_kernel", "mla_expand_kernel", "mla_prefill_kernel", "mla_indexer_score_kernel"}
assert kernels >= wanted, kernels
assert {launch.target for launch in launches} == set(compile_cases.TARGETS) == set(compile_all.GPU_TARGETS)
first, again = (compile_all._sample(launches, 130, 7) for _ in range(2))
assert [x.name for x in first] == [x.name for x in again] and len(first) == 130
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500, env=environment)


def test_what_it_looks_for() -> None:
    done = run("-c", UNITS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_one_kernel_for_one_target() -> None:
    done = run("-m", "tools.compile_kernels.triton", "--all", "--only", "merge_kernel bfloat16 128 sm_90")
    assert done.returncode == 0 and "1 compiled, 0 failed" in done.stdout, done.stdout + done.stderr
