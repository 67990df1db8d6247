"""The lines of the fusion report: kept by graph, and carried by the config strings of compiled code.

While a graph is traced, layers append the note `UNSEEN` to their config strings, and the passes replace it by a line of
the report. Compiled code that still has `UNSEEN` when it runs was compiled without the passes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any
from urllib.parse import quote, unquote

import torch

from vattn.config.encoding import NOTE_MARK
from vattn.errors import FusionError

logger = logging.getLogger("vattn")

FUSED, REFUSED, NEAR_MISS = "fused", "refused", "near miss"

UNSEEN, UNSEEN_STRICT = "unseen", "unseen, strict"
"""Notes of config strings that the passes have not seen; the second under `strict`."""

_FAILED = "strict: "
"""How a note begins with which compiled code fails when it runs; the arguments of the error follow."""

_PLAIN = " !#$&()*+,-./:;<=>@[]^_`{|}~"
"""Characters that a note does not escape, besides letters and digits."""


@dataclass(frozen=True)
class NodeReport:
    """The result of the passes for one attention node.

    Attributes:
        graph: name of the compiled graph, the same for the same graph in every process.
        index, count: which attention node of how many.
        op: `"attention"` or `"varlen_attention"`.
        outcome: `"fused"`, `"refused"` or `"near miss"` (a quantiser follows, something keeps it from fusing).
        output_format: what the op writes now.
        reason: why it is not fused; empty if it is.
        source: the user's line that caused the outcome, empty if unknown.
        query: how the query is quantised, and why in a separate kernel if it is; empty: it is not quantised.
        query_outcome: `"fused"` (its quantisation costs no kernel), `"near miss"` or `"refused"`; empty where there is
            none to fuse, or one that the op cannot see.
        query_source: the user's line that caused it, empty if unknown.
        rope: the result for RoPE before the op and its cache update; empty: there is none.
        rope_outcome: `"fused"`, `"refused"` (left to Inductor by rule) or `"near miss"`; empty: there is none.
        rope_source: the user's line that caused it, empty if unknown.
        cached: whether this was read from code that another process compiled. Source lines are then those of that
            process's model, which has an equal graph but may be another model.
    """

    graph: str
    index: int
    count: int
    op: str
    outcome: str
    output_format: str
    reason: str = ""
    source: str = ""
    query: str = ""
    query_outcome: str = ""
    query_source: str = ""
    rope: str = ""
    rope_outcome: str = ""
    rope_source: str = ""
    cached: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether the output's quantisation is fused, and the query's if there is one."""
        return self.outcome == FUSED and self.query_outcome in (FUSED, "")

    @property
    def missed_rope(self) -> bool:
        """Whether there is RoPE that is not fused."""
        return self.rope_outcome not in (FUSED, "")

    def label(self) -> str:
        """Return which attention node of its graph this is."""
        return f"{self.op} {self.index + 1}/{self.count}"

    def __str__(self) -> str:
        return f"{self.label()}: {self.result()}"

    def result(self) -> str:
        """Return the result without the label: equal for layers with which the same happened."""
        text = self.outcome
        if self.outcome == FUSED:
            text += f", writes {self.output_format}"
        if self.reason:
            text += f": {self.reason}"
        if self.source:
            text += self._line(self.source)
        if self.query:
            text += f"; query {self.query}"
        if self.query_source and self.query_outcome != FUSED:
            text += self._line(self.query_source)
        if self.rope:
            text += f"; RoPE {self.rope_outcome}: {self.rope}"
        if self.rope_source and self.rope_outcome != FUSED:
            text += self._line(self.rope_source)
        return text

    def _line(self, source: str) -> str:
        return f" [when first compiled: {source}]" if self.cached else f" [{source}]"

    def note(self, config: str) -> str:
        """Return a config string followed by this line of the report, in characters that are safe in any code.

        Inductor's C++ wrappers hold strings between double quotes and escape nothing.
        """
        fields = {name: quote(x, _PLAIN) if isinstance(x, str) else x for name, x in dataclasses.asdict(self).items()}
        return config.partition(NOTE_MARK)[0] + NOTE_MARK + json.dumps(fields, separators=(",", ":")).replace('"', "'")

    @staticmethod
    def of_note(note: str) -> NodeReport:
        """Return the line of the report that `note` has put after a config string.

        Raises:
            TypeError, ValueError: another version has written it.
        """
        fields: dict[str, Any] = json.loads(note.replace("'", '"'))
        plain: dict[str, Any] = {name: unquote(x) if isinstance(x, str) else x for name, x in fields.items()}
        return NodeReport(**plain)


