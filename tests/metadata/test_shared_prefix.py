"""`build(shared_prefix_len=...)`: attending a shared prefix once gives what attending it per request gives."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vattn
from tests.layers.layer_support import BLOCK, CLOSE, HEADS, KV_HEADS, SIZE, backends, make_layer
from tests.support import capture, unchanged, usable, with_cache
from vattn.errors import GraphContractError, MetadataError, UnsupportedRequestError
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.quantization.codecs import dequantise_output
from vattn.quantization.formats import OUTPUT_FORMATS

BACKENDS = ["TORCH_SDPA", *(name for name in backends() if name == "TRITON_ATTN")]
TABLES = [[1, 3, 2], [1, 3, 5, 6], [1, 3, 7]]
QUERIES, LENGTHS = [3, 1, 4], [20, 30, 22]


def make_builder(**options: Any) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(4, 24, 32, BLOCK, **options)


def fill(layer: Any) -> None:
    """Write the cached tokens of all requests through the layer's own update."""
    tokens = torch.arange(BLOCK, 8 * BLOCK)
    key, value = (torch.randn(len(tokens), KV_HEADS, SIZE, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    torch.ops.vattn.kv_cache_update(
        key, value, layer.key_cache, layer.value_cache, tokens, layer.k_scale, layer.v_scale, layer.config.encode()
    )


def inputs(rows: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(9)
    return [torch.randn(rows, heads * SIZE, generator=made) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def attend(layer: Any, step: AttentionMetadata) -> Any:
    with torch.no_grad(), vattn.forward_context(step):
        return layer(*inputs(step.slot_mapping.shape[0]))


def both(layer: Any, shared: int, **options: Any) -> tuple[Any, Any]:
    """Return a step's result without and with the prefix attended apart, from equal caches."""
    fill(layer)
    builder, other = make_builder(max_trees=1, max_tree_size=4), make_builder(max_trees=1, max_tree_size=4)
    twin = copy.deepcopy(layer)
    whole = attend(twin, builder.build(QUERIES, LENGTHS, TABLES, **options))
    step = other.build(QUERIES, LENGTHS, TABLES, shared_prefix_len=shared, **options)
    step.check(BLOCK, 8)
    return whole, attend(layer, step)


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "cap": {"logits_soft_cap": 2.0},
    "fp8": {"cache": {"cache_dtype": "fp8"}, "quant_config": vattn.QuantConfig(k_scale=0.02, v_scale=0.03)},
    "fp8_query": {
        "cache": {"cache_dtype": "fp8"},
        "quant_config": vattn.QuantConfig(k_scale=0.02, v_scale=0.03, q_scale=0.01, query_format="fp8_e4m3"),
    },
    "int8": {"cache": {"cache_dtype": "int8_per_token_head", "kv_cache_layout": "HND"}},
}


CASES = [
    *(("TORCH_SDPA", name, shared) for name in LAYERS for shared in (0, BLOCK, 2 * BLOCK)),
    *(("TRITON_ATTN", "fp8_query", 2 * BLOCK) for _ in BACKENDS[1:]),
]


@pytest.mark.parametrize(("backend", "name", "shared"), CASES)
def test_equals_attending_per_request(backend: str, name: str, shared: int) -> None:
    layer = make_layer(attn_backend=backend, **LAYERS[name])
    whole, apart = both(layer, shared, num_tokens_padded=11, num_reqs_padded=4)
    torch.testing.assert_close(apart, whole, **CLOSE)
    assert bool((apart[8:] == 0).all())


@pytest.mark.parametrize(
    "backend", ["TORCH_SDPA", *(pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS[1:])]
)
def test_flags_and_trees_are_about_new_keys(backend: str) -> None:
    bias = torch.zeros(1, 4, 4).masked_fill(torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0] * 4]) > 0, -1e9)
    for options in ({"causal": [0, 1, 1]}, {"causal": False}, {"tree_bias": bias, "tree_id": [-1, -1, 0]}):
        torch.testing.assert_close(*both(make_layer(attn_backend=backend), 2 * BLOCK, **options), **CLOSE)


def test_static_sinks_stand_in_front_of_what_is_not_shared() -> None:
    rows = torch.randn(BLOCK, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(4))
    sinks = {"sink_len": BLOCK, "sink_key": rows, "sink_value": rows.flip(0)}
    layer = with_cache(make_layer(kind=vattn.StaticSinkAttention, bound=False, **sinks), 9)
    tables = [[table + 1 for table in row] for row in TABLES]
    results = []
    for options in ({}, {"shared_prefix_len": 2 * BLOCK}):
        torch.nn.Module.apply(layer, lambda module: module.kv_cache.view(torch.uint8).fill_(0x3C))
        layer.refresh_sinks()
        builder = vattn.AttentionMetadataBuilder(4, 24, 32, BLOCK, layers=layer)
        results.append(attend(layer, builder.build(QUERIES, LENGTHS, tables, **options)))
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("name", ["fp8_static", "fp8_per_token", "fp8_group64"])
def test_the_merged_output_is_quantised(name: str) -> None:
    scale = {"output_scale": 0.01} if OUTPUT_FORMATS[name].static_scale else {}
    config = vattn.QuantConfig(output_format=name, **scale)
    plain, _ = both(make_layer(), 2 * BLOCK)
    _, apart = both(make_layer(quant_config=config), 2 * BLOCK)
    codes, scales = apart if isinstance(apart, tuple) else (apart, None)
    given = torch.tensor(0.01) if scale else None
    back = dequantise_output(codes.view(8, HEADS, SIZE), name, scales, given)
    # Half a step of e4m3 is 2^-4 of a value.
    assert float((back.reshape(plain.shape) - plain).norm() / plain.norm()) < 2**-4


