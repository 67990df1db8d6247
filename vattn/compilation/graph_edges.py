"""Edges of a captured CUDA graph: let kernels that wait by themselves start when the previous kernel has begun.

A launch that may overlap with the previous kernel becomes a programmatic edge: it starts once every block of that
kernel has triggered or exited. Compilers emit the trigger late, after the last wait. Some kernels wait for the end of
the previous kernel before they touch its results, so an edge into them may let them start once every previous block has
begun:

- `vattn::linear`'s and `vattn::add_lora`'s kernels, which load weights first, or wait first;
- the kernel of RoPE where it is launched early, if decode in clusters follows: other kernels are
  not faster after it, so before those it starts when the previous kernel has ended;
- the first kernel of a layer that Inductor has compiled on its own, after the last kernel of the previous layer.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from vattn.errors import DeviceError

EARLY_KERNELS = ("streamed_kernel", "small_m_kernel", "rope_update_kernel", "lora_shrink_kernel", "lora_expand_kernel")
"""Names of kernels that wait for the one before them to end, whenever they start."""

INDUCTOR, FIRST = re.compile(r"triton_(poi|red|per)_fused_\w*_\d+"), re.compile(r"triton_(poi|red|per)_fused_\w*_0")
"""Names of kernels that Inductor has made, and of those that are the first of their compiled graph."""

ROPE, CLUSTERS = "rope_update_kernel", "decode_cluster_kernel"
"""Names of the kernel of RoPE, and of the next one that makes it start early."""

PROGRAMMATIC = 1
"""Type of an edge, and its port where the kernel before says when."""

BEGUN = 2
"""Port of an edge that is taken when all blocks of the kernel before have begun."""


class Edge(ctypes.Structure):
    """`CUgraphEdgeData`."""

    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


class KernelNode(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS`, with room for later versions of it."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("more", ctypes.c_void_p * 4),
    ]


def start_early(graph: int, driver: Any = None) -> int:
    """Let kernels that wait by themselves start when those before them have begun; return how many edges were changed.

    RoPE's waits for the end of the kernel before it where no decode in clusters follows.

    Args:
        graph: the `cudaGraph_t` of a capture that has ended and is not instantiated yet.
        driver: CUDA's driver library; loaded where it is not given. One without edges' data changes nothing.

    Raises:
        DeviceError: the driver refuses.
    """
    driver = _driver() if driver is None else driver
    if not all(hasattr(driver, name) for name in ("cuGraphGetEdges_v2", "cuFuncGetName", "cuKernelGetName")):
        return 0
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    _checked(driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)), "cuGraphGetEdges")
    sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    edges = (Edge * count.value)()
    _checked(driver.cuGraphGetEdges_v2(handle, sources, targets, edges, ctypes.byref(count)), "cuGraphGetEdges")
    changed, pairs = 0, list(zip(sources, targets, strict=True))
    for source, target, edge in zip(sources, targets, edges, strict=True):
        if (edge.type, edge.from_port) != (PROGRAMMATIC, PROGRAMMATIC):
            continue
        name = _kernel_name(driver, target)
        if not _waits(_kernel_name(driver, source), name):
            continue
        ends = (ctypes.byref(ctypes.c_void_p(source)), ctypes.byref(ctypes.c_void_p(target)))
        later = Edge(BEGUN, edge.to_port, PROGRAMMATIC)
        if name == ROPE and CLUSTERS not in [_kernel_name(driver, t) for s, t in pairs if s == target]:
            later = Edge()
        one = ctypes.c_size_t(1)
        _checked(
            driver.cuGraphRemoveDependencies_v2(handle, *ends, ctypes.byref(edge), one), "cuGraphRemoveDependencies"
        )
        _checked(driver.cuGraphAddDependencies_v2(handle, *ends, ctypes.byref(later), one), "cuGraphAddDependencies")
        changed += 1
    return changed


def _waits(before: str, name: str) -> bool:
    """Return whether a kernel waits for the end of the one before it, and touches nothing earlier.

    Of Inductor's, only the first of a graph is known to: others load what older kernels wrote before they wait. It is
    the first where the one before is Inductor's too, of another graph; kernels between the two would be operators'.
    """
    return name in EARLY_KERNELS or bool(FIRST.fullmatch(name) and INDUCTOR.fullmatch(before))


def _driver() -> Any:
    """Return CUDA's driver library, or what has none of its functions."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _kernel_name(driver: Any, node: int) -> str:
    """Return the name of a kernel node, empty for any other node."""
    found, name = KernelNode(), ctypes.c_char_p()
    if driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(found)):
        return ""
    if found.function:
        failed = driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(found.function))
    else:
        failed = driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(found.kernel))
    return "" if failed or name.value is None else name.value.decode()


def _checked(result: int, call: str) -> None:
    if result:
        raise DeviceError(f"{call}: CUDA error {result}", "a captured graph", "capture without vattn_linears")
