"""The metadata builder against a loop in plain Python, its errors, and that a refused step changes nothing."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import weakref
from types import SimpleNamespace

import pytest
import torch

import vattn
from tests.support import unchanged, with_cache
from vattn.errors import CacheError, CacheNotBoundError, ConfigError, DeviceError, GraphContractError, MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata, CaptureKey
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.plans import device_of
from vattn.metadata.staging import Staging
from vattn.metadata.state_slots import num_state_slots

BLOCK = 8


def make_builder(**changes: object) -> AttentionMetadataBuilder:
    sizes = {"max_num_reqs": 5, "max_num_tokens": 40, "max_seq_len": 64, "block_size": BLOCK, "num_blocks": 50}
    return AttentionMetadataBuilder(**{**sizes, **changes})  # type: ignore[arg-type]


def random_step(rng: random.Random) -> tuple[list[int], list[int], list[list[int]]]:
    """Requests with query lengths from 0 up; blocks permuted over the pool and never shared."""
    blocks = list(range(50))
    rng.shuffle(blocks)
    query_lens, seq_lens, tables = [], [], []
    for _ in range(rng.randint(0, 5)):
        query = rng.choice([0, 1, 1, 2, 7, 8])
        length = query + rng.choice([0, 0, 1, 7, 8, 9, 40])
        query_lens.append(query)
        seq_lens.append(length)
        tables.append([blocks.pop() for _ in range(math.ceil(length / BLOCK) + rng.randint(0, 1))])
    return query_lens, seq_lens, tables


def loop_slots_and_positions(
    query_lens: list[int], seq_lens: list[int], tables: list[list[int]]
) -> tuple[list[int], list[int]]:
    slots, positions = [], []
    for query, length, table in zip(query_lens, seq_lens, tables, strict=True):
        for position in range(length - query, length):
            positions.append(position)
            slots.append(table[position // BLOCK] * BLOCK + position % BLOCK)
    return slots, positions


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("as_tensor", [False, True], ids=["lists", "tensors"])
def test_matches_a_loop(seed: int, as_tensor: bool) -> None:
    rng = random.Random(seed)
    builder = make_builder()
    builder.build([8] * 5, [64] * 5, [list(range(8 * i, 8 * i + 8)) for i in range(5)])  # leaves stale values behind
    query_lens, seq_lens, tables = random_step(rng)
    tokens, reqs = sum(query_lens), len(query_lens)
    padded_tokens, padded_reqs = rng.randint(tokens, 40), rng.randint(max(reqs, 2), 5)
    given: tuple[object, ...] = (query_lens, seq_lens, tables)
    if as_tensor:
        width = max(map(len, tables), default=0)
        rows = [row + [-77] * (width - len(row)) for row in tables]  # unused entries may hold garbage
        table = torch.tensor(rows, dtype=torch.int32).reshape(reqs, width)
        given = (torch.tensor(query_lens, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int64), table)
    step = builder.build(*given, num_reqs_padded=padded_reqs, num_tokens_padded=padded_tokens)  # type: ignore[arg-type]

    slots, positions = loop_slots_and_positions(query_lens, seq_lens, tables)
    starts = [sum(query_lens[:i]) for i in range(reqs + 1)]
    assert step.query_start_loc.tolist() == starts + [tokens] * (padded_reqs - reqs)
    assert step.seq_lens.tolist() == seq_lens + [0] * (padded_reqs - reqs)
    assert step.slot_mapping.tolist() == slots + [-1] * (padded_tokens - tokens)
    assert step.positions is not None
    assert step.positions.tolist() == positions + [0] * (padded_tokens - tokens)
    for row, (length, blocks) in enumerate(zip(seq_lens, tables, strict=True)):
        used = math.ceil(length / BLOCK)
        assert step.block_table[row, :used].tolist() == blocks[:used]
    assert step.block_table.shape == (padded_reqs, 8)
    assert (step.num_reqs, step.num_actual_tokens) == (reqs, tokens)
    assert (step.max_query_len, step.max_seq_len) == (max(query_lens, default=0), max(seq_lens, default=0))
    builder.check(step)


def test_dtypes_and_presence() -> None:
    step = make_builder().build([1], [1], [[3]])
    assert {name: tensor.dtype for name, tensor in step.tensors().items()} == {
        "query_start_loc": torch.int32,
        "seq_lens": torch.int32,
        "block_table": torch.int32,
        "slot_mapping": torch.int64,
        "positions": torch.int64,
    }
    assert step.causal is True and step.tree_bias is None and step.mm_ranges is None


def test_padded_requests_have_no_blocks_of_an_earlier_step() -> None:
    builder = make_builder()
    builder.build([1, 1, 1], [3, 3, 3], [[3], [2], [1]])
    step = builder.build([1], [3], [[3]], num_reqs_padded=3)
    assert step.block_table[:, 0].tolist() == [3, 0, 0] and not step.block_table[1:].any()


def test_two_new_tokens_are_no_decode_by_default() -> None:
    step = make_builder().build([1, 2], [5, 5], [[1], [2]])
    assert (step.num_decodes, step.num_decode_tokens) == (1, 1)


def test_differences_of_captures_are_in_the_order_of_their_fields() -> None:
    captured = CaptureKey(4, 8, 2, "causal", (), (), (1,))
    other = captured._replace(num_tokens=9, table_width=3, buffers=(2,))
    assert captured.differences(other) == ["num_tokens 9, captured 8", "table_width 3, captured 2", "buffers moved"]


def state_builder(slots: int) -> AttentionMetadataBuilder:
    builder = make_builder()
    builder._num_state_slots = slots
    return builder


def test_requests_of_models_with_states_have_slots() -> None:
    layers = [SimpleNamespace(bind_states=None, num_state_slots=count) for count in (5, 3, 4)]
    assert num_state_slots([*layers, SimpleNamespace(num_state_slots=1)]) == 3 and num_state_slots([]) is None
    step = state_builder(3).build([1, 2], [1, 2], [[1], [2]], state_slots=[3, 1])
    assert step.state_slots is not None and step.state_slots[:2].tolist() == [3, 1]
    profiling = {"slot_mapping": [-1, -1, -1], "state_slots": [0, 0]}
    assert state_builder(3).build([1, 2], [1, 2], [[1], [2]], **profiling).state_slots is not None


STATE_SLOTS = {
    "none": ([1, 2], None, "a step without state_slots"),
    "of one request": ([1, 2], [1], "state_slots"),
    "of padding": ([1, 2], [0, 1], "state_slots [0, 1]"),
    "too high": ([1, 2], [4, 1], "state_slots [4, 1]"),
    "one twice": ([1, 2], [2, 2], "state_slots [2, 2]"),
    "without tokens": ([1, 0], [1, 2], "state_slots with query_lens [1, 0]"),
}


@pytest.mark.parametrize("name", STATE_SLOTS)
def test_other_state_slots_are_refused(name: str) -> None:
    lengths, slots, says = STATE_SLOTS[name]
    with pytest.raises(MetadataError) as caught:
        state_builder(3).build(lengths, [1, 2], [[1], [2]], state_slots=slots)
    assert caught.value.got.startswith(says)
    with pytest.raises(MetadataError, match="state_slots for layers without states"):
        make_builder().build([1, 2], [1, 2], [[1], [2]], state_slots=[1, 2])


def test_a_step_shows_what_its_user_gave() -> None:
    shown = repr(make_builder().build([1], [3], [[1]]))
    assert "seq_lens=" in shown and "_built=" not in shown and "_lengths=" not in shown


def test_one_request_is_padded_to_two() -> None:
    builder = AttentionMetadataBuilder(1, 4, 16, BLOCK)
    assert builder.max_num_reqs == 2
    step = builder.build([2], [2], [[0]])
    assert step.seq_lens.tolist() == [2, 0] and step.query_start_loc.tolist() == [0, 2, 2]
    assert step.num_reqs == 1


def test_buffers_keep_their_addresses() -> None:
    builder = make_builder(max_mm_ranges=2, max_trees=1, max_tree_size=3)
    keys = set()
    for length in (5, 9, 60):
        extra = {"causal": [1], "mm_ranges": [[(1, length)]], "tree_bias": torch.zeros(1, 3, 3), "tree_id": [0]}
        step = builder.build([3], [length], [list(range(8))], num_reqs_padded=4, num_tokens_padded=8, **extra)  # type: ignore[arg-type]
        keys.add(step.capture_key())
    assert len(keys) == 1
    assert builder.build([3], [5], [[0]], num_tokens_padded=8).capture_key() not in keys


@pytest.mark.parametrize(
    ("threshold", "expected"), [(1, (3, 14, 3, 2)), (2, (2, 12, 4, 4))], ids=["threshold1", "threshold2"]
)
def test_prefill_decode_split(threshold: int, expected: tuple[int, int, int, int]) -> None:
    # a prompt; a decode; a prompt of one token; two new tokens behind cached ones; nothing new; a decode
    query_lens, seq_lens = [11, 1, 1, 2, 0, 1], [11, 9, 1, 20, 5, 2]
    builder = make_builder(max_num_reqs=6, decode_threshold=threshold)
    step = builder.build(query_lens, seq_lens, [[8 * i, 8 * i + 1, 8 * i + 2] for i in range(6)])
    split = (step.num_prefills, step.num_prefill_tokens, step.num_decodes, step.num_decode_tokens)
    assert split == expected


def test_optional_tensors() -> None:
    builder = make_builder(max_mm_ranges=3, max_trees=2, max_tree_size=4)
    bias = torch.randn(2, 3, 3)
    step = builder.build(
        [3, 1],
        [3, 4],
        [[0], [1]],
        num_reqs_padded=3,
        causal=[0, 5],
        tree_bias=bias,
        tree_id=[-1, 1],
        mm_ranges=[[(0, 1), (2, 9)], []],
    )
    assert isinstance(step.causal, torch.Tensor) and step.causal.tolist() == [0, 1, 1]
    assert step.tree_bias is not None and torch.equal(step.tree_bias, bias)
    assert step.tree_id is not None and step.tree_id.tolist() == [-1, 1, -1]
    assert step.mm_ranges is not None
    assert step.mm_ranges.tolist() == [[[0, 1], [2, 9], [0, 0]], [[0, 0]] * 3, [[0, 0]] * 3]
    builder.check(step)
    assert builder.build([1], [1], [[0]], causal=False).causal is False


def test_given_slots_are_kept() -> None:
    step = make_builder().build([3], [3], [[2]], slot_mapping=[-1, 399, 0])
    assert step.slot_mapping.tolist() == [-1, 399, 0]


GOOD = {"query_lens": [3, 1], "seq_lens": [3, 9], "block_tables": [[1], [2, 3]]}
BAD = {
    "negative query": ({"query_lens": [-1, 1]}, "query_lens[0]=-1"),
    "negative length": ({"query_lens": [0, 1], "seq_lens": [-2, 9]}, "seq_lens[0]=-2"),
    "shorter than its query": ({"seq_lens": [2, 9]}, "seq_len 2 is shorter than its query_len 3"),
    "counts differ": ({"seq_lens": [3]}, "seq_lens describes 1 requests"),
    "tables differ": ({"block_tables": [[1]]}, "block_tables describes 1 requests"),
    "too many requests": (
        {"query_lens": [1] * 6, "seq_lens": [1] * 6, "block_tables": [[i] for i in range(6)]},
        "max_num_reqs=6",
    ),
    "too many tokens": ({"query_lens": [41, 0], "seq_lens": [41, 9]}, "max_num_tokens=41"),
    "too long": ({"seq_lens": [3, 65]}, "max_seq_len=65"),
    "narrow list": ({"seq_lens": [3, 17]}, "seq_len 17 needs 3 blocks of 8 tokens, its block table has 2"),
    "narrow tensor": ({"seq_lens": [3, 33], "block_tables": torch.ones(2, 4, dtype=torch.int32)}, "needs 5 blocks"),
    "block beyond the cache": ({"block_tables": [[1], [2, 50]]}, "entry 1 of the block table is block 50"),
    "negative block": ({"block_tables": [[-1], [2, 3]]}, "block -1"),
    "slot beyond the cache": ({"slot_mapping": [0, 1, 2, 400]}, "slot_mapping[3]=400"),
    "slot below -1": ({"slot_mapping": [0, -2, 2, 3]}, "slot_mapping[1]=-2"),
    "slot twice": ({"slot_mapping": [0, 7, 7, 3]}, "slot 7 is given to two tokens"),
    "block of two requests": ({"query_lens": [3, 2], "seq_lens": [3, 3], "block_tables": [[1], [1]]}, "two tokens"),
    "tokens and slots": ({"slot_mapping": [0, 1]}, "slot_mapping has 2 entries, the query_lens sum to 4"),
    "floats": ({"query_lens": [3.0, 1.0]}, "flat sequence of ints"),
    "nested": ({"query_lens": [[3], [1]]}, "flat sequence of ints"),
    "few padded requests": ({"num_reqs_padded": 1}, "2 requests padded to 1"),
    "one padded request": (
        {"query_lens": [3], "seq_lens": [3], "block_tables": [[1]], "num_reqs_padded": 1},
        "1 requests padded to 1",
    ),
    "many padded requests": ({"num_reqs_padded": 6}, "2 to 5 requests"),
    "few padded tokens": ({"num_tokens_padded": 3}, "4 tokens padded to 3"),
    "many padded tokens": ({"num_tokens_padded": 41}, "4 to 40 tokens"),
    "sparse": ({"query_lens": torch.tensor([3, 1]).to_sparse()}, "torch.sparse_coo"),
    "complex": ({"query_lens": torch.tensor([3, 1], dtype=torch.complex64)}, "torch.complex64"),
    "complex table": ({"block_tables": torch.ones(2, 2, dtype=torch.complex64)}, "block_tables is torch.complex64"),
    "block ids without order": ({"block_tables": [{1}, {2, 3}]}, "has {1} for a request"),
    "flags": ({"causal": [1]}, "causal describes 1 requests"),
    "flags between": ({"causal": torch.tensor([0.5, 1.0])}, "causal is torch.float32"),
    "bias of NaN": ({"tree_bias": torch.full((1, 2, 2), math.nan), "tree_id": [0, 0]}, "with NaN or inf"),
    "bias without bound": ({"tree_bias": torch.full((1, 2, 2), math.inf), "tree_id": [0, 0]}, "with NaN or inf"),
    "bias alone": ({"tree_bias": torch.zeros(1, 2, 2)}, "tree_id missing"),
    "ids alone": ({"tree_id": [0, 0]}, "tree_bias missing"),
    "bias of no capacity": ({"tree_bias": torch.zeros(1, 5, 5), "tree_id": [0, 0]}, "max_tree_size"),
    "bias not square": ({"tree_bias": torch.zeros(1, 2, 3), "tree_id": [0, 0]}, "(1, 2, 3)"),
    "tree out of range": ({"tree_bias": torch.zeros(1, 2, 2), "tree_id": [0, 1]}, "tree_id[1]=1 with 1 trees"),
    "many ranges": ({"mm_ranges": [[], [(0, 1), (2, 3)]]}, "max_mm_ranges"),
    "ranges beyond 32 bits": ({"mm_ranges": [[(0, 2**32 + 3)], []]}, "32 bits"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_step_names_the_fault_and_touches_nothing(name: str) -> None:
    change, text = BAD[name]
    builder = make_builder(max_mm_ranges=1, max_trees=1, max_tree_size=4)
    step = builder.build([5], [20], [[7, 8, 9]], causal=[0], num_tokens_padded=6)
    with unchanged(step), pytest.raises(MetadataError) as caught:
        builder.build(**{**GOOD, **change})  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_step_that_contradicts_a_capture() -> None:
    builder = make_builder()
    key = builder.build([1, 1], [9, 4], [[1, 2], [3]], num_reqs_padded=4, num_tokens_padded=4).capture_key()
    step = builder.build([1], [7], [[5]], capture_key=key)
    assert step.capture_key() == key and step.num_reqs == 1
    before = step.seq_lens.clone()
    with pytest.raises(GraphContractError, match="a step of 5 requests for a graph captured with 4"):
        builder.build([1] * 5, [1] * 5, [[i] for i in range(5)], capture_key=key)
    with pytest.raises(GraphContractError, match="a step of 6 tokens for a graph captured with 4"):
        builder.build([6], [6], [[0]], capture_key=key)
    with pytest.raises(GraphContractError, match="causal 'per_request', captured 'layer'"):
        builder.build([1], [7], [[5]], causal=[1], capture_key=key)
    with pytest.raises(GraphContractError, match="buffers moved"):
        make_builder().build([1], [7], [[5]], capture_key=key)
    assert torch.equal(step.seq_lens, before)


def test_builder_refuses_bad_capacities_and_unbound_layers() -> None:
    with pytest.raises(ConfigError, match="max_num_tokens=0"):
        make_builder(max_num_tokens=0)
    with pytest.raises(DeviceError, match="a builder on meta"):
        make_builder(device="meta")

    class Unbound(torch.nn.Module):
        config, prefix = None, "model.layers.0.attn"

        def bind_kv_cache(self) -> None: ...

    with pytest.raises(CacheNotBoundError, match=r"model\.layers\.0\.attn"):
        make_builder(layers=Unbound())


def hand_made(**changes: object) -> AttentionMetadata:
    fields: dict[str, object] = {
        "query_start_loc": torch.tensor([0, 2, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([2, 9], dtype=torch.int32),
        "block_table": torch.tensor([[4, -9], [2, 3]], dtype=torch.int32),
        "slot_mapping": torch.tensor([32, 33, 24, -1]),
    }
    return AttentionMetadata(**{**fields, **changes})  # type: ignore[arg-type]


FAULTS = {
    "falls": ({"query_start_loc": torch.tensor([0, 4, 3], dtype=torch.int32)}, "never fall"),
    "first offset": ({"query_start_loc": torch.tensor([1, 2, 3], dtype=torch.int32)}, "start at 0"),
    "short": ({"seq_lens": torch.tensor([1, 9], dtype=torch.int32)}, "shorter than its query_len"),
    "narrow": ({"seq_lens": torch.tensor([2, 17], dtype=torch.int32)}, "needs 3 blocks"),
    "block": ({"block_table": torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)}, "block 5"),
    "slot": ({"slot_mapping": torch.tensor([40, 33, 24, -1])}, "slot_mapping[0]=40"),
    "slot twice": ({"slot_mapping": torch.tensor([33, 33, 24, -1])}, "slot 33"),
    "padding writes": ({"slot_mapping": torch.tensor([32, 33, 24, 25])}, "padding row 3 has a slot"),
    "tree": (
        {"tree_bias": torch.zeros(1, 2, 2), "tree_id": torch.tensor([0, 1], dtype=torch.int32)},
        "tree_id[1]=1 with 1 trees",
    ),
    "dtype": ({"seq_lens": torch.tensor([2.0, 9.0])}, "seq_lens is torch.float32"),
    "rows": ({"seq_lens": torch.tensor([2, 9, 0], dtype=torch.int32)}, "rows"),
    "tokens": ({"num_actual_tokens": 2}, "num_actual_tokens=2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_finds(name: str) -> None:
    hand_made().check(BLOCK, num_blocks=5)
    change, text = FAULTS[name]
    with pytest.raises(MetadataError) as caught:
        hand_made(**change).check(BLOCK, num_blocks=5)
    assert text in str(caught.value)


def test_a_step_without_a_cache() -> None:
    builder = make_builder()
    step = builder.build([3, 0, 5], num_tokens_padded=11, num_reqs_padded=4)
    assert step.query_start_loc.tolist() == [0, 3, 3, 8, 8]
    assert step.seq_lens.tolist() == [3, 0, 5, 0]
    assert step.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 0]
    assert step.slot_mapping.tolist() == [-1] * 11
    assert step.block_table.shape == (4, 0) and step.plans == {}
    builder.check(step)
    with pytest.raises(GraphContractError, match="table_width 8, captured 0"):
        builder.build([3], [3], [[1]], capture_key=step.capture_key())


def test_a_step_without_a_cache_has_no_cached_tokens_and_no_slots() -> None:
    builder = make_builder()
    with pytest.raises(MetadataError, match="request 1: seq_len 4 for 2 new tokens, and no block tables"):
        builder.build([3, 2], [3, 4])
    with pytest.raises(MetadataError, match="slot_mapping without block_tables"):
        builder.build([2], slot_mapping=[1, 2])


@pytest.mark.parametrize(
    "lengths, tables, named",
    [
        (3, [[1]], "query_lens is 3"),
        ([3], 5, "block_tables=5"),
        ([3], [1], "block_tables has 1 for a request"),
        ([3], [None], "block_tables has None for a request"),
        ([3], ["12"], "block_tables has '12' for a request"),
        ([3], [["1"]], r"block_tables has \['1'\] for a request"),
        ([3], [[1.0]], r"block_tables has \[1.0\] for a request"),
        ([True], [[1]], r"query_lens is \[True\]"),
    ],
)
def test_what_is_no_list_of_ints_is_refused(lengths: object, tables: object, named: str) -> None:
    with pytest.raises(MetadataError, match=named):
        make_builder().build(lengths, [3], tables)


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([None], r"layers\[0\]=None of type NoneType"),
        ([3.5], "of type float"),
        (["layers.0"], "layers.0.* of type str"),
        ([vattn.Attention], "of type type"),
        ([torch.zeros(2)], "of type Tensor"),
        (torch.zeros(2), "a model, layers or configs"),
        ("model", "layers='model'"),
        ({"first": None}, "of type str"),
        (torch.nn.Linear(2, 2), "type Linear, without any attention layer"),
        ([torch.nn.Linear(2, 2), torch.nn.ReLU()], "type Linear, ReLU, without any attention layer"),
        (torch.nn.ModuleList(), "without any attention layer"),
    ],
)
def test_what_is_no_layer_is_refused(layers: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        AttentionMetadataBuilder(2, 8, 64, layers=layers)
    with pytest.raises(ConfigError):
        vattn.FlashAttentionMetadataBuilder(2, 8, 64, layers=layers)
    layer = with_cache(vattn.Attention(2, 16, 0.3), 4)
    if isinstance(layers, list) and not isinstance(layers[0], torch.nn.Module):
        with pytest.raises(ConfigError, match=r"layers\[1\]"):
            AttentionMetadataBuilder(2, 8, 64, layers=[layer, *layers])


def test_layers_inside_of_what_is_listed_are_found_once() -> None:
    layer = with_cache(vattn.Attention(2, 16, 0.3), 4)
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), layer)
    for layers in ([block], [block, layer], block.modules(), (torch.nn.ReLU(), layer), [layer.config]):
        assert AttentionMetadataBuilder(2, 8, 64, layers=layers).backends == {"TORCH_SDPA"}
    assert AttentionMetadataBuilder(2, 8, 64, layers=[block, layer]).num_blocks == 4
    assert not AttentionMetadataBuilder(2, 8, 64, layers=[]).backends
    encoder = vattn.EncoderOnlyAttention(2, 16, 0.3)
    assert AttentionMetadataBuilder(2, 8, 64, layers=[encoder]).build([2]).num_reqs == 1


def test_a_layer_with_a_cache_refuses_a_step_without_one() -> None:
    layer = with_cache(vattn.Attention(2, 8, 0.3, cache_config=vattn.CacheConfig(BLOCK)), 4)
    with unchanged(layer), pytest.raises(MetadataError, match="without block tables"):
        layer(*(torch.randn(3, 16) for _ in range(3)), metadata=vattn.AttentionMetadataBuilder(2, 4, 64).build([3]))


@pytest.mark.parametrize(
    "kind", ["AttentionMetadataBuilder", "TreeAttentionMetadataBuilder", "FlashAttentionMetadataBuilder"]
)
def test_layers_tell_a_builder_their_block_size(kind: str) -> None:
    make = getattr(vattn, kind)
    layer = with_cache(vattn.Attention(2, 16, 0.25, cache_config=vattn.CacheConfig(block_size=32)), 4)
    for layers in (layer, [layer], iter([layer]), [layer.config]):
        builder = make(2, 8, 64, layers=layers)
        own = getattr(builder, "_inner", builder)
        assert own.block_size == 32 and own.table_width == 2
        assert builder.build([1, 1], [33, 9], [[1, 2], [3]]).slot_mapping[:2].tolist() == [64, 104]
    plain = make(2, 8, 64)
    assert getattr(plain, "_inner", plain).block_size == 16
    with pytest.raises(ConfigError, match="leave block_size out of the builder"):
        make(2, 8, 64, 16, layers=layer)
    small = with_cache(vattn.Attention(2, 16, 0.25, cache_config=vattn.CacheConfig(block_size=8)), 4)
    with pytest.raises(ConfigError, match="block_size"):
        make(2, 8, 64, layers=[layer, small])
    if kind.startswith("Flash"):
        with pytest.raises(ConfigError, match="Block size must be a multiple of 16"):
            make(2, 8, 64, layers=small)


@pytest.mark.parametrize("head_size_v", [64, 32])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int8_per_token_head", "nvfp4", "turboquant_4bit_nc"])
def test_caches_of_every_layout_tell_their_blocks(cache_dtype: str, head_size_v: int) -> None:
    """A block behind the cache is refused, whichever dimension of the storage counts them."""
    scales = {"k_scale": "unit", "v_scale": "unit"} if cache_dtype in ("fp8", "nvfp4") else {}
    layer = vattn.Attention(
        *(2, 64, 0.125, 2),
        head_size_v=head_size_v,
        cache_config=vattn.CacheConfig(cache_dtype=cache_dtype),
        quant_config=vattn.QuantConfig(**scales),
    )
    vattn.allocate_kv_cache(layer, num_blocks=5, dtype=torch.float32)
    builder = AttentionMetadataBuilder(2, 8, 64, layers=layer)
    assert builder.num_blocks == 5
    builder.build([1], [9], [[4]])
    with pytest.raises(MetadataError, match="block ids from 0 to 4"):
        builder.build([1], [9], [[5]])


def test_a_builder_refuses_caches_that_came_after_it() -> None:
    """Block ids of the larger cache would be dropped by the smaller one's kernels; an equal cache is fine."""
    model = torch.nn.ModuleList(vattn.Attention(2, 16, 0.25, prefix=f"layers.{index}") for index in range(2))
    vattn.allocate_kv_cache(model, num_blocks=9, dtype=torch.float32)
    builder = AttentionMetadataBuilder(2, 8, 64, layers=model)
    step = builder.build([1], [9], [[8]])
    vattn.allocate_kv_cache(model, num_blocks=9, dtype=torch.float32)
    for _ in range(2):
        step = builder.build([1], [9], [[8]])
        step = builder.advance(step, [])
    before = [tensor.clone() for tensor in step.tensors().values()]
    for changes in ({"num_blocks": 5}, {"num_blocks": 9, "dtype": torch.bfloat16}):
        vattn.allocate_kv_cache(model, **{"dtype": torch.float32, **changes})  # type: ignore[arg-type]
        for call in (lambda: builder.build([1], [9], [[3]]), lambda: builder.advance(step, [])):
            with pytest.raises(CacheError, match=r"layer 'layers.0' has another cache since .*make a new builder"):
                call()
        # Steps that were built before are refused too, by a context for all layers and by each layer.
        with pytest.raises(CacheError, match=r"layer 'layers.0' has another cache since"), vattn.forward_context(step):
            pass
        rows = torch.ones(step.slot_mapping.shape[0], 32)
        with pytest.raises(CacheError, match=r"layer 'layers.0' has another cache since"):
            model[1](rows, rows, rows, metadata=step)
        assert all(map(torch.equal, before, step.tensors().values()))
    assert AttentionMetadataBuilder(2, 8, 64, layers=model).build([1], [9], [[8]]).num_reqs == 1


