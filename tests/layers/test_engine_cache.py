"""Layers over an engine's own KV memory: views with strides, nothing copied, cleared or written beside their slots."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import vattn
from tests.layers.layer_support import (
    BLOCK,
    HEADS,
    KV_HEADS,
    NUM_BLOCKS,
    SIZE,
    backends,
    make_inputs,
    make_layer,
    make_step,
)
from vattn.backends import dispatch, selector
from vattn.config.device import DeviceInfo
from vattn.errors import (
    CacheError,
    ConfigError,
    DtypeError,
    ShapeError,
    StrideError,
    UnsupportedRequestError,
    VattnError,
)
from vattn.ops.checks import share_elements

Views = tuple[Tensor, Tensor]
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
LAYERS, LAYER = 3, 1


def sizes(order: str) -> list[int]:
    """Return a shape by letters: layers, blocks, heads, tokens of a block, a key and a value, key or value, columns."""
    of = {"L": LAYERS, "B": NUM_BLOCKS, "H": KV_HEADS, "N": BLOCK, "C": 2 * SIZE, "2": 2, "D": SIZE}
    return [of[letter] for letter in order]


def vllm_views(order: str) -> Callable[[Tensor], Views]:
    """Return vLLM's view of one layer: logically `[B, H, N, 2D]`, in memory as `order` says."""

    def views(pool: Tensor) -> Views:
        logical = pool.permute([order.index(letter) for letter in "LBHNC"])[LAYER]
        key, value = logical.transpose(1, 2).split(SIZE, dim=-1)
        return key, value

    return views


def heads_first(part: Tensor) -> Tensor:
    """Return the memory of `[B, N, H, D]` as blocks in which heads come before tokens."""
    return part.view(NUM_BLOCKS, KV_HEADS, BLOCK, SIZE).transpose(1, 2)


ENGINES: dict[str, tuple[str, Callable[[Tensor], Views]]] = {
    "apart": ("2BNHD", lambda pool: (pool[0], pool[1])),
    "nano-vllm": ("2LBNHD", lambda pool: (pool[0, LAYER], pool[1, LAYER])),
    "sglang": ("L2BNHD", lambda pool: (pool[LAYER, 0], pool[LAYER, 1])),
    "side by side": ("BN2HD", lambda pool: (pool[:, :, 0], pool[:, :, 1])),
    "NHD keys, HND values": ("2BNHD", lambda pool: (pool[0], heads_first(pool[1]))),
    "HND keys, NHD values": ("2BNHD", lambda pool: (heads_first(pool[0]), pool[1])),
    "heads first": ("BL2HND", lambda pool: (pool[:, LAYER, 0].transpose(1, 2), pool[:, LAYER, 1].transpose(1, 2))),
    **{name: (name, vllm_views(name)) for name in ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")},
}


def bound(engine: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[vattn.Attention, Tensor, Views]:
    """Return a layer bound to a layer's part of an engine's pool of NaN, the pool, and the part."""
    order, views = ENGINES[engine]
    pool = torch.full(sizes(order), float("nan"), dtype=dtype)
    layer, parts = make_layer(bound=False, **options), views(pool)
    layer.bind_kv_cache(*parts)
    return layer, pool, parts


def run(layer: vattn.Attention) -> Tensor:
    """Return the outputs of two prompts, then of a chunk and a decode."""
    first = layer(*make_inputs(8), metadata=make_step([5, 3]))
    return torch.cat((first, layer(*make_inputs(4, seed=1), metadata=make_step([3, 1], [8, 4]))))


@pytest.mark.parametrize("backend", [name for name in ("TORCH_SDPA", "TRITON_ATTN") if name in backends()])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_an_engines_memory_gives_what_an_own_cache_gives(engine: str, backend: str) -> None:
    layer, pool, parts = bound(engine, attn_backend=backend)
    own = make_layer(attn_backend=backend)
    assert torch.equal(run(layer), run(own))
    assert own.key_cache is not None and own.value_cache is not None
    for part, written in zip(parts, (own.key_cache, own.value_cache), strict=True):
        assert torch.equal(part.nan_to_num(7.0), written.nan_to_num(7.0))
        part.fill_(0.0)
    # What is not this layer's is as it was.
    assert int(pool.isnan().sum()) == pool.numel() - 2 * parts[0].numel()
    assert layer.num_blocks == NUM_BLOCKS


@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e4m3fn])
def test_fp8_caches_come_as_bytes_or_fp8(stored: torch.dtype) -> None:
    options = {"cache": {"cache_dtype": "fp8"}, "quant_config": vattn.QuantConfig(k_scale=0.02, v_scale=0.03)}
    layer, own = make_layer(bound=False, **options), make_layer(**options)
    pool = torch.zeros(sizes("BL2NHD"), dtype=torch.uint8).view(stored)
    layer.bind_kv_cache(pool[:, LAYER, 0], pool[:, LAYER, 1], dtype=torch.float32)
    assert torch.equal(run(layer), run(own))
    assert own.kv_cache is not None
    # Unwritten slots are NaN in one and zeros in the other.
    table = torch.tensor([3, 1])
    assert torch.equal(pool.view(torch.uint8)[table, LAYER, 0, :4], own.kv_cache[0, table, :4])


