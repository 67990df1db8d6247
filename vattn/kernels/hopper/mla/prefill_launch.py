"""Expanded latent attention of Hopper: which steps it takes, and the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vattn.config import device as devices
from vattn.config.device import DeviceInfo, Sizes, not_allowed
from vattn.config.mla import MLAConfig
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper.mla.prefill import GROUPS, KEYS, ROPE, mla_prefill_gluon_kernel
from vattn.kernels.hopper.prefill.load import GROUP_ROWS
from vattn.kernels.hopper.prefill.schedule import RECORD_WORDS, max_row_tiles, prefill_plan_kernel
from vattn.kernels.triton.common.mask import LOG2E
from vattn.kernels.triton.common.tiles import Limits, next_power_of_two
from vattn.kernels.triton.mla.epilogue import epilogue_arguments, epilogue_constants
from vattn.ops.arguments_mla import MLAAttentionArgs

BLOCK_SIZES = Sizes(step=128, low=128, high=2048, besides=(16, 32, 64))
DTYPES = {"float16": gl.float16, "bfloat16": gl.bfloat16}
ROWS = GROUPS.value * GROUP_ROWS.value
WIDTHS = {(128, ROPE.value, 128): 2, (64, ROPE.value, 64): 3}
"""Columns of keys, of rotated keys and of values that the kernel knows, and tiles that it holds of them."""
_STATIC = {"multiply": "fp8_multiply", "approximate_multiply": "fp8_multiply"}


def refusals(config: MLAConfig, device: DeviceInfo) -> list[str]:
    """Return why the kernel cannot run a layer, empty if it can. The plain kernel runs what this one refuses."""
    found = hopper.refusals(device, config, DTYPES)
    if _widths(config) not in WIDTHS:
        found.append(f"heads of {_widths(config)} columns (runs {' and '.join(map(str, WIDTHS))})")
    found += not_allowed(config, {"block_size": BLOCK_SIZES})
    if config.scale <= 0:
        found.append(f"scale {config.scale} (runs scales above 0)")
    if config.sparse:
        found.append("sparse is not implemented")
    return found


def _widths(config: MLAConfig) -> tuple[int, int, int]:
    return config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim


_can_run = hopper.runs_where(refusals)


def accepts(args: MLAAttentionArgs, config: MLAConfig, align: int, chunks: int) -> bool:
    """Return whether this path takes a step: it takes the layer, and the keys lie in whole tiles, all at once."""
    if align % KEYS.value or chunks > 1:
        return False
    return args.output.is_contiguous() and _can_run(config, args.query.device)


def plans(config: MLAConfig, device: torch.device) -> bool:
    """Return whether plans of a layer have room for row tiles: steps with prompts go this way."""
    return device.type == "cuda" and _can_run(config, device)


def plan_key(config: MLAConfig) -> str:
    """Return what layers that share a plan have in common."""
    return "" if refusals(config, DeviceInfo("cuda", hopper.CAPABILITY)) else " tiles"


def planned_room(config: MLAConfig, num_tokens: int, num_reqs: int, device: torch.device) -> int:
    """Return how many integers a plan has for the row tiles of prompts, whether the step has some or not.

    It tells how many tokens the step has, see `planned_tokens`.
    """
    return 2 * RECORD_WORDS * (num_tokens + num_reqs + 2) if plans(config, device) else 0


def planned_tokens(room: int, num_reqs: int, config: MLAConfig, device: torch.device) -> int:
    """Return the tokens of the step that room for row tiles was made for, below 0 if for none; 0 without such room."""
    if not plans(config, device):
        return 0
    return -1 if room % (2 * RECORD_WORDS) else room // (2 * RECORD_WORDS) - num_reqs - 2


def write_tiles(query_start_loc: Tensor, seq_lens: Tensor, schedule: Tensor, num_tokens: int, longest: int) -> None:
    """Write the row tiles of requests of more than `longest` tokens, and of padding, the longest first."""
    reqs = seq_lens.shape[0]
    prefill_plan_kernel[(1,)](
        query_start_loc, torch.empty_like(query_start_loc), seq_lens, schedule, reqs, num_tokens,
        max_row_tiles(num_tokens, reqs, ROWS), WINDOW=0,
        ROWS=ROWS, LEAST=longest + 1, KEYS=KEYS.value, CHUNK=128,
        REQUESTS=min(128, next_power_of_two(max(reqs, 16))), num_warps=8,
    )  # fmt: skip


def plan_tiles(args: MLAAttentionArgs, longest: int) -> Tensor:
    """Return a step's row tiles, for calls without a plan."""
    tokens, reqs = args.query.shape[0], args.seq_lens.shape[0]
    rows = 1 + 2 * max_row_tiles(tokens, reqs, ROWS)
    schedule = torch.empty((rows, RECORD_WORDS), dtype=torch.int32, device=args.query.device)
    write_tiles(args.query_start_loc, args.seq_lens, schedule, tokens, longest)
    return schedule


