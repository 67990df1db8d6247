"""Host side of the Hopper prefill kernel: which layers and calls it takes, its schedule and its launch.

`refusals` says what the kernel is written for; `accepts` takes only what has also been run on a GPU and compared with
the reference: bf16, four query heads per KV head, the blocks of `RUN_ON_A_GPU`, outputs in bf16 or static FP8. Not run
yet, so left to the general kernel: fp16, blocks of 32 and 128, other group sizes, odd numbers of KV heads, other output
formats. `tests/gpu/test_prefill_gpu.py` has a test for each.

Shapes choose it: many query rows per request on average. The op reads no length on the host; any split of the rows over
the requests is computed right, a request of few rows merely wastes most of its tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vattn.backends.base import DeviceInfo, Sizes, requested_features
from vattn.config import AttentionConfig
from vattn.formats import MODEL_DTYPES, OUTPUT_FORMATS
from vattn.ops.arguments import AttentionArgs
from vattn.ops.cache_layout import key_value_views
from vattn.ops.gluon.prefill import GROUP_ROWS, LOG2E, PANEL, prefill_kernel
from vattn.ops.gluon.prefill_plan import KEY_TILE, RECORD_WORDS, ROW_TILE, max_row_tiles, prefill_plan_kernel
from vattn.ops.triton.epilogue import row_output

CAPABILITY = (9, 0)
DTYPES = ("float16", "bfloat16")
HEAD_SIZES = Sizes(values=(64, 128))
BLOCK_SIZES = Sizes(values=(16, 32, 64, 128, 256))
FEATURES = frozenset({"sliding_window", "logits_soft_cap", "sinks", "lse", "hnd_layout"})
MIN_ROWS_PER_REQUEST = 64
"""On average; below, row tiles of 128 are mostly empty."""

RUN_ON_A_GPU = frozenset({(128, 16, "NHD"), (128, 16, "HND"), (128, 64, "HND"), (128, 256, "NHD"), (64, 16, "NHD")})
"""Head size, block size and layout of the caches that `accepts` takes."""

_GLUON_DTYPES = {"float16": gl.float16, "bfloat16": gl.bfloat16}
_PANELS = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3)}


def refusals(config: AttentionConfig, device: DeviceInfo) -> list[str]:
    """Return why the kernel cannot run a layer, empty if it can. The general kernel runs what this one refuses."""
    found = []
    if device.type != "cuda" or device.capability != CAPABILITY:
        found.append(f"{device} (made for sm_{CAPABILITY[0]}{CAPABILITY[1]})")
    if config.dtype not in DTYPES:
        found.append(f"dtype {config.dtype} (runs {', '.join(DTYPES)})")
    if config.kv_cache_dtype != config.dtype:
        found.append(f"kv_cache_dtype {config.kv_cache_dtype} (runs the model dtype)")
    if config.query_format != "none":
        found.append(f"query_format {config.query_format} (runs none)")
    if config.head_size not in HEAD_SIZES:
        found.append(f"head_size {config.head_size} (runs {HEAD_SIZES})")
    if config.block_size not in BLOCK_SIZES:
        found.append(f"block_size {config.block_size} (runs {BLOCK_SIZES})")
    if config.attn_type != "decoder":
        found.append(f"attn_type {config.attn_type} (runs decoder)")
    if config.scale <= 0:
        found.append(f"scale {config.scale} (runs scales above 0)")
    found += [f"{name} is not implemented" for name in sorted(requested_features(config) - FEATURES)]
    return found


@lru_cache(maxsize=4096)
def runs(config: AttentionConfig, device: torch.device) -> bool:
    """Return whether nothing is refused, and the like of it has been run."""
    has_run = (
        (config.head_size, config.block_size, config.kv_cache_layout) in RUN_ON_A_GPU
        and config.dtype == "bfloat16"
        and config.group_size == 4
        and config.num_kv_heads % 2 == 0
        and config.output_format in ("none", "fp8_static")
    )
    return has_run and not refusals(config, DeviceInfo.of(device))


def accepts(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Return whether this call goes the fast way: a layer that `runs`, and many rows per request on average."""
    num_reqs = args.seq_lens.shape[0]
    has_keys = args.kv_cache.numel() > 0 and args.block_table.shape[1] > 0 and args.kv_cache.is_contiguous()
    is_prefill = num_reqs > 0 and args.query.shape[0] >= MIN_ROWS_PER_REQUEST * num_reqs
    return is_prefill and has_keys and runs(config, args.query.device)


