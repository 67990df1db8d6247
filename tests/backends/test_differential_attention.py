"""Differential attention equals the paper's formula, whatever is in the cache and however the steps are cut."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vattn
from tests.support import with_cache
from vattn.backends import selector
from vattn.backends.differential_flash_attn import DifferentialFlashAttentionBackend, underlying
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.errors import CacheError, ConfigError, GradientError, ShapeError, UnsupportedRequestError
from vattn.layers.differential_attention import half_of
from vattn.quantization.codecs import quantise_output

HEADS, KV_HEADS, WIDTH, INIT = 8, 4, 16, 0.35
BLOCK = 8
NAMES = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Relative L2 error of a whole output. Each half is rounded to the model dtype (2^-9 and 2^-12), and their difference
is as small as a tenth of them where lambda is 0.9 and a row sees one key alone."""


def lambdas(seed: int = 0, width: int = WIDTH) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(width, generator=rng) * 0.3 for name in NAMES}


def make_layer(**changes) -> vattn.DifferentialAttention:
    values = {
        "num_heads": HEADS,
        "head_size": WIDTH,
        "scale": WIDTH**-0.5,
        "num_kv_heads": KV_HEADS,
        "lambda_init": INIT,
        "cache_config": vattn.CacheConfig(block_size=BLOCK),
        **lambdas(),
        **changes,
    }
    layer = vattn.DifferentialAttention(**values)
    rng = torch.Generator().manual_seed(9)
    if isinstance(layer.subln, nn.RMSNorm):
        layer.subln.weight.data.copy_(torch.rand(layer.subln.weight.shape, generator=rng) + 0.5)
    return layer.eval().requires_grad_(False)


