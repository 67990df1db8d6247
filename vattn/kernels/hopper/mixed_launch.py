"""Steps between decode and prefill on Hopper: drafted tokens, short extends, prompts beside running requests.

Shapes choose the route, and the results are right for any split of the rows over the requests:

- "packed_gqa": the prefill kernel attends all requests. The heads of a group are rows of one tile, so keys and values
  are loaded once for all of them. A request's keys are not split, so requests or rows must fill the whole card.
- "two_kernels": the prefill kernel attends padding and the requests of more rows than the decode kernel attends at a
  time; the decode kernel attends the others, and starts where the prefill kernel leaves multiprocessors free. Two
  schedules, one after the other in one tensor, are made on the device from the rows that requests have.
- "split_keys": the prefill kernel attends all requests, and the keys of few row tiles in parts. Decodes of larger
  groups than the decode kernel takes go this way too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vattn.config import device as devices
from vattn.config.attention import AttentionConfig
from vattn.kernels.hopper import fp4_rows
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.launch import Tuning
from vattn.kernels.hopper.prefill import launch as prefill_launch
from vattn.kernels.hopper.prefill import split_launch
from vattn.kernels.hopper.prefill.launch import TileConfig, packs, products_of
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.triton.attention.launch import rows_to_write
from vattn.ops.arguments import AttentionArgs

MOST_SPLIT_TILES, MOST_SPLIT_DRAFTS = 1, 1.5
"""Keys may be split below so many row tiles per multiprocessor; the second number is for steps in which the decode
kernel takes up to `FEW_ROWS` rows of a request at a time."""

FEW_ROWS = 3

MOST_ROWS_PER_REQUEST = 256
"""On average, from which the prefill kernel attends a step as prompts."""


def route_of(config: AttentionConfig, num_tokens: int, num_reqs: int, device: torch.device) -> str:
    """Return the route of a step of these shapes, empty if it takes none."""
    large, long = config.group_size > decode_fast.MAX_GROUP_SIZE, prefill_launch.is_prefill(num_tokens, num_reqs)
    # A schedule cannot tell steps of fewer rows than requests from decodes.
    if num_tokens < max(num_reqs, 1) or (config.group_size > split_launch.MAX_GROUP_SIZE and not long):
        return ""
    if not large and decode_fast.rows_at_a_time(config, num_tokens, num_reqs):
        return ""
    if long and prefill_launch.sees_few_keys(config):
        return ""
    few_rows = short_rows(config) <= FEW_ROWS and not long
    most = (MOST_SPLIT_DRAFTS if few_rows else MOST_SPLIT_TILES) * devices.multiprocessors(device)
    if split_launch.items_of(config, num_tokens, num_reqs) < most:
        return "split_keys"
    if large:
        return "" if long else "split_keys"
    if is_speculative(config, num_tokens, num_reqs):
        return "packed_gqa"
    if num_tokens >= MOST_ROWS_PER_REQUEST * num_reqs:
        return ""
    # The decode kernel of FP8 heads of 256 has not been timed beside the prefill kernel.
    return (
        "packed_gqa" if prefill_launch.columns_of(config) == 256 and products_of(config) != "plain" else "two_kernels"
    )


def is_speculative(config: AttentionConfig, num_tokens: int, num_reqs: int) -> bool:
    """Return whether every request may have equally many rows, one warpgroup's at most with their group of heads."""
    rows = num_tokens // num_reqs
    return num_tokens % num_reqs == 0 and rows <= split_launch.MOST_DRAFTS and rows * packs(config) <= GROUP_ROWS.value


def choose_tiles(config: AttentionConfig, num_tokens: int, num_reqs: int) -> TileConfig:
    """Return the prefill kernel's row tiles of a step without split keys.

    Drafts are bound by memory, which delivers the keys of all heads of a request faster than the keys of two.
    """
    if is_speculative(config, num_tokens, num_reqs):
        return split_launch.choose_tiles(config, num_tokens, num_reqs)
    return TileConfig(2, split_launch.pack_of(config, num_tokens, num_reqs), ahead=True)


