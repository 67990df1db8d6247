"""Decode of few requests in clusters of CTAs: which steps may go this way, and the launch.

Every request has as many CTAs as the whole card, so requests of any lengths keep it busy. Splits need
neither a schedule before the keys nor a second kernel after them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vattn.cache.layout import key_value_views
from vattn.config.attention import AttentionConfig
from vattn.config.device import Sizes, not_allowed
from vattn.kernels.hopper import fp4_rows
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.cluster_kernel import decode_cluster_kernel
from vattn.kernels.replay import active, unrecorded
from vattn.kernels.triton.attention.launch import rows_to_write
from vattn.kernels.triton.common.launching import finished
from vattn.kernels.triton.common.output_constants import groups_fit_heads
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import OUTPUT_FORMATS

HEAD_SIZES = Sizes(values=(64, 128))
MAX_GROUP_SIZE = 8
"""Query heads per KV head: the rows that the kernel keeps of a product, and CTAs of the smaller clusters."""

LEAST_CTAS = 64
"""Of a request; with fewer the card is not full, and a schedule that splits further does better."""

SLOTS = 4
"""Warps of a CTA, a tile of 16 keys each."""

MOST_HEADS, MOST_TOKENS = 16, 2048
"""KV heads of all requests, and tokens of a request, up to which clusters are faster: of more, splits keep the card
busier."""


def takes(args: AttentionArgs, config: AttentionConfig) -> bool:
    """Return whether a step that `decode_fast.accepts` took, of one row a request, is to go this way and can."""
    num_reqs = args.seq_lens.shape[0]
    if not 0 < num_reqs <= decode_fast.FEW_REQUESTS:
        return False
    # Lengths are on the device; what the host knows of them is how many blocks a request can have.
    tokens, heads = args.block_table.shape[1] * config.block_size, num_reqs * config.num_kv_heads
    if heads > MOST_HEADS or tokens > MOST_TOKENS:
        return False
    return args.query.shape[0] == num_reqs and not refusals(args, config)


def refusals(args: AttentionArgs, config: AttentionConfig) -> list[str]:
    """Return what the kernel lacks of a layer that the fast decode path runs, empty if nothing."""
    found = not_allowed(config, {"head_size": HEAD_SIZES, "query_load": ("plain",)})
    if config.group_size > MAX_GROUP_SIZE:
        found.append(f"{config.group_size} query heads per KV head (runs up to {MAX_GROUP_SIZE})")
    if config.num_kv_heads * cluster_size(config, 1) < LEAST_CTAS:
        found.append(f"{config.num_kv_heads} KV heads (runs {LEAST_CTAS // 16} or more)")
    if args.query.data_ptr() % 16:
        found.append("a query that is not aligned to 16 bytes")
    if args.value_cache is None or args.key_cache.stride() != args.value_cache.stride():
        found.append("keys and values of different strides")
    _, tokens, heads, _ = args.key_cache.shape
    if tokens * args.key_cache.stride(1) + heads * args.key_cache.stride(2) >= 2**31:
        found.append("tokens and heads of a block 2**31 elements apart or more")
    return found


def cluster_size(config: AttentionConfig, num_reqs: int) -> int:
    """Return how many CTAs share a KV head of a request: 8 where that fills the card, else 16."""
    return 8 if config.num_kv_heads * num_reqs * 8 >= 128 else 16


def decode(args: AttentionArgs, config: AttentionConfig, size: int = 0) -> None:
    """Run `vattn::attention` for a step that `takes` took, in clusters of `size` CTAs, 0 for as many as are best."""
    finished = not OUTPUT_FORMATS[config.output_format].group_size or groups_fit_heads(config)
    output, written = rows_to_write(args, config, finished), config if finished else config.with_plain_output()
    size = size or cluster_size(config, args.seq_lens.shape[0])
    arguments = kernel_arguments(args, written, output, size)
    grid = (args.seq_lens.shape[0] * config.num_kv_heads,)
    launch_in_clusters(decode_cluster_kernel, grid, size, arguments)
    if not finished:
        fp4_rows.finish(args, config, output)


def launch_in_clusters(kernel: Any, grid: tuple[int, ...], size: int, arguments: dict[str, Any]) -> None:
    """Launch a grid of clusters of a kernel that was compiled for CTAs on their own.

    Clusters of the compiler's own divide every tensor among their CTAs, or let one CTA alone store it.
    """
    compiled = kernel.warmup(grid=grid, **arguments)
    if active.compile_only:
        return
    compiled = finished(compiled)
    warps, _, shared = compiled.packed_metadata
    compiled.packed_metadata = (warps, size, shared)
    unrecorded(kernel)[grid](**arguments)


def stages(config: AttentionConfig) -> int:
    """Return how many tiles a warp holds.

    A kernel must opt in to more than 48 KB of shared memory. The runtime decides by what the compiler allocates, which
    does not include the inbox: the stages must exceed 48 KB by themselves, or leave room for the inbox below it.
    """
    if config.kv_cache_dtype not in decode_fast.QUANTISED_CACHES:
        return 3
    return 5 if config.head_size == 128 else 4


def kernel_arguments(args: AttentionArgs, config: AttentionConfig, output: Tensor, size: int) -> dict[str, Any]:
    """Return what the kernel is launched with, in clusters of `size`."""
    quantised = config.kv_cache_dtype in decode_fast.QUANTISED_CACHES
    tuning = decode_fast.Tuning(1, stages(config))
    key, value = key_value_views(args.key_cache, args.value_cache, config)
    if quantised:
        key, value = key.view(torch.int16), value.view(torch.int16)
    constants = decode_fast.decode_constants(config, tuning)
    return {
        **decode_fast.common_arguments(args, config, output), **decode_fast.step_arguments(args, config),
        **{name: constants[name] for name in _CONSTANTS}, "key_cache": key, "value_cache": value,
        "query_start_loc": args.query_start_loc, "seq_lens": args.seq_lens, "num_blocks": key.shape[0],
        "block_stride": key.stride(0), "token_stride": key.stride(1), "head_stride": key.stride(2),
        "num_reqs": args.seq_lens.shape[0], "CLUSTER": size, "SLOTS": SLOTS, "num_warps": SLOTS, "launch_pdl": True,
    }  # fmt: skip


_CONSTANTS = ("BLOCK_SIZE", "WINDOW", "FP8", "QUERY_SCALE", "SOFT_CAP", "DTYPE", "STAGES")
