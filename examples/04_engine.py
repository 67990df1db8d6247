"""An inference engine in one file: continuous batching over KV memory that belongs to the engine.

Prompts are computed in chunks beside requests that decode, requests with equal beginnings share blocks, and when blocks
run out the youngest request gives its own back and starts again later. On a GPU, layers are compiled and decode steps
replayed as CUDA graphs. `vattn.Generator` does all of this with less host time, and more.

python examples/04_engine.py [folder of a Llama checkpoint with bytes as tokens]
"""

import hashlib
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from demo.checkpoint import build_llama, read_checkpoint
from demo.model import Llama
from torch import Tensor

import vattn
from vattn.errors import OutOfBlocksError

DEMO_MODEL = Path(__file__).parent / "demo_model"
BLOCK = 16


@dataclass(eq=False)
class Request:
    """A prompt, what is generated after it, and the blocks that hold its keys and values.

    Attributes:
        temperature: 0 takes the likeliest token.
        stop: a token that ends the request.
        tokens: prompt and output.
        blocks: ids, in the order of the tokens.
        computed: tokens whose keys and values are in the cache.
        reused: tokens that were found there when it began.
    """

    prompt: Sequence[int]
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stop: int | None = None
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    reused: int = 0
    preemptions: int = 0
    keys: list[str] = field(default_factory=list)
    random: torch.Generator = field(default_factory=torch.Generator)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        count = len(self.tokens) - len(self.prompt)
        return count == self.max_tokens or (count > 0 and self.tokens[-1] == self.stop)

    def keys_of(self, num_blocks: int) -> list[str]:
        """Return a key for each of the first full blocks: a hash of its tokens and of all before them."""
        while len(self.keys) < num_blocks:
            start = len(self.keys) * BLOCK
            before = self.keys[-1] if self.keys else ""
            text = f"{before} {self.tokens[start : start + BLOCK]}"
            self.keys.append(hashlib.sha256(text.encode()).hexdigest())
        return self.keys[:num_blocks]


