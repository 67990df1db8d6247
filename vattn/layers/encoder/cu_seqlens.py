"""Offsets of packed sequences, `cu_seqlens`: checked on the host, and padded so that a CUDA graph can be replayed."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from vattn.config.arguments import MOST_INT32, read_count
from vattn.config.typed import typed
from vattn.errors import MetadataError, ShapeError
from vattn.ops.index_dtypes import INDEX_DTYPES


@typed
def check_cu_seqlens(
    cu_seqlens: Tensor, num_tokens: int, max_seqlen: int | Tensor | None = None, *, padded: bool = False
) -> None:
    """Refuse offsets that do not describe packed sequences. Reads them on the host, which synchronises on CUDA.

    Args:
        cu_seqlens: int32 or int64 `[sequences + 1]`: they start at 0, never fall and end at the number of tokens.
        num_tokens: rows of the packed tensors.
        max_seqlen: no sequence is longer.
        padded: rows after the last offset are padding.

    Raises:
        MetadataError: an offset or length is wrong; the message names the first.

    Example:
        >>> import torch, vattn
        >>> vattn.check_cu_seqlens(torch.tensor([0, 3, 3, 8], dtype=torch.int32), num_tokens=8, max_seqlen=5)
    """
    check_offsets("cu_seqlens", cu_seqlens, num_tokens, max_seqlen, padded)


def check_offsets(
    name: str, cu_seqlens: Tensor, num_tokens: int, max_seqlen: int | Tensor | None, padded: bool
) -> None:
    """Do what `check_cu_seqlens` does; `name`: of the argument."""
    plain = isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 and not cu_seqlens.is_meta
    if not plain or cu_seqlens.dtype not in INDEX_DTYPES:
        allowed = "an int32 or int64 tensor [sequences + 1] with numbers in it"
        raise MetadataError(f"{name}={cu_seqlens!r:.60}", allowed, f"pass the offsets, as {name}.int()")
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    if not lengths or offsets[0] != 0:
        raise MetadataError(f"{name} {offsets!s:.60}", "offsets that start at 0", "pass cumulative lengths")
    if min(lengths) < 0:
        row = next(i for i, length in enumerate(lengths) if length < 0)
        raise MetadataError(
            f"{name} falls from {offsets[row]} to {offsets[row + 1]} at entry {row + 1}",
            "offsets that never fall",
            "pass cumulative lengths",
        )
    if offsets[-1] > num_tokens or (offsets[-1] < num_tokens and not padded):
        raise MetadataError(
            f"{name} ends at {offsets[-1]} for {num_tokens} tokens",
            f"at most {num_tokens}" if padded else f"{num_tokens}",
            "pass padded=True if the rows after it are padding" if offsets[-1] < num_tokens else "check the lengths",
        )
    if isinstance(max_seqlen, Tensor) and (max_seqlen.numel() != 1 or max_seqlen.is_meta):
        raise MetadataError(
            f"max_seqlen of shape {tuple(max_seqlen.shape)}", "an int, or a tensor of one", "pass the longest length"
        )
    if max_seqlen is not None and max(lengths) > int(max_seqlen):
        raise MetadataError(
            f"a sequence of {max(lengths)} tokens with max_seqlen={int(max_seqlen)}",
            "max_seqlen at least as long as every sequence",
            "pass the longest length, or more",
        )


@typed
def pad_cu_seqlens(cu_seqlens: Tensor, num_sequences: int) -> Tensor:
    """Return offsets of `num_sequences` sequences: the last one repeated, which adds empty sequences. No sync.

    With offsets (and tokens, `padded=True`) padded to a few sizes, one CUDA graph serves all smaller batches.

    Raises:
        ShapeError: there are more sequences already, or no tensor.

    Example:
        >>> import torch, vattn
        >>> vattn.pad_cu_seqlens(torch.tensor([0, 3, 8], dtype=torch.int32), num_sequences=4).tolist()
        [0, 3, 8, 8, 8]
    """
    num_sequences = read_count("num_sequences", num_sequences, 0, "pass the padded number", ShapeError)
    if not isinstance(cu_seqlens, Tensor):
        raise ShapeError(f"cu_seqlens={cu_seqlens!r:.60}", "an int32 tensor [sequences + 1]", "pass the offsets")
    rows = cu_seqlens.shape[0] if cu_seqlens.dim() == 1 and cu_seqlens.dtype in INDEX_DTYPES else 0
    if not 1 <= rows <= num_sequences + 1 <= MOST_INT32:
        raise ShapeError(
            f"cu_seqlens of shape {tuple(cu_seqlens.shape)} and {cu_seqlens.dtype} for {num_sequences} sequences",
            f"[1] to [{num_sequences + 1}], int32 or int64",
            "choose a larger bucket",
        )
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(num_sequences + 1 - rows)])
