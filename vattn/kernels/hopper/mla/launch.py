"""The latent decode path of Hopper: which calls it takes, its schedule, and the launches.

The numbers of the schedule (`vattn.kernels.hopper.mla.schedule`) are in a tensor. Its first dimension is how many query
tokens a split request may have: requests of more tokens than the shapes of a step suggest run unsplit, which is slow,
but right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vattn.config import device as devices
from vattn.config.device import DeviceInfo, Sizes, not_allowed
from vattn.config.mla import MLAConfig
from vattn.errors import ShapeError
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper.mla.decode_16_32 import mla_decode_kernel
from vattn.kernels.hopper.mla.decode_64 import mla_decode_64_kernel
from vattn.kernels.hopper.mla.decode_fp8 import PAIRS, ROPE_PAIRS, mla_decode_fp8_kernel
from vattn.kernels.hopper.mla.prefill_launch import boxes_of, planned_room, planned_tokens, plans
from vattn.kernels.hopper.mla.reduce import merge_parts
from vattn.kernels.hopper.mla.schedule import Parts, cut_requests, mla_schedule_kernel
from vattn.kernels.hopper.mla.work_items import LATENT, ROPE, TILE
from vattn.kernels.hopper.schedule import FIELDS, WAVES
from vattn.kernels.triton.common.bounded_step import bounded_step
from vattn.kernels.triton.common.mask import LOG2E
from vattn.kernels.triton.common.tiles import next_power_of_two
from vattn.kernels.triton.mla.absorb_rule import longest_absorbed
from vattn.kernels.triton.mla.plan_layout import MIXED, step_in, step_room
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.formats import MODEL_DTYPES

DTYPES = ("bfloat16",)
"""Of the kernels' two; in the other one they have not run on a GPU."""
BLOCK_SIZES = Sizes(step=64, low=64, high=2048, besides=(16, 32))
"""Whole tiles of a block, or whole blocks of a tile."""
NUM_HEADS = Sizes(values=(8, 16, 32, 64, 128))
FP8 = "fp8_e4m3"
FP8_HEADS = Sizes(values=(8, 16))
"""With 16, which are one program, FP8 caches were timed faster here than in the plain kernel; 8 fill half of one."""

LEAST_SCALE = 1e-20
"""Smallest scale of scores of which 64 rows are attended at a time: hidden ones are a number, to be divided by it."""

MOST_QUERY_TOKENS = 8
"""Longest query of a request that is split over programs."""

_STAGES = 2
_REGISTERS = 152
"""Registers of a thread that the narrow kernel starts with at 16 rows, which its warpgroups share out among themselves:
few enough to start while the merge before it runs. With 32 rows it was slower so."""
FP8_STAGES = 4


def refusals(config: MLAConfig, device: DeviceInfo) -> list[str]:
    """Return why this path cannot run a layer, empty if it can. The plain kernel runs what this one refuses."""
    found = hopper.refusals(device, config, DTYPES)
    if config.kv_cache_dtype not in (config.dtype, FP8):
        found.append(f"kv_cache_dtype {config.kv_cache_dtype} (runs the model dtype and {FP8})")
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    if widths != (LATENT.value, ROPE.value):
        found.append(f"rows of {widths[0]} + {widths[1]} columns (runs {LATENT.value} + {ROPE.value})")
    found += not_allowed(config, {"block_size": BLOCK_SIZES, "num_heads": NUM_HEADS})
    if config.sparse:
        found.append("sparse is not implemented")
    return found


def runs(config: MLAConfig, device: torch.device) -> bool:
    """Return whether nothing is refused, and this way is the one that is taken."""
    if config.kv_cache_dtype == FP8 and config.num_heads not in FP8_HEADS:
        return False
    return _can_run(config, device)


_can_run = hopper.runs_where(refusals)


