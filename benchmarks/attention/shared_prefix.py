"""Time a decode step of requests that share a prefix, attended apart and attended by every request, on one GPU.

    python -m benchmarks.attention.shared_prefix --json out.json

Both are captured in CUDA graphs and replayed in turn, and their results are compared first.
"""

from __future__ import annotations

from typing import Any

import torch

import vattn
from benchmarks.harness import add_row, machine, parser_of, time_in_turn

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
        cell["microseconds"] = time_in_turn({name: [call] for name, call in calls.items()})[0]
    return cell


def main() -> None:
    """Measure every cell and print one line each."""
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="one small cell, also on a CPU")
    parser.add_argument("--only", default="", help="cells whose text, such as '64 x 8192 + 256, fp8', contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = machine(device)
    for requests, shared, own in [(4, 64, 20)] if options.small else CELLS:
        for cache_dtype in ("auto", "fp8"):
            if options.only in f"{requests} x {shared} + {own}, {cache_dtype}":
                with torch.no_grad():
                    add_row(result, measure(requests, shared, own, cache_dtype, device), options.json)


if __name__ == "__main__":
    main()
