"""FLASHINFER: attention by FlashInfer's prefill wrappers; the cache is written by our own kernel.

FlashInfer plans on the host, so every call reads the lengths: one sync, and no CUDA graphs. Values in memory that no
request owns must be finite, block ids that name no block are read as the nearest one, and a sequence longer than its
row of the block table ends with it. Sinks join the result afterwards, through the log-sum-exp.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vattn.backends.base import Backend, Capabilities, Exclusion, Package, Sizes
from vattn.config import AttentionConfig
from vattn.errors import GraphContractError
from vattn.formats import KV_FORMATS, MODEL_DTYPES
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, VarlenAttentionArgs
from vattn.ops.cache_layout import key_value_views

_WORKSPACE_BYTES = 128 << 20


class FlashInferBackend(Backend):
    """Run what FlashInfer's batch prefill kernels can run; they take decodes too."""

    name = "FLASHINFER"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=("float16", "bfloat16"),
        kv_cache_dtypes=("float16", "bfloat16", "fp8_e4m3"),
        query_formats=("none",),
        output_formats=("none",),
        attn_types=("decoder", "encoder", "encoder_only", "encoder_decoder"),
        head_sizes=Sizes(values=(64, 128, 256)),
        block_sizes=Sizes(8, 8, 256),
        features=frozenset(
            "bidirectional sliding_window logits_soft_cap sinks kv_scale_per_head lse hnd_layout contiguous_kv".split()
        ),
        exclusions=(
            Exclusion(frozenset({"bidirectional", "sliding_window"}), "FlashInfer's windows reach to the left alone"),
            Exclusion(
                frozenset({"kv_cache_dtype=fp8_e4m3", "contiguous_kv"}), "FP8 keys and values outside a paged cache"
            ),
        ),
        minimum_capability=(8, 0),
        package=Package(module="flashinfer", distribution="flashinfer-python", minimum=(0, 6), extra="flashinfer"),
        cuda_graphs="never",
        garbage_safe=False,
    )

    def problem(self) -> str | None:
        """Return why FlashInfer cannot be used in this process, `None` if it can."""
        return super().problem() or _compiler_problem()

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::attention`."""
        starts, lengths = _host(args.query, args.query_start_loc, args.seq_lens)
        width = args.block_table.shape[1]
        lengths = lengths.clamp(0, width * config.block_size)
        key, value = key_value_views(args.kv_cache, config)
        if config.kv_cache_layout == "HND":
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        pages = (lengths + config.block_size - 1) // config.block_size
        # Its kernels for Hopper read no FP8 keys under a 16-bit query.
        family = "fa2" if KV_FORMATS[config.kv_cache_dtype].quantised else "auto"
        wrapper = _paged_wrapper(args.query.device, config.kv_cache_layout, family)

        def plan() -> None:
            wrapper.plan(
                qo_indptr=starts,
                paged_kv_indptr=_offsets(pages),
                paged_kv_indices=_used_blocks(args.block_table, pages, key.shape[0]),
                paged_kv_last_page_len=(lengths - (pages - 1).clamp(min=0) * config.block_size).to(torch.int32),
                page_size=config.block_size,
                **_plan_options(config, key.dtype),
            )

        def run(query: Tensor, output: Tensor) -> Tensor:
            result: Tensor = wrapper.run(query, (key, value), out=output, return_lse=True)[1]
            return result

        _attend(args, config, int(starts[-1]), bool(lengths.any()), plan, run)

    def varlen_attention(self, args: VarlenAttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::varlen_attention`."""
        starts, kv_starts = _host(args.query, args.query_start_loc, args.kv_start_loc)
        wrapper = _packed_wrapper(args.query.device)

        def plan() -> None:
            wrapper.plan(qo_indptr=starts, kv_indptr=kv_starts, **_plan_options(config, args.key.dtype))

        def run(query: Tensor, output: Tensor) -> Tensor:
            result: Tensor = wrapper.run(query, args.key, args.value, out=output, return_lse=True)[1]
            return result

        _attend(args, config, int(starts[-1]), bool(kv_starts.any()), plan, run)

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        """Run `vattn::kv_cache_update` by the Triton kernel, which every format has."""
        from vattn.ops.triton.launch import update_kv_cache

        update_kv_cache(args, config)


def _compiler_problem() -> str | None:
    """FlashInfer compiles its kernels on first use, unless they came with a package."""
    if importlib.util.find_spec("flashinfer_jit_cache") or shutil.which("nvcc"):
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").exists():
        return None
    return (
        "FlashInfer compiles its kernels on first use and no nvcc was found (install the CUDA toolkit and set "
        "CUDA_HOME, or install the package flashinfer-jit-cache)"
    )


@lru_cache(maxsize=8)
def _workspace(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@lru_cache(maxsize=8)
def _paged_wrapper(device: torch.device, layout: str, family: str) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(_workspace(device), layout, backend=family)


@lru_cache(maxsize=8)
def _packed_wrapper(device: torch.device) -> Any:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    return BatchPrefillWithRaggedKVCacheWrapper(_workspace(device), "NHD")


def _host(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Copy small int32 tensors to the host in one sync."""
    if torch.cuda.is_current_stream_capturing():
        raise GraphContractError(
            f"FLASHINFER in a CUDA-graph capture on {query.device}",
            "a backend whose capabilities say cuda_graphs='full'",
            "ask for attn_backend='TRITON_ATTN', or run this step without a graph",
        )
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
    return list(packed.split([tensor.numel() for tensor in tensors]))


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)])


