"""Time the ways that a step of vattn's attention can go beside other libraries' kernels, after checking every result.

    python -m benchmarks.attention.variants --fa3 fa3.so --json out.json --only "drafts;mixed"

Each cell runs every way and every peer in one process, replays in turn, over inputs that exceed the L2 cache. The ways
are the choices of `vattn.kernels.variants`; the first is the default. For each cell the fastest right way is named,
beside the fastest peer and the bar.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import add_row, machine, parser_of
from vattn.backends.selector import get_backend
from vattn.cli.bench import attention, peers
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.peers import Call, NotThisCellError, Peer
from vattn.cli.bench.shapes import LAYERS, WORKS, LayerShape, Work
from vattn.config.attention import AttentionConfig
from vattn.kernels import variants
from vattn.ops.arguments import VarlenAttentionArgs

LLAMA, WIDE = LAYERS["llama3-8b"], LayerShape("16 heads of 256", 16, 8, 256)
WINDOW = LayerShape("llama3-8b, window 1024", 32, 8, 128, window=1024)
DRAFTS_MIX = Work("8x512 prefill + 64 x 4 drafts of 4k", ((512, 512),) * 8 + ((4, 4096),) * 64)
SAME_PAIRS = Work("32 x 1024 new of 1536", ((1024, 1536),) * 32)
"""As many rows as a prompt of 32k, which see 1024 keys on average: as many pairs as under a window of 1024."""


def way(name: str, make: Callable[[Cell], Call], fp8_query: bool = False) -> Peer:
    """Return one of vattn's ways as something to time."""
    return Peer(f"vattn {name}", name, lambda: None, make, peers.ROUNDED if fp8_query else (1.6e-2, 1.6e-2))


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

    return Peer("FA3 (packed rows)", "fa3", lambda: None, make)


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
    ways: tuple[Peer, ...] = (DEFAULT,)
    bar: float = 1.0
    peers: tuple[str, ...] = ("fa3",)
    others: tuple[Peer, ...] = ()


def _decodes(lengths: tuple[int, ...], tokens: int = 1) -> Work:
    """Return a step of requests with so many keys each, and so many new tokens."""
    listed = ", ".join(map(str, lengths)) if len(lengths) < 5 else f"{len(lengths)} of {lengths[0]} to {lengths[-1]}"
    return Work(f"{tokens} new of {listed}", tuple((tokens, length) for length in lengths))


def _decode_questions() -> Iterator[Question]:
    """Yield decode steps: few requests in clusters or in splits, one wave of CTAs by request or by a schedule."""
    ways = (DEFAULT, *(by_variant(way, few_requests=way) for way in ("split", "clusters")))
    for lengths in ((1024,), (1024, 1), (2048, 1), (2048, 2048), (4096, 1), (4096, 4096), (8192,), (131072,)):
        for cache in ("bf16", "fp8"):
            yield Question("few", LLAMA, _decodes(lengths), cache, ways, 1.0, ("fa3", "flashinfer", "cudnn", "xqa"))
    ways = (DEFAULT, by_variant("scheduled", one_wave="scheduled"))
    steps = [
        (1024,) * 32, tuple(50 + 31 * i for i in range(32)), (1024, *(100,) * 31), (1024,) * 25, (512,) * 33,
        (256,) * 32,
    ]  # fmt: skip
    for lengths in steps:
        for cache in ("bf16", "fp8"):
            yield Question("wave", LLAMA, _decodes(lengths), cache, ways, 1.0, ("flashinfer", "cudnn", "xqa"))
    for layer, keys in ((WINDOW, 32768), (LLAMA, 1024)):
        for cache in ("bf16", "fp8"):
            yield Question("window", layer, _decodes((keys,) * 64), cache, peers=())


def _draft_questions() -> Iterator[Question]:
    """Yield speculative steps of groups that fill tiles unevenly, and of fewer tiles than multiprocessors."""
    work, layer = WORKS["speculative 64x4k, 4"], LAYERS["llama3-70b-tp8"]
    for name in ("qwen2.5-32b", "qwen2.5-7b"):
        yield Question("drafts", LAYERS[name], work, "bf16")
        yield Question("drafts", LAYERS[name], work, "fp8", (DEFAULT, DEFAULT_FP8), 1.2)
    ways = (DEFAULT, by_variant("general", few_drafts="general"))
    shapes = ((64, 4096, 4), (2, 4096, 4), (82, 4096, 4), (16, 16384, 4), (64, 4096, 8))
    skewed = _decodes(tuple(1024 + 113 * i for i in range(64)), 4)
    for few in (skewed, *(_decodes((keys,) * reqs, rows) for reqs, keys, rows in shapes)):
        for cache in ("bf16", "fp8"):
            yield Question("drafts", layer, few, cache, ways)


