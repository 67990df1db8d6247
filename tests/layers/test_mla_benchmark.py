"""The latent attention benchmark runs on a CPU, in tiny sizes: every kind of cell, its rows, and what fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness
from benchmarks.mla import attention as mla
from benchmarks.mla.cells import TINY, Cell, Inputs


def test_cells_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds: dict[tuple[str, ...], int] = {}
    for number, cell in enumerate(mla.CELLS):
        if cell.changes.get("kv_cache_dtype") != "fp8_ds_mla":  # of whose groups tiny latents have none
            kinds.setdefault((cell.kind, str(cell.tokens > 1), *sorted(cell.changes)), number)
    file = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--inline", "--json", str(file), "--only", *map(str, kinds.values())]
    assert mla.main(arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["cell"] for row in rows] == list(kinds.values())
    for row in rows:
        assert row["us"]["vattn"] > 0 and ("ratio" in row) == (len(row["us"]) > 1)
    assert capsys.readouterr().out.count("\n") == len(rows)


def test_a_cell_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Done:
        returncode, stdout, stderr = 1, "", "a peer broke this process"

    monkeypatch.setattr(harness.subprocess, "run", lambda *args, **kwargs: Done)
    file = tmp_path / "rows.json"
    assert mla.main(["--json", str(file), "--only", "0", "1"]) == 1
    rows = json.loads(file.read_text())["rows"]
    assert [row["failed"] for row in rows] == ["a peer broke this process"] * 2


def test_no_cell_begins_when_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert mla.main(["--seconds", "-1"]) == 0
    assert "cells from 0 on were not begun" in capsys.readouterr().err


def test_the_check_notices_a_wrong_result() -> None:
    cell = Cell("decode", 2, 3, -40, 2)
    inputs = Inputs(cell, TINY, "cpu")
    query: Any = inputs.absorbed()
    right = torch.empty(6, 2, 64)
    for request in range(3):
        length = int(inputs.seq_lens[request])
        rows = inputs.cache[inputs.table[request].long()].flatten(0, 1)[:length]
        for i in range(2):
            seen = rows[: length - 1 + i]
            scores = query[2 * request + i] @ seen.T * inputs.config().scale
            right[2 * request + i] = scores.softmax(-1) @ seen[:, :64]
    assert inputs.error(query, right) < 1e-5
    assert inputs.error(query, right.flip(0)) > 0.1


def test_the_whole_layer_gives_what_transformers_gives(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from benchmarks.mla import layer

    file = tmp_path / "rows.json"
    assert layer.main(["--device", "cpu", "--json", str(file), "--only", "0", "2"]) == 0
    plain, fp8 = json.loads(file.read_text())["rows"]
    # In fp32 hardly a code may differ; FP8 rows of a cache cost some per cent.
    assert plain["difference"] < 0.005 and fp8["difference"] < 0.1 and plain["ratio"] > 0


def test_steps_of_different_lengths(tmp_path: Path) -> None:
    from benchmarks.mla import mixed

    file = tmp_path / "rows.json"
    assert mixed.main(["--device", "cpu", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == list(mixed.CELLS)
    assert all(row["difference"] < 2e-6 and row["ratio"] > 0 for row in rows)
