"""Serve `/v1/completions` as OpenAI's clients expect it: FastAPI handlers, and one thread that steps the generator.

pip install ".[transformers]" fastapi uvicorn
uvicorn --app-dir examples 15_http_server:app
curl -N 127.0.0.1:8000/v1/completions --json '{"model": "demo_model", "prompt": "def ", "stream": true}'

VATTN_MODEL is the folder of another model. Only requests with equal API keys share cached prefixes. Nothing checks the
keys: a proxy in front of the server may.
"""

import asyncio
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

import vattn
from vattn.cli.generate import load_model
from vattn.errors import QueueFullError, VattnError
from vattn.integrations.transformers import enable

logger = logging.getLogger("uvicorn.error")
DEMO_MODEL = Path(__file__).parent / "demo_model"
OFF = {"n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "user": ""}
"""Options of OpenAI's that this server does not have, each with the value that changes nothing."""


@dataclass
class Limits:
    """What one client, and all of them together, may use."""

    clients: int = 64
    running: int = 16
    prompts: int = 16
    body_bytes: int = 2**20
    seconds: float = 120.0


class Completion(BaseModel):
    """The body of a call; an unknown option is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(default_factory=lambda: secrets.randbits(63), ge=0, lt=2**64)
    stop: str | list[str] = []
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}

    @model_validator(mode="before")
    @classmethod
    def without_defaults(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None and OFF.get(name, cls) != value}

    def prompts(self) -> list[Any]:
        several = isinstance(self.prompt, list) and not isinstance((self.prompt or [0])[0], int)
        return list(self.prompt) if several else [self.prompt]

    def sampling(self) -> vattn.Sampling:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        chosen = {"top_p": self.top_p, "seed": self.seed, "stop_strings": stops}
        return vattn.Sampling(self.max_tokens, self.temperature, **chosen)


class Engine:
    """A generator, and the thread that runs its steps.

    `put(request, text, reason, failure)` gets what each step adds: why the request has ended, "" if it has not, and
    what it failed with.
    """

    def __init__(self, generator: vattn.Generator, most_running: int) -> None:
        self.generator, self.most_running, self.failure = generator, most_running, ""
        self._unfinished: dict[vattn.Request, Callable[[vattn.Request, str, str, str], None]] = {}
        self._changed, self._stopped = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._thread.start()

    def add(self, prompts: list[Any], sampling: vattn.Sampling, salt: str, put: Any) -> list[vattn.Request]:
        """Queue all prompts or none."""
        requests: list[vattn.Request] = []
        with self._changed:
            try:
                for prompt in prompts:
                    requests.append(self.generator.add(prompt, sampling, cache_salt=salt))
            except Exception:
                self.cancel(requests)
                raise
            self._unfinished |= dict.fromkeys(requests, put)
            self._changed.notify()
        return requests

    def cancel(self, requests: list[vattn.Request]) -> None:
        """Free what requests hold; those that have ended stay as they are."""
        with self._changed:
            for request in requests:
                self._unfinished.pop(request, None)
                self.generator.cancel(request)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self.generator.busy)
                if self._stopped:
                    return
            try:
                parts, self.failure = self.generator.step(), ""
            except Exception as error:
                logger.exception("a step failed")
                parts, self.failure = [], f"{type(error).__name__}: {error}"
            with self._changed:
                for part in parts:
                    request = part.request
                    put = self._unfinished.pop(request, None) if request.done else self._unfinished.get(request)
                    if put is not None:
                        put(request, part.text, request.reason, str(request.error or ""))
                # The oldest requests are those that a failed step may have computed; the others go on.
                for request in list(self._unfinished)[: self.most_running] if self.failure else ():
                    put = self._unfinished[request]
                    self.cancel([request])
                    put(request, "", "error", "a step of the model failed; send the request again")


class Guard:
    """Limit the clients, their bodies and their time. When a call ends, in any way, its requests do too."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self.app, self.limits, self.clients = app, limits, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        if self.clients >= self.limits.clients:
            busy = refuse(503, f"the server has {self.clients} clients; try again later")
            return await busy(scope, receive, send)
        self.clients += 1
        scope["requests"] = []
        try:
            body = await asyncio.wait_for(self.read(receive), self.limits.seconds)
            if len(body) > self.limits.body_bytes:
                await refuse(413, f"a body of more than {self.limits.body_bytes} bytes")(scope, receive, send)
            else:
                await self.serve(scope, body, receive, send)
        except asyncio.TimeoutError:
            await refuse(408, f"no complete body within {self.limits.seconds:g} seconds")(scope, receive, send)
        except ConnectionError:
            pass
        finally:
            self.clients -= 1
            if scope["requests"]:
                scope["app"].state.engine.cancel(scope["requests"])

    async def read(self, receive: Any) -> bytes:
        """Return the body, or its beginning if it is larger than allowed."""
        body, message = bytearray(), {"more_body": True}
        while message.get("more_body") and len(body) <= self.limits.body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError
            body += message.get("body", b"")
        return bytes(body)

    async def serve(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Run a call until it has answered or its client has left."""
        messages = [{"type": "http.request", "body": body}]

        async def replay() -> Any:
            return messages.pop() if messages else await asyncio.Future()

        call, gone = asyncio.ensure_future(self.app(scope, replay, send)), asyncio.ensure_future(receive())
        try:
            # A call ends in time by itself, unless its client reads nothing.
            await asyncio.wait({call, gone}, timeout=1.5 * self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            gone.cancel()
            await asyncio.wait({call, gone})
        if not call.cancelled():
            call.result()


def failed(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def respond(content: Any, status: int = 200) -> Response:
    # ASCII: a client's text may hold what UTF-8 cannot encode.
    return Response(json.dumps(content), status, media_type="application/json")


def refuse(status: int, message: str, param: str | None = None) -> Response:
    return respond(failed(status, message, param), status)


async def follow(requests: list[vattn.Request], parts: asyncio.Queue, seconds: float) -> AsyncIterator[dict[str, Any]]:
    """Yield what is added to each choice, until all have ended."""
    deadline, left = time.monotonic() + seconds, len(requests)
    while left:
        try:
            request, text, ended, failure = await asyncio.wait_for(parts.get(), deadline - time.monotonic())
        except asyncio.TimeoutError:
            raise HTTPException(504, f"no complete answer within {seconds:g} seconds") from None
        if failure:
            raise HTTPException(500, failure)
        left -= bool(ended)
        reason = "length" if ended == "length" else "stop" if ended else None
        if text or ended:
            yield {"index": requests.index(request), "text": text, "logprobs": None, "finish_reason": reason}


def create_app(model: Path, limits: Limits) -> FastAPI:
    """Make the server; the model loads when it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        device, memory = ("cuda", "2GiB") if torch.cuda.is_available() else ("cpu", "64MiB")
        loaded, tokenizer = load_model(model, device, None)
        generator = vattn.Generator(
            enable(loaded, memory=memory), tokenizer, max_num_reqs=limits.running, max_queue=limits.clients
        )
        app.state.engine = Engine(generator, limits.running)
        yield
        app.state.engine.stop()

    app = FastAPI(title="vattn", lifespan=lifespan)
    app.add_middleware(Guard, limits=limits)

    @app.exception_handler(Exception)
    @app.exception_handler(HTTPException)
    @app.exception_handler(VattnError)
    @app.exception_handler(RequestValidationError)
    async def explain(_: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return refuse(error.status_code, error.detail)
        if isinstance(error, VattnError):
            return refuse(503 if isinstance(error, QueueFullError) else 400, str(error))
        if isinstance(error, RequestValidationError):
            first = error.errors()[0]
            param = ".".join(str(part) for part in first["loc"][1:2])
            return refuse(400, f"{param or 'body'}: {first['msg']}", param or None)
        return refuse(500, "the server failed; its log says why")

    @app.get("/health")
    async def health() -> Response:
        failure = app.state.engine.failure
        return respond({"last_step": failure or "ok"}, 503 if failure else 200)

    @app.get("/v1/models")
    async def models() -> Response:
        return respond({"object": "list", "data": [{"id": model.name, "object": "model", "owned_by": "vattn"}]})

    @app.post("/v1/completions")
    async def completions(body: Completion, http: Request) -> Response:
        prompts, loop, parts = body.prompts(), asyncio.get_running_loop(), asyncio.Queue()
        if body.model != model.name:
            raise HTTPException(404, f"no model {body.model!r:.60}; this server has {model.name!r}")
        if not 0 < len(prompts) <= limits.prompts:
            raise HTTPException(400, f"{len(prompts)} prompts in a call; 1 to {limits.prompts} are allowed")

        def put(*part: Any) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, part)

        requests = app.state.engine.add(prompts, body.sampling(), http.headers.get("authorization", ""), put)
        http.scope["requests"] += requests
        choices = follow(requests, parts, limits.seconds)
        answer = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "model": model.name}
        answer["created"] = int(time.time())

        def usage() -> dict[str, int]:
            taken, made = sum(len(r.prompt) for r in requests), sum(len(r.output) for r in requests)
            return {"prompt_tokens": taken, "completion_tokens": made, "total_tokens": taken + made}

        async def events() -> AsyncIterator[str]:
            try:
                async for choice in choices:
                    yield f"data: {json.dumps(answer | {'choices': [choice]})}\n\n"
                if body.stream_options.get("include_usage"):
                    yield f"data: {json.dumps(answer | {'choices': [], 'usage': usage()})}\n\n"
                yield "data: [DONE]\n\n"
            except HTTPException as error:
                yield f"data: {json.dumps(failed(error.status_code, error.detail))}\n\n"

        if body.stream:
            return StreamingResponse(events(), media_type="text/event-stream")
        ended = {c["index"]: c | {"text": requests[c["index"]].text} async for c in choices if c["finish_reason"]}
        return respond(answer | {"choices": [ended[index] for index in sorted(ended)], "usage": usage()})

    return app


app = create_app(Path(os.environ.get("VATTN_MODEL", DEMO_MODEL)), Limits())
