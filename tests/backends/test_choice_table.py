"""Choice by measurement: tables are checked, order by kind of layer alone, and are explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import make_config
from vattn.__main__ import main
from vattn.backends import choice_table, selector
from vattn.backends.choice_table import ChoiceTable, Kind, Measured
from vattn.cli import tune
from vattn.config.device import DeviceInfo
from vattn.config.files import write_whole
from vattn.errors import ConfigError

H200 = DeviceInfo("cuda", (9, 0), "NVIDIA H200")
CONFIG = make_config(dtype="bfloat16", num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
NAMES = ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_SDPA")


def table(**us: float) -> ChoiceTable:
    """A table of one kind, that of `CONFIG`, whose steps take as long as given, and one step the inverse of nothing."""
    cell = Measured(Kind.of(CONFIG), {"decode": us, "prefill": {name: 2 * time for name, time in us.items()}})
    return ChoiceTable("NVIDIA H200", (9, 0), "2026-01-02", {"torch": "2"}, (cell,))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Write a table where the environment names it."""

    def write(made: ChoiceTable) -> None:
        path = tmp_path / f"table{len(list(tmp_path.iterdir()))}.json"
        path.write_text(made.dump())
        monkeypatch.setenv(choice_table.VARIABLE, str(path))
        selector.forget_decisions()

    yield write
    selector.forget_decisions()


def test_a_missing_table_is_refused_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(choice_table.VARIABLE, str(tmp_path / "none.json"))
    selector.forget_decisions()
    with pytest.raises(ConfigError, match=r"none\.json: FileNotFoundError"):
        selector.explain(CONFIG, "cpu")
    monkeypatch.delenv(choice_table.VARIABLE)
    assert selector.explain(CONFIG, "cpu").chosen == "TORCH_SDPA"


def test_the_fastest_is_asked_first_if_it_gains_enough(use) -> None:
    use(table(TRITON_ATTN=10.0, FLASHINFER=8.0, FLASH_ATTN=9.9))
    names, why = choice_table.order(NAMES, CONFIG, H200)
    assert names == ("FLASHINFER", "TRITON_ATTN", "FLASH_ATTN", "TORCH_SDPA")
    assert why.startswith("measured: FLASHINFER is tried first") and "2026-01-02" in why
    assert "FLASHINFER 1.25, FLASH_ATTN 1.01, TRITON_ATTN 1.00" in why
    use(table(TRITON_ATTN=10.0, FLASHINFER=9.8))
    names, why = choice_table.order(NAMES, CONFIG, H200)
    assert names == NAMES and "TRITON_ATTN stays first" in why


def test_nothing_measured_changes_nothing(use) -> None:
    use(table(TRITON_ATTN=10.0, FLASHINFER=5.0))
    for config in (
        CONFIG.replace(batch_invariant=True),
        CONFIG.replace(sinks=True),
        CONFIG.replace(tree_bias=True),
        CONFIG.replace(causality="bidirectional"),
        CONFIG.replace(causality="bidirectional", attn_type="encoder", block_size=0),
        CONFIG.replace(causality="bidirectional", attn_type="encoder_decoder"),
        CONFIG.replace(head_pairs="even", head_size_v=2 * CONFIG.head_size),
        CONFIG.replace(head_size=64, head_size_v=64),
        CONFIG.replace(sliding_window=9),
        CONFIG.replace(kv_cache_dtype="fp8_e4m3", kv_scale="tensor"),
    ):
        assert choice_table.order(NAMES, config, H200) == (NAMES, None)
    assert choice_table.order(NAMES, CONFIG, DeviceInfo("cpu")) == (NAMES, None)
    use(ChoiceTable("NVIDIA H200", (9, 0), "2026-01-02"))
    assert choice_table.order(NAMES, CONFIG, H200) == (NAMES, None)


def test_the_nearest_group_size_answers(use) -> None:
    few, many = (Measured(Kind(128, group, "bfloat16", False), {"d": us}) for group, us in (
        (1, {"TRITON_ATTN": 1.0, "FLASHINFER": 9.0}), (16, {"TRITON_ATTN": 9.0, "FLASHINFER": 1.0}),
    ))  # fmt: skip
    use(ChoiceTable("NVIDIA H200", (9, 0), "2026-01-02", {}, (few, many)))
    first = [choice_table.order(NAMES, CONFIG.replace(num_heads=8 * g), H200)[0][0] for g in (1, 2, 8, 16)]
    assert first == ["TRITON_ATTN", "TRITON_ATTN", "FLASHINFER", "FLASHINFER"]


def test_a_backend_without_common_steps_is_not_compared(use) -> None:
    cell = Measured(Kind.of(CONFIG), {"decode": {"TRITON_ATTN": 9.0}, "prefill": {"FLASHINFER": 1.0}})
    use(ChoiceTable("NVIDIA H200", (9, 0), "2026-01-02", {}, (cell,)))
    assert choice_table.order(NAMES, CONFIG, H200)[0] == NAMES


def test_explain_says_why(use, monkeypatch) -> None:
    for name in ("TRITON_ATTN", "FLASHINFER"):
        monkeypatch.setattr(type(selector.get_backend(name)), "reasons", lambda self, config, device: [])
    use(table(TRITON_ATTN=10.0, FLASHINFER=5.0))
    explanation = selector.explain(CONFIG, H200)
    assert explanation.chosen == "FLASHINFER"
    assert "measured: FLASHINFER is tried first" in str(explanation)
    assert selector.explain(CONFIG.replace(backend="TRITON_ATTN"), H200).chosen == "TRITON_ATTN"
    assert selector.explain(CONFIG.replace(batch_invariant=True), H200).chosen == "TRITON_ATTN"


