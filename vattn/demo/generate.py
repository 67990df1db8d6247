"""Continuous batching: requests of different lengths join and leave one running batch on a paged cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vattn.block_pool import BlockPool, BlockTable
from vattn.context import forward_context
from vattn.cuda_graph import CUDAGraphRunner
from vattn.errors import OutOfBlocksError
from vattn.kv_cache import KVCacheAllocation
from vattn.metadata import AttentionMetadata
from vattn.metadata_builder import AttentionMetadataBuilder


@dataclass(eq=False)
class Request:
    """One prompt and what became of it.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: when to stop, unless `stop_token` comes first.
        temperature: 0 is greedy; otherwise sampled with a generator of its own, so that the other requests of a batch
            change nothing.
        seed: of that generator.
        stop_token: ends the text; it is not part of `output`.
        output: ids generated so far.
        table: blocks it holds, `None` while it waits.
        stopped: nothing is left to generate.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stop_token: int | None = None
    output: list[int] = field(default_factory=list)
    table: BlockTable | None = None
    stopped: bool = False

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output together."""
        return [*self.prompt, *self.output]

    @property
    def cached(self) -> int:
        """Tokens whose keys and values lie in the cache."""
        return 0 if self.table is None else self.table.num_tokens

    def accept(self, logits: Tensor) -> None:
        """Choose the next token from fp32 CPU logits `[vocab_size]`."""
        if self.temperature > 0:
            chances = (logits / self.temperature).softmax(-1)
            token = int(torch.multinomial(chances, 1, generator=self._random))
        else:
            token = int(logits.argmax())
        if token != self.stop_token:
            self.output.append(token)
        self.stopped = token == self.stop_token or len(self.output) >= self.max_new_tokens


class Scheduler:
    """Decide what each step computes: running requests first, then as many waiting ones as budget and blocks allow.

    A prompt longer than what is left of the token budget is cut into chunks. When blocks run out, the youngest running
    request gives its blocks back and waits; what it has generated stays and is computed again as part of its prompt.
    """

    def __init__(self, pool: BlockPool, block_size: int, max_num_reqs: int, token_budget: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.max_num_reqs, self.token_budget = max_num_reqs, token_budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request; raises OutOfBlocksError if even the empty pool could not hold it."""
        needed = -(-(len(request.prompt) + request.max_new_tokens) // self.block_size)
        usable = self.pool.num_blocks - self.pool.reserved
        if needed > usable:
            raise OutOfBlocksError(
                f"a request of {len(request.prompt)} + {request.max_new_tokens} tokens needs {needed} blocks",
                f"up to {usable} blocks, all of the pool",
                "allocate more blocks or ask for fewer tokens",
            )
        self.waiting.append(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """Return the requests of the next step and how many new tokens of each it computes; their blocks are taken."""
        budget, step, preemptions = self.token_budget, [], self.preemptions
        for request in list(self.running):
            if budget and request in self.running and (new := self._grow(request, budget)):
                budget -= new
                step.append((request, new))
        while self.waiting and budget and len(self.running) < self.max_num_reqs and self.preemptions == preemptions:
            request = self.waiting[0]
            new = min(len(request.tokens), budget)
            if -(-new // self.block_size) > self.pool.num_free:
                break
            request.table = BlockTable(self.pool, self.block_size)
            request.table.append(new)
            self.running.append(self.waiting.popleft())
            budget -= new
            step.append((request, new))
        return step

    def _grow(self, request: Request, budget: int) -> int:
        """Take blocks for the next tokens of a running request; the youngest make room, itself at last (then 0)."""
        new = min(len(request.tokens) - request.cached, budget)
        while request.table is not None:
            try:
                request.table.append(new)
                return new
            except OutOfBlocksError:
                self._preempt(self.running[-1])
        return 0

    def _preempt(self, request: Request) -> None:
        self.release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def release(self, request: Request) -> None:
        """Take a request out of the batch and give its blocks back."""
        self.running.remove(request)
        if request.table is not None:
            request.table.free()
            request.table = None


class Generator:
    """Run a model over the scheduler's steps; steps that only decode go through CUDA graphs where there are some.

    Args:
        model: takes `(input_ids [T], positions [T], logits_indices [B])`, returns logits `[B, vocab_size]`.
        cache: what `vattn.allocate_kv_cache(model, ...)` returned.
        forward: the model's compiled form; default the model as it is.
        max_num_reqs: requests that run at once.
        token_budget: new tokens of one step.
        max_seq_len: longest request, prompt and output.
        graph_sizes: batch sizes to capture; empty for none.

    Attributes:
        graphs: the runner of the captured sizes; its `report` says what was captured or why nothing was.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCacheAllocation,
        *,
        forward: Callable[..., Tensor] | None = None,
        max_num_reqs: int = 8,
        token_budget: int = 256,
        max_seq_len: int = 1024,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        self.forward = model if forward is None else forward
        self.device = cache.device
        self.scheduler = Scheduler(BlockPool(cache.num_blocks), cache.block_size, max_num_reqs, token_budget)
        self.builder = AttentionMetadataBuilder(
            max_num_reqs, max(2, token_budget), max_seq_len, cache.block_size, cache.device, layers=model
        )
        self.graphs: CUDAGraphRunner | None = None
        if graph_sizes:
            self.graphs = CUDAGraphRunner(
                self.forward, graph_sizes, self.builder, self._sample_inputs, output_rows="requests"
            )
        self.num_steps = 0

    def _sample_inputs(self, metadata: AttentionMetadata) -> list[Tensor]:
        return model_inputs([0] * metadata.slot_mapping.shape[0], metadata)

    def step(self) -> list[Request]:
        """Compute one step and return the requests that it finished."""
        plan = self.scheduler.schedule()
        ids = [token for request, new in plan for token in request.tokens[request.cached - new : request.cached]]
        lengths = {
            "query_lens": [new for _, new in plan],
            "seq_lens": [request.cached for request, _ in plan],
            "block_tables": [request.table.blocks for request, _ in plan if request.table is not None],
        }
        logits = self._run(ids, lengths, decode=len(ids) == len(plan)).cpu()
        self.num_steps += 1
        finished = []
        for row, (request, _) in enumerate(plan):
            if request.cached == len(request.tokens):
                request.accept(logits[row])
                if request.stopped:
                    self.scheduler.release(request)
                    finished.append(request)
        return finished

    @torch.no_grad()
    def _run(self, ids: list[int], lengths: dict[str, Any], decode: bool) -> Tensor:
        """Return the logits of each request's last token."""
        if decode and self.graphs is not None and self.graphs.key_for(len(ids), len(ids)) is not None:
            metadata = self.graphs.build(**lengths)
            return self.graphs(*model_inputs(ids, metadata), metadata=metadata)
        # One token would compile a graph of its own.
        ids = ids + [0] * (2 - len(ids))
        metadata = self.builder.build(**lengths, num_tokens_padded=len(ids))
        with forward_context(metadata):
            return self.forward(*model_inputs(ids, metadata))

    def generate(self, requests: Iterable[Request]) -> Iterator[list[Request]]:
        """Run requests to their end; yields after every step what it finished."""
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.waiting or self.scheduler.running:
            yield self.step()


def model_inputs(ids: Sequence[int], metadata: AttentionMetadata) -> list[Tensor]:
    """Return what the model takes for a step: token ids, positions, and the row of each request's last token."""
    assert metadata.positions is not None
    last = (metadata.query_start_loc[1:] - 1).clamp(min=0).long()
    return [torch.tensor(ids).to(last.device), metadata.positions, last]
