"""Launch a step: its inputs, the model or its graph, and the sampler. Nothing here waits for the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from vattn.errors import VattnError
from vattn.generation.batch import Batch
from vattn.generation.cache_blocks import CacheBlocks
from vattn.generation.draft_source import DraftSource
from vattn.generation.logprobs import StepLogprobs, TokenLogprobs, compute_logprobs
from vattn.generation.model_steps import DRAFTS, MIXED, PLAIN, ModelSteps, Ran, StepInputs
from vattn.generation.request import Request
from vattn.generation.sampler import Sampler, SamplingMetadata
from vattn.generation.transfers import to_host
from vattn.metadata.prompt_inputs import EncoderStep, PromptPart


@dataclass
class Launched(Ran):
    """A running step.

    Attributes:
        batch: what it computes.
        result: int64 `[2, N]` on the host as soon as `done`: the tokens, and whether their logits could be used.
        errors: what the logits processors of a request raised, by row of `tokens`.
        step_logprobs: log-probabilities, on the host as soon as `done`; `None` if no request of the step gets any.
        drafts: int64, the drafts of the step on the host as soon as `done`; `None` if the batch holds them.
        begin, done: events around the step and its drafts, `None` without a GPU.
        drafted: event between drafts and step; `None` if nothing was launched for drafts.
        waited: seconds for which `read` waited for the device.
    """

    batch: Batch
    result: Tensor
    errors: dict[int, VattnError]
    step_logprobs: StepLogprobs | None = None
    drafts: Tensor | None = None
    begin: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    drafted: torch.cuda.Event | None = None
    waited: float = 0.0

    def read(self) -> tuple[list[int], list[int]]:
        """Wait for the step, note its drafts in the batch, and return its tokens, and 1 for each with usable logits."""
        if self.done is not None:
            begin = time.perf_counter()
            self.done.synchronize()
            self.waited = time.perf_counter() - begin
        if self.drafts is not None:
            found = iter(self.drafts.tolist())
            self.batch.drafts = [list(islice(found, len(each))) for each in self.batch.drafts]
        tokens, usable = self.result.tolist()
        return tokens, usable

    def logprobs(self, rows: Sequence[int]) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens of some rows, after `read`; none if their request gets none."""
        found = self.step_logprobs
        return [each for row in rows for each in found.of_rows(row, 1)] if found is not None else []

    @property
    def device_seconds(self) -> float:
        """Time on the device, after `read`; 0 without a GPU."""
        if self.begin is None or self.done is None:
            return 0.0
        return self.begin.elapsed_time(self.done) / 1e3

    @property
    def draft_seconds(self) -> float:
        """Time on the device for drafts, after `read`; 0 without a GPU."""
        if self.begin is None or self.drafted is None:
            return 0.0
        return self.begin.elapsed_time(self.drafted) / 1e3


