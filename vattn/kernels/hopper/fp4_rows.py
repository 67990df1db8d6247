"""NVFP4 of rows that another kernel stored in the model dtype: a thread quantises a whole group.

It runs after a prefill, where the number of instructions counts, not latency: a group of 16 columns takes about 300 in
one thread, and threads exchange nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.config.attention import AttentionConfig
from vattn.kernels.hopper.epilogue import group_codes, group_maximum, group_scales
from vattn.kernels.hopper.fp4 import fp4_code, fp4_scale, inverse_of, is_usual, quick_reciprocal
from vattn.kernels.replay import unrecorded
from vattn.kernels.triton.attention import launch as attention_launch
from vattn.kernels.triton.common.output_constants import group_constants
from vattn.ops.arguments import AttentionArgs, VarlenAttentionArgs
from vattn.quantization.formats import NVFP4_GROUP_SIZE, OUTPUT_FORMATS

WARPS, SIZE = 8, gl.constexpr(NVFP4_GROUP_SIZE)
COLUMNS_OF_PROGRAM = WARPS * 32 * NVFP4_GROUP_SIZE

SIGNS = gl.constexpr(
    """
    {
    .reg .b32 even, more_even, odd, more_odd;
    prmt.b32 even, $1, $3, 0x0073;
    prmt.b32 more_even, $5, $7, 0x7300;
    prmt.b32 odd, $2, $4, 0x0073;
    prmt.b32 more_odd, $6, $8, 0x7300;
    prmt.b32 even, even, more_even, 0x7610;
    prmt.b32 odd, odd, more_odd, 0x7610;
    shr.u32 even, even, 4;
    and.b32 even, even, 0x08080808;
    and.b32 odd, odd, 0x80808080;
    or.b32 $0, even, odd;
    }
    """
)
"""Sign bits of eight values where the codes of 4 bits have theirs."""


@gluon.jit
def eighths(x):
    """Return columns 0, 8, ... of `[R, C]`, columns 1, 9, ... and so on."""
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 8, 2, 2, 2]))
    x04, x26 = gl.split(even)
    x15, x37 = gl.split(odd)
    x0, x4 = gl.split(x04)
    x1, x5 = gl.split(x15)
    x2, x6 = gl.split(x26)
    x3, x7 = gl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def words_of(codes):
    """Return int32 words of eight columns each from int32 codes in the last 4 bits; the other bits add up to zero.

    The bits above the last three of a code are a multiple of 2^24, and the same in every code.
    """
    c0, c1, c2, c3, c4, c5, c6, c7 = eighths(codes)
    low = c0 + c1 * 16 + (c2 + c3 * 16) * 256
    return low + (c4 + c5 * 16 + (c6 + c7 * 16) * 256) * 65536


@gluon.jit
def swizzled_place(row, column, COLUMNS: gl.constexpr):
    """See `vattn.kernels.triton.common.epilogue.swizzled_offset`."""
    tile = (row // 128) * (COLUMNS // 4) + column // 4
    return tile.to(gl.int64) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


@gluon.jit(do_not_specialize=["num_tokens", "scale_stride", "group_stride"])
def fp4_rows_kernel(
    source, output, block_scale, output_scale, num_tokens, scale_stride, group_stride, COLUMNS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Quantise rows `[T, COLUMNS]`; grid: rows (of padded scales if swizzled) x blocks of columns.

    The output's rows are as many words of eight codes. SCALE_COLUMNS is the padded number of swizzled scales of a row,
    0 for scales in order.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, SIZE], [32, 1], [WARPS, 1], [1, 0])
    APPROXIMATE: gl.constexpr = GROUPS[4] == "approximate_divide"
    row = gl.program_id(0)
    first = gl.program_id(1) * (WARPS * 32)
    group = first + gl.arange(0, WARPS * 32, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT))
    inside = (group < COLUMNS // SIZE) & (row < num_tokens)
    scale = gl.load(output_scale)
    start = source + row.to(gl.int64) * COLUMNS
    x = gl.load(start + (group * SIZE)[:, None] + column[None, :], mask=inside[:, None], other=0.0).to(gl.float32)
    largest = group_maximum(x, 1)
    inverse_scale = quick_reciprocal(scale, APPROXIMATE)
    if is_usual(inverse_scale):
        stored, step = fp4_scale(largest, scale, inverse_scale, APPROXIMATE)
        zero = gl.zeros_like(x)
        inverse = zero + inverse_of(step, APPROXIMATE).expand_dims(1)
        codes, signed = fp4_code(x, zero + step.expand_dims(1), inverse, APPROXIMATE)
        s0, s1, s2, s3, s4, s5, s6, s7 = eighths(signed)
        signs = gl.inline_asm_elementwise(
            SIGNS, "=r,r,r,r,r,r,r,r,r", [s0, s1, s2, s3, s4, s5, s6, s7], dtype=gl.int32, is_pure=True, pack=1
        )
        words = (words_of(codes) - words_of(gl.full_like(codes, 0x4B000000))) | signs
    else:
        stored, step = group_scales(largest, scale, GROUPS)
        words = words_of(group_codes(x, step.expand_dims(1), GROUPS))
    if SCALE_COLUMNS > 0:
        place = swizzled_place(row, group, SCALE_COLUMNS)
        gl.store(block_scale + place, gl.where(inside, stored, 0), mask=group < SCALE_COLUMNS)
    else:
        place = row.to(gl.int64) * scale_stride + group.to(gl.int64) * group_stride
        gl.store(block_scale + place, stored, mask=inside)
    WORDS: gl.constexpr = words.type.layout
    at = first + gl.arange(0, WARPS * 32, layout=gl.SliceLayout(1, WORDS))
    half = gl.arange(0, SIZE // 8, layout=gl.SliceLayout(0, WORDS))
    target = output + row.to(gl.int64) * (COLUMNS // 8) + (at * (SIZE // 8))[:, None] + half[None, :]
    gl.store(target, words, mask=((at < COLUMNS // SIZE) & (row < num_tokens))[:, None] & (half >= 0)[None, :])


def finish(args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, values: Tensor) -> None:
    """Quantise rows `[T, H, V]` of the model dtype into the output of an op whose scales span heads or tiles."""
    fmt = OUTPUT_FORMATS[config.output_format]
    if fmt.group_size == NVFP4_GROUP_SIZE and args.output.is_contiguous() and args.output.data_ptr() % 4 == 0:
        launch(args, config, values)
    else:
        attention_launch.finish(args, config, values)


def launch(args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, values: Tensor) -> None:
    """Launch the kernel for an output that takes whole words."""
    scales, swizzled = args.output_block_scale, OUTPUT_FORMATS[config.output_format].swizzled
    assert scales is not None
    # Swizzled scales are padded, and padding is written.
    rows, scale_columns = scales.shape if swizzled else (args.query.shape[0], 0)
    columns = config.num_heads * config.head_size_v
    unrecorded(fp4_rows_kernel)[rows, -(-max(columns, scale_columns * NVFP4_GROUP_SIZE) // COLUMNS_OF_PROGRAM)](
        source=values, output=args.output.view(-1).view(torch.int32), block_scale=scales.view(torch.uint8),
        output_scale=args.output_scale, num_tokens=args.query.shape[0], scale_stride=scales.stride(0),
        group_stride=scales.stride(1), COLUMNS=columns, SCALE_COLUMNS=scale_columns,
        GROUPS=(NVFP4_GROUP_SIZE, True, False, -1.0, group_constants(config)[4]), WARPS=WARPS, num_warps=WARPS,
    )  # fmt: skip
