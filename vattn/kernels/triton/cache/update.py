"""Write new keys and values into their slots of a paged cache in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import cast, encode_quotient


@triton.jit
def head_scale(scale, head, known, PER_HEAD: tl.constexpr):
    """Return the scales of heads as `[heads, 1]`, or one as `[1, 1]`; 1 without scales."""
    # A function that is not inlined cannot return None.
    if scale is None:
        return tl.full((1, 1), 1.0, tl.float32)
    elif PER_HEAD:
        return tl.load(scale + head, mask=known, other=1.0, eviction_policy="evict_last")[:, None]
    else:
        return tl.load(scale + tl.zeros((1, 1), tl.int32), eviction_policy="evict_last")


@triton.jit
def stored(x, scale, FORMAT: tl.constexpr, STORED: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Encode model-dtype values for the cache; bytes are FP8 already."""
    if x.dtype == tl.uint8:
        return x
    elif STORED != tl.uint8:
        return cast(x, STORED)
    else:
        return encode_quotient(x.to(tl.float32), scale, FORMAT, NATIVE_FP8)


@triton.jit
def slot_start(slot, num_slots, BLOCK_SIZE: tl.constexpr, STRIDES: tl.constexpr):
    """Return the offset of a slot's first head; STRIDES are of block, row and head. 0 for a slot out of range."""
    inside = (slot >= 0) & (slot < num_slots)
    block = tl.where(inside, slot // BLOCK_SIZE, 0)
    return block * STRIDES[0] + tl.where(inside, slot % BLOCK_SIZE, 0) * STRIDES[1]


@triton.jit
def _copy_heads(
    source, cache, scale, slot, num_slots, token, head, known, stride_t, stride_h,
    WIDTH: tl.constexpr, TILE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, STRIDES: tl.constexpr,
    FORMAT: tl.constexpr, PER_HEAD: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, TILE_WIDTH)[None, :]
    inside = known[:, None] & (column < WIDTH)
    x = tl.load(source + token * stride_t + (head * stride_h)[:, None] + column, mask=inside, other=0)
    x = stored(x, head_scale(scale, head, known, PER_HEAD), FORMAT, cache.dtype.element_ty, NATIVE_FP8)
    target = (
        cache + slot_start(slot, num_slots, BLOCK_SIZE, STRIDES) + (head.to(tl.int64) * STRIDES[2])[:, None] + column
    )
    tl.store(target, x, mask=inside)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"])
def cache_update_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, num_slots,
    stride_kt, stride_kh, stride_vt, stride_vh,
    NUM_HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_TILE: tl.constexpr, V_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    FORMAT: tl.constexpr, PER_HEAD: tl.constexpr, NATIVE_FP8: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See `vattn.ops.reference.attention.kv_cache_update`. Grid: tokens, tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    known = head < NUM_HEADS
    _copy_heads(key, key_cache, k_scale, slot, num_slots, token, head, known, stride_kt, stride_kh,
                D, D_TILE, BLOCK_SIZE, K_STRIDES, FORMAT, PER_HEAD, NATIVE_FP8)  # fmt: skip
    _copy_heads(value, value_cache, v_scale, slot, num_slots, token, head, known, stride_vt, stride_vh,
                V, V_TILE, BLOCK_SIZE, V_STRIDES, FORMAT, PER_HEAD, NATIVE_FP8)  # fmt: skip
