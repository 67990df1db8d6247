"""Time the ways that one of vattn's steps can go beside other libraries' kernels, after checking every result.

    python benchmarks/variants.py --fa3 fa3.so --json out.json --only "speculative;mixed"

Each cell runs every way and every peer in one process, replays interleaved, inputs rotated past the L2 cache. The ways
are those of `vattn.kernels.variants`, of `decode_fast.Tuning` and of `prefill_launch.Cut`; the first is what runs now.
For each cell the fastest right way is named, beside the fastest peer and the bar.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vattn.backends.selector import get_backend
from vattn.cli.bench import attention, peers
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.peers import Call, NotThisCellError, Peer
from vattn.cli.bench.report import write_result
from vattn.cli.bench.shapes import LAYERS, WORKS, LayerShape, Work
from vattn.config.attention import AttentionConfig
from vattn.config.device import multiprocessors
from vattn.kernels import variants
from vattn.ops.arguments import VarlenAttentionArgs

LLAMA, WIDE = LAYERS["llama3-8b"], LayerShape("16 heads of 256", 16, 8, 256)
WINDOW = LayerShape("llama3-8b, window 1024", 32, 8, 128, window=1024)
LONG_MIX = Work("8 x 2048 prefill + 128 decodes of 4k", ((2048, 2048),) * 8 + ((1, 4096),) * 128)
SHORT_EXTENDS = Work("32 x 20 new of 4k + 32 decodes of 4k", ((20, 4096), (1, 4096)) * 32)
DRAFTS_MIX = Work("8x512 prefill + 64 x 4 drafts of 4k", ((512, 512),) * 8 + ((4, 4096),) * 64)
SAME_PAIRS = Work("32 x 1024 new of 1536", ((1024, 1536),) * 32)
"""As many rows as a prompt of 32k, which see 1024 keys on average: as many pairs as under a window of 1024."""


def _found() -> None:
    return None


def way(name: str, make: Callable[[Cell], Call], fp8_query: bool = False) -> Peer:
    """Return one of vattn's ways as something to time."""
    return Peer(f"vattn {name}", name, _found, make, peers.ROUNDED if fp8_query else (1.6e-2, 1.6e-2))


def by_variant(name: str, fp8_query: bool = False, **changes: Any) -> Peer:
    """Return the op, and its schedule, under other variants."""

    def make(cell: Cell) -> Call:
        with variants.using(**changes):
            args = peers.attention_arguments(cell, "TRITON_ATTN", fp8_query)

        def step() -> Tensor:
            with variants.using(**changes):
                torch.ops.vattn.attention(*args)
            return args.output

        return step

    return way(name, make, fp8_query)


def by_tuning(name: str, tuning: Any, fp8_query: bool = False, at_a_time: int = 0) -> Peer:
    """Return the decode kernels with another tuning, the schedule made for it, or by so many rows of a request."""

    def make(cell: Cell) -> Call:
        from vattn.kernels.hopper.decode import launch as decode_fast

        args = peers.attention_arguments(cell, "TRITON_ATTN", fp8_query)
        config, (schedule,) = AttentionConfig.parse(args.config), args.plan
        rows = args.query.shape[0]
        tokens = at_a_time or rows // args.seq_lens.shape[0]
        decode_fast.plan(args.query_start_loc, args.seq_lens, schedule, config, tuning, tokens, num_tokens=rows)

        def step() -> Tensor:
            decode_fast.decode(args, config, tuning, tokens)
            return args.output

        return step

    return way(name, make, fp8_query)


def by_clusters(size: int) -> Peer:
    """Return the kernel of few requests with so many CTAs a KV head of a request."""

    def make(cell: Cell) -> Call:
        from vattn.kernels.hopper.decode import cluster_launch as launch

        args = peers.attention_arguments(cell, "TRITON_ATTN")
        config = AttentionConfig.parse(args.config)
        grid = (len(cell.work.requests) * config.num_kv_heads,)
        arguments = launch.kernel_arguments(args, config, args.output, size)

        def step() -> Tensor:
            launch.launch_in_clusters(launch.decode_cluster_kernel, grid, size, arguments)
            return args.output

        return step

    return way(f"clusters of {size}", make)


