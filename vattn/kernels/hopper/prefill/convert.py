"""The converter warps of the Hopper prefill kernel: tiles of an FP8 cache into what the matrix instructions take.

- FP8 queries are multiplied in FP8. Its second product needs values with contiguous tokens: `transpose_tile`
  transposes them on the way through shared memory. Inside each 16 tokens the order is permuted, position
  4 q + 2 i + e holding token 8 i + 2 q + e, so that the weights already lie as the product takes them.
- 16-bit queries are multiplied in fp16, which holds every FP8 value: `widen_tile` turns keys and values into it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from vattn.kernels.hopper.compat import as_tiles, block_barrier
from vattn.kernels.hopper.prefill.load import clear_rows
from vattn.kernels.hopper.prefill.tile_queue import receive

WIDEN_TOKENS = gl.constexpr(32)


@gluon.jit
def sort_bytes(pairs):
    """Split pairs of columns, four tokens to a thread's two words, into the codes of even and of odd columns."""
    return gl.inline_asm_elementwise(
        """
        prmt.b32 $0, $2, $3, 0x6420;
        prmt.b32 $1, $2, $3, 0x7531;
        """,
        "=&r,=r,r,r",
        [pairs],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def transpose_tile(
    raw, transposed, D: gl.constexpr, KEYS: gl.constexpr, PANEL_TOKENS: gl.constexpr, WARPS: gl.constexpr
):
    """Transpose an FP8 tile `[KEYS, D]` into `[D, KEYS]`, panels of PANEL_TOKENS tokens (32 or 64); by 2 or 4 warps.

    A thread of the layout holds tokens 2 q, 2 q + 1, 8 + 2 q and 9 + 2 q of a pair of columns, next to each other.
    """
    PANELS: gl.constexpr = KEYS // PANEL_TOKENS
    # A panel of the tile has 128 columns; wider rows are several panels, one after the other.
    COLUMNS: gl.constexpr = 128 if D >= 128 else D
    PARTS: gl.constexpr = D // COLUMNS
    PAIRS: gl.constexpr = COLUMNS // 2
    as_pairs: gl.constexpr = gl.NVMMASharedLayout(COLUMNS, 16, 2)
    as_panel: gl.constexpr = gl.NVMMASharedLayout(PANEL_TOKENS, 8, 2)
    # Half of the column pairs belong to other warps, or to the same thread where there are fewer warps.
    MORE: gl.constexpr = [[32, 0]] if PAIRS == 64 and WARPS == 2 else []
    in_thread: gl.constexpr = [[0, 1], [0, 8], [8, 0], [0, 16]] + ([[0, 32]] if PANEL_TOKENS == 64 else []) + MORE
    WARP: gl.constexpr = [[16, 0]] if WARPS == 2 else [[16, 0], [32, 0] if PAIRS == 64 else [0, 0]]
    held: gl.constexpr = gl.DistributedLinearLayout(
        in_thread, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], WARP, [], [PAIRS, PANEL_TOKENS]
    )
    sources = as_tiles(raw, gl.int16, PARTS * PANELS, [PANEL_TOKENS, PAIRS], as_pairs)
    targets = as_tiles(transposed, gl.int8, PANELS * PARTS, [COLUMNS, PANEL_TOKENS], as_panel)
    for i in gl.static_range(PANELS):
        for part in gl.static_range(PARTS):
            even, odd = sort_bytes(sources.index(part * PANELS + i).permute((1, 0)).load(held))
            codes = gl.join(even, odd).permute((0, 2, 1)).reshape([COLUMNS, PANEL_TOKENS])
            codes = (
                codes.reshape([COLUMNS, PANEL_TOKENS // 16, 2, 4, 2])
                .permute((0, 1, 3, 2, 4))
                .reshape([COLUMNS, PANEL_TOKENS])
            )
            targets.index(i * PARTS + part).store(codes)


@gluon.jit
def widen_tile(raw, wide, D: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr):
    """Convert an FP8 tile `[KEYS, D]` to fp16."""
    # Eight columns a thread: neighbours then write neighbouring 16 bytes.
    ACROSS: gl.constexpr = D // 8
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    for i in gl.static_range(KEYS // WIDEN_TOKENS):
        codes = raw.slice(i * WIDEN_TOKENS, WIDEN_TOKENS, dim=0).load(rows)
        wide.slice(i * WIDEN_TOKENS, WIDEN_TOKENS, dim=0).store(codes.to(gl.float16))


@gluon.jit
def convert(arguments, SHAPE: gl.constexpr):
    """Convert every tile that the producer loads: the values alone if CACHE is "native", keys and values otherwise."""
    (
        raw_keys, raw_values, keys, values, messages, raw_key_full, raw_key_empty, raw_value_full, raw_value_empty,
        key_full, key_empty, value_full, value_empty, message_full, message_empty,
    ) = arguments  # fmt: skip
    D: gl.constexpr = SHAPE.D
    KEYS: gl.constexpr = SHAPE.KEYS
    RAW_STAGES: gl.constexpr = SHAPE.RAW_STAGES
    STAGES: gl.constexpr = SHAPE.STAGES
    CACHE: gl.constexpr = SHAPE.CACHE
    WARPS: gl.constexpr = SHAPE.CONVERTERS
    step = 0
    message = 0
    rows, _, _, seq_len, first, end, _ = receive(messages, message_full, message_empty, message, WARPS)
    while rows > 0:
        for back in range(end - first):
            source = step % RAW_STAGES
            target = step % STAGES
            loaded = (step // RAW_STAGES) & 1
            released = ((step // STAGES) & 1) ^ 1
            if CACHE == "widened":
                mbarrier.wait(raw_key_full.index(source), loaded)
                mbarrier.wait(key_empty.index(target), released)
                widen_tile(raw_keys.index(source), keys.index(target), D, KEYS, WARPS)
                fence_async_shared()
                block_barrier()
                mbarrier.arrive(raw_key_empty.index(source), count=1)
                mbarrier.arrive(key_full.index(target), count=1)
            mbarrier.wait(raw_value_full.index(source), loaded)
            mbarrier.wait(value_empty.index(target), released)
            if SHAPE.PART:
                own = seq_len - (end - 1 - back) * KEYS
                if (own < KEYS) & (seq_len % SHAPE.BOX != 0):
                    clear_rows(raw_values.index(source), own, KEYS, D, WARPS)
            if CACHE == "widened":
                widen_tile(raw_values.index(source), values.index(target), D, KEYS, WARPS)
            else:
                transpose_tile(raw_values.index(source), values.index(target), D, KEYS, SHAPE.PANEL_TOKENS, WARPS)
            fence_async_shared()
            block_barrier()
            mbarrier.arrive(raw_value_empty.index(source), count=1)
            mbarrier.arrive(value_full.index(target), count=1)
            step += 1
        message += 1
        rows, _, _, seq_len, first, end, _ = receive(messages, message_full, message_empty, message, WARPS)
