"""Steps of a model in a pipeline of ranks: hidden states go from stage to stage, logits back to the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from vattn.errors import ConfigError
from vattn.generation.model_steps import Outcome, Ran, StepInputs
from vattn.generation.ranks import RankSteps
from vattn.generation.transfers import on_device

MICROBATCH = 512
"""Least tokens of a microbatch: products of fewer rows take as long as reading the weights."""


def is_stage(model: Any) -> bool:
    """Return whether a model is one stage of a pipeline."""
    return getattr(model, "stage", None) is not None


def sizes_of_stage(model: Any, mixed_graph_sizes: Any, compile: str | None) -> Any:
    """Return the sizes of graphs of steps with prompts: none for a stage of a pipeline.

    Raises:
        ConfigError: graphs of steps with prompts, which run in microbatches, or one compiled graph of all.
    """
    if not is_stage(model):
        return mixed_graph_sizes
    wrong = {"mixed_graph_sizes": mixed_graph_sizes, "compile='model'": compile == "model"}
    for name, given in wrong.items():
        if given:
            raise ConfigError(f"{name} for a model in a pipeline", "graph_sizes, and compile='layers'", "leave it out")
    return ()


def part_of_pipeline(forward: Any, model: Any, capacity: int) -> Any:
    """Return what runs the layers of this rank, for steps of up to `capacity` tokens."""
    return model.one_stage(capacity) if is_stage(model) else forward


def steps_of_ranks(model: Any) -> type[RankSteps]:
    """Return which steps the ranks of a model run."""
    return PipelineSteps if is_stage(model) else RankSteps


class PipelineSteps(RankSteps):
    """Steps over the stages of a pipeline: rank 0 plans them, embeds their tokens and gets their logits.

    A step with prompts is cut into microbatches, as many as stages at most, so that all stages compute at once.
    """

    def compute(self, step: StepInputs, before: Ran | None, begin: torch.cuda.Event | None = None) -> Outcome:
        """Run this stage's layers; see `ModelSteps.run`. Only rank 0 returns logits."""
        model: Any = self.forward
        stage, work = model.stage, []
        parts = self._parts(step, before)
        if not stage.is_first:
            # All of them before anything is sent: NCCL keeps the order of what two ranks exchange.
            for part in parts:
                work.append(stage.receive(model.hidden[part.start : part.start + part.num_tokens]))
        sent: list[Any] = []
        for index, part in enumerate(parts):
            if work:
                work[index].wait()
            model.start = part.start
            out, metadata, graphs = super().compute(part.step, before, begin if index == 0 else None)
            count = len(part.wanted) if stage.is_last else part.num_tokens
            sent += [stage.send(out[:count])] if count else []
        if stage.is_first:
            received = [stage.logits(len(part.wanted)) for part in parts]
            sent += [stage.receive(logits) for logits in received if logits.shape[0]]
        for each in sent:
            each.wait()
        if not stage.is_first:
            return out[:0], metadata, graphs
        return self._in_order(received, parts), metadata, graphs

    def share_tokens(self, tokens: Tensor) -> None:
        """Do nothing: only rank 0 embeds tokens."""

    def _in_order(self, logits: list[Tensor], parts: list[Part]) -> Tensor:
        if len(parts) == 1:
            return logits[0]
        wanted = [row for part in parts for row in part.wanted]
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        return torch.cat(logits).index_select(0, on_device(order, self.device))

    def _parts(self, step: StepInputs, before: Ran | None) -> list[Part]:
        model: Any = self.forward
        num_tokens = len(step.ids) if step.new_blocks is None else before.tokens.shape[0]  # type: ignore[union-attr]
        parts = min(model.stage.size, num_tokens // MICROBATCH)
        if parts > 1 and max(step.counts, default=1) > 1:
            return list(cut(step, parts))
        if step.rows is not None:
            count = len(step.rows)
        else:
            count = len(step.counts) if step.new_blocks is None else num_tokens
        return [Part(step, 0, num_tokens, list(range(count)))]


class Part:
    """A microbatch of a step.

    Attributes:
        step: what it computes.
        start, num_tokens: where its tokens begin in the whole step, and how many there are.
        wanted: for each row of its logits, its place among the rows of the whole step.
    """

    def __init__(self, step: StepInputs, start: int, num_tokens: int, wanted: list[int]) -> None:
        self.step, self.start, self.num_tokens, self.wanted = step, start, num_tokens, wanted


def cut(step: StepInputs, count: int) -> Iterator[Part]:
    """Cut a step into microbatches of as many tokens each; a request that is cut becomes consecutive chunks."""
    offsets = [0, *accumulate(step.counts)]
    total = offsets[-1]
    rows = [end - 1 for end in offsets[1:]] if step.rows is None else list(step.rows)
    edges = [total * index // count for index in range(count + 1)]
    for start, end in pairwise(edges):
        requests = [i for i, (a, b) in enumerate(pairwise(offsets)) if a < end and b > start]
        wanted = [place for place, row in enumerate(rows) if start <= row < end]
        part = replace(
            step,
            counts=[min(offsets[i + 1], end) - max(offsets[i], start) for i in requests],
            ends=[step.ends[i] - max(0, offsets[i + 1] - end) for i in requests],
            ids=step.ids[start:end],
            sources=step.sources[start:end],
            tables=_rows_of(step.tables, requests),
            # One row at least: models take no empty list of rows.
            rows=[rows[place] - start for place in wanted] or [0],
            graphs=None,
        )
        yield Part(part, start, end - start, wanted)


def _rows_of(tables: Any, requests: list[int]) -> Any:
    if isinstance(tables, (list, tuple)) and tables and hasattr(tables[0], "shape"):
        return [table[requests] for table in tables]
    return tables[requests]
