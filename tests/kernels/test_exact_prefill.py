"""`CacheConfig.exact_prefill`: rows see their own step as given, and what lies before it as stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn
from tests.support import capture, relative_l2
from vattn.config.attention import AttentionConfig
from vattn.errors import ConfigError, MetadataError, UnsupportedRequestError
from vattn.quantization.codecs import decode_kv, encode_kv
from vattn.quantization.formats import KV_FORMATS
from vattn.quantization.packed import decode_rows, encode_rows

HEADS, KV_HEADS, SIZE, BLOCK, TOKENS = 4, 2, 32, 8, 37
QUANTISED = [name for name, fmt in KV_FORMATS.items() if fmt.quantised or fmt.packed]
CUTS: dict[str, list[int]] = {
    "whole": [TOKENS],
    "halves": [20, 17],
    "uneven": [1, 9, 8, 16, 3],
    "then-decodes": [TOKENS - 3, 1, 1, 1],
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window-sinks": {"per_layer_sliding_window": 11, "sinks": [0.5, -1.0, 2.0, 0.0]},
    "cap-alibi": {"logits_soft_cap": 3.0, "alibi_slopes": [0.25, 0.5, 0.03, 0.1]},
}


def make_layer(
    fmt: str, backend: str = "TORCH_SDPA", *, exact: bool = True, device: str = "cpu", **changes: Any
) -> vattn.Attention:
    """Return a layer in fp32 with a bound cache; scales are no powers of two."""
    cache = {"block_size": BLOCK, "cache_dtype": fmt, "exact_prefill": exact, **changes.pop("cache", {})}
    scales = {"k_scale": 0.013, "v_scale": 0.009} if KV_FORMATS.get(fmt) and KV_FORMATS[fmt].quantised else {}
    settings: dict[str, Any] = {
        "num_heads": HEADS, "head_size": SIZE, "scale": SIZE**-0.5, "num_kv_heads": KV_HEADS, "attn_backend": backend,
        "cache_config": vattn.CacheConfig(**cache),
        "quant_config": vattn.QuantConfig(**{**scales, **changes.pop("quant", {})}),
        **changes,
    }  # fmt: skip
    layer = vattn.Attention(**settings)
    vattn.allocate_kv_cache(layer, num_blocks=16, dtype=torch.float32, device=device)
    return layer


def make_inputs(tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(tokens, heads, SIZE, generator=drawn) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return query * 2, key, value


def run(layer: vattn.Attention, inputs: Sequence[Tensor], cuts: Sequence[int]) -> Tensor:
    """Return `[T, H, V]` of one request whose tokens come in steps of these sizes."""
    device = layer.kv_cache.device
    builder = vattn.AttentionMetadataBuilder(2, 64, 64, BLOCK, device, layers=layer)
    outputs, end = [], 0
    for size in cuts:
        part = slice(end, end + size)
        end += size
        step = builder.build([size], [end], [[3, 7, 1, 12, 5]])
        with torch.no_grad():
            outputs.append(layer(*(rows[part].to(device) for rows in inputs), metadata=step).cpu())
    return torch.cat(outputs).view(-1, HEADS, SIZE)


def stored(rows: Tensor, layer: vattn.Attention, of_values: bool) -> Tensor:
    """Return what the format makes of rows."""
    fmt, scale = layer.config.kv_cache_dtype, layer.v_scale if of_values else layer.k_scale
    scale = None if scale is None else scale.cpu()
    if not KV_FORMATS[fmt].packed:
        return decode_kv(encode_kv(rows, fmt, scale), fmt, scale)
    codes, scales = encode_rows(rows, fmt, of_values, scale)
    return decode_rows(codes, scales, fmt, of_values, SIZE, scale)


def mixed(layer: vattn.Attention, inputs: Sequence[Tensor], cuts: Sequence[int]) -> Tensor:
    """Return fp64 `[T, H, V]`, row by row: each sees its step's keys as given and those before the step as stored."""
    query, key, value = (x.double() for x in inputs)
    old_key, old_value = (stored(x, layer, of_values).double() for of_values, x in enumerate(inputs[1:]))
    config = layer.config
    out = torch.zeros(len(query), HEADS, SIZE, dtype=torch.float64)
    for row, first in enumerate(_first_of_step(cuts)):
        keys, values = (
            torch.cat([old[:first], new[first : row + 1]]) for old, new in ((old_key, key), (old_value, value))
        )
        low = 0 if config.sliding_window is None else max(0, row + 1 - config.sliding_window)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[low:, kv_head] @ query[row, head] * config.scale
            if config.logits_soft_cap is not None:
                scores = config.logits_soft_cap * torch.tanh(scores / config.logits_soft_cap)
            if layer.alibi_slopes is not None:
                scores = scores + layer.alibi_slopes[head].double().cpu() * (torch.arange(low, row + 1) - row)
            if layer.sinks is not None:
                scores = torch.cat([scores, layer.sinks[head, None].double().cpu()])
            weights = scores.softmax(0)[: row + 1 - low]
            out[row, head] = weights @ values[low:, kv_head]
    return out


