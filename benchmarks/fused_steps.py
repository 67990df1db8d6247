"""Time decode steps of a Llama-shaped stack with FP8 weights, activations and cache: vattn's passes on against off.

    python benchmarks/fused_steps.py --json out.json --profile --transformers

Both variants are compiled from the same model and captured by `vattn.CUDAGraphRunner`; their results are compared
first, then their replays are timed in turn. Weights and cache contents are random, and there is neither embedding nor
head. On a CPU (`--device cpu`, small sizes) the same runs without graphs, to try the benchmark.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vattn
from benchmarks.kernels import Kernel, kernels_of_layer, profile_kernels
from vattn.kernels.variants import using

E4M3 = torch.float8_e4m3fn
BLOCK = 16

ATTENTION = ("decode_kernel", "decode_cluster_kernel")
"""Names of the first attention kernel of a layer."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder stack; the default is Llama 3 8B."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    ffn: int = 14336


def static_fp8(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[T, N]` by a given scale."""
    return (x.float() / scale).clamp(-448.0, 448.0).to(E4M3), scale


def per_token_fp8(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[T, N]` with one scale a row; the given one is not used."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (wide / scale).clamp(-448.0, 448.0).to(E4M3), scale


QUANTISERS = {"static": static_fp8, "token": per_token_fp8}


class Linear(nn.Module):
    """`x @ weight.T` of FP8 weights, after quantising x."""

    def __init__(self, inputs: int, outputs: int, activations: str) -> None:
        super().__init__()
        self.quantise = QUANTISERS[activations]
        weight = torch.empty(outputs, inputs, dtype=E4M3)
        for rows, codes in zip(torch.arange(outputs).split(4096), weight.split(4096), strict=True):
            codes.copy_(torch.randn(len(rows), inputs) * 16)
        self.register_buffer("weight", weight)
        scale = torch.full((outputs,) if activations == "token" else (), inputs**-0.5 / 16)
        self.register_buffer("weight_scale", scale.reshape(1, -1) if activations == "token" else scale)
        self.register_buffer("input_scale", torch.tensor(0.02))

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = self.quantise(x, self.input_scale)
        return torch._scaled_mm(
            codes, self.weight.t(), scale, self.weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE (NeoX order) to `[T, heads, D]`; `cos` and `sin` are `[T, 1, D / 2]`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, index: int, sizes: Sizes, activations: str) -> None:
        super().__init__()
        self.widths = [sizes.heads * sizes.head_size, *[sizes.kv_heads * sizes.head_size] * 2]
        self.head_size = sizes.head_size
        self.norm, self.ffn_norm = RMSNorm(sizes.hidden), RMSNorm(sizes.hidden)
        self.qkv = Linear(sizes.hidden, sum(self.widths), activations)
        self.attn = vattn.Attention(
            sizes.heads, sizes.head_size, sizes.head_size**-0.5, sizes.kv_heads, prefix=f"layers.{index}.attn",
            cache_config=vattn.CacheConfig(block_size=BLOCK, cache_dtype="fp8"),
            quant_config=vattn.QuantConfig(k_scale=0.02, v_scale=0.02, query_format="fp8_e4m3", q_scale=0.02),
        )  # fmt: skip
        self.out = Linear(self.widths[0], sizes.hidden, activations)
        self.gate_up = Linear(sizes.hidden, 2 * sizes.ffn, activations)
        self.down = Linear(sizes.ffn, sizes.hidden, activations)

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        query, key, value = self.qkv(self.norm(residual)).split(self.widths, dim=-1)
        query, key = (rotate(part.unflatten(-1, (-1, self.head_size)), cos, sin) for part in (query, key))
        residual = residual + self.out(self.attn(query, key, value))
        gate, up = self.gate_up(self.ffn_norm(residual)).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up), residual


class Stack(nn.Module):
    """Decoder layers and a last norm; takes hidden states `[T, hidden]` and positions `[T]`."""

    def __init__(self, sizes: Sizes, activations: str, max_positions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, sizes, activations) for i in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden)
        half = sizes.head_size // 2
        frequencies = 500000.0 ** (-torch.arange(half).float() / half)
        angles = torch.arange(max_positions).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, positions: Tensor, run_layer: Callable[..., Any] = Layer.forward) -> Tensor:
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = run_layer(layer, x, residual, cos, sin)
        return self.norm(residual + x)


