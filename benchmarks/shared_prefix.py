"""Time a decode step of requests that share a prefix, attended apart and attended by every request, on one GPU.

    python benchmarks/shared_prefix.py --json out.json

Both are captured in CUDA graphs and replayed in turn, and their results are compared first.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vattn
from benchmarks.timing import Timer, interleave

HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 16
CELLS = ((16, 2048, 128), (64, 2048, 256), (64, 8192, 256), (256, 2048, 128))
"""Requests, tokens that they share, and tokens of their own."""


def measure(requests: int, shared: int, own: int, cache_dtype: str, device: str) -> dict[str, Any]:
    """Check and time one cell; on a CPU only check it."""
    quantised = cache_dtype != "auto"
    layer = vattn.Attention(
        HEADS, WIDTH, WIDTH**-0.5, KV_HEADS,
        cache_config=vattn.CacheConfig(block_size=BLOCK, cache_dtype=cache_dtype),
        quant_config=vattn.QuantConfig(k_scale=0.02, v_scale=0.02) if quantised else None,
    ).to(device)  # fmt: skip
    columns, before = -(-own // BLOCK), shared // BLOCK
    tables = [
        [*range(1, 1 + before), *range(1 + before + row * columns, 1 + before + (row + 1) * columns)]
        for row in range(requests)
    ]
    cache = vattn.allocate_kv_cache(
        layer, num_blocks=1 + before + requests * columns, dtype=torch.bfloat16, device=device
    )
    for storage in cache.kv_caches:
        values = torch.randint(0, 0x3F, storage.shape, device=device) if quantised else torch.randn_like(storage)
        storage.copy_(values)
    rows = [torch.randn(requests, heads * WIDTH, device=device).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    calls = {}
    for name, options in {"by every request": {}, "apart": {"shared_prefix_len": shared}}.items():
        builder = vattn.AttentionMetadataBuilder(
            requests, requests, shared + columns * BLOCK, BLOCK, device, layers=layer
        )
        step = builder.build([1] * requests, [shared + own] * requests, tables, **options)
        calls[name] = lambda step=step: layer(*rows, metadata=step)
    whole, apart = (call().float() for call in calls.values())
    error = float((apart - whole).norm() / whole.norm())
    # Two results in bf16 are rounded once more before they are merged.
    if not error < 2**-7:
        raise SystemExit(f"results differ by {error} at {requests} x {shared} + {own}")
    cell = {"requests": requests, "shared": shared, "own": own, "kv_cache_dtype": cache_dtype, "error": error}
    if device == "cuda":
        cell["microseconds"] = interleave({name: Timer([call]) for name, call in calls.items()})
    return cell


def main() -> None:
    """Measure every cell and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="one small cell, also on a CPU")
    parser.add_argument("--only", default="", help="cells whose text, such as '64 x 8192 + 256, fp8', contains this")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {datetime.date.today()}; us of one layer")
    cells = []
    for requests, shared, own in [(4, 64, 20)] if given.small else CELLS:
        for cache_dtype in ("auto", "fp8"):
            if given.only not in f"{requests} x {shared} + {own}, {cache_dtype}":
                continue
            with torch.no_grad():
                cells.append(measure(requests, shared, own, cache_dtype, device))
            print(cells[-1], flush=True)
            if given.json:
                given.json.write_text(
                    json.dumps({"device": name, "torch": torch.__version__, "cells": cells}, indent=1)
                )


if __name__ == "__main__":
    main()
