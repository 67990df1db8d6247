"""Ctrl-C in a step and calls from other threads: every request gets the tokens that it would have had."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import vattn

pytest.importorskip("transformers")

from tests.generation.generator_support import PROMPTS, Characters, check_empty, make_generator
from vattn.integrations.transformers import PackedModel

SAMPLINGS = [
    vattn.Sampling(9, stop_token_ids=()),
    vattn.Sampling(12, temperature=0.8, seed=3, stop_token_ids=()),
    vattn.Sampling(12, stop_token_ids=(), stop_strings=("Q",)),
    vattn.Sampling(5, stop_token_ids=()),
]


def interrupting(at: int, seen: list[int]) -> Callable[..., Any]:
    """Return a trace function that counts the lines that run in a step and interrupts one of them."""
    step = vattn.Generator._run_step.__code__

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "/vattn/generation/" not in frame.f_code.co_filename or not inside(frame):
            return None
        # An expression that is given up before its end returns where Python prints errors and goes on.
        if event == "line" and frame.f_code.co_name != "<genexpr>":
            seen[0] += 1
            if seen[0] == at:
                raise KeyboardInterrupt
        return trace

    def inside(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not step:
            frame = frame.f_back
        return frame is not None

    return trace


def run(packed: PackedModel, options: dict[str, Any], at: int) -> tuple[list[vattn.Request], list[list[int]], int]:
    """Run requests, interrupted once; return them, the tokens that steps returned, and how many lines there were."""
    generator = make_generator(packed, tokenizer=Characters(), token_budget=24, **options)
    requests = [generator.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=False)]
    returned: dict[int, list[int]] = {id(request): [] for request in requests}
    seen, interrupted = [0], 0
    while any(not request.done for request in requests):
        sys.settrace(interrupting(at, seen) if not interrupted else None)
        try:
            progress = generator.step()
        except KeyboardInterrupt:
            interrupted += 1
            continue
        finally:
            sys.settrace(None)
        for one in progress:
            returned[id(one.request)] += one.tokens
    assert interrupted == (0 < at <= seen[0])
    check_empty(generator)
    return requests, list(returned.values()), seen[0]


@pytest.mark.parametrize("kind", ["plain", "drafts"])
def test_an_interruption_anywhere(packed: PackedModel, kind: str) -> None:
    options: dict[str, Any] = {}
    if kind == "drafts":
        options["speculation"] = vattn.PromptLookup(num_drafts=3, shortest=1)
    want, returned, lines = run(packed, options, 0)
    assert returned == [request.output for request in want] and lines > 1000
    for at in range(1, lines, lines // 5):
        got, returned, _ = run(packed, options, at)
        for one, other, tokens in zip(want, got, returned, strict=True):
            assert (one.output, one.text, one.reason) == (other.output, other.text, other.reason), at
            # No token is returned twice; those of a request that ended in the interrupted step are returned by none.
            missing = len(other.output) - len(tokens)
            assert any(tokens == other.output[:n] + other.output[n + missing :] for n in range(len(tokens) + 1)), at


@pytest.mark.parametrize("streams", [False, True])
def test_an_interruption_while_prompts_are_read(packed: PackedModel, streams: bool) -> None:
    """What was queued by then is cancelled."""

    class Slow(Characters):
        def encode(self, text: str) -> list[int]:
            if text == "third":
                raise KeyboardInterrupt
            return super().encode(text)

    generator = make_generator(packed, tokenizer=Slow())
    texts = ["first", "second", "third"]
    with pytest.raises(KeyboardInterrupt):
        list(generator.stream(texts)) if streams else generator.generate(texts)
    check_empty(generator)
    assert generator.generate(["first"], vattn.Sampling(3, stop_token_ids=()))[0].state == "finished"
    assert generator.statistics().prompt_tokens == 5


def test_cancels_of_other_threads_disturb_no_step(packed: PackedModel) -> None:
    generator = make_generator(packed)
    faults: list[BaseException] = []

    def run_steps() -> None:
        try:
            while generator.busy:
                generator.step()
        except BaseException as error:
            faults.append(error)

    kept = [generator.add(prompt, vattn.Sampling(12, stop_token_ids=())) for prompt in PROMPTS[:3]]
    worker = threading.Thread(target=run_steps)
    worker.start()
    while worker.is_alive():
        generator.cancel(generator.add(PROMPTS[3], vattn.Sampling(2, stop_token_ids=())))
        generator.statistics()
    worker.join()
    assert not faults and [len(request.output) for request in kept] == [12, 12, 12]
    check_empty(generator)


def test_an_interruption_while_a_step_begins(packed: PackedModel) -> None:
    """It is undone, so that the next one can run."""

    class Interrupted:
        def __init__(self, lock: Any) -> None:
            self.lock, self.releases = lock, 0

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()
            self.releases += 1
            if self.releases == 1:
                raise KeyboardInterrupt

    generator = make_generator(packed)
    request = generator.add([1, 2, 3], vattn.Sampling(3, stop_token_ids=()))
    generator._lock = Interrupted(generator._lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        generator.step()
    while generator.busy:
        generator.step()
    assert len(request.output) == 3


def test_requests_that_are_added_while_a_step_begins(packed: PackedModel) -> None:
    """A signal handler may do so."""
    generator = make_generator(packed)
    sampling = vattn.Sampling(2, stop_token_ids=())
    requests = [generator.add([token, 4], sampling) for token in range(1, 4)]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name not in ("step", "snapshot", "<dictcomp>"):
            return None
        if event == "line" and len(requests) < 60:
            requests.append(generator.add([5, 6], sampling))
        return trace

    sys.settrace(trace)
    try:
        generator.step()
    finally:
        sys.settrace(None)
    while generator.busy:
        generator.step()
    assert {len(request.output) for request in requests} == {2} and len(requests) > 9
