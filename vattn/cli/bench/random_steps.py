"""Random rows of a benchmark: published layers times random steps, the same ones for the same seed."""

from __future__ import annotations

import math
import random

from vattn.cli.bench.published import PUBLISHED
from vattn.cli.bench.shapes import LayerShape, Work

KINDS = ("decode", "prefill", "mixed")
"""One row in three each, half of them over a bf16 cache and half over an FP8 one."""

MOST_CACHE_BYTES, MOST_OPERATIONS = 3 << 30, 4e12
"""Of one step: a few milliseconds of a large GPU at most."""

Requests = list[tuple[int, int]]


def draw(count: int, seed: int) -> list[tuple[LayerShape, Work, str]]:
    """Return `count` rows: a layer, a step and a cache format each.

    A step is named after its kind, its place in the draw, and the lengths of its requests.
    """
    rng = random.Random(seed)
    rows = []
    for place in range(count):
        kind, cache = KINDS[place % 3], ("bf16", "fp8")[place // 3 % 2]
        layer = rng.choice(PUBLISHED)
        requests = _fitting(layer, _STEPS[kind](rng), 1 if cache == "fp8" else 2)
        rows.append((layer, Work(f"{kind} #{place}: {_lengths(requests)}", tuple(requests)), cache))
    return rows


def _between(rng: random.Random, low: int, high: int) -> int:
    """Return a number in `low..high`, small and large ones alike: uniform in its logarithm."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def _spread(rng: random.Random, count: int, low: int, high: int) -> list[int]:
    """Return lengths of so many requests: in half of the steps all equal, in the others in one range."""
    ends = sorted(_between(rng, low, high) for _ in range(2))
    if rng.random() < 0.5:
        return [ends[1]] * count
    return [rng.randint(*ends) for _ in range(count)]


def _decode(rng: random.Random) -> Requests:
    count = _between(rng, 1, 256)
    return [(1, keys) for keys in _spread(rng, count, 16, 131072)]


def _prefill(rng: random.Random) -> Requests:
    """Return prompts, or in half of the steps chunks of them behind what is cached."""
    count = _between(rng, 1, 32)
    new = _spread(rng, count, 8, 8192)
    cached = _spread(rng, count, 16, 65536) if rng.random() < 0.5 else [0] * count
    return [(rows, rows + before) for rows, before in zip(new, cached, strict=True)]


def _mixed(rng: random.Random) -> Requests:
    """Return drafts of one length, or running requests with and without drafts beside a few prompts or chunks."""
    count = _between(rng, 1, 200)
    cached = _spread(rng, count, 16, 32768)
    if rng.random() < 0.5:
        drafts = rng.randint(1, 7)
        return [(1 + drafts, before + 1 + drafts) for before in cached]
    most = rng.randint(0, 7)
    running = [(rows, before + rows) for before in cached for rows in [1 + rng.randint(0, most)]]
    prompts = _prefill(rng)[: rng.randint(1, 4)]
    return [*running, *prompts] if rng.random() < 0.5 else [*prompts, *running]


_STEPS = {"decode": _decode, "prefill": _prefill, "mixed": _mixed}


def _fitting(layer: LayerShape, requests: Requests, item_size: int) -> Requests:
    """Return requests without the last ones, or shorter ones, until the step is small enough to be timed."""
    while True:
        keys = sum(length for _, length in requests)
        pairs = sum(rows * length for rows, length in requests)
        cache = 2 * keys * layer.kv_heads * layer.head_size * item_size
        if cache <= MOST_CACHE_BYTES and 4 * pairs * layer.heads * layer.head_size <= MOST_OPERATIONS:
            return requests
        if len(requests) > 1:
            requests = requests[: -(-len(requests) // 2)]
        else:
            [(rows, length)] = requests
            requests = [(max(1, rows // 2), max(max(1, rows // 2), length // 2))]


def _lengths(requests: Requests) -> str:
    """Return the numbers of a step in a few words, new tokens of all keys."""

    def span(values: list[int]) -> str:
        low, high = min(values), max(values)
        return f"{low}" if low == high else f"{low}-{high}"

    new, keys = (list(column) for column in zip(*requests, strict=True))
    of = "" if new == keys else f" of {span(keys)}"
    return f"{len(requests)} x {span(new)}{of}"
