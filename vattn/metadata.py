"""What one step's batch looks like: `AttentionMetadata`, and the builder that fills it into fixed buffers.

Compiled code reads tensors only. The integers beside them are for people and for the host; a test asserts that nothing
compiled reads one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class AttentionMetadata:
    """Describe the requests of one step: the five tensors, optional mask tensors, and host integers.

    Padding: padded requests have query length 0 and `seq_lens` 0; padded tokens have slot -1; rows of padding come out zero.

    Attributes:
        query_start_loc: int32 `[B + 1]`, where each request's new tokens start; padded requests repeat the last value.
        seq_lens: int32 `[B]`, cached plus new tokens.
        block_table: int32 `[B, W]`; entries past a request's last block may hold garbage.
        slot_mapping: int64 `[T]`, `block * block_size + offset` of every new token; -1 writes nothing.
        positions: int64 `[T]`, `seq_len - query_len + i`; 0 for padding.
        causal: `True` (each layer's own rule), `False` (bidirectional), or int32 `[B]` flags, nonzero = causal.
        tree_bias: fp32 `[trees, n, n]` added to scores of query row r and new key c.
        tree_id: int32 `[B]`, which bias a request uses, -1 = none.
        mm_ranges: int32 `[B, R, 2]`, inclusive absolute positions that see each other both ways; start >= end = unused.
        plans: schedules by `Backend.plan_key`, filled once a step; a layer without one plans for itself.
        num_reqs, num_actual_tokens: real requests and tokens, without padding.
        max_query_len, max_seq_len: over the real requests.
        num_prefills, num_prefill_tokens, num_decodes, num_decode_tokens: the split; a decode has one new token (or up to
            the builder's `decode_threshold`) and some cached ones.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    positions: Tensor | None = None
    causal: bool | Tensor = True
    tree_bias: Tensor | None = None
    tree_id: Tensor | None = None
    mm_ranges: Tensor | None = None
    plans: dict[str, Tensor] = field(default_factory=dict)
    num_reqs: int = 0
    num_actual_tokens: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
