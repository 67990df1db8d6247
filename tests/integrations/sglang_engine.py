"""SGLang without a GPU: its own pools, layers, batches and server arguments, and what a plugin gets of a model runner.

Nothing of SGLang is replaced here. Its modules import on a CPU with the packages of the extra `test-sglang`. They also
import torchvision, and a torchvision built for CUDA cannot load its ops beside a torch built for the CPU: the schemas
of two ops, which nothing calls, let that import pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: pip install --no-deps sglang 'vattn[test-sglang]'", allow_module_level=True)

try:
    import torchvision  # noqa: F401
except RuntimeError:
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _op in ("nms", "qnms"):
        _library.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.server_args import ServerArgs

__all__ = ["ForwardContext", "TorchNativeAttnBackend", "forward_context"]

HEADS, KV_HEADS, SIZE, SCALE = 4, 2, 16, 0.25
CONTEXT, TOKENS, REQS = 96, 512, 4


def make_pool(page_size: int = 16, dtype: torch.dtype = torch.float32, layers: int = 2, **options: Any) -> Any:
    """Return SGLang's pool of a model of full attention."""
    return MHATokenToKVPool(TOKENS, page_size, dtype, KV_HEADS, SIZE, layers, "cpu", False, **options)


def make_swa_pool(page_size: int = 16, dtype: torch.dtype = torch.float32) -> Any:
    """Return SGLang's pool of a model in which layer 1 has a window: fewer slots for it, under ids of their own."""
    pool = SWAKVPool(TOKENS, TOKENS // 2, page_size, dtype, KV_HEADS, SIZE, [1], [0], "cpu", enable_kv_cache_copy=False)
    pool.register_mapping(torch.zeros(TOKENS + page_size + 1, dtype=torch.int64))
    return pool


def make_layer(layer_id: int = 0, heads: int = HEADS, **options: Any) -> RadixAttention:
    """Return an attention layer of one of SGLang's models."""
    return RadixAttention(heads, SIZE, SCALE, KV_HEADS, layer_id, **options)


def make_runner(pool: Any, *layers: RadixAttention, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return what a plugin reads of a model runner, which itself needs a model to load; options are the server's."""
    model = nn.Module()
    for place, layer in enumerate(layers):
        model.add_module(str(place), nn.ModuleDict({"attn": layer}))
    return SimpleNamespace(
        server_args=ServerArgs(model_path="none", device="cpu", **options),
        token_to_kv_pool=pool,
        req_to_token_pool=ReqToTokenPool(REQS, CONTEXT, "cpu", False),
        model=model,
        dtype=dtype,
        device="cpu",
    )


@dataclass
class Request:
    """A request of the tests' own scheduler.

    Attributes:
        row: its row in the request pool.
        slots: of its tokens, in the pages that it got.
    """

    row: int
    slots: Tensor
    length: int = 0


class Scheduler:
    """Give requests rows and pages in random order, and make SGLang's batches of their new tokens."""

    def __init__(self, runner: Any, seed: int = 0) -> None:
        self.runner, self.rng = runner, torch.Generator().manual_seed(seed)
        pool, page = runner.token_to_kv_pool, runner.token_to_kv_pool.page_size
        width = -(-CONTEXT // page)
        pages = self._pages(pool.size, page)[: REQS * width].view(REQS, width)
        slots = (pages[:, :, None] * page + torch.arange(page)).view(REQS, -1)[:, :CONTEXT]
        if isinstance(pool, SWAKVPool):
            windowed = self._pages(pool.size_swa, page)
            mapping = torch.zeros_like(pool.full_to_swa_index_mapping).view(-1)
            # Fewer pages than slots of the full pool: requests have those of the tokens that they reach.
            for own, first in zip(pages.view(-1).tolist(), windowed.tolist(), strict=False):
                mapping[own * page : (own + 1) * page] = first * page + torch.arange(page)
            pool.register_mapping(mapping)
        rows = (torch.randperm(REQS, generator=self.rng) + 1).tolist()
        self.requests = [Request(row, slots[place]) for place, row in enumerate(rows)]
        for request in self.requests:
            runner.req_to_token_pool.write((request.row, slice(0, CONTEXT)), request.slots.to(torch.int32))

    def _pages(self, size: int, page: int) -> Tensor:
        return torch.randperm(size // page, generator=self.rng) + 1  # page 0 takes what is padded

    def batch(self, new: dict[int, int], mode: ForwardMode, padding: int = 0) -> ForwardBatch:
        """Return the batch in which requests get so many new tokens, with padded decodes as of a captured graph."""
        requests = [self.requests[place] for place in new]
        prefix = [request.length for request in requests]
        for request, count in zip(requests, new.values(), strict=True):
            request.length += count
        slots = [r.slots[start : r.length] for r, start in zip(requests, prefix, strict=True)]
        lens = torch.tensor([r.length for r in requests] + [1] * padding)
        extend = mode != ForwardMode.DECODE
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests) + padding,
            input_ids=torch.zeros(sum(new.values()) + padding, dtype=torch.int64),
            req_pool_indices=torch.tensor([r.row for r in requests] + [0] * padding),
            seq_lens=lens,
            out_cache_loc=torch.cat([*slots, torch.zeros(padding, dtype=torch.int64)]),
            seq_lens_sum=int(lens.sum()),
            seq_lens_cpu=lens.clone(),
            extend_num_tokens=sum(new.values()) if extend else None,
            extend_seq_lens=torch.tensor(list(new.values()), dtype=torch.int32) if extend else None,
            extend_prefix_lens=torch.tensor(prefix, dtype=torch.int32) if extend else None,
            extend_seq_lens_cpu=list(new.values()) if extend else None,
            extend_prefix_lens_cpu=prefix if extend else None,
        )
