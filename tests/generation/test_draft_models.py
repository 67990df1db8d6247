"""Draft models in the generator: the tokens of plain generation, and a second cache that agrees with the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vattn
from vattn import errors

pytest.importorskip("transformers")

from tests.generation.generator_support import (
    PROMPTS,
    Faulty,
    check_empty,
    make_generator,
    one_by_one,
    run_with_cancels,
)
from tests.generation.test_generator_graphs import Replay, stand_in
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable

LONG = vattn.Sampling(max_new_tokens=40, stop_token_ids=())


def noisy(name: str = "llama", noise: float = 0.02) -> PackedModel:
    """Return a draft model without a cache, which often chooses other tokens than the model of the tests."""
    model, random = make_model(name), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=random))
    return enable(model)


def equal() -> PackedModel:
    """Return a draft model that is the target: each of its drafts is right, as long as its cache is."""
    packed = enable(make_model("llama"))
    poison(packed, 64)
    return packed


def poison(packed: PackedModel, num_blocks: int) -> None:
    """Allocate a cache in which what was not written is NaN."""
    for cache in packed.allocate(num_blocks=num_blocks).kv_caches:
        cache[1:].fill_(torch.nan)


@pytest.fixture(params=["direct", "captured"])
def captured(request: Any) -> Iterator[Any]:
    """Yield what gives a generator stand-ins for graphs, or does nothing."""

    def give(generator: vattn.Generator) -> None:
        if request.param == "captured":
            stand_in(generator)
            source: Any = generator.scheduler.source
            for runner in source._runners:
                for key in runner._entries:
                    runner._entries[key].graph = Replay(runner, key, [])

    give.sizes = [1, 3, 4] if request.param == "captured" else ()  # type: ignore[attr-defined]
    yield give


@pytest.mark.parametrize("drafts", [1, 3])
def test_the_tokens_are_those_of_plain_greedy(
    packed: PackedModel, long_expected: list[list[int]], captured: Any, drafts: int
) -> None:
    source = vattn.DraftModel(noisy(), num_drafts=drafts)
    generator = make_generator(packed, token_budget=23, speculation=source, graph_sizes=captured.sizes)
    captured(generator)
    done = generator.generate(PROMPTS, LONG)
    assert [request.output for request in done] == long_expected
    now = generator.statistics()
    assert now.generated_tokens == 40 * len(PROMPTS) and now.steps < 70
    assert 0.3 < now.acceptance < 0.95 and sum(request.accepted for request in done) == now.accepted_tokens
    check_empty(generator)


def test_both_caches_agree(long_expected: list[list[int]], captured: Any) -> None:
    """Chunks, prefixes, preemptions and cancels: the target as its own draft model is right each time."""
    target = enable(make_model("llama"), num_blocks=11)
    generator = make_generator(
        target, token_budget=21, speculation=vattn.DraftModel(equal(), 3), graph_sizes=captured.sizes
    )
    captured(generator)
    requests = run_with_cancels(generator, long_expected, turns=3)
    now = generator.statistics()
    assert now.preemptions > 0 and sum(request.reused for request in requests) > 0
    assert now.accepted_tokens == now.drafted_tokens > 300
    check_empty(generator)


def test_prompts_that_share_blocks_have_right_drafts_at_once() -> None:
    """The second prompt ends with a block of the first, which its first drafts follow."""
    generator = make_generator(enable(make_model("llama"), num_blocks=64), speculation=vattn.DraftModel(equal(), 3))
    prompt = list(range(5, 37))
    short = vattn.Sampling(9, stop_token_ids=())
    generator.generate([prompt], short)
    done = generator.generate([prompt, prompt + [3]], short)
    assert [request.reused for request in done] == [16, 32]
    assert [request.output for request in done] == [one_by_one(make_model("llama"), r.prompt, 9) for r in done]
    assert generator.statistics().acceptance == 1.0


def test_sampled_tokens_are_those_without_drafts(packed: PackedModel) -> None:
    """A draw depends on seed and place alone; requests whose logits change by their history get no drafts."""
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"logit_bias": {5: 4.0}, "min_tokens": 9},
        {"frequency_penalty": 1.0},
    ]
    samplings = [vattn.Sampling(30, 0.7, seed=3, logprobs=1, stop_token_ids=(), **changes) for changes in kinds]
    prompts = [PROMPTS[0]] * 4
    plain = make_generator(packed).generate(prompts, samplings)
    generator = make_generator(packed, speculation=vattn.DraftModel(equal()))
    done = generator.generate(prompts, samplings)
    assert [request.output for request in done] == [request.output for request in plain]
    assert [[one.rank for one in request.logprobs or ()] for request in done] == [
        [one.rank for one in request.logprobs or ()] for request in plain
    ]
    assert [request.drafted > 0 for request in done] == [True, True, True, False]


def test_targets_with_groups_of_layers() -> None:
    """The draft model follows the blocks of the layers that keep all tokens."""
    target, model = enable(make_model("gemma2")), make_model("gemma2")
    target.allocate(num_blocks=64, hybrid=True, max_seq_len=128)
    generator = make_generator(target, speculation=vattn.DraftModel(enable(make_model("gemma2")), 3))
    done = generator.generate(PROMPTS, LONG)
    assert [request.output for request in done] == [one_by_one(model, prompt, 40) for prompt in PROMPTS]
    assert generator.statistics().acceptance == 1.0
    check_empty(generator)


def test_a_failed_step_starts_over(long_expected: list[list[int]]) -> None:
    for fails in ("target", "draft model"):
        target, drafting = Faulty(enable(make_model("llama"), num_blocks=64)), Faulty(equal())
        for one in (target, drafting):
            one.bad, one.vocab_size = -1, one.packed.vocab_size
        generator = make_generator(target, speculation=vattn.DraftModel(drafting, 3))
        requests = [generator.add(prompt, LONG) for prompt in PROMPTS[:3]]
        (target if fails == "target" else drafting).raise_in = 7
        with pytest.raises(ZeroDivisionError):
            while generator.busy:
                generator.step()
        while generator.busy:
            generator.step()
        assert [request.output for request in requests] == long_expected[:3]
        assert generator.statistics().acceptance == 1.0
        check_empty(generator)


def test_a_step_that_failed_ahead_concerns_its_requests_alone(long_expected: list[list[int]]) -> None:
    target = Faulty(enable(make_model("llama"), num_blocks=64))
    target.bad, target.vocab_size = -1, target.packed.vocab_size
    generator = make_generator(target, speculation=vattn.DraftModel(equal(), 3))
    request = generator.add(PROMPTS[0], LONG)
    generator.step()
    target.raise_in = 1
    assert generator.step(), "the tokens of the step before the one that fails are returned"
    generator.cancel(request)
    assert generator.generate([PROMPTS[1]], LONG)[0].output == long_expected[1]


def test_a_draft_model_belongs_to_the_newest_generator(packed: PackedModel) -> None:
    drafting = equal()
    old = make_generator(enable(make_model("llama"), num_blocks=16), speculation=vattn.DraftModel(drafting))
    make_generator(packed, speculation=vattn.DraftModel(drafting))
    old.add([1, 2, 3])
    with pytest.raises(errors.CacheError, match="the newest"):
        old.step()


def test_wrong_draft_models(packed: PackedModel) -> None:
    def refused(draft: Any, **options: Any) -> str:
        with pytest.raises(errors.ConfigError) as caught:
            make_generator(packed, speculation=vattn.DraftModel(draft), **options)
        return str(caught.value)

    other = enable(make_model("llama"))
    other.vocab_size = 100
    assert "100 token ids for a target with" in refused(other)
    other.vocab_size = None
    assert "a draft model without vocab_size" in refused(other)
    assert "layers of the target" in refused(packed)
    assert "8 blocks for a target with 64" in refused(enable(make_model("llama"), num_blocks=8))
    small = enable(make_model("llama"), cache_config=vattn.CacheConfig(block_size=32), num_blocks=64)
    assert "blocks of 32 tokens" in refused(small)
    grouped = enable(make_model("gemma2"))
    grouped.vocab_size = packed.vocab_size
    grouped.allocate(num_blocks=64, hybrid=True)
    assert "hybrid=True" in refused(grouped)
    training = enable(make_model("llama"))
    training.model.train()
    assert "training mode" in refused(training)
    with pytest.raises(errors.ConfigError, match="DraftModel"):
        vattn.DraftModel("small")
    with pytest.raises(errors.ConfigError, match="num_drafts"):
        vattn.DraftModel(other, 0)
    with pytest.raises(errors.ConfigError, match="num_drafts=65"):
        vattn.DraftModel(other, 65)
    with pytest.raises(errors.ConfigError, match=r"LlamaForCausalLM, a model of transformers.*enable\(small\)"):
        make_generator(packed, speculation=vattn.DraftModel(make_model("llama")))
    with pytest.raises(errors.ConfigError, match=r"DraftModel\(small"):
        make_generator(packed, speculation=other)
