"""Latent decode on Hopper from FP8 rows: codes become fp16 in registers, on their way into the matrix instructions.

As in `vattn.kernels.hopper.mla.decode_16_32` cached rows are the tall operand of both products, but here a thread loads
pairs of codes, widens them and multiplies: fp16 holds every e4m3 value. Two warpgroups take alternate tiles, since each
must convert a tile before it multiplies, and merge their results in shared memory. Queries are widened to fp16 too:
each row is scaled by a power of two into fp16's range first.

NATIVE: queries are e4m3 codes as well, and the first product takes both from shared memory as they are.

Pairs of codes are int16 to everything that moves them. Their two columns go to different results: even columns of the
latent to one accumulator, odd ones to another.
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

from vattn.kernels.hopper.compat import as_tiles, block_barrier, take_over
from vattn.kernels.hopper.decode.products import unpack_keys, unpack_values
from vattn.kernels.hopper.mla.gather import THREADS, gather_codes
from vattn.kernels.hopper.mla.work_items import (
    LATENT,
    ROPE,
    TILE,
    clear_padding,
    clear_rows,
    first_item,
    keys_seen,
    open_item,
    panels,
    produce,
    store_lse,
    store_stats,
    weigh,
)
from vattn.kernels.hopper.prefill.tile_queue import new_barriers

PAIRS = gl.constexpr(256)
"""Pairs of codes of a latent."""

ROPE_PAIRS = gl.constexpr(32)
HEADROOM = gl.constexpr(12)
"""Queries reach up to 2^13 in fp16, so that small ones beside large ones keep their bits."""


@gluon.jit
def split_pairs(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return columns 4 i and 4 i + 1 of `[ROWS, COLUMNS]`, and columns 4 i + 2 and 4 i + 3: the order of codes."""
    low, high = x.reshape([ROWS, COLUMNS // 4, 2, 2]).permute((0, 1, 3, 2)).split()
    return low.reshape([ROWS, COLUMNS // 2]), high.reshape([ROWS, COLUMNS // 2])


@gluon.jit
def place_queries(query, low, high, rope_low, rope_high, factors, row0, row_end, ROWS: gl.constexpr):
    """Store rows of queries as fp16, scaled into its range, and the factors that undo that."""
    HELD: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, HELD))
    source = query + (row0 + row).to(gl.int64)[:, None] * (LATENT + ROPE)
    inside = (row0 + row < row_end)[:, None]
    column = gl.arange(0, LATENT, layout=gl.SliceLayout(0, HELD))[None, :]
    rope_column = gl.arange(0, ROPE, layout=gl.SliceLayout(0, HELD))[None, :]
    latent = gl.load(source + column, mask=inside, other=0.0).to(gl.float32)
    rope = gl.load(source + (LATENT + rope_column), mask=inside, other=0.0).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(latent), 1), gl.max(gl.abs(rope), 1))
    exponent = gl.minimum(gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) & 255, HEADROOM + 1), 253)
    shrink = ((254 + HEADROOM - exponent) << 23).to(gl.float32, bitcast=True)
    factors.index(0).store(((exponent - HEADROOM) << 23).to(gl.float32, bitcast=True))
    a, b = split_pairs((latent * shrink[:, None]).to(gl.float16), ROWS, LATENT)
    low.store(a)
    high.store(b)
    a, b = split_pairs((rope * shrink[:, None]).to(gl.float16), ROWS, ROPE)
    rope_low.store(a)
    rope_high.store(b)
    fence_async_shared()
    block_barrier()


