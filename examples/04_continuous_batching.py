"""Continuous batching in about 100 lines: prompts of different lengths join and leave one batch on a paged cache.

Long prompts are computed in chunks, so that the others keep decoding; blocks come from a pool and go back to it.
`vattn.Generator` does the same with sampling, preemption, prefixes found again and CUDA graphs.
"""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from demo.checkpoint import build_llama, read_checkpoint
from demo.model import Llama
from torch import Tensor

import vattn
from vattn.cache.allocation import KVCacheAllocation
from vattn.cache.block_pool import BlockTable
from vattn.generation import model_inputs

FOLDER = Path(__file__).parent / "demo_model"
MAX_NUM_REQS, TOKEN_BUDGET, NEW_TOKENS = 3, 48, 24

PROMPTS = [
    "import ",
    "class Stack:\n    def __init__(self",
    "def test_simple(self):\n    self.assertEqual(",
    "#!/usr/bin/env python3\n" + "# A comment that fills several blocks of the cache.\n" * 3 + "def main(",
    "for i in range(",
]


@dataclass(eq=False)
class Request:
    """A prompt (a token is a byte, byte 0 begins a text) that grows, and the blocks that hold it."""

    number: int
    tokens: list[int]
    wanted: int
    table: BlockTable = field(repr=False)


class Batch:
    """What runs now and what waits."""

    def __init__(self, model: Llama, cache: KVCacheAllocation, max_seq_len: int) -> None:
        self.model = model
        self.pool = vattn.BlockPool(cache.num_blocks)
        self.block_size = cache.block_size
        self.builder = vattn.AttentionMetadataBuilder(
            MAX_NUM_REQS, TOKEN_BUDGET, max_seq_len, cache.block_size, cache.device, layers=model
        )
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.state = ""

    def add(self, number: int, prompt: str, new_tokens: int) -> None:
        tokens = [0, *prompt.encode()]
        table = BlockTable(self.pool, self.block_size)
        self.waiting.append(Request(number, tokens, len(tokens) + new_tokens, table))

    def schedule(self) -> list[tuple[Request, int]]:
        """Give each request some of the budget: first those that run, then new ones while blocks for all of it last."""
        promised = sum(-(-r.wanted // self.block_size) - len(r.table.blocks) for r in self.running)
        while self.waiting and len(self.running) < MAX_NUM_REQS:
            promised += -(-self.waiting[0].wanted // self.block_size)
            if promised > self.pool.num_free:
                break
            self.running.append(self.waiting.popleft())
        budget, plan = TOKEN_BUDGET, []
        for request in self.running:
            new = min(len(request.tokens) - request.table.num_tokens, budget)
            if new:
                request.table.append(new)
                budget -= new
                plan.append((request, new))
        return plan

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Compute one step and return what it finished."""
        plan = self.schedule()
        held = [request.table.num_tokens for request, _ in plan]
        ids = [t for (r, new), end in zip(plan, held, strict=True) for t in r.tokens[end - new : end]]
        metadata = self.builder.build([new for _, new in plan], held, [r.table.blocks for r, _ in plan])
        with vattn.forward_context(metadata):
            logits: Tensor = self.model(*model_inputs(ids, metadata))
        chosen = logits.argmax(-1).tolist()
        state = f"{metadata.num_prefills} prefilling, {metadata.num_decodes} decoding, {len(self.waiting)} waiting"
        if state != self.state:
            print(f"{state}: {len(ids)} tokens in this step, {self.pool.num_free} blocks free")
        self.state = state
        finished = []
        for (request, _), end, token in zip(plan, held, chosen[: len(plan)], strict=True):
            if end == len(request.tokens):
                request.tokens.append(token)
                if len(request.tokens) == request.wanted:
                    self.running.remove(request)
                    request.table.free()
                    finished.append(request)
        return finished


def main() -> None:
    model = build_llama(*read_checkpoint(FOLDER))
    cache = vattn.allocate_kv_cache(model, num_blocks=24)
    batch = Batch(model, cache, max_seq_len=256)
    for number, prompt in enumerate(PROMPTS):
        batch.add(number, prompt, NEW_TOKENS + 4 * number)
    while batch.waiting or batch.running:
        for request in batch.step():
            print(f"request {request.number} is done: {bytes(request.tokens[1:]).decode('latin-1')!r}")
    batch.pool.check()
    assert batch.pool.num_used == 0


if __name__ == "__main__":
    main()
