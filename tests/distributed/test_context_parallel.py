"""Context parallelism: shards, steps and parts of all ranks in one process, then process groups of two and four."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vattn
from tests.distributed.context_parallel_ranks import CASES, SLOW_CASES
from tests.distributed.context_parallel_support import combined_parts, ranks
from tests.distributed.processes import run_all
from tests.layers.mla_support import exact, make_mla_config, random_mla_batch
from tests.support import make_config, random_paged_batch, relative_l2, with_cache
from vattn.backends.mla.registry import mla_backends
from vattn.distributed import ContextParallel, DCPShard
from vattn.distributed.combine import combine_parts, joint_lse
from vattn.distributed.rendezvous import confirm, meet, refuse
from vattn.errors import ConfigError, MetadataError, RankError, UnknownOptionError, UnsupportedRequestError, VattnError
from vattn.ops.reference import attention as reference

RANKS = "tests.distributed.context_parallel_ranks"
WORLDS = st.integers(1, 5)
INTERLEAVES = st.sampled_from([1, 2, 3, 7, 16])


@given(WORLDS, INTERLEAVES, st.integers(0, 200))
def test_shards_deal_out_every_token_once(world: int, interleave: int, length: int) -> None:
    """Against counting: owners, counts, positions and local indices, on ints and on tensors."""
    held: list[list[int]] = [[] for _ in range(world)]
    for token in range(length):
        held[token // interleave % world].append(token)
    tokens = torch.arange(length, dtype=torch.int32)
    for shard, own in zip(ranks(world, interleave), held, strict=True):
        assert shard.count(length) == len(own) == int(shard.count(torch.tensor(length)))
        assert [shard.position(index) for index in range(len(own))] == own
        assert shard.position(torch.arange(len(own))).tolist() == own
        assert shard.owns(tokens).tolist() == [token in own for token in range(length)]
        assert shard.local_indices(tokens).tolist() == [own.index(t) if t in own else -1 for t in range(length)]
        assert shard.count(-3) == 0 == int(shard.count(torch.tensor(-3)))


MASKS = {
    "causal": {},
    "window": {"sliding_window": 9},
    "window-alibi": {"sliding_window": 11, "alibi": "linear", "logits_soft_cap": 2.0},
    "sqrt-alibi": {"alibi": "sqrt"},
    "bidirectional": {"causality": "bidirectional", "sliding_window": 6, "alibi": "linear"},
    "chunks-flags": {"causality": "per_request", "sliding_window": 8, "chunk_lookback": 1},
    "tree": {"tree_bias": True},
    "ranges": {"mm_prefix": "full", "sliding_window": 5},
    "sinks": {"sinks": True},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head", "query_format": "fp8_e4m3", "query_scale": "head"},
    "packed": {"kv_cache_dtype": "int8_per_token_head", "kv_cache_layout": "HND"},
}


@settings(max_examples=15)
@given(st.data(), WORLDS, INTERLEAVES, st.sampled_from(list(MASKS)), st.integers(0, 1 << 16))
def test_parts_combined_are_one_rank(data: st.DataObject, world: int, interleave: int, mask: str, seed: int) -> None:
    """Every rank's part by the reference and by TORCH_SDPA; together, what one rank computes of the whole cache."""
    queries = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    lengths = [query + data.draw(st.sampled_from([0, 0, 1, 5, 40])) for query in queries]
    config = make_config(block_size=8, lse=True, **MASKS[mask])
    full = random_paged_batch(config, queries, lengths, seed=seed, num_padding_tokens=1, num_padding_reqs=1)
    expected, expected_lse = reference.paged_attention(full.args, config)
    got, got_lse = combined_parts(
        full.args, config, ranks(world, interleave), reference.paged_attention, "TORCH_SDPA", (1e-5, 1e-5), seed=seed
    )
    real = sum(queries)
    assert relative_l2(got[:real], expected[:real]) < 1e-5
    assert torch.allclose(got_lse[:real], expected_lse[:real], atol=1e-5)


@settings(max_examples=10)
@given(st.data(), WORLDS, INTERLEAVES, st.booleans(), st.integers(0, 1 << 16))
def test_latent_parts_combined_are_one_rank(
    data: st.DataObject, world: int, interleave: int, sparse: bool, seed: int
) -> None:
    """The same for latent attention, against the un-absorbed formula in fp64; listed positions are the request's."""
    queries = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    lengths = [query + data.draw(st.sampled_from([0, 1, 6, 30])) for query in queries]
    config = make_mla_config(lse=True, sparse=sparse)
    full = random_mla_batch(config, queries, lengths, seed=seed, padding_tokens=1, padding_reqs=1, topk=5)
    expected, expected_lse = exact(full, config)
    got, got_lse = combined_parts(full, config, ranks(world, interleave), exact, "TORCH_MLA", (1e-5, 1e-5), seed=seed)
    assert relative_l2(got, expected) < 1e-5
    assert torch.allclose(got_lse.double(), expected_lse, atol=1e-5)


