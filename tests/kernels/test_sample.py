"""The kernels of sampling and log-probabilities against the torch operators that a CPU runs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from vattn.generation.draws import draw, truncate, uniforms
from vattn.generation.logprobs import likeliest
from vattn.kernels.triton import sample as kernels


def run(
    logits: torch.Tensor, seed: int, top_k: bool, top_p: bool, min_p: bool, some: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens and usable rows of the kernel, and the tokens of torch; a third of the rows are not drawn."""
    random, device = torch.Generator().manual_seed(seed), logits.device
    total, width = logits.shape
    rows = torch.randperm(total, generator=random)[: total * 2 // 3].to(device)
    count = len(rows)
    uniform = [torch.rand(count, generator=random).to(device) for _ in range(5)]
    temperature, drawn = uniform[0][:, None] * 2 + 0.1, uniform[1] < 0.7 if some else None
    k = (uniform[2] ** 4 * width).long() + 1 if top_k else None
    p = uniform[3].double().clamp(min=1e-9) if top_p else None
    m = uniform[4].double() * 0.2 if min_p else None
    if p is not None:
        p[::5] = 1.0
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=random).to(device)
    positions = torch.randint(0, 1000, (total,), generator=random).to(device)
    tokens, usable = torch.full((2, total), -7, device=device)
    kernels.sample(logits, rows, temperature, drawn, k, p, m, seeds, positions, tokens, usable)
    scores = logits[rows].float()
    left = truncate((scores - scores.max(-1, keepdim=True).values) / temperature, k, p, m, width)
    expected = draw(left, uniforms(seeds, positions[rows]))
    if drawn is not None:
        expected = torch.where(drawn, expected, scores.argmax(-1))
    other = torch.ones(total, dtype=torch.bool, device=device)
    other[rows] = False
    assert (tokens[other] == -7).all() and (usable[other] == -7).all()
    return tokens[rows], usable[rows], expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A vocabulary of several blocks and a part of one; 16-bit logits have ties."""
    monkeypatch.setattr(kernels, "_MOST", 128)
    logits = (torch.randn(9, 301, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    for seed, options in enumerate(
        [(False, False, False, False), (True, True, True, True), (False, True, False, True)]
    ):
        tokens, usable, expected = run(logits, seed, *options)
        assert tokens.tolist() == expected.tolist() and usable.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_least_kept_logit_is_found_whatever_the_values(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Zeros of both signs, infinities, ties, tiny and huge values, wide gaps; a greedy row takes the first largest."""
    monkeypatch.setattr(kernels, "_MOST", 64)
    logits = torch.randn(24, 150, generator=torch.Generator().manual_seed(9))
    logits[::4] *= 10.0 ** torch.randint(-30, 30, (6, 150), generator=torch.Generator().manual_seed(2))
    logits[1::4] = logits[1::4].round()
    logits[2::4, ::3], logits[2::4, 1::3] = -torch.inf, 0.0
    logits[2::4, 2::3] = -0.0
    logits[3::4] *= 1e-20
    for seed, options in enumerate(
        [(True, False, False, True), (False, True, False, False), (True, True, False, True)]
    ):
        tokens, usable, expected = run(logits.to(dtype), seed, *options)
        assert tokens.tolist() == expected.tolist() and usable.all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_vocabularies(dtype: torch.dtype) -> None:
    """A draw may fall between two sums of fp32 weights that were added in another order: one in 1,000 at most."""
    wrong = count = 0
    for scale in (0.5, 3.0, 12.0):
        logits = (torch.randn(384, 128256, generator=torch.Generator("cuda").manual_seed(3), device="cuda") * scale).to(
            dtype
        )
        for options in [(False, False, False, False), (True, True, True, True), (False, True, False, False)]:
            tokens, usable, expected = run(logits, 5, *options)
            assert usable.all()
            wrong, count = wrong + int((tokens != expected).sum()), count + len(tokens)
    assert wrong <= count // 1000, f"{wrong} of {count}"


def test_rows_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST", 64)
    logits = torch.randn(6, 150)
    logits[0, 77], logits[1, 149], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :149] = -torch.inf
    rows, ones = torch.arange(6), torch.ones(6, 1)
    tokens, usable = torch.full((2, 6), -7)
    kernels.sample(logits, rows, ones, None, None, None, None, rows, rows, tokens, usable)
    assert usable.tolist() == [0, 0, 0, 1, 1, 1] and tokens[3] == 149
    assert ((tokens >= 0) & (tokens < 150)).all(), "the next step reads an embedding of each"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_totals_and_ranks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Sums of fp32 in another order: a few of the last bits."""
    monkeypatch.setattr(kernels, "_MOST", 64)
    logits = (torch.randn(5, 170) * 5).to(dtype)
    tokens = torch.tensor([0, 169, 64, 63, 100])
    totals, ranks, maxima = kernels.normalise(logits, tokens, 2)
    assert maxima is not None and torch.equal(maxima, logits.float().unflatten(1, (-1, 2)).amax(-1))
    scores = logits.float()
    torch.testing.assert_close(totals, scores.double().logsumexp(-1, keepdim=True).float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(ranks, (scores > scores.gather(1, tokens[:, None])).sum(-1, keepdim=True) + 1)
    values, ids = likeliest(logits, maxima, 7)
    assert torch.equal(values, logits.topk(7).values) and torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == 7 for row in ids.tolist())