@dataclass
class Variant:
    """One way to compile the model.

    Attributes:
        name: "off" or "on".
        runner: its captured steps.
        compile_seconds: until the first result, capture included.
        times: seconds a step, one value per round.
    """

    name: str
    runner: vattn.CUDAGraphRunner
    compile_seconds: float
    times: list[float]


class Bench:
    """A model, its caches and steps.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.sizes = Sizes(args.layers, args.hidden, args.heads, args.kv_heads, args.head_size, args.ffn)
        self.batches = sorted(args.batches)
        torch.manual_seed(0)
        with self.device:
            self.model = Stack(self.sizes, args.activations, max(args.context)).requires_grad_(False)
        self.lengths = torch.linspace(*map(float, args.context), max(self.batches)).int().tolist()
        self.tables = self._tables()
        vattn.allocate_kv_cache(self.model, num_blocks=1 + sum(map(len, self.tables)), dtype=torch.bfloat16)
        self._fill_caches()
        self.builder = vattn.AttentionMetadataBuilder(
            max(self.batches), max(2, *self.batches), max(args.context), BLOCK, self.device, layers=self.model
        )

    def _tables(self) -> list[list[int]]:
        counts = [-(-length // BLOCK) for length in self.lengths]
        order = iter((1 + torch.randperm(sum(counts), device="cpu")).tolist())
        return [[next(order) for _ in range(count)] for count in counts]

    def _fill_caches(self) -> None:
        for layer in self.model.layers:
            codes = layer.attn.kv_cache.view(-1).view(E4M3)
            for part in codes.split(1 << 26):
                part.copy_(torch.randn(part.shape, device=self.device, dtype=torch.bfloat16) * 50)

    def compile(self, name: str) -> Variant:
        """Compile and capture the model with the passes on or off."""
        start = time.perf_counter()
        options: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
        passes = vattn.options(options, rope=self.args.rope) if name == "on" else options
        if self.args.scope == "layer":
            run_layer = vattn.compile(Layer.forward, options=passes)
            target: Any = lambda x, positions: self.model(x, positions, run_layer)  # noqa: E731
        else:
            target = vattn.compile(self.model, options=passes)
        runner = vattn.CUDAGraphRunner(target, self.batches, self.builder, self._inputs)
        if self.device.type == "cpu":
            self.run(runner, self.batches[0])
        return Variant(name, runner, time.perf_counter() - start, [])

    def _inputs(self, step: vattn.AttentionMetadata) -> list[Tensor]:
        tokens = step.slot_mapping.shape[0]
        rng = torch.Generator("cpu").manual_seed(tokens)
        hidden = torch.randn(tokens, self.sizes.hidden, generator=rng).bfloat16().to(self.device)
        return [hidden, step.positions]

    def step(self, runner: vattn.CUDAGraphRunner, batch: int) -> vattn.AttentionMetadata:
        """Build a decode step of so many requests."""
        return runner.build([1] * batch, self.lengths[-batch:], self.tables[-batch:])

    def run(self, runner: vattn.CUDAGraphRunner, batch: int) -> Tensor:
        """Run one step and return the last hidden states."""
        step = self.step(runner, batch)
        hidden, positions = self._inputs(step)
        with torch.no_grad():
            return runner(hidden, positions, metadata=step).clone()

    def written(self, batch: int) -> list[Tensor]:
        """Return the cache rows that a step wrote, by layer: bytes `[2, batch, kv_heads, head_size]`."""
        lengths, tables = self.lengths[-batch:], self.tables[-batch:]
        blocks = torch.tensor([table[(n - 1) // BLOCK] for n, table in zip(lengths, tables, strict=True)])
        offsets = torch.tensor([(n - 1) % BLOCK for n in lengths])
        place = (slice(None), blocks.to(self.device), offsets.to(self.device))
        return [layer.attn.kv_cache.view(torch.uint8)[place].clone() for layer in self.model.layers]

    def compare(self, variants: list[Variant], batch: int) -> dict[str, Any]:
        """Compare the results of two variants, last hidden states and cache rows."""
        results = []
        for variant in variants:
            hidden = self.run(variant.runner, batch)
            results.append((hidden, self.written(batch)))
        (first, rows_first), (second, rows_second) = results
        differing = [float((a != b).float().mean()) for a, b in zip(rows_first, rows_second, strict=True)]
        error = (first.float() - second.float()).norm() / first.float().norm()
        return {
            "bitwise_equal": bool(torch.equal(first, second)) and max(differing) == 0.0,
            "relative_l2": float(error),
            "finite": bool(first.isfinite().all() and second.isfinite().all()),
            "cache_codes_differing_layer_0": differing[0],
            "cache_codes_differing_last_layer": differing[-1],
        }

    def measure(self, variants: list[Variant], batch: int) -> dict[str, Any]:
        """Time replays of the variants in turn; returns medians in ms."""
        args = self.args
        for variant in variants:
            variant.times.clear()
            self._time(variant.runner, batch, args.steps)
        for _ in range(args.rounds):
            for variant in variants:
                variant.times.append(self._time(variant.runner, batch, args.steps))
        medians = {variant.name: statistics.median(variant.times) * 1e3 for variant in variants}
        pairs = [off / on for off, on in zip(*(variant.times for variant in variants), strict=True)]
        spread = [round(value, 4) for value in (min(pairs), statistics.median(pairs), max(pairs))]
        return {"ms": {k: round(v, 4) for k, v in medians.items()}, "off_over_on": spread}

    def _time(self, runner: vattn.CUDAGraphRunner, batch: int, steps: int) -> float:
        metadata = self.step(runner, batch)
        hidden, positions = self._inputs(metadata)
        with torch.no_grad():
            runner(hidden, positions, metadata=metadata)
            call = self._replay(runner, metadata, hidden, positions)
            if self.device.type != "cuda":
                start = time.perf_counter()
                for _ in range(steps):
                    call()
                return (time.perf_counter() - start) / steps
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(steps):
                call()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1e3 / steps

    def _replay(self, runner: vattn.CUDAGraphRunner, metadata: Any, *inputs: Tensor) -> Callable[[], object]:
        """Return what is timed: the graph alone, whose inputs lie in place already; without graphs, the call."""
        graph = runner._entries[metadata.capture_key()].graph
        return graph.replay if graph is not None else lambda: runner(*inputs, metadata=metadata)

    def profile(self, variant: Variant, batch: int) -> tuple[list[Kernel], list[Kernel]]:
        """Return the kernels of one replay, and those of one layer in its middle."""
        self.run(variant.runner, batch)
        step = self.step(variant.runner, batch)
        kernels = profile_kernels(self._replay(variant.runner, step, *self._inputs(step)))
        return kernels, kernels_of_layer(kernels, ATTENTION, self.sizes.layers)


def run_batches(bench: Bench) -> Iterator[dict[str, Any]]:
    """Compile both variants, then check, time and profile every batch size."""
    variants = [bench.compile(name) for name in ("off", "on")]
    report = vattn.fusion_report()
    print(report.summary(), flush=True)
    for line in dict.fromkeys(str(node).partition(": ")[2] for node in report):
        print(" ", line, flush=True)
    yield {"compile_seconds": {v.name: round(v.compile_seconds, 1) for v in variants}, "report": report.summary()}
    for batch in bench.batches:
        row: dict[str, Any] = {"batch": batch, **bench.compare(variants, batch), **bench.measure(variants, batch)}
        if bench.args.profile and bench.device.type == "cuda":
            for variant in variants:
                everything, layer = bench.profile(variant, batch)
                row[f"kernels_{variant.name}"] = {
                    "step": len(everything),
                    "layer": len(layer),
                    "busy_ms": round(sum(kernel.us for kernel in everything) / 1e3, 4),
                    "names": [[kernel.name, round(kernel.us, 2)] for kernel in layer],
                }
        yield row


def transformers_ms(sizes: Sizes, batch: int, context: int, new_tokens: int, device: str) -> dict[str, float]:
    """Return ms a step of transformers' own Llama in bf16 with a static cache, compiled by `generate`.

    The vocabulary is small, so that the head costs next to nothing. A step is what more tokens add to a call.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=sizes.hidden, intermediate_size=sizes.ffn, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_size,
        max_position_embeddings=8192, dtype=torch.bfloat16,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(before)
    return generate_ms(model, batch, context, new_tokens)


