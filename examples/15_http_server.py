"""Serve `/v1/completions` and `/v1/chat/completions` as OpenAI's clients expect them, with FastAPI.

pip install ".[transformers]" fastapi uvicorn
uvicorn --app-dir examples 15_http_server:app
curl -N 127.0.0.1:8000/v1/completions --json '{"model": "demo_model", "prompt": "def ", "stream": true}'

VATTN_MODEL is the folder of another model. VATTN_ADAPTERS is a folder with a folder for each LoRA adapter, as PEFT
saves them: "model" is then the model alone, or the name of an adapter's folder. Only requests with equal API keys share
cached prefixes. Nothing checks the keys: a proxy in front of the server may.
"""

import asyncio
import json
import logging
import os
import secrets
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
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

import vattn
from vattn.cli.checkpoints import load_model
from vattn.errors import QueueFullError, VattnError
from vattn.integrations.transformers import enable, enable_adapters

logger = logging.getLogger("uvicorn.error")
DEMO_MODEL = Path(__file__).parent / "demo_model"
OFF = {"echo": False, "user": "", "store": False}
"""Options of OpenAI's that this server does not have, each with the value that changes nothing."""


@dataclass
class Limits:
    """What one client, and all of them together, may use."""

    clients: int = 64
    running: int = 16
    prompts: int = 16
    body_bytes: int = 2**20
    seconds: float = 120.0


class Call(BaseModel):
    """What both calls take; an unknown option is an error."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(default_factory=lambda: secrets.randbits(63), ge=0, lt=2**64)
    stop: str | list[str] = []
    n: int = Field(1, ge=1, le=16)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] = {}
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}

    @model_validator(mode="before")
    @classmethod
    def without_defaults(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None and OFF.get(name, cls) != value}

    def sampling(self, **more: Any) -> vattn.Sampling:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        same = ("top_p", "seed", "n", "presence_penalty", "frequency_penalty")
        bias = {int(token) if token.isdecimal() else token: value for token, value in self.logit_bias.items()}
        options = {name: getattr(self, name) for name in same} | {"stop_strings": stops, "logit_bias": bias} | more
        return vattn.Sampling(self.max_tokens, self.temperature, **options)


class Completion(Call):
    """The body of a call for texts."""

    prompt: str | list[int] | list[str] | list[list[int]]
    best_of: int | None = Field(None, ge=1, le=16)
    logprobs: int | None = Field(None, ge=0, le=5)

    def prompts(self) -> list[Any]:
        several = isinstance(self.prompt, list) and not isinstance((self.prompt or [0])[0], int)
        return list(self.prompt) if several else [self.prompt]

    def settings(self) -> vattn.Sampling:
        if self.stream and (self.best_of or self.n) > self.n:
            raise HTTPException(400, "best_of: a stream cannot know the best texts before they end")
        return self.sampling(best_of=self.best_of, logprobs=self.logprobs)


class ChatCompletion(Call):
    """The body of a call for answers."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = []
    max_tokens: int = Field(256, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: dict[str, Any] = {"type": "text"}

    def prompts(self) -> list[Any]:
        return [vattn.Chat(self.messages, **({"tools": self.tools} if self.tools else {}))]

    def settings(self) -> vattn.Sampling:
        grammar, kind = None, self.response_format.get("type")
        if kind == "json_schema":
            grammar = vattn.Grammar(json_schema=self.response_format.get("json_schema", {}).get("schema", {}))
        elif kind == "json_object":
            grammar = vattn.Grammar(json_schema={"type": "object"})
        elif kind != "text":
            raise HTTPException(400, f"response_format: no type {kind!r:.60}; text, json_object or json_schema")
        return self.sampling(grammar=grammar, logprobs=self.top_logprobs if self.logprobs else None)


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


def token_text(tokenizer: Any, token: int) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "bytes": list(text.encode(errors="replace"))}


def as_completion(tokenizer: Any, text: str, tokens: Any, measured: Any, **_: Any) -> dict[str, Any]:
    """Return what a choice of texts says, whole or in part."""
    logprobs = None
    if measured is not None:
        name = [tokenizer.decode([token]) for token in tokens]
        top = [{tokenizer.decode([token]): value for token, value in one.top.items()} for one in measured]
        logprobs = {"tokens": name, "token_logprobs": [one.logprob for one in measured], "top_logprobs": top}
    return {"text": text, "logprobs": logprobs}


def as_message(
    tokenizer: Any, text: str, tokens: Any, measured: Any, stream: bool = False, first: bool = False
) -> dict[str, Any]:
    """Return what a choice of answers says, whole or in part."""
    content = None
    if measured is not None:
        content = []
        for token, one in zip(tokens, measured, strict=True):
            top = [token_text(tokenizer, other) | {"logprob": value} for other, value in one.top.items()]
            content.append(token_text(tokenizer, token) | {"logprob": one.logprob, "top_logprobs": top})
    role = {"role": "assistant"} if first or not stream else {}
    said = {"delta" if stream else "message": role | {"content": text}}
    return said | {"logprobs": None if content is None else {"content": content}}


KINDS: dict[type, tuple[str, str, str, Callable[..., dict[str, Any]]]] = {
    Completion: ("cmpl", "text_completion", "text_completion", as_completion),
    ChatCompletion: ("chatcmpl", "chat.completion", "chat.completion.chunk", as_message),
}
"""Beginnings of ids, names of whole answers and of parts, and what makes choices."""


