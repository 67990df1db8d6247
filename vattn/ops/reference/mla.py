"""What the latent attention ops mean, un-absorbed, in fp32 or fp64 on any device: the executable specification.

Every head gets its own keys and values, expanded from the latents; requests are taken one by one. Queries are absorbed
where they are quantised alone: in requests of at most `decode_threshold` rows, under a `query_format`. A row of a
sparse layer counts a key as often as it lists it, and entries outside of the request not at all. Metadata may hold any
value, as in `vattn.ops.reference.attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.cache.layout import row_view
from vattn.config.mla import MLAConfig
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference.attention import held_lengths, held_positions, locate_keys, ranges, softmax, write_slots
from vattn.ops.reference.mla_absorb import key_and_value_weights, quantised_query, weight_values
from vattn.quantization.mla_formats import decode_rows, encode_rows


def mla_kv_cache_update(args: MLACacheUpdateArgs, config: MLAConfig) -> None:
    """Write rows `[T, L]` and `[T, R]` into their slots, without a sync; see `write_slots`."""
    stored = encode_rows(args.kv_c, args.k_pe, config.kv_cache_dtype, args.k_scale)
    write_slots(row_view(args.kv_cache, config), stored, args.slot_mapping)


def attend_latents(
    args: MLAAttentionArgs, config: MLAConfig, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return what `vattn::mla_attention` computes, before any rounding: `[T, N, V]` and LSE `[T, N]` in `dtype`."""
    weight = weight_values(args.kv_b_weight, args.kv_b_scale, config, dtype)
    rows = row_view(args.kv_cache, config)
    num_tokens = args.query.shape[0]
    out = torch.zeros((num_tokens, config.num_heads, config.v_head_dim), dtype=dtype, device=args.query.device)
    lse = out.new_full((num_tokens, config.num_heads), -torch.inf)
    seq_lens = held_lengths(None, args.seq_lens, None)
    stored = held_lengths(config.dcp_shard, args.seq_lens, args.local_seq_lens)
    stored = [min(length, args.block_table.shape[1] * config.block_size) for length in stored]
    for request, (start, end) in enumerate(ranges(args.query_start_loc, num_tokens)):
        if end <= start:
            continue
        table, device = args.block_table[request], args.query.device
        blocks, offsets, exists = locate_keys(table, stored[request], config.block_size, rows.shape[0])
        latent, rope = read_rows(rows[blocks, offsets], args.k_scale, config)
        topk = None if args.topk_indices is None else args.topk_indices[start:end]
        held = held_positions(config.dcp_shard, stored[request], device)
        counts = times_seen(end - start, seq_lens[request], held, topk) * exists
        q_scale = args.q_scale if end - start <= config.decode_threshold else None
        out[start:end], lse[start:end] = attend_expanded(
            args.query[start:end].to(dtype), latent.to(dtype), rope.to(dtype), weight, counts, config, q_scale
        )
    return out, lse


def read_rows(stored: Tensor, k_scale: Tensor | None, config: MLAConfig) -> tuple[Tensor, Tensor]:
    """Return fp32 latents `[..., L]` and rotated keys `[..., R]` of stored rows."""
    return decode_rows(stored, config.kv_cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim, k_scale)


def times_seen(query_len: int, seq_len: int, positions: Tensor, topk: Tensor | None) -> Tensor:
    """Return bool or, with `topk`, int32 `[q, s]`: how often rows of a request see keys at ascending `positions` `[s]`.

    A row sees the keys up to its own position, and with `topk` `[q, K]` each as often as it lists it.
    """
    row = seq_len - query_len + torch.arange(query_len, device=positions.device)[:, None]
    visible = positions[None, :] <= row
    if topk is None or not positions.numel():
        return visible
    place = torch.searchsorted(positions, topk.long()).clamp(max=positions.numel() - 1)
    listed = (positions[place] == topk).int()
    return visible * torch.zeros_like(visible, dtype=torch.int32).scatter_add_(1, place, listed)


def weigh(scores: Tensor, counts: Tensor) -> Tensor:
    """Return scores `[N, q, s]` of keys that count as often as `counts` `[q, s]` says; -inf for 0."""
    if counts.dtype != torch.bool:
        scores = scores + counts.clamp(min=1).to(scores.dtype).log()
    return torch.where(counts > 0, scores, -torch.inf)


def attend_expanded(
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor,
    counts: Tensor,
    config: MLAConfig,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend one request's rows to keys and values that are expanded for every head, in the dtype of `query`.

    Args:
        query: `[q, N, P + R]`.
        latent, rope: `[s, L]` and `[s, R]`; rows that no query row sees may hold anything.
        weight: `[N, P + V, L]`.
        counts: `[q, s]`, how often rows see keys.
        q_scale: with it, queries are absorbed and quantised before they meet keys.

    Returns:
        `[q, N, V]`, zero for rows that see no key, and LSE `[q, N]`, -inf for them.
    """
    latent, rope = only_seen(latent, counts > 0), only_seen(rope, counts > 0)
    w_uk, w_uv = key_and_value_weights(weight, config)
    value = torch.einsum("sl,nlv->snv", latent, w_uv)
    nope, rotated = query.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
    if q_scale is None:
        key = torch.einsum("sl,npl->snp", latent, w_uk)
        scores = torch.einsum("qnp,snp->nqs", nope, key) + torch.einsum("qnr,sr->nqs", rotated, rope)
    else:
        absorbed = absorbed_query(query, w_uk, q_scale, config)
        scores = torch.einsum("qnd,sd->nqs", absorbed, torch.cat((latent, rope), dim=-1))
    weights, lse = softmax(weigh(scores * config.scale, counts))
    return torch.einsum("nqs,snv->qnv", weights, value), lse.t()


def only_seen(rows: Tensor, visible: Tensor) -> Tensor:
    """Return rows `[s, X]` with zeros in rows that no query row sees: zero times NaN would be NaN."""
    return torch.where(visible.any(dim=0)[:, None], rows, 0.0)


def absorbed_query(query: Tensor, w_uk: Tensor, q_scale: Tensor | None, config: MLAConfig) -> Tensor:
    """Return queries in the latent space `[q, N, L + R]`, quantised and dequantised if there is a `q_scale`."""
    nope, rotated = query.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
    absorbed = torch.cat((torch.einsum("qnp,npl->qnl", nope, w_uk), rotated), dim=-1)
    if q_scale is None:
        return absorbed
    return quantised_query(absorbed, q_scale, config).to(query.dtype) * q_scale.to(query.dtype)