def accepts(absorbed: Tensor, args: MLAAttentionArgs, config: MLAConfig) -> bool:
    """Return whether this path takes the call: the layer is accepted, and the shapes are of a decode step."""
    num_tokens, num_reqs = absorbed.shape[0], args.seq_lens.shape[0]
    is_decode = 0 < num_tokens <= MOST_QUERY_TOKENS * num_reqs
    return is_decode and runs(config, absorbed.device) and rows_apart(args.kv_cache) > 0


def rows_apart(kv_cache: Tensor) -> int:
    """Return how many rows blocks `[num_blocks, block_size, 576]` are apart, 0 where a map over rows cannot hold them.

    Int32 counts the rows.
    """
    blocks, block_size, width = kv_cache.shape
    rows, rest = divmod(kv_cache.stride(0), width) if blocks > 1 else (block_size, 0)
    fits = not rest and blocks * rows < 1 << 31 and kv_cache.data_ptr() % 16 == 0
    return rows if fits else 0


def cached_rows(kv_cache: Tensor) -> Tensor:
    """Return all rows from the first to the last of a cache `[rows, 576]`, those between its blocks included."""
    blocks, block_size, width = kv_cache.shape
    return kv_cache.as_strided(((blocks - 1) * rows_apart(kv_cache) + block_size, width), (width, 1))


def rows_per_program(config: MLAConfig, tokens: int) -> int:
    """Return the rows of the query that one program works on: the fewest that waste no program."""
    sizes: tuple[int, ...] = (16, 32, 64) if config.scale >= LEAST_SCALE else (16, 32)
    if config.kv_cache_dtype == FP8:
        # Twice as many rows of widened codes do not fit into registers.
        sizes = (16,)
    return next(rows for rows in sizes if config.num_heads * tokens <= rows or rows == sizes[-1])