def by_cut(name: str, fp8_query: bool = False, **cut: int) -> Peer:
    """Return the prefill kernel with rows cut in another way; `pack` -1 packs the heads of a group."""

    def make(cell: Cell) -> Call:
        from vattn.kernels.hopper.prefill import launch as prefill_launch

        args = peers.attention_arguments(cell, "TRITON_ATTN", fp8_query)
        config, device = AttentionConfig.parse(args.config), args.query.device
        tokens, reqs = args.query.shape[0], args.seq_lens.shape[0]
        pack = prefill_launch.packs(config) if cut.get("pack") == -1 else cut.get("pack", 1)
        chosen = prefill_launch.Cut(**{**cut, "pack": pack})
        # The step's own schedule may have no room for smaller tiles.
        shape = prefill_launch.plan_rows(tokens, reqs, chosen), prefill_launch.RECORD_WORDS
        schedule = torch.zeros(shape, dtype=torch.int32, device=device)
        prefill_launch.plan(args.query_start_loc, args.seq_lens, schedule, tokens, config, chosen)

        def step() -> Tensor:
            ctas = multiprocessors(device)
            prefill_launch.launch(args, config, schedule, args.output, ctas, chosen)
            return args.output

        return step

    return way(name, make, fp8_query)


def by_parts(name: str, fp8_query: bool = False) -> Peer:
    """Return a mixed step as two, one after the other: its prompts, which come first, and its decodes."""

    def make(cell: Cell) -> Call:
        args = peers.attention_arguments(cell, "TRITON_ATTN", fp8_query)
        prompts = sum(query > 1 for query, _ in cell.work.requests)
        rows = sum(query for query, _ in cell.work.requests[:prompts])
        parts = [
            (args.query[:rows], cell.starts[: prompts + 1], slice(0, prompts), args.output[:rows]),
            (args.query[rows:], cell.starts[prompts:] - rows, slice(prompts, None), args.output[rows:]),
        ]
        calls = []
        for query, starts, requests, output in parts:
            part = args._replace(query=query, query_start_loc=starts, output=output, plan=[])
            part = part._replace(seq_lens=cell.seq_lens[requests], block_table=cell.table[requests])
            config = AttentionConfig.parse(args.config)
            shape = get_backend("TRITON_ATTN").plan_shape(config, query.shape[0], *part.block_table.shape)
            if shape:
                schedule = torch.zeros(shape, dtype=torch.int32, device=cell.device)
                torch.ops.vattn.plan(starts, part.seq_lens, schedule, args.config)
                part = part._replace(plan=[schedule])
            calls.append(part)

        def step() -> Tensor:
            for part in calls:
                torch.ops.vattn.attention(*part)
            return args.output

        return step

    return way(name, make, fp8_query)


def packed_rows(cell: Cell) -> tuple[Tensor, Tensor]:
    """Return keys and values `[T, K, D]` of a cell of equally long whole prompts, without a cache."""
    if cell.fp8 or any(work != cell.work.requests[0] or work[0] != work[1] for work in cell.work.requests):
        raise NotThisCellError("anything but whole prompts of one length on bf16")
    _, key, value = (part.transpose(1, 2).flatten(0, 1).contiguous() for part in cell.contiguous)
    return key, value


def by_fa3_on_packed_rows() -> Peer:
    """Return FA3 without a cache."""

    def make(cell: Cell) -> Call:
        from vattn.backends.flash_attn.libraries import NAMESPACE

        forward = getattr(torch.ops, NAMESPACE).fwd
        key, value = packed_rows(cell)
        output, most = torch.empty_like(cell.query), cell.work.requests[0][0]

        def step() -> Tensor:
            forward(
                cell.query, key, value, None, None, None, output, cell.starts, cell.starts, None, None, None, most,
                most, None, None, None, None, None, None, None, None, None, cell.scale, True, -1, -1, 0.0, True, None,
                1, None, 0, None, 1, 0, None,
            )  # fmt: skip
            return output

        return step

    return Peer("FA3 (packed rows)", "fa3", _found, make)


def by_general_kernel(name: str, contiguous: bool = False) -> Peer:
    """Return the general Triton kernel, over the cache or over packed keys and values."""

    def make(cell: Cell) -> Call:
        from vattn.kernels.triton.attention import launch

        args = peers.attention_arguments(cell, "TRITON_ATTN")
        config = AttentionConfig.parse(args.config)
        if not contiguous:

            def step() -> Tensor:
                launch.paged_attention(args, config)
                return args.output

            return step
        key, value = packed_rows(cell)
        given = {field: getattr(args, field) for field in VarlenAttentionArgs._fields if hasattr(args, field)}
        packed = VarlenAttentionArgs(**{**given, "key": key, "value": value, "kv_start_loc": cell.starts})
        without_blocks = config.replace(block_size=0)

        def packed_step() -> Tensor:
            launch.packed_attention(packed, without_blocks)
            return args.output

        return packed_step

    return way(name, make)


