"""Launch a step: its inputs, the model or its graph, and the sampler. Nothing here waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vattn.compilation.cuda_graph import CUDAGraphRunner
from vattn.errors import VattnError
from vattn.generation.cache_blocks import CacheBlocks
from vattn.generation.logprobs import StepLogprobs, TokenLogprobs, compute_logprobs
from vattn.generation.request import Request
from vattn.generation.sampler import Sampler, SamplingMetadata
from vattn.generation.scheduler import Batch
from vattn.generation.transfers import on_device, on_host, to_host
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context

Outcome = tuple[Tensor, AttentionMetadata, CUDAGraphRunner | None]


@dataclass
class Launched:
    """A running step.

    Attributes:
        batch: what it computes.
        tokens: int64 `[N]` on the device, the tokens that it chooses: one for each ready request, and one after each
            of its drafts.
        result: int64 `[2, N]` on the host as soon as `done`: the tokens, and whether their logits could be used.
        errors: what the logits processors of a request raised, by row of `tokens`.
        metadata: of the step.
        runner: the graphs that hold it, `None` if it runs without.
        step_logprobs: log-probabilities, on the host as soon as `done`; `None` if no request of the step gets any.
        begin, done: events around the step, `None` without a GPU.
        waited: seconds for which `read` waited for the device.
    """

    batch: Batch
    tokens: Tensor
    result: Tensor
    errors: dict[int, VattnError]
    metadata: AttentionMetadata
    runner: CUDAGraphRunner | None = None
    step_logprobs: StepLogprobs | None = None
    begin: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    waited: float = 0.0

    def read(self) -> tuple[list[int], list[int]]:
        """Wait for the step and return its tokens, and 1 for tokens with usable logits."""
        if self.done is not None:
            begin = time.perf_counter()
            self.done.synchronize()
            self.waited = time.perf_counter() - begin
        tokens, usable = self.result.tolist()
        return tokens, usable

    def logprobs(self, row: int, count: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens of some rows, after `read`; none if their request gets none."""
        return self.step_logprobs.of_rows(row, count) if self.step_logprobs is not None else []

    @property
    def device_seconds(self) -> float:
        """Time on the device, after `read`; 0 without a GPU."""
        if self.begin is None or self.done is None:
            return 0.0
        return self.begin.elapsed_time(self.done) / 1e3


