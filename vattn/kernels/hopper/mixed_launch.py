"""Steps between decode and prefill on Hopper: drafted tokens, short extends, prompts beside running requests.

Which kernel takes which rows, of the ways that `vattn.kernels.variants` names:

- "packed": the prefill kernel takes all, the heads of a group as rows of one tile, so that keys and values are loaded
  once for all of them. A request's keys are never split, so there must be enough requests or rows for the whole card.
- "two": the prefill kernel takes requests of more rows than the decode kernel attends at a time, heads packed too, and
  padding; the decode kernel takes the others, and splits long ones. Two schedules, one behind the other in one tensor,
  say which request is whose; they are made on the device from the rows that requests have.
- "overlapped": the same, and the decode kernel starts where the prefill kernel has left multiprocessors free.

Shapes choose the way, and any split of the rows over the requests comes out right.
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
from vattn.kernels.hopper.prefill.launch import Cut, packs, padded_pack, products_of
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.variants import current
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

LEAST_TILES_PER_PROCESSOR = 1
"""Row tiles of a KV head that there must be on average; fewer leave multiprocessors without work."""

LEAST_DRAFTS_PER_PROCESSOR = 3 / 8
"""The same for `few_drafts="measured"`: the rest idles for less time than the general kernel takes longer."""


def way_of(config: AttentionConfig, num_tokens: int, num_reqs: int, device: torch.device) -> str:
    """Return which way a step of these shapes goes, empty for none of these."""
    variants = current()
    if num_tokens <= num_reqs or decode_fast.rows_at_a_time(config, num_tokens, num_reqs, device):
        return ""
    way = variants.mixed if num_tokens < variants.mixed_below * num_reqs else "general"
    if way in ("two", "overlapped") and config.head_size == 256 and products_of(config) != "plain":
        way = "packed"  # What these decode by since has not been compared beside another kernel on a GPU.
    least: float = LEAST_TILES_PER_PROCESSOR
    if is_speculative(config, num_tokens, num_reqs):
        way = variants.speculative
        least = LEAST_DRAFTS_PER_PROCESSOR if variants.few_drafts == "measured" else least
    tiles = max(num_tokens * config.group_size // (2 * GROUP_ROWS.value), num_reqs) * config.num_kv_heads
    if way == "general" or tiles < least * devices.multiprocessors(device):
        return ""
    return way


def is_speculative(config: AttentionConfig, num_tokens: int, num_reqs: int) -> bool:
    """Return whether every request may have equally many rows, one warpgroup's at most with their group of heads."""
    return num_tokens % num_reqs == 0 and num_tokens // num_reqs * packs(config) <= GROUP_ROWS.value


def cut_of(config: AttentionConfig, num_tokens: int, num_reqs: int) -> Cut:
    """Return how the prefill kernel's rows are cut: one warpgroup where a request's rows do not fill it.

    Heads that do not fill a tile evenly leave some of its rows unused there; a tile for each would load keys again.
    Drafts are bound by memory, which gives keys of all heads of a request sooner than those of two.
    """
    if not is_speculative(config, num_tokens, num_reqs):
        return Cut(2, packs(config), ahead=True)
    pack = padded_pack(config)
    fits = num_tokens // num_reqs * pack <= GROUP_ROWS.value
    return Cut(1, pack if fits else packs(config), ahead=True, together=config.num_kv_heads)


