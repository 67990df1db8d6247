"""Attention over a cache whose requests come alone, together, in any order and in chunks, to compare bit by bit."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from tests.support import make_config, poisoned_empty
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

Chunk = tuple[int, int, int]
"""Request, first row and end row."""


class Requests:
    """Whole requests with their queries, and a cache that holds all of their keys and values."""

    def __init__(self, lengths: list[int], device: str, **changes: Any) -> None:
        config = make_config(backend="TRITON_ATTN", batch_invariant=True, lse=True, **changes)
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.config, self.lengths, self.device = config, lengths, device
        dtype = torch.float8_e4m3fn if config.takes_fp8_query else MODEL_DTYPES[config.dtype]
        self.queries = [random(n, config.num_heads, config.head_size).to(device, dtype) for n in lengths]
        counts = [-(-n // config.block_size) for n in lengths]
        stored = kv_cache_dtype(config)
        codes = stored == torch.uint8
        cache = random(*kv_cache_shape(config, sum(counts)))
        self.cache = (cache.to(torch.float8_e4m3fn).view(torch.uint8) if codes else cache.to(stored)).to(device)
        order = torch.randperm(sum(counts), generator=generator).int().split(counts)
        for blocks, length in zip(order, lengths, strict=True):
            self._poison(int(blocks[-1]), length % config.block_size)
        self.table = torch.full((len(lengths), max(counts)), 2**31 - 1, dtype=torch.int32)
        for row, blocks in zip(self.table, order, strict=True):
            row[: len(blocks)] = blocks
        one = torch.full((1,), 0.7, device=device)
        self.query_scale = one if config.query_scale != "none" else None
        self.scale = one if config.kv_scale != "none" else None
        self.output_scale = one if OUTPUT_FORMATS[config.output_format].static_scale else None
        self.sinks = random(config.num_heads).to(device) if config.sinks else None
        self.slopes = random(config.num_heads).abs().to(device) if config.alibi != "none" else None

    def _poison(self, block: int, filled: int) -> None:
        """Make what is not filled of a request's last block NaN."""
        if filled:
            for view in op_views(self.cache, self.config):
                assert view is not None
                view[block, filled:].view(torch.uint8).fill_(0xFF)  # NaN in every format

    def run(self, chunks: list[Chunk], padding: int = 0) -> dict[tuple[int, int], tuple[Tensor, ...]]:
        """Attend rows of requests in one step; return every row's outputs by request and position."""
        parts = [self.queries[request][first:end] for request, first, end in chunks]
        filler = poisoned_empty((padding, *parts[0].shape[1:]), parts[0].dtype, self.device)
        query = torch.cat([part.view(torch.uint8) for part in (*parts, filler)]).view(filler.dtype)
        starts = torch.tensor([0, *(end - first for _, first, end in chunks)]).cumsum(0).int().to(self.device)
        seq_lens = torch.tensor([end for _, _, end in chunks], dtype=torch.int32, device=self.device)
        table = self.table[[request for request, _, _ in chunks]].to(self.device)
        config = self.config
        output, scales = OUTPUT_FORMATS[config.output_format].allocate(
            query, config.head_size_v, MODEL_DTYPES[config.dtype]
        )
        lse = poisoned_empty(query.shape[:2], torch.float32, self.device)
        torch.ops.vattn.attention(
            *AttentionArgs(
                query, *op_views(self.cache, config), starts, seq_lens, table, output, scales, lse, self.output_scale,
                self.query_scale, self.scale, self.scale, self.slopes, self.sinks, None, None, None, None, None, [],
                None, config.encode(),
            )
        )  # fmt: skip
        results = [part.cpu() for part in (output.view(torch.uint8), scales, lse) if part is not None]
        found, row = {}, 0
        for request, first, end in chunks:
            for position in range(first, end):
                found[request, position] = tuple(part[row] for part in results)
                row += 1
        return found


def check_invariance(requests: Requests, chunk_sizes: list[int]) -> None:
    """Compare every row of whole requests together with the same rows alone, in another order and in chunks."""
    whole = [(number, 0, length) for number, length in enumerate(requests.lengths)]
    expected = requests.run(whole)
    _require_equal(expected, requests.run(whole[::-1], padding=5), "in another order")
    for chunk in whole[:2]:
        _require_equal(expected, requests.run([chunk]), "alone")
    for size in chunk_sizes:
        chunks = [
            (r, first, min(first + size, n)) for r, n in enumerate(requests.lengths) for first in range(0, n, size)
        ]
        together = [chunk for number, chunk in enumerate(chunks) if number % 5 in (0, 3)]
        _require_equal(expected, requests.run(together), f"in chunks of {size}")
        _require_equal(expected, requests.run([max(chunks, key=lambda chunk: chunk[2])]), f"as a last chunk of {size}")


def check_random_steps(requests: Requests, count: int, seed: int) -> None:
    """Compare rows of whole requests together with random steps: a chunk each of some requests, in any order."""
    rng = random.Random(seed)
    expected = requests.run([(number, 0, length) for number, length in enumerate(requests.lengths)])
    for step in range(count):
        chunks = []
        for number in rng.sample(range(len(requests.lengths)), rng.randint(1, len(requests.lengths))):
            end = rng.randint(1, requests.lengths[number])
            rows = rng.choice([1, 1, rng.randint(1, 8), rng.randint(1, 300), end])
            chunks.append((number, max(0, end - rows), end))
        _require_equal(expected, requests.run(chunks, rng.randint(0, 3)), f"in step {step} of seed {seed}: {chunks}")


def _require_equal(expected: dict, got: dict, how: str) -> None:  # type: ignore[type-arg]
    for key, parts in got.items():
        for part, other in zip(parts, expected[key], strict=True):
            assert torch.equal(part, other), f"row {key[1]} of request {key[0]} {how}"
