"""XFORMERS: xFormers' `memory_efficient_attention_forward` where it has a kernel for the mask, else vattn's kernels.

Over a paged cache xFormers can only run decodes: one query row per request, without a window, a soft cap or a scale.
Everything else, prefill included, runs in the kernels of TRITON_ATTN, which honour windows, soft caps and scales in
prefill and decode alike. Which of the two takes a layer follows from its config, and for a step from the shapes alone:
at most as many tokens as requests is a decode for xFormers, with a request of its own for every row, so that nothing is
read from the device and any call can be captured in a CUDA graph.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vattn.backends.base import Exclusion, Package
from vattn.backends.external_rows import rows_as_requests
from vattn.backends.triton_attn import TritonAttentionBackend
from vattn.cache.layout import key_value_views
from vattn.cache.memory import CacheMemory
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo, Sizes
from vattn.config.features import requested_features
from vattn.ops.arguments import AttentionArgs

PAGE = 64
"""xFormers reads a paged cache in tiles of this many keys, which must not cross blocks."""

HEAD_SIZES = (32, 64, 128, 256)
"""Head sizes of xFormers' paged kernel."""

_OURS = TritonAttentionBackend.capabilities
_ALIBI = ("alibi", "alibi_sqrt")
_LACKING = {*_ALIBI, "context_parallel", "bidirectional", "causal_flags", "contiguous_kv", "tree_bias"}


class XFormersBackend(TritonAttentionBackend):
    """Decode by xFormers where it can; run everything else as TRITON_ATTN does."""

    name = "XFORMERS"
    capabilities = replace(
        _OURS,
        devices=("cuda",),
        attn_types=("decoder",),
        head_sizes=Sizes(8, 32, 256),
        features=_OURS.features - _LACKING,
        exclusions=(
            *_OURS.exclusions,
            *(Exclusion(frozenset({kind}), "XFormers does not support alibi slopes yet") for kind in _ALIBI),
        ),
        strided_caches=False,
        package=Package(module="xformers", distribution="xformers", minimum=(0, 0, 33), extra="xformers"),
        # Block ids that name no block are read as the nearest one, and a sequence ends with its row of the table.
        garbage_safe=False,
    )

    def problem(self) -> str | None:
        triton = _OURS.package
        return super().problem() or (None if triton is None else triton.problem()) or _library_problem()

    def notes(self, config: AttentionConfig) -> list[str]:
        """Say which kernel decodes, and why it is not xFormers' if it is not."""
        missing = missing_in_xformers(config)
        if missing:
            note = f"prefill and decode by vattn's kernels; xFormers' paged kernel lacks {', '.join(missing)}"
        else:
            note = (
                "steps of at most one new token per request by xFormers' memory_efficient_attention_forward "
                "(triton_splitKF), all others by vattn's kernels: its causal mask takes no queries of unequal lengths"
            )
        return [note, *super().notes(config)]

    def general_steps(
        self, config: AttentionConfig, device: DeviceInfo, memory: CacheMemory | None = None
    ) -> list[str]:
        """Return which steps that run by vattn's kernels miss those for Hopper."""
        found = super().general_steps(config, device, memory)
        return found if missing_in_xformers(config) else [step for step in found if not step.startswith("decodes ")]

    def plan_shape(self, config: AttentionConfig, num_tokens: int, num_reqs: int, table_width: int) -> tuple[int, ...]:
        """Return the shape of the schedule of vattn's decode kernel; `()` if xFormers decodes."""
        if not missing_in_xformers(config):
            return ()
        return super().plan_shape(config, num_tokens, num_reqs, table_width)

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        num_tokens, num_reqs = args.query.shape[0], args.block_table.shape[0]
        if num_tokens > num_reqs or missing_in_xformers(config) or not args.block_table.numel() or not num_tokens:
            super().attention(args, config)
            return
        _decode(args, config)


