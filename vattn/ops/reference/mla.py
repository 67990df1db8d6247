"""What the latent attention ops mean, un-absorbed, in fp32 or fp64 on any device: the executable specification.

Every head gets its own keys and values, expanded from the latents; requests are taken one by one. Queries are absorbed
where they are quantised alone: in requests of at most `decode_threshold` rows, under a `query_format`.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from vattn.cache.layout import row_view
from vattn.config.dcp import DCPShard
from vattn.config.mla import MLAConfig
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference.attention import held_lengths, held_positions, locate_keys, softmax, write_results, write_slots
from vattn.ops.reference.mla_absorb import key_and_value_weights, quantised_query, weight_values
from vattn.quantization.mla_formats import decode_rows, encode_rows


def mla_kv_cache_update(args: MLACacheUpdateArgs, config: MLAConfig) -> None:
    """Write rows `[T, L]` and `[T, R]` into their slots, without a sync; see `write_slots`."""
    stored = encode_rows(args.kv_c, args.k_pe, config.kv_cache_dtype, args.k_scale)
    write_slots(row_view(args.kv_cache, config), stored, args.slot_mapping)


def mla_attention(args: MLAAttentionArgs, config: MLAConfig) -> None:
    """Run `vattn::mla_attention`: write output, scales and LSE as requested by the config."""
    write_results(args, *attend_latents(args, config), config)


def attend_latents(
    args: MLAAttentionArgs, config: MLAConfig, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return what `vattn::mla_attention` computes, before any rounding: `[T, N, V]` and LSE `[T, N]` in `dtype`."""
    weight = weight_values(args.kv_b_weight, args.kv_b_scale, config, dtype)
    rows = row_view(args.kv_cache, config)
    num_tokens = args.query.shape[0]
    out = torch.zeros((num_tokens, config.num_heads, config.v_head_dim), dtype=dtype, device=args.query.device)
    lse = out.new_full((num_tokens, config.num_heads), -torch.inf)
    starts, seq_lens = args.query_start_loc.tolist(), held_lengths(None, args.seq_lens, None)
    stored = held_lengths(config.dcp_shard, args.seq_lens, args.local_seq_lens)
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        if end <= start:
            continue
        table, device = args.block_table[request], args.query.device
        blocks, offsets, exists = locate_keys(table, stored[request], config.block_size, rows.shape[0])
        latent, rope = read_rows(rows[blocks, offsets], args.k_scale, config)
        topk = None if args.topk_indices is None else args.topk_indices[start:end]
        visible = visible_keys(end - start, seq_lens[request], topk, device)
        held = held_positions(config.dcp_shard, stored[request], device)
        visible = (visible if held is None else visible[:, held]) & exists
        q_scale = args.q_scale if end - start <= config.decode_threshold else None
        out[start:end], lse[start:end] = attend_expanded(
            args.query[start:end].to(dtype), latent.to(dtype), rope.to(dtype), weight, visible, config, q_scale
        )
    return out, lse


def read_rows(stored: Tensor, k_scale: Tensor | None, config: MLAConfig) -> tuple[Tensor, Tensor]:
    """Return fp32 latents `[..., L]` and rotated keys `[..., R]` of stored rows."""
    return decode_rows(stored, config.kv_cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim, k_scale)


def visible_keys(
    query_len: int,
    seq_len: int,
    topk: Tensor | None,
    device: torch.device,
    first: int = 0,
    end: int | None = None,
    shard: DCPShard | None = None,
) -> Tensor:
    """Return bool `[q, end - first]` for keys `[first, end)`, by default all `seq_len` of them.

    A row sees the keys up to its own position, and with `topk` `[q, K]` only those that it lists. With `shard`, keys
    are counted as a rank holds them, those that `topk` lists too.
    """
    end = seq_len if end is None else end
    position = seq_len - query_len + torch.arange(query_len, device=device)[:, None]
    key = torch.arange(first, end, device=device)
    visible = (key if shard is None else shard.position(key))[None, :] <= position
    if topk is not None:
        listed = visible.new_zeros((query_len, end - first + 1))
        inside = (topk >= first) & (topk < end)
        listed.scatter_(1, torch.where(inside, topk - first, end - first).long(), True)
        visible = visible & listed[:, : end - first]
    return visible


def attend_expanded(
    query: Tensor,
    latent: Tensor,
    rope: Tensor,
    weight: Tensor,
    visible: Tensor,
    config: MLAConfig,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend one request's rows to keys and values that are expanded for every head, in the dtype of `query`.

    Args:
        query: `[q, N, P + R]`.
        latent, rope: `[s, L]` and `[s, R]`; rows that no query row sees may hold anything.
        weight: `[N, P + V, L]`.
        visible: bool `[q, s]`.
        q_scale: with it, queries are absorbed and quantised before they meet keys.

    Returns:
        `[q, N, V]`, zero for rows that see no key, and LSE `[q, N]`, -inf for them.
    """
    latent, rope = only_seen(latent, visible), only_seen(rope, visible)
    w_uk, w_uv = key_and_value_weights(weight, config)
    value = torch.einsum("sl,nlv->snv", latent, w_uv)
    nope, rotated = query.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
    if q_scale is None:
        key = torch.einsum("sl,npl->snp", latent, w_uk)
        scores = torch.einsum("qnp,snp->nqs", nope, key) + torch.einsum("qnr,sr->nqs", rotated, rope)
    else:
        absorbed = absorbed_query(query, w_uk, q_scale, config)
        scores = torch.einsum("qnd,sd->nqs", absorbed, torch.cat((latent, rope), dim=-1))
    weights, lse = softmax(torch.where(visible, scores * config.scale, -torch.inf))
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