def short_rows(config: AttentionConfig) -> int:
    """Return how many rows of a request the decode kernel attends at a time."""
    if not decode_fast.attends_drafts(config):
        return 1
    return max(1, decode_fast.MAX_GROUP_SIZE // config.group_size)


def rows_at_once(config: AttentionConfig) -> int:
    """Return how many rows of a request the decode kernel attends at once in a step of two kernels.

    Eight rows, with their group of heads, take an FP8 cache less time than sixteen, and most requests have one.
    """
    halved = current().mixed_rows == "eight" and config.kv_cache_dtype in decode_fast.QUANTISED_CACHES
    rows = short_rows(config)
    return min(rows, max(1, decode_fast.MAX_GROUP_SIZE // 2 // config.group_size)) if halved else rows


def tuning_of(config: AttentionConfig, num_reqs: int, way: str) -> Tuning:
    """Return the tuning of the decode kernel in a step of two kernels."""
    tuning = decode_fast.choose_tuning(config, num_reqs, short_rows(config))
    return replace(tuning, overlap="end") if way == "overlapped" else tuning


def accepts(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Return whether this call goes one of these ways: a layer that both kernels run, and shapes that ask for it."""
    device = args.query.device
    has_keys = args.kv_cache.numel() > 0 and args.block_table.shape[1] > 0 and args.kv_cache.is_contiguous()
    if not has_keys or not (prefill_launch.runs(config, device) and decode_fast.runs(config, device)):
        return False
    return way_of(config, args.query.shape[0], args.seq_lens.shape[0], device) != ""


def plan(
    query_start_loc: Tensor, seq_lens: Tensor, schedule: Tensor, num_tokens: int, config: AttentionConfig, way: str
) -> None:
    """Fill the schedule of a step on the device, for a way that `way_of` named."""
    num_reqs = seq_lens.shape[0]
    cut = cut_of(config, num_tokens, num_reqs)
    if way == "packed":
        prefill_launch.plan(query_start_loc, seq_lens, schedule, num_tokens, config, cut)
        return
    rows, of_decode, of_prefill = short_rows(config), *_parts(schedule, config, num_reqs)
    tuning = tuning_of(config, num_reqs, way)
    decode_fast.plan(query_start_loc, seq_lens, of_decode, config, tuning, rows_at_once(config), longest=rows)
    prefill_launch.plan(query_start_loc, seq_lens, of_prefill, num_tokens, config, cut, least_rows=rows + 1)


def _parts(schedule: Tensor, config: AttentionConfig, num_reqs: int) -> tuple[Tensor, Tensor]:
    """Return the two schedules inside one."""
    chunks = decode_fast.chunks_of(num_reqs, rows_at_once(config), longest=short_rows(config))
    place = decode_fast.rows_of_short_requests(config, chunks, schedule.device)
    return schedule[:place], schedule[place:]


def attend(args: AttentionArgs, config: AttentionConfig, way: str = "") -> None:
    """Run `vattn::attention` for a call that `accepts` took; `way` overrides what the shapes would choose."""
    num_tokens, num_reqs, device = args.query.shape[0], args.seq_lens.shape[0], args.query.device
    way = way or way_of(config, num_tokens, num_reqs, device)
    shape = decode_fast.plan_shape(config, num_tokens, num_reqs, device)
    schedule = next((s for s in args.plan if tuple(s.shape) == shape), None)
    if schedule is None:
        schedule = torch.empty(shape, dtype=torch.int32, device=device)
        plan(args.query_start_loc, args.seq_lens, schedule, num_tokens, config, way)
    cut, fmt, rows = cut_of(config, num_tokens, num_reqs), OUTPUT_FORMATS[config.output_format], rows_at_once(config)
    tuning = tuning_of(config, num_reqs, way)
    finished = not fmt.group_size or prefill_launch.computes_scales(config)
    if way != "packed" and fmt.group_size:
        finished = finished and decode_fast.computes_scales(config, num_reqs, tuning, rows)
    output = args.output
    if not finished:
        output = torch.empty(args.query.shape, dtype=MODEL_DTYPES[config.dtype], device=device)
    if way == "packed":
        prefill_launch.launch(args, config, schedule, output, devices.multiprocessors(device), cut)
    else:
        of_decode, of_prefill = _parts(schedule, config, num_reqs)
        early = way == "overlapped"
        prefill_launch.launch(args, config, of_prefill, output, devices.multiprocessors(device), cut, early)
        sizes = decode_fast.sizing(config, num_reqs, tuning, device, rows, longest=short_rows(config))
        decode_fast.launch(args, config, of_decode, output, tuning, sizes, rows)
    if not finished:
        fp4_rows.finish(args, config, num_reqs, output)
