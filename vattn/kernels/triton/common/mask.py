"""The mask, bias and soft cap of `vattn.ops.reference.attention` as device functions.

Letters: `q` and `k` are absolute positions, broadcast against each other; `causal` is the request's flag (only read
with CAUSALITY "per_request"). WINDOW and CHUNK are 0 when off.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.config import lengths

MAX_SEQ_LEN = tl.constexpr(lengths.MAX_SEQ_LEN)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def clamp(value, most):
    """Return integers clamped to [0, most]."""
    return tl.minimum(tl.maximum(value, 0), most)


@triton.jit
def count_held(length, RANK: tl.constexpr, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return how many of the first `length` keys of a request this rank holds (`vattn.distributed.DCPShard`)."""
    PERIOD: tl.constexpr = WORLD * INTERLEAVE
    length = tl.maximum(length, 0)
    rest = tl.minimum(tl.maximum(length % PERIOD - RANK * INTERLEAVE, 0), INTERLEAVE)
    return length // PERIOD * INTERLEAVE + rest


@triton.jit
def position_held(index, RANK: tl.constexpr, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return the positions of the keys with local indices `index` >= 0 on this rank."""
    return index // INTERLEAVE * (WORLD * INTERLEAVE) + RANK * INTERLEAVE + index % INTERLEAVE


@triton.jit
def key_range(
    q_first, q_last, seq_len, causal,
    CAUSALITY: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, LOOKBACK: tl.constexpr, MM: tl.constexpr,
):  # fmt: skip
    """Return [low, high): the keys that any row between two positions may see; empty if both are negative."""
    first = tl.maximum(q_first, 0)
    low = 0
    high = seq_len
    if CHUNK > 0:
        low = tl.maximum((first // CHUNK - LOOKBACK) * CHUNK, 0)
        high = tl.minimum(seq_len, (q_last // CHUNK + LOOKBACK + 1) * CHUNK)
    elif WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
        high = tl.minimum(seq_len, q_last + WINDOW)
    if CAUSALITY == "causal":
        high = tl.minimum(seq_len, q_last + 1)
    elif CAUSALITY == "per_request":
        high = tl.where(causal != 0, tl.minimum(seq_len, q_last + 1), high)
    if MM != "none":
        # Ranges may be anywhere.
        low = 0
        high = seq_len
    high = tl.where(q_last < 0, 0, high)
    return tl.minimum(low, high), high


@triton.jit
def full_range(
    q_first, q_last, seq_len, causal,
    CAUSALITY: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, LOOKBACK: tl.constexpr,
):  # fmt: skip
    """Return [low, high): keys that every row between two positions sees (without multimodal ranges); may be empty."""
    low = 0
    high = seq_len
    if CHUNK > 0:
        low = tl.maximum((q_last // CHUNK - LOOKBACK) * CHUNK, 0)
        high = tl.minimum(seq_len, (q_first // CHUNK + LOOKBACK + 1) * CHUNK)
    elif WINDOW > 0:
        low = tl.maximum(q_last - WINDOW + 1, 0)
        high = tl.minimum(seq_len, q_first + WINDOW)
    if CAUSALITY == "causal":
        high = tl.minimum(seq_len, q_first + 1)
    elif CAUSALITY == "per_request":
        high = tl.where(causal != 0, tl.minimum(seq_len, q_first + 1), high)
    return low, tl.where(q_first < 0, low, high)


@triton.jit
def visible(
    q, k, seq_len, causal, mm_ranges, num_ranges,
    CAUSALITY: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, LOOKBACK: tl.constexpr, MM: tl.constexpr,
):  # fmt: skip
    """Return which rows see which keys."""
    if CAUSALITY == "causal":
        sees = k <= q
    elif CAUSALITY == "per_request":
        sees = (k <= q) | (causal == 0)
    else:
        sees = (k >= 0) & (q >= 0)
    if CHUNK > 0:
        ahead = q // CHUNK - k // CHUNK
        sees = sees & (ahead <= LOOKBACK) & (ahead >= -LOOKBACK)
    elif WINDOW > 0:
        # Causal rows always pass the second comparison.
        sees = sees & (q - k < WINDOW) & (k - q < WINDOW)
    if MM != "none":
        for r in range(num_ranges):
            start = tl.load(mm_ranges + 2 * r)
            end = tl.load(mm_ranges + 2 * r + 1)
            inside = (start < end) & (q >= start) & (q <= end) & (k >= start) & (k <= end)
            if MM == "clamped" and WINDOW > 0:
                inside = inside & (q - k < WINDOW)
            sees = sees | inside
    return sees & (k < seq_len) & (q >= 0)


@triton.jit
def modify_scores(
    s, q, k, causal, soft_cap, slope, bias, bias_size, query_len, seq_len,
    CAUSALITY: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Apply soft cap, ALiBi and tree bias to scaled scores; return them times log2(e), for `exp2`.

    Args:
        slope: ALiBi slope of each row, `[rows, 1]`.
        bias: pointer to the request's square bias, or `None`; `bias_size` is 0 for a request without one.
    """
    if SOFT_CAP:
        # tanh(y) as 1 - 2 / (exp(2 y) + 1): an overflowing exponential gives 1, an underflowing one -1.
        s = soft_cap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / soft_cap)) + 1.0))
    if ALIBI == "linear":
        distance = (k - q).to(tl.float32)
        if CAUSALITY == "bidirectional":
            distance = -tl.abs(distance)
        elif CAUSALITY == "per_request":
            distance = tl.where(causal != 0, distance, -tl.abs(distance))
        s += slope * distance
    elif ALIBI == "sqrt":
        s -= slope * tl.sqrt(tl.maximum(q - k, 0).to(tl.float32))
    if bias is not None:
        context_len = seq_len - query_len
        row = q - context_len
        column = k - context_len
        inside = (row >= 0) & (row < bias_size) & (column >= 0) & (column < bias_size)
        s += tl.load(bias + row * bias_size + column, mask=inside, other=0.0)
    return s * LOG2E
