"""The report's lines as compiled code carries them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forms import static
from harness import Attend, inputs_of, step

import vattn
from vattn.canonical import NOTE_MARK
from vattn.config import AttentionConfig
from vattn.passes.report import NodeReport, fusion_report, read_note

CONFIG = AttentionConfig(4, 2, 32, 32, 0.2, "bfloat16", "bfloat16").encode()
ODD_LINE = 'm.py:3: return f("x", \'y\', """z""") # 100 % {é} \\n ??/ &amp;\ttab\n'


def test_a_note_holds_any_line_of_code() -> None:
    node = NodeReport("g", 0, 1, "attention", "fused", "none", "why", ODD_LINE, rope="one kernel", rope_outcome="fused")
    text = node.note(CONFIG)
    assert text.isascii() and text.isprintable() and not set(text) & {'"', "\\", "?"}
    assert NodeReport.of_note(text.partition(NOTE_MARK)[2]) == node
    assert AttentionConfig.parse(text).encode() == CONFIG


@pytest.mark.parametrize("note", ["", "not a note", '{"graph":"g","index":0}', "{'graph':'g','later':1}"])
def test_notes_of_other_versions_are_no_report(note: str) -> None:
    read_note(CONFIG + NOTE_MARK + note)
    assert len(fusion_report()) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_a_cpp_wrapper() -> None:
    """Inductor writes config strings into C++."""

    def odd(o: torch.Tensor, s: torch.Tensor) -> Any:
        return {"a 'key'": static(o, s)}["a 'key'"]  # "quoted" \n {0} 100 %

    model = Attend(odd)
    with torch._inductor.config.patch(cpp_wrapper=True, force_disable_caches=True), step(model, [3, 4]):
        got = vattn.compile(model, options=vattn.options(strict=True))(*inputs_of(7))
        assert torch.equal(got.view(torch.uint8), model(*inputs_of(7)).view(torch.uint8))
