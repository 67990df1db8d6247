"""Whole models in SGLang's own model runner, with vattn, give transformers' greedy tokens (`sglang_model_run`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations import sglang_engine  # noqa: F401  skips where SGLang is not installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed"),
    pytest.mark.skipif(version("sglang") == "0.5.17", reason="the run starts SGLang as releases from 0.5.22 do"),
]


@pytest.mark.parametrize("kind, page_size", [("llama", 1), ("gemma2", 16)])
def test_a_model_in_the_engines_runner_gives_the_tokens_of_transformers(kind: str, page_size: int) -> None:
    """Chunks of prompts and decodes of 4 requests; gemma2 has windows shorter than its prompts and a soft cap."""
    command = [sys.executable, "-m", "tests.integrations.sglang_model_run", kind, str(page_size)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-4000:]
    printed = json.loads(result.stdout.strip().splitlines()[-1])
    worst = printed.pop("worst")
    assert printed == {"backend": "VattnBackend", "pool": "MHATokenToKVPool", "equal": 64, "of": 64}
    assert worst < 1e-5
