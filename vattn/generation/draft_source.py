"""`DraftSource`: where drafts of the next tokens come from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vattn.generation.batch import Batch
from vattn.generation.cache_blocks import CacheBlocks
from vattn.generation.model_steps import Ran
from vattn.generation.request import Request
from vattn.metadata.token_tree import TokenTree


@dataclass(frozen=True)
class ServedModel:
    """What a draft source must know of the generator that it drafts for.

    Attributes:
        model: the target.
        blocks: the blocks of its requests.
        max_num_reqs, token_budget, max_seq_len: of the generator.
        compile, compile_options: of the generator.
        graph_sizes: numbers of decoding requests that are captured.
        sharded: whether its weights are sharded over ranks.
        forward: runs the target; what `DraftSource.watch` returned.
    """

    model: nn.Module
    blocks: CacheBlocks
    max_num_reqs: int
    token_budget: int
    max_seq_len: int
    compile: str | None = None
    compile_options: dict[str, Any] | None = None
    graph_sizes: Sequence[int] = ()
    sharded: bool = False
    forward: Any = None


class DraftSource:
    """Where drafts come from: the `speculation` of a generator.

    Attributes:
        num_drafts: most tokens that are drafted for a request; a step verifies them together.
        beside_prompts: whether steps that hold prompts may have drafts too.
        launches: whether `launch` runs anything.
        tree: how the `num_drafts` drafts of a request branch; `None`: not at all, and there may be fewer.
    """

    num_drafts: int
    tree: TokenTree | None = None
    beside_prompts, launches = True, False

    def watch(self, served: ServedModel, forward: Any, num_tokens: int) -> Any:
        """Return what runs the target instead of `forward`, for a source that looks at what it computes.

        Args:
            served: without `forward`.
            forward: runs the target.
            num_tokens: most tokens of a step.
        """
        return forward

    def start(self, served: ServedModel) -> DraftSource:
        """Return the source for one generator; refuse a generator that it cannot draft for."""
        return self

    @abstractmethod
    def plan(self, request: Request, most: int) -> list[int]:
        """Return drafts of a request's next tokens: up to `most`, `UNKNOWN` for tokens that `launch` will choose.

        With a tree: one for each node in the tree's order, siblings that differ, or none.
        The scheduler takes blocks for them. `request.output` holds all tokens so far.
        """

    def launch(self, batch: Batch, begin: torch.cuda.Event | None) -> Ran | None:
        """Launch what a step needs before it, without waiting for the device; called for every step.

        Args:
            batch: its plan, with `UNKNOWN` drafts.
            begin: recorded before the first kernel; `None` without a GPU.

        Returns:
            All drafts of the batch as its `tokens`, one request after the other; `None` if the batch holds them.
        """
        return None


UNKNOWN = 0
"""Stands for a draft that is on the device."""
