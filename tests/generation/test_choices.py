"""Several outputs of a prompt, prompts that begin alike, why requests end, and a model's own generation config."""

from __future__ import annotations

from typing import Any

import pytest

import vattn
from vattn import errors

pytest.importorskip("transformers")

from transformers import GenerationConfig

from tests.generation.generator_support import GREEDY, PROMPTS, Characters, check_empty, make_generator, run_to_end
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable

SAMPLED = {"temperature": 1.5, "stop_token_ids": ()}


@pytest.mark.parametrize("hybrid", [False, True])
def test_prompts_that_begin_alike_are_computed_once(hybrid: bool) -> None:
    """All that came together find the blocks of the first, which is computed in chunks."""
    packed = enable(make_model("gemma2" if hybrid else "llama"))
    packed.allocate(num_blocks=128, hybrid=hybrid)
    prompt = PROMPTS[0]
    prompts = [prompt, prompt, prompt[:33] + [9, 9], [*prompt, 5], prompt[:3], prompt]
    generator = make_generator(packed, token_budget=24)
    salts = ["", "", "", "", "", "other"]
    alone = [make_generator(packed).generate([one], GREEDY)[0].output for one in prompts]
    generator = make_generator(packed, token_budget=24)
    done = generator.generate(prompts, GREEDY, cache_salt=salts)
    assert [request.output for request in done] == alone
    assert [request.reused for request in done] == [0, 32, 32, 32, 0, 0]
    check_empty(generator)


def test_a_request_waits_for_a_beginning_only_while_it_is_computed(packed: PackedModel) -> None:
    """The one that computes it is cancelled, or its prompt is not to be reused."""
    generator = make_generator(packed, token_budget=20)
    first, second = (generator.add(PROMPTS[0], GREEDY) for _ in range(2))
    generator.step()
    assert first.cached < len(PROMPTS[0]) and second.state == "waiting"
    generator.cancel(first)
    run_to_end(generator)
    assert second.state == "finished"
    for options in ({"reuse_prefixes": False}, {}):
        sampling = vattn.Sampling(4, stop_token_ids=(), prompt_logprobs=None if options else 0)
        generator = make_generator(packed, **options)
        requests = [generator.add(PROMPTS[0], sampling) for _ in range(2)]
        generator.step()
        assert [request.state for request in requests] == ["running", "running"]
        run_to_end(generator)


def test_choices_share_the_blocks_of_their_prompt(packed: PackedModel) -> None:
    generator = make_generator(packed)
    request, other = generator.generate([PROMPTS[0], PROMPTS[1]], vattn.Sampling(9, n=3, seed=4, **SAMPLED))
    assert [choice.index for choice in request.choices] == [0, 1, 2] and request.best == request.choices
    assert [choice.reused for choice in request.choices] == [0, 32, 32]
    assert len({tuple(choice.output) for choice in request.choices}) == 3 == len({*map(id, other.choices)})
    alone = make_generator(packed).generate([PROMPTS[0]], vattn.Sampling(9, seed=4, **SAMPLED))[0]
    assert alone.output == request.output and alone.choices == (alone,)
    again = make_generator(packed).generate([PROMPTS[0]], vattn.Sampling(9, n=3, seed=4, **SAMPLED))[0]
    assert [choice.output for choice in again.choices] == [choice.output for choice in request.choices]
    check_empty(generator)


def test_the_best_choices_are_the_most_likely_ones(packed: PackedModel) -> None:
    request = make_generator(packed).generate([PROMPTS[1]], vattn.Sampling(6, n=2, best_of=5, **SAMPLED))[0]
    means = sorted((choice.cumulative_logprob / 6 for choice in request.choices), reverse=True)
    assert [choice.cumulative_logprob / 6 for choice in request.best] == means[:2] and len(means) == 5
    assert means[0] > means[-1]


