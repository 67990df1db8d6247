"""Sampling: probabilities and choices of transformers' own processors and warpers, and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vattn
from vattn import errors
from vattn.generation.draws import draw, splitmix64, truncate, uniforms
from vattn.generation.request import Request
from vattn.generation.sampler import Sampler, SamplingMetadata

pytest.importorskip("transformers")

from transformers import GenerationConfig
from transformers.generation import logits_process

from tests.generation.generator_support import GREEDY, PROMPTS, Characters, check_empty, make_generator
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable

DRAWS = 3000
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "warm": {"temperature": 1.7},
    "cold": {"temperature": 0.4},
    "top_k": {"temperature": 1.3, "top_k": 7},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 1.3, "min_p": 0.08},
    "all": {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
}


def warped(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """Return the probabilities that transformers' warpers leave."""
    warpers: list[Any] = [logits_process.TemperatureLogitsWarper(temperature)]
    warpers += [logits_process.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [logits_process.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [logits_process.MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        logits = warper(torch.zeros(1, 1, dtype=torch.long), logits)
    return logits.softmax(-1)


def chance_of_worse(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return Pearson's test: how often draws from these probabilities differ from them as much as `counts` do."""
    expected = probabilities.double() * counts.sum()
    # Rare tokens count as one: the test needs about five of each.
    rare = expected < 5
    parts = [(counts[~rare], expected[~rare])]
    if rare.any() and expected[rare].sum() > 0:
        parts.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    got, want = (torch.cat(each) for each in zip(*parts, strict=True))
    distance = ((got - want) ** 2 / want).sum()
    return float(torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), distance / 2))


def tokens_of(logits: torch.Tensor, samplings: list[vattn.Sampling]) -> torch.Tensor:
    """Return what a batch of requests draws, all from the same logits."""
    requests = [Request([1, 2], sampling) for sampling in samplings]
    rows = logits.expand(len(requests), -1)
    chosen = Sampler(1).choose(
        rows, requests, [2] * len(requests), SamplingMetadata.of(requests, range(len(requests)), rows)
    )
    assert chosen.result[1].all()
    return chosen.tokens


def test_draws_have_the_probabilities_of_transformers(device: str) -> None:
    """Pearson's chi-square for each kind of settings, all of them in one batch; and it sees a wrong temperature."""
    # More tokens than lanes, and not a multiple of them.
    logits = torch.randn(1, 530, generator=torch.Generator().manual_seed(5)) * 4
    samplings = [vattn.Sampling(seed=seed, **kind) for kind in SETTINGS.values() for seed in range(DRAWS)]
    drawn = tokens_of(logits.to(device), samplings).view(len(SETTINGS), DRAWS).cpu()
    for (name, kind), row in zip(SETTINGS.items(), drawn, strict=True):
        counts, probabilities = row.bincount(minlength=logits.shape[1]), warped(logits, **kind)[0]
        assert not counts[probabilities == 0].any(), name
        assert chance_of_worse(counts, probabilities) > 1e-3, name
        wrong = warped(logits, **kind | {"temperature": kind["temperature"] * 1.3})[0]
        assert chance_of_worse(counts, wrong) < 1e-6, name


@given(
    st.integers(0, 2**32), st.integers(2, 700), st.integers(0, 40), st.sampled_from([1.0, 0.99, 0.7, 0.2, 1e-6]),
    st.sampled_from([0.0, 1e-3, 0.1, 1.0]), st.sampled_from([0.05, 1.0, 30.0]),
)  # fmt: skip
def test_truncation_keeps_what_the_warpers_keep(
    seed: int, width: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * 3
    kept = warped(logits, temperature, top_k, top_p, min_p) > 0
    wide = min(top_k or width, width)
    got = truncate(
        (logits - logits.max()) / temperature,
        torch.tensor([wide]) if top_k else None,
        torch.tensor([top_p], dtype=torch.float64) if top_p < 1 else None,
        torch.tensor([min_p], dtype=torch.float64) if min_p else None,
        wide if top_k else width,
    )
    # Probabilities that round to 0 are kept by nobody; the last kept one may differ by the rounding of a sum of fp32.
    differ = (got.softmax(-1) > 0) != kept
    assert int(differ.sum()) <= 1 and float(warped(logits, temperature)[differ].sum()) < 1e-5


def test_tokens_as_likely_as_the_last_one_are_kept() -> None:
    scores = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    for top_k, top_p in ((2, None), (None, 0.6)):
        left = truncate(
            scores,
            torch.tensor([top_k]) if top_k else None,
            torch.tensor([top_p]).double() if top_p else None,
            None,
            top_k or 5,
        )
        assert left.isfinite().tolist() == [[True, True, True, True, False]]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=5))
def test_numbers_are_those_of_the_hash(pairs: list[tuple[int, int]]) -> None:
    seeds = torch.tensor([seed - (seed >> 63 << 64) for seed, _ in pairs])
    got = uniforms(seeds, torch.tensor([position for _, position in pairs]))
    assert got.tolist() == [(splitmix64(seed, position) >> 12) / 2**52 for seed, position in pairs]


@given(st.integers(0, 2**32), st.integers(1, 1500), st.sampled_from([0.0, 1 - 2.0**-52, 0.5, 1e-12]))
def test_no_number_draws_what_has_no_chance(seed: int, width: int, number: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, width, generator=rng) * 20
    scores[torch.rand(3, width, generator=rng) < 0.9] = -torch.inf
    scores[:, seed % width] = 1.0
    tokens = draw(scores, torch.full((3,), number, dtype=torch.float64))
    assert scores.gather(1, tokens[:, None]).isfinite().all()
    # The intervals lie in the order of the tokens.
    positive = (scores - scores.max(-1, keepdim=True).values).exp() > 0
    if number == 0:
        assert tokens.tolist() == [int(row.nonzero()[0]) for row in positive]


def test_tiny_temperatures_are_greedy() -> None:
    logits = torch.randn(1, 90, generator=torch.Generator().manual_seed(0))
    samplings = [vattn.Sampling(temperature=temperature) for temperature in (1e-45, 1e-30, 5e-324)]
    assert tokens_of(logits, samplings).tolist() == [int(logits.argmax())] * 3


def generated(prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return what transformers generates greedily with some options."""
    model = make_model("llama")
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
    return list(model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist())


def test_bad_words_biases_and_early_ends_are_those_of_transformers(
    packed: PackedModel, long_expected: list[list[int]]
) -> None:
    """Greedy tokens, each request with other options in the same steps."""
    words = [[long_expected[0][2]], long_expected[0][4:6], [5, 6, 7]]
    bias = {long_expected[1][1]: -3.0, 17: 1.5, 40: 0.25}
    end = long_expected[2][3]
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"bad_words": words}, {"bad_words_ids": words}),
        ({"logit_bias": bias}, {"sequence_bias": {(token,): value for token, value in bias.items()}}),
        ({"stop_token_ids": [end], "min_tokens": 8}, {"eos_token_id": end, "min_new_tokens": 8}),
        ({"forced_eos_token_id": 50}, {"forced_eos_token_id": 50}),
        (
            {"logit_bias": bias, "bad_words": words, "repetition_penalty": 1.3},
            {
                "sequence_bias": {(token,): value for token, value in bias.items()},
                "bad_words_ids": words,
                "repetition_penalty": 1.3,
            },
        ),
    ]
    samplings = [vattn.Sampling(12, **{"stop_token_ids": ()} | ours) for ours, _ in kinds]
    done = make_generator(packed).generate(PROMPTS[:5], samplings)
    for request, prompt, (_, theirs) in zip(done, PROMPTS, kinds, strict=False):
        want = generated(prompt, 12, **{"eos_token_id": None} | theirs)
        ends = [theirs.get("eos_token_id"), theirs.get("forced_eos_token_id")]
        assert request.output == (want[:-1] if want[-1] in ends else want)
    assert (done[3].reason, done[3].stop_reason, len(done[3].output)) == ("stop token", 50, 11)
    assert done[0].output != long_expected[0][:12] and done[1].output != long_expected[1][:12]


def penalised(model: Any, prompt: list[int], count: int, presence: float, frequency: float) -> list[int]:
    """Return greedy tokens with OpenAI's penalties, of the output alone."""
    output: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([prompt + output])).logits[0, -1].float()
        often = torch.tensor(output, dtype=torch.long).bincount(minlength=len(scores))
        output.append(int((scores - frequency * often - presence * (often > 0)).argmax()))
    return output


@pytest.mark.parametrize("blocks", [64, 9])
def test_penalties_count_the_output(blocks: int) -> None:
    """Also for requests that are preempted, so that others have their rows in between."""
    model, prompts = make_model("llama"), [*PROMPTS, PROMPTS[1]]
    kinds = [(0.7, 0.0), (0.0, 0.4), (-0.5, 0.3), (0.0, 0.0), (1.0, 1.0), (0.2, 0.1), (0.0, -0.2)]
    want = [penalised(model, prompt, 16, *kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    generator = make_generator(enable(make_model("llama"), num_blocks=blocks))
    samplings = [
        vattn.Sampling(16, presence_penalty=presence, frequency_penalty=frequency, stop_token_ids=())
        for presence, frequency in kinds
    ]
    assert [request.output for request in generator.generate(prompts, samplings)] == want
    assert (generator.statistics().preemptions > 0) == (blocks == 9)
    check_empty(generator)


def test_allowed_tokens(packed: PackedModel) -> None:
    allowed = [4, 9, 30, 31, 80]
    samplings = [
        vattn.Sampling(12, temperature, seed=3, allowed_token_ids=allowed, stop_token_ids=())
        for temperature in (0.0, 2.0, 2.0)
    ]
    done = make_generator(packed).generate([PROMPTS[0], PROMPTS[0], PROMPTS[1]], [*samplings[:2], GREEDY])
    assert set(done[0].output) | set(done[1].output) <= set(allowed) and len(set(done[1].output)) > 2
    assert not set(done[2].output) <= set(allowed)


def test_bad_words_of_texts(packed: PackedModel, expected: list[list[int]]) -> None:
    tokenizer = Characters()
    text = tokenizer.decode(expected[0])
    generator = make_generator(packed, tokenizer=tokenizer)
    done = generator.generate([PROMPTS[0]], vattn.Sampling(12, bad_words=(text[3:5],), stop_token_ids=()))[0]
    assert text[3:5] not in done.text and done.output[:4] == expected[0][:4]


def test_stop_strings_are_looked_for_after_the_least_tokens(packed: PackedModel, expected: list[list[int]]) -> None:
    tokenizer = Characters()
    text = tokenizer.decode(expected[0])
    generator = make_generator(packed, tokenizer=tokenizer)
    for least in range(12):
        stop = text[4]
        sampling = vattn.Sampling(12, stop_strings=(stop,), min_tokens=least, stop_token_ids=())
        request = generator.generate([PROMPTS[0]], sampling)[0]
        at = text.find(stop, least)
        assert request.text == (text if at < 0 else text[:at])


@pytest.mark.parametrize("speculation", [None, vattn.PromptLookup(shortest=1)], ids=["plain", "drafts"])
@pytest.mark.parametrize("blocks", [64, 9])
def test_log_probabilities_are_those_of_the_model(
    long_expected: list[list[int]], speculation: Any, blocks: int
) -> None:
    """Of outputs and prompts, in chunks, among others without, with preemptions and drafts."""
    model = make_model("llama")
    generator = make_generator(enable(make_model("llama"), num_blocks=blocks), token_budget=21, speculation=speculation)
    wanted = [(0, None), (3, 2), (None, None), (None, 0), (97, 1), (2, None)]
    samplings = [vattn.Sampling(20, stop_token_ids=(), logprobs=own, prompt_logprobs=prompt) for own, prompt in wanted]
    done = generator.generate(PROMPTS, samplings) + generator.generate(PROMPTS[:2], samplings[:2])
    assert [request.output for request in done] == [tokens[:20] for tokens in [*long_expected, *long_expected[:2]]]
    for request, (own, prompt) in zip(done, [*wanted, *wanted[:2]], strict=True):
        with torch.no_grad():
            probabilities = model(input_ids=torch.tensor([request.prompt + request.output])).logits[0].log_softmax(-1)
        length = len(request.prompt)
        assert (request.logprobs is None) == (own is None) and (request.prompt_logprobs is None) == (prompt is None)
        if own is not None:
            check_logprobs(request.logprobs, probabilities[length - 1 : -1], request.output, own)
            total = probabilities[range(length - 1, length + 19), request.output].sum()
            assert request.cumulative_logprob == pytest.approx(float(total), abs=1e-3)
        if prompt is not None:
            assert request.prompt_logprobs[0] is None
            check_logprobs(request.prompt_logprobs[1:], probabilities[: length - 1], request.prompt[1:], prompt)
    assert (generator.statistics().preemptions > 0) == (blocks == 9)
    check_empty(generator)


def check_logprobs(found: Any, probabilities: torch.Tensor, tokens: list[int], count: int) -> None:
    assert len(found) == len(tokens) == len(probabilities)
    for one, row, token in zip(found, probabilities, tokens, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert one.rank == int((row > row[token]).sum()) + 1 and len(one.top) == count
        best = row.topk(count)
        assert list(one.top) == best.indices.tolist() or count == 97
        assert list(one.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_log_probabilities_survive_a_step_that_raises(packed: PackedModel, expected: list[list[int]]) -> None:
    from tests.generation.generator_support import Faulty, run_to_end

    faulty = Faulty(packed)
    faulty.bad = -1
    generator = make_generator(faulty)
    sampling = vattn.Sampling(12, stop_token_ids=(), logprobs=1, prompt_logprobs=1)
    clean = make_generator(packed).generate(PROMPTS[:2], sampling)
    generator = make_generator(faulty)
    requests = [generator.add(prompt, sampling) for prompt in PROMPTS[:2]]
    for when in (2, 4):
        faulty.raise_in = when
        with pytest.raises(ZeroDivisionError):
            run_to_end(generator)
    run_to_end(generator)
    for request, want in zip(requests, clean, strict=True):
        assert request.output == want.output and len(request.logprobs) == 12
        assert [one.top.keys() for one in request.logprobs] == [one.top.keys() for one in want.logprobs]
        assert None not in request.prompt_logprobs[1:]


WRONG = {
    "presence_penalty": [2.5, "a", float("nan")],
    "frequency_penalty": [-3, True],
    "min_tokens": [-1, 1.5, 65],
    "logprobs": [-1, True, 1.0],
    "prompt_logprobs": ["all"],
    "allowed_token_ids": [(), (1.5,), "ab", (-1,)],
    "bad_words": ["ab", ("",), ((),), (3,), ((1, -2),)],
    "logit_bias": [[1, 2], {"1": 2.0}, {1: float("nan")}, {1: float("inf")}, {-1: 1.0}, 3],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(errors.ConfigError, match=rf"Sampling\({name}="):
            vattn.Sampling(**{name: value})


def test_what_the_vocabulary_does_not_have(packed: PackedModel) -> None:
    generator = make_generator(packed)
    for sampling, text in (
        (vattn.Sampling(logit_bias={97: 1.0}), "logit_bias with 97"),
        (vattn.Sampling(allowed_token_ids=(1, 200)), "allowed_token_ids with 200"),
        (vattn.Sampling(bad_words=((97, 1),)), "bad_words with 97"),
        (vattn.Sampling(logprobs=98), "logprobs with 98"),
        (vattn.Sampling(prompt_logprobs=98), "prompt_logprobs with 98"),
        (vattn.Sampling(bad_words=("word",)), "without a tokenizer"),
    ):
        with pytest.raises(errors.RequestError, match=text):
            generator.add([1, 2], sampling)
        check_empty(generator)
