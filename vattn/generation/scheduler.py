"""What each step computes: running requests first, then as many waiting ones as token budget and blocks allow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from vattn.block_pool import BlockPool, BlockTable
from vattn.errors import OutOfBlocksError, QueueFullError, RequestError
from vattn.generation.request import CANCELLED, RUNNING, WAITING, Request


@dataclass(frozen=True)
class Part:
    """New tokens of one request in one step: positions `start` to `end - 1`."""

    request: Request
    start: int
    end: int


class Scheduler:
    """Queue, running batch and blocks of requests on one cache.

    A prompt longer than what is left of the token budget is cut into chunks. When blocks run out, the youngest running
    request gives its blocks back and waits; what it has generated stays and is computed again as part of its prompt,
    as far as its blocks have been handed to somebody else by then. Whole blocks are found again by their content.

    Args:
        pool, block_size: of the cache.
        max_num_reqs: requests that run at once.
        token_budget: new tokens of one step.
        max_seq_len: longest request, prompt and output.
        max_queue: most waiting requests; `None` for any number.
        reuse_prefixes: look for blocks of equal content before computing a prompt.

    Attributes:
        tables: int32 `[max_num_reqs, ceil(max_seq_len / block_size)]`, block ids of the running requests by their row.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_reqs: int,
        token_budget: int,
        max_seq_len: int,
        max_queue: int | None = None,
        reuse_prefixes: bool = True,
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.max_num_reqs, self.token_budget, self.max_seq_len = max_num_reqs, token_budget, max_seq_len
        self.max_queue, self.reuse_prefixes = max_queue, reuse_prefixes
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.tables = torch.zeros(max_num_reqs, -(-max_seq_len // block_size), dtype=torch.int32)
        self._rows = list(range(max_num_reqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: an empty prompt, or more tokens than a request may have.
            OutOfBlocksError: even the empty pool could not hold it.
            QueueFullError: too many are waiting.
        """
        prompt, new = len(request.prompt), request.sampling.max_new_tokens
        if not prompt:
            raise RequestError("an empty prompt", "at least one token", "begin with the model's begin token")
        if prompt + new > self.max_seq_len:
            raise RequestError(
                f"a prompt of {prompt} tokens and {new} new ones",
                f"{self.max_seq_len} tokens together",
                "shorten the prompt, ask for fewer tokens, or give the generator a larger max_seq_len",
            )
        # The last token is chosen and never computed.
        needed = -(-(prompt + new - 1) // self.block_size)
        usable = self.pool.num_blocks - self.pool.reserved
        if needed > usable:
            raise OutOfBlocksError(
                f"a request of {prompt} + {new} tokens needs {needed} blocks",
                f"up to {usable} blocks, all of the pool",
                "allocate more blocks or ask for fewer tokens",
            )
        if self.max_queue is not None and len(self.waiting) >= self.max_queue:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait", f"up to {self.max_queue}", "run steps first, or raise max_queue"
            )
        self.waiting.append(request)

    def schedule(self) -> list[Part]:
        """Return what the next step computes; its blocks are taken."""
        budget, parts, preemptions = self.token_budget, [], self.preemptions
        for request in list(self.running):
            if budget and request.table is not None and (part := self._grow(request, budget)):
                budget -= part.end - part.start
                parts.append(part)
        while self.waiting and budget and len(self.running) < self.max_num_reqs and self.preemptions == preemptions:
            admitted = self._admit(self.waiting[0], budget)
            if admitted is None:
                break
            budget -= admitted.end - admitted.start
            parts.append(admitted)
        # A request that was preempted for a later one has no tokens in the step.
        return [part for part in parts if part.request.table is not None]

    def _grow(self, request: Request, budget: int) -> Part | None:
        """Take blocks for a running request's next tokens; the youngest make room, itself at last (then `None`)."""
        start = request.cached
        end = min(request.num_tokens, start + budget)
        if start == end:
            return None
        while request.table is not None:
            try:
                self._append(request, end - start)
                return Part(request, start, end)
            except OutOfBlocksError:
                self.preempt(self.running[-1])
        return None

    def _admit(self, request: Request, budget: int) -> Part | None:
        """Move the first waiting request into the batch; `None` if its blocks are not free."""
        table = BlockTable(self.pool, self.block_size)
        if self.reuse_prefixes:
            # One token at least is computed: its logits are needed.
            whole = (request.num_tokens - 1) // self.block_size
            table.blocks = self.pool.take(request.keys(whole, self.block_size))
            table.num_tokens = len(table.blocks) * self.block_size
        start = table.num_tokens
        end = min(request.num_tokens, start + budget)
        if -(-end // self.block_size) - len(table.blocks) > self.pool.num_free:
            table.free()
            return None
        self.waiting.popleft()
        request.table, request.row, request.state = table, self._rows.pop(), RUNNING
        if not request.output:
            request.reused = start
        self.tables[request.row, : len(table.blocks)] = torch.tensor(table.blocks, dtype=torch.int32)
        self.running.append(request)
        self._append(request, end - start)
        return Part(request, start, end)

    def _append(self, request: Request, count: int) -> None:
        assert request.table is not None
        table, before = request.table, len(request.table.blocks)
        table.append(count)
        if len(table.blocks) > before:
            self.tables[request.row, before : len(table.blocks)] = torch.tensor(
                table.blocks[before:], dtype=torch.int32
            )

    def table_rows(self, parts: list[Part]) -> Tensor:
        """Return int32 `[len(parts), W]`, block ids of a step's requests."""
        return self.tables[[part.request.row for part in parts]]

    def publish(self, part: Part) -> None:
        """Make the whole blocks that a step has filled known by their content."""
        if not self.reuse_prefixes or part.request.table is None:
            return
        first, last = part.start // self.block_size, part.end // self.block_size
        if last > first:
            keys = part.request.keys(last, self.block_size)
            for index in range(first, last):
                self.pool.publish(part.request.table.blocks[index], keys[index])

    def preempt(self, request: Request) -> None:
        """Take a request out of the batch and let it wait first; its blocks are given back."""
        self.release(request)
        request.state = WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def retire(self, request: Request) -> None:
        """Take a request out, whether it runs or was preempted while its last token was on its way."""
        if request in self.running:
            self.release(request)
        else:
            self.waiting.remove(request)

    def release(self, request: Request) -> None:
        """Take a request out of the batch and give its blocks back."""
        self.running.remove(request)
        self._rows.append(request.row)
        request.row = -1
        if request.table is not None:
            request.table.free()
            request.table = None

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is; one that has ended stays as it is.

        Raises:
            RequestError: a request of another generator.
        """
        if request.done:
            return
        if request in self.running or request in self.waiting:
            self.retire(request)
        else:
            raise RequestError(f"{request!r}, which is not in this generator", "its own requests", "check which one")
        request.end(CANCELLED, "cancelled")
