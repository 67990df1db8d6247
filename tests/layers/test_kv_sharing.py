"""Layers that read another layer's cache: what must be equal, and fast prefill with the last tokens alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import vattn
from tests.layers import layer_support
from tests.layers.layer_support import (
    BLOCK,
    CLOSE,
    HEADS,
    KV_HEADS,
    NUM_BLOCKS,
    SIZE,
    UNIT,
    bind,
    make_builder,
    make_inputs,
)
from tests.support import unchanged, with_cache
from vattn.errors import CacheError, ConfigError, MetadataError, ShapeError


def make_layer(name="layers.0", target=None, *, layer=vattn.Attention, **options):
    if target is not None:
        options["kv_sharing_target_layer_name"] = target
    return layer_support.make_layer(kind=layer, bound=False, prefix=name, **options)


def make_pair(*, first=None, second=None, both=None, bound=True):
    """Return two layers, of which the second reads the first one's cache."""
    both = both or {}
    model = nn.ModuleList(
        [make_layer(**{**both, **(first or {})}), make_layer("layers.1", "layers.0", **{**both, **(second or {})})]
    )
    return bind(model) if bound else model


TABLES = [[3, 5], [1, 6], [7, 2]]


def make_step(query_lens=(5, 7, 2), seq_lens=None, builder=None, **options):
    lens = list(query_lens)
    builder = builder or make_builder(max_trees=1, max_tree_size=4)
    return builder.build(lens, list(seq_lens or lens), TABLES[: len(lens)], **options)


# What must be equal

FOUR, NINE = {"per_layer_sliding_window": 4}, {"per_layer_sliding_window": 9}
CHUNKS = {"per_layer_sliding_window": 8, "chunk_lookback": 1}
WINDOWS = {
    "both full": ({}, {}, True),
    "window in a full cache": ({}, FOUR, True),
    "smaller window": (NINE, FOUR, True),
    "full in a window's cache": (NINE, {}, False),
    "larger window": (FOUR, NINE, False),
    "range that reaches before the window": (NINE, {**NINE, "mm_prefix": "full"}, False),
    "chunks in a full cache": ({}, CHUNKS, True),
    "equal chunks": (CHUNKS, CHUNKS, True),
    "window in the cache of chunks": (CHUNKS, FOUR, False),
}


@pytest.mark.parametrize(("first", "second", "allowed"), WINDOWS.values(), ids=WINDOWS.keys())
def test_a_sharing_layer_sees_no_further_back_than_its_target_keeps(first, second, allowed):
    model = make_pair(first=first, second=second, bound=False)
    if not allowed:
        with pytest.raises(CacheError, match="may be gone from the cache"):
            bind(model)
        assert model[0].kv_cache is None and model[1].kv_cache is None
        return
    bind(model)
    query, key, value = make_inputs(14)
    model[0](query, key, value, metadata=make_step())
    alone = bind(nn.ModuleList([make_layer(**second)]))[0]
    out = model[1](query, None, None, metadata=make_step())
    torch.testing.assert_close(out, alone(query, key, value, metadata=make_step()), **CLOSE)


def test_what_is_not_in_the_cache_may_differ():
    """Query heads, soft cap, sinks, scale: the bytes are read alike."""
    second = {
        "logits_soft_cap": 2.0,
        "sinks": torch.zeros(HEADS),
        "quant_config": vattn.QuantConfig(output_format="fp8_per_token"),
    }
    model = make_pair(second=second)
    inputs = make_inputs(14)
    model[0](*inputs, metadata=make_step())
    codes, _ = model[1](inputs[0], None, None, metadata=make_step())
    assert codes.dtype == torch.float8_e4m3fn


def test_layers_of_another_class_do_not_share():
    first = make_layer()
    second = make_layer("layers.1", "layers.0", layer=vattn.CrossAttention)
    with pytest.raises(CacheError, match="is a Attention, the layer a CrossAttention"):
        bind(nn.ModuleList([first, second]))
    bind(nn.ModuleList([first]))
    with pytest.raises(CacheError, match="is a Attention, the layer a CrossAttention"):
        second.bind_kv_cache(first.kv_cache, dtype=torch.float32, target=first)


