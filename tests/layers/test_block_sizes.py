"""Layers of every kind, transfers and generators give the same with blocks of 1 to 2048 tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from vattn.errors import ConfigError

SIZES = (1, 2, 4, 24, 528, 2048)
UNIT = vattn.QuantConfig(k_scale="unit", v_scale="unit")
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")

KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "plain": (vattn.Attention, {}, {}),
    "window": (vattn.Attention, {"per_layer_sliding_window": 7}, {"kv_cache_layout": "HND"}),
    "exact prefill": (vattn.Attention, {"quant_config": UNIT}, {"cache_dtype": "fp8", "exact_prefill": True}),
    "packed": (vattn.Attention, {}, {"cache_dtype": "int8_per_token_head"}),
    "three bits": (vattn.Attention, {}, {"cache_dtype": "turboquant_3bit_nc", "kv_cache_layout": "HND"}),
    "differential": (
        vattn.DifferentialAttention,
        {"lambda_init": 0.3, **{name: torch.linspace(-0.3, 0.4, 16) for name in LAMBDAS}},
        {},
    ),
}


def outputs(size: int, kind: str, shared: bool = False) -> Tensor:
    """Return what a layer gives for two prompts, a chunk and a decode, over blocks of that size."""
    made, options, cache = KINDS[kind]
    layer = made(4, 16, 0.25, num_kv_heads=2, cache_config=vattn.CacheConfig(size, **cache), **options)
    width = -(-96 // size) + 1
    vattn.allocate_kv_cache(layer, num_blocks=2 * width + 1, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(2, 64, 96, layers=layer)
    tables = [list(range(1, width + 1)), list(range(2 * width, width, -1))]
    if shared:
        tables[1][: 24 // size] = tables[0][: 24 // size]
    rng, found = torch.Generator().manual_seed(2), []
    first = ([29, 0], [29, 0]) if shared else ([29, 24], [29, 24])
    for query_lens, seq_lens in (first, ([11, 2], [40, 26]), ([1, 1], [41, 27])):
        rows = [torch.randn(sum(query_lens), columns, generator=rng) for columns in (64, 32, 32)]
        options = {"shared_prefix_len": 24} if shared and found else {}
        step = builder.build(query_lens, seq_lens, tables, **options)
        step.check(size, 2 * width + 1)
        found.append(layer(*rows, metadata=step))
    return torch.cat(found)


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_give_what_blocks_of_eight_give(kind: str) -> None:
    expected = outputs(8, kind)
    for size in SIZES:
        torch.testing.assert_close(outputs(size, kind), expected, rtol=1e-5, atol=1e-6)


def test_prefixes_of_small_blocks_are_shared() -> None:
    expected = outputs(8, "plain", shared=True)
    for size in (1, 2, 4, 24):
        torch.testing.assert_close(outputs(size, "plain", shared=True), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 4, 528])
def test_sinks_take_whole_blocks(size: int) -> None:
    rows = torch.randn(528, 2, 16)
    layer = vattn.StaticSinkAttention(
        4, 16, 0.25, sink_len=528, sink_key=rows, sink_value=rows.flip(0), num_kv_heads=2,
        cache_config=vattn.CacheConfig(size),
    )  # fmt: skip
    blocks = vattn.allocate_kv_cache(layer, num_blocks=528 // size + 8, dtype=torch.float32).reserved_blocks
    assert blocks == 528 // size + 1
    builder = vattn.AttentionMetadataBuilder(1, 8, 16, layers=layer)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    step = builder.build([3], [3], [list(range(blocks, blocks + max(1, -(-3 // size))))])
    got = layer(x, x[:, :32], x[:, 32:], metadata=step)
    keys, values = (torch.cat([own, new.view(3, 2, 16)]) for own, new in ((rows, x[:, :32]), (rows.flip(0), x[:, 32:])))
    query, keys, values = x.view(3, 4, 16), keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
    mask = torch.arange(531)[None] <= 528 + torch.arange(3)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in (query, keys, values)), attn_mask=mask, scale=0.25
    )
    torch.testing.assert_close(got.view(3, 4, 16), want.transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 24])
def test_blocks_are_saved_and_loaded(size: int) -> None:
    layer = vattn.Attention(4, 16, 0.25, num_kv_heads=2, cache_config=vattn.CacheConfig(size), prefix="layer")
    model = nn.ModuleList([layer])
    cache = vattn.allocate_kv_cache(model, num_blocks=12, dtype=torch.float32)
    transfer = vattn.KVTransfer(model, cache, vattn.HostMemoryConnector("4MiB"))
    try:
        cache.kv_caches[0][:, [3, 5]] = torch.randn(2, 2, size, 2, 16)
        keys = vattn.block_keys(range(2 * size), size)
        transfer.offload("a", keys, [3, 5])
        transfer.reload("b", keys, [1, 9])
        assert torch.equal(cache.kv_caches[0][:, [1, 9]], cache.kv_caches[0][:, [3, 5]])
    finally:
        transfer.detach()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 24, 528])
def test_generators_find_prefixes_of_any_block_size(size: int) -> None:
    pytest.importorskip("transformers")
    from tests.generation.generator_support import GREEDY, PROMPTS, check_empty, make_generator, one_by_one
    from tests.integrations.hf_families import make_model
    from vattn.integrations.transformers import enable

    model = make_model("llama")
    expected = [one_by_one(model, prompt, 12) for prompt in PROMPTS[:3]]
    packed = enable(model, cache_config=vattn.CacheConfig(size), num_blocks=8 + 640 // size)
    generator = make_generator(packed)
    assert [request.output for request in generator.generate(PROMPTS[:3], GREEDY)] == expected
    (again,) = generator.generate(PROMPTS[:1], GREEDY)
    assert again.output == expected[0] and again.reused == (len(PROMPTS[0]) - 1) // size * size
    check_empty(generator)


def test_formats_say_which_blocks_hold_them() -> None:
    layer = vattn.Attention(1, 8, 0.25, cache_config=vattn.CacheConfig(1, "turboquant_3bit_nc"))
    with pytest.raises(ConfigError, match=r"turboquant_3bit_nc in blocks of 1 rows \(takes an even number of tokens"):
        vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    layer = vattn.Attention(1, 8, 0.25, cache_config=vattn.CacheConfig(2, "turboquant_3bit_nc"))
    assert vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32).num_blocks == 4