REFUSED: dict[str, tuple[Callable[[Views], Any], type[Exception], str]] = {
    "other blocks": (lambda kv: (kv[0], kv[1][1:]), ShapeError, "value_cache has shape.*the blocks of key_cache"),
    "other tokens": (lambda kv: (kv[0][:, 1:], kv[1][:, 1:]), ShapeError, "key_cache has shape.*Try: allocate blocks"),
    "a smaller block": (lambda kv: (kv[0][:, :4], kv[1][:, :4]), ShapeError, r"Try: .*CacheConfig\(block_size=4\)"),
    "heads first": (lambda kv: (kv[0].mT, kv[1].mT), ShapeError, "key_cache has shape"),
    "heads before tokens": (
        lambda kv: (kv[0].transpose(1, 2), kv[1].transpose(1, 2)),
        ShapeError,
        r"Try: pass key_cache.transpose\(1, 2\) and value_cache",
    ),
    "overlap": (lambda kv: (kv[0][:1].expand(kv[0].shape), kv[1]), StrideError, "elements overlap"),
    "columns apart": (lambda kv: (kv[0].mT.contiguous().mT, kv[1]), StrideError, "columns lie apart"),
    "other dtype": (lambda kv: (kv[0], kv[1].double()), DtypeError, "value_cache has dtype float64"),
    "no values": (lambda kv: (kv[0], torch.float32), CacheError, "value_cache of type dtype.*by their names"),
    "no dtype": (lambda kv: tuple(part.view(torch.int32) for part in kv), DtypeError, "dtype=torch.int32"),
    "keys alone": (lambda kv: (kv[0],), CacheError, "KV cache storage"),
    "keys twice": (lambda kv: (kv[0], kv[0]), StrideError, "share elements"),
    "a parameter": (lambda kv: (nn.Parameter(kv[0]), kv[1]), CacheError, "storage of type Parameter"),
}


@pytest.mark.parametrize("mistake", list(REFUSED))
def test_wrong_views_are_refused_and_the_cache_that_was_bound_stays(mistake: str) -> None:
    change, error, message = REFUSED[mistake]
    layer, _, parts = bound("apart")
    before = run(layer)
    with pytest.raises(error, match=message):
        layer.bind_kv_cache(*change(parts))
    assert torch.equal(run(layer), before)


@pytest.mark.parametrize(
    ("key", "value", "shared"),
    [((0, 6), (6, 12), False), ((0, 6), (5, 11), True), ((6, 12), (0, 6), False), ((6, 12), (1, 7), True)],
)
def test_columns_of_keys_and_values_do_not_overlap(key: tuple[int, int], value: tuple[int, int], shared: bool) -> None:
    pool = torch.zeros(5, 3, 2, 12)
    views = pool[..., slice(*key)], pool[..., slice(*value)]
    assert share_elements(*views) == share_elements(*(view[1:] for view in views)) == shared
    assert share_elements(views[0][:-1], views[0][1:]) and not share_elements(views[0][:2], views[0][3:])


def test_layers_that_share_an_engines_cache_share_its_tensors() -> None:
    layer, pool, parts = bound("side by side")
    reader = make_layer(bound=False, kv_sharing_target_layer_name="layer")
    reader.bind_kv_cache(pool[:, :, 0], pool[:, :, 1], target=layer)
    assert reader.key_cache is layer.key_cache and reader.value_cache is layer.value_cache
    with pytest.raises(CacheError, match="not bound to this storage"):
        reader.bind_kv_cache(parts[0], parts[1].clone(), target=layer)
    copied = copy.deepcopy(nn.ModuleList([layer, reader]))
    assert copied[0].key_cache is copied[1].key_cache is copied[0].kv_cache
    assert copied[0].key_cache.data_ptr() != layer.key_cache.data_ptr()  # type: ignore[union-attr]