class ModelRunner:
    """Launch the steps that a scheduler plans.

    Args:
        forward: the model, compiled or not.
        builder: where metadata comes from.
        graphs: one runner each, or `None`, for steps of one token a request, with drafts, and with prompts.
        blocks: hold the block tables.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        builder: AttentionMetadataBuilder,
        graphs: tuple[CUDAGraphRunner | None, CUDAGraphRunner | None, CUDAGraphRunner | None],
        blocks: CacheBlocks,
    ) -> None:
        self.forward, self.builder, self.graphs, self.blocks = forward, builder, graphs, blocks
        self.device = builder.device
        self._sampler = Sampler(builder.max_num_reqs)
        # An inference tensor, as in `launch`: another kind would compile another graph.
        with torch.inference_mode():
            self._row_numbers = torch.arange(builder.max_num_reqs, device=self.device)

    @torch.inference_mode()
    def launch(self, batch: Batch, before: Launched | None = None) -> Launched:
        """Launch a step.

        Args:
            batch: what it computes, of requests that have their blocks.
            before: the step before, if it has not been read: its tokens are taken on the device.
        """
        begin = torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else None
        if before is not None and batch.follows and not self.blocks.cache.groups:
            logits, metadata, runner = self._advance(batch, before, begin)
        else:
            logits, metadata, runner = self._run(batch, before, begin)
        requests, positions, sampled, with_logprobs = _chosen(batch, logits)
        tokens, result, errors = self._sampler.choose(logits, requests, positions, sampled)
        launched = Launched(batch, tokens, to_host(result), errors, metadata, runner)
        if with_logprobs or batch.prompt_logprobs:
            launched.step_logprobs = compute_logprobs(logits, tokens, requests, with_logprobs, batch.prompt_logprobs)
            launched.step_logprobs.values = to_host(launched.step_logprobs.values)
        if begin is not None:
            launched.begin, launched.done = begin, torch.cuda.Event(enable_timing=True)
            launched.done.record()
        return launched

    def _run(self, batch: Batch, before: Launched | None, begin: torch.cuda.Event | None) -> Outcome:
        """Run a step, replaying a graph where one holds it; note when it begins."""
        if batch.follows:
            ends, counts = batch.positions(), [1] * batch.ready
        else:
            ends, counts = batch.ends, [end - start for start, end in zip(batch.starts, batch.ends, strict=True)]
        ids, rows = self._ids(batch, counts, before), self._rows(batch, counts)
        tables: Any = self.blocks.rows(batch.requests, max(ends))
        total = sum(counts)
        graphs = self._graphs(batch, counts)
        if graphs is not None and graphs.key_for(len(counts), total) is not None:
            metadata = graphs.build(on_host(counts), on_host(ends), tables)
            ids = ids[:total]
        else:
            graphs = None
            metadata = self.builder.build(on_host(counts), on_host(ends), tables, num_tokens_padded=ids.shape[0])
        return self._forward(ids, metadata, rows, graphs, begin)

    def _graphs(self, batch: Batch, counts: list[int]) -> CUDAGraphRunner | None:
        """Return the graphs of a kind of step."""
        if batch.prompt_logprobs:
            return None
        plain, with_drafts, mixed = self.graphs
        if max(counts) <= 1 + max(map(len, batch.drafts), default=0):
            return with_drafts if batch.drafts else plain
        # A step with both prompts and drafts has no fixed number of rows.
        return None if batch.drafts else mixed

    def _advance(self, batch: Batch, before: Launched, begin: torch.cuda.Event | None) -> Outcome:
        """Run the step after a running one of the same requests, from its metadata."""
        count, ids = batch.ready, before.tokens
        metadata = self.builder.advance(before.metadata, batch.new_blocks[0])
        if count == 1 and before.runner is None:
            ids = ids.repeat(2)
        return self._forward(ids, metadata, self._row_numbers[: max(2, count)], before.runner, begin)

    def _forward(
        self,
        ids: Tensor,
        metadata: AttentionMetadata,
        rows: Tensor | None,
        graphs: CUDAGraphRunner | None,
        begin: torch.cuda.Event | None,
    ) -> Outcome:
        """Return the logits of every chosen token, what describes the step, and the graphs that were replayed."""
        if begin is not None:
            begin.record()
        inputs = model_inputs(ids, metadata, rows)
        if graphs is not None:
            return graphs(*inputs, metadata=metadata), metadata, graphs
        # Graphs compute what they captured, whatever has changed; this step does not.
        self.blocks.look()
        with torch.inference_mode(False):
            # Not inference tensors, as in captures: those would compile a whole model once more.
            inputs = [tensor.clone() if tensor.is_inference() else tensor for tensor in inputs]
        with forward_context(metadata):
            return self.forward(*inputs), metadata, None

    def _rows(self, batch: Batch, counts: list[int]) -> Tensor | None:
        """Return the rows of a step that need logits; `None` for the last one of each request."""
        if not batch.drafts and not batch.prompt_logprobs:
            return self._row_numbers[: max(2, len(counts))] if max(counts) == 1 else None
        ends = list(accumulate(counts))
        drafts = map(len, batch.drafts) if batch.drafts else [0] * batch.ready
        rows = [
            row for end, more in zip(ends[: batch.ready], drafts, strict=False) for row in range(end - 1 - more, end)
        ]
        for request, first, count in batch.prompt_logprobs:
            row = batch.requests.index(request)
            begin = ends[row] - batch.ends[row] + first - 1
            rows += range(begin, begin + count)
        # One row would compile a graph of its own.
        return on_device(rows if len(rows) > 1 else rows * 2, self.device)

    def _ids(self, batch: Batch, counts: list[int], before: Launched | None) -> Tensor:
        """Return int64 ids on the device, two at least: one token would compile a graph of its own."""
        if before is not None and batch.follows:
            return before.tokens if len(counts) > 1 else before.tokens.repeat(2)
        ids: list[int] = []
        sources: list[int] = []
        for index, (request, start, count) in enumerate(zip(batch.requests, batch.starts, counts, strict=True)):
            if request.pending and start + count == request.num_tokens:
                ids += request.tokens(start, start + count - 1)
                sources += [-1] * (len(ids) - len(sources))
                sources.append(request.pending_row)
                ids.append(0)
            elif batch.drafts and batch.drafts[index]:
                ids.append(request.output[-1])
                ids += batch.drafts[index]
            else:
                ids += request.tokens(start, start + count)
        ids += [0] * (2 - len(ids))
        if before is None or not sources:
            return on_device(ids, self.device)
        sources += [-1] * (len(ids) - len(sources))
        return _merged(ids, sources, before)


def _merged(ids: list[int], sources: list[int], before: Launched) -> Tensor:
    """Return ids on the device: `ids`, and where `sources` has no -1 a token that the step before chooses."""
    if max(sources) < 0:
        return on_device(ids, before.tokens.device)
    if sources == list(range(before.tokens.shape[0])):
        return before.tokens
    both = on_device(ids + sources, before.tokens.device).view(2, -1)
    return torch.where(both[1] >= 0, before.tokens[both[1].clamp(min=0)], both[0])


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
            positions += range(end - len(drafts), end + 1)
    sampled = [row for row, request in enumerate(requests) if not request.greedy]
    with_logprobs = [row for row, request in enumerate(requests) if request.logprobs is not None]
    return requests, positions, SamplingMetadata.of(requests, sampled, logits) if sampled else None, with_logprobs


def model_inputs(ids: Sequence[int] | Tensor, metadata: AttentionMetadata, rows: Tensor | None = None) -> list[Tensor]:
    """Return what a model takes for a step: token ids, positions, and the rows that need logits.

    Args:
        ids: `[T]`.
        metadata: of the step.
        rows: int64; default each request's last one.
    """
    assert metadata.positions is not None
    if rows is None:
        rows = (metadata.query_start_loc[1:] - 1).clamp(min=0).long()
    if not isinstance(ids, Tensor):
        ids = torch.tensor(ids).to(rows.device)
    return [ids, metadata.positions, rows]


def sample_inputs(metadata: AttentionMetadata) -> list[Tensor]:
    """Return inputs of any content for a step, to capture it with."""
    return model_inputs([0] * metadata.slot_mapping.shape[0], metadata)


def sample_draft_inputs(metadata: AttentionMetadata) -> list[Tensor]:
    """Return inputs of any content for a step that computes logits of all tokens, to capture it with."""
    count = metadata.slot_mapping.shape[0]
    return model_inputs([0] * count, metadata, torch.arange(count, device=metadata.slot_mapping.device))
