"""Time a draft model, and sampling, on a model of the shape of Llama 3 8B with random weights.

    python -m benchmarks.models.draft_model [--json PATH] [--acceptance 0.7] [--drafts 3 4 6] [--small]

One request decodes plainly, and then with a draft model of under a twentieth of the target's bytes. Random models do
not agree, so that a coin with a seed decides whether a draft counts as right; all else is what a generator does. Then
many requests decode with each kind of sampling, and the sampler is timed alone on random logits.
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import torch

import vattn
from benchmarks.harness import add_row, machine, parser_of
from benchmarks.models.llama import LARGE, SMALL, make_model, synchronise, weight_bytes
from vattn.generation.logprobs import compute_logprobs
from vattn.generation.request import Request
from vattn.generation.sampler import Sampler, SamplingMetadata
from vattn.integrations.transformers import enable

DRAFT = {
    **LARGE, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 12,
    "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
SMALL_DRAFT = {**SMALL, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5},
}


class Coins(vattn.Generator):
    """A generator whose drafts are right as often as it is told."""

    share, coins = 0.7, random.Random(0)

    def _count_right(self, drafts: list[int], chosen: list[int]) -> int:
        return next((i for i in range(len(drafts)) if self.coins.random() >= self.share), len(drafts))


def decode(generator: vattn.Generator, count: int, context: int, sampling: vattn.Sampling, skip: int = 8) -> Any:
    """Return milliseconds per token of a request, and of a step, of some requests after their first steps."""
    rng, device = random.Random(count), generator.device.type
    vocabulary: Any = generator.model.vocab_size
    requests = [generator.add([rng.randrange(vocabulary) for _ in range(context)], sampling) for _ in range(count)]
    while generator.scheduler.waiting or any(len(request.output) < skip for request in requests):
        generator.step()
    synchronise(device)
    begin, steps = time.perf_counter(), generator.statistics().steps
    before = sum(len(request.output) for request in requests)
    drafted, device_seconds = generator.statistics().draft_seconds, generator.statistics().device_seconds
    # The last steps plan nothing ahead.
    while all(len(request.output) + 12 < sampling.max_new_tokens for request in requests):
        generator.step()
    synchronise(device)
    seconds, now = time.perf_counter() - begin, dataclasses.replace(generator.statistics())
    tokens, steps = sum(len(request.output) for request in requests) - before, now.steps - steps
    while generator.busy:
        generator.step()
    return {
        "token_ms": round(seconds / tokens * count * 1e3, 4),
        "step_ms": round(seconds / steps * 1e3, 4),
        "device_step_ms": round((now.device_seconds - device_seconds) / steps * 1e3, 4),
        "draft_step_ms": round((now.draft_seconds - drafted) / steps * 1e3, 4),
        "tokens_per_step": round(tokens / steps / count, 3),
    }


def time_sampler(count: int, vocabulary: int, device: str, kind: dict[str, Any], spread: float) -> float:
    """Return microseconds of the sampler alone on logits of a standard deviation, the median of some calls."""
    logits = torch.randn(count, vocabulary, device=device).mul_(spread).bfloat16()
    requests = [Request([1, 2], vattn.Sampling(seed=seed, **kind)) for seed in range(count)]
    sampled = [row for row in range(count) if not requests[row].greedy]
    settings = SamplingMetadata.of(requests, sampled, logits) if sampled else None
    sampler, times = Sampler(count), list[float]()

    def choose() -> None:
        tokens = sampler.choose(logits, requests, [2] * count, settings).tokens
        if "logprobs" in kind:
            compute_logprobs(logits, tokens, requests, range(count), [])

    for _ in range(12):
        synchronise(device)
        if device == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            # The device is busy while the host launches.
            torch.cuda._sleep(2_000_000)
            events[0].record()
            choose()
            events[1].record()
            torch.cuda.synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e3)
        else:
            begin = time.perf_counter()
            choose()
            times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)[len(times) // 2]


def main() -> None:
    """Measure."""
    parser = parser_of(__doc__)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--drafts", type=int, nargs="*", default=[3, 4, 6])
    parser.add_argument("--requests", type=int, default=256, help="that are sampled")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result, shape = machine(device), SMALL if args.small else LARGE
    count, context = (8, 16) if args.small else (args.requests, 64)
    for one in (1, count):
        for name, kind in KINDS.items():
            # Those of random weights vary by less than those of a trained model.
            for spread in (4.0, 1.2):
                row = {"what": "sampler alone", "requests": one, "sampling": name, "spread": spread}
                us = time_sampler(one, shape["vocab_size"], device, kind, spread)
                add_row(result, row | {"us": round(us, 1)}, args.json)
    target = enable(
        make_model(shape, None, device), memory="64MiB" if args.small else "8GiB", merge_projections=True, prove=False
    )
    draft = enable(make_model(SMALL_DRAFT if args.small else DRAFT, None, device), merge_projections=True, prove=False)
    share = weight_bytes(draft) / weight_bytes(target)
    graphs = {"graph_sizes": [1, count] if device == "cuda" else (), "mixed_graph_sizes": ()}
    options: dict[str, Any] = {"max_num_reqs": count, "max_seq_len": 512, "token_budget": 2048, **graphs}
    generator = vattn.Generator(target, **options)
    one = vattn.Sampling(48 if args.small else 160, stop_token_ids=())
    plain = decode(generator, 1, 2 * context, one)
    add_row(result, {"what": "plain", "requests": 1, **plain}, args.json)
    for name, kind in (*KINDS.items(), ("greedy", {})):
        sampling = vattn.Sampling(44, seed=5, stop_token_ids=(), **kind)
        row = {"what": "steps", "requests": count, "sampling": name}
        add_row(result, row | decode(generator, count, context, sampling), args.json)
    Coins.share, long = args.acceptance, vattn.Sampling(48 if args.small else 380, stop_token_ids=())
    options |= {"graph_sizes": [1] if device == "cuda" else (), "max_num_reqs": 2}
    for drafts in args.drafts:
        coins = Coins(target, speculation=vattn.DraftModel(draft, drafts), **options)
        found = decode(coins, 1, 2 * context, long)
        row = {"what": "draft model", "requests": 1, "drafts": drafts, "share_of_bytes": round(share, 4), **found}
        row |= {"acceptance": round(coins.statistics().acceptance, 3)}
        add_row(result, row | {"times_plain": round(plain["token_ms"] / found["token_ms"], 3)}, args.json)
    generator = vattn.Generator(target, **options)
    add_row(result, {"what": "plain again", "requests": 1, **decode(generator, 1, 2 * context, one)}, args.json)


if __name__ == "__main__":
    main()
