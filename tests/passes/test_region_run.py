"""How single nodes of a graph run on the CPU, and which values depend on no input of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_graphs import T, Written
from torch import Tensor

from vattn.passes import region_run
from vattn.passes.region_run import constant, cpu_arguments, run_node, run_nodes, same_bits, unsaturated_cast

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = torch.nan, torch.inf


def chain(count: int) -> Callable[[Tensor], Tensor]:
    """Return a program that ends after some nodes which depend on no input."""

    def program(x: Tensor) -> Tensor:
        made = torch.full((3,), 2.0)
        for _ in range(count - 1):
            made = made.neg()
        return made

    return program


CONSTANTS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor | None]] = {
    "filled": (lambda x: torch.full((3,), 0.3), torch.full((3,), 0.3)),
    "computed": (lambda x: torch.arange(4).float().neg() / 2, torch.arange(4) / -2),
    "eight nodes": (chain(8), -torch.full((3,), 2.0)),
    "nine nodes": (chain(9), None),
    "many": (lambda x: torch.ones(4096), torch.ones(4096)),
    "too many": (lambda x: torch.ones(4097), None),
    "an input": (lambda x: x, None),
    "of an input": (lambda x: torch.ones(3) * x, None),
    "of a size": (lambda x: torch.ones(x.shape[0]), None),
    "random": (lambda x: torch.rand(3), None),
    "written": (lambda x: torch.ones(3).add_(2), None),
    "unwritten": (lambda x: torch.empty(3), torch.full((3,), 3.0)),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_depend_on_no_input(name: str) -> None:
    program, wanted = CONSTANTS[name]
    found = constant(Written(program, (T, 3)).end)
    assert found is None if wanted is None else found is not None and torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_constants_of_a_module_are_read_up_to_a_size() -> None:
    owner = torch.nn.Module()
    owner.inner = torch.nn.Module()
    owner.inner.few, owner.inner.many = torch.rand(4096, requires_grad=True), torch.rand(4097)
    graph = torch.fx.GraphModule(owner, torch.fx.Graph()).graph
    graph.owning_module.inner = owner.inner  # type: ignore[union-attr]
    found = constant(graph.get_attr("inner.few"))
    assert found is not None and torch.equal(found, owner.inner.few) and not found.requires_grad
    assert constant(graph.get_attr("inner.many")) is None and constant(graph.get_attr("inner")) is None
    assert constant(graph.get_attr("inner.other")) is None


def test_arguments_are_those_of_a_cpu() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    given: dict[str, Any] = {"dtype": torch.int8, "layout": torch.strided, "pin_memory": True}
    node = graph.call_function(torch.ops.aten.full.default, ([2], x), given | {"device": torch.device("cuda:1")})
    args, kwargs = cpu_arguments(node, {x: 7}.__getitem__)
    assert (args, kwargs) == (([2], 7), {"dtype": torch.int8, "device": torch.device("cpu")})
    assert cpu_arguments(graph.call_function(torch.ops.aten.neg.default, (x,)), {x: 7}.__getitem__) == ((7,), {})
    moved = graph.call_function(torch.ops.prims.device_put.default, (x, torch.device("cuda:1")))
    moved.meta["val"] = 0
    env: dict[Any, Any] = {x: torch.tensor([2.0])}
    negated = graph.call_function(torch.ops.aten.neg.default, (moved,))
    run_nodes([moved, negated], env)
    assert env[moved] is env[x] and float(env[negated]) == -2.0


@pytest.mark.parametrize("saturates", [True, False])
def test_casts_are_those_of_eager_code(saturates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_run, "SATURATES", saturates)
    x, wanted = torch.tensor([464.0, 465.0, -1e9, NAN, 0.3]), [448.0, NAN, NAN, NAN, 0.3125]
    if saturates:
        wanted = x.to(E4M3).float().tolist()
    graph = torch.fx.Graph()
    source, other = graph.placeholder("x"), graph.placeholder("y")
    aten, prims = torch.ops.aten, torch.ops.prims
    for node in (
        graph.call_function(prims.convert_element_type.default, (source, E4M3)),
        graph.call_function(aten._to_copy.default, (source,), {"dtype": E4M3}),
        graph.call_function(aten.copy.default, (other, source)),
    ):
        made = run_node(node, {source: x, other: torch.zeros(5).to(E4M3)})
        assert made.dtype == E4M3 and torch.equal(made.float().nan_to_num(-1), torch.tensor(wanted).nan_to_num(-1))
    (held,) = (graph.call_function(aten._to_copy.default, (source,), {"layout": torch.strided}),)
    assert torch.equal(run_node(held, {source: x[:3]}), x[:3])


def test_casts_saturate_from_a_version_on() -> None:
    assert (torch.torch_version.TorchVersion(torch.__version__) >= "2.12") == region_run.SATURATES


def test_other_casts_do_not_saturate_and_keep_integers() -> None:
    assert unsaturated_cast(torch.tensor([1e9]), E5M2).float().tolist() == torch.tensor([1e9]).to(E5M2).float().tolist()
    whole = torch.tensor([900])  # becomes NaN before torch 2.12
    assert same_bits(unsaturated_cast(whole, E4M3), whole.to(E4M3))


def test_bits_are_compared_but_for_those_of_nan() -> None:
    x = torch.tensor([0.0, 1.0, NAN, INF])
    assert same_bits(x, x.clone()) and same_bits(x.view(2, 2), x)
    assert same_bits(x, (x.view(torch.int32) + torch.tensor([0, 0, 5, 0]).int()).view(torch.float32))
    for other in ([-0.0, 1, NAN, INF], [0, 1, 2, INF], [0, NAN, NAN, INF], [0, 1, NAN], [0, 1, NAN, -INF]):
        assert not same_bits(x, torch.tensor(other)) and not same_bits(torch.tensor(other), x)
    assert not same_bits(x, x.double()) and same_bits(x.double(), x.double()) and same_bits(x.half(), x.half())
    whole = torch.tensor([1, 2])
    assert same_bits(whole, whole.clone()) and not same_bits(whole, whole + 1)
    assert same_bits(x.to(E4M3), x.to(E4M3)) and not same_bits(x.to(E4M3), x.neg().to(E4M3))
