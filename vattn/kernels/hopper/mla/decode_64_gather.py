"""Latent decode on Hopper for 64 query rows at a time over listed keys: each row of the cache is copied by itself.

The first warpgroup multiplies queries and keys, exponentiates, and multiplies the left half of the values; the second
multiplies the right half by weights that the first writes to shared memory. Rotated keys and both halves of the latents
are loaded and released separately, since only two tiles fit. Programs that share the listed keys of a token are
neighbours in the grid, so the second reads them from L2.
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
from vattn.kernels.hopper.mla.gather import THREADS, gather
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
    advance,
    clear_padding,
    clear_rows,
    first_item,
    open_item,
    panels,
)
from vattn.kernels.hopper.prefill.tile_queue import new_barriers


@gluon.jit
def wait_for_rows(barrier, phase):
    """Wait for a load, and show to the matrix instructions what threads have copied."""
    mbarrier.wait(barrier, phase)
    fence_async_shared()


@gluon.jit
def multiply_keys(queries, query_ropes, latents, ropes, ready, stage, phase, zero, LAYOUT: gl.constexpr):
    """Start the products of queries and the keys of a stage as they arrive."""
    wait_for_rows(ready.index(3 * stage), phase)
    scores = warpgroup_mma(query_ropes, ropes.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    room = latents.index(stage)
    for half in gl.static_range(2):
        wait_for_rows(ready.index(3 * stage + 1 + half), phase)
        key = panels(room, 4 * half, 4, TILE, LAYOUT).permute((1, 0))
        scores = warpgroup_mma(panels(queries, 4 * half, 4, ROWS, LAYOUT), key, scores, is_async=True)
    return scores


@gluon.jit
def release_queries(query_free, tile, last):
    """After the last tile's scores, let the next rows of queries be loaded, and then their tiles."""
    if tile + 1 == last:
        mbarrier.arrive(query_free.index(0), count=1)


@gluon.jit
def attend_left(
    arguments, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT_QUERY: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Compute weights, and the left half of the results."""
    (
        work, output, output_boxes, lse, partial, partial_boxes, stats, scale, queries, query_ropes, latents,
        ropes, weights_room, factors, query_ready, query_free, ready, free, weights_ready, weights_free, factors_ready,
    ) = arguments  # fmt: skip
    _, _, _, schedule, num_tokens, num_blocks, _, _ = work
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=RESULT, k_width=2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RESULT_ROWS: gl.constexpr = gl.SliceLayout(1, RESULT)
    clear_padding(output, lse, schedule, num_tokens, HEADS, gl.BlockedLayout([4], [32], [4], [0]))
    token_of_tile = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    zero = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    hidden = HIDDEN / scale
    stage = 0
    phase = 0
    query_phase = 0
    weights_phase = 0
    item = first_item(schedule, gl.program_id(0) // GROUPS)
    while item >= 0:
        row0, rows, seq_len, keys, first, last, slot, item, table, last_block = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY
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
                scores = multiply_keys(queries, query_ropes, latents, ropes, ready, stage, phase, zero, LAYOUT)
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
                    scores = multiply_keys(queries, query_ropes, latents, ropes, ready, stage, phase, zero, LAYOUT)
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
            seen = rows_seen(limit, first, maximum, scale)
            norm = inverse_of(total, seen)
            if first < last:
                factors.index(0).store(norm)
                mbarrier.arrive(factors_ready.index(0), count=1)
            store_sums(lse, stats, row, row < rows, row0, slot, maximum, total, seen, scale, PARTIAL_ROWS)
            write_half(
                acc, gl.convert_layout(norm, RESULT_ROWS), sent, output, output_boxes, partial, partial_boxes,
                latents.index(stage ^ 1), free.index(3 * (stage ^ 1) + 1), group, rows, row0, slot, 0, PARTIAL_ROWS,
                RESULT, LAYOUT,
            )  # fmt: skip


@gluon.jit
def attend_right(
    arguments, HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, SPLIT_QUERY: gl.constexpr,
    PARTIAL_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
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
    item = first_item(schedule, gl.program_id(0) // GROUPS)
    while item >= 0:
        row0, rows, _, keys, first, last, slot, item, _, _ = open_item(work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY)
        for group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            acc = gl.zeros([ROWS, 256], gl.float32, RESULT)
            norm = gl.zeros([ROWS], gl.float32, RESULT_ROWS)
            sent = may_send(slot, rows, group, first, last)
            for tile in range(first, last):
                if tile > first:
                    mbarrier.wait(factors_ready.index(0), factors_phase)
                    factors_phase ^= 1
                    acc = rescale(acc, factors.index(0).load(RESULT_ROWS))
                wait_for_rows(ready.index(3 * stage + 2), phase)
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
            write_half(
                acc, norm, sent, output, output_boxes, partial, partial_boxes, latents.index(stage ^ 1),
                free.index(3 * (stage ^ 1) + 2), group, rows, row0, slot, 256, PARTIAL_ROWS, RESULT, LAYOUT,
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=["num_tokens", "num_blocks", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def mla_decode_64_gather_kernel(
    query_boxes, query_rope_boxes, cache, output_boxes, partial_boxes, query_start_loc, seq_lens,
    block_table, schedule, output, lse, partial, stats, num_tokens, num_blocks, table_stride, table_width,
    scale,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SPLIT_QUERY: gl.constexpr, PARTIAL_ROWS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend rows of `cache` `[slots, 576]`, which `num_blocks` counts and `block_table` names, -1 for none.

    The other arguments are as in `vattn.kernels.hopper.mla.decode_16_32.mla_decode_kernel`; the schedule is not
    FULL. Results of 64 whole rows leave by bulk copies: parts, in bf16, by `partial_boxes`, others by `output_boxes`.
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
    ready = new_barriers(6, THREADS)
    free = new_barriers(6, 1)
    weights_ready = new_barriers(1, 1)
    weights_free = new_barriers(1, 1)
    factors_ready = new_barriers(1, 1)
    fence_async_shared()
    take_over()
    block_barrier()
    work = (query_start_loc, seq_lens, block_table, schedule, num_tokens, num_blocks, table_stride, table_width)
    left = (
        work, output, output_boxes, lse, partial, partial_boxes, stats, scale, queries, query_ropes, latents,
        ropes, weights_room, factors, query_ready, query_free, ready, free, weights_ready, weights_free, factors_ready,
    )  # fmt: skip
    right = (
        work, output, output_boxes, partial, partial_boxes, latents, weights_room, factors, ready, free, weights_ready,
        weights_free, factors_ready,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (attend_left, (
                left, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, LAYOUT,
            )),
            (attend_right, (
                right, HEADS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, LAYOUT,
            )),
            (gather, (
                query_boxes, query_rope_boxes, cache, work, queries, query_ropes, latents, ropes, query_ready,
                query_free, ready, free, HEADS, ROWS, GROUPS, SPLIT_QUERY, LAYOUT,
            )),
        ],
        [4, 4],
        [208, 40],
    )  # fmt: skip
