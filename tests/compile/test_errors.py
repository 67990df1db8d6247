"""Errors of ours that are found while compiling come out of `vattn.compile` and `compile_regions` as themselves."""

from __future__ import annotations

import functools
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
    count = qkv[0].shape[0]
    builder = vattn.AttentionMetadataBuilder(2, 8, 32, block_size=16)
    with vattn.forward_context(builder.build([count], [count], tables)):
        return target(*qkv)


def regions(model: nn.Module, **options: Any) -> Any:
    vattn.compile_regions(model, **options)
    return model


def function(model: nn.Module, **options: Any) -> Any:
    return vattn.compile(lambda *qkv: model(*qkv), **options)


MISTAKES: dict[str, tuple[type[VattnError], str, Any]] = {
    "no cache": (CacheNotBoundError, "layer 'layers.0.attn' has no KV cache", rows),
    "dtype": (DtypeError, "query is bfloat16 in layer 'layers.0.attn'", lambda: rows(dtype=torch.bfloat16)),
    "shape": (ShapeError, r"query has shape \((\w+, \w+|\.\.\.)\)", lambda: [x[:, :-4] for x in rows()]),
    "tables": (MetadataError, "without block tables in layer 'layers.0.attn'", rows),
    "gradient": (GradientError, "requires a gradient while grad mode is on", lambda: rows(requires_grad=True)),
}


@pytest.mark.parametrize(
    ("compiled", "mistake"),
    [
        (vattn.compile, "no cache"),
        (regions, "dtype"),
        (function, "shape"),
        (regions, "tables"),
        (vattn.compile, "gradient"),
    ],
)
def test_mistakes_found_while_tracing(compiled: Any, mistake: str) -> None:
    kind, text, make = MISTAKES[mistake]
    target = compiled(Model(bound=mistake != "no cache"), backend="eager")
    with pytest.raises(kind, match=text) as caught, torch.set_grad_enabled(mistake == "gradient"):
        run(target, *make(), tables=None if mistake == "tables" else [[1]])
    assert isinstance(caught.value.__cause__, torch._dynamo.exc.TorchDynamoException)
    assert "Allowed: " in str(caught.value) and "Try: " in str(caught.value)


@pytest.mark.parametrize("compiled", [vattn.compile, regions])
def test_mistakes_found_by_our_backend(compiled: Any) -> None:
    target = compiled(Model(), backend=vattn.backend, options={"vattn.stict": True})
    with pytest.raises(UnknownOptionError, match=r"vattn\.stict"), torch.no_grad():
        run(target, *rows())


def test_what_is_right_afterwards_runs() -> None:
    model = Model()
    target = vattn.compile(model, backend="eager")
    with torch.no_grad():
        with pytest.raises(DtypeError):
            run(target, *rows(dtype=torch.bfloat16))
        good = rows()
        assert torch.equal(run(target, *good), run(model, *good))


@pytest.mark.parametrize("whole", [False, True], ids=["a function", "a module"])
@torch._dynamo.config.patch(recompile_limit=2)
def test_constants_without_end_are_told(whole: bool) -> None:
    """torch compiles a function for few values of a constant; what it says of the next names no way out."""

    class Named(Model):
        def forward(self, *qkv: torch.Tensor, name: str) -> Any:
            return super().forward(*qkv) * len(name)

    model: Any = Named()
    target = vattn.compile(model if whole else lambda *qkv, name: model(*qkv, name=name), backend="eager")
    with torch.no_grad():
        for count in range(2):
            run(functools.partial(target, name="x" * count), *rows())
        with pytest.raises(RecompilationError, match=r"compiled 2 times.*TORCH_LOGS=recompiles"):
            run(functools.partial(target, name="one more"), *rows())
        run(functools.partial(target, name="x"), *rows())


@torch._dynamo.config.patch(recompile_limit=2)
def test_tensors_of_other_kinds_without_end_are_told() -> None:
    target = vattn.compile(lambda x: x + 1, backend="eager")
    target(torch.zeros(())), target(torch.zeros(2))
    with pytest.raises(RecompilationError, match="how many dimensions"):
        target(torch.zeros(2, 2))


def test_backends_that_torch_does_not_have_are_named() -> None:
    for backend in ("inductr", 5):
        with pytest.raises(UnknownOptionError, match=f"backend={backend!r}. Allowed: .*inductor"):
            vattn.compile(lambda x: x, backend=backend)
    with pytest.raises(ConfigError, match="compile_regions of NoneType"):
        vattn.compile_regions(None)  # type: ignore[arg-type]


def test_errors_that_are_not_ours_stay() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ZeroDivisionError("theirs")

    target = vattn.compile(Model(), backend=broken)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="theirs"), torch.no_grad():
        run(target, *rows())


def test_plain_torch_compile_hides_ours_inside_its_own() -> None:
    """What the guide says about `torch.compile`; `own_error` finds it."""
    target = torch.compile(Model(bound=False), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="CacheNotBoundError") as caught, torch.no_grad():
        run(target, *rows())
    assert isinstance(own_error(caught.value), CacheNotBoundError)


def test_texts_that_hold_no_error_of_ours() -> None:
    for text in ("raised exception ValueError('x')", "raised exception VattnErr('x')", "nothing"):
        assert own_error(RuntimeError(text)) is None
    assert isinstance(own_error(RuntimeError("raised exception ConfigError(of, something)")), ConfigError)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_graph_breaks_of_plain_torch_compile_are_no_errors(backend: str) -> None:
    """Behind a refusal Dynamo runs the model piece by piece, and ops outside of any graph; it must not trace these."""
    model, seen = Model(), []
    target = torch.compile(model, backend=backend)
    steps = [rows(dtype=torch.bfloat16), rows(), rows(5), [x[:, :-4] for x in rows()], rows(4), rows(2)]
    with torch.no_grad():
        for qkv in [*steps, steps[0]]:
            try:
                seen.append(torch.equal(run(target, *qkv), run(model, *qkv)))
            except VattnError as error:
                seen.append(type(error))
    assert seen == [DtypeError, True, True, ShapeError, True, True, DtypeError]
