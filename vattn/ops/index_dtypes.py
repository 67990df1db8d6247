"""Lengths, offsets, block ids and slots come in int32 or int64; kernels read slots in int64 and the others in int32.

The ops convert what they are given. Layers convert before they call the ops, so that a compiled step does it once for
all of its layers. Nothing is read on the host.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

Args = TypeVar("Args", bound=tuple[Any, ...])

INDEX_DTYPES = (torch.int32, torch.int64)

_IN_INT32 = ("query_start_loc", "kv_start_loc", "seq_lens", "block_table")
_LIMITS = torch.iinfo(torch.int32)


def as_int32(indices: Tensor) -> Tensor:
    """Return indices as int32: themselves, or a copy in which what is too large or small stays so."""
    if indices.dtype != torch.int64:
        return indices
    return indices.clamp(_LIMITS.min, _LIMITS.max).to(torch.int32)


def as_int64(slots: Tensor) -> Tensor:
    """Return slots as int64: themselves, or a copy."""
    return slots.to(torch.int64) if slots.dtype == torch.int32 else slots


def with_read_dtypes(args: Args) -> Args:
    """Return the checked arguments of an op with indices as kernels read them; the same ones if they are."""
    found = {}
    for name in _IN_INT32:
        indices = getattr(args, name, None)
        if indices is not None and indices.dtype == torch.int64:
            found[name] = as_int32(indices)
    slots = getattr(args, "slot_mapping", None)
    if slots is not None and slots.dtype == torch.int32:
        found["slot_mapping"] = as_int64(slots)
    return args._replace(**found) if found else args  # type: ignore[attr-defined, no-any-return]
