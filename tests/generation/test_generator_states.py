"""The generator on models that keep a state for each request: the tokens of transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn

pytest.importorskip("transformers")

from tests.integrations.hybrid_families import make_hybrid
from vattn.errors import ConfigError
from vattn.generation.prompt_lookup import PromptLookup
from vattn.integrations.transformers import disable, enable

NEW = 12
PROMPTS = [[(7 * i + 3 * j) % 90 + 3 for i in range(length)] for j, length in enumerate((40, 1, 9, 23, 2, 17, 9))]


def own_tokens(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def run(packed: Any, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], vattn.Generator]:
    generator = vattn.Generator(packed, **{"max_num_reqs": 4, "token_budget": 16, **options})
    sampling = vattn.Sampling(temperature=0, max_new_tokens=NEW, stop_token_ids=())
    return [request.output for request in generator.generate(prompts, sampling)], generator


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "jamba", "lfm2", "falcon_h1"])
def test_tokens_are_those_of_generate(name: str) -> None:
    """Prompts in chunks beside decodes, more requests than slots, and a pool that preempts."""
    model = make_hybrid(name)
    expected = own_tokens(model, PROMPTS)
    packed = enable(model, num_blocks=9, max_num_reqs=4)
    tokens, generator = run(packed, PROMPTS)
    assert tokens == expected
    assert generator.statistics().preemptions > 0


def test_padded_decodes() -> None:
    """On the CPU a runner of graphs runs the padded step itself."""
    model = make_hybrid("bamba")
    expected = own_tokens(model, PROMPTS)
    packed = enable(model, num_blocks=40, max_num_reqs=4)
    assert run(packed, PROMPTS, graph_sizes=[4, 2])[0] == expected
    assert run(packed, PROMPTS, graph_sizes=[4], token_budget=64)[0] == expected


def test_states_beside_a_cache_in_groups() -> None:
    model = make_hybrid("lfm2")
    expected = own_tokens(model, PROMPTS)
    packed = enable(model)
    packed.allocate(num_blocks=12, hybrid=True, max_num_reqs=4)
    assert run(packed, PROMPTS)[0] == expected


def test_equal_prompts_share_nothing_and_choices_go_apart() -> None:
    model = make_hybrid("lfm2")
    expected = own_tokens(model, [PROMPTS[0]])[0]
    packed = enable(model, num_blocks=40, max_num_reqs=4)
    generator = vattn.Generator(packed, max_num_reqs=4)
    sampling = vattn.Sampling(temperature=0, max_new_tokens=NEW, stop_token_ids=())
    done = [*generator.generate([PROMPTS[0]] * 2, sampling), *generator.generate([PROMPTS[0]], sampling)]
    assert [request.output for request in done] == [expected] * 3
    assert [request.reused for request in done] == [0, 0, 0]
    sampled = vattn.Sampling(temperature=1.0, seed=3, n=3, max_new_tokens=NEW, stop_token_ids=())
    choices = generator.generate([PROMPTS[0]], sampled)[0].choices
    alone = vattn.Generator(packed, max_num_reqs=1).generate([PROMPTS[0]], sampled)[0].choices
    assert [choice.output for choice in choices] == [choice.output for choice in alone]


def ask(generator: vattn.Generator, *prompts: list[int]) -> tuple[list[list[int]], list[int]]:
    """Return the outputs of prompts that run together, and how many tokens each has reused."""
    sampling = vattn.Sampling(temperature=0, max_new_tokens=NEW, stop_token_ids=())
    done = generator.generate(prompts, sampling)
    return [request.output for request in done], [request.reused for request in done]


@pytest.mark.parametrize("hybrid", [False, True])
def test_prefixes_are_found_where_a_state_was_kept(hybrid: bool) -> None:
    """Blocks have 16 tokens. The first request keeps the state after 32; the second leaves it after 16 and keeps that
    one; the third finds it."""
    model = make_hybrid("lfm2")
    first = PROMPTS[0]
    second, third = first[:20] + [5] * 15, first[:17] + [6] * 3
    expected = own_tokens(model, [first, second, third])
    packed = enable(model)
    packed.allocate(num_blocks=40, hybrid=hybrid, max_num_reqs=3)
    generator = vattn.Generator(packed, max_num_reqs=3, state_snapshots=4, token_budget=24)
    assert ask(generator, first) == ([expected[0]], [0])
    assert ask(generator, second) == ([expected[1]], [0])
    assert ask(generator, first, second, third) == (expected, [32, 32, 16])
    assert generator.statistics().reused_tokens == 80


def test_a_snapshot_that_made_room_is_not_found() -> None:
    model = make_hybrid("qwen3_next")
    prompts = [[number] * 20 for number in (3, 4, 5)]
    expected = own_tokens(model, prompts)
    packed = enable(model, num_blocks=60, max_num_reqs=2)
    generator = vattn.Generator(packed, max_num_reqs=2, state_snapshots=2)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert ask(generator, prompt) == ([tokens], [0])
    assert [ask(generator, prompts[number])[1] for number in (2, 1, 0)] == [[16], [16], [0]]
    assert ask(generator, *prompts)[0] == expected


def test_snapshots_of_another_model_or_salt_are_not_found() -> None:
    model = make_hybrid("lfm2")
    packed = enable(model, num_blocks=40, max_num_reqs=2)
    generator = vattn.Generator(packed, max_num_reqs=2, state_snapshots=4)
    sampling = vattn.Sampling(temperature=0, max_new_tokens=NEW, stop_token_ids=())
    ask(generator, PROMPTS[0])
    assert generator.generate([PROMPTS[0]], sampling, cache_salt="other")[0].reused == 0
    assert ask(generator, PROMPTS[0])[1] == [32]
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1.5)
    tokens, reused = ask(generator, PROMPTS[0])
    assert reused == [0]
    disable(packed)
    assert tokens == own_tokens(model, [PROMPTS[0]])


def test_choices_and_preempted_requests_go_on_from_snapshots() -> None:
    model = make_hybrid("jamba")
    expected = own_tokens(model, PROMPTS)
    packed = enable(model, num_blocks=9, max_num_reqs=4)
    tokens, generator = run(packed, PROMPTS, state_snapshots=3)
    assert tokens == expected and generator.statistics().preemptions > 0
    sampled = vattn.Sampling(temperature=1.0, seed=3, n=3, max_new_tokens=NEW, stop_token_ids=())
    fresh = [6, *PROMPTS[0]]
    choices = generator.generate([fresh], sampled)[0].choices
    assert [choice.reused for choice in choices] == [0, 32, 32]
    alone = vattn.Generator(packed, max_num_reqs=1).generate([fresh], sampled)[0].choices
    assert [choice.output for choice in choices] == [choice.output for choice in alone]


def test_a_failed_step_is_undone() -> None:
    model = make_hybrid("qwen3_next")
    expected = own_tokens(model, PROMPTS[:3])
    packed = enable(model, num_blocks=40, max_num_reqs=4)
    generator = vattn.Generator(packed, max_num_reqs=4, token_budget=16)
    sampling = vattn.Sampling(temperature=0, max_new_tokens=NEW, stop_token_ids=())
    requests = [generator.add(prompt, sampling) for prompt in PROMPTS[:3]]
    calls = 0

    def fails(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            raise RuntimeError("injected")

    handle = model.lm_head.register_forward_pre_hook(fails)
    while generator.busy and calls < 12:
        try:
            generator.step()
        except RuntimeError as error:
            assert "injected" in str(error)
    handle.remove()
    while generator.busy:
        generator.step()
    assert [request.output for request in requests] == expected


def test_what_states_cannot_do_is_refused() -> None:
    model = make_hybrid("lfm2")
    packed = enable(model, num_blocks=8, max_num_reqs=2)
    for options, words in [
        ({}, "max_num_reqs=64 for a cache with the states of 2"),
        ({"max_num_reqs": 2, "speculation": PromptLookup()}, "speculation for a model that keeps a state"),
        ({"max_num_reqs": 2, "reuse_prefixes": True}, "without state_snapshots"),
        ({"max_num_reqs": 2, "reuse_prefixes": False, "state_snapshots": 2}, "state_snapshots=2 with reuse_prefixes"),
        ({"max_num_reqs": 2, "state_snapshots": -1}, "state_snapshots=-1"),
        ({"max_num_reqs": 2, "mixed_graph_sizes": [16]}, "mixed_graph_sizes for a model"),
        ({"max_num_reqs": 2, "compile": "model"}, "compile='model' for a model"),
    ]:
        with pytest.raises(ConfigError, match=words):
            vattn.Generator(packed, **options)
    disable(packed)
