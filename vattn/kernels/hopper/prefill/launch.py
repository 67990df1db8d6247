"""Host side of the Hopper prefill kernel: which layers and calls it takes, its schedule and its launch.

An FP8 query on an FP8 cache is multiplied in FP8, the weights included. They are rounded to e4m3, half a unit of which
is 2**-4 of a weight, so a row is off by at most that much of its size and by 2 % as a rule. Scores are summed 32
products at a time, and each time bits more than 13 below the largest exponent are truncated:
`tests/kernels/fp8_products.py` does the same bit by bit. With a 16-bit query an FP8 cache is widened to fp16 without
loss.

Shapes choose it: many query rows per request on average. The op reads no length on the host; any split of the rows over
the requests is computed right, a request of few rows merely wastes most of its tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vattn.cache.layout import key_value_views
from vattn.config import device as devices
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo, Sizes, not_allowed
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper import fp4_rows
from vattn.kernels.hopper.columns import padded_columns
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.prefill.kernel import prefill_kernel
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.schedule import RECORD_WORDS, max_row_tiles, prefill_plan_kernel
from vattn.kernels.hopper.prefill.shape import Shape
from vattn.kernels.hopper.prefill.softmax import WIDENED_SHRINK
from vattn.kernels.triton.attention.launch import as_bytes, rows_to_write
from vattn.kernels.triton.common.launching import launch as launch_again
from vattn.kernels.triton.common.output_constants import group_constants, groups_fit_heads, row_output
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import OUTPUT_FORMATS

BLOCK_SIZES = Sizes(16, 16, 2048)
MIN_ROWS_PER_REQUEST = 64
"""On average; below, row tiles of 128 are mostly empty."""

LATE_BELOW = 8
"""Row tiles of all heads per multiprocessor up to which the order in which they are taken counts."""

NARROW_WINDOW = 128
"""Tokens of a window up to which row tiles are made small."""

REGISTERS = 65536
"""Of a multiprocessor."""

LONG_REQUEST = 2048
"""Query rows per request, on average, from which larger tiles pay."""

MOST_SOFT_CAP = 1e6
"""Largest cap of scores: times the maximum of a row that sees no key, twice a cap is to stay a number in fp32."""

LEAST_TOGETHER, MOST_TOGETHER = 4096, 8192
"""Query rows per request, on average, of prompts whose row tiles of eight KV heads run side by side: enough that heads
one after the other leave multiprocessors idle at their ends, and few enough that L2 holds the keys of all."""


@dataclass(frozen=True)
class TileConfig:
    """How query rows are grouped into row tiles.

    Attributes:
        groups: consumer warpgroups of a CTA, 64 rows each.
        pack: 1, or the query heads of a KV head, which are rows of one tile then. Rounded up to a divisor of 64 some
            rows of each token stay unused; else a few of each warpgroup, and queries take longer to load.
        converters: warps that convert an FP8 cache, 0 for as many as were best.
        keys: tokens of a key tile, 0 for as many as `key_tile` says.
        residents: CTAs that share a multiprocessor: more than one for one warpgroup and heads of 64 alone; where a
            16-bit query meets an FP8 cache two, of two converters.
        ahead: whether a CTA takes its next row tile at the start of the one before even where there are few: these are
            about equally long.
        together: KV heads, as far as their number divides, whose row tiles run side by side.
        halves: whether values are multiplied by halves of a tile, the first beside the weights of the second.
    """

    groups: int = 2
    pack: int = 1
    converters: int = 0
    keys: int = 0
    residents: int = 1
    ahead: bool = False
    together: int = 2
    halves: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a row tile."""
        return GROUP_ROWS.value // self.pack * self.groups


def columns_of(config: AttentionConfig) -> int:
    """Return how many columns the kernel multiplies for a head."""
    return padded_columns(config.head_size)


def packs(config: AttentionConfig) -> int:
    """Return how many heads of a token may be rows of one tile: a whole group if it fills tiles evenly, else 1."""
    group = config.group_size
    return group if group <= 16 and GROUP_ROWS.value % group == 0 else 1


def padded_pack(config: AttentionConfig) -> int:
    """Return how many rows of a tile the heads of a group take if some may stay unused; 1 for too many heads."""
    return triton.next_power_of_2(config.group_size) if config.group_size <= GROUP_ROWS.value else 1


def full_pack(config: AttentionConfig) -> int:
    """Return how many rows of a tile the heads of a group take if as many tokens as possible are to fit in; else 1."""
    group, padded = config.group_size, padded_pack(config)
    return group if padded > 1 and GROUP_ROWS.value // group > GROUP_ROWS.value // padded else padded


def choose_tiles(config: AttentionConfig, num_tokens: int, num_reqs: int, processors: int) -> TileConfig:
    """Return the row tiles of a prefill step, by a request's rows on average and by the multiprocessors of the GPU."""
    if sees_few_keys(config):
        # Several short row tiles cover each other's loads and results.
        converters = 2 if products_of(config) == "widened" else 0
        residents = 3 if products_of(config) == "plain" else 2
        return TileConfig(1, packs(config), converters, keys=64, residents=residents)
    groups = warpgroups(config, num_tokens // num_reqs)
    # Heads side by side take as long for prompts and a share of the time for requests of few rows among them.
    side_by_side = columns_of(config) == 256 or (groups == 2 and products_of(config) == "plain")
    together = heads_together(config, num_tokens // num_reqs)
    # Prompts of 8k rows take 0.7 % longer by halves, chunks of 512 rows 2 % and prompts of 1k rows 5 % less.
    halves = columns_of(config) == 128 and products_of(config) == "native" and num_tokens // num_reqs < LONG_REQUEST
    tiles = TileConfig(groups, packs(config) if side_by_side else 1, together=together, halves=halves)
    timed = columns_of(config) == 128 and products_of(config) != "widened"
    heads = config.num_heads // min(tiles.pack, config.group_size)
    if timed and (num_tokens // tiles.tokens + num_reqs - 1) * heads <= processors:
        # The longest of few row tiles are the step: half as many rows take less time.
        return replace(tiles, groups=1, halves=False)
    return tiles


def sees_few_keys(config: AttentionConfig) -> bool:
    """Return whether row tiles see no more than about two tiles of keys, and heads side by side fill them."""
    narrow = config.sliding_window is not None and config.sliding_window <= NARROW_WINDOW
    return narrow and columns_of(config) == 64 and packs(config) > 1


def heads_together(config: AttentionConfig, rows_per_request: int) -> int:
    """Return how many KV heads of prompts run side by side: two, or eight where that was faster on an H200.

    Not timed: heads of 128 with an FP8 cache that is widened.
    """
    timed = columns_of(config) == 256 or (columns_of(config) == 128 and products_of(config) != "widened")
    return 8 if timed and config.sliding_window is None and LEAST_TOGETHER <= rows_per_request <= MOST_TOGETHER else 2


def items_of(config: AttentionConfig, num_tokens: int, num_reqs: int, tiles: TileConfig) -> int:
    """Return the most row tiles of all heads that a step of these shapes can have."""
    heads = config.num_heads // min(tiles.pack, config.group_size)
    return max_row_tiles(num_tokens, num_reqs, tiles.tokens) * heads


def refusals(config: AttentionConfig, device: DeviceInfo) -> list[str]:
    """Return why the kernel cannot run a layer, empty if it can. The general kernel runs what this one refuses."""
    found = hopper.layer_refusals(config, device, hopper.HEAD_SIZES, BLOCK_SIZES, {"query_scale_per_head"})
    if config.kv_cache_dtype not in (config.dtype, "fp8_e4m3"):
        found.append(f"kv_cache_dtype {config.kv_cache_dtype} (runs the model dtype and fp8_e4m3)")
    is_fp8 = config.kv_cache_dtype == "fp8_e4m3"
    if config.query_format not in ("none", "fp8_e4m3" if is_fp8 else "none"):
        found.append(f"query_format {config.query_format} (runs none, and fp8_e4m3 on an fp8_e4m3 cache)")
    found += not_allowed(config, {"query_load": ("plain",)})
    if config.scale <= 0:
        found.append(f"scale {config.scale} (runs scales above 0)")
    if (config.logits_soft_cap or 0.0) > MOST_SOFT_CAP:
        found.append(f"logits_soft_cap {config.logits_soft_cap} (runs up to {MOST_SOFT_CAP:g})")
    return found


runs = hopper.runs_where(refusals)
"""Whether nothing is refused: of a config and a device."""


def is_prefill(num_tokens: int, num_reqs: int) -> bool:
    """Return whether a step of these shapes has many rows per request on average."""
    return num_tokens >= MIN_ROWS_PER_REQUEST * num_reqs > 0


def accepts(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Return whether the fast path takes this call: a layer that `runs`, and a step that is a prefill."""
    shapes = args.query.shape[0], args.seq_lens.shape[0]
    return is_prefill(*shapes) and runs(config, args.query.device) and decode_fast.has_boxes(args)


def plan(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    schedule: Tensor,
    num_tokens: int,
    config: AttentionConfig,
    tiles: TileConfig | None = None,
    least_rows: int = 1,
) -> None:
    """Fill the schedule of a prefill step on the device: rows of `RECORD_WORDS`, as many as `plan_rows` or more.

    Args:
        tiles: of the rows; by the shapes if it is not given.
        least_rows: requests of fewer rows are left out.
    """
    num_reqs = seq_lens.shape[0]
    tiles = tiles or choose_tiles(config, num_tokens, num_reqs, devices.multiprocessors(seq_lens.device))
    rows = tiles.tokens
    arguments = {
        "query_start_loc": query_start_loc, "ordered": torch.empty_like(query_start_loc), "seq_lens": seq_lens,
        "schedule": schedule, "num_reqs": num_reqs, "num_tokens": num_tokens,
        "max_tiles": max_row_tiles(num_tokens, num_reqs, rows),
    }  # fmt: skip
    constants = {
        "WINDOW": config.sliding_window or 0, "ROWS": rows, "LEAST": least_rows, "KEYS": key_tile(config, tiles),
        "CHUNK": 128, "REQUESTS": min(128, triton.next_power_of_2(max(num_reqs, 16))), "num_warps": 8,
    }  # fmt: skip
    launch_again(prefill_plan_kernel, (1,), arguments, constants)


def plan_rows(num_tokens: int, num_reqs: int, tiles: TileConfig) -> int:
    """Return how many rows a schedule needs."""
    return 1 + 2 * max_row_tiles(num_tokens, num_reqs, tiles.tokens)


def prefill(args: AttentionArgs, config: AttentionConfig, tiles: TileConfig | None = None) -> None:
    """Run `vattn::attention` for a call that `accepts` took; `tiles` overrides what the shapes would choose."""
    num_tokens, num_reqs = args.query.shape[0], args.seq_lens.shape[0]
    if num_tokens == 0:
        return
    tiles = tiles or choose_tiles(config, num_tokens, num_reqs, devices.multiprocessors(args.query.device))
    shape = decode_fast.plan_shape(config, num_tokens, num_reqs, args.query.device)
    schedule = next((s for s in args.plan if s.shape == shape), None)
    if schedule is None:
        shape = plan_rows(num_tokens, num_reqs, tiles), RECORD_WORDS
        schedule = torch.empty(shape, dtype=torch.int32, device=args.query.device)
        plan(args.query_start_loc, args.seq_lens, schedule, num_tokens, config, tiles)
    output = rows_to_write(args, config, finishes(config))
    launch(args, config, schedule, output, devices.multiprocessors(args.query.device), tiles)
    if output is not args.output:
        fp4_rows.finish(args, config, output)


def finishes(config: AttentionConfig) -> bool:
    """Return whether the kernel stores the output format itself; otherwise a second kernel quantises its rows."""
    return not OUTPUT_FORMATS[config.output_format].group_size or computes_scales(config)


def computes_scales(config: AttentionConfig) -> bool:
    """Return whether the kernel computes the scales of the output format: of FP8 groups inside a head.

    NVFP4 and IEEE's divisions are left to another kernel, as scales per token are. Their code is long and would run
    once a tile: NVFP4 took 14 % of this kernel's time, where scales per token take 4 in another. Heads of 256 of an FP8
    cache under a 16-bit query leave no shared memory for groups.
    """
    is_long = OUTPUT_FORMATS[config.output_format].static_scale or config.output_arithmetic == "divide"
    has_room = columns_of(config) < 256 or products_of(config) != "widened"
    return columns_of(config) == config.head_size and groups_fit_heads(config) and not is_long and has_room


def launch(
    args: AttentionArgs,
    config: AttentionConfig,
    schedule: Tensor,
    output: Tensor,
    ctas: int,
    tiles: TileConfig,
    early: bool = False,
    partial: dict[str, Tensor] | None = None,
    part: int = 0,
    chain: Tensor | None = None,
) -> None:
    """Launch the attention kernel; `output` is the final one, or in the model dtype where another kernel follows.

    Args:
        early: whether the next kernel may start while this one runs; it has to wait for this one's end then.
        partial: room for results over some of the keys, if the schedule's items are parts of row tiles.
        part: `Shape.PART`, and `chain`: the room that it needs for each CTA.
    """
    if output is not args.output:
        config = config.with_plain_output()
    key, value = key_value_views(args.key_cache, args.value_cache, config)
    query, cache, kind = args.query, products_of(config), map_of(key, value)
    if cache != "plain":
        key, value = key.view(torch.float8_e4m3fn), value.view(torch.float8_e4m3fn)
    aligned = 16 // query.itemsize
    if query.data_ptr() % 16 or query.stride(0) % aligned or query.stride(1) % aligned or query.stride(2) != 1:
        query = query.contiguous()
    shrunk = cache == "widened" and config.dtype == "bfloat16"
    scale, soft_cap = decode_fast.score_scales(config, WIDENED_SHRINK.value if shrunk else 1.0)
    scales, strides = None, (0, 0)
    if computes_scales(config) and args.output_block_scale is not None:
        scales = args.output_block_scale
        strides = (scales.stride(0), scales.stride(1))
    # Layers share the schedule, so what hands out its row tiles is of this call. Parts are taken in turn.
    counter = torch.zeros(1, dtype=torch.int32, device=query.device) if partial is None else None
    items = items_of(config, query.shape[0], args.seq_lens.shape[0], tiles)
    own_loads = bool(GROUP_ROWS.value % tiles.pack)
    late = partial is None and takes_late(config, tiles, items, ctas)
    arguments = {
        "query_boxes": query_boxes(query, 1 if own_loads else tiles.pack),
        "key_boxes": cache_boxes(key, config, tiles, kind), "value_boxes": cache_boxes(value, config, tiles, kind),
        "output": as_bytes(output), "lse": args.lse,
        "block_scale": scales, "scale_stride": strides[0], "group_stride": strides[1], "sinks": args.sinks,
        "q_scale": args.q_scale, "k_scale": args.k_scale, "v_scale": args.v_scale, "output_scale": args.output_scale,
        "schedule": schedule, "counter": counter, "block_table": args.block_table,
        "table_stride": args.block_table.stride(0), "table_width": args.block_table.shape[1],
        "num_blocks": key.shape[0], "query_rows": query if own_loads else None,
        "query_stride": query.stride(0) if own_loads else None, "query_head_stride": query.stride(1), "scale": scale,
        "soft_cap": soft_cap,
    }  # fmt: skip
    arguments |= {name: partial[name] if partial else None for name in ("partial_output", "partial_stats")}
    arguments["chain"] = chain
    shape = shape_of(config, tiles, late, kind)._replace(SPLIT=partial is not None, PART=part)
    constants = {"EARLY": early, "SHAPE": shape, **launch_options(config, tiles)}
    grid = ctas * tiles.residents if partial else min(ctas * tiles.residents, items)
    launch_again(prefill_kernel, (grid,), arguments, constants)


def products_of(config: AttentionConfig) -> str:
    """Return what the products are made of: `CACHE` of the kernel."""
    if config.kv_cache_dtype == config.dtype:
        return "plain"
    return "native" if config.takes_fp8_query else "widened"


def key_tile(config: AttentionConfig, tiles: TileConfig) -> int:
    """Return keys of a tile: registers hold fewer scores beside a wide result."""
    if tiles.keys:
        return tiles.keys
    return 64 if columns_of(config) == 256 else 128


def box_tokens(config: AttentionConfig, tiles: TileConfig) -> int:
    """Return tokens of a box of a tensor map: as many as divide a block and a key tile."""
    return math.gcd(config.block_size, key_tile(config, tiles))


def warpgroups(config: AttentionConfig, rows_per_request: int) -> int:
    """Return the consumer warpgroups of a CTA: three where their registers suffice and tiles of 192 rows get full.

    The assembler of Triton 3.9 (CUDA 13) keeps much of three warpgroups' state in memory, that of 3.6 nothing.
    """
    fits = columns_of(config) == 64 and triton.__version__.startswith("3.6.")
    return 3 if fits and rows_per_request >= LONG_REQUEST else 2


def takes_late(config: AttentionConfig, tiles: TileConfig, items: int, ctas: int) -> bool:
    """Return whether CTAs take their next row tile at the end of the one before, not at its start.

    So the longest that are left go to the first free CTA, which counts while tiles are few; with many it costs a wait a
    tile. Three warpgroups leave no registers for it, and wide heads were not timed so.
    """
    return items <= LATE_BELOW * ctas and not tiles.ahead and tiles.groups < 3 and columns_of(config) < 256


def shape_of(config: AttentionConfig, tiles: TileConfig, late: bool, kind: str = "any") -> Shape:
    """Return what the kernel is specialised for; `late`: see `takes_late`, `kind`: see `map_of`."""
    cache = products_of(config)
    stages, raw_stages = ring_sizes(config, tiles)
    wide = columns_of(config) == 256 and cache != "native" and tiles.groups == 2
    depth = 32 if cache == "native" else 16
    return Shape(
        HEADS=config.num_heads,
        KV_HEADS=config.num_kv_heads,
        # Heads that share keys run together too, so that the keys of a few heads stay in L2.
        KV_GROUP=math.gcd(config.num_kv_heads, tiles.together),
        D=columns_of(config),
        SIZE=config.head_size,
        USED=-(-config.head_size // depth) * depth,
        PACK=tiles.pack,
        KEYS=key_tile(config, tiles),
        BLOCK_SIZE=config.block_size,
        BOX=box_tokens(config, tiles),
        MAP=kind,
        WINDOW=config.sliding_window or 0,
        SOFT_CAP=config.logits_soft_cap is not None,
        STAGES=stages,
        RAW_STAGES=raw_stages,
        CACHE=cache,
        GROUPS=tiles.groups,
        CONVERTERS=tiles.converters or converter_warps(config, tiles),
        PANEL_TOKENS=panel_tokens(config),
        LONG_PING_PONG=wide,
        # Tiles of 64 keys, queries of 256 columns and loads want all that shared memory can give.
        HELD=128 if wide and cache == "plain" else 0,
        HALVES=tiles.halves,
        QUERY_SCALE=decode_fast.SCALE_KINDS[config.query_scale],
        KV_SCALE=decode_fast.SCALE_KINDS[config.kv_scale],
        MODEL=config.dtype,
        LATE=late,
        SPLIT=False,
        PART=0,
        OUTPUT=row_output(config),
        OUTPUT_GROUPS=group_constants(config) if computes_scales(config) else (0, False, False, -1.0, "divide"),
    )


def launch_options(config: AttentionConfig, tiles: TileConfig) -> dict[str, Any]:
    """Return options of the compiler: eight warps have more registers between them than the assembler gives a thread.

    It would drop the limit, and with it the hand-over of registers between partitions. CTAs that share a multiprocessor
    share its registers.
    """
    cache = products_of(config)
    converters = 0 if cache == "plain" else tiles.converters or converter_warps(config, tiles)
    warps = 4 * tiles.groups + converters + 1
    if tiles.residents > 1:
        threads = 32 * triton.cdiv(warps, 4) * 4 * tiles.residents
        return {"num_warps": 4, "maxnreg": REGISTERS // threads // 8 * 8}
    return {"num_warps": 4} | ({"maxnreg": 240} if warps <= 8 else {})


def converter_warps(config: AttentionConfig, tiles: TileConfig) -> int:
    """Return the warps that convert an FP8 cache."""
    # Beside wide results, or three warpgroups', there are no registers for more.
    if tiles.groups == 3 or columns_of(config) == 256:
        return 2
    if products_of(config) == "native":
        return 4 if columns_of(config) == 128 else 2
    return 8 if tiles.groups == 1 else 4


def panel_tokens(config: AttentionConfig) -> int:
    """Return the tokens of a panel of transposed values."""
    return 32 if columns_of(config) == 64 else 64


def ring_sizes(config: AttentionConfig, tiles: TileConfig) -> tuple[int, int]:
    """Return tiles of keys and values under way, as they are multiplied and as they are loaded: what memory holds."""
    cache, narrow = products_of(config), columns_of(config) == 64
    if tiles.groups == 1 and columns_of(config) == 128:
        # Few rows a tile are bound by loads, and their queries take less room.
        return {"plain": (3, 1), "native": (4, 3), "widened": (2, 2)}[cache]
    if tiles.residents > 1:
        return 3, 2
    return 4 if narrow else 3 if cache == "native" else 2, 2 if narrow or cache == "native" else 1


def panels(element_size: int, width: int, rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of boxes in shared memory: swizzled panels of 128 bytes, or of whole narrower rows."""
    return gl.NVMMASharedLayout(min(128, width * element_size), 8 * element_size, rank)


def query_boxes(query: Tensor, pack: int = 1) -> TensorDescriptor:
    """Return a tensor map over queries `[T, H, D]` with boxes of one warpgroup's rows, of one head or of `pack`."""
    tokens, heads, width = query.shape
    padded = padded_columns(width)
    if pack > 1 or padded > width:
        box = [GROUP_ROWS.value // pack, pack, padded]
        return TensorDescriptor(query, list(query.shape), list(query.stride()), box, panels(query.itemsize, padded, 3))
    columns = (heads - 1) * query.stride(1) + width
    layout = panels(query.itemsize, width, 2)
    return TensorDescriptor(query, [tokens, columns], [query.stride(0), 1], [GROUP_ROWS.value, width], layout)


def map_of(*views: Tensor) -> str:
    """Return how tensor maps hold keys and values `[blocks, block_size, K, D]`, which must be the same for both.

    - "tokens": the heads of a token follow each other without gaps, as columns of one row; not where a map has to fill
      in columns that a head lacks;
    - "heads": those of a block do and blocks too, so heads of all blocks are one dimension;
    - "any": blocks and heads are two dimensions. That costs an instruction a box, 1 % of the time with small blocks.
    """
    if all(view.stride(2) == view.shape[3] == padded_columns(view.shape[3]) for view in views):
        return "tokens"
    return "heads" if all(view.stride(0) == view.shape[2] * view.stride(2) for view in views) else "any"


def cache_boxes(cache: Tensor, config: AttentionConfig, tiles: TileConfig, kind: str) -> TensorDescriptor:
    """Return a tensor map over keys or values `[blocks, block_size, K, D]` with boxes of one panel of a block."""
    blocks, block_size, heads, width = cache.shape
    shape, (by_block, by_head, by_token, _) = decode_fast.map_dimensions(cache)
    strides = [by_block, by_head, by_token, 1]
    if kind == "tokens":
        shape, strides = [blocks, block_size, heads * width], [by_block, by_token, 1]
    elif kind == "heads":
        # The stride of a single head may be anything.
        shape, strides = [blocks * heads, block_size, width], [by_head if heads > 1 else by_block, by_token, 1]
    width = padded_columns(width)
    box = [1] * (len(shape) - 2) + [box_tokens(config, tiles), min(width, 128 // cache.itemsize)]
    return TensorDescriptor(cache, shape, strides, box, panels(cache.itemsize, width, len(shape)))
