"""The generator: the tokens of one-by-one greedy generation, whatever is scheduled, preempted, reused or cancelled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from vattn import errors
from vattn.generation.cache_blocks import CacheBlocks
from vattn.generation.detokenizer import TextStream
from vattn.generation.request import Request
from vattn.generation.scheduler import Scheduler

pytest.importorskip("transformers")

from tests.generation.generator_support import (
    GREEDY,
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


@pytest.mark.parametrize(("budget", "reuse"), [(7, True), (64, False), (512, True)])
def test_tokens_equal_one_by_one(packed: PackedModel, expected: list[list[int]], budget: int, reuse: bool) -> None:
    generator = make_generator(packed, token_budget=budget, reuse_prefixes=reuse)
    done = generator.generate(PROMPTS, GREEDY)
    assert [request.output for request in done] == expected
    assert all(request.state == "finished" and request.reason == "length" for request in done)
    check_empty(generator)
    statistics = generator.statistics()
    assert statistics.generated_tokens == 12 * len(PROMPTS) and statistics.waiting == statistics.running == 0
    assert statistics.prompt_tokens + statistics.reused_tokens == sum(map(len, PROMPTS))
    assert len(statistics.first_token_seconds) == len(PROMPTS)


def test_prefixes_are_found_again(packed: PackedModel, expected: list[list[int]]) -> None:
    generator = make_generator(packed)
    first = generator.generate(PROMPTS[:1], GREEDY)[0]
    again, longer = generator.generate([PROMPTS[0], PROMPTS[0] + first.output], GREEDY)
    assert first.reused == 0 and again.reused == 32 and longer.reused == 48
    assert again.output == first.output == expected[0]
    whole = generator.generate([PROMPTS[0][:32]], GREEDY)[0]
    assert whole.reused == 16, "the last token is computed, since its logits are needed"
    assert generator.statistics().reused_tokens == 96
    check_empty(generator)


@pytest.mark.long
@pytest.mark.parametrize("hybrid", [False, True])
def test_blocks_of_other_weights_are_not_found(hybrid: bool) -> None:
    """Weights that are written between runs, as a trainer does, leave keys of the old ones in the cache."""
    # Tied embeddings of random weights repeat the last token, whatever the weights are.
    model = make_model("gemma2" if hybrid else "llama", tie_word_embeddings=False)
    packed = enable(model)
    packed.allocate(num_blocks=64, hybrid=hybrid)
    generator = make_generator(packed)
    before = generator.generate(PROMPTS[:1], GREEDY)[0].output
    assert generator.generate(PROMPTS[:1], GREEDY)[0].reused > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    got = generator.generate(PROMPTS[:2], GREEDY)
    assert [request.reused for request in got] == [0, 0]
    assert got[0].output == make_generator(packed).generate(PROMPTS[:1], GREEDY)[0].output != before
    generator = make_generator(packed)
    generator.generate(PROMPTS[:1], GREEDY)
    assert generator.generate(PROMPTS[:1], GREEDY)[0].reused > 0


def own_scales(model: Any) -> list[torch.Tensor]:
    layers = [module for module in model.modules() if getattr(module, "k_scale", None) is not None]
    return [scale for layer in layers for scale in (layer.k_scale, layer.v_scale)]


def test_blocks_of_other_cache_scales_are_not_found() -> None:
    """Scales written between runs give the codes of stored keys and values another meaning."""
    model = make_model("llama")
    config, scales = vattn.CacheConfig(cache_dtype="fp8"), vattn.QuantConfig(k_scale=0.1, v_scale=0.1)
    packed = enable(model, num_blocks=64, cache_config=config, quant_config=scales)
    generator = make_generator(packed)
    assert [generator.generate(PROMPTS[:1], GREEDY)[0].reused for _ in range(3)] == [0, 32, 32]
    for change in (lambda scale: scale.fill_(0.4), lambda scale: scale.copy_(torch.tensor([0.2]))):
        change(own_scales(model)[-1])
        got = generator.generate(PROMPTS[:2], GREEDY)
        assert [request.reused for request in got] == [0, 0]
        assert generator.generate(PROMPTS[:1], GREEDY)[0].reused == 32
        generator = make_generator(packed)
        assert got[0].output == generator.generate(PROMPTS[:1], GREEDY)[0].output
    layer = next(module for module in model.modules() if getattr(module, "k_scale", None) is not None)
    layer.k_scale = torch.full_like(layer.k_scale, 0.3)
    assert [generator.generate(PROMPTS[:1], GREEDY)[0].reused for _ in range(2)] == [0, 32]


def test_scales_that_layers_calculate_forget_nothing_until_they_change() -> None:
    """They are written in every step, with the same values: versions tell nothing of them."""
    model = make_model("llama")
    packed = enable(model, num_blocks=64, cache_config=vattn.CacheConfig(cache_dtype="fp8", calculate_kv_scales=True))
    generator = make_generator(packed)
    assert [generator.generate(PROMPTS[:1], GREEDY)[0].reused for _ in range(3)] == [0, 32, 32]
    own_scales(model)[0].mul_(2)
    assert [generator.generate(PROMPTS[:1], GREEDY)[0].reused for _ in range(2)] == [0, 32]
    for module in model.modules():
        if getattr(module, "scales_ready", None) is not None:
            module.scales_ready.zero_()
    assert [generator.generate(PROMPTS[:1], GREEDY)[0].reused for _ in range(2)] == [0, 32]


def test_other_families() -> None:
    for name in ("gemma2", "bloom"):
        want = [one_by_one(make_model(name), prompt, 6) for prompt in PROMPTS[:3]]
        generator = make_generator(enable(make_model(name), num_blocks=32), token_budget=20)
        done = generator.generate(PROMPTS[:3], vattn.Sampling(max_new_tokens=6, stop_token_ids=()))
        assert [request.output for request in done] == want


def test_sampling_depends_on_the_seed_and_on_no_neighbour(packed: PackedModel) -> None:
    def sampling(seed: int, **changes: Any) -> vattn.Sampling:
        return vattn.Sampling(10, temperature=1.5, seed=seed, stop_token_ids=(), **changes)

    kinds = [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.4}]
    for changes in kinds:
        alone = make_generator(packed).generate([PROMPTS[1]], sampling(3, **changes))[0].output
        wanted = [sampling(3, **changes), sampling(4, **changes), sampling(3, **changes), GREEDY]
        together = make_generator(packed).generate([PROMPTS[1], PROMPTS[1], PROMPTS[1], PROMPTS[0]], wanted)
        assert together[0].output == together[2].output == alone != together[1].output


def test_samples_follow_the_models_chances(packed: PackedModel) -> None:
    """Counts of 600 draws among the three likeliest tokens: 5 standard deviations."""
    model = make_model("llama")
    with torch.no_grad():
        chances = (model(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1] / 3).softmax(-1)
    top = chances.topk(3)
    wanted = top.values / top.values.sum()
    samplings = [vattn.Sampling(1, temperature=3.0, top_k=3, seed=seed, stop_token_ids=()) for seed in range(600)]
    done = make_generator(packed, max_num_reqs=64).generate([PROMPTS[1]] * 600, samplings)
    drawn = torch.tensor([request.output[0] for request in done])
    assert set(drawn.tolist()) <= set(top.indices.tolist())
    for token, chance in zip(top.indices, wanted, strict=True):
        spread = (chance * (1 - chance) / 600) ** 0.5
        assert abs((drawn == token).float().mean() - chance) < 5 * spread


def test_a_repetition_penalty_is_that_of_transformers(packed: PackedModel) -> None:
    model = make_model("llama")
    want = model.generate(
        torch.tensor([PROMPTS[2]]), max_new_tokens=10, do_sample=False, repetition_penalty=1.7, eos_token_id=None
    )[0, len(PROMPTS[2]) :]
    sampling = vattn.Sampling(10, repetition_penalty=1.7, stop_token_ids=())
    assert make_generator(packed).generate([PROMPTS[2]], sampling)[0].output == want.tolist()


def test_processors_and_criteria_of_the_user(packed: PackedModel) -> None:
    def never_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -torch.inf
        return scores

    sampling = vattn.Sampling(
        10, stop_token_ids=(), logits_processors=(never_even,),
        stopping_criteria=(lambda ids, scores: ids.shape[1] >= len(PROMPTS[1]) + 4,),
    )  # fmt: skip
    request = make_generator(packed).generate([PROMPTS[1]], sampling)[0]
    assert request.reason == "stopping criterion" and len(request.output) == 4
    assert all(token % 2 for token in request.output)


def test_stop_tokens_and_strings(packed: PackedModel, expected: list[list[int]]) -> None:
    tokenizer = Characters()
    stop = expected[0][5]
    at = expected[0].index(stop)
    generator = make_generator(packed, tokenizer=tokenizer, stop_token_ids=[stop])
    ended = generator.generate([PROMPTS[0]])[0]
    assert (ended.reason, ended.output) == ("stop token", expected[0][:at])
    assert ended.text == tokenizer.decode(expected[0][:at])
    text = tokenizer.decode(expected[0])
    # Streams hold back what may become a stop string.
    for cut, end in ((text[4:7], text.index(text[4:7])), (text[4:6] + "no", 12), (text[-2:] + "x", 12)):
        sampling = vattn.Sampling(12, stop_token_ids=(), stop_strings=("zzzz", cut))
        streamed = list(generator.stream([tokenizer.decode(PROMPTS[0])], sampling))
        request = streamed[-1].request
        assert request.reason == ("length" if end == 12 else "stop string") and request.text == text[:end]
        assert "".join(part.text for part in streamed) == request.text
    check_empty(generator)


def test_text_is_streamed_in_whole_characters() -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    ids = list("naïve ☃ 漢字!".encode())
    stream = TextStream(Bytes())
    shown = [stream.push(ids[: count + 1], last=count + 1 == len(ids)) for count in range(len(ids))]
    assert "".join(shown) == "naïve ☃ 漢字!" and "\ufffd" not in "".join(shown)
    assert stream.push([*ids, 0xE2], last=True) == "\ufffd"


def test_the_scheduler_keeps_to_its_budget() -> None:
    layer = vattn.Attention(1, 16, 0.25, cache_config=vattn.CacheConfig(block_size=8))
    cache = vattn.allocate_kv_cache(layer, num_blocks=10, dtype=torch.float32)
    blocks = CacheBlocks(cache, max_num_reqs=2, max_seq_len=80, reuse=True)
    scheduler = Scheduler(blocks, max_num_reqs=2, token_budget=16, max_seq_len=80)
    with pytest.raises(errors.OutOfBlocksError, match=r"70 \+ 4 tokens needs 10 blocks.*up to 9"):
        scheduler.add(Request([1] * 70, vattn.Sampling(4)))
    for length in (20, 5, 3):
        scheduler.add(Request([length] * length, vattn.Sampling(2)))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.starts, first.ends, first.ready) == ([0], [16], 0)
    assert (second.starts, second.ends, second.ready) == ([16, 0], [20, 5], 2)
    assert len(scheduler.waiting) == 1
    assert blocks.rows(second.requests, 20).tolist() == [[1, 2, 3], [4, 0, 0]]


def test_requests_that_can_never_fit_and_full_queues(packed: PackedModel) -> None:
    small = make_generator(enable(make_model("llama"), num_blocks=4), max_queue=2)
    with pytest.raises(errors.RequestError, match=r"60 tokens and 12 new ones.*48 tokens together"):
        small.add(list(range(60)), GREEDY)
    for _ in range(2):
        small.add([1, 2], GREEDY)
    with pytest.raises(errors.QueueFullError, match="2 requests wait"):
        small.add([1, 2], GREEDY)
    run_to_end(small)


def test_cancelling_in_every_state(packed: PackedModel, expected: list[list[int]]) -> None:
    generator = make_generator(packed, max_num_reqs=2, token_budget=16)
    requests = [generator.add(prompt, GREEDY) for prompt in PROMPTS]
    generator.cancel(requests[-1])
    generator.step()
    assert requests[0].state == "running" and 0 < requests[0].cached < len(PROMPTS[0])
    generator.cancel(requests[0])
    while not requests[1].output:
        generator.step()
    generator.cancel(requests[1])
    run_to_end(generator)
    generator.cancel(requests[2])
    states = [request.state for request in requests]
    assert states == ["cancelled", "cancelled", "finished", "finished", "finished", "cancelled"]
    assert [r.output for r in requests[2:5]] == expected[2:5]
    with pytest.raises(errors.RequestError, match="cancelled"):
        requests[0].result()


def test_a_client_that_goes_away_in_the_stream(packed: PackedModel) -> None:
    generator = make_generator(packed)
    stream = generator.stream(PROMPTS, GREEDY)
    first = next(stream).request
    stream.close()
    assert first.state == "cancelled"
    check_empty(generator)
    del stream
    generator.stream(PROMPTS, GREEDY)
    assert not generator.busy, "the iteration has not begun"


def test_a_model_that_raises_can_be_run_again(packed: PackedModel, expected: list[list[int]]) -> None:
    faulty = Faulty(packed)
    generator = make_generator(faulty)
    requests = [generator.add(prompt, GREEDY) for prompt in PROMPTS]
    faulty.raise_in, faulty.bad = 6, -1
    with pytest.raises(ZeroDivisionError):
        run_to_end(generator)
    assert {request.state for request in requests} <= {"waiting", "finished"}, requests
    run_to_end(generator)
    assert [request.output for request in requests] == expected


def test_logits_that_are_not_finite_fail_their_request_alone(packed: PackedModel, expected: list[list[int]]) -> None:
    generator = make_generator(Faulty(packed))
    sampled = vattn.Sampling(5, temperature=1.0, stop_token_ids=())
    done = generator.generate([PROMPTS[0], PROMPTS[1], PROMPTS[1], [9, 8]], [GREEDY, GREEDY, sampled, sampled])
    assert [request.state for request in done] == ["finished", "failed", "failed", "finished"]
    assert done[0].output == expected[0] and "not finite" in str(done[1].error)
    check_empty(generator)