def groups_of_rows(config: MLAConfig, tokens: int) -> int:
    """Return how many programs share the rows of a request."""
    return -(-config.num_heads * tokens // rows_per_program(config, tokens))


def plan_key(config: MLAConfig) -> str:
    """Return what layers that share a schedule have in common."""
    return f"num_heads={config.num_heads} rows={rows_per_program(config, MOST_QUERY_TOKENS)}"


class Way(NamedTuple):
    """What one launch attends: requests of at least `shortest` and at most `longest` rows, split up to `split` rows."""

    split: int
    """Most rows of a request that is split over programs."""
    longest: int
    """Requests of more rows are not attended; 0: all are."""
    shortest: int = 0
    """Requests of fewer rows are not attended."""


def fewest(config: MLAConfig) -> int:
    """Return the most rows of a request that are absorbed and need no more programs than one row does."""
    least, longest = groups_of_rows(config, 1), longest_absorbed(config)
    return next(n for n in (8, 4, 2, 1) if n <= longest and groups_of_rows(config, n) == least)


def rows_of_parts(num_tokens: int, num_reqs: int, config: MLAConfig) -> int:
    """Return the most rows of a part when the requests of a step are split into parts, 0 for steps that are not split.

    Steps of as many rows as requests are decodes. Of twice as many or another multiple all have equally many, more
    likely than not, and keep them together. In others the numbers differ; where most have one row, programs for one
    row re-read a few keys in less time than programs for `fewest` rows take for all.
    """
    if num_tokens == num_reqs or num_tokens > MOST_QUERY_TOKENS * num_reqs:
        return 0
    if num_tokens % num_reqs == 0:
        return min(MOST_QUERY_TOKENS, next_power_of_two(max(1, num_tokens // num_reqs)))
    return 1 if 2 * num_tokens < 3 * num_reqs else fewest(config)


def mixes(args: MLAAttentionArgs, config: MLAConfig) -> bool:
    """Return whether requests of fewest rows go this way in a step that has others."""
    many = args.query.shape[0] > MOST_QUERY_TOKENS * args.seq_lens.shape[0]
    return many and runs(config, args.query.device) and rows_apart(args.kv_cache) > 0


def plan_shape(config: MLAConfig, num_tokens: int, num_reqs: int, device: torch.device) -> tuple[int, ...]:
    """Return the shape of a step's plan, which tells how the step is split; its size never falls with the batch."""
    room = _schedule_room(num_reqs, device) + planned_room(config, num_tokens, num_reqs, device)
    if num_tokens > MOST_QUERY_TOKENS * num_reqs:
        return MIXED, room // MIXED
    most = rows_of_parts(num_tokens, num_reqs, config)
    return (most, room // most, 1) if most else (1, room)


def _schedule_room(num_reqs: int, device: torch.device) -> int:
    """Return how many integers a plan has for all but the row tiles of prompts."""
    parts = most_parts(num_reqs, 1)
    records = _even(1 + 2 * parts + WAVES.value * devices.multiprocessors(device))
    return records * FIELDS.value + 3 * _even(parts + 1) + step_room(num_reqs)


def _even(count: int) -> int:
    return -(-count // 16) * 16


def most_parts(num_reqs: int, most: int) -> int:
    """Return how many parts of `most` rows the requests of a step may be split into, empty ones included."""
    return num_reqs * (MOST_QUERY_TOKENS // most + 1)


def parts_in(plan: Tensor, num_reqs: int) -> Parts:
    """Return the parts in the plan of a split step, as views."""
    parts = most_parts(num_reqs, plan.shape[0])
    end = plan.numel() - step_room(num_reqs)
    starts, lengths, owners = plan.view(-1)[end - 3 * _even(parts + 1) : end].chunk(3)
    return Parts(starts[: parts + 1], lengths[:parts], owners[:parts])


def _ctas(config: MLAConfig, tokens: int, device: torch.device) -> int:
    return max(1, devices.multiprocessors(device) // groups_of_rows(config, tokens))


def plan(query_start_loc: Tensor, seq_lens: Tensor, schedule: Tensor, config: MLAConfig, rows: int = 0) -> int:
    """Fill the schedule of a step on the device; where other kernels attend a whole step, there is none to fill.

    Args:
        rows: of the step, where they do not follow from its plan.

    Returns:
        Tokens of the step, where its plan has room for row tiles and so tells them; else 0.

    Raises:
        ShapeError: the schedule was made for another batch size.
    """
    num_reqs, shape, device = seq_lens.shape[0], tuple(schedule.shape), seq_lens.device
    room, tokens = _schedule_room(num_reqs, device), shape[0] if shape else 0
    num_tokens = planned_tokens(schedule.numel() - room, num_reqs, config, device)
    room += planned_room(config, max(num_tokens, 0), num_reqs, device)
    if tokens not in (1, 2, 4, MOST_QUERY_TOKENS, MIXED) or schedule.numel() != room:
        raise ShapeError(f"schedule has shape {shape}", f"{room} elements", "make it by Backend.plan_shape")
    # At least as many; kernels keep inside of those that there are.
    most = {1: 1 if len(shape) == 2 else MOST_QUERY_TOKENS, MIXED: 1 << 16}.get(tokens, MOST_QUERY_TOKENS)
    rows = rows or num_tokens or most * num_reqs
    query_start_loc, seq_lens = bounded_step(query_start_loc, seq_lens, rows, step_in(schedule, num_reqs))
    if len(shape) == 3:
        parts = parts_in(schedule, num_reqs)
        cut_requests(query_start_loc, seq_lens, parts, tokens)
        # Parts without rows have no item.
        lay_schedule(parts.starts, parts.lengths, schedule, Way(tokens, tokens, 1), config, parts.owners)
    else:
        way = Way(fewest(config), fewest(config)) if tokens == MIXED else Way(tokens, 0)
        lay_schedule(query_start_loc, seq_lens, schedule, way, config)
    return num_tokens


def lay_schedule(
    query_start_loc: Tensor, seq_lens: Tensor, schedule: Tensor, way: Way, config: MLAConfig,
    owners: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the schedule of one launch; `owners`: the request that each entry of `seq_lens` is a part of."""
    num_reqs, ctas = seq_lens.shape[0], _ctas(config, way.split, seq_lens.device)
    requests = min(1024, next_power_of_two(max(32, num_reqs)))
    mla_schedule_kernel[(1,)](
        query_start_loc, seq_lens, owners, schedule, num_reqs, ctas, _max_items(num_reqs, ctas),
        SPLIT_QUERY=way.split, TILE=TILE.value, REQUESTS=requests, PARTS=2048 // requests, LONGEST=way.longest,
        SHORTEST=way.shortest, LEAST=_least_tiles(rows_per_program(config, way.split)), num_warps=8,
    )  # fmt: skip


def _least_tiles(rows: int) -> int:
    """Return the tiles of the smallest part of a request, by the rows of a program: smaller ones cost more to merge."""
    return 4 if rows == 64 else 2


def _max_items(num_reqs: int, ctas: int) -> int:
    return num_reqs + WAVES.value * ctas


def attend_latents(absorbed: Tensor, args: MLAAttentionArgs, config: MLAConfig) -> Tensor:
    """Attend absorbed queries `[T, N, 576]` to cached rows; return `[T, N, 512]` and write the LSE.

    In steps of more than MOST_QUERY_TOKENS rows a request on average, requests of more rows than `fewest` are left to
    other kernels: their rows are written in neither result.
    """
    num_tokens, num_reqs = absorbed.shape[0], args.seq_lens.shape[0]
    most = rows_of_parts(num_tokens, num_reqs, config)
    if most:
        return _launch(absorbed, args, config, most, num_tokens // most + num_reqs, most_parts(num_reqs, most))
    tokens = 1 if num_tokens == num_reqs else fewest(config)
    return _launch(absorbed, args, config, tokens, num_reqs, num_reqs)


def planned(absorbed: Tensor, args: MLAAttentionArgs, config: MLAConfig) -> Tensor:
    """Return the plan of a step, made now where a builder made none."""
    device = absorbed.device
    shape = plan_shape(config, absorbed.shape[0], args.seq_lens.shape[0], device)
    found = next((given for given in args.plan if tuple(given.shape) == shape), None)
    if found is None:
        found = torch.empty(shape, dtype=torch.int32, device=device)
        plan(args.query_start_loc, args.seq_lens, found, config, absorbed.shape[0])
    return found


def _launch(
    absorbed: Tensor, args: MLAAttentionArgs, config: MLAConfig, tokens: int, busy: int, scheduled: int
) -> Tensor:
    """Attend the items of a step's schedule.

    Args:
        tokens: most rows of a request that is split.
        busy: how many requests, or parts of them, may have items.
        scheduled: how many requests or parts the schedule has room for.
    """
    num_tokens, num_reqs, device = absorbed.shape[0], args.seq_lens.shape[0], absorbed.device
    output = absorbed.new_empty((num_tokens, config.num_heads, LATENT.value), dtype=MODEL_DTYPES[config.dtype])
    schedule = planned(absorbed, args, config)
    rows, groups = rows_per_program(config, tokens), groups_of_rows(config, tokens)
    ctas = _ctas(config, tokens, device)
    # Only plans with row tiles have the number of rows, and so that of the parts that offsets out of range may have.
    slots = _max_items(busy if plans(config, device) else scheduled, ctas)
    partial, stats = partial_results(slots, rows, groups, device)
    common: dict[str, Any] = {
        "query_start_loc": args.query_start_loc,
        "seq_lens": args.seq_lens, "block_table": args.block_table, "schedule": schedule, "output": output,
        "lse": args.lse, "partial": partial, "stats": stats, "num_tokens": num_tokens,
        "num_blocks": args.kv_cache.shape[0], "table_stride": args.block_table.stride(0),
        "table_width": args.block_table.shape[1], "scale": config.scale * LOG2E.value, "HEADS": config.num_heads,
        "GROUPS": groups, "BLOCK_SIZE": config.block_size, "BLOCK_ROWS": rows_apart(args.kv_cache),
        "SPLIT_QUERY": tokens, "PARTIAL_ROWS": rows * groups, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    grid = (ctas * groups,)
    if config.kv_cache_dtype == FP8:
        boxes = _code_boxes(args.kv_cache, config)
        mla_decode_fp8_kernel[grid](cache=None, GATHER=False, **fp8_arguments(absorbed, args, rows), **boxes, **common)
    elif rows == 64:
        boxes = row_boxes(absorbed, args.kv_cache, rows, config)
        boxes |= result_boxes(output, partial)
        mla_decode_64_kernel[grid](**boxes, **common)
    else:
        boxes = row_boxes(absorbed, args.kv_cache, rows, config)
        mla_decode_kernel[grid](
            ROWS=rows, STAGES=_STAGES, maxnreg=_REGISTERS if rows == 16 else None, **boxes, **common
        )
    # No request is split into smaller parts than the schedule allows, nor into more of them than there are programs.
    tiles = -(-args.block_table.shape[1] * config.block_size // TILE.value)
    parts = max(1, min(ctas // num_reqs, tiles // _least_tiles(rows)))
    merge_parts(
        busy * rows * groups, parts, config.num_heads, rows * groups, devices.multiprocessors(device), True,
        schedule=schedule, partial=partial, stats=stats, query_start_loc=args.query_start_loc, output=output,
        lse=args.lse, max_items=_max_items(scheduled, ctas), num_tokens=num_tokens,
    )  # fmt: skip
    return output


def fp8_arguments(absorbed: Tensor, args: MLAAttentionArgs, rows: int) -> dict[str, Any]:
    """Return what the kernel of FP8 caches takes of queries, in the model dtype or as codes, and of scales."""
    native = absorbed.dtype == torch.float8_e4m3fn
    return {
        "query": absorbed.view(torch.uint8) if native else absorbed, "q_scale": args.q_scale if native else None,
        "k_scale": args.k_scale, "ROWS": rows, "STAGES": FP8_STAGES, "NATIVE": native,
    }  # fmt: skip


def partial_results(slots: int, rows: int, groups: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return room for the results of parts, and for their rows' maxima and sums, by the rows of a program."""
    dtype = torch.bfloat16 if rows == 64 else torch.float32
    partial = torch.empty((slots, rows * groups, LATENT.value), dtype=dtype, device=device)
    return partial, torch.empty((slots, rows * groups, 2), dtype=torch.float32, device=device)


def result_boxes(output: Tensor, partial: Tensor) -> dict[str, TensorDescriptor]:
    """Return tensor maps over results of 64 rows `[T * N, 512]` and over partial results `[slots * rows, 512]`."""
    width = LATENT.value
    return {
        "output_boxes": boxes_of(output.view(-1, width), 64, width // 2),
        "partial_boxes": boxes_of(partial.view(-1, width), 64, width // 2),
    }


def row_boxes(absorbed: Tensor, kv_cache: Tensor, rows: int, config: MLAConfig) -> dict[str, Any]:
    """Return tensor maps over queries `[T * N, 576]` and cached rows `[slots, 576]`.

    With 64 rows of the query the halves of a tile arrive apart.
    """
    width = LATENT.value + ROPE.value
    query, cached = absorbed.view(-1, width), cached_rows(kv_cache)
    whole, high = config.block_size >= TILE.value, min(TILE.value, config.block_size)
    return {
        "query_boxes": boxes_of(query, rows, LATENT.value),
        "query_rope_boxes": boxes_of(query, rows, ROPE.value),
        "boxes": boxes_of(cached, high, (LATENT.value // (2 if rows == 64 else 1)) if whole else 64),
        "rope_boxes": boxes_of(cached, high, ROPE.value),
    }


def _code_boxes(kv_cache: Tensor, config: MLAConfig) -> dict[str, Any]:
    """Return tensor maps over cached rows of codes, pairs of which are int16 `[slots, 288]`."""
    cached = cached_rows(kv_cache).view(torch.int16)
    whole, high = config.block_size >= TILE.value, min(TILE.value, config.block_size)
    return {
        "boxes": boxes_of(cached, high, PAIRS.value if whole else 64),
        "rope_boxes": boxes_of(cached, high, ROPE_PAIRS.value, 64),
    }
