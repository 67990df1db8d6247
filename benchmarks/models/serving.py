"""Run many requests through a generator and say what their time went to: `llama --serve` calls it."""

from __future__ import annotations

import copy
import random
import statistics
import time
from typing import Any

import torch

import vattn
from benchmarks.compile.compilations import watch_compilations
from benchmarks.kernels import print_kernels
from vattn.generation.statistics import Statistics
from vattn.integrations.transformers import PackedModel


def serve(
    packed: PackedModel, lengths: list[int], new: int, graph_sizes: Any, options: dict[str, Any], profile: bool = False
) -> dict[str, Any]:
    """Run requests to their end, behind as many of the same lengths, which have everything compiled.

    Args:
        packed: a model with a cache.
        lengths: of the prompts.
        new: tokens for each.
        graph_sizes, options: of the generator.
        profile: list the kernels of a step of prompts.

    Returns:
        Tokens a second; steps that hold prompts and steps that do not, apart; what the host computed in a decode step,
        and which share of the time the device waited for it (`idle_share`: of all steps, of decode steps).
        `compiled_inside` names what was compiled or loaded in the timed part: such a run is no measure.
    """
    rng, vocabulary = random.Random(0), packed.model.config.vocab_size
    generator = vattn.Generator(packed, max_num_reqs=len(lengths), graph_sizes=graph_sizes, **options)

    def add(length: int, count: int) -> vattn.Request:
        prompt = [rng.randrange(vocabulary) for _ in range(length)]
        return generator.add(prompt, vattn.Sampling(count, stop_token_ids=()))

    # Steps go by lengths alone: these are of the sizes that the timed ones will be, preemptions included.
    for length in lengths:
        add(length, new)
    rehearsal = time.perf_counter()
    while generator.busy:
        generator.step()
    rehearsal = time.perf_counter() - rehearsal
    if profile and torch.cuda.is_available():
        _profile(generator, add, lengths)
    before = copy.copy(generator.statistics())
    requests = [add(length, new) for length in lengths]
    with watch_compilations() as compiled:
        begin = time.perf_counter()
        steps, waste = _timed(generator, packed.kv_cache.block_size)
        seconds = time.perf_counter() - begin
    count = generator.statistics()
    if any(request.state != "finished" for request in requests):
        raise RuntimeError(f"requests that did not finish: {[r for r in requests if r.state != 'finished']}")
    prompts, decodes = [s for s in steps if s[3]], [s for s in steps[:-1] if not s[3]]
    return {
        "requests": len(lengths), "prompt": [min(lengths), max(lengths)], "new": new, "seconds": seconds,
        "tokens_per_second": len(lengths) * new / seconds, "steps": len(steps),
        "prompt_steps": len(prompts), "prompt_seconds": sum(s[0] for s in prompts),
        "prompt_tokens_per_second": sum(s[3] for s in prompts) / max(1e-9, sum(s[0] for s in prompts)),
        "longest_step_seconds": max(s[0] for s in steps),
        "decode_ms": _median(decodes, 0) * 1e3, "decode_device_ms": _median(decodes, 1) * 1e3,
        "decode_host_us": _median(decodes, 2) * 1e6,
        "idle_share": [_idle(steps), _idle(decodes)],
        "preemptions": count.preemptions - before.preemptions, "waste": waste,
        "first_token_seconds": statistics.median(count.first_token_seconds[len(before.first_token_seconds) :]),
        "rehearsal_seconds": rehearsal, "compiled_inside": compiled,
    }  # fmt: skip


def check_compiled(rows: list[dict[str, Any]]) -> None:
    """Raise RuntimeError where the timed part of a run compiled something: its times are no measure."""
    late = [
        f"{row['requests']} requests: {'; '.join(row['compiled_inside'])}" for row in rows if row["compiled_inside"]
    ]
    if late:
        raise RuntimeError("compiled inside of the timed part, " + ", ".join(late))


def _timed(generator: vattn.Generator, block_size: int) -> tuple[list[list[float]], float]:
    """Run everything that waits; return seconds of each step (wall, device, host), its prompt tokens, and the waste."""
    count = generator.statistics()
    waste, steps = 0.0, []
    while generator.busy:
        before = _times(count)
        generator.step()
        steps.append([now - then for now, then in zip(_times(count), before, strict=True)])
        if len(steps) % 16 == 0:
            count = generator.statistics()
            waste = max(waste, count.wasted_tokens / max(1, count.used_blocks * block_size))
    return steps, waste


def _some(lengths: list[int], total: int) -> list[int]:
    """Return the first lengths, up to a sum."""
    taken: list[int] = []
    while len(taken) < len(lengths) and sum(taken) < total:
        taken.append(lengths[len(taken)])
    return taken


def _times(count: Statistics) -> tuple[float, float, float, int]:
    return count.seconds, count.device_seconds, count.host_seconds, count.prompt_tokens


def _median(steps: list[list[float]], column: int) -> float:
    return statistics.median(step[column] for step in steps) if steps else float("nan")


def _idle(steps: list[list[float]]) -> float:
    """Return the share of some steps in which the device had nothing to do."""
    return 1 - sum(step[1] for step in steps) / max(1e-9, sum(step[0] for step in steps))


def _profile(generator: vattn.Generator, add: Any, lengths: list[int]) -> None:
    """Print the kernels of a step full of prompts, by name."""
    for length in _some(lengths, 4 * generator.scheduler.token_budget):
        add(length, 1)
    print_kernels(generator.step, 24)
    while generator.busy:
        generator.step()