def test_a_target_that_was_bound_again_is_noticed():
    model = make_pair()
    query, key, value = make_inputs(14)
    model[0].bind_kv_cache(torch.zeros_like(model[0].kv_cache), dtype=torch.float32)
    with pytest.raises(CacheError, match="has another cache by now"):
        model[1](query, None, None, metadata=make_step())
    model[1].bind_kv_cache(model[0].kv_cache, dtype=torch.float32, target=model[0])
    model[0](query, key, value, metadata=make_step())
    assert model[1](query, None, None, metadata=make_step()).isfinite().all()


def test_a_sharing_layer_is_not_its_targets_owner():
    """A reference to the target would double its parameters in a state dict and move them twice."""
    model = make_pair(both={"cache": {"cache_dtype": "fp8"}, "quant_config": UNIT}, second={"quant_config": None})
    assert list(model.state_dict()) == ["0.k_scale", "0.v_scale"]
    assert [name for name, _ in model.named_modules()] == ["", "0", "1"]


def test_repr_names_the_owner_of_the_cache():
    assert "kv_cache=float32 of 'layers.0', fast_prefill, block_size=8" in repr(fast_pair()[1])
    assert "kv_cache=float32 of 'layers.0', block_size=8" in repr(make_pair()[1])


@pytest.mark.parametrize("calculate", [False, True])
def test_a_quantised_cache_is_read_with_the_targets_scales(calculate):
    cache = {"cache_dtype": "fp8", "calculate_kv_scales": calculate}
    heads = vattn.QuantConfig(k_scale=[0.01, 0.02], v_scale=[0.03, 0.01])
    model = make_pair(both={"cache": cache}, first={"quant_config": None if calculate else heads})
    query, key, value = make_inputs(14)
    out = model[0](query, key, value, metadata=make_step())
    with unchanged(model[1]):
        assert torch.equal(model[1](query, None, None, metadata=make_step()), out)
    assert model[1].k_scale is model[0].k_scale and (model[0].k_scale != 1.0).all()
    assert model[1].config.kv_scale == ("tensor" if calculate else "head")
    assert model[1].calculate_kv_scales is False


# Fast prefill


def prepared(model):
    """Give a model the same finite bytes in its cache as every other: tokens of earlier steps."""
    for storage in {layer.kv_cache.data_ptr(): layer.kv_cache for layer in model}.values():
        storage.copy_(torch.linspace(-1, 1, storage.numel()).view_as(storage))
    return model


def fast_pair(**options):
    return prepared(make_pair(second={"fast_prefill": True}, **options))


def run_pair(model, step, query, key, value):
    """Return what the second layer gives for the rows that the step keeps."""
    model[0](query, key, value, metadata=step)
    return model[1](vattn.kept_rows(query, step), None, None, metadata=step)


def last_rows(query_lens, kept):
    ends = torch.tensor(query_lens).cumsum(0).tolist()
    return [end - count + i for end, count in zip(ends, kept, strict=True) for i in range(count)]


@pytest.mark.parametrize(
    ("backend", "kept", "window"),
    [
        ("TORCH_SDPA", [1, 1, 1], None),
        ("TORCH_SDPA", [5, 1, 2], 3),
        ("TORCH_SDPA", [2, 7, 1], None),
        ("TRITON_ATTN", [0, 3, 0], 3),
    ],
    ids=str,
)
def test_kept_rows_get_what_they_would_get_among_all(backend, kept, window):
    options = {"attn_backend": backend, "per_layer_sliding_window": window}
    inputs, seq_lens = make_inputs(14), (9, 7, 12)
    whole = run_pair(prepared(make_pair(both=options)), make_step(seq_lens=seq_lens), *inputs)
    step = make_step(seq_lens=seq_lens, num_logits=kept)
    assert step.logits_indices.tolist() == last_rows((5, 7, 2), kept)
    step.check(BLOCK, NUM_BLOCKS)
    out = run_pair(fast_pair(both=options), step, *inputs)
    torch.testing.assert_close(out, whole[step.logits_indices], **CLOSE)


