"""Runs the passes on the graphs that Inductor would give them, without generating code, so that a form costs little.

`captured` compiles a function down to the point where Inductor calls the passes, keeps the graph before and after, and
runs either of them op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import vattn
from vattn.ops.fusion_notes import NodeReport
from vattn.passes.pipeline import fuse_graph
from vattn.passes.region import attention_calls
from vattn.quantization.formats import OUTPUT_FORMATS

HEADS, WIDTH = 4, 64
COLUMNS = HEADS * WIDTH


@dataclass
class Capture:
    """What became of one compiled function.

    Attributes:
        before, after: the post-grad graph without and with the passes.
        report: what the passes said.
        fused: which of the two runs.
        formats: output formats that may be used.
    """

    before: list[torch.fx.GraphModule] = field(default_factory=list)
    after: list[torch.fx.GraphModule] = field(default_factory=list)
    report: list[NodeReport] = field(default_factory=list)
    fused: bool = True
    formats: Sequence[str] = tuple(OUTPUT_FORMATS)

    def backend(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, inputs, inner_compile=self._inner)

    def _inner(self, gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.compile_fx import view_to_reshape

        view_to_reshape(gm)
        gm.graph.eliminate_dead_code()
        copied = torch.fx.Graph()
        copied.output(copied.graph_copy(gm.graph, {}))
        before = torch.fx.GraphModule(gm, copied)
        self.report += fuse_graph(gm.graph, self.formats)
        gm.graph.lint()
        gm.recompile()
        self.before.append(before)
        self.after.append(gm)

        def run(*args: Any) -> Any:
            return torch.fx.Interpreter(gm if self.fused else before).run(*args)

        return make_boxed_func(run)


class Attend(nn.Module):
    """Attention and whatever is done to its output `[T, COLUMNS]`."""

    def __init__(self, form: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, **attention: Any) -> None:
        super().__init__()
        self.attn = vattn.Attention(HEADS, WIDTH, WIDTH**-0.5, 2, prefix="layers.0.attn", **attention)
        self.form = form
        self.register_buffer("scale", torch.tensor([0.0137]))
        vattn.allocate_kv_cache(self, num_blocks=16, dtype=dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.form(self.attn(query, key, value), self.scale)


class Layer(nn.Module):
    """A projection, attention, and a residual of what a form makes of the output."""

    def __init__(self, index: int, form: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.qkv = nn.Linear(COLUMNS, 2 * COLUMNS, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.attn = vattn.Attention(HEADS, WIDTH, WIDTH**-0.5, 2, prefix=f"layers.{index}.attn")
        self.form = form
        self.register_buffer("scale", torch.tensor([0.0037 * (index + 1)]))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split((COLUMNS, 2 * WIDTH, 2 * WIDTH), dim=-1)
        return x + self.form(self.attn(query, key, value), self.scale).to(x.dtype)


class Stack(nn.Module):
    """One layer for each form, on one cache."""

    def __init__(self, forms: Sequence[Callable[..., Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, form) for index, form in enumerate(forms))
        vattn.allocate_kv_cache(self, num_blocks=16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run(target: Any, model: nn.Module, query_lens: list[int]) -> Tensor:
    """Call a stack, or what it was compiled to, on a step of some lengths."""
    with step(model, query_lens):
        return target(inputs_of(sum(query_lens))[0])


class Bundle:
    """Several forms side by side, each on the output of an attention of its own: one compile judges them all.

    Called with `[query, key, value]` rows and the start of every request.
    """

    def __init__(self, forms: Sequence[Callable[..., Any]], dtype: str = "bfloat16") -> None:
        base = vattn.AttentionConfig(HEADS, 2, WIDTH, WIDTH, 0.2, dtype, dtype, block_size=0, attn_type="encoder_only")
        base = base.replace(causality="bidirectional")
        # No two calls are the same, or they would be made one.
        self.configs = [base.replace(scale=0.2 + index / 1000).encode() for index in range(len(forms))]
        self.forms, self.scale = list(forms), torch.tensor([0.0137])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: Tensor) -> tuple[Any, ...]:
        query, key, value = (x.view(x.shape[0], -1, WIDTH) for x in (query, key, value))
        results = []
        for form, config in zip(self.forms, self.configs, strict=True):
            out = torch.empty_like(query)
            args = (query, key, value, starts, starts, out, None, None, *[None] * 10, [], None, config)
            torch.ops.vattn.varlen_attention(*args)
            results.append(form(out.flatten(1), scale))
        return tuple(results)

    def run(self, target: Callable[..., Any], query_lens: list[int]) -> tuple[Any, ...]:
        """Call something compiled from this on inputs of some lengths."""
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        inputs = inputs_of(sum(query_lens), seed=len(query_lens))
        with torch.no_grad():
            return target(*inputs, starts, self.scale)


def captured_bundle(bundle: Bundle) -> tuple[Capture, Any]:
    """Compile forms up to the passes; returns what happened and the callable."""
    torch._dynamo.reset()
    capture = Capture()
    target = vattn.compile(bundle.__call__, backend=capture.backend)
    bundle.run(target, [3, 4])
    return capture, target


def after_attention(graph: torch.fx.GraphModule) -> list[list[torch.fx.Node]]:
    """Return, for every attention call of a graph in order, what is computed from its results."""
    found = []
    for call, _ in attention_calls(graph.graph):
        reached, stack = set(), [call]
        while stack:
            for user in stack.pop().users:
                if user not in reached and user.op != "output":
                    reached.add(user)
                    stack.append(user)
        found.append([node for node in graph.graph.nodes if node in reached])
    return found


def step_of(model: nn.Module, query_lens: list[int], **options: Any) -> Any:
    builder = vattn.AttentionMetadataBuilder(8, 64, 64, 16, layers=model)
    tables = [[1 + 2 * i] for i in range(len(query_lens))]
    return builder.build(query_lens, query_lens, tables, **options)


def inputs_of(tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    sizes = (COLUMNS, 2 * WIDTH, 2 * WIDTH)
    return [torch.randn(tokens, size, generator=rng).to(dtype) * 3 for size in sizes]


@contextmanager
def step(model: nn.Module, query_lens: list[int], **options: Any) -> Any:
    with torch.no_grad(), vattn.forward_context(step_of(model, query_lens, **options)):
        yield


def captured(
    model: nn.Module, query_lens: list[int] | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Capture, Any]:
    """Compile a model up to the passes; returns what happened and the callable."""
    query_lens = query_lens or [3, 4]
    torch._dynamo.reset()
    capture = Capture()
    target = vattn.compile(model, backend=capture.backend)
    with step(model, query_lens):
        target(*inputs_of(sum(query_lens), dtype))
    return capture, target
