"""The FastAPI example: text is streamed, mistakes are answered, several clients are served at once."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def client() -> Any:
    from fastapi.testclient import TestClient

    path = Path(__file__).parents[1] / "examples" / "15_http_server.py"
    spec = importlib.util.spec_from_file_location("http_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return TestClient(module.app)


def test_clients(client: Any) -> None:
    def ask(prompt: str) -> tuple[int, str]:
        answer = client.post("/generate", params={"prompt": prompt, "max_new_tokens": 8})
        return answer.status_code, answer.text

    prompts = ["def ", "import ", "class "]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(ask, prompts))
    assert together == [ask(prompt) for prompt in prompts]
    assert all(status == 200 and len(text) > 3 for status, text in together)
    answer = client.post("/generate", params={"prompt": "x", "max_new_tokens": 10**6})
    status, text = answer.status_code, answer.text
    assert status == 422 and "tokens together" in text
