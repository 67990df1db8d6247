"""Steps of few row tiles on Hopper: the prefill kernel attends parts of their keys, a second kernel merges these.

Prompts, chunks and drafts come here if their row tiles leave multiprocessors without work, and decodes with more query
heads per KV head than the decode kernel takes. How many parts a row tile has is decided on the device from all lengths,
so that a step of short contexts, or of enough of them, has whole tiles.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vattn.config import device as devices
from vattn.config.attention import AttentionConfig
from vattn.kernels.hopper import fp4_rows
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.launch import Sizing
from vattn.kernels.hopper.prefill import launch as prefill_launch
from vattn.kernels.hopper.prefill.launch import TileConfig, key_tile
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.schedule import max_row_tiles
from vattn.kernels.hopper.prefill.split_schedule import split_plan_kernel
from vattn.kernels.hopper.schedule import WAVES
from vattn.kernels.triton.attention.launch import rows_to_write
from vattn.kernels.triton.common.launching import launch as launch_again
from vattn.ops.arguments import AttentionArgs

MAX_GROUP_SIZE = GROUP_ROWS.value
"""Most query heads per KV head."""

MOST_DRAFTS = 16
"""Most rows per request, on average, of a step that is taken for drafts."""

LEAST_KEYS = 256
"""Fewest keys of a part."""

MERGED_KEYS = 192
"""Keys that a warpgroup attends in the time in which partial results of a whole tile are written and read again."""

MOST_WHOLE_TOKENS = 512
"""Row tiles stay whole where block tables have room for no more tokens: no second kernel follows then."""

MANY_PARTS = 32
"""Parts of a row tile from which on several programs of the reduction share a head."""

PROGRAMS = 16
"""Programs of the reduction on a multiprocessor."""


def choose_tiles(config: AttentionConfig, num_tokens: int, num_reqs: int) -> TileConfig:
    """Return the row tiles of a step: heads packed where that reads fewer keys, one warpgroup where it suffices.

    An idle warpgroup costs little. A request with more rows than the average is usually a prompt.
    """
    rows, padded = -(-num_tokens // num_reqs), prefill_launch.padded_pack(config)
    if num_tokens <= MOST_DRAFTS * num_reqs and rows * padded <= GROUP_ROWS.value:
        return TileConfig(1, padded, ahead=True, together=config.num_kv_heads)
    return TileConfig(2, pack_of(config, num_tokens, num_reqs), ahead=True, together=config.num_kv_heads)


def pack_of(config: AttentionConfig, num_tokens: int, num_reqs: int) -> int:
    """Return how many rows of a tile the heads of a group are to take, with some unused if that saves tiles.

    A request of r rows has about `r / tokens + 1 / 2` tiles of packed heads, and `r / 128 + 1 / 2` for each head.
    """
    group, pack = config.group_size, prefill_launch.full_pack(config)
    tokens = TileConfig(2, pack).tokens
    unused = 2 * GROUP_ROWS.value - group * tokens
    return pack if num_tokens * unused <= num_reqs * GROUP_ROWS.value * (group - 1) * tokens else 1


def items_of(config: AttentionConfig, num_tokens: int, num_reqs: int) -> int:
    """Return about how many row tiles of all heads a step of these shapes has."""
    tiles = choose_tiles(config, num_tokens, num_reqs)
    heads = config.num_heads // min(tiles.pack, config.group_size)
    return max(num_tokens // tiles.tokens, num_reqs) * heads


def sizing(config: AttentionConfig, num_tokens: int, num_reqs: int, device: torch.device) -> Sizing:
    """Return items that run at a time for each head, and the most items and partial results."""
    tiles = choose_tiles(config, num_tokens, num_reqs)
    heads = config.num_heads // min(tiles.pack, config.group_size)
    ctas = max(1, devices.multiprocessors(device) // heads)
    return Sizing(ctas, 0, max_row_tiles(num_tokens, num_reqs, tiles.tokens) + WAVES.value * ctas)


def plan_rows(config: AttentionConfig, num_tokens: int, num_reqs: int, device: torch.device) -> int:
    """Return how many rows a schedule needs."""
    tiles = choose_tiles(config, num_tokens, num_reqs)
    max_items = sizing(config, num_tokens, num_reqs, device).max_items
    return 2 + max_items + 3 * max_row_tiles(num_tokens, num_reqs, tiles.tokens)


def plan(query_start_loc: Tensor, seq_lens: Tensor, schedule: Tensor, num_tokens: int, config: AttentionConfig) -> None:
    """Fill the schedule of a step on the device: rows of 8 words, as many as `plan_rows` or more."""
    num_reqs, tiles = seq_lens.shape[0], choose_tiles(config, num_tokens, seq_lens.shape[0])
    sizes, keys = sizing(config, num_tokens, num_reqs, seq_lens.device), key_tile(config, tiles)
    arguments = {
        "query_start_loc": query_start_loc, "ordered": torch.empty_like(query_start_loc), "seq_lens": seq_lens,
        "schedule": schedule, "num_reqs": num_reqs, "num_tokens": num_tokens,
        "max_tiles": max_row_tiles(num_tokens, num_reqs, tiles.tokens), "max_items": sizes.max_items,
        "ctas": sizes.ctas,
    }  # fmt: skip
    constants = {
        "WINDOW": config.sliding_window or 0, "ROWS": tiles.tokens, "KEYS": keys, "CHUNK": 128,
        "REQUESTS": min(128, triton.next_power_of_2(max(num_reqs, 16))), "LEAST": max(1, LEAST_KEYS // keys),
        "MERGING": MERGED_KEYS * tiles.groups // keys, "num_warps": 8,
    }  # fmt: skip
    launch_again(split_plan_kernel, (1,), arguments, constants)


def attend(args: AttentionArgs, config: AttentionConfig, schedule: Tensor) -> None:
    """Run `vattn::attention` with a schedule that `plan` filled."""
    num_tokens, num_reqs, device = args.query.shape[0], args.seq_lens.shape[0], args.query.device
    tiles, sizes = choose_tiles(config, num_tokens, num_reqs), sizing(config, num_tokens, num_reqs, device)
    finished = prefill_launch.finishes(config)
    output = rows_to_write(args, config, finished)
    whole = args.block_table.shape[1] * config.block_size <= MOST_WHOLE_TOKENS
    if whole:
        schedule = schedule[1 + sizes.max_items + max_row_tiles(num_tokens, num_reqs, tiles.tokens) :]
    partial = decode_fast.scratch(args, config, 1 if whole else sizes.max_items * tiles.tokens)
    prefill_launch.launch(
        args, config, schedule, output, devices.multiprocessors(device), tiles, early=not whole, partial=partial
    )
    if not whole:
        _merge(args, config, schedule, output, tiles, sizes, partial)
    if not finished:
        fp4_rows.finish(args, config, output)


def _merge(
    args: AttentionArgs, config: AttentionConfig, schedule: Tensor, output: Tensor, tiles: TileConfig, sizes: Sizing,
    partial: dict[str, Tensor],
) -> None:  # fmt: skip
    """Launch the reduction of the row tiles that were split."""
    written = config if output is args.output else config.with_plain_output()
    pieces = max(args.query.shape[0] // tiles.tokens, args.seq_lens.shape[0])
    decode_fast.launch_reduction(
        args, written, {"schedule": schedule, **partial}, decode_fast.common_arguments(args, written, output), sizes,
        PROGRAMS, tiles.tokens, pieces=pieces, few=sizes.ctas >= MANY_PARTS * pieces,
    )  # fmt: skip