class Answer:
    """The requests of a call, and what steps add to them."""

    def __init__(self, body: Any, tokenizer: Any) -> None:
        self.body, self.tokenizer, self.requests = body, tokenizer, list[vattn.Request]()
        self.loop, self.parts = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self.begin, self.kind, self.part_kind, self.choice = KINDS[type(body)]
        self.head = {"id": f"{self.begin}-{secrets.token_hex(12)}", "model": body.model, "created": int(time.time())}

    def watch(self, part: Any) -> None:
        """Send on what a step adds; called in the thread of the steps."""
        request, count = part.request, len(part.tokens)
        measured = request.logprobs[-count:] if request.logprobs is not None and count else None
        ended = request.finish_reason, request.error
        self.loop.call_soon_threadsafe(self.parts.put_nowait, (request, part.text, part.tokens, measured, ended))

    async def follow(self, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Yield what is added to each choice, until all have ended."""
        choices = [choice for request in self.requests for choice in request.choices]
        deadline, left, begun = time.monotonic() + seconds, len(choices), set[int]()
        while left:
            try:
                request, text, tokens, measured, (reason, error) = await asyncio.wait_for(
                    self.parts.get(), deadline - time.monotonic()
                )
            except asyncio.TimeoutError:
                raise HTTPException(504, f"no complete answer within {seconds:g} seconds") from None
            if error is not None:
                raise HTTPException(500, str(error))
            left -= reason is not None
            if text or tokens or reason:
                index = choices.index(request)
                said = {"stream": True, "first": index not in begun} if self.kind != self.part_kind else {}
                begun.add(index)
                yield {"index": index, "finish_reason": reason} | self.choice(
                    self.tokenizer, text, tokens, measured, **said
                )

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        best = [choice for request in self.requests for choice in request.best]
        choices = [
            {"index": index, "finish_reason": one.finish_reason}
            | self.choice(
                self.tokenizer, one.text, one.output, one.logprobs if one.sampling.logprobs is not None else None
            )
            for index, one in enumerate(best)
        ]
        return self.head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        taken = sum(len(request.prompt) for request in self.requests)
        made = sum(len(choice.output) for request in self.requests for choice in request.choices)
        return {"prompt_tokens": taken, "completion_tokens": made, "total_tokens": taken + made}

    async def events(self, seconds: float) -> AsyncIterator[str]:
        """Yield the answer in parts, as events."""
        head = self.head | {"object": self.part_kind}
        try:
            async for choice in self.follow(seconds):
                yield f"data: {json.dumps(head | {'choices': [choice]})}\n\n"
            if self.body.stream_options.get("include_usage"):
                yield f"data: {json.dumps(head | {'choices': [], 'usage': self.usage()})}\n\n"
            yield "data: [DONE]\n\n"
        except HTTPException as error:
            yield f"data: {json.dumps(failed(error.status_code, error.detail))}\n\n"


def load_adapters(packed: Any, folders: list[Path]) -> None:
    """Let requests use the adapters of some folders, by their names."""
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    ranks = [rank for each in configs for rank in (each["r"], *each.get("rank_pattern", {}).values())]
    adapters = enable_adapters(packed, max_adapters=len(folders), max_rank=max(ranks))
    for folder in folders:
        adapters.load(folder.name, folder)


def create_app(model: Path, limits: Limits, adapters: Path | None = None) -> FastAPI:
    """Make the server; the model and its adapters load when it starts."""
    folders = sorted(path.parent for path in adapters.glob("*/adapter_config.json")) if adapters else []
    names = [model.name, *(folder.name for folder in folders)]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        device, memory = ("cuda", "2GiB") if torch.cuda.is_available() else ("cpu", "64MiB")
        loaded, tokenizer = load_model(model, device, None)
        packed = enable(loaded, memory=memory)
        if folders:
            load_adapters(packed, folders)
        generator = vattn.Generator(packed, tokenizer, max_num_reqs=limits.running, max_queue=limits.clients)
        with vattn.AsyncGenerator(generator) as app.state.engine:
            yield

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
        data = [{"id": name, "object": "model", "owned_by": "vattn"} for name in names]
        return respond({"object": "list", "data": data})

    async def answer(body: Any, http: Request) -> Response:
        engine, prompts = app.state.engine, body.prompts()
        if body.model not in names:
            raise HTTPException(404, f"no model {body.model!r:.60}; this server has {', '.join(map(repr, names))}")
        adapter = None if body.model == model.name else body.model
        if not 0 < len(prompts) <= limits.prompts:
            raise HTTPException(400, f"{len(prompts)} prompts in a call; 1 to {limits.prompts} are allowed")
        answer, settings = Answer(body, engine.generator.tokenizer), body.settings()
        salt = http.headers.get("authorization", "")
        for prompt in prompts:
            # If one is refused, the guard cancels those before it.
            answer.requests.append(engine.submit(vattn.Submission(prompt, settings, salt, adapter), answer.watch))
            http.scope["requests"].append(answer.requests[-1])
        if body.stream:
            return StreamingResponse(answer.events(limits.seconds), media_type="text/event-stream")
        async for _ in answer.follow(limits.seconds):
            pass
        return respond(answer.whole())

    @app.post("/v1/completions")
    async def completions(body: Completion, http: Request) -> Response:
        return await answer(body, http)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatCompletion, http: Request) -> Response:
        return await answer(body, http)

    return app


folder = os.environ.get("VATTN_ADAPTERS")
app = create_app(Path(os.environ.get("VATTN_MODEL", DEMO_MODEL)), Limits(), Path(folder) if folder else None)
