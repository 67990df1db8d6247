"""Plan each step: running requests first, then as many waiting ones as the token budget and the blocks allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

from vattn.cache.block_pool import BlockPool
from vattn.errors import ConfigError, OutOfBlocksError, QueueFullError, RequestError
from vattn.generation.batch import Batch, DecodeRun
from vattn.generation.cache_blocks import CacheBlocks, blocks_needed
from vattn.generation.draft_source import DraftSource
from vattn.generation.request import CANCELLED, RUNNING, WAITING, Request


class Scheduler:
    """Queue and running batch of requests on one cache.

    A prompt longer than the rest of the token budget is split into chunks. When blocks run out, the youngest running
    request gives its blocks back and waits; what it has generated stays and is computed again as part of its prompt,
    unless its blocks are still in the cache: whole blocks are found again by their content.

    Args:
        blocks: of the cache.
        max_num_reqs: requests that run at once.
        token_budget: new tokens of one step.
        max_seq_len: longest request, prompt and output.
        max_queue: most waiting requests; `None` for any number.
        source: drafts tokens of greedy and sampled requests, with the rest of the budget and of the blocks.

    Attributes:
        waiting, running: requests; the oldest first.
        preemptions: how often a request had to give its blocks back.
    """

    def __init__(
        self,
        blocks: CacheBlocks,
        max_num_reqs: int,
        token_budget: int,
        max_seq_len: int,
        max_queue: int | None = None,
        source: DraftSource | None = None,
    ) -> None:
        self.blocks, self.source = blocks, source
        self.max_num_reqs, self.token_budget, self.max_seq_len = max_num_reqs, token_budget, max_seq_len
        self.max_queue = max_queue
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        # Identifies its requests, ended ones too.
        self.mark = object()
        self._changes, self._drafting = 0, False
        # Content keys of the blocks that the prompts of this step fill.
        self._filled: set[str] = set()

    @property
    def pool(self) -> BlockPool:
        """Where blocks come from."""
        return self.blocks.pool

    def add(self, *choices: Request) -> None:
        """Queue the requests of a prompt, all or none.

        Raises:
            RequestError: an empty prompt, or more tokens than a request may have.
            OutOfBlocksError: even the empty pool could not hold it.
            QueueFullError: too many are waiting.
        """
        prompt, new = len(choices[0].prompt), choices[0].sampling.max_new_tokens
        if not prompt:
            raise RequestError("an empty prompt", "at least one token", "begin with the model's BOS token")
        if prompt + new > self.max_seq_len:
            raise RequestError(
                f"a prompt of {prompt} tokens and {new} new ones",
                f"{self.max_seq_len} tokens together",
                "shorten the prompt or request fewer tokens; a larger max_seq_len= needs a cache and a model for it",
            )
        self._check_ranges(choices[0])
        # The last token is chosen and never computed.
        needed = blocks_needed(self.blocks.cache, prompt + new - 1, self.token_budget)
        needed += self.blocks.encoder_blocks(choices[0])
        usable = self.pool.num_blocks - self.pool.reserved
        if needed > usable:
            raise OutOfBlocksError(
                f"a request of {prompt} + {new} tokens needs {needed} blocks",
                f"up to {usable} blocks, all of the pool",
                "allocate more blocks or request fewer tokens",
            )
        if self.max_queue is not None and len(self.waiting) + len(choices) > self.max_queue:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait, for {len(choices)} more",
                f"up to {self.max_queue}",
                "run steps first, or raise max_queue",
            )
        for request in choices:
            request.holder = self.mark
        self.waiting += choices

    def _check_ranges(self, request: Request) -> None:
        """Refuse a prompt with tokens that see each other both ways and that no step holds together."""
        ranges = () if request.inputs is None else request.inputs.ranges
        longest = max((end - start + 1 for start, end in ranges), default=0)
        decodes = (self.max_num_reqs - 1) * (1 + (self.source.num_drafts if self.source is not None else 0))
        most = self.token_budget - decodes
        if ranges and longest > most:
            raise RequestError(
                f"a prompt with {longest} tokens that see each other both ways, such as an image",
                f"{most} tokens: the token_budget of {self.token_budget} without {decodes} for decodes",
                "raise token_budget=, or lower max_num_reqs=",
            )

    def schedule(self) -> Batch:
        """Plan the next step and take its blocks."""
        budget, preemptions, batch = self.token_budget, self.preemptions, Batch()
        self._drafting = self.source is not None and (self.source.beside_prompts or self._only_decodes())
        others = len(self.running)
        for request in list(self.running):
            others -= 1
            count = self.blocks.until_cut(request, min(request.uncached, budget))
            if count and self._grow(request, count):
                budget -= self._put(request, count, budget, batch, others)
        if self.waiting:
            self.blocks.look()
        later: list[Request] = []
        try:
            while self.waiting and budget and len(self.running) < self.max_num_reqs and self.preemptions == preemptions:
                request = self.waiting[0]
                found = self._admit(request, budget)
                if found is None:
                    later.append(self.waiting.popleft())
                elif found:
                    budget -= self._put(request, found, budget, batch)
                else:
                    break
        finally:
            self.waiting.extendleft(reversed(later))
            self._filled.clear()
        if not any(batch.drafts):
            batch.drafts = []
        batch.tree = self.source.tree if batch.drafts and self.source is not None else None
        if self.blocks.snapshots is not None or batch.unready_before_ready():
            batch.put_ready_first()
        singles = self.token_budget - budget == len(batch.requests) == len(self.running) == batch.ready
        if singles and batch.requests and self.source is None and self.blocks.has_encoders(batch.requests):
            batch.run = DecodeRun(batch.requests, batch.ends, self._changes, self.blocks.block_size)
        return batch

    def follow(self, before: Batch) -> Batch | None:
        """Plan the step after a running one without looking at every request: the same requests, one token each.

        Blocks are taken, and nothing else changes for a request: when the tokens of `before` are appended to the
        outputs, everything is as after `schedule`. Returns `None` where `schedule` has to plan the step.
        """
        run = before.run
        if run is None or run.changes != self._changes or run.left < 1:
            return None
        if self.waiting and len(self.running) < self.max_num_reqs:
            return None
        offset = before.offset + 1
        try:
            new_blocks = run.grow(self.blocks, offset)
        except OutOfBlocksError:
            return None
        run.left -= 1
        return Batch(run.requests, ready=before.ready, run=run, offset=offset, new_blocks=new_blocks)

    def _put(self, request: Request, count: int, budget: int, batch: Batch, others: int = 0) -> int:
        """Put `count` tokens of a request into the batch, and drafts after them; return how many tokens there are.

        Args:
            others: running requests that follow. Drafts leave each a token, and an even share of what is left.
        """
        start, end = request.cached, request.cached + count
        # A request gets no token if it takes the whole budget, and is the last one, or ends at a snapshot.
        batch.ready += end == request.num_tokens
        if self._drafting:
            spare = budget - 1 - others
            batch.drafts.append(self._draft(request, spare, others) if count == 1 and request.output else [])
            end += len(batch.drafts[-1])
        if self.waiting and start < len(request.prompt):
            self._filled.update(self.blocks.new_keys(request, start, end))
        if not request.has_prompt_logprobs and start < len(request.prompt) - 1:
            batch.prompt_logprobs.append((request, start + 1, min(end, len(request.prompt) - 1) - start))
        batch.requests.append(request)
        batch.starts.append(start)
        batch.ends.append(end)
        request.cached = end
        return end - start

    def _only_decodes(self) -> bool:
        """Return whether the next step computes one known token of each request, and admits none."""
        joins = self.waiting and len(self.running) < self.max_num_reqs
        return not joins and all(request.uncached == 1 for request in self.running)

    def _draft(self, request: Request, spare: int, others: int) -> list[int]:
        """Return drafts of a request's next tokens, as many as there is room for.

        Args:
            spare: tokens that the step has left for drafts of this request and of `others`.
        """
        assert self.source is not None
        # The step also chooses the token after the drafts.
        rest = request.limit - request.num_tokens - 1
        if self.source.tree is None:
            least, most = 1, min(self.source.num_drafts, rest, spare // (1 + others))
        else:
            # The other branches of a tree need room beside the one that is right, also at the request's end.
            least = most = self.source.num_drafts
            if rest < 1 or spare < least or request.num_tokens + least > self.max_seq_len:
                return []
        if most < least or request.pending or request.needs_history:
            return []
        drafts = self.source.plan(request, most)
        if len(drafts) > most or 0 < len(drafts) < least:
            raise ConfigError(
                f"{len(drafts)} drafts of {type(self.source).__name__}.plan",
                f"none, or {least} to {most}",
                "return no more than `most`, and with a tree one for each node",
            )
        if drafts:
            try:
                self.blocks.grow(request, 1 + len(drafts))
            except OutOfBlocksError:
                # A draft preempts no request.
                drafts = drafts[: request.room - request.cached - 1] if least == 1 else []
        return drafts

    def _grow(self, request: Request, count: int) -> bool:
        """Take blocks for a request's next tokens and preempt the youngest for them; False if that was itself."""
        while request.table is not None:
            try:
                self.blocks.grow(request, count)
                return True
            except OutOfBlocksError:
                self.preempt(self.running[-1])
        return False

    def _admit(self, request: Request, budget: int) -> int | None:
        """Move the first waiting request into the batch; return how many tokens have room, 0 if it has to wait.

        Returns `None` for one that begins like another one of this step: its next step finds what this one computes.
        """
        self.blocks.open(request)
        found = request.cached
        if self.blocks.next_key(request) in self._filled:
            self.blocks.close(request)
            return None
        count = self.blocks.until_cut(request, min(request.num_tokens - found, budget))
        try:
            if self.blocks.with_encoder:
                self.blocks.open_encoder(request)
            self.blocks.grow(request, count)
        except OutOfBlocksError:
            count = 0
        if not count:
            self.blocks.close(request)
            return 0
        self.blocks.load_state(request)
        self.waiting.popleft()
        request.state = RUNNING
        if not request.output:
            request.reused = found
        self.running.append(request)
        return count

    def preempt(self, request: Request) -> None:
        """Take a request out of the batch and let it wait first; its blocks are given back."""
        self.release(request)
        request.state = WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def snapshot(self) -> dict[Request, int]:
        """Return the requests that the next step may run, in order, each with the length of its output."""
        return {request: len(request.output) for request in (*self.running, *islice(self.waiting, self.max_num_reqs))}

    def start_over(self, snapshot: Mapping[Request, int]) -> list[Request]:
        """Empty the cache and let all unfinished requests wait, with the outputs of a snapshot; return them."""
        unfinished = [
            request for request in dict.fromkeys([*snapshot, *self.running, *self.waiting]) if not request.done
        ]
        for request in unfinished:
            request.start_over(snapshot.get(request, len(request.output)))
        self.waiting, self.running = deque(unfinished), []
        self.blocks.start_over()
        self._changes += 1
        return unfinished

    def retire(self, request: Request) -> None:
        """Take a request out, whether it runs or was preempted while its last step ran."""
        if request.table is not None:
            self.release(request)
        else:
            self.waiting.remove(request)

    def release(self, request: Request) -> None:
        """Take a request out of the batch and give its blocks back."""
        self.running.remove(request)
        self._changes += 1
        self.blocks.close(request)

    def cancel(self, request: Request) -> None:
        """Take a request out, wherever it is; one that has ended stays as it is.

        Raises:
            RequestError: a request of another generator.
        """
        self.check_held(request)
        if not request.done:
            self.retire(request)
            request.end(CANCELLED, "cancelled")

    def check_held(self, request: Request) -> None:
        """Refuse a request of another generator, even if it has ended.

        Raises:
            RequestError: it is one.
        """
        held = request.holder is self.mark
        if not held or not (request.done or request in self.running or request in self.waiting):
            raise RequestError(f"{request!r}, which is not in this generator", "its own requests", "check which one")