def _first_of_step(cuts: Sequence[int]) -> Iterator[int]:
    start = 0
    for size in cuts:
        yield from [start] * size
        start += size


@pytest.mark.parametrize("fmt", QUANTISED)
def test_rows_see_their_step_as_given(fmt: str, device: str) -> None:
    """Every cut, against a loop over rows; fp32 sums in another order are off by 1e-6, on a GPU by more."""
    backend, tolerance = ("TORCH_SDPA", 2e-6) if device == "cpu" else ("TRITON_ATTN", 1e-5)
    masks = list(MASKS.values())
    for index, cuts in enumerate(CUTS.values(), QUANTISED.index(fmt)):
        layer, inputs = make_layer(fmt, backend, device=device, **masks[index % len(masks)]), make_inputs()
        assert relative_l2(run(layer, inputs, cuts), mixed(layer, inputs, cuts)) < tolerance


KERNELS = [("fp8_e4m3", "window-sinks"), ("int4_per_token_head", "causal"), ("turboquant_4bit_nc", "cap-alibi")]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("fmt", "mask"), KERNELS)
def test_kernels(fmt: str, mask: str) -> None:
    """The same through the Triton kernels (every format meets the mask in the conformance suite)."""
    layer, inputs, cuts = make_layer(fmt, "TRITON_ATTN", **MASKS[mask]), make_inputs(24, seed=1), [5, 10, 1, 8]
    # Sums of rotated rows in another order.
    assert relative_l2(run(layer, inputs, cuts), mixed(layer, inputs, cuts)) < 1e-5


def test_what_chunking_changes() -> None:
    """By default no cut matters. With the option a whole prompt is exact, and each cut brings its part of the error."""
    inputs = make_inputs(seed=2)
    plain = run(make_layer("auto", exact=False), inputs, [TOKENS])
    cuts = ([TOKENS], [20, 17], [8, 8, 8, 8, 5], [1] * TOKENS)
    for fmt in ("int4_per_token_head", "turboquant_3bit_nc", "fp8_e4m3"):
        default = [relative_l2(run(make_layer(fmt, exact=False), inputs, cut), plain) for cut in cuts]
        assert max(default) - min(default) < 1e-5 * max(default)
        whole, *parts = (relative_l2(run(make_layer(fmt), inputs, cut), plain) for cut in cuts)
        assert whole < 1e-6
        # Fewer keys are rounded the larger the steps; single tokens see but themselves as given.
        assert 0.2 * default[0] < parts[0] < parts[1] < parts[2] < default[0]


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
def test_batches_padding_and_trees(backend: str) -> None:
    """Requests of every kind side by side equal themselves alone; padding rows are zero and never read."""
    query, key, value = make_inputs(26, seed=3)
    layer = make_layer("int8_per_token_head", backend)
    builder = vattn.AttentionMetadataBuilder(6, 32, 64, BLOCK, layers=layer, max_trees=1, max_tree_size=3)
    tables = [[3], [7, 1], [12], [5]]
    before = builder.build([8, 7], [8, 7], [tables[0], tables[1]])
    rows = [x[:15] for x in (query, key, value)]
    with torch.no_grad():
        layer(*rows, metadata=before)
        lens = ([0, 1, 5, 0], [8, 8, 5, 0])
        step = builder.build(*lens, tables, num_reqs_padded=6, num_tokens_padded=9)
        parts = [torch.full((9, *x.shape[1:]), torch.nan) for x in (query, key, value)]
        for part, x in zip(parts, (query, key, value), strict=True):
            part[:6] = x[15:21]
        out = layer(*parts, metadata=step).view(9, HEADS, SIZE)
        assert out.isfinite().all() and not out[6:].any()
        one = mixed(layer, [torch.cat([x[8:15], x[15:16]]) for x in (query, key, value)], [7, 1])
        assert relative_l2(out[:1], one[7:]) < 1e-5
        fresh = mixed(layer, [x[16:21] for x in (query, key, value)], [5])
        assert relative_l2(out[1:6], fresh) < 1e-5
        # A tree: the third draft does not see the second, its brother.
        bias = torch.tensor([[[0, -torch.inf, -torch.inf], [0, 0, -torch.inf], [0, -torch.inf, 0]]])
        tree = builder.build([3], [11], [[3, 9]], tree_bias=bias, tree_id=[0])
        drafts = [x[21:24] for x in (query, key, value)]
        out = layer(*drafts, metadata=tree).view(3, HEADS, SIZE)
        seen = [torch.cat([x[:8], x[21:22], x[23:24]]) for x in (query, key, value)]
        want = mixed(layer, seen, [8, 2])
        assert relative_l2(out[::2], want[8:]) < 1e-5


