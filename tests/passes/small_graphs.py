"""Graphs of small programs, written by hand: no layer, no compiler, a varying number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

T = 13
"""In shapes: a varying number of tokens."""

Shape = tuple[Any, ...]
"""Sizes, and a dtype unless it is fp32."""


class Written:
    """The graph of a program of some tensors."""

    def __init__(self, program: Callable[..., Any], *shapes: Shape) -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv())

        def fake(shape: Shape) -> Tensor:
            sizes = [size for size in shape if isinstance(size, int)]
            dynamic = [DimDynamic.DUCK if size == T else DimDynamic.STATIC for size in sizes]
            made = torch.empty(sizes, dtype=torch.float32 if sizes == list(shape) else shape[-1])
            return mode.from_tensor(made, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))

        inputs = [*map(fake, shapes)]
        with mode:
            self.gm: GraphModule = make_fx(program)(*inputs)
        self.gm.graph.eliminate_dead_code()
        self.inputs: list[Node] = self.gm.graph.find_nodes(op="placeholder")
        (results,) = self.gm.graph.find_nodes(op="output")
        self.end: Node = results.args[0]
