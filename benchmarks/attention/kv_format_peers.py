"""Kernels of other libraries that read or write the same formats as ours, over copies of the same rows.

Found by import. One that is missing, refuses this GPU or throws is named with its reason by `kv_formats`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vattn.cache.layout import key_value_views, packed_views
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import KV_FORMATS

if TYPE_CHECKING:
    from benchmarks.attention.kv_formats import Filled

ROUNDED = 6.3e-2
"""Largest relative error of kernels that round query and weights to e4m3; of others it is that of bf16 weights."""


@dataclass(frozen=True)
class DecodePeer:
    """A kernel for a decode step.

    Attributes:
        name: in tables.
        cache: the format that it reads.
        key: on the command line.
        make: returns the step over the rows of our cache; what is done once a step of a model is done in it.
        limit: largest relative error from our output.
    """

    name: str
    cache: str
    key: str
    make: Callable[[Filled, AttentionArgs], Callable[[], Tensor]]
    limit: float = 1.6e-2


@dataclass(frozen=True)
class StorePeer:
    """A kernel that stores keys and values; `make` returns the call and what reads its keys back, fp32 `[T, K, D]`."""

    name: str
    cache: str
    key: str
    make: Callable[[Filled, Tensor], tuple[Callable[[], object], Callable[[], Tensor]]]


def _rows(cache: Filled) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Return keys and values `[blocks, block_size, K, bytes]`, and of NVFP4 their block scales, each contiguous."""
    if not KV_FORMATS[cache.config.kv_cache_dtype].packed:
        return key_value_views(cache.storage, cache.config), None
    key, value = packed_views(cache.storage, cache.config)
    assert key.scales is not None and value.scales is not None
    scales = tuple(part.contiguous().view(torch.float8_e4m3fn) for part in (key.scales, value.scales))
    return (key.codes.contiguous(), value.codes.contiguous()), (scales[0], scales[1])


def _pages(args: AttentionArgs, config: AttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return what FlashInfer calls indptr, indices and last page lengths; every page is full."""
    num_reqs, columns = args.block_table.shape
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * columns
    return starts, args.block_table.flatten(), torch.full((num_reqs,), config.block_size, dtype=torch.int32)


def _flashinfer_prefill(cache: Filled, args: AttentionArgs) -> Callable[[], Tensor]:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    config, (rows, scales) = cache.config, _rows(cache)
    starts, pages, last = _pages(args, config)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device=args.query.device), "NHD", backend="fa2"
    )
    wrapper.plan(
        qo_indptr=args.query_start_loc.cpu(), paged_kv_indptr=starts, paged_kv_indices=pages,
        paged_kv_last_page_len=last, num_qo_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
        head_dim_qk=config.head_size, page_size=config.block_size, causal=True, sm_scale=config.scale,
        q_data_type=torch.bfloat16, kv_data_type=rows[0].dtype,
    )  # fmt: skip
    return _run(wrapper, cache, args, rows, scales)


def _flashinfer_decode(tensor_cores: bool) -> Callable[[Filled, AttentionArgs], Callable[[], Tensor]]:
    def make(cache: Filled, args: AttentionArgs) -> Callable[[], Tensor]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        config, (rows, scales) = cache.config, _rows(cache)
        starts, pages, last = _pages(args, config)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(512 << 20, dtype=torch.uint8, device=args.query.device), "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(
            starts, pages, last, config.num_heads, config.num_kv_heads, config.head_size, config.block_size,
            sm_scale=config.scale, q_data_type=torch.bfloat16, kv_data_type=rows[0].dtype,
        )  # fmt: skip
        return _run(wrapper, cache, args, rows, scales)

    return make


def _run(
    wrapper: object, cache: Filled, args: AttentionArgs, rows: tuple[Tensor, Tensor], scales: object
) -> Callable[[], Tensor]:
    output, given = torch.empty_like(args.query), float(cache.scale)
    more = {} if scales is None else {"kv_cache_sf": scales}

    def step() -> Tensor:
        wrapper.run(args.query, rows, k_scale=given, v_scale=given, out=output, **more)
        return output

    return step


def _xqa(cache: Filled, args: AttentionArgs) -> Callable[[], Tensor]:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    config, (rows, scales) = cache.config, _rows(cache)
    workspace = torch.zeros(160 << 20, dtype=torch.uint8, device=args.query.device)
    output, lengths, given = torch.empty_like(args.query), args.seq_lens.view(torch.uint32), float(cache.scale)
    longest = args.block_table.shape[1] * config.block_size

    def step() -> Tensor:
        return xqa_batch_decode_with_kv_cache(
            args.query, rows, workspace, args.block_table, lengths, longest, bmm1_scale=config.scale * given,
            bmm2_scale=given, out=output, kv_layout="NHD", kv_cache_sf=scales,
        )  # fmt: skip

    return step


DECODE_PEERS = (
    DecodePeer("FlashInfer decode", "fp8_e4m3", "flashinfer", _flashinfer_decode(False)),
    DecodePeer("FlashInfer decode on tensor cores", "fp8_e4m3", "flashinfer", _flashinfer_decode(True)),
    DecodePeer("FlashInfer fa2", "nvfp4", "flashinfer", _flashinfer_prefill),
    DecodePeer("FlashInfer decode", "nvfp4", "flashinfer", _flashinfer_decode(False)),
    DecodePeer("FlashInfer decode on tensor cores", "nvfp4", "flashinfer", _flashinfer_decode(True)),
    DecodePeer("XQA", "nvfp4", "xqa", _xqa, ROUNDED),
)
"""Beside those of `vattn.cli.bench.peers`, which read an FP8 cache of their own. No library of kernels has the formats
with scales per token and head."""


def _flashinfer_nvfp4_store(cache: Filled, slots: Tensor) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """It packs rows without putting them into slots."""
    from flashinfer import nvfp4_kv_quantize

    from vattn.quantization.packed import decode_rows

    given, shape = cache.scale, cache.key.shape
    key, value = (x.flatten(0, 1) for x in (cache.key, cache.value))

    def store() -> tuple[Tensor, Tensor]:
        nvfp4_kv_quantize(value, given)
        return nvfp4_kv_quantize(key, given)

    def read() -> Tensor:
        codes, scales = (part.view(torch.uint8).unflatten(0, shape[:2]) for part in store())
        return decode_rows(codes, scales, "nvfp4", False, shape[2], cache.scale)

    return store, read


def _vllm_fp8_store(cache: Filled, slots: Tensor) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    from vllm import _custom_ops

    key, value = (part.clone() for part in key_value_views(cache.storage, cache.config))
    codes = tuple(part.view(torch.uint8) for part in (key, value))

    def store() -> None:
        _custom_ops.reshape_and_cache_flash(cache.key, cache.value, *codes, slots, "fp8", cache.scale, cache.scale)

    def read() -> Tensor:
        key.zero_()
        store()
        return key[slots // cache.config.block_size, slots % cache.config.block_size].float() * cache.scale

    return store, read


STORE_PEERS = (
    StorePeer("FlashInfer nvfp4_kv_quantize, without slots", "nvfp4", "flashinfer", _flashinfer_nvfp4_store),
    StorePeer("vLLM reshape_and_cache_flash", "fp8_e4m3", "vllm", _vllm_fp8_store),
)
