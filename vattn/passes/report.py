"""The fusion report: one line for every attention node, carried by compiled code.

On a hit of Inductor's caches no pass runs. So each attention op that the passes have seen carries its line of the
report as a note after its config string, in the compiled code itself: a process that loads that code has the report
once the op has run. Source lines in it are those of the first compilation: an equal graph of another model, or of the
same one before an edit, is the same entry of a cache.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from vattn.errors import FusionError
from vattn.ops.fusion_notes import FUSED, NEAR_MISS, REFUSED, NodeReport, counts, forget, logger, passes_off, recorded


@dataclass(frozen=True)
class FusionReport:
    """The results of the passes for every graph that this process compiled or loaded, in that order.

    Attributes:
        nodes: one entry per attention node.
        why_empty: why a report has no nodes: whether the passes were on, and which graphs they ran on; else empty.
        passes_off: functions that ran compiled attention which the passes have not seen, and where they are.
    """

    nodes: tuple[NodeReport, ...]
    why_empty: str = ""
    passes_off: tuple[str, ...] = ()

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
        text = [self.summary()]
        if self.why_empty:
            text.append(f"  {self.why_empty}")
        text += [f"  passes off: {where}" for where in self.passes_off]
        for graph, nodes in itertools.groupby(self.nodes, lambda node: node.graph):
            text.append(f"graph {graph}")
            for line in lines(list(nodes)):
                text += wrap(line, 118, initial_indent="  ", subsequent_indent="    ", **_WHOLE_WORDS)
        return "\n".join(text)


_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


def lines(nodes: Sequence[NodeReport]) -> list[str]:
    """Return a line for each different result: the layers of a model mostly share one."""
    equal: dict[str, list[NodeReport]] = {}
    for node in nodes:
        equal.setdefault(node.result(), []).append(node)
    return [f"{_which(alike)}: {text}" for text, alike in equal.items()]


def _which(nodes: Sequence[NodeReport]) -> str:
    """Return which attention nodes of a graph these are; a layer has one."""
    first, count = nodes[0], len(nodes)
    if count == 1:
        return first.label()
    some = f"{count}" if count == first.count else f"{count} of {first.count}"
    return f"{first.op}, {some} layers"


_enabled = False
"""Whether the passes were switched on in this process."""


def note_enabled() -> None:
    """Note that the passes were switched on."""
    global _enabled
    _enabled = True


def fusion_report() -> FusionReport:
    """Return the results for every attention node that this process compiled or loaded from a compile cache.

    Code from a cache reports once it has run. `str()` of the result is a table, `.as_dict()` plain values. An empty
    report says whether the passes were on.
    """
    nodes = recorded()
    return FusionReport(nodes, "" if nodes else _why_empty(), passes_off())


def _why_empty() -> str:
    if not _enabled:
        return (
            "the passes are off: nothing in this process has switched them on; torch.compile and vattn.compile take "
            "them from vattn.enable(), options=vattn.options() or backend=vattn.backend"
        )
    if counts["failed"]:
        return f"the passes failed on {_graphs_of('failed')}; the log says why"
    if counts["without attention"]:
        return (
            f"the passes ran on {_graphs_of('without attention')}, none with attention of vattn; layers that run "
            "without metadata make profiling calls, which have none"
        )
    return (
        "the passes were switched on, and have run on no graph: nothing was compiled with them, or the compiled code "
        "is from a cache and has not run yet"
    )


def _graphs_of(kind: str) -> str:
    return f"{counts[kind]} graph" + "s" * (counts[kind] != 1)


def clear_fusion_report() -> None:
    """Forget all lines of the report, such as those of a model that is compiled no more.

    Example:
        >>> import vattn
        >>> vattn.clear_fusion_report()
        >>> len(vattn.fusion_report().nodes)
        0
    """
    forget()


def log(nodes: list[NodeReport]) -> None:
    """Log the results for one graph in one line."""
    if not nodes:
        return
    report = FusionReport(tuple(nodes))
    texts = [f"{node.outcome}: {node.reason}" for node in nodes if node.outcome != FUSED]
    texts += [f"query {node.query_outcome}: {node.query}" for node in nodes if node.query_outcome not in (FUSED, "")]
    texts += [f"RoPE {node.rope_outcome}: {node.rope}" for node in nodes if node.rope]
    others = dict.fromkeys(texts)
    logger.info("fusion: %s%s", report.summary(), "".join(f"; {text}" for text in others))


def strict_error(misses: list[NodeReport]) -> FusionError:
    """Return the error of `strict=True` for nodes that are not fused, or for a graph without any."""
    from torch._dynamo.exc import ShortenTraceback

    class StrictFusionError(FusionError, ShortenTraceback):
        """Dynamo and Inductor raise this as it is instead of wrapping it in their own errors."""

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

    if misses:
        listed = "\n  ".join(lines(misses))
        plain = FusionError(
            f"strict fusion: not every attention node is fused\n  {listed}\n",
            "graphs in which each attention output is quantised in a supported format, and no query in a kernel of its "
            "own",
            "change what a reason names, or compile with strict=False",
        )
    else:
        plain = FusionError(
            "strict fusion: a compiled graph holds no attention of vattn",
            "graphs with attention; a layer that gets no metadata makes a profiling call, which has none",
            "call the model in a forward_context, and compile it without graph breaks",
        )
    error = StrictFusionError(plain)
    error.args = plain.args
    return error
