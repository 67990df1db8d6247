"""LoRA kernels: one multiplies a tile of rows by A, the next multiplies the result by B; each tile has one adapter.

A step of few rows takes the time to read the adapters once. The first kernel splits K, so that few tiles give all
multiprocessors work, and the second one adds the parts up. On sm_90 both are launched early: they load their weights
while the kernel before them ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import cast
from vattn.kernels.triton.common.launching import launch
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.ops.lora_arguments import TILE_ROWS, LoRAArgs, most_tiles


@triton.jit
def _tile(tiles, num_adapters, num_listed):
    """Return the adapter of a program's tile, its first place in the list and its number of rows, 0 for none."""
    entry = tiles + tl.program_id(0) * 3
    adapter, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    sound = (adapter >= 0) & (adapter < num_adapters) & (first >= 0) & (first < num_listed)
    return tl.where(sound, adapter, 0).to(tl.int64), first, tl.where(sound, tl.minimum(count, num_listed - first), 0)


@triton.jit
def _listed_rows(rows, first, count, num_rows, ROWS: tl.constexpr):
    """Return the rows of a tile, and which of them exist."""
    place = tl.arange(0, ROWS)
    row = tl.load(rows + first + place, mask=place < count, other=-1)
    exists = (row >= 0) & (row < num_rows) & (first + place < num_rows)
    return tl.where(exists, row, 0).to(tl.int64), exists


