"""Caches in groups: which layers share what, blocks freed behind windows, and outputs that stay as they were."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

import vattn
from vattn.cache.block_pool import BlockPool, BlockTable
from vattn.cache.groups import group_layers, lifetime
from vattn.cache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from vattn.errors import (
    BlockError,
    CacheError,
    ConfigError,
    GraphContractError,
    MetadataError,
    OutOfBlocksError,
    UnsupportedRequestError,
)
from vattn.kv_transfer import HostMemoryConnector, KVTransfer

BLOCK = 8
FULL, WINDOW = FullAttentionSpec(2, 64), SlidingWindowSpec(2, 64, sliding_window=1024)


KINDS = [(FullAttentionSpec, {}), (SlidingWindowSpec, {"sliding_window": 32})]


def named(*specs):
    return {f"layers.{index}": spec for index, spec in enumerate(specs)}


@pytest.mark.parametrize(
    "full, window, groups, storages",
    [
        (1, 1, 2, 1),
        (24, 24, 2, 24),
        (10, 50, 6, 10),
        (4, 22, 7, 4),
        (5, 5, 2, 5),
        (0, 6, 1, 6),
        (6, 0, 1, 6),
        (8, 7, 2, 8),
    ],
)
def test_groups_of_full_and_window_layers(full, window, groups, storages):
    grouping = group_layers(named(*[FULL] * full, *[WINDOW] * window))
    assert (len(grouping.groups), len(grouping.page_types)) == (groups, storages)
    assert grouping.bytes_per_block == storages * FULL.page_size_bytes
    assert 0 <= grouping.waste < 0.1


def test_layers_of_unequal_types_share_no_storage_and_the_waste_is_told():
    small = SlidingWindowSpec(2, 64, kv_cache_dtype="fp8_e4m3", sliding_window=1024)
    grouping = group_layers(named(*[FULL] * 10, *[small] * 50))
    dtypes = [dtype for dtype, _, _ in grouping.page_types]
    assert dtypes.count(torch.bfloat16) == 10 and 10 <= dtypes.count(torch.uint8) < 50
    blocks = [group.spec.max_blocks(32768, 1) for group in grouping.groups]
    used = sum(count * group.content_bytes for count, group in zip(blocks, grouping.groups, strict=True))
    assert grouping.waste == pytest.approx(1 - used / (sum(blocks) * grouping.bytes_per_block))
    assert grouping.waste > 0.25


def test_storages_in_bytes_are_padded_to_share_them():
    wide, narrow = FullAttentionSpec(2, 64, 48), SlidingWindowSpec(2, 64, 40, sliding_window=1024)
    grouping = group_layers(named(*[wide] * 4, *[narrow] * 4))
    assert len(grouping.page_types) == 4
    assert grouping.bytes_per_block == 4 * wide.page_size_bytes
    assert {spec.page_size_bytes for group in grouping.groups for spec in group.specs} == {wide.page_size_bytes}
    assert grouping.waste > 0
    packed = [cls(2, 64, kv_cache_dtype="int8_per_token_head", **window) for cls, window in KINDS for _ in range(2)]
    assert len(group_layers(named(*packed)).page_types) == 2
    alone = group_layers(named(wide, narrow.__class__(2, 64, sliding_window=1024)))
    assert len(alone.page_types) == 2, "a typed storage is not padded"


def test_nothing_to_group():
    with pytest.raises(CacheError, match="no layer of the model has a KV cache"):
        group_layers({})
    with pytest.raises(CacheError, match="block sizes 16, 32"):
        group_layers(named(FULL, FullAttentionSpec(2, 64, block_size=32)))


SPECS = st.one_of(
    st.builds(FullAttentionSpec, st.just(2), st.sampled_from([64, 128]), st.sampled_from([0, 32, 40])),
    st.builds(lambda w: SlidingWindowSpec(2, 64, sliding_window=w), st.sampled_from([16, 1000])),
    st.builds(lambda v: SlidingWindowSpec(2, 64, v, sliding_window=16), st.sampled_from([32, 48])),
    st.builds(lambda c: ChunkedLocalAttentionSpec(2, 64, attention_chunk_size=c), st.sampled_from([32, 2048])),
    st.just(CrossAttentionSpec(2, 64)),
    st.just(FullAttentionSpec(2, 64, kv_cache_dtype="int8_per_token_head")),
    st.just(SlidingWindowSpec(2, 64, kv_cache_dtype="int8_per_token_head", sliding_window=16)),
    st.just(SinkFullAttentionSpec(2, 64, sink_len=32)),
)


@given(st.lists(SPECS, min_size=1, max_size=12), st.sampled_from([100, 4096, 32768]))
def test_any_model_is_grouped_soundly(specs, max_seq_len):
    specs = named(*specs)
    grouping = group_layers(specs, max_seq_len)
    placed = [name for group in grouping.groups for name in group.layer_names]
    assert sorted(placed) == sorted(specs)
    by_storage = {}
    for group in grouping.groups:
        assert len({lifetime(spec) for spec in group.specs}) == 1
        assert len(set(group.storages)) == len(group.storages), "two layers of a group in one storage"
        for name, spec, place in zip(group.layer_names, group.specs, group.storages, strict=True):
            dtype, shape, owner = grouping.page_types[place]
            assert (spec.storage_dtype, spec.storage_shape(1)) == (dtype, shape)
            assert owner == (name if isinstance(spec, SinkFullAttentionSpec) else ""), (
                "storages of sinks are not shared"
            )
            assert spec.content_bytes == specs[name].content_bytes
            by_storage.setdefault(place, []).append(spec)
    assert sorted(by_storage) == list(range(len(grouping.page_types)))
    assert all(len({(s.storage_dtype, s.storage_shape(1)) for s in users}) == 1 for users in by_storage.values())
    ideal = sum(s.max_blocks(max_seq_len, 1, max_seq_len) * s.content_bytes for s in specs.values())
    assert grouping.used_bytes == ideal <= grouping.request_bytes


def make_layer(index, **changes):
    changes = {"num_kv_heads": 2, "cache_config": vattn.CacheConfig(BLOCK), **changes}
    return vattn.Attention(4, 16, 0.25, prefix=f"layers.{index}", **changes)


class Stack(nn.Module):
    """Full, window and chunk layers in a row."""

    KINDS = (
        {},
        {"per_layer_sliding_window": 12},
        {"per_layer_sliding_window": 12},
        {"per_layer_sliding_window": 16, "chunk_lookback": 0},
        {},
        {"per_layer_sliding_window": 12},
        {"per_layer_sliding_window": 24, "chunk_lookback": 1},
    )

    def __init__(self, kinds=KINDS, **changes):
        super().__init__()
        self.layers = nn.ModuleList(make_layer(i, **kind, **changes) for i, kind in enumerate(kinds))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x[:, :32].contiguous(), x[:, 32:].contiguous())
        return x


class Hybrid:
    """A hybrid stack beside the same stack with one table for all layers."""

    def __init__(self, num_blocks=96, device="cpu", **changes):
        self.model, self.plain, self.device = Stack(**changes), Stack(**changes), device
        options = {"dtype": torch.float32, "device": device}
        self.cache = vattn.allocate_kv_cache(self.model, num_blocks=num_blocks, hybrid=True, **options)
        plain = vattn.allocate_kv_cache(self.plain, num_blocks=96, **options)
        self.pool, self.plain_pool = BlockPool(num_blocks), BlockPool(plain.num_blocks)
        capacity = (4, 64, 128, BLOCK, device)
        self.builder = vattn.GroupedMetadataBuilder(*capacity, layers=self.model)
        self.plain_builder = vattn.AttentionMetadataBuilder(*capacity, layers=self.plain)
        self.forward = self.model

    def poison_free(self):
        """Fill every block that no request owns, the null block too, with NaN."""
        owned = [block for block, count in enumerate(self.pool._references) if count]
        for storage in self.cache.kv_caches:
            kept = storage[:, owned].clone()
            storage.fill_(float("nan"))
            storage[:, owned] = kept

    @torch.no_grad()
    def compare(self, requests, counts):
        """Run one step of both and compare; requests are pairs of tables."""
        for (table, plain), count in zip(requests, counts, strict=True):
            vattn.copy_blocks(self.cache, table.append(count))
            plain.append(count)
        self.poison_free()
        x = torch.randn(sum(counts), 64).to(self.device)
        ends = [plain.num_tokens for _, plain in requests]
        rows = [[table.rows[index] for table, _ in requests] for index in range(len(self.cache.groups))]
        step = self.builder.build(counts, ends, rows)
        self.builder.check(step)
        plain_step = self.plain_builder.build(counts, ends, [plain.blocks for _, plain in requests])
        with vattn.forward_context(step):
            ours = self.forward(x)
        with vattn.forward_context(plain_step):
            expected = self.plain(x)
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
        return step

    def compare_steps(self):
        """Compare a prefill, a decode and a mixed step of two requests."""
        requests = [self.request() for _ in range(2)]
        for counts in ([30, 3], [1, 1], [7, 20]):
            self.compare(requests, counts)

    def request(self):
        return vattn.HybridBlockTable(self.pool, self.cache), BlockTable(self.plain_pool, BLOCK)


def test_a_hybrid_model_gets_groups_that_share_storages():
    hybrid = Hybrid()
    groups = hybrid.cache.groups
    assert [group.kind for group in groups] == ["full", "window", "window", "chunk", "chunk"]
    assert len(hybrid.cache.kv_caches) == 2 and hybrid.cache.bytes_per_block == 2 * 2 * BLOCK * 2 * 16 * 4
    assert hybrid.cache.total_bytes == sum(s.numel() * 4 for s in hybrid.cache.kv_caches)
    assert sum(hybrid.cache.bytes_per_layer.values()) == hybrid.cache.total_bytes
    text = str(hybrid.cache)
    assert "group 0: 2 layers, FullAttentionSpec" in text and "% of a request of 32768 tokens is unused" in text
    assert hybrid.cache.blocks_per_request(128) == 16 + 3 + 5 + 2 * 3
    assert vattn.allocate_kv_cache(Stack(), num_blocks=2, dtype=torch.float32).blocks_per_request(128) == 16


@pytest.mark.parametrize("changes", [{}, {"cache_config": vattn.CacheConfig(BLOCK, kv_cache_layout="HND")}])
def test_outputs_equal_those_of_one_table_for_all_layers(changes):
    hybrid = Hybrid(**changes)
    rng = random.Random(0)
    requests = [hybrid.request() for _ in range(3)]
    for _ in range(8):
        chosen = [request for request in requests if rng.random() < 0.8] or requests[:1]
        hybrid.compare(chosen, [rng.choice([1, 1, 2, 5, 9]) for _ in chosen])
    for table, _ in requests:
        for group, row in zip(hybrid.cache.groups, table.rows, strict=True):
            assert sum(map(bool, row)) <= group.spec.max_blocks(table.num_tokens, 9)
        table.free()
    hybrid.pool.check()
    assert hybrid.pool.num_used == 0


def test_compiled_models_take_steps_with_groups_in_one_graph():
    hybrid, backend = Hybrid(kinds=Stack.KINDS[:4]), EagerAndRecordGraphs()
    hybrid.forward = vattn.compile(hybrid.model, backend=backend)
    hybrid.compare_steps()
    assert len(backend.graphs) == 1


def test_equal_layers_of_different_groups_share_one_graph():
    torch._dynamo.reset()
    hybrid, backend = Hybrid(), EagerAndRecordGraphs()
    windows = [layer for layer in hybrid.model.layers if layer._request["sliding_window"] == 12]
    assert len({layer.kv_cache_group.index for layer in windows}) == 2
    vattn.compile_regions(windows, backend=backend)
    hybrid.compare_steps()
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_inductor_updates_a_storage_that_two_groups_share():
    hybrid = Hybrid(kinds=Stack.KINDS[:2])
    assert len(hybrid.cache.kv_caches) == 1
    hybrid.forward = vattn.compile(hybrid.model)
    hybrid.compare_steps()


def test_forked_requests_write_to_blocks_of_their_own():
    hybrid = Hybrid()
    first = hybrid.request()
    hybrid.compare([first], [27])
    branch = (first[0].fork(), BlockTable(hybrid.plain_pool, BLOCK))
    # Without groups nothing is forked here: the branch recomputes nothing, so its plain twin gets the same bytes.
    branch[1].append(27)
    for source, target in zip(first[1].blocks, branch[1].blocks, strict=True):
        vattn.copy_blocks([layer.kv_cache for layer in hybrid.plain.layers], [(source, target)])
    for counts in ([1, 1], [3, 6]):
        hybrid.compare([first, branch], counts)
    first[0].free()
    hybrid.compare([branch], [4])
    branch[0].free()
    hybrid.pool.check()
    assert hybrid.pool.num_used == 0


def test_the_cuda_graph_runner_takes_steps_with_groups():
    hybrid = Hybrid()
    runner = vattn.CUDAGraphRunner(
        hybrid.model, [4, 2], hybrid.builder, lambda step: [torch.zeros(step.slot_mapping.shape[0], 64)]
    )
    table, _ = hybrid.request()
    table.append(20)
    rows = [[row] for row in table.rows]
    x = torch.randn(1, 64)
    step = runner.build([1], [20], rows)
    assert step.capture_key() in runner._entries
    with torch.no_grad():
        assert runner(x, metadata=step).shape == (1, 64)
    other = vattn.GroupedMetadataBuilder(4, 64, 128, BLOCK, layers=hybrid.model)
    with pytest.raises(GraphContractError, match="buffers moved"):
        other.build([1], [20], rows, capture_key=step.capture_key())


def test_metadata_of_the_wrong_kind_is_refused():
    hybrid = Hybrid()
    x = torch.randn(2, 64)
    table, _ = hybrid.request()
    table.append(2)
    step = hybrid.builder.build([2], [2], [[row] for row in table.rows])
    plain = hybrid.plain_builder.build([2], [2], [[1]])
    with torch.no_grad():
        with vattn.forward_context(plain), pytest.raises(MetadataError, match="without a part for group 0 of 5"):
            hybrid.model(x)
        with (
            vattn.forward_context(step),
            pytest.raises(MetadataError, match=r"metadata with groups in layer 'layers\.0'"),
        ):
            hybrid.plain(x)
        with pytest.raises(MetadataError, match="without a part"):
            hybrid.model.layers[0](x, x[:, :32], x[:, 32:], metadata=plain)
        other = Hybrid()
        with vattn.forward_context(step), pytest.raises(MetadataError, match="without a part"):
            other.model(x)
        with vattn.forward_context(step):
            with vattn.forward_context(None):
                assert not (hybrid.model(x) - x).any(), "a profiling call inside of a step"
            ours = hybrid.model(x)
        layer = hybrid.model.layers[1]
        with vattn.forward_context(step):
            expected = layer(x, x[:, :32], x[:, 32:])
        assert torch.equal(layer(x, x[:, :32], x[:, 32:], metadata=step), expected)
        assert all(group.step is None for group in hybrid.builder.groups)
    assert torch.isfinite(ours).all()
    with pytest.raises(ConfigError, match="in no group of the same cache"):
        vattn.GroupedMetadataBuilder(4, 64, 128, BLOCK, layers=hybrid.plain)
    with pytest.raises(CacheError, match="KV transfer for a cache of 5 groups"):
        KVTransfer(hybrid.model, hybrid.cache, HostMemoryConnector("1MiB"))
    with pytest.raises(CacheError, match="KVCacheAllocation, without groups"):
        vattn.HybridBlockTable(hybrid.pool, vattn.allocate_kv_cache(Stack(), num_blocks=2, dtype=torch.float32))


def test_wrong_tables_are_refused_and_touch_no_buffer():
    hybrid = Hybrid()
    table, _ = hybrid.request()
    with pytest.raises(BlockError, match="-1 tokens"):
        table.append(-1)
    table.append(40)
    table.append(1)
    rows = [[row] for row in table.rows]
    step = hybrid.builder.build([1], [41], rows)
    before = {name: tensor.clone() for name, tensor in step.tensors().items()}
    freed = [rows[0], *[[[0] * 6]] * 4]
    for tables, text in (
        (rows[:4], "4 block tables"),
        (freed, r"request 0: entry 3 of the block table of CacheGroup\(1 of 5, window\) is 0, a block that was freed"),
        ([*rows[:4], [[1]]], "needs 6 blocks"),
        ([*rows[:4], [[99] * 6]], "block 99"),
    ):
        with pytest.raises(MetadataError, match=text):
            hybrid.builder.build([1], [41], tables)
    with pytest.raises(MetadataError, match="slot_mapping with slots"):
        hybrid.builder.build([1], [41], rows, slot_mapping=[3])
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.tensors().items())


def test_blocks_behind_the_window_make_room_for_the_next_unless_a_fork_holds_them():
    cache = Hybrid().cache
    pool = BlockPool(1 + 3 * len(cache.groups))
    table = vattn.HybridBlockTable(pool, cache)
    table.append(24)
    branch = table.fork()
    with pytest.raises(OutOfBlocksError, match="0 are free and 0 would"):
        branch.append(1)
    branch.free()
    table.append(1)
    assert pool.num_free == 0
    pool.check()


def test_a_fork_that_goes_on_for_several_blocks_copies_to_the_first():
    cache = Hybrid().cache
    pool = BlockPool(64)
    table = vattn.HybridBlockTable(pool, cache)
    table.append(20)
    branch = table.fork()
    copies = branch.append(20)
    assert copies == [(old[2], new[2]) for old, new in zip(table.rows, branch.rows, strict=True)]
    assert pool.references(branch.rows[0][2]) == 1 and len(set(branch.rows[0])) == 5


def test_a_model_without_cross_attention_takes_no_encoder_states():
    hybrid = Hybrid()
    table, _ = hybrid.request()
    with pytest.raises(CacheError, match="no group for them"):
        table.append_encoder(3)
    assert hybrid.pool.num_used == 0
    table.append(8)


class UnawareLayer(nn.Module):
    def get_kv_cache_spec(self, dtype):
        return FULL

    def resolve_config(self, dtype, device, target=None):
        return None

    def bind_kv_cache(self, storage, dtype, target=None):
        self.storage = storage


class EncoderOnlyLayer(UnawareLayer):
    storage = None

    def get_kv_cache_spec(self, dtype):
        return EncoderOnlyAttentionSpec(2, 64)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_layer_that_stores_nothing_gets_nothing(hybrid):
    model = nn.ModuleList([EncoderOnlyLayer(), make_layer(0)])
    cache = vattn.allocate_kv_cache(model, num_blocks=3, dtype=torch.float32, hybrid=hybrid)
    assert [entry.name for entry in cache.layers] == ["layers.0"] and model[0].storage is None
    with pytest.raises(CacheError, match="no layer of the model has a KV cache"):
        vattn.allocate_kv_cache(model[:1], num_blocks=3, dtype=torch.float32, hybrid=hybrid)


def test_a_layer_that_knows_no_groups_is_refused():
    with pytest.raises(CacheError, match="UnawareLayer, which has no attribute kv_cache_group"):
        vattn.allocate_kv_cache(UnawareLayer(), num_blocks=2, dtype=torch.float32, hybrid=True)
    assert len(vattn.allocate_kv_cache(UnawareLayer(), num_blocks=2, dtype=torch.float32).layers) == 1
    with pytest.raises(ConfigError, match="max_seq_len=0"):
        vattn.allocate_kv_cache(Stack(), num_blocks=2, hybrid=True, max_seq_len=0)


def test_layers_that_share_a_cache_belong_to_the_group_of_their_target():
    model = nn.ModuleList(
        [
            make_layer(0),
            make_layer(1, per_layer_sliding_window=12),
            make_layer(2, per_layer_sliding_window=12, kv_sharing_target_layer_name="layers.1"),
        ]
    )
    cache = vattn.allocate_kv_cache(model, num_blocks=6, dtype=torch.float32, hybrid=True)
    assert [entry.group for entry in cache.layers] == [0, 1, 1]
    assert model[2].kv_cache_group is model[1].kv_cache_group
    vattn.allocate_kv_cache(model, num_blocks=6, dtype=torch.float32)
    assert all(layer.kv_cache_group is None for layer in model)


def test_cross_attention_is_a_group_with_blocks_of_its_own():
    config = vattn.CacheConfig(BLOCK)
    model = nn.ModuleList(
        [
            make_layer(0),
            vattn.CrossAttention(4, 16, 0.25, 2, cache_config=config, prefix="cross"),
            make_layer(1, per_layer_sliding_window=12),
        ]
    )
    plain = nn.ModuleList([make_layer(0), vattn.CrossAttention(4, 16, 0.25, 2, cache_config=config, prefix="cross")])
    cache = vattn.allocate_kv_cache(model, num_blocks=24, dtype=torch.float32, hybrid=True)
    vattn.allocate_kv_cache(plain, num_blocks=24, dtype=torch.float32)
    assert [group.kind for group in cache.groups] == ["full", "window", "cross"] and len(cache.kv_caches) == 1
    pool = BlockPool(cache.num_blocks, reserved=cache.reserved_blocks)
    table = vattn.HybridBlockTable(pool, cache)
    table.append_encoder(19)
    with pytest.raises(CacheError, match="blocks already"):
        table.append_encoder(19)
    builder = vattn.GroupedMetadataBuilder(2, 32, 64, BLOCK, layers=model, max_encoder_len=32)
    plain_builder = vattn.AttentionMetadataBuilder(2, 32, 64, BLOCK, layers=plain, max_encoder_len=32)
    states = torch.randn(19, 64)
    for count in (20, 1, 1):
        table.append(count)
        x = torch.randn(count, 64)
        first = table.num_tokens == 20
        encoder = {"encoder_lens": [19], "new_encoder": [first]}
        rows = [[row] for row in table.rows]
        step = builder.build([count], [table.num_tokens], rows, cross_block_tables=[table.encoder_blocks], **encoder)
        other = plain_builder.build([count], [table.num_tokens], [[1, 2, 3]], cross_block_tables=[[4, 5, 6]], **encoder)
        keys = (states[:, :32], states[:, 32:]) if first else (None, None)
        with torch.no_grad():
            for index, layer in enumerate(model):
                given_keys = keys if index == 1 else (x[:, :32], x[:, 32:])
                ours = layer(x, *given_keys, metadata=step)
                if index < 2:
                    torch.testing.assert_close(ours, plain[index](x, *given_keys, metadata=other), rtol=1e-6, atol=1e-6)
    table.free()
    pool.check()
    assert pool.num_used == 0


class HybridTraffic(RuleBasedStateMachine):
    """Random requests that grow, fork and end; every block is one group's and one content's."""

    cache = vattn.allocate_kv_cache(Stack(), num_blocks=48, dtype=torch.float32, hybrid=True)

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(48)
        self.tables = []

    @precondition(lambda self: len(self.tables) < 4)
    @rule()
    def begin(self):
        self.tables.append(vattn.HybridBlockTable(self.pool, self.cache))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(0, 30))
    def grow(self, data, count):
        table = data.draw(st.sampled_from(self.tables))
        before, held = [list(row) for row in table.rows], table.num_tokens
        try:
            copies = table.append(count)
        except OutOfBlocksError:
            assert table.rows == before and table.num_tokens == held
            return
        assert len({destination for _, destination in copies}) == len(copies)
        for group, row in zip(self.cache.groups, table.rows, strict=True):
            assert len(row) == -(-table.num_tokens // BLOCK)
            first = group.spec.first_block(held)
            if count:
                assert all(row[first:]), "a block that can be read was freed"
                assert not any(row[:first]), "a block that nobody reads was kept"
                assert sum(map(bool, row)) <= group.spec.max_blocks(table.num_tokens, count)
                written = row[held // BLOCK :]
                assert all(self.pool.references(block) == 1 for block in written), "writes to a shared block"

    @precondition(lambda self: self.tables and len(self.tables) < 4)
    @rule(data=st.data())
    def fork(self, data):
        self.tables.append(data.draw(st.sampled_from(self.tables)).fork())

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data):
        self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))).free()

    @invariant()
    def every_block_is_counted_and_of_one_group(self):
        self.pool.check()
        owners, group_of = {}, {}
        for table in self.tables:
            for index, row in enumerate(table.rows):
                for block in filter(None, row):
                    owners[block] = owners.get(block, 0) + 1
                    assert group_of.setdefault(block, index) == index
        assert self.pool.num_used == len(owners)
        assert all(self.pool.references(block) == count for block, count in owners.items())


TestHybridTraffic = HybridTraffic.TestCase
TestHybridTraffic.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_export_refuses_what_it_would_get_wrong():
    hybrid = Hybrid(kinds=Stack.KINDS[:2])
    table, _ = hybrid.request()
    table.append(3)
    step = hybrid.builder.build([3], [3], [[row] for row in table.rows])
    with pytest.raises(UnsupportedRequestError, match=r"'layers\.0' belongs to a group of a hybrid cache"):
        vattn.export_step(hybrid.model, (torch.randn(3, 64),), step)
    cache = vattn.allocate_kv_cache(hybrid.model, num_blocks=4, dtype=torch.float32)
    transfer = KVTransfer(hybrid.model, cache, HostMemoryConnector("1MiB"))
    with pytest.raises(UnsupportedRequestError, match=r"'layers\.0' has a connector"):
        vattn.export_step(hybrid.model, (torch.randn(3, 64),), hybrid.plain_builder.build([3], [3], [[1]]))
    transfer.detach()
