"""The ahead-of-time compile finds what it must. In processes of its own, as it turns the interpreter off."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

UNITS = """
import inspect
import os
os.environ["TRITON_INTERPRET"] = "0"
from types import SimpleNamespace
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, serialize_specialization_data
from tools.compile_kernels import attention, decode, mla, prefill
from tools.compile_kernels.__main__ import sample
from tools.compile_kernels.compiling import GPU_TARGETS, complaints, source_of, spills
from tools.compile_kernels.launches import TARGETS

nothing = SimpleNamespace(asm={})
assert spills("0 bytes spill stores, 0 bytes spill loads", nothing, 64) == []
assert spills("96 bytes spill stores, 90 bytes spill loads", nothing, 95)
assert spills("", SimpleNamespace(asm={"amdgcn": ".vgpr_spill_count: 40"}), 64)
for line in ("Potential Performance Loss: wgmma.mma_async instructions are serialized due to", "ptxas warning : x"):
    assert complaints(line) and complaints(line, drops_limit=True)
limit = "ptxas warning : Too many maxnreg specified"
assert complaints(limit) and not complaints(limit, drops_limit=True)
launches = [launch for family in (attention, decode, mla, prefill) for launch in family.all_launches()]
kernels = {launch.kernel.__name__ for launch in launches}
wanted = {"attention_kernel", "finish_kernel", "cache_update_kernel", "merge_kernel", "rope_update_kernel"}
wanted |= {"round_query_kernel", "planned_rows_kernel", "mla_attention_kernel", "mla_merge_kernel", "mla_update_kernel"}
wanted |= {"mla_project_kernel", "mla_expand_kernel", "mla_prefill_kernel", "mla_indexer_score_kernel"}
wanted |= {"encoder_kernel", "decode_kernel", "decode_cluster_kernel", "decode_packed_kernel", "prefill_kernel"}
assert kernels >= wanted, wanted - kernels
assert {launch.target for launch in launches} == set(TARGETS) == set(GPU_TARGETS)
first, again = (sample(launches, 30, 7) for _ in range(2))
assert [x.name for x in first] == [x.name for x in again] and {x.kernel.__name__ for x in first} == kernels
# Hooks on compiling get the constants as JSON.
for launch in first:
    source, target = source_of(launch), GPU_TARGETS[launch.target]
    constants = {key: value for key, value in source.constants.items() if not isinstance(value, JITFunction)}
    data = launch.name, source.signature, constants, {}, make_backend(target).parse_options({}), "key", target
    serialize_specialization_data(*data[: len(inspect.signature(serialize_specialization_data).parameters)])
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500, env={**os.environ})


@pytest.mark.long
def test_what_it_looks_for() -> None:
    done = run("-c", UNITS)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_one_kernel_for_one_target() -> None:
    done = run("-m", "tools.compile_kernels", "--all", "--only", "merge_kernel bfloat16 128 sm_90")
    assert done.returncode == 0 and "1 compiled, 0 failed" in done.stdout, done.stdout + done.stderr