@triton.jit(do_not_specialize=["num_rows", "num_listed"])
def lora_shrink_kernel(
    input, lora_a, partial, rows, tiles, num_rows, num_listed, num_adapters, input_stride, K,
    RANKS: tl.constexpr, RANK_TILE: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write `input @ lora_a.T` over CHUNKS * COLUMNS columns to `partial` `[splits, num_rows, RANKS]`, rows as listed.

    Grid: tiles, splits of K, blocks of RANK_TILE ranks of all parts. EARLY: the kernel before may still run.
    """
    adapter, first, count = _tile(tiles, num_adapters, num_listed)
    split = tl.program_id(1)
    rank = tl.program_id(2) * RANK_TILE + tl.arange(0, RANK_TILE)
    column = split * (CHUNKS * COLUMNS) + tl.arange(0, COLUMNS)
    end = tl.minimum(K, (split + 1) * (CHUNKS * COLUMNS))
    there = rank < tl.where(count > 0, RANKS, 0)
    weights = lora_a + (adapter * RANKS + rank)[:, None] * K
    a = tl.load(weights + column[None, :], mask=there[:, None] & (column < end)[None, :], other=0)
    row, exists = _listed_rows(rows, first, count, num_rows, ROWS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count > 0:
        inputs = input + row[:, None] * input_stride
        total = tl.zeros([ROWS, RANK_TILE], tl.float32)
        for _ in range(CHUNKS):
            x = tl.load(inputs + column[None, :], mask=exists[:, None] & (column < end)[None, :], other=0)
            total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
            column += COLUMNS
            a = tl.load(weights + column[None, :], mask=there[:, None] & (column < end)[None, :], other=0)
        place = (split * num_rows + first + tl.arange(0, ROWS)).to(tl.int64)
        target = partial + place[:, None] * RANKS + rank[None, :]
        tl.store(target, total, mask=exists[:, None] & (rank < RANKS)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_listed"])
def lora_expand_kernel(
    partial, lora_b, scales, output, rows, tiles, num_rows, num_listed, num_adapters,
    BOUNDS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr, SPLITS: tl.constexpr, FEATURES: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the product of `partial`, summed over SPLITS, with `lora_b`, times the scale of each part, to `output`.

    Grid: tiles, blocks of FEATURES. BOUNDS: the first feature of each part, and N. EARLY: as above.
    """
    PARTS: tl.constexpr = len(BOUNDS) - 1
    N: tl.constexpr = BOUNDS[PARTS]
    adapter, first, count = _tile(tiles, num_adapters, num_listed)
    begin = tl.program_id(1) * FEATURES
    feature, rank = begin + tl.arange(0, FEATURES), tl.arange(0, RANK_TILE)
    there = feature < tl.where(count > 0, N, 0)
    b = tl.load(
        lora_b + (adapter * N + feature)[:, None] * RANK + rank[None, :],
        mask=there[:, None] & (rank < RANK)[None, :], other=0)  # fmt: skip
    row, exists = _listed_rows(rows, first, count, num_rows, ROWS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count > 0:
        place = (first + tl.arange(0, ROWS)).to(tl.int64)
        change = tl.zeros([ROWS, FEATURES], tl.float32)
        for part in tl.static_range(PARTS):
            if (begin < BOUNDS[part + 1]) & (begin + FEATURES > BOUNDS[part]):
                hidden = tl.zeros([ROWS, RANK_TILE], tl.float32)
                sums = partial + place[:, None] * (PARTS * RANK) + part * RANK + rank[None, :]
                if RANK_TILE <= 32:
                    # Unrolled: the loads do not wait for each other.
                    for _ in tl.static_range(SPLITS):
                        hidden += tl.load(sums, mask=exists[:, None] & (rank < RANK)[None, :], other=0)
                        sums += num_rows * (PARTS * RANK)
                else:
                    for _ in range(SPLITS):
                        hidden += tl.load(sums, mask=exists[:, None] & (rank < RANK)[None, :], other=0)
                        sums += num_rows * (PARTS * RANK)
                product = tl.dot(cast(hidden, b.dtype), tl.trans(b), input_precision="ieee")
                mine = (feature >= BOUNDS[part]) & (feature < BOUNDS[part + 1])
                change += tl.where(mine[None, :], product * tl.load(scales + adapter * PARTS + part), 0.0)
        target = output + row[:, None] * N + feature[None, :]
        mask = exists[:, None] & (feature < N)[None, :]
        total = tl.load(target, mask=mask, other=0).to(tl.float32) + change
        tl.store(target, cast(total, output.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class LoRATiles:
    """Tile config of both launches.

    Attributes:
        columns: of K, read at a time.
        ranks: most of a program of the first kernel.
        features: of a program of the second kernel.
        warps: of a program of either.
        programs: most programs of the first kernel for each multiprocessor; K is split for as many.
    """

    columns: int = 128
    ranks: int = 64
    features: int = 128
    warps: int = 4
    programs: int = 2


IN_FP32 = LoRATiles(columns=32, ranks=16, features=32)
"""Without tensor cores operands pass through registers."""


def launch_lora(args: LoRAArgs, config: LoRATiles | None = None, limits: Limits | None = None) -> None:
    """Run `vattn::add_lora`."""
    wide = args.input.dtype is torch.float32
    config, limits = config or (IN_FP32 if wide else LoRATiles()), limits or Limits.of(args.input.device)
    (num_rows, columns), (adapters, ranks, _), rank = args.input.shape, args.lora_a.shape, args.lora_b.shape[2]
    tiles = min(args.tiles.shape[0], most_tiles(num_rows, adapters))
    if not tiles:
        return
    rank_tile = min(config.ranks, max(16, next_power_of_two(ranks)))
    blocks, chunks = -(-ranks // rank_tile), -(-columns // config.columns)
    splits = max(1, min(chunks, config.programs * limits.processors // (tiles * blocks)))
    chunks = -(-chunks // splits)
    splits = -(-columns // (chunks * config.columns))
    partial = torch.empty(splits, num_rows, ranks, dtype=torch.float32, device=args.input.device)
    early = limits.hopper and not limits.interpreted
    shared = {"ROWS": TILE_ROWS, "EARLY": early, "num_warps": config.warps, **({"launch_pdl": True} if early else {})}
    table = {"rows": args.rows, "tiles": args.tiles, "num_rows": num_rows, "num_listed": args.rows.shape[0]}
    launch(
        lora_shrink_kernel,
        (tiles, splits, blocks),
        {"input": args.input, "lora_a": args.lora_a, "partial": partial, **table, "num_adapters": adapters,
         "input_stride": args.input.stride(0), "K": columns},
        {"RANKS": ranks, "RANK_TILE": rank_tile, "COLUMNS": config.columns, "CHUNKS": chunks, **shared},
    )  # fmt: skip
    bounds = tuple(accumulate(args.sizes, initial=0))
    launch(
        lora_expand_kernel,
        (tiles, -(-bounds[-1] // config.features)),
        {"partial": partial, "lora_b": args.lora_b, "scales": args.scales, "output": args.output, **table,
         "num_adapters": adapters},
        {"BOUNDS": bounds, "RANK": rank, "RANK_TILE": max(16, next_power_of_two(rank)), "SPLITS": splits,
         "FEATURES": config.features, **shared},
    )  # fmt: skip
