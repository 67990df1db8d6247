"""The ops of context parallelism: for few rows by each other's memory, otherwise by the collectives of torch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vattn.config.device import has_triton
from vattn.distributed import combine as collectives
from vattn.distributed.group import ContextParallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from vattn.distributed.inbox import Inbox

MOST_ROWS = 1024
"""Heads of a rank times tokens up to which an inbox is used; all of them fit on a GPU at once."""

_inboxes: WeakKeyDictionary[ProcessGroup, dict[tuple[object, ...], Inbox | None]] = WeakKeyDictionary()


def writes_to_others(query: Tensor) -> bool:
    """Return whether a layer's ranks may exchange heads by each other's memory: not on which group they are."""
    return query.device.type == "cuda" and query.dtype.itemsize == 2 and query.shape[-1] % 2 == 0 and has_triton()


def gather_heads(part: Tensor, rank: int, world_size: int, group: str) -> Tensor:
    """Return `[T, world_size * h, D]` of every rank's `[T, h, D]`, in the order of ranks."""
    part, gathered = part.contiguous(), part.new_empty((part.shape[0], world_size * part.shape[1], part.shape[2]))
    inbox = _inbox_of(part, part.shape[2], group, "queries")
    if inbox is None:
        return collectives.gather_heads(part, ContextParallel(rank, world_size, group_name=group))
    from vattn.kernels.triton.attention.exchange_heads import launch_gather_heads

    launch_gather_heads(inbox, part, gathered)
    return gathered


def combine_heads(
    output: Tensor, lse: Tensor, sinks: Tensor | None, combined: Tensor, rank: int, world_size: int, group: str
) -> None:
    """Write the combined results `[T, h, V]` of a rank's heads, from its parts `[T, world_size * h, V]` of all.

    Args:
        lse: fp32 `[T, world_size * h]`.
        sinks: `[world_size * h]`.
    """
    inbox = _inbox_of(combined, combined.shape[2] + 2, group, "parts")
    if inbox is None:
        parallel = ContextParallel(rank, world_size, combine="all_to_all", group_name=group)
        combined.copy_(collectives.combine(output, lse, parallel, sinks)[0])
        return
    from vattn.kernels.triton.attention.exchange_heads import launch_combine_heads

    launch_combine_heads(inbox, output.contiguous(), lse.contiguous(), combined, sinks)


def _inbox_of(rows: Tensor, width: int, group: str, use: str) -> Inbox | None:
    """Return the inbox for rows `[T, h, D]`, made at the first use; `None` where collectives do it.

    All ranks make it in the same step: they have the same rows. None of them uses it if one cannot.
    """
    if not writes_to_others(rows) or not 0 < rows.shape[0] * rows.shape[1] <= MOST_ROWS:
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group

    ranks: ProcessGroup = _resolve_process_group(group)  # type: ignore[arg-type, unused-ignore]
    made, key = _inboxes.setdefault(ranks, {}), (rows.device, width, use)
    if key not in made:
        if torch.cuda.is_current_stream_capturing():
            return None
        made[key] = _make_inbox(rows.device, width, ranks)
    return made[key]


def _make_inbox(device: torch.device, width: int, ranks: ProcessGroup) -> Inbox | None:
    from torch import distributed

    from vattn.distributed.inbox import Inbox

    inbox = None
    # Other hosts, or GPUs that cannot write to each other.
    with contextlib.suppress(RuntimeError, ImportError):
        inbox = Inbox(ranks, device, width, MOST_ROWS)
    made = torch.tensor([inbox is not None], dtype=torch.int32, device=device)
    distributed.all_reduce(made, distributed.ReduceOp.MIN, group=ranks)
    return inbox if int(made) else None
