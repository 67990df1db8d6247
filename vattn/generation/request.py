"""`Sampling`: how a request's tokens are chosen. `Request`: a prompt and what became of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vattn.block_pool import BlockTable
from vattn.errors import ConfigError, RequestError, VattnError
from vattn.kv_transfer.connector import block_keys

WAITING, RUNNING, FINISHED, FAILED, CANCELLED = "waiting", "running", "finished", "failed", "cancelled"


@dataclass(frozen=True)
class Sampling:
    """Say how tokens are chosen and when to stop.

    Attributes:
        max_new_tokens: the most that are generated.
        temperature: 0 is greedy: the likeliest token, always.
        top_k: sample from this many likeliest tokens; 0 for all.
        top_p: sample from the likeliest tokens whose chances reach this sum; 1 for all.
        min_p: leave out tokens less likely than this share of the likeliest; 0 for none.
        repetition_penalty: above 1 makes tokens of prompt and output less likely.
        stop_strings: end the text where one of these appears; it is cut off. Needs a tokenizer.
        stop_token_ids: end at one of these tokens, which is kept out of the output; `None`: the model's own end
            tokens, `()`: none.
        seed: of the request's own generator, so that the other requests of a batch change nothing.
        logits_processors, stopping_criteria: further objects of transformers: `LogitsProcessor`s are called with
            `[1, L]` ids and `[1, vocab_size]` scores, `StoppingCriteria` with the ids and no scores.

    Raises:
        ConfigError: a value out of range, or one that a temperature of 0 would ignore.

    Example:
        >>> import vattn
        >>> vattn.Sampling(temperature=0.8, top_p=0.9, seed=1).greedy
        False
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    seed: int = 0
    logits_processors: tuple[Any, ...] = ()
    stopping_criteria: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "a finite number from 0 up"),
            "top_k": (self.top_k >= 0, "0 for all tokens, or a positive count"),
            "top_p": (0 < self.top_p <= 1, "above 0 and up to 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "a positive number; 1 for none"),
        }
        for name, (right, allowed) in ranges.items():
            if not right:
                raise ConfigError(f"Sampling({name}={getattr(self, name)!r})", allowed, f"change {name}")
        if isinstance(self.stop_strings, str) or not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ConfigError(
                f"Sampling(stop_strings={self.stop_strings!r})", "a tuple of texts, none empty", "('\\n\\n',) for one"
            )
        ignored = [name for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(self, name) != off]
        if self.temperature == 0 and ignored:
            raise ConfigError(
                f"Sampling({ignored[0]}={getattr(self, ignored[0])}) with temperature=0, which is greedy",
                "a temperature above 0, or greedy without it",
                "set temperature=1.0 to sample",
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token of the model's own logits is taken."""
        return self.temperature == 0 and self.repetition_penalty == 1 and not self.logits_processors


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
        preemptions: how often it had to give its blocks back and start again.
        arrived, first_token, ended: seconds of a monotonic clock, `None` before.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling, stop_token_ids: frozenset[int] = frozenset()) -> None:
        self.prompt, self.sampling = list(prompt), sampling
        self.stop_token_ids = stop_token_ids
        self.output: list[int] = []
        self.text = ""
        self.state, self.reason = WAITING, ""
        self.error: VattnError | None = None
        self.reused = self.preemptions = 0
        self.coming = self.shown = 0
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.ended: float | None = None
        self.table: BlockTable | None = None
        self.row = -1
        self.generator: torch.Generator | None = None
        self._keys: list[str] = []

    def __repr__(self) -> str:
        state = f"{self.state}: {self.reason}" if self.reason else self.state
        return f"Request({len(self.prompt)} + {len(self.output)} tokens, {state})"

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together, and the one that a step on its way will bring."""
        return len(self.prompt) + len(self.output) + self.coming

    @property
    def cached(self) -> int:
        """Tokens whose keys and values lie in the cache."""
        return 0 if self.table is None else self.table.num_tokens

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.state in (FINISHED, FAILED, CANCELLED)

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the ids of positions `start` to `end - 1`, as far as they are known."""
        length = len(self.prompt)
        if start >= length:
            return self.output[start - length : end - length]
        return self.prompt[start:end] + self.output[: max(0, end - length)]

    def keys(self, num_blocks: int, block_size: int) -> list[str]:
        """Return content keys of the first whole blocks."""
        have = len(self._keys)
        if num_blocks > have:
            fresh = self.tokens(have * block_size, num_blocks * block_size)
            self._keys += block_keys(fresh, block_size, parent=self._keys[-1] if have else None)
        return self._keys[:num_blocks]

    def end(self, state: str, reason: str, error: VattnError | None = None) -> None:
        """Note how the request ended."""
        self.state, self.reason, self.error = state, reason, error
        self.coming = 0
        self.ended = time.monotonic()

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