def paper(
    layer: vattn.DifferentialAttention, query: Tensor, key: Tensor, value: Tensor, window=None, cap=None
) -> Tensor:
    """The formula of arXiv 2410.05258 for the last rows of one text, dense, one pair of heads at a time, in fp64."""
    rows, keys = query.shape[0], key.shape[0]
    query, key, value = query.double(), key.double(), value.double()
    q1, k1, q2, k2 = (getattr(layer, name).double() for name in NAMES)
    factor = torch.exp(torch.dot(q1, k1)) - torch.exp(torch.dot(q2, k2)) + layer.lambda_init
    place = torch.arange(keys)[None, :] - (keys - rows + torch.arange(rows))[:, None]
    hidden = place > 0
    if window is not None:
        hidden |= place <= -window
    outputs = []
    for pair in range(layer.num_heads // 2):
        kv_pair = pair // (layer.num_heads // layer.num_kv_heads)
        both = torch.cat((value[:, 2 * kv_pair], value[:, 2 * kv_pair + 1]), dim=1)
        maps = []
        for member in (0, 1):
            scores = query[:, 2 * pair + member] @ key[:, 2 * kv_pair + member].T * layer._request["scale"]
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            maps.append(scores.masked_fill(hidden, -torch.inf).softmax(dim=1))
        mixed = (maps[0] - factor * maps[1]) @ both
        mixed = mixed / (mixed.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * layer.subln.weight.double()
        outputs.append((1 - layer.lambda_init) * mixed)
    return torch.cat(outputs, dim=1)


class Text:
    """One random text and its cache; `run` feeds the next tokens."""

    def __init__(self, layer, length=40, dtype=torch.float32, seed=3, device="cpu", num_blocks=12):
        rng = torch.Generator().manual_seed(seed)
        self.layer, self.seen = layer, 0
        layer.to(dtype)
        self.qkv = [
            torch.randn(length, heads, layer.head_size, generator=rng).to(dtype).to(device)
            for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        ]
        vattn.allocate_kv_cache(layer, num_blocks=num_blocks, dtype=dtype, device=device)
        self.builder = vattn.AttentionMetadataBuilder(
            max_num_reqs=4, max_num_tokens=64, max_seq_len=64, block_size=BLOCK, layers=layer, device=device
        )
        self.table = [7, 2, 9, 4, 1, 8]

    def run(self, count, attend=None, **step):
        rows = [x[self.seen : self.seen + count] for x in self.qkv]
        self.seen += count
        metadata = self.builder.build([count], [self.seen], [self.table], **step)
        padding = metadata.slot_mapping.shape[0] - count
        rows = [torch.cat((x, x.new_full((padding, *x.shape[1:]), torch.nan))) for x in rows]
        with torch.no_grad(), vattn.forward_context(metadata):
            return (self.layer if attend is None else attend)(*rows)[:count]

    def expected(self, first=0, **mask):
        query, key, value = (x.cpu()[: self.seen] for x in self.qkv)
        return paper(self.layer, query[first:], key, value, **mask)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


STEPS = {"prefill": (33,), "chunks": (5, 16, 9, 2), "decode": (17, 1, 1, 1), "first token": (1, 1, 1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cuts", STEPS.values(), ids=STEPS.keys())
def test_equals_the_formula_of_the_paper(cuts, dtype) -> None:
    text = Text(make_layer(), dtype=dtype)
    got = torch.cat([text.run(count) for count in cuts])
    assert got.dtype == dtype
    assert error(got, text.expected()) < LOOSE[dtype]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 8)])
def test_any_even_head_counts(heads, kv_heads) -> None:
    text = Text(make_layer(num_heads=heads, num_kv_heads=kv_heads))
    got = torch.cat([text.run(20), text.run(1)])
    assert error(got, text.expected()) < 1e-5


@pytest.mark.parametrize("mask", [{"window": 6}, {"cap": 1.5}, {"window": 9, "cap": 0.7}])
def test_masks(mask) -> None:
    layer = make_layer(per_layer_sliding_window=mask.get("window"), logits_soft_cap=mask.get("cap"))
    text = Text(layer)
    got = torch.cat([text.run(20), text.run(1), text.run(7)])
    assert error(got, text.expected(**mask)) < 1e-5


def test_sinks_and_alibi_go_to_the_heads_they_are_of() -> None:
    """Against two plain layers with those heads alone."""
    rng = torch.Generator().manual_seed(4)
    sinks, slopes = torch.randn(HEADS, generator=rng), torch.rand(HEADS, generator=rng)
    text = Text(make_layer(sinks=sinks, alibi_slopes=slopes))
    got = text.run(19)
    query, key, value = (x[:19] for x in text.qkv)
    both = value.unflatten(1, (KV_HEADS // 2, 2)).flatten(2)
    halves = []
    for member in (0, 1):
        plain = vattn.Attention(
            HEADS // 2, WIDTH, WIDTH**-0.5, KV_HEADS // 2, head_size_v=2 * WIDTH, sinks=sinks[member::2],
            alibi_slopes=slopes[member::2], cache_config=vattn.CacheConfig(block_size=BLOCK),
        )  # fmt: skip
        vattn.allocate_kv_cache(plain, num_blocks=12, dtype=torch.float32)
        step = text.builder.build([19], [19], [text.table])
        halves.append(plain(query[:, member::2], key[:, member::2], both, metadata=step).unflatten(1, (-1, 2 * WIDTH)))
    mixed = layer_difference(text.layer, *halves)
    assert error(got, mixed.double()) < 1e-6


def layer_difference(layer, first, second):
    return (layer.subln(first - layer.lambda_full() * second) * (1 - layer.lambda_init)).flatten(1)


def test_requests_of_any_kind_in_one_step_and_a_shared_prefix() -> None:
    """A prefill, a decode, a chunk over blocks of another request, padding, and a text of nothing."""
    layer = make_layer()
    text = Text(layer, num_blocks=16)
    text.run(24)
    rng = torch.Generator().manual_seed(8)
    fresh = [torch.randn(9 + 1 + 5, heads, WIDTH, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    tables = [[3, 5], text.table, [*text.table[:2], 6], [0]]
    step = text.builder.build([9, 1, 5, 0], [9, 25, 16 + 5, 0], tables)
    with torch.no_grad():
        got = layer(*fresh, metadata=step).split([9, 1, 5])
    alone = paper(layer, *(x[:9] for x in fresh))
    decode = paper(
        layer, fresh[0][9:10], *(torch.cat((x[:24], y[9:10])) for x, y in zip(text.qkv[1:], fresh[1:], strict=True))
    )
    hit = paper(
        layer, fresh[0][10:], *(torch.cat((x[:16], y[10:])) for x, y in zip(text.qkv[1:], fresh[1:], strict=True))
    )
    for result, expected in zip(got, (alone, decode, hit), strict=True):
        assert error(result, expected) < 1e-5


@pytest.mark.parametrize("per_head", [False, True], ids=["one scale", "per head"])
@pytest.mark.parametrize("query_format", ["none", "fp8_e4m3"])
def test_an_fp8_cache_with_scales(per_head, query_format) -> None:
    count = KV_HEADS if per_head else 1
    scales = {name: (torch.arange(count) + 1.5) * 0.007 for name in ("k_scale", "v_scale", "q_scale")}
    if query_format == "none":
        scales.pop("q_scale")
    quant = vattn.QuantConfig(query_format=query_format, **scales)
    layer = make_layer(quant_config=quant, cache_config=vattn.CacheConfig(block_size=BLOCK, cache_dtype="fp8"))
    text = Text(layer)
    got = torch.cat([text.run(20), text.run(1)])

    def stored(x: Tensor, scale: Tensor, heads: int) -> Tensor:
        # Query heads 2j and 2j + 1 read the pair of KV heads that j belongs to, the even and the odd one.
        index = torch.arange(x.shape[1])
        of_head = 2 * (index // 2 // (heads // KV_HEADS)) + index % 2
        per = scale.expand(KV_HEADS)[of_head][None, :, None]
        return (x / per).clamp(-448, 448).to(torch.float8_e4m3fn).double() * per

    text.qkv[1] = stored(text.qkv[1], scales["k_scale"], KV_HEADS)
    text.qkv[2] = stored(text.qkv[2], scales["v_scale"], KV_HEADS)
    if query_format != "none":
        text.qkv[0] = stored(text.qkv[0], scales["q_scale"], HEADS)
    assert error(got, text.expected()) < 1e-5


def test_calculated_scales() -> None:
    cache = vattn.CacheConfig(block_size=BLOCK, cache_dtype="fp8", calculate_kv_scales=True)
    text = Text(make_layer(cache_config=cache))
    got = text.run(30)
    assert float(text.layer.k_scale) != 1.0
    assert error(got, text.expected()) < 0.1


@pytest.mark.parametrize("name", ["fp8_static", "fp8_per_token", "fp8_group64_col", "nvfp4_swizzled"])
def test_the_output_is_quantised_as_by_the_reference(name) -> None:
    static = "nvfp4" in name or name == "fp8_static"
    quant = vattn.QuantConfig(output_format=name, output_scale=0.02 if static else None)
    plain, text = Text(make_layer()), Text(make_layer(quant_config=quant))
    expected = plain.run(23)
    step = text.builder.build([23], [23], [text.table])
    with torch.no_grad():
        got = text.layer(*(x[:23] for x in text.qkv), metadata=step)
    got, scales = got if isinstance(got, tuple) else (got, None)
    ideal = torch.zeros_like(got).unflatten(1, (HEADS, -1))
    ideal_scales = None if scales is None else torch.zeros_like(scales)
    scale = torch.tensor([0.02]) if static else None
    quantise_output(expected.unflatten(1, (HEADS, WIDTH)), name, ideal, ideal_scales, scale)
    assert torch.equal(got.view(torch.uint8), ideal.flatten(1).view(torch.uint8))
    assert scales is None or torch.equal(scales.float(), ideal_scales.float())


class Decoder(nn.Module):
    """Two layers over one cache: the second has queries of its own alone."""

    def __init__(self, **changes):
        super().__init__()
        self.first = make_layer(prefix="layers.0")
        self.second = make_layer(
            prefix="layers.1", kv_sharing_target_layer_name="layers.0", **lambdas(seed=5), **changes
        )

    def forward(self, query, key, value):
        return torch.cat((self.first(query, key, value), self.second(query.flip(1), None, None)), dim=1)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_a_layer_that_shares_a_cache_takes_queries_only(compiled) -> None:
    """Prompts, chunks and decodes."""
    model = Decoder()
    vattn.allocate_kv_cache(model, num_blocks=12, dtype=torch.float32)
    assert model.second.kv_cache is model.first.kv_cache
    builder = vattn.AttentionMetadataBuilder(
        max_num_reqs=4, max_num_tokens=64, max_seq_len=64, block_size=BLOCK, layers=model
    )
    rng = torch.Generator().manual_seed(3)
    qkv = [torch.randn(30, heads, WIDTH, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    run, seen, got = vattn.compile(model, fullgraph=True) if compiled else model, 0, []
    for count in (13, 4, 9, 2):
        step = builder.build([count], [seen + count], [[7, 2, 9, 4]])
        with torch.no_grad(), vattn.forward_context(step):
            got.append(run(*(x[seen : seen + count] for x in qkv))[:count])
        seen += count
    first, second = torch.cat(got).chunk(2, dim=1)
    query, key, value = (x[:seen] for x in qkv)
    assert error(first, paper(model.first, query, key, value)) < 1e-5
    assert error(second, paper(model.second, query.flip(1), key, value)) < 1e-5


@pytest.mark.slow
def test_compiled_in_one_graph_for_all_lengths(fresh_dynamo: None) -> None:
    text = Text(make_layer())
    attend = vattn.compile(text.layer, fullgraph=True)
    got = torch.cat([text.run(count, attend) for count in (19, 3, 5, 2, 7)])
    assert error(got, text.expected()) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_exports_with_lambda_in_the_program() -> None:
    layer = with_cache(make_layer(), 8)
    builder = vattn.AttentionMetadataBuilder(4, 16, 32, BLOCK, layers=layer)

    def rows(count: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(count, heads * WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))

    exported = vattn.export_step(layer, rows(3), builder.build([2, 1], [2, 5], [[1], [2]]))
    step, given = builder.build([4, 2, 1], [4, 2, 9], [[3], [4], [5, 6]]), rows(7)
    with torch.no_grad():
        want = layer(*given, metadata=step)
        got = exported.program.module()(*exported.inputs(given, step))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["buffers", "parameters"])
def test_lambda_follows_reloaded_weights(kind) -> None:
    given = lambdas()
    if kind == "parameters":
        given = {name: nn.Parameter(vector) for name, vector in given.items()}
    text = Text(make_layer(**given))
    attend = vattn.compile(text.layer, fullgraph=True)
    assert error(text.run(8, attend), text.expected()) < 1e-5
    other = {name: vector * -0.4 for name, vector in lambdas(seed=77).items()}
    state = text.layer.state_dict()
    assert set(NAMES) <= set(state)
    before = float(text.layer.lambda_full())
    text.layer.load_state_dict({**state, **other})
    assert float(text.layer.lambda_full()) != before
    got = text.run(8, attend)
    assert error(got, text.expected(first=8)) < 1e-5


def test_lambdas_that_are_copied_keep_their_dtype() -> None:
    layer = make_layer().to(torch.bfloat16)
    assert layer.lambda_q1.dtype == torch.float32
    assert layer.subln.weight.dtype == torch.bfloat16


def test_two_attentions_of_twice_the_width() -> None:
    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.vattn.attention.default:
                self.calls.append((args[6].shape, AttentionConfig.parse(args[-1])))
            return func(*args, **(kwargs or {}))

    text = Text(make_layer())
    with Count() as count:
        text.run(6)
    assert [tuple(shape[1:]) for shape, _ in count.calls] == [(HEADS // 2, 2 * WIDTH)] * 2
    assert [config.head_pairs for _, config in count.calls] == ["even", "odd"]


def test_rows_of_padding_are_zero_with_any_norm() -> None:
    norm = nn.LayerNorm(2 * WIDTH)
    norm.bias.data.fill_(3.0)
    text = Text(make_layer(subln=norm))
    step = text.builder.build([3], [3], [text.table], num_tokens_padded=16)
    rows = [torch.cat((x[:3], torch.full((13, *x.shape[1:]), torch.nan))) for x in text.qkv]
    with torch.no_grad():
        got = text.layer(*rows, metadata=step)
    assert not got[3:].any()
    assert got[:3].isfinite().all()


def test_a_profiling_call_gives_zeros() -> None:
    layer = make_layer()
    query, key, value = (torch.randn(5, heads * WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with torch.no_grad():
        assert not layer(query, key, value).any()


def test_the_cache_by_halves() -> None:
    """The shape that the system of that name has, as a view of an ordinary storage."""
    shape = DifferentialFlashAttentionBackend.get_kv_cache_shape(12, 16, KV_HEADS, WIDTH)
    assert shape == (2, 2, 12, 16, KV_HEADS // 2, WIDTH)
    text = Text(make_layer())
    text.run(11)
    view = DifferentialFlashAttentionBackend.kv_cache_view(text.layer.kv_cache)
    assert view.shape == (2, 2, 12, BLOCK, KV_HEADS // 2, WIDTH)
    assert view.data_ptr() == text.layer.kv_cache.data_ptr()
    for half in (0, 1):
        for part in (0, 1):
            block, slot = text.table[10 // BLOCK], 10 % BLOCK
            assert torch.equal(view[half, part, block, slot], text.qkv[1 + part][10, half::2])


def test_the_named_backend_runs_on_the_one_beneath() -> None:
    text = Text(make_layer(attn_backend="DIFFERENTIAL_FLASH_ATTN"))
    assert text.layer.config.backend == "TORCH_SDPA"
    assert error(text.run(12), text.expected()) < 1e-5
    half = half_of(text.layer.config, "odd").replace(backend="DIFFERENTIAL_FLASH_ATTN")
    assert selector.explain(half, "cpu").chosen == "DIFFERENTIAL_FLASH_ATTN"
    plain = text.layer.config.replace(backend="DIFFERENTIAL_FLASH_ATTN")
    assert "no head_pairs" in str(selector.explain(plain, "cpu"))
    hopper = DeviceInfo("cuda", (9, 0), "H")
    if selector.get_backend("TRITON_ATTN").problem() is None:
        assert underlying(half, hopper) == "TRITON_ATTN"


def test_a_backend_without_pairs_is_refused_by_name() -> None:
    layer = make_layer(attn_backend="FLASHINFER")
    with pytest.raises(UnsupportedRequestError, match="head_pairs"):
        vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)


def test_triton_beneath() -> None:
    problem = selector.get_backend("TRITON_ATTN").problem()
    if problem is not None or not DeviceInfo.of("cpu").triton_interpreter:
        pytest.skip(problem or "needs TRITON_INTERPRET=1")
    quant = vattn.QuantConfig(k_scale=[0.01, 0.02, 0.03, 0.04], v_scale=[0.03, 0.02, 0.05, 0.01])
    cache = vattn.CacheConfig(block_size=BLOCK, cache_dtype="fp8")
    texts = [Text(make_layer(attn_backend=n, cache_config=cache, quant_config=quant)) for n in (None, "TRITON_ATTN")]
    expected, got = (torch.cat([text.run(9), text.run(1)]) for text in texts)
    assert error(got, expected.double()) < 1e-5


WRONG = {
    "odd KV heads": ({"num_heads": 6, "num_kv_heads": 3}, ConfigError, "num_kv_heads=3"),
    "odd heads": ({"num_heads": 3, "num_kv_heads": None}, ConfigError, "num_heads=3"),
    "a missing lambda": ({"lambda_k2": None}, ConfigError, "None instead of numbers"),
    "a lambda too long": ({"lambda_q1": torch.zeros(2 * WIDTH)}, ShapeError, "lambda_q1"),
    "lambda_init": ({"lambda_init": 1.5}, ConfigError, "lambda_init=1.5"),
    "lambda_init of another type": ({"lambda_init": "0.8"}, ConfigError, "lambda_init='0.8'"),
    "no module": ({"subln": "rms"}, ConfigError, "subln of type str"),
    "an HND cache": ({"cache_config": vattn.CacheConfig(kv_cache_layout="HND")}, ConfigError, "HND"),
    "a value width": ({"head_size_v": 32}, TypeError, "head_size_v"),
}


@pytest.mark.parametrize(("changes", "kind", "text"), WRONG.values(), ids=WRONG.keys())
def test_what_makes_no_layer_is_refused(changes, kind, text) -> None:
    with pytest.raises(kind, match=text):
        make_layer(**changes)


def test_gradients_are_refused() -> None:
    text = Text(make_layer())
    text.layer.subln.requires_grad_(True)
    step = text.builder.build([2], [2], [text.table])
    with pytest.raises(GradientError), torch.enable_grad():
        text.layer(*(x[:2] for x in text.qkv), metadata=step)


def test_a_sharing_layer_of_another_kind_is_refused() -> None:
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = vattn.Attention(HEADS, WIDTH, 0.25, KV_HEADS, prefix="layers.0")
            self.b = make_layer(
                prefix="layers.1", kv_sharing_target_layer_name="layers.0", cache_config=vattn.CacheConfig()
            )

    with pytest.raises(CacheError, match="which is a Attention"):
        vattn.allocate_kv_cache(Two(), num_blocks=4, dtype=torch.float32)


def test_shapes_and_views_of_no_pairs_are_refused() -> None:
    shape = DifferentialFlashAttentionBackend.get_kv_cache_shape
    with pytest.raises(ConfigError, match="num_kv_heads=3"):
        shape(4, 16, 3, 64)
    with pytest.raises(ConfigError, match="block_size=24"):
        shape(4, 24, 4, 64)
    with pytest.raises(CacheError, match="even num_kv_heads"):
        DifferentialFlashAttentionBackend.kv_cache_view(torch.zeros(2, 4, 16, 3, 8))


@pytest.mark.parametrize("depth", [-1, 1.5, True])
def test_a_depth_that_is_none(depth) -> None:
    with pytest.raises(ConfigError, match="depth"):
        vattn.differential_lambda_init(depth)