def test_a_builder_refuses_more_blocks_than_its_layers_have() -> None:
    layer = with_cache(vattn.Attention(2, 16, 0.25, prefix="a"), 9)
    with pytest.raises(ConfigError, match=r"num_blocks=10 of the builder, and 9 blocks in the cache of layer 'a'"):
        AttentionMetadataBuilder(2, 8, 64, layers=layer, num_blocks=10)
    assert AttentionMetadataBuilder(2, 8, 64, layers=layer, num_blocks=9).build([1], [9], [[8]]).num_reqs == 1
    builder = AttentionMetadataBuilder(2, 8, 64, layers=layer, num_blocks=7)
    with pytest.raises(MetadataError, match="block ids from 0 to 6"):
        builder.build([1], [9], [[7]])


def test_a_builder_keeps_no_layer_and_no_cache() -> None:
    """Nor do its copies have any, which may be for copies of the layers."""
    layer = with_cache(vattn.Attention(2, 16, 0.25), 9)
    builder = AttentionMetadataBuilder(2, 8, 64, layers=layer)
    copied = copy.deepcopy(builder), pickle.loads(pickle.dumps(builder))
    vattn.allocate_kv_cache(layer, num_blocks=5, dtype=torch.float32)
    with pytest.raises(CacheError, match="has another cache since"):
        builder.build([1], [9], [[8]])
    assert layer.kv_cache is not None
    kept = weakref.ref(layer), weakref.ref(layer.kv_cache)
    del layer
    gc.collect()
    assert [found() for found in kept] == [None, None]
    for one in (builder, *copied):
        step = one.advance(one.build([1], [9], [[8]]), [])
        assert step.seq_lens.tolist() == [10, 0] and step.block_table[0].tolist()[0] == 8


