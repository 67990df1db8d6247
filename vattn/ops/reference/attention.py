"""What every `vattn::` op means, in fp32 on any device: the executable specification.

Requests are taken one by one and lengths are read on the host; nothing here is meant to be fast. Masks and biases are
in `vattn.ops.reference.mask`, formats in `vattn.quantization.codecs` and `vattn.quantization.packed`.

Metadata may hold any value. Offsets are clamped to what they count, and to be no smaller than the one before
(`ranges`). Lengths are clamped to 0 and `MAX_SEQ_LEN`, and rows keep the positions that their length gives them. Keys
that the block table has no column for, or that lie in a block outside of the cache, do not exist; slots outside of it
write nothing. Rows of no request are zero, with LSE -inf. Kernels do the same, but for offsets out of order: a row of
such a step is what any request that claims it computes, or zero.

Letters: T query tokens, H query heads, K KV heads, g = H / K, D key width, V value width, q query rows and s keys of
one request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vattn.cache.stored_rows import decode_stored, encode_stored, stored_views, take
from vattn.config.attention import AttentionConfig
from vattn.config.dcp import DCPShard
from vattn.config.lengths import MAX_SEQ_LEN
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, MergeArgs, VarlenAttentionArgs
from vattn.ops.reference.mask import alibi_bias, is_causal, row_positions, tree_bias, visible_keys
from vattn.quantization.codecs import decode_kv, load_query, quantise_output
from vattn.quantization.formats import MODEL_DTYPES

KeysOfRequest = Callable[[int], "tuple[Tensor, Tensor, Tensor, Tensor]"]
"""Request number -> keys fp32 `[s, K, D]`, values fp32 `[s, K, V]`, bool `[s]`: which of them exist, and int64 `[s]`:
their positions."""


def kv_cache_update(args: CacheUpdateArgs, config: AttentionConfig) -> None:
    """Write new keys and values `[T, K, *]` into their slots, without a sync; see `write_slots`."""
    new = ((args.key, args.k_scale), (args.value, args.v_scale))
    for of_values, (cache, (rows, scale)) in enumerate(
        zip(stored_views(args.key_cache, args.value_cache, config), new, strict=True)
    ):
        stored = encode_stored(rows, config, bool(of_values), scale)
        for held, part in zip(cache, stored, strict=True):
            if held is not None and part is not None:
                write_slots(held, part, args.slot_mapping)


def write_slots(held: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows into slots of a paged tensor, without a sync; a slot outside writes nothing.

    Args:
        held: `[num_blocks, block_size, ...]`; changed in place.
        rows: `[T, ...]`.
        slots: int64 `[T]`. Of two rows with the same slot either may win.
    """
    size = held.shape[1]
    if not held.shape[0] * size or not slots.numel():
        return
    if slots.device.type == "cpu" and held.stride(0) == size * held.stride(1):
        # Where reading slots costs nothing, one operation writes rows that all have one.
        given = slots.tolist()
        if min(given) >= 0 and max(given) < held.shape[0] * size:
            held.flatten(0, 1).index_put_((slots,), rows)
            return
    valid = (slots >= 0) & (slots < held.shape[0] * size)
    # A dropped row repeats the first valid one, so that every write to a slot carries the same bytes and none races.
    # Without a valid row all of them write slot 0's own content back.
    row = torch.arange(slots.numel(), device=slots.device)
    row = torch.where(valid, row, valid.to(torch.uint8).argmax())
    slot = torch.where(valid, slots, 0)[row]
    index = (slot // size, slot % size)
    held[index] = torch.where(valid.any(), rows[row], held[index])


def attention(args: AttentionArgs, config: AttentionConfig) -> None:
    """Run `vattn::attention`: write output, scales and LSE as requested by the config."""
    write_results(args, *paged_attention(args, config), config)


def varlen_attention(args: VarlenAttentionArgs, config: AttentionConfig) -> None:
    """Run `vattn::varlen_attention`: write output, scales and LSE as requested by the config."""
    write_results(args, *packed_attention(args, config), config)


def write_results(args: Any, out: Tensor, lse: Tensor, config: Any) -> None:
    """Write results `[T, H, V]` of any dtype to an op's output and scales, in its config's format, and the LSE."""
    quantise_output(
        out.to(MODEL_DTYPES[config.dtype]), config.output_format, args.output, args.output_block_scale,
        args.output_scale, config.output_arithmetic, config.output_min_scale, config.output_floor,
    )  # fmt: skip
    if args.lse is not None:
        args.lse.copy_(lse)


def paged_attention(args: AttentionArgs, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return what `vattn::attention` computes, before any rounding: fp32 `[T, H, V]` and LSE fp32 `[T, H]`."""
    keys, values = stored_views(args.key_cache, args.value_cache, config)
    seq_lens = held_lengths(None, args.seq_lens, None)
    stored = held_lengths(config.dcp_shard, args.seq_lens, args.local_seq_lens)
    stored = [min(length, args.block_table.shape[1] * config.block_size) for length in stored]

    def keys_of_request(request: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        entries, offsets, exists = locate_keys(
            args.block_table[request], stored[request], config.block_size, keys.codes.shape[0]
        )
        key = decode_stored(take(keys, entries, offsets), config, False, args.k_scale)
        value = decode_stored(take(values, entries, offsets), config, True, args.v_scale)
        return key, value, exists, held_positions(config.dcp_shard, stored[request], args.query.device)

    return _attend_requests(args, config, keys_of_request, seq_lens)


def held_lengths(shard: DCPShard | None, seq_lens: Tensor, local_seq_lens: Tensor | None) -> list[int]:
    """Return how many keys of each request can be read: those of its length that this rank holds."""
    lengths = seq_lens.clamp(0, MAX_SEQ_LEN).tolist()
    if shard is None or local_seq_lens is None:
        return lengths
    return [
        max(0, min(shard.count(length), held)) for length, held in zip(lengths, local_seq_lens.tolist(), strict=True)
    ]


def held_positions(shard: DCPShard | None, count: int, device: torch.device) -> Tensor:
    """Return the positions of a request's first `count` keys on this rank."""
    index = torch.arange(count, device=device)
    return index if shard is None else shard.position(index)


def ranges(offsets: Tensor, most: int) -> list[tuple[int, int]]:
    """Return where the rows of each request begin and end among `most`, by offsets that may hold anything."""
    return list(itertools.pairwise(offsets.cummax(0).values.clamp(0, most).tolist()))


def locate_keys(block_row: Tensor, seq_len: int, block_size: int, num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return block ids, offsets and existence, each `[seq_len]`, of one request's keys.

    A key exists if its column of the table names a block of the cache. Those that do not exist get a block id that can
    be read, never a key that can be seen.
    """
    positions = torch.arange(seq_len, device=block_row.device)
    blocks = block_row[positions // block_size].long()
    exists = (blocks >= 0) & (blocks < num_blocks)
    return blocks.clamp(0, num_blocks - 1), positions % block_size, exists


def packed_attention(args: VarlenAttentionArgs, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return what `vattn::varlen_attention` computes, before any rounding: fp32 `[T, H, V]` and LSE fp32 `[T, H]`."""
    spans = ranges(args.kv_start_loc, args.key.shape[0])

    def keys_of_request(request: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = slice(*spans[request])
        key = decode_kv(args.key[rows], config.kv_cache_dtype, args.k_scale)
        value = decode_kv(args.value[rows], config.kv_cache_dtype, args.v_scale)
        exists = torch.ones(key.shape[0], dtype=torch.bool, device=key.device)
        return key, value, exists, held_positions(None, key.shape[0], key.device)

    return _attend_requests(args, config, keys_of_request, [end - start for start, end in spans])


def _attend_requests(
    args: AttentionArgs | VarlenAttentionArgs,
    config: AttentionConfig,
    keys_of_request: KeysOfRequest,
    seq_lens: list[int],
) -> tuple[Tensor, Tensor]:
    """Attend request by request; rows that belong to none stay at output 0 and LSE -inf."""
    num_tokens = args.query.shape[0]
    query = load_query(args.query, args.q_scale, config.num_kv_heads, config.query_load)
    out = query.new_zeros((num_tokens, config.num_heads, config.head_size_v))
    lse = query.new_full((num_tokens, config.num_heads), -torch.inf)
    for request, (start, end) in enumerate(ranges(args.query_start_loc, num_tokens)):
        if end > start:
            key, value, exists, held = keys_of_request(request)
            visible, bias = _mask_and_bias(args, config, request, end - start, seq_lens[request], held)
            out[start:end], lse[start:end] = attend(
                query[start:end], key, value, visible & exists, config, bias=bias, sinks=args.sinks
            )
    return out, lse


def _mask_and_bias(
    args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, request: int, query_len: int, seq_len: int,
    held: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return one request's visibility `[q, s]` and what is added to its scores `[H, q, s]`, or `None`.

    held: the positions of its keys.
    """
    causal = is_causal(config, None if args.causal_flags is None else bool(args.causal_flags[request] != 0))
    mm_ranges = None if args.mm_ranges is None else args.mm_ranges[request]
    q, k = row_positions(query_len, seq_len, args.query.device), held[None, :]
    visible = visible_keys(config, q, k, seq_len - query_len, causal, mm_ranges)
    return visible, score_bias(args, config, q, k, seq_len - query_len, request, causal)


def score_bias(
    args: AttentionArgs | VarlenAttentionArgs,
    config: AttentionConfig,
    q: Tensor,
    k: Tensor,
    context_len: int,
    request: int,
    causal: bool,
) -> Tensor | None:
    """Return what is added to the scores `[H, q, s]` of a request's rows and keys at some positions, or `None`."""
    bias = None if args.alibi_slopes is None else alibi_bias(config, args.alibi_slopes, q, k, causal)
    if args.bias is not None and args.tree_id is not None:
        tree = tree_bias(args.bias, int(args.tree_id[request]), q, k, context_len)
        bias = tree.expand(config.num_heads, -1, -1) if bias is None else bias + tree
    return bias


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    config: AttentionConfig,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend one request's rows to its keys: scale, soft cap, mask, bias, softmax with sink.

    Args:
        query, key, value: fp32 `[q, H, D]`, `[s, K, D]`, `[s, K, V]`.
        visible: bool `[q, s]`. Keys and values that no row sees may hold anything.
        bias: `[H, q, s]`, added to the scores; -inf hides.
        sinks: `[H]`, one logit per head, only in the denominator.

    Returns:
        fp32 `[q, H, V]`, zero for rows that see no key, and LSE `[q, H]`: the natural log of the whole denominator.
    """
    value = torch.where(visible.any(dim=0)[:, None, None], value, 0.0)
    grouped = query.unflatten(1, (config.num_kv_heads, config.group_size))
    scores = config.scale * torch.einsum("qkgd,skd->kgqs", grouped, key).flatten(0, 1)
    if config.logits_soft_cap is not None:
        scores = config.logits_soft_cap * torch.tanh(scores / config.logits_soft_cap)
    scores = torch.where(visible, scores, -torch.inf)
    if bias is not None:
        scores = scores + bias
    weights, lse = softmax(scores, sinks)
    weights = weights.unflatten(0, (config.num_kv_heads, config.group_size))
    out = torch.einsum("kgqs,skv->qkgv", weights, value).flatten(1, 2)
    return out, lse.t()


def softmax(scores: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the softmax of scores `[H, q, s]` and the natural log of its denominators `[H, q]`.

    Args:
        sinks: `[H]`, one logit per head, only in the denominator.

    Rows of -inf get weights 0 and LSE -inf.
    """
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().unsqueeze(-1))
    # Subtracting 0 instead of -inf keeps exp(-inf) = 0 from becoming NaN.
    return torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1)), lse


def merge_attn_states(args: MergeArgs) -> None:
    """Run `vattn::merge_attn_states`: weigh two partial results of the same rows by their LSE, in fp32.

    A part with LSE -inf or +inf is empty and its output is not read; two empty parts give output 0 and LSE -inf.
    """
    out, lse = merge((args.prefix_output, args.prefix_lse), (args.suffix_output, args.suffix_lse))
    args.output.copy_(out)
    if args.output_lse is not None:
        args.output_lse.copy_(lse)


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the merged fp32 output `[T, H, V]` and LSE `[T, H]` of two partial results of the same rows."""
    first, second = (torch.where(part[1] == torch.inf, -torch.inf, part[1]) for part in (one, other))
    lse = torch.logaddexp(first, second)
    reference = torch.where(lse == -torch.inf, 0.0, lse)
    return _weighed(one[0], first - reference) + _weighed(other[0], second - reference), lse


def _weighed(part: Tensor, log_weight: Tensor) -> Tensor:
    weight = torch.exp(log_weight).unsqueeze(-1)
    return torch.where(log_weight.unsqueeze(-1) == -torch.inf, 0.0, part.float() * weight)
