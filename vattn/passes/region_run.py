"""Runs single nodes of a graph on the CPU, and finds values that depend on no input of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn.passes.ops import meaning, op_name, unwritten
from vattn.passes.region import FP8_DTYPES, value

SATURATES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether eager CUDA casts to e4m3 saturate, as compiled ones and those of a CPU do (pytorch/pytorch#178817)."""

_LARGEST_FINITE_CAST = 464.0
"""A cast that does not saturate makes NaN of larger values; up to this it rounds to 448."""


def constant(node: Node, depth: int = 8) -> Tensor | None:
    """Return the value of a node that depends on no input of the graph, `None` for any other."""
    if node.op == "get_attr":
        owner: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part, None)
        return owner.detach().cpu() if isinstance(owner, Tensor) and owner.numel() <= 4096 else None
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or depth == 0:
        return None
    val = value(node)
    if not isinstance(val, Tensor) or not isinstance(val.numel(), int) or val.numel() > 4096:
        return None
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    env: dict[Node, Any] = {}
    for source in node.all_input_nodes:
        env[source] = constant(source, depth - 1)
        if env[source] is None:
            return None
    return run_node(node, env)


def cpu_arguments(node: Node, value_of: Callable[[Node], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments that a node is called with on CPU."""
    args, given = torch.fx.map_arg((node.args, dict(node.kwargs)), value_of)  # type: ignore[misc]
    kwargs = {name: argument for name, argument in given.items() if name not in ("layout", "pin_memory")}
    return args, kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})


def run_node(node: Node, env: dict[Node, Any]) -> Any:
    """Run one node on CPU."""
    args, kwargs = cpu_arguments(node, env.__getitem__)
    name = op_name(node.target)
    if meaning(node) in ("cast", "copy"):
        dtype: Any = args[0].dtype if name == "copy" else kwargs.get("dtype") or (args[1] if len(args) > 1 else None)
        if dtype in FP8_DTYPES:
            return eager_cast(args[1] if name == "copy" else args[0], dtype)
    if node.target is torch.ops.prims.device_put.default:
        return args[0]
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    if unwritten(node):
        made.fill_(3)  # Freed memory may hold the expected values.
    return made


def eager_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to FP8 as eager CUDA of this torch does."""
    return x.to(dtype) if SATURATES else unsaturated_cast(x, dtype)


def unsaturated_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to FP8 as eager CUDA did before torch 2.12: NaN beyond the range."""
    if dtype is not torch.float8_e4m3fn or not x.is_floating_point():
        return x.to(dtype)
    wide = x.float()
    return torch.where(wide.abs() > _LARGEST_FINITE_CAST, torch.nan, wide).to(dtype)


def run_nodes(nodes: Iterable[Node], env: dict[Node, Any]) -> None:
    """Run nodes in order; `env` gets their values."""
    for node in nodes:
        env[node] = run_node(node, env)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same elements in order, bit for bit except for NaN, in any shapes."""
    if a.numel() != b.numel() or a.dtype != b.dtype:
        return False
    a, b = a.reshape(-1), b.reshape(-1)
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    if torch.equal(a.view(integer), b.view(integer)):
        return True
    differ = a.view(integer) != b.view(integer)
    return bool(a[differ].float().isnan().all()) and bool(b[differ].float().isnan().all())
