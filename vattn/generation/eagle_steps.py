"""Steps of a head of EAGLE: what the target has computed in its last step, and then the drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.compilation.cuda_graph import CUDAGraphRunner
from vattn.generation.batch import Batch
from vattn.generation.draft_source import UNKNOWN, ServedModel
from vattn.generation.draft_steps import DraftSteps
from vattn.generation.model_steps import ModelSteps, Ran, StepInputs
from vattn.generation.request import Request
from vattn.generation.transfers import on_host
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.token_tree import TokenTree


class Computed(NamedTuple):
    """The tokens of a request that the target has computed in its last step.

    Attributes:
        start, end: their positions, wrong drafts among them.
        row: where their hidden states begin.
        place: the request's row in the block tables of that step.
        paths: which rows hold right drafts, see `Batch`.
    """

    start: int
    end: int
    row: int
    place: int
    paths: dict[Request, list[int]]


class EagleSteps(DraftSteps):
    """Draft for one generator by a head that reads the target's hidden states.

    The head's row of a position needs the token after it. So it follows the target by a step: it first computes what
    the target's last step had, of requests that have ended too, since their blocks may be found by their content, and
    then the drafts.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCacheAllocation,
        num_drafts: int,
        served: ServedModel,
        states: Tensor,
        tree: TokenTree | None = None,
    ) -> None:
        self._most = 1 + (num_drafts if tree is None else tree.depth)
        super().__init__(model, cache, num_drafts, served, states, tree)
        served.blocks.computes_last = True
        self._computed: dict[Request, Computed] = {}
        self._tables: Tensor | None = None

    def _tokens_per_request(self) -> tuple[int, ...]:
        return (self._most,)

    def _prompt_steps(self, forward: Any, served: ServedModel) -> ModelSteps | None:
        return None

    def _sample_inputs(self, metadata: AttentionMetadata) -> list[Tensor]:
        tokens = metadata.slot_mapping.shape[0]
        return [*super()._sample_inputs(metadata), torch.zeros(tokens, dtype=torch.int64, device=self._device)]

    def _runner(self, counts: Any) -> CUDAGraphRunner | None:
        holds = self._runners and self._runners[0].key_for(len(counts), sum(counts)) is not None
        return self._runners[0] if holds and max(counts) <= self._most else None

    def plan(self, request: Request, most: int) -> list[int]:
        """Return placeholders for a request that was in the target's last step, of which there are hidden states."""
        return [UNKNOWN] * most if request in self._computed else []

    @torch.inference_mode()
    def launch(self, batch: Batch, begin: torch.cuda.Event | None) -> Ran | None:
        """Compute what the target's last step had, and then the drafts of this step."""
        self.check_cache()
        tables = self._tables_of(batch)
        drafts = {request: len(each) for request, each in zip(batch.requests, batch.drafts, strict=False) if each}
        found = self._follow(drafts, batch, tables, begin) if self._computed else None
        row, self._tables, self._computed = 0, tables, {}
        for place, (request, start, end) in enumerate(zip(batch.requests, batch.starts, batch.ends, strict=True)):
            self._computed[request] = Computed(start, end, row, place, batch.paths)
            row += end - start
        return found

    def _follow(
        self, drafts: dict[Request, int], batch: Batch, tables: Tensor, begin: torch.cuda.Event | None
    ) -> Ran | None:
        """Compute the last step's tokens that turned out right, and the drafts of some requests of this step."""
        rows, places = dict[Request, int](), list[int]()
        counts, ends, ids, sources = list[int](), list[int](), list[int](), list[int]()
        for request, each in self._computed.items():
            # The last token has none after it.
            end = min(each.end, request.num_tokens - 1)
            if end > each.start:
                rows[request] = len(rows)
                places.append(each.place)
                counts.append(end - each.start)
                ends.append(end)
                ids += request.tokens(each.start + 1, end + 1)
                path = each.paths.get(request)
                rows_of_step = range(end - each.start) if path is None else [0, *path][: end - each.start]
                sources += [each.row + row for row in rows_of_step]
        if not rows:
            return None
        assert self._tables is not None
        before = self._tables.index_select(0, on_host(places))
        before = nn.functional.pad(before, (0, max(0, tables.shape[1] - before.shape[1])))
        for place, request in enumerate(batch.requests):
            if request in drafts:
                # Drafts may need blocks that the request has since.
                before[rows[request], : tables.shape[1]] = tables[place]
        order = [rows[request] for request in batch.requests if request in drafts]
        lengths = [drafts.get(request, 0) for request in rows]
        step = StepInputs(counts, ends, ids, tables=before)
        return self._draft(step, lengths, self._runner(counts), begin, sources, order)