def _tuned(fp8_query: bool = False) -> list[Peer]:
    """Return decode tunings: as it is, side by side in one CTA, with overlap, deeper."""
    from vattn.kernels.hopper.decode.launch import Tuning

    named = {
        "2 heads, 3 stages": Tuning(2, 3, 4),
        "2 heads, 3 stages, overlap": Tuning(2, 3, 4, overlap=True),
        "2 heads, 4 stages": Tuning(2, 4, 4),
        "4 heads, 3 stages": Tuning(4, 3, 2),
        "slots 4, 5 stages": Tuning(2, 5, 1, slots=4, overlap=True),
        "slots 4, 6 stages": Tuning(2, 6, 1, slots=4, overlap=True),
        "slots 2 of 4 heads, 5 stages": Tuning(4, 5, 1, slots=2, overlap=True),
    }
    return [by_tuning(name, tuning, fp8_query) for name, tuning in named.items()]


DEFAULT = by_variant("as it is")
DEFAULT_FP8 = by_variant("as it is, FP8 query", True)


@dataclass(frozen=True)
class Question:
    """One cell and the ways that are tried on it.

    Attributes:
        key: on the command line.
        layer, work, cache: of the cell.
        ways: vattn's; the first is the default.
        bar: least time of the best peer over the best way.
        peers: keys of `vattn.cli.bench.peers.PEERS`.
        others: further peers.
    """

    key: str
    layer: LayerShape
    work: Work
    cache: str
    ways: tuple[Peer, ...]
    bar: float
    peers: tuple[str, ...] = ("fa3", "flashinfer", "cudnn")
    others: tuple[Peer, ...] = ()


def _mixed_ways(fp8_query: bool = False, below: int = 256) -> tuple[Peer, ...]:
    label = ", FP8 query" if fp8_query else ""
    return tuple(
        by_variant(f"{name}{label}", fp8_query, mixed=name, mixed_below=below)
        for name in ("general", "packed", "two", "overlapped")
    )


def _cuts(*cuts: dict[str, int], fp8_query: bool = False) -> tuple[Peer, ...]:
    """Return the prefill kernel cut in several ways."""
    return tuple(by_cut(", ".join(f"{key} {value}" for key, value in cut.items()), fp8_query, **cut) for cut in cuts)


def _decode_questions() -> Iterator[Question]:
    """Yield decode steps: one kernel for few requests, and registers of the kernel of many."""
    from vattn.kernels.hopper.decode.launch import Tuning

    split = by_variant("split", few_requests="split")
    few = (by_clusters(8), by_clusters(16), split)
    for lengths, cache in (((1024, 1), "bf16"), ((1024, 1024), "bf16"), ((1024,) * 4, "bf16"), ((1024, 1), "fp8")):
        work = Work(f"decode of {', '.join(map(str, lengths))}", tuple((1, length) for length in lengths))
        yield Question("few", LLAMA, work, cache, few, 1.0, ())
    for lengths in ((2048, 1), (2048, 2048), (4096, 1), (4096, 4096)):
        work = Work(f"decode of {', '.join(map(str, lengths))}", tuple((1, length) for length in lengths))
        for cache in ("fp8", "bf16"):
            yield Question("pairs", LLAMA, work, cache, (by_clusters(8), split), 1.0, ())
    whole = by_tuning("168 registers", Tuning(2, 2, 1, slots=4, overlap=True))
    less = by_tuning("128 registers", Tuning(2, 2, 1, slots=4, overlap=True, max_registers=128))
    for name in ("32x1k", "64x4k", "128x2k"):
        ways = (DEFAULT, whole)
        yield Question("registers", LLAMA, WORKS[f"decode {name}"], "bf16", ways, 1.0, ("cudnn",))
    yield Question("registers", LLAMA, WORKS["speculative 64x4k, 4"], "bf16", (DEFAULT, less), 1.0, ())
    for name, cache, bar in (
        ("1x1k", "bf16", 1.5), ("1x1k", "fp8", 1.1), ("1x8k", "bf16", 1.25), ("1x8k", "fp8", 1.2),
    ):  # fmt: skip
        yield Question("clusters", LLAMA, WORKS[f"decode {name}"], cache, (DEFAULT, *few), bar, ("cudnn", "xqa"))