def test_groups_of_a_hybrid_cache_share_their_tensors() -> None:
    model = nn.ModuleList([make_layer(bound=False), make_layer(bound=False, per_layer_sliding_window=8)])
    vattn.allocate_kv_cache(model, num_blocks=NUM_BLOCKS, dtype=torch.float32, hybrid=True, max_seq_len=32)
    assert model[0].kv_cache is model[1].kv_cache and model[0].key_cache is model[1].key_cache


@pytest.fixture
def restricted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Narrow what TORCH_SDPA reads, as libraries do."""

    def narrow(**changes: Any) -> None:
        backend = type(selector.get_backend("TORCH_SDPA"))
        monkeypatch.setattr(backend, "capabilities", replace(backend.capabilities, **changes))
        selector.forget_decisions()
        dispatch._resolve.cache_clear()

    yield narrow  # type: ignore[misc]
    selector.forget_decisions()
    dispatch._resolve.cache_clear()


def test_backends_that_read_no_gaps_refuse_them(restricted: Callable[..., None]) -> None:
    restricted(strided_caches=False)
    bound("apart", attn_backend="TORCH_SDPA")
    with pytest.raises(UnsupportedRequestError, match=r"TORCH_SDPA cannot run .* gaps between the blocks"):
        bound("side by side", attn_backend="TORCH_SDPA")
    with pytest.raises(UnsupportedRequestError, match="keys in another order than values"):
        bound("NHD keys, HND values", attn_backend="TORCH_SDPA")
    if selector.get_backend("TRITON_ATTN").problem() is None and DeviceInfo.of("cpu").triton_interpreter:
        assert bound("side by side")[0].config.backend == "TRITON_ATTN"  # type: ignore[union-attr]


@pytest.mark.parametrize("changes", [{"strided_caches": False}, {"row_alignment": 16}])
def test_functions_refuse_memory_that_the_backend_does_not_read(
    changes: dict[str, Any], restricted: Callable[..., None]
) -> None:
    layer, _, _ = bound("apart", attn_backend="TORCH_SDPA")
    config, step = layer.config, make_step([3], [3])
    assert config is not None
    pool = torch.zeros(2, NUM_BLOCKS, BLOCK, KV_HEADS, SIZE + 2)[..., :SIZE]
    query, rows = torch.ones(3, HEADS, SIZE), torch.ones(3, KV_HEADS, SIZE)
    vattn.update_kv_cache(rows, rows, (pool[0], pool[1]), step.slot_mapping, config)
    written = pool.clone()
    restricted(**changes)
    with pytest.raises(UnsupportedRequestError, match=r"gaps between|multiples of 8 bytes \(reads multiples of 16\)"):
        vattn.update_kv_cache(2 * rows, rows, (pool[0], pool[1]), step.slot_mapping, config)
    with pytest.raises(UnsupportedRequestError, match=r"gaps between|multiples of 8 bytes \(reads multiples of 16\)"):
        vattn.paged_attention(query, (pool[0], pool[1]), step, config)
    assert torch.equal(pool, written)
    dense = torch.zeros(2, NUM_BLOCKS, BLOCK, KV_HEADS, SIZE)
    vattn.update_kv_cache(rows, rows, (dense[0], dense[1]), step.slot_mapping, config)
    assert bool(vattn.paged_attention(query, (dense[0], dense[1]), step, config).output.eq(1).all())


def test_explain_says_how_a_layers_cache_lies() -> None:
    layer, _, views = bound("side by side")
    explained, config = vattn.explain(layer), layer.config
    assert config is not None and explained == vattn.explain(config, "cpu", views)
    assert explained.chosen == config.backend
    assert "cache  : gaps between blocks, tokens or heads, or keys and values in two orders, rows at" in str(explained)
    narrow = torch.zeros(2, NUM_BLOCKS, BLOCK, KV_HEADS, SIZE + 2)[..., :SIZE]
    layer.bind_kv_cache(narrow[0], narrow[1])
    notes = vattn.explain(config.replace(backend="TRITON_ATTN"), "sm_90", layer.cache_views()).notes
    assert len([note for note in notes if "rows of the cache at multiples of 8 bytes" in note]) == 2
    with pytest.raises(ConfigError, match="a layer without a KV cache"):
        vattn.explain(make_layer(bound=False))


def test_a_model_moves_and_copies_with_an_engines_cache() -> None:
    layer, _, parts = bound("side by side")
    before = run(layer)
    layer.to(torch.bfloat16)
    assert layer.key_cache is not None and layer.key_cache.data_ptr() == parts[0].data_ptr()
    assert torch.equal(run(copy.deepcopy(layer)), before)


def test_differential_layers_refuse_what_they_cannot_read_and_keep_their_cache() -> None:
    layer = vattn.DifferentialAttention(
        4, 16, 0.25, 2, cache_config=vattn.CacheConfig(block_size=BLOCK), **dict.fromkeys(LAMBDAS, [0.1] * 16),
        lambda_init=0.2,
    )  # fmt: skip
    vattn.allocate_kv_cache(layer, num_blocks=NUM_BLOCKS, dtype=torch.float32)
    before, config, ops = layer.kv_cache, layer.config, dict(layer._ops)
    pool = torch.zeros(5, BLOCK, 2, 32)
    with pytest.raises(StrideError, match="32 elements apart"):
        layer.bind_kv_cache(*pool.split(16, -1))
    heads_first = torch.zeros(2, 5, 2, BLOCK, 16).transpose(2, 3)
    with pytest.raises(VattnError):
        layer.bind_kv_cache(heads_first[0], heads_first[1])
    assert (layer.kv_cache, layer.config, layer._ops) == (before, config, ops)


def test_functions_take_keys_and_values() -> None:
    layer, _, (keys, values) = bound("BLNHC")
    config, step, (query, key, value) = layer.config, make_step([5, 3]), make_inputs(8)
    assert config is not None
    given = layer(query, key, value, metadata=step)
    rows = [x.view(8, -1, SIZE) for x in (query, key, value)]
    other = torch.full_like(keys, float("nan")), torch.full_like(values, float("nan"))
    vattn.update_kv_cache(rows[1], rows[2], other, step.slot_mapping, config)
    assert torch.equal(vattn.paged_attention(rows[0], other, step, config).output.flatten(1), given)
    with pytest.raises(ShapeError, match="key_cache without value_cache"):
        vattn.paged_attention(rows[0], (keys, None), step, config)  # type: ignore[arg-type]


class Model(nn.Module):
    """Layers with keys and values in one tensor for all layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(bound=False) for _ in range(count))
        self.pool = torch.zeros(2, count, NUM_BLOCKS, BLOCK, KV_HEADS, SIZE)
        for index, layer in enumerate(self.layers):
            layer.bind_kv_cache(self.pool[0, index], self.pool[1, index])  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x[:, : KV_HEADS * SIZE], x[:, KV_HEADS * SIZE :])
        return x


