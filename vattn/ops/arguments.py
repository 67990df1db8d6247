"""The tensor arguments of each op as named tuples, in the order of the op's schema.

A backend, the reference and the checks receive these instead of two dozen positional arguments.
Letters: T query tokens (padding included), B requests (padding included), H query heads, K KV heads, D key width,
V value width, N blocks of the cache, S block size, W columns of the block table.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CacheUpdateArgs(NamedTuple):
    """`vattn::kv_cache_update`: write new keys and values into their slots."""

    key: Tensor
    """`[T, K, D]`, model dtype or already in the cache's FP8 dtype (then stored as it is)."""
    value: Tensor
    """`[T, K, V]`."""
    key_cache: Tensor
    """`[N, S, K, D]`, any strides but rows of adjacent elements, dtype of the format or uint8; mutated. Packed formats:
    their storage `[N, bytes]`."""
    value_cache: Tensor | None
    """`[N, S, K, V]`, likewise; mutated. Packed formats: `None`."""
    slot_mapping: Tensor
    """int64 or int32 `[T]`: `block * block_size + offset`; one outside the cache (-1, say) writes nothing."""
    k_scale: Tensor | None
    """fp32, 1 value or K values; a quantised cache stores `key / k_scale`."""
    v_scale: Tensor | None
    config: str


class RopeUpdateArgs(NamedTuple):
    """`vattn::rope_kv_cache_update`: rotate queries and keys, write the queries out, keys and values into their slots.

    R = `rotary_dim` of the rope config; rows of all tokens are written to `query_out`, padding included.
    """

    query: Tensor
    """`[T, H, D]`, model dtype; may be a strided slice of one projection's result, as key and value."""
    key: Tensor
    """`[T, K, D]`, model dtype."""
    value: Tensor
    """`[T, K, V]`, model dtype or already in the cache's FP8 dtype (then stored as it is)."""
    cos: Tensor
    """`[N, R / 2]`: one angle per pair of columns, or `[N, R]`: one factor per column; float, any strides. Row t is
    token t's (N = T), or with `positions` row `positions[t]`."""
    sin: Tensor
    """As `cos`, same shape and dtype."""
    positions: Tensor | None
    """int32 or int64 `[T]`: rows of a table. Negative ones count from its end; one outside of it gives NaN."""
    query_out: Tensor
    """`[T, H, D]`, model dtype, or e4m3 if the config has a query format; mutated."""
    key_cache: Tensor
    """As for `kv_cache_update`; mutated, as the next."""
    value_cache: Tensor | None
    slot_mapping: Tensor
    """int64 or int32 `[T]`; as for `kv_cache_update`."""
    q_weight: Tensor | None
    """fp32 or model dtype `[D]`: of the query's RMSNorm, if the rope config has a norm."""
    k_weight: Tensor | None
    """fp32 or model dtype `[D]`: of the key's."""
    q_scale: Tensor | None
    """fp32, 1 value or K values: the scale of a quantised query, or its reciprocal (`RopeConfig.query_arithmetic`)."""
    k_scale: Tensor | None
    v_scale: Tensor | None
    rope: str
    """`RopeConfig.encode()`."""
    config: str


