"""Twenty seconds of the soaks that run for minutes elsewhere: random traffic, faults, adapters and tenants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "done", "packages"),
    [
        ("soak", "finished: length", ["transformers"]),
        ("soak_server", "stream: 200", ["transformers", "fastapi", "httpx", "uvicorn"]),
    ],
)
def test_nothing_is_wrong_after_twenty_seconds(script: str, done: str, packages: list[str], tmp_path: Path) -> None:
    for package in packages:
        pytest.importorskip(package)
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.models.{script}", "--minutes", "0.33"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    ran = subprocess.run(
        [*command, "--json", tmp_path / "result.json"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert not result["wrong"] and result["counts"][done]