def test_masks_of_the_step_reach_the_kept_rows():
    inputs = make_inputs(14)
    for asked in ({"causal": [0, 1, 0]}, {"causal": False}, {"mm_ranges": [[(1, 4)], [(2, 6)], []]}):
        builder = make_builder(max_mm_ranges=1)
        whole = run_pair(prepared(make_pair()), make_step(builder=builder, **asked), *inputs)
        step = make_step(builder=builder, num_logits=[2, 3, 1], **asked)
        torch.testing.assert_close(run_pair(fast_pair(), step, *inputs), whole[step.logits_indices], **CLOSE)


def test_other_layers_that_share_keep_rows_too():
    """Cross attention reads lengths of the encoder, sinks shift those of the decoder."""
    encoded = {"encoder_lens": [9, 4, 0], "cross_block_tables": [[4, 6], [2], []], "new_encoder": [1, 1, 1]}
    builder = make_builder(max_encoder_len=16)
    states = make_inputs(13, seed=3)[1:]
    outs = []
    for fast in (False, True):
        both = {"layer": vattn.CrossAttention}
        model = prepared(make_pair(both=both, second={"fast_prefill": fast}))
        step = make_step(builder=builder, **encoded, **({"num_logits": [1, 2, 2]} if fast else {}))
        model[0](make_inputs(14)[0], *states, metadata=step)
        outs.append(model[1](vattn.kept_rows(make_inputs(14)[0], step), None, None, metadata=step))
    torch.testing.assert_close(outs[1], outs[0][last_rows((5, 7, 2), (1, 2, 2))], **CLOSE)

    sinks = {"sink_key": torch.randn(BLOCK, KV_HEADS, SIZE), "sink_value": torch.randn(BLOCK, KV_HEADS, SIZE)}
    outs = []
    for fast in (False, True):
        both = {"layer": vattn.StaticSinkAttention, "sink_len": BLOCK}
        model = with_cache(make_pair(both=both, first=sinks, second={"fast_prefill": fast}, bound=False), NUM_BLOCKS)
        lens = [5, 7, 2]
        asked = {"num_logits": [1, 2, 2]} if fast else {}
        step = make_builder().build(lens, lens, [[3], [2], [7]], **asked)
        outs.append(run_pair(model, step, *make_inputs(14)))
    torch.testing.assert_close(outs[1], outs[0][last_rows((5, 7, 2), (1, 2, 2))], **CLOSE)


def test_cross_attention_keeps_rows_with_a_cache_of_its_own():
    """Its keys come from the encoder, and are written whichever rows of the query are kept."""
    encoded = {"encoder_lens": [9, 4, 0], "cross_block_tables": [[4, 6], [2], []], "new_encoder": [1, 1, 1]}
    builder, states, query = make_builder(max_encoder_len=16), make_inputs(13, seed=3)[1:], make_inputs(14)[0]
    outs = []
    for fast in (False, True):
        layer = bind(nn.ModuleList([make_layer(layer=vattn.CrossAttention, fast_prefill=fast)]))[0]
        step = make_step(builder=builder, num_logits=[1, 2, 2], **encoded)
        outs.append(layer(vattn.kept_rows(query, step) if fast else query, *states, metadata=step))
    torch.testing.assert_close(outs[1], outs[0][last_rows((5, 7, 2), (1, 2, 2))], **CLOSE)


def test_padding_of_tokens_and_of_kept_rows_is_zero():
    inputs = make_inputs(18, real=14)
    step = make_step(num_logits=[1, 2, 1], num_tokens_padded=18, num_reqs_padded=4, num_logits_padded=7)
    assert step.logits_indices.tolist() == [4, 10, 11, 13, 0, 0, 0]
    assert step.logits_start_loc.tolist() == [0, 1, 3, 4, 4]
    out = run_pair(fast_pair(), step, *inputs)
    assert out[:4].isfinite().all() and out[:4].any() and not out[4:].any()