def _wave_questions() -> Iterator[Question]:
    """Yield steps whose pairs of KV heads are about as many as multiprocessors: requests whole, or by a schedule."""
    scheduled = by_variant("scheduled", one_wave="scheduled")
    up_to_2k = Work("decode of 32 of 100 to 2k", tuple((1, 100 + 61 * i) for i in range(32)))
    up_to_1k = Work("decode of 32 of 50 to 1k", tuple((1, 50 + 31 * i) for i in range(32)))
    bf16, fp8 = ("flashinfer", "cudnn"), ("xqa",)
    yield Question("wave", LLAMA, WORKS["decode 32x1k"], "fp8", (DEFAULT, scheduled), 1.05, fp8)
    yield Question("wave", LLAMA, WORKS["decode 32x1k"], "bf16", (DEFAULT, scheduled), 1.25, bf16)
    yield Question("wave", LLAMA, up_to_1k, "fp8", (DEFAULT, scheduled), 1.0, fp8)
    for cache, long in (("fp8", 1024), ("bf16", 2048)):
        lone = Work(f"decode of 1 of {long} and 31 of 100", ((1, long), *((1, 100),) * 31))
        yield Question("wave", LLAMA, lone, cache, (DEFAULT, scheduled), 1.0, ())
    yield Question("wave", LLAMA, up_to_2k, "bf16", (DEFAULT, scheduled), 1.0, bf16)
    for requests, keys, cache in ((25, 1024, "bf16"), (33, 512, "fp8"), (32, 256, "fp8"), (32, 256, "bf16")):
        work = Work(f"decode {requests} x {keys}", ((1, keys),) * requests)
        yield Question("wave", LLAMA, work, cache, (DEFAULT, scheduled), 1.0, ())


def _draft_questions() -> Iterator[Question]:
    """Yield speculative steps of groups that fill tiles unevenly, and of fewer tiles than multiprocessors."""
    from vattn.kernels.hopper.decode.launch import Tuning

    work, layer = WORKS["speculative 64x4k, 4"], LAYERS["llama3-70b-tp8"]
    for name in ("qwen2.5-32b", "qwen2.5-7b"):
        yield Question("uneven drafts", LAYERS[name], work, "bf16", (DEFAULT,), 1.0, ("fa3",))
        yield Question("uneven drafts", LAYERS[name], work, "fp8", (DEFAULT, DEFAULT_FP8), 1.2, ("fa3",))
    skewed = Work("speculative 64 of 1k to 8k, 4", tuple((4, 1024 + 113 * i) for i in range(64)))
    general, packed = by_variant("general", few_drafts="general"), by_cut("packed", groups=1, pack=-1)
    shapes = ((64, 4096, 4), (2, 4096, 4), (82, 4096, 4), (16, 16384, 4), (64, 4096, 8))
    works = [Work(f"speculative {reqs}x{keys}, {rows}", ((rows, keys),) * reqs) for reqs, keys, rows in shapes]
    for few, cache in itertools.product((works[0], skewed, *works[1:]), ("bf16", "fp8")):
        yield Question("few drafts", layer, few, cache, (DEFAULT, general, packed), 1.0, ("fa3",))
    eight = Work("speculative 8x4096, 8", ((8, 4096),) * 8)
    two = Work("speculative 64x4096, 2", ((2, 4096),) * 64)
    before = by_tuning("a CTA a multiprocessor", Tuning(1, 2, 1, slots=4, overlap=True))
    for cache in ("bf16", "fp8"):
        yield Question("few drafts", LLAMA, eight, cache, (DEFAULT, general, packed), 1.0, ("fa3",))
    yield Question("few drafts", layer, two, "bf16", (DEFAULT, before), 1.0, ("fa3",))


