"""The order of requests and tokens that puts prefills, or decodes, first."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.config.arguments import read_count
from vattn.config.typed import typed
from vattn.errors import UnknownOptionError
from vattn.metadata.checks import check_seq_lens
from vattn.metadata.halves import is_decode
from vattn.metadata.inputs import Lengths, check_count, read_integers


class TokenOrder(NamedTuple):
    """Requests and their packed tokens in another order.

    Attributes:
        requests: requests in the new order.
        tokens: int64 `[T]`, host: row i of the new order is row `tokens[i]` of the old one.
    """

    requests: list[int]
    tokens: Tensor


@typed
def token_order(query_lens: Lengths, seq_lens: Lengths, first: str, decode_threshold: int = 1) -> TokenOrder:
    """Return the order that puts prefills, or decodes, first; requests of a kind keep their order.

    Args:
        query_lens, seq_lens: new, and cached plus new, tokens of each request.
        first: `"prefill"`, as `FlashAttentionMetadata` wants it, or `"decode"`.
        decode_threshold: longest query that still counts as a decode.

    Raises:
        UnknownOptionError: another `first`.
        MetadataError: no integers, not one of each for every request, a negative length, or one shorter than its query.

    Example:
        >>> import vattn
        >>> order = vattn.token_order(query_lens=[1, 3, 1], seq_lens=[9, 3, 20], first="prefill")
        >>> order.requests, order.tokens.tolist()
        ([1, 0, 2], [1, 2, 3, 0, 4])
    """
    if first not in ("prefill", "decode"):
        raise UnknownOptionError(f"first={first!r}", "'prefill', 'decode'", "take one of these")
    queries, lengths = read_integers("query_lens", query_lens), read_integers("seq_lens", seq_lens)
    check_count("seq_lens", lengths.shape[0], queries.shape[0])
    check_seq_lens(queries, lengths)
    decode_threshold = read_count("decode_threshold", decode_threshold, 0, "pass the longest decode, 1 as a rule")
    decodes = is_decode(queries, lengths, decode_threshold).tolist()
    requests = sorted(range(len(decodes)), key=lambda row: decodes[row] == (first == "prefill"))
    starts = [0, *accumulate(queries.tolist())]
    rows = [row for request in requests for row in range(starts[request], starts[request + 1])]
    return TokenOrder(requests, torch.tensor(rows, dtype=torch.int64, device="cpu"))


def reorder_batch(input_batch: Any, scheduler_output: Any, decode_threshold: int) -> bool:
    """Exchange requests of a batch until decodes come first, then those that extend a prompt, then prompts.

    Returns:
        Whether anything was exchanged; arguments as for `TreeAttentionMetadataBuilder.reorder_batch`.
    """
    new = [scheduler_output.num_scheduled_tokens[name] for name in input_batch.req_ids]
    cached = [int(count) for count in input_batch.num_computed_tokens_cpu[: len(new)]]
    kinds = [2 if before == 0 else int(n > decode_threshold) for n, before in zip(new, cached, strict=True)]
    misplaced = [row for row, (kind, wanted) in enumerate(zip(kinds, sorted(kinds), strict=True)) if kind != wanted]
    # The misplaced requests take each other's places: those of a kind in their order, each where its kind belongs.
    holder = dict(zip(misplaced, misplaced, strict=True))
    for place, request in zip(misplaced, sorted(misplaced, key=kinds.__getitem__), strict=True):
        if holder[place] != request:
            other = next(row for row in misplaced if holder[row] == request)
            input_batch.swap_states(place, other)
            holder[place], holder[other] = request, holder[place]
    return bool(misplaced)
