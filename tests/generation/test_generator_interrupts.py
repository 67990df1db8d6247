"""Ctrl-C at any line of the host's part of a step: the next steps give every request the tokens it would have had."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import vattn
from vattn.errors import RequestError

pytest.importorskip("transformers")

from tests.generation.generator_support import PROMPTS, Characters, check_empty, make_generator
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable

OWN = ("generator.py", "scheduler.py", "blocks.py", "request.py", "turn.py")
STATE = (
    *(f"/vattn/generation/{name}" for name in OWN),
    "/vattn/cache/block_pool.py",
    "/vattn/cache/hybrid_block_table.py",
)
USERS = ("/vattn/generation/outputs.py", "/vattn/generation/detokenizer.py")
"""Files whose lines are interrupted: those that keep what requests are, without `with` blocks, whose end a trace could
take away; and those that call what a user has given, where an `Exception` ends its request alone."""

SAMPLINGS = [
    vattn.Sampling(9, stop_token_ids=()),
    vattn.Sampling(12, temperature=0.8, seed=3, stop_token_ids=()),
    vattn.Sampling(12, stop_token_ids=(), stop_strings=("Q",)),
    vattn.Sampling(5, stop_token_ids=()),
]


@pytest.fixture(scope="module")
def packed() -> PackedModel:
    return enable(make_model("llama"), num_blocks=24)


class TimeIsUp(Exception):
    """What a signal handler may raise."""


def interrupting(at: int, seen: list[int], error: type[BaseException]) -> Callable[..., Any]:
    """Return a trace function that counts lines of the host and interrupts one of them."""
    files = STATE if error is TimeIsUp else (*STATE, *USERS)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        # An expression that is given up before its end returns where Python prints errors and goes on.
        given_up = event == "return" and frame.f_code.co_name == "<genexpr>"
        if event in ("line", "return") and not given_up:
            seen[0] += 1
            if seen[0] == at:
                raise error
        return trace

    return trace


def run(
    packed: PackedModel, options: dict[str, Any], error: type[BaseException], at: int
) -> tuple[list[vattn.Request], list[list[int]], int]:
    """Run requests, interrupted once; return them, the tokens that steps told, and how many lines there were."""
    generator = make_generator(packed, tokenizer=Characters(), token_budget=24, **options)
    requests = [generator.add(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=False)]
    told: dict[int, list[int]] = {id(request): [] for request in requests}
    seen, interrupted = [0], 0
    while any(not request.done for request in requests):
        sys.settrace(interrupting(at, seen, error) if not interrupted else None)
        try:
            came = generator.step()
        except error:
            interrupted += 1
            continue
        finally:
            sys.settrace(None)
        for one in came:
            told[id(one.request)] += one.tokens
    assert interrupted == (0 < at <= seen[0])
    # Where the last step was interrupted, what it held is given back now.
    assert generator.statistics().used_blocks == 0
    check_empty(generator)
    return requests, list(told.values()), seen[0]


@pytest.mark.parametrize("kind", ["plain", "guesses", "handler"])
def test_an_interruption_anywhere(packed: PackedModel, kind: str) -> None:
    options: dict[str, Any] = {}
    if kind == "guesses":
        options["speculation"] = vattn.PromptLookup(num_drafts=3, shortest=1)
    error = TimeIsUp if kind == "handler" else KeyboardInterrupt
    want, told, lines = run(packed, options, error, 0)
    assert told == [request.output for request in want] and lines > 1000
    for at in range(1, lines, lines // 11):
        got, told, _ = run(packed, options, error, at)
        for one, other, tokens in zip(want, got, told, strict=True):
            assert (one.output, one.text, one.reason) == (other.output, other.text, other.reason), at
            # Nothing is told twice; what a step that was interrupted at its end would have returned is told by nobody.
            missing = len(other.output) - len(tokens)
            assert any(tokens == other.output[:n] + other.output[n + missing :] for n in range(len(tokens) + 1)), at


@pytest.mark.parametrize("streams", [False, True])
def test_an_interruption_while_prompts_are_read(packed: PackedModel, streams: bool) -> None:
    """What was queued by then is computed by nobody."""

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


@pytest.mark.parametrize("call", ["statistics", "cancel"])
def test_a_signal_handler_that_calls_the_generator_disturbs_no_cancel(packed: PackedModel, call: str) -> None:
    """Whatever line of a cancel it interrupts; unlike those above it returns."""

    def run(at: int) -> int:
        generator = make_generator(packed)
        requests = [generator.add(prompt, vattn.Sampling(3, stop_token_ids=())) for prompt in PROMPTS[:3]]
        generator.step()
        handlers = {"statistics": generator.statistics, "cancel": lambda: generator.cancel(requests[0])}
        lines = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.endswith(STATE):
                return None
            lines += event == "line"
            if event == "line" and lines == at:
                sys.settrace(None)
                handlers[call]()
            return trace

        sys.settrace(trace)
        try:
            generator.cancel(requests[1])
        finally:
            sys.settrace(None)
        while generator.busy:
            generator.step()
        gone = [0, 1] if call == "cancel" and at else [1]
        assert [index for index, one in enumerate(requests) if one.state == "cancelled"] == gone
        assert all(len(one.output) == 3 for one in requests if one.state == "finished")
        check_empty(generator)
        return lines

    lines = run(0)
    assert lines > 30
    for at in range(1, lines + 1, 2):
        run(at)


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
    generator.statistics()
    check_empty(generator)


def test_a_thread_that_dies_in_a_step_leaves_its_turn(packed: PackedModel) -> None:
    """Others go on where it was interrupted, even where it could not give its turn back."""
    generator = make_generator(packed)
    plain = [sampling for sampling in SAMPLINGS if not sampling.stop_strings]
    want = [request.output for request in generator.generate(PROMPTS[:3], plain)]

    def run(at: int) -> int:
        """Step in threads that die at a line of theirs, and go on here; return how many lines one of them ran."""
        seen, generator = [0], make_generator(packed)
        requests = [generator.add(prompt, sampling) for prompt, sampling in zip(PROMPTS[:3], plain, strict=True)]

        def die() -> None:
            sys.settrace(interrupting(at, seen, SystemExit))
            with contextlib.suppress(SystemExit):
                generator.step()

        for _ in range(2):
            seen[0] = 0
            worker = threading.Thread(target=die)
            worker.start()
            worker.join()
        while generator.busy:
            generator.step()
        assert [request.output for request in requests] == want
        check_empty(generator)
        return seen[0]

    lines = run(0)
    assert lines > 50
    for at in (*range(1, lines - 12, 23), *range(lines - 12, lines + 1)):
        run(at)


def test_one_of_many_inherits_from_a_thread_that_died(packed: PackedModel) -> None:
    generator = make_generator(packed)
    request = generator.add(PROMPTS[0], SAMPLINGS[0])
    worker = threading.Thread(target=generator._turn.take, args=(False,))  # and never gives it back
    worker.start()
    worker.join()
    took: list[bool] = []
    barrier, done = threading.Barrier(4), threading.Event()

    def compete() -> None:
        barrier.wait()
        took.append(generator._turn.take(False))
        done.wait()

    others = [threading.Thread(target=compete) for _ in range(4)]
    for thread in others:
        thread.start()
    while len(took) < 4:
        time.sleep(0.001)
    assert sorted(took) == [False, False, False, True]
    with pytest.raises(RequestError, match="another thread"):
        generator.step()
    done.set()
    for thread in others:
        thread.join()
    while generator.busy:
        generator.step()
    assert request.output == make_generator(packed).generate(PROMPTS[:1], SAMPLINGS[:1])[0].output
