"""Fast prefill: after the layers that write the cache, compute only the tokens that need logits.

The layers that share another layer's cache (`kv_sharing_target_layer_name`) write nothing, so in them a prefill needs
no rows but the last of each request. Which rows stay is in the metadata: `logits_indices` and `logits_start_loc`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from vattn.config.typed import typed_on_error
from vattn.errors import MetadataError, ShapeError
from vattn.metadata import forward_context as context
from vattn.metadata.attention_metadata import AttentionMetadata, step_of
from vattn.metadata.cross_attention import packed_rows
from vattn.metadata.inputs import Lengths, check_count, read_integers


def read_num_logits(query_lens: Tensor, num_logits: Lengths | None, logits_indices: Lengths | None) -> Tensor:
    """Return how many of its last tokens each request keeps, int64 `[B]`; one of the two arguments says it.

    Args:
        query_lens: int64 `[B]` on the host.
        num_logits: that number, of each request.
        logits_indices: instead, the rows of the step that are kept, in order.

    Raises:
        MetadataError: both, a number out of range, or rows that are not the last ones of their requests.
    """
    if num_logits is not None and logits_indices is not None:
        raise MetadataError("num_logits and logits_indices", "one of them", "drop one of them")
    if logits_indices is not None:
        counts = _count_last(query_lens, read_integers("logits_indices", logits_indices))
    else:
        counts = read_integers("num_logits", num_logits)  # type: ignore[arg-type]
        check_count("num_logits", counts.shape[0], query_lens.shape[0])
    wrong = (counts < 0) | (counts > query_lens)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise MetadataError(
            f"request {row}: logits of {int(counts[row])} tokens",
            f"0 to {int(query_lens[row])}, its new tokens",
            "keep at most the tokens of the step",
        )
    return counts


def _count_last(query_lens: Tensor, rows: Tensor) -> Tensor:
    """Count the rows of each request; refuse rows that are out of range, out of order or not its last ones."""
    ends = query_lens.cumsum(0)
    request = torch.searchsorted(ends, rows, right=True)
    inside = request < query_lens.shape[0]
    counts = torch.bincount(request[inside], minlength=query_lens.shape[0])
    owner, offset, _ = packed_rows(counts, rows.shape[0])
    if not bool(inside.all()) or not torch.equal(rows, ends[owner] - counts[owner] + offset):
        raise MetadataError(
            f"logits_indices {rows.tolist()} with requests that end before rows {ends.tolist()}",
            "rising rows, the last ones of each request: a query that leaves out later rows sits at a wrong position",
            "keep every row from the first needed one to the end of its request",
        )
    return counts


def write_logits_indices(query_start_loc: Tensor, logits_start_loc: Tensor, indices: Tensor) -> None:
    """Fill the rows that a step keeps, on the device and without a sync.

    Args:
        query_start_loc: int32 `[B + 1]`, of all rows.
        logits_start_loc: int32 `[B + 1]`, of the rows that are kept.
        indices: int64 `[N]`, written: the last rows of each request; 0 after the last request.
    """
    counts = logits_start_loc.diff()
    request, offset, real = packed_rows(counts, indices.shape[0])
    rows = query_start_loc[request + 1].long() - counts[request] + offset
    indices.copy_(torch.where(real, rows, 0))


@typed_on_error
def fast_prefill(metadata: AttentionMetadata, logits_indices: Tensor) -> AttentionMetadata:
    """Return a step's metadata with the rows that its sharing layers keep, from indices on the device; no sync.

    What the host knows is better given to `AttentionMetadataBuilder.build(num_logits=...)`, which checks it. Here only
    `AttentionMetadata.check` can tell whether the rows are each request's last ones.

    Args:
        metadata: left as it is.
        logits_indices: int64 `[N]` on the metadata's device, rows of the step in rising order: the last ones of each
            request. Behind them, rows from `query_start_loc[-1]` on are padding.

    Raises:
        MetadataError: another shape, dtype or device, or more rows than the step has.

    Example:
        >>> import torch, vattn
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=16)
        >>> step = builder.build(query_lens=[5, 2], seq_lens=[5, 9], block_tables=[[1], [2]])
        >>> vattn.fast_prefill(step, torch.tensor([4, 5, 6])).logits_start_loc.tolist()
        [0, 1, 3]
    """
    step_of(metadata, "fast_prefill()")
    starts, tokens = metadata.query_start_loc, metadata.slot_mapping.shape[0]
    right = logits_indices.dim() == 1 and logits_indices.dtype == torch.int64
    if not right or logits_indices.device != starts.device or logits_indices.shape[0] > tokens:
        raise MetadataError(
            f"logits_indices is {logits_indices.dtype} {tuple(logits_indices.shape)} on {logits_indices.device}",
            f"int64 of up to {tokens} rows on {starts.device}",
            "pass the rows of the step that need logits",
        )
    num_reqs = starts.shape[0] - 1
    request = torch.bucketize(logits_indices, starts[1:].long(), right=True)
    # One more bin takes the padding.
    counts = torch.zeros(num_reqs + 1, dtype=torch.int32, device=starts.device)
    counts.scatter_add_(0, request, torch.ones_like(request, dtype=torch.int32))
    kept = torch.zeros_like(starts)
    torch.cumsum(counts[:num_reqs], 0, dtype=torch.int32, out=kept[1:])
    return dataclasses.replace(metadata, logits_indices=logits_indices, logits_start_loc=kept)


def kept_rows(rows: Tensor, metadata: AttentionMetadata | None = None) -> Tensor:
    """Return the rows of `[T, ...]` that the layers with `fast_prefill=True` take: those that need logits.

    All of them in a step that keeps every token, such as pure decode, and in a profiling call.

    Args:
        rows: one row per token of the step, such as hidden states or a residual.
        metadata: default the one of `vattn.forward_context`.

    Example:
        >>> import torch, vattn
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=16)
        >>> step = builder.build(query_lens=[3, 2], seq_lens=[3, 2], block_tables=[[1], [2]], num_logits=[1, 1])
        >>> vattn.kept_rows(torch.arange(5.0), step)
        tensor([2., 4.])
    """
    if not isinstance(rows, Tensor) or not rows.dim():
        given = f"a tensor of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ShapeError(f"kept_rows() of {given}", "a tensor [tokens, ...]", "pass hidden states or a residual")
    if metadata is None:
        metadata = context.current_step()
    if metadata is None:
        return rows
    kept = step_of(metadata, "kept_rows()").logits_indices
    return rows if kept is None else rows.index_select(0, kept)
