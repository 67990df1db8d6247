"""How the general attention kernel folds tiles of keys and values into the running sums of its rows."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.ops.triton.codec import cast, dot


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
def attend_ahead(
    q, factor, acc, m, total, first_block, table, key_rows, value_rows, key_boxes, value_boxes, kv_head, kv_start,
    num_keys, begin, end, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold tiles [begin, end) that need no mask, the keys of each multiplied beside the weights of the tile before.

    Two products and a softmax depend on each other only from tile to tile then, so that neither waits for the other.

    Args:
        factor: what scores are of products, above 0.
        first_block: the block of each key of the first tile.
        key_rows, value_rows: where the rows of block 0 lie.
        key_boxes, value_boxes: tensor maps instead, or `None`.
        num_keys: packed keys in all, beyond which maps give zeros.
    """
    n = tl.arange(0, TILE)
    in_block = n // BLOCK_SIZE if BLOCK_SIZE > 0 else n
    key_block = first_block
    value_block = first_block
    # Nothing comes before the first tile: its place is taken by weights and values of zero.
    before = tl.full([q.shape[0], TILE], float("-inf"), tl.float32)
    for j in tl.range(tl.where(begin < end, begin - 1, end), end, num_stages=STAGES):
        following = tl.minimum(j + 1, end - 1)
        if key_boxes is not None:
            place = tl.where(j < begin, num_keys, kv_start + j * TILE)
            k_tile = key_boxes.load([kv_head, kv_start + following * TILE, 0]).reshape([TILE, BLOCK_D])
            v_tile = value_boxes.load([kv_head, place, 0]).reshape([TILE, BLOCK_V])
        else:
            k_tile = tl.load(key_rows + (key_block.to(tl.int64) * K_BLOCK)[:, None])
            key_block = tl.load(table + tl.minimum(j + 2, end - 1) * (TILE // BLOCK_SIZE) + in_block)
            exists = (n * 0 + j >= begin)[:, None]
            v_tile = tl.load(value_rows + (value_block.to(tl.int64) * V_BLOCK)[:, None], mask=exists, other=0.0)
            value_block = tl.load(table + following * (TILE // BLOCK_SIZE) + in_block)
        products = dot(q, tl.trans(k_tile), tl.zeros([q.shape[0], TILE], tl.float32))
        acc, m, total = softmax_step_of_products(before, factor, v_tile, acc, m, total)
        before = products
    return acc, m, total
