"""Draws a graph around its attention nodes for Graphviz, the fused regions coloured."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from vattn.passes.region import attention_calls, find_region

_BEFORE, _AFTER = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
_ATTENTION, _REGION = "#a6cee3", "#fdbf6f"


def draw(graph: Graph, title: str) -> str:
    """Return a graph as Graphviz text: attention calls blue, what follows from their outputs alone orange."""
    calls = {call for call, _ in attention_calls(graph)}
    order = {node: position for position, node in enumerate(graph.nodes)}
    regions: set[Node] = set()
    for call in calls:
        for output in call.users:
            region = find_region(output, order) if output.meta.get("val") is not None else None
            if region is not None and region.quantised:
                regions.update(region.ancestors(list(region.quantised)))
    lines = [f'digraph "{title}" {{', '  node [shape=box, style=filled, fillcolor=white, fontname="monospace"];']
    for node in graph.nodes:
        colour = _ATTENTION if node in calls else _REGION if node in regions else "white"
        lines.append(f'  "{node.name}" [label="{_label(node)}", fillcolor="{colour}"];')
        lines += [f'  "{source.name}" -> "{node.name}";' for source in node.all_input_nodes]
    return "\n".join([*lines, "}"])


def _label(node: Node) -> str:
    target = node.args[0] if "auto_functionalized" in str(node.target) and node.args else node.target
    text = f"{node.name}\\n{target}"
    config = str(node.kwargs.get("config", "")).partition(" # ")[0]
    formats = [part for part in config.split() if part.startswith("output_format=")]
    return "\\n".join([text, *formats]).replace('"', "'")


class Picturing:
    """Draws every graph before and after the passes.

    Attributes:
        texts: Graphviz texts in the order in which the passes ran.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []

    def options(self) -> dict[str, Any]:
        """Return Inductor options that draw; the pass before ours and one behind it."""
        return {_BEFORE: self._before, _AFTER: self._after}

    def _before(self, graph: Graph) -> None:
        self.texts.append(draw(graph, f"before {len(self.texts) // 2}"))

    def _after(self, graph: Graph) -> None:
        self.texts.append(draw(graph, f"after {len(self.texts) // 2}"))
