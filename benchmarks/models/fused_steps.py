"""Time decode steps of a Llama-shaped stack with FP8 weights, activations and cache: vattn's passes on against off.

    python -m benchmarks.models.fused_steps --json out.json --profile --transformers 1 32

Both variants are compiled from the same model and captured by `vattn.CUDAGraphRunner`; their results are compared
first, then their replays are timed in turn. Weights and cache contents are random, and there is neither embedding nor
head. On a CPU (`--device cpu`, small sizes) the same runs without graphs, to try the benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import vattn
from benchmarks.harness import add_row, machine, parser_of, table, versions_of
from benchmarks.kernels import Kernel, kernels_of_layer, profile_kernels
from benchmarks.models.decoder import BLOCK, Layer, Sizes, Stack
from benchmarks.models.quantisers import E4M3, QUANTISERS
from benchmarks.models.transformers_steps import transformers_ms
from vattn.cli.bench.report import write_result

ATTENTION = ("decode_kernel", "decode_cluster_kernel")
"""Names of the first attention kernel of a layer."""


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
            made = Stack(self.sizes, args.activations, args.output or args.activations, max(args.context))
        self.model = made.requires_grad_(False)
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
        made = [hidden, step.positions]
        return [each.unsqueeze(1) for each in made] if self.args.batched else made

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

    def run_batch(self, variants: list[Variant], batch: int) -> dict[str, Any]:
        """Check, time and profile both variants at a batch size."""
        row: dict[str, Any] = {"batch": batch, **self.compare(variants, batch), **self.measure(variants, batch)}
        for variant in variants if self.args.profile and self.device.type == "cuda" else ():
            everything, layer = self.profile(variant, batch)
            row[f"kernels_{variant.name}"] = {
                "step": len(everything),
                "layer": len(layer),
                "busy_ms": round(sum(kernel.us for kernel in everything) / 1e3, 4),
                "names": [[kernel.name, round(kernel.us, 2)] for kernel in layer],
            }
        return row


def markdown(result: dict[str, Any]) -> str:
    """Return the results as a page."""
    columns = (
        "batch", "off, ms", "on, ms", "off / on (lowest, median, highest)", "kernels a layer, off", "on",
        "relative difference of results", "transformers bf16, ms",
    )  # fmt: skip
    rows, kernels = [], ""
    for row in result["rows"]:
        layers = {name: row.get(f"kernels_{name}", {}) for name in ("off", "on")}
        rows.append((
            row["batch"], row["ms"]["off"], row["ms"]["on"], ", ".join(f"{value:.3f}" for value in row["off_over_on"]),
            *(layer.get("layer", "-") for layer in layers.values()),
            "none" if row["bitwise_equal"] else f"{row['relative_l2']:.1e}",
            row.get("transformers", {}).get("ms", "-"),
        ))  # fmt: skip
        for name, layer in layers.items():
            if layer:
                kernels += f"\nKernels of a layer, batch {row['batch']}, passes {name} ({layer['step']} in a step):\n\n"
                kernels += "".join(f"- {us} us `{kernel[:110]}`\n" for kernel, us in layer["names"])
    shape = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    return (
        f"# Fused decode steps on {result['device']}, {result['date']}\n\n"
        f"{versions_of(result)}. {shape}; {result['activations']} FP8 activations, FP8 weights, query and cache; "
        f"the attention output is quantised as {result['output']}; hidden states {result['hidden']}; "
        f"contexts of {result['context'][0]} to {result['context'][1]} tokens; compiled by {result['scope']}. {HOW}\n\n"
        f"{table(columns, rows)}{kernels}"
    )


HOW = (
    "CUDA-graph replays of both variants in turn; medians. Passes on and off compile the same model; kernels are those "
    "between one attention kernel and the next, by torch.profiler; their times are medians over the layers of one step."
)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = parser_of(__doc__)
    for name, default in vars(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, nargs=2, default=[1024, 2048], help="shortest and longest")
    parser.add_argument("--activations", choices=("static", "token"), default="static")
    parser.add_argument(
        "--output", choices=QUANTISERS, help="how the attention output is quantised; as the activations"
    )
    parser.add_argument("--batched", action="store_true", help="hidden states [B, 1, hidden] instead of [T, hidden]")
    parser.add_argument("--rope", default="auto", help="option of that name of the passes")
    parser.add_argument("--scope", choices=("model", "layer"), default="model", help="what is compiled at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="replays timed at once")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a layer")
    parser.add_argument("--transformers", type=int, nargs="*", help="time transformers' Llama at these batch sizes")
    return parser


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Time both variants, and transformers' steps if asked to; `--json` writes a page beside it, too."""
    args = arguments().parse_args(argv)
    bench = Bench(args)
    result = {
        "sizes": vars(bench.sizes), "activations": args.activations, "output": args.output or args.activations,
        "context": args.context, "scope": args.scope, "hidden": "[B, 1, hidden]" if args.batched else "[T, hidden]",
        **machine(args.device),
    }  # fmt: skip
    variants = [bench.compile(name) for name in ("off", "on")]
    result["compile_seconds"] = {v.name: round(v.compile_seconds, 1) for v in variants}
    report = vattn.fusion_report()
    print(report.summary(), *dict.fromkeys(str(node).partition(": ")[2] for node in report), sep="\n  ", flush=True)
    for batch in bench.batches:
        row = bench.run_batch(variants, batch)
        shown = json.dumps({name: value for name, value in row.items() if "kernels" not in name})
        add_row(result, row, args.json, shown)
    sizes = bench.sizes
    del bench, variants
    for batch in args.transformers or []:
        if args.device == "cuda":
            torch.cuda.empty_cache()
        timed = transformers_ms(sizes, batch, sum(args.context) // 2, 68, args.device)
        print(f"transformers, batch {batch}: {timed}", flush=True)
        for row in result["rows"]:
            if row["batch"] == batch:
                row["transformers"] = timed
    if args.json:
        write_result(args.json, result)
        args.json.with_suffix(".md").write_text(markdown(result))
    return result


if __name__ == "__main__":
    main()
