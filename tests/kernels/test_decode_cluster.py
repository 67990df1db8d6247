"""Decode of few requests in clusters: which steps go that way, and what the compiled kernel consists of."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.support import make_config, random_paged_batch
from vattn.kernels.hopper.decode import cluster_launch
from vattn.kernels.hopper.decode import launch as decode_fast

LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


def is_taken(lengths: list[int], query_lens: list[int] | None = None, **changes: Any) -> bool:
    config = make_config(**{**LLAMA, **changes})
    batch = random_paged_batch(config, query_lens or [1] * len(lengths), lengths)
    return cluster_launch.takes(batch.args, config)


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [([2032], True), ([40, 0], True), ([2032, 3], True), ([2033], False), ([40, 2033], False), ([1, 2, 3], False)],
    ids=str,
)
def test_small_tables_by_default(lengths: list[int], taken: bool) -> None:
    """Tables have room for the longest request and one block more."""
    assert is_taken(lengths) is taken


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 256}, {"num_heads": 128}, {"num_heads": 4, "num_kv_heads": 2},
        {"query_format": "fp8_e4m3", "query_load": "divide"},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_kernel_lacks_stays_where_it_is(changes: dict[str, Any]) -> None:
    assert not is_taken([40], **changes)


def test_heads_2_to_the_31_elements_apart_stay_where_they_are() -> None:
    """Offsets inside of a block are int32 in the kernel."""
    config = make_config(**LLAMA)
    args = random_paged_batch(config, [1], [40]).args
    for apart, taken in ((2**28 - 2048, True), (2**28, False)):
        far = torch.empty((), dtype=torch.bfloat16, device="meta").as_strided((4, 16, 8, 128), (2048, 128, apart, 1))
        assert cluster_launch.takes(args._replace(key_cache=far, value_cache=far), config) == taken


def test_many_requests_and_several_rows_stay_where_they_are() -> None:
    assert not is_taken([40] * 5, num_kv_heads=2)
    assert not is_taken([40, 50], [2, 2])


def test_clusters_fill_the_card_and_hold_a_row_a_cta() -> None:
    for heads in (4, 8, 16, 32):
        for num_reqs in range(1, decode_fast.FEW_REQUESTS + 1):
            size = cluster_launch.cluster_size(make_config(**{**LLAMA, "num_kv_heads": heads}), num_reqs)
            assert size in (8, 16) and size >= cluster_launch.MAX_GROUP_SIZE
            assert heads * num_reqs * size >= cluster_launch.LEAST_CTAS
    # The kernel looks a row's request up among as many ends as this.
    assert decode_fast.FEW_REQUESTS == 4


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3"])
def test_shared_memory_is_asked_for_or_needs_no_asking(head_size: int, cache: str) -> None:
    """The runtime asks the driver for more than 48 KB by what the compiler allocates, which is not all there is."""
    config = make_config(**{**LLAMA, "head_size": head_size, "kv_cache_dtype": cache, "kv_scale": SCALES[cache]})
    row_bytes = head_size * (1 if cache == "fp8_e4m3" else 2)
    ring = 2 * cluster_launch.stages(config) * cluster_launch.SLOTS * 16 * row_bytes
    maxima_and_sums, inbox, most = 2 * cluster_launch.SLOTS * 8 * 4, 9216, 48 << 10
    assert ring + maxima_and_sums > most or ring + maxima_and_sums + inbox + 1024 <= most


SCALES = {"bfloat16": "none", "fp8_e4m3": "tensor"}

COMPILE = """
import os
os.environ["TRITON_INTERPRET"] = "0"
import triton
from tests.support import make_config, random_paged_batch
from tools.compile_kernels.compiling import GPU_TARGETS, source_of
from tools.compile_kernels.launches import record
from vattn.kernels.hopper.decode import cluster_launch
config = make_config(
    num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=16, output_format="fp8_group128"
)
batch = random_paged_batch(config, [1], [40])
launch, *_ = record("", "sm_90", lambda: cluster_launch.decode(batch.args, config, 16))
print(triton.compile(source_of(launch), target=GPU_TARGETS["sm_90"], options=launch.options).asm["ptx"])
"""


@pytest.mark.long
def test_one_inbox_two_barriers_and_one_instruction_for_the_maximum_of_a_group() -> None:
    """A second inbox would be another place than the one that parts are sent to.

    Of four cluster barrier instructions two arrive and two wait, in turn; the copies of keys are of 16 bytes. In a
    process of its own, as it turns the interpreter off.
    """
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(".b8 vattn_inbox" in line for line in lines) == 1
    barriers = [line.split(";")[0].split(".")[2] for line in lines if "barrier.cluster." in line]
    assert barriers == ["arrive", "wait", "arrive", "wait"]
    assert sum("redux.sync" in line for line in lines) == 1
    copies = [line for line in lines if "cp.async.c" in line and "shared.global" in line]
    assert copies and all("0x10" in line for line in copies)