class ModelRunner:
    """Launch the steps that a scheduler plans.

    Args:
        steps: run the model.
        blocks: hold the block tables.
        source: launches the drafts of a step before it; `None` for steps without drafts.
    """

    def __init__(self, steps: ModelSteps, blocks: CacheBlocks, source: DraftSource | None = None) -> None:
        self.steps, self.blocks, self.source = steps, blocks, source
        self._sampler = Sampler(steps.builder.max_num_reqs)

    @torch.inference_mode()
    def launch(self, batch: Batch, before: Ran | None = None) -> Launched:
        """Launch a step.

        Args:
            batch: what it computes, of requests that have their blocks.
            before: the step before, if it has not been read: its tokens are taken on the device.
        """
        begin = torch.cuda.Event(enable_timing=True) if self.steps.device.type == "cuda" else None
        drafts, drafted = self._draft(batch, begin)
        before = before or drafts
        logits, metadata, graphs = self.steps.run(
            self._inputs(batch, before), before, begin if drafted is None else None
        )
        if drafts is not None and drafts.runner is not None:
            drafts.runner.check_model()
        self.blocks.save_states(batch.requests, batch.ends)
        if graphs is None:
            # Graphs compute what they captured, whatever has changed; this step did not.
            self.blocks.look()
        requests, positions, sampled, with_logprobs = _chosen(batch, logits)
        tokens, result, errors = self._sampler.choose(logits, requests, positions, sampled)
        launched = Launched(tokens, metadata, graphs, batch, to_host(result), errors)
        launched.drafts = to_host(drafts.tokens) if drafts is not None else None
        if with_logprobs or batch.prompt_logprobs:
            launched.step_logprobs = compute_logprobs(logits, tokens, requests, with_logprobs, batch.prompt_logprobs)
            launched.step_logprobs.values = to_host(launched.step_logprobs.values)
        if begin is not None:
            launched.begin, launched.done = begin, torch.cuda.Event(enable_timing=True)
            launched.drafted = drafted
            launched.done.record()
        return launched

    def _draft(self, batch: Batch, begin: torch.cuda.Event | None) -> tuple[Ran | None, torch.cuda.Event | None]:
        """Launch what drafts the step; return its drafts if they are on the device, and an event after a model's."""
        if self.source is None or not self.source.launches:
            return None, None
        if begin is not None:
            # A source that launches nothing, as before the model's first step, leaves it here.
            begin.record()
        drafts = self.source.launch(batch, begin)
        if begin is None:
            return drafts, None
        drafted = torch.cuda.Event(enable_timing=True)
        drafted.record()
        return drafts, drafted

    def _inputs(self, batch: Batch, before: Ran | None) -> StepInputs:
        """Return what the model computes in a step."""
        if not batch.follows:
            counts = [end - start for start, end in zip(batch.starts, batch.ends, strict=True)]
            ids, sources = _ids(batch, counts, before is not None)
            ends, rows = batch.ends, _rows(batch, counts)
        elif not self.blocks.cache.groups:
            return StepInputs(new_blocks=batch.new_blocks[0])
        else:
            ends, counts, rows = batch.positions(), [1] * batch.ready, None
            ids, sources = [0] * batch.ready, list(range(batch.ready))
        tables = self.blocks.rows(batch.requests, max(ends))
        slots, sources = self.blocks.state_slots(batch.requests), sources if before else []
        adapters = [-1 if request.adapter is None else request.adapter.slot for request in batch.requests]
        step = StepInputs(counts, ends, ids, sources, tables, rows, _graphs(batch, counts), slots, adapters)
        if batch.tree is not None:
            drafts = [*batch.drafts, *([] for _ in batch.requests[len(batch.drafts) :])]
            step.trees = [batch.tree if each else None for each in drafts]
        if any(request.inputs is not None for request in batch.requests):
            _add_prompt_inputs(step, batch)
        if self.blocks.with_encoder:
            step.encoder = _encoder_step(batch)
            if step.encoder.states is not None:
                step.graphs = None
        return step


def _add_prompt_inputs(step: StepInputs, batch: Batch) -> None:
    """Add what prompts are besides ids to a step; one that computes tokens of such a prompt runs without a graph."""
    inputs = [request.inputs for request in batch.requests]
    step.offsets = [0 if each is None else each.offset for each in inputs]
    row = 0
    for each, count, end in zip(inputs, step.counts, step.ends, strict=True):
        if each is not None and each.embeddings is not None:
            start, stop = end - count, min(end, each.embeddings.shape[0])
            if start < stop:
                step.prompts.append(PromptPart(row, each, start, stop))
        row += count
    if step.prompts:
        step.graphs = None
        if any(each is not None and each.ranges for each in inputs):
            step.ranges = [() if each is None else each.ranges for each in inputs]


