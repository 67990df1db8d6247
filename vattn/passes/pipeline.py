"""The one pass that Inductor gets: the user's own passes, then vattn's, under one cache key."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from vattn.backends import selector
from vattn.ops.fusion_notes import FUSED, NEAR_MISS, REFUSED, NodeReport, failing, note_failed, record
from vattn.ops.schemas import SCHEMA_VERSION
from vattn.passes import report
from vattn.passes.inductor import caches_graphs, is_part, makes_package
from vattn.passes.output_quant import find as output_quant
from vattn.passes.output_quant.rewrite import rewrite
from vattn.passes.query_quant.find import (
    IN_LOAD,
    IN_PRODUCER,
    IN_ROPE,
    OWN_KERNEL,
    before_moves,
    describe_query,
    find_query,
    in_load,
)
from vattn.passes.query_quant.rewrite import rewrite_query
from vattn.passes.region import Refusal, attention_calls, describe, parse_config, source_line, value
from vattn.passes.rope_kv_cache.find import find_rope, find_update
from vattn.passes.rope_kv_cache.rewrite import rewrite_rope
from vattn.quantization.formats import OUTPUT_FORMATS
from vattn.version import __version__

logger = logging.getLogger("vattn")

InnerPass = Callable[[Graph], None]

_PACKAGE = Path(__file__).parents[1]
_SOURCES = (
    "passes/**/*.py",
    "backends/**/*.py",
    "config/*.py",
    "quantization/**/*.py",
    "errors.py",
    "ops/fusion_notes.py",
    "ops/schemas.py",
    "ops/reference/rope.py",
)
"""Files that decide what the pass does."""


@dataclass(unsafe_hash=True, repr=False)
class FusionPass(CustomGraphPass):
    """Inductor's `post_grad_custom_pre_pass` of vattn; models compiled with equal ones share graphs.

    Attributes:
        strict: raise `FusionError` on a graph with an attention node that is not fused.
        output_formats: output formats that may be used.
        inner: passes that ran in this slot before; they run first.
        rope: one of `ROPE_CHOICES`; with `"always"`, `strict` requires RoPE too.
        for_all: it sees whatever a thread compiles, so that `strict` takes a graph without attention.
        replaced: what `disable()` puts back if `enable()` put this pass into Inductor's configuration; else empty.
    """

    strict: bool
    output_formats: tuple[str, ...]
    inner: tuple[InnerPass, ...]
    rope: str = "auto"
    for_all: bool = False
    replaced: tuple[Any, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        report.note_enabled()

    def __call__(self, graph: Graph) -> None:
        """Fuse what can be fused in a post-grad graph, in place, and report it.

        Raises:
            FusionError: `strict` and not everything is fused, or there is nothing that could be.
        """
        for other in self.inner:
            other(graph)
        try:
            nodes = fuse_graph(graph, self.output_formats, self.rope)
        except Exception:
            if self.strict:
                raise
            logger.warning("the fusion passes failed; this graph has no report", exc_info=True)
            note_failed()
            return
        record(nodes)
        report.log(nodes)
        if self.strict and not nodes and not self.for_all and not is_part(graph) and not _parts_attend(graph):
            raise report.strict_error([])
        misses = [node for node in nodes if not node.is_fused or (self.rope == "always" and node.missed_rope)]
        if self.strict and misses:
            error = report.strict_error(misses)
            if makes_package() or (caches_graphs() and self.uuid() is not None):
                raise error
            # Without its cache, Inductor wraps every error of a pass in its own: the op raises this one.
            for call, _ in attention_calls(graph):
                call.kwargs = {**call.kwargs, "config": failing(str(call.kwargs["config"]), error)}

    def uuid(self) -> Any | None:
        """Return a hash of everything that decides what the pass does, `None` if an inner pass has no key."""
        inner = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.inner]
        if None in inner:
            return None
        parts = [_source_digest(), _environment(), str(self.strict), self.rope, *self.output_formats, f"inner {inner}"]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@lru_cache(maxsize=1)
def _source_digest() -> str:
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(str(path.relative_to(_PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()


def _environment() -> str:
    """Return what verdicts depend on besides the graph: versions, devices, backends and their capabilities."""
    parts = [__version__, str(SCHEMA_VERSION), torch.__version__]
    if torch.cuda.is_available():
        parts += [str(torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())]
    for name in selector.backend_names():
        backend = selector.get_backend(name)
        fields = vars(backend.capabilities).items()
        can = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in fields if k != "exclusions"}
        rules = [(sorted(rule.names), rule.why) for rule in backend.capabilities.exclusions]
        parts += [name, str(backend.problem()), repr(can), repr(rules)]
    return "\n".join(parts)


def fuse_graph(
    graph: Graph, output_formats: Sequence[str] = tuple(OUTPUT_FORMATS), rope: str = "auto"
) -> list[NodeReport]:
    """Fuse the attention nodes of a graph in place; return the report, which each node also carries."""
    calls = attention_calls(graph)
    if not calls:
        return []
    name = _graph_name(graph)
    nodes = []
    for index, (call, op) in enumerate(calls):
        in_rope = _attempt("RoPE", _fuse_rope, call, rope)
        query = _attempt("the query", _fuse_query, call, op)
        reason, outcome, source = _attempt("the output", _fuse_output, call, op, output_formats)
        written = parse_config(call, op).output_format if "config" in call.kwargs else "none"
        node = NodeReport(name, index, len(calls), op, outcome, written, reason, source, *query, *in_rope)
        nodes.append(node)
        if "config" in call.kwargs:
            call.kwargs = {**call.kwargs, "config": node.note(str(call.kwargs["config"]))}
    return nodes


Outcome = tuple[str, str, str]
"""Text, outcome and source line, as fields of the report."""


def _attempt(what: str, fuse: Callable[..., Outcome], call: Node, *args: Any) -> Outcome:
    """Run one matcher on an attention call; one that fails is reported and changes nothing."""
    try:
        return fuse(call, *args)
    except Refusal as refusal:
        return refusal.reason, NEAR_MISS if refusal.near else REFUSED, source_line(refusal.node)
    except Exception as error:
        logger.debug("the matcher of %s failed on %s", what, call, exc_info=True)
        return f"the matcher failed: {type(error).__name__}: {error}", REFUSED, source_line(call)


def _fuse_output(call: Node, op: str, output_formats: Sequence[str]) -> Outcome:
    """Let one attention call write what its output is quantised to; the text is the reason why not."""
    attention = describe(call, op)
    if attention.config.output_format != "none":
        return "requested by the layer", FUSED, ""
    found = output_quant.find(attention, output_formats)
    line = source_line(found.codes[0])
    rewrite(attention, found)
    return "", FUSED, line


def _fuse_rope(call: Node, choice: str) -> Outcome:
    """Let one op rotate query and key and update the cache before a call."""
    update = find_update(call) if choice != "never" else None
    found = None if update is None else find_rope(update, call, choice)
    if found is None:
        return "", "", ""
    text, line = str(found), source_line(found.update.kwargs["key"])  # type: ignore[arg-type]
    rewrite_rope(found)
    return text, FUSED, line


def _fuse_query(call: Node, op: str) -> Outcome:
    """Let one attention call quantise its query where that saves a kernel."""
    text = describe_query(call)
    if not text.startswith(OWN_KERNEL):
        return text, FUSED if text.startswith((IN_LOAD, IN_PRODUCER, IN_ROPE)) else "", ""
    try:
        attention = describe(call, op)
        found = find_query(attention)
        if found is None:
            return IN_PRODUCER, FUSED, ""
        query = call.kwargs["query"]
        text = f"{in_load(found.config, value(query).device)}, after {found.producer}"  # type: ignore[arg-type]
        line = source_line(before_moves(query))  # type: ignore[arg-type]
        rewrite_query(attention, found)
        return text, FUSED, line
    except Refusal as refusal:
        raise Refusal(f"{text}: {refusal.reason}", refusal.node, near=True) from None


def _parts_attend(graph: Graph) -> bool:
    """Return whether a branch or region of a graph holds attention."""
    whole: Any = graph.owning_module
    parts = [] if whole is None else [part for part in whole.modules() if isinstance(part, torch.fx.GraphModule)]
    return any(attention_calls(part.graph) for part in parts)


def _graph_name(graph: Graph) -> str:
    """Return a name that the same graph has in every process."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        target = str(node.target).partition(" at 0x")[0]  # the address of a plain function differs
        digest.update(f"{node.name} {target} {node.args} {node.kwargs}\n".encode())
        if node.op == "placeholder":
            val = value(node)
            digest.update(str((tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else val).encode())
    return digest.hexdigest()[:12]
