"""`Request`: a prompt and what became of it."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from vattn.cache.block_pool import BlockTable
from vattn.cache.hybrid_block_table import HybridBlockTable
from vattn.errors import RequestError, VattnError
from vattn.generation.detokenizer import TextStream
from vattn.generation.prompt_lookup import LookupIndex
from vattn.generation.sampling import Sampling

WAITING, RUNNING, FINISHED, FAILED, CANCELLED = "waiting", "running", "finished", "failed", "cancelled"


class Request:
    """One prompt and what became of it; made by `Generator.add`.

    Attributes:
        prompt: token ids.
        sampling: how its tokens are chosen.
        output: ids generated so far.
        text: their text, if the generator has a tokenizer; cut before a stop string.
        state: "waiting", "running", "finished", "failed" or "cancelled".
        reason: why it ended: "length", "stop token", "stop string", "stopping criterion", "cancelled" or "error".
        error: what it failed with.
        reused: tokens of the prompt that were in the cache already.
        drafted, accepted: tokens that were guessed for it, and those of them that were right.
        preemptions: how often it had to give its blocks back and start again.
        arrived, first_token, ended: seconds of a monotonic clock, `None` before.
        limit: the most that prompt and output can become together.
        behind: tokens whose keys and values are not in the cache, nor will be when the steps on their way have run.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, stop_token_ids: frozenset[int] = frozenset()) -> None:
        self.prompt, self.sampling = list(prompt), sampling
        self.stop_token_ids = stop_token_ids
        self.limit = len(self.prompt) + sampling.max_new_tokens
        self.output: list[int] = []
        self.text = ""
        self.state, self.reason = WAITING, ""
        self.error: VattnError | None = None
        self.reused = self.drafted = self.accepted = self.preemptions = 0
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.ended: float | None = None
        # Blocks, how many of each group were freed behind a window, the tokens they have room for, and how many of
        # them are known by their content.
        self.table: BlockTable | HybridBlockTable | None = None
        self.row = -1
        # The mark of the scheduler that it was given to.
        self.holder: object = None
        self.freed: list[int] = []
        self.behind, self.room, self.published = len(self.prompt), 0, 0
        # Whether a token that is on its way counts already, and at which place among those that its step brings.
        self.coming, self.place = False, -1
        self.greedy = sampling.greedy
        # Whether a token that is no end token changes nothing but the output.
        self.plain = False
        self.index: LookupIndex | None = None
        self.stream: TextStream | None = None
        # Where what comes of it is put for an iteration that waits for it.
        self.watcher: deque[Progress] | None = None
        self._keys: list[str] = []

    def __repr__(self) -> str:
        reason = self.reason if self.error is None else f"{type(self.error).__name__}: {self.error}"
        state = f"{self.state}: {reason}" if reason else self.state
        return f"Request({len(self.prompt)} + {len(self.output)} tokens, {state})"

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together, and the one that is on its way, where it counts."""
        return len(self.prompt) + len(self.output) + self.coming

    @property
    def cached(self) -> int:
        """Tokens whose keys and values lie in the cache, or will when the steps on their way have run."""
        return len(self.prompt) + len(self.output) + self.coming - self.behind

    @cached.setter
    def cached(self, count: int) -> None:
        self.behind = self.num_tokens - count

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.ended is not None

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the ids of positions `start` to `end - 1`, as far as they are known."""
        length = len(self.prompt)
        if start >= length:
            return self.output[start - length : end - length]
        return self.prompt[start:end] + self.output[: max(0, end - length)]

    def keys(self, num_blocks: int, block_size: int) -> list[str]:
        """Return content keys of the first whole blocks, and of as many more as are known.

        They are of this process alone, and made in less time than those of `vattn.block_keys`.
        """
        have = len(self._keys)
        if num_blocks > have:
            fresh = array("q", self.tokens(have * block_size, num_blocks * block_size))
            key = self._keys[-1] if have else ""
            for end in range(block_size, len(fresh) + 1, block_size):
                key = hashlib.sha256(key.encode() + fresh[end - block_size : end].tobytes()).hexdigest()
                self._keys.append(key)
        return self._keys

    def end(self, state: str, reason: str, error: VattnError | None = None) -> None:
        """Note how the request ended."""
        self.state, self.reason, self.error = state, reason, error
        self.coming, self.index, self.stream = False, None, None
        self.ended = time.monotonic()

    def start_over(self) -> None:
        """Wait with nothing in the cache, behind an interruption; what was generated stays."""
        self.state, self.reason, self.error = WAITING, "", None
        self.table, self.row, self.freed = None, -1, []
        self.coming, self.index, self._keys = False, None, []
        self.cached = self.room = self.published = 0

    def result(self) -> Request:
        """Return the request, or raise what it failed with.

        Raises:
            VattnError: the error of a failed request.
            RequestError: the request was cancelled, or has not ended.
        """
        if self.error is not None:
            raise self.error
        if self.state != FINISHED:
            raise RequestError(f"a request that is {self.state}", "finished requests", "run the generator to its end")
        return self


class Progress(NamedTuple):
    """What a step did for one request.

    Attributes:
        request: whose.
        text: text that came, whole characters only; "" without a tokenizer.
        tokens: ids that came: one, more where guesses were right, none if the request has failed.
    """

    request: Request
    text: str
    tokens: tuple[int, ...]
