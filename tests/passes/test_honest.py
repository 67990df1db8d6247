"""`strict=True` fails wherever attention is compiled that the passes have not seen, and the report says where."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from forms import plain, static
from harness import Attend, Stack, captured, inputs_of, step

import vattn
from vattn.errors import FusionError
from vattn.passes.entry import enabled as passes_enabled
from vattn.passes.region_run import same_bits

SLOT = "post_grad_custom_pre_pass"


def call(target: Any, model: Any) -> Any:
    with step(model, [3, 4]):
        return target(*inputs_of(7))


def test_an_outer_compile_does_not_drop_strict_passes() -> None:
    model = Attend(static)
    inner = vattn.compile(model, options=vattn.options(strict=True))
    got = call(torch.compile(lambda *x: inner(*x)), model)
    assert same_bits(got, call(model, model))
    assert vattn.fusion_report().count("fused") == 1 and not vattn.fusion_report().passes_off


@pytest.mark.parametrize("module", [True, False])
def test_an_outer_full_graph_refuses_strict_passes_in_it(module: bool) -> None:
    model = Attend(static)
    inner = vattn.compile(model if module else model.forward, options=vattn.options(strict=True))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compiled with strict passes|torch\.compiler\.disable"):
        call(torch.compile(lambda *x: inner(*x), fullgraph=True), model)


def test_passes_without_strict_in_an_outer_compile_are_reported() -> None:
    model = Attend(static)
    inner = vattn.compile(model, options=vattn.options())

    def outer(*inputs: Any) -> Any:
        return inner(*inputs)

    call(torch.compile(outer), model)
    report = vattn.fusion_report()
    (where,) = report.passes_off
    assert where.startswith("outer (") and __file__ in where and not len(report)
    assert f"passes off: {where}" in str(report)


@contextmanager
def replaced() -> Iterator[None]:
    vattn.enable(strict=True)
    with torch._inductor.config.patch({SLOT: lambda graph: None}):
        yield


@contextmanager
def emptied() -> Iterator[None]:
    vattn.enable(strict=True)
    with torch._inductor.config.patch({SLOT: None}):
        yield


@contextmanager
def enabled() -> Iterator[None]:
    with vattn.enable(strict=True):
        yield


@pytest.mark.parametrize(
    ("switched", "options"),
    [(replaced, {}), (emptied, {}), (enabled, {"backend": "aot_eager"}), (enabled, {"backend": "eager"})],
)
def test_passes_that_are_off_by_accident(switched: Callable[[], Any], options: dict[str, Any]) -> None:
    model = Attend(static)
    with switched():
        target = torch.compile(model, **options)
        for _ in range(2):
            with pytest.raises(FusionError, match=r"the passes were off when forward .*harness\.py") as refused:
                call(target, model)
    assert SLOT in refused.value.allowed


def test_code_that_is_compiled_stays_as_it_is() -> None:
    """Switching strict passes on or off recompiles nothing, and changes nothing about eager calls."""
    model = Attend(static)
    target = torch.compile(model, fullgraph=True)
    with vattn.enable(strict=True):
        expected = call(model, model)
        call(target, model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert same_bits(call(target, model), expected)
    assert not vattn.fusion_report().passes_off


def test_strict_belongs_to_a_thread() -> None:
    model, results = Attend(static), []

    def work() -> None:
        with torch.no_grad():
            results.append((call(torch.compile(model), model), passes_enabled()))

    with vattn.enable(strict=True):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    ((got, shared),) = results  # threads of torch 2.11 share Inductor's configuration
    assert same_bits(got, call(model, model)) and len(vattn.fusion_report().passes_off) == (0 if shared else 1)
    assert not shared or torch.__version__.startswith("2.11.")


@pytest.mark.parametrize("compiler", [vattn.compile, torch.compile])
def test_a_graph_without_attention_fails(compiler: Any) -> None:
    model = Attend(static)
    target = compiler(model, options=vattn.options(strict=True))
    with pytest.raises(FusionError, match="a compiled graph holds no attention"):
        target(*inputs_of(7))  # without metadata


def test_graphs_without_attention_pass_where_the_whole_thread_is_strict() -> None:
    with vattn.enable(strict=True):
        assert torch.compile(lambda x: x * 2)(torch.ones(3)).tolist() == [2, 2, 2]


def test_a_branch_without_attention_is_part_of_a_graph_with_it() -> None:
    def branched(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.cond(s.sum() > 1, lambda x: x * 2, lambda x: x + 1, (s,))
        return static(o, s), wide

    model = Attend(branched)
    got = call(vattn.compile(model, options=vattn.options(strict=True)), model)
    assert all(map(same_bits, got, call(model, model)))


def test_a_stance_that_compiles_nothing_fails() -> None:
    model = Attend(static)
    target = vattn.compile(model, options=vattn.options(strict=True))
    with torch.compiler.set_stance("force_eager"), pytest.raises(FusionError, match="the first call ran no attention"):
        call(target, model)
    call(target, model)
    assert vattn.fusion_report().count("fused") == 1


def test_a_second_object_of_code_that_this_process_compiled() -> None:
    model = Attend(static)
    for _ in range(2):
        torch._dynamo.reset()
        call(vattn.compile(model, options=vattn.options(strict=True)), model)


def test_equal_layers_have_one_line() -> None:
    report = vattn.passes.report.FusionReport(tuple(captured(Stack([plain] * 3 + [static]), inputs=one).report))
    head, _, *rest = str(report).splitlines()
    assert head.startswith("4 attention nodes: 1 fused")
    assert (
        rest[0].startswith("  attention, 3 of 4 layers: refused") and sum(not x.startswith("    ") for x in rest) == 2
    )
    assert max(map(len, rest)) <= 120


def one(tokens: int) -> list[torch.Tensor]:
    return inputs_of(tokens)[:1]
