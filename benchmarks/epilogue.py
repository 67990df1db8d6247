"""Time what a quantised attention output costs over a plain one, per kernel path, after checking every result.

    python benchmarks/epilogue.py --json out.json

Each cell runs one attention with the output in the model dtype and in quantised formats, replays interleaved, inputs
rotated past the L2 cache. Codes must be those that `vattn.quantization.codecs` makes of the plain output. Formats
divide as fused ones do on CUDA, except where the name says "exact".
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import attention as decode_bench
from benchmarks import prefill as prefill_bench
from benchmarks.timing import Timer, interleave
from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.kernels import variants
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.codecs import quantise_output
from vattn.quantization.formats import OUTPUT_FORMATS

FORMATS: dict[str, tuple[str, str]] = {
    "fp8_static": ("fp8_static", "approximate_divide"),
    "fp8_static, exact": ("fp8_static", "divide"),
    "fp8_group128": ("fp8_group128", "approximate_divide"),
    "fp8_group64": ("fp8_group64", "approximate_divide"),
    "nvfp4": ("nvfp4", "approximate_divide"),
    "nvfp4, exact": ("nvfp4", "divide"),
    "fp8_per_token": ("fp8_per_token", "approximate_divide"),
}
DECODE = [(1, 1024), (1, 8192), (8, 1024), (32, 1024), (64, 4096), (128, 2048), (256, 1024)]
PREFILL = ["1 x 8k", "16 x 1k", "chunk 4 x 512 of 8k"]
WAYS = {"split": {"few_requests": "split"}}
"""Of one request, beside what runs now."""

SMALL_DECODE, SMALL_PREFILL = [(1, 1024), (32, 1024)], ["1 x 8k"]

Inputs = tuple[AttentionArgs, AttentionConfig]


def decode_inputs(batch: int, context: int, fp8: bool) -> list[Inputs]:
    """Return arguments of a decode step for as many sets of inputs as exceed the L2 cache."""
    from vattn.kernels.hopper.decode import launch as decode_fast

    shape = decode_bench.equal(batch, context)
    size = 2 * shape.keys * shape.kv_heads * shape.head_size * (1 if fp8 else 2)
    count = max(1, min(decode_bench.MAX_ROTATIONS, decode_bench.ROTATED_BYTES // size))
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    made = []
    for cell in [decode_bench.Cell(shape, fp8, seed) for seed in range(count)]:
        config = decode_bench.config_of(cell).replace(backend="TRITON_ATTN")
        shape = decode_fast.plan_shape(config, batch, batch, torch.device("cuda:0"))
        schedule = torch.zeros(shape, dtype=torch.int32, device="cuda")
        decode_fast.plan(cell.starts, cell.seq_lens, schedule, config)
        cache = cell.cache.view(torch.uint8) if fp8 else cell.cache
        args = _arguments(cell.query, cache, cell.starts, cell.seq_lens, cell.table, cell.ones, [schedule], workspace)
        made.append((args, config))
    return made


def prefill_inputs(name: str) -> list[Inputs]:
    """Return arguments of a prefill."""
    cell = prefill_bench.Cell(prefill_bench.CELLS[name], 128, 16, seed=1)
    config = AttentionConfig(
        prefill_bench.HEADS, prefill_bench.KV_HEADS, 128, 128, cell.scale, "bfloat16", "bfloat16", backend="TRITON_ATTN"
    )
    args = _arguments(cell.query, cell.cache, cell.starts, cell.seq_lens, cell.table, None, [], None)
    return [(args, config)]


def _arguments(
    query: Tensor, cache: Tensor, starts: Tensor, seq_lens: Tensor, table: Tensor, kv_scale: Tensor | None,
    plan: list[Tensor], workspace: Tensor | None,
) -> AttentionArgs:  # fmt: skip
    nothing = dict.fromkeys(AttentionArgs._fields)
    given = {
        "query": query, "kv_cache": cache, "query_start_loc": starts, "seq_lens": seq_lens, "block_table": table,
        "output": torch.empty_like(query), "k_scale": kv_scale, "v_scale": kv_scale, "plan": plan,
        "workspace": workspace,
    }  # fmt: skip
    return AttentionArgs(**{**nothing, **given})  # type: ignore[arg-type]


def in_format(inputs: Inputs, name: str, arithmetic: str) -> Inputs:
    """Return the same attention with another output."""
    args, config = inputs
    fmt = OUTPUT_FORMATS[name]
    output, block_scale = fmt.allocate(args.query, config.head_size_v, torch.bfloat16)
    output.view(torch.uint8).fill_(0x7F)
    scale = torch.full((1,), 0.003, device="cuda") if fmt.static_scale else None
    args = args._replace(output=output, output_block_scale=block_scale, output_scale=scale)
    return args, config.replace(output_format=name, output_arithmetic=arithmetic)


def by_backend(inputs: Inputs) -> Callable[[], object]:
    """Return a call of the path that the backend chooses."""
    backend = selector.get_backend("TRITON_ATTN")
    return lambda: backend.attention(*inputs)


def by_way(**changes: Any) -> Callable[[Inputs], Callable[[], object]]:
    """Return calls of the path that the backend chooses under other variants."""

    def make(inputs: Inputs) -> Callable[[], object]:
        call = by_backend(inputs)

        def step() -> object:
            with variants.using(**changes):
                return call()

        return step

    return make


def by_triton(inputs: Inputs) -> Callable[[], object]:
    """Return a call of the general Triton kernel."""
    from vattn.kernels.triton.attention.launch import paged_attention

    return lambda: paged_attention(*inputs)


def codes_differing(plain: Inputs, quantised: Inputs) -> float:
    """Return the share of output bytes that `vattn.quantization.codecs` makes otherwise of the plain output."""
    args, config = quantised
    expected = torch.empty_like(args.output)
    scales = None if args.output_block_scale is None else torch.empty_like(args.output_block_scale)
    fmt, exact = config.output_format, config.output_arithmetic.removeprefix("approximate_")
    quantise_output(plain[0].output, fmt, expected, scales, args.output_scale, exact)
    return float((args.output.view(torch.uint8) != expected.view(torch.uint8)).float().mean())


def run_cell(
    name: str, cells: list[Inputs], call: Callable[[Inputs], Callable[[], object]], replays: int
) -> dict[str, Any]:
    """Check and time all formats on one cell."""
    row: dict[str, Any] = {"cell": name, "formats": {}}
    timers = {"none": Timer([call(inputs) for inputs in cells])}
    for label, (fmt, arithmetic) in FORMATS.items():
        entry = row["formats"].setdefault(label, {})
        try:
            quantised = [in_format(inputs, fmt, arithmetic) for inputs in cells]
            timers[label] = Timer([call(inputs) for inputs in quantised])
            entry["codes_differing"] = codes_differing(cells[0], quantised[0])
        except Exception as error:  # a format that fails is reported, the rest goes on
            entry["failed"] = repr(error)[:300]
            print(f"{name} {label} failed: {error!r}"[:600], file=sys.stderr)
    times = interleave(timers, replays)
    row["us"] = round(times.pop("none"), 2)
    for label, us in times.items():
        row["formats"][label].update(us=round(us, 2), ratio=round(us / row["us"], 4))
    return row


def cells(small: bool) -> list[tuple[str, Callable[[], list[Inputs]], Callable[[Inputs], Callable[[], object]]]]:
    """Return name, inputs and call of every cell."""
    found = []
    for fp8 in (True, False):
        for batch, context in SMALL_DECODE if small else DECODE:
            name = f"decode {'fp8' if fp8 else 'bf16'} {batch} x {context}"
            found.append((name, lambda b=batch, c=context, f=fp8: decode_inputs(b, c, f), by_backend))
        for context, (way, changes) in itertools.product((1024,) if small else (1024, 8192), WAYS.items()):
            name = f"decode {'fp8' if fp8 else 'bf16'} 1 x {context}, {way}"
            found.append((name, lambda c=context, f=fp8: decode_inputs(1, c, f), by_way(**changes)))
    for cell in SMALL_PREFILL if small else PREFILL:
        found.append((f"prefill bf16 {cell}", lambda c=cell: prefill_inputs(c), by_backend))
        found.append((f"prefill bf16 {cell}, Triton", lambda c=cell: prefill_inputs(c), by_triton))
    return found  # type: ignore[return-value]


def markdown(result: dict[str, Any]) -> str:
    """Return the results as a table."""
    lines = [
        f"# Quantised outputs over plain ones on {result['gpu']}, {result['date']}",
        "",
        f"torch {result['torch']}, triton {result['triton']}. Time with the format divided by time with bf16 output; "
        "in brackets the share of codes that differ from quantising the plain output exactly.",
        "",
        f"| cell | plain, us | {' | '.join(FORMATS)} |",
        "|---|---|" + "---|" * len(FORMATS),
    ]
    for row in result["rows"]:
        entries = [row["formats"].get(label, {}) for label in FORMATS]
        shown = [f"{e['ratio']:.3f} ({e['codes_differing']:.0e})" if "ratio" in e else "failed" for e in entries]
        lines.append(f"| {row['cell']} | {row['us']} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results; a table goes beside them as .md")
    parser.add_argument("--small", action="store_true", help="few cells")
    parser.add_argument("--replays", type=int, default=101, help="of every format, in turn; the median counts")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "rows": [],
    }  # fmt: skip
    for name, make, call in (cell for cell in cells(args.small) if args.only in cell[0]):
        row = run_cell(name, make(), call, args.replays)
        result["rows"].append(row)
        print(row["cell"], row["us"], {k: v.get("ratio", "failed") for k, v in row["formats"].items()}, flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1))
            args.json.with_suffix(".md").write_text(markdown(result))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
