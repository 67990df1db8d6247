"""Which edges of a captured graph are changed, by a driver that keeps a graph in a list."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from vattn import errors
from vattn.compilation.graph_edges import BEGUN, Edge, start_early

KERNELS = {
    1: "triton_poi_fused",
    2: "streamed_kernel",
    3: "streamed_kernel",
    4: "attention",
    5: "rope_update_kernel",
    6: "my_streamed_kernel",
    8: "streamed_kernel_2",
    10: "rope_update_kernel",
    11: "decode_cluster_kernel",
    12: "small_m_kernel",
    13: "triton_poi_fused_add_view_3",
    14: "triton_red_fused_mean_mul_rsqrt_0",
    15: "triton_per_fused_mean_10",
    16: "triton_mine_0",
    17: "lora_shrink_kernel",
    18: "lora_expand_kernel",
}
"""Kernel nodes; others are no kernels."""


class Driver:
    """Nodes are numbers, functions are numbers of nodes plus 100, every second one by the other handle."""

    def __init__(self, edges: list[tuple[int, int, int, int]]) -> None:
        self.edges, self.fails = edges, ""

    def cuGraphGetEdges_v2(self, graph: Any, sources: Any, targets: Any, edges: Any, count: Any) -> int:
        if sources is None:
            count._obj.value = len(self.edges)
            return int(self.fails == "edges")
        for index, (source, target, port, kind) in enumerate(self.edges):
            sources[index], targets[index], edges[index] = source, target, Edge(port, 0, kind)
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, found: Any) -> int:
        if node.value not in KERNELS:
            return 1
        setattr(found._obj, "kernel" if node.value % 2 else "function", node.value + 100)
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:
        assert function.value % 2 == 0
        name._obj.value = KERNELS[function.value - 100].encode()
        return 0

    def cuKernelGetName(self, name: Any, kernel: Any) -> int:
        assert kernel.value % 2
        name._obj.value = KERNELS[kernel.value - 100].encode()
        return 0

    def cuGraphRemoveDependencies_v2(self, graph: Any, source: Any, target: Any, edge: Any, count: Any) -> int:
        self.edges.remove((source._obj.value, target._obj.value, edge._obj.from_port, edge._obj.type))
        return 0

    def cuGraphAddDependencies_v2(self, graph: Any, source: Any, target: Any, edge: Any, count: Any) -> int:
        self.edges.append((source._obj.value, target._obj.value, edge._obj.from_port, edge._obj.type))
        return int(self.fails == "add")


def test_edges_into_kernels_that_wait() -> None:
    kept = [(4, 1, 1, 1), (1, 4, 1, 1), (1, 2, 0, 0), (9, 3, 0, 0), (1, 9, 0, 0), (2, 3, BEGUN, 1), (1, 5, 0, 0)]
    kept += [(1, 6, 1, 1), (1, 8, 1, 1)]  # Names that only hold one of theirs.
    kept += [(10, 11, 1, 1), (5, 4, 1, 1)]
    # Not the first of a graph, behind no kernel of Inductor, no kernel of Inductor; waiting anyway.
    kept += [(13, 15, 1, 1), (2, 14, 1, 1), (16, 14, 1, 1), (13, 16, 1, 1), (15, 14, 0, 0)]
    driver = Driver([*kept, (1, 2, 1, 1), (4, 3, 1, 1), (4, 5, 1, 1), (1, 10, 1, 1), (3, 12, 1, 1), (13, 14, 1, 1)])
    driver.edges += [(4, 17, 1, 1), (17, 18, 1, 1)]
    assert start_early(7, driver) == 8
    # RoPE waits for the end of what is before it where another kernel than decode in clusters is behind it.
    changed = [
        (1, 2, BEGUN, 1),
        (4, 3, BEGUN, 1),
        (4, 5, 0, 0),
        (1, 10, BEGUN, 1),
        (3, 12, BEGUN, 1),
        (13, 14, BEGUN, 1),
        (4, 17, BEGUN, 1),
        (17, 18, BEGUN, 1),
    ]
    assert sorted(driver.edges) == sorted([*kept, *changed])
    assert start_early(7, driver) == 0


def test_what_a_driver_refuses() -> None:
    for call in ("edges", "add"):
        driver = Driver([(1, 2, 1, 1)])
        driver.fails = call
        with pytest.raises(errors.DeviceError, match="CUDA error 1"):
            start_early(7, driver)
    assert start_early(7, object()) == 0, "a driver that is too old"
    if not torch.cuda.is_available():
        assert start_early(7) == 0, "none"


def test_structures_are_the_driver_s() -> None:
    assert ctypes.sizeof(Edge) == 8
