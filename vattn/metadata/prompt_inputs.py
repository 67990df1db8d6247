"""What a prompt gives a model besides token ids, and the part of it that a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PromptInputs:
    """What a prompt of n tokens gives a model besides token ids.

    Attributes:
        embeddings: `[n, H]`, in place of the output of the model's embedding layer; `None` to use that layer.
        positions: int64 `[K, n]`, for models whose tokens have K positions each; `None`: their places.
        offset: how much further than its place the position of a token after the prompt is.
        added: `[L, n, H]`, what the first L layers add to their outputs; `None` for nothing.
        ranges: `(start, end)`, both inclusive: places of tokens that see each other both ways.
        encoder_states: `[S, H]`, what cross attention sees; `None` for models without.
        identities: `(start, end, identity)`: what the tokens at `start` to `end - 1` are besides their ids.
    """

    embeddings: Tensor | None = None
    positions: Tensor | None = None
    offset: int = 0
    added: Tensor | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    identities: tuple[tuple[int, int, bytes], ...] = ()
    encoder_states: Tensor | None = None

    def identity(self, start: int, end: int) -> bytes:
        """Return what the tokens at `start` to `end - 1` are besides their ids; empty for nothing."""
        found = [(a - start, b - start, name) for a, b, name in self.identities if a < end and b > start]
        return repr(found).encode() if found else b""

    def whole(self, start: int, end: int) -> int:
        """Return how far a step from `start` may go towards `end`, so that it cuts no range; `start` if nowhere."""
        for first, last in self.ranges:
            if first < end <= last:
                return max(start, first)
        return end


@dataclass(frozen=True, eq=False)
class PromptPart:
    """Tokens of a prompt that a step computes.

    Attributes:
        row: of the first of them in the step.
        inputs: of the whole prompt.
        start, end: places `start` to `end - 1`.
    """

    row: int
    inputs: PromptInputs
    start: int
    end: int


class StepEmbeddings:
    """The rows of a step that come with embeddings.

    Args:
        parts: of the prompts in the step, one at least.

    Attributes:
        rows: int64 `[M]`.
        embeddings: `[M, H]`.
        added: `[L, M, H]`, see `PromptInputs`; `None` for nothing.
    """

    def __init__(self, parts: Sequence[PromptPart]) -> None:
        given = [p.inputs.embeddings[p.start : p.end] for p in parts if p.inputs.embeddings is not None]
        rows = torch.cat([torch.arange(p.row, p.row + p.end - p.start) for p in parts])
        self.embeddings = torch.cat(given)
        self.rows = rows.to(self.embeddings.device)
        self.added: Tensor | None = None
        depth = max(0 if part.inputs.added is None else part.inputs.added.shape[0] for part in parts)
        if depth:
            nothing = self.embeddings.new_zeros(depth, 1, self.embeddings.shape[1])
            self.added = torch.cat(
                [
                    nothing.expand(-1, part.end - part.start, -1)
                    if part.inputs.added is None
                    else part.inputs.added[:, part.start : part.end]
                    for part in parts
                ],
                1,
            )


def positions_of(parts: Sequence[PromptPart], positions: Tensor) -> Tensor:
    """Return the positions `[K, T]` of a step, or `[T]` as they are if no prompt has its own.

    Args:
        positions: int64 `[T]`, offsets included.
    """
    own = [part for part in parts if part.inputs.positions is not None]
    if not own:
        return positions
    kinds = own[0].inputs.positions.shape[0]  # type: ignore[union-attr]
    found = positions.expand(kinds, -1).clone()
    for part in own:
        assert part.inputs.positions is not None
        found[:, part.row : part.row + part.end - part.start] = part.inputs.positions[:, part.start : part.end]
    return found


@dataclass(frozen=True, eq=False)
class EncoderStep:
    """The encoder's side of a step of a model with cross attention.

    Attributes:
        lengths: encoder states of each request.
        new: whether they are written in this step.
        tables: blocks of each request's states.
        states: `[S, H]`, those that are written, one request after the other; `None` for none.
    """

    lengths: list[int]
    new: list[bool]
    tables: list[list[int]]
    states: Tensor | None
