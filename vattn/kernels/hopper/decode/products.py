"""What the decode kernels in Gluon do with a tile: scores, online softmax, the product with values; and query loads.

A warp has a tile of a KV head to itself; rows are laid out as in `vattn.kernels.hopper.decode.triton_kernel`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from vattn.kernels.hopper.decode.triton_kernel import FP16_QUERY_SHRINK, TILE_TOKENS, UNPACK_KEYS, UNPACK_VALUES
from vattn.kernels.hopper.epilogue import QUERY_ROWS, divide, encode_e4m3


@gluon.jit
def unpack_keys(pairs):
    """See `unpack_pairs` in Triton."""
    return gl.inline_asm_elementwise(
        UNPACK_KEYS, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def unpack_values(pairs):
    """See `unpack_pairs` in Triton."""
    return gl.inline_asm_elementwise(
        UNPACK_VALUES, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def keep_visible(values, token, begin, end):
    """Zero 16-bit values of tokens (the last axis) outside [begin, end).

    Declared impure, or the compiler would do it for every tile and choose the result afterwards.
    """
    bits = gl.where(token % 2 == 0, 0xFFFF, -0x10000)
    mask = gl.where((token >= begin) & (token < end), bits, 0)
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 mask;
        or.b32 mask, $2, $3;
        and.b32 $0, $1, mask;
        }
        """,
        "=r,r,r,r",
        [values, mask],
        dtype=values.dtype,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def keep_rows(scores, BATCH: gl.constexpr, ROWS: gl.constexpr):
    """Return the first ROWS rows of scores `[batch, 16, 16]`: 8 or all."""
    if ROWS == 16:
        return scores
    else:
        low, _ = scores.reshape([BATCH, 2, QUERY_ROWS, TILE_TOKENS]).permute((0, 2, 3, 1)).split()
        return low


@gluon.jit
def tile_scores(
    query_a, query_b, key, factor, soft_cap, BATCH: gl.constexpr, ROWS: gl.constexpr, FP8: gl.constexpr,
    SOFT_CAP: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Return the scores of a tile of each warp `[batch, ROWS, 16]`, in units of log2 e."""
    scores = gl.zeros([BATCH, 16, TILE_TOKENS], gl.float32, MMA)
    if FP8:
        key_a, key_b = unpack_keys(key)
        scores = mma_v2(query_a, key_a, scores)
        scores = mma_v2(query_b, key_b, scores)
    else:
        scores = mma_v2(query_a, key, scores)
    low = keep_rows(scores, BATCH, ROWS) * factor
    if SOFT_CAP:
        low = soft_cap * (1.0 - 2.0 / (gl.exp2(low) + 1.0))
    return low


@gluon.jit
def take_scores(
    low, maximum, total, acc_a, acc_b, ROWS: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Take a tile's scores into the online softmax; return their weights, as what values are multiplied by, first."""
    new_maximum = gl.maximum(maximum, gl.max(low, 2))
    decay = gl.exp2(maximum - new_maximum)
    weights = gl.exp2(low - new_maximum.expand_dims(2))
    total = total * decay.expand_dims(2) + weights
    if ROWS == 8:
        column_decay = gl.convert_layout(decay, gl.SliceLayout(1, MMA)).expand_dims(1)
        right = gl.convert_layout(weights.to(DTYPE).permute((0, 2, 1)), RIGHT)
    else:
        column_decay = gl.convert_layout(decay, gl.SliceLayout(2, MMA)).expand_dims(2)
        right = gl.convert_layout(weights.to(DTYPE), LEFT)
    acc_a = acc_a * column_decay
    if FP8:
        acc_b = acc_b * column_decay
    return right, new_maximum, total, acc_a, acc_b


@gluon.jit
def multiply_values(values, weights, acc_a, acc_b, FP8: gl.constexpr, ROWS: gl.constexpr):
    """Return the accumulators plus `V^T P^T` of 8 rows, or plus `P V` of 16."""
    values_a = values
    values_b = values
    if FP8:
        values_a, values_b = unpack_values(values)
    if ROWS == 8:
        acc_a = mma_v2(values_a, weights, acc_a)
        if FP8:
            acc_b = mma_v2(values_b, weights, acc_b)
    else:
        acc_a = mma_v2(weights, values_a, acc_a)
        if FP8:
            acc_b = mma_v2(weights, values_b, acc_b)
    return acc_a, acc_b


@gluon.jit
def round_query(x, step, LOAD: gl.constexpr):
    """Return e4m3 bytes of x under the scales `step`, as `vattn.kernels.triton.common.epilogue.quantise_dynamic`."""
    wide = gl.zeros_like(x) + step
    if LOAD == "multiply" or LOAD == "approximate_multiply":
        quotient = x * divide(gl.zeros_like(x) + 1.0, wide, LOAD == "approximate_multiply")
    else:
        quotient = divide(x, wide, LOAD == "approximate_divide")
    return encode_e4m3(quotient)


@gluon.jit
def load_query(query, query_rows, columns, mask, step, LOAD: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr):
    """See `vattn.kernels.hopper.decode.triton_kernel`; `step` `[batch, 1, 1]`."""
    loaded = gl.load(query + query_rows + columns, mask=mask, other=0.0)
    if LOAD != "plain":
        loaded = round_query(loaded.to(gl.float32), step, LOAD).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    if FP8:
        return (loaded.to(gl.float32) * FP16_QUERY_SHRINK).to(DTYPE)
    else:
        return loaded.to(DTYPE)
