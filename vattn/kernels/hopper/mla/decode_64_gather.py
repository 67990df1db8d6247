"""Latent decode on Hopper for 64 query rows at a time: two warpgroups share the columns of the result.

The first multiplies queries and keys, exponentiates, and multiplies the left half of the values; the second multiplies
the right half by weights that the first leaves in shared memory. Rotated keys and both halves of the latents arrive and
are released apart, since only two tiles fit. Results are rescaled only where a maximum has grown by more than 2^8:
weights may be that large before. Programs that share the cached rows of a request are neighbours in the grid, so one
reads them from L2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vattn.kernels.hopper.compat import as_tiles, block_barrier, store_box, take_over
from vattn.kernels.hopper.mla.gather import THREADS, gather
from vattn.kernels.hopper.mla.rescale import rescale
from vattn.kernels.hopper.mla.work_items import (
    LATENT,
    ROPE,
    TILE,
    advance,
    block_ids,
    clear_padding,
    clear_rows,
    first_item,
    load_blocks,
    load_queries,
    open_item,
    panels,
)
from vattn.kernels.hopper.prefill.tile_queue import new_barriers
from vattn.kernels.triton.common.mask import LN2

ROWS = gl.constexpr(64)
HIDDEN = gl.constexpr(-1e8)
"""Score of what is hidden, in base 2: far below any other, and finite, since maxima are multiplied."""


@gluon.jit
def produce(
    query_boxes, query_rope_boxes, boxes, rope_boxes, work, queries, query_ropes, latents, ropes, query_ready,
    query_free, ready, free, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SPLIT_QUERY: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load the queries of each group of rows, then its tiles; barriers 3 s, 3 s + 1 and 3 s + 2 are of stage s."""
    _, _, _, schedule, _, num_blocks, _, _ = work
    stage = 0
    phase = 1
    query_phase = 1
    item = first_item(schedule, gl.program_id(0) // GROUPS, True)
    while item >= 0:
        row0, rows, _, _, first, last, _, item, table, last_block = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY, True
        )
        for group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            # On their way while the queries' copies are started.
            blocks = block_ids(table, first, last_block, BLOCK_SIZE)
            load_queries(
                query_boxes, query_rope_boxes, row0, group, queries, query_ropes, query_ready, query_free, query_phase,
                ROWS, True,
            )  # fmt: skip
            query_phase ^= 1
            for tile in range(first, last):
                following = block_ids(table, tile + 1, last_block, BLOCK_SIZE)
                room = latents.index(stage)
                mbarrier.wait(free.index(3 * stage), phase)
                mbarrier.expect(ready.index(3 * stage), TILE * ROPE * 2)
                load_blocks(
                    boxes, rope_boxes, tile, num_blocks, blocks, ready.index(3 * stage), room, ropes.index(stage), 0, 0,
                    True, BLOCK_SIZE, LAYOUT,
                )  # fmt: skip
                for half in gl.static_range(2):
                    mbarrier.wait(free.index(3 * stage + 1 + half), phase)
                    mbarrier.expect(ready.index(3 * stage + 1 + half), TILE * LATENT)
                    load_blocks(
                        boxes, rope_boxes, tile, num_blocks, blocks, ready.index(3 * stage + 1 + half), room,
                        ropes.index(stage), 4 * half, 4, False, BLOCK_SIZE, LAYOUT,
                    )  # fmt: skip
                blocks = following
                stage, phase = advance(stage, phase, 2)


@gluon.jit
def wait_for_rows(barrier, phase, GATHER: gl.constexpr):
    """Wait for a load. What threads have copied must be shown to the matrix instructions."""
    mbarrier.wait(barrier, phase)
    if GATHER:
        fence_async_shared()


