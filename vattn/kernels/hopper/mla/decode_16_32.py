"""Latent decode on Hopper for up to 32 query rows of a request: cached rows are the tall operand of both products.

`S^T = K Q^T` and `O^T = V^T P^T`, where K and V are the same tile in shared memory: it is read from memory once and
copied nowhere. One warpgroup computes, one warp loads and runs ahead over the ends of items. A program walks the items
of its schedule (`vattn.kernels.hopper.decode.schedule`).
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
from vattn.kernels.hopper.mla.work_items import (
    LATENT,
    ROPE,
    TILE,
    advance,
    clear_padding,
    clear_rows,
    first_item,
    keys_seen,
    open_item,
    produce,
    store_lse,
    store_stats,
    weigh,
)
from vattn.kernels.hopper.prefill.tile_queue import new_barriers


@gluon.jit
def consume(
    work, output, lse, partial, stats, scale, queries, query_ropes, latents, ropes, weights_room, query_ready,
    query_free, ready, free, HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SPLIT_QUERY: gl.constexpr, PARTIAL_ROWS: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Attend the rows of this program's items."""
    _, _, _, schedule, num_tokens, num_blocks, _, _ = work
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    TOKENS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    clear_padding(output, lse, schedule, num_tokens, HEADS, gl.BlockedLayout([4], [32], [4], [0]))
    token_of_tile = gl.arange(0, TILE, layout=TOKENS)
    column = gl.arange(0, ROWS, layout=COLUMNS)
    latent_column = gl.arange(0, LATENT, layout=TOKENS)[:, None]
    zero_scores = gl.zeros([TILE, ROWS], gl.float32, MMA)
    query = queries.permute((1, 0))
    query_rope = query_ropes.permute((1, 0))
    stage = 0
    phase = 0
    query_phase = 0
    item = first_item(schedule, gl.program_id(0) // GROUPS, True)
    while item >= 0:
        row0, rows, seq_len, keys, first, last, slot, item, table, last_block = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY, True
        )
        for group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            row = group * ROWS + column
            limit = keys_seen(row, rows, seq_len, keys, HEADS)
            acc = gl.zeros([LATENT, ROWS], gl.float32, MMA)
            total = zero_scores
            maximum = gl.max(zero_scores, 0) - 1e30
            mbarrier.wait(query_ready.index(0), query_phase)
            query_phase ^= 1
            block = gl.load(table + gl.minimum((first * TILE + token_of_tile) // BLOCK_SIZE, last_block))
            for tile in range(first, last):
                token = tile * TILE + token_of_tile
                next_block = gl.load(table + gl.minimum((token + TILE) // BLOCK_SIZE, last_block))
                known = (block >= 0) & (block < num_blocks)
                block = next_block
                mbarrier.wait(ready.index(stage), phase)
                scores = warpgroup_mma(latents.index(stage), query, zero_scores, use_acc=False, is_async=True)
                scores = warpgroup_mma(ropes.index(stage), query_rope, scores, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
                visible = (token[:, None] < limit[None, :]) & known[:, None]
                scores = gl.where(visible, scores * scale, float("-inf"))
                weights, maximum, decay = weigh(scores, maximum)
                weights_room.store(weights.to(weights_room.dtype))
                total = total * decay + weights
                acc = acc * decay
                if (tile + 1) * TILE > keys:
                    clear_rows(latents.index(stage), keys - tile * TILE, 0, 8, LAYOUT)
                fence_async_shared()
                acc = warpgroup_mma(latents.index(stage).permute((1, 0)), weights_room, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                mbarrier.arrive(free.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
            mbarrier.arrive(query_free.index(0), count=1)
            row_total = gl.sum(total, 0)
            inside = row < rows
            if slot >= 0:
                place = slot.to(gl.int64) * PARTIAL_ROWS + row
                gl.store(partial + place[None, :] * LATENT + latent_column, acc, mask=inside[None, :])
                store_stats(stats, place, maximum, row_total, inside)
            else:
                seen = row_total != 0.0
                safe = gl.where(seen, row_total, 1.0)
                norm = gl.where(seen, 1.0 / safe, 0.0)
                place = (row0 + row).to(gl.int64)
                result = (acc * norm[None, :]).to(output.dtype.element_ty)
                gl.store(output + place[None, :] * LATENT + latent_column, result, mask=inside[None, :])
                if lse is not None:
                    store_lse(lse, place, maximum, safe, seen, inside)


@gluon.jit(
    do_not_specialize=["num_tokens", "num_blocks", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def mla_decode_kernel(
    query_boxes, query_rope_boxes, boxes, rope_boxes, query_start_loc, seq_lens, block_table, schedule, output, lse,
    partial, stats, num_tokens, num_blocks, table_stride, table_width, scale,
    HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, SPLIT_QUERY: gl.constexpr, PARTIAL_ROWS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Attend absorbed queries `[T * HEADS, 576]` to cached rows. Grid: CTAs of the schedule times GROUPS.

    ROWS rows of a request at a time, GROUPS programs side by side. `scale` includes log2(e). Results go to `output`
    `[T * HEADS, 512]` and `lse`, those of split items unnormalised to `partial` fp32 `[slots, PARTIAL_ROWS, 512]` and
    `stats` (maximum in base 2, sum). The schedule is FULL (`vattn.kernels.hopper.mla.schedule`). BLOCK_ROWS: rows from
    one block of the cache to the next.

    It is launched while the kernel before may still run, and touches shared memory alone before that has ended.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(ROWS * 2, 16, 2)
    DTYPE: gl.constexpr = boxes.dtype
    queries = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], LAYOUT)
    query_ropes = gl.allocate_shared_memory(DTYPE, [ROWS, ROPE], LAYOUT)
    latents = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, LATENT], LAYOUT)
    ropes = gl.allocate_shared_memory(DTYPE, [STAGES, TILE, ROPE], LAYOUT)
    weights_room = gl.allocate_shared_memory(DTYPE, [TILE, ROWS], WEIGHTS)
    query_ready = new_barriers(1, 1)
    query_free = new_barriers(1, 1)
    ready = new_barriers(STAGES, 1)
    free = new_barriers(STAGES, 1)
    fence_async_shared()
    take_over()
    block_barrier()
    work = (query_start_loc, seq_lens, block_table, schedule, num_tokens, num_blocks, table_stride, table_width)
    gl.warp_specialize(
        [
            (consume, (
                work, output, lse, partial, stats, scale, queries, query_ropes, latents, ropes, weights_room,
                query_ready, query_free, ready, free, HEADS, ROWS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS,
                STAGES, LAYOUT,
            )),
            (produce, (
                query_boxes, query_rope_boxes, boxes, rope_boxes, work, queries, query_ropes, latents, ropes,
                query_ready, query_free, ready, free, HEADS, ROWS, GROUPS, BLOCK_SIZE, BLOCK_ROWS, SPLIT_QUERY,
                STAGES, LAYOUT,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip
