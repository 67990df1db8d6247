"""Choose the tile config of an attention launch from shapes and the device; lengths are not read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton

from vattn.config.attention import AttentionConfig
from vattn.quantization.formats import KV_FORMATS


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()


def padded_widths(config: AttentionConfig) -> tuple[int, int]:
    """Return how many columns of keys and of values the attention kernel multiplies: powers of two."""
    block_d, block_v = (max(16, next_power_of_two(width)) for width in (config.head_size, config.head_size_v))
    # Tiles of keys and of values may reuse one shared-memory address. If their swizzles differ (rows under 128 bytes),
    # the assembler of CUDA 12.8 may mix up the two kinds of wgmma descriptors.
    narrowest = min(64, max(block_d, block_v))
    if KV_FORMATS[config.kv_cache_dtype].packed:
        # Keys of 16 columns unpacked from four bits are wrong on an H200 with Triton 3.6.
        narrowest = max(narrowest, 32)
    return max(block_d, narrowest), max(block_v, narrowest)


INVARIANT_ROWS = 64
"""Query rows of a program of a batch-invariant layer: the fewest that Hopper's matrix instructions take."""


@dataclass(frozen=True)
class Limits:
    """Properties of a device that a launch depends on.

    Attributes:
        processors: multiprocessors.
        shared_bytes: most shared memory of a program.
        native_fp8: whether the hardware converts FP8.
        most_rows: query rows beyond which registers spill for every head size.
        warpgroups: whether matrix instructions read keys from shared memory (sm_90, sm_100); elsewhere they pass
            through registers.
        interpreted: whether Triton's interpreter runs kernels; tiles stay small then.
        hopper: whether the device is sm_90.
    """

    processors: int
    shared_bytes: int
    native_fp8: bool
    most_rows: int = 128
    warpgroups: bool = True
    interpreted: bool = False
    hopper: bool = False

    @staticmethod
    @lru_cache
    def of(device: torch.device) -> Limits:
        """Describe a torch device."""
        if device.type != "cuda":
            return Limits(4, 1 << 16, False, 32, False, True)
        properties: Any = torch.cuda.get_device_properties(device)
        if torch.version.hip is not None:
            return Limits(properties.multi_processor_count, 1 << 16, False, 32, False)
        native = (properties.major, properties.minor) >= (8, 9)
        shared = properties.shared_memory_per_block_optin
        major, count = properties.major, properties.multi_processor_count
        return Limits(count, shared, native, warpgroups=major in (9, 10), hopper=major == 9)


@dataclass(frozen=True)
class Tiles:
    """Tile config of a launch.

    Attributes:
        block_m: query rows of a program, (token, head) pairs.
        group_tile: heads of a group in one program.
        tile: keys of one step.
        d_step: key columns multiplied at once.
        num_splits: programs that share the keys of a tile of rows.
        full_loop: run unmasked tiles in a separate loop.
        num_warps, num_stages: launch options.
        masked_tile: keys of one step with a mask, a divisor of `tile`; 0: `tile`.
        folded: whether the unmasked loop multiplies by the scale inside the exponent, and looks up block ids one tile
            ahead.
        hoisted: whether the unmasked loop computes offsets in blocks once; its tiles are then whole blocks of whole
            rows in the dtype of the products.
        positive: whether no factor of a score can be negative; products then read the loaded query from shared memory.
        boxes: whether the unmasked loop loads keys and values by tensor maps.
        together: KV heads (or head chunks, if a group has several) that start their tiles together.
        scores_ahead: whether the unmasked loop multiplies keys one tile ahead; needs `boxes` and `positive`.
    """

    block_m: int
    group_tile: int
    tile: int
    d_step: int
    num_splits: int
    full_loop: bool
    num_warps: int
    num_stages: int
    masked_tile: int = 0
    folded: bool = False
    hoisted: bool = False
    positive: bool = False
    boxes: bool = False
    together: int = 1
    scores_ahead: bool = False

    @property
    def block_q(self) -> int:
        """Query tokens of a program."""
        return self.block_m // self.group_tile


def compute_dtype(config: AttentionConfig) -> torch.dtype:
    """Return the dtype in which keys and values are multiplied.

    FP8 caches of 16-bit models use fp16, which holds every FP8 value and is cheapest to convert to; bf16 queries are
    scaled into its range per row. So do packed formats for keys without their scales; values, with scales, are
    multiplied in the model dtype.
    """
    model, stored = config.dtype, config.kv_cache_dtype
    if "float32" in (model, stored):
        return torch.float32
    if KV_FORMATS[stored].quantised or KV_FORMATS[stored].packed or stored == "float16":
        return torch.float16
    return torch.bfloat16 if model == "bfloat16" else torch.float32