def test_nothing_changes_for_plain_caches() -> None:
    """Where keys are stored as given, one op does it, and the config is that of a layer without the option."""
    layers = [make_layer("auto", exact=exact, quant={"output_format": "fp8_per_token"}) for exact in (False, True)]
    assert layers[0].config == layers[1].config
    skipping = make_layer("int4_per_token_head", prefix="0", cache={"kv_cache_dtype_skip_layers": ("0",)})
    assert not skipping.config.context_only
    packed = make_layer("int4_per_token_head").config
    assert packed.context_only and AttentionConfig.parse(packed.encode()) == packed


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "output": ({"quant": {"output_format": "fp8_per_token"}}, "merged in the model dtype"),
    "invariant": ({"batch_invariant": True}, "how a prompt is cut"),
    "chunks": ({"per_layer_sliding_window": 8, "chunk_lookback": 1}, "start of the sequence"),
    "ranges": ({"mm_prefix": "full"}, "start of the sequence"),
    "sharing": ({"kv_sharing_target_layer_name": "layers.0"}, "a cache of their own"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    changes, text = WRONG[name]
    with pytest.raises(ConfigError, match=text):
        make_layer("int8_per_token_head", **changes)


def test_refused_elsewhere() -> None:
    """Other layers, backends without the mask, and steps with ranges."""
    cache = vattn.CacheConfig(cache_dtype="int8_per_token_head", exact_prefill=True)
    for kind in (vattn.CrossAttention, vattn.EncoderOnlyAttention, vattn.DifferentialAttention):
        extra: dict[str, Any] = {}
        if kind is vattn.DifferentialAttention:
            extra = {f"lambda_{name}": torch.ones(16) for name in ("q1", "k1", "q2", "k2")} | {"lambda_init": 0.5}
        with pytest.raises(ConfigError, match="exact_prefill"):
            kind(num_heads=2, head_size=16, scale=1.0, cache_config=cache, **extra)
    with pytest.raises(UnsupportedRequestError, match="context_only is not implemented"):
        make_layer("fp8_e4m3", "FLASHINFER")
    layer = make_layer("int8_per_token_head")
    builder = vattn.AttentionMetadataBuilder(2, 8, 64, BLOCK, layers=layer, max_mm_ranges=1)
    step = builder.build([4], [4], [[1]], mm_ranges=[[(0, 2)]])
    with pytest.raises(UnsupportedRequestError, match="multimodal ranges"), torch.no_grad():
        layer(*make_inputs(4), metadata=step)
    with pytest.raises((ConfigError, MetadataError), match="context_parallel"):
        AttentionConfig(2, 2, 16, 16, 1.0, "float32", "int8_per_token_head", context_only=True, context_parallel=True)


def test_one_graph() -> None:
    """Compiled whole: one graph for all lengths, of an update, the two parts and their merge."""
    layer, inputs = make_layer("turboquant_4bit_nc"), make_inputs(seed=4)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    eager = run(layer, inputs, [20, 9, 8])
    compiled = torch.compile(layer, fullgraph=True, backend=keep, dynamic=True)
    assert torch.equal(run(compiled, inputs, [20, 9, 8]), eager)
    assert len(graphs) == 1
    ops = [str(node.target) for node in graphs[0].graph.nodes if "vattn" in str(node.target)]
    assert ops == ["vattn.kv_cache_update", "vattn.attention", "vattn.varlen_attention", "vattn.merge_attn_states"]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int4_per_token_head"])
def test_a_graph_replays_other_lengths(fmt: str) -> None:
    """One graph of two requests with four rows each; contexts change from replay to replay."""
    layer, inputs = make_layer(fmt, "TRITON_ATTN", device="cuda"), [x.cuda() for x in make_inputs(8)]
    builder = vattn.AttentionMetadataBuilder(2, 8, 64, BLOCK, "cuda", layers=layer)
    layer.kv_cache.view(torch.uint8).copy_(torch.randint(0, 60, layer.kv_cache.view(torch.uint8).shape))
    tables = [[3, 7, 1], [12, 5, 2]]
    step = builder.build([4, 4], [20, 9], tables)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(*inputs, metadata=step)
        torch.cuda.current_stream().wait_stream(stream)
        graph, out = capture(lambda: layer(*inputs, metadata=step))
        for lens in ([20, 9], [4, 17], [11, 4]):
            step = builder.build([4, 4], lens, tables)
            graph.replay()
            got = out.clone()
            assert relative_l2(got, layer(*inputs, metadata=step)) < 1e-6
