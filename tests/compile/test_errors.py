"""Errors of ours that are found while compiling come out of `vattn.compile` and `compile_regions` as themselves."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import vattn
from vattn.compilation.compile import own_error
from vattn.errors import (
    CacheNotBoundError,
    ConfigError,
    DtypeError,
    GradientError,
    MetadataError,
    RecompilationError,
    ShapeError,
    UnknownOptionError,
    VattnError,
)


class Model(nn.Module):
    def __init__(self, bound: bool = True) -> None:
        super().__init__()
        attn = vattn.Attention(num_heads=4, head_size=16, scale=0.25, num_kv_heads=2, prefix="layers.0.attn")
        self.layers = nn.ModuleList([attn])
        if bound:
            vattn.allocate_kv_cache(self, num_blocks=4, dtype=torch.float32)

    def forward(self, *qkv: torch.Tensor) -> Any:
        for layer in self.layers:
            output = layer(*qkv)
        return output


def rows(tokens: int = 3, **options: Any) -> list[torch.Tensor]:
    return [torch.randn(tokens, heads * 16, **options) for heads in (4, 2, 2)]


def run(target: Any, *qkv: torch.Tensor, tables: Any = ((1,),)) -> Any:
    builder = vattn.AttentionMetadataBuilder(2, 8, 32, block_size=16)
    with vattn.forward_context(builder.build([3], [3], tables)):
        return target(*qkv)


@pytest.fixture(params=["vattn.compile", "compile_regions", "a function"])
def compiled(request: pytest.FixtureRequest) -> Any:
    """Return how a model becomes a callable."""
    torch._dynamo.reset()

    def regions(model: nn.Module, **options: Any) -> Any:
        vattn.compile_regions(model, **options)
        return model

    def function(model: nn.Module, **options: Any) -> Any:
        return vattn.compile(lambda *qkv: model(*qkv), **options)

    return {"vattn.compile": vattn.compile, "compile_regions": regions, "a function": function}[request.param]


MISTAKES: dict[str, tuple[type[VattnError], str, Any]] = {
    "no cache": (CacheNotBoundError, "layer 'layers.0.attn' has no KV cache", rows),
    "dtype": (DtypeError, "query is bfloat16 in layer 'layers.0.attn'", lambda: rows(dtype=torch.bfloat16)),
    "shape": (ShapeError, r"query has shape \((\w+, \w+|\.\.\.)\)", lambda: [x[:, :-4] for x in rows()]),
    "tables": (MetadataError, "without block tables in layer 'layers.0.attn'", rows),
    "gradient": (GradientError, "requires a gradient while grad mode is on", lambda: rows(requires_grad=True)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_found_while_tracing(compiled: Any, mistake: str) -> None:
    kind, text, make = MISTAKES[mistake]
    target = compiled(Model(bound=mistake != "no cache"), backend="eager")
    with pytest.raises(kind, match=text) as caught, torch.set_grad_enabled(mistake == "gradient"):
        run(target, *make(), tables=None if mistake == "tables" else [[1]])
    assert isinstance(caught.value.__cause__, torch._dynamo.exc.TorchDynamoException)
    assert "Allowed: " in str(caught.value) and "Try: " in str(caught.value)


def test_mistakes_found_by_our_backend(compiled: Any) -> None:
    target = compiled(Model(), backend=vattn.backend, options={"vattn.stict": True})
    with pytest.raises(UnknownOptionError, match=r"vattn\.stict"), torch.no_grad():
        run(target, *rows())


def test_what_is_right_afterwards_runs(compiled: Any) -> None:
    model = Model()
    target = compiled(model, backend="eager")
    with torch.no_grad():
        with pytest.raises(DtypeError):
            run(target, *rows(dtype=torch.bfloat16))
        good = rows()
        assert torch.equal(run(target, *good), run(model, *good))


@pytest.mark.parametrize("whole", [False, True], ids=["a function", "a module"])
def test_constants_without_end_are_told(whole: bool) -> None:
    """torch compiles a function for eight values of a constant; what it says of the ninth names no way out."""
    torch._dynamo.reset()

    class Named(Model):
        def forward(self, *qkv: torch.Tensor, name: str) -> Any:
            return super().forward(*qkv) * len(name)

    model: Any = Named()
    target = vattn.compile(model if whole else lambda *qkv, name: model(*qkv, name=name), backend="eager")
    limit = torch._dynamo.config.recompile_limit
    with torch.no_grad():
        for count in range(limit):
            run(functools.partial(target, name="x" * count), *rows())
        with pytest.raises(RecompilationError, match=f"compiled {limit} times.*TORCH_LOGS=recompiles"):
            run(functools.partial(target, name="one more"), *rows())
        run(functools.partial(target, name="x"), *rows())


def test_tensors_of_other_kinds_without_end_are_told() -> None:
    torch._dynamo.reset()
    target = vattn.compile(lambda x: x + 1, backend="eager")
    shapes = [(2,) * count for count in range(torch._dynamo.config.recompile_limit + 1)]
    for shape in shapes[:-1]:
        target(torch.zeros(shape))
    with pytest.raises(RecompilationError, match="how many dimensions"):
        target(torch.zeros(shapes[-1]))


def test_errors_that_are_not_ours_stay(compiled: Any) -> None:
    class Foreign(Model):
        def forward(self, *qkv: torch.Tensor) -> Any:
            return super().forward(*qkv)

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("theirs")

    target = compiled(Foreign(), backend=lambda graph, inputs: broken())
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="theirs"), torch.no_grad():
        run(target, *rows())


def test_plain_torch_compile_hides_ours_inside_its_own() -> None:
    """What the guide says about `torch.compile`; `own_error` finds it."""
    torch._dynamo.reset()
    target = torch.compile(Model(bound=False), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="CacheNotBoundError") as caught, torch.no_grad():
        run(target, *rows())
    assert isinstance(own_error(caught.value), CacheNotBoundError)


def test_texts_that_hold_no_error_of_ours() -> None:
    for text in ("raised exception ValueError('x')", "raised exception VattnErr('x')", "nothing"):
        assert own_error(RuntimeError(text)) is None
    assert isinstance(own_error(RuntimeError("raised exception ConfigError(of, something)")), ConfigError)


BROKEN = """
import torch, vattn
from vattn.errors import VattnError
attn = vattn.Attention(num_heads=4, head_size=16, scale=0.25, num_kv_heads=2, prefix="layers.0.attn")
model = torch.nn.Sequential(attn)
model.forward = lambda *qkv: [layer(*qkv) for layer in model][-1]
vattn.allocate_kv_cache(model, num_blocks=4, dtype=torch.float32)
builder = vattn.AttentionMetadataBuilder(2, 8, 32, block_size=16, layers=model)
compiled = torch.compile(model, backend="BACKEND")

def rows(tokens, dtype=torch.float32, less=0):
    return [torch.randn(tokens, heads * 16 - less).to(dtype) for heads in (4, 2, 2)]

seen = []
with torch.no_grad():
    for qkv in (rows(3, torch.bfloat16), rows(3), rows(5), rows(3, less=4), rows(4), rows(3, torch.bfloat16), rows(2)):
        count = qkv[0].shape[0]
        with vattn.forward_context(builder.build([count], [count], [[1]])):
            try:
                seen.append(str(torch.equal(compiled(*qkv), model(*qkv))))
            except Exception as error:
                seen.append(type(error).__name__ if isinstance(error, VattnError) else repr(error))
print(*seen)
"""


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_graph_breaks_of_plain_torch_compile_are_no_errors(backend: str) -> None:
    """Behind a refusal Dynamo runs the model piece by piece, and ops outside of any graph; it must not trace these."""
    text = BROKEN.replace("BACKEND", backend)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == "DtypeError True True ShapeError True DtypeError True".split(), done.stderr[-2000:]
