"""Batch-invariant steps on Hopper: the prefill kernel attends every row, over parts of its keys with fixed limits.

Prompts, chunks, drafts and decodes differ in how rows and heads fill a tile, and in which CTA attends a part. Neither
changes a bit of a row (`parts`), so a decode gives what a prompt of the same tokens gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from vattn.config import device as devices
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo, Sizes, not_allowed
from vattn.config.features import requested_features
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper import fp4_rows
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.prefill import launch as prefill_launch
from vattn.kernels.hopper.prefill import split_launch
from vattn.kernels.hopper.prefill.fixed_schedule import fixed_plan_kernel
from vattn.kernels.hopper.prefill.launch import TileConfig, key_tile, map_of
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.merge import MERGED_ROWS, merge_parts_kernel
from vattn.kernels.hopper.prefill.schedule import max_row_tiles
from vattn.kernels.triton.attention.launch import as_bytes, rows_to_write
from vattn.kernels.triton.common.launching import launch as launch_again
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import OUTPUT_FORMATS

PART_KEYS = 512
"""Keys of the first parts. Results depend on it."""

SCRATCH_BYTES = 128 << 20
"""Most room for partial results of several CTAs; row tiles for which it does not suffice stay whole."""

COMPARED: dict[str, Any] = {
    "head_size": Sizes(values=(128,)), "dtype": ("bfloat16",), "query_format": ("none",), "output_format": ("none",),
    "kv_scale": ("none", "tensor"),
}  # fmt: skip
"""Layers of which the bits of different steps were compared on a GPU. Others stay on the general kernel till then."""

COMPARED_FEATURES = frozenset({"batch_invariant", "lse", "hnd_layout"})

PROGRAMS = 8
"""Programs of the merging kernel on a multiprocessor."""


def refusals(config: AttentionConfig, device: DeviceInfo) -> list[str]:
    """Return why the kernel does not run a batch-invariant layer, empty if it does: what it lacks, or is untested."""
    found = prefill_launch.refusals(config.replace(batch_invariant=False), device)
    if config.group_size > split_launch.MAX_GROUP_SIZE:
        found.append(f"{config.group_size} query heads per KV head (runs up to {split_launch.MAX_GROUP_SIZE})")
    return found or untested(config)


def untested(config: AttentionConfig) -> list[str]:
    """Return what of a batch-invariant layer has not been compared bit by bit on a GPU."""
    found = not_allowed(config, COMPARED)
    if GROUP_ROWS.value % config.group_size:
        found.append(f"{config.group_size} query heads per KV head (runs divisors of {GROUP_ROWS.value})")
    found += [f"{name} (runs none)" for name in sorted(requested_features(config) - COMPARED_FEATURES)]
    return [f"batch_invariant with {reason}" for reason in found]


runs = hopper.runs_where(refusals)
"""Whether nothing is refused: of a config and a device."""


def accepts(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Return whether the kernel takes a call; only the layer and its cache decide that."""
    return config.batch_invariant and runs(config, args.query.device) and decode_fast.has_boxes(args)


def choose_tiles(config: AttentionConfig, num_tokens: int, num_reqs: int, processors: int) -> TileConfig:
    """Return the row tiles of a step, as the kernels that are free choose them, where rows are rounded alike."""
    if not prefill_launch.is_prefill(num_tokens, num_reqs) or prefill_launch.sees_few_keys(config):
        return split_launch.choose_tiles(config, num_tokens, num_reqs)
    tiles = prefill_launch.choose_tiles(config, num_tokens, num_reqs, processors)
    return replace(tiles, groups=min(tiles.groups, 2), halves=False)


def splits(config: AttentionConfig, num_tokens: int, num_reqs: int, processors: int) -> bool:
    """Return whether row tiles of a step may be split: not where prompts fill the card."""
    return not prefill_launch.is_prefill(num_tokens, num_reqs) or (
        split_launch.items_of(config, num_tokens, num_reqs) < processors
    )


def max_places(config: AttentionConfig) -> int:
    """Return for how many rows there is room for partial results."""
    return SCRATCH_BYTES // (4 * config.num_heads * (config.head_size + 2))


def max_items(config: AttentionConfig, num_tokens: int, num_reqs: int, tiles: TileConfig, device: torch.device) -> int:
    """Return how many items a schedule has room for."""
    rows, _ = decode_fast.plan_shape(config, num_tokens, num_reqs, device)
    return rows - 2 - 3 * max_row_tiles(num_tokens, num_reqs, tiles.tokens)


