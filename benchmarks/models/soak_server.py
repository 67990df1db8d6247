"""Run clients of all kinds against the server example for a while, and count what is wrong.

    nice -n 10 python -m benchmarks.models.soak_server --minutes 10

In rounds of some seconds, more clients than the server takes request greedy texts, streamed and not, with API keys of
several tenants; some leave in the middle, some make mistakes, and now and then a step of the model raises. Between
rounds the model gets another adapter (given peft). Wrong: a text that one-by-one generation does not give, an answer
that a call cannot get, a block that two tenants hold, blocks, threads or files that stay, memory that grows.
"""

from __future__ import annotations

import collections
import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
import uvicorn

from benchmarks.harness import load_example, parser_of
from benchmarks.models.soak import adapted, another_adapter, shared_blocks, switch_to
from vattn.cli.checkpoints import DEMO_MODEL, load_model

CLIENTS, THREADS, TOKENS = 6, 8, 12
COMMON = "# A comment that several prompts begin with, longer than a block.\n"
PROMPTS = [COMMON + "def ", COMMON + "import ", COMMON + "class ", "for ", "x", COMMON * 4]
MISTAKES = [{"max_tokens": 0}, {"max_tokens": 10**6}, {"prompt": []}, {"suffix": "x"}, {"prompt": "x" * 30_000}]


class Traffic:
    """The server, its clients, and what is found.

    Args:
        folder: of the model, in fp32: in bf16, batches of other sizes give other tokens.
        seed: of all that is drawn.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.texts: dict[tuple[str | None, str], str] = {}
        self.adapter: str | None = None
        model, _ = load_model(folder, "cpu", None)
        self.alone, self.layers = model, [adapted(model)]
        example = load_example("15_http_server.py")
        example.load_model = self.load
        self.app = example.create_app(folder, example.Limits(CLIENTS, running=3, body_bytes=20_000, seconds=60))
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="critical"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.05)
        self.engine = self.app.state.engine
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/v1/completions"
        self.inject()

    def load(self, *arguments: Any) -> tuple[Any, Any]:
        model, tokenizer = load_model(*arguments)
        self.layers.append(adapted(model))
        return model, tokenizer

    def inject(self) -> None:
        """Let some steps of the server's model fail, and look at the blocks of each."""
        generator = self.engine.generator
        forward, step = generator._runner.steps.forward, generator.step

        def fails(*inputs: Any) -> Any:
            if self.rng.random() < 0.003:
                self.counts["steps that failed"] += 1
                raise MemoryError("injected")
            return forward(*inputs)

        def watched() -> Any:
            parts = step()
            if shared := shared_blocks(generator):
                self.wrong.append(f"blocks {shared} of two tenants")
            return parts

        generator._runner.steps.forward, generator.step = fails, watched

    def text(self, prompt: str) -> str:
        """Return the text of a prompt that runs alone, without a cache that others have filled."""
        key = self.adapter, prompt
        if key not in self.texts:
            ids = [0, *prompt.encode()]
            with torch.no_grad():
                out = self.alone.generate(
                    torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, eos_token_id=0
                )
            made = out[0, len(ids) :].tolist()
            self.texts[key] = bytes(made[:-1] if made[-1] == 0 else made).decode(errors="replace")
        return self.texts[key]

    def call(self, client: httpx.Client, rng: random.Random) -> None:
        """Make one call of some kind, and note what is wrong with its answer."""
        kind, prompt = rng.choice(["text"] * 4 + ["stream"] * 4 + ["leave", "mistake", "sampled"]), rng.choice(PROMPTS)
        body = {"model": self.folder.name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        body |= {"leave": {"max_tokens": 500, "stream": True}, "stream": {"stream": True},
                 "mistake": rng.choice(MISTAKES), "sampled": {"temperature": 1.0}}.get(kind, {})  # fmt: skip
        with client.stream("POST", self.url, json=body) as answer:
            if kind == "leave" and answer.status_code == 200:
                next(answer.iter_lines())
                self.counts["left"] += 1
                return
            answer.read()
        self.counts[f"{kind}: {answer.status_code}"] += 1
        expected = {400, 413, 503} if kind == "mistake" else {200, 500, 503}
        if answer.status_code not in expected:
            self.wrong.append(f"{kind}: {answer.status_code} {answer.text:.200}")
        elif answer.status_code == 503:
            time.sleep(0.2)
        elif answer.status_code == 200 and kind in ("text", "stream"):
            found = answer.json()["choices"][0]["text"] if kind == "text" else self.joined(answer.text)
            if found is not None and found != self.texts[self.adapter, prompt]:
                self.wrong.append(f"{kind} with adapter {self.adapter}: {prompt!r} gave {found!r}")

    def joined(self, events: str) -> str | None:
        """Return the text of a stream, `None` if it ends with an error."""
        parts = [line.removeprefix("data: ") for line in events.splitlines() if line]
        if "error" in parts[-1]:
            self.counts["streams that ended with an error"] += 1
            return None
        if parts.pop() != "[DONE]":
            self.wrong.append(f"a stream without an end: {events[-200:]!r}")
        return "".join(json.loads(part)["choices"][0]["text"] for part in parts)

    def client(self, seed: int, end: float) -> None:
        rng = random.Random(seed)
        headers = {"authorization": f"Bearer {rng.choice(['one', 'two', 'three'])}"}
        with httpx.Client(headers=headers, timeout=120) as client:
            while time.monotonic() < end:
                self.call(client, rng)

    def round(self, seconds: float) -> None:
        """Run clients for a while; then nothing may be left of them."""
        self.adapter = another_adapter(self.adapter, self.rng)
        for parts in self.layers:
            switch_to(self.adapter, parts)
        for prompt in PROMPTS:
            self.text(prompt)
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda seed: self.client(seed, end), self.rng.sample(range(10**9), THREADS)))
        wait, pool = time.monotonic() + 20, self.engine.generator.scheduler.pool
        while (self.engine.generator.busy or self.engine._unfinished) and time.monotonic() < wait:
            time.sleep(0.05)
        pool.check()
        if self.engine.generator.busy or self.engine._unfinished or pool.num_used:
            self.wrong.append(f"after a round: {pool}, {len(self.engine._unfinished)} requests")

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def main() -> int:
    """Run for the minutes requested; return 1 if anything was wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    end, seen = time.monotonic() + 60 * args.minutes, []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        transformers.LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).save_pretrained(folder)
        traffic = Traffic(folder, args.seed)
        while time.monotonic() < end:
            traffic.round(min(6.0, max(3.0, end - time.monotonic())))
            files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            seen.append((threading.active_count(), files, memory))
            print(f"{len(seen):4d} rounds, {len(traffic.wrong)} wrong, {seen[-1]}, {dict(traffic.counts)}", flush=True)
        traffic.stop()
    first, last = seen[min(len(seen) - 1, 5)], seen[-1]
    grown = [name for name, was, now in zip(("threads", "files"), first, last, strict=False) if now > was + 3]
    growth = last[2] / first[2] - 1
    traffic.wrong += [f"{name} grew: {first} to {last}" for name in [*grown, *["memory"] * (growth > 0.1)]]
    if not any(status.endswith(": 200") for status in traffic.counts):
        traffic.wrong.append("no call was served")
    result = {"minutes": args.minutes, "rounds": len(seen), "wrong": traffic.wrong, "memory_growth": growth,
              "reused_tokens": traffic.engine.generator.statistics().reused_tokens,
              "counts": dict(traffic.counts)}  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return bool(traffic.wrong)


if __name__ == "__main__":
    sys.exit(main())
