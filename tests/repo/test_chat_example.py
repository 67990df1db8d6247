"""The server example answers chats by OpenAI's client: choices, log-probabilities, streams, forms, mistakes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import vattn
from benchmarks.harness import load_example

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import openai
import uvicorn

from tests.generation.generator_support import WORDS, make_generator, make_tokenizer
from tests.integrations.hf_families import make_model
from tests.repo.test_http_example import NAME, wait_for
from vattn.integrations.transformers import enable

MESSAGES = [{"role": "user", "content": "the thin"}]
TOKENIZER = make_tokenizer()


def make() -> Any:
    model = make_model("llama", vocab_size=WORDS)
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    return model


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    example = load_example(NAME)
    example.load_model = lambda *_: (make(), TOKENIZER)
    app = example.create_app(example.DEMO_MODEL, example.Limits(running=4, seconds=60.0))
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=running.run)
    thread.start()
    wait_for(lambda: running.started)
    url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/v1"
    yield SimpleNamespace(client=openai.OpenAI(base_url=url, api_key="key", max_retries=0, timeout=60), app=app)
    running.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def chat(server: Any, messages: Any = MESSAGES, **options: Any) -> Any:
    return server.client.chat.completions.create(model="demo_model", messages=messages, **{"seed": 4} | options)


@pytest.fixture(scope="module")
def alone() -> vattn.Generator:
    return make_generator(enable(make(), num_blocks=64), tokenizer=TOKENIZER)


def test_answers_are_those_of_the_generator(server: Any, alone: vattn.Generator) -> None:
    options = {"seed": 4, "top_p": 0.9, "presence_penalty": 0.5}
    sampling = vattn.Sampling(9, 1.0, logprobs=3, n=2, logit_bias={40: 1.0}, **options)
    request = alone.chat(MESSAGES, sampling)
    answer = chat(server, max_tokens=9, n=2, logprobs=True, top_logprobs=3, logit_bias={"40": 1.0}, **options)
    assert answer.object == "chat.completion" and [choice.index for choice in answer.choices] == [0, 1]
    for choice, want in zip(answer.choices, request.choices, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", want.text)
        assert choice.finish_reason == want.finish_reason
        found = choice.logprobs.content
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in want.logprobs], abs=1e-4)
        assert [one.token for one in found] == [TOKENIZER.decode([token]) for token in want.output]
        for one, measured in zip(found, want.logprobs, strict=True):
            assert [other.token for other in one.top_logprobs] == [TOKENIZER.decode([t]) for t in measured.top]
    assert answer.usage.prompt_tokens == len(request.prompt)

    texts, reasons, counts = ["", ""], {}, [0, 0]
    stream = chat(server, max_tokens=9, n=2, logprobs=True, logit_bias={"40": 1.0}, stream=True, **options)
    for index, part in enumerate(stream):
        assert part.object == "chat.completion.chunk"
        for one in part.choices:
            assert index > 1 or one.delta.role == "assistant"
            texts[one.index] += one.delta.content or ""
            counts[one.index] += len(one.logprobs.content) if one.logprobs else 0
            reasons |= {one.index: one.finish_reason} if one.finish_reason else {}
    assert texts == [choice.text for choice in request.choices] and sorted(reasons) == [0, 1]
    assert counts == [len(choice.output) for choice in request.choices]


def test_completions_have_choices_and_log_probabilities_too(server: Any, alone: vattn.Generator) -> None:
    sampling = vattn.Sampling(6, 1.0, seed=4, n=2, best_of=3, logprobs=2)
    want = alone.generate(["the"], sampling)[0].best
    answer = server.client.completions.create(
        model="demo_model", prompt="the", max_tokens=6, seed=4, n=2, best_of=3, logprobs=2
    )
    assert [choice.text for choice in answer.choices] == [one.text for one in want]
    for choice, one in zip(answer.choices, want, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx([each.logprob for each in one.logprobs], abs=1e-4)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == len(one.output)


def test_answers_of_a_form(server: Any) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    answer = chat(server, response_format=form, max_completion_tokens=200).choices[0]
    assert answer.finish_reason == "stop" and isinstance(json.loads(answer.message.content)["ok"], bool)


def test_chats_that_are_refused(server: Any) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for options, text in (
        ({"messages": image}, "content of type 'image_url'"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "yaml"}}, "no type 'yaml'"),
        ({"top_logprobs": 50}, "top_logprobs"),
    ):
        with pytest.raises(openai.BadRequestError, match=text):
            chat(server, **options)
    generator = server.app.state.engine.generator
    wait_for(lambda: not generator.busy)
    assert generator.scheduler.pool.num_used == 0
