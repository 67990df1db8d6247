"""Queries that the attention kernels round as they load them, on a GPU: every path, bit for bit.

With exact arithmetic the oracle is a query rounded by torch before, with approximate arithmetic the unfused compiled
graph, whose divisions are those of generated code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.ops.test_query_load import pair, same
from tests.support import make_config, random_paged_batch

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
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


@pytest.mark.parametrize("load", ["divide", "multiply"])
@pytest.mark.parametrize("kind", ["tensor", "head"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact_arithmetic(dtype: str, lens: str, cache: str, kind: str, load: str) -> None:
    config = config_of(dtype, cache, kind)
    before, loading = pair(random_paged_batch(config, *LENGTHS[lens], device="cuda"), load)
    before.run(), loading.run()
    assert same(before, loading)


@pytest.mark.parametrize("load", ["divide", "multiply"])
@pytest.mark.parametrize("kind", ["tensor", "head"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("num_reqs", [5, 40], ids=["few", "many"])
def test_fast_decode_rounds_by_itself(num_reqs: int, cache: str, kind: str, load: str) -> None:
    """Both kernels of fast decode: the Triton one (few, FP8) and the Gluon one (many)."""
    from vattn.config.device import DeviceInfo
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
    """A layer whose query comes from a projection alone."""

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
        given = (codes.reshape(-1, 8, 128), self.cache, starts, lens, table, output, None, None, None, *scales)
        torch.ops.vattn.attention(*given, *[None] * 7, [], None, self.config.encode())
        return output


WAYS: dict[str, Any] = {
    "divide": lambda q, s: ((q.float() / s).clamp(-448, 448).to(E4M3), s),
    "reciprocal": lambda q, s: ((q.float() * s.reciprocal()).clamp(-448, 448).to(E4M3), s),
    "groups": lambda q, s: ((q.view(-1, 2, 512).float() / s[:, None]).clamp(-448, 448).to(E4M3), s),
    "one over": lambda q, s: ((q.view(-1, 2, 512).float() * (1 / s)[:, None]).clamp(-448, 448).to(E4M3), s),
}


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
