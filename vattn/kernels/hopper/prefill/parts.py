"""Parts of the keys with fixed limits, so that a row's result does not depend on what else is in a step.

Every row has its keys attended part by part, each from its last key tile backwards, and the parts' results merged from
the last part backwards (`merge`). Where parts begin depends on nothing but the number of the key: the first
`PARTS_PER_DOUBLING` are of equal length, and so are as many halves after each doubling of the keys. Key tiles and parts
in which a row sees nothing change no bit of its result.

So one CTA may attend all parts of a row tile, one after the other, or several CTAs some of them; shapes and lengths
decide that, and the bits are the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vattn.kernels.hopper.prefill.tile_queue import HEAD_BITS, record_of, tell

PARTS_PER_DOUBLING = gl.constexpr(32)
"""Parts of the first length; each doubling of the keys after them doubles the length of half as many."""

WHOLE, FIRST, MIDDLE, LAST = gl.constexpr(-1), gl.constexpr(-2), gl.constexpr(-3), gl.constexpr(-4)
"""Places of a message's part that one CTA attends after others of the row tile: the only one, the first, last or any
other. Parts that other CTAs may attend have places from 0 on."""


@gluon.jit
def part_start(tile, PART: gl.constexpr):
    """Return the first key tile of the part that a key tile belongs to."""
    length = tile * 0 + PART
    while length * PARTS_PER_DOUBLING <= tile:
        length *= 2
    return tile // length * length


@gluon.jit
def announce_part(
    schedule, messages, message_full, message_empty, item, message, most_tiles, below, HEADS: gl.constexpr,
    TOGETHER: gl.constexpr, SPLIT: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Pass the next part of a row tile on, as `announce` does with whole ones; the last word holds its place too.

    below: where that part ends; -1: begin with the last part of a row tile.

    Returns:
        The words of the record in shared memory, its rows, and `below` of the part before.
    """
    record, word, head = record_of(schedule, item, most_tiles, HEADS, TOGETHER)
    first = gl.sum(gl.where(word == 5, record, 0), 0)
    end = gl.sum(gl.where(word == 6, record, 0), 0)
    place = end * 0 - 1
    if SPLIT:
        place = gl.sum(gl.where(word == 7, record, 0), 0)
    end = gl.where(below < 0, end, below)
    begin = gl.maximum(first, part_start(gl.maximum(end - 1, 0), PART))
    begin = gl.where((place >= 0) | (first >= end), first, begin)
    is_last = begin <= first
    of_chain = gl.where(below < 0, gl.where(is_last, WHOLE, FIRST), gl.where(is_last, LAST, MIDDLE))
    place = gl.where(place >= 0, place, of_chain)
    record = gl.where(word == 5, begin, record)
    record = gl.where(word == 6, end, record)
    record = gl.where(word == 7, head + ((place + 1) << HEAD_BITS), record)
    fields, rows = tell(record, messages, message_full, message_empty, message)
    return fields, rows, gl.where(is_last, -1, begin)