def test_a_step_that_keeps_all_is_like_one_without():
    """Pure decode: the same graph, the same metadata."""
    builder = make_builder()
    decode = {"query_lens": (1, 1, 1), "seq_lens": (9, 7, 12), "builder": builder}
    plain, fast = make_step(**decode).capture_key(), make_step(num_logits=[1, 1, 1], **decode).capture_key()
    assert plain == fast
    step, rows = make_step(logits_indices=[0, 1, 2], **decode), torch.randn(3, 4)
    assert step.logits_indices is None and vattn.kept_rows(rows, step) is rows
    assert vattn.kept_rows(rows) is rows, "a profiling call keeps all"
    captured = make_step(num_logits_padded=3, **decode)
    assert captured.logits_indices.tolist() == [0, 1, 2]
    again = make_step((1, 1), (9, 7), builder=builder, capture_key=captured.capture_key())
    assert again.logits_indices.tolist() == [0, 1, 0] and again.logits_start_loc.tolist() == [0, 1, 2, 2]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4), st.integers(0, 3))
def test_rows_made_on_the_device_are_those_counted_on_the_host(requests, padding):
    lens, kept = [n for n, _ in requests], [min(n, k) for n, k in requests]
    rows = last_rows(lens, kept)
    builder = make_builder()
    tables = [[i] for i in range(len(lens))]
    build = {"num_tokens_padded": sum(lens) + padding, "num_logits_padded": min(len(rows) + padding, 32)}
    by_count = builder.build(lens, lens, tables, num_logits=kept, **build)
    want = (rows + [0] * padding, by_count.logits_start_loc.tolist())
    assert by_count.logits_indices.tolist() == want[0]
    by_index = builder.build(lens, lens, tables, logits_indices=rows, **build)
    assert (by_index.logits_indices.tolist(), by_index.logits_start_loc.tolist()) == want
    step = builder.build(lens, lens, tables, num_tokens_padded=sum(lens) + padding)
    on_device = vattn.fast_prefill(step, torch.tensor(rows, dtype=torch.int64))
    assert on_device.logits_start_loc.tolist() == want[1] and step.logits_indices is None
    on_device.check(BLOCK)
    if padding:
        with_padding = vattn.fast_prefill(step, torch.tensor(rows + [sum(lens)] * padding))
        assert with_padding.logits_start_loc.tolist() == want[1]


WRONG_ROWS = {
    "not the last": ({"logits_indices": [3, 11, 13]}, "rising rows, the last ones"),
    "the first of a request too": ({"logits_indices": [0, 4, 13]}, "rising rows, the last ones"),
    "falling": ({"logits_indices": [13, 4]}, "rising rows, the last ones"),
    "twice": ({"logits_indices": [4, 4]}, "rising rows, the last ones"),
    "beyond the tokens": ({"logits_indices": [14]}, "rising rows, the last ones"),
    "negative": ({"logits_indices": [-1]}, "rising rows, the last ones"),
    "more than there are": ({"num_logits": [1, 8, 1]}, "request 1: logits of 8 tokens"),
    "negative count": ({"num_logits": [1, -1, 1]}, "request 1: logits of -1 tokens"),
    "another number of requests": ({"num_logits": [1, 1]}, "num_logits describes 2 requests"),
    "both": ({"num_logits": [1, 1, 1], "logits_indices": [4, 11, 13]}, "num_logits and logits_indices"),
    "padded to too few": ({"num_logits": [1, 1, 1], "num_logits_padded": 2}, "3 kept tokens padded to 2"),
}


@pytest.mark.parametrize(("asked", "named"), WRONG_ROWS.values(), ids=WRONG_ROWS.keys())
def test_rows_that_are_not_the_last_are_refused(asked, named):
    builder = make_builder()
    with unchanged(make_step(builder=builder)), pytest.raises(MetadataError) as caught:
        make_step((5, 7, 2), (6, 8, 3), builder=builder, **asked)
    assert named in str(caught.value)


def test_check_finds_rows_that_only_the_device_knew():
    step = make_step()
    for rows in ([3, 11], [4, 10], [11, 4]):
        with pytest.raises(MetadataError, match="the last rows of each request"):
            vattn.fast_prefill(step, torch.tensor(rows)).check(BLOCK)
    vattn.fast_prefill(step, torch.tensor([4, 10, 11])).check(BLOCK)
    for wrong in (torch.tensor([4.0]), torch.tensor([[4]]), torch.arange(15), torch.tensor([4], device="meta")):
        with pytest.raises(MetadataError, match="logits_indices is"):
            vattn.fast_prefill(step, wrong)
    with pytest.raises(MetadataError, match="only one of"):
        dataclasses.replace(step, logits_indices=torch.tensor([4])).check(BLOCK)