def test_choices_are_queued_and_cancelled_together(packed: PackedModel) -> None:
    generator = make_generator(packed, max_queue=4)
    sampling = vattn.Sampling(6, n=3, **SAMPLED)
    request = generator.add(PROMPTS[1], sampling)
    with pytest.raises(errors.QueueFullError, match="3 requests wait, for 3 more"):
        generator.add(PROMPTS[1], sampling)
    generator.step()
    with pytest.raises(errors.RequestError, match="choices that have not ended"):
        assert request.best
    generator.cancel(request.choices[1])
    assert [choice.state for choice in request.choices] == ["running", "cancelled", "running"]
    generator.cancel(request)
    assert {choice.finish_reason for choice in request.choices} == {"abort"}
    check_empty(generator)
    parts = list(generator.stream([PROMPTS[1]], sampling))
    assert {part.request.index for part in parts} == {0, 1, 2}
    for choice in parts[0].request.choices:
        assert [token for part in parts if part.request is choice for token in part.tokens] == choice.output


@pytest.mark.parametrize(
    "options",
    [{"n": 0}, {"n": 2}, {"best_of": 2}, {"n": 3, "best_of": 2, "temperature": 1.0}, {"n": True}, {"best_of": "2"}],
)
def test_wrong_numbers_of_choices(options: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match=r"n=|best_of="):
        vattn.Sampling(**options)


def test_why_requests_end(packed: PackedModel, expected: list[list[int]]) -> None:
    tokenizer = Characters()
    generator = make_generator(packed, tokenizer=tokenizer)
    text, end = tokenizer.decode(expected[0]), expected[0][3]
    kinds = [{}, {"stop_token_ids": (end,)}, {"stop_strings": ("@@", text[5:7])}, {"stopping_criteria": (always,)}]
    done = generator.generate([PROMPTS[0]] * 4, [vattn.Sampling(12, **{"stop_token_ids": ()} | kind) for kind in kinds])
    assert [request.finish_reason for request in done] == ["length", "stop", "stop", "stop"]
    assert [request.stop_reason for request in done] == [None, end, text[5:7], None]
    failed = generator.generate([[200]])[0]
    assert failed.finish_reason == "error" and generator.add([5]).finish_reason is None


def always(ids: Any, scores: Any) -> bool:
    return True


def test_the_generation_config_is_the_default() -> None:
    model = make_model("llama")
    packed = enable(model, num_blocks=16)
    assert make_generator(packed).default_sampling == vattn.Sampling()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=7, min_new_tokens=3, eos_token_id=[2, 4],
        repetition_penalty=1.1, suppress_tokens=[5], sequence_bias=[[[6], 1.5]], bad_words_ids=[[7, 8]],
        forced_eos_token_id=[4],
    )  # fmt: skip
    generator = make_generator(packed)
    want = vattn.Sampling(
        7,
        0.6,
        20,
        0.9,
        repetition_penalty=1.1,
        min_tokens=3,
        logit_bias={5: -float("inf"), 6: 1.5},
        bad_words=((7, 8),),
        forced_eos_token_id=4,
    )
    assert generator.default_sampling == want and generator.stop_token_ids == {2, 4}
    assert generator.generate([PROMPTS[1]])[0].output == generator.generate([PROMPTS[1]], want)[0].output
    assert generator.generate([PROMPTS[1]])[0].sampling is generator.default_sampling
    model.generation_config = GenerationConfig(temperature=0.6, top_k=5)
    assert make_generator(packed).default_sampling == vattn.Sampling(), "without do_sample"


def test_what_a_generation_config_asks_for_and_no_generator_has() -> None:
    model = make_model("llama")
    packed = enable(model, num_blocks=16)
    model.generation_config = GenerationConfig(num_beams=4, no_repeat_ngram_size=2, stop_strings="x")
    with pytest.warns(UserWarning, match="num_beams, no_repeat_ngram_size, stop_strings without a tokenizer"):
        make_generator(packed)
    model.generation_config = GenerationConfig(stop_strings="x")
    generator = make_generator(packed, tokenizer=Characters())
    assert generator.default_sampling.stop_strings == ("x",)
    model.generation_config = GenerationConfig()
    model.generation_config.repetition_penalty = -1.0
    with pytest.raises(errors.ConfigError, match=r"a generation config with Sampling\(repetition_penalty=-1.0\)"):
        make_generator(packed)
