"""`Stage`: one rank's layers of a model that several ranks hold one after another, and what they send to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Stage:
    """One stage of a pipeline: rank 0 embeds tokens, each rank runs its layers, the last one computes logits.

    Args:
        group: the ranks of the pipeline, in its order.
        hidden_size: columns of the hidden states that go from rank to rank.
        vocab_size: columns of logits.
        dtype, device: of both.

    Attributes:
        rank, size: of this stage, and how many there are.
    """

    def __init__(
        self, group: ProcessGroup, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        from torch import distributed

        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.hidden_size, self.vocab_size, self.dtype, self.device = hidden_size, vocab_size, dtype, device
        self._ranks = [distributed.get_global_rank(group, rank) for rank in range(self.size)]

    @property
    def is_first(self) -> bool:
        """Return whether this stage embeds tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Return whether this stage computes logits."""
        return self.rank == self.size - 1

    def send(self, tensor: Tensor) -> Any:
        """Begin to send this stage's result: hidden states to the next stage, logits to the first; return the work."""
        from torch import distributed

        return distributed.isend(tensor.contiguous(), self._ranks[(self.rank + 1) % self.size], group=self.group)

    def receive(self, tensor: Tensor) -> Any:
        """Begin to receive from the stage before, the first stage from the last one, and return the work."""
        from torch import distributed

        return distributed.irecv(tensor, self._ranks[self.rank - 1], group=self.group)

    def hidden_states(self, num_tokens: int) -> Tensor:
        """Return zeros `[num_tokens, hidden_size]`."""
        return torch.zeros(num_tokens, self.hidden_size, dtype=self.dtype, device=self.device)

    def logits(self, num_rows: int) -> Tensor:
        """Return an uninitialised `[num_rows, vocab_size]`."""
        return torch.empty(num_rows, self.vocab_size, dtype=self.dtype, device=self.device)

    def share_logits(self, logits: Tensor) -> Tensor:
        """Return the last stage's logits on every rank; others pass a tensor of the same shape."""
        from torch import distributed

        logits = logits.contiguous()
        distributed.broadcast(logits, self._ranks[-1], group=self.group)
        return logits
