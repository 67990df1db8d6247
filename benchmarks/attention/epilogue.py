"""Time what a quantised attention output costs over a plain one, per kernel path, after checking every result.

    python -m benchmarks.attention.epilogue --json out.json

Each cell runs one attention with the output in the model dtype and in quantised formats, replays in turn, over inputs
that exceed the L2 cache. Codes are compared with what `vattn.quantization` makes of the plain output. Formats divide as
fused ones do on CUDA, except where the name says "exact". `--json` writes a page beside it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Call, Calls, add_row, machine, parser_of, table, time_in_turn, versions_of
from vattn.backends import selector
from vattn.cli.bench.attention import Settings, rotations
from vattn.cli.bench.peers import attention_arguments
from vattn.cli.bench.shapes import LAYERS, WORKS
from vattn.config.attention import AttentionConfig
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
DECODE = tuple(f"decode {size}" for size in ("1x1k", "1x8k", "8x1k", "32x1k", "64x4k", "128x2k", "256x1k"))
PREFILL = ("prefill 1x8k", "prefill 16x1k", "chunk 4x512 of 8k")
SMALL = ("decode 1x1k", "decode 32x1k", "prefill 1x8k")

Inputs = tuple[AttentionArgs, AttentionConfig]


def inputs_of(work: str, cache: str) -> list[Inputs]:
    """Return the arguments of a step for as many sets of inputs as exceed the L2 cache."""
    cells = rotations(LAYERS["llama3-8b"], WORKS[work], cache, Settings())
    arguments = [attention_arguments(cell, "TRITON_ATTN") for cell in cells]
    return [(args, AttentionConfig.parse(args.config)) for args in arguments]


def in_format(inputs: Inputs, name: str, arithmetic: str) -> Inputs:
    """Return the same attention with another output."""
    args, config = inputs
    fmt = OUTPUT_FORMATS[name]
    output, block_scale = fmt.allocate(args.query, config.head_size_v, torch.bfloat16)
    output.view(torch.uint8).fill_(0x7F)
    scale = torch.full((1,), 0.003, device=args.query.device) if fmt.static_scale else None
    args = args._replace(output=output, output_block_scale=block_scale, output_scale=scale)
    return args, config.replace(output_format=name, output_arithmetic=arithmetic)


def by_backend(inputs: Inputs) -> Call:
    """Return a call of the path that the backend chooses."""
    backend = selector.get_backend("TRITON_ATTN")
    return lambda: backend.attention(*inputs)


def by_triton(inputs: Inputs) -> Call:
    """Return a call of the general Triton kernel."""
    from vattn.kernels.triton.attention.launch import paged_attention

    return lambda: paged_attention(*inputs)


def codes_differing(plain: Inputs, quantised: Inputs) -> float:
    """Return the share of output bytes that `vattn.quantization` makes otherwise of the plain output."""
    args, config = quantised
    expected = torch.empty_like(args.output)
    scales = None if args.output_block_scale is None else torch.empty_like(args.output_block_scale)
    fmt, exact = config.output_format, config.output_arithmetic.removeprefix("approximate_")
    quantise_output(plain[0].output, fmt, expected, scales, args.output_scale, exact)
    return float((args.output.view(torch.uint8) != expected.view(torch.uint8)).float().mean())


def run_cell(name: str, cells: list[Inputs], call: Callable[[Inputs], Call], replays: int) -> dict[str, Any]:
    """Check and time all formats on one cell."""
    row: dict[str, Any] = {"cell": name, "formats": {label: {} for label in FORMATS}}
    calls: dict[str, Calls] = {"none": [call(inputs) for inputs in cells]}
    quantised: dict[str, list[Inputs]] = {}
    for label, (fmt, arithmetic) in FORMATS.items():
        quantised[label] = [in_format(inputs, fmt, arithmetic) for inputs in cells]
        calls[label] = [call(inputs) for inputs in quantised[label]]
    times, failed = time_in_turn(calls, replays=replays)
    if "none" in failed:
        return row | {"failed": failed}
    row["us"] = round(times.pop("none"), 2)
    for label, us in times.items():
        differing = codes_differing(cells[0], quantised[label][0])
        row["formats"][label] = {"us": round(us, 2), "ratio": round(us / row["us"], 4), "codes_differing": differing}
    for label, problem in failed.items():
        row["formats"][label]["failed"] = problem
    return row


def cells_of(small: bool) -> list[tuple[str, str, str, Callable[[Inputs], Call]]]:
    """Return name, work, cache and call of every cell."""
    found = []
    for work in SMALL if small else (*DECODE, *PREFILL):
        for cache in ("bf16",) if work in PREFILL else ("fp8", "bf16"):
            found.append((f"{work}, {cache}", work, cache, by_backend))
        if work in PREFILL:
            found.append((f"{work}, bf16, general kernel", work, "bf16", by_triton))
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return the results as a page."""

    def shown(entry: dict[str, Any]) -> str:
        return f"{entry['ratio']:.3f} ({entry['codes_differing']:.0e})" if "ratio" in entry else "failed"

    rows = [
        (r["cell"], r.get("us", "failed"), *(shown(r["formats"][label]) for label in FORMATS)) for r in result["rows"]
    ]
    return (
        f"# Quantised outputs over plain ones on {result['device']}, {result['date']}\n\n"
        f"{versions_of(result)}. Time with the format divided by time with bf16 output; in brackets the share of codes "
        f"that differ from quantising the plain output exactly.\n\n{table(('cell', 'plain, us', *FORMATS), rows)}"
    )


def main() -> None:
    """Run every cell and print one line each."""
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="few cells")
    parser.add_argument("--replays", type=int, default=101, help="of every format, in turn; the median counts")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    options = parser.parse_args()
    result = machine()
    for name, work, cache, call in (cell for cell in cells_of(options.small) if options.only in cell[0]):
        add_row(result, run_cell(name, inputs_of(work, cache), call, options.replays), options.json)
        if options.json:
            options.json.with_suffix(".md").write_text(markdown(result))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