def _row_tile_questions() -> Iterator[Question]:
    """Yield prompts of few row tiles a multiprocessor, and windows narrower than key tiles."""

    def prompt(length: int, count: int = 1) -> Work:
        return Work(f"prefill {count}x{length}", ((length, length),) * count)

    window, ahead = LAYERS["gpt-oss-20b-window"], {"pack": -1, "ahead": True}
    narrow = {"pack": -1, "groups": 1, "keys": 64}
    for work in (WORKS["prefill 1x8k"], WORKS["prefill 16x1k"]):
        taken = by_cut("taken ahead", **narrow, residents=3, ahead=True)
        yield Question("narrow", window, work, "bf16", (DEFAULT, taken), 1.0, ("fa3",))
        taken = by_cut("taken ahead, FP8 query", True, **narrow, residents=2, ahead=True)
        yield Question("narrow", window, work, "fp8", (DEFAULT_FP8, taken), 1.0, ("fa3",))
    layer, one = LAYERS["llama3-8b-tp8"], by_cut("one warpgroup", pack=-1, groups=1)
    two = by_cut("two warpgroups, ahead", **ahead)
    for length in (8192, 6144, 4096, 2048):
        yield Question("row tiles", layer, prompt(length), "bf16", (DEFAULT, one, two), 1.0, ("fa3",))
    for length in (8192, 4096):
        ways = (
            DEFAULT_FP8, by_cut("ahead, FP8 query", True, ahead=True),
            by_cut("one warpgroup, FP8 query", True, groups=1),
        )  # fmt: skip
        yield Question("row tiles", layer, prompt(length), "fp8", ways, 1.0, ("fa3",))
    for one_layer, work in (
        (LAYERS["llama3-70b-tp8"], prompt(8192)), (LLAMA, prompt(2048)), (LLAMA, prompt(4096)), (LLAMA, prompt(512)),
        (LLAMA, WORKS["prefill 8x512"]), (LLAMA, WORKS["chunk 4x512 of 8k"]),
    ):  # fmt: skip
        yield Question("row tiles", one_layer, work, "bf16", (DEFAULT, two), 1.0, ("fa3",))


def questions() -> Iterator[Question]:
    """Yield what is to be decided, the most important first."""
    from vattn.kernels.hopper.decode.launch import Tuning

    yield from _decode_questions()
    yield from _wave_questions()
    yield from _draft_questions()
    yield from _row_tile_questions()
    mixed, prompt, prompts = WORKS["mixed 8x512 + 128 decodes of 4k"], WORKS["prefill 1x8k"], WORKS["prefill 16x1k"]
    apart, packed = {"pack": 1}, {"pack": -1}
    general, on_packed = by_general_kernel("general kernel"), by_general_kernel("general kernel, packed rows", True)
    for work in (prompt, prompts):
        yield Question("wide", WIDE, work, "bf16", (DEFAULT,), 0.95, ("fa3",))
        yield Question("general", LLAMA, work, "bf16", (general,), 0.7, ("fa3",))
        others = (by_fa3_on_packed_rows(),)
        yield Question("packed rows", LLAMA, work, "bf16", (on_packed,), 0.75, ("fa3",), others)
    both = by_parts("its parts, one after the other")
    yield Question("parts", LLAMA, mixed, "bf16", (DEFAULT, both), 1 / 1.05, ("fa3",))
    both = by_parts("its parts, one after the other, FP8 query", True)
    sixteen = by_variant("sixteen rows, FP8 query", True, mixed_rows="sixteen")
    yield Question("parts", LLAMA, mixed, "fp8", (DEFAULT, DEFAULT_FP8, sixteen, both), 1 / 1.05, ("fa3",))
    yield Question("parts", LLAMA, DRAFTS_MIX, "fp8", (DEFAULT_FP8, sixteen), 1.0, ("fa3",))
    for layer, work in ((WINDOW, WORKS["prefill 1x32k"]), (LLAMA, SAME_PAIRS), (LLAMA, WORKS["prefill 32x1k"])):
        yield Question("window prompts", layer, work, "bf16", (DEFAULT,), 1.0, ("fa3",))
    for work in (prompt, WORKS["prefill 1x32k"], prompts, WORKS["prefill mixed 1 to 8k"], WORKS["chunk 4x512 of 8k"]):
        yield Question("prompts", LLAMA, work, "bf16", (DEFAULT,), 1.0, ("fa3",))
        yield Question("prompts", LLAMA, work, "fp8", (DEFAULT_FP8, *_cuts(packed, fp8_query=True)), 1.0, ("fa3",))
    for work in (prompt, prompts):
        yield Question("wide fp8", WIDE, work, "fp8", (DEFAULT_FP8, *_cuts(apart, fp8_query=True)), 0.95, ("fa3",))
    few = (("1x1k", 1.5), ("1x8k", 1.25), ("8x1k", 1.0))
    tunings = {"as before": Tuning(2, 3, 4), "overlap": Tuning(2, 3, 4, overlap=True), "4 stages": Tuning(2, 4, 4)}
    for name, bar in few:
        ways = (DEFAULT, *(by_tuning(way, tuning) for way, tuning in tunings.items()))
        yield Question("short", LLAMA, WORKS[f"decode {name}"], "bf16", ways, bar)
    yield Question("full", LLAMA, WORKS["decode 128x2k"], "fp8", (DEFAULT, *_tuned()), 1.02, ("xqa",))
    yield Question("mixed", LLAMA, mixed, "bf16", (DEFAULT, *_mixed_ways()), 1.05, ("fa3",))
    yield Question("mixed", LLAMA, mixed, "fp8", (DEFAULT, DEFAULT_FP8, *_mixed_ways(), *_mixed_ways(True)), 1.05)
    yield Question("extends", LLAMA, SHORT_EXTENDS, "bf16", (DEFAULT, *_mixed_ways()), 1.0, ("fa3",))
    yield Question("long mix", LLAMA, LONG_MIX, "bf16", (DEFAULT, *_mixed_ways(below=4096)), 1.0, ("fa3",))
    for name, bar in (("decode 32x1k", 1.05), ("decode 32x8k", 1.2), ("decode 64x4k", 1.05)):
        yield Question("decode", LLAMA, WORKS[name], "fp8", (DEFAULT, *_tuned()), bar, ("xqa",))
    for layer, keys in ((WINDOW, 32768), (LLAMA, 1024)):
        work = Work(f"decode 64 x {keys}", ((1, keys),) * 64)
        for cache in ("bf16", "fp8"):
            yield Question("window", layer, work, cache, (DEFAULT,), 1.0, ())


