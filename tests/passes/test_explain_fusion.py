"""The subcommand that shows a user what became of their model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import escaping, static
from harness import Attend, inputs_of, step_of
from queries import PER_TENSOR, Written, inputs

from vattn.__main__ import main
from vattn.cli import explain_fusion
from vattn.errors import ConfigError


def fusing() -> tuple[Any, ...]:
    model = Attend(static)
    return model, inputs_of(7), step_of(model, [3, 4])


def missing() -> tuple[Any, ...]:
    model = Attend(escaping)
    return model, inputs_of(7), step_of(model, [3, 4])


def without_metadata() -> tuple[Any, ...]:
    return Attend(static), inputs_of(7)


def without_a_tuple() -> tuple[Any, ...]:
    return Attend(static), inputs_of(7)[0]


def query() -> tuple[Any, ...]:
    return Written(PER_TENSOR["divide"]), (inputs(),)


def wrong() -> int:
    return 3


not_callable = 5


def test_report_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "graphs.dot"
    assert main(["explain-fusion", f"{__name__}:fusing", "--strict", "--dot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1 attention nodes: 1 fused") and "writes fp8_static" in printed
    before, after = picture.read_text().split("digraph")[1:]
    assert before.count("#a6cee3") == 1 and before.count("#fdbf6f") > 3 and "output_format" not in before
    assert "clamp" not in after and "quant" not in after and "#fdbf6f" not in after
    assert after.count("#b2df8a") == 1 and "output_format=fp8_static" in after


def test_a_picture_of_a_query(tmp_path: Path) -> None:
    picture = tmp_path / "graphs.dot"
    assert main(["explain-fusion", f"{__name__}:query", "--dot", str(picture)]) == 0
    before, after = picture.read_text().split("digraph")[1:]
    assert before.count("#a6cee3") == 1 and before.count("#fdbf6f") >= 4 and "query_load" not in before
    assert after.count("#b2df8a") == 1 and "query_load=divide" in after and "#fdbf6f" not in after


def test_a_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-fusion", f"{__name__}:missing", "--strict", "--json"]) == 1
    ((node,),) = json.loads(capsys.readouterr().out).values()
    assert node["outcome"] == "near miss" and "forms.py" in node["source"] and "o + 1" in node["source"]


def test_a_profiling_call_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-fusion", f"{__name__}:without_metadata", "--strict"]) == 1
    said = capsys.readouterr().err
    assert "return (model, args, metadata)" in said and "the passes ran on 1 graph, none with attention" in said


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-fusion", f"{__name__}:fusing", "--stric"]) == 2
    assert "explain-fusion has no --stric" in capsys.readouterr().err


@pytest.mark.parametrize(
    "target",
    ["no_colon", "no_such_module:f", f"{__name__}:no_such", f"{__name__}:wrong", f"{__name__}:without_a_tuple"],
)
def test_wrong_targets(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-fusion", target]) == 2
    assert capsys.readouterr().err.startswith("vattn: ")


def test_a_picture_that_could_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-fusion", f"{__name__}:fusing", "--dot", str(tmp_path / "none" / "o.dot")]) == 2
    assert "a folder that exists" in capsys.readouterr().err


def test_a_target_that_is_no_function() -> None:
    with pytest.raises(ConfigError, match="is no function"):
        explain_fusion.load(f"{__name__}:not_callable")
    assert torch.is_tensor(explain_fusion.load(f"{__name__}:fusing")()[1][0])


def test_explain_asks_for_what_the_query_pass_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", "--device", "cpu", "--query-format", "fp8_e4m3", "--query-load"]
    assert main([*asked, "divide"]) == 0
    assert "query_load=divide" in capsys.readouterr().out
    assert main([*asked, "approximate_divide", "--backend", "TORCH_SDPA"]) == 1
    assert "query_load approximate_divide (runs plain, divide, multiply)" in capsys.readouterr().out
    assert main(["explain", "--device", "cpu", "--query-load", "divide"]) == 2
    assert "query_format" in capsys.readouterr().err