TALL: dict[str, Any] = {"tile": 64, "masked_tile": 32, "num_stages": 3, "folded": True}
"""Long prefills over varlen keys without tensor maps: 128 rows by 64 keys."""

PAIRED = {**TALL, "block_m": 64, "num_warps": 4}
"""Other long prefills: 64 rows by 64 keys, two programs on a multiprocessor."""

MOST_TOGETHER = 8192
"""Average tokens of a request up to which tiles of several KV heads start together: L2 holds their keys."""

LONG_AHEAD = 4096
"""Average tokens of a request from which `scores_ahead` pays."""

LEAST_SCALE = 2.0**-100
"""Below, the scale may round to zero, and minus infinity times it is NaN."""


def choose_tiles(
    config: AttentionConfig, num_tokens: int, num_reqs: int, max_keys: int, limits: Limits, mapped: bool = False
) -> Tiles:
    """Choose tiles for `num_tokens` query rows and `num_reqs` requests of up to `max_keys` keys each.

    Tiles of a batch-invariant layer depend on its config and the device alone. `mapped`: tensor maps can be made over
    varlen keys and values.
    """
    wide = next_power_of_two(max(config.head_size, config.head_size_v, 16))
    item = compute_dtype(config).itemsize
    demanding = _is_demanding(config, wide)
    rows = -(-num_tokens // max(num_reqs, 1)) * config.group_size
    if config.batch_invariant:
        rows = INVARIANT_ROWS
    block_m = min(max(next_power_of_two(rows), 16), _most_rows(wide, item, demanding, limits))
    group_tile = min(config.group_size, block_m)
    tile = _keys_of_a_step(config, wide, item, block_m, limits)
    num_splits = 1
    if not config.batch_invariant:
        num_splits = _choose_splits(config, num_tokens, num_reqs, max_keys, block_m, tile, limits)
    # Whether a tile needs a mask depends on neighbouring rows, and the two loops may round differently.
    full_loop = block_m > 16 and num_splits == 1 and config.mm_prefix == "none" and not config.batch_invariant
    num_warps = 8 if block_m >= 128 or (block_m >= 64 and (wide >= 256 or demanding)) or wide >= 512 else 4
    num_stages = _stages(config, wide, item, block_m, tile, limits)
    chosen = Tiles(block_m, group_tile, tile, 32 if item == 4 else wide, num_splits, full_loop, num_warps, num_stages)
    if not full_loop or block_m < 128:
        return chosen
    return _cut_long_prefill(chosen, config, wide, limits, mapped, num_tokens // max(num_reqs, 1))


def _cut_long_prefill(
    chosen: Tiles, config: AttentionConfig, wide: int, limits: Limits, mapped: bool, tokens: int
) -> Tiles:
    """Return the fastest tiles on an H200 for a prefill that fills programs of 128 rows.

    `tokens`: average of a request.
    """
    fits = _fits_long_tiles(config, wide, compute_dtype(config).itemsize, limits)
    positive, packed = _has_positive_factors(config), config.block_size == 0
    boxes = mapped and packed and fits and positive and limits.hopper and _is_of_128_columns(config)
    if packed and config.sliding_window is not None and not boxes:
        # Row offsets and windows leave too few registers: matrix instructions would be serialised.
        return chosen
    if not fits:
        return replace(chosen, folded=True)
    if packed and not boxes:
        return replace(chosen, **TALL, positive=positive)
    group_tile, hoisted = min(config.group_size, 64), _is_whole_blocks(config, PAIRED["tile"])
    paired = replace(chosen, **PAIRED, group_tile=group_tile, positive=positive, boxes=boxes, hoisted=hoisted)
    if tokens > MOST_TOGETHER or not limits.hopper:
        return paired
    heads = config.num_kv_heads * -(-config.group_size // group_tile)
    if hoisted:
        return replace(paired, together=math.gcd(heads, 8))
    ahead = boxes and config.sliding_window is None and config.scale >= LEAST_SCALE
    # The assembler of Triton 3.9 (CUDA 13) serialises the products.
    if ahead and tokens >= LONG_AHEAD and triton.__version__.startswith("3.6."):
        return replace(paired, together=math.gcd(heads, 4), scores_ahead=True)
    return paired


def _is_padded(config: AttentionConfig, wide: int) -> bool:
    return wide not in (config.head_size, config.head_size_v)


def _is_demanding(config: AttentionConfig, wide: int) -> bool:
    """Return whether padded columns or changes to scores need more registers."""
    changed = config.logits_soft_cap is not None or config.alibi != "none" or config.tree_bias
    return changed or config.mm_prefix != "none" or _is_padded(config, wide)


def _most_rows(wide: int, item: int, demanding: bool, limits: Limits) -> int:
    """Return the most rows for which an fp32 accumulator `[rows, wide]` fits registers."""
    if item == 4:
        return 16
    return min(limits.most_rows, {512: 32, 256: 64}.get(wide, 64 if demanding else 128))


def _keys_of_a_step(config: AttentionConfig, wide: int, item: int, block_m: int, limits: Limits) -> int:
    if limits.interpreted:
        return 16
    tile = {256: 32, 512: 16}.get(wide, 64)
    if block_m <= 32 and wide <= 256 and item == 2:
        tile *= 2
    converted = wide >= 256 and KV_FORMATS[config.kv_cache_dtype].element_size != item
    through_registers = block_m >= 64 and not limits.warpgroups
    packed = KV_FORMATS[config.kv_cache_dtype].packed
    if item == 4 or converted or through_registers or packed or _is_padded(config, wide):
        tile //= 2
    least = _fewest_keys(config, item)
    tile = max(least, tile)
    # One stage of keys and values and the query must fit.
    while tile > least and 2 * tile * wide * item > limits.shared_bytes // 3:
        tile //= 2
    return tile


def _fewest_keys(config: AttentionConfig, item: int) -> int:
    """Return the fewest keys of a step for which Triton multiplies weights and values correctly.

    It gives a thread eight consecutive keys of 4-bit codes, and counts keys twice in tiles of 16; fp32 products are not
    affected.
    """
    part = KV_FORMATS[config.kv_cache_dtype].value
    return 32 if part is not None and part.bits == 4 and item == 2 else 16


def _fits_long_tiles(config: AttentionConfig, wide: int, item: int, limits: Limits) -> bool:
    """Return whether keys and values need no conversion, and three stages of two programs fit shared memory."""
    plain = KV_FORMATS[config.kv_cache_dtype].element_size == item == 2 and wide == 128
    return plain and limits.warpgroups and limits.shared_bytes >= (3 * 2 + 1) * 2 * 64 * wide * item


def _has_positive_factors(config: AttentionConfig) -> bool:
    """Return whether no factor of a score can be negative, without reading a scale."""
    return config.scale > 0 and config.kv_scale == config.query_scale == config.query_format == "none"


def _is_of_128_columns(config: AttentionConfig) -> bool:
    """Return whether keys and values have 128 columns each in the model dtype."""
    return config.head_size == config.head_size_v == 128 and config.kv_cache_dtype == config.dtype


def _is_whole_blocks(config: AttentionConfig, tile: int) -> bool:
    """Return whether every step reads whole blocks of whole rows."""
    return config.block_size > 0 and tile % config.block_size == 0 and _is_of_128_columns(config)


def _stages(config: AttentionConfig, wide: int, item: int, block_m: int, tile: int, limits: Limits) -> int:
    stored = KV_FORMATS[config.kv_cache_dtype].element_size
    stage = 2 * tile * wide * stored
    fixed = block_m * (wide + tile) * item + (2 * tile * wide * item if stored != item else 0)
    # Loads of the block table take stages of the pipeline, too, so more stages pay if registers allow them.
    most = 5 if block_m >= 64 else 3
    return max(1, min(most, (limits.shared_bytes - fixed) // stage))


def _choose_splits(
    config: AttentionConfig, num_tokens: int, num_reqs: int, max_keys: int, block_m: int, tile: int, limits: Limits
) -> int:
    """Return the splits for about two programs on each multiprocessor."""
    heads = config.num_kv_heads * -(-config.group_size // block_m)
    block_q = max(1, block_m // config.group_size)
    programs = min(num_tokens, num_tokens // block_q + num_reqs) * heads
    if config.sliding_window is not None and config.mm_prefix == "none":
        reach = config.sliding_window + block_q
        max_keys = min(max_keys, reach if config.causality == "causal" else 2 * reach)
    useful = -(-max_keys // (2 * tile))
    return max(1, min(2 * limits.processors // max(programs, 1), useful, 64))