@pytest.mark.slow
def test_layers_over_one_tensor_compile_to_one_graph_without_copies() -> None:
    model, x = Model(4), make_inputs(8)[0]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad(), vattn.forward_context(make_step([5, 3])):
        expected = model(x)
        pool = model.pool.clone()
        model.pool.zero_()
        result, codes = run_and_get_code(compiled, x)
        assert torch.equal(result, expected) and torch.equal(model.pool, pool)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(x), expected)
    assert len(codes) == 1
    called = codes[0].split("def call(")[1].split("def benchmark_")[0].split("def get_args")[0]
    assert "vattn.kv_cache_update" in called
    assert not [word for word in ("clone", "copy_", "as_strided(") if word in called]


@pytest.mark.slow
def test_compiled_functions_write_values_where_they_are_in_caches_of_any_size() -> None:
    """Inductor loses where values begin in a storage of varying size (pytorch/pytorch#198068)."""
    config, slots = make_layer().config, torch.arange(3)
    key, value = torch.randn(2, 3, KV_HEADS, SIZE)

    def write(kv_cache: Tensor) -> None:
        vattn.update_kv_cache(key, value, kv_cache, slots, config)

    torch._dynamo.reset()
    compiled = torch.compile(write, fullgraph=True)
    for blocks in (5, 9, 7, 9):
        wanted, given = (torch.zeros(2, blocks, BLOCK, KV_HEADS, SIZE) for _ in range(2))
        write(wanted)
        compiled(given)
        assert torch.equal(given, wanted) and given[1].any()


def test_ops_refuse_values_over_keys() -> None:
    config, rows = make_layer().config, torch.randn(3, KV_HEADS, SIZE)
    keys = torch.zeros(5, BLOCK, KV_HEADS, SIZE)
    with pytest.raises(StrideError, match="begin at the same byte"):
        torch.ops.vattn.kv_cache_update(rows, rows, keys, keys, torch.arange(3), None, None, config.encode())
