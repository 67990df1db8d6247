"""`MLAAttention` on a CPU: steps of every mixture, weights of every kind, compilation, and what it refuses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vattn
from tests.support import relative_l2, unchanged
from vattn.backends.mla.registry import mla_backends
from vattn.errors import (
    CacheNotBoundError,
    ConfigError,
    DtypeError,
    GradientError,
    MetadataError,
    ScaleError,
    ShapeError,
    UnknownOptionError,
    UnsupportedRequestError,
    VattnError,
)
from vattn.layers.base.scales import HEADROOM
from vattn.quantization.codecs import dequantise_output
from vattn.quantization.formats import OUTPUT_FORMATS

N, P, R, V, L = 3, 12, 6, 10, 20
SCALE = (P + R) ** -0.5


def make_layer(projection: nn.Module | None = None, *, blocks: int = 24, block_size: int = 8, **options: Any) -> Any:
    latent = options.pop("kv_lora_rank", L)
    kv_b_proj = nn.Linear(latent, N * (P + V), bias=False) if projection is None else projection
    config = vattn.CacheConfig(block_size=block_size, cache_dtype=options.pop("cache_dtype", "auto"))
    options = {"decode_threshold": 2, "cache_config": config, "prefix": "0.attn", **options}
    layer = vattn.MLAAttention(N, SCALE, P, R, V, 16, latent, kv_b_proj, **options)
    if blocks:
        vattn.allocate_kv_cache(layer, num_blocks=blocks, dtype=torch.float32, device="cpu")
    return layer


def make_builder(layer: Any) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(
        max_num_reqs=4, max_num_tokens=64, max_seq_len=96, layers=layer, block_size=layer.cache_config.block_size
    )


def inputs(tokens: int, latent: int = L) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, N, P + R), torch.randn(tokens, latent), torch.randn(tokens, 1, R)


def formula(q: Tensor, kv_c: Tensor, k_pe: Tensor, weight: Tensor) -> Tensor:
    """Return causal attention of one whole sequence in fp64, keys and values expanded."""
    q, kv_c, k_pe = q.double(), kv_c.double(), k_pe.double()
    key, value = (kv_c @ weight.double().T).view(-1, N, P + V).split((P, V), -1)
    key = torch.cat((key, k_pe.expand(-1, N, -1)), -1)
    scores = torch.einsum("qnd,snd->nqs", q, key) * SCALE
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return torch.einsum("nqs,snv->qnv", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(1)


TABLES = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 12, 11, 10], [13, 14, 15, 16, 17]]
STEPS = (
    ([7, 0, 20], [7, 0, 20]),  # prompts
    ([9, 13, 1], [16, 13, 21]),  # a chunk, a prompt and a decode
    ([1, 2, 12], [17, 15, 33]),  # a decode, two drafts and a chunk: any order
    ([1, 1, 1], [18, 16, 34]),
)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("workspace_tokens", [None, 8])
def test_steps_of_every_mixture_equal_the_formula(
    compiled: bool, workspace_tokens: int | None, fresh_dynamo: None
) -> None:
    layer = make_layer(workspace_tokens=workspace_tokens)
    weight = layer._kv_b_proj[0].weight
    builder, sequences = make_builder(layer), [inputs(40) for _ in range(3)]
    run = vattn.compile(layer, fullgraph=True) if compiled else layer
    for query_lens, seq_lens in STEPS:
        step = builder.build(query_lens, seq_lens, TABLES)
        spans = [slice(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
        given = [torch.cat([parts[i][span] for parts, span in zip(sequences, spans, strict=True)]) for i in range(3)]
        with torch.no_grad(), vattn.forward_context(step):
            got = run(*given)
        expected = [
            formula(*(t[: span.stop] for t in parts), weight)[span]
            for parts, span in zip(sequences, spans, strict=True)
        ]
        assert relative_l2(got, torch.cat(expected)) < 2e-6
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_padding_rows_are_zero_and_write_nothing() -> None:
    layer = make_layer()
    builder = make_builder(layer)
    step = builder.build([3, 1], [3, 1], TABLES[:2], num_tokens_padded=9, num_reqs_padded=3)
    q, kv_c, k_pe = inputs(9)
    for tensor in (q, kv_c, k_pe):
        tensor[4:] = torch.nan
    with torch.no_grad():
        out = layer(q, kv_c, k_pe, metadata=step)
    assert not out[4:].any() and out[:4].isfinite().all() and layer.kv_cache.isfinite().all()


def test_profiling_call_is_zero_and_needs_no_cache() -> None:
    layer = make_layer(blocks=0)
    with torch.no_grad():
        assert not layer(*inputs(5)).any()
        assert layer(*inputs(5), output_shape=(5, N, V)).shape == (5, N, V)


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_quantised_caches(cache_dtype: str) -> None:
    quant = vattn.QuantConfig(k_scale=0.02) if cache_dtype == "fp8" else None
    layer = make_layer(cache_dtype=cache_dtype, kv_lora_rank=128, quant_config=quant)
    step = make_builder(layer).build([20, 3], [20, 3], TABLES[:2])
    q, kv_c, k_pe = inputs(23, 128)
    with torch.no_grad():
        got = layer(q, kv_c, k_pe, metadata=step)
    expected = formula(q[:20], kv_c[:20], k_pe[:20], layer._kv_b_proj[0].weight)
    assert relative_l2(got[:20], expected) < (0.2 if "nvfp4" in cache_dtype else 0.05)


def test_calculated_scales() -> None:
    """The first real tokens decide, latents and rotated keys together; later steps keep it, compiled ones too."""
    config = vattn.CacheConfig(block_size=8, cache_dtype="fp8", calculate_kv_scales=True)
    layer = make_layer(cache_config=config)
    assert layer.scales_ready.tolist() == [0] and {"k_scale", "scales_ready"} <= layer.state_dict().keys()
    step = make_builder(layer).build([5], [5], TABLES[:1], num_tokens_padded=9)
    q, kv_c, k_pe = inputs(9)
    k_pe[2] *= 9.0
    kv_c[5:], k_pe[5:] = torch.nan, 1e6
    with torch.no_grad():
        got = layer(q, kv_c, k_pe, metadata=step)
    largest = torch.maximum(kv_c[:5].abs().max(), k_pe[:5].abs().max())
    assert layer.scales_ready.tolist() == [1]
    assert layer.k_scale.tolist() == pytest.approx([float(largest) * HEADROOM / 448])
    assert relative_l2(got[:5], formula(q[:5], kv_c[:5], k_pe[:5], layer._kv_b_proj[0].weight)) < 0.05
    kept = layer.k_scale.clone()
    with torch.no_grad():
        layer(*(100 * rows for rows in inputs(2)), metadata=make_builder(layer).build([2], [7], TABLES[:1]))
    assert torch.equal(layer.k_scale, kept)
    torch.compiler.reset()
    other = make_layer(cache_config=config)
    with torch.no_grad():
        torch.compile(other, fullgraph=True, backend="aot_eager")(q, kv_c, k_pe, metadata=step)
    assert torch.equal(other.k_scale, kept)
    # One source, given or calculated; 1.0 is right for every cache.
    plain = vattn.CacheConfig(calculate_kv_scales=True)
    for wrong in ({"cache_config": config, "quant_config": vattn.QuantConfig("unit")}, {"cache_config": plain}):
        with pytest.raises(ScaleError, match="calculate_kv_scales=True"):
            make_layer(blocks=0, **wrong)
    assert make_layer(quant_config=vattn.QuantConfig("unit", "unit")).k_scale is None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that ops return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(each, self.free, storage._cdata, storage.nbytes())
        return found

    def free(self, address: int, count: int) -> None:
        self.now -= count
        self.seen.discard(address)


@pytest.mark.parametrize(
    ("tokens", "keys", "workspace"), [(512, 4096, 64), (1, 4096, 64), (64, 1024, 128), (700, 700, 256)]
)
def test_scratch_is_what_a_step_takes(tokens: int, keys: int, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least, and no more than four times as much."""
    heads, latent = 16, 128
    proj = nn.Linear(latent, heads * (32 + 32), bias=False)
    layer = vattn.MLAAttention(heads, 0.1, 32, 16, 32, None, latent, proj, workspace_tokens=workspace)
    vattn.allocate_kv_cache(layer, num_blocks=keys // 16 + 2, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(2, max(2, tokens), keys, layers=layer)
    step = builder.build([tokens], [keys], [list(range(1, -(-keys // 16) + 1))])
    backend, counted = type(mla_backends()["TORCH_MLA"]), LiveBytes()
    attend = backend.mla_attention

    def counting(*args: Any) -> None:
        with counted:
            attend(*args)

    monkeypatch.setattr(backend, "mla_attention", counting)
    with torch.no_grad():
        layer(torch.randn(tokens, heads, 48), torch.randn(tokens, latent), torch.randn(tokens, 1, 16), metadata=step)
    said = layer.scratch_bytes(tokens)
    assert counted.most <= said <= 4 * counted.most


class FP8Linear(nn.Module):
    """Holds e4m3 weights and their scales as checkpoints do."""

    def __init__(self, weight: Tensor, scale: Tensor, name: str = "weight_scale", block: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer(name, scale)
        self.weight_block_size = block


class Opaque(nn.Module):
    """A linear module that keeps its weight in a form of its own, and returns a pair."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("packed", weight.flip(0))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.packed.flip(0).T, None


def projections() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(1)
    rows = N * (P + V)
    weight = torch.randn(rows, L).to(torch.float8_e4m3fn)
    wide = weight.float()
    tensor, channel, block = torch.tensor(0.07), 0.1 * torch.rand(rows, 1), 0.1 * torch.rand(-(-rows // 16), 3)
    blocks = block.repeat_interleave(16, 0)[:rows].repeat_interleave(8, 1)[:, :L]
    one = torch.tensor([[0.3]])
    return {
        "per tensor": (FP8Linear(weight, tensor), wide * tensor),
        "per tensor, transposed": (FP8Linear(weight.t(), tensor), wide * tensor),
        "per channel": (FP8Linear(weight, channel), wide * channel),
        "blocks": (FP8Linear(weight, block, "weight_scale_inv", [16, 8]), wide * blocks),
        "blocks of 128": (FP8Linear(weight, one, "weight_scale_inv"), wide * one),
        "opaque": (Opaque(wide), wide),
    }


@pytest.mark.parametrize("name", list(projections()))
def test_every_kind_of_projection(name: str) -> None:
    module, weight = projections()[name]
    layer = make_layer(module)
    expected = weight.view(N, P + V, L)
    assert torch.allclose(layer.W_UK_T, expected[:, :P], rtol=1e-6)
    assert torch.allclose(layer.W_UV, expected[:, P:].transpose(1, 2), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sequential", "two layers", "transposed weight", "transposed e4m3"])
def test_projections_of_every_make_attend_as_a_plain_one(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(L, N * (P + V), bias=False, dtype=dtype)
    other: nn.Module = nn.Sequential(plain)
    if kind == "two layers":
        turn = nn.Linear(L, L, bias=False, dtype=dtype)
        turn.weight.data.copy_(torch.eye(L).flip(0))
        other = nn.Sequential(turn, nn.Linear(L, N * (P + V), bias=False, dtype=dtype))
        other[1].weight.data.copy_(plain.weight.data.flip(1))
    if kind == "transposed weight":
        other = nn.Linear(L, N * (P + V), bias=False, dtype=dtype)
        other.weight = nn.Parameter(plain.weight.data.t().contiguous().t())
    if kind == "transposed e4m3":
        codes = plain.weight.data.to(torch.float8_e4m3fn)
        plain.weight.data.copy_(codes)
        other = FP8Linear(codes.t().contiguous(), torch.tensor(1.0))
    given, results = [t.to(dtype) for t in inputs(5)], []
    for module in (plain, other):
        layer = make_layer(module, blocks=0)
        vattn.allocate_kv_cache(layer, num_blocks=4, dtype=dtype, device="cpu")
        with torch.no_grad():
            results.append(layer(*given, metadata=make_builder(layer).build([5], [5], [[1]])))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["relu", "gelu", "bias", "norm", "dropout"])
def test_modules_that_are_not_linear_are_refused(kind: str, dtype: torch.dtype) -> None:
    plain = nn.Linear(L, N * (P + V), bias=False)
    modules = {
        "relu": nn.Sequential(plain, nn.ReLU()),
        "gelu": nn.Sequential(plain, nn.GELU()),
        "bias": nn.Sequential(nn.Linear(L, N * (P + V))),
        "norm": nn.Sequential(nn.RMSNorm(L), plain),
        "dropout": nn.Sequential(plain, nn.Dropout(0.5)),
    }
    layer = make_layer(modules[kind].to(dtype), blocks=0)
    with pytest.raises(ConfigError, match="is not linear"):
        vattn.allocate_kv_cache(layer, num_blocks=4, dtype=dtype, device="cpu")
    assert layer.kv_cache is None and layer.kv_b_weight is None


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this")


def unreadable() -> dict[str, tuple[type[VattnError], nn.Module]]:
    weight = torch.randn(N * (P + V), L).to(torch.float8_e4m3fn)
    blocks = torch.rand(N * (P + V) // 16, L // 8)
    found: dict[str, tuple[type[VattnError], nn.Module]] = {
        "no forward": (ConfigError, FP8Linear(weight.float().to(torch.float8_e5m2), blocks)),
        "a forward that fails": (ConfigError, Fails()),
        "stored exponents as bytes": (
            ScaleError, FP8Linear(weight, blocks.to(torch.uint8), "weight_scale_inv", [16, 8])
        ),
        "scales of other blocks": (ShapeError, FP8Linear(weight, blocks, "weight_scale_inv", [15, 8])),
    }  # fmt: skip
    for block in ([16.0, 8.0], "ab", [16], [0, 0], [-16, -8], 3, torch.tensor([16, 8])):
        found[f"blocks of {block}"] = (ConfigError, FP8Linear(weight, blocks, "weight_scale_inv", block))
    return found


@pytest.mark.parametrize("name", list(unreadable()))
def test_projections_that_cannot_be_read_are_refused_and_change_nothing(name: str) -> None:
    error, module = unreadable()[name]
    layer = make_layer(module, blocks=0)
    with pytest.raises(error):
        vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    assert layer.kv_cache is None and layer.config is None and layer.kv_b_weight is None


def changed_weights() -> dict[str, tuple[nn.Module, Callable[[Any], object]]]:
    found = projections()
    linear = nn.Sequential(nn.Linear(L, L, bias=False), nn.Linear(L, N * (P + V), bias=False))
    plain = nn.Linear(L, N * (P + V), bias=False)
    return {
        "a part in place": (linear, lambda module: module[0].weight.mul_(2.0)),
        "another parameter": (linear, lambda module: setattr(module[1], "weight", nn.Parameter(-module[1].weight))),
        "a scale": (found["blocks"][0], lambda module: module.weight_scale_inv.mul_(2.0)),
        "a buffer": (found["opaque"][0], lambda module: module.packed.neg_()),
        "data of another address": (plain, lambda module: setattr(module.weight, "data", -module.weight.data)),
        "another dtype": (nn.Linear(L, N * (P + V), bias=False), lambda module: module.half()),
    }


@pytest.mark.parametrize("name", list(changed_weights()))
def test_eager_calls_notice_changes_in_any_part(name: str) -> None:
    module, change = changed_weights()[name]
    layer = make_layer(module)
    step, given = make_builder(layer).build([5], [5], TABLES[:1]), inputs(5)
    with torch.no_grad():
        before, address = layer(*given, metadata=step), layer.W_UK_T.data_ptr()
        change(module)
        with pytest.raises(ConfigError, match=r"have changed since.*process_weights_after_loading"):
            layer(*given, metadata=step)
        layer.process_weights_after_loading()
        assert not torch.equal(layer(*given, metadata=step), before) and layer.W_UK_T.data_ptr() == address


def test_changes_that_torch_does_not_count_are_read_when_asked_for() -> None:
    layer = make_layer()
    step, given, weight = make_builder(layer).build([5], [5], TABLES[:1]), inputs(5), layer._kv_b_proj[0].weight
    with torch.no_grad():
        for change in (lambda: weight.data.mul_(2.0), lambda: weight.detach().numpy().__imul__(2.0)):
            before = layer(*given, metadata=step)
            change()
            assert torch.equal(layer(*given, metadata=step), before)
            layer.process_weights_after_loading()
            assert relative_l2(layer(*given, metadata=step), formula(*given, weight)) < 2e-6


@pytest.mark.parametrize(
    "dtype", [3, "bfloat16", torch.int32, torch.bool, torch.float64, torch.float8_e4m3fn, torch.ones(2)], ids=repr
)
@pytest.mark.parametrize("blocks", [0, 4])
def test_dtypes_that_no_model_has_are_refused(dtype: Any, blocks: int) -> None:
    layer = make_layer(blocks=blocks)
    before = layer.kv_b_weight
    with pytest.raises(ConfigError, match=r"act_dtype=.*Allowed: .*torch\.float32.*Try: "):
        layer.process_weights_after_loading(dtype)
    assert layer.kv_b_weight is before
    layer.process_weights_after_loading(torch.float32)


def unusable() -> dict[str, tuple[type[VattnError], str, Callable[[Any], object]]]:
    """Return what makes an e4m3 projection with a scale per row unusable."""
    return {
        "a scale of 0": (ScaleError, "1 of 66 scales.* 0.0", lambda m: m.weight_scale[3].fill_(0.0)),
        "a scale below 0": (ScaleError, "1 of 66 scales.* -1.0", lambda m: m.weight_scale[3].fill_(-1.0)),
        "a scale of NaN": (ScaleError, "1 of 66 scales.* nan", lambda m: m.weight_scale[3].fill_(float("nan"))),
        "an infinite scale": (ScaleError, "1 of 66 scales.* inf", lambda m: m.weight_scale[3].fill_(float("inf"))),
        "codes of NaN": (
            ConfigError, "1 values.* nan in row 3, column 5", lambda m: m.weight.view(torch.uint8)[3, 5].fill_(127)
        ),
        "scales under two names": (
            ConfigError, "weight_scale and weight_scale_inv", lambda m: setattr(m, "weight_scale_inv", m.weight_scale)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(unusable()))
def test_values_that_cannot_be_weights_are_refused_and_change_nothing(name: str) -> None:
    error, match, spoil = unusable()[name]
    module = projections()["per channel"][0]
    layer = make_layer(module)
    with torch.no_grad():
        spoil(module)
    with unchanged(layer), pytest.raises(error, match=match):
        layer.process_weights_after_loading()
    with unchanged(layer), pytest.raises(error, match=match):
        vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)


def unloaded() -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return projections before they are loaded, and what is loaded into them."""
    fp8, plain = projections()["per channel"][0], nn.Linear(L, N * (P + V), bias=False)
    empty = FP8Linear(torch.zeros_like(fp8.weight), torch.zeros_like(fp8.weight_scale))
    damaged = nn.Linear(L, N * (P + V), bias=False)
    damaged.weight.data.fill_(float("nan"))
    parts = nn.Sequential(nn.Linear(L, N * (P + V), bias=False))
    return {
        "on meta": (nn.Linear(L, N * (P + V), bias=False, device="meta"), plain),
        "parts on meta": (nn.Sequential(nn.Linear(L, N * (P + V), bias=False, device="meta")), parts),
        "NaN": (damaged, plain),
        "scales of 0": (empty, fp8),
    }


@pytest.mark.parametrize("name", list(unloaded()))
def test_weights_may_be_loaded_after_a_cache_was_bound(name: str) -> None:
    module, source = unloaded()[name]
    layer = make_layer(module)
    step, given = make_builder(layer).build([5], [5], TABLES[:1]), inputs(5)
    with torch.no_grad():
        assert layer.kv_b_weight is None and layer.W_UK_T is None
        for call in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
            with pytest.raises(Exception, match=r"had no values.*load them, then call .*process_weights_after_loading"):
                call(*given, metadata=step)
        with pytest.raises((ConfigError, ScaleError), match="load the weights, then call"):
            layer.process_weights_after_loading()
        module.to_empty(device="cpu").load_state_dict(source.state_dict())
        layer.process_weights_after_loading()
        assert torch.equal(layer(*given, metadata=step), make_layer(source)(*given, metadata=step))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e6])
@pytest.mark.parametrize("opaque", [False, True])
def test_weights_that_are_not_finite_are_refused(value: float, opaque: bool) -> None:
    weight = torch.rand(N * (P + V), L)
    weight[4, 2] = value
    plain = nn.Linear(L, N * (P + V), bias=False)
    plain.weight.data.copy_(weight)
    layer = make_layer(Opaque(weight) if opaque else plain, blocks=0)
    with pytest.raises(ConfigError, match="not finite in float16"):
        layer.process_weights_after_loading(torch.float16)
    assert layer.kv_b_weight is None
    if value == 1e6:
        layer.process_weights_after_loading(torch.bfloat16)


@pytest.mark.parametrize("output_format", ["fp8_static", "fp8_per_token", "nvfp4"])
def test_quantised_outputs(output_format: str) -> None:
    static = OUTPUT_FORMATS[output_format].static_scale
    quant = vattn.QuantConfig(output_format=output_format, output_scale=0.02 if static else None)
    layer = vattn.MLAAttention(2, SCALE, P, R, 16, None, L, nn.Linear(L, 2 * (P + 16), bias=False), quant_config=quant)
    vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    step = make_builder(layer).build([5], [5], [[1]])
    with torch.no_grad():
        made = layer(torch.randn(5, 2, P + R), torch.randn(5, L), torch.randn(5, R), metadata=step)
    out, scales = made if isinstance(made, tuple) else (made, None)
    values = dequantise_output(out.view(5, 2, -1), output_format, scales, layer.output_scale)
    assert values.isfinite().all() and values.any()


class Indexer:
    def __init__(self, tokens: int, width: int) -> None:
        self.topk_indices = torch.full((tokens, width), -1, dtype=torch.int32)


def test_sparse_rows_see_what_the_indexer_lists() -> None:
    indexer = Indexer(16, 5)
    layer = make_layer(use_sparse=True, indexer=indexer)
    step = make_builder(layer).build([6], [6], TABLES[:1])
    given = inputs(6)
    indexer.topk_indices[:6, :5] = torch.tensor([0, 1, 2, 3, 4])
    with torch.no_grad():
        got = layer(*given, metadata=step)
    expected = formula(*given, layer._kv_b_proj[0].weight)
    assert relative_l2(got[:5], expected[:5]) < 2e-6 and relative_l2(got[5], expected[5]) > 1e-3


def bad_indexers() -> dict[str, tuple[type[VattnError], Any]]:
    found: dict[str, tuple[type[VattnError], Any]] = {"an object": (ConfigError, object())}
    for name, error, buffer in (
        ("None", ConfigError, None),
        ("a list", ConfigError, [[0, 1]]),
        ("one row", ShapeError, torch.zeros(4, dtype=torch.int32)),
        ("no columns", ShapeError, torch.zeros(4, 0, dtype=torch.int32)),
        ("int64", DtypeError, torch.zeros(4, 2, dtype=torch.int64)),
    ):
        indexer = Indexer(1, 1)
        indexer.topk_indices = buffer  # type: ignore[assignment]
        found[name] = error, indexer
    return found


@pytest.mark.parametrize("name", list(bad_indexers()))
def test_indexers_without_a_list_to_read_are_refused(name: str) -> None:
    error, bad = bad_indexers()[name]
    with pytest.raises(error, match=r"topk_indices.*Allowed: .*int32.*Try: "):
        make_layer(blocks=0, use_sparse=True, indexer=bad)
    good = Indexer(4, 2)
    layer = make_layer(blocks=0, use_sparse=True, indexer=good)
    good.topk_indices = getattr(bad, "topk_indices", None)  # type: ignore[assignment]
    with pytest.raises(error, match="topk_indices"):
        vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    assert layer.kv_cache is None and layer.config is None


def bad_layers() -> dict[str, tuple[type[VattnError], dict[str, Any]]]:
    return {
        "projection of another geometry": (ShapeError, {"projection": nn.Linear(L, 7, bias=False)}),
        "projection with a bias": (ConfigError, {"projection": nn.Linear(L, N * (P + V))}),
        "no projection": (ConfigError, {"projection": 3}),
        "an FP8 cache without a scale": (ScaleError, {"cache_dtype": "fp8"}),
        "a scale without an FP8 cache": (ScaleError, {"quant_config": vattn.QuantConfig(k_scale=1.0)}),
        "a value scale": (
            ScaleError,
            {"cache_dtype": "fp8", "quant_config": vattn.QuantConfig(k_scale=1.0, v_scale=0.5)},
        ),
        "a format that latents lack": (ConfigError, {"cache_dtype": "fp8_e5m2"}),
        "packed rows of another rank": (ConfigError, {"cache_dtype": "fp8_ds_mla"}),
        "an indexer alone": (ConfigError, {"indexer": Indexer(1, 1)}),
        "sparse without an indexer": (ConfigError, {"use_sparse": True}),
        "a workspace below one block": (ConfigError, {"workspace_tokens": 7}),
        "an unknown backend": (UnknownOptionError, {"attn_backend": "TORCH_SDPA"}),
        "a backend without a name": (UnknownOptionError, {"attn_backend": ""}),
        "backends": (UnknownOptionError, {"attn_backend": ["TORCH_MLA"]}),
        "a prefix that is no text": (ConfigError, {"prefix": ["a"]}),
        "a block size that no backend has": (ConfigError, {"block_size": 12}),
    }


@pytest.mark.parametrize("place", range(1, 7))
@pytest.mark.parametrize("value", [None, "4", 4.5, True, 0, 1e40], ids=repr)
def test_sizes_and_scales_that_are_none_are_refused(place: int, value: object) -> None:
    # Heads, scale, P, R, V, query rank, L.
    sizes: list[Any] = [N, SCALE, P, R, V, None, L]
    if place == 5 and value is None:
        return
    sizes[0 if place == 1 and value != 1e40 else place] = value
    with pytest.raises(ConfigError):
        vattn.MLAAttention(*sizes, nn.Linear(L, N * (P + V), bias=False))


@pytest.mark.parametrize("name", list(bad_layers()))
def test_wrong_layers_are_refused(name: str) -> None:
    error, options = bad_layers()[name]
    with pytest.raises(error):
        make_layer(**options)


def test_messages_say_what_to_do() -> None:
    with pytest.raises(UnknownOptionError, match=r"attn_backend 'nope' of latent attention.*Allowed: auto, .*MLA"):
        make_layer(blocks=0, attn_backend="nope")
    with pytest.raises(ScaleError, match=r"Try: give one value\.$"):
        make_layer(blocks=0, cache_dtype="fp8", quant_config=vattn.QuantConfig(k_scale=[0.02] * 4))
    layer = make_layer()
    step, given = make_builder(layer).build([5], [5], TABLES[:1]), inputs(5)
    with pytest.raises(DtypeError, match=r"q is int32.*Try: pass queries of torch\.float32; a cache can be bound for "):
        layer(given[0].int(), *given[1:], metadata=step)
    with pytest.raises(ConfigError, match=r"dtype=torch\.bfloat16\. Allowed: str\. Try: pass dtype='bfloat16'"):
        vattn.MLAConfig(4, P, R, V, L, SCALE, torch.bfloat16, "float32")


def test_formats_of_latents_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="is not a KV cache format"):
        vattn.Attention(2, 16, 0.25, cache_config=vattn.CacheConfig(cache_dtype="fp8_ds_mla"))


def test_windows_and_layouts_are_refused() -> None:
    proj = nn.Linear(L, N * (P + V), bias=False)
    for option in (
        {"cache_config": vattn.CacheConfig(sliding_window=8)},
        {"cache_config": vattn.CacheConfig(kv_cache_layout="HND")},
    ):
        with pytest.raises(UnsupportedRequestError):
            vattn.MLAAttention(N, SCALE, P, R, V, None, L, proj, **option)


def test_quantised_queries() -> None:
    proj, cache = nn.Linear(L, N * (P + V), bias=False), vattn.CacheConfig(cache_dtype="fp8")
    asked: dict[str, Any] = {"cache_config": cache, "quant_config": vattn.QuantConfig(k_scale=0.02)}
    plain = vattn.MLAAttention(N, SCALE, P, R, V, None, L, proj, **asked)
    asked["quant_config"] = vattn.QuantConfig(k_scale=0.02, query_format="fp8_e4m3", q_scale=0.03)
    layer = vattn.MLAAttention(N, SCALE, P, R, V, None, L, proj, **asked)
    given, later, results = inputs(9), inputs(2), []
    for made in (plain, layer):
        vattn.allocate_kv_cache(made, num_blocks=8, dtype=torch.float32)
        builder = make_builder(made)
        with torch.no_grad():
            made(*given, metadata=builder.build([9], [9], TABLES[:1]))
            results.append(made(*later, metadata=builder.build([2], [11], TABLES[:1])))
    assert "query_format=fp8_e4m3" in layer._op_config and "q_scale" in layer.state_dict()
    assert 0.002 < relative_l2(results[1], results[0]) < 0.1
    for wrong in (
        {"cache_config": vattn.CacheConfig(), "quant_config": vattn.QuantConfig(query_format="fp8_e4m3", q_scale=1.0)},
        {"cache_config": cache, "quant_config": vattn.QuantConfig(k_scale=1.0, query_format="fp8_e4m3")},
    ):
        with pytest.raises((ConfigError, ScaleError)):
            vattn.MLAAttention(N, SCALE, P, R, V, None, L, proj, **wrong)


def test_scratch_is_told_and_claimed_by_profiling_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    proj = nn.Linear(L, N * (P + V), bias=False)
    layers = [vattn.MLAAttention(N, SCALE, P, R, V, None, L, proj, workspace_tokens=room) for room in (None, 64, 128)]
    per_token = L + R + N * (P + R + V)
    told = [layer.scratch_bytes(10, torch.float32) for layer in layers]
    assert told[1] < told[2] < told[0] and told[0] >= 4 * 4096 * per_token
    claimed = []
    empty = Tensor.new_empty

    def noted(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = empty(self, *size, **options)
        claimed.append(made.nbytes)
        return made

    monkeypatch.setattr(Tensor, "new_empty", noted)
    assert not layers[1](*inputs(10)).any()
    assert told[1] in claimed
    with pytest.raises(ConfigError, match="without a cache"):
        layers[0].scratch_bytes(10)
    for tokens in (-1, 2.5, "x"):
        with pytest.raises(ConfigError, match="num_tokens="):
            layers[0].scratch_bytes(tokens, torch.float32)
    triton = mla_backends()["TRITON_MLA"]
    config = layers[0]._request_config(torch.bfloat16)
    small, large = (triton.scratch_bytes(config, 10, room) for room in (64, None))
    rows = 2 * 10 * N * (2 * L + R) + 4 * 10 * N * (V + 2)
    assert small == rows + 2 * 64 * per_token and large - rows <= 256 << 20
    assert "workspace=64 tokens" in repr(layers[1])
    assert f"scale={layers[1].scale:.4g}," in repr(layers[1])


def test_wrong_steps_are_refused_and_change_nothing() -> None:
    layer = make_layer()
    builder = make_builder(layer)
    step, given = builder.build([5], [5], TABLES[:1]), inputs(5)
    cases: list[tuple[type[VattnError], tuple[Any, ...]]] = [
        (ShapeError, (given[0][:4], *given[1:])),
        (ShapeError, (given[0], given[1][:4], given[2])),
        (ShapeError, (given[0], given[1], given[2][:4])),
        (ShapeError, (given[0][:, :2], *given[1:])),
        (DtypeError, (given[0].half(), *given[1:])),
        (DtypeError, (given[0], given[1].half(), given[2])),
        (GradientError, (given[0].clone().requires_grad_(), *given[1:])),
    ]
    with unchanged(layer):
        for error, wrong in cases:
            with pytest.raises(error):
                layer(*wrong, metadata=step)
        with pytest.raises(UnsupportedRequestError, match="causal"):
            layer(*inputs(5), metadata=builder.build([5], [5], TABLES[:1], causal=False))
        with pytest.raises(MetadataError):
            layer(*inputs(5), metadata=3)
    with pytest.raises(CacheNotBoundError):
        make_layer(blocks=0)(*inputs(5), metadata=builder.build([5], [5], TABLES[:1]))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "value", [None, 3, [[1.0]], torch.tensor(1.0), torch.ones(5)], ids=["None", "3", "list", "0", "1"]
)
def test_what_is_no_tensor_of_rows_is_refused(place: int, value: Any) -> None:
    layer = make_layer()
    given: list[Any] = list(inputs(5))
    given[place] = value
    for step in (make_builder(layer).build([5], [5], TABLES[:1]), None):
        with torch.no_grad(), pytest.raises(ShapeError):
            layer(*given, metadata=step)


@pytest.mark.parametrize(
    "shape", [(5.0, N * V), ("5", N * V), (-5, -N * V), (-1, N * V), (torch.tensor(5), N * V)], ids=str
)
def test_output_shapes_that_are_none_are_refused(shape: Any) -> None:
    layer = make_layer()
    with torch.no_grad(), pytest.raises(ShapeError, match="output_shape"):
        layer(*inputs(5), shape, metadata=make_builder(layer).build([5], [5], TABLES[:1]))
    assert not layer.kv_cache.any()


def test_layers_of_a_model_have_equal_ops_and_save_nothing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = nn.ModuleList(nn.Linear(L, N * (P + V), bias=False) for _ in range(2))
            self.layers = nn.ModuleList(
                vattn.MLAAttention(N, SCALE, P, R, V, None, L, proj, prefix=f"{i}.attn")
                for i, proj in enumerate(self.projections)
            )

    model = Two()
    vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32)
    assert not [name for name in model.state_dict() if "attn" in name or "kv_b_weight" in name]
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=64, layers=model)
    step = builder.build([5], [5], [[1]])
    assert model.layers[0]._op_config == model.layers[1]._op_config
    with torch.no_grad():
        for layer in model.layers:
            given = inputs(5)
            assert relative_l2(layer(*given, metadata=step), formula(*given, layer._kv_b_proj[0].weight)) < 2e-6
