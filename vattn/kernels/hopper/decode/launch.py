"""The fast decode path of TRITON_ATTN on Hopper: which calls it takes, its schedule, and the launches.

Shapes choose it: as many query rows as requests, the shape of a decode step, or a few times as many, that of a
speculative one. The op reads no length on the host, so counts do not prove that rows are dealt out evenly; the
schedule, made on the device, is right for any split of the rows. Where several rows of a request are attended at a
time, requests are split into chunks of so many, which are spread over CTAs; otherwise one CTA walks a request of
several rows, one row after the other (slow, but right). Short requests that fill the card go without a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vattn.cache.layout import key_value_views
from vattn.config import device as devices
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo, Sizes
from vattn.errors import ShapeError
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper.columns import columns_of
from vattn.kernels.hopper.decode.schedule import plan_kernel
from vattn.kernels.hopper.decode.triton_kernel import (
    FP16_QUERY_SHRINK,
    LOG2E,
    QUERY_ROWS,
    TILE_TOKENS,
    decode_kernel,
    reduce_kernel,
)
from vattn.kernels.hopper.schedule import FIELDS, WAVES
from vattn.kernels.triton.attention.launch import as_bytes, finish, rows_to_write
from vattn.kernels.triton.common.launching import launch as launch_again
from vattn.kernels.triton.common.output_constants import group_constants, groups_fit_heads, row_output
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import KV_FORMATS, OUTPUT_FORMATS

SPECULATIVE_COLUMNS = (64, 128)
BLOCK_SIZES = Sizes(step=16, low=16, high=2048)
MAX_GROUP_SIZE = 16
"""Query heads per KV head; where several rows of a request are attended at a time, that times the rows."""

FEW_REQUESTS = 4
"""Up to so many, programs of the reduction share a head."""

MOST_CHUNKS = 3
"""Of a request whose rows the decode kernel attends in a step of two kernels."""

LEAST_WHOLE_WAVE = 7 / 8
"""With a schedule, requests stay whole if they fill at least this share of the card."""

WHOLE_SHARE, MOST_WHOLE_TOKENS = 4 / 5, 1024
"""Without a schedule, requests stay whole where their block tables have room for at most so many tokens, and for
proportionally fewer below this share of the card: splitting saves less time than a schedule and a reduction take."""

FULL_WAVES, LEAST_WAVE_TOKENS, LARGEST_WAVE_GROUP = 3 / 2, 256, 4
"""Over an FP8 cache, with up to so many query heads per KV head, they stay whole in several waves of two CTAs a
multiprocessor, too: in so many waves or more, with room for so many tokens or more."""

HOPPER_MULTIPROCESSORS, MANY_WAVES = 132, 3.5
"""For which waves were timed; and of those so many that what the last one leaves idle is little."""

QUANTISED_CACHES = ("fp8_e4m3",)

DTYPES = {"float16": tl.float16, "bfloat16": tl.bfloat16}
SCALE_KINDS = {"none": 0, "tensor": 1, "head": 2}


@dataclass(frozen=True)
class Tuning:
    """Tile config of the main kernel.

    Attributes:
        heads: KV heads of one CTA. Warps are heads times slots.
        stages: of the loop. In the Triton kernel one less are buffers in shared memory, in the Gluon kernel all.
        ctas: CTAs per multiprocessor that the schedule counts on.
        slots: 0 for the Triton kernel; for the Gluon kernel, the tiles that a CTA works on side by side (1, 2 or 4).
        overlap: whether the kernel is launched while the one before it may still run; "end": it reads nothing that this
            one writes, and waits for it at its own end.
        max_registers: limit per thread, `None` for the compiler's choice.
        whole: of the Gluon kernel and one row a request: a CTA for each request and its heads, without a schedule or a
            reduction.
    """

    heads: int
    stages: int
    ctas: float = 2
    slots: int = 0
    overlap: bool | Literal["end"] = False
    max_registers: int | None = None
    whole: bool = False


@lru_cache(maxsize=4096)
def choose_tuning(config: AttentionConfig, num_reqs: int, tokens: int = 1) -> Tuning:
    """Return the tuning of a layer for this many requests: what was best on an H200.

    The Gluon kernel alone attends several rows of a request at a time, and does better with large groups. Narrow rows
    need more stages to keep as many bytes under way, wide ones leave room for fewer CTAs. Overlap pays where the CTAs
    of one kernel fill the shared memory; otherwise those of the next pile up on some multiprocessors. Over an FP8 cache
    two CTAs of the Gluon kernel are faster where whole requests fill their waves, four of the Triton kernel elsewhere.

    Args:
        tokens: rows of a request that are attended at a time.
    """
    heads = heads_per_cta(config.num_kv_heads, 2)
    columns = columns_of(config.head_size)
    row_bytes = columns * KV_FORMATS[config.kv_cache_dtype].element_size
    plain = config.kv_cache_dtype not in QUANTISED_CACHES
    if columns == 256 and not plain:
        return _wide_tuning(config, tokens)
    large = num_reqs >= 16 and heads == 2 and row_bytes <= 256
    if tokens > 1 or (large and (plain or config.group_size > 4)):
        stages = 512 // row_bytes if plain else 5
        if not plain and heads_per_cta(config.num_kv_heads, 4) == 4:
            return Tuning(4, stages, ctas=1, slots=2, overlap=True)
        # With fewer registers the reduction's programs run while this kernel does, and the next step's after them.
        registers = 128 if plain and tokens == 1 else None
        return Tuning(heads, stages, ctas=1, slots=4, overlap=True, max_registers=registers)
    if large and columns == 128 and _fills_waves(num_reqs, config.num_kv_heads):
        return Tuning(heads, 4, ctas=2, slots=2, max_registers=128)
    ctas = (4 if row_bytes <= 256 else 2) * 2 // heads
    return Tuning(heads, 5 if row_bytes < 128 else 3, ctas, overlap=heads == 2 and row_bytes == 256)


def _wide_tuning(config: AttentionConfig, tokens: int) -> Tuning:
    """Return the tuning of FP8 heads of 256: a stage of two heads and two slots takes 32 KiB of shared memory.

    The Triton kernel's two heads leave room for three CTAs, which took 1.8 times as long as two of the Gluon kernel's.
    """
    heads = heads_per_cta(config.num_kv_heads, 2)
    if config.group_size * tokens > QUERY_ROWS.value // 2:
        return Tuning(heads, 5, ctas=1, slots=4 // heads, overlap=True)
    return Tuning(heads, 3, ctas=2, slots=2, max_registers=128) if heads == 2 else Tuning(1, 3, ctas=4)


def _fills_waves(num_reqs: int, num_kv_heads: int) -> bool:
    """Return whether requests that stay whole fill a wave of two CTAs a multiprocessor of an H200, or many."""
    waves = num_reqs * num_kv_heads / 2 / (2 * HOPPER_MULTIPROCESSORS)
    return LEAST_WHOLE_WAVE <= waves <= 1 or waves >= MANY_WAVES


def whole_tuning(args: AttentionArgs, config: AttentionConfig) -> Tuning | None:
    """Return the tuning of a step that `accepts` took if every request is to have CTAs of its own, else `None`.

    One wave of CTAs that fills the card, or is short, needs no splits: no schedule before its keys, no kernel after.
    How evenly it does is not known here; block tables without room for long requests bound that. Over an FP8 cache a
    wave has two CTAs a multiprocessor where requests are more than one of them takes.
    """
    num_reqs, room = args.seq_lens.shape[0], args.block_table.shape[1] * config.block_size
    columns, plain = columns_of(config.head_size), config.kv_cache_dtype not in QUANTISED_CACHES
    if config.num_kv_heads % 2 or columns not in SPECULATIVE_COLUMNS or args.query.shape[0] != num_reqs:
        return None
    waves = num_reqs * config.num_kv_heads / 2 / devices.multiprocessors(args.query.device)
    two = waves > 1 and not plain and columns == 128 and config.group_size <= LARGEST_WAVE_GROUP
    waves = waves / 2 if two else waves
    if waves > 1 and not (two and waves >= FULL_WAVES and room >= LEAST_WAVE_TOKENS):
        return None
    if room > MOST_WHOLE_TOKENS * min(1, waves / WHOLE_SHARE):
        return None
    stages = 512 // (columns * KV_FORMATS[config.kv_cache_dtype].element_size) if plain else 4
    ctas, slots = (2, 2) if two else (1, 4)
    return Tuning(2, stages, ctas, slots=slots, overlap=True, max_registers=128, whole=True)


def most_ctas(config: AttentionConfig, device: torch.device) -> int:
    """Return an upper bound of the items that run at a time, whatever the batch; schedules are sized by it."""
    return 8 * devices.multiprocessors(device) // config.num_kv_heads + devices.multiprocessors(device)


def heads_per_cta(num_kv_heads: int, most: int) -> int:
    """Return the power of two up to `most` that wastes the fewest heads in its last CTA."""
    sizes = [size for size in (8, 4, 2, 1) if size <= most]
    return min(sizes, key=lambda size: (-num_kv_heads % size, -size))


def refusals(config: AttentionConfig, device: DeviceInfo) -> list[str]:
    """Return why the fast path cannot run a layer, empty if it can. The general kernel runs what this one refuses."""
    found = hopper.layer_refusals(config, device, hopper.HEAD_SIZES, BLOCK_SIZES, {"query_scale_per_head"})
    if config.kv_cache_dtype not in (config.dtype, *QUANTISED_CACHES):
        found.append(f"kv_cache_dtype {config.kv_cache_dtype} (runs the model dtype and {', '.join(QUANTISED_CACHES)})")
    if config.group_size > MAX_GROUP_SIZE:
        found.append(f"{config.group_size} query heads per KV head (runs up to {MAX_GROUP_SIZE})")
    return found


def rows_at_a_time(config: AttentionConfig, num_tokens: int, num_reqs: int) -> int:
    """Return how many rows of a request a step of these shapes attends at a time, 0 if the decode kernel takes none."""
    tokens = num_tokens // max(num_reqs, 1)
    if tokens * num_reqs != num_tokens:
        return 0
    most = MAX_GROUP_SIZE // config.group_size if tokens > 1 and attends_drafts(config) else 1
    return tokens if tokens <= max(most, 1) else 0


def attends_drafts(config: AttentionConfig) -> bool:
    """Return whether the kernel attends several rows of a request at a time."""
    return columns_of(config.head_size) in SPECULATIVE_COLUMNS


def accepts(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Return whether the fast path takes this call: the layer is accepted and so are the rows per request."""
    num_reqs = args.seq_lens.shape[0]
    tokens = rows_at_a_time(config, args.query.shape[0], num_reqs)
    # Queries of several rows of a request have not been rounded in their load on a GPU yet.
    has_run = config.query_load == "plain" or tokens == 1
    return tokens > 0 and has_run and runs(config, args.query.device) and has_boxes(args)


