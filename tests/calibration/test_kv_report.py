"""`python -m vattn kv-report` on the repository's model: a row for each format and scale, and what it says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from vattn.__main__ import main
from vattn.cli.kv_report import Row, relative_change

QUICK = ["kv-report", "--device", "cpu", "--max-bytes", "96", "--dtype", "float32"]


def test_rows(capsys: Any, tmp_path: Path) -> None:
    """Unit scales lose where channels were planted, calibrated ones do not; the plain cache changes nothing."""
    path, formats = tmp_path / "out.json", ["fp8_e4m3", "int8_per_token_head"]
    plot = ["--plot", str(tmp_path / "out.png")]
    assert main([*QUICK, "--outliers", "--memory", "1MiB", "--formats", *formats, "--json", str(path), *plot]) == 0
    rows = {(row["weights"], row["cache"], row["scales"]): row for row in json.loads(path.read_text())}
    assert len(rows) == 10 and (tmp_path / "out.png").stat().st_size > 1000
    plain = rows["as they are", "float32", "none"]
    assert (plain["bytes_per_token"], plain["max_tokens"]) == (8192, 128)
    assert plain["over_plain"] == 0 and plain["top1"] == 1 and plain["worst"] == 0
    planted = rows["with outliers x 4096", "float32", "none"]
    assert planted["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-5)
    kept, lost = (rows["with outliers x 4096", "fp8_e4m3", scales]["over_plain"] for scales in ("calibrated", "unit"))
    assert abs(kept) < 0.02 < 0.05 < lost
    # e4m3 keeps 4 significant bits, which no scale can change as long as nothing clips.
    fine = [rows["as they are", "fp8_e4m3", scales]["over_plain"] for scales in ("calibrated", "unit")]
    assert all(0 < abs(change) < 0.02 for change in fine)
    small = rows["as they are", "int8_per_token_head", "in the cache"]
    assert small["bytes_per_token"] == 8 * 2 * 2 * (64 + 4) and abs(small["over_plain"]) < 0.01
    assert small["error"] > 0 and plain["error"] == 0
    # int8 is off by up to half a step of 1 / 127 of the largest column; channels planted take the step with them.
    assert plain["key_error"] == 0 < small["key_error"] < 1e-3
    assert capsys.readouterr().out.count("\n") == 16


def test_offsets_of_keys(tmp_path: Path) -> None:
    """Where keys share an offset along a row of the Hadamard matrix, only signs keep a codebook's error."""
    from tests.integrations.hf_families import make_model

    # With such a base RoPE rotates few columns.
    rope = {"rope_type": "default", "rope_theta": 1e30}
    model = make_model("llama", attention_bias=True, head_dim=64, rope_parameters=rope, vocab_size=256)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.k_proj.bias, 16 * float(layer.self_attn.k_proj.weight.detach().std()))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "heldout.txt").write_text("def f(x):\n    return x\n" * 7)
    path, names = tmp_path / "out.json", ["turboquant_4bit_nc", "turboquant_4bit_nc_signed"]
    wanted = ["--model", str(tmp_path / "model"), "--formats", *names, "--json", str(path)]
    assert main([*QUICK, *wanted]) == 0
    errors = {row["cache"]: row["key_error"] for row in json.loads(path.read_text())}
    assert errors[names[1]] < 0.02 < 0.1 < errors[names[0]]


def test_names_and_noise(capsys: Any) -> None:
    """Aliases are understood, each format is measured once, and a difference that may be chance is marked."""
    assert main([*QUICK, "--formats", "fp8", "fp8_e4m3"]) == 0
    out, err = capsys.readouterr()
    assert "measuring 4 caches on 96 bytes of" in err and "[4/4] weights as they are, fp8_e4m3" in err
    assert out.count("| fp8_e4m3 |") == 3
    assert out.count("% * |") > 0 and "within two standard errors" in out


def test_standard_error() -> None:
    """The error is that of the mean of paired differences, whatever the spread of the text; large ones are no noise."""
    drawn = torch.Generator().manual_seed(0)
    plain = torch.rand(400, generator=drawn).double() * 5
    changes = []
    for _ in range(300):
        more = 0.01 + 0.1 * torch.randn(400, generator=drawn).double()
        changes.append(relative_change(plain + more, plain))
    over, error = torch.tensor(changes).double().unbind(1)
    # The spread of 300 estimates is known to 1 / sqrt(2 * 300) = 4 %.
    assert float(over.std() / error.mean()) == pytest.approx(1, abs=0.15)
    row = Row("", "", "", over_plain=0.02, error=0.009)
    assert not row.noise and replace(row, error=0.011).noise and replace(row, error=float("nan")).noise


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--formats", "fp7"], "turboquant_k8v4"),
        (["--formats", "fp8,nvfp4"], "separate names by spaces"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--model", "nowhere"], "config.json"),
        (["--memory", "much"], "2GiB"),
        (["--max-bytes", "-5"], "at least 2"),
        (["--outliers", "0"], "1 to 24"),
        (["--margin", "0.5"], "from 1"),
        (["--rope-length", "0"], "--rope-length 0"),
        (["--rope-length", "64"], "same for every length"),
        (["--margin", "1.5", "--formats", "int8_per_token_head"], "--margin 1.5 with --formats int8_per_token_head"),
        (["--formats", "bf16"], "fp8_e4m3"),
        (["--json", "nowhere/out.json"], "--json nowhere/out.json, which cannot be written"),
        (["--json", "."], "--json ., which cannot be written"),
        (["--plot", "nowhere/out.png"], "--plot nowhere/out.png, which cannot be written"),
        (["--plot", "out.xyz"], ".png"),
    ],
)
def test_wrong_use(capsys: Any, arguments: list[str], text: str) -> None:
    assert main([*QUICK, *arguments]) == 2
    assert text in capsys.readouterr().err


def test_lengths_of_rope(capsys: Any, tmp_path: Path) -> None:
    """Models whose frequencies go by lengths are measured at one, in requests that are no longer, or refused."""
    from tests.integrations.hf_families import make_model
    from tests.integrations.test_rope_lengths import LIMIT, MODELS

    make_model("phi3", **MODELS["phi3"], vocab_size=256).save_pretrained(tmp_path)
    (tmp_path / "heldout.txt").write_text("def f(x):\n    return x\n" * 7)
    wanted = [*QUICK, "--model", str(tmp_path), "--formats", "fp8_e4m3"]
    assert main(wanted) == 2
    assert f"--rope-length {LIMIT}" in capsys.readouterr().err
    for length in (LIMIT, 5000):
        assert main([*wanted, "--rope-length", str(length)]) == 0
        assert capsys.readouterr().out.count("| fp8_e4m3 |") == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "empty.txt: 1 of"), ("a", "first quarter of text .*empty.txt, which scales are calibrated on")],
)
def test_texts_too_short(capsys: Any, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(text)
    assert main([*QUICK, "--text", str(path), "--formats", "fp8"]) == 2
    err = capsys.readouterr().err
    assert re.search(said, err) and "format/s" not in err and "as they are" not in err  # no progress before
