"""Prefill attention over a paged cache for Hopper (sm_90), in Gluon.

One persistent CTA per multiprocessor: a producer warp that loads by bulk tensor copies (`load`), two or three
consumer warpgroups of 64 query rows each that share every key and value tile, and for an FP8 cache some converter warps
(`convert`). Row tiles come from a schedule made on the device (`schedule`), longest first; the producer
takes the next one from a counter in device memory and passes it on through shared memory (`tile_queue`).

Inside a row tile the key tiles run from the diagonal backwards. A warpgroup leaves its second product in flight while
it asks for the next first one; the warpgroups cover each other in a ping-pong by named barriers. Each has the
matrix units for the first product, and with 16-bit heads of 256 for the second product and the next first one: these
take longer than the weights, which the other warpgroup computes meanwhile.

`shape.Shape` says what a launch is specialised for. Its PACK is 1, or the query heads of a KV head: a row is
one head of a token then, and the rows of a tile are PACK heads of 64 // PACK tokens for each warpgroup. Requests of few
tokens fill their tiles that way. Where PACK is more than a KV head has, the last rows of each token are left unused;
where it does not divide 64, the last rows of each warpgroup, which then loads its queries itself: boxes have a power of
2 of heads.
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

from vattn.kernels.hopper.compat import as_tiles, block_barrier, let_next_kernel_start
from vattn.kernels.hopper.prefill.convert import convert
from vattn.kernels.hopper.prefill.load import GROUP_ROWS, WORDS, clear_rows, load_queries, produce
from vattn.kernels.hopper.prefill.merge import finish_part
from vattn.kernels.hopper.prefill.ping_pong import BARRIERS, own_end_of, pass_tiles, ping_pong_signal, ping_pong_wait
from vattn.kernels.hopper.prefill.softmax import (
    LOWEST,
    NATIVE_BITS,
    add_tile,
    as_left,
    as_right,
    cap_scores,
    hide,
    multiply_keys,
    score_scale,
    tokens_of,
    weights_of,
    widen_query,
)
from vattn.kernels.hopper.prefill.store import finish_rows, store_nothing, store_part
from vattn.kernels.hopper.prefill.tile_queue import RECORD, head_of, new_barriers, read_word, receive, slot_of


@gluon.jit
def consume(arguments, SHAPE: gl.constexpr, GROUP_INDEX: gl.constexpr, NEXT_GROUP: gl.constexpr):
    """Attend this warpgroup's rows of every row tile that the producer announces.

    NEXT_GROUP: the warpgroup that has the matrix units after this one; a warpgroup alone is its own next.
    """
    (
        output, lse, block_scale, sinks, output_scale, scale_stride, group_stride, q_scale, k_scale, v_scale, scale,
        soft_cap, queries, keys, values, words, messages, query_full, query_empty, key_full, key_empty, value_full,
        value_empty, message_full, message_empty, partial_output, partial_stats, chain, query_rows, query_stride,
        query_head_stride,
    ) = arguments  # fmt: skip
    HEADS: gl.constexpr = SHAPE.HEADS
    D: gl.constexpr = SHAPE.D
    PACK: gl.constexpr = SHAPE.PACK
    WINDOW: gl.constexpr = SHAPE.WINDOW
    SOFT_CAP: gl.constexpr = SHAPE.SOFT_CAP
    STAGES: gl.constexpr = SHAPE.STAGES
    CACHE: gl.constexpr = SHAPE.CACHE
    KV_SCALE: gl.constexpr = SHAPE.KV_SCALE
    MODEL: gl.constexpr = gl.float16 if SHAPE.MODEL == "float16" else gl.bfloat16
    GROUP: gl.constexpr = HEADS // SHAPE.KV_HEADS
    N: gl.constexpr = SHAPE.KEYS
    BOX: gl.constexpr = SHAPE.BOX
    NATIVE: gl.constexpr = CACHE == "native"
    MATH: gl.constexpr = keys.dtype
    DEPTH: gl.constexpr = 32 if NATIVE else 16
    BITS: gl.constexpr = NATIVE_BITS if NATIVE else 0.0
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, DEPTH])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, DEPTH])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=RESULT, k_width=DEPTH // 8)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    PART: gl.constexpr = SHAPE.PART
    MINE: gl.constexpr = BARRIERS[GROUP_INDEX]
    NEXT: gl.constexpr = BARRIERS[NEXT_GROUP]
    PING_PONG: gl.constexpr = GROUP_INDEX != NEXT_GROUP
    LONG_PING_PONG: gl.constexpr = PING_PONG and SHAPE.LONG_PING_PONG
    HELD: gl.constexpr = SHAPE.HELD
    # Both the cache's tiles and those made of them, of 256 columns, leave no shared memory to sort results in.
    DIRECT: gl.constexpr = CACHE == "widened" and D == 256
    QUERY: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=DEPTH // 8)
    TOKENS: gl.constexpr = GROUP_ROWS // PACK
    FILLED: gl.constexpr = PACK if PACK <= GROUP else GROUP
    OWN_LOADS: gl.constexpr = GROUP_ROWS % PACK != 0
    # Results are placed by the rows of a tile, or of this warpgroup where these are not all used.
    PLACE: gl.constexpr = 0 if OWN_LOADS else GROUP_INDEX
    raw_query = queries.index(GROUP_INDEX)
    if CACHE == "widened":
        query = as_tiles(raw_query, gl.float16, 1, [GROUP_ROWS, D], gl.NVMMASharedLayout(128, 16, 2)).index(0)
    else:
        query = raw_query
    written = (output, lse, block_scale, sinks, v_scale, output_scale, scale_stride, group_stride)
    step = 0
    used = 0
    message = 0
    if PING_PONG and NEXT_GROUP == 0:
        ping_pong_signal(NEXT)
    rows, first_row, tile_position, seq_len, first, end, packed = receive(
        messages, message_full, message_empty, message, 4
    )
    while rows > 0:
        head = head_of(packed, SHAPE.SPLIT or PART > 0) * FILLED
        own_row = first_row
        own_rows = rows
        if OWN_LOADS:
            own_row += GROUP_INDEX * TOKENS
            own_rows = gl.minimum(rows - GROUP_INDEX * TOKENS, TOKENS)
        # No box is shifted where keys lie at fixed places.
        edge = seq_len * 0 if PART else seq_len
        if first < end:
            position = tile_position + GROUP_INDEX * TOKENS
            own_end = own_end_of(position, rows, first, end, GROUP_INDEX, TOKENS, N)
            step = pass_tiles(
                end - own_end, step, key_full, key_empty, value_full, value_empty, MINE, NEXT, PING_PONG, STAGES
            )
            # Key tiles from `whole_from` on reach past the first row; those before `window_to` reach out of a window.
            whole_from = gl.maximum(position + 1, 0) // N
            window_to = 0
            if WINDOW:
                window_to = gl.maximum(position + (TOKENS - 1) - WINDOW + N, 0) // N
            head_scale = score_scale(scale, q_scale, k_scale, head // GROUP, SHAPE.QUERY_SCALE, KV_SCALE)
            # Of what `cap_scores` returns, in base 2.
            weight_scale = 2.0 * soft_cap if SOFT_CAP else head_scale

            if OWN_LOADS:
                load_queries(
                    query_rows, raw_query, first_row, rows, head, query_stride, query_head_stride, GROUP_INDEX, PACK,
                    SHAPE.SIZE, D,
                )  # fmt: skip
            else:
                mbarrier.wait(query_full.index(GROUP_INDEX), used & 1)
            if CACHE == "widened":
                widen_query(raw_query, D, MODEL == gl.bfloat16)
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(key_full.index(stage), phase)
            missing = read_word(words.index(step % WORDS), 4)
            no_scores = gl.zeros([GROUP_ROWS, N], gl.float32, SCORES)
            if PING_PONG:
                ping_pong_wait(MINE)
            held = query
            if HELD > 0:
                held = query.slice(0, HELD, dim=1).load(QUERY)
            raw0 = multiply_keys(held, query, keys.index(stage), no_scores, HELD, SHAPE.USED, D)
            if PING_PONG:
                ping_pong_signal(NEXT)
            raw0 = warpgroup_mma_wait(num_outstanding=0, deps=(raw0,))
            mbarrier.arrive(key_empty.index(stage), count=1)
            scores0 = cap_scores(raw0, head_scale, SOFT_CAP)
            key_tile0 = own_end - 1
            reaches_tail = (seq_len % BOX != 0) & (own_end * N > seq_len)
            if reaches_tail | (missing != 0) | (key_tile0 < window_to):
                scores0 = hide(scores0, position, key_tile0, edge, missing, PACK, N, WINDOW, BOX, SCORES)
            else:
                row = tokens_of(gl.arange(0, GROUP_ROWS, layout=ROW), PACK) + (position - key_tile0 * N)
                column = gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
                scores0 = gl.where(row[:, None] >= column[None, :], scores0, float("-inf"))
            maximum = gl.maximum(gl.max(scores0, 1), LOWEST)
            weights0 = weights_of(scores0, maximum, weight_scale, BITS)
            # Sums of each thread's own columns; they meet at the end of the row tile.
            sums = gl.sum(weights0.reshape(GROUP_ROWS, N // 8, 8), 1)
            left0 = as_left(weights0, N, CACHE, MATH, LEFT)
            mbarrier.wait(value_full.index(stage), phase)
            if PART and CACHE == "plain":
                if reaches_tail:
                    clear_rows(values.index(stage), seq_len - key_tile0 * N, N, D, 4)
            if LONG_PING_PONG:
                ping_pong_wait(MINE)
            no_result = gl.zeros([GROUP_ROWS, D], gl.float32, RESULT)
            acc = warpgroup_mma(left0, as_right(values.index(stage), CACHE), no_result, use_acc=False, is_async=True)
            for back in range(1, own_end - first):
                next_step = step + 1
                next_stage = next_step % STAGES
                next_phase = (next_step // STAGES) & 1
                mbarrier.wait(key_full.index(next_stage), next_phase)
                missing = read_word(words.index(next_step % WORDS), 4)
                if PING_PONG and not LONG_PING_PONG:
                    ping_pong_wait(MINE)
                raw = multiply_keys(held, query, keys.index(next_stage), no_scores, HELD, SHAPE.USED, D)
                if PING_PONG:
                    ping_pong_signal(NEXT)
                raw, acc = warpgroup_mma_wait(num_outstanding=0, deps=(raw, acc))
                mbarrier.arrive(value_empty.index(step % STAGES), count=1)
                mbarrier.arrive(key_empty.index(next_stage), count=1)
                scores = cap_scores(raw, head_scale, SOFT_CAP)
                key_tile = own_end - 1 - back
                if (key_tile >= whole_from) | (key_tile < window_to) | (missing != 0):
                    scores = hide(scores, position, key_tile, edge, missing, PACK, N, WINDOW, BOX, SCORES)
                maximum, sums, acc = add_tile(
                    scores, maximum, sums, acc, weight_scale, values, value_full, next_stage, next_phase, BITS, CACHE,
                    MATH, LEFT, MINE if LONG_PING_PONG else None, SHAPE.HALVES,
                )  # fmt: skip
                step += 1
            if LONG_PING_PONG:
                ping_pong_signal(NEXT)
            if not OWN_LOADS:
                mbarrier.arrive(query_empty.index(GROUP_INDEX), count=1)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(value_empty.index(step % STAGES), count=1)
            step += 1
            used += 1

            total = gl.convert_layout(gl.sum(sums, 1), ROW)
            log_maximum = maximum * weight_scale
            if SOFT_CAP:
                log_maximum += soft_cap
            if PART:
                finish_part(
                    written, partial_output, partial_stats, chain, slot_of(packed), acc, log_maximum, total, rows,
                    own_row, own_rows, head, SHAPE, GROUP_INDEX, PLACE, BITS, DIRECT,
                )  # fmt: skip
            elif SHAPE.SPLIT:
                if slot_of(packed) >= 0:
                    store_part(
                        partial_output, partial_stats, (slot_of(packed) * SHAPE.GROUPS + GROUP_INDEX) * TOKENS, acc,
                        log_maximum - BITS, total, rows, head, GROUP_INDEX, HEADS, SHAPE.SIZE, PACK, FILLED,
                    )  # fmt: skip
                else:
                    finish_rows(written, acc, log_maximum, total, own_row, own_rows, head, SHAPE, PLACE, BITS, DIRECT)
            else:
                finish_rows(written, acc, log_maximum, total, own_row, own_rows, head, SHAPE, PLACE, BITS, DIRECT)
        elif SHAPE.SPLIT:
            if slot_of(packed) >= 0:
                nothing = gl.zeros([GROUP_ROWS, D], gl.float32, RESULT)
                lowest = gl.full([GROUP_ROWS], LOWEST, gl.float32, ROW)
                first_place = (slot_of(packed) * SHAPE.GROUPS + GROUP_INDEX) * TOKENS
                if PART:
                    first_place = slot_of(packed) + GROUP_INDEX * TOKENS
                store_part(
                    partial_output, partial_stats, first_place, nothing, lowest,
                    gl.zeros([GROUP_ROWS], gl.float32, ROW), rows, head, GROUP_INDEX, HEADS, SHAPE.SIZE, PACK, FILLED,
                )  # fmt: skip
            else:
                store_nothing(written, seq_len, own_row, own_rows, head, SHAPE, PLACE, RESULT, ROW, DIRECT)
        else:
            store_nothing(written, seq_len, own_row, own_rows, head, SHAPE, PLACE, RESULT, ROW, DIRECT)
        message += 1
        rows, first_row, tile_position, seq_len, first, end, packed = receive(
            messages, message_full, message_empty, message, 4
        )
    if PING_PONG and GROUP_INDEX == 0:
        ping_pong_wait(MINE)


@gluon.jit(do_not_specialize=["scale_stride", "group_stride"])
def prefill_kernel(
    query_boxes, key_boxes, value_boxes, output, lse, block_scale, partial_output, partial_stats, chain, sinks, q_scale,
    k_scale, v_scale, output_scale, scale_stride, group_stride, schedule, counter, block_table, table_stride,
    table_width, num_blocks, query_rows, query_stride, query_head_stride, scale, soft_cap, SHAPE: gl.constexpr,
    EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend every row of the schedule; see the module's description.

    SHAPE: a `shape.Shape`.
    query_rows, query_stride: the queries, where warpgroups load them themselves.
    EARLY: the next kernel may start while this one runs; it must wait for this one's end before it ends itself.
    """
    D: gl.constexpr = SHAPE.D
    KEYS: gl.constexpr = SHAPE.KEYS
    STAGES: gl.constexpr = SHAPE.STAGES
    RAW_STAGES: gl.constexpr = SHAPE.RAW_STAGES
    CACHE: gl.constexpr = SHAPE.CACHE
    GROUPS: gl.constexpr = SHAPE.GROUPS
    CONVERTERS: gl.constexpr = SHAPE.CONVERTERS
    MODEL: gl.constexpr = gl.float16 if SHAPE.MODEL == "float16" else gl.bfloat16
    if EARLY:
        let_next_kernel_start()
    panels: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(128 if D >= 128 else D, 8, 2)
    words_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BITS: gl.constexpr = query_boxes.dtype.primitive_bitwidth
    query_panels: gl.constexpr = gl.NVMMASharedLayout(128 if D * BITS >= 1024 else D * BITS // 8, BITS, 2)
    queries = gl.allocate_shared_memory(query_boxes.dtype, [GROUPS, GROUP_ROWS, D], query_panels)
    words = gl.allocate_shared_memory(gl.int32, [WORDS, 1], words_layout)
    messages = gl.allocate_shared_memory(gl.int32, [2, RECORD], words_layout)
    boxes_of_tile: gl.constexpr = KEYS // SHAPE.BOX
    blocks = gl.allocate_shared_memory(gl.int32, [boxes_of_tile], words_layout)
    query_full = new_barriers(GROUPS, 1)
    query_empty = new_barriers(GROUPS, 1)
    key_full = new_barriers(STAGES, 1)
    key_empty = new_barriers(STAGES, GROUPS)
    value_full = new_barriers(STAGES, 1)
    value_empty = new_barriers(STAGES, GROUPS)
    message_full = new_barriers(2, 1)
    message_empty = new_barriers(2, GROUPS if CACHE == "plain" else GROUPS + 1)
    raw_key_full = key_full
    raw_key_empty = key_empty
    raw_value_full = value_full
    raw_value_empty = value_empty
    if CACHE == "plain":
        keys = gl.allocate_shared_memory(MODEL, [STAGES, KEYS, D], panels)
        values = gl.allocate_shared_memory(MODEL, [STAGES, KEYS, D], panels)
        raw_keys = keys
        raw_values = values
    else:
        raw_values = gl.allocate_shared_memory(gl.float8e4nv, [RAW_STAGES, KEYS, D], narrow)
        raw_value_full = new_barriers(RAW_STAGES, 1)
        raw_value_empty = new_barriers(RAW_STAGES, 1)
        if CACHE == "native":
            keys = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, KEYS, D], narrow)
            values = gl.allocate_shared_memory(
                gl.float8e4nv, [STAGES, D, KEYS], gl.NVMMASharedLayout(SHAPE.PANEL_TOKENS, 8, 2)
            )
            raw_keys = keys
        else:
            keys = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, D], panels)
            values = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, D], panels)
            raw_keys = gl.allocate_shared_memory(gl.float8e4nv, [RAW_STAGES, KEYS, D], narrow)
            raw_key_full = new_barriers(RAW_STAGES, 1)
            raw_key_empty = new_barriers(RAW_STAGES, 1)
    fence_async_shared()
    block_barrier()
    # Tuples hold what exists at run time; what does not is in SHAPE.
    consumer = (
        output, lse, block_scale, sinks, output_scale, scale_stride, group_stride, q_scale, k_scale, v_scale, scale,
        soft_cap, queries, keys, values, words, messages, query_full, query_empty, key_full, key_empty, value_full,
        value_empty, message_full, message_empty, partial_output, partial_stats, chain, query_rows, query_stride,
        query_head_stride,
    )  # fmt: skip
    converter = (
        raw_keys, raw_values, keys, values, messages, raw_key_full, raw_key_empty, raw_value_full, raw_value_empty,
        key_full, key_empty, value_full, value_empty, message_full, message_empty,
    )  # fmt: skip
    producer = (
        query_boxes, key_boxes, value_boxes, schedule, counter, block_table, table_stride, table_width, num_blocks,
        query_head_stride, queries, raw_keys, raw_values, words, messages, blocks, query_full, query_empty,
        raw_key_full, raw_key_empty, raw_value_full, raw_value_empty, message_full, message_empty,
    )  # fmt: skip
    if GROUPS == 3 and CACHE == "plain":
        gl.warp_specialize(
            [
                (consume, (consumer, SHAPE, 0, 1)),
                (consume, (consumer, SHAPE, 1, 2)),
                (consume, (consumer, SHAPE, 2, 0)),
                (produce, (producer, SHAPE)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (consume, (consumer, SHAPE, 0, 1)),
                (consume, (consumer, SHAPE, 1, 2)),
                (consume, (consumer, SHAPE, 2, 0)),
                (convert, (converter, SHAPE)),
                (produce, (producer, SHAPE)),
            ],
            [4, 4, CONVERTERS, 1],
            [152, 152, 48, 48],
        )
    elif GROUPS == 1 and CACHE == "plain":
        gl.warp_specialize(
            [(consume, (consumer, SHAPE, 0, 0)), (produce, (producer, SHAPE))], [1], [40 if SHAPE.PART else 24]
        )
    elif GROUPS == 1:
        gl.warp_specialize(
            [(consume, (consumer, SHAPE, 0, 0)), (convert, (converter, SHAPE)), (produce, (producer, SHAPE))],
            [CONVERTERS, 1],
            [56, 56 if CACHE == "native" else 40],
        )
    elif CACHE == "plain":
        gl.warp_specialize(
            [(consume, (consumer, SHAPE, 0, 1)), (consume, (consumer, SHAPE, 1, 0)), (produce, (producer, SHAPE))],
            [4, 1],
            # A producer that cuts row tiles into parts has more to remember.
            [232, 40] if SHAPE.PART and D < 256 else [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (consumer, SHAPE, 0, 1)),
                (consume, (consumer, SHAPE, 1, 0)),
                (convert, (converter, SHAPE)),
                (produce, (producer, SHAPE)),
            ],
            [4, CONVERTERS, 1],
            [216, 40, 40] if CACHE == "widened" and CONVERTERS == 4 else [224, 56, 56],
        )
