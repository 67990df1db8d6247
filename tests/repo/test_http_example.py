"""The server example under uvicorn: OpenAI's client, mistakes, limits, clients that leave, steps that fail."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vattn
from benchmarks.harness import load_example
from vattn.cli.checkpoints import ByteTokenizer

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
NAME = "15_http_server.py"
CLIENTS, RUNNING, BODY = 6, 2, 50_000


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    example = load_example(NAME)
    limits = example.Limits(clients=CLIENTS, running=RUNNING, prompts=4, body_bytes=BODY, seconds=60.0)
    app = example.create_app(example.DEMO_MODEL, limits)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=running.run)
    thread.start()
    wait_for(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]
    engine = app.state.engine
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}", port=port, limits=limits, engine=engine, client=client(port))
    running.should_exit = True
    thread.join(30)
    assert not thread.is_alive() and not engine._thread.is_alive()


@pytest.fixture(autouse=True)
def nothing_is_left(server: Any) -> Iterator[None]:
    yield
    generator = server.engine.generator
    wait_for(lambda: not generator.busy and not server.engine._unfinished)
    generator.scheduler.pool.check()
    assert generator.scheduler.pool.num_used == 0


def client(port: int, key: str = "key") -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def complete(server: Any, prompt: Any, **options: Any) -> Any:
    return server.client.completions.create(model="demo_model", prompt=prompt, **{"temperature": 0} | options)


def greedy(server: Any, prompt: str, max_tokens: int = 8) -> str:
    return str(complete(server, prompt, max_tokens=max_tokens).choices[0].text)


def post(server: Any, **body: Any) -> Any:
    content = json.dumps({"model": "demo_model", "prompt": "def "} | body)  # ASCII: the text may be no Unicode
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)


def expected(server: Any, prompts: list[Any], max_tokens: int) -> list[str]:
    """Return what a generator of its own gives, in one process with the server's."""
    from vattn.cli.checkpoints import DEMO_MODEL, load_model
    from vattn.integrations.transformers import enable

    model, tokenizer = load_model(DEMO_MODEL, "cpu", None)
    generator = vattn.Generator(enable(model, memory="16MiB"), tokenizer)
    return [request.text for request in generator.generate(prompts, vattn.Sampling(max_tokens))]