def _encoder_step(batch: Batch) -> EncoderStep:
    """Return the encoder's side of a step; states are written with the first tokens after a request got its blocks."""
    states = [None if each.inputs is None else each.inputs.encoder_states for each in batch.requests]
    new = [not request.has_encoder for request in batch.requests]
    for request in batch.requests:
        request.has_encoder = True
    written = [each for each, is_new in zip(states, new, strict=True) if is_new and each is not None]
    return EncoderStep(
        [0 if each is None else each.shape[0] for each in states],
        new,
        [request.encoder_blocks for request in batch.requests],
        torch.cat(written) if written else None,
    )


def _graphs(batch: Batch, counts: list[int]) -> int | None:
    """Return which graphs hold a kind of step."""
    if batch.prompt_logprobs:
        return None
    if max(counts) <= 1 + max(map(len, batch.drafts), default=0):
        return DRAFTS if batch.drafts else PLAIN
    # A step with both prompts and drafts has no fixed number of rows.
    return None if batch.drafts else MIXED


def _rows(batch: Batch, counts: list[int]) -> list[int] | None:
    """Return the rows of a step that need logits; `None` for the last one of each request."""
    if not batch.drafts and not batch.prompt_logprobs:
        return None
    ends = list(accumulate(counts))
    drafts = map(len, batch.drafts) if batch.drafts else [0] * batch.ready
    rows = [row for end, more in zip(ends[: batch.ready], drafts, strict=False) for row in range(end - 1 - more, end)]
    for request, first, count in batch.prompt_logprobs:
        row = batch.requests.index(request)
        begin = ends[row] - batch.ends[row] + first - 1
        rows += range(begin, begin + count)
    return rows


def _ids(batch: Batch, counts: list[int], continues: bool) -> tuple[list[int], list[int]]:
    """Return the ids of a step, and their sources; see `StepInputs`.

    Args:
        counts: tokens of each request.
        continues: whether the device has the tokens of the step before, or the drafts.
    """
    ids: list[int] = []
    sources: list[int] = []
    num_drafts = 0
    for index, (request, start, count) in enumerate(zip(batch.requests, batch.starts, counts, strict=True)):
        if request.pending and start + count == request.num_tokens:
            ids += request.tokens(start, start + count - 1)
            sources += [-1] * (len(ids) - len(sources))
            sources.append(request.pending_row)
            ids.append(0)
        elif batch.drafts and batch.drafts[index]:
            drafts = batch.drafts[index]
            ids.append(request.output[-1])
            ids += drafts
            if continues:
                sources += [-1] * (len(ids) - len(drafts) - len(sources))
                sources += range(num_drafts, num_drafts + len(drafts))
                num_drafts += len(drafts)
        else:
            ids += request.tokens(start, start + count)
    return ids, sources + [-1] * (len(ids) - len(sources)) if sources else []


def _chosen(batch: Batch, logits: Tensor) -> tuple[list[Request], list[int], SamplingMetadata | None, list[int]]:
    """Return the request and the position of each token that a step chooses, and two selections of rows.

    Returns:
        The requests; the positions, or `[]` where nothing is sampled; the rows that are not greedy, and those that get
        log-probabilities.
    """
    requests, run = batch.requests[: batch.ready], batch.run
    if run is not None:
        if run.sampled and run.settings is None:
            run.settings = SamplingMetadata.of(requests, run.sampled, logits)
        return requests, batch.positions() if run.sampled else [], run.settings, run.with_logprobs
    positions = batch.positions()
    if batch.drafts:
        requests, positions = [], []
        for request, end, drafts in zip(batch.requests[: batch.ready], batch.ends, batch.drafts, strict=False):
            requests += [request] * (1 + len(drafts))
            first = end - len(drafts)
            depths = batch.tree.depths if batch.tree is not None and drafts else range(1 + len(drafts))
            positions += [first + depth for depth in depths]
    sampled = [row for row, request in enumerate(requests) if not request.greedy]
    with_logprobs = [row for row, request in enumerate(requests) if request.logprobs is not None]
    return requests, positions, SamplingMetadata.of(requests, sampled, logits) if sampled else None, with_logprobs
