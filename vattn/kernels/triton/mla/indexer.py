"""The lightning indexer in Triton: keys into their slots, scores, and the positions of the highest ones.

`vattn.ops.reference.mla_indexer` says what they compute. Positions are chosen by four passes over the bits of the
scores,
eight at a time: how many scores have each value of these bits tells in which of them the last chosen one lies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vattn.kernels.triton.cache.update import slot_start
from vattn.kernels.triton.common.codec import decode, dot, encode_quotient
from vattn.kernels.triton.common.epilogue import absolute_maximum
from vattn.kernels.triton.common.mask import MAX_SEQ_LEN, clamp
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.kernels.triton.mla.kernels import request_of_token
from vattn.kernels.triton.mla.rows import LEAST_SCALE, row_offset
from vattn.ops.reference.mla_indexer import SCALE_BYTES, IndexerSelectArgs, IndexerUpdateArgs


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping"])
def mla_indexer_update_kernel(
    key, cache, slot_mapping, num_slots, stride_k, D: tl.constexpr, D_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Write one token's codes and scale. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    row = cache + slot_start(slot, num_slots, BLOCK_SIZE, (BLOCK_SIZE * (D + 4), D + 4))
    column = tl.arange(0, D_TILE)
    x = tl.load(key + token * stride_k + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    largest = absolute_maximum(x)
    scale = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    scale = tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)
    codes = encode_quotient(x, scale[:, None], "fp8_e4m3", NATIVE_FP8)
    tl.store(row + column[None, :], codes, mask=(column < D)[None, :])
    tl.store((row + D).to(tl.pointer_type(tl.float32)) + tl.arange(0, 1), scale)


@triton.jit
def visible_tokens(query_start_loc, seq_lens, num_tokens, num_reqs, most_keys, token):
    """Return the request of a token (-1: none) and how many tokens it sees."""
    request = request_of_token(query_start_loc, num_reqs, token)
    is_real = request >= 0
    end = tl.minimum(tl.load(query_start_loc + request + 1, mask=is_real, other=0), num_tokens)
    seq_len = clamp(tl.load(seq_lens + request, mask=is_real, other=0), MAX_SEQ_LEN)
    limit = clamp(seq_len - (end - 1 - token), most_keys)
    return request, tl.where(is_real, limit, 0)


@triton.jit(
    do_not_specialize=[
        "first_token",
        "num_tokens",
        "num_reqs",
        "num_blocks",
        "table_stride",
        "most_keys",
        "listed",
        "row_stride",
    ],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def mla_indexer_score_kernel(
    query, weights, cache, query_start_loc, seq_lens, block_table, scores, first_token, num_tokens, num_reqs,
    num_blocks, table_stride, most_keys, listed, row_stride,
    H: tl.constexpr, D: tl.constexpr, H_TILE: tl.constexpr, D_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, STRETCH: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Write the scores of a stretch of STRETCH keys of one token. Grid: stretches, tokens.

    `scores` is fp32 `[tokens of this launch, row_stride]`. Tokens that see no more keys than are listed need none.
    """
    token = first_token + tl.program_id(1)
    request, limit = visible_tokens(query_start_loc, seq_lens, num_tokens, num_reqs, most_keys, token)
    first = tl.program_id(0) * STRETCH
    if (limit <= listed) | (first >= limit):
        return
    head = tl.arange(0, H_TILE)
    column = tl.arange(0, D_TILE)
    inside = (head < H)[:, None] & (column < D)[None, :]
    q = tl.load(query + token.to(tl.int64) * (H * D) + head[:, None] * D + column[None, :], mask=inside, other=0)
    weight = tl.load(weights + token.to(tl.int64) * H + head, mask=head < H, other=0.0)
    if NATIVE_FP8:
        q = q.to(tl.float8e4nv, bitcast=True)
    else:
        q = decode(q, "fp8_e4m3", tl.float16, NATIVE_FP8)
    table = block_table + request.to(tl.int64) * table_stride
    target = scores + tl.program_id(1).to(tl.int64) * row_stride
    for start in range(first, tl.minimum(first + STRETCH, limit), BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        exists = position < limit
        block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=-1)
        known = exists & (block >= 0) & (block < num_blocks)
        row = cache + row_offset(tl.where(known, block, 0), position % BLOCK_SIZE, (BLOCK_SIZE * (D + 4), D + 4))
        mask = known[:, None] & (column < D)[None, :]
        k = tl.load(row[:, None] + column[None, :], mask=mask, other=0)
        if NATIVE_FP8:
            k = k.to(tl.float8e4nv, bitcast=True)
        else:
            k = decode(k, "fp8_e4m3", tl.float16, NATIVE_FP8)
        scale = tl.load((row + D).to(tl.pointer_type(tl.float32)), mask=known, other=0.0)
        zero = tl.zeros([H_TILE, BLOCK_N], tl.float32)
        if NATIVE_FP8:
            # The hardware keeps fp32's bits in sums of FP8 products only on request.
            products = tl.dot(q, tl.trans(k), zero, max_num_imprecise_acc=0)
        else:
            products = dot(q, tl.trans(k), zero)
        score = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0) * scale
        tl.store(target + position, tl.where(known, score, float("-inf")), mask=exists)


