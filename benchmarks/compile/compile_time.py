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
from benchmarks.models.decoder import E4M3
from vattn.cli.bench.report import write_result
from vattn.passes.pipeline import FusionPass


def static(o: Tensor, s: Tensor) -> Tensor:
    return (o.float() / s).clamp(-448, 448).to(E4M3).float() * s


def token(o: Tensor, s: Tensor) -> Tensor:
    scale = o.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (o.float() / scale).clamp(-448, 448).to(E4M3).float() * scale


def group(o: Tensor, s: Tensor) -> Tensor:
    groups = o.float().unflatten(-1, (-1, 64))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).clamp(-448, 448).to(E4M3).float() * scale).flatten(-2)


def int8(o: Tensor, s: Tensor) -> Tensor:
    scale = (o.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-7)
    return torch.round(o.float() / scale).clamp(-128, 127).to(torch.int8).float() * scale


def mx(o: Tensor, s: Tensor) -> Tensor:
    """Groups of 32 under powers of two, by the bits of their maxima."""
    groups = o.float().unflatten(-1, (-1, 32))
    maximum = groups.abs().amax(-1, keepdim=True)
    exponent = torch.where(maximum.isnan(), 255, ((maximum.view(torch.int32) >> 23) - 8).clamp(min=0))
    scale = (exponent << 23).view(torch.float32).clamp(min=2.0**-126)
    codes, byte = (groups / scale).clamp(-448, 448).to(E4M3), exponent.to(torch.uint8)
    return (codes.float() * torch.exp2(byte.float() - 127)).flatten(-2)


def nvfp4(o: Tensor, s: Tensor) -> Tensor:
    groups = o.float().unflatten(-1, (-1, 16))
    step = (groups.abs().amax(-1, keepdim=True) / 6 / s).clamp(-448, 448).to(E4M3).float() * s
    x = (groups / torch.where(step == 0, torch.inf, step)).flatten(-2)
    size = x.abs()
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0)
    code = torch.where(x.isnan(), 7, code + 8 * x.signbit().to(torch.uint8)).to(torch.uint8)
    packed = code[..., ::2] | (code[..., 1::2] << 4)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=o.device)
    unpacked = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    signed = torch.where(unpacked >= 8, -1.0, 1.0) * values[unpacked & 7]
    return (signed.unflatten(-1, (-1, 16)) * step).flatten(-2)


FORMATS = {"static": static, "token": token, "group": group, "int8": int8, "mx": mx, "nvfp4": nvfp4}


class Layer(nn.Module):
    def __init__(self, index: int, heads: int, width: int, form: Any) -> None:
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
        codes = self.form(self.attn(query, key, value), self.scale)
        return x + self.out(codes.to(x.dtype))


class Stack(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, form: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, heads, width, form) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layers: int, heads: int, width: int, form: Any, device: str) -> tuple[nn.Module, list[Tensor], Any]:
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
        model, inputs, step = stack(layers, heads, width, FORMATS[format_name], device)
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
    parser.add_argument("--format", choices=(*FORMATS, "decoder"), default="static")
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