def has_boxes(args: AttentionArgs) -> bool:
    """Return whether tensor maps can hold the keys and values: there are some, and each row starts at 16 bytes."""
    assert args.value_cache is not None
    for cache in (args.key_cache, args.value_cache):
        start, (first, second, third, _) = cache.data_ptr(), cache.stride()
        if (start | cache.itemsize * (first | second | third)) % 16:
            first, second, third, _ = map_dimensions(cache)[1]
        if (start | cache.itemsize * (first | second | third)) % 16 or not cache.numel():
            return False
    return args.block_table.shape[1] > 0


def map_dimensions(cache: Tensor) -> tuple[list[int], list[int]]:
    """Return sizes and strides of a tensor map over keys or values `[blocks, block_size, K, D]`: heads before tokens.

    The stride of a dimension of size 1 may be anything, which maps do not take.
    """
    blocks, tokens, heads, width = cache.shape
    by_block, by_token, by_head, by_column = cache.stride()
    sizes, strides = [blocks, heads, tokens, width], [by_block, by_head, by_token, by_column]
    if 1 in sizes:
        strides = [width if size == 1 else step for size, step in zip(sizes, strides, strict=True)]
    return sizes, strides


runs = hopper.runs_where(refusals)
"""Whether nothing is refused: of a config and a device."""


