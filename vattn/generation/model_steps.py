"""Run the model on a step, from what the host knows of it: every rank of a model makes the same tensors of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vattn.compilation.cuda_graph import CUDAGraphRunner
from vattn.generation.transfers import on_device, on_host
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context
from vattn.metadata.prompt_inputs import EncoderStep, PromptPart, StepEmbeddings, positions_of
from vattn.metadata.token_tree import TokenTree

T = TypeVar("T")
Outcome = tuple[Tensor, AttentionMetadata, CUDAGraphRunner | None]


PLAIN, DRAFTS, MIXED = range(3)
"""Kinds of steps, in the order of `Graphs`."""


class Graphs(NamedTuple):
    """The captured graphs of a generator, `None` where nothing is captured.

    Attributes:
        plain: for steps of one token a request.
        drafts: for steps with drafts.
        mixed: for steps with prompts.
    """

    plain: CUDAGraphRunner | None = None
    drafts: CUDAGraphRunner | None = None
    mixed: CUDAGraphRunner | None = None


@dataclass
class StepInputs:
    """What the model computes in a step.

    Attributes:
        counts, ends: new tokens of each request, and its length with them.
        ids: their token ids.
        sources: for each id -1, or the row of the token of the step before that is meant; empty for -1 everywhere.
        tables: int64 `[requests, W]`, block ids; a list of one for each group in a cache with groups.
        rows: rows of tokens that need logits; `None` for the last one of each request.
        graphs: the kind of graphs that may hold the step, `None` for none.
        state_slots: where each request has its state; `None` for models without states.
        adapters: the slot of each request's adapter, -1 for none.
        prompts: the parts of prompts that are more than ids, such as embeddings.
        offsets: how much further than its place the position of each request's tokens is; empty for nowhere.
        ranges: places of each request's tokens that see each other both ways; `None` for none.
        encoder: the encoder's side; `None` for models without.
        trees: the tree that each request verifies, `None` for none; `None`: no request does.
        new_blocks: where the step has the requests of the step before and one token of each: the blocks that begin with
            these tokens. All else is empty then.
    """

    counts: Sequence[int] = ()
    ends: Sequence[int] = ()
    ids: Sequence[int] = ()
    sources: Sequence[int] = ()
    tables: Any = None
    rows: Sequence[int] | None = None
    graphs: int | None = None
    state_slots: Sequence[int] | None = None
    adapters: Sequence[int] = ()
    new_blocks: Sequence[int] | None = None
    prompts: list[PromptPart] = field(default_factory=list)
    offsets: Sequence[int] = ()
    ranges: Sequence[Sequence[tuple[int, int]]] | None = None
    encoder: EncoderStep | None = None
    trees: Sequence[TokenTree | None] | None = None

    @property
    def continues(self) -> bool:
        """Whether it takes tokens from the step before."""
        return self.new_blocks is not None or bool(self.sources)


@dataclass
class Ran:
    """A step that was launched.

    Attributes:
        tokens: int64 `[N]` on the device, the tokens that it chooses: one for each ready request, and one after each
            of its drafts.
        metadata: of the step.
        runner: the graphs that hold it, `None` if it runs without.
    """

    tokens: Tensor
    metadata: AttentionMetadata
    runner: CUDAGraphRunner | None


class ModelSteps:
    """Run a model on steps.

    Args:
        forward: the model, compiled or not.
        builder: where metadata comes from.
        graphs: of the generator.
    """

    def __init__(self, forward: Callable[..., Tensor], builder: AttentionMetadataBuilder, graphs: Graphs) -> None:
        self.forward, self.builder, self.graphs = forward, builder, graphs
        self.device = builder.device
        # An inference tensor, as in `run`: another kind would compile another graph.
        with torch.inference_mode():
            self._row_numbers = torch.arange(builder.max_num_reqs, device=self.device)
        # Of the tokens of the last step, on the device; `None` for 0 everywhere.
        self._offsets: Tensor | None = None

    def check(self) -> None:
        """Refuse requests and steps where none can run: see `RankSteps`."""

    def read(self, wait: Callable[[], T]) -> T:
        """Return what `wait` returns once a step is over."""
        return wait()

    @torch.inference_mode()
    def run(self, step: StepInputs, before: Ran | None, begin: torch.cuda.Event | None = None) -> Outcome:
        """Run a step, replaying a graph where one holds it.

        Args:
            step: what it computes.
            before: the step before; needed by steps that continue it.
            begin: recorded when the model begins.

        Returns:
            The logits of every chosen token, what describes the step, and the graphs that were replayed.
        """
        if step.new_blocks is not None:
            assert before is not None
            return self._advance(before, step.new_blocks, begin)
        ids, rows = self._ids(step, before), self._rows(step)
        self._offsets = None
        if any(step.offsets):
            each = [offset for offset, count in zip(step.offsets, step.counts, strict=True) for _ in range(count)]
            self._offsets = on_device(each, self.device)
        counts, ends, tables = on_host(step.counts), on_host(step.ends), step.tables
        graphs = None if step.graphs is None else self.graphs[step.graphs]
        trees: dict[str, Any] = {} if step.trees is None else {"trees": step.trees}
        if graphs is not None and graphs.key_for(len(step.counts), len(step.ids)) is not None:
            # The device waits for a step with drafts, and for no other.
            later = step.graphs == DRAFTS
            metadata = graphs.build(
                counts,
                ends,
                tables,
                check_model=not later,
                state_slots=step.state_slots,
                **trees,
                **_encoder_side(step),
            )
            outcome = self._forward(ids[: len(step.ids)], metadata, rows, graphs, begin)
            if later and graphs.captured:
                graphs.check_model()
            return outcome
        metadata = self.builder.build(
            counts,
            ends,
            tables,
            num_tokens_padded=ids.shape[0],
            mm_ranges=step.ranges,
            state_slots=step.state_slots,
            **trees,
            **_encoder_side(step),
        )
        states = None if step.encoder is None else step.encoder.states
        return self._forward(ids, metadata, rows, None, begin, step.prompts, states)

    def _advance(self, before: Ran, new_blocks: Sequence[int], begin: torch.cuda.Event | None) -> Outcome:
        """Run the step after another one of the same requests, from its metadata."""
        metadata, ids = self.builder.advance(before.metadata, new_blocks), before.tokens
        count = ids.shape[0]
        graphs = before.runner
        if count == 1 and graphs is None:
            ids = ids.repeat(2)
        outcome = self._forward(ids, metadata, self._row_numbers[: max(2, count)], graphs, begin)
        if graphs is not None and graphs.captured:
            # While the device runs. A refused step is dropped, with the step before.
            graphs.check_model()
        return outcome

    def _forward(
        self,
        ids: Tensor,
        metadata: AttentionMetadata,
        rows: Tensor | None,
        graphs: CUDAGraphRunner | None,
        begin: torch.cuda.Event | None,
        prompts: Sequence[PromptPart] = (),
        states: Tensor | None = None,
    ) -> Outcome:
        if begin is not None:
            begin.record()
        inputs = model_inputs(ids, metadata, rows)
        if self._offsets is not None:
            missing = inputs[1].shape[0] - self._offsets.shape[0]
            inputs[1] = inputs[1] + torch.nn.functional.pad(self._offsets, (0, missing))
        if graphs is not None:
            return graphs(*inputs, metadata=metadata), metadata, graphs
        inputs = _outside(inputs)
        with forward_context(metadata):
            if prompts:
                inputs[1] = positions_of(prompts, inputs[1])
                # A model that is compiled whole has one graph, for ids.
                model = getattr(self.forward, "_orig_mod", self.forward)
                return model(*inputs, StepEmbeddings(prompts)), metadata, None
            if states is not None:
                return self.forward(*inputs, states), metadata, None
            return self.forward(*inputs), metadata, None

    def _rows(self, step: StepInputs) -> Tensor | None:
        """Return the rows that need logits on the device, two at least: one would compile a graph of its own."""
        if step.rows is None:
            return self._row_numbers[: max(2, len(step.counts))] if max(step.counts) == 1 else None
        return on_device(step.rows if len(step.rows) > 1 else [*step.rows] * 2, self.device)

    def _ids(self, step: StepInputs, before: Ran | None) -> Tensor:
        """Return int64 ids on the device, two at least: one token would compile a graph of its own."""
        padding = [0] * (2 - len(step.ids))
        ids = [*step.ids, *padding]
        if not step.sources or max(step.sources) < 0:
            return on_device(ids, self.device)
        assert before is not None
        tokens, sources = before.tokens, [*step.sources, *(-1 for _ in padding)]
        if sources == list(range(tokens.shape[0])):
            return tokens
        both = on_device(ids + sources, self.device).view(2, -1)
        return torch.where(both[1] >= 0, tokens[both[1].clamp(min=0)], both[0])


def _outside(inputs: list[Tensor]) -> list[Tensor]:
    """Return inputs that are no inference tensors, as in captures: those would compile a whole model once more."""
    with torch.inference_mode(False):
        return [tensor.clone() if tensor.is_inference() else tensor for tensor in inputs]


def _encoder_side(step: StepInputs) -> dict[str, Any]:
    """Return what describes the encoder's side to a builder; nothing for models without."""
    encoder = step.encoder
    if encoder is None:
        return {}
    return {"encoder_lens": encoder.lengths, "new_encoder": encoder.new, "cross_block_tables": encoder.tables}


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
