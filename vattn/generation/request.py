"""`Request`: a prompt, its output and its state; `Progress`: what a step added to it."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from vattn.cache.block_pool import BlockTable
from vattn.cache.hybrid_block_table import HybridBlockTable
from vattn.errors import RequestError, VattnError
from vattn.generation.detokenizer import TextStream
from vattn.generation.draws import splitmix64
from vattn.generation.grammar import GrammarMatcher
from vattn.generation.lookup_index import LookupIndex
from vattn.generation.sampling import Sampling
from vattn.kv_transfer.connector import Salt, salt_digest
from vattn.layers.lora import Adapter
from vattn.metadata.prompt_inputs import PromptInputs

WAITING, RUNNING, FINISHED, FAILED, CANCELLED = "waiting", "running", "finished", "failed", "cancelled"


class Request:
    """One prompt, its output and its state; made by `Generator.add`.

    Attributes:
        prompt: token ids.
        sampling: how its tokens are chosen.
        cache_salt: it shares blocks with requests of the same salt alone.
        adapter: the adapter that its tokens use; `None` for none.
        uncounted: a token after which its model would count positions in another way; `None` for none.
        inputs: what its prompt is besides ids, until it ends: embeddings, images; `None` for nothing.
        output: ids generated so far.
        text: their text, if the generator has a tokenizer; it ends before a stop string.
        logprobs: of each token of `output`; `None` unless `Sampling(logprobs=...)` or `best_of` asks for them.
        prompt_logprobs: of each token of the prompt, `None` for the first, as far as they are computed; `None` unless
            `Sampling(prompt_logprobs=...)` asks for them.
        state: "waiting", "running", "finished", "failed" or "cancelled".
        reason: why it ended: "length", "stop token", "stop string", "stopping criterion", "cancelled" or "error".
        stop_reason: the stop token or the stop string that ended it; `None` if it was neither.
        error: what it failed with.
        choices: all requests of its prompt, with `Sampling(n=...)` several; itself among them.
        index: its index among them.
        reused: tokens of the prompt that were in the cache already.
        drafted, accepted: tokens that were drafted for it, and those that were right.
        preemptions: how often it had to give its blocks back and start again.
        arrived, first_token, ended: seconds of a monotonic clock, `None` before.
        limit: the most that prompt and output can become together.
        uncached: tokens whose keys and values are not in the cache, and not written by a running step.
    """

    # Of an open request: its row in the block tables, and how many blocks of each group were freed before a window.
    row: int
    freed: list[int]
    # Of a pending token: its row in the running step's output.
    pending_row: int

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_token_ids: frozenset[int] = frozenset(),
        cache_salt: Salt = "",
        bad_words: Sequence[list[int]] = (),
        index: int = 0,
        adapter: Adapter | None = None,
        inputs: PromptInputs | None = None,
        uncounted: int | None = None,
    ) -> None:
        self.prompt, self.sampling, self.cache_salt = list(prompt), sampling, cache_salt
        self.stop_token_ids, self.bad_words, self.uncounted = stop_token_ids, bad_words, uncounted
        self.limit = len(self.prompt) + sampling.max_new_tokens
        self.output: list[int] = []
        self.text = ""
        self.index, self.adapter, self.inputs = index, adapter, inputs
        if adapter is not None:
            adapter.requests.add(self)
        self.choices: tuple[Request, ...] = (self,)
        self.seed = splitmix64(sampling.seed, -1 - index) if index else sampling.seed
        with_logprobs = sampling.logprobs is not None or sampling.candidates > sampling.n
        self.logprobs: list[TokenLogprobs] | None = [] if with_logprobs else None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt)
        self.state, self.reason = WAITING, ""
        self.error: VattnError | None = None
        self.stop_reason: int | str | None = None
        self.reused = self.drafted = self.accepted = self.preemptions = 0
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.ended: float | None = None
        # Blocks of its encoder states, and whether these are written.
        self.encoder_blocks: list[int] = []
        self.has_encoder = False
        # Blocks, the tokens they have room for, and how many of them are known by their content.
        self.table: BlockTable | HybridBlockTable | None = None
        # The mark of its scheduler.
        self.holder: object = None
        self.uncached, self.room, self.published = len(self.prompt), 0, 0
        # Whether the token that a running step will choose is counted already.
        self.pending = False
        self.greedy, self.needs_history = sampling.greedy, sampling.needs_history
        # Whether it has all log-probabilities of its prompt that it asks for.
        self.has_prompt_logprobs = self.prompt_logprobs is None or len(self.prompt) < 2
        # What its grammar allows.
        self.matcher: GrammarMatcher | None = None
        # The allowed tokens on the device, as soon as a step has read them.
        self.allowed: Tensor | None = None
        # Whether a token only extends the output: no text, no stopping criteria, no log-probabilities.
        self.plain = False
        self.lookup_index: LookupIndex | None = None
        # Tokens whose keys and values are in the cache of the draft model, where there is one.
        self.drafted_until = 0
        self.stream: TextStream | None = None
        # The queue of the stream that reads its progress.
        self.watcher: deque[Progress] | None = None
        # The changes of the model that were seen before it got its blocks.
        self.epoch = 0
        # Lengths at which its state is saved for other requests; no step goes past the next one.
        self.cuts: set[int] = set()
        self._keys: list[str] = []

    def __repr__(self) -> str:
        reason = self.reason if self.error is None else f"{type(self.error).__name__}: {self.error}"
        state = f"{self.state}: {reason}" if reason else self.state
        return f"Request({len(self.prompt)} + {len(self.output)} tokens, {state})"

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in the words of OpenAI and vLLM: "length", "stop", "abort" or "error"; `None` if it has not."""
        if not self.done:
            return None
        return {"length": "length", "cancelled": "abort", "error": "error"}.get(self.reason, "stop")

    @property
    def best(self) -> tuple[Request, ...]:
        """The `n` finished choices with the highest log-probability per token, the best first; all without `best_of`.

        Raises:
            RequestError: a choice has not ended.
        """
        if not all(choice.done for choice in self.choices):
            raise RequestError("choices that have not ended", "choices that have", "run the generator to its end")
        if len(self.choices) == self.sampling.n:
            return self.choices
        finished = [choice for choice in self.choices if choice.state == FINISHED]
        finished.sort(key=lambda choice: choice.cumulative_logprob / max(1, len(choice.output)), reverse=True)
        return tuple(finished[: self.sampling.n])

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the log-probabilities of the output.

        Raises:
            RequestError: the request has none.
        """
        if self.logprobs is None:
            raise RequestError("a request without log-probabilities", "requests with them", "Sampling(logprobs=0)")
        return sum(one.logprob for one in self.logprobs)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together, and the pending one."""
        return len(self.prompt) + len(self.output) + self.pending

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the cache once the running steps end."""
        return len(self.prompt) + len(self.output) + self.pending - self.uncached

    @cached.setter
    def cached(self, count: int) -> None:
        self.uncached = self.num_tokens - count

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.ended is not None

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the ids of positions `start` to `end - 1`, as far as they are known."""
        length = len(self.prompt)
        if start >= length:
            return self.output[start - length : end - length]
        return self.prompt[start:end] + self.output[: max(0, end - length)]

    def keys(self, num_blocks: int, block_size: int) -> list[str]:
        """Return content keys of the first whole blocks, and of as many more as are known.

        They are valid in this process alone, and faster to compute than `vattn.block_keys`.
        """
        have = len(self._keys)
        if num_blocks > have:
            fresh = array("q", self.tokens(have * block_size, num_blocks * block_size))
            own = "" if self.adapter is None else self.adapter.identity
            key = self._keys[-1] if have else salt_digest(block_size, self.cache_salt).hex() + own
            for end in range(block_size, len(fresh) + 1, block_size):
                more = b""
                if self.inputs is not None:
                    place = len(self._keys) * block_size
                    more = self.inputs.identity(place, place + block_size)
                key = hashlib.sha256(key.encode() + fresh[end - block_size : end].tobytes() + more).hexdigest()
                self._keys.append(key)
        return self._keys

    def end(self, state: str, reason: str, error: VattnError | None = None) -> None:
        """Note how the request ended."""
        self.state, self.reason, self.error = state, reason, error
        self.pending, self.lookup_index, self.stream, self.inputs = False, None, None, None
        self.ended = time.monotonic()

    def start_over(self, length: int) -> None:
        """Wait with the first `length` tokens of the output and nothing in the cache."""
        del self.output[length:]
        if self.logprobs is not None:
            del self.logprobs[length:]
        self.state, self.reason, self.error, self.stop_reason = WAITING, "", None, None
        self.table, self.cuts, self.encoder_blocks = None, set(), []
        self.pending, self.lookup_index, self._keys = False, None, []
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
    """New tokens and text of one request after one step.

    Attributes:
        request: made by `Generator.add`.
        text: new text, whole characters only; "" without a tokenizer.
        tokens: new ids: one, more where drafts were right, none if the request has failed.
    """

    request: Request
    text: str
    tokens: tuple[int, ...]


class TokenLogprobs(NamedTuple):
    """How likely a token was, by the model's own logits.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the likeliest token.
        top: log-probabilities of the likeliest tokens by id, the likeliest first.
    """

    logprob: float
    rank: int
    top: dict[int, float]
