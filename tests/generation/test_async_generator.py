"""Generation in coroutines: several at once, left early, with errors, and steps that raise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import vattn
from vattn import errors

pytest.importorskip("transformers")

from tests.generation.generator_support import GREEDY, PROMPTS, Faulty, check_empty, make_generator
from vattn.integrations.transformers import PackedModel


@pytest.fixture
def running(packed: PackedModel) -> Iterator[tuple[vattn.AsyncGenerator, Faulty]]:
    faulty = Faulty(packed)
    faulty.bad = -1
    with vattn.AsyncGenerator(make_generator(faulty)) as generator:
        yield generator, faulty
    assert not generator._thread.is_alive() and not generator._unfinished
    check_empty(generator.generator)


def test_coroutines_share_the_steps(running: Any, expected: list[list[int]]) -> None:
    generator, _ = running

    async def streamed(prompt: list[int]) -> list[int]:
        return [token async for part in generator.stream(prompt, GREEDY) for token in part.tokens]

    async def main() -> Any:
        whole = (generator.generate(prompt, GREEDY) for prompt in PROMPTS)
        return await asyncio.gather(*map(streamed, PROMPTS), *whole)

    found = asyncio.run(main())
    assert found[:6] == expected and [request.output for request in found[6:]] == expected
    assert generator.generator.statistics().steps < 6 * 12


def test_choices_come_in_one_stream(running: Any) -> None:
    generator, _ = running

    async def main() -> list[Any]:
        return [part async for part in generator.stream([5, 6], vattn.Sampling(5, 1.0, n=3, stop_token_ids=()))]

    parts = asyncio.run(main())
    choices = parts[0].request.choices
    assert len(choices) == 3 and all(choice.done for choice in choices)
    for choice in choices:
        assert [token for part in parts if part.request is choice for token in part.tokens] == choice.output


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_a_loop_that_is_left_cancels(running: Any, pause: float) -> None:
    """Also while its prompt is being queued, and however soon the event loop ends."""
    generator, _ = running
    long = vattn.Sampling(80, stop_token_ids=())

    async def main() -> Any:
        stream = generator.stream(PROMPTS[1], long)
        first = (await anext(stream)).request
        await stream.aclose()
        task = asyncio.ensure_future(generator.generate(PROMPTS[2], long))
        await asyncio.sleep(pause)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return first

    first = asyncio.run(main())
    generator.close()
    assert first.state == "cancelled" and not generator.generator.busy


def test_errors_reach_their_coroutine(running: Any, expected: list[list[int]]) -> None:
    generator, faulty = running

    async def main() -> Any:
        with pytest.raises(errors.RequestError, match="tokens together"):
            await generator.generate([5] * 500)
        faulty.raise_in = 3
        failed = await generator.generate(PROMPTS[0], GREEDY)
        return failed, generator.failure, await generator.generate(PROMPTS[0], GREEDY)

    failed, failure, again = asyncio.run(main())
    assert failed.state == "failed" and failure == "ZeroDivisionError: the model failed"
    with pytest.raises(errors.RequestError, match="a step of the model failed") as caught:
        failed.result()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert again.output == expected[0] and generator.failure == ""


def test_requests_of_other_threads(running: Any, expected: list[list[int]]) -> None:
    generator, _ = running
    found, ended = [], threading.Event()

    def watch(part: vattn.generation.Progress) -> None:
        found.extend(part.tokens)
        if part.request.done:
            ended.set()

    generator.submit(vattn.Submission(PROMPTS[1], GREEDY), watch)
    assert ended.wait(30) and found == expected[1]


def test_a_watch_that_raises_ends_its_request_alone(running: Any, expected: list[list[int]]) -> None:
    generator, _ = running

    def broken(part: vattn.Progress) -> None:
        raise RuntimeError("Event loop is closed")

    request = generator.submit(vattn.Submission(PROMPTS[0], GREEDY), broken)
    assert asyncio.run(generator.generate(PROMPTS[1], GREEDY)).output == expected[1]
    assert request.state == "cancelled" and len(request.output) == 1
    with pytest.raises(errors.ConfigError, match=r"submission=.*Allowed: Submission"):
        generator.submit(PROMPTS[0], broken)


def test_closed_and_wrong(packed: PackedModel) -> None:
    with pytest.raises(errors.ConfigError, match="Allowed: Generator"):
        vattn.AsyncGenerator(packed)  # type: ignore[arg-type]
    generator = vattn.AsyncGenerator(make_generator(packed))
    request = generator.submit(vattn.Submission(PROMPTS[0], vattn.Sampling(80, stop_token_ids=())), lambda part: None)
    with pytest.raises(errors.ConfigError, match="a second AsyncGenerator of one generator"):
        vattn.AsyncGenerator(generator.generator)
    with pytest.raises(errors.ConfigError, match="watch=None"):
        generator.submit(vattn.Submission(PROMPTS[0]), None)  # type: ignore[arg-type]
    for wrong in (request, [request, 5], None):
        with pytest.raises(errors.ConfigError, match=r"cancel\(\[request\]\)"):
            generator.cancel(wrong)  # type: ignore[arg-type]
    assert request.state != "cancelled"
    other = generator.submit(vattn.Submission(PROMPTS[1], vattn.Sampling(80, stop_token_ids=())), lambda part: None)
    generator.cancel(iter([other]))  # type: ignore[arg-type]
    assert other.state == "cancelled"
    generator.close()
    generator.close()
    vattn.AsyncGenerator(generator.generator).close()
    assert request.state == "cancelled"
    with pytest.raises(errors.RequestError, match="is closed"):
        asyncio.run(generator.generate(PROMPTS[0]))
