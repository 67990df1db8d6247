"""Appends a program to an attention call by hand, as a post-grad graph: no Dynamo, no AOTAutograd, no Inductor.

The attention call is not run: `Run` gives it the output to try, and does what its config says with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

import vattn
from vattn.passes.ops import op_name
from vattn.quantization.codecs import quantise_output

HEADS, WIDTH = 4, 64
COLUMNS = HEADS * WIDTH

Program = Callable[[Tensor, Tensor], Any]
"""What is made of the output `[T, COLUMNS]` and a scale `[1]`."""


class Template:
    """The graph of an attention call over a varying number of tokens, captured once; programs are appended to it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        name = str(dtype).removeprefix("torch.")
        config = vattn.AttentionConfig(
            HEADS, HEADS, WIDTH, WIDTH, 0.2, name, name, block_size=0, attn_type="encoder_only"
        )
        text = config.replace(causality="bidirectional").encode()

        def attend(query: Tensor, starts: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            out = torch.empty_like(query)
            args = (query, query, query, starts, starts, out, None, None, *[None] * 10, [], None, text)
            torch.ops.vattn.varlen_attention(*args)
            return out.flatten(1), scale * 2

        query, starts = torch.zeros(512, HEADS, WIDTH, dtype=dtype), torch.arange(513, dtype=torch.int32)
        torch._dynamo.mark_dynamic(query, 0)
        torch._dynamo.mark_dynamic(starts, 0)
        gm, _ = captured_graph(attend, query, starts, torch.ones(1))
        (results,) = (node for node in gm.graph.nodes if node.op == "output")
        self.graph, (self.flat, doubled) = gm.graph, results.args[0]
        self.scale = doubled.args[0]
        gm.graph.erase_node(results)
        gm.graph.erase_node(doubled)

    def behind(self, program: Program) -> GraphModule:
        """Return a graph of the attention call and a program; nodes of the program have `meta["site"]`."""
        whole = copied(GraphModule({}, self.graph))
        names = {node.name: node for node in whole.graph.nodes}

        def traced(output: Tensor, scale: Tensor) -> Any:
            made = program(output, scale)
            return made if isinstance(made, tuple) else (made,)

        results = add_program(whole, traced, [names[node.name] for node in (self.flat, self.scale)])
        whole.graph.output(results)
        return whole


def captured_graph(
    function: Callable[..., Any], *inputs: Any, compiler: Callable[..., Any] = torch.compile
) -> tuple[GraphModule, list[Any]]:
    """Return the post-grad graph of a function, as Inductor gives it to a pass, and what the graph was called with."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, view_to_reshape

    held: list[tuple[GraphModule, list[Any]]] = []

    def keep(gm: GraphModule, inputs: list[Any], **_: Any) -> Any:
        view_to_reshape(gm)

        def run(*args: Any) -> Any:
            held.append((gm, list(args)))
            return Interpreter(gm).run(*args)

        return make_boxed_func(run)

    torch._dynamo.reset()
    with torch.no_grad():
        compiler(function, backend=lambda gm, x: compile_fx(gm, x, inner_compile=keep))(*inputs)
    ((gm, args),) = held
    return gm, args


def add_program(whole: GraphModule, program: Callable[..., Any], places: Sequence[Node]) -> Any:
    """Add a program of some nodes at the end of a graph; returns the nodes that hold its results.

    Each new node has `meta["site"]`, and a line of its own: its op's name.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    mode = places[0].meta["val"].fake_mode
    sizes = [node for node in whole.graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], torch.SymInt)]
    inputs = [*sizes, *places]  # sizes of tensors are then these, as in a graph of Dynamo's

    def traced(*args: Any) -> Any:
        return torch.func.functionalize(program, remove="mutations")(*args[len(sizes) :])

    with mode, torch.no_grad(), enable_python_dispatcher():
        part = make_fx(traced, decomposition_table=select_decomp_table())(*(node.meta["val"] for node in inputs))
    remove_noop_ops(part.graph)
    view_to_reshape(part)
    part.graph.eliminate_dead_code()
    inner = dict(zip(part.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in part.graph.nodes:
        if node.op == "get_attr":
            setattr(whole, node.target, getattr(part, node.target))
        if node.op not in ("placeholder", "output"):
            inner[node] = whole.graph.node_copy(node, inner.__getitem__)
            name = op_name(node.target) or node.name
            trace = f'  File "program.py", line 1, in program\n    {name}'
            inner[node].meta = {"val": node.meta.get("val"), "site": True, "stack_trace": trace}
            if node.op == "get_attr":
                inner[node].meta["val"] = mode.from_tensor(getattr(part, node.target))
    (results,) = part.graph.find_nodes(op="output")
    return torch.fx.map_arg(results.args[0], inner.__getitem__)


def copied(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph, with the same fake values and constants."""
    graph = Graph()
    graph.graph_copy(gm.graph, made := {})
    for old, new in made.items():
        new.meta = dict(old.meta)
    for results in gm.graph.find_nodes(op="output"):
        graph.output(torch.fx.map_arg(results.args[0], made.__getitem__))
    return GraphModule(dict(gm.named_buffers()) | {k: v for k, v in vars(gm).items() if isinstance(v, Tensor)}, graph)


def run(gm: GraphModule, output: Tensor, scale: Tensor, keep: bool = False) -> tuple[Any, dict[Node, Any]]:
    """Run a graph on an attention output `[T, COLUMNS]`; returns its results and, if requested, all values."""
    runner = Run(gm, output, keep)
    sizes = {torch.SymInt: len(output), torch.float32: scale, torch.int32: torch.arange(len(output) + 1)}
    args = []
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        args.append(sizes.get(getattr(val, "dtype", type(val)), output.view(-1, HEADS, WIDTH)))
    return runner.run(*args), runner.seen


class Run(Interpreter):
    """Runs a graph; an attention call is given its output."""

    def __init__(self, gm: GraphModule, output: Tensor, keep: bool) -> None:
        super().__init__(gm)
        self.keep, self.seen = keep, dict[Node, Any]()
        self.attended = output.view(-1, HEADS, WIDTH)

    def run_node(self, n: Node) -> Any:
        made = super().run_node(n)
        if self.keep:
            self.seen[n] = made
        return made

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target) != "auto_functionalized_v2":
            return super().call_function(target, args, kwargs)
        config = vattn.AttentionConfig.parse(kwargs["config"])
        bases = list(kwargs["_all_bases"])
        at = kwargs["_output_base_index"]
        if config.output_format == "none":
            bases[at] = self.attended
        else:
            scales = kwargs.get("_output_block_scale_base_index")
            written = bases[at], None if scales is None else bases[scales]
            quantise_output(
                self.attended,
                config.output_format,
                *written,
                kwargs.get("output_scale"),
                config.output_arithmetic,
                config.output_min_scale,
                config.output_floor,
            )
        return (None, *bases)