@gluon.jit
def place_codes(query, queries, query_ropes, row0, row_end, ROWS: gl.constexpr):
    """Copy rows of queries, e4m3 codes."""
    HELD: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, HELD))
    source = query + (row0 + row).to(gl.int64)[:, None] * (LATENT + ROPE)
    inside = (row0 + row < row_end)[:, None]
    column = gl.arange(0, LATENT, layout=gl.SliceLayout(0, HELD))[None, :]
    rope_column = gl.arange(0, ROPE, layout=gl.SliceLayout(0, HELD))[None, :]
    latent = gl.load(source + column, mask=inside, other=0)
    rope = gl.load(source + (LATENT + rope_column), mask=inside, other=0)
    queries.store(latent.to(gl.float8e4nv, bitcast=True))
    query_ropes.store(rope.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    block_barrier()


@gluon.jit
def multiply_codes(codes, ropes, queries, query_ropes, zero):
    """Return the products of a tile's codes and the queries'."""
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    key = as_tiles(codes, gl.float8e4nv, 1, [TILE, LATENT], wide).index(0)
    rope = as_tiles(ropes, gl.float8e4nv, 1, [TILE, ROPE], narrow).index(0)
    scores = warpgroup_mma(rope, query_ropes.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma(key, queries.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(scores,))


@gluon.jit
def multiply_widened(
    held, ropes, low, high, rope_low, rope_high, zero, MMA: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return the products of a tile's codes, widened to fp16, and queries."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    a, b = unpack_keys(ropes.load(LEFT))
    scores = warpgroup_mma(a, rope_low.permute((1, 0)), zero, use_acc=False, is_async=True)
    scores = warpgroup_mma(b, rope_high.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    for panel in gl.static_range(4):
        a, b = unpack_keys(panels(held, panel, 1, TILE, LAYOUT).load(LEFT))
        scores = warpgroup_mma(a, panels(low, panel, 1, ROWS, LAYOUT).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma(b, panels(high, panel, 1, ROWS, LAYOUT).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    return scores


@gluon.jit
def consume(
    arguments, PART: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, SPLIT_QUERY: gl.constexpr, PARTIAL_ROWS: gl.constexpr, STAGES: gl.constexpr,
    NATIVE: gl.constexpr, GATHER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Attend every second tile of this program's items; part 0 places the queries and writes what both have found."""
    (
        query, work, output, lse, partial, stats, q_scale, k_scale, scale, low, high, rope_low, rope_high,
        factors, codes, ropes, weights_room, other_results, other_stats, query_ready, merge_ready, ready, free,
    ) = arguments  # fmt: skip
    _, _, _, schedule, num_tokens, num_blocks, _, _ = work
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    TOKENS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    if PART == 0:
        clear_padding(output, lse, schedule, num_tokens, HEADS, gl.BlockedLayout([4], [32], [4], [0]))
    token_of_tile = gl.arange(0, TILE, layout=TOKENS)
    column = gl.arange(0, ROWS, layout=COLUMNS)
    pair = gl.arange(0, 128, layout=TOKENS)[:, None]
    zero_scores = gl.zeros([TILE, ROWS], gl.float32, MMA)
    FP8: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 32])
    zero_products = gl.zeros([TILE, ROWS], gl.float32, FP8)
    zero_part = gl.zeros([128, ROWS], gl.float32, MMA)
    row_scale = gl.load(k_scale)
    if NATIVE:
        scale = scale * gl.load(q_scale)
    room = weights_room.index(PART)
    # Tiles that the program has had before this item: their number says which stage a tile is in.
    before = 0
    group_phase = 0
    item = first_item(schedule, gl.program_id(0) // GROUPS, not GATHER)
    while item >= 0:
        row0, rows, seq_len, keys, first, last, slot, item, table, last_block = open_item(
            work, item, HEADS, BLOCK_SIZE, SPLIT_QUERY, not GATHER
        )
        for group in range(gl.program_id(0) % GROUPS, (rows + ROWS - 1) // ROWS, GROUPS):
            if PART == 0:
                # The other part has ended its tiles of the group before: this one has read its results.
                if NATIVE:
                    place_codes(query, low, rope_low, row0 + group * ROWS, row0 + rows, ROWS)
                else:
                    place_queries(
                        query, low, high, rope_low, rope_high, factors, row0 + group * ROWS, row0 + rows, ROWS
                    )
                mbarrier.arrive(query_ready.index(0), count=1)
            else:
                mbarrier.wait(query_ready.index(0), group_phase)
            row = group * ROWS + column
            limit = keys_seen(row, rows, seq_len, keys, HEADS)
            factor = gl.zeros([ROWS], gl.float32, COLUMNS) + scale * row_scale
            if not NATIVE:
                factor = factor * factors.index(0).load(COLUMNS)
            low_left = zero_part
            high_left = zero_part
            low_right = zero_part
            high_right = zero_part
            total = zero_scores
            maximum = gl.max(zero_scores, 0) - 1e30
            for tile in range(first + PART, last, 2):
                count = before + tile - first
                stage = count % STAGES
                token = tile * TILE + token_of_tile
                block = gl.load(table + gl.minimum(token // BLOCK_SIZE, last_block))
                known = (block >= 0) & (block < num_blocks)
                held = codes.index(stage)
                mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
                if NATIVE:
                    if GATHER:
                        # What threads have copied must be shown to the matrix instructions.
                        fence_async_shared()
                    products = multiply_codes(held, ropes.index(stage), low, rope_low, zero_products)
                    scores = gl.convert_layout(products, MMA)
                else:
                    scores = multiply_widened(
                        held, ropes.index(stage), low, high, rope_low, rope_high, zero_scores, MMA, ROWS, LAYOUT
                    )
                visible = (token[:, None] < limit[None, :]) & known[:, None]
                scores = gl.where(visible, scores * factor[None, :], float("-inf"))
                weights, maximum, decay = weigh(scores, maximum)
                room.store(weights.to(gl.float16))
                total = total * decay + weights
                low_left = low_left * decay
                high_left = high_left * decay
                low_right = low_right * decay
                high_right = high_right * decay
                if (tile + 1) * TILE > keys:
                    clear_rows(held, keys - tile * TILE, 0, 4, LAYOUT)
                fence_async_shared()
                a, b = unpack_values(panels(held, 0, 2, TILE, LAYOUT).permute((1, 0)).load(LEFT))
                low_left = warpgroup_mma(a, room, low_left, is_async=True)
                high_left = warpgroup_mma(b, room, high_left, is_async=True)
                low_left, high_left = warpgroup_mma_wait(num_outstanding=0, deps=(low_left, high_left))
                a, b = unpack_values(panels(held, 2, 2, TILE, LAYOUT).permute((1, 0)).load(LEFT))
                mbarrier.arrive(free.index(stage), count=1)
                low_right = warpgroup_mma(a, room, low_right, is_async=True)
                high_right = warpgroup_mma(b, room, high_right, is_async=True)
                low_right, high_right = warpgroup_mma_wait(num_outstanding=0, deps=(low_right, high_right))
            before += gl.maximum(last - first, 0)
            row_total = gl.sum(total, 0)
            if PART == 1:
                other_stats.index(0).store(maximum)
                other_stats.index(1).store(row_total)
                other_results.index(0).store(low_left)
                other_results.index(1).store(high_left)
                other_results.index(2).store(low_right)
                other_results.index(3).store(high_right)
                mbarrier.arrive(merge_ready.index(0), count=1)
            else:
                mbarrier.wait(merge_ready.index(0), group_phase)
                other_maximum = other_stats.index(0).load(COLUMNS)
                new_maximum = gl.maximum(maximum, other_maximum)
                own = gl.exp2(maximum - new_maximum)
                other = gl.exp2(other_maximum - new_maximum)
                maximum = new_maximum
                row_total = row_total * own + other_stats.index(1).load(COLUMNS) * other
                own = own[None, :]
                other = other[None, :]
                low_left = low_left * own + other_results.index(0).load(MMA) * other
                high_left = high_left * own + other_results.index(1).load(MMA) * other
                low_right = low_right * own + other_results.index(2).load(MMA) * other
                high_right = high_right * own + other_results.index(3).load(MMA) * other
                inside = row < rows
                mask = inside[None, :]
                if slot >= 0:
                    place = slot.to(gl.int64) * PARTIAL_ROWS + row
                    part = partial + place[None, :] * LATENT + 2 * pair
                    gl.store(part, low_left * row_scale, mask=mask)
                    gl.store(part + 1, high_left * row_scale, mask=mask)
                    gl.store(part + 256, low_right * row_scale, mask=mask)
                    gl.store(part + 257, high_right * row_scale, mask=mask)
                    store_stats(stats, place, maximum, row_total, inside)
                else:
                    seen = row_total != 0.0
                    safe = gl.where(seen, row_total, 1.0)
                    norm = gl.where(seen, row_scale / safe, 0.0)[None, :]
                    place = (row0 + row).to(gl.int64)
                    target = output + place[None, :] * LATENT + 2 * pair
                    gl.store(target, (low_left * norm).to(output.dtype.element_ty), mask=mask)
                    gl.store(target + 1, (high_left * norm).to(output.dtype.element_ty), mask=mask)
                    gl.store(target + 256, (low_right * norm).to(output.dtype.element_ty), mask=mask)
                    gl.store(target + 257, (high_right * norm).to(output.dtype.element_ty), mask=mask)
                    if lse is not None:
                        store_lse(lse, place, maximum, safe, seen, inside)
            group_phase ^= 1


@gluon.jit(
    do_not_specialize=["num_tokens", "num_blocks", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "q_scale", "k_scale"],
)
def mla_decode_fp8_kernel(
    query, boxes, rope_boxes, cache, query_start_loc, seq_lens, block_table, schedule, output, lse, partial, stats,
    q_scale, k_scale, num_tokens, num_blocks, table_stride, table_width, scale,
    HEADS: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, SPLIT_QUERY: gl.constexpr, PARTIAL_ROWS: gl.constexpr, STAGES: gl.constexpr,
    NATIVE: gl.constexpr, GATHER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend absorbed queries `[T * HEADS, 576]` to cached rows of e4m3 codes that stand for `k_scale` times as much.

    NATIVE: queries are bytes of such codes too, with `q_scale`. GATHER: `block_table` names slots of `cache`, int16
    `[slots, 288]`, which `num_blocks` counts, instead of blocks of it; the schedule is not FULL then. The rest is as in
    `vattn.kernels.hopper.mla.decode_16_32.mla_decode_kernel`.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROPE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(ROWS * 2, 16, 2)
    MATRIX: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if NATIVE:
        low = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, LATENT], gl.NVMMASharedLayout(128, 8, 2))
        rope_low = gl.allocate_shared_memory(gl.float8e4nv, [ROWS, ROPE], gl.NVMMASharedLayout(64, 8, 2))
        high = low
        rope_high = rope_low
    else:
        low = gl.allocate_shared_memory(gl.float16, [ROWS, PAIRS], LAYOUT)
        high = gl.allocate_shared_memory(gl.float16, [ROWS, PAIRS], LAYOUT)
        rope_low = gl.allocate_shared_memory(gl.float16, [ROWS, ROPE_PAIRS], ROPE_LAYOUT)
        rope_high = gl.allocate_shared_memory(gl.float16, [ROWS, ROPE_PAIRS], ROPE_LAYOUT)
    factors = gl.allocate_shared_memory(gl.float32, [1, ROWS], VECTOR)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, PAIRS], LAYOUT)
    ropes = gl.allocate_shared_memory(gl.int16, [STAGES, TILE, ROPE_PAIRS], ROPE_LAYOUT)
    weights_room = gl.allocate_shared_memory(gl.float16, [2, TILE, ROWS], WEIGHTS)
    other_results = gl.allocate_shared_memory(gl.float32, [4, 128, ROWS], MATRIX)
    other_stats = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    query_ready = new_barriers(1, 1)
    merge_ready = new_barriers(1, 1)
    ready = new_barriers(STAGES, THREADS if GATHER else 1)
    free = new_barriers(STAGES, 1)
    fence_async_shared()
    take_over()
    block_barrier()
    work = (query_start_loc, seq_lens, block_table, schedule, num_tokens, num_blocks, table_stride, table_width)
    consumer = (
        query, work, output, lse, partial, stats, q_scale, k_scale, scale, low, high, rope_low, rope_high,
        factors, codes, ropes, weights_room, other_results, other_stats, query_ready, merge_ready, ready, free,
    )  # fmt: skip
    if GATHER:
        gl.warp_specialize(
            [
                (consume, (
                    consumer, 0, HEADS, ROWS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, STAGES, NATIVE, GATHER,
                    LAYOUT,
                )),
                (consume, (
                    consumer, 1, HEADS, ROWS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, STAGES, NATIVE, GATHER,
                    LAYOUT,
                )),
                (gather_codes, (
                    cache, work, codes, ropes, ready, free, HEADS, ROWS, GROUPS, SPLIT_QUERY, STAGES, LAYOUT,
                )),
            ],
            [4, 4],
            [208, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (
                    consumer, 0, HEADS, ROWS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, STAGES, NATIVE, GATHER,
                    LAYOUT,
                )),
                (consume, (
                    consumer, 1, HEADS, ROWS, GROUPS, BLOCK_SIZE, SPLIT_QUERY, PARTIAL_ROWS, STAGES, NATIVE, GATHER,
                    LAYOUT,
                )),
                (produce, (
                    None, None, boxes, rope_boxes, work, None, None, codes, ropes, None, None, ready, free, HEADS,
                    ROWS, GROUPS, BLOCK_SIZE, BLOCK_ROWS, SPLIT_QUERY, STAGES, LAYOUT,
                )),
            ],
            [4, 1],
            [208, 24],
        )  # fmt: skip
