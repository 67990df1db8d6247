"""What the passes read and use of Inductor besides its entry points: settings of generated code, and its graph sort."""

from __future__ import annotations

import torch
from torch.fx import Graph

EMULATES_EVERYWHERE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether code for a CPU rounds too where `rounds_every_operation`; before, it skipped some roundings."""


def rounds_every_operation() -> bool:
    """Return whether generated code rounds to the dtype of every operation, as eager code does."""
    from torch._inductor import config

    return config.emulate_precision_casts


def rounds_divisions() -> bool:
    """Return whether generated CUDA code rounds quotients correctly."""
    from torch._inductor import config

    return bool(getattr(getattr(config, "eager_numerics", None), "division_rounding", False))


def caches_graphs() -> bool:
    """Return whether Inductor's cache of graphs is on; else it wraps the errors of passes in its own."""
    from torch._inductor import config

    return bool(config.fx_graph_cache) and not config.force_disable_caches


def makes_package() -> bool:
    """Return whether AOTInductor makes a package now."""
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation)


def is_part(graph: Graph) -> bool:
    """Return whether a graph is a branch or another region of a larger one, which Inductor hands to passes first."""
    return "desc" not in next(iter(reversed(graph.nodes))).meta


def sort_graph(graph: Graph) -> None:
    """Bring the nodes of a graph into an order in which each follows what it reads."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
