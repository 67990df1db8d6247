"""Steps that follow a step of the same decodes: everything is as if each had been planned."""

from __future__ import annotations

from typing import Any

import pytest

import vattn

pytest.importorskip("transformers")

from tests.generation.generator_support import PROMPTS, Characters, Faulty, check_empty, make_generator
from vattn.integrations.transformers import PackedModel

EVENTS = ["stop token", "not finite", "model raises", "cancel", "arrival", "few blocks", "text", "sampled"]


def run(packed: PackedModel, event: str, follow: bool, bad: int = -1) -> tuple[list[Any], int]:
    """Return what became of some requests, and how many steps followed another."""
    packed.allocate(num_blocks=10 if event == "few blocks" else 64)
    faulty = Faulty(packed)
    faulty.bad = bad
    options: dict[str, Any] = {"max_num_reqs": 4, "token_budget": 96, "max_seq_len": 96}
    generator = make_generator(faulty, tokenizer=Characters() if event == "text" else None, **options)
    followed = []
    plan = generator.scheduler.follow

    def watched(before: Any) -> Any:
        batch = plan(before) if follow else None
        followed.append(batch is not None)
        return batch

    generator.scheduler.follow = watched  # type: ignore[method-assign]
    sampling: dict[str, Any] = {"stop_token_ids": (), "temperature": 0.8 if event == "sampled" else 0.0, "seed": 5}
    counts = [7, 12, 20, 20] if event in ("text", "sampled") else [20] * 4
    requests = [
        generator.add(prompt, vattn.Sampling(count, **sampling))
        for prompt, count in zip(PROMPTS[:4], counts, strict=True)
    ]
    seen, raised = [], 0
    while generator.busy:
        steps = generator.statistics().steps
        if event == "stop token" and steps == 6:
            # Whatever comes in the step after next ends the second request.
            requests[1].stop_token_ids = frozenset(range(96))
            generator.scheduler._changes += 1
        if event == "model raises" and steps == 10 and not raised:
            faulty.raise_in = raised = 1
        if event == "cancel" and steps == 9:
            generator.cancel(requests[0])
        if event == "arrival" and steps == 9:
            generator.cancel(requests[3])
            requests.append(generator.add(PROMPTS[4], vattn.Sampling(9, **sampling)))
        try:
            progress = generator.step()
        except ZeroDivisionError:
            continue
        seen.append([(requests.index(one.request), one.text, one.tokens) for one in progress])
        assert all(0 <= r.cached <= r.num_tokens for r in generator.scheduler.running)
    check_empty(generator)
    now = generator.statistics()
    totals = now.steps, now.generated_tokens, now.prompt_tokens, now.preemptions
    return [seen, totals, [(r.state, r.reason, r.output, r.text, r.accepted) for r in requests]], sum(followed)


@pytest.mark.parametrize("event", EVENTS)
def test_following_steps_change_nothing(packed: PackedModel, long_expected: list[list[int]], event: str) -> None:
    # Rows after this token have NaN among their logits.
    bad = long_expected[2][12] if event == "not finite" else -1
    expected, none = run(packed, event, follow=False, bad=bad)
    got, followed = run(packed, event, follow=True, bad=bad)
    assert got == expected and none == 0
    assert followed >= (4 if event == "few blocks" else 8), "most steps follow"
    states = {state for state, *_ in got[-1]}
    ends = {
        "cancel": {"finished", "cancelled"},
        "arrival": {"finished", "cancelled"},
        "not finite": {"finished", "failed"},
    }
    assert states == ends.get(event, {"finished"})