@triton.jit
def ordered_bits(x):
    """Return fp32 as uint32 in the same order."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def choose_digit(row, limit, prefix, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits of the last wanted score from bit SHIFT up, and how many that begin with them are wanted.

    `prefix`: its bits above these eight.
    """
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([256], tl.int32)
    for start in range(0, limit, BLOCK):
        place = start + lane
        inside = place < limit
        bits = ordered_bits(tl.load(row + place, mask=inside, other=float("-inf")))
        if SHIFT < 24:
            inside = inside & ((bits >> (SHIFT + 8)) == prefix)
        counts += tl.histogram(((bits >> SHIFT) & 255).to(tl.int32), 256, mask=inside)
    # Scores with larger digits, and the largest digit that the last wanted score can have.
    value = tl.arange(0, 256)
    larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    found = tl.max(tl.where(larger + counts >= wanted, value, 0), 0)
    wanted -= tl.sum(tl.where(value == found, larger, 0), 0)
    return (prefix << 8) | found.to(tl.uint32), wanted


@triton.jit(
    do_not_specialize=["first_token", "num_tokens", "num_reqs", "most_keys", "listed", "row_stride", "topk_stride"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens"],
)
def mla_indexer_choose_kernel(
    scores, query_start_loc, seq_lens, topk_indices, first_token, num_tokens, num_reqs, most_keys, listed, row_stride,
    topk_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the positions that one token sees. Grid: tokens."""
    token = first_token + tl.program_id(0)
    _, limit = visible_tokens(query_start_loc, seq_lens, num_tokens, num_reqs, most_keys, token)
    row = scores + tl.program_id(0).to(tl.int64) * row_stride
    target = topk_indices + token.to(tl.int64) * topk_stride
    lane = tl.arange(0, BLOCK)
    if limit <= listed:
        for start in range(0, listed, BLOCK):
            place = start + lane
            tl.store(target + place, tl.where(place < limit, place, -1), mask=place < listed)
        return
    prefix = tl.zeros([], tl.uint32)
    wanted = listed
    for digit in tl.static_range(4):
        prefix, wanted = choose_digit(row, limit, prefix, wanted, 24 - 8 * digit, BLOCK)
    base = 0
    equals = 0
    for start in range(0, limit, BLOCK):
        place = start + lane
        inside = place < limit
        bits = ordered_bits(tl.load(row + place, mask=inside, other=float("-inf")))
        is_equal = (inside & (bits == prefix)).to(tl.int32)
        rank = equals + tl.cumsum(is_equal, 0)
        taken = ((inside & (bits > prefix)) | ((is_equal > 0) & (rank <= wanted))).to(tl.int32)
        at = base + tl.cumsum(taken, 0) - 1
        tl.store(target + at, place, mask=taken > 0)
        equals += tl.sum(is_equal, 0)
        base += tl.sum(taken, 0)


SCORE_BYTES = 256 << 20
"""Scores that are held at a time."""

_STRETCH = 1024


def mla_indexer_update(args: IndexerUpdateArgs, limits: Limits | None = None) -> None:
    """Run `vattn::mla_indexer_update`."""
    if not args.slot_mapping.numel():
        return
    limits = limits or Limits.of(args.key.device)
    columns, size = args.key.shape[1], args.index_cache.shape[1]
    mla_indexer_update_kernel[(args.key.shape[0],)](
        args.key, args.index_cache, args.slot_mapping, args.index_cache.shape[0] * size, args.key.stride(0), D=columns,
        D_TILE=next_power_of_two(columns), BLOCK_SIZE=size, NATIVE_FP8=limits.native_fp8, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip


def mla_indexer_select(args: IndexerSelectArgs, limits: Limits | None = None) -> None:
    """Run `vattn::mla_indexer_select`. Nothing is read on the host."""
    tokens, heads, columns = args.query.shape
    if not tokens:
        return
    limits = limits or Limits.of(args.query.device)
    size, listed = args.index_cache.shape[1], args.topk_indices.shape[1]
    assert args.index_cache.shape[2] == columns + SCALE_BYTES
    most_keys, reqs = args.block_table.shape[1] * size, args.seq_lens.shape[0]
    # Where no row can see more than is listed, there is nothing to score.
    scored = most_keys > listed
    rows = max(1, min(tokens, SCORE_BYTES // (4 * most_keys))) if scored else tokens
    scores = torch.empty((rows, most_keys) if scored else (1, 1), dtype=torch.float32, device=args.query.device)
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        if scored:
            mla_indexer_score_kernel[(-(-most_keys // _STRETCH), count)](
                args.query.view(torch.uint8), args.weights, args.index_cache, args.query_start_loc, args.seq_lens,
                args.block_table, scores, first, tokens, reqs, args.index_cache.shape[0], args.block_table.stride(0),
                most_keys, listed, scores.stride(0), H=heads, D=columns, H_TILE=max(16, next_power_of_two(heads)),
                D_TILE=max(32, next_power_of_two(columns)), BLOCK_SIZE=size, STRETCH=_STRETCH,
                BLOCK_N=16 if limits.interpreted else 128, NATIVE_FP8=limits.native_fp8, num_warps=4, num_stages=3,
                enable_fp_fusion=True,
            )  # fmt: skip
        mla_indexer_choose_kernel[(count,)](
            scores, args.query_start_loc, args.seq_lens, args.topk_indices, first, tokens, reqs, most_keys, listed,
            scores.stride(0), args.topk_indices.stride(0), BLOCK=64 if limits.interpreted else 2048, num_warps=8,
            enable_fp_fusion=True,
        )  # fmt: skip
