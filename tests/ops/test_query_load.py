"""`query_load`: a kernel that rounds its query as it loads it does what it does with one that was rounded before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
