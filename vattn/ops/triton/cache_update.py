"""Write new keys and values into their slots of a paged cache: one launch for both."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.ops.triton.codec import encode


@triton.jit
def _store_part(
    source, cache, scale, token, block, offset, column, stride_t, stride_h,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, FORMAT: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    head = column // WIDTH
    inside = head < NUM_HEADS
    x = tl.load(source + token.to(tl.int64) * stride_t + head * stride_h + column % WIDTH, mask=inside, other=0)
    # Bytes are FP8 already and stored as they are.
    if source.dtype.element_ty != tl.uint8:
        if scale is not None:
            divisor = tl.load(scale + (head if PER_HEAD else head * 0), mask=inside, other=1.0)
            x = tl.div_rn(x.to(tl.float32), divisor)
        x = encode(x, FORMAT, cache.dtype.element_ty)
    target = block * BLOCK_STRIDE + offset * ROW_STRIDE + head * HEAD_STRIDE + column % WIDTH
    tl.store(cache + target, x, mask=inside)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping"])
def cache_update_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_slots,
    stride_kt, stride_kh, stride_vt, stride_vh,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr, V_ROW: tl.constexpr, V_HEAD: tl.constexpr,
    FORMAT: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `vattn.ops.reference.kv_cache_update`. Grid: tokens, blocks of columns."""
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    _store_part(key, key_cache, k_scale, token, block, offset, column, stride_kt, stride_kh,
                D, NUM_HEADS, K_BLOCK, K_ROW, K_HEAD, FORMAT, PER_HEAD)  # fmt: skip
    _store_part(value, value_cache, v_scale, token, block, offset, column, stride_vt, stride_vh,
                V, NUM_HEADS, V_BLOCK, V_ROW, V_HEAD, FORMAT, PER_HEAD)  # fmt: skip
