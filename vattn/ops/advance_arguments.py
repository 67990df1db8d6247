"""Arguments of the op that advances a decode step on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AdvanceArgs(NamedTuple):
    """The tensors of a batch of decodes, one row a request; all but two are mutated.

    R requests, padding included; a request of length 0 is padding and stays as it is. The tensors of the tokens and
    `slot_mapping` may have fewer rows, at least `num_queries`.
    """

    input_tokens: Tensor
    """int32 or int64 `[R]`; becomes `sampled`."""
    input_positions: Tensor
    """int32 or int64 `[R]`; becomes the length before."""
    positions: Tensor
    """int64 `[R]`: the same for the metadata; may be the same memory."""
    sampled: Tensor
    """int32 or int64, at least `num_queries`; read."""
    seq_lens: Tensor
    """int32 `[R]`; one more."""
    context_lens: Tensor
    """int32 `[R]`; the length before."""
    query_start_loc: Tensor
    """int32 `[R + 1]`; changes with `from_prefills` alone, to one row a request."""
    seq_start_loc: Tensor
    """int32 `[R + 1]`; grows by one for every request in front."""
    slot_mapping: Tensor
    """int64 `[R]`; where the new token goes: -1 where the table has no block for it."""
    block_table: Tensor
    """int32 `[R, W]`; read. A negative entry is no block."""
    block_size: int
    num_queries: int
    """Requests that may move; later ones are padding."""
    from_prefills: bool = False
    """The step before had prefills: rows and offsets were theirs."""
