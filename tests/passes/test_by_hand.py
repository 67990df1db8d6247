"""What the passes decide about single forms, in graphs that are put together by hand: milliseconds each, no compiler.

Every graph runs op by op before and after the passes. The same forms are compiled in `test_forms`, `test_query` and
`test_rope`, most of them in the slow tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from fx_layers import run as run_layer
from fx_layers import with_query, with_rope
from fx_programs import Template, copied, run
from queries import PER_HEAD, PER_TENSOR, REFUSED, UNCLAMPED, rounded
from rope_forms import FORMS as ROPE_FORMS
from test_forms import FORMS, TABLE, assert_same_bits, expected, row
from test_probe import ODD, PLAIN
from test_query import KEPT_WAYS, PRODUCERS, divided
from test_rope import targets
from torch import Tensor
from torch.fx import GraphModule

from vattn.ops.fusion_notes import FUSED, NEAR_MISS, NodeReport
from vattn.passes import region_run, verdicts
from vattn.passes.pipeline import fuse_graph
from vattn.passes.probe import NO_CLAMP
from vattn.passes.query_quant import region as query_region
from vattn.passes.query_quant.find import IN_LOAD, IN_PRODUCER, OWN_KERNEL
from vattn.passes.region_run import same_bits

SCALE = torch.tensor([0.0213])


@cache
def template() -> Template:
    return Template()


@cache
def output() -> Tensor:
    return torch.randn(11, 256, generator=torch.Generator().manual_seed(1)).bfloat16() * 3


def judged(program: Callable[..., Any]) -> NodeReport:
    """Return the report of a program behind attention; what it returns must keep its bits."""
    gm = template().behind(program)
    fused = copied(gm)
    (node,) = fuse_graph(fused.graph)
    wanted, _ = run(gm, output(), SCALE)
    got, _ = run(GraphModule(fused, fused.graph), output(), SCALE)
    assert_same_bits(tuple(got), tuple(wanted))
    if node.outcome == FUSED:
        (again,) = fuse_graph(fused.graph)
        assert (again.outcome, again.reason) == (FUSED, "requested by the layer")
    return node


COMPILED_ONLY = (
    "torchao: q", "torchao: c", "torchao: F", "compressed_tensors", "torch: quantize_per_tensor.tensor",
    "program: autograd.Function", "program: groups written", "program: heads written", "token, largest: quantile",
    "torchao: Int8Tensor.from_hp, PerRow of fp32",
)  # fmt: skip
"""Forms that Dynamo or AOTAutograd have to take apart first, or that add zeros, which Inductor leaves out."""
LONG = ("NVFP4: scale * (1 / 6)", "NVFP4: swizzled", "NVFP4: bytes of the scales", "NVFP4: pairs of a view")
READS_ANOTHER_SCALE = ("the smaller of two quotients", "by a scale and a ratio")
BY_HAND = [name for name in FORMS if not name.startswith(COMPILED_ONLY) and name not in LONG]


EXTRA = (
    "static, scaled: / s / 2", "static, scaled: / 0.02", "static, scaled: ldexp", "static, cast: copy_",
    "token, largest: of negative and positive", "token, scale: in bf16", "group, placed: first half of columns",
    "vattn: quant_fp8_group of the first tokens", "vattn: quant_nvfp4, swizzled",
    "NVFP4: thresholds",
)  # fmt: skip
"""Forms that reach code which no other form reaches."""


def is_special(name: str) -> bool:
    """Return whether a form reaches code that few reach: moves of codes and scales among them."""
    return name in EXTRA or "placed:" in name or "shaped:" in name


FUSES = {line.split(" | ")[0].removeprefix("| ") for line in TABLE if line.endswith("|  |")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if index % 6 == 0 or name not in FUSES or is_special(name) else pytest.mark.slow)
        for index, name in enumerate(BY_HAND)
    ],
)
def test_outputs(name: str) -> None:
    form = FORMS[name]
    node = judged(form.function)
    means = expected(form)
    assert row(form, node) in TABLE and (means is None or (node.outcome == FUSED) == means)


@pytest.mark.parametrize("name", [name for name in (*ODD, *PLAIN) if name not in READS_ANOTHER_SCALE])
def test_outputs_that_differ_in_places(name: str) -> None:
    node = judged(ODD.get(name) or PLAIN[name])
    assert node.outcome == (NEAR_MISS if name in ODD else FUSED)


@pytest.mark.parametrize("name", [name for name in ROPE_FORMS if name != "RMSNorm by torch"])
def test_rope(name: str) -> None:
    form = ROPE_FORMS[name]
    gm, inputs = with_rope(form)
    wanted = run_layer(gm, inputs)
    (node,) = fuse_graph(gm.graph, rope="always")
    gm.graph.lint()
    got = run_layer(gm, inputs)
    called = targets(gm.graph)
    assert form.says in node.rope, node.rope
    assert called.count("vattn.rope_kv_cache_update") == int(form.fuses is True)
    assert called.count("vattn.kv_cache_update") == int(form.fuses is not True)
    assert node.rope_outcome == {True: "fused", False: "near miss", None: ""}[form.fuses]
    for a, b in zip(got, wanted, strict=True):
        if not isinstance(a, Tensor) or form.exact or form.fuses is not True:
            assert a == b if not isinstance(a, Tensor) else torch.equal(a, b)
        else:
            a, b = ((x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).float() for x in (a, b))
            # As in `test_rope`: the graph before rounds after every op, the fused op once.
            assert (a - b).norm() <= (0.08 if "q_scale" in form.options else 0.02) * b.norm()


def query_of(*args: Any, **kwargs: Any) -> tuple[NodeReport, str]:
    """Return the report of an attention call to a quantised query, and the config of the call afterwards."""
    gm, inputs = with_query(*args, **kwargs)
    wanted = run_layer(gm, inputs)
    (node,) = fuse_graph(gm.graph)
    gm.graph.lint()
    for a, b in zip(run_layer(gm, inputs), wanted, strict=True):
        assert not isinstance(a, Tensor) or same_bits(a, b)
    (config,) = (str(n.kwargs["config"]) for n in gm.graph.nodes if "config" in n.kwargs)
    return node, config


@pytest.mark.parametrize("name", [*PER_TENSOR, *PER_HEAD])
def test_queries_that_the_attention_kernel_quantises(name: str) -> None:
    scales = (0.0137, 0.031) if name in PER_HEAD else (0.0137,)
    node, config = query_of(PER_TENSOR.get(name) or PER_HEAD[name], scales=scales)
    assert (node.query, node.query_outcome) == (f"{IN_LOAD}, after mm", "fused")
    assert f"query_load={'multiply' if 'reciprocal' in name or 'one over' in name else 'divide'}" in config


FIRST_DIFFERENCE = {
    "too narrow": "clamp_min", "bf16 math": "convert_element_type", "another scale": "div", "multiplied instead": "mul",
    "a scale per token": "amax", "no scale": "convert_element_type", "a constant": "div",
    "through e5m2": "convert_element_type", "given reciprocal": "mul",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_queries_that_no_load_quantises(name: str) -> None:
    way, reason, _ = REFUSED[name]
    node, config = query_of(way)
    assert (node.query, node.query_outcome) == (f"{OWN_KERNEL} mm: {reason}", "near miss")
    assert name not in FIRST_DIFFERENCE or node.query_source == f"program.py:1: {FIRST_DIFFERENCE[name]}"
    assert "query_load" not in config


@pytest.mark.parametrize("name", UNCLAMPED)
def test_queries_without_a_clamp_where_casts_do_not_saturate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.12."""
    for module in (region_run, query_region):
        monkeypatch.setattr(module, "SATURATES", False)
    verdicts.forget()
    gm, _ = with_query(UNCLAMPED[name])
    (node,) = fuse_graph(gm.graph)
    verdicts.forget()
    assert node.query == f"{OWN_KERNEL} mm: {NO_CLAMP}" and node.query_outcome == "near miss"


def test_a_factor_that_bf16_rounds_away_is_no_part_of_a_query_load() -> None:
    """Generated code does not round the product, so the op would scale otherwise."""
    node, config = query_of(lambda q, s: (rounded((q * (1 + 2**-10)).float() / s), s))
    assert node.query == IN_PRODUCER and "query_load" not in config


@pytest.mark.parametrize("name", PRODUCERS)
def test_queries_of_other_kernels(name: str) -> None:
    make, says = PRODUCERS[name]
    node, config = query_of(divided, make)
    assert node.query.startswith(says) and node.query_outcome == "fused"
    assert ("query_load" in config) == says.startswith(IN_LOAD)


@pytest.mark.parametrize("name", KEPT_WAYS)
def test_queries_that_the_op_cannot_read(name: str) -> None:
    options, why = KEPT_WAYS[name]
    node, config = query_of(**options)
    assert node.query.endswith(why) and node.query_outcome == "near miss" and "query_load" not in config
