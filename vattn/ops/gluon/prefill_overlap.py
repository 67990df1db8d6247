"""The order of products of wide heads in the Hopper prefill kernel: a tile's second one behind the next one's first.

Results of wide heads leave registers for narrow tiles of scores alone, and of those a second tile fits. While a
warpgroup makes weights of the newer tile, its second product of the older one runs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from vattn.ops.gluon.prefill_load import GROUP_ROWS, WORDS
from vattn.ops.gluon.prefill_messages import read_word
from vattn.ops.gluon.prefill_softmax import as_left, cap_scores, decay_of, hide, weights_of
from vattn.ops.gluon.prefill_turns import give_turn, take_turn


@gluon.jit
def add_tiles_behind(
    left, acc, maximum, sums, step, tiles, query, keys, values, words, key_full, key_empty, value_full, value_empty,
    position, own_end, whole_from, window_to, seq_len, scale, soft_cap, SHAPE: gl.constexpr, LEFT: gl.constexpr,
    SCORES: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr, TURNING: gl.constexpr,
):  # fmt: skip
    """Attend the tiles behind the first, whose weights are `left`; 16-bit caches alone.

    Returns:
        Results, to which the last tile's values are still being added, maxima, sums, and the step of that tile.
    """
    N: gl.constexpr = SHAPE.KEYS
    STAGES: gl.constexpr = SHAPE.STAGES
    CACHE: gl.constexpr = SHAPE.CACHE
    SOFT_CAP: gl.constexpr = SHAPE.SOFT_CAP
    no_scores = gl.zeros([GROUP_ROWS, N], gl.float32, SCORES)
    for back in range(1, tiles):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        next_step = step + 1
        next_stage = next_step % STAGES
        mbarrier.wait(key_full.index(next_stage), (next_step // STAGES) & 1)
        missing = read_word(words.index(next_step % WORDS), 4)
        mbarrier.wait(value_full.index(stage), phase)
        right = keys.index(next_stage).permute((1, 0))
        if TURNING:
            take_turn(MINE)
        raw = warpgroup_mma(query, right, no_scores, use_acc=False, is_async=True)
        acc = warpgroup_mma(left, values.index(stage), acc, is_async=True)
        if TURNING:
            give_turn(NEXT)
        raw = warpgroup_mma_wait(num_outstanding=1, deps=(raw,))
        mbarrier.arrive(key_empty.index(next_stage), count=1)
        scores = cap_scores(raw, scale, soft_cap, SOFT_CAP)
        key_tile = own_end - 1 - back
        if (key_tile >= whole_from) | (key_tile < window_to) | (missing != 0):
            scores = hide(
                scores, position, key_tile, seq_len, missing, SHAPE.PACK, N, SHAPE.WINDOW, SHAPE.BLOCK_SIZE, SCORES
            )
        new_maximum = gl.maximum(maximum, gl.max(scores, 1))
        decay = decay_of(maximum, new_maximum, scale, SOFT_CAP)
        weights = weights_of(scores, new_maximum, scale, 0.0, SOFT_CAP)
        new_sums = gl.sum(weights.reshape(GROUP_ROWS, N // 8, 8), 1)
        sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None] + new_sums
        left = as_left(weights, N, CACHE, values.dtype, LEFT)
        maximum = new_maximum
        # This phase is over, and its tile still held. The wait parts the code, or the assembler would move the one for
        # the product up to before the weights.
        mbarrier.wait(value_full.index(stage), phase)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(value_empty.index(stage), count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, LEFT.parent))[:, None]
        step += 1
    mbarrier.wait(value_full.index(step % STAGES), (step // STAGES) & 1)
    acc = warpgroup_mma(left, values.index(step % STAGES), acc, is_async=True)
    return acc, maximum, sums, step