def test_a_prefix_of_fewer_tokens_than_the_step_is_attended_per_request() -> None:
    """As one request of the prefix, the first rows would lie before its first key, and see none."""
    layer = make_layer()
    fill(layer)
    queries, lengths, tables = [4, 5], [12, 13], [[1, 5], [1, 6]]
    whole = attend(copy.deepcopy(layer), make_builder().build(queries, lengths, tables))
    step = make_builder().build(queries, lengths, tables, shared_prefix_len=BLOCK)
    assert step.prefix_lens.tolist() == [0, 0] and step.suffix_lens.tolist() == lengths
    torch.testing.assert_close(attend(layer, step), whole, **CLOSE)


@settings(max_examples=20)
@given(st.data())
def test_any_requests(data: st.DataObject) -> None:
    shared = data.draw(st.integers(0, 3))
    count = data.draw(st.integers(1, 4))
    queries = [data.draw(st.integers(0, 5)) for _ in range(count)]
    cached = [shared * BLOCK + data.draw(st.integers(0 if query + shared else 1, 3)) for query in queries]
    lengths = [query + before for query, before in zip(queries, cached, strict=True)]
    # Blocks of their own behind the prefix.
    tables = [[1, 4, 2][:shared] + [5 + 2 * row, 6 + 2 * row] for row in range(count)]
    layer = vattn.Attention(HEADS, SIZE, 0.25, KV_HEADS, cache_config=vattn.CacheConfig(block_size=BLOCK))
    storage = vattn.allocate_kv_cache(layer, num_blocks=14, dtype=torch.float32).kv_caches[0]
    storage.copy_(torch.randn(storage.shape, generator=torch.Generator().manual_seed(0)))
    whole, apart = (
        attend(layer, make_builder(max_mm_ranges=0).build(queries, lengths, tables, **options))
        for options in ({}, {"shared_prefix_len": shared * BLOCK})
    )
    torch.testing.assert_close(apart, whole, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shared_prefix_len": 12}, "whole blocks of 8 tokens"),
        ({"shared_prefix_len": -8}, "whole blocks"),
        ({"shared_prefix_len": 8.0}, "whole blocks"),
        ({"shared_prefix_len": torch.tensor(8)}, "whole blocks"),
        ({"shared_prefix_len": True}, "whole blocks"),
        ({"shared_prefix_len": 24}, "request 0: 17 cached tokens"),
        ({"block_tables": [[1, 3, 2], [1, 4, 5, 6], [1, 3, 7]]}, "request 1: its first 2 blocks differ"),
        ({"block_tables": None, "seq_lens": None}, "without block tables"),
        ({"seq_lens": [20, 30, 0], "query_lens": [3, 1, 0]}, "request 2: 0 cached tokens"),
        ({"mm_ranges": [[], [(1, 3)], []]}, "shared_prefix_len with mm_ranges"),
        ({"num_logits": [1, 1, 1]}, "shared_prefix_len with num_logits"),
        ({"num_logits_padded": 8}, "shared_prefix_len with num_logits_padded"),
    ],
)
def test_steps_that_share_no_prefix_are_refused(changes: dict[str, Any], text: str) -> None:
    builder = make_builder(max_mm_ranges=1)
    before = builder.build([1], [9], [[5, 4]])
    step = {"query_lens": QUERIES, "seq_lens": LENGTHS, "block_tables": TABLES, "shared_prefix_len": 16, **changes}
    with unchanged(before), pytest.raises(MetadataError, match=text):
        builder.build(**step)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"per_layer_sliding_window": 9}, "a window ends inside of the prefix"),
        ({"alibi_slopes": [0.5, 0.25, 0.125, 0.1]}, "distances to keys of the prefix differ"),
    ],
)
def test_layers_that_count_places_are_refused(options: dict[str, Any], text: str) -> None:
    layer = make_layer(**options)
    step = make_builder().build(QUERIES, LENGTHS, TABLES, shared_prefix_len=BLOCK)
    with unchanged(layer), pytest.raises(UnsupportedRequestError, match=text) as caught:
        attend(layer, step)
    assert "attn_backend" not in str(caught.value), "no other backend would help"


