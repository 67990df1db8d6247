"""Time the guards of a compiled step over an engine's views of one KV tensor beside those over contiguous caches.

    python -m benchmarks.compile.guard_time --json out.json

A step is layers of attention and nothing else, on a CPU: Dynamo checks the guards of a graph on the host at each call,
whatever device it launches kernels on. The script fails where a kind of step gives more than one graph or copies a
cache.
"""

from __future__ import annotations

import statistics
import time
import types
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor.graph import GraphLowering

import vattn
from benchmarks.harness import add_row, machine, parser_of

HEADS, KV_HEADS, SIZE, BLOCK, NUM_BLOCKS = 4, 2, 16, 16, 64
STEPS = (([1, 1], [9, 33]), ([5, 1, 7], [5, 60, 20]), ([40], [44]))
"""Query and sequence lengths of steps of one kind, more than one token; the first is compiled."""

MEMORY = ("contiguous", "layers in a block", "key and value side by side")
CHECKS = 200
"""Checks of all guards in a sample."""


class Model(nn.Module):
    """Layers of attention that pass their rows on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            vattn.Attention(HEADS, SIZE, SIZE**-0.5, num_kv_heads=KV_HEADS, prefix=f"layers.{index}")
            for index in range(count)
        )

    def forward(self, x: Tensor, step: vattn.AttentionMetadata) -> Tensor:
        rows = KV_HEADS * SIZE
        for layer in self.layers:
            x = layer(x, x[:, :rows], x[:, rows : 2 * rows], metadata=step)
        return x


def model_over(memory: str, count: int) -> Any:
    """Return a model over caches of its own, or over views of one tensor in an engine's order."""
    # A code object of its own: Dynamo keeps graphs and their guards by code object.
    forward = types.FunctionType(Model.forward.__code__.replace(), globals())
    model: Any = type("Model", (Model,), {"forward": forward})(count)
    if memory == "contiguous":
        vattn.allocate_kv_cache(model, num_blocks=NUM_BLOCKS, dtype=torch.float32)
        return model
    if memory == "layers in a block":
        pool = torch.zeros(NUM_BLOCKS, count, 2, BLOCK, KV_HEADS, SIZE)
        views = [(pool[:, index, 0], pool[:, index, 1]) for index in range(count)]
    else:
        pool = torch.zeros(count, NUM_BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
        views = [pool[index].transpose(1, 2).split(SIZE, dim=-1) for index in range(count)]
    for layer, (keys, values) in zip(model.layers, views, strict=True):
        layer.bind_kv_cache(keys, values)
    return model


def compiled_step(memory: str, count: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Compile a model; return the guards of its one graph, the locals that they check, and what is counted."""
    model = model_over(memory, count)
    builder = vattn.AttentionMetadataBuilder(8, 64, 256, layers=model)
    compiled = torch.compile(model, fullgraph=True)
    made: list[Any] = [model, None, None]
    codes: list[str] = []
    for index, (query_lens, seq_lens) in enumerate(STEPS):
        tables = [list(range(8 * request, 8 * request + 8)) for request in range(len(query_lens))]
        made[1:] = torch.randn(sum(query_lens), HEADS * SIZE), builder.build(query_lens, seq_lens, tables)
        torch._dynamo.maybe_mark_dynamic(made[1], 0)
        with (
            mock.patch.object(GraphLowering, "save_output_code", codes.append),
            torch.compiler.set_stance("fail_on_recompile" if index else "default"),
        ):
            compiled(*made[1:])
    entries = _debug_get_cache_entry_list(type(model).forward.__code__)
    called = codes[0].split("def call(")[1].split("def get_args")[0].split("def benchmark_")[0]
    row = {"memory": memory, "layers": count, "graphs": len(entries)}
    row |= {"copies": sum(called.count(word) for word in ("clone", "aten.copy_", "as_strided("))}
    names = dict(zip(("self", "x", "step"), made, strict=True))
    return entries[0].guard_manager, names, row


def sample(guards: Any, names: dict[str, Any]) -> float:
    """Return the microseconds that one check of all guards takes of its thread, on average."""
    started = time.thread_time_ns()
    for _ in range(CHECKS):
        guards.check(names)
    return (time.thread_time_ns() - started) / 1e3 / CHECKS


def main() -> None:
    """Compile, time in turn, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=101)
    options = parser.parse_args()
    with torch.no_grad():
        steps = [compiled_step(memory, options.layers) for memory in MEMORY]
        for guards, names, row in steps:
            if not guards.check(names) or row["graphs"] != 1 or row["copies"]:
                raise AssertionError(f"guards that fail, more than one graph, or copies: {row}")
        times: list[list[float]] = [[] for _ in steps]
        for repeat in range(options.rounds):
            for place in range(len(steps)):
                index = (repeat + place) % len(steps)
                times[index].append(sample(*steps[index][:2]))
    medians = [statistics.median(found) for found in times]
    result: dict[str, Any] = {**machine("cpu"), "rows": []}
    for (_, _, row), us in zip(steps, medians, strict=True):
        row |= {"us": round(us, 2), "ratio": round(us / medians[0], 3)}
        add_row(result, row, options.json, str(row))


if __name__ == "__main__":
    main()
