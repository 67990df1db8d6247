"""Put a step on the device: inputs, the model or its graph, the choice of tokens. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vattn.context import forward_context
from vattn.cuda_graph import CUDAGraphRunner
from vattn.generation.request import Request
from vattn.generation.sampler import choose_tokens
from vattn.generation.scheduler import Part, Scheduler
from vattn.metadata import AttentionMetadata
from vattn.metadata_builder import AttentionMetadataBuilder


@dataclass
class Launched:
    """A step on its way.

    Attributes:
        parts: what it computes.
        ready: those of them whose requests get a token.
        tokens: int64 `[len(ready)]` on the device, those tokens.
        result: int64 `[2, len(ready)]` on the host as soon as `done`: the tokens, and whether their logits were finite.
        begin, done: events around the step, `None` without a GPU.
    """

    parts: list[Part]
    ready: list[Part]
    tokens: Tensor
    result: Tensor
    begin: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None

    def read(self) -> tuple[list[int], list[bool]]:
        """Wait for the step and return its tokens, and whether their logits were finite."""
        if self.done is not None:
            self.done.synchronize()
        tokens, usable = self.result.tolist()
        return tokens, [bool(flag) for flag in usable]

    @property
    def device_seconds(self) -> float:
        """Time on the device, after `read`; 0 without a GPU."""
        if self.begin is None or self.done is None:
            return 0.0
        return self.begin.elapsed_time(self.done) / 1e3


class Launcher:
    """Launches the steps that a scheduler plans.

    Args:
        forward: the model, compiled or not.
        builder, graphs: where metadata comes from; graphs for steps that only decode, or `None`.
        scheduler: whose block tables are used.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        builder: AttentionMetadataBuilder,
        graphs: CUDAGraphRunner | None,
        scheduler: Scheduler,
    ) -> None:
        self.forward, self.builder, self.graphs, self.scheduler = forward, builder, graphs, scheduler
        self.device = builder.device

    @torch.inference_mode()
    def launch(self, parts: list[Part], before: Launched | None = None) -> Launched:
        """Launch a step.

        Args:
            parts: what it computes, of requests whose blocks are taken.
            before: the step before, if it has not been read: tokens that it chooses are taken on the device.
        """
        cuda = self.device.type == "cuda"
        begin = torch.cuda.Event(enable_timing=True) if cuda else None
        # Those that get a token first: their rows are then the first ones of the logits.
        parts = sorted(parts, key=lambda part: part.end < part.request.num_tokens)
        ready = [part for part in parts if part.end == part.request.num_tokens]
        ids = self._ids(parts, before)
        lengths: dict[str, Any] = {
            "query_lens": [part.end - part.start for part in parts],
            "seq_lens": [part.end for part in parts],
            "block_tables": self.scheduler.table_rows(parts),
        }
        count = sum(lengths["query_lens"])
        decode = count == len(parts) and self.graphs is not None and self.graphs.key_for(count, count) is not None
        if decode and self.graphs is not None:
            metadata = self.graphs.build(**lengths)
        else:
            metadata = self.builder.build(**lengths, num_tokens_padded=ids.shape[0])
        if begin is not None:
            begin.record()
        if decode and self.graphs is not None:
            logits = self.graphs(*model_inputs(ids[:count], metadata), metadata=metadata)
        else:
            with forward_context(metadata):
                logits = self.forward(*model_inputs(ids, metadata))
        tokens, result = choose_tokens(logits, [part.request for part in ready])
        if not cuda:
            return Launched(parts, ready, tokens, result)
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        host.copy_(result, non_blocking=True)
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return Launched(parts, ready, tokens, host, begin, done)

    def _ids(self, parts: list[Part], before: Launched | None) -> Tensor:
        """Return int64 ids on the device, two at least: one token would compile a graph of its own."""
        places = {} if before is None else {part.request: row for row, part in enumerate(before.ready)}
        ids: list[int] = []
        sources: list[int] = []
        for part in parts:
            known = part.request.tokens(part.start, part.end)
            ids += known
            if len(known) < part.end - part.start:
                sources += [-1] * (len(ids) - len(sources))
                sources.append(places[part.request])
                ids.append(0)
        ids += [0] * (2 - len(ids))
        if before is None or not sources:
            return self._put(ids)
        sources += [-1] * (len(ids) - len(sources))
        both = self._put([ids, sources])
        return torch.where(both[1] >= 0, before.tokens[both[1].clamp(min=0)], both[0])

    def _put(self, values: Any) -> Tensor:
        cuda = self.device.type == "cuda"
        return torch.tensor(values, dtype=torch.int64, pin_memory=cuda).to(self.device, non_blocking=True)


def model_inputs(ids: Sequence[int] | Tensor, metadata: AttentionMetadata) -> list[Tensor]:
    """Return what a model takes for a step: token ids, positions, and the row of each request's last token."""
    assert metadata.positions is not None
    last = (metadata.query_start_loc[1:] - 1).clamp(min=0).long()
    if not isinstance(ids, Tensor):
        ids = torch.tensor(ids).to(last.device)
    return [ids, metadata.positions, last]


def sample_inputs(metadata: AttentionMetadata) -> list[Tensor]:
    """Return inputs of any content for a step, to capture it with."""
    return model_inputs([0] * metadata.slot_mapping.shape[0], metadata)


def needs_history(request: Request) -> bool:
    """Whether choosing a request's next token takes all its tokens on the host."""
    return request.sampling.repetition_penalty != 1 or bool(request.sampling.logits_processors)