def test_layers_of_other_kinds_are_refused() -> None:
    vector = torch.zeros(SIZE)
    lambdas = {f"lambda_{name}": vector for name in ("q1", "k1", "q2", "k2")}
    layer = make_layer(kind=vattn.DifferentialAttention, **lambdas, lambda_init=0.5)
    step = make_builder().build(QUERIES, LENGTHS, TABLES, shared_prefix_len=BLOCK)
    with pytest.raises(UnsupportedRequestError, match="differential"):
        attend(layer, step)


def test_steps_with_other_prefixes_share_one_compiled_graph(fresh_dynamo: None) -> None:
    from torch._dynamo.utils import counters

    layer = make_layer()
    fill(layer)
    builder, compiled = make_builder(), torch.compile(layer, backend="eager", fullgraph=True)
    for shared in (16, 0, 8):
        step = builder.build(QUERIES, LENGTHS, TABLES, shared_prefix_len=shared)
        torch.testing.assert_close(attend(compiled, step), attend(copy.deepcopy(layer), step), **CLOSE)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_capture_fixes_whether_there_is_a_prefix_and_not_its_length() -> None:
    builder = make_builder()
    key = builder.build(QUERIES, LENGTHS, TABLES, shared_prefix_len=0).capture_key()
    builder.build(QUERIES, LENGTHS, TABLES, shared_prefix_len=16, capture_key=key)
    with pytest.raises(GraphContractError, match="prefix_lens"):
        builder.build(QUERIES, LENGTHS, TABLES, capture_key=key)


def test_half_of_the_fields_is_refused() -> None:
    step = make_builder().build(QUERIES, LENGTHS, TABLES, shared_prefix_len=16)
    with pytest.raises(MetadataError, match="suffix_lens"):
        dataclasses.replace(step, suffix_lens=None).check(BLOCK, 8)


FOUR = [[1, 3, 2, 9], [1, 3, 5, 6], [1, 3, 7, 8], [1, 3, 4, 10]]
# Each of the two partial results is rounded to the model dtype before they are merged, values and their difference:
# 2^-11 in fp16, 2^-8 in bf16.
CLOSE_ON_GPU = {torch.float16: {"rtol": 2e-3, "atol": 2e-3}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2}}


def layer_on_gpu(backend: str, size: int = 64, dtype: torch.dtype = torch.float16) -> vattn.Attention:
    layer = vattn.Attention(8, size, size**-0.5, 2, attn_backend=backend, cache_config=vattn.CacheConfig(16)).cuda()
    for storage in vattn.allocate_kv_cache(layer, num_blocks=12, dtype=dtype, device="cuda").kv_caches:
        storage.copy_(torch.randn(storage.shape, generator=torch.Generator().manual_seed(0)))
    return layer


def inputs_on_gpu(rows: int, size: int = 64, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(9)
    return [torch.randn(rows, n * size, generator=made).to(dtype).cuda() for n in (8, 2, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [3, 1, 5, 9]])
@pytest.mark.parametrize("backend", ["TRITON_ATTN", "TORCH_SDPA", "FLASHINFER", "FLASH_ATTN"])
def test_equals_attending_per_request_on_a_gpu(backend: str, queries: list[int]) -> None:
    # The kernel that every build of FlashInfer comes with.
    kind = (128, torch.bfloat16) if backend == "FLASHINFER" else (64, torch.float16)
    layer = layer_on_gpu(usable(backend), *kind)
    lengths = [40 + count for count in queries]
    results = []
    for options in ({}, {"shared_prefix_len": 0}, {"shared_prefix_len": 32}):
        builder = vattn.AttentionMetadataBuilder(4, 24, 64, 16, "cuda", layers=[layer])
        step = builder.build(queries, lengths, FOUR, **options)
        with torch.no_grad():
            results.append(layer(*inputs_on_gpu(sum(queries), *kind), metadata=step))
    torch.testing.assert_close(results[1], results[0], **CLOSE_ON_GPU[kind[1]])
    torch.testing.assert_close(results[2], results[0], **CLOSE_ON_GPU[kind[1]])


@pytest.mark.gpu
def test_a_graph_replays_other_prefixes() -> None:
    layer = layer_on_gpu("TRITON_ATTN")
    builder = vattn.AttentionMetadataBuilder(4, 24, 64, 16, "cuda", layers=[layer])
    rows = inputs_on_gpu(4)
    step = builder.build([1] * 4, [41, 43, 45, 50], FOUR, shared_prefix_len=16)
    with torch.no_grad():
        for _ in range(2):
            layer(*rows, metadata=step)
        graph, captured = capture(lambda: layer(*rows, metadata=step))
        for shared, lengths in ((32, [41, 43, 45, 50]), (0, [41, 60, 45, 50]), (16, [33, 43, 64, 50])):
            builder.build([1] * 4, lengths, FOUR, shared_prefix_len=shared)
            graph.replay()
            other = vattn.AttentionMetadataBuilder(4, 24, 64, 16, "cuda", layers=[layer])
            expected = layer(*rows, metadata=other.build([1] * 4, lengths, FOUR))
            torch.testing.assert_close(captured, expected, **CLOSE_ON_GPU[torch.float16])
