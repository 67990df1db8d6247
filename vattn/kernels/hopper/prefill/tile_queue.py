"""Row tiles on their way through the Hopper prefill kernel: the producer warp takes them and tells the other warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from vattn.kernels.hopper.compat import as_words

RECORD = gl.constexpr(8)
"""Words of a row of the schedule: request, first row, rows, position of the first, seq_len, first and end key tile."""

HEAD_BITS = gl.constexpr(12)
"""Low bits of a message's last word, which hold the head; the others hold the place of a partial result, plus one."""


@gluon.jit
def read_word(cell, NUM_WARPS: gl.constexpr):
    """Load a scalar from shared memory `[1]`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    return gl.max(cell.load(layout), 0)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return COUNT barriers, each complete after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def announce(
    schedule, messages, message_full, message_empty, item, message, most_tiles, HEADS: gl.constexpr,
    TOGETHER: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Pass the next row tile on: its record of the schedule, the head in the last word; no rows if there is none.

    With SPLIT the last word also holds the record's last, see `slot_of`.

    most_tiles: key tiles that the block table has room for, where schedules may go further.

    Returns:
        The words of the record in shared memory, and its rows.
    """
    record, word, head = record_of(schedule, item, most_tiles, HEADS, TOGETHER)
    last = head
    if SPLIT:
        last = head + ((record + 1) << HEAD_BITS)
    return tell(gl.where(word == 7, last, record), messages, message_full, message_empty, message)


@gluon.jit
def record_of(schedule, item, most_tiles, HEADS: gl.constexpr, TOGETHER: gl.constexpr):
    """Return the record of a row tile and its words' numbers, and the head; no rows if there are no more row tiles."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_tiles = gl.load(schedule)
    at = gl.minimum(item, num_tiles * HEADS - 1)
    of_group = num_tiles * TOGETHER
    rest = at % of_group
    head = at // of_group * TOGETHER + rest % TOGETHER
    word = gl.arange(0, RECORD, layout=lanes)
    record = gl.load(schedule + (1 + rest // TOGETHER) * RECORD + word)
    record = gl.where((word == 5) | (word == 6), gl.minimum(record, most_tiles), record)
    return gl.where((word == 2) & (item >= num_tiles * HEADS), 0, record), word, head


@gluon.jit
def tell(record, messages, message_full, message_empty, message):
    """Pass a record on; return its words in shared memory, and its rows."""
    slot = message % 2
    mbarrier.wait(message_empty.index(slot), ((message // 2) & 1) ^ 1)
    messages.index(slot).store(record)
    mbarrier.arrive(message_full.index(slot), count=1)
    fields = as_words(messages.index(slot), RECORD)
    return fields, read_word(fields.index(2), 1)


@gluon.jit
def head_of(last, SPLIT: gl.constexpr):
    """Return the head in a message's last word."""
    if SPLIT:
        return last & ((1 << HEAD_BITS) - 1)
    else:
        return last


@gluon.jit
def slot_of(last):
    """Return where the partial result of a message's row tile goes, -1 where it is a whole one."""
    return (last >> HEAD_BITS) - 1


@gluon.jit
def receive(messages, message_full, message_empty, message, NUM_WARPS: gl.constexpr):
    """Return the next row tile: rows (0: no more), first row, position, seq_len, first and end key tile, head."""
    slot = message % 2
    fields = as_words(messages.index(slot), RECORD)
    mbarrier.wait(message_full.index(slot), (message // 2) & 1)
    first_row = read_word(fields.index(1), NUM_WARPS)
    rows = read_word(fields.index(2), NUM_WARPS)
    position = read_word(fields.index(3), NUM_WARPS)
    seq_len = read_word(fields.index(4), NUM_WARPS)
    first = read_word(fields.index(5), NUM_WARPS)
    end = read_word(fields.index(6), NUM_WARPS)
    head = read_word(fields.index(7), NUM_WARPS)
    mbarrier.arrive(message_empty.index(slot), count=1)
    return rows, first_row, position, seq_len, first, end, head
