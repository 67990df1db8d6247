"""Sparse latent decode on Hopper, over keys that every token lists: 64 query rows a program, or 16 from FP8 caches."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vattn.config import device as devices
from vattn.config.device import DeviceInfo
from vattn.config.mla import MLAConfig
from vattn.kernels.hopper import availability as hopper
from vattn.kernels.hopper.mla import launch as mla_launch
from vattn.kernels.hopper.mla.decode_64_gather import mla_decode_64_gather_kernel
from vattn.kernels.hopper.mla.decode_fp8 import mla_decode_fp8_kernel
from vattn.kernels.hopper.mla.reduce import merge_parts
from vattn.kernels.hopper.mla.work_items import LATENT, TILE
from vattn.kernels.hopper.schedule import FIELDS
from vattn.kernels.triton.common.mask import LOG2E, MAX_SEQ_LEN, clamp
from vattn.kernels.triton.common.tiles import next_power_of_two
from vattn.kernels.triton.mla.kernels import request_of_token
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.formats import MODEL_DTYPES

ROWS = 64


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_reqs", "num_blocks", "table_stride", "table_width", "topk_stride", "topk", "ctas",
    ],
    do_not_specialize_on_alignment=["topk_indices", "query_start_loc", "seq_lens", "block_table"],
)  # fmt: skip
def mla_slots_kernel(
    topk_indices, query_start_loc, seq_lens, block_table, slots, starts, lengths, schedule, num_tokens, num_reqs,
    num_blocks, table_stride, table_width, topk_stride, topk, ctas,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what one token sees, as if it were a request of one token. Grid: tokens.

    `slots` is `[T, topk]`, -1 for what is not seen; `lengths` `[T]` are their ends, `starts` `[T + 1]` count tokens.
    A slot is a row of a map in which blocks are BLOCK_ROWS apart. The schedule is that of
    `vattn.kernels.hopper.mla.schedule`, of SPLITS items a token; PARTS is a power of two.
    """
    token = tl.program_id(0)
    request = request_of_token(query_start_loc, num_reqs, token)
    is_real = request >= 0
    end = tl.minimum(tl.load(query_start_loc + request + 1, mask=is_real, other=0), num_tokens)
    seq_len = clamp(tl.load(seq_lens + request, mask=is_real, other=0), MAX_SEQ_LEN)
    limit = tl.where(is_real, tl.minimum(seq_len - (end - 1 - token), table_width * BLOCK_SIZE), 0)
    table = block_table + request.to(tl.int64) * table_stride
    used = tl.zeros([], tl.int32)
    for first in range(0, topk, BLOCK):
        place = first + tl.arange(0, BLOCK)
        position = tl.load(topk_indices + token.to(tl.int64) * topk_stride + place, mask=place < topk, other=-1)
        exists = (position >= 0) & (position < limit)
        position = tl.where(exists, position, 0)
        block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=-1)
        exists = exists & (block >= 0) & (block < num_blocks)
        slot = tl.where(exists, block * BLOCK_ROWS + position % BLOCK_SIZE, -1)
        tl.store(slots + token.to(tl.int64) * topk + place, slot, mask=place < topk)
        used = tl.maximum(used, tl.max(tl.where(exists, place + 1, 0), 0))
    tl.store(lengths + token, used)
    tl.store(starts + token, token)
    part = tl.arange(0, PARTS)
    tiles = (used + TILE - 1) // TILE
    chunk = (tiles + SPLITS - 1) // SPLITS
    items = num_tokens * SPLITS
    item = token * SPLITS + part
    record = schedule + (1 + item) * FIELDS
    inside = part < SPLITS
    tl.store(record, tl.zeros_like(part) + token, mask=inside)
    tl.store(record + 1, tl.minimum(part * chunk, tiles), mask=inside)
    tl.store(record + 2, tl.minimum((part + 1) * chunk, tiles), mask=inside)
    tl.store(record + 3, tl.where(SPLITS > 1, item, -1), mask=inside)
    tl.store(record + 4, tl.where(item + ctas < items, item + ctas, -1), mask=inside)
    split = schedule + (1 + items + token) * FIELDS
    tl.store(split, token)
    tl.store(split + 1, token * SPLITS)
    tl.store(split + 2, SPLITS)
    if token == 0:
        tl.store(starts + num_tokens, num_tokens)
        tl.store(schedule, tl.minimum(ctas, items))
        tl.store(schedule + 1, tl.where(SPLITS > 1, num_tokens, 0))
        tl.store(schedule + 2, num_tokens)
        tl.store(schedule + 3, 0)


