"""Online softmax of the general attention kernel: add tiles of keys and values to the running sums."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import cast, dot


@triton.jit
def softmax_step(s, v, acc, m, total):
    """Add scores (times log2 e) and values of one tile to the running sums."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    # A row without visible keys so far keeps its sums at zero instead of exp2(-inf + inf).
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, axis=1)
    acc = dot(cast(p, v.dtype), v, acc * alpha[:, None])
    return acc, m_new, total


@triton.jit
def softmax_step_of_products(s, factor, v, acc, m, total):
    """Do the same with products; scores are `factor` >= 0 times as large."""
    m_new = tl.maximum(m, tl.max(s, axis=1) * factor)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor[:, None] - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, axis=1)
    acc = dot(cast(p, v.dtype), v, acc * alpha[:, None])
    return acc, m_new, total


@triton.jit
def softmax_step_apart(s, factor, v, acc, m, sums):
    """Do the same with sums over every eighth key, `[rows, 8]`, which stay in separate threads until the end.

    Maxima are taken over every eighth key first, too: one chain of comparisons would take twice as long.
    """
    ROWS: tl.constexpr = s.shape[0]
    EIGHTHS: tl.constexpr = s.shape[1] // 8
    m_new = tl.maximum(m, tl.max(tl.max(s.reshape([ROWS, EIGHTHS, 8]), axis=1), axis=1) * factor)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor[:, None] - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    sums = sums * alpha[:, None] + tl.sum(p.reshape([ROWS, EIGHTHS, 8]), axis=1)
    acc = dot(cast(p, v.dtype), v, acc * alpha[:, None])
    return acc, m_new, sums


@triton.jit
def attend_ahead(
    q, factor, acc, m, total, key_boxes, value_boxes, kv_head, kv_start, num_keys, begin, end, TILE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add unmasked tiles [begin, end), multiplying the keys of each while the weights of the previous one are applied.

    The two products and the softmax then depend on each other only from tile to tile.

    Args:
        factor: scores per product, above 0.
        key_boxes, value_boxes: tensor maps over varlen keys and values.
        num_keys: all varlen keys; maps give zeros beyond them.
    """
    # Weights and values of zero represent the tile before the first one.
    before = tl.full([q.shape[0], TILE], float("-inf"), tl.float32)
    for j in tl.range(tl.where(begin < end, begin - 1, end), end, num_stages=STAGES):
        following = tl.minimum(j + 1, end - 1)
        place = tl.where(j < begin, num_keys, kv_start + j * TILE)
        k_tile = key_boxes.load([kv_head, kv_start + following * TILE, 0]).reshape([TILE, BLOCK_D])
        v_tile = value_boxes.load([kv_head, place, 0]).reshape([TILE, BLOCK_V])
        products = dot(q, tl.trans(k_tile), tl.zeros([q.shape[0], TILE], tl.float32))
        acc, m, total = softmax_step_of_products(before, factor, v_tile, acc, m, total)
        before = products
    return acc, m, total
