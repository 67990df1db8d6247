"""Latent decode on Hopper for 64 query rows at a time: two warpgroups alternate between tiles.

The first scores the even tiles of an item, the second the odd ones, while the other exponentiates or multiplies: a
tile's weights are multiplied by the left half of its latents in the first and by the right half in the second. Weights
overwrite the rotated keys of their tile, which are not read after its scores, so two tiles fit as before.
Both warpgroups rescale by the same maxima, which they send each other a tile at a time; these move only where they have
grown by more than 2^8. Otherwise as `vattn.kernels.hopper.mla.decode_64_gather`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vattn.kernels.hopper.compat import block_barrier, take_over
from vattn.kernels.hopper.mla.rows_64 import (
    HIDDEN,
    ROWS,
    blocks_known,
    hide,
    inverse_of,
    may_send,
    rescale,
    rows_seen,
    store_sums,
    write_half,
)
from vattn.kernels.hopper.mla.work_items import (
    LATENT,
    ROPE,
    TILE,
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


@gluon.jit
def load_tile(
    boxes, rope_boxes, tile, num_blocks, blocks, latents, ropes, ready, free, phase, STAGE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load the left half of a tile, then the right one and its rotated keys, each when its room is free."""
    room = latents.index(STAGE)
    rope_room = ropes.index(STAGE)
    for half in gl.static_range(2):
        # Both warpgroups have read the weights that lie in the room of rotated keys when both halves are free.
        mbarrier.wait(free.index(2 * STAGE + half), phase)
        mbarrier.expect(ready.index(2 * STAGE + half), TILE * (LATENT + 2 * half * ROPE))
        load_blocks(
            boxes, rope_boxes, tile, num_blocks, blocks, ready.index(2 * STAGE + half), room, rope_room, 4 * half, 4,
            half == 1, BLOCK_SIZE, BLOCK_ROWS, LAYOUT,
        )  # fmt: skip