def test_completions_are_those_of_the_generator(server: Any) -> None:
    prompts = ["def ", "import ", "class Stack:\n    def __init__("]
    alone = expected(server, prompts, 12)
    answer = complete(server, prompts, max_tokens=12)
    assert [choice.text for choice in answer.choices] == alone
    assert [(choice.index, choice.finish_reason) for choice in answer.choices] == [(i, "length") for i in range(3)]
    taken = sum(map(len, prompts)) + 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        taken, 36, taken + 36
    )  # fmt: skip
    ids = complete(server, ByteTokenizer().encode(prompts[0]), max_tokens=12)
    assert ids.choices[0].text == alone[0]

    texts, reasons = ["", "", ""], {}
    for part in complete(server, prompts, max_tokens=12, stream=True, stream_options={"include_usage": True}):
        for choice in part.choices:
            assert choice.index not in reasons
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = part.usage
    assert texts == alone and reasons == dict.fromkeys(range(3), "length") and usage.completion_tokens == 36

    stop = alone[0][4:6]
    stopped = complete(server, prompts[0], max_tokens=12, stop=stop).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == alone[0][: alone[0].index(stop)]
    pieces = list(complete(server, prompts[0], max_tokens=12, stop=[stop], stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == stopped.text
    assert server.client.models.list().data[0].id == "demo_model"


def test_sampling_follows_the_seed(server: Any) -> None:
    first, again, other = (
        complete(server, "def ", temperature=1, top_p=0.9, seed=seed, max_tokens=12).choices[0].text
        for seed in (1, 1, 2)
    )
    assert first == again != other
    drawn = {complete(server, "def ", temperature=1).choices[0].text for _ in range(3)}
    assert len(drawn) > 1, "without a seed, each call draws its own"


MISTAKES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "no tokens": ({"max_tokens": 0}, "greater than or equal to 1", "max_tokens"),
    "a text for a number": ({"max_tokens": "8"}, "valid integer", "max_tokens"),
    "a negative temperature": ({"temperature": -1.0}, "greater than or equal to 0", "temperature"),
    "an option that is not there": ({"suffix": "x"}, "not permitted", "suffix"),
    "no choices": ({"n": 0}, "greater than or equal to 1", "n"),
    "greedy choices": ({"n": 2, "temperature": 0}, "equal outputs", None),
    "a stream of the best": ({"best_of": 2, "stream": True}, "before they end", None),
    "a bias of a word": ({"logit_bias": {"def": 1}}, "logit_bias", None),
    "a bias beyond the vocabulary": ({"logit_bias": {"256": 1}}, "ids from 0 to 255", None),
    "a number for a prompt": ({"prompt": 7}, "valid string", "prompt"),
    "an empty text": ({"prompt": []}, "empty prompt", None),
    "no prompts": ({"prompt": [[]]}, "empty prompt", None),
    "too many prompts": ({"prompt": ["x"] * 5}, "1 to 4 are allowed", None),
    "one of two too long": ({"prompt": ["x", "x" * 40_000]}, "tokens together", None),
    "too long": ({"max_tokens": 10**6}, "tokens together", None),
    "ids beyond the vocabulary": ({"prompt": [1, 256]}, "ids from 0 to 255", None),
    "half a character": ({"prompt": "\ud800"}, "the tokenizer refuses", None),
    "half a character as a name": ({"\ud800": 1}, "valid string", None),
    "greedy with top_p": ({"temperature": 0, "top_p": 0.5}, "temperature", None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_answered_in_openais_shape(server: Any, mistake: str) -> None:
    body, message, param = MISTAKES[mistake]
    for stream in (False, True):
        answer = post(server, **{"stream": stream} | body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and message in error["message"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)


def test_openais_client_raises_its_own_errors(server: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="greater than or equal to 1") as caught:
        complete(server, "def ", max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
        server.client.completions.create(model="gpt-4", prompt="def ")


def test_calls_that_are_none_are_answered_in_openais_shape(server: Any) -> None:
    url = f"{server.url}/v1/completions"
    answers = {
        400: [httpx.post(url, content=text, headers={"content-type": "application/json"})
              for text in ("{", "[" * 20_000, '"def"', "\xff".encode("latin-1"), '{"model": "demo_model"}')],
        404: [post(server, model="gpt-4"), httpx.get(f"{server.url}/v1/nothing")],
        405: [httpx.get(url)],
        413: [httpx.post(url, content=b"x" * (BODY + 1)), httpx.post(url, content=iter([b"x" * 1000] * 100))],
    }  # fmt: skip
    for status, all_of_them in answers.items():
        for answer in all_of_them:
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            assert error["message"] and error["type"] == "invalid_request_error"


def test_options_that_change_nothing_are_taken(server: Any) -> None:
    options = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "presence_penalty": 0.0, "logit_bias": {}}
    assert complete(server, "def ", max_tokens=8, **options).choices[0].text == greedy(server, "def ")


@pytest.fixture
def fault(server: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes the next step of the model fail."""
    runner = server.engine.generator._runner
    forward = runner.steps.forward

    def inject() -> None:
        def raises(*inputs: Any) -> Any:
            monkeypatch.setattr(runner.steps, "forward", forward)
            raise RuntimeError("injected")

        monkeypatch.setattr(runner.steps, "forward", raises)

    return inject


def test_a_step_that_fails_fails_its_requests_and_the_server_lives(server: Any, fault: Any) -> None:
    right = greedy(server, "import ", 24)
    stream = complete(server, "def ", max_tokens=500, stream=True)
    next(stream)
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(greedy, server, "class ", 500)
        wait_for(lambda: len(server.engine.generator.scheduler.running) == RUNNING)
        waiting = pool.submit(greedy, server, "import ", 24)
        wait_for(lambda: len(server.engine._unfinished) == RUNNING + 1)
        fault()
        with pytest.raises(openai.APIError, match="step of the model failed"):
            for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="step of the model failed") as caught:
            running.result()
        assert caught.value.body["type"] == "server_error" and "injected" not in str(caught.value)
        assert waiting.result() == right, "a request that was not in the step goes on"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_steps_that_always_fail_answer_everyone(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine.generator, "step", fails)
        with ThreadPoolExecutor(CLIENTS) as pool:
            answers = list(pool.map(lambda _: post(server), range(CLIENTS)))
        health = httpx.get(f"{server.url}/health")
    assert [answer.status_code for answer in answers] == [500] * CLIENTS
    assert health.status_code == 503 and health.json() == {"last_step": "MemoryError: no memory"}
    assert greedy(server, "def ")
    assert httpx.get(f"{server.url}/health").json() == {"last_step": "ok"}


def test_a_flood_is_served_or_refused(server: Any) -> None:
    alone = greedy(server, "def ")
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda _: post(server, max_tokens=8, temperature=0), range(40)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(served) + len(refused) == 40 and len(served) >= CLIENTS and refused
    assert {answer.json()["choices"][0]["text"] for answer in served} == {alone}
    assert all("try again later" in answer.json()["error"]["message"] for answer in refused)


def test_a_full_queue_is_an_answer_of_its_own(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.generator.scheduler, "max_queue", 0)
    answer = post(server)
    assert answer.status_code == 503 and "requests wait" in answer.json()["error"]["message"]


def send(server: Any, **body: Any) -> socket.socket:
    """Send a call and return its connection."""
    content = json.dumps({"model": "demo_model", "prompt": "def ", "max_tokens": 1500} | body)
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n{content}".encode()
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_requests(server: Any, stream: bool) -> None:
    scheduler = server.engine.generator.scheduler
    clients = [send(server, stream=stream, prompt=["def ", "import "]), send(server, stream=stream)]
    wait_for(lambda: len(scheduler.running) == RUNNING and len(scheduler.waiting) == 1)
    if stream:
        assert b"200 OK" in clients[0].recv(100)
    held = [*scheduler.running, *scheduler.waiting]
    for connection in clients:
        connection.close()
    wait_for(lambda: all(request.state == "cancelled" for request in held), 5)
    assert all(len(request.output) < 1500 for request in held)


@pytest.mark.parametrize("stream", [True, False])
def test_time_ends_a_call(server: Any, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(server.limits, "seconds", 0.3)
    error = openai.APIError if stream else openai.InternalServerError
    with pytest.raises(error, match=r"no complete answer within 0\.3 seconds"):
        list(complete(server, "def ", max_tokens=1500, stream=stream))


def test_time_ends_a_body_that_does_not_come(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.limits, "seconds", 0.3)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        connection.settimeout(10)
        assert b" 408 " in connection.recv(1000)


def test_a_client_that_reads_nothing_does_not_stay() -> None:
    example, messages, ended = load_example(NAME), [{"type": "http.request", "body": b"{}"}], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}"
        try:
            await asyncio.Event().wait()  # as a write that the client never takes
        finally:
            ended.append(True)

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    guard = example.Guard(app, example.Limits(seconds=0.1))
    asyncio.run(asyncio.wait_for(guard({"type": "http", "path": "/"}, receive, None), 10))
    assert ended == [True] and guard.clients == 0


def test_keys_separate_tenants(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, requests = server.engine.submit, []
    monkeypatch.setattr(server.engine, "submit", lambda *args: requests.append(submit(*args)) or requests[-1])
    prompt = "# A line that both tenants begin with, longer than a block of the cache.\n"
    texts = [
        client(server.port, key)
        .completions.create(model="demo_model", prompt=prompt, temperature=0, max_tokens=2)
        .choices[0]
        .text
        for key in ("one", "one", "two")
    ]
    assert len(set(texts)) == 1
    assert [request.reused > 0 for request in requests] == [False, True, False]


def test_the_model_may_name_an_adapter(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from fastapi.testclient import TestClient

    from vattn.cli.checkpoints import DEMO_MODEL
    from vattn.integrations.transformers import enable, enable_adapters

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval()
    for name, rank in (("shout", 2), ("whisper", 3)):
        options = peft.LoraConfig(r=rank, target_modules=["v_proj", "o_proj"], init_lora_weights=False)
        tuned = peft.get_peft_model(model, options)
        tuned.save_pretrained(tmp_path / name)
        model = tuned.unload()
    packed = enable(model, memory="16MiB")
    adapters = enable_adapters(packed, max_rank=3)
    for name in ("shout", "whisper"):
        adapters.load(name, tmp_path / name)
    generator = vattn.Generator(packed, ByteTokenizer())
    requests = generator.generate(["def "] * 3, vattn.Sampling(12), adapter=[None, "shout", "whisper"])
    example = load_example(NAME)
    app = example.create_app(example.DEMO_MODEL, example.Limits(), tmp_path)
    with TestClient(app) as web:
        names = [one["id"] for one in web.get("/v1/models").json()["data"]]
        assert names == ["demo_model", "shout", "whisper"]
        body = {"prompt": "def ", "max_tokens": 12, "temperature": 0}
        texts = [
            web.post("/v1/completions", json=body | {"model": name}).json()["choices"][0]["text"] for name in names
        ]
        assert texts == [request.text for request in requests] and len(set(texts)) == 3
        refused = web.post("/v1/completions", json=body | {"model": "sing"})
        assert refused.status_code == 404 and "'demo_model', 'shout', 'whisper'" in refused.text


@pytest.mark.slow
def test_uvicorn_starts_it_from_the_command_line() -> None:
    command = [sys.executable, "-m", "uvicorn", "--app-dir", "examples", f"{Path(NAME).stem}:app", "--port", "0"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        port = next(int(found[1]) for line in process.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)", line)))
        assert client(port).completions.create(model="demo_model", prompt="def ").choices[0].text
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=30)
        assert "Application shutdown complete" in log
    finally:
        process.kill()
