"""The report's lines as compiled code carries them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from forms import static
from harness import Attend, inputs_of, step

import vattn
from vattn.config.attention import AttentionConfig
from vattn.config.encoding import NOTE_MARK
from vattn.ops.fusion_notes import NodeReport, read_note, record
from vattn.passes.pipeline import _graph_name
from vattn.passes.report import FusionReport, clear_fusion_report, fusion_report, log

CONFIG = AttentionConfig(4, 2, 32, 32, 0.2, "bfloat16", "bfloat16").encode()
ODD_LINE = 'm.py:3: return f("x", \'y\', """z""") # 100 % {é} \\n ??/ &amp;\ttab\n'


def test_a_note_holds_any_line_of_code() -> None:
    node = NodeReport("g", 0, 1, "attention", "fused", "none", "why", ODD_LINE, rope="one kernel", rope_outcome="fused")
    text = node.note(CONFIG)
    assert text.isascii() and text.isprintable() and not set(text) & {'"', "\\", "?"}
    assert NodeReport.of_note(text.partition(NOTE_MARK)[2]) == node
    assert AttentionConfig.parse(text).encode() == CONFIG


def test_graphs_that_read_other_inputs_have_other_names() -> None:
    """Reports of one name replace each other."""

    def named(value: Any) -> str:
        graph = torch.fx.Graph()
        argument = graph.placeholder("x")
        argument.meta["val"] = value
        graph.output(argument)
        return _graph_name(graph)

    assert named(torch.zeros(2)) == named(torch.ones(2))
    names = {named(value) for value in (torch.zeros(2), torch.zeros(3), torch.zeros(2).bfloat16(), 2, 3)}
    assert len(names) == 5


def test_lines_of_code_from_a_cache_are_told_from_own_ones() -> None:
    """Whoever loads compiled code has an equal graph, whose lines may be others."""
    node = NodeReport(
        "g", 0, 1, "attention", "near miss", "none", "why", "model.py:3: x * 2", rope="late", rope_outcome="refused"
    )
    clear_fusion_report()
    read_note(node.note(CONFIG))
    (loaded,) = fusion_report()
    assert loaded.cached and not node.cached
    assert str(loaded).endswith("[when first compiled: model.py:3: x * 2]; RoPE refused: late")
    assert dataclasses.replace(loaded, cached=False) == node
    clear_fusion_report()
    record([node])
    read_note(node.note(CONFIG))  # as compiled code does when it runs, here in the process that compiled it
    assert list(fusion_report()) == [node]
    clear_fusion_report()


def test_a_graph_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def node(index: int, *how: str, **more: str) -> NodeReport:
        return NodeReport("g", index, 4, "attention", *how, **more)

    log([])
    log([
        node(0, "fused", "none"),
        node(1, "near miss", "none", "why", query="late", query_outcome="near miss"),
        node(2, "fused", "none", query="early", query_outcome="fused", rope="one kernel", rope_outcome="fused"),
        node(3, "near miss", "none", "why"),
    ])  # fmt: skip
    (line,) = caplog.messages
    assert line.startswith("fusion: ")
    assert line.endswith("; near miss: why; query near miss: late; RoPE fused: one kernel")


@pytest.mark.parametrize("note", ["", "not a note", '{"graph":"g","index":0}', "{'graph':'g','later':1}"])
def test_notes_of_other_versions_are_no_report(note: str) -> None:
    read_note(CONFIG + NOTE_MARK + note)
    assert len(fusion_report()) == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_a_cpp_wrapper() -> None:
    """Inductor writes config strings into C++."""

    def odd(o: torch.Tensor, s: torch.Tensor) -> Any:
        return {"a 'key'": static(o, s)}["a 'key'"]  # "quoted" \n {0} 100 %

    model = Attend(odd)
    with torch._inductor.config.patch(cpp_wrapper=True, force_disable_caches=True), step(model, [3, 4]):
        got = vattn.compile(model, options=vattn.options(strict=True))(*inputs_of(7))
        assert torch.equal(got.view(torch.uint8), model(*inputs_of(7)).view(torch.uint8))


def test_paths_are_kept_whole() -> None:
    path = "/" + "some-place/" * 15 + "model.py:3"
    report = FusionReport((NodeReport("g", 0, 1, "attention", "near miss", "none", "why", path),))
    assert path in str(report) and len(str(report).splitlines()) > 3


def test_plain_values_are_in_the_order_of_the_nodes() -> None:
    nodes = tuple(NodeReport(graph, index, 2, "attention", "fused", "none") for graph in "gh" for index in (0, 1))
    plain = FusionReport(nodes).as_dict()
    assert [(graph, [one["index"] for one in found]) for graph, found in plain.items()] == [
        ("g", [0, 1]),
        ("h", [0, 1]),
    ]
