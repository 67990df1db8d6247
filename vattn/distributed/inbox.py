"""`Inbox`: memory of this rank that the other ranks of a group write to, for sums of few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FLAGS = 1024
"""Entries of `flag`, which are written together: every thread of a kernel reads its own."""


class Inbox:
    """What a rank needs to sum rows of 16-bit values with the other ranks of a group, on one host.

    Args:
        group: of GPUs that can write to each other's memory; every rank makes an inbox at the same time.
        device: of this rank.
        width: values of a row, an even number.
        most_rows: rows of the largest sum.

    Attributes:
        rank, world_size: of the group.
        addresses: int64 `[world_size]`, of the inboxes of all ranks.
        counts: int32 `[most_rows]`, how often each row was summed.
        flag: int32 `[FLAGS]` in the host's memory; ones end all waiting.

    Raises:
        RuntimeError: torch cannot share the memory.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, width: int, most_rows: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.rank, self.world_size = group.rank(), group.size()
        self.width, self.most_rows = width, most_rows
        shape = 2, self.world_size, most_rows, width // 2
        self._memory = symmetric.empty(shape, dtype=torch.int64, device=device)
        # Counts begin at one. Nothing is written by others before all have met.
        self._memory.zero_()
        self.counts = torch.zeros(most_rows, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._handle: Any = symmetric.rendezvous(self._memory, group)
        self.addresses = torch.tensor(list(self._handle.buffer_ptrs), dtype=torch.int64, device=device)
        self.flag: Tensor = torch.zeros(FLAGS, dtype=torch.int32, pin_memory=True)

    def abort(self) -> None:
        """Let kernels that wait for other ranks end; what they and later ones compute is anything."""
        self.flag.fill_(1)
