"""Writes graphs for Graphviz, with attention nodes and their regions coloured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from vattn.passes.query_quant.find import quantising_nodes
from vattn.passes.region import attention_calls, find_region

_ATTENTION, _REGION, _FUSED = "#a6cee3", "#fdbf6f", "#b2df8a"
_FUSED_IN = ("output_format=", "query_load=")


def draw(graph: Graph, title: str) -> str:
    """Return a graph as Graphviz text.

    Attention calls are blue, or green if quantisation is part of them; separate quantisation of outputs and queries is
    orange.
    """
    calls = {call for call, _ in attention_calls(graph)}
    regions: set[Node] = set()
    for call in calls:
        regions.update(quantising_nodes(call))
        writes_codes = any(part.startswith("output_format=") for part in _fused_in(call))
        for output in () if writes_codes else call.users:
            if output.meta.get("val") is not None:
                region = find_region(output)
                regions.update(region.ancestors(region.quantised))
    lines = [f'digraph "{title}" {{', '  node [shape=box, style=filled, fillcolor=white, fontname="monospace"];']
    for node in graph.nodes:
        colour = "white"
        if node in calls:
            colour = _FUSED if _fused_in(node) else _ATTENTION
        elif node in regions:
            colour = _REGION
        lines.append(f'  "{node.name}" [label="{_label(node)}", fillcolor="{colour}"];')
        lines += [f'  "{source.name}" -> "{node.name}";' for source in node.all_input_nodes]
    return "\n".join([*lines, "}"])


def _fused_in(call: Node) -> list[str]:
    """Return the quantisation of a call, as in its config string."""
    config = str(call.kwargs.get("config", "")).partition(" # ")[0]
    return [part for part in config.split() if part.startswith(_FUSED_IN)]


def _label(node: Node) -> str:
    target = node.args[0] if "auto_functionalized" in str(node.target) and node.args else node.target
    return "\\n".join([f"{node.name}\\n{target}", *_fused_in(node)]).replace('"', "'")


def drawing_options(texts: list[str]) -> dict[str, Any]:
    """Return Inductor options with a pass before vattn's and one after it, which append a graph's text to a list."""

    def drawing(when: str) -> Callable[[Graph], None]:
        return lambda graph: texts.append(draw(graph, f"{when} {len(texts) // 2}"))

    return {"post_grad_custom_pre_pass": drawing("before"), "post_grad_custom_post_pass": drawing("after")}
