"""Time every way in which a step can run on Hopper: routes of steps with prompts, tile configs of short decodes.

    python -m benchmarks.attention.routes --fa3 FILE --json out.json --seconds 100

Steps with prompts are rows of `bench attention --random`, by seed and place, in which the ways differ most by what row
tiles and waves suggest. Every way is checked against fp32 first. Peers are FlashAttention-3 and, for decodes, XQA.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from benchmarks.harness import add_row, machine, parser_of
from vattn.cli.bench import random_steps
from vattn.cli.bench.attention import Settings, compile_kernels, run_cell
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.command import forbid_builds
from vattn.cli.bench.peers import OWN, ROUNDED, Call, NotThisCellError, Peer, attention_arguments, choose_peers
from vattn.cli.bench.shapes import LAYERS, LayerShape, Work
from vattn.config import device as devices
from vattn.config.attention import AttentionConfig
from vattn.kernels.hopper import mixed_launch
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.launch import Tuning
from vattn.kernels.hopper.prefill import launch as prefill_launch
from vattn.kernels.hopper.prefill import split_launch

PLACES = {
    258758544: (13, 20, 2, 26, 50, 70, 8, 61, 85, 22, 68, 89, 47, 46, 91, 7),
    192007157: (14, 83, 73, 13, 20, 59, 41),
    20261123: (97, 16, 32, 44, 80, 25, 91, 8, 49, 76, 2, 43),
    7: (44, 5, 28, 91, 14, 17, 98, 8, 46, 89),
    199052100: (86, 10, 73, 29, 35, 7, 83, 67),
}
DECODES = ((40, 300), (40, 500), (48, 300), (24, 300), (16, 100), (24, 700), (64, 300), (100, 1000), (128, 500))
TUNINGS = {
    f"{heads} heads, {slots} slots, {stages} stages, {registers} registers": Tuning(
        heads, stages, ctas, slots=slots, overlap=True, max_registers=registers, whole=True
    )
    for heads, slots, stages, ctas, registers in (
        (2, 2, 4, 2, 128), (2, 2, 6, 2, 128), (2, 4, 4, 1, 128), (1, 4, 4, 3, 80), (1, 4, 3, 3, 80), (1, 4, 4, 2, 128),
    )
}  # fmt: skip
Row = tuple[LayerShape, Work, str]


def by_route(route: str, together: int = 0) -> Peer:
    """Return the way of a route, or of the prefill kernel with so many KV heads side by side."""

    def make(cell: Cell) -> Call:
        args = attention_arguments(cell, "TRITON_ATTN", cell.fp8)
        config, device = AttentionConfig.parse(args.config), cell.query.device
        tokens, reqs = cell.query.shape[0], cell.seq_lens.shape[0]
        schedule = decode_fast.plan_shape(config, tokens, reqs, device)
        args = args._replace(plan=[torch.zeros(schedule, dtype=torch.int32, device=device)])
        steps = (args.query_start_loc, args.seq_lens, args.plan[0], tokens, config)
        if route == "prefill":
            tiles = prefill_launch.choose_tiles(config, tokens, reqs, devices.multiprocessors(device))
            if not prefill_launch.accepts(args, config) or config.num_kv_heads % together:
                raise NotThisCellError("few rows a request, or heads that do not divide")
            tiles = replace(tiles, together=together)
            prefill_launch.plan(*steps, tiles)
        elif config.group_size > (split_launch if route == "split_keys" else decode_fast).MAX_GROUP_SIZE:
            raise NotThisCellError("a larger group")
        else:
            mixed_launch.plan(*steps, route)

        def step() -> torch.Tensor:
            if route == "prefill":
                prefill_launch.prefill(args, config, tiles)
            else:
                mixed_launch.attend(args, config, route)
            return args.output

        return step

    name = f"vattn {route}" + (f", {together} heads" if together else "")
    return Peer(name, "vattn", lambda: None, make, ROUNDED)


def by_tuning(name: str, tuning: Tuning) -> Peer:
    """Return the way of a tile config of the decode kernel."""

    def make(cell: Cell) -> Call:
        args = attention_arguments(cell, "TRITON_ATTN")
        config = AttentionConfig.parse(args.config)

        def step() -> torch.Tensor:
            decode_fast.decode(args, config, tuning)
            return args.output

        return step

    return Peer(f"vattn {name}", "vattn", lambda: None, make, ROUNDED)


def rows() -> list[tuple[Row, list[Peer]]]:
    """Return the rows with their ways, those of all seeds and decodes in turn."""
    routes = [by_route(name) for name in ("two_kernels", "split_keys")]
    routes += [by_route("prefill", heads) for heads in (2, 8, 24)]
    tunings = [by_tuning(*item) for item in TUNINGS.items()]
    drawn = {seed: random_steps.draw(100, seed) for seed in PLACES}
    found: list[list[tuple[Row, list[Peer]]]] = [
        [((LAYERS["llama3-8b"], Work(f"{reqs} x {keys}", ((1, keys),) * reqs), "fp8"), tunings)
         for reqs, keys in DECODES],
        *([(drawn[seed][place], routes) for place in places] for seed, places in PLACES.items()),
    ]  # fmt: skip
    return [part[place] for place in range(max(map(len, found))) for part in found if place < len(part)]


def main() -> None:
    """Measure and print a line a row."""
    parser = parser_of(__doc__)
    parser.add_argument("--fa3", help="a FlashAttention-3 library to load")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further row after so long")
    parser.add_argument("--replays", type=int, default=5)
    options = parser.parse_args()
    if options.fa3:
        from vattn.backends.flash_attn.libraries import load_flash_attn

        load_flash_attn(options.fa3)
    forbid_builds(False)
    peers = [peer for peer in choose_peers(["fa3", "xqa"]) if peer.problem() is None and not peer.name.startswith("v")]
    result, start, all_rows = machine(), time.monotonic(), rows()
    compile_kernels(all_rows, Settings())
    for row, ways in all_rows:
        if time.monotonic() - start > options.seconds:
            break
        measured = run_cell(*row, [OWN[0], *ways, *peers], Settings(replays=options.replays), {})
        torch.cuda.empty_cache()
        times = {name: entry["us"] for name, entry in measured["kernels"].items() if "us" in entry}
        add_row(
            result, measured, options.json, f"{measured['model']}, {measured['work']}, {measured['cache']}: {times}"
        )


if __name__ == "__main__":
    main()
