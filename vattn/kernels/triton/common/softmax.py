"""How the general attention kernel folds tiles of keys and values into the running sums of its rows."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import cast, dot


@triton.jit
def softmax_step(s, v, acc, m, total):
    """Fold scores (times log2 e) and values of one tile into the running sums."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    # A row that has seen nothing yet keeps its sums at zero instead of exp2(-inf + inf).
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, axis=1)
    acc = dot(cast(p, v.dtype), v, acc * alpha[:, None])
    return acc, m_new, total


@triton.jit
def softmax_step_of_products(s, factor, v, acc, m, total):
    """Do the same with products whose scores are `factor` times as large, which is not negative."""
    m_new = tl.maximum(m, tl.max(s, axis=1) * factor)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor[:, None] - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, axis=1)
    acc = dot(cast(p, v.dtype), v, acc * alpha[:, None])
    return acc, m_new, total


@triton.jit
def softmax_step_apart(s, factor, v, acc, m, sums):
    """Do the same with sums of every eighth key, `[rows, 8]`, which threads have apart and add up at the end.

    Largest scores are of every eighth key first too: one chain of comparisons would take twice as long.
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
    """Fold tiles [begin, end) that need no mask, the keys of each multiplied beside the weights of the tile before.

    Two products and a softmax depend on each other only from tile to tile then, so that neither waits for the other.

    Args:
        factor: what scores are of products, above 0.
        key_boxes, value_boxes: tensor maps over packed keys and values.
        num_keys: packed keys in all, beyond which maps give zeros.
    """
    # Nothing comes before the first tile: its place is taken by weights and values of zero.
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
