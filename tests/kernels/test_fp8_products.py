"""The emulation of Hopper's FP8 sums gives what an H200 gave, where that was farthest from the exact sums."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.fp8_products import summed_lse, summed_products
from tests.kernels.test_prefill_gpu import NATIVE, ODD
from tests.support import make_config, random_paged_batch


def test_a_measured_row_bit_by_bit() -> None:
    """An H200 gave 1.05745 for one row of large scores, whose exact value is 1.06663, and one more beyond 4e-3."""
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_size": 256, "dtype": "bfloat16", "lse": True}
    config = make_config(**shape, scale=3.0, **NATIVE)
    query_lens, seq_lens = (list(lengths) for lengths in zip(*ODD, strict=True))
    batch = random_paged_batch(config, query_lens, seq_lens, num_padding_reqs=1, num_padding_tokens=3)
    request = ODD.index((130, 130))
    assert round(float(summed_lse(batch, request, 1)[4]), 5) == 1.05745
    far = 0
    for row in range(8):
        keys, query = batch.keys[request][: row + 1], batch.queries[request][row]
        scores = torch.einsum("hd,khd->hk", query, keys.repeat_interleave(config.group_size, 1)) * config.scale
        exact = scores.logsumexp(1)
        far += int(((summed_lse(batch, request, row) - exact).abs() > 4e-3 * exact.abs().clamp(min=1)).sum())
    assert far == 2


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_bound(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    query, keys = (torch.randn(8, width, generator=generator).to(torch.float8_e4m3fn).float() for _ in range(2))
    exact = query.double() @ keys.double().T
    error = (summed_products(query, keys) - exact).abs()
    largest = (query[:, None].abs() * keys[None].abs()).sum(-1).amax().log2().floor().exp2()
    assert 0 < error.max() <= width / 32 * 33 * largest * 2.0**-13


def test_sums_of_few_bits_are_exact() -> None:
    query = torch.tensor([[1.0, -2.0, 0.5, 0.0] * 16])
    keys = torch.tensor([[2.0, 0.25, -4.0, 448.0] * 16, [0.0] * 64])
    assert torch.equal(summed_products(query, keys), query.double() @ keys.double().T)