def answer(question: Question, settings: attention.Settings) -> dict[str, Any]:
    """Check and time one cell; name the winner."""
    others = [peer for key in question.peers for peer in peers.choose_peers([key]) if peer.problem() is None]
    tried = [*question.ways, *question.others, *others]
    row = attention.run_cell(question.layer, question.work, question.cache, tried, settings, ceilings={})
    kernels = row.get("kernels", {})
    default = kernels.get(question.ways[0].name, {}).get("us")
    row |= {"question": question.key, "bar": question.bar, "default_us": default}
    if "best_own" in row:
        best = kernels[row["best_own"]]["us"]
        row["winner"] = row["best_own"].removeprefix("vattn ")
        row["winner_us"] = best
        row["default_over_winner"] = round(default / best, 3) if default else None
        row["bar_met"] = row["peer_over_own"] >= question.bar if "peer_over_own" in row else None
    return row


def warm(question: Question) -> None:
    """Compile what vattn's ways of a cell run, so that a run of their times finds it in Triton's cache."""
    cell = Cell(question.layer, question.work, question.cache, 16, 0)
    for tried in question.ways:
        try:
            error = cell.error(tried.make(cell)())
            print(f"{question.key}, {question.work.name}, {question.cache}: {tried.name}: {error:.1e}", flush=True)
        except Exception as failure:
            print(f"{question.key}, {question.work.name}, {question.cache}: {tried.name}: {failure!r:.300}", flush=True)


def main() -> None:
    """Answer the questions that are asked for, in their order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all numbers")
    parser.add_argument("--only", default="", help="questions by the beginnings of their keys, by semicolons")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further cell after so long")
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--fa3", help="a FlashAttention-3 library to load")
    parser.add_argument("--warm", action="store_true", help="run every way once, to compile it, and time nothing")
    options = parser.parse_args()
    if options.fa3:
        from vattn.backends.flash_attn.libraries import load_flash_attn

        load_flash_attn(options.fa3)
    only = tuple(name.strip() for name in options.only.split(";") if name.strip())
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__}, "rows": [],
    }  # fmt: skip
    start = time.monotonic()
    for question in questions():
        if only and not question.key.startswith(only):
            continue
        if options.warm:
            warm(question)
            continue
        if time.monotonic() - start > options.seconds:
            print(f"stopped after {options.seconds} s", flush=True)
            break
        row = answer(question, attention.Settings(replays=options.replays))
        result["rows"].append(row)
        times = {name: entry.get("us") or next(iter(entry.values()), "-") for name, entry in row["kernels"].items()}
        print(json.dumps({key: row.get(key) for key in SHOWN} | {"us": times}), flush=True)
        if options.json:
            write_result(options.json, result)
        torch.cuda.empty_cache()
    if not options.warm:
        print(json.dumps(winners(result["rows"]), indent=1))


SHOWN = ("question", "work", "cache", "winner", "winner_us", "default_over_winner", "best_peer", "peer_over_own", "bar")


def winners(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each cell decided, without its times."""
    return [{name: row.get(name) for name in (*SHOWN, "bar_met")} for row in rows]


if __name__ == "__main__":
    main()