def short_rows(config: AttentionConfig) -> int:
    """Return how many rows of a request the decode kernel attends at a time."""
    if not decode_fast.attends_drafts(config):
        return 1
    return max(1, decode_fast.MAX_GROUP_SIZE // config.group_size)


def rows_at_once(config: AttentionConfig) -> int:
    """Return how many rows of a request the decode kernel attends at once in a step of two kernels.

    Over an FP8 cache eight rows, with their group of heads, take less time than sixteen, and most requests have one.
    """
    rows = short_rows(config)
    if config.kv_cache_dtype not in decode_fast.QUANTISED_CACHES:
        return rows
    return min(rows, max(1, decode_fast.MAX_GROUP_SIZE // 2 // config.group_size))


def tuning_of(config: AttentionConfig, num_reqs: int) -> Tuning:
    """Return the tuning of the decode kernel in a step of two kernels: it starts while the prefill kernel runs."""
    return replace(decode_fast.choose_tuning(config, num_reqs, short_rows(config)), overlap="end")


def accepts(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Return whether this call takes a route: both kernels run the layer, and the shapes choose one."""
    device = args.query.device
    if not prefill_launch.runs(config, device):
        return False
    return bool(route_of(config, args.query.shape[0], args.seq_lens.shape[0], device)) and decode_fast.has_boxes(args)


def plan(
    query_start_loc: Tensor, seq_lens: Tensor, schedule: Tensor, num_tokens: int, config: AttentionConfig, route: str
) -> None:
    """Fill the schedule of a step on the device, for what `route_of` returned."""
    num_reqs = seq_lens.shape[0]
    if route == "split_keys":
        split_launch.plan(query_start_loc, seq_lens, schedule, num_tokens, config)
        return
    tiles = choose_tiles(config, num_tokens, num_reqs)
    if route == "packed_gqa":
        prefill_launch.plan(query_start_loc, seq_lens, schedule, num_tokens, config, tiles)
        return
    rows, of_decode, of_prefill = short_rows(config), *_parts(schedule, config, num_reqs)
    tuning = tuning_of(config, num_reqs)
    decode_fast.plan(query_start_loc, seq_lens, of_decode, config, tuning, rows_at_once(config), rows,
                     step_tokens=num_tokens)  # fmt: skip
    prefill_launch.plan(query_start_loc, seq_lens, of_prefill, num_tokens, config, tiles, least_rows=rows + 1)


def _parts(schedule: Tensor, config: AttentionConfig, num_reqs: int) -> tuple[Tensor, Tensor]:
    """Return the two schedules inside one."""
    chunks = decode_fast.chunks_of(num_reqs, rows_at_once(config), longest=short_rows(config))
    place = decode_fast.rows_of_short_requests(config, chunks, schedule.device)
    return schedule[:place], schedule[place:]


def attend(args: AttentionArgs, config: AttentionConfig, route: str = "") -> None:
    """Run `vattn::attention` for a call that `accepts` took; `route` overrides what the shapes choose."""
    num_tokens, num_reqs, device = args.query.shape[0], args.seq_lens.shape[0], args.query.device
    route = route or route_of(config, num_tokens, num_reqs, device)
    schedule, is_new = decode_fast.schedule_of(args, config)
    if is_new:
        plan(args.query_start_loc, args.seq_lens, schedule, num_tokens, config, route)
    if route == "split_keys":
        split_launch.attend(args, config, schedule)
        return
    tiles, rows, tuning = choose_tiles(config, num_tokens, num_reqs), rows_at_once(config), tuning_of(config, num_reqs)
    finished = prefill_launch.finishes(config)
    if route != "packed_gqa":
        finished = finished and decode_fast.computes_scales(config, num_reqs, tuning, rows)
    output = rows_to_write(args, config, finished)
    if route == "packed_gqa":
        prefill_launch.launch(args, config, schedule, output, devices.multiprocessors(device), tiles)
    else:
        of_decode, of_prefill = _parts(schedule, config, num_reqs)
        prefill_launch.launch(args, config, of_prefill, output, devices.multiprocessors(device), tiles, early=True)
        sizes = decode_fast.sizing(config, num_reqs, tuning, device, rows, longest=short_rows(config))
        decode_fast.launch(args, config, of_decode, output, tuning, sizes, rows)
    if not finished:
        fp4_rows.finish(args, config, output)