class Elsewhere(torch.nn.Module):
    """What stands in for a layer whose cache is on a device that this machine may not have."""

    def __init__(self, cache: object) -> None:
        super().__init__()
        self.kv_cache = cache


def test_layers_tell_a_builder_their_device() -> None:
    class OnDevice(torch.Tensor):
        device = torch.device("cuda:3")
        is_meta = False

    here, there = torch.zeros(1), torch.zeros(1).as_subclass(OnDevice)
    for caches, device in (
        ((), "cpu"),
        ((None, here, there), "cpu"),
        ((None, there, here), "cuda:3"),
        ((torch.zeros(1, device="meta"), there), "cuda:3"),
        ((torch.zeros(1, device="meta"),), "cpu"),
    ):
        assert device_of([Elsewhere(cache) for cache in caches]) == torch.device(device)
    layer = with_cache(vattn.Attention(2, 16, 0.25), 4)
    assert vattn.AttentionMetadataBuilder(2, 8, 64, layers=layer).device == torch.device("cpu")
    with pytest.raises(DeviceError, match="meta"):
        vattn.AttentionMetadataBuilder(2, 8, 64, device="meta", layers=layer)


class Event:
    """What stands in for CUDA's events, and notes what becomes of them."""

    log: list[tuple[str, int]]

    def __init__(self) -> None:
        self.index = len(self.log)
        self.log.append(("made", self.index))

    def record(self, stream: object) -> None:
        self.log.append(("recorded", self.index))

    def synchronize(self) -> None:
        self.log.append(("waited for", self.index))


def test_a_staging_set_is_filled_when_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets in turn; each waits for its own copies, of two steps ago.."""
    Event.log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    buffers: list[int] = [9]
    made: list[list[int]] = []

    def make() -> list[int]:
        made.append([len(made)])
        return made[-1]

    staging = Staging(buffers, make, torch.device("cuda"))
    assert not made
    used = []
    for _ in range(4):
        used.append(staging.next())
        staging.copied()
    assert len(made) == 2 and used[0] is used[2] and used[1] is used[3]
    assert {id(each) for each in used} == {id(each) for each in made} and buffers not in made
    (_, first), (_, second) = Event.log[2], Event.log[4]
    assert first != second
    assert Event.log[2:] == [(what, index) for index in (first, second) * 2 for what in ("waited for", "recorded")]
    del Event.log[:]
    own = Staging(buffers, lambda: [1], torch.device("cpu"))
    assert own.next() is buffers and own.next() is buffers
    own.copied()
    assert not Event.log
