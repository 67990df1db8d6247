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
    "few_drafts": ("general", "measured"),
    "mixed": ("general", "packed", "two", "overlapped"),
    "mixed_below": tuple(range(2, 4097)),
    "latent_fp8": ("measured", "plain", "gluon"),
    "latent_prefill": ("plain", "gluon"),
    "latent_sparse": ("plain", "gluon"),
    "latent_scores": ("first", "turns"),
    "few_rows": ("none", "values", "streamed"),
    "packed_store": ("plain", "words"),
    "graph_edges": ("captured", "early"),
    "few_requests": ("measured", "split", "clusters"),
    "one_wave": ("scheduled", "whole"),
    "mixed_rows": ("sixteen", "eight"),
    "rope_launch": ("after", "overlapped"),
}
"""What each field may be."""


@dataclass(frozen=True)
class Variants:
    """One choice of every variant.

    Attributes:
        speculative: steps of equally many rows a request, more than the decode kernel takes and at most 64 with their
            group of heads: "general", the general kernel; "packed", Hopper's prefill kernel with the heads of a group
            as rows of one tile.
        few_drafts: speculative steps whose tiles are fewer than multiprocessors: "general", the general kernel;
            "measured", the decode kernel, some rows of a request at a time, for fewer than half, else what
            `speculative` says, as for three eighths and more where the decode kernel cannot.
        mixed: other steps of several rows a request on average: "general"; "packed"; "two", requests of few rows by the
            decode kernel and the others by the prefill kernel, heads packed; "overlapped", the same two, the second of
            which starts where the first leaves multiprocessors free.
        mixed_below: rows per request on average below which `mixed` holds.
        mixed_rows: what the decode kernel of "two" and "overlapped" steps attends at once over an FP8 cache: "sixteen"
            rows of a request and its group of heads, or "eight", slower where requests have three or four rows.
        packed_store: how new keys and values are packed on GPUs that convert FP8: "plain", or "words", eight columns at
            a time, which is for NVFP4 and keys in a codebook.
        few_requests: decode of up to four requests on Hopper: "split", over as many CTAs as there are, whose parts a
            second kernel merges; "clusters", one kernel, in which the CTAs of a cluster share a request's KV head;
            "measured", this for requests of up to 16 KV heads together whose block table has room for no more than 2048
            tokens.
        one_wave: decode of short requests on Hopper whose pairs of KV heads are about as many as multiprocessors:
            "scheduled", by a schedule, parts and their merge; "whole", one kernel that splits no request.
        rope_launch: when the kernel of RoPE and cache update of few tokens starts on Hopper: "after", when the kernel
            before has ended; "overlapped", while that runs, in a captured graph where decode in clusters follows, which
            then starts while RoPE's runs (over caches with which other decode makes no use of that).
        few_rows: for which products of up to 32 rows `vattn::linear` takes its own kernels: "none"; "values", of 16-bit
            values and more than two rows; "streamed", as "values", and up to eight rows of values or e4m3 codes by a
            kernel whose weights are on their way while the kernel before still runs, which must not be one that writes
            them.
        graph_edges: when kernels that wait by themselves, of products and first ones of layers, start in a captured
            graph: "captured", when the kernel before lets them; "early", when it has begun.
        latent_fp8: latent decode from an FP8 cache: "plain", the plain kernel; "gluon", Hopper's; "measured", Hopper's
            for as many heads as it was timed with, and for any over listed keys.
        latent_prefill: expanded latent attention of steps whose keys come at once: "plain", the plain kernel; "gluon",
            Hopper's.
        latent_sparse: latent decode over listed keys: "plain", the plain kernel; "gluon", Hopper's.
        latent_scores: which warpgroup scores keys in dense latent decode of 64 rows a program on Hopper: the "first"
            alone, as it does over listed keys, or both in "turns", a tile each.
    """

    speculative: str = "packed"
    few_drafts: str = "measured"
    mixed: str = "overlapped"
    mixed_below: int = 256
    latent_fp8: str = "measured"
    latent_prefill: str = "gluon"
    latent_sparse: str = "gluon"
    latent_scores: str = "turns"
    few_rows: str = "streamed"
    graph_edges: str = "early"
    packed_store: str = "words"
    few_requests: str = "measured"
    one_wave: str = "whole"
    mixed_rows: str = "eight"
    rope_launch: str = "overlapped"

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
