"""Device code for the start of an item of the packed decode path: what is read ahead.

A CTA turns its query before it asks for the first keys. `fetch_tiles` asks for them before that, into L2, so that
memory is not idle meanwhile: where every request is one item, as with 256 requests of 1024 tokens, all CTAs start at
the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.ops.triton.decode_fast_kernels import FETCH, TILE_TOKENS


@triton.jit
def fetch(pointers, mask, ASSEMBLY: tl.constexpr):
    """Ask for the lines of pointers where mask, which broadcasts, is true; nothing waits for them."""
    mask = tl.broadcast_to(mask, pointers.shape)
    if ASSEMBLY:
        places = pointers.to(tl.int64)
        tl.inline_asm_elementwise(FETCH, "=r,l,r", [places, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.load(pointers, mask=mask, other=0)


@triton.jit
def rows_of_tiles(part, place, inside, head, STRIDES: tl.constexpr):
    """Return pointers `[tiles, tokens, heads]` to what rows have in a part of the cache; strides are in bytes."""
    block = place.to(tl.int64)[:, None, None] * STRIDES[0]
    row = inside[:, :, None] * STRIDES[1] + head[None, None, :] * STRIDES[2]
    return part.to(tl.pointer_type(tl.uint8), bitcast=True) + (block + row)


@triton.jit
def fetch_tiles(
    key_codes, value_codes, key_scales, value_scales, table, first_tile, last_tile, num_blocks, kv_head,
    TILES: tl.constexpr, TILES_PER_BLOCK: tl.constexpr, KEY_ROWS: tl.constexpr, VALUE_ROWS: tl.constexpr,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Ask for codes and scales of the first TILES tiles of an item; bad block ids are left out.

    ROWS, STRIDES: of codes and of scales, in bytes.
    """
    tile = first_tile + tl.arange(0, TILES)
    block = tl.load(table + tile // TILES_PER_BLOCK, mask=tile < last_tile, other=-1)
    known = ((block >= 0) & (block < num_blocks))[:, None, None]
    inside = (tile % TILES_PER_BLOCK * TILE_TOKENS)[:, None] + tl.arange(0, TILE_TOKENS)[None, :]
    fetch(rows_of_tiles(key_codes, block, inside, kv_head, KEY_ROWS), known, ASSEMBLY)
    fetch(rows_of_tiles(value_codes, block, inside, kv_head, VALUE_ROWS), known, ASSEMBLY)
    if key_scales is not None:
        fetch(rows_of_tiles(key_scales, block, inside, kv_head, KEY_STRIDES), known, ASSEMBLY)
    fetch(rows_of_tiles(value_scales, block, inside, kv_head, VALUE_STRIDES), known, ASSEMBLY)
