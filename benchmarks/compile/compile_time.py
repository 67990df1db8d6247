"""What the fusion passes cost at compile time: seconds of a cold compile, seconds of it in the passes, nodes.

    python -m benchmarks.compile.compile_time --layers 32 --format token --repeat 3

Compiles a stack of decoder layers (RMSNorm, QKV projection, attention on a paged cache, quantised output, projection)
with Inductor, caches off, on a GPU if there is one. `--format decoder` is the stack of `models.decoder`, in which RoPE,
query quantisation and cache write are fused as well. CPU seconds are those of the compiling process alone: the C++ or
Triton compilers that Inductor starts come on top of `compile_cpu_s`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import vattn
from benchmarks.harness import parser_of, run_module
from benchmarks.models import fused_steps
from benchmarks.models.quantisers import QUANTISERS, decoded
from vattn.cli.bench.report import write_result
from vattn.passes.pipeline import FusionPass


class Layer(nn.Module):
    def __init__(self, index: int, heads: int, width: int, form: str) -> None:
        super().__init__()
        columns = heads * width
        make = {"bias": False, "dtype": torch.bfloat16}
        self.norm = nn.RMSNorm(columns, dtype=torch.bfloat16)
        self.qkv, self.out = nn.Linear(columns, 3 * columns, **make), nn.Linear(columns, columns, **make)
        self.attn = vattn.Attention(heads, width, width**-0.5, heads, prefix=f"layers.{index}.attn")
        self.form = form
        self.register_buffer("scale", torch.tensor([0.01 * (index + 1)]))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        codes, scales = QUANTISERS[self.form](self.attn(query, key, value), self.scale)
        return x + self.out(decoded(self.form, codes, scales, self.scale).to(x.dtype))


class Stack(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, heads, width, form) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layers: int, heads: int, width: int, form: str, device: str) -> tuple[nn.Module, list[Tensor], Any]:
    """Return a stack whose attention outputs are quantised, its inputs and its step."""
    model = Stack(layers, heads, width, form).requires_grad_(False).to(device)
    vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.bfloat16)
    builder = vattn.AttentionMetadataBuilder(4, 64, 64, layers=model)
    return model, [torch.randn(7, heads * width, device=device).bfloat16()], builder.build([3, 4], [3, 4], [[1], [2]])


def decoder(layers: int, heads: int, width: int, device: str) -> tuple[nn.Module, list[Tensor], Any]:
    """Return the decoder stack of the benchmark of steps, its inputs and its step."""
    sizes = f"--layers {layers} --hidden {heads * width} --heads {heads} --kv-heads {heads} --head-size {width}"
    given = f"--device {device} {sizes} --ffn {2 * heads * width} --context 20 40 --batches 3"
    bench = fused_steps.Bench(fused_steps.arguments().parse_args(given.split()))
    step = bench.builder.build([1] * 3, bench.lengths, bench.tables)
    return bench.model, bench._inputs(step), step


def measure(layers: int, heads: int, width: int, format_name: str) -> dict[str, Any]:
    """Return seconds of one cold compile and of the passes in it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if format_name == "decoder":
        model, inputs, step = decoder(layers, heads, width, device)
    else:
        model, inputs, step = stack(layers, heads, width, format_name, device)
    spent: list[float] = []
    plain = FusionPass.__call__

    def timed(self: FusionPass, graph: torch.fx.Graph) -> None:
        start = time.process_time()
        plain(self, graph)
        spent.append(time.process_time() - start)

    FusionPass.__call__ = timed  # type: ignore[method-assign]
    target = vattn.compile(model, options=vattn.options(rope="always"))
    start, processor = time.perf_counter(), time.process_time()
    with torch.no_grad(), vattn.forward_context(step), torch._inductor.config.patch(force_disable_caches=True):
        target(*inputs)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    report = vattn.fusion_report()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "format": format_name,
        "layers": layers,
        "columns": heads * width,
        "compile_s": round(seconds, 2),
        "compile_cpu_s": round(processor, 2),
        "passes_cpu_s": round(sum(spent), 3),
        "share_of_cpu_percent": round(100 * sum(spent) / processor, 2),
        "attention_nodes": len(report),
        "fused": report.count("fused"),
    }


def repeated(args: argparse.Namespace) -> dict[str, Any]:
    """Measure in processes that remember nothing of each other; returns the median run and all shares."""
    given = ["--layers", str(args.layers), "--heads", str(args.heads)]
    given += ["--head-size", str(args.head_size), "--format", args.format]
    runs = []
    for _ in range(args.repeat):
        made = run_module("benchmarks.compile.compile_time", given, capture_output=True, check=True)
        runs.append(json.loads(made.stdout.splitlines()[-1]))
    shares = [run["share_of_cpu_percent"] for run in runs]
    median = next(run for run in runs if run["share_of_cpu_percent"] == statistics.median_low(shares))
    return {**median, "shares_of_cpu_percent": shares}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--format", choices=(*QUANTISERS, "decoder"), default="static")
    parser.add_argument("--repeat", type=int, default=1, help="so many processes; prints the median and all shares")
    args = parser.parse_args()
    if args.repeat > 1:
        found = repeated(args)
    else:
        found = measure(args.layers, args.heads, args.head_size, args.format)
    print(json.dumps(found))
    if args.json:
        write_result(args.json, found)


if __name__ == "__main__":
    main()