def attend_expanded(
    args: MLAAttentionArgs,
    config: MLAConfig,
    line: Tensor,
    expanded: Tensor,
    ropes: Tensor,
    rows: Tensor | None,
    longest: int,
    limits: Limits,
    schedule: Tensor | None = None,
) -> None:
    """Attend requests of more than `longest` tokens to their keys on the line, and write rows of padding.

    Args:
        expanded, ropes: flat, of whole rows of N (P + V) and R columns.
        rows: `[T, N, V]` in the model dtype that get the results instead of the output.
        schedule: the step's row tiles, made here by default.
    """
    query, heads = args.query, config.num_heads
    if query.data_ptr() % 16 or query.stride(0) % 8 or query.stride(1) % 8 or query.stride(2) != 1:
        query = query.contiguous()
    tokens, reqs, device = query.shape[0], args.seq_lens.shape[0], query.device
    if schedule is None:
        schedule = plan_tiles(args, longest)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    target, constants = epilogue_arguments(args, config, rows), epilogue_constants(config, limits)
    kind = constants["KIND"]
    output = static_output(config) if kind == "fp8_static" else "none"
    groups = constants["GROUPS"] if kind in ("groups", "swizzled") else (0, False, False, -1.0, "divide")
    nope, _, values = _widths(config)
    rows_of_line = expanded.view(-1, heads * (nope + values))
    tiles = max_row_tiles(tokens, reqs, ROWS) * heads
    mla_prefill_gluon_kernel[(min(devices.multiprocessors(device), tiles),)](
        **_query_boxes(query, nope), key_boxes=boxes_of(rows_of_line, KEYS.value, nope),
        rope_boxes=boxes_of(ropes.view(-1, ROPE.value), KEYS.value, ROPE.value), output=target["output"], lse=args.lse,
        block_scale=target["output_block_scale"] if groups[0] else None, output_scale=args.output_scale,
        scale_stride=target["stride_br"], group_stride=target["stride_bg"], line=line,
        schedule=schedule, counter=counter, block_table=args.block_table, table_stride=args.block_table.stride(0),
        table_width=args.block_table.shape[1], num_blocks=args.kv_cache.shape[0], query_head_stride=query.stride(1),
        scale=config.scale * LOG2E.value, HEADS=heads, TOGETHER=heads_together(heads), BLOCK_SIZE=config.block_size,
        NOPE=nope, VALUES=values, STAGES=WIDTHS[_widths(config)],
        MODEL=DTYPES[config.dtype], OUTPUT=output, OUTPUT_GROUPS=groups, SCALE_COLUMNS=target["SCALE_COLUMNS"],
        CORRECTED=corrects(output, groups),
        num_warps=4,
    )  # fmt: skip


def corrects(output: str, groups: tuple[Any, ...]) -> bool:
    """Return whether an output is quantised by corrected products: IEEE's quotients, steps not far from 1."""
    size, _, _, least, arithmetic = groups
    return output == "fp8_divide" or (size > 0 and arithmetic == "divide" and (least < 0 or 1e-12 < least < 1e12))


def heads_together(heads: int) -> int:
    """Return how many heads' tiles run side by side: the longest of many go first, the shortest last."""
    return next(count for count in (16, 8, 4, 2, 1) if heads % count == 0)


def static_output(config: MLAConfig) -> str:
    """Return how static FP8 is stored: `OUTPUT` of the kernel."""
    return _STATIC.get(config.output_arithmetic, f"fp8_{config.output_arithmetic}")


def boxes_of(source: Tensor, high: int, wide: int, swizzle: int = 128) -> TensorDescriptor:
    """Return a tensor map over rows of 16-bit values, in boxes of `high` rows and `wide` columns."""
    layout = gl.NVMMASharedLayout(swizzle, 16, 2)
    return TensorDescriptor(source, list(source.shape), [source.stride(0), 1], [high, wide], layout)


def _query_boxes(query: Tensor, nope: int) -> dict[str, Any]:
    tokens, heads, width = query.shape
    flat = query.as_strided((tokens, (heads - 1) * query.stride(1) + width), (query.stride(0), 1))
    rows = GROUP_ROWS.value
    return {"query_boxes": boxes_of(flat, rows, nope), "query_rope_boxes": boxes_of(flat, rows, ROPE.value)}