def refusals(config: MLAConfig, device: DeviceInfo) -> list[str]:
    """Return why this path cannot run a layer, empty if it can. The plain kernel runs what this one refuses."""
    found = mla_launch.refusals(config.replace(sparse=False), device)
    if config.kv_cache_dtype != mla_launch.FP8 and config.num_heads % ROWS:
        found.append(f"num_heads {config.num_heads} (runs multiples of {ROWS})")
    if config.kv_cache_dtype != mla_launch.FP8 and config.scale < mla_launch.LEAST_SCALE:
        found.append(f"scale {config.scale} (runs {mla_launch.LEAST_SCALE} and more)")
    return found


_can_run = hopper.runs_where(refusals)


def accepts(absorbed: Tensor, args: MLAAttentionArgs, config: MLAConfig) -> bool:
    """Return whether this call goes this way: the layer does, keys are listed, and int32 can count those there are."""
    if args.topk_indices is None or not absorbed.shape[0]:
        return False
    runs = args.topk_indices.shape[1] > 0 and _can_run(config, absorbed.device)
    return runs and mla_launch.rows_apart(args.kv_cache) > 0


def attend_latents(absorbed: Tensor, args: MLAAttentionArgs, config: MLAConfig) -> Tensor:
    """Attend absorbed queries `[T, N, 576]` to listed rows of the cache; return `[T, N, 512]` and write the LSE."""
    topk = args.topk_indices
    assert topk is not None
    tokens, reqs, device = absorbed.shape[0], args.seq_lens.shape[0], absorbed.device
    from_codes = config.kv_cache_dtype == mla_launch.FP8
    rows = mla_launch.rows_per_program(config, 1) if from_codes else ROWS
    groups = -(-config.num_heads // rows)
    ctas = max(1, devices.multiprocessors(device) // groups)
    splits = max(1, min(-(-topk.shape[1] // TILE.value), ctas // tokens))
    items = tokens * splits

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    cached = mla_launch.cached_rows(args.kv_cache)
    slots, starts, lengths = integers(tokens, topk.shape[1]), integers(tokens + 1), integers(tokens)
    schedule = integers(1 + items + tokens, FIELDS.value)
    mla_slots_kernel[(tokens,)](
        topk, args.query_start_loc, args.seq_lens, args.block_table, slots, starts, lengths, schedule, tokens, reqs,
        args.kv_cache.shape[0], args.block_table.stride(0), args.block_table.shape[1], topk.stride(0), topk.shape[1],
        ctas, SPLITS=splits, PARTS=next_power_of_two(splits), TILE=TILE.value, BLOCK_SIZE=config.block_size,
        BLOCK_ROWS=mla_launch.rows_apart(args.kv_cache), BLOCK=1024, num_warps=8,
    )  # fmt: skip
    parts = items if splits > 1 else 1
    shape = tokens, config.num_heads, LATENT.value
    output = absorbed.new_empty(shape, dtype=MODEL_DTYPES[config.dtype])
    partial, stats = mla_launch.partial_results(parts, rows, groups, device)
    common: dict[str, Any] = {
        "query_start_loc": starts, "seq_lens": lengths, "block_table": slots, "schedule": schedule, "output": output,
        "lse": args.lse, "partial": partial, "stats": stats, "num_tokens": tokens,
        "num_blocks": cached.shape[0], "table_stride": slots.stride(0),
        "table_width": slots.shape[1], "scale": config.scale * LOG2E.value, "HEADS": config.num_heads, "GROUPS": groups,
        "BLOCK_SIZE": 1, "SPLIT_QUERY": 1, "PARTIAL_ROWS": rows * groups, "num_warps": 4, "launch_pdl": True,
    }  # fmt: skip
    grid = (min(ctas, items) * groups,)
    if from_codes:
        mla_decode_fp8_kernel[grid](
            boxes=None, rope_boxes=None, cache=cached.view(torch.int16), GATHER=True, BLOCK_ROWS=1,
            **mla_launch.fp8_arguments(absorbed, args, rows), **common,
        )  # fmt: skip
    else:
        boxes: dict[str, Any] = mla_launch.row_boxes(absorbed, args.kv_cache, rows, config)
        mla_decode_64_gather_kernel[grid](
            query_boxes=boxes["query_boxes"], query_rope_boxes=boxes["query_rope_boxes"], cache=cached,
            **mla_launch.result_boxes(output, partial), **common,
        )  # fmt: skip
    if splits > 1:
        merge_parts(
            tokens * rows * groups, splits, config.num_heads, rows * groups,
            devices.multiprocessors(device), False, schedule=schedule, partial=partial, stats=stats,
            query_start_loc=starts, output=output, lse=args.lse, max_items=items, num_tokens=tokens,
        )  # fmt: skip
    return output