def _mixed_questions() -> Iterator[Question]:
    """Yield mixed steps, beside their parts."""
    mixed = WORKS["mixed 8x512 + 128 decodes of 4k"]
    yield Question("mixed", LLAMA, mixed, "bf16", (DEFAULT, by_parts("its parts")), 1 / 1.05)
    parts = by_parts("its parts, FP8 query", True)
    sixteen = by_variant("sixteen rows, FP8 query", True, mixed_rows="sixteen")
    yield Question("mixed", LLAMA, mixed, "fp8", (DEFAULT, DEFAULT_FP8, sixteen, parts), 1 / 1.05)
    yield Question("mixed", LLAMA, DRAFTS_MIX, "fp8", (DEFAULT_FP8, sixteen))


def _prompt_questions() -> Iterator[Question]:
    """Yield prompts: of few row tiles, of wide and narrow heads, under windows, by the general kernel."""
    both = (("bf16", DEFAULT), ("fp8", DEFAULT_FP8))
    long, short, chunks = (WORKS[name] for name in ("prefill 1x8k", "prefill 16x1k", "chunk 4x512 of 8k"))
    for work in (long, WORKS["prefill 1x32k"], short, WORKS["prefill mixed 1 to 8k"], chunks):
        for cache, default in both:
            yield Question("prompts", LLAMA, work, cache, (default,))
    for layer in (WIDE, LAYERS["gpt-oss-20b"], LAYERS["gpt-oss-20b-window"]):
        for work in (long, short):
            for cache, default in both:
                yield Question("heads", layer, work, cache, (default,), 0.95)
    layer = LAYERS["llama3-8b-tp8"]
    for length in (8192, 6144, 4096, 2048):
        for cache, default in both:
            yield Question("few tiles", layer, Work(f"prefill 1x{length}", ((length, length),)), cache, (default,))
    for layer, work in ((WINDOW, WORKS["prefill 1x32k"]), (LLAMA, SAME_PAIRS), (LLAMA, WORKS["prefill 32x1k"])):
        yield Question("window", layer, work, "bf16")
    general, on_packed = by_general_kernel("general kernel"), by_general_kernel("general kernel, packed rows", True)
    for work in (long, short):
        yield Question("general", LLAMA, work, "bf16", (general,), 0.7)
        yield Question("packed rows", LLAMA, work, "bf16", (on_packed,), 0.75, ("fa3",), (by_fa3_on_packed_rows(),))


def questions() -> Iterator[Question]:
    """Yield what is to be decided."""
    yield from _decode_questions()
    yield from _draft_questions()
    yield from _mixed_questions()
    yield from _prompt_questions()


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
        row |= {"winner": row["best_own"].removeprefix("vattn "), "winner_us": best}
        row["default_over_winner"] = round(default / best, 3) if default else None
        row["bar_met"] = row["peer_over_own"] >= question.bar if "peer_over_own" in row else None
    return row


SHOWN = ("question", "work", "cache", "winner", "winner_us", "default_over_winner", "best_peer", "peer_over_own", "bar")


def main() -> None:
    """Answer the questions that are asked for, in their order."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="questions by the beginnings of their keys, by semicolons")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further cell after so long")
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--fa3", help="a FlashAttention-3 library to load")
    options = parser.parse_args()
    if options.fa3:
        from vattn.backends.flash_attn.libraries import load_flash_attn

        load_flash_attn(options.fa3)
    only = tuple(name.strip() for name in options.only.split(";") if name.strip())
    result, start = machine(), time.monotonic()
    for question in questions():
        if only and not question.key.startswith(only):
            continue
        if time.monotonic() - start > options.seconds:
            print(f"stopped after {options.seconds} s", flush=True)
            break
        row = answer(question, attention.Settings(replays=options.replays))
        times = {name: entry.get("us") or next(iter(entry.values()), "-") for name, entry in row["kernels"].items()}
        add_row(result, row, options.json, json.dumps({key: row.get(key) for key in SHOWN} | {"us": times}))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
