"""`Sampling`: how a request's tokens are chosen, and when it ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vattn.config.arguments import integer
from vattn.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Say how tokens are chosen and when to stop.

    Attributes:
        max_new_tokens: the most that are generated.
        temperature: 0 is greedy: the likeliest token, always.
        top_k: sample from this many likeliest tokens; 0 for all.
        top_p: sample from the most probable tokens with probabilities that add up to this; 1 for all.
        min_p: leave out tokens less likely than this share of the likeliest; 0 for none.
        repetition_penalty: above 1 makes tokens of prompt and output less likely.
        stop_strings: end the text where one of these appears; it is removed. Needs a tokenizer.
        stop_token_ids: end at one of these tokens, which is kept out of the output; `None`: the model's own end
            tokens, `()`: none.
        seed: from 0 to 2**64 - 1. The draw for a token depends on it, on the token's place and on the model's chances
            alone, so that the other requests of a batch change nothing.
        logits_processors, stopping_criteria: further objects of transformers: `LogitsProcessor`s are called with
            `[1, L]` ids and `[1, vocab_size]` scores and return scores, `StoppingCriteria` with the ids and no scores.
            One that raises ends its request with an error, and no other.

    Raises:
        ConfigError: a value of another type or out of range, or one that a temperature of 0 would ignore.
        UnknownOptionError: a name that is none of these.

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
        for name, (right, allowed) in _RANGES.items():
            if not right(getattr(self, name)):
                raise _refused(name, getattr(self, name), allowed)
        for name, (right, allowed) in _ITEMS.items():
            object.__setattr__(self, name, _items(name, getattr(self, name), right, allowed))
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
        return self.temperature == 0 and not self.needs_history

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token takes all tokens before it, on the host."""
        return self.repetition_penalty != 1 or bool(self.logits_processors)


def _whole(value: Any, least: int = 0, most: float = math.inf) -> bool:
    number = integer(value)
    return number is not None and least <= number <= most


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: _whole(value, 1), "an int, at least 1"),
    "temperature": (lambda value: _number(value) and value >= 0, "a finite number from 0 up"),
    "top_k": (_whole, "0 for all tokens, or a positive int"),
    "top_p": (lambda value: _number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
    "min_p": (lambda value: _number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: _number(value) and value > 0, "a positive number; 1 for none"),
    "seed": (lambda value: _whole(value, 0, 2**64 - 1), "an int from 0 to 2**64 - 1"),
}
_ITEMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stop_strings": (lambda item: isinstance(item, str) and bool(item), "a tuple of texts, none empty"),
    "stop_token_ids": (_whole, "a tuple of token ids from 0 up, () for none, None for the model's own"),
    "logits_processors": (callable, "a tuple of logits processors"),
    "stopping_criteria": (callable, "a tuple of stopping criteria"),
}


def _items(name: str, value: Any, right: Callable[[Any], bool], allowed: str) -> tuple[Any, ...] | None:
    """Return a sequence as a tuple, or refuse it."""
    if value is None and name == "stop_token_ids":
        return None
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(map(right, value)):
        raise _refused(name, value, allowed)
    return tuple(map(operator.index, value)) if name == "stop_token_ids" else tuple(value)


def _refused(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"Sampling({name}={value!r:.80})", allowed, f"change {name}")
