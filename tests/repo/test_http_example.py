"""The FastAPI example: text is streamed, mistakes are answered, several clients are served at once."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def server() -> Any:
    path = Path(__file__).parents[2] / "examples" / "15_http_server.py"
    spec = importlib.util.spec_from_file_location("http_server", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client(server: Any) -> Any:
    from fastapi.testclient import TestClient

    return TestClient(server.app)


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
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}):
        answer = client.post("/generate", params={"prompt": "x", **wrong})
        assert answer.status_code == 422 and next(iter(wrong)) in answer.text


def test_a_client_that_goes_away_cancels_its_request(server: Any) -> None:
    async def leave_after_two_pieces() -> Any:
        answer = await server.generate("def ", max_new_tokens=400)
        pieces = answer.body_iterator
        taken = [await anext(pieces) for _ in range(2)]
        await pieces.aclose()
        return taken

    async def stay() -> str:
        return "".join([text async for text in (await server.generate("def ", max_new_tokens=8)).body_iterator])

    cancelled = []
    generator = server.generators[0]
    cancel = generator.cancel
    generator.cancel = lambda request: cancelled.append(request) or cancel(request)
    assert len(asyncio.run(leave_after_two_pieces())) == 2
    assert len(asyncio.run(stay())) > 3
    deadline = time.monotonic() + 30
    while len(cancelled) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cancelled[0].state == "cancelled" and len(cancelled[0].output) < 400
    assert cancelled[1].state == "finished" and generator.scheduler.pool.num_used == 0


def test_a_full_queue_is_an_answer_of_its_own(server: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.generators[0].scheduler, "max_queue", 0)
    answer = client.post("/generate", params={"prompt": "x"})
    assert answer.status_code == 503 and "requests wait" in answer.text
