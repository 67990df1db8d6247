"""The fast decode path of TRITON_ATTN for packed KV formats on Hopper: which calls it takes, and the launches.

Schedule, scratch and reduction come from `vattn.kernels.hopper.decode.launch`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vattn.cache.layout import packed_views
from vattn.config import device as devices
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo, Sizes, not_allowed
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.launch import Tuning
from vattn.kernels.hopper.decode.triton_kernel import QUERY_ROWS, TILE_TOKENS
from vattn.kernels.hopper.decode_packed.kernel import decode_packed_kernel
from vattn.kernels.replay import unrecorded
from vattn.kernels.triton.attention.launch import finish, rows_to_write
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import KV_FORMATS, OUTPUT_FORMATS
from vattn.quantization.packed import query_factor
from vattn.quantization.packed.hadamard import SIGNS, block_width, row_shift

KEY_CODECS = {("int8", 8), ("fp8", 8), ("e4m3", 8), ("int4", 4), ("codebook", 4), ("nvfp4", 4), ("codebook", 3)}
VALUE_CODECS = {("int8", 8), ("fp8", 8), ("int4", 4), ("uniform", 4), ("nvfp4", 4), ("uniform", 3)}
"""Codecs and bits that the kernel unpacks."""

TUNINGS: dict[str, Tuning] = {
    "int8_per_token_head": Tuning(2, 4, 4),
    "fp8_per_token_head": Tuning(2, 4, 4),
    "turboquant_k8v4": Tuning(2, 4, 4),
    "int4_per_token_head": Tuning(2, 3, 6, slots=2, max_registers=168),
    "turboquant_4bit_nc": Tuning(2, 3, 6, max_registers=168),
    "nvfp4": Tuning(2, 3, 6, slots=2, max_registers=168),
    "turboquant_k3v4_nc": Tuning(1, 3, 8, slots=2),
    "turboquant_3bit_nc": Tuning(1, 3, 8, slots=2),
}
"""Tile configs by format, signed or not: what was fastest on an H200. `slots`: tiles of a step, 2, or 0 for one."""

MANY_TUNINGS: dict[str, Tuning] = {
    "int4_per_token_head": Tuning(2, 3, 8, slots=2, max_registers=128),
    "turboquant_4bit_nc": Tuning(1, 3, 16, max_registers=128),
    "nvfp4": Tuning(1, 3, 16, max_registers=128),
}
"""The same where requests outnumber the CTAs of that: more of them, which need not share requests; barriers of a single
warp cost nothing. Groups of more than four query heads per KV head leave too few registers."""

HEAD_SIZES = Sizes(values=(64, 128))
SHORT_HEAD_SIZES = Sizes(values=(128,))
"""With codes of three bits: tensor maps want heads multiples of 16 bytes apart, and 64 columns take 24."""


def refusals(config: AttentionConfig, device: DeviceInfo) -> list[str]:
    """Return why this path cannot run a layer, empty if it can. The general kernel runs what this one refuses."""
    fmt = KV_FORMATS[config.kv_cache_dtype]
    sizes = SHORT_HEAD_SIZES if fmt.packed and any(part.bits == 3 for part in fmt.parts) else HEAD_SIZES
    found = hopper.layer_refusals(config, device, sizes, decode_fast.BLOCK_SIZES)
    if not fmt.packed or not _is_unpacked(config):
        found.append(f"kv_cache_dtype {fmt.name}")
    if config.group_size > QUERY_ROWS.value:
        found.append(f"{config.group_size} query heads per KV head (runs up to {QUERY_ROWS.value})")
    return found + not_allowed(config, {"query_format": ("none",)})


def _is_unpacked(config: AttentionConfig) -> bool:
    key, value = KV_FORMATS[config.kv_cache_dtype].parts
    return (key.codec, key.bits) in KEY_CODECS and (value.codec, value.bits) in VALUE_CODECS


runs = hopper.runs_where(refusals)
"""Whether nothing is refused: of a config and a device."""


def accepts(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Return whether the fast path takes this call: the layer is accepted and there are as many rows as requests."""
    aligned = (args.key_cache.data_ptr() | args.key_cache.stride(0)) % 16 == 0
    return args.query.shape[0] == args.seq_lens.shape[0] > 0 and aligned and runs(config, args.query.device)


