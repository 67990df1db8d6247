"""Steps from tensors: those of `build` for the same step, in the same buffers; refusals change nothing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vattn
from tests.support import make_config, unchanged, usable, with_cache
from vattn.errors import CacheError, MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder

BLOCK = 8

pytestmark = pytest.mark.usefixtures("planned_backends")


def make_builder(**changes: Any) -> AttentionMetadataBuilder:
    sizes = {"max_num_reqs": 6, "max_num_tokens": 50, "max_seq_len": 64, "block_size": BLOCK}
    return AttentionMetadataBuilder(**{**sizes, **changes})


def planned_config(window: int | None = None) -> vattn.AttentionConfig:
    return make_config(block_size=BLOCK, backend="PLANNED", sliding_window=window)


def by_engine(
    step: AttentionMetadata, rng: random.Random | None = None, reqs: int = 0, tokens: int = 0, flags: Any = None
) -> dict[str, Tensor]:
    """Return the real part of a step as an engine has it: int32 or int64, strided, and padded by so many rows."""
    rng = rng or random.Random(0)
    num_reqs, num_tokens = step.num_reqs, step.num_actual_tokens
    assert step.positions is not None
    found = {
        "query_start_loc": (step.query_start_loc[: num_reqs + 1], reqs, num_tokens),
        "seq_lens": (step.seq_lens[:num_reqs], reqs, 0),
        "slot_mapping": (step.slot_mapping[:num_tokens], tokens, -1),
        "positions": (step.positions[:num_tokens], tokens, 0),
    }
    if flags is not None:
        found["causal"] = torch.tensor(flags).int(), reqs, 1
    given = {}
    for name, (tensor, count, value) in found.items():
        padded = torch.nn.functional.pad(tensor, (0, count), value=value).to(rng.choice((torch.int32, torch.int64)))
        given[name] = torch.stack((padded, padded - 7), 1)[:, 0] if rng.random() < 0.5 else padded
    table = torch.nn.functional.pad(step.block_table[:num_reqs], (0, rng.randint(0, 3), 0, reqs), value=-1)
    return {**given, "block_table": table.to(rng.choice((torch.int32, torch.int64)))}


def check_equal(got: AttentionMetadata, expected: AttentionMetadata) -> None:
    """Compare all tensors; of the table, the entries of each request."""
    assert got.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        own = got.tensors()[name]
        assert (own.shape, own.dtype) == (tensor.shape, tensor.dtype), name
        if name == "block_table":
            used = torch.arange(tensor.shape[1]) * BLOCK < expected.seq_lens.unsqueeze(1)
            own, tensor = own[used], tensor[used]
        assert torch.equal(own, tensor), name


@st.composite
def host_steps(draw: Any) -> tuple[list[int], list[int], list[list[int]]]:
    queries = draw(st.lists(st.integers(0, 9), max_size=4))
    lengths = [query + draw(st.integers(0, 64 - query)) for query in queries]
    blocks = iter(draw(st.permutations(range(40))))
    return queries, lengths, [list(itertools.islice(blocks, -(-length // BLOCK))) for length in lengths]


def write_longest(builder: AttentionMetadataBuilder) -> None:
    """Fill the buffers, so that a value which a step leaves behind is seen."""
    builder.build([7, 3, 9, 1, 2, 20], [64] * 6, [list(range(8 * row, 8 * row + 8)) for row in range(6)])


@settings(max_examples=60)
@given(host_steps(), st.integers(0, 2), st.integers(0, 4), st.booleans(), st.randoms(use_true_random=False))
def test_equals_build(step: Any, reqs: int, tokens: int, engine_pads: bool, rng: random.Random) -> None:
    configs = [planned_config(), planned_config(window=5)]
    host, device = make_builder(layers=configs), make_builder(layers=configs)
    queries, lengths, tables = step
    sizes = {"num_reqs_padded": max(2, len(queries) + reqs), "num_tokens_padded": sum(queries) + tokens}
    flags = rng.choice((None, [rng.random() < 0.5 for _ in queries]))
    causal = rng.random() < 0.5 if flags is None else flags
    expected = host.build(queries, lengths, tables, causal=causal, **sizes)
    write_longest(device)
    if engine_pads:
        given, sizes = by_engine(expected, rng, sizes["num_reqs_padded"] - len(queries), tokens, flags), {}
    else:
        given = by_engine(expected, rng, flags=flags)
    bounds = {"max_query_len": max(queries, default=0), "max_seq_len": max(lengths, default=0)}
    got = device.build_from_tensors(**{"causal": causal, **given, **rng.choice(({}, bounds))}, **sizes)
    check_equal(got, expected)
    got.check(BLOCK, 48)
    assert got.plans[vattn.plan_key(configs[0], "cpu")][0].tolist() == expected.seq_lens.tolist()


def test_padded_requests_may_have_length_one() -> None:
    builder = make_builder(layers=[planned_config()])
    write_longest(builder)
    given = by_engine(make_builder().build([3, 1], [11, 20], [[1, 2], [3, 4, 5]]), reqs=2, tokens=3)
    given["seq_lens"][2:] = 1
    given["block_table"] = given["block_table"][:, :3]
    step = builder.build_from_tensors(**given, causal=False)
    assert step.query_start_loc.tolist() == [0, 3, 4, 4, 4] and step.seq_lens.tolist() == [11, 20, 1, 1]
    assert (step.num_reqs, step.num_actual_tokens, step.causal) == (4, 7, False)
    assert (step.max_query_len, step.max_seq_len, step.max_position) == (7, 24, -1)
    assert step.block_table.tolist()[:2] == [[1, 2, 0, *[-1] * 5], [3, 4, 5, *[-1] * 5]]


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
def test_layers_give_the_results_of_a_built_step(backend: str) -> None:
    cache_config = vattn.CacheConfig(block_size=BLOCK)
    layer = with_cache(vattn.Attention(2, 16, 0.25, attn_backend=usable(backend), cache_config=cache_config), 12)
    builder = make_builder(layers=layer)
    with torch.no_grad():
        layer(*torch.randn(3, 16, 32), metadata=builder.build([16], [16], [[7, 3]], num_tokens_padded=16))
        sizes = {"num_reqs_padded": 4, "num_tokens_padded": 6}
        step, inputs = builder.build([1, 4], [17, 4], [[7, 3, 9], [5]], **sizes), torch.randn(3, 6, 32)
        given = by_engine(step, reqs=2, tokens=1)
        expected = layer(*inputs, metadata=step)
        layer.kv_cache[:, [9, 5]] = torch.nan
        given["seq_lens"][2:] = 1
        got = layer(*inputs, metadata=builder.build_from_tensors(**given))
    assert torch.equal(got, expected) and not got[5].any()


def test_sinks_count_in_schedules_and_results() -> None:
    sizes: dict[str, Any] = {"cache_config": vattn.CacheConfig(block_size=BLOCK), "attn_backend": "PLANNED"}
    sinks = torch.randn(2, BLOCK, 2, 16)
    layer = vattn.StaticSinkAttention(2, 16, 0.25, BLOCK, sink_key=sinks[0], sink_value=sinks[1], **sizes)
    with_cache(layer, 12)
    builder = make_builder(layers=layer)
    step, inputs = builder.build([2, 1], [9, 5], [[4, 5], [6]]), torch.randn(3, 3, 32)
    given = by_engine(step)
    with torch.no_grad():
        expected = layer(*inputs, metadata=step)
        step = builder.build_from_tensors(**given)
        assert torch.equal(layer(*inputs, metadata=step), expected)
    assert [plan[0].tolist() for plan in step.plans.values()] == [[9 + BLOCK, 5 + BLOCK]]


def test_cross_attention_has_no_schedule() -> None:
    cross = make_config(block_size=BLOCK, backend="PLANNED", attn_type="encoder_decoder", causality="bidirectional")
    step = make_builder(layers=[cross, planned_config()]).build([1], [1], [[1]])
    assert list(step.plans) == [vattn.plan_key(planned_config(), "cpu")] != [vattn.plan_key(cross, "cpu")]


def test_latent_layers_take_the_step() -> None:
    usable("TRITON_ATTN")
    torch.manual_seed(0)
    projection = torch.nn.Linear(32, 2 * 32, bias=False)
    layer = vattn.MLAAttention(2, 24**-0.5, 16, 8, 16, None, 32, projection, attn_backend="TRITON_MLA")
    builder = AttentionMetadataBuilder(4, 40, max_seq_len=64, layers=with_cache(layer, 12))
    inputs = torch.randn(31, 2, 24), torch.randn(31, 32), torch.randn(31, 1, 8)
    with torch.no_grad():
        step = builder.build([30, 1], [30, 1], [[3, 7], [5]])
        given, expected = by_engine(step), layer(*inputs, metadata=step)
        step = builder.build_from_tensors(**given)
        assert torch.equal(layer(*inputs, metadata=step), expected)


def test_buffers_stay_and_older_steps_are_refused() -> None:
    builder = make_builder(layers=[planned_config()])
    given = by_engine(make_builder().build([3, 1], [11, 20], [[1, 2], [3, 4, 5]]))
    first = builder.build_from_tensors(**given)
    key = first.capture_key()
    given["seq_lens"] += 8
    assert builder.build_from_tensors(**given).capture_key() == key
    assert builder.build([3, 1], [11, 20], [[1, 2], [3, 4, 5]]).capture_key() == key
    with pytest.raises(MetadataError, match="step 1 of a builder"), vattn.forward_context(first):
        pass
    step = builder.build_from_tensors(**given)
    with pytest.raises(MetadataError, match="a step of build_from_tensors"):
        builder.advance(step, [])


def test_nothing_is_read_from_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = make_builder(layers=[planned_config()])
    given = by_engine(make_builder().build([3], [11], [[1, 2]]))

    def refuse(*_: object) -> None:
        raise AssertionError("a value was read")

    for name in ("item", "tolist", "__bool__", "__int__", "__index__", "cpu", "numpy", "nonzero"):
        monkeypatch.setattr(Tensor, name, refuse)
    builder.build_from_tensors(**given, causal=torch.ones(1, dtype=torch.bool))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"seq_lens": [11, 20]}, r"seq_lens=\[11, 20\]. Allowed: int32 or int64 \[any\] on cpu"),
    "floats": ({"seq_lens": torch.ones(2)}, "seq_lens is float32"),
    "no batch": ({"seq_lens": torch.tensor(3)}, r"seq_lens is int64 \[\]"),
    "offsets": ({"query_start_loc": torch.tensor([0, 4])}, r"query_start_loc is int64 \[2\] .* Allowed: .* \[3\]"),
    "rows": ({"block_table": torch.zeros(3, 3).int()}, r"block_table is int32 \[3, 3\] .* \[2, any\]"),
    "a flat table": ({"block_table": torch.zeros(6).int()}, "block_table is"),
    "sparse": ({"block_table": torch.zeros(2, 3).int().to_sparse()}, "sparse"),
    "device": ({"slot_mapping": torch.zeros(4, device="meta").long()}, "slot_mapping is int64 .* on meta"),
    "positions": ({"positions": torch.zeros(3).long()}, r"positions is int64 \[3\]"),
    "flags": ({"causal": torch.zeros(3).bool()}, r"causal is bool \[3\]"),
    "no flag": ({"causal": None}, "causal=None"),
    "a bound": ({"max_seq_len": 20.0}, "max_seq_len=20.0"),
    "length": ({"max_seq_len": 65}, "65 positions in one request. Allowed: at most 64"),
    "query": ({"max_query_len": 51}, "51 new tokens in one request"),
    "narrow": ({"max_seq_len": 25, "block_table": torch.zeros(2, 3).int()}, "3 columns for up to 25 tokens"),
    "tokens": ({"slot_mapping": torch.zeros(51).long(), "positions": None}, "a step of 51 tokens"),
    "requests": ({"num_reqs_padded": 7}, "2 requests padded to 7"),
    "padded tokens": ({"num_tokens_padded": 3}, "4 tokens padded to 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_host_sees_is_refused_and_changes_nothing(name: str) -> None:
    builder = make_builder(layers=[planned_config()])
    given: dict[str, Any] = by_engine(make_builder().build([3, 1], [11, 20], [[1, 2], [3, 4, 5]]))
    before = builder.build_from_tensors(**given)
    change, why = WRONG[name]
    with unchanged(before), pytest.raises(MetadataError, match=why):
        builder.build_from_tensors(**{**given, **change})
    with vattn.forward_context(before):
        pass


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN", "PLANNED"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensors_may_stay_where_they_are(backend: str, dtype: torch.dtype) -> None:
    cache_config = vattn.CacheConfig(block_size=BLOCK)
    layer = with_cache(vattn.Attention(2, 16, 0.25, attn_backend=usable(backend), cache_config=cache_config), 12)
    builder, inputs = make_builder(layers=layer), torch.randn(3, 6, 32)
    step = builder.build([1, 4], [17, 4], [[7, 3, 9], [5]], num_tokens_padded=6)
    given = {name: tensor.contiguous().to(dtype) for name, tensor in by_engine(step, tokens=1).items()}
    plans = {key: plan.clone() for key, plan in step.plans.items()}
    with torch.no_grad():
        expected = layer(*inputs, metadata=step)
        step = builder.build_from_tensors(**given, copy=False)
        assert torch.equal(layer(*inputs, metadata=step), expected)
    builder.check(step)
    assert all(getattr(step, name).data_ptr() == tensor.data_ptr() for name, tensor in given.items())
    assert step.plans.keys() == plans.keys() and all(torch.equal(step.plans[key], plans[key]) for key in plans)
    for change, why in (
        ({"causal": torch.ones(2, dtype=torch.bool)}, "causal is bool .* Allowed: int32"),
        ({"num_tokens_padded": 8}, "copy=False with padded sizes"),
    ):
        with unchanged(step), pytest.raises(MetadataError, match=why):
            builder.build_from_tensors(**{**given, "copy": False, **change})


def test_too_many_requests() -> None:
    tensors = torch.zeros(8).int(), torch.zeros(7).int(), torch.zeros(7, 1).int(), torch.zeros(0).long()
    with pytest.raises(MetadataError, match="a step of 7 requests"):
        make_builder().build_from_tensors(*tensors)


def test_builders_that_need_host_lengths_say_so() -> None:
    tensors = torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([[0]]), torch.tensor([0])
    model = with_cache(torch.nn.ModuleList([vattn.Attention(2, 16, 0.25)]), 4)
    on_host = make_config(block_size=16, backend="PLANNED_ON_HOST")
    hybrid = torch.nn.ModuleList(vattn.Attention(2, 16, 0.25, per_layer_sliding_window=w) for w in (None, 24))
    vattn.allocate_kv_cache(hybrid, num_blocks=4, dtype=torch.float32, hybrid=True)
    for builder, why in (
        (AttentionMetadataBuilder(2, 8, 32, layers=[on_host]), "layers on PLANNED_ON_HOST, which plans on the host"),
        (vattn.TreeAttentionMetadataBuilder(2, 8, 32, tree_choices=[(0,), (1,)]), "a builder with trees"),
        (vattn.GroupedMetadataBuilder(2, 8, 32, layers=hybrid), "a builder with groups"),
    ):
        with pytest.raises(MetadataError, match=why):
            builder.build_from_tensors(*tensors)
    builder = AttentionMetadataBuilder(2, 8, 32, layers=model)
    builder.build_from_tensors(*tensors)
    vattn.allocate_kv_cache(model, num_blocks=7, dtype=torch.float32)
    with pytest.raises(CacheError):
        builder.build_from_tensors(*tensors)


def test_steps_of_all_sizes_and_of_build_share_a_compiled_graph(fresh_dynamo: None) -> None:
    from torch._dynamo.utils import counters

    layer = with_cache(vattn.Attention(2, 16, 0.25, cache_config=vattn.CacheConfig(block_size=BLOCK)), 12)
    builder, compiled = make_builder(layers=layer), vattn.compile(layer, backend="eager")
    with torch.no_grad():
        for queries, lengths, tables in (
            ([3, 4], [11, 4], [[1, 2], [3]]),
            ([2], [9], [[4, 5]]),
            ([1] * 3, [9] * 3, [[1, 2], [3, 6], [4, 5]]),
        ):
            step = builder.build(queries, lengths, tables)
            inputs = [torch.randn(sum(queries), 32) for _ in range(3)]
            expected = compiled(*inputs, metadata=step)
            assert torch.equal(compiled(*inputs, metadata=builder.build_from_tensors(**by_engine(step))), expected)
    assert counters["stats"]["unique_graphs"] == 1