class Scheduler:
    """Decide what each step computes, and which blocks hold it.

    Args:
        num_blocks: of the cache; block 0 is left to padding.
        max_running: requests that run at once.
        budget: new tokens of a step.
    """

    def __init__(self, num_blocks: int, max_running: int, budget: int) -> None:
        self.pool = vattn.BlockPool(num_blocks)
        self.max_running, self.budget = max_running, budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def schedule(self) -> list[tuple[Request, int]]:
        """Return the requests of the next step, each with its new tokens: running ones first, then waiting ones."""
        plan, budget, before = [], self.budget, list(self.running)
        for request in before:
            count = min(len(request.tokens) - request.computed, budget)
            while count and request in self.running and not self.grow(request, count):
                self.preempt(self.running[-1])
            if count and request in self.running:
                plan.append((request, count))
                budget -= count
        # After a preemption, blocks are too few for another request.
        whole = len(self.running) == len(before)
        while whole and self.waiting and budget and len(self.running) < self.max_running:
            request = self.waiting[0]
            # At least one token is computed, since the next one is chosen from its logits.
            request.blocks = self.pool.take(request.keys_of((len(request.tokens) - 1) // BLOCK))
            request.computed = len(request.blocks) * BLOCK
            count = min(len(request.tokens) - request.computed, budget)
            if not self.grow(request, count):
                self.release(request)
                break
            request.reused = request.reused or request.computed
            self.running.append(self.waiting.popleft())
            plan.append((request, count))
            budget -= count
        return plan

    def grow(self, request: Request, count: int) -> bool:
        """Take the blocks for a request's next tokens; False if too few are free."""
        needed = -(-(request.computed + count) // BLOCK) - len(request.blocks)
        try:
            request.blocks += self.pool.allocate(max(0, needed))
        except OutOfBlocksError:
            return False
        return True

    def release(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.blocks, request.computed = [], 0

    def preempt(self, request: Request) -> None:
        """Let a request wait again, first in the queue; its full blocks may still be there when it returns."""
        self.running.remove(request)
        self.release(request)
        request.preemptions += 1
        self.waiting.appendleft(request)

    def finish(self, plan: list[tuple[Request, int]], chosen: list[int]) -> list[Request]:
        """Note what a step has computed, and return the requests that it ended."""
        for (request, count), token in zip(plan, chosen, strict=True):
            full = request.computed // BLOCK
            request.computed += count
            for index, key in enumerate(request.keys_of(request.computed // BLOCK)[full:], full):
                self.pool.publish(request.blocks[index], key)
            if request.computed == len(request.tokens):
                request.tokens.append(token)
        ended = [request for request, _ in plan if request.done]
        for request in ended:
            self.running.remove(request)
            self.release(request)
        return ended


class Runner:
    """The model, the KV memory that its layers are bound to, and its CUDA graphs.

    Args:
        model: its layers are bound to new memory.
        num_blocks: of the memory.
        max_running, budget: the largest step.
        max_seq_len: longest request.
        compile: compile each kind of layer once.
        graph_sizes: numbers of decoding requests to capture.
    """

    def __init__(
        self,
        model: Llama,
        num_blocks: int,
        max_running: int,
        budget: int,
        max_seq_len: int,
        compile: bool,
        graph_sizes: Sequence[int],
    ) -> None:
        self.model, config = model, model.config
        weight = model.embed_tokens.weight
        self.device = weight.device
        # Keys and values of all layers in one tensor: an engine moves or saves a block with one copy.
        shape = (num_blocks, config.num_layers, 2, BLOCK, config.num_kv_heads, config.head_size)
        self.memory = torch.zeros(shape, dtype=weight.dtype, device=self.device)
        for index, layer in enumerate(model.layers):
            layer.self_attn.attn.bind_kv_cache(self.memory[:, index, 0], self.memory[:, index, 1])
        if compile:
            vattn.compile_regions(model)
        self.builder = vattn.AttentionMetadataBuilder(max_running, budget, max_seq_len, layers=model)
        self.graphs = None
        if graph_sizes:
            self.graphs = vattn.CUDAGraphRunner(model, graph_sizes, self.builder, self.sample_inputs)

    def sample_inputs(self, step: vattn.AttentionMetadata) -> list[Tensor]:
        return [torch.zeros_like(step.slot_mapping), step.positions, self.last_rows(step)]

    @staticmethod
    def last_rows(step: vattn.AttentionMetadata) -> Tensor:
        """Return the row of each request's last token, any row for padded requests."""
        return (step.query_start_loc[1:] - 1).clamp(min=0).long()

    @torch.inference_mode()
    def run(self, plan: list[tuple[Request, int]]) -> list[int]:
        """Compute a step, and return a token for each request."""
        counts = [count for _, count in plan]
        ends = [request.computed + count for request, count in plan]
        tables = [request.blocks for request, _ in plan]
        ids = [token for request, count in plan for token in request.tokens[request.computed :][:count]]
        inputs = torch.tensor(ids + [0] * (len(ids) == 1), device=self.device)
        if self.graphs is not None and max(counts) == 1 and self.graphs.key_for(len(plan), len(plan)):
            step = self.graphs.build(counts, ends, tables)
            logits = self.graphs(inputs[: len(ids)], step.positions, self.last_rows(step), metadata=step)
        else:
            # Two tokens at least: a single one would compile a graph of its own.
            step = self.builder.build(counts, ends, tables, num_tokens_padded=len(inputs))
            with vattn.forward_context(step), torch.inference_mode(False), torch.no_grad():
                logits = self.model(inputs.clone(), step.positions, self.last_rows(step))
        chosen = logits.argmax(-1)
        for row, (request, _) in enumerate(plan):
            # A chunk before a prompt's last one draws nothing, so that a seed gives one text.
            if request.temperature > 0 and ends[row] == len(request.tokens):
                chances = (logits[row] / request.temperature).softmax(-1)
                chosen[row] = torch.multinomial(chances, 1, generator=request.random)[0]
        return chosen[: len(plan)].tolist()


class Engine:
    """Run requests: `add` them, and call `step` until `busy` is False, or let `generate` do both."""

    def __init__(
        self,
        model: Llama,
        *,
        num_blocks: int = 512,
        max_running: int = 16,
        budget: int = 256,
        max_seq_len: int = 2048,
        compile: bool = False,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        max_seq_len = min(max_seq_len, model.config.max_positions, (num_blocks - 1) * BLOCK)
        self.max_seq_len, budget = max_seq_len, max(budget, max_running, 2)
        self.scheduler = Scheduler(num_blocks, max_running, budget)
        self.runner = Runner(model, num_blocks, max_running, budget, max_seq_len, compile, graph_sizes)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, request: Request) -> Request:
        longest = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1 or longest > self.max_seq_len:
            raise ValueError(
                f"a request of {len(request.prompt)} + {request.max_tokens} tokens; at least one of each and "
                f"{self.max_seq_len} together are allowed"
            )
        request.tokens = list(request.prompt)
        request.random = torch.Generator(self.runner.device).manual_seed(request.seed)
        self.scheduler.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """Compute one step, and return the requests that it ended."""
        plan = self.scheduler.schedule()
        return self.scheduler.finish(plan, self.runner.run(plan))

    def generate(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Yield requests as they end."""
        for request in requests:
            self.add(request)
        while self.busy:
            yield from self.step()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO_MODEL
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    model = build_llama(*read_checkpoint(folder), dtype=dtype, device=device)
    engine = Engine(
        model, num_blocks=40, max_running=6, budget=64, compile=cuda, graph_sizes=[6, 4, 2, 1] if cuda else ()
    )
    common = "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def test_"
    texts = ["import ", "for i in range(", *(common + name for name in ("push", "pop", "peek", "empty")), common * 4]
    # A token is a byte, and byte 0 begins a text.
    requests = [Request([0, *text.encode()], max_tokens=96, stop=0) for text in texts]
    requests += [Request(requests[0].prompt, 48, temperature=0.7, seed=seed) for seed in range(2)]
    begin = time.perf_counter()
    for request in engine.generate(requests):
        text = bytes(request.output).decode(errors="replace")
        print(f"{len(request.prompt)} tokens, {request.reused} of them found; preempted {request.preemptions} times:")
        print(f"    {text!r}")
    seconds = time.perf_counter() - begin
    total = sum(len(request.output) for request in requests)
    print(f"{total} tokens in {seconds:.1f} s, {total / seconds:.0f} a second")


if __name__ == "__main__":
    main()