def plan(query_start_loc: Tensor, seq_lens: Tensor, schedule: Tensor, num_tokens: int, config: AttentionConfig) -> None:
    """Fill the schedule of a step of any kind on the device."""
    num_reqs, device = seq_lens.shape[0], seq_lens.device
    processors = devices.multiprocessors(device)
    tiles = choose_tiles(config, num_tokens, num_reqs, processors)
    if not splits(config, num_tokens, num_reqs, processors):
        prefill_launch.plan(query_start_loc, seq_lens, schedule, num_tokens, config, tiles)
        return
    keys, heads = key_tile(config, tiles), config.num_heads // min(tiles.pack, config.group_size)
    arguments = {
        "query_start_loc": query_start_loc, "ordered": torch.empty_like(query_start_loc), "seq_lens": seq_lens,
        "schedule": schedule, "num_reqs": num_reqs, "num_tokens": num_tokens,
        "max_tiles": max_row_tiles(num_tokens, num_reqs, tiles.tokens),
        "max_items": max_items(config, num_tokens, num_reqs, tiles, device), "max_places": max_places(config),
        "ctas": max(1, processors // heads),
    }  # fmt: skip
    constants = {
        "WINDOW": config.sliding_window or 0, "ROWS": tiles.tokens, "KEYS": keys, "CHUNK": 128,
        "REQUESTS": min(128, triton.next_power_of_2(max(num_reqs, 16))), "PART": PART_KEYS // keys,
        "MERGING": split_launch.MERGED_KEYS * tiles.groups // keys, "num_warps": 8,
    }  # fmt: skip
    launch_again(fixed_plan_kernel, (1,), arguments, constants)


def attend(args: AttentionArgs, config: AttentionConfig) -> None:
    """Run `vattn::attention` for a call that `accepts` took."""
    num_tokens, num_reqs, device = args.query.shape[0], args.seq_lens.shape[0], args.query.device
    if num_tokens == 0:
        return
    processors = devices.multiprocessors(device)
    schedule, is_new = decode_fast.schedule_of(args, config)
    # The schedule of a step of fewer rows than requests was made for as many: it cannot tell.
    if is_new or num_tokens < num_reqs:
        schedule = torch.empty_like(schedule)
        plan(args.query_start_loc, args.seq_lens, schedule, num_tokens, config)
    tiles = choose_tiles(config, num_tokens, num_reqs, processors)
    may_split = splits(config, num_tokens, num_reqs, processors)
    finished = not OUTPUT_FORMATS[config.output_format].group_size
    output = rows_to_write(args, config, finished)
    partial, chain = _scratch(args, config, tiles, processors, may_split)
    part = PART_KEYS // key_tile(config, tiles)
    prefill_launch.launch(
        args, config, schedule, output, processors, tiles, early=may_split, partial=partial, part=part, chain=chain
    )
    if partial is not None:
        _merge(args, config if finished else config.with_plain_output(), schedule, output, tiles, partial)
    if not finished:
        fp4_rows.finish(args, config, output)


def _scratch(
    args: AttentionArgs, config: AttentionConfig, tiles: TileConfig, processors: int, may_split: bool
) -> tuple[dict[str, Tensor] | None, Tensor]:
    """Return room for parts of several CTAs, where there may be any, and for what each CTA keeps between its parts."""
    chain = processors * tiles.residents * tiles.groups * GROUP_ROWS.value * (prefill_launch.columns_of(config) + 2)
    places = max_places(config) if may_split else 0
    sums, stats = places * config.num_heads * config.head_size, places * config.num_heads * 2
    need, workspace = 4 * (chain + sums + stats), args.workspace
    if workspace is None or workspace.numel() * workspace.itemsize < need or workspace.data_ptr() % 16:
        workspace = torch.empty(need, dtype=torch.uint8, device=args.query.device)
    room = workspace.view(-1).view(torch.uint8)[:need].view(torch.float32)
    own, partial_output, partial_stats = room.split([chain, sums, stats])
    return {"partial_output": partial_output, "partial_stats": partial_stats} if may_split else None, own


def _merge(
    args: AttentionArgs, config: AttentionConfig, schedule: Tensor, output: Tensor, tiles: TileConfig,
    partial: dict[str, Tensor],
) -> None:  # fmt: skip
    """Launch the kernel that merges the parts of several CTAs."""
    num_tokens, num_reqs = args.query.shape[0], args.seq_lens.shape[0]
    shape = prefill_launch.shape_of(config, tiles, False, map_of(args.key_cache))
    arguments = {
        "schedule": schedule, **partial, "output": as_bytes(output), "lse": args.lse, "sinks": args.sinks,
        "v_scale": args.v_scale, "output_scale": args.output_scale,
        "max_items": max_items(config, num_tokens, num_reqs, tiles, args.query.device),
    }  # fmt: skip
    rows = max_row_tiles(num_tokens, num_reqs, tiles.tokens) * GROUP_ROWS.value * tiles.groups
    work = rows // MERGED_ROWS.value * (config.num_heads // min(tiles.pack, config.group_size))
    grid = min(work, PROGRAMS * devices.multiprocessors(args.query.device))
    launch_again(merge_parts_kernel, (grid,), arguments, {"SHAPE": shape, "num_warps": 4, "launch_pdl": True})
