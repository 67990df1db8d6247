"""`query_load`: a kernel that rounds its query as it loads it does what it does with one that was rounded before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.conformance.compare import run_and_compare
from tests.kernels.test_decode_fast_interpreted import decode_batch, interpreted  # noqa: F401
from tests.support import Batch, make_config, random_packed_batch, random_paged_batch
from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.errors import DtypeError, ScaleError, UnsupportedRequestError
from vattn.quantization.codecs import encode_query, load_query
from vattn.quantization.formats import MODEL_DTYPES, QUERY_LOADS

E4M3 = torch.float8_e4m3fn
LENS = ([3, 1, 0, 5, 1], [5, 20, 2, 5, 33])


def queries(batch: Batch) -> Tensor:
    """Return queries in the model dtype with values beyond the range, infinities, zeros and many ties."""
    config = batch.config
    rng = torch.Generator().manual_seed(7)
    query = torch.randn(batch.args.query.shape, generator=rng) * 3
    codes = torch.arange(126, dtype=torch.uint8)
    ties = (codes.view(E4M3).float() + (codes + 1).view(E4M3).float()) / 2
    ties = ties.repeat(-(-query.shape[2] * query.shape[1] // len(ties)))[: query[0].numel()].view(query[0].shape)
    query[1], query[2, 0, :4] = ties * 7 / 512, torch.tensor([1e4, -1e4, torch.inf, 0.0])
    return query.to(batch.args.query.device, MODEL_DTYPES[config.dtype])


def pair(batch: Batch, load: str, strided: bool = False) -> tuple[Batch, Batch]:
    """Return a batch whose query was rounded before, and the same with the query as it was."""
    config, query = batch.config, queries(batch)
    if config.query_scale == "tensor":
        # Ties are exact in every dtype.
        batch.args = batch.args._replace(q_scale=torch.tensor([7 / 512], device=query.device))
    codes = encode_query(query, batch.args.q_scale, config.num_kv_heads, load)
    batch.args = batch.args._replace(query=codes)
    if strided:
        query = torch.cat([query, query], dim=1)[:, : config.num_heads]
    other = batch.with_backend(config.backend)
    other.config = config.replace(query_load=load)
    other.args = other.args._replace(query=query, config=other.config.encode())
    return batch, other


def same(a: Batch, b: Batch) -> bool:
    outputs = [(batch.args.output.view(torch.uint8), batch.args.lse) for batch in (a, b)]
    return torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])


@pytest.mark.sample(5)
@pytest.mark.parametrize("backend", selector.backend_names())
@pytest.mark.parametrize(
    ("dtype", "kind", "load"),
    [
        ("bfloat16", "tensor", "divide"),
        ("bfloat16", "head", "multiply"),
        ("float32", "head", "divide"),
        ("float16", "tensor", "multiply"),
    ],
)
def test_bits_are_those_of_a_query_rounded_before(backend: str, dtype: str, kind: str, load: str) -> None:
    for changes in ({"block_size": 8}, {"block_size": 0, "head_size": 40, "logits_soft_cap": 2.0}):
        asked: dict[str, Any] = {"query_format": "fp8_e4m3", "query_scale": kind, "lse": True, "backend": backend}
        config = make_config(dtype=dtype, **asked, **changes)
        refused = selector.get_backend(backend).reasons(config.replace(query_load=load), DeviceInfo.of("cpu"))
        if refused:
            pytest.skip("; ".join(refused))
        make = random_paged_batch if config.block_size else random_packed_batch
        before, loading = pair(make(config, *LENS, num_padding_tokens=2), load, strided=kind == "head")
        before.run(), loading.run()
        assert same(before, loading)
        assert run_and_compare(loading.with_backend(backend))


def test_a_division_and_a_multiplication_differ_at_ties() -> None:
    """Otherwise the tests above would not see which of them a kernel does."""
    batch = random_paged_batch(make_config(query_format="fp8_e4m3", query_scale="tensor"), *LENS)
    query, scale = queries(batch), torch.tensor([7 / 512])
    codes = [encode_query(query, scale, 2, load).view(torch.uint8) for load in ("divide", "multiply")]
    assert int((codes[0] != codes[1]).sum()) > 3
    assert torch.equal(load_query(query, scale, 2, "divide"), codes[0].view(E4M3).float() * scale)


@pytest.mark.parametrize(
    ("cache", "load"), [({}, "multiply"), ({"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}, "divide")], ids=str
)
@pytest.mark.usefixtures("interpreted")
def test_fast_decode(cache: dict[str, Any], load: str) -> None:
    from vattn.kernels.hopper.decode import launch as decode_fast

    asked = {"query_format": "fp8_e4m3", "query_scale": "head" if load == "divide" else "tensor", **cache}
    before, loading = pair(decode_batch([1, 47, 129], padding=1, **asked), load)
    # The interpreter has no e4m3 to load: what it is given is what the codes stand for, without the scale.
    before.args = before.args._replace(query=before.args.query.to(torch.float16))
    for batch in (before, loading):
        decode_fast.decode(batch.args, batch.config, None)
    assert same(before, loading)


@pytest.mark.parametrize("load", ["divide", "multiply"])
@pytest.mark.usefixtures("interpreted")
def test_rounding_ahead_of_a_kernel_that_wants_codes(load: str) -> None:
    """For the Hopper prefill kernel and the encoder kernel, which multiply queries as they lie in memory."""
    from vattn.kernels.triton.attention.round_query import round_query

    for changes in ({"num_heads": 6, "query_scale": "head"}, {"query_scale": "tensor", "dtype": "bfloat16"}):
        config = make_config(head_size=24, query_format="fp8_e4m3", query_load=load, **changes)
        batch = random_paged_batch(config, *LENS)
        query = torch.cat([queries(batch)] * 2, dim=1)[:, : config.num_heads]
        args = round_query(batch.args._replace(query=query), config)
        expected = encode_query(query, args.q_scale, config.num_kv_heads, load)
        assert torch.equal(args.query.view(torch.uint8), expected.view(torch.uint8))
        assert AttentionConfig.parse(args.config) == config.replace(query_load="plain")


def test_fast_paths_say_which_layers_they_take() -> None:
    pytest.importorskip("triton")
    from vattn.kernels.hopper.decode import launch as decode_fast
    from vattn.kernels.hopper.prefill import launch as prefill_launch

    config = make_config(
        dtype="bfloat16", head_size=128, block_size=16, query_format="fp8_e4m3", query_load="approximate_divide"
    )
    hopper = DeviceInfo("cuda", (9, 0), "sm_90")
    assert decode_fast.refusals(config, hopper) == []
    assert "query_load approximate_divide (runs plain)" in prefill_launch.refusals(config, hopper)


def test_the_config_string() -> None:
    config = make_config(query_format="fp8_e4m3")
    assert "query_load" not in config.encode() and config.takes_fp8_query
    for load in QUERY_LOADS[1:]:
        changed = config.replace(query_load=load)
        assert f" query_load={load}" in changed.encode() and not changed.takes_fp8_query
        assert AttentionConfig.parse(changed.encode()) == changed


def test_wrong_queries_and_scales_are_refused() -> None:
    config = make_config(query_format="fp8_e4m3", query_load="divide", backend="TORCH_SDPA")
    batch = random_paged_batch(config, *LENS)
    query, scale = batch.args.query, batch.args.q_scale
    for changes, error in (
        ({"query": query.to(E4M3)}, DtypeError),
        ({"query": query.bfloat16()}, DtypeError),
        ({"q_scale": None}, ScaleError),
        ({"q_scale": scale.expand(4).contiguous()}, ScaleError),
    ):
        with pytest.raises(error):
            torch.ops.vattn.attention(*batch.args._replace(**changes))
    assert bool(batch.args.output.isnan().all())


def test_a_backend_refuses_what_it_cannot_load() -> None:
    config = make_config(query_format="fp8_e4m3", query_load="approximate_divide", backend="TORCH_SDPA")
    with pytest.raises(
        UnsupportedRequestError, match=r"query_load approximate_divide \(runs plain, divide, multiply\)"
    ):
        selector.choose(config, "cpu")


def test_fast_decode_takes_the_loads_that_have_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vattn.kernels.hopper.decode import launch as decode_fast

    monkeypatch.setattr(decode_fast, "runs", lambda config, device: True)
    asked = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "query_format": "fp8_e4m3", "block_size": 16}
    for lens, takes in (([1, 1], True), ([2, 2], False)):
        for load in ("plain", "approximate_divide"):
            batch = random_paged_batch(make_config(**asked), lens, [5, 33])
            config = batch.config.replace(query_load=load)
            assert decode_fast.accepts(batch.args, config) == (takes or load == "plain")


# On a GPU: with exact arithmetic the oracle is a query rounded by torch before, with approximate arithmetic the unfused
# compiled graph, which divides as generated code does.

LENGTHS = {
    "decode": ([1] * 5, [1, 300, 47, 129, 1000]),
    "many decodes": ([1] * 40, [17 * i + 1 for i in range(40)]),
    "mixed": ([3, 1, 70, 0, 5], [5, 200, 70, 2, 500]),
}


def config_of(dtype: str, cache: str, kind: str) -> vattn.AttentionConfig:
    return make_config(
        num_heads=8, num_kv_heads=2, head_size=128, block_size=16, dtype=dtype, lse=True, backend="TRITON_ATTN",
        kv_cache_dtype=dtype if cache == "auto" else cache, query_format="fp8_e4m3", query_scale=kind,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("load", ["divide", "multiply"])
@pytest.mark.parametrize("kind", ["tensor", "head"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact_arithmetic_on_a_gpu(dtype: str, lens: str, cache: str, kind: str, load: str) -> None:
    config = config_of(dtype, cache, kind)
    before, loading = pair(random_paged_batch(config, *LENGTHS[lens], device="cuda"), load)
    before.run(), loading.run()
    assert same(before, loading)


@pytest.mark.gpu
@pytest.mark.parametrize("load", ["divide", "multiply"])
@pytest.mark.parametrize("kind", ["tensor", "head"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("num_reqs", [5, 40], ids=["few", "many"])
def test_fast_decode_rounds_by_itself(num_reqs: int, cache: str, kind: str, load: str) -> None:
    """Both kernels of fast decode: the Triton one (few, FP8) and the Gluon one (many)."""
    from vattn.kernels.hopper.decode import launch as decode_fast

    config = config_of("bfloat16", cache, kind)
    if decode_fast.refusals(config, DeviceInfo.of("cuda")):
        pytest.skip("the fast decode path needs an sm_90 GPU")
    lengths = [17 * i + 1 for i in range(num_reqs)]
    before, loading = pair(random_paged_batch(config, [1] * num_reqs, lengths, device="cuda"), load)
    for batch in (before, loading):
        decode_fast.decode(batch.args, batch.config)
    assert same(before, loading)


class Layer(nn.Module):
    """A layer that takes its query from a projection alone."""

    def __init__(self, way: Any, scale: list[float], dtype: torch.dtype, cache: str) -> None:
        super().__init__()
        self.config = vattn.AttentionConfig(
            8, 2, 128, 128, 128**-0.5, str(dtype).removeprefix("torch."),
            str(dtype).removeprefix("torch.") if cache == "auto" else cache,
            kv_scale="none" if cache == "auto" else "tensor", query_format="fp8_e4m3",
            query_scale="head" if len(scale) > 1 else "tensor", backend="TRITON_ATTN",
        )  # fmt: skip
        self.way = way
        torch.manual_seed(0)
        self.proj = nn.Linear(1024, 1024, bias=False, dtype=dtype, device="cuda").requires_grad_(False)
        self.register_buffer("scale", torch.tensor(scale, device="cuda"))
        unit = None if cache == "auto" else torch.ones(1, device="cuda")
        self.register_buffer("kv_scale", unit)
        storage = torch.randint(0, 120, vattn.kv_cache_shape(self.config, 64), dtype=torch.uint8)
        plain = torch.randn(storage.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.register_buffer("cache", (plain if cache == "auto" else storage).cuda())

    def forward(self, x: Tensor, starts: Tensor, lens: Tensor, table: Tensor) -> Tensor:
        codes, q_scale = self.way(self.proj(x), self.scale)
        output = x.new_empty((x.shape[0], 8, 128))
        scales = (q_scale, self.kv_scale, self.kv_scale)
        given = (codes.reshape(-1, 8, 128), *self.cache, starts, lens, table, output, None, None, None, *scales)
        torch.ops.vattn.attention(*given, *[None] * 7, [], None, self.config.encode())
        return output


WAYS: dict[str, Any] = {
    "divide": lambda q, s: ((q.float() / s).clamp(-448, 448).to(E4M3), s),
    "reciprocal": lambda q, s: ((q.float() * s.reciprocal()).clamp(-448, 448).to(E4M3), s),
    "groups": lambda q, s: ((q.view(-1, 2, 512).float() / s[:, None]).clamp(-448, 448).to(E4M3), s),
    "one over": lambda q, s: ((q.view(-1, 2, 512).float() * (1 / s)[:, None]).clamp(-448, 448).to(E4M3), s),
}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("lens", LENGTHS)
def test_fused_equals_unfused_compiled(way: str, cache: str, lens: str) -> None:
    from torch._inductor.utils import run_and_get_code

    query_lens, seq_lens = LENGTHS[lens]
    per_head = way in ("groups", "one over")
    layer = Layer(WAYS[way], [0.0137, 0.0291] if per_head else [0.0137], torch.bfloat16, cache)
    x = torch.randn(sum(query_lens), 1024, generator=torch.Generator().manual_seed(5)).bfloat16().cuda() * 4
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().cuda()
    lengths = torch.tensor(seq_lens, dtype=torch.int32).cuda()
    table = torch.randint(64, (len(seq_lens), 64), generator=torch.Generator().manual_seed(6)).int().cuda()
    results = []
    with torch.no_grad():
        # Inductor pads odd row counts of a GEMM where that was faster when tried out, which changes its bits.
        unfused = {"shape_padding": False}
        for options in (unfused, vattn.options(unfused)):
            torch._dynamo.reset()
            got, (code,) = run_and_get_code(torch.compile(layer, options=options), x, starts, lengths, table)
            results.append(got)
            fused = options is not unfused
            assert ("query_load=" in code) == fused
            assert ("float8e4nv" in code) != fused  # the quantiser's kernel
    assert torch.equal(*results)
