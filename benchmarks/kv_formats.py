"""Time what each KV format costs on one GPU: a store of 8192 tokens, and decode steps, beside the per-tensor FP8 cache.

    python benchmarks/kv_formats.py

Every output is first compared with the reference on two of its requests. 32 query and 8 KV heads of 128, bf16, blocks
of 16; CUDA-graph replays, all formats of a cell interleaved, median of 7.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vattn.ops.schemas  # noqa: F401  registers the ops
from benchmarks.timing import Timer, interleave
from vattn.backends import selector
from vattn.config import AttentionConfig
from vattn.formats import KV_FORMATS
from vattn.ops import reference
from vattn.ops.arguments import AttentionArgs
from vattn.ops.cache_layout import kv_cache_dtype, kv_cache_shape

BASELINE = "fp8_e4m3"
CELLS = ((32, 8192), (256, 1024))
BLOCKS, BLOCK, TOKENS = 16384, 16, 8192


def config_of(name: str) -> AttentionConfig:
    kind = "tensor" if KV_FORMATS[name].quantised else "none"
    return AttentionConfig(32, 8, 128, 128, 128**-0.5, "bfloat16", name, BLOCK, kv_scale=kind, backend="TRITON_ATTN")


class Filled:
    """A cache of one format that is full of normal keys and values."""

    def __init__(self, name: str, key: Tensor, value: Tensor) -> None:
        self.config = config_of(name)
        self.storage = torch.zeros(
            kv_cache_shape(self.config, BLOCKS), dtype=kv_cache_dtype(self.config), device="cuda"
        )
        self.scale = torch.full((1,), 0.02, device="cuda") if KV_FORMATS[name].quantised else None
        self.key, self.value = key, value
        for first in range(0, BLOCKS * BLOCK, TOKENS):
            self.store(torch.arange(first, first + TOKENS, device="cuda"))

    def store(self, slots: Tensor) -> None:
        """Write the keys and values into slots."""
        scales = (self.scale, self.scale)
        torch.ops.vattn.kv_cache_update(self.key, self.value, self.storage, slots, *scales, self.config.encode())

    def step(self, num_reqs: int, seq_len: int, query: Tensor, table: Tensor) -> AttentionArgs:
        """Return a decode step with its schedule, after comparing two of its rows with the reference."""
        starts = torch.arange(num_reqs + 1, device="cuda", dtype=torch.int32)
        lengths = torch.full((num_reqs,), seq_len, device="cuda", dtype=torch.int32)
        config, plan = self.config, []
        shape = selector.get_backend("TRITON_ATTN").plan_shape(config, num_reqs, *table.shape)
        if shape:
            plan = [torch.empty(shape, dtype=torch.int32, device="cuda")]
            torch.ops.vattn.plan(starts, lengths, plan[0], config.encode())
        args = AttentionArgs(
            query, self.storage, starts, lengths, table, torch.empty_like(query), None, None, None, None, self.scale,
            self.scale, None, None, None, None, None, None, None, plan, None, config.encode(),
        )  # fmt: skip
        torch.ops.vattn.attention(*args)
        two = args._replace(query=query[:2], query_start_loc=starts[:3], seq_lens=lengths[:2], block_table=table[:2])
        expected, _ = reference.paged_attention(two, config)
        error = float((args.output[:2] - expected).norm() / expected.norm())
        if not error < 5e-3:
            raise SystemExit(f"{config.kv_cache_dtype}: relative error {error:.1e}")
        return args


def main() -> None:
    """Measure and print one line for each format."""
    key, value = (torch.randn(TOKENS, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    names = [BASELINE, *(name for name, fmt in KV_FORMATS.items() if fmt.packed)]
    caches = {name: Filled(name, key, value) for name in names}
    slots = torch.randperm(BLOCKS * BLOCK, device="cuda")[:TOKENS]
    cells = {"store 8192": {name: Timer([lambda c=cache: c.store(slots)]) for name, cache in caches.items()}}
    for num_reqs, seq_len in CELLS:
        query = torch.randn(num_reqs, 32, 128, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(BLOCKS, device="cuda").int().view(num_reqs, seq_len // BLOCK)
        steps = {name: cache.step(num_reqs, seq_len, query, table) for name, cache in caches.items()}
        cells[f"{num_reqs} x {seq_len}"] = {
            name: Timer([lambda a=args: torch.ops.vattn.attention(*a)]) for name, args in steps.items()
        }
    medians = {cell: interleave(timers) for cell, timers in cells.items()}
    print("| format | bytes a token and head | " + " | ".join(cells) + " |")
    print("|---" * (len(cells) + 2) + "|")
    for name in names:
        times = [f"{us[name]:.1f} us ({us[name] / us[BASELINE]:.2f})" for us in medians.values()]
        print(f"| {name} | {KV_FORMATS[name].token_bytes(128, 128)} | " + " | ".join(times) + " |")


if __name__ == "__main__":
    main()
