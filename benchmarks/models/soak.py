"""Run random traffic through generators for a while, and count what is wrong.

    nice -n 10 python -m benchmarks.models.soak --minutes 10

Requests arrive at random and end in every way: at their length, at stop strings, cancelled in any state, refused, with
logits that are not finite, with logits processors that raise, in steps in which the model raises. They are of several
tenants, each with a cache salt, and now and then the model gets another adapter (given peft). Small models alternate:
without and with groups in the cache, without and with guesses, on CUDA with graphs, where replays cannot raise.
Greedy requests that end at their length must have the tokens of one-by-one generation; where the two best logits
nearly tie, products of other shapes may part them. Wrong: another token, a request that ends in a way it cannot, a
block that two tenants hold, a block or row that is lost, memory that grows.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import random
import resource
import sys
import time
from typing import Any

import torch

import vattn
from benchmarks.harness import parser_of
from tests.generation.generator_support import Characters, Faulty
from tests.integrations.hf_families import make_model
from vattn import errors
from vattn.cache.block_pool import BlockTable
from vattn.integrations.transformers import PackedModel, enable

KINDS = ["run"] * 6 + ["sampled", "cancel", "early", "nan", "processor", "stop", "huge", "late"]
VARIANTS = [("llama", False), ("llama", True), ("gemma2", False), ("gemma2", True)]
SALTS = ["one", b"two"]


def adapted(model: Any) -> list[Any]:
    """Put adapters "a" and "b" into a model, and return the layers that have them; none without peft."""
    if importlib.util.find_spec("peft") is None:
        return []
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    for name in "ab":
        peft.inject_adapter_in_model(config, model, name)
    model.eval()
    return [part for part in model.modules() if isinstance(part, peft.tuners.tuners_utils.BaseTunerLayer)]


def another_adapter(active: str | None, rng: random.Random) -> str | None:
    """Draw an adapter, or none, other than the active one."""
    return rng.choice([name for name in ("a", "b", None) if name != active])


def switch_to(name: str | None, layers: list[Any]) -> None:
    """Let an adapter be active in these layers, or none."""
    for layer in layers:
        layer.enable_adapters(name is not None)
        if name is not None:
            layer.set_adapter(name)


def shared_blocks(generator: vattn.Generator) -> set[int]:
    """Return the blocks that running requests of different salts hold at once."""
    owners: dict[int, Any] = {}
    shared = set()
    for request in generator.scheduler.running:
        assert request.table is not None
        rows = [request.table.blocks] if isinstance(request.table, BlockTable) else request.table.rows
        for block in {block for row in rows for block in row if block}:
            if owners.setdefault(block, request.cache_salt) != request.cache_salt:
                shared.add(block)
    return shared


class Watcher:
    """One generator under traffic, and what is found."""

    def __init__(self, name: str, speculate: bool, device: str, rng: random.Random) -> None:
        self.rng, self.name = rng, name
        changes = {"sliding_window": 20} if name == "gemma2" else {}
        # Heads of 16 columns are too small for some CUDA kernels.
        changes |= {"head_dim": 64} if device == "cuda" else {}
        self.plain, model = make_model(name, **changes).to(device), make_model(name, **changes).to(device)
        self.adapter, self.adapters = None, [adapted(self.plain), adapted(model)]
        self.switch()
        self.packed: PackedModel = enable(model)
        self.packed.allocate(num_blocks=rng.randint(14, 40), hybrid=name == "gemma2")
        self.faulty = Faulty(self.packed)
        self.speculate = speculate
        self.kinds = KINDS if rng.random() < 0.5 else [kind for kind in KINDS if kind != "stop"]
        self.generator = vattn.Generator(
            # Requests without text take a shorter way.
            self.faulty, Characters() if "stop" in self.kinds else None,
            token_budget=rng.randint(10, 64), max_num_reqs=rng.randint(1, 8), max_queue=12,
            reuse_prefixes=rng.random() < 0.9, compile="none",
            speculation=vattn.PromptLookup(shortest=1) if speculate else None,
        )  # fmt: skip
        self.alive: list[tuple[vattn.Request, str]] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def arrive(self) -> None:
        """Add a request of some kind."""
        rng, kind = self.rng, self.rng.choice(self.kinds)
        most = self.generator.scheduler.max_seq_len
        length = (
            rng.randint(most, 2 * most) if kind == "huge" else rng.randint(1, max(1, rng.choice([most - 24, 70, 70])))
        )
        start = rng.choice([3, 11])
        prompt = [3 + (i * start) % 80 for i in range(length)] + [90] * (kind == "nan")
        options: dict[str, Any] = {"stop_token_ids": ()}
        options |= {"sampled": {"temperature": 0.9, "seed": length}, "stop": {"stop_strings": ("a", "bc")},
                    "processor": {"logits_processors": (_raises,)}}.get(kind, {})  # fmt: skip
        try:
            request = self.generator.add(
                prompt, vattn.Sampling(rng.randint(1, 20), **options), cache_salt=rng.choice(SALTS)
            )
        except errors.VattnError as error:
            self.counts[f"refused: {type(error).__name__}"] += 1
            if kind == "huge" and not isinstance(error, errors.RequestError):
                self.wrong.append(f"too long a prompt raised {error}")
            return
        self.alive.append((request, kind))
        if kind == "early":
            self.generator.cancel(request)

    def switch(self) -> None:
        """Give both models another adapter, or none."""
        self.adapter = another_adapter(self.adapter, self.rng)
        for parts in self.adapters:
            switch_to(self.adapter, parts)

    def step(self) -> None:
        """Run a step, in which the model may raise, and cancel some requests."""
        if self.rng.random() < 0.02:
            self.faulty.raise_in = 1
        try:
            self.generator.step()
        except ZeroDivisionError:
            self.counts["steps in which the model raised"] += 1
        self.faulty.raise_in = 0
        if shared := shared_blocks(self.generator):
            self.wrong.append(f"blocks {shared} of two tenants")
        for request, kind in self.alive:
            if kind in ("cancel", "late") and self.rng.random() < 0.2:
                self.generator.cancel(request)
        ended = [(request, kind) for request, kind in self.alive if request.done]
        self.alive = [(request, kind) for request, kind in self.alive if not request.done]
        for request, kind in ended:
            self.check(request, kind)

    def check(self, request: vattn.Request, kind: str) -> None:
        """Note how a request ended, and whether it may."""
        self.counts[f"{request.state}: {request.reason}"] += 1
        whole = len(request.output) == request.sampling.max_new_tokens
        bad = 90 in [request.prompt[-1], *request.output]
        right = {"finished": whole or kind == "stop", "cancelled": kind in ("cancel", "late", "early"),
                 "failed": kind in ("nan", "processor") or bad}  # fmt: skip
        if not right[request.state]:
            self.wrong.append(f"{kind} {request!r} {request.error}")
        if kind == "run" and request.state == "finished":
            self.compare(request)

    @torch.no_grad()
    def compare(self, request: vattn.Request) -> None:
        """Compare greedy tokens with those of the model alone, without a cache, up to a near tie."""
        ids = torch.tensor([request.prompt + request.output[:-1]], device=self.plain.device)
        best = self.plain(ids).logits[0, len(request.prompt) - 1 :].float().topk(2)
        for token, (first, second), (right, _) in zip(
            request.output, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            if token != right:
                if first - second > 1e-3 * abs(first):
                    self.wrong.append(f"{request!r}, {request.reused} reused: token {token} instead of {right}")
                return
        self.counts["compared with one-by-one generation"] += 1

    def drain(self) -> None:
        """Run to the end and count blocks and rows."""
        while self.generator.busy:
            self.step()
        blocks = self.generator.scheduler.blocks
        try:
            blocks.pool.check()
        except errors.BlockError as error:
            self.wrong.append(str(error))
        lost = blocks.pool.num_used + self.generator.scheduler.max_num_reqs - blocks.num_free_rows
        if lost:
            self.wrong.append(f"{lost} blocks or rows were lost")

    def finish(self) -> None:
        """Run to the end and count what was done."""
        self.drain()
        now = self.generator.statistics()
        self.counts.update(
            steps=now.steps, tokens=now.generated_tokens, preemptions=now.preemptions, accepted=now.accepted_tokens,
            reused=now.reused_tokens,
        )  # fmt: skip


def _raises(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise ValueError("of the user")


def main() -> int:
    """Run for the minutes requested; return 1 if anything was wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=60, help="of each generator")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    end, rng = time.monotonic() + 60 * args.minutes, random.Random(args.seed)
    counts: collections.Counter[str] = collections.Counter()
    wrong, memory = [], []
    while time.monotonic() < end:
        name, speculate = VARIANTS[len(memory) % len(VARIANTS)]
        watcher = Watcher(name, speculate, device, rng)
        for _ in range(args.requests):
            for _ in range(rng.randint(0, 3)):
                watcher.arrive()
            for _ in range(rng.randint(0, 6)):
                if watcher.generator.busy:
                    watcher.step()
            if watcher.adapters[0] and rng.random() < 0.1:
                # What has begun with an adapter ends with it.
                watcher.drain()
                watcher.switch()
                watcher.counts["adapters switched"] += 1
            if time.monotonic() > end:
                break
        watcher.finish()
        counts += watcher.counts
        wrong += [f"{name}, guesses {speculate}: {what}" for what in watcher.wrong]
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        print(
            f"{len(memory):4d} {name:7s} {memory[-1]:7.0f} MiB at most, {len(wrong)} wrong, {dict(counts)}", flush=True
        )
    settled = memory[min(len(memory) - 1, 2 * len(VARIANTS))]
    growth = memory[-1] / settled - 1
    if growth > 0.1:
        wrong.append(f"memory grew by {growth:.0%}")
    result = {"minutes": args.minutes, "device": device, "generators": len(memory), "wrong": wrong,
              "memory_growth": growth, "counts": dict(counts)}  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
