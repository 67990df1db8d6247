"""What vattn relies on in torch beyond its public interface: names, the form of graphs, how generated code rounds.

Where this fails, the passes need a look before they can be trusted with that torch.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import static
from grammar import Form
from harness import Attend, captured
from test_generated_code import compiled
from torch import Tensor

import vattn
from vattn.passes.entry import SLOT
from vattn.passes.inductor import EMULATES_EVERYWHERE, is_part, rounds_divisions, rounds_every_operation
from vattn.passes.region import attention_calls
from vattn.passes.region_precision import roundings

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

NAMES = """
torch._C._AutoDispatchBelowAutograd
torch._C._cuda_getCurrentRawStream
torch._C._cuda_getDevice
torch._C._cuda_isCurrentStreamCapturing
torch._C._dynamo.eval_frame._FrameAction.SKIP
torch._C._dynamo.eval_frame._FrameExecStrategy
torch._C._dynamo.eval_frame.set_code_exec_strategy
torch._C._len_torch_dispatch_stack
torch._assert_async
torch._dynamo.config.recompile_limit
torch._dynamo.exc.FailOnRecompileLimitHit
torch._dynamo.exc.ShortenTraceback.__init__
torch._dynamo.exc.TorchDynamoException
torch._dynamo.maybe_mark_dynamic
torch._guards.detect_fake_mode
torch._inductor.aoti_compile_and_package
torch._inductor.aoti_load_package
torch._inductor.async_compile.AsyncCompile.warm_pool
torch._inductor.compile_fx
torch._inductor.compile_fx.compile_fx
torch._inductor.config.eager_numerics.division_rounding
torch._inductor.config.emulate_precision_casts
torch._inductor.config.force_disable_caches
torch._inductor.config.fx_graph_cache
torch._inductor.config.get_config_copy
torch._inductor.custom_graph_pass.CustomGraphPass
torch._inductor.exc.InductorError
torch._inductor.list_mode_options
torch._inductor.pattern_matcher.stable_topological_sort
torch._inductor.virtualized.V.aot_compilation
torch._ops.HigherOrderOperator
torch._ops.OpOverload
torch._scaled_mm
torch._subclasses.fake_tensor.unset_fake_temporarily
torch.autograd.forward_ad._current_level
torch.cuda._sleep
torch.distributed._functional_collectives
torch.distributed.distributed_c10d._get_default_store
torch.distributed.distributed_c10d._resolve_process_group
torch.distributed.distributed_c10d._world.pg_names
torch.ops._c10d_functional
torch.ops._flashmla_C
torch.ops.aten._flash_attention_forward
torch.utils._python_dispatch.TorchDispatchMode
torch.utils._python_dispatch._disable_current_modes
torch.utils._pytree.tree_map_only
"""
"""Every private name of torch that vattn uses. They hold in 2.11, 2.13, 2.14 and 2.15."""

ELSEWHERE = ("torch._C._cuda_", "torch.ops._flashmla_C")
"""Names of CUDA builds and of other packages."""


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of torch that a file imports, reads as attributes or asks for by `getattr`."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}

    def dotted(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "getattr"
            and isinstance(node.args[1], ast.Constant)
        ):
            return f"{dotted(node.args[0])}.{node.args[1].value}"
        return known.get(node.id, "") if isinstance(node, ast.Name) else ""

    found = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.expr)}
    for name in found | set(known.values()):
        parts = name.split(".")
        whole = not any(other.startswith(f"{name}.") for other in found)
        if parts[0] == "torch" and whole and any(part[:1] == "_" != part[1:2] for part in parts):
            yield name


def test_private_names() -> None:
    files = Path(vattn.__file__).parent.rglob("*.py")
    used = {name for path in files for name in private_names(ast.parse(path.read_text()))}
    assert used == set(NAMES.split()), "NAMES lists what vattn uses: add a new name once every supported torch has it"


@pytest.mark.parametrize("name", [name for name in NAMES.split() if not name.startswith(ELSEWHERE)])
def test_torch_has_the_name(name: str) -> None:
    owner: Any = torch
    at = "torch"
    for part in name.split(".")[1:]:
        at += f".{part}"
        if not hasattr(owner, part):
            importlib.import_module(at)
        owner = getattr(owner, part)


def test_the_form_of_a_graph() -> None:
    assert SLOT in torch._inductor.config.get_config_copy()
    capture = captured(Attend(static))
    (graph,) = capture.before
    ((call, name),) = attention_calls(graph.graph)
    assert name == "attention" and str(call.target) == "auto_functionalized_v2"
    assert {"_all_bases", "_output_base_index", "config"} <= set(call.kwargs) and call.kwargs["_output_base_index"] == 0
    assert {"val", "eager_input_vals", "stack_trace"} <= set(call.meta)
    assert not is_part(capture.after[0].graph)
    assert [node.outcome for node in capture.report] == ["fused"]


def test_bytes_and_kernels_of_generated_code() -> None:
    results, kernels = [], []
    for options in ({}, {"options": vattn.options()}):
        bundle, target, code = compiled([Form("static", static)], **options)
        results.append(bundle.run(target, [3, 4])[0].view(torch.uint8))
        kernels.append("".join(code).count("async_compile.cpp_pybinding("))
    assert torch.equal(*results) and kernels == [1, 0]


EVERY_VALUE = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("emulated", [False, True])
def test_a_chain_that_ends_in_fp32_is_rounded_where_casts_are_emulated(emulated: bool) -> None:
    def chain(x: Tensor, factor: Tensor, term: Tensor) -> Tensor:
        return (x * factor - term).float()

    seen: list[torch.fx.Graph] = []
    config = torch._inductor.config.patch(
        emulate_precision_casts=emulated, post_grad_custom_post_pass=seen.append, force_disable_caches=True
    )
    inputs = (
        EVERY_VALUE[EVERY_VALUE.isfinite()],
        torch.tensor([1.703125]).bfloat16(),
        torch.tensor([0.30078125]).bfloat16(),
    )
    with config, torch.no_grad():
        got = torch.compile(chain)(*inputs)
        certain, doubtful = roundings([node for node in seen[0].nodes if node.op == "call_function"])
    rounded, unrounded = chain(*inputs), chain(*map(Tensor.float, inputs))
    assert not torch.equal(rounded, unrounded)
    assert torch.equal(got, rounded if emulated and EMULATES_EVERYWHERE else unrounded)
    if emulated:
        assert not certain and len(doubtful) == (0 if EMULATES_EVERYWHERE else 2)
    else:
        assert len(certain) == 2 and not doubtful


def test_divisions_of_code_for_cuda() -> None:
    from torch._inductor import config, ir, lowering
    from torch._inductor.codegen.triton import TritonOverrides
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    class Variable(str):
        dtype = torch.float32

    graph = GraphLowering(torch.fx.symbolic_trace(lambda x: x))
    for rounds in (False, True):
        with config.patch({"eager_numerics.division_rounding": rounds}), V.set_graph_handler(graph):
            assert rounds_divisions() == rounds
            quotient = "triton.language.div_rn(a, b)" if rounds else "(a / b)"
            assert TritonOverrides.truediv(Variable("a"), Variable("b")) == quotient
            for device, divisor in (("cuda", repr(1.0 / 0.0137)), ("cpu", "0.0137")):
                layout = ir.FixedLayout(torch.device(device), torch.float32, [4], [1])
                x = ir.TensorBox.create(ir.InputBuffer(name="x", layout=layout))
                assert f"ops.constant({divisor}, " in lowering.div(x, 0.0137).data.data.inner_fn_str()


@pytest.mark.skipif(VERSION < (2, 15), reason="torch 2.15 has one name for all options of exact numerics")
def test_strict_numerics_set_the_options_that_are_read() -> None:
    with torch._inductor.config.patch(numerics="strict"):
        assert rounds_divisions() and rounds_every_operation()
