"""The generator on a cache with groups: the tokens of transformers, while window layers give their blocks back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from vattn import errors

pytest.importorskip("transformers")

from tests.generation.generator_support import BLOCK, check_empty, chosen, make_generator
from tests.integrations.hf_families import make_model
from vattn.generation.cache_blocks import CacheBlocks
from vattn.integrations.transformers import PackedModel, enable

GREEDY = vattn.Sampling(max_new_tokens=24, stop_token_ids=())
PROMPTS = [[(7 * i + 3) % 97 for i in range(110)], [7, 5, 90], [(5 * i + 1) % 97 for i in range(60)], [9] * 33]
FAMILIES = {"gemma2": 2, "gemma3": 0, "gpt_oss": 2, "mistral": 1, "cohere2": 0}
"""Numbers of groups, 0 where any number is right."""


def hybrid(name: str, num_blocks: int, window: int = 20) -> PackedModel:
    packed = enable(make_model(name, sliding_window=window))
    packed.allocate(num_blocks=num_blocks, hybrid=True, max_seq_len=256)
    return packed


def check_tokens(model: Any, requests: list[vattn.Request]) -> None:
    """Assert that requests have the 24 tokens that a model of transformers chooses."""
    for request in requests:
        assert request.output == chosen(model, request.prompt, request.output) and len(request.output) == 24


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("gemma2", "gpt_oss") else pytest.mark.long) for name in FAMILIES]
)
def test_tokens_equal_one_by_one(name: str) -> None:
    packed, model = hybrid(name, 200), make_model(name, sliding_window=20)
    assert packed.kv_cache is not None and len(packed.kv_cache.groups) == (
        FAMILIES[name] or len(packed.kv_cache.groups)
    )
    drafts = vattn.PromptLookup(shortest=1)
    for options in ({"token_budget": 40, "speculation": drafts}, {"token_budget": 256, "graph_sizes": [2, 4]}):
        generator = make_generator(packed, max_seq_len=140, **options)
        check_tokens(model, generator.generate(PROMPTS, GREEDY))
        again = generator.generate(PROMPTS, GREEDY)
        check_tokens(model, again)
        assert all(request.reused >= 16 for request in again if len(request.prompt) > 40)
        check_empty(generator)


def test_windows_give_their_blocks_back() -> None:
    """A request of 110 + 24 tokens: 9 blocks in the full layers, never more than 3 in those with a window of 20."""
    packed = hybrid("gemma2", 64)
    generator = make_generator(packed, token_budget=16, max_seq_len=140)
    request = generator.add(PROMPTS[0], GREEDY)
    most = 0
    while generator.busy:
        generator.step()
        if request.table is not None:
            full, window = ([block for block in row if block] for row in request.table.rows)
            assert len(full) == -(-request.cached // BLOCK)
            assert len(window) <= 4 and len(full) + len(window) == generator.statistics().used_blocks
            most = max(most, len(full) - len(window))
    assert most >= 6
    check_empty(generator)


def test_preempted_and_reused_with_few_blocks() -> None:
    packed, model = hybrid("gemma2", 19), make_model("gemma2", sliding_window=20)
    for options in ({}, {"reuse_prefixes": False, "speculation": vattn.PromptLookup(shortest=1)}):
        generator = make_generator(packed, token_budget=32, max_seq_len=134, **options)
        check_tokens(model, generator.generate([*PROMPTS, PROMPTS[0]], GREEDY))
        assert generator.statistics().preemptions > 0
        check_empty(generator)


def test_a_prefix_is_reused_as_far_as_every_group_has_it() -> None:
    """Blocks before a window stay known until their room is needed; then a shorter prefix is found, or none."""
    packed, model = hybrid("gemma2", 64), make_model("gemma2", sliding_window=20)
    generator = make_generator(packed, token_budget=32, max_seq_len=140)
    pool = generator.scheduler.pool
    first, short = (generator.generate([prompt], GREEDY)[0] for prompt in (PROMPTS[0], PROMPTS[0][:70]))
    check_tokens(model, [first, short])
    assert short.reused == 64
    keys = first.keys(6, BLOCK)
    # Only what the window needs at 96 tokens is left of its group: blocks 4 and 5.
    names = [f"0/1/{key}" for key in keys[:4]]
    blocks = pool.take(names)
    assert len(blocks) == 4
    pool.forget(blocks)
    pool.free(blocks)
    whole, part = (generator.generate([prompt], GREEDY)[0] for prompt in (PROMPTS[0], PROMPTS[0][:70]))
    check_tokens(model, [whole, part])
    assert whole.reused == 96 and part.reused == 0
    check_empty(generator)


def test_requests_that_can_never_fit() -> None:
    packed = hybrid("gemma2", 12)
    generator = vattn.Generator(packed, max_num_reqs=2, token_budget=16)
    most = generator.scheduler.max_seq_len
    assert 100 < most < 11 * BLOCK
    done = generator.generate([[3] * (most - 24)], GREEDY)
    assert done[0].state == "finished"
    with pytest.raises(errors.RequestError, match=f"{most} tokens together"):
        generator.add([3] * (most - 23), GREEDY)
    with pytest.raises(errors.ConfigError, match=f"holds a request of {most} tokens"):
        vattn.Generator(packed, max_num_reqs=2, token_budget=16, max_seq_len=most + 1)
    check_empty(generator)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_waste_with_mixed_lengths(name: str) -> None:
    """Counted, not run: 64 requests of 16 to 4096 tokens in steps of any size waste less than 4 % of their blocks."""
    rng = torch.Generator().manual_seed(1)
    packed = enable(make_model(name, sliding_window=1024) if name == "gemma2" else make_model(name))
    packed.allocate(num_blocks=70_000, hybrid=name == "gemma2", max_seq_len=4224)
    assert packed.kv_cache is not None
    blocks = CacheBlocks(packed.kv_cache, 64, 4224, reuse=False)
    requests = []
    for length in torch.randint(16, 4097, (64,), generator=rng).tolist():
        request = vattn.Request([1] * length, vattn.Sampling(32))
        blocks.open(request)
        while request.cached < length:
            count = min(length - request.cached, int(torch.randint(1, 2049, (), generator=rng)))
            blocks.grow(request, count)
            request.cached += count
        requests.append(request)
    worst = 0.0
    for _ in range(32):
        for request in requests:
            blocks.grow(request, 1)
            request.cached += 1
        worst = max(worst, blocks.num_wasted(requests) / (blocks.pool.num_used * BLOCK))
    assert 0 < worst < 0.04, worst
    assert packed.kv_cache.waste < 0.04
    for request in requests:
        blocks.close(request)
    assert blocks.pool.num_used == 0


def test_caches_with_encoder_states_are_refused() -> None:
    model: Any = torch.nn.ModuleList(
        [vattn.Attention(2, 16, 0.25, prefix="self"), vattn.CrossAttention(2, 16, 0.25, prefix="cross")]
    )
    cache = vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32, hybrid=True)
    with pytest.raises(errors.ConfigError, match="for a model with cross attention"):
        vattn.Generator(model, cache=cache)
