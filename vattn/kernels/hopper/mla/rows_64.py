"""What the latent decode kernels of 64 query rows share: hidden keys, rescaling, and the way out of their results.

Two warpgroups share the columns of a result, 256 each. It is rescaled only where a row's maximum has grown by more than
2^8: weights may be that large before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from vattn.kernels.hopper.compat import as_tiles, block_barrier, store_box
from vattn.kernels.hopper.mla.work_items import LATENT, TILE
from vattn.kernels.triton.common.mask import LN2

ROWS = gl.constexpr(64)
HIDDEN = gl.constexpr(-1e8)
"""Score of hidden keys, in base 2: far below any other, and finite, since maxima are multiplied."""

VALUES = 64
"""Values of a thread that are multiplied together: a divisor of what a thread has."""

_PRODUCTS = "".join(f"mul.f32 ${i}, ${i}, ${2 * VALUES + i}; " for i in range(VALUES))
RESCALE = gl.constexpr(
    "{ .reg .pred p; "
    f"setp.neu.f32 p, ${2 * VALUES}, 0f3F800000; setp.neu.or.f32 p, ${2 * VALUES + 2}, 0f3F800000, p; "
    f"vote.sync.any.pred p, p, 0xffffffff; @!p bra SKIP; {_PRODUCTS} SKIP: }}"
)
"""Multiply the values of two rows by their rows' factors unless all of the warp's are 1."""

RESCALE_OPERANDS = gl.constexpr(",".join(["=f"] * VALUES + [str(i) for i in range(VALUES)] + ["f"] * VALUES))


@gluon.jit
def rescale(acc, decay):
    """Return results times the decay of their rows; a warp skips the products where no decay differs from 1."""
    # A thread of a warpgroup has two rows of a result; their values alternate by pairs.
    values, factors = gl.broadcast(acc, decay[:, None])
    return gl.inline_asm_elementwise(
        RESCALE, RESCALE_OPERANDS, [values, factors], dtype=gl.float32, is_pure=True, pack=64
    )


@gluon.jit
def hide(
    scores, hidden, tile, limit, least, table, last_block, num_blocks, all_known, token_of_tile,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Return scores with `hidden` for what rows do not see. `least`: keys that every row sees."""
    if ((tile + 1) * TILE > least) | (all_known == 0):
        token = tile * TILE + token_of_tile
        block = gl.load(table + gl.minimum(token // BLOCK_SIZE, last_block))
        known = (block >= 0) & (block < num_blocks)
        scores = gl.where((token[None, :] < limit[:, None]) & known[None, :], scores, hidden)
    return scores


@gluon.jit
def blocks_known(table, first, last, last_block, num_blocks, BLOCK_SIZE: gl.constexpr):
    """Return 1 if a table's entries for tiles [first, last), up to the last one, name blocks of the cache, else 0."""
    end = gl.minimum((last * TILE + BLOCK_SIZE - 1) // BLOCK_SIZE, last_block + 1)
    begin = first * TILE // BLOCK_SIZE
    # Every warp reads all of them, so none waits for another.
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    lane = gl.arange(0, 128, layout=LANES)
    known = gl.full([128], 1, gl.int32, LANES)
    for start in range(begin, end, 128):
        block = gl.load(table + start + lane, mask=start + lane < end, other=0)
        known = known & ((block >= 0) & (block < num_blocks)).to(gl.int32)
    return gl.min(known, 0)


@gluon.jit
def rows_seen(limit, first, maximum, scale):
    """Return which rows see a key of their item; the maximum of the others is that of hidden keys."""
    return (limit > first * TILE) & (maximum > 0.5 * HIDDEN / scale)


@gluon.jit
def inverse_of(total, seen):
    """Return the inverse of the sum of a row's weights, 0 for rows that see nothing."""
    return gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0)


@gluon.jit
def store_sums(lse, stats, row, inside, row0, slot, maximum, total, seen, scale, PARTIAL_ROWS: gl.constexpr):
    """Write the LSE of rows, or of a split the maxima and sums."""
    if slot >= 0:
        place = (slot.to(gl.int64) * PARTIAL_ROWS + row) * 2
        gl.store(stats + place, gl.where(seen, maximum * scale, -1e30), mask=inside)
        gl.store(stats + place + 1, gl.where(seen, total, 0.0), mask=inside)
    elif lse is not None:
        log = gl.where(seen, (maximum * scale + gl.log2(gl.where(seen, total, 1.0))) * LN2, float("-inf"))
        gl.store(lse + (row0 + row).to(gl.int64), log, mask=inside)


@gluon.jit
def may_send(slot, rows, group, first, last):
    """Return whether bulk copies may write a group's results: there are some, and room for ROWS rows."""
    return (first < last) & ((slot >= 0) | (rows - group * ROWS >= ROWS))


@gluon.jit
def write_half(
    acc, norm, sent, output, output_boxes, partial, partial_boxes, room, free, group, rows, row0, slot,
    FIRST: gl.constexpr, PARTIAL_ROWS: gl.constexpr, RESULT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write 256 columns of the rows' results, or of a split's unnormalised ones.

    `sent`: by bulk copies from the room of those columns of the last tile, which is free after them.
    """
    if sent:
        send_half(acc, norm, output_boxes, partial_boxes, room, group, row0, slot, FIRST, PARTIAL_ROWS, LAYOUT)
        mbarrier.arrive(free, count=1)
    else:
        row = group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, RESULT))
        store_half(acc, norm, output, partial, row, row < rows, row0, slot, FIRST, PARTIAL_ROWS, RESULT)


@gluon.jit
def store_half(
    acc, norm, output, partial, row, inside, row0, slot, FIRST: gl.constexpr, PARTIAL_ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write 256 columns of the rows that are the request's."""
    column = FIRST + gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if slot >= 0:
        place = slot.to(gl.int64) * PARTIAL_ROWS + row
        gl.store(partial + place[:, None] * LATENT + column, acc.to(partial.dtype.element_ty), mask=inside[:, None])
    else:
        place = (row0 + row).to(gl.int64)
        result = (acc * norm[:, None]).to(output.dtype.element_ty)
        gl.store(output + place[:, None] * LATENT + column, result, mask=inside[:, None])


@gluon.jit
def send_half(
    acc, norm, output_boxes, partial_boxes, tile_room, group, row0, slot, FIRST: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write 256 columns of ROWS rows by bulk copies."""
    if slot >= 0:
        send_columns(acc, partial_boxes, slot * PARTIAL_ROWS + group * ROWS, tile_room, FIRST, LAYOUT)
    else:
        send_columns(acc * norm[:, None], output_boxes, row0 + group * ROWS, tile_room, FIRST, LAYOUT)


@gluon.jit
def send_columns(result, boxes, row, tile_room, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Write 256 columns of ROWS rows through a tile's room; return when it is free."""
    room = as_tiles(tile_room, boxes.dtype, 2, [ROWS, 256], LAYOUT).index(FIRST // 256)
    room.store(result.to(boxes.dtype))
    fence_async_shared()
    block_barrier()
    store_box(boxes, [row, FIRST], room)
    tma.store_wait(0)
    block_barrier()
