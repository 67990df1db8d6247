"""Variants of kernels: which of several right ways a step goes, as data.

A process uses `Variants()`, whose values are what ran fastest on a GPU, or all that ran there. Benchmarks and tests try
others with `using`; whoever makes a schedule and whoever reads it must do so under the same ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from vattn.errors import UnknownOptionError

ALLOWED: dict[str, tuple[Any, ...]] = {
    "speculative": ("general", "packed"),
    "mixed": ("general", "packed", "two", "overlapped"),
    "mixed_below": tuple(range(2, 4097)),
    "general_prefill": ("plain", "folded", "wide", "paired", "wide_hoisted", "paired_hoisted", "paired_late"),
    "general_packed": (
        "pointers",
        "boxes",
        "boxes_late",
        "boxes_tall",
        "boxes_tall_late",
        "boxes_paired",
        "boxes_paired_late",
    ),
    "latent_fp8": ("measured", "plain", "gluon"),
    "latent_prefill": ("measured", "plain", "gluon"),
    "latent_sparse": ("plain", "gluon"),
    "latent_parts": ("small", "large", "tiles"),
    "latent_launch": ("after", "early"),
    "latent_results": ("direct", "bulk"),
    "latent_output": ("deep", "overlapped"),
    "few_rows": ("none", "values", "all", "streamed"),
    "packed_store": ("plain", "quick", "words"),
    "few_requests": ("measured", "split", "clusters"),
    "first_tiles": ("wait", "early"),
    "prefill_rescale": ("always", "late"),
    "prefill_loads": ("one", "two"),
}
"""What each field may be."""


@dataclass(frozen=True)
class Variants:
    """One choice of every variant.

    Attributes:
        speculative: steps of equally many rows a request, more than the decode kernel takes and at most 64 with their
            group of heads: "general", the general kernel; "packed", Hopper's prefill kernel with the heads of a group
            as rows of one tile.
        mixed: other steps of several rows a request on average: "general"; "packed"; "two", requests of few rows by the
            decode kernel and the others by the prefill kernel, heads packed; "overlapped", the same two, the second of
            which starts where the first leaves multiprocessors free.
        mixed_below: rows per request on average below which `mixed` holds.
        general_prefill: how the general kernel runs tiles that need no mask in prefills of 128 rows a program: "plain";
            "folded", with the scale in the exponent's argument; "wide", that, and 128 keys a step where they fit;
            "paired", as "wide" over packed keys, and over a cache 64 rows, two programs on a multiprocessor;
            "wide_hoisted" and "paired_hoisted", these with places inside blocks computed once for all steps;
            "paired_late", the last with results rescaled on Hopper only where a row's maximum has grown by more than
            2^8.
        general_packed: how the general kernel loads packed keys in such tiles on Hopper: "pointers"; "boxes", by tensor
            maps, 128 keys a step; "boxes_tall", 64 keys, two programs of 128 rows on a multiprocessor; "boxes_paired",
            two of 64 rows; "boxes_late", "boxes_tall_late" and "boxes_paired_late", these with results rescaled late.
        packed_store: how new keys and values are packed on GPUs that convert FP8: "plain", or "quick", with fewer
            instructions for TurboQuant keys and NVFP4.
        few_requests: decode of up to four requests on Hopper: "split", over as many CTAs as there are, whose parts a
            second kernel merges; "clusters", one kernel, in which the CTAs of a cluster share a request's KV head;
            "measured", this where block tables have room for no more than 2048 tokens in all.
        first_tiles: when the decode kernels of large batches and of few short requests on Hopper ask for the first keys
            and values of a program: "wait", once the kernel before has ended; "early", into the L2 cache before that.
        prefill_rescale: when Hopper's prefill kernel multiplies its results by what their weights have shrunk:
            "always", at every key tile; "late", where a row's maximum has grown by more than 2^8 (16-bit weights, heads
            of 128 and 256).
        latent_output: how results of latent attention are multiplied by their projection and quantised on GPUs with
            warpgroups, where a row's scale spans all heads: "deep", twice, one launch after the other; "overlapped",
            the second while the first still runs.
        prefill_loads: warps of Hopper's prefill kernel that load keys and values: "one"; "two", one for either where
            nothing is converted and a tile has two warpgroups.
        few_rows: for which products of up to 32 rows `vattn::linear` takes its own kernels: "none"; "values", of 16-bit
            values and more than two rows; "all", of one or two rows and of e4m3 codes too; "streamed", as "values", and
            up to eight rows of either by a kernel whose weights are on their way while the kernel before still runs,
            which must not be one that writes them.
        latent_fp8: latent decode from an FP8 cache: "plain", the plain kernel; "gluon", Hopper's; "measured", Hopper's
            for as many heads as it was timed with, and not over listed keys.
        latent_prefill: expanded latent attention: "plain", the plain kernel; "gluon", Hopper's; "measured", Hopper's
            but for outputs in FP8 groups and NVFP4, keys that come in chunks, and heads of other columns than 192 and
            128.
        latent_sparse: latent decode over listed keys: "plain", the plain kernel; "gluon", Hopper's.
        latent_parts: parts that requests of latent decode on Hopper are split into: "small", of one tile up, merged
            eight at a time; "large", of two tiles up, of four with 64 rows a program, as many merged at a time as
            registers hold, by few programs, and records of the schedule that hold all that is read of a request;
            "tiles", as "large" with parts of half as many tiles.
        latent_launch: when latent decode on Hopper is launched: "after", when the kernel before has ended; "early",
            while it runs, so that setting up overlaps with its end.
        latent_results: how results of latent decode with 64 rows a program leave it: "direct", from registers, those of
            parts in fp32; "bulk", through shared memory, those of parts in bf16.
    """

    speculative: str = "packed"
    mixed: str = "overlapped"
    mixed_below: int = 256
    general_prefill: str = "paired"
    general_packed: str = "pointers"
    latent_fp8: str = "measured"
    latent_prefill: str = "measured"
    latent_sparse: str = "gluon"
    latent_parts: str = "small"
    latent_launch: str = "after"
    latent_results: str = "direct"
    latent_output: str = "deep"
    few_rows: str = "values"
    packed_store: str = "plain"
    few_requests: str = "measured"
    first_tiles: str = "wait"
    prefill_rescale: str = "always"
    prefill_loads: str = "one"

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                told = f"{allowed[0]} to {allowed[-1]}" if len(allowed) > 8 else ", ".join(map(repr, allowed))
                raise UnknownOptionError(f"{name}={getattr(self, name)!r}", told, "take one of them")


_current = Variants()


def current() -> Variants:
    """Return the variants in use."""
    return _current


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[Variants]:
    """Use other variants inside a `with` block, in the whole process.

    Raises:
        UnknownOptionError: no such variant, or not one of its values.
    """
    global _current
    names = [field.name for field in fields(Variants)]
    for name in changes:
        if name not in names:
            raise UnknownOptionError(f"variant {name!r}", ", ".join(names), "take one of them")
    before = _current
    _current = replace(before, **changes)
    try:
        yield _current
    finally:
        _current = before