@gluon.jit
def multiply_keys(
    queries, query_ropes, latents, ropes, ready, stage, phase, zero, GATHER: gl.constexpr, LAYOUT: gl.constexpr
):
    """Start the products of queries and the keys of a stage as they arrive."""
    wait_for_rows(ready.index(3 * stage), phase, GATHER)
    scores = warpgroup_mma(query_ropes, ropes.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    room = latents.index(stage)
    for half in gl.static_range(2):
        wait_for_rows(ready.index(3 * stage + 1 + half), phase, GATHER)
        key = panels(room, 4 * half, 4, TILE, LAYOUT).permute((1, 0))
        scores = warpgroup_mma(panels(queries, 4 * half, 4, ROWS, LAYOUT), key, scores, is_async=True)
    return scores


@gluon.jit
def release_queries(query_free, tile, last):
    """After the last tile's scores let the next rows of queries be loaded, and behind them their tiles."""
    if tile + 1 == last:
        mbarrier.arrive(query_free.index(0), count=1)


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
    # Every warp looks at all of them, so none waits for another.
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    lane = gl.arange(0, 128, layout=LANES)
    known = gl.full([128], 1, gl.int32, LANES)
    for start in range(begin, end, 128):
        block = gl.load(table + start + lane, mask=start + lane < end, other=0)
        known = known & ((block >= 0) & (block < num_blocks)).to(gl.int32)
    return gl.min(known, 0)


@gluon.jit
def store_half(
    acc, norm, output, partial, row, inside, row0, slot, FIRST: gl.constexpr, PARTIAL_ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write 256 columns of the rows' results, or of a split's unnormalised ones, as far as rows are the request's."""
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
    """Write 256 columns of ROWS rows as `store_half` does, by bulk copies from the room of those columns of a tile."""
    if slot >= 0:
        send_columns(acc, partial_boxes, slot * PARTIAL_ROWS + group * ROWS, tile_room, FIRST, LAYOUT)
    else:
        send_columns(acc * norm[:, None], output_boxes, row0 + group * ROWS, tile_room, FIRST, LAYOUT)


@gluon.jit
def send_columns(result, boxes, row, tile_room, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Write 256 columns of ROWS rows; return when their room is free."""
    room = as_tiles(tile_room, boxes.dtype, 2, [ROWS, 256], LAYOUT).index(FIRST // 256)
    room.store(result.to(boxes.dtype))
    fence_async_shared()
    block_barrier()
    store_box(boxes, [row, FIRST], room)
    tma.store_wait(0)
    block_barrier()


@gluon.jit
def may_send(slot, rows, group, first, last):
    """Return whether `send_half` may write a group's results: there are some, and ROWS rows have room for them."""
    return (first < last) & ((slot >= 0) | (rows - group * ROWS >= ROWS))


@gluon.jit
def attend_left(
    arguments, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT_QUERY: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr, GATHER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute weights, and the left half of the results."""
    (
        work, output, output_boxes, lse, partial, partial_boxes, stats, num_reqs, scale, queries, query_ropes, latents,
        ropes, weights_room, factors, query_ready, query_free, ready, free, weights_ready, weights_free, factors_ready,
    ) = arguments  # fmt: skip
    query_start_loc, _, _, schedule, num_tokens, num_blocks, _, _ = work
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=RESULT, k_width=2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RESULT_ROWS: gl.constexpr = gl.SliceLayout(1, RESULT)
    clear_padding(output, lse, query_start_loc, num_reqs, num_tokens, HEADS, gl.BlockedLayout([4], [32], [4], [0]))
    token_of_tile = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    zero = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    hidden = HIDDEN / scale
    stage = 0
    phase = 0
    query_phase = 0
    weights_phase = 0
    item = first_item(schedule, gl.program_id(0) // GROUPS, not GATHER)
    while item >= 0:
        row0, rows, seq_len, keys, first, last, slot, item, table, last_block = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY, not GATHER
        )
        all_known = blocks_known(table, first, last, last_block, num_blocks, BLOCK_SIZE)
        visible_first = seq_len - rows // HEADS + 1
        for group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            row = group * ROWS + gl.arange(0, ROWS, layout=SCORE_ROWS)
            limit = gl.minimum(visible_first + row // HEADS, keys)
            least = gl.minimum(visible_first + group * ROWS // HEADS, keys)
            acc = gl.zeros([ROWS, 256], gl.float32, RESULT)
            maximum = gl.max(zero, 1) + hidden
            total = gl.max(zero, 1)
            sent = may_send(slot, rows, group, first, last)
            mbarrier.wait(query_ready.index(0), query_phase)
            query_phase ^= 1
            if first < last:
                scores = multiply_keys(queries, query_ropes, latents, ropes, ready, stage, phase, zero, GATHER,
                                       LAYOUT)  # fmt: skip
                scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
                mbarrier.arrive(free.index(3 * stage), count=1)
                release_queries(query_free, first, last)
                scores = hide(scores, hidden, first, limit, least, table, last_block, num_blocks, all_known,
                              token_of_tile, BLOCK_SIZE)  # fmt: skip
                maximum = gl.max(scores, 1)
                weights = gl.exp2(scores * scale - (maximum * scale)[:, None])
                sums = gl.sum(weights.reshape([ROWS, 8, 8]), 1)
                operand = gl.convert_layout(weights.to(weights_room.dtype), WEIGHTS)
                weights_room.store(operand)
                if (first + 1) * TILE > keys:
                    clear_rows(latents.index(stage), keys - first * TILE, 0, 4, LAYOUT)
                fence_async_shared()
                mbarrier.arrive(weights_ready.index(0), count=1)
                for tile in range(first + 1, last):
                    before = stage
                    acc = warpgroup_mma(operand, panels(latents.index(before), 0, 4, TILE, LAYOUT), acc, is_async=True)
                    stage, phase = advance(stage, phase, 2)
                    scores = multiply_keys(queries, query_ropes, latents, ropes, ready, stage, phase, zero, GATHER,
                                       LAYOUT)  # fmt: skip
                    acc = warpgroup_mma_wait(num_outstanding=3, deps=(acc,))
                    mbarrier.arrive(free.index(3 * before + 1), count=1)
                    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
                    release_queries(query_free, tile, last)
                    scores = hide(scores, hidden, tile, limit, least, table, last_block, num_blocks, all_known,
                                  token_of_tile, BLOCK_SIZE)  # fmt: skip
                    highest = gl.max(scores, 1)
                    new_maximum = gl.where(highest > maximum + 8.0 / scale, highest, maximum)
                    decay = gl.exp2((maximum - new_maximum) * scale)
                    maximum = new_maximum
                    mbarrier.wait(weights_free.index(0), weights_phase)
                    weights_phase ^= 1
                    factors.index(0).store(decay)
                    mbarrier.arrive(factors_ready.index(0), count=1)
                    weights = gl.exp2(scores * scale - (maximum * scale)[:, None])
                    operand = gl.convert_layout(weights.to(weights_room.dtype), WEIGHTS)
                    weights_room.store(operand)
                    if (tile + 1) * TILE > keys:
                        clear_rows(latents.index(stage), keys - tile * TILE, 0, 4, LAYOUT)
                    fence_async_shared()
                    mbarrier.arrive(weights_ready.index(0), count=1)
                    acc = rescale(acc, gl.convert_layout(decay, RESULT_ROWS))
                    factor = gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None]
                    sums = sums * factor + gl.sum(weights.reshape([ROWS, 8, 8]), 1)
                    mbarrier.arrive(free.index(3 * stage), count=1)
                acc = warpgroup_mma(operand, panels(latents.index(stage), 0, 4, TILE, LAYOUT), acc, is_async=True)
                total = gl.convert_layout(gl.sum(sums, 1), SCORE_ROWS)
                mbarrier.wait(weights_free.index(0), weights_phase)
                weights_phase ^= 1
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                if not sent:
                    mbarrier.arrive(free.index(3 * stage + 1), count=1)
                stage, phase = advance(stage, phase, 2)
            else:
                mbarrier.arrive(query_free.index(0), count=1)
            # A row whose keys all lie behind it has weights of hidden keys alone.
            seen = (limit > first * TILE) & (maximum > 0.5 * hidden)
            norm = gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0)
            inside = row < rows
            if first < last:
                factors.index(0).store(norm)
                mbarrier.arrive(factors_ready.index(0), count=1)
            if slot >= 0:
                place = (slot.to(gl.int64) * PARTIAL_ROWS + row) * 2
                gl.store(stats + place, gl.where(seen, maximum * scale, -1e30), mask=inside)
                gl.store(stats + place + 1, gl.where(seen, total, 0.0), mask=inside)
            elif lse is not None:
                log = gl.where(seen, (maximum * scale + gl.log2(gl.where(seen, total, 1.0))) * LN2, float("-inf"))
                gl.store(lse + (row0 + row).to(gl.int64), log, mask=inside)
            norm = gl.convert_layout(norm, RESULT_ROWS)
            if sent:
                send_half(acc, norm, output_boxes, partial_boxes, latents.index(stage ^ 1), group, row0, slot, 0,
                          PARTIAL_ROWS, LAYOUT)  # fmt: skip
                mbarrier.arrive(free.index(3 * (stage ^ 1) + 1), count=1)
            else:
                result_row = group * ROWS + gl.arange(0, ROWS, layout=RESULT_ROWS)
                store_half(acc, norm, output, partial, result_row, result_row < rows, row0, slot, 0, PARTIAL_ROWS,
                           RESULT)  # fmt: skip


@gluon.jit
def attend_right(
    arguments, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT_QUERY: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr, GATHER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute the right half of the results."""
    (
        work, output, output_boxes, partial, partial_boxes, latents, weights_room, factors, ready, free, weights_ready,
        weights_free, factors_ready,
    ) = arguments  # fmt: skip
    schedule = work[3]
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    RESULT_ROWS: gl.constexpr = gl.SliceLayout(1, RESULT)
    stage = 0
    phase = 0
    weights_phase = 0
    factors_phase = 0
    item = first_item(schedule, gl.program_id(0) // GROUPS, not GATHER)
    while item >= 0:
        row0, rows, _, keys, first, last, slot, item, _, _ = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY, not GATHER
        )
        for group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            acc = gl.zeros([ROWS, 256], gl.float32, RESULT)
            norm = gl.zeros([ROWS], gl.float32, RESULT_ROWS)
            sent = may_send(slot, rows, group, first, last)
            for tile in range(first, last):
                if tile > first:
                    mbarrier.wait(factors_ready.index(0), factors_phase)
                    factors_phase ^= 1
                    acc = rescale(acc, factors.index(0).load(RESULT_ROWS))
                wait_for_rows(ready.index(3 * stage + 2), phase, GATHER)
                if (tile + 1) * TILE > keys:
                    clear_rows(latents.index(stage), keys - tile * TILE, 4, 4, LAYOUT)
                mbarrier.wait(weights_ready.index(0), weights_phase)
                weights_phase ^= 1
                acc = warpgroup_mma(weights_room, panels(latents.index(stage), 4, 4, TILE, LAYOUT), acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                if (tile + 1 < last) | (sent == 0):
                    mbarrier.arrive(free.index(3 * stage + 2), count=1)
                mbarrier.arrive(weights_free.index(0), count=1)
                stage, phase = advance(stage, phase, 2)
            if first < last:
                mbarrier.wait(factors_ready.index(0), factors_phase)
                factors_phase ^= 1
                norm = factors.index(0).load(RESULT_ROWS)
            if sent:
                send_half(acc, norm, output_boxes, partial_boxes, latents.index(stage ^ 1), group, row0, slot, 256,
                          PARTIAL_ROWS, LAYOUT)  # fmt: skip
                mbarrier.arrive(free.index(3 * (stage ^ 1) + 2), count=1)
            else:
                row = group * ROWS + gl.arange(0, ROWS, layout=RESULT_ROWS)
                store_half(acc, norm, output, partial, row, row < rows, row0, slot, 256, PARTIAL_ROWS, RESULT)


@gluon.jit(
    do_not_specialize=["num_tokens", "num_reqs", "num_blocks", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def mla_decode_wide_kernel(
    query_boxes, query_rope_boxes, boxes, rope_boxes, cache, output_boxes, partial_boxes, query_start_loc, seq_lens,
    block_table, schedule, output, lse, partial, stats, num_tokens, num_reqs, num_blocks, table_stride, table_width,
    scale,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SPLIT_QUERY: gl.constexpr, PARTIAL_ROWS: gl.constexpr, GATHER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """See `vattn.kernels.hopper.mla.decode_16_32.mla_decode_kernel`, with 64 rows of a request at a time.

    Results of whole groups of rows leave by bulk copies, to `partial`, which is bf16, by `partial_boxes`, to
    `output` by `output_boxes`; the room of the last tile is free when they have. GATHER: `block_table` names slots of
    `cache` `[slots, 576]`, which `num_blocks` counts, instead of blocks of it; the schedule is not FULL then.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    DTYPE: gl.constexpr = query_boxes.dtype
    queries = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], LAYOUT)
    query_ropes = gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], LAYOUT)
    latents = gl.allocate_shared_memory(DTYPE, [2, TILE, LATENT], LAYOUT)
    ropes = gl.allocate_shared_memory(DTYPE, [2, TILE, ROPE], LAYOUT)
    weights_room = gl.allocate_shared_memory(DTYPE, [ROWS, TILE], LAYOUT)
    factors = gl.allocate_shared_memory(gl.float32, [1, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    query_ready = new_barriers(1, 1)
    query_free = new_barriers(1, 1)
    ready = new_barriers(6, THREADS if GATHER else 1)
    free = new_barriers(6, 1)
    weights_ready = new_barriers(1, 1)
    weights_free = new_barriers(1, 1)
    factors_ready = new_barriers(1, 1)
    fence_async_shared()
    take_over()
    block_barrier()
    work = (query_start_loc, seq_lens, block_table, schedule, num_tokens, num_blocks, table_stride, table_width)
    left = (
        work, output, output_boxes, lse, partial, partial_boxes, stats, num_reqs, scale, queries, query_ropes, latents,
        ropes, weights_room, factors, query_ready, query_free, ready, free, weights_ready, weights_free, factors_ready,
    )  # fmt: skip
    right = (
        work, output, output_boxes, partial, partial_boxes, latents, weights_room, factors, ready, free, weights_ready,
        weights_free, factors_ready,
    )  # fmt: skip
    if GATHER:
        gl.warp_specialize(
            [
                (attend_left, (
                    left, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, GATHER, LAYOUT,
                )),
                (attend_right, (
                    right, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, GATHER, LAYOUT,
                )),
                (gather, (
                    query_boxes, query_rope_boxes, cache, work, queries, query_ropes, latents, ropes, query_ready,
                    query_free, ready, free, HEADS, ROWS, GROUPS, SPLIT_QUERY, LAYOUT,
                )),
            ],
            [4, 4],
            [208, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_left, (
                    left, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, GATHER, LAYOUT,
                )),
                (attend_right, (
                    right, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, GATHER, LAYOUT,
                )),
                (produce, (
                    query_boxes, query_rope_boxes, boxes, rope_boxes, work, queries, query_ropes, latents, ropes,
                    query_ready, query_free, ready, free, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, LAYOUT,
                )),
            ],
            [4, 1],
            [208, 24],
        )  # fmt: skip