def choose_tuning(config: AttentionConfig, num_reqs: int, device: torch.device) -> Tuning:
    """Return the tile config for a layer and this many requests, with heads that fill their CTAs."""
    name = config.kv_cache_dtype.removesuffix("_signed")
    tuning = TUNINGS.get(name, Tuning(2, 4, 4))
    groups = -(-config.num_kv_heads // tuning.heads)
    if num_reqs * groups > tuning.ctas * devices.multiprocessors(device) and config.group_size <= 4:
        tuning = MANY_TUNINGS.get(name, tuning)
    heads = decode_fast.heads_per_cta(config.num_kv_heads, tuning.heads)
    return replace(tuning, heads=heads, ctas=tuning.ctas * tuning.heads / heads)


def plan(query_start_loc: Tensor, seq_lens: Tensor, schedule: Tensor, config: AttentionConfig) -> None:
    """Fill the schedule of a decode step on the device."""
    tuning = choose_tuning(config, seq_lens.shape[0], seq_lens.device)
    decode_fast.plan(query_start_loc, seq_lens, schedule, config, tuning)


def decode(args: AttentionArgs, config: AttentionConfig, tuning: Tuning | None = None) -> None:
    """Run `vattn::attention` for a decode step that `accepts` took; `tuning` overrides what the config would choose."""
    num_reqs, device = args.seq_lens.shape[0], args.query.device
    tuning = tuning or choose_tuning(config, num_reqs, device)
    sizes = decode_fast.sizing(config, num_reqs, tuning, device)
    schedule, is_new = decode_fast.schedule_of(args, config)
    if is_new:
        decode_fast.plan(args.query_start_loc, args.seq_lens, schedule, config, tuning)
    finished = not OUTPUT_FORMATS[config.output_format].group_size
    output, written = rows_to_write(args, config, finished), config if finished else config.with_plain_output()
    partial = {"schedule": schedule, **decode_fast.scratch(args, config, sizes.max_items)}
    common = decode_fast.common_arguments(args, written, output)
    _launch(args, config, tuning, sizes, partial, common)
    decode_fast.launch_reduction(args, written, partial, common, sizes, most=8)
    if not finished:
        finish(args, config, output)


def _boxes(codes: Tensor, tuning: Tuning) -> TensorDescriptor:
    """Return a tensor map over codes `[blocks, block_size, K, bytes]` seen as int16; a box holds a CTA's tile."""
    codes = codes.view(torch.int16)
    blocks, block_size, num_heads, width = codes.shape
    by_block, by_token, by_head, _ = codes.stride()
    shape, strides = [blocks, num_heads, block_size, width], [by_block, by_head, by_token, 1]
    box = [1, tuning.heads, TILE_TOKENS.value, triton.next_power_of_2(width)]
    return TensorDescriptor(codes, shape, strides, box)


def _byte_strides(scales: Tensor | None) -> tuple[int, ...]:
    """Return how many bytes the scales, or codes, of blocks, tokens and heads are apart; zeros where there are none."""
    return (0, 0, 0) if scales is None else tuple(step * scales.itemsize for step in scales.stride()[:3])


def decode_constants(config: AttentionConfig, tuning: Tuning) -> dict[str, Any]:
    """Return what the main kernel is specialised for, strides of scales and the reduction's constants aside."""
    constants: dict[str, Any] = {
        "HEADS": tuning.heads, "BLOCK_SIZE": config.block_size, "WINDOW": config.sliding_window or 0,
        "ASSEMBLY": True, "SOFT_CAP": config.logits_soft_cap is not None, "STAGES": tuning.stages,
        "PAIR": tuning.slots == 2,
    }  # fmt: skip
    width = config.head_size
    for name, part in zip(("KEY", "VALUE"), KV_FORMATS[config.kv_cache_dtype].parts, strict=True):
        constants |= {
            f"{name}_CODEC": part.codec, f"{name}_COUNT": 16 // part.bits,
            # What rotated rows are held at is made up for here, once.
            f"{name}_FACTOR": query_factor(width, part.rotation) * 2.0 ** -row_shift(width, part.rotation),
            f"{name}_BLOCK": block_width(width, part.rotation),
            f"{name}_FLIP": SIGNS.get(part.rotation, 0),
        }  # fmt: skip
    return constants


def _launch(
    args: AttentionArgs,
    config: AttentionConfig,
    tuning: Tuning,
    sizes: decode_fast.Sizing,
    partial: dict[str, Tensor],
    common: dict[str, Any],
) -> None:
    key, value = packed_views(args.key_cache, config)
    short = KV_FORMATS[config.kv_cache_dtype].parts[0].bits == 3
    others = {"block_scale", "scale_stride", "group_stride", "GROUPS", "q_scale"}
    shared = common | decode_fast.step_arguments(args, config)
    unrecorded(decode_packed_kernel)[(sizes.ctas * -(-config.num_kv_heads // tuning.heads),)](
        key_codes=key.codes if short else None, key_boxes=_boxes(key.codes, tuning),
        value_boxes=_boxes(value.codes, tuning), key_scales=key.scales, value_scales=value.scales,
        num_blocks=key.codes.shape[0], num_warps=tuning.heads, maxnreg=tuning.max_registers,
        KEY_STRIDES=_byte_strides(key.scales), VALUE_STRIDES=_byte_strides(value.scales),
        CODE_STRIDES=_byte_strides(key.codes if short else None),
        **{name: value for name, value in shared.items() if name not in others}, **partial,
        **decode_constants(config, tuning),
    )  # fmt: skip
