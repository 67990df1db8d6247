"""Files are written whole or not at all, whatever call fails on the way."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from tests.faults import each_file_fault, file_fault, files_in
from vattn.config.files import write_files, write_whole
from vattn.errors import ConfigError, TransferError
from vattn.kv_transfer import TransferRequest


def test_an_old_file_survives_every_fault(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def check(error: BaseException) -> None:
        assert files_in(tmp_path) == {"a.json": b"old"} and "No space left" in str(error)

    # Opening, writing, flushing, syncing, closing, renaming.
    assert each_file_fault(lambda: write_whole(path, "new and longer"), check) == 6
    assert files_in(tmp_path) == {"a.json": b"new and longer"}


def test_several_files_appear_together(tmp_path: Path) -> None:
    contents = [(tmp_path / name, b"bytes") for name in "abc"]
    for place in range(1, 100):
        with file_fault(place) as strike:
            try:
                write_files(contents)
            except OSError:
                assert files_in(tmp_path) == {}
        if strike.calls < place:
            break
    assert place == 3 * 5 + 3 + 1 and set(files_in(tmp_path)) == {"a", "b", "c"}


def test_a_real_limit_of_the_system(tmp_path: Path) -> None:
    """The kernel refuses to write more: what a full disk does, seen by the same calls."""
    path, layers = tmp_path / "scales.json", {f"layers.{i}": {} for i in range(2000)}
    path.write_text("old")
    found, before = vattn.Calibration(layers, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"scales.json' cannot be written: File too large"):
            found.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files_in(tmp_path) == {"scales.json": b"old"}


def test_calibrations(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    vattn.Calibration({}, 1).save(path)
    old = files_in(tmp_path)
    new = vattn.Calibration({}, 2)
    assert each_file_fault(lambda: new.save(path), lambda _: assert_equal(files_in(tmp_path), old)) == 6
    assert vattn.Calibration.load(path) == new


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from vattn.calibration.audit import Audit, AuditRow

    path = tmp_path / "drift.png"
    found = Audit("fp8_e4m3", 1, tuple(AuditRow(name, x, x, x, 0.1 + x, 0.1, 1.0) for x, name in enumerate("abz")))
    found.plot(path)  # matplotlib writes files of its own once.
    path.write_bytes(b"old")
    assert each_file_fault(lambda: found.plot(path), lambda _: assert_equal(files_in(tmp_path), {"drift.png": b"old"}))
    assert path.stat().st_size > 1000


def test_block_files(tmp_path: Path) -> None:
    """A save that fails leaves no block, not even a part of one, and those of other saves as they were."""
    pytest.importorskip("safetensors")

    def connector() -> vattn.FileConnector:
        made = vattn.FileConnector(tmp_path)
        made.attach({"x": 16}, "f" * 64)
        return made

    def save(*keys: str) -> None:
        store, request = connector(), TransferRequest("r", keys, tuple(range(1, len(keys) + 1)))
        store.save_kv_layer("x", request, torch.arange(16 * len(keys), dtype=torch.uint8).view(-1, 16))
        store.finish(request, True, None)

    # A folder that was made stays; its model.json is whole or missing.
    assert each_file_fault(connector, lambda error: assert_equal(files_in(tmp_path), {})) == 6
    save("a")
    old = files_in(tmp_path)

    def check(error: BaseException) -> None:
        assert isinstance(error, TransferError | ConfigError)
        assert files_in(tmp_path) == old and connector().find(["a"]) == 1 and connector().find(["b"]) == 0

    assert each_file_fault(lambda: save("a", "b", "c"), check) > 10
    assert connector().find(["a", "b", "c"]) == 3


def assert_equal(got: Any, expected: Any) -> None:
    assert got == expected
