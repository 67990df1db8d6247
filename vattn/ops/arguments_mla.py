"""The tensor arguments of the latent attention ops as named tuples, in the order of each op's schema.

Letters: T query tokens (padding included), B requests, N query heads, P and R columns of a query head without and with
rotation, V value columns of a head, L latent columns, W columns of the block table.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MLACacheUpdateArgs(NamedTuple):
    """`vattn::mla_kv_cache_update`: write latents and rotated keys into their slots."""

    kv_c: Tensor
    """`[T, L]`, model dtype, normed."""
    k_pe: Tensor
    """`[T, R]`, model dtype, rotated."""
    kv_cache: Tensor
    """This layer's storage, `mla_cache_shape(config, num_blocks)`; mutated."""
    slot_mapping: Tensor
    """int64 or int32 `[T]`: `block * block_size + offset`; one outside the cache (-1, say) writes nothing."""
    k_scale: Tensor | None
    """fp32, 1 value, for an `fp8_e4m3` cache: the row is stored divided by it."""
    config: str
    """`MLAConfig.encode()`."""


class MLAAttentionArgs(NamedTuple):
    """`vattn::mla_attention`: packed queries attend to what the cache holds of their requests.

    All keys are read from the cache, also for new tokens, so a result does not depend on how a prompt was split.
    """

    query: Tensor
    """`[T, N, P + R]`, model dtype; the last R columns are rotated."""
    kv_cache: Tensor
    """This layer's storage; read only."""
    query_start_loc: Tensor
    """int32 or int64 `[B + 1]`, rising; rows from its last entry on are padding and come out zero."""
    seq_lens: Tensor
    """int32 or int64 `[B]`: keys of each request, its new tokens included. Query row i sits at `seq_len - query_len +
    i`."""
    block_table: Tensor
    """int32 or int64 `[B, W]`; entries past the last block of a request may hold garbage."""
    kv_b_weight: Tensor
    """`[N, P + V, L]`: of each head, what makes keys (P rows) and values (V rows) of a latent. Model dtype, or e4m3 by
    `weight_format`; contiguous."""
    kv_b_scale: Tensor | None
    """fp32 scales of an e4m3 weight: one value, or one per block of 128 x 128 of `[N * (P + V), L]`."""
    output: Tensor
    """`[T, N, V]` (NVFP4: `[T, N, V // 2]` uint8); every row is written."""
    output_block_scale: Tensor | None
    """Scales that the output format computes; written."""
    lse: Tensor | None
    """fp32 `[T, N]`, natural log of the denominator, -inf where it is empty; written."""
    output_scale: Tensor | None
    """fp32, one value: the static FP8 scale, or NVFP4's global scale."""
    q_scale: Tensor | None
    """fp32, 1 value, with `query_format="fp8_e4m3"`: absorbed queries `[latent | rotated]` are e4m3 codes of the
    model dtype's values divided by it. Queries that meet expanded keys stay as they are."""
    k_scale: Tensor | None
    """fp32, 1 value: that of the cache."""
    topk_indices: Tensor | None
    """int32 `[T, K]`: positions in its request that a row sees, -1 for none; `None`: all up to its own."""
    local_seq_lens: Tensor | None
    """int32 `[B]`: how many of a request's keys this rank holds, with `context_parallel`; the table is of those alone.
    `seq_lens` and `topk_indices` stay those of the whole request."""
    plan: list[Tensor]
    """What `vattn::plan` wrote for this kind of layer; empty: the op plans for itself."""
    workspace: Tensor | None
    """Room for keys and values that are expanded, in the model dtype; `None`: the op allocates."""
    config: str