@dataclass(frozen=True)
class Sizing:
    """Sizes of the schedule and of the scratch for partial results.

    Attributes:
        ctas: items that run at a time.
        waves: waves that one item per request takes.
        max_items: rows of items in the schedule; also the most partial results. Never falls with the batch.
    """

    ctas: int
    waves: int
    max_items: int


def chunks_of(num_reqs: int, tokens: int, num_tokens: int = 0, longest: int = 0) -> int:
    """Return the most chunks of `tokens` rows that so many requests have between them, by default as many on average.

    With one row at a time requests stay whole, unless there is a `longest` whose rows are cut.
    """
    if longest:
        return num_reqs * -(-longest // tokens)
    return num_reqs if tokens == 1 else (num_tokens or tokens * num_reqs) // tokens + num_reqs


def sizing(
    config: AttentionConfig,
    num_reqs: int,
    tuning: Tuning,
    device: torch.device,
    tokens: int = 1,
    num_tokens: int = 0,
    longest: int = 0,
) -> Sizing:
    """Return the sizes for a batch of this many requests, of `tokens` rows on average unless there are `num_tokens`.

    Requests of more than `longest` rows, unless it is 0, are left out.
    """
    groups = -(-config.num_kv_heads // tuning.heads)
    most = most_ctas(config, device)
    ctas = max(1, min(most, int(devices.multiprocessors(device) * tuning.ctas) // groups))
    waves = -(-(num_tokens // tokens or num_reqs) // ctas)
    return Sizing(ctas, waves, chunks_of(num_reqs, tokens, num_tokens, longest) + WAVES.value * most)


def plan_shape(config: AttentionConfig, num_tokens: int, num_reqs: int, device: torch.device) -> tuple[int, int]:
    """Return the shape of the int32 schedule of a step, of whatever kind; its size never falls with tokens or requests.

    It tells how many query rows the step has. A prefill's schedule fits in as well, and in steps of both kinds of
    requests one after the other.
    """
    return _plan_rows(config, num_reqs, device) + 4 * max(num_tokens - num_reqs, 0), FIELDS.value


def _plan_rows(config: AttentionConfig, num_reqs: int, device: torch.device) -> int:
    return rows_of_short_requests(config, MOST_CHUNKS * num_reqs, device) + 3 * num_reqs + 8


def rows_of_short_requests(config: AttentionConfig, num_chunks: int, device: torch.device) -> int:
    """Return how many rows a schedule of requests of few rows takes, that have so many chunks between them at most."""
    return 1 + 2 * num_chunks + WAVES.value * most_ctas(config, device)


def tokens_of_plan(schedule: Tensor, config: AttentionConfig, num_reqs: int) -> int:
    """Return the query rows of the step that a schedule was allocated for.

    Raises:
        ShapeError: it is of no such step.
    """
    rows = schedule.shape[0] - _plan_rows(config, num_reqs, schedule.device) if schedule.ndim == 2 else -1
    if rows < 0 or rows % 4 or schedule.shape[1] != FIELDS.value:
        expected = plan_shape(config, num_reqs, num_reqs, schedule.device)
        raise ShapeError(
            f"schedule has shape {tuple(schedule.shape)}",
            f"{expected}, and 4 rows more for every row of the query beyond {num_reqs}",
            "make it by Backend.plan_shape",
        )
    return num_reqs + rows // 4


def plan(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    schedule: Tensor,
    config: AttentionConfig,
    tuning: Tuning | None = None,
    tokens: int = 1,
    longest: int = 0,
    num_tokens: int = 0,
    step_tokens: int = 0,
) -> None:
    """Fill the schedule of a decode step on the device.

    Args:
        tokens: rows of a request that are attended at a time.
        longest: leave requests of more rows, and padding, to another kernel; 0: none.
        num_tokens: rows of all requests, if they are not `tokens` each on average.
        step_tokens: rows of the step, if it has others.
    """
    num_reqs = seq_lens.shape[0]
    tuning = tuning or choose_tuning(config, num_reqs, tokens)
    sizes = sizing(config, num_reqs, tuning, seq_lens.device, tokens, num_tokens, longest)
    chunks, ordered = None, torch.empty_like(query_start_loc)
    if tokens > 1 or longest:
        most = chunks_of(num_reqs, tokens, num_tokens, longest)
        chunks = torch.empty((most, 4), dtype=torch.int32, device=seq_lens.device)
    step_tokens = step_tokens or num_tokens or tokens * num_reqs
    arguments = {
        "query_start_loc": query_start_loc, "ordered": ordered, "seq_lens": seq_lens, "schedule": schedule,
        "chunks": chunks, "num_tokens": step_tokens, "num_reqs": num_reqs, "ctas": sizes.ctas,
        "waves_of_requests": sizes.waves, "max_items": sizes.max_items,
    }  # fmt: skip
    constants = {
        "TOKENS": tokens, "LONGEST": longest, "WINDOW": config.sliding_window or 0, "UNIT": max(1, tuning.slots),
        "REQUESTS": min(1024, triton.next_power_of_2(max(32, num_reqs))), "num_warps": 8,
    }  # fmt: skip
    launch_again(plan_kernel, (1,), arguments, constants)


def decode(args: AttentionArgs, config: AttentionConfig, tuning: Tuning | None = None, tokens: int = 0) -> None:
    """Run `vattn::attention` for a decode step that `accepts` took.

    Args:
        tuning, tokens: instead of what shapes would choose, and of as many rows of a request at a time.
    """
    num_tokens, num_reqs, device = args.query.shape[0], args.seq_lens.shape[0], args.query.device
    tokens = tokens or rows_at_a_time(config, num_tokens, num_reqs)
    tuning = tuning or whole_tuning(args, config)
    tuning = tuning or choose_tuning(config, num_reqs, tokens)
    sizes = sizing(config, num_reqs, tuning, device, tokens, num_tokens)
    schedule = None
    if not tuning.whole:
        schedule, is_new = schedule_of(args, config)
        if is_new:
            plan(args.query_start_loc, args.seq_lens, schedule, config, tuning, tokens, num_tokens=num_tokens)
    output = rows_to_write(args, config, finished=computes_scales(config, num_reqs, tuning, tokens))
    launch(args, config, schedule, output, tuning, sizes, tokens)
    if output is not args.output:
        finish(args, config, output)


def schedule_of(args: AttentionArgs, config: AttentionConfig) -> tuple[Tensor, bool]:
    """Return the schedule that a step was given, or room for one, and whether that is still to be filled."""
    shape = plan_shape(config, args.query.shape[0], args.seq_lens.shape[0], args.query.device)
    for schedule in args.plan:
        if schedule.shape == shape:
            return schedule, False
    return torch.empty(shape, dtype=torch.int32, device=args.query.device), True


def choose_reduction(config: AttentionConfig, few: bool) -> tuple[int, int, int]:
    """Return the programs that share a head's columns, partial results that one takes at a time, and its warps.

    Few requests have many splits each. A program that computes scales has whole groups; more warps would wait for each
    other and leave no room for it beside the main kernel.
    """
    if not few:
        return 1, 16, 1
    group = OUTPUT_FORMATS[config.output_format].group_size
    parts = min(4, config.head_size // group) if group else 4
    return parts, 128 if parts == 4 else 64, 4


def computes_scales(config: AttentionConfig, num_reqs: int, tuning: Tuning, tokens: int) -> bool:
    """Return whether the kernels compute the scales of the output format themselves, or it has none."""
    if not OUTPUT_FORMATS[config.output_format].group_size:
        return True
    sixteen_rows = tuning.slots > 0 and (tokens > 1 or config.group_size > QUERY_ROWS.value)
    # Programs share the heads of few requests. A group of a whole head is made afterwards where they start late.
    wide = (
        tuning.overlap is True
        and num_reqs <= FEW_REQUESTS
        and 2 * OUTPUT_FORMATS[config.output_format].group_size > config.head_size
    )
    whole = columns_of(config.head_size) == config.head_size
    return whole and groups_fit_heads(config) and not sixteen_rows and not wide


def launch(
    args: AttentionArgs,
    config: AttentionConfig,
    schedule: Tensor | None,
    output: Tensor,
    tuning: Tuning,
    sizes: Sizing,
    tokens: int,
) -> None:
    """Launch the main kernel and the reduction; `output` is the final one, or another in the model dtype.

    Args:
        schedule: unused where requests stay whole.
        tokens: rows of a request that are attended at a time.
    """
    written = config if output is args.output else config.with_plain_output()
    common = common_arguments(args, written, output)
    groups, columns = -(-config.num_kv_heads // tuning.heads), columns_of(config.head_size)
    kernel, warps, grid = decode_kernel, tuning.heads, sizes.ctas * groups
    partial: dict[str, Tensor | None] = {"schedule": None, "partial_output": None, "partial_stats": None}
    lengths: dict[str, Tensor | None] = {}
    if tuning.slots:
        from vattn.kernels.hopper.decode.gluon_kernel import decode_kernel as kernel

        warps *= tuning.slots
        lengths = {"query_start_loc": None, "seq_lens": None}
    if tuning.whole:
        lengths = {"query_start_loc": args.query_start_loc, "seq_lens": args.seq_lens}
        grid = args.seq_lens.shape[0] * groups
    else:
        partial = {"schedule": schedule, **scratch(args, config, sizes.max_items * tokens)}
    key, value = key_value_views(args.key_cache, args.value_cache, config)
    boxes = {"key_boxes": _boxes(key, tuning, columns), "value_boxes": _boxes(value, tuning, columns)}
    boxes["num_blocks"] = key.shape[0]
    options = {"num_warps": warps, "launch_pdl": bool(tuning.overlap), "maxnreg": tuning.max_registers}
    arguments, constants = dict[str, Any](), dict[str, Any]()
    for name, value in common.items():
        (constants if name.isupper() else arguments)[name] = value
    launch_again(
        kernel, (grid,), boxes | partial | lengths | arguments | step_arguments(args, config),
        options | constants | decode_constants(config, tuning, tokens),
    )  # fmt: skip
    if not tuning.whole:
        most = 6 if tuning.max_registers else 8
        launch_reduction(args, written, partial, common, sizes, most, tokens, tuning.overlap is True)


def launch_reduction(
    args: AttentionArgs,
    config: AttentionConfig,
    partial: dict[str, Any],
    common: dict[str, Any],
    sizes: Sizing,
    most: int,
    tokens: int = 1,
    overlap: bool = False,
    pieces: int = 0,
    few: bool | None = None,
) -> None:
    """Launch the reduction of what the main kernel left in `partial`, in programs of `tokens` rows.

    Args:
        config: with the output format that the reduction writes.
        most: programs of a multiprocessor: as many as fit while the main kernel runs.
        overlap: whether the main kernel may start before the previous one has ended.
        pieces: of `tokens` rows that may be split, by default the requests.
        few: whether these are few, with many partial results each; by their number if it is not given.
    """
    pieces = pieces or args.seq_lens.shape[0]
    parts, splits, warps = choose_reduction(config, pieces <= FEW_REQUESTS if few is None else few)
    most *= devices.multiprocessors(args.query.device)
    arguments, constants = dict[str, Any](), dict[str, Any]()
    for name, value in common.items():
        (constants if name.isupper() else arguments)[name] = value
    sizes_of = {"max_items": sizes.max_items, "num_tokens": args.query.shape[0]}
    own = {"TOKENS": tokens, "COLUMNS": columns_of(config.head_size) // parts, "SPLITS": splits, "OVERLAP": overlap}
    launch_again(
        reduce_kernel, (min(pieces * tokens * config.num_heads * parts, most),), sizes_of | partial | arguments,
        own | constants | {"num_warps": warps, "launch_pdl": True},
    )  # fmt: skip


def scratch(args: AttentionArgs, config: AttentionConfig, slots: int) -> dict[str, Tensor]:
    """Return fp32 room for partial results `[slots, H, D]` and their maxima and sums `[slots, H, 2]`."""
    values, stats = slots * config.num_heads * config.head_size, slots * config.num_heads * 2
    need, workspace = 4 * (values + stats), args.workspace
    if workspace is None or workspace.numel() * workspace.itemsize < need or workspace.data_ptr() % 16:
        workspace = torch.empty(need, dtype=torch.uint8, device=args.query.device)
    room = workspace.view(-1).view(torch.uint8)[:need].view(torch.float32)
    return {"partial_output": room[:values], "partial_stats": room[values:]}


def common_arguments(args: AttentionArgs, config: AttentionConfig, output: Tensor) -> dict[str, Any]:
    """Return what the main kernel and the reduction both take."""
    groups, scales = group_constants(config), args.output_block_scale
    strides = scales.stride() if groups[0] and scales is not None else (0, 0)
    return {
        "sinks": args.sinks, "v_scale": args.v_scale, "output_scale": args.output_scale,
        "output": as_bytes(output), "lse": args.lse,
        "block_scale": as_bytes(scales) if groups[0] and scales is not None else None, "GROUPS": groups,
        "output_stride": output.stride(0), "scale_stride": strides[0], "group_stride": strides[1],
        "NUM_HEADS": config.num_heads, "NUM_KV_HEADS": config.num_kv_heads,
        "HEAD_SIZE": config.head_size, "KV_SCALE": SCALE_KINDS[config.kv_scale],
        "MODEL": DTYPES[config.dtype], "OUTPUT": row_output(config),
    }  # fmt: skip


def step_arguments(args: AttentionArgs, config: AttentionConfig) -> dict[str, Any]:
    """Return what a main kernel takes of a query, the block tables and scales, and what it multiplies scores by."""
    shrink = FP16_QUERY_SHRINK.value if config.kv_cache_dtype in QUANTISED_CACHES else 1.0
    score_scale, soft_cap = score_scales(config, shrink)
    return {
        "query": args.query, "query_stride": args.query.stride(0), "query_head_stride": args.query.stride(1),
        "block_table": args.block_table, "table_stride": args.block_table.stride(0),
        "table_width": args.block_table.shape[1], "q_scale": args.q_scale, "k_scale": args.k_scale,
        "score_scale": score_scale, "soft_cap": soft_cap,
    }  # fmt: skip


def score_scales(config: AttentionConfig, shrink: float = 1.0) -> tuple[float, float]:
    """Return what products of a shrunk query and a key are multiplied by, and the soft cap, in units of log2 e."""
    scale, cap = config.scale * LOG2E.value, config.logits_soft_cap
    return (scale / shrink, 1.0) if cap is None else (2.0 * scale / cap / shrink, cap * LOG2E.value)


def _boxes(cache: Tensor, tuning: Tuning, columns: int) -> Any:
    """Return a tensor map over keys or values `[blocks, block_size, K, D]`; a box is a tile of the heads of one CTA.

    A box has `columns` of a head, zeros where the head has fewer.
    An FP8 cache is seen as int16 pairs of columns.
    """
    if cache.itemsize == 1:
        cache, columns = cache.view(torch.int16), columns // 2
    signature = (cache.dtype, cache.data_ptr() % 16, cache.shape, cache.stride(), tuning.heads, tuning.slots > 0)
    boxes: Any
    if signature in _maps:
        kind, fields = _maps[signature]
        boxes = object.__new__(kind)
        vars(boxes).update(fields, base=cache)
        return boxes
    shape, strides = map_dimensions(cache)
    box = [1, tuning.heads, TILE_TOKENS.value, columns]
    if not tuning.slots:
        boxes = TensorDescriptor(cache, shape, strides, box)
    else:
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=4)
        boxes = GluonDescriptor(cache, shape, strides, box, layout)
    if len(_maps) == MOST_MAPS:
        _maps.clear()
    _maps[signature] = type(boxes), {**vars(boxes), "base": None}
    return boxes


MOST_MAPS = 256
"""Tensor maps that are kept: one for each shape of a cache, and each way to cut it."""

_maps: dict[tuple[Any, ...], tuple[type, dict[str, Any]]] = {}
"""Tensor maps that were checked, without their memory: the checks take as long as a launch."""


def decode_constants(config: AttentionConfig, tuning: Tuning, tokens: int = 1) -> dict[str, Any]:
    """Return what the main kernel is specialised for, the reduction's constants aside."""
    quantised = config.kv_cache_dtype in QUANTISED_CACHES
    constants = {
        "HEADS": tuning.heads, "BLOCK_SIZE": config.block_size, "WINDOW": config.sliding_window or 0,
        "FP8": quantised, "QUERY_SCALE": SCALE_KINDS[config.query_scale],
        "QUERY_LOAD": config.query_load,
        "SOFT_CAP": config.logits_soft_cap is not None,
        "DTYPE": tl.float16 if quantised else DTYPES[config.dtype], "STAGES": tuning.stages,
        "OVERLAP": tuning.overlap,
    }  # fmt: skip
    return constants | ({"SLOTS": tuning.slots, "TOKENS": tokens} if tuning.slots else {"ASSEMBLY": True})