def plan(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, config: AttentionConfig) -> Tensor:
    """Return a new schedule of a step, filled on the device."""
    num_reqs = seq_lens.shape[0]
    tiles = max_row_tiles(num_tokens, num_reqs)
    schedule = torch.empty((1 + 2 * tiles, RECORD_WORDS), dtype=torch.int32, device=seq_lens.device)
    prefill_plan_kernel[(1,)](
        query_start_loc, seq_lens, schedule, num_reqs, num_tokens, tiles, WINDOW=config.sliding_window or 0,
        ROWS=ROW_TILE, KEYS=KEY_TILE, CHUNK=128, REQUESTS=min(128, triton.next_power_of_2(max(num_reqs, 16))),
        num_warps=8,
    )  # fmt: skip
    return schedule


def prefill(args: AttentionArgs, config: AttentionConfig) -> None:
    """Run `vattn::attention` for a call that `accepts` took."""
    num_tokens, num_reqs = args.query.shape[0], args.seq_lens.shape[0]
    if num_tokens == 0:
        return
    schedule = plan(args.query_start_loc, args.seq_lens, num_tokens, config)
    fmt = OUTPUT_FORMATS[config.output_format]
    output = args.output
    if fmt.group_size:
        output = torch.empty(args.query.shape, dtype=MODEL_DTYPES[config.dtype], device=output.device)
    launch(args, config, schedule, output, multiprocessors(args.query.device))
    if fmt.group_size:
        from vattn.ops.triton.launch import _launch_finish

        _launch_finish(args, config, num_reqs, 1, output, None, fmt)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Return how many CTAs run at a time: one per multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(args: AttentionArgs, config: AttentionConfig, schedule: Tensor, output: Tensor, ctas: int) -> None:
    """Launch the attention kernel; `output` is in the model dtype or, for static FP8, the final one."""
    key, value = key_value_views(args.kv_cache, config)
    query = args.query
    if query.data_ptr() % 16 or query.stride(0) % 8 or query.stride(1) % 8 or query.stride(2) != 1:
        query = query.contiguous()
    scale, soft_cap = config.scale * LOG2E.value, 1.0
    if config.logits_soft_cap is not None:
        scale, soft_cap = 2.0 * scale / config.logits_soft_cap, config.logits_soft_cap * LOG2E.value
    items = (query.shape[0] // ROW_TILE + args.seq_lens.shape[0] + 1) * config.num_heads
    prefill_kernel[(min(ctas, items),)](
        query_boxes=query_boxes(query), key_boxes=cache_boxes(key, config), value_boxes=cache_boxes(value, config),
        output=output.view(torch.uint8) if output.dtype == torch.float8_e4m3fn else output, lse=args.lse,
        sinks=args.sinks, output_scale=args.output_scale, schedule=schedule, block_table=args.block_table,
        table_stride=args.block_table.stride(0), table_width=args.block_table.shape[1], num_blocks=key.shape[0],
        query_head_stride=query.stride(1), scale=scale, soft_cap=soft_cap, **constants(config),
    )  # fmt: skip


def constants(config: AttentionConfig) -> dict[str, Any]:
    """Return what the kernel is specialised for."""
    return {
        "HEADS": config.num_heads, "KV_HEADS": config.num_kv_heads,
        # Heads that share keys run together, so that the keys of a few heads stay in L2.
        "KV_GROUP": 2 if config.num_kv_heads % 2 == 0 else 1,
        "D": config.head_size, "BLOCK_SIZE": config.block_size, "HND": config.kv_cache_layout == "HND",
        "WINDOW": config.sliding_window or 0, "SOFT_CAP": config.logits_soft_cap is not None,
        "STAGES": 2 if config.head_size == 128 else 4, "MODEL": _GLUON_DTYPES[config.dtype],
        "OUTPUT": row_output(config), "num_warps": 4,
    }  # fmt: skip


def query_boxes(query: Tensor) -> TensorDescriptor:
    """Return a tensor map over queries `[T, H, D]` as rows of all heads, boxes of one warpgroup's rows of one head."""
    tokens, heads, width = query.shape
    columns = (heads - 1) * query.stride(1) + width
    return TensorDescriptor(query, [tokens, columns], [query.stride(0), 1], [GROUP_ROWS.value, width], _PANELS[2])


def cache_boxes(cache: Tensor, config: AttentionConfig) -> TensorDescriptor:
    """Return a tensor map over keys or values `[blocks, block_size, K, D]` whose box is a panel of a block's tokens."""
    blocks, block_size, heads, width = cache.shape
    box = [1, min(block_size, KEY_TILE), PANEL.value]
    if config.kv_cache_layout == "HND":
        shape, strides = [blocks * heads, block_size, width], [cache.stride(2), cache.stride(1), 1]
    else:
        shape, strides = [blocks, block_size, heads * width], [cache.stride(0), cache.stride(1), 1]
    return TensorDescriptor(cache, shape, strides, box, _PANELS[3])
