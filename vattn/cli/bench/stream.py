"""Read memory once and do next to nothing with it: the ceilings of everything that a cache limits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK, ROUNDS = 4096, 16
READ = BLOCK * ROUNDS
"""int32 values of one program."""


@triton.jit
def read_kernel(values, output, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """XOR `ROUNDS` blocks. Grid: parts of `BLOCK * ROUNDS` values."""
    program = tl.program_id(0)
    column = program.to(tl.int64) * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for part in tl.static_range(ROUNDS):
        found ^= tl.load(values + column + part * BLOCK)
    tl.store(output + program, tl.sum(found, 0))


def read_all(values: Tensor) -> Tensor:
    """Read int32 values, a multiple of `READ`; returns one unused number per part."""
    output = torch.empty(values.numel() // READ, dtype=torch.int32, device=values.device)
    read_kernel[(len(output),)](values, output, BLOCK=BLOCK, ROUNDS=ROUNDS, num_warps=8)
    return output


@triton.jit
def stream_kernel(  # type: ignore[no-untyped-def]
    key_boxes, value_boxes, block_table, output, table_stride, tiles, chunk, chunks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """XOR the 16-token tiles of a chunk of a request."""
    program = tl.program_id(0)
    head0 = (program % GROUPS) * HEADS
    item = program // GROUPS
    table = block_table + (item // chunks) * table_stride
    first = (item % chunks) * chunk
    last = tl.minimum(first + chunk, tiles)
    acc = tl.zeros([HEADS, 16, WIDTH], tl.int16)
    page = tl.load(table + first * 16 // BLOCK_SIZE)
    for tile in tl.range(first, last, num_stages=STAGES):
        next_page = tl.load(table + tl.minimum(tile + 1, last - 1) * 16 // BLOCK_SIZE)
        inside = tile * 16 % BLOCK_SIZE
        acc ^= key_boxes.load([page, head0, inside, 0]).reshape(HEADS, 16, WIDTH)
        acc ^= value_boxes.load([page, head0, inside, 0]).reshape(HEADS, 16, WIDTH)
        page = next_page
    tl.store(output + program, tl.sum(tl.sum(tl.sum(acc.to(tl.int32), 2), 1), 0))


def stream_decode(key: Tensor, value: Tensor, table: Tensor, batch: int, length: int) -> Callable[[], Tensor]:
    """Return a call that streams `batch` requests of `length` keys and values `[blocks, block_size, K, D]` once."""
    heads = min(4, key.shape[2])
    groups, tiles = key.shape[2] // heads, -(-length // 16)
    chunks = max(1, min(tiles, 264 // (batch * groups))) if batch * groups <= 264 else 1
    chunk = -(-tiles // chunks)
    chunks = -(-tiles // chunk)
    boxes = []
    for cache in (key, value):
        pairs = cache.view(torch.int16)
        blocks, size, kv_heads, width = pairs.shape
        by_block, by_token, by_head, _ = pairs.stride()
        boxes.append(
            TensorDescriptor(
                pairs, [blocks, kv_heads, size, width], [by_block, by_head, by_token, 1], [1, heads, 16, width]
            )
        )
    programs = batch * chunks * groups
    output = torch.empty(programs, dtype=torch.int32, device=key.device)

    def call() -> Tensor:
        stream_kernel[(programs,)](
            *boxes, table, output, table.stride(0), tiles, chunk, chunks, HEADS=heads, GROUPS=groups,
            BLOCK_SIZE=key.shape[1], WIDTH=boxes[0].block_shape[3], STAGES=4, num_warps=heads, num_stages=4,
        )  # fmt: skip
        return output

    return call
