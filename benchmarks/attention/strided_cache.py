"""Time attention over an engine's own KV memory beside vattn's contiguous storages, over the same values.

    python -m benchmarks.attention.strided_cache --json out.json

Every result over strided keys is compared with that over contiguous ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.harness import add_row, machine, parser_of, time_in_turn
from benchmarks.mla.cells import DEEPSEEK, Inputs
from benchmarks.mla.cells import Cell as LatentCell
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.peers import attention_arguments
from vattn.cli.bench.shapes import every_cell
from vattn.ops.arguments import AttentionArgs

CELLS = (
    ("llama3-8b", "decode 1x8k", "bf16"),
    ("llama3-8b", "decode 32x1k", "bf16"),
    ("llama3-8b", "decode 32x1k", "fp8"),
    ("llama3-8b", "decode 32x8k", "fp8"),
    ("gemma3-12b", "decode 32x1k", "bf16"),
    ("llama3-8b", "prefill 1x8k", "bf16"),
    ("llama3-8b", "prefill 1x8k", "fp8"),
    ("llama3-8b", "prefill 1x8k", "fp8 query"),
    ("llama3-8b", "chunk 4x512 of 8k", "bf16"),
    ("llama3-8b", "chunk 4x512 of 8k", "fp8 query"),
    ("llama3-8b", "mixed 8x512 + 128 decodes of 4k", "bf16"),
    ("llama3-8b", "mixed 8x512 + 128 decodes of 4k", "fp8"),
)
"""Layer, step and cache; with "fp8 query" the query is FP8 too."""

LATENTS = (
    LatentCell("decode", 16, 64, 8192),
    LatentCell("decode", 128, 32, 4096),
    LatentCell("decode", 16, 64, 8192, changes={"kv_cache_dtype": "fp8_e4m3"}),
)
"""Latent attention: heads, requests, their length."""

ORDERS = {
    "a layer of four": "2BLNHD",
    "side by side": "BNHC",
    "side by side, heads first": "BHNC",
    "a layer of four, side by side": "BLHNC",
}
"""Memory by letters: layers, blocks, heads, tokens, keys and values (2), columns of one (D) or of both (C)."""


def strided(args: AttentionArgs, order: str) -> AttentionArgs:
    """Return a call over the same values in an engine's memory of an order."""
    key, value = args.key_cache, args.value_cache
    assert value is not None
    blocks, tokens, heads, width = key.shape
    sizes = {"L": 4, "B": blocks, "N": tokens, "H": heads, "2": 2, "D": width, "C": 2 * width}
    pool, letters = key.new_empty([sizes[name] for name in order]), order
    if "L" in order:
        pool, letters = pool.select(order.index("L"), 1), order.replace("L", "")
    if "2" in order:
        keys, values = pool.permute([letters.index(name) for name in "2BNHD"])
    else:
        keys, values = pool.permute([letters.index(name) for name in "BNHC"]).split(width, dim=-1)
    return args._replace(key_cache=keys.copy_(key), value_cache=values.copy_(value))


def make_calls(model: str, work: str, cache: str) -> dict[str, list[AttentionArgs]]:
    """Return the calls of a cell by order, several of each over values of their own."""
    (layer, step), *_ = [(layer, step) for layer, step in every_cell() if (layer.name, step.name) == (model, work)]
    kind, _, query = cache.partition(" ")
    cells = [Cell(layer, step, kind, 16, seed) for seed in range(2 if "8k" in work else 4)]
    contiguous = [attention_arguments(cell, "TRITON_ATTN", bool(query)) for cell in cells]
    return {"contiguous": contiguous} | {
        name: [strided(args, order) for args in contiguous] for name, order in ORDERS.items()
    }


def run(model: str, work: str, cache: str) -> dict[str, Any]:
    """Check and time one cell over all orders."""
    calls = make_calls(model, work, cache)
    row: dict[str, Any] = {"model": model, "work": work, "cache": cache, "apart": {}}
    expected = None
    for order, args in calls.items():
        torch.ops.vattn.attention(*args[0])
        expected = args[0].output.float() if expected is None else expected
        row["apart"][order] = float((args[0].output.float() - expected).norm() / expected.norm())
    ways = {order: [partial(torch.ops.vattn.attention, *one) for one in args] for order, args in calls.items()}
    times, failed = time_in_turn(ways, replays=15)
    return row | {"us": {order: round(us, 2) for order, us in times.items()}, "failed": failed}


def run_latents(cell: LatentCell) -> dict[str, Any]:
    """Check and time a decode of absorbed queries over blocks of one layer and of one layer of four."""
    inputs, ways, query = Inputs(cell, DEEPSEEK, "cuda"), {}, None
    config = inputs.config(**cell.changes)
    cache, expected = inputs.cache_of(config), None
    row: dict[str, Any] = {"work": cell.name, "apart": {}}
    for order in ("contiguous", "a layer of four"):
        if expected is not None:
            inputs._caches[config.kv_cache_dtype] = cache.new_empty(len(cache), 4, *cache.shape[1:])[:, 1].copy_(cache)
        step, query = inputs.decode(query, **cell.changes)
        result = step().float()
        expected = result if expected is None else expected
        row["apart"][order] = float((result - expected).norm() / expected.norm())
        ways[order] = [step]
    times, failed = time_in_turn(ways, replays=15)
    return row | {"us": {order: round(us, 2) for order, us in times.items()}, "failed": failed}


def main() -> None:
    """Run every cell and print one line each."""
    options, result = parser_of(__doc__).parse_args(), machine()
    with torch.no_grad():
        for cell in CELLS:
            add_row(result, run(*cell), options.json)
            torch.cuda.empty_cache()
        for latent in LATENTS:
            add_row(result, run_latents(latent), options.json)


if __name__ == "__main__":
    main()