class AttentionArgs(NamedTuple):
    """`vattn::attention`: packed queries attend to a paged cache."""

    query: Tensor
    """`[T, H, D]`, model dtype, or e4m3 for a quantised query with `query_load="plain"`; rows of a request follow each
    other without padding."""
    key_cache: Tensor
    """`[N, S, K, D]` as for `kv_cache_update`; read only, as the next."""
    value_cache: Tensor | None
    query_start_loc: Tensor
    """int32 or int64 `[B + 1]`, rising; rows from its last entry on are padding and come out zero."""
    seq_lens: Tensor
    """int32 or int64 `[B]`: keys of each request, its new tokens included. Query row i sits at `seq_len - query_len +
    i`."""
    block_table: Tensor
    """int32 or int64 `[B, W]`; entries past the last block of a request may hold garbage."""
    output: Tensor
    """`[T, H, V]` (NVFP4: `[T, H, V // 2]` uint8); every row is written."""
    output_block_scale: Tensor | None
    """Scales that the output format computes; written."""
    lse: Tensor | None
    """fp32 `[T, H]`, natural log of the whole denominator (sink included), -inf where it is empty; written."""
    output_scale: Tensor | None
    """fp32, one value: the static FP8 scale, or NVFP4's global scale."""
    q_scale: Tensor | None
    """fp32, 1 value or K values; like `k_scale` and `v_scale` positive, which nothing checks here."""
    k_scale: Tensor | None
    v_scale: Tensor | None
    alibi_slopes: Tensor | None
    """fp32 `[H]`."""
    sinks: Tensor | None
    """fp32 or model dtype `[H]`: one logit per head that joins the denominator only."""
    causal_flags: Tensor | None
    """int32 `[B]`: nonzero = causal; with causality `per_request`."""
    bias: Tensor | None
    """fp32 `[trees, n, n]`: added to scores of query row r and key `context_len + c` for r, c < n; -inf hides."""
    tree_id: Tensor | None
    """int32 `[B]`: which bias a request uses, -1 = none (plain causal)."""
    mm_ranges: Tensor | None
    """int32 `[B, R, 2]`: inclusive positions (start, end) that see each other both ways; start >= end = unused."""
    local_seq_lens: Tensor | None
    """int32 `[B]`: how many of a request's keys this rank holds, with `context_parallel`; the table is of those alone.
    Lengths, positions, masks and trees stay those of the whole request."""
    plan: list[Tensor]
    """What `vattn::plan` wrote for this kind of layer; empty: the op plans for itself. Tensors of no elements count as
    absent, since AOTInductor cannot pass an empty list."""
    workspace: Tensor | None
    """Scratch for split results; `None`: the op allocates."""
    config: str


class VarlenAttentionArgs(NamedTuple):
    """`vattn::varlen_attention`: packed queries attend to packed keys and values, no cache."""

    query: Tensor
    """`[T, H, D]`."""
    key: Tensor
    """`[Tk, K, D]`."""
    value: Tensor
    """`[Tk, K, V]`."""
    query_start_loc: Tensor
    """int32 or int64 `[B + 1]`."""
    kv_start_loc: Tensor
    """int32 or int64 `[B + 1]`; key i of a request sits at position i, query row i at `kv_len - query_len + i`."""
    output: Tensor
    output_block_scale: Tensor | None
    lse: Tensor | None
    output_scale: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    causal_flags: Tensor | None
    bias: Tensor | None
    tree_id: Tensor | None
    mm_ranges: Tensor | None
    plan: list[Tensor]
    workspace: Tensor | None
    config: str


class PlanArgs(NamedTuple):
    """`vattn::plan`: make a schedule of this step's lengths on the device."""

    query_start_loc: Tensor
    """int32 or int64 `[B + 1]`."""
    seq_lens: Tensor
    """int32 or int64 `[B]`."""
    schedule: Tensor
    """int32, shape by `Backend.plan_shape`; mutated."""
    config: str


class HostPlanArgs(NamedTuple):
    """What a backend plans a step from that plans on the host (`Backend.plan_on_host`); no op's arguments."""

    query_lens: Tensor
    """int64 on the host, one entry per real request."""
    kv_lens: Tensor
    """int64 on the host, one entry per real request."""
    query_start_loc: Tensor
    """int32 `[B + 1]`, as the step's calls will read it; padded requests have no rows."""
    seq_lens: Tensor
    """int32 `[B]`."""
    block_table: Tensor
    """int32 `[B, W]`."""
    num_tokens: int
    """T, padding included."""
    num_blocks: int
    """Blocks of the caches."""
    schedule: Tensor
    """int32, shape by `Backend.plan_shape`, on the device; mutated."""
    host_plan: Tensor
    """int64 on the host, `Backend.host_plan_size` elements; mutated."""


class MergeArgs(NamedTuple):
    """`vattn::merge_attn_states`: combine two partial results of the same rows by their log-sum-exp."""

    output: Tensor
    """`[T, H, V]`; written. May be the same storage as neither input."""
    output_lse: Tensor | None
    """fp32 `[T, H]`; written."""
    prefix_output: Tensor
    prefix_lse: Tensor
    suffix_output: Tensor
    suffix_lse: Tensor


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
