"""Time steps that hold a prompt beside decodes, captured and not, in turn: does `mixed_graph_sizes` pay?

    python -m benchmarks.models.mixed_graphs --json out.json

The model has the shape of Llama 3 8B and random weights; 16 requests decode behind 1024 tokens, and prompts join them
so that a step has the given number of tokens. Generators with and without graphs for such steps take turns. Medians of
the wall time from `add` to the prompt's token, which holds a step of decodes alone too, alike in both; and of the
device's and the host's part of it.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import torch

import vattn
from benchmarks.compile.compilations import watch_compilations
from benchmarks.harness import machine, parser_of
from benchmarks.models import llama
from vattn.cli.bench.report import write_result
from vattn.integrations.transformers import PackedModel, enable

DECODES = 16


def measure(
    packed: PackedModel, sizes: list[int], ladder: bool, context: int, repeats: int, options: dict[str, Any]
) -> list[Any]:
    """Return a row for each number of tokens; graphs are those of the generator's own ladder, or of these sizes."""
    rng, vocabulary = random.Random(0), packed.model.config.vocab_size
    rows: list[Any] = []
    times: dict[tuple[int, bool], list[tuple[float, float, float]]] = {}
    compiled: list[str] = []
    # Rounds of one generator each, since a cache belongs to the newest; the first two have everything compiled.
    for turn in range(2 + 2 * repeats):
        graphs = bool(turn % 2)
        generator = vattn.Generator(
            packed, compile="layers" if turn == 0 else "none",
            mixed_graph_sizes=(None if ladder else sizes) if graphs else (), graph_sizes=[DECODES], **options,
        )  # fmt: skip
        if generator.mixed_graphs is not None and turn < 2:
            print(generator.mixed_graphs.report, flush=True)

        def add(length: int, new: int, generator: vattn.Generator = generator) -> vattn.Request:
            return generator.add(
                [rng.randrange(vocabulary) for _ in range(length)], vattn.Sampling(new, stop_token_ids=())
            )

        for _ in range(DECODES):
            add(context, 200)
        while any(not request.output for request in [*generator.scheduler.running, *generator.scheduler.waiting]):
            generator.step()
        with watch_compilations() as found:
            for size in sizes * 4:
                # A step of decodes is on its way already; the one with the prompt is launched behind it.
                request = add(size - DECODES, 1)
                before = generator.statistics()
                past = before.seconds, before.device_seconds, before.host_seconds
                while not request.done:
                    generator.step()
                now = generator.statistics()
                spent = now.seconds - past[0], now.device_seconds - past[1], now.host_seconds - past[2]
                if turn > 1:
                    times.setdefault((size, graphs), []).append(spent)
        compiled += found if turn > 1 else []
        for request in [*generator.scheduler.running, *generator.scheduler.waiting]:
            generator.cancel(request)
    for (size, graphs), each in sorted(times.items()):
        wall, device, host = (statistics.median(column) * 1e3 for column in zip(*each, strict=True))
        rows.append({"tokens": size, "graphs": graphs, "wall_ms": wall, "device_ms": device, "host_ms": host})
        print(
            {key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True
        )
    if compiled:
        raise RuntimeError(f"compiled inside of the timed part: {compiled[:5]}")
    return rows


def main() -> None:
    """Run it and print it."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ladder", action="store_true", help="graphs of the generator's own choice")
    parser.add_argument("--requests", type=int, default=DECODES + 1, help="that the generator runs at once")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = llama.make_model(llama.SMALL if args.small else llama.LARGE, args.layers, device)
    packed = enable(model, memory="64MiB" if args.small else "16GiB", merge_projections=True)
    options = {
        "max_seq_len": 512 if args.small else 4096, "token_budget": max(args.sizes), "reuse_prefixes": False,
        "max_num_reqs": args.requests,
    }  # fmt: skip
    rows = measure(packed, args.sizes, args.ladder, 64 if args.small else 1024, args.repeats, options)
    if args.json:
        write_result(args.json, machine(device) | {"rows": rows})


if __name__ == "__main__":
    main()