def test_wrong_use_of_a_fast_layer():
    with pytest.raises(ConfigError, match="writes every token to its own"):
        make_layer(fast_prefill=True)
    with pytest.raises(ConfigError, match="fast_prefill='yes'"):
        make_layer("layers.1", "layers.0", fast_prefill="yes")
    model, step = fast_pair(), make_step(num_logits=[1, 1, 1])
    with unchanged(model[1]), pytest.raises(ShapeError, match=r"query has 14 tokens.*kept_rows"):
        model[1](make_inputs(14)[0], None, None, metadata=step)
    with pytest.raises(ShapeError, match="query has 3 tokens"):
        fast_pair()[0](*make_inputs(3), metadata=step)
    tree = {"tree_bias": torch.zeros(1, 3, 3), "tree_id": [0, 0, 0]}
    with unchanged(model[1]), pytest.raises(MetadataError, match="tree_bias and num_logits"):
        model[1](make_inputs(3)[0], None, None, metadata=make_step(num_logits=[1, 1, 1], **tree))


class Model(nn.Module):
    """A layer that writes, one that shares its cache and keeps the last rows; a residual that is cut with them."""

    def __init__(self, fast):
        super().__init__()
        self.first, self.second = make_layer("0"), make_layer("1", "0", fast_prefill=fast)
        self.qkv = nn.Linear(32, (HEADS + 2 * KV_HEADS) * SIZE)
        self.o = nn.Linear(HEADS * SIZE, 32)

    def forward(self, x):
        query, key, value = self.qkv(x).split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)
        x = x + self.o(self.first(query, key, value))
        if self.second.fast_prefill:
            x = vattn.kept_rows(x)
        return x + self.o(self.second(self.qkv(x)[:, : HEADS * SIZE], None, None))


def test_compiles_into_one_graph_for_prefill_and_one_for_decode(fresh_dynamo):
    torch.manual_seed(3)
    fast, whole = Model(True).eval(), Model(False).eval()
    whole.load_state_dict(fast.state_dict())
    for model in (fast, whole):
        vattn.allocate_kv_cache(model, num_blocks=NUM_BLOCKS, dtype=torch.float32)
    compiled = vattn.compile(fast, backend="eager")
    builder = make_builder(layers=fast)
    lens = [0, 0, 0]
    for queries, kept in (
        ([5, 7, 2], [1, 1, 1]),
        ([4, 1, 3], [2, 1, 1]),
        ([1, 1, 1], [1, 1, 1]),
        ([1, 1, 2], [1, 1, 2]),
    ):
        lens = [a + b for a, b in zip(lens, queries, strict=True)]
        x = torch.randn(sum(queries), 32)
        with torch.no_grad():
            with vattn.forward_context(make_step(queries, lens, builder=builder)):
                want = whole(x)[last_rows(queries, kept)]
            with vattn.forward_context(make_step(queries, lens, builder=builder, num_logits=kept)):
                got = compiled(x)
        torch.testing.assert_close(got, want, **CLOSE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_exports_with_the_kept_rows_as_an_input():
    model = Model(True).eval()
    vattn.allocate_kv_cache(model, num_blocks=NUM_BLOCKS, dtype=torch.float32)
    builder = make_builder(layers=model)
    with torch.no_grad():
        exported = vattn.export_step(model, (torch.randn(14, 32),), make_step(builder=builder, num_logits=[1, 2, 1]))
        for lens, kept in (([5, 7, 2], [1, 1, 1]), ([9, 2], [3, 2])):
            x, step = torch.randn(sum(lens), 32), make_step(lens, builder=builder, num_logits=kept)
            with vattn.forward_context(step):
                want = model(x)
            torch.testing.assert_close(exported.program.module()(*exported.inputs((x,), step)), want, **CLOSE)
