"""The scheduler, alone and under a model whose cache remembers which prefix each of its slots belongs to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vattn
from tests.generation.generator_support import check_empty
from vattn import errors
from vattn.generation.batch import DecodeRun
from vattn.generation.cache_blocks import CacheBlocks
from vattn.generation.request import CANCELLED, FINISHED, Request, TokenLogprobs
from vattn.generation.scheduler import Scheduler
from vattn.metadata.forward_context import current_step

BLOCK, WINDOW = 4, 6


class Chains(nn.Module):
    """Stores with each token a digest of all tokens up to it, and chooses the next token by the digest of the last."""

    vocab_size = 6
    tokens = range(6)

    def __init__(self, num_blocks: int, hybrid: bool) -> None:
        super().__init__()
        config = vattn.CacheConfig(BLOCK)
        kinds: tuple[dict[str, Any], ...] = ({}, {"per_layer_sliding_window": WINDOW}) if hybrid else ({},)
        self.layers = nn.ModuleList(
            vattn.Attention(1, 16, 1.0, cache_config=config, prefix=str(i), **kind) for i, kind in enumerate(kinds)
        )
        self.kv_cache = vattn.allocate_kv_cache(self, num_blocks=num_blocks, dtype=torch.float32, hybrid=hybrid)
        self.eval()

    @staticmethod
    def digest(before: float, token: int) -> int:
        # Never 0, which an empty slot holds, and exact in float32.
        return (int(before) * 31 + token * 7919 + 17) % 1_000_003 + 1

    @classmethod
    def expected(cls, prompt: list[int], count: int) -> list[int]:
        digest, tokens = 0, list(prompt)
        for token in prompt:
            digest = cls.digest(digest, token)
        for _ in range(count):
            tokens.append(digest // 8 % cls.vocab_size)
            digest = cls.digest(digest, tokens[-1])
        return tokens[len(prompt) :]

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        step = current_step()
        assert step is not None
        stores = [layer.kv_cache[0, :, :, 0, 0] for layer in self.layers]
        tables = [part.block_table.tolist() for part in getattr(step, "parts", (step,))]
        starts, logits = step.query_start_loc.tolist(), torch.zeros(len(ids), self.vocab_size)
        for request, (begin, end) in enumerate(pairwise(starts)):
            length = int(step.seq_lens[request])
            for row, position in zip(range(begin, end), range(length - (end - begin), length), strict=True):
                assert int(positions[row]) == position
                held = [
                    [float(store[table[request][at // BLOCK], at % BLOCK]) for at in range(position)[first:]]
                    for store, table, first in zip(stores, tables, (0, -(WINDOW - 1)), strict=False)
                ]
                assert all(held[0][-len(window) :] == window for window in held[1:] if window)
                chain = pairwise([0, *held[0]])
                assert all(any(self.digest(one, token) == digest for token in self.tokens) for one, digest in chain)
                digest = self.digest(held[0][-1] if position else 0, int(ids[row]))
                for store, table in zip(stores, tables, strict=True):
                    store[table[request][position // BLOCK], position % BLOCK] = digest
                logits[row, digest // 8 % self.vocab_size] = 1
        return logits[rows]


def scheduler(num_blocks: int = 9, max_num_reqs: int = 2, budget: int = 8, **options: Any) -> Scheduler:
    cache = Chains(num_blocks, hybrid=False).kv_cache
    return Scheduler(CacheBlocks(cache, max_num_reqs, 32, reuse=False), max_num_reqs, budget, 32, **options)


def request(length: int, new: int = 8) -> Request:
    return Request([1 + i % 5 for i in range(length)], vattn.Sampling(new, stop_token_ids=()))


def give(requests: list[Request]) -> None:
    """Give requests the token that they have just computed."""
    for one in requests:
        one.output.append(3)
        one.uncached += 1


arrivals = st.tuples(
    st.sampled_from([0, 2]),
    st.integers(1, 14),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from(["run", "cancel"]),
)


@pytest.mark.parametrize("hybrid", [False, True])
@given(
    st.lists(arrivals, min_size=1, max_size=8), st.integers(1, 3), st.integers(3, 20), st.integers(8, 16),
    st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=25)
def test_every_request_sees_its_own_prefix_and_keeps_its_turn(
    hybrid: bool, traffic: Any, max_num_reqs: int, budget: int, num_blocks: int, speculate: bool, reuse: bool
) -> None:
    lookup = vattn.PromptLookup(shortest=1) if speculate else None
    generator = vattn.Generator(
        Chains(num_blocks, hybrid), max_num_reqs=max_num_reqs, token_budget=budget, speculation=lookup,
        reuse_prefixes=reuse,
    )  # fmt: skip
    plan, held, waiting = generator.scheduler, list[Request](), list(traffic)
    while waiting or generator.busy:
        while waiting and (waiting[0][3] <= 0 or not generator.busy):
            start, length, new, _, cancelled = waiting.pop(0)
            prompt = [(start + i * i) % 6 for i in range(length)]
            try:
                held.append(generator.add(prompt, vattn.Sampling(new, stop_token_ids=())))
            except (errors.OutOfBlocksError, errors.RequestError):
                assert length + new > plan.max_seq_len
                continue
            if cancelled:
                generator.cancel(held[-1])
        waiting = [(*waiting[0][:3], waiting[0][3] - 1, waiting[0][4]), *waiting[1:]] if waiting else []
        generator.step()
        plan.pool.check()
        order = [held.index(one) for one in (*plan.running, *plan.waiting)]
        # One that begins like another waits for that one's blocks, and others pass it.
        assert (reuse or order == sorted(order)) and len(plan.running) <= max_num_reqs
        assert plan.running or not plan.waiting or generator._ahead is None
    for one in held:
        if one.state != "cancelled":
            assert one.output == Chains.expected(one.prompt, one.sampling.max_new_tokens)
    check_empty(generator)


def test_a_run_of_decode_steps_ends_for_a_request_that_can_be_admitted() -> None:
    for rows, follows in ((2, False), (1, True)):
        plan = scheduler(max_num_reqs=rows)
        plan.add(request(1))
        batch = plan.follow(plan.schedule())
        assert batch is not None and (batch.offset, batch.positions()) == (1, [2])
        plan.add(request(1))
        assert (plan.follow(batch) is not None) == follows


def test_a_run_of_decode_steps_ends_with_its_requests() -> None:
    plan = scheduler()
    plan.add(request(1, new=3))
    first = plan.schedule()
    second = plan.follow(first)
    assert second is not None and plan.follow(second) is not None and plan.follow(second) is None

    for name in ("start_over", "cancel"):
        plan, one = scheduler(), request(1)
        plan.add(one)
        batch = plan.schedule()
        one.output += [5, 6]
        getattr(plan, name)({one: 1} if name == "start_over" else one)
        assert plan.follow(batch) is None and one.output == ([5] if name == "start_over" else [5, 6])


def test_a_step_keeps_to_its_budget_and_its_rows() -> None:
    plan = scheduler(budget=8, max_num_reqs=2)
    long, short, third = request(11), request(2), request(1)
    for one in (long, short, third):
        plan.add(one)
    batch = plan.schedule()
    assert (batch.requests, batch.starts, batch.ends, batch.ready, batch.run) == ([long], [0], [8], 0, None)
    batch = plan.schedule()
    assert (batch.requests, batch.starts, batch.ends, batch.ready) == ([long, short], [8, 0], [11, 2], 2)
    give([long, short])
    batch = plan.schedule()
    assert (batch.requests, batch.ends, list(plan.waiting)) == ([long, short], [12, 3], [third])
    assert batch.run is not None, "each request computes one token, and one waits without a row"


def test_the_youngest_gives_its_blocks_back_and_is_the_next_to_run() -> None:
    plan = scheduler(num_blocks=6, max_num_reqs=3, budget=32)
    first, second, third, fourth = requests = [request(8, 5), request(7, 5), request(4, 5), request(1)]
    for one in requests:
        plan.add(one)
    assert plan.schedule().requests == [first, second, third], "five blocks are taken, and there is no row for a fourth"
    give([first, second, third])
    batch = plan.schedule()
    assert batch.requests == [first, second] and list(plan.waiting) == [third, fourth]
    assert (plan.preemptions, third.preemptions, third.state) == (1, 1, "waiting")
    assert third.table is None and plan.pool.num_free == 0, "the block that it gave back is taken at once"
    plan.cancel(second)
    assert plan.schedule().requests == [third], "it comes first, and leaves no block"
    assert third.reused == 0 and third.output == [3]


def test_nothing_is_admitted_in_the_step_of_a_preemption() -> None:
    plan = scheduler(num_blocks=6, max_num_reqs=3, budget=32)
    first, second = request(8, 5), request(12, 5)
    plan.add(first)
    plan.add(second)
    plan.schedule()
    give([first, second])
    small = request(1, 5)
    plan.add(small)
    assert plan.schedule().requests == [first], "two blocks are free, and the request that lost its own comes first"
    assert list(plan.waiting) == [second, small] and plan.pool.num_free == 2


def test_a_request_that_lost_its_blocks_does_not_come_back_in_the_same_step() -> None:
    """With a small budget a part of it would fit, and take the blocks that the others need next."""
    plan = scheduler(num_blocks=6, budget=4)
    first, second = request(7, 9), request(12, 9)
    plan.add(first)
    plan.add(second)
    for _ in range(4):
        batch = plan.schedule()
        give(batch.requests[: batch.ready])
    assert (first.cached, second.cached, plan.pool.num_free) == (9, 7, 0)
    assert plan.schedule().requests == [first] and list(plan.waiting) == [second] and plan.preemptions == 1
    assert plan.pool.num_free == 2, "a chunk of it would fit"
    give([first])
    assert plan.schedule().requests == [first, second], "the next step admits it"


def test_its_own_blocks_are_no_prefix_of_another() -> None:
    """A request that finds what it had computed before it lost its blocks has reused nothing."""
    cache = Chains(9, hybrid=False).kv_cache
    plan = Scheduler(CacheBlocks(cache, 2, 32, reuse=True), 2, 8, 32)
    one, other = request(8), request(8)
    plan.add(one)
    plan.schedule()
    plan.blocks.publish(one, 8)
    give([one])
    plan.preempt(one)
    batch = plan.schedule()
    assert (batch.starts, batch.ends) == ([8], [9]), "it finds both of its blocks"
    assert one.reused == 0
    plan.add(other)
    plan.schedule()
    assert other.reused == 4, "another prompt finds the first, and computes its last block itself"


def test_drafts_end_with_the_request_the_budget_and_the_blocks() -> None:
    lookup = vattn.PromptLookup(num_drafts=4, shortest=1)
    for new, budget, blocks, drafts in ((8, 8, 9, 4), (3, 8, 9, 1), (2, 8, 9, 0), (8, 4, 9, 3), (8, 8, 4, 2)):
        plan = scheduler(num_blocks=blocks, budget=budget, source=lookup)
        one = Request([2] * 5, vattn.Sampling(new, stop_token_ids=()))
        for each in (request(1, 2), one):
            plan.add(each)
        while one.uncached:
            plan.schedule()
        one.output, one.uncached = [2], 1
        batch = plan.schedule()
        assert [len(each) for each in batch.drafts] == [drafts] * bool(drafts), (new, budget, blocks)
        assert batch.ends == [6 + drafts]


def test_what_no_cache_could_hold_is_refused_and_what_just_fits_is_not() -> None:
    plan = scheduler(num_blocks=5, max_queue=1)
    with pytest.raises(errors.OutOfBlocksError, match=r"10 \+ 8 tokens needs 5 blocks"):
        plan.add(request(10, 8))
    with pytest.raises(errors.RequestError, match="32 tokens together"):
        plan.add(request(25, 8))
    with pytest.raises(errors.RequestError, match="empty prompt"):
        plan.add(request(0))
    plan.add(request(9, 8))
    with pytest.raises(errors.QueueFullError, match="1 requests wait"):
        plan.add(request(1))
    assert len(plan.waiting) == 1


def test_a_run_reads_what_its_requests_say() -> None:
    plain, drawn, text = request(3), request(2), request(4)
    plain.plain = drawn.plain = True
    drawn.greedy, text.logprobs = False, []
    run = DecodeRun([plain, drawn], [4, 3], 0, BLOCK)
    assert run.plain() and run.plain() and run.sampled == [1] and not run.with_logprobs
    mixed = DecodeRun([plain, text], [4, 5], 0, BLOCK)
    assert not mixed.plain() and mixed.with_logprobs == [1]


def test_equal_prompts_wait_for_the_first_in_their_order() -> None:
    plan = Scheduler(CacheBlocks(Chains(20, hybrid=False).kv_cache, 6, 32, reuse=True), 6, 32, 32)
    first, second, third, other = requests = [request(9), request(9), request(9), Request([5] * 3, vattn.Sampling(2))]
    for one in requests:
        plan.add(one)
    assert plan.schedule().requests == [first, other], "the others find what the first computes"
    assert list(plan.waiting) == [second, third]
    plan.cancel(first)
    assert plan.schedule().requests[-1] is second and list(plan.waiting) == [third], "nobody waits for one that is gone"


def test_a_step_without_drafts_has_none() -> None:
    plan = scheduler(budget=8, source=vattn.PromptLookup(shortest=1))
    one = Request([1, 2] * 4 + [1], vattn.Sampling(8, stop_token_ids=()))
    plan.add(one)
    assert plan.schedule().drafts == []
    batch = plan.schedule()
    assert (batch.starts, batch.ends, batch.drafts) == ([8], [9], []), "the last token of a prompt drafts nothing"
    one.output, one.uncached = [2], 1
    assert [len(drafts) for drafts in plan.schedule().drafts] == [4]


def test_blocks_before_a_window_leave_the_tables() -> None:
    cache = Chains(20, hybrid=True).kv_cache
    blocks = CacheBlocks(cache, 2, 40, reuse=False)
    one = request(30)
    blocks.open(one)
    for _ in range(7):
        blocks.grow(one, BLOCK)
        one.cached += BLOCK
    blocks.grow(one, 1)
    gone = (28 - WINDOW + 1) // BLOCK
    full, window = (table[0].tolist() for table in blocks.rows([one], 29))
    assert all(full) and window[:gone] == [0] * gone and all(window[gone:])
    assert blocks.num_wasted([one]) == 4 + (8 - gone) * BLOCK - (28 - gone * BLOCK)


def test_rows_end_with_the_batch() -> None:
    blocks = scheduler(max_num_reqs=2).blocks
    held = [request(1), request(1)]
    for left, one in zip((1, 0), held, strict=True):
        blocks.open(one)
        assert blocks.num_free_rows == left
    assert {one.row for one in held} == {0, 1}


def test_the_best_choices_are_the_likeliest_for_each_token() -> None:
    sampling = vattn.Sampling(4, n=1, best_of=3, temperature=1.0)
    choices = tuple(Request([1], sampling, index=index) for index in range(3))
    for choice, logs in zip(choices, ([-1.0], [-0.5, -1.3], [-0.9] * 4), strict=True):
        choice.choices, choice.output = choices, [1] * len(logs)
        choice.logprobs = [TokenLogprobs(log, 1, {}) for log in logs]
    with pytest.raises(errors.RequestError, match="choices that have not ended"):
        _ = choices[0].best
    for choice, state in zip(choices, (FINISHED, FINISHED, CANCELLED), strict=True):
        choice.end(state, "length")
    assert choices[0].best == (choices[1],)
    assert len({choice.seed for choice in choices}) == 3


@pytest.mark.parametrize(("each", "left"), [(True, 20), (False, 0)])
def test_a_prefix_is_found_as_far_as_every_group_holds_what_its_window_reads(each: bool, left: int) -> None:
    blocks = CacheBlocks(Chains(30, hybrid=True).kv_cache, 2, 40, reuse=True)
    first, second = request(30), request(30)
    blocks.open(first)
    for _ in range(7):
        blocks.grow(first, BLOCK)
        first.cached += BLOCK
        if each or first.cached == 28:
            # Blocks that the window has left by then stay unknown.
            blocks.publish(first, first.cached)
    assert first.table is not None
    window = list(first.table.rows[1])
    blocks.close(first)
    blocks.open(second)
    gone = (28 - WINDOW + 1) // BLOCK
    assert second.cached == second.room == 28 and second.published == 7
    assert second.table is not None and second.table.rows[1] == [0] * gone + window[gone:]
    blocks.pool.forget([window[5]])
    blocks.close(second)
    blocks.open(second)
    assert second.cached == left


def test_a_measured_prompt_says_which_of_its_tokens_a_step_measures() -> None:
    plan, sampling = scheduler(budget=8), vattn.Sampling(4, prompt_logprobs=1)
    short, long = Request([1, 2, 3], sampling), Request([1] * 9, sampling)
    plan.add(short)
    plan.add(long)
    assert plan.schedule().prompt_logprobs == [(short, 1, 2), (long, 1, 5)]
    give([short])
    assert plan.schedule().prompt_logprobs == [(long, 6, 3)]
    assert Request([1], sampling).has_prompt_logprobs, "the first token has no probability"


def test_what_begins_alike_behind_a_known_prefix_waits_too() -> None:
    plan = Scheduler(CacheBlocks(Chains(20, hybrid=False).kv_cache, 4, 32, reuse=True), 4, 32, 32)
    before, first, second = request(5), request(13), request(13)
    plan.add(before)
    plan.schedule()
    plan.blocks.publish(before, 4)
    plan.cancel(before)
    plan.add(first, second)
    batch = plan.schedule()
    assert (batch.requests, batch.starts, list(plan.waiting)) == ([first], [4], [second])


def test_a_shorter_common_beginning_is_found() -> None:
    plan = Scheduler(CacheBlocks(Chains(20, hybrid=False).kv_cache, 4, 32, reuse=True), 4, 32, 32)
    before = request(13)
    other = Request(before.prompt[:6] + [5] * 6, vattn.Sampling(2))
    plan.add(before)
    plan.schedule()
    plan.blocks.publish(before, 12)
    plan.add(other)
    plan.schedule()
    assert other.reused == 4