def _used_blocks(table: Tensor, pages: Tensor, num_blocks: int) -> Tensor:
    """Return the ids of all used blocks, request after request, on the device."""
    rows = torch.repeat_interleave(torch.arange(len(pages)), pages)
    columns = torch.arange(int(pages.sum())) - torch.repeat_interleave(_offsets(pages)[:-1].long(), pages)
    index = (rows * table.shape[1] + columns).to(table.device, non_blocking=True)
    # An id that names no block would be read outside the cache.
    return table.reshape(-1)[index].clamp(0, max(num_blocks - 1, 0))


def _plan_options(config: AttentionConfig, kv_dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_qo_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim_qk": config.head_size,
        "causal": config.causality == "causal",
        "sm_scale": config.scale,
        "window_left": -1 if config.sliding_window is None else config.sliding_window - 1,
        "logits_soft_cap": config.logits_soft_cap or 0.0,
        "q_data_type": MODEL_DTYPES[config.dtype],
        "kv_data_type": kv_dtype,
        "o_data_type": MODEL_DTYPES[config.dtype],
    }


def _attend(
    args: AttentionArgs | VarlenAttentionArgs,
    config: AttentionConfig,
    num_tokens: int,
    any_keys: bool,
    plan: Any,
    run: Any,
) -> None:
    """Run the planned call on the real rows, then the scales, the sinks and the rows that see no key."""
    args.output.zero_()
    if args.lse is not None:
        args.lse.fill_(float("-inf"))
    if not num_tokens:
        return
    output, query = args.output[:num_tokens], args.query[:num_tokens]
    asked = _rows_that_ask(args, config, num_tokens)
    if any_keys:
        plan()
        # A key scale of its own for every KV head: the same scores with the query scaled.
        query = _scaled(query, args.k_scale, config) if KV_FORMATS[config.kv_cache_dtype].quantised else query
        logs = run(query, output) * math.log(2)
        if args.v_scale is not None:
            output.copy_(_scaled(output, args.v_scale, config))
    else:
        logs = torch.full((num_tokens, config.num_heads), float("-inf"), device=output.device)
    seen = asked & logs.isfinite()
    logs = logs.masked_fill(~seen, float("-inf"))
    output.masked_fill_(~seen.unsqueeze(2), 0)
    if args.sinks is not None:
        sinks = args.sinks.float()
        # The sink joins the denominator alone: exp(log) / (exp(log) + exp(sink)).
        output.mul_(torch.sigmoid(logs - sinks).unsqueeze(2))
        logs = torch.logaddexp(logs, sinks.expand_as(logs))
    if args.lse is not None:
        args.lse[:num_tokens] = logs


def _scaled(rows: Tensor, scale: Tensor | None, config: AttentionConfig) -> Tensor:
    assert scale is not None  # a quantised cache has scales, or the config was refused
    per_head = scale.expand(config.num_kv_heads).repeat_interleave(config.group_size)
    return (rows.float() * per_head.unsqueeze(1)).to(rows.dtype)


def _rows_that_ask(args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, num_tokens: int) -> Tensor:
    """Return bool `[num_tokens, 1]`: not the rows of a query longer than its sequence that lie before it."""
    rows = torch.arange(num_tokens, device=args.query.device)
    if config.attn_type == "encoder_decoder":
        return torch.ones_like(rows, dtype=torch.bool).unsqueeze(1)
    starts = args.query_start_loc
    lengths = args.seq_lens if isinstance(args, AttentionArgs) else args.kv_start_loc.diff()
    request = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=lengths.shape[0] - 1)
    return (rows >= starts[request + 1] - lengths[request]).unsqueeze(1)