def test_combine_of_empty_and_extreme_parts() -> None:
    """Nothing of an empty part is read; logs beyond the range of exp do not overflow; a sink alone weighs nothing."""
    nan = torch.full((2, 1, 3), torch.nan)
    values = torch.ones(2, 1, 3)
    empty = torch.tensor([[-torch.inf], [-torch.inf]])
    got, lse = combine_parts([nan, values, nan], torch.stack([empty, torch.tensor([[500.0], [-500.0]]), empty]))
    assert torch.equal(got, values) and lse.flatten().tolist() == [500.0, -500.0]
    got, lse = combine_parts([nan, nan], torch.stack([empty, empty]))
    assert torch.equal(got, torch.zeros_like(values)) and torch.equal(lse, empty)
    got, lse = combine_parts([nan, nan], torch.stack([empty, empty]), torch.tensor([0.5]))
    assert torch.equal(got, torch.zeros_like(values)) and lse.flatten().tolist() == [0.5, 0.5]
    logs = torch.randn(4, 3, 2)
    assert torch.allclose(joint_lse(logs), torch.logsumexp(logs, 0), atol=1e-6)


@settings(max_examples=20)
@given(st.data(), WORLDS, INTERLEAVES)
def test_builders_of_all_ranks_share_the_tokens(data: st.DataObject, world: int, interleave: int) -> None:
    """Each token has one slot on one rank, where its shard says; lengths add up; metadata passes its own check."""
    queries = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    lengths = [query + data.draw(st.integers(0, 50)) for query in queries]
    most = DCPShard(0, world, interleave)
    needed = [-(-most.count(length) // 8) for length in lengths]
    blocks = iter(random.Random(1).sample(range(1, 64), 3 * 10))
    tables = [[next(blocks) for _ in range(count)] for count in needed]
    owners, held = torch.zeros(sum(queries), dtype=torch.long), torch.zeros(len(queries), dtype=torch.long)
    for rank in range(world):
        parallel = ContextParallel(rank, world, interleave)
        builder = vattn.AttentionMetadataBuilder(4, 32, 64, block_size=8, num_blocks=64, context_parallel=parallel)
        step = builder.build(queries, lengths, tables, num_tokens_padded=sum(queries) + 1)
        builder.check(step)
        assert step.seq_lens[: len(queries)].tolist() == lengths
        positions = step.positions[: sum(queries)]
        request = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries))
        for token, slot in enumerate(step.slot_mapping[: sum(queries)].tolist()):
            position = int(positions[token])
            if not parallel.dcp_shard.owns(position):
                assert slot == -1
                continue
            owners[token] += 1
            index = int(parallel.dcp_shard.local_indices(torch.tensor(position)))
            assert slot == tables[int(request[token])][index // 8] * 8 + index % 8
        assert step.slot_mapping[-1] == -1
        held += step.local_seq_lens[: len(queries)]
    assert bool((owners == 1).all()) and held.tolist() == lengths


def layer_of(parallel: ContextParallel | None, **options: object) -> nn.Module:
    return with_cache(vattn.Attention(4, 16, 0.25, 2, context_parallel=parallel, **options), 8)


def inputs(heads: int) -> list[Tensor]:
    return [torch.randn(3, count * 16) for count in (heads, 2, 2)]


PAIR = ContextParallel(1, 2)

REFUSED = {
    "no-group": (ConfigError, "without a process group", ContextParallel.of),
    "rank": (ConfigError, "rank=2, world_size=2", lambda: ContextParallel(2, 2)),
    "interleave": (ConfigError, "interleave=0", lambda: ContextParallel(0, 2, 0)),
    "combine": (UnknownOptionError, "combine='sum'", lambda: ContextParallel(0, 2, combine="sum")),
    "heads": (ConfigError, "4 query heads for 3 ranks", lambda: layer_of(ContextParallel(0, 3))),
    "object": (ConfigError, "context_parallel of type int", lambda: layer_of(2)),
    "groups-of-columns": (
        ConfigError,
        "rows of 32 columns on each rank",
        lambda: layer_of(PAIR, quant_config=vattn.QuantConfig(output_format="fp8_group64")),
    ),
    "calculated-scales": (
        UnsupportedRequestError,
        "context_parallel with calculate_kv_scales",
        lambda: layer_of(PAIR, cache_config=vattn.CacheConfig(cache_dtype="fp8", calculate_kv_scales=True)),
    ),
    "invariant-sums": (
        UnsupportedRequestError,
        "batch_invariant and combine='reduce_scatter'",
        lambda: layer_of(PAIR, batch_invariant=True),
    ),
    "differential": (
        UnsupportedRequestError,
        "DifferentialAttention",
        lambda: vattn.DifferentialAttention(
            4,
            16,
            0.25,
            2,
            context_parallel=PAIR,
            lambda_init=0.1,
            **{f"lambda_{x}": [0.0] * 16 for x in ("q1", "k1", "q2", "k2")},
        ),
    ),
    "layer-alone": (
        ConfigError,
        "the builder with none",
        lambda: vattn.AttentionMetadataBuilder(layers=layer_of(PAIR), **SIZES),
    ),
    "builder-alone": (
        ConfigError,
        "a layer with no context parallelism",
        lambda: vattn.AttentionMetadataBuilder(layers=layer_of(None), context_parallel=PAIR, **SIZES),
    ),
    "no-ranks-for-a-builder": (
        ConfigError,
        "context_parallel=1",
        lambda: vattn.AttentionMetadataBuilder(context_parallel=1, **SIZES),
    ),
    "timeout": (ConfigError, "timeout='x'", lambda: ContextParallel(0, 2, timeout="x")),
    "endless": (ConfigError, "timeout=inf", lambda: ContextParallel(0, 2, timeout=float("inf"))),
    "no-timeout": (ConfigError, "timeout=-1", lambda: ContextParallel(0, 2, timeout=-1)),
    "other-combine": (
        ConfigError,
        "all_to_all",
        lambda: vattn.AttentionMetadataBuilder(
            layers=layer_of(PAIR), context_parallel=ContextParallel(1, 2, combine="all_to_all"), **SIZES
        ),
    ),
    "slots": (MetadataError, "slot_mapping with context parallelism", lambda: build(slot_mapping=[0, 1])),
    "prefix": (MetadataError, "shared_prefix_len with", lambda: build(shared_prefix_len=16)),
    "no-tables": (MetadataError, "block_tables=None", lambda: build([2], [2], None)),
    "narrow-table": (MetadataError, "seq_len 36 over 2 ranks needs 2 blocks", lambda: build([2], [36], [[1]])),
    "long": (MetadataError, "a step of 80 positions", lambda: build([2], [80], [[1, 2, 3, 4, 5]])),
    "whole-step": (MetadataError, "metadata of whole requests", lambda: call(PAIR, None)),
    "sharded-step": (MetadataError, "which holds all tokens", lambda: call(None, PAIR)),
    "other-shard": (MetadataError, "interleave=4", lambda: call(ContextParallel(1, 2, 4), PAIR)),
    "no-group-in-call": (MetadataError, "without a process group", lambda: call(PAIR, PAIR)),
}
SIZES = {"max_num_reqs": 2, "max_num_tokens": 16, "max_seq_len": 64}


def build(*step: object, **more: object) -> object:
    builder = vattn.AttentionMetadataBuilder(context_parallel=PAIR, **SIZES)
    return builder.build(*(step or ([2], [20], [[1, 2]])), **more)


def call(layer: ContextParallel | None, step: ContextParallel | None) -> Tensor:
    builder = vattn.AttentionMetadataBuilder(context_parallel=step, **SIZES)
    with torch.no_grad():
        return layer_of(layer)(*inputs(4 if layer is None else 2), metadata=builder.build([3], [3], [[1]]))


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    error, text, make = REFUSED[name]
    with pytest.raises(error) as raised:
        make()
    assert text in str(raised.value)


def test_transfers_refuse_shards() -> None:
    from vattn import KVTransfer
    from vattn.errors import CacheError

    layer = vattn.Attention(4, 16, 0.25, 2, context_parallel=PAIR)
    cache = vattn.allocate_kv_cache(layer, num_blocks=8, dtype=torch.float32)
    with pytest.raises(CacheError, match="one rank's tokens"):
        KVTransfer(layer, cache, vattn.HostMemoryConnector(memory="1MiB"))


def test_a_profiling_call_asks_no_other_rank() -> None:
    layer = vattn.Attention(4, 16, 0.25, 2, context_parallel=PAIR)
    assert layer(*inputs(2)).shape == (3, 32)
    assert "rank 1 of 2" in repr(layer)


def test_checks_without_a_group_say_nothing_and_errors_are_ours() -> None:
    PAIR.agree({"anything": 1})
    assert issubclass(RankError, VattnError)


HERE = threading.local()
"""The store of the rank that runs in a thread."""

STORE = "torch.distributed.distributed_c10d._get_default_store"


class Member:
    """What a meeting asks of a process group, and this rank's way to the store."""

    def __init__(self, rank: int, store: Any, name: str = "group") -> None:
        self.rank, self.size, self.store, self.group_name = lambda: rank, lambda: 3, store, name

    def come(self, interleave: int, timeout: float) -> str:
        """Return what this rank raises at a meeting, or `""`."""
        HERE.store = self.store
        try:
            confirm(self, meet(self, {"interleave": interleave}, timeout), None, timeout)
        except RankError as error:
            return str(error)
        return ""


def meet_at_once(members: list[Member], interleave: int, timeout: float) -> list[str]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda member: member.come(interleave, timeout), members))


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no stores")
@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_a_missed_meeting_is_over_for_all_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who came are told, what was said there is not read again, and ranks may have come unequally often."""
    monkeypatch.setattr(STORE, lambda: HERE.store)
    first: Any = dist.HashStore() if kind == "memory" else dist.TCPStore("localhost", 0, is_master=True)
    # A client of TCP serves one thread at a time.
    stores = [first, *(first if kind == "memory" else dist.TCPStore("localhost", first.port) for _ in range(2))]
    members = [Member(rank, store) for rank, store in enumerate(stores)]
    for number in range(2):
        assert "within 0.05 s: rank 1, 2 did not answer" in meet_at_once(members[:1], 2, 0.05)[0]
        missed = meet_at_once(members[:2], 2, 0.1)
        assert all("2 did not answer" in text for text in missed), missed
        assert meet_at_once(members, 4 + number, 60) == ["", "", ""]
    HERE.store = members[2].store
    refuse(members[2])
    assert all("rank 2 refused" in text for text in meet_at_once(members[:2], 2, 60))
    assert meet_at_once(members, 2, 60) == ["", "", ""]

    hasty, patient, _ = (Member(rank, store, "others") for rank, store in enumerate(stores))
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(patient.come, 2, 60)
        first.wait(["vattn/meet/others/0/1"])
        assert "rank 2 did not answer" in hasty.come(2, 0.1)
        assert said.result().startswith("rank 0 of 3 gave up waiting for the others' answers about interleave")


@pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no stores")
def test_a_store_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def check(self, keys: object) -> bool:
            raise RuntimeError("Broken pipe")

    monkeypatch.setattr(STORE, Gone)
    member = Member(1, None)
    assert "rank 1 of 3 cannot reach the store of its process group: Broken pipe" in member.come(2, 1)
    refuse(member)


with_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this build of torch has no gloo"
)
LAST = "a_rank_that_does_not_come_is_told"
"""A rank that others waited for in vain comes late to everything that follows."""
OF_FOUR = ["attention_equals_one_rank", "combine_is_its_reference", "latent_attention_equals_one_rank"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """Run all cases on two ranks and some on four, once."""
    names = [name for name in CASES if name != LAST] + [LAST]
    folders: list[Path] = [tmp_path_factory.mktemp(f"ranks{world}") for world in (2, 4)]
    return {2: run_all(RANKS, 2, folders[0], names), 4: run_all(RANKS, 4, folders[1], OF_FOUR)}


@with_gloo
@pytest.mark.parametrize(
    ("world", "name"), [*((2, name) for name in CASES), *((4, name) for name in OF_FOUR)], ids=lambda x: str(x)
)
def test_every_rank_passes(found: dict[int, list[dict[str, str]]], world: int, name: str) -> None:
    for rank, results in enumerate(found[world]):
        assert results.get(name, "not reached") == "passed", f"rank {rank} of {world}: {results.get(name)}"


@with_gloo
@pytest.mark.long
def test_inductor_on_every_rank(tmp_path: Path) -> None:
    for rank, results in enumerate(run_all(RANKS, 2, tmp_path, list(SLOW_CASES), timeout=600)):
        assert results == dict.fromkeys(SLOW_CASES, "passed"), f"rank {rank}: {results}"


def test_scratch_counts_gathered_latents() -> None:
    """Two ranks of 8 heads each: 64 latents for each new token, sent, gathered and put in order."""
    heads, sizes, latent = 16, (128, 64, 128, None), 512
    weight = nn.Linear(latent, 1, bias=False, device="meta")

    def make(group_name: str) -> Any:
        parallel = ContextParallel(0, 2, group_name=group_name)
        return vattn.MLAAttention(
            heads, 0.1, *sizes, latent, weight, context_parallel=parallel, attn_backend="TRITON_MLA"
        )

    alone, layer = make(""), make("a group")
    tokens, dtype = 1000, torch.bfloat16
    config = layer.resolve_config(dtype, "cpu")
    own = mla_backends()["TRITON_MLA"].scratch_bytes(config.replace(num_heads=8), tokens, None)
    latents = tokens * 64 * (latent + 64) * 2
    assert alone.scratch_bytes(tokens, dtype) < layer.scratch_bytes(tokens, dtype) == own + latents * 5 // 2