_graphs: dict[str, dict[int, NodeReport]] = {}
_lock = threading.Lock()
_unseen: dict[str, None] = {}
"""Functions that ran compiled code which the passes have not seen, as an ordered set."""

_thread = threading.local()
counts = {"without attention": 0, "failed": 0, "attention": 0}
"""Graphs without attention, graphs on which the passes failed, and attention nodes that were reported."""


def is_strict() -> bool:
    """Return whether what this thread compiles must be seen by the passes."""
    return getattr(_thread, "strict", False)


def set_strict(wanted: bool) -> bool:
    """Set whether what this thread compiles must be seen by the passes; return what was set before."""
    before, _thread.strict = is_strict(), wanted
    return before


def noted(config: str) -> str:
    """Return a config string for an attention op, while a graph is traced with the note `UNSEEN`."""
    return config + _unseen_note() if torch.compiler.is_compiling() else config


def _unseen_note() -> str:
    return NOTE_MARK + (UNSEEN_STRICT if is_strict() else UNSEEN)


# Dynamo calls it while it traces and keeps the result without a guard, so that `set_strict` recompiles nothing.
_unseen_note._dynamo_marked_constant = True  # type: ignore[attr-defined]


def record(nodes: list[NodeReport]) -> None:
    """Keep the report of one compiled graph; it replaces an earlier one of the same graph."""
    with _lock:
        counts["without attention"] += not nodes
        counts["attention"] += len(nodes)
        for name in {node.graph for node in nodes}:
            _graphs.pop(name, None)
        for node in nodes:
            _graphs.setdefault(node.graph, {})[node.index] = node


def failing(config: str, error: FusionError) -> str:
    """Return a config string by which compiled code raises an error when it runs."""
    texts = [quote(str(text), _PLAIN) for text in error.args]
    return config.partition(NOTE_MARK)[0] + NOTE_MARK + _FAILED + json.dumps(texts).replace('"', "'")


def note_failed() -> None:
    """Count a graph on which the passes failed."""
    with _lock:
        counts["failed"] += 1


def recorded() -> tuple[NodeReport, ...]:
    """Return all lines, graph by graph."""
    with _lock:
        return tuple(graph[index] for graph in _graphs.values() for index in sorted(graph))


def passes_off() -> tuple[str, ...]:
    """Return the functions that ran compiled code which the passes have not seen."""
    with _lock:
        return tuple(_unseen)


def forget() -> None:
    """Forget all lines."""
    with _lock:
        _graphs.clear()
        _unseen.clear()
        counts.update(dict.fromkeys(counts, 0))


def read_note(config: str) -> None:
    """Keep the line of the report that a config string of loaded code carries, if there is one.

    Raises:
        FusionError: the passes have not seen the code, though they had to, or have put an error into it.
    """
    _, mark, note = config.partition(NOTE_MARK)
    if not mark:
        return
    if note.startswith(_FAILED):
        raise FusionError(*map(unquote, json.loads(note.removeprefix(_FAILED).replace("'", '"'))))
    if note in (UNSEEN, UNSEEN_STRICT):
        where = _caller()
        with _lock:
            _unseen[where] = None
        if note == UNSEEN_STRICT:
            raise FusionError(
                f"strict fusion: the passes were off when {where} was compiled",
                "attention that is compiled with vattn's pass in torch._inductor.config.post_grad_custom_pre_pass",
                "put passes of your own there before vattn.enable(), and compile by Inductor in the thread, and the "
                "block, of enable()",
            )
        return
    try:
        node = NodeReport.of_note(note)
    except (TypeError, ValueError):
        # A package of AOTInductor may be older than this version; it runs without a report.
        logger.debug("a note of another version: %s", note)
        return
    with _lock:
        counts["attention"] += 1
        _graphs.setdefault(node.graph, {}).setdefault(node.index, dataclasses.replace(node, cached=True))


def _caller() -> str:
    """Return which function runs compiled code, and where it is: the first one of neither torch nor vattn."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


_GENERATED = (torch.__path__[0], "<eval_with_key>")
"""How the file names of torch's own and generated code begin."""


def _is_library(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    return module in ("torch", "vattn") or frame.f_code.co_filename.startswith(_GENERATED)
