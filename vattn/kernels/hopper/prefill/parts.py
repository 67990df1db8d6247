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

PARTS_PER_DOUBLING = gl.constexpr(32)
"""Parts of the first length; each doubling of the keys after them doubles the length of half as many."""


@gluon.jit
def part_start(tile, PART: gl.constexpr):
    """Return the first key tile of the part that a key tile belongs to."""
    length = tile * 0 + PART
    while length * PARTS_PER_DOUBLING <= tile:
        length *= 2
    return tile // length * length
