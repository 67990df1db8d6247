"""Time a draft model, and sampling, on a model of the shape of Llama 3 8B with random weights.

    python -m benchmarks.models.draft_model [--json PATH] [--acceptance 0.7] [--drafts 3 4 6] [--parts sampler drafts]
        [--small]

One request decodes plainly, then with a draft model of under a twentieth of the target's bytes, then with a head of
EAGLE-3 of random weights, whose drafts follow each other or branch. Random models do not agree, so that a coin with a
seed decides whether a draft counts as right; all else is what a generator does. Where the likeliest token is wrong, the
second one of a tree is right with `SECOND`, and then the third one with `THIRD`. Many requests decode with each kind of
sampling, and the sampler is timed alone on random logits.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
import time
from pathlib import Path
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
SMALL_TARGET = {**SMALL, "num_hidden_layers": 6}
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


SECOND, THIRD = 0.4, 0.25
TREES: dict[str, Any] = {
    "4 in a row": None,
    "tree of 8": [(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0), (0, 0, 0, 1)],
    "tree of 12": [(*[0] * depth, child) for depth in range(4) for child in range(3)],
}


class Coins(vattn.Generator):
    """A generator whose drafts are right as often as it is told."""

    share, coins = 0.7, random.Random(0)

    def _right(self, batch: Any, drafts: list[int], chosen: list[int]) -> list[int]:
        paths = [(0,) * depth for depth in range(1, 1 + len(drafts))]
        if batch.tree is not None:
            paths = list(batch.tree.paths)
        places: dict[tuple[int, ...], int] = {tuple(path): row for row, path in enumerate(paths, 1)}
        rows, path = list[int](), tuple[int, ...]()
        while True:
            right = (self.coins.random() < share for share in (self.share, SECOND, THIRD))
            child = next((child for child, hit in enumerate(right) if hit), None)
            if child is None or (path := (*path, child)) not in places:
                return rows
            rows.append(places[path])


def write_head(folder: str, shape: dict[str, int], device: str) -> str:
    """Write a head of EAGLE-3 with random weights for a model of that shape, with a vocabulary of a quarter."""
    from safetensors.torch import save_file

    hidden, middle, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    small, kv = shape["vocab_size"] // 4, shape["num_key_value_heads"] * hidden // heads
    shapes = {"self_attn.q_proj": (hidden, 2 * hidden), "self_attn.k_proj": (kv, 2 * hidden)}
    shapes |= {"self_attn.v_proj": (kv, 2 * hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden), "mlp.down_proj": (hidden, middle)}
    shapes = {f"midlayer.{name}.weight": size for name, size in shapes.items()}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (small, hidden)}
    weights = {name: torch.randn(size, dtype=torch.bfloat16, device=device) * 0.02 for name, size in shapes.items()}
    norms = [f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    weights |= {name: torch.ones(hidden, dtype=torch.bfloat16) for name in (*norms, "norm.weight")}
    weights["d2t"] = torch.arange(small) * 3
    save_file(weights, Path(folder) / "model.safetensors")
    config = {**shape, "num_hidden_layers": 1, "draft_vocab_size": small, "rms_norm_eps": 1e-5, "model_type": "llama"}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


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


def time_samplers(args: Any, result: Any, vocabulary: int, count: int, device: str) -> None:
    """Time the sampler alone, with the same spread before and after."""
    for one in (1, count):
        for name, kind in KINDS.items():
            # Those of random weights vary by less than those of a trained model.
            for spread in (4.0, 1.2):
                row = {"what": "sampler alone", "requests": one, "sampling": name, "spread": spread}
                us = time_sampler(one, vocabulary, device, kind, spread)
                add_row(result, row | {"us": round(us, 1)}, args.json)


def main() -> None:
    """Measure."""
    parser = parser_of(__doc__)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--drafts", type=int, nargs="*", default=[3, 4, 6])
    parser.add_argument("--requests", type=int, default=256, help="that are sampled")
    parser.add_argument("--parts", nargs="*", default=["sampler", "sampling", "drafts", "heads"])
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result, shape = machine(device), SMALL_TARGET if args.small else LARGE
    count, context = (8, 16) if args.small else (args.requests, 64)
    if "sampler" in args.parts:
        time_samplers(args, result, shape["vocab_size"], count, device)
    target = enable(
        make_model(shape, None, device), memory="64MiB" if args.small else "8GiB", merge_projections=True, prove=False
    )
    sizes = [1, count] if "sampling" in args.parts else [1]
    graphs = {"graph_sizes": sizes if device == "cuda" else (), "mixed_graph_sizes": ()}
    options: dict[str, Any] = {"max_num_reqs": max(2, *sizes), "max_seq_len": 512, "token_budget": 2048, **graphs}
    generator = vattn.Generator(target, **options)
    one = vattn.Sampling(48 if args.small else 160, stop_token_ids=())
    plain = decode(generator, 1, 2 * context, one)
    add_row(result, {"what": "plain", "requests": 1, **plain}, args.json)
    for name, kind in (*KINDS.items(), ("greedy", {})) if "sampling" in args.parts else ():
        sampling = vattn.Sampling(44, seed=5, stop_token_ids=(), **kind)
        row = {"what": "steps", "requests": count, "sampling": name}
        add_row(result, row | decode(generator, count, context, sampling), args.json)
    Coins.share, long = args.acceptance, vattn.Sampling(48 if args.small else 380, stop_token_ids=())
    options |= {"graph_sizes": [1] if device == "cuda" else (), "max_num_reqs": 2}

    def time_drafts(row: dict[str, Any], source: Any) -> None:
        Coins.coins = random.Random(0)
        coins = Coins(target, speculation=source, **options)
        found = decode(coins, 1, 2 * context, long)
        row |= {"requests": 1, **found, "acceptance": round(coins.statistics().acceptance, 3)}
        add_row(result, row | {"times_plain": round(plain["token_ms"] / found["token_ms"], 3)}, args.json)

    if "drafts" in args.parts:
        shape_of_draft = SMALL_DRAFT if args.small else DRAFT
        draft = enable(make_model(shape_of_draft, None, device), merge_projections=True, prove=False)
        share = weight_bytes(draft) / weight_bytes(target)
        for drafts in args.drafts:
            row = {"what": "draft model", "drafts": drafts, "share_of_bytes": round(share, 4)}
            time_drafts(row, vattn.DraftModel(draft, drafts))
    if "heads" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            write_head(folder, shape, device)
            for name, tree in TREES.items():
                time_drafts({"what": "EAGLE-3 head", "drafts": name}, vattn.EagleDraft(folder, tree=tree))
    generator = vattn.Generator(target, **options)
    add_row(result, {"what": "plain again", "requests": 1, **decode(generator, 1, 2 * context, one)}, args.json)


if __name__ == "__main__":
    main()
