"""Expanded latent attention on Hopper: 64 query rows a warpgroup, keys of 128 + 64 columns or 64 + 64, values of 128 or
of 64.

It uses the scheme, schedule, messages and arithmetic of `vattn.kernels.hopper.prefill.kernel`; here keys
and values lie in a workspace (`vattn.kernels.triton.mla.prefill_kernels`), a stretch of whole tiles for every request,
so that one copy loads a tile's keys of a head, and one the rotated keys that all heads share. It holds the keys of a
whole step.
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

from vattn.kernels.hopper.compat import block_barrier, load_box
from vattn.kernels.hopper.mla.prefill_store import PART_COLUMNS, store_fp8, store_parts
from vattn.kernels.hopper.prefill.load import GROUP_ROWS, WORDS
from vattn.kernels.hopper.prefill.ping_pong import BARRIERS, own_end_of, pass_tiles, ping_pong_signal, ping_pong_wait
from vattn.kernels.hopper.prefill.softmax import LOWEST, add_tile, as_left, weights_of
from vattn.kernels.hopper.prefill.store import store_rows
from vattn.kernels.hopper.prefill.tile_queue import RECORD, announce, new_barriers, read_word, receive
from vattn.kernels.triton.common.mask import LN2

ROPE = gl.constexpr(64)
KEYS = gl.constexpr(128)
"""Keys of a tile."""

GROUPS = gl.constexpr(2)


@gluon.jit
def boxes_of(key_tile, BLOCK_SIZE: gl.constexpr):
    """Return the boxes of a tile, blocks or parts of a large one, and the first token of each."""
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < KEYS else KEYS
    BOXES: gl.constexpr = KEYS // BOX
    box = gl.arange(0, BOXES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    return box, (key_tile * BOXES + box) * BOX


@gluon.jit
def load_blocks(table, key_tile, table_width, BLOCK_SIZE: gl.constexpr):
    """Load the block ids of a tile's boxes."""
    _, token = boxes_of(key_tile, BLOCK_SIZE)
    return gl.load(table + gl.minimum(token // BLOCK_SIZE, table_width - 1))


@gluon.jit
def missing_blocks(block, key_tile, most_keys, num_blocks, BLOCK_SIZE: gl.constexpr):
    """Return a bit for each box of a tile with a block id out of range."""
    box, token = boxes_of(key_tile, BLOCK_SIZE)
    wrong = ((block < 0) | (block >= num_blocks)) & (token < most_keys)
    return gl.sum(wrong.to(gl.int32) << box, 0)


@gluon.jit
def load_queries(
    query_boxes, query_rope_boxes, query_full, query_empty, queries, query_ropes, first_row, column, used,
    NOPE: gl.constexpr, GROUP_INDEX: gl.constexpr,
):  # fmt: skip
    """Load a warpgroup's queries of a row tile as soon as those before are done with."""
    mbarrier.wait(query_empty.index(GROUP_INDEX), (used & 1) ^ 1)
    mbarrier.expect(query_full.index(GROUP_INDEX), GROUP_ROWS * (NOPE + ROPE) * 2)
    row = first_row + GROUP_INDEX * GROUP_ROWS
    load_box(query_boxes, [row, column], query_full.index(GROUP_INDEX), queries.index(GROUP_INDEX))
    load_box(query_rope_boxes, [row, column + NOPE], query_full.index(GROUP_INDEX), query_ropes.index(GROUP_INDEX))


@gluon.jit
def produce(
    arguments, HEADS: gl.constexpr, TOGETHER: gl.constexpr, BLOCK_SIZE: gl.constexpr, NOPE: gl.constexpr,
    VALUES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Take row tiles from the counter, announce them, and load their queries, keys and values."""
    (
        query_boxes, query_rope_boxes, key_boxes, rope_boxes, line, schedule, counter, block_table, table_stride,
        table_width, num_blocks, query_head_stride, queries, query_ropes, keys, ropes, values, words, messages,
        query_full, query_empty, key_full, key_empty, value_full, value_empty, message_full, message_empty,
    ) = arguments  # fmt: skip
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    most_keys = table_width * BLOCK_SIZE
    item = gl.program_id(0)
    message = 0
    used = 0
    step = 0
    rows = 1
    while rows > 0:
        fields, rows = announce(
            schedule, messages, message_full, message_empty, item, message, (most_keys + KEYS - 1) // KEYS, HEADS,
            TOGETHER, False,
        )  # fmt: skip
        message += 1
        end = read_word(fields.index(6), 1)
        if rows > 0:
            if end <= 0:
                item = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            if end > 0:
                first_row = read_word(fields.index(1), 1)
                head = read_word(fields.index(7), 1)
                request = read_word(fields.index(0), 1)
                query_column = head * query_head_stride
                load_queries(
                    query_boxes, query_rope_boxes, query_full, query_empty, queries, query_ropes, first_row,
                    query_column, used, NOPE, 0,
                )  # fmt: skip
                table = block_table + request.to(gl.int64) * table_stride
                origin = gl.load(line + request)
                column = head * (NOPE + VALUES)
                blocks = load_blocks(table, end - 1, table_width, BLOCK_SIZE)
                for back in range(end):
                    key_tile = end - 1 - back
                    # Late, so that the longest row tiles that are left go to the first free CTA.
                    if key_tile == 0:
                        item = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
                    place = origin + key_tile * KEYS
                    stage = step % STAGES
                    free = ((step // STAGES) & 1) ^ 1
                    missing = missing_blocks(blocks, key_tile, most_keys, num_blocks, BLOCK_SIZE)
                    # The next tile's, on their way while this one's room is waited for.
                    blocks = load_blocks(table, gl.maximum(key_tile - 1, 0), table_width, BLOCK_SIZE)
                    mbarrier.wait(key_empty.index(stage), free)
                    words.index(step % WORDS).store(gl.zeros([1], gl.int32, lanes) + missing)
                    mbarrier.expect(key_full.index(stage), KEYS * (NOPE + ROPE) * 2)
                    load_box(key_boxes, [place, column], key_full.index(stage), keys.index(stage))
                    load_box(rope_boxes, [place, 0], key_full.index(stage), ropes.index(stage))
                    # The first warpgroup starts while the second ends the row tile before.
                    if back == 0:
                        load_queries(
                            query_boxes, query_rope_boxes, query_full, query_empty, queries, query_ropes,
                            first_row, query_column, used, NOPE, 1,
                        )  # fmt: skip
                    mbarrier.wait(value_empty.index(stage), free)
                    mbarrier.expect(value_full.index(stage), KEYS * VALUES * 2)
                    load_box(key_boxes, [place, column + NOPE], value_full.index(stage), values.index(stage))
                    step += 1
                used += 1


@gluon.jit
def hide(scores, position, key_tile, seq_len, missing, BLOCK_SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return scores with the future, what the table does not hold and missing blocks at -inf."""
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < KEYS else KEYS
    row = position + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    token = key_tile * KEYS + column
    there = (token < seq_len) & (((missing >> (column // BOX)) & 1) == 0)
    return gl.where((token[None, :] <= row[:, None]) & there[None, :], scores, float("-inf"))


@gluon.jit
def multiply_keys(query, query_rope, keys, ropes, stage, zero):
    """Start the products of queries and a tile of keys."""
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(query_rope, ropes.index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def finish(
    output, lse, block_scale, output_scale, scale, inverse, scale_stride, group_stride, room, result, log_sum,
    first_row, rows, head, GROUP_INDEX: gl.constexpr, HEADS: gl.constexpr, VALUES: gl.constexpr, MODEL: gl.constexpr,
    OUTPUT: gl.constexpr, OUTPUT_GROUPS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, CORRECTED: gl.constexpr,
    ZEROS: gl.constexpr = False,
):  # fmt: skip
    """Store this warpgroup's rows of a tile, and their logs if requested. ZEROS: the results are known to be zeros.

    scale, inverse: the given scale and 1 / scale, where CORRECTED.
    """
    if CORRECTED:
        if OUTPUT_GROUPS[1]:
            store_parts(
                output, block_scale, scale, scale_stride, group_stride, room.index(GROUP_INDEX), result,
                first_row, rows, head, GROUP_INDEX, HEADS, VALUES, MODEL, OUTPUT_GROUPS, SCALE_COLUMNS,
            )  # fmt: skip
        else:
            store_fp8(
                output, block_scale, scale, inverse, scale_stride, group_stride, result, first_row, rows, head,
                GROUP_INDEX, HEADS, VALUES, MODEL, OUTPUT_GROUPS, ZEROS,
            )  # fmt: skip
        if lse is not None:
            row = GROUP_INDEX * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=log_sum.type.layout)
            gl.store(lse + (first_row + row).to(gl.int64) * HEADS + head, log_sum, mask=row < rows)
    else:
        store_rows(
            output, lse, block_scale, output_scale, scale_stride, group_stride, result, log_sum, first_row, rows, head,
            GROUP_INDEX, HEADS, VALUES, VALUES, 1, 1, MODEL, OUTPUT, OUTPUT_GROUPS,
        )  # fmt: skip


@gluon.jit
def consume(
    arguments, HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, VALUES: gl.constexpr, STAGES: gl.constexpr,
    MODEL: gl.constexpr, OUTPUT: gl.constexpr, OUTPUT_GROUPS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    CORRECTED: gl.constexpr, GROUP_INDEX: gl.constexpr,
):  # fmt: skip
    """Attend this warpgroup's rows of every row tile that the producer announces."""
    (
        output, lse, block_scale, output_scale, scale_stride, group_stride, table_width, scale, queries, query_ropes,
        keys, ropes, values, room, words, messages, query_full, query_empty, key_full, key_empty, value_full,
        value_empty, message_full, message_empty,
    ) = arguments  # fmt: skip
    N: gl.constexpr = KEYS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, VALUES, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=RESULT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    RESULT_ROW: gl.constexpr = gl.SliceLayout(1, RESULT)
    MINE: gl.constexpr = BARRIERS[GROUP_INDEX]
    NEXT: gl.constexpr = BARRIERS[1 - GROUP_INDEX]
    query = queries.index(GROUP_INDEX)
    query_rope = query_ropes.index(GROUP_INDEX)
    most_keys = table_width * BLOCK_SIZE
    given = 1.0
    inverse = 1.0
    if CORRECTED and output_scale is not None:
        given = gl.load(output_scale)
        inverse = gl.div_rn(1.0, given)
    step = 0
    used = 0
    message = 0
    if GROUP_INDEX == 1:
        ping_pong_signal(NEXT)
    rows, first_row, tile_position, seq_len, _, end, head = receive(messages, message_full, message_empty, message, 4)
    while rows > 0:
        if end > 0:
            held = gl.minimum(seq_len, most_keys)
            position = tile_position + GROUP_INDEX * GROUP_ROWS
            own_end = own_end_of(position, rows, 0, end, GROUP_INDEX, GROUP_ROWS, N)
            step = pass_tiles(
                end - own_end, step, key_full, key_empty, value_full, value_empty, MINE, NEXT, True, STAGES
            )
            # Key tiles from here on hold keys that some row does not see.
            whole_from = gl.minimum(gl.maximum(position + 1, 0), held) // N
            mbarrier.wait(query_full.index(GROUP_INDEX), used & 1)
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(key_full.index(stage), phase)
            missing = read_word(words.index(step % WORDS), 4)
            zero = gl.zeros([GROUP_ROWS, N], gl.float32, SCORES)
            ping_pong_wait(MINE)
            scores0 = multiply_keys(query, query_rope, keys, ropes, stage, zero)
            ping_pong_signal(NEXT)
            scores0 = warpgroup_mma_wait(num_outstanding=0, deps=(scores0,))
            mbarrier.arrive(key_empty.index(stage), count=1)
            scores0 = hide(scores0, position, own_end - 1, held, missing, BLOCK_SIZE, SCORES)
            maximum = gl.maximum(gl.max(scores0, 1), LOWEST)
            weights0 = weights_of(scores0, maximum, scale, 0.0)
            # Sums of each thread's own columns; they meet at the end of the row tile.
            sums = gl.sum(weights0.reshape(GROUP_ROWS, N // 8, 8), 1)
            left0 = as_left(weights0, N, "plain", MODEL, LEFT)
            mbarrier.wait(value_full.index(stage), phase)
            no_result = gl.zeros([GROUP_ROWS, VALUES], gl.float32, RESULT)
            acc = warpgroup_mma(left0, values.index(stage), no_result, use_acc=False, is_async=True)
            for back in range(1, own_end):
                next_step = step + 1
                next_stage = next_step % STAGES
                next_phase = (next_step // STAGES) & 1
                mbarrier.wait(key_full.index(next_stage), next_phase)
                missing = read_word(words.index(next_step % WORDS), 4)
                ping_pong_wait(MINE)
                scores = multiply_keys(query, query_rope, keys, ropes, next_stage, zero)
                ping_pong_signal(NEXT)
                scores, acc = warpgroup_mma_wait(num_outstanding=0, deps=(scores, acc))
                mbarrier.arrive(value_empty.index(step % STAGES), count=1)
                mbarrier.arrive(key_empty.index(next_stage), count=1)
                key_tile = own_end - 1 - back
                if (key_tile >= whole_from) | (missing != 0):
                    scores = hide(scores, position, key_tile, held, missing, BLOCK_SIZE, SCORES)
                maximum, sums, acc = add_tile(
                    scores, maximum, sums, acc, scale, values, value_full, next_stage, next_phase, 0.0,
                    "plain", MODEL, LEFT,
                )  # fmt: skip
                step += 1
            mbarrier.arrive(query_empty.index(GROUP_INDEX), count=1)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(value_empty.index(step % STAGES), count=1)
            step += 1
            used += 1

            total = gl.convert_layout(gl.sum(sums, 1), ROW)
            # A row that sees a NaN is NaN, one that sees nothing is zero.
            norm = gl.where(total != 0.0, 1.0 / total, 0.0)
            log_sum = LN2 * (maximum * scale + gl.log2(total))
            result = acc * gl.convert_layout(norm, RESULT_ROW)[:, None]
            finish(
                output, lse, block_scale, output_scale, given, inverse, scale_stride, group_stride, room, result,
                log_sum, first_row, rows, head, GROUP_INDEX, HEADS, VALUES, MODEL, OUTPUT, OUTPUT_GROUPS, SCALE_COLUMNS,
                CORRECTED,
            )  # fmt: skip
        else:
            empty = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROW)
            nothing = gl.zeros([GROUP_ROWS, VALUES], gl.float32, RESULT)
            finish(
                output, lse, block_scale, output_scale, given, inverse, scale_stride, group_stride, room, nothing,
                empty, first_row, rows, head, GROUP_INDEX, HEADS, VALUES, MODEL, OUTPUT, OUTPUT_GROUPS, SCALE_COLUMNS,
                CORRECTED, True,
            )  # fmt: skip
        message += 1
        rows, first_row, tile_position, seq_len, _, end, head = receive(
            messages, message_full, message_empty, message, 4
        )
    if GROUP_INDEX == 0:
        ping_pong_wait(MINE)


@gluon.jit(
    do_not_specialize=["scale_stride", "group_stride", "table_stride", "table_width", "num_blocks"],
    do_not_specialize_on_alignment=["line", "block_table"],
)
def mla_prefill_gluon_kernel(
    query_boxes, query_rope_boxes, key_boxes, rope_boxes, output, lse, block_scale, output_scale, scale_stride,
    group_stride, line, schedule, counter, block_table, table_stride, table_width, num_blocks, query_head_stride, scale,
    HEADS: gl.constexpr, TOGETHER: gl.constexpr, BLOCK_SIZE: gl.constexpr, NOPE: gl.constexpr, VALUES: gl.constexpr,
    STAGES: gl.constexpr, MODEL: gl.constexpr, OUTPUT: gl.constexpr, OUTPUT_GROUPS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, CORRECTED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Attend every row of the schedule to the keys of its request on the line; `scale` includes log2(e).

    Queries are `[T, HEADS, NOPE + 64]`; a row of the workspace holds for every head NOPE columns of its key, then its
    value. TOGETHER: heads with tiles that run side by side, few enough that their keys stay in L2. CORRECTED: quantised
    outputs by `vattn.kernels.hopper.mla.prefill_store`.
    """
    panels: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    words_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(MODEL, [GROUPS, GROUP_ROWS, NOPE], panels)
    query_ropes = gl.allocate_shared_memory(MODEL, [GROUPS, GROUP_ROWS, ROPE], panels)
    keys = gl.allocate_shared_memory(MODEL, [STAGES, KEYS, NOPE], panels)
    ropes = gl.allocate_shared_memory(MODEL, [STAGES, KEYS, ROPE], panels)
    values = gl.allocate_shared_memory(MODEL, [STAGES, KEYS, VALUES], panels)
    words = gl.allocate_shared_memory(gl.int32, [WORDS, 1], words_layout)
    room = words
    if OUTPUT_GROUPS[1]:
        room = gl.allocate_shared_memory(MODEL, [GROUPS, GROUP_ROWS, PART_COLUMNS], panels)
    messages = gl.allocate_shared_memory(gl.int32, [2, RECORD], words_layout)
    query_full = new_barriers(GROUPS, 1)
    query_empty = new_barriers(GROUPS, 1)
    key_full = new_barriers(STAGES, 1)
    key_empty = new_barriers(STAGES, GROUPS)
    value_full = new_barriers(STAGES, 1)
    value_empty = new_barriers(STAGES, GROUPS)
    message_full = new_barriers(2, 1)
    message_empty = new_barriers(2, GROUPS)
    fence_async_shared()
    block_barrier()
    consumer = (
        output, lse, block_scale, output_scale, scale_stride, group_stride, table_width, scale, queries, query_ropes,
        keys, ropes, values, room, words, messages, query_full, query_empty, key_full, key_empty, value_full,
        value_empty, message_full, message_empty,
    )  # fmt: skip
    producer = (
        query_boxes, query_rope_boxes, key_boxes, rope_boxes, line, schedule, counter, block_table, table_stride,
        table_width, num_blocks, query_head_stride, queries, query_ropes, keys, ropes, values, words, messages,
        query_full, query_empty, key_full, key_empty, value_full, value_empty, message_full, message_empty,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (
                consumer, HEADS, BLOCK_SIZE, VALUES, STAGES, MODEL, OUTPUT, OUTPUT_GROUPS, SCALE_COLUMNS, CORRECTED,
                0,
            )),
            (consume, (
                consumer, HEADS, BLOCK_SIZE, VALUES, STAGES, MODEL, OUTPUT, OUTPUT_GROUPS, SCALE_COLUMNS, CORRECTED,
                1,
            )),
            (produce, (producer, HEADS, TOGETHER, BLOCK_SIZE, NOPE, VALUES, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