@gluon.jit
def load_tiles(
    query_boxes, query_rope_boxes, boxes, rope_boxes, work, queries, query_ropes, latents, ropes, query_ready,
    query_free, ready, free, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, SPLIT_QUERY: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load the queries of each group of rows, then its tiles: even ones into stage 0, odd ones into stage 1."""
    _, _, _, schedule, _, num_blocks, _, _ = work
    even_phase = 1
    odd_phase = 1
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
                query_boxes, query_rope_boxes, row0, group, queries.index(0), query_ropes.index(0), query_ready,
                query_free, query_phase, ROWS, False,
            )  # fmt: skip
            query_phase ^= 1
            for tile in range(first, last, 2):
                following = block_ids(table, tile + 1, last_block, BLOCK_SIZE)
                load_tile(boxes, rope_boxes, tile, num_blocks, blocks, latents, ropes, ready, free, even_phase, 0,
                          BLOCK_SIZE, BLOCK_ROWS, LAYOUT)  # fmt: skip
                even_phase ^= 1
                blocks = block_ids(table, tile + 2, last_block, BLOCK_SIZE)
                if tile + 1 < last:
                    load_tile(boxes, rope_boxes, tile + 1, num_blocks, following, latents, ropes, ready, free,
                              odd_phase, 1, BLOCK_SIZE, BLOCK_ROWS, LAYOUT)  # fmt: skip
                    odd_phase ^= 1


@gluon.jit
def stage_of(tile, STAGE: gl.constexpr):
    """Return STAGE in a way that the compiler cannot see through: it would keep more addresses than registers hold."""
    zero = gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [tile], dtype=gl.int32, is_pure=True, pack=1)
    return zero + STAGE


@gluon.jit
def score(
    queries, query_ropes, latents, ropes, ready, tile, phase, zero, STAGE: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Return the scores of the tile of a stage; its parts are multiplied as they arrive."""
    stage = stage_of(tile, STAGE)
    query = queries.index(stage - STAGE)
    query_rope = query_ropes.index(stage - STAGE)
    room = latents.index(stage)
    mbarrier.wait(ready.index(2 * STAGE), phase)
    left = panels(room, 0, 4, TILE, LAYOUT).permute((1, 0))
    scores = warpgroup_mma(panels(query, 0, 4, ROWS, LAYOUT), left, zero, use_acc=False, is_async=True)
    mbarrier.wait(ready.index(2 * STAGE + 1), phase)
    right = panels(room, 4, 4, TILE, LAYOUT).permute((1, 0))
    scores = warpgroup_mma(panels(query, 4, 4, ROWS, LAYOUT), right, scores, is_async=True)
    scores = warpgroup_mma(query_rope, ropes.index(stage).permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(scores,))


@gluon.jit
def raised(scores, maximum, scale, is_first):
    """Return the maxima to go on with: the old ones but where the scores' are larger by far, or there are none yet."""
    highest = gl.max(scores, 1)
    return gl.where((highest > maximum + 8.0 / scale) | is_first, highest, maximum)


@gluon.jit
def add_weights(sums, weights):
    """Add weights to sums `[ROWS, 8]`, eight columns apart: what a thread adds is its own."""
    return sums + gl.sum(weights.reshape([ROWS, 8, 8]), 1)


@gluon.jit
def shrink(acc, sums, decay, RESULT: gl.constexpr):
    """Return a result and sums of weights times the decay of their rows."""
    acc = rescale(acc, gl.convert_layout(decay, gl.SliceLayout(1, RESULT)))
    return acc, sums * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def multiply_sent(acc, weights, room, ready, weights_ready, phase, left, FIRST: gl.constexpr, STAGE: gl.constexpr,
                  LAYOUT: gl.constexpr):  # fmt: skip
    """Start multiplying a half of a tile by weights that the other warpgroup leaves; `left`: the tile's real rows."""
    mbarrier.wait(ready.index(2 * STAGE + FIRST // 4), phase)
    mbarrier.wait(weights_ready.index(STAGE), phase)
    if left < TILE:
        clear_rows(room, left, FIRST, 4, LAYOUT)
    return warpgroup_mma(weights, panels(room, FIRST, 4, TILE, LAYOUT), acc, is_async=True)


@gluon.jit
def total_of(sums, totals, totals_ready, read, phase, ME: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the sums of all weights of the rows, over both warpgroups."""
    own = gl.convert_layout(gl.sum(sums, 1), LAYOUT)
    totals.index(ME).store(own)
    mbarrier.arrive(totals_ready.index(ME), count=1)
    mbarrier.wait(totals_ready.index(1 - ME), phase)
    other = totals.index(1 - ME).load(LAYOUT)
    mbarrier.arrive(read.index(0), count=1)
    return own + other


@gluon.jit
def close_rows(
    acc, maximum, total, scale, output, output_boxes, lse, partial, partial_boxes, stats, room, free, row, limit, rows,
    row0, slot, group, first, sent, FIRST: gl.constexpr, PARTIAL_ROWS: gl.constexpr, RESULT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write a half of the rows' results, and with the left one their LSE, or maxima and sums of a split."""
    seen = rows_seen(limit, first, maximum, scale)
    if FIRST == 0:
        store_sums(lse, stats, row, row < rows, row0, slot, maximum, total, seen, scale, PARTIAL_ROWS)
    norm = gl.convert_layout(inverse_of(total, seen), gl.SliceLayout(1, RESULT))
    write_half(acc, norm, sent, output, output_boxes, partial, partial_boxes, room, free, group, rows, row0, slot,
               FIRST * 64, PARTIAL_ROWS, RESULT, LAYOUT)  # fmt: skip


@gluon.jit
def attend_even(
    arguments, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT_QUERY: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute the weights of even tiles, and the left half of the results."""
    (
        work, output, output_boxes, lse, partial, partial_boxes, stats, scale, queries, query_ropes, latents,
        ropes, maxima, totals, query_ready, query_free, ready, free, maxima_ready, weights_ready, totals_ready, read,
    ) = arguments  # fmt: skip
    _, _, _, schedule, num_tokens, num_blocks, _, _ = work
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=RESULT, k_width=2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    clear_padding(output, lse, schedule, num_tokens, HEADS, gl.BlockedLayout([4], [32], [4], [0]))
    token_of_tile = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    zero = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    hidden = HIDDEN / scale
    phase = 0
    odd_phase = 0
    query_phase = 0
    group_phase = 0
    item = first_item(schedule, gl.program_id(0) // GROUPS, True)
    while item >= 0:
        row0, rows, seq_len, keys, first, last, slot, item, table, last_block = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY, True
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
            sums = gl.sum(zero.reshape([ROWS, 8, 8]), 1)
            sent = may_send(slot, rows, group, first, last)
            mbarrier.wait(query_ready.index(0), query_phase)
            query_phase ^= 1
            if first < last:
                # The other has read what this one sent for the rows before.
                mbarrier.wait(read.index(0), group_phase ^ 1)
                for tile in range(first, last, 2):
                    scores = score(queries, query_ropes, latents, ropes, ready, tile, phase, zero, 0, LAYOUT)
                    if tile + 2 >= last:
                        mbarrier.arrive(query_free.index(0), count=1)
                    scores = hide(scores, hidden, tile, limit, least, table, last_block, num_blocks, all_known,
                                  token_of_tile, BLOCK_SIZE)  # fmt: skip
                    raise_to = raised(scores, maximum, scale, tile == first)
                    maxima.index(0).store(raise_to)
                    mbarrier.arrive(maxima_ready.index(0), count=1)
                    decay = gl.exp2((maximum - raise_to) * scale)
                    maximum = raise_to
                    weights = gl.exp2(scores * scale - (maximum * scale)[:, None])
                    operand = gl.convert_layout(weights.to(ropes.dtype), WEIGHTS)
                    # All warps have multiplied the rotated keys.
                    block_barrier()
                    ropes.index(0).store(operand)
                    if (tile + 1) * TILE > keys:
                        clear_rows(latents.index(0), keys - tile * TILE, 0, 4, LAYOUT)
                    fence_async_shared()
                    mbarrier.arrive(weights_ready.index(0), count=1)
                    acc, sums = shrink(acc, sums, decay, RESULT)
                    acc = warpgroup_mma(operand, panels(latents.index(0), 0, 4, TILE, LAYOUT), acc, is_async=True)
                    sums = add_weights(sums, weights)
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                    if (tile + 1 < last) | (sent == 0):
                        mbarrier.arrive(free.index(0), count=1)
                    phase ^= 1
                    if tile + 1 < last:
                        mbarrier.wait(maxima_ready.index(1), odd_phase)
                        raise_to = maxima.index(1).load(SCORE_ROWS)
                        decay = gl.exp2((maximum - raise_to) * scale)
                        maximum = raise_to
                        acc, sums = shrink(acc, sums, decay, RESULT)
                        acc = multiply_sent(acc, ropes.index(1), latents.index(1), ready, weights_ready, odd_phase,
                                            keys - (tile + 1) * TILE, 0, 1, LAYOUT)  # fmt: skip
                        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                        if (tile + 2 < last) | (sent == 0):
                            mbarrier.arrive(free.index(2), count=1)
                        odd_phase ^= 1
                total = total_of(sums, totals, totals_ready, read, group_phase, 0, SCORE_ROWS)
                group_phase ^= 1
            else:
                mbarrier.arrive(query_free.index(0), count=1)
            stage = (last - first + 1) % 2
            close_rows(
                acc, maximum, total, scale, output, output_boxes, lse, partial, partial_boxes, stats,
                latents.index(stage), free.index(2 * stage), row, limit, rows, row0, slot, group, first, sent, 0,
                PARTIAL_ROWS, RESULT, LAYOUT,
            )  # fmt: skip


@gluon.jit
def attend_odd(
    arguments, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT_QUERY: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute the weights of odd tiles, and the right half of the results."""
    (
        work, output, output_boxes, lse, partial, partial_boxes, stats, scale, queries, query_ropes, latents, ropes,
        maxima, totals, query_ready, query_free, ready, free, maxima_ready, weights_ready, totals_ready, read,
    ) = arguments  # fmt: skip
    _, _, _, schedule, _, num_blocks, _, _ = work
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    token_of_tile = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    zero = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    hidden = HIDDEN / scale
    phase = 0
    even_phase = 0
    query_phase = 0
    group_phase = 0
    item = first_item(schedule, gl.program_id(0) // GROUPS, True)
    while item >= 0:
        row0, rows, seq_len, keys, first, last, slot, item, table, last_block = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY, True
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
            sums = gl.sum(zero.reshape([ROWS, 8, 8]), 1)
            sent = may_send(slot, rows, group, first, last)
            mbarrier.wait(query_ready.index(0), query_phase)
            query_phase ^= 1
            if first + 1 >= last:
                mbarrier.arrive(query_free.index(0), count=1)
            if first < last:
                mbarrier.wait(read.index(0), group_phase ^ 1)
                for tile in range(first + 1, last, 2):
                    scores = score(queries, query_ropes, latents, ropes, ready, tile, phase, zero, 1, LAYOUT)
                    if tile + 2 >= last:
                        mbarrier.arrive(query_free.index(0), count=1)
                    scores = hide(scores, hidden, tile, limit, least, table, last_block, num_blocks, all_known,
                                  token_of_tile, BLOCK_SIZE)  # fmt: skip
                    mbarrier.wait(maxima_ready.index(0), even_phase)
                    sent_maximum = maxima.index(0).load(SCORE_ROWS)
                    acc, sums = shrink(acc, sums, gl.exp2((maximum - sent_maximum) * scale), RESULT)
                    acc = multiply_sent(acc, ropes.index(0), latents.index(0), ready, weights_ready, even_phase, TILE,
                                        4, 0, LAYOUT)  # fmt: skip
                    even_phase ^= 1
                    maximum = raised(scores, sent_maximum, scale, False)
                    maxima.index(1).store(maximum)
                    mbarrier.arrive(maxima_ready.index(1), count=1)
                    decay = gl.exp2((sent_maximum - maximum) * scale)
                    weights = gl.exp2(scores * scale - (maximum * scale)[:, None])
                    # All warps have multiplied the rotated keys.
                    block_barrier()
                    ropes.index(1).store(weights.to(ropes.dtype))
                    if (tile + 1) * TILE > keys:
                        clear_rows(latents.index(1), keys - tile * TILE, 4, 4, LAYOUT)
                    fence_async_shared()
                    mbarrier.arrive(weights_ready.index(1), count=1)
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                    mbarrier.arrive(free.index(1), count=1)
                    acc, sums = shrink(acc, sums, decay, RESULT)
                    room = panels(latents.index(1), 4, 4, TILE, LAYOUT)
                    acc = warpgroup_mma(ropes.index(1), room, acc, is_async=True)
                    sums = add_weights(sums, weights)
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                    if (tile + 1 < last) | (sent == 0):
                        mbarrier.arrive(free.index(3), count=1)
                    phase ^= 1
                if (last - first) % 2 == 1:
                    mbarrier.wait(maxima_ready.index(0), even_phase)
                    sent_maximum = maxima.index(0).load(SCORE_ROWS)
                    acc, sums = shrink(acc, sums, gl.exp2((maximum - sent_maximum) * scale), RESULT)
                    maximum = sent_maximum
                    acc = multiply_sent(acc, ropes.index(0), latents.index(0), ready, weights_ready, even_phase,
                                        keys - (last - 1) * TILE, 4, 0, LAYOUT)  # fmt: skip
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                    if sent == 0:
                        mbarrier.arrive(free.index(1), count=1)
                    even_phase ^= 1
                total = total_of(sums, totals, totals_ready, read, group_phase, 1, SCORE_ROWS)
                group_phase ^= 1
            stage = (last - first + 1) % 2
            close_rows(
                acc, maximum, total, scale, output, output_boxes, lse, partial, partial_boxes, stats,
                latents.index(stage), free.index(2 * stage + 1), row, limit, rows, row0, slot, group, first, sent, 4,
                PARTIAL_ROWS, RESULT, LAYOUT,
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=["num_tokens", "num_blocks", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def mla_decode_64_kernel(
    query_boxes, query_rope_boxes, boxes, rope_boxes, output_boxes, partial_boxes, query_start_loc, seq_lens,
    block_table, schedule, output, lse, partial, stats, num_tokens, num_blocks, table_stride, table_width,
    scale, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    SPLIT_QUERY: gl.constexpr, PARTIAL_ROWS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend blocks of cached rows, which `boxes` and `rope_boxes` load, by a FULL schedule.

    The other arguments are as in `vattn.kernels.hopper.mla.decode_16_32.mla_decode_kernel`. Results of 64 whole rows
    leave by bulk copies: parts, in bf16, by `partial_boxes`, others by `output_boxes`.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    VECTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DTYPE: gl.constexpr = query_boxes.dtype
    queries = gl.allocate_shared_memory(DTYPE, [1, ROWS, LATENT], LAYOUT)
    query_ropes = gl.allocate_shared_memory(DTYPE, [1, ROWS, ROPE], LAYOUT)
    latents = gl.allocate_shared_memory(DTYPE, [2, TILE, LATENT], LAYOUT)
    ropes = gl.allocate_shared_memory(DTYPE, [2, TILE, ROPE], LAYOUT)
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTORS)
    totals = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTORS)
    query_ready = new_barriers(1, 1)
    query_free = new_barriers(1, 2)
    ready = new_barriers(4, 1)
    free = new_barriers(4, 1)
    maxima_ready = new_barriers(2, 1)
    weights_ready = new_barriers(2, 1)
    totals_ready = new_barriers(2, 1)
    read = new_barriers(1, 2)
    fence_async_shared()
    take_over()
    block_barrier()
    work = (query_start_loc, seq_lens, block_table, schedule, num_tokens, num_blocks, table_stride, table_width)
    arguments = (
        work, output, output_boxes, lse, partial, partial_boxes, stats, scale, queries, query_ropes, latents,
        ropes, maxima, totals, query_ready, query_free, ready, free, maxima_ready, weights_ready, totals_ready, read,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (attend_even, (
                arguments, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, LAYOUT,
            )),
            (attend_odd, (
                arguments, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, LAYOUT,
            )),
            (load_tiles, (
                query_boxes, query_rope_boxes, boxes, rope_boxes, work, queries, query_ropes, latents, ropes,
                query_ready, query_free, ready, free, HEADS, GROUPS, BLOCK_SIZE, BLOCK_ROWS, SPLIT_QUERY, LAYOUT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