def test_a_table_of_another_gpu_is_refused(use) -> None:
    use(table(TRITON_ATTN=1.0))
    with pytest.raises(ConfigError, match=r"NVIDIA H200 \(sm_90\) on NVIDIA A100 \(sm_80\)"):
        choice_table.table_for(DeviceInfo("cuda", (8, 0), "NVIDIA A100"))
    with pytest.raises(ConfigError, match="run `python -m vattn tune"):
        selector.explain(CONFIG, DeviceInfo("cuda", (9, 0), "NVIDIA H100"))


WHOLE = json.loads(table(TRITON_ATTN=1.0).dump())
BROKEN = {
    "torn": table(TRITON_ATTN=1.0).dump()[:-40],
    "empty": "",
    "another format": json.dumps({**WHOLE, "format": 99}),
    "no cells": json.dumps({name: value for name, value in WHOLE.items() if name != "cells"}),
    "a list": "[]",
    "a time of zero": json.dumps(
        {**WHOLE, "cells": [{**WHOLE["cells"][0], "us": {"d": {"TRITON_ATTN": 0, "XFORMERS": 1}}}]}
    ),
    "a kind in words": json.dumps(
        {**WHOLE, "cells": [{"kind": {**WHOLE["cells"][0]["kind"], "head_size": "64"}, "us": {}}]}
    ),
    "a kind without a window": json.dumps({**WHOLE, "cells": [{"kind": {"head_size": 64}, "us": {}}]}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_torn_table_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(BROKEN[name])
    with pytest.raises(ConfigError, match="vattn tune"):
        choice_table.read_table(path)
    with pytest.raises(ConfigError):
        choice_table.read_table(tmp_path / "absent.json")


@pytest.mark.parametrize("path", sorted(choice_table.FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_shipped_tables_are_whole_and_named_by_their_architecture(path: Path) -> None:
    read = choice_table.read_table(path)
    assert path.name == f"sm_{read.capability[0]}{read.capability[1]}.json"
    assert read.cells and all(name in selector.backend_names() for c in read.cells for t in c.us.values() for name in t)


def test_the_command_shows_a_table_and_refuses_what_it_cannot_do(tmp_path: Path, capsys, monkeypatch) -> None:
    path = tmp_path / "t.json"
    write_whole(path, table(TRITON_ATTN=10.0, FLASHINFER=8.0).dump())
    assert not list(tmp_path.glob("*.part"))
    assert main(["tune", "--check", str(path)]) == 0
    assert "FLASHINFER 1.25" in capsys.readouterr().out
    assert main(["tune"]) == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["tune", "--out", str(path)]) == 2
    assert "without a usable GPU" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="choose from these"):
        tune._picked("--steps", "decode 9x9", list(tune.STEPS))


def test_measuring_with_a_clock_that_is_given(tmp_path: Path, capsys, monkeypatch) -> None:
    """Backends that are missing, wrong or fail have no times; a cell that fails as a whole is left out."""
    from vattn.cli.bench import attention

    clock = {"TRITON_ATTN": 10.0, "TORCH_SDPA": 4.0}
    monkeypatch.setattr(attention, "interleave", lambda timers, replays: {name: clock[name] for name in timers})
    monkeypatch.setattr(tune, "BACKENDS", ("TRITON_ATTN", "TORCH_SDPA", "XFORMERS"))
    monkeypatch.setattr(selector.get_backend("XFORMERS"), "problem", lambda: "not installed")
    steps = ("decode 1x8k", "chunk 4x512 of 8k")
    made = tune.measure(("head 128 group 4", "head 128 window"), steps, ("fp8",), 3, "cpu")
    assert [cell.kind for cell in made.cells] == [Kind(128, 4, "fp8_e4m3", False), Kind(128, 4, "fp8_e4m3", True)]
    assert all(cell.us == dict.fromkeys(steps, clock) for cell in made.cells)
    assert made.cells[0].speed("TORCH_SDPA", "TRITON_ATTN") == 2.5
    told = capsys.readouterr().out
    assert "XFORMERS: not installed" in told and "[4/4] head 128 window, fp8, chunk 4x512 of 8k" in told
    path = tmp_path / "t.json"
    write_whole(path, made.dump())
    assert choice_table.read_table(path) == made

    run_cell = attention.run_cell

    def partly(layer: Any, work: Any, *rest: Any) -> dict[str, Any]:
        if work.name.startswith("chunk"):
            return {"model": layer.name, "work": work.name, "cache": "fp8", "kernels": {}, "failed": "out of memory"}
        row = run_cell(layer, work, *rest)
        row["kernels"]["TORCH_SDPA"] = {"error": 0.5, "wrong": "relative error"}
        return row

    monkeypatch.setattr(attention, "run_cell", partly)
    made = tune.measure(("head 128 group 4",), steps, ("fp8",), 3, "cpu")
    assert made.cells[0].us == {"decode 1x8k": {"TRITON_ATTN": 10.0}}
    assert "out of memory" in capsys.readouterr().out
