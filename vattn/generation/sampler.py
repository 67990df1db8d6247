"""Choose the next tokens from a step's logits: the greedy ones at once, then all others together.

A draw depends on the request's seed, the token's position and the model's probabilities alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vattn.errors import VattnError
from vattn.generation.draws import draw, truncate, uniforms
from vattn.generation.grammar import apply_bitmask
from vattn.generation.logit_changes import TokenCounts, change_logits, run_processors
from vattn.generation.request import Request
from vattn.generation.transfers import floats_on_device, has_kernels, on_device, to_device


class SamplerOutput(NamedTuple):
    """The tokens of a step.

    Attributes:
        tokens: int64 `[N]` on the device.
        result: int64 `[2, N]`: tokens, and 1 where the logits could be used.
        errors: what the logits processors of a request raised, by row.
    """

    tokens: Tensor
    result: Tensor
    errors: dict[int, VattnError]


@dataclass
class SamplingMetadata:
    """The rows of a step that are not greedy, and their settings on the device.

    Attributes:
        rows, index: the rows, on the host and as int64 `[n]`.
        requests: of each of them.
        seeds: int64 `[n]`; `None` if nothing is drawn.
        drawn: bool `[n]`, rows with a temperature; `None` if all have one.
        temperature: fp32 `[n, 1]`, 1 for rows without one.
        top_k, top_p, min_p: see `truncate`; `None` where no row has it.
        most: see `truncate`.
        changed: whether logits change before tokens are drawn.
    """

    rows: Sequence[int]
    index: Tensor
    requests: list[Request]
    seeds: Tensor | None
    drawn: Tensor | None
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    most: int
    changed: bool

    @classmethod
    def of(cls, requests: Sequence[Request], rows: Sequence[int], logits: Tensor) -> SamplingMetadata:
        """Return the settings of some rows of logits."""
        vocab_size, device = logits.shape[1], logits.device
        chosen = [requests[row] for row in rows]
        settings = [request.sampling for request in chosen]
        drawn = [s.temperature > 0 for s in settings]
        seeds = [request.seed - (request.seed >> 63 << 64) for request in chosen]
        top_k = [min(s.top_k or vocab_size, vocab_size) for s in settings]
        wide = any(s.top_p < 1 and not s.top_k for s in settings)
        most = vocab_size if wide else max((k for k in top_k if k < vocab_size), default=vocab_size)
        top_p, min_p = [s.top_p for s in settings], [s.min_p for s in settings]
        return cls(
            rows,
            on_device(rows, device),
            chosen,
            on_device(seeds, device) if any(drawn) else None,
            None if all(drawn) else on_device(list(map(int, drawn)), device).bool(),
            floats_on_device([max(s.temperature, 1e-30) if s.temperature else 1.0 for s in settings], device).float()[
                :, None
            ],
            on_device(top_k, device) if any(k < vocab_size for k in top_k) else None,
            floats_on_device(top_p, device) if min(top_p) < 1 else None,
            floats_on_device(min_p, device) if max(min_p) > 0 else None,
            most,
            any(s.changes_logits for s in settings),
        )


class Sampler:
    """Choose tokens, without waiting for the device.

    Args:
        max_num_reqs: requests that run at once.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self._counts = TokenCounts(max_num_reqs)

    def choose(
        self, logits: Tensor, requests: Sequence[Request], positions: Sequence[int], sampled: SamplingMetadata | None
    ) -> SamplerOutput:
        """Return a token for each row.

        Args:
            logits: `[N, vocab_size]` of any float dtype; rows after the requests' are ignored.
            requests: of each row; a request with drafts has several rows.
            positions: of the tokens that are chosen, one for each row; read where something is sampled.
            sampled: the rows that are not greedy, `None` if all are.
        """
        rows = logits[: len(requests)]
        errors: dict[int, VattnError] = {}
        if sampled is not None and sampled.seeds is not None and has_kernels(rows):
            return self._sample_on_gpu(rows, sampled, positions, errors)
        # The largest value is NaN where any is.
        largest, tokens = rows.max(dim=-1)
        usable = largest.isfinite()
        if sampled is not None:
            self._sample(rows, sampled, positions, tokens, usable, errors)
        return SamplerOutput(tokens, torch.stack((tokens, usable.long())), errors)

    def _sample_on_gpu(
        self, logits: Tensor, metadata: SamplingMetadata, positions: Sequence[int], errors: dict[int, VattnError]
    ) -> SamplerOutput:
        """Do what `choose` does by one kernel for the rows that are not greedy, without a copy of their logits."""
        from vattn.kernels.triton.sample import sample

        device, index = logits.device, metadata.index
        places, scores, rows = on_device(positions, device), logits, index
        result = torch.empty(2, logits.shape[0], dtype=torch.int64, device=device)
        if len(metadata.rows) < logits.shape[0]:
            largest, likeliest = logits.max(dim=-1)
            torch.stack((likeliest, largest.isfinite().long()), out=result)
        target = result
        if metadata.changed:
            scores = logits.index_select(0, index).float()
            good = scores.max(dim=-1).values.isfinite()
            scores = torch.where(good[:, None], scores, 0.0)
            self._change(scores, metadata, [positions[row] for row in metadata.rows], errors)
            rows, places = torch.arange(len(metadata.rows), device=device), places.index_select(0, index)
            target = torch.empty(2, len(metadata.rows), dtype=torch.int64, device=device)
        assert metadata.seeds is not None
        sample(
            scores, rows, metadata.temperature, metadata.drawn, metadata.top_k, metadata.top_p, metadata.min_p,
            metadata.seeds, places, target[0], target[1],
        )  # fmt: skip
        if metadata.changed:
            target[1] *= good
            result.index_copy_(1, index, target)
        return SamplerOutput(result[0], result, errors)

    def _sample(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        positions: Sequence[int],
        tokens: Tensor,
        usable: Tensor,
        errors: dict[int, VattnError],
    ) -> None:
        """Write the tokens of rows that are not greedy, which of them can be used, and the errors of processors."""
        index = metadata.index
        good = usable.index_select(0, index)
        # A row that cannot be used has no probabilities to draw from.
        scores = torch.where(good[:, None], logits.index_select(0, index).float(), 0.0)
        if metadata.changed:
            self._change(scores, metadata, [positions[row] for row in metadata.rows], errors)
        largest = scores.max(dim=-1, keepdim=True).values
        if metadata.changed:
            good = good & largest.squeeze(1).isfinite()
            scores = torch.where(good[:, None], scores, 0.0)
            largest = torch.where(good[:, None], largest, 0.0)
        chosen = scores.argmax(dim=-1)
        if metadata.seeds is not None:
            # In this order a temperature near 0 gives no infinity.
            scores = truncate(
                (scores - largest) / metadata.temperature, metadata.top_k, metadata.top_p, metadata.min_p, metadata.most
            )
            drawn = draw(scores, uniforms(metadata.seeds, on_device(positions, index.device).index_select(0, index)))
            chosen = drawn if metadata.drawn is None else torch.where(metadata.drawn, drawn, chosen)
        tokens.index_copy_(0, index, chosen)
        usable.index_copy_(0, index, good)

    def _change(
        self, scores: Tensor, metadata: SamplingMetadata, positions: list[int], errors: dict[int, VattnError]
    ) -> None:
        """Apply to scores, in place, what requests ask for."""
        change_logits(scores, metadata.requests, positions, self._counts)
        bitmasks: dict[int, Tensor] = {}
        for i, request in enumerate(metadata.requests):
            if request.matcher is not None:
                try:
                    bitmasks[i] = request.matcher.bitmask(request.output)
                except VattnError as error:
                    errors[metadata.rows[i]] = error
        if bitmasks:
            device = scores.device
            stacked = torch.stack(list(bitmasks.values()))
            apply_bitmask(scores, on_device(list(bitmasks), device), to_device(stacked, device))
        for i, request in enumerate(metadata.requests):
            if request.sampling.logits_processors:
                try:
                    scores[i] = run_processors(request, scores[i : i + 1])[0]
                except VattnError as error:
                    errors[metadata.rows[i]] = error