def generate_ms(model: Any, batch: int, context: int, new_tokens: int) -> dict[str, float]:
    """Return ms a step of `model.generate` with a static cache, compiled, and seconds of its first call."""
    from transformers import GenerationConfig

    torch._dynamo.reset()
    device = model.device.type
    prompt = torch.randint(2, model.config.vocab_size, (batch, context), device=device)
    seconds: dict[int, list[float]] = {}
    for tokens in (new_tokens, 4) * 3:
        how = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static",
            pad_token_id=0, eos_token_id=1, max_length=None,
        )  # fmt: skip
        torch.cuda.synchronize() if device != "cpu" else None
        begin = time.perf_counter()
        with torch.no_grad():
            model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=how)
        torch.cuda.synchronize() if device != "cpu" else None
        seconds.setdefault(tokens, []).append(time.perf_counter() - begin)
    cold = seconds[new_tokens][0]
    step = (min(seconds[new_tokens]) - min(seconds[4])) / (new_tokens - 4)
    return {"ms": round(step * 1e3, 3), "cold_seconds": round(cold, 1)}


def markdown(result: dict[str, Any]) -> str:
    """Return the results as tables."""
    sizes, rows = result["sizes"], [row for row in result["rows"] if "ms" in row]
    shape = ", ".join(f"{name} {value}" for name, value in sizes.items())
    lines = [
        f"# Fused decode steps on {result['device']}, {result['date']}",
        "",
        f"torch {result['torch']}. {shape}; {result['activations']} FP8 activations, FP8 weights, query and cache; "
        f"contexts of {result['context'][0]} to {result['context'][1]} tokens; compiled by {result['scope']}. {HOW}",
        "",
        "| batch | off, ms | on, ms | off / on (lowest, median, highest) | kernels a layer, off | on | "
        "relative difference of results | transformers bf16, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        counts = [row.get(f"kernels_{name}", {}).get("layer", "-") for name in ("off", "on")]
        spread = ", ".join(f"{value:.3f}" for value in row["off_over_on"])
        difference = "none" if row["bitwise_equal"] else f"{row['relative_l2']:.1e}"
        peer = row.get("transformers", {}).get("ms", "-")
        cells = [
            f"{row['batch']} {row.get('variants', '')}".strip(),
            row["ms"]["off"],
            row["ms"]["on"],
            spread,
            *counts,
            difference,
            peer,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for row in rows:
        for name in ("off", "on"):
            if f"kernels_{name}" in row:
                kernels = row[f"kernels_{name}"]
                lines += [
                    "",
                    f"Kernels of a layer, batch {row['batch']}, passes {name} ({kernels['step']} in a step):",
                    "",
                ]
                lines += [f"- {us} us `{kernel[:110]}`" for kernel, us in kernels["names"]]
    return "\n".join(lines) + "\n"


HOW = (
    "CUDA-graph replays of both variants in turn; medians. Passes on and off compile the same model; kernels are those "
    "between one attention kernel and the next, by torch.profiler; their times are medians over the layers of one step."
)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, nargs=2, default=[1024, 2048], help="shortest and longest")
    parser.add_argument("--activations", choices=QUANTISERS, default="static")
    parser.add_argument("--rope", default="auto", help="option of that name of the passes")
    parser.add_argument("--variants", nargs="*", default=[], help="run again under each, NAME=VALUE,NAME=VALUE")
    parser.add_argument("--scope", choices=("model", "layer"), default="model", help="what is compiled at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="replays timed at once")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a layer")
    parser.add_argument("--transformers", type=int, nargs="*", help="time transformers' Llama at these batch sizes")
    parser.add_argument("--json", type=Path, help="where to write the results; tables go beside them as .md")
    return parser


def save(result: dict[str, Any], path: Path | None) -> None:
    """Write what there is so far."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1))
        path.with_suffix(".md").write_text(markdown(result))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = arguments().parse_args(argv)
    bench = Bench(args)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "sizes": vars(bench.sizes),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "activations": args.activations, "context": args.context, "scope": args.scope, "rows": [],
    }  # fmt: skip
    for variants in ("", *args.variants):
        with using(**dict(choice.split("=") for choice in variants.split(",") if choice)):
            for row in run_batches(bench):
                result["rows"].append(row if not variants else {**row, "variants": variants})
                print(json.dumps({name: value for name, value in row.items() if "kernels" not in name}), flush=True)
                save(result, args.json)
    sizes = bench.sizes
    del bench
    for batch in args.transformers or []:
        if args.device == "cuda":
            torch.cuda.empty_cache()
        timed = transformers_ms(sizes, batch, sum(args.context) // 2, 68, args.device)
        print(f"transformers, batch {batch}: {timed}", flush=True)
        for row in result["rows"]:
            if row.get("batch") == batch:
                row["transformers"] = timed
        save(result, args.json)
    return result


if __name__ == "__main__":
    main()