@lru_cache(maxsize=1)
def _library_problem() -> str | None:
    """Return why xFormers itself would refuse every call: it does where its compiled half could not be loaded."""
    if not torch.cuda.is_available():
        return None
    try:
        importlib.import_module("xformers.ops.fmha")
        library = importlib.import_module("xformers._cpp_lib")
    except Exception as error:  # it refuses versions of other packages, and a broken install raises anything
        return f"xFormers cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    failure = getattr(library, "_cpp_library_load_exception", None)
    if failure is None:
        return None
    return f"xFormers runs nothing without its compiled half: {' '.join(str(failure).split())[:300]}"


def missing_in_xformers(config: AttentionConfig) -> list[str]:
    """Return what of a request xFormers' paged kernel lacks; empty where it can decode."""
    missing = {
        f"head size {config.head_size}": config.head_size not in HEAD_SIZES,
        f"blocks of {config.block_size} (multiples of {PAGE})": config.block_size % PAGE != 0,
        f"dtype {config.dtype}": config.dtype not in ("float16", "bfloat16"),
        f"a cache of {config.kv_cache_dtype}": config.kv_cache_dtype != config.dtype,
        f"queries of {config.query_format}": config.query_format != "none",
        f"outputs of {config.output_format}": config.output_format != "none",
    }
    # Its paged mask is the causal one and nothing else, and its splits follow the batch.
    return [*(what for what, lacks in missing.items() if lacks), *sorted(requested_features(config))]


def _decode(args: AttentionArgs, config: AttentionConfig) -> None:
    """Let xFormers attend, every query row as a request of its own that ends with its position."""
    from xformers.ops import fmha

    key, value = key_value_views(args.key_cache, args.value_cache, config)
    request, lengths, _ = rows_as_requests(args.query_start_loc, args.seq_lens, args.query.shape[0])
    real = lengths > 0
    # An id that names no block would be read outside the cache; rows that see nothing read one key of block 0.
    table = torch.where(real[:, None], args.block_table[request].clamp(0, key.shape[0] - 1), 0)
    lengths = lengths.clamp(1, args.block_table.shape[1] * config.block_size)
    bias = decode_bias(lengths, table, config.block_size)
    heads = (config.num_kv_heads, config.group_size, config.head_size)
    grouped = args.query.reshape(1, -1, *heads)
    keys, values = (
        cache.reshape(1, -1, config.num_kv_heads, 1, config.head_size).expand(-1, -1, *heads) for cache in (key, value)
    )
    output = fmha.memory_efficient_attention_forward(
        grouped, keys, values, attn_bias=bias, scale=config.scale, op=fmha.triton_splitk.FwOp
    )
    args.output.copy_(output.reshape(args.output.shape))
    args.output.masked_fill_(~real[:, None, None], 0)


def decode_bias(seq_lens: Tensor, block_table: Tensor, block_size: int) -> Any:
    """Return xFormers' mask of one query row per request over a paged cache, without reading a length.

    Args:
        seq_lens: int32 `[B]` on the device of the query, none above `W * block_size`.
        block_table: int32 `[B, W]`.
        block_size: tokens per block.

    Returns:
        `PagedBlockDiagonalCausalWithOffsetPaddedKeysMask` over the given tensors. Its Python lengths are the
        capacity: the kernel uses their bounds alone.
    """
    template = _bias_template(seq_lens.shape[0], block_table.shape[1], block_size)
    bias, queries, keys = copy.copy(template), copy.copy(template.q_seqinfo), copy.copy(template.k_seqinfo)
    queries.seqstart = torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
    keys.seqstart = queries.seqstart * keys.padding
    keys.seqlen = seq_lens
    bias.q_seqinfo, bias.k_seqinfo, bias.block_tables = queries, keys, block_table
    return bias


@lru_cache(maxsize=256)
def _bias_template(num_reqs: int, width: int, block_size: int) -> Any:
    """Return the mask with every length at its capacity, on the CPU: making it on a GPU would wait for copies."""
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalCausalWithOffsetPaddedKeysMask as Mask

    return Mask.from_seqlens(
        q_seqlen=[1] * num_reqs,
        kv_seqlen=[width * block_size] * num_reqs,
        block_tables=torch.zeros(num_reqs, width, dtype=torch.int32),
        page_size=block_size,
        device=torch.device("cpu"),
    )
