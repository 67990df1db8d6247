"""Prompt lookup in the generator: the tokens of plain generation in fewer steps, greedy and sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from vattn import errors
from vattn.generation import DraftSource
from vattn.generation.lookup_index import LookupIndex

pytest.importorskip("transformers")

from tests.generation.generator_support import (
    PROMPTS,
    Characters,
    Faulty,
    check_empty,
    make_generator,
    one_by_one,
    run_to_end,
)
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable

LONG = vattn.Sampling(max_new_tokens=40, stop_token_ids=())


@pytest.mark.parametrize("drafts", [1, 4])
def test_the_tokens_are_those_of_plain_greedy(packed: PackedModel, long_expected: list[list[int]], drafts: int) -> None:
    """This model soon repeats itself, so that drafts are right."""
    generator = make_generator(packed, speculation=vattn.PromptLookup(num_drafts=drafts, shortest=1))
    done = generator.generate(PROMPTS, LONG)
    assert [request.output for request in done] == long_expected
    now = generator.statistics()
    # Without drafts, 6 requests of 40 tokens take 80 steps at least, 4 at once.
    assert now.generated_tokens == 40 * len(PROMPTS) and now.steps < 78
    assert 0 < now.accepted_tokens < now.drafted_tokens and 0 < now.accepted_per_step <= drafts
    assert sum(request.accepted for request in done) == now.accepted_tokens
    assert sum(request.drafted for request in done) == now.drafted_tokens
    check_empty(generator)


@pytest.mark.parametrize("speculation", [None, vattn.PromptLookup(shortest=1)], ids=["plain", "drafts"])
@pytest.mark.parametrize("reuse", [False, True])
def test_preempted_requests_start_again(long_expected: list[list[int]], reuse: bool, speculation: Any) -> None:
    packed, sampling = enable(make_model("llama"), num_blocks=9), vattn.Sampling(20, stop_token_ids=())
    generator = make_generator(packed, token_budget=21, reuse_prefixes=reuse, speculation=speculation)
    done = generator.generate(PROMPTS, sampling) + generator.generate(PROMPTS[:1], sampling)
    assert [request.output for request in done] == [tokens[:20] for tokens in [*long_expected, long_expected[0]]]
    assert generator.statistics().preemptions > 0 and any(request.preemptions for request in done)
    assert (sum(request.reused for request in done) > 0) == reuse
    check_empty(generator)


def test_blocks_of_wrong_drafts_are_not_found(packed: PackedModel, long_expected: list[list[int]]) -> None:
    """Every published block holds tokens that the request has; others find the right values."""
    generator = make_generator(packed, speculation=vattn.PromptLookup(num_drafts=16, shortest=1))
    first = generator.generate(PROMPTS, LONG)
    again = generator.generate(
        [request.prompt + request.output[:30] for request in first], vattn.Sampling(10, stop_token_ids=())
    )
    assert all(request.reused >= 16 for request in again if len(request.prompt) > 17)
    assert [request.output for request in again] == [tokens[30:] for tokens in long_expected]
    check_empty(generator)


def test_sampled_tokens_are_those_without_drafts(packed: PackedModel) -> None:
    """A draw depends on seed and place alone; a draft is kept where it is what would have been drawn."""
    kinds: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 1.2}]
    samplings = [vattn.Sampling(30, 0.7, seed=3, stop_token_ids=(), **changes) for changes in kinds]
    prompts = [PROMPTS[0]] * 4
    plain = make_generator(packed).generate(prompts, samplings)
    done = make_generator(packed, speculation=vattn.PromptLookup(shortest=1)).generate(prompts, samplings)
    assert [request.output for request in done] == [request.output for request in plain]
    # A penalty needs the tokens before each token.
    assert [request.drafted > 0 for request in done] == [True, True, True, False]


def test_what_follows_the_end_is_dropped(packed: PackedModel, long_expected: list[list[int]]) -> None:
    expected = long_expected
    tokenizer = Characters()
    lookup = vattn.PromptLookup(num_drafts=8, shortest=1)
    stop = expected[0][25]
    generator = make_generator(packed, tokenizer=tokenizer, speculation=lookup)
    sampling = vattn.Sampling(40, stop_token_ids=(stop,))
    assert generator.generate([PROMPTS[0]], sampling)[0].output == expected[0][: expected[0].index(stop)]
    text = tokenizer.decode(expected[0])
    cut = text[20:23]
    parts = list(generator.stream([PROMPTS[0]], vattn.Sampling(40, stop_token_ids=(), stop_strings=(cut,))))
    assert "".join(part.text for part in parts) == text[: text.index(cut)] == parts[-1].request.text
    assert parts[-1].request.reason == "stop string"
    check_empty(generator)


def test_a_failure_among_drafts_ends_its_request_alone(packed: PackedModel, long_expected: list[list[int]]) -> None:
    expected = long_expected
    faulty = Faulty(packed)
    faulty.bad = expected[0][20]
    generator = make_generator(faulty, speculation=vattn.PromptLookup(shortest=1))
    done = generator.generate([PROMPTS[0], PROMPTS[5]], LONG)
    at = expected[0].index(faulty.bad)
    assert done[0].state == "failed" and done[0].output == expected[0][: at + 1]
    assert done[1].state == ("failed" if faulty.bad in PROMPTS[5][-1:] + expected[5][:-1] else "finished")
    check_empty(generator)


def test_no_drafts_without_room() -> None:
    """The budget is one token: the drafts of a request would take that of the others."""
    packed = enable(make_model("llama"), num_blocks=8)
    generator = make_generator(packed, token_budget=1, speculation=vattn.PromptLookup(shortest=1))
    done = generator.generate([[5, 5, 5, 5]], vattn.Sampling(20, stop_token_ids=()))
    assert generator.statistics().drafted_tokens == 0
    assert done[0].output == one_by_one(make_model("llama"), [5, 5, 5, 5], 20)


def test_drafts_leave_tokens_for_other_requests(packed: PackedModel, long_expected: list[list[int]]) -> None:
    """In a step of 11 tokens four requests have one each, and share the rest."""

    class Wrong(DraftSource):
        num_drafts = 6

        def plan(self, request: vattn.Request, most: int) -> list[int]:
            planned.append(most)
            return [96] * most

    planned: list[int] = []
    generator = make_generator(packed, token_budget=11, speculation=Wrong())
    requests = [generator.add(prompt, LONG) for prompt in (PROMPTS[1], PROMPTS[3], PROMPTS[1][:2], PROMPTS[3] * 2)]
    while not all(request.output for request in requests):
        generator.step()
    generator.step()
    planned.clear()
    before = [len(request.output) for request in requests]
    generator.step()
    assert planned == [1, 2, 2, 2] and [len(request.output) for request in requests] == [one + 1 for one in before]
    run_to_end(generator)
    assert [request.output[:40] for request in requests[:2]] == [long_expected[1], long_expected[3]]


def test_lookups() -> None:
    def drafts(tokens: list[int], count: int, shortest: int = 2) -> list[int]:
        lengths = range(4, shortest - 1, -1)
        index = LookupIndex(lengths, tokens[:3])
        index.extend(tokens[3:])
        assert index.drafts(count) == LookupIndex(lengths, tokens).drafts(count)
        return index.drafts(count)

    assert drafts([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert drafts([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4], "the latest of equally long matches"
    assert drafts([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1) == [3], "the longest match"
    assert drafts([1, 2, 9, 2], 3) == [] and drafts([1, 2, 9, 2], 3, shortest=1) == [9, 2, 9]
    assert drafts([6, 6, 6], 5) == [6] * 5 and drafts([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert drafts([1], 3) == [] and drafts([], 3) == []


def test_random_lookups_against_a_search() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens = torch.randint(3, (int(torch.randint(2, 30, (), generator=rng)),), generator=rng).tolist()
        want: list[int] = []
        for size in (3, 2):
            ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
            if ends and len(tokens) >= size:
                copy = list(tokens)
                for step in range(4):
                    copy.append(copy[ends[-1] + step])
                want = copy[len(tokens) :]
                break
        assert LookupIndex((3, 2), tokens).drafts(4) == want


@pytest.mark.parametrize("changes", [{"num_drafts": 0}, {"num_drafts": 2.0}, {"longest": 1}, {"shortest": 0}])
def test_wrong_lookups(changes: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        vattn.PromptLookup(**changes)
    with pytest.raises(errors.ConfigError, match="PromptLookup"):
        vattn.Generator(enable(make_model("llama"), num_blocks=4), speculation=4)  # type: ignore[arg-type]
