"""Runs the passes on the graphs that Inductor would give them, without generating code, so that a form costs little.

`Capture` compiles a function down to the point where Inductor calls the passes, keeps the graph before and after, and
runs either of them op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import vattn
from vattn.ops.fusion_notes import NodeReport
from vattn.passes.pipeline import fuse_graph
from vattn.passes.region import attention_calls
from vattn.quantization.formats import OUTPUT_FORMATS

HEADS, WIDTH = 4, 64
COLUMNS = HEADS * WIDTH


class Capture:
    """Compiles a function down to the passes.

    Args:
        formats, rope: which output formats may be used, and whether RoPE is fused.
        compiler: `vattn.compile` or a relative of it, and its options.

    Attributes:
        target: what to call.
        before, after: the post-grad graphs without and with the passes.
        report: what the passes said.
        fused: which of the two runs.
    """

    def __init__(
        self,
        function: Any,
        formats: Sequence[str] = tuple(OUTPUT_FORMATS),
        rope: str = "auto",
        compiler: Callable[..., Any] = vattn.compile,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        self.formats, self.rope, self.fused = formats, rope, True
        self.before: list[torch.fx.GraphModule] = []
        self.after: list[torch.fx.GraphModule] = []
        self.report: list[NodeReport] = []
        self.target = compiler(function, backend=self.backend, **options)

    def both(self, call: Callable[[], Any]) -> list[Any]:
        """Return what a call of the target gives with the passes and without."""
        results = []
        for self.fused in (True, False):
            results.append(call())
        self.fused = True
        return results

    def backend(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, inputs, inner_compile=self._inner)

    def _inner(self, gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._inductor.compile_fx import view_to_reshape

        view_to_reshape(gm)
        gm.graph.eliminate_dead_code()
        before = torch.fx.GraphModule(gm, copied(gm.graph))
        self.report += fuse_graph(gm.graph, self.formats, self.rope)
        gm.graph.lint()
        gm.recompile()
        self.before.append(before)
        self.after.append(gm)

        def run(*args: Any) -> Any:
            return torch.fx.Interpreter(gm if self.fused else before).run(*args)

        return make_boxed_func(run)


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def in_regions(model: nn.Module, **options: Any) -> nn.Module:
    """Compile the layers of a model in place; returns the model."""
    vattn.compile_regions(model, **options)
    return model


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


def captured_bundle(forms: Sequence[Callable[..., Any]], query_lens: Sequence[int] = (3, 4)) -> tuple[Capture, Bundle]:
    """Compile forms up to the passes, side by side."""
    bundle = Bundle(forms)
    capture = Capture(bundle.__call__)
    bundle.run(capture.target, list(query_lens))
    return capture, bundle


def generated_code(call: Callable[[], Any]) -> str:
    """Return the code that Inductor generates for a call; it is neither compiled nor run."""
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []

    def generate(graph: GraphLowering) -> None:
        codes.append(graph.codegen()[0].value)
        raise InterruptedError("the code is generated")

    with (
        mock.patch.object(GraphLowering, "compile_to_module", generate),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch._dynamo.reset()
        try:
            call()
        except Exception:
            if not codes:
                raise
    (code,) = codes
    return code


def code_of(target: Callable[..., Any], model: nn.Module, query_lens: list[int], *inputs: Any) -> str:
    """Return the code that is generated for a step of a model."""
    with step(model, query_lens):
        return generated_code(lambda: target(*inputs))


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
    model: nn.Module,
    query_lens: Sequence[int] = (3, 4),
    inputs: Callable[[int], Sequence[Tensor]] = inputs_of,
    **options: Any,
) -> Capture:
    """Compile a model up to the passes on a step of some lengths."""
    capture = Capture(model, **options)
    with step(model, list(query_lens)):
        capture.target(*inputs(sum(query_lens)))
    return capture
