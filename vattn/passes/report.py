"""What became of every attention node: the report of the passes, and how compiled code carries it.

On a hit of Inductor's caches no pass runs. So each attention op that the passes have looked at carries its own line of
the report, as a note behind its config string, in the compiled code itself: whoever loads that code, in whatever
process, has the report as soon as the op has run once. The lines of code in it are those of whoever compiled first: an
equal graph of another model, or of the same one before it was edited, is the same entry of a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vattn.errors import FusionError
from vattn.ops.fusion_notes import FUSED, NEAR_MISS, REFUSED, NodeReport, _graphs, _lock, _seen, logger


@dataclass(frozen=True)
class FusionReport:
    """What the passes made of every graph that this process compiled or loaded, in that order.

    Attributes:
        nodes: one entry per attention node.
        why_empty: of a report without nodes, whether the passes were on and what they saw; else empty.
    """

    nodes: tuple[NodeReport, ...]
    why_empty: str = ""

    def __iter__(self) -> Iterator[NodeReport]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def count(self, outcome: str) -> int:
        """Return how many nodes had an outcome."""
        return sum(node.outcome == outcome for node in self.nodes)

    def as_dict(self) -> dict[str, list[dict[str, object]]]:
        """Return plain values: graph name -> its nodes."""
        graphs: dict[str, list[dict[str, object]]] = {}
        for node in self.nodes:
            graphs.setdefault(node.graph, []).append(dataclasses.asdict(node))
        return graphs

    def summary(self) -> str:
        """Return the counts in one line."""
        counts = ", ".join(f"{self.count(outcome)} {outcome}" for outcome in (FUSED, REFUSED, NEAR_MISS))
        return f"{len(self.nodes)} attention nodes: {counts}"

    def __str__(self) -> str:
        lines, graph = [self.summary()], ""
        if self.why_empty:
            lines.append(f"  {self.why_empty}")
        for node in self.nodes:
            if node.graph != graph:
                graph = node.graph
                lines.append(f"graph {graph}")
            lines.append(f"  {node}")
        return "\n".join(lines)


_asked_for = False
"""Whether anything in this process has switched the passes on."""


def note_asked() -> None:
    """Note that the passes were switched on, for what is compiled from now on or for one call."""
    global _asked_for
    _asked_for = True


def note_failed() -> None:
    """Note a graph on which the passes failed."""
    with _lock:
        _seen["failed"] += 1


def fusion_report() -> FusionReport:
    """Return what became of every attention node that this process compiled or loaded from a compile cache.

    Code from a cache reports when it has run once. `str()` of the result is a table, `.as_dict()` plain values. A
    report of no attention says whether the passes were on at all.
    """
    with _lock:
        nodes = [graph[index] for graph in _graphs.values() for index in sorted(graph)]
        return FusionReport(tuple(nodes), "" if nodes else _why_empty())


def _why_empty() -> str:
    if not _asked_for:
        return (
            "the passes are off: nothing in this process has switched them on; torch.compile and vattn.compile take "
            "them from vattn.enable(), options=vattn.options() or backend=vattn.backend"
        )
    if _seen["failed"]:
        return f"the passes failed on {_graphs_of('failed')}; the log says why"
    if _seen["without attention"]:
        return (
            f"the passes ran on {_graphs_of('without attention')}, none with attention of vattn; layers that run "
            "without metadata make profiling calls, which have none"
        )
    return (
        "the passes were switched on, and have run on no graph: nothing was compiled with them, or what was came from "
        "a cache and has not run yet"
    )


def _graphs_of(kind: str) -> str:
    return f"{_seen[kind]} graph" + "s" * (_seen[kind] != 1)


def clear_fusion_report() -> None:
    """Forget everything that was reported so far."""
    with _lock:
        _graphs.clear()
        _seen.update(dict.fromkeys(_seen, 0))


def log(nodes: list[NodeReport]) -> None:
    """Say in one line what became of one graph."""
    if not nodes:
        return
    report = FusionReport(tuple(nodes))
    texts = [f"{node.outcome}: {node.reason}" for node in nodes if node.outcome != FUSED]
    texts += [f"query {node.query_outcome}: {node.query}" for node in nodes if node.query_outcome not in (FUSED, "")]
    texts += [f"RoPE {node.rope_outcome}: {node.rope}" for node in nodes if node.rope]
    others = dict.fromkeys(texts)
    logger.info("fusion: %s%s", report.summary(), "".join(f"; {text}" for text in others))


def strict_error(misses: list[NodeReport]) -> FusionError:
    """Return what `strict=True` raises for nodes that are not fused."""
    from torch._dynamo.exc import ShortenTraceback

    class StrictFusionError(FusionError, ShortenTraceback):
        """Dynamo and Inductor hand this one on as it is instead of wrapping it in an error of theirs."""

        def __init__(self, plain: FusionError) -> None:
            ShortenTraceback.__init__(self, str(plain), first_useful_frame=None)

        @property
        def got(self) -> str:
            # Dynamo appends advice about its own errors to the first argument.
            return plain.got

        def __reduce__(self) -> tuple[Any, ...]:
            return FusionError, plain.args

    # Tracebacks name the public class, which is what to catch.
    StrictFusionError.__module__ = FusionError.__module__
    StrictFusionError.__name__ = StrictFusionError.__qualname__ = FusionError.__qualname__

    listed = "\n  ".join(map(str, misses))
    plain = FusionError(
        f"strict fusion: not every attention node is fused\n  {listed}\n",
        "graphs in which each attention output is quantised in a supported format, and no query in a kernel of its own",
        "change what a reason names, or compile with strict=False",
    )
    error = StrictFusionError(plain)
    error.args = plain.args
    return error
