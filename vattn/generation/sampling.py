"""`Sampling`: how a request's tokens are chosen, and when it ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vattn.config.arguments import integer
from vattn.config.keywords import known_keywords
from vattn.config.other_names import PROMPT, PROMPTS, SAMPLING, of_sampling
from vattn.errors import ConfigError
from vattn.generation.grammar import Grammar


@known_keywords(SAMPLING)
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
        presence_penalty: is subtracted from the logits of tokens that the output has, from -2 to 2.
        frequency_penalty: is subtracted once for each time that the output has a token, from -2 to 2.
        logit_bias: what is added to the logits of some token ids, by id; `-inf` forbids a token.
        allowed_token_ids: only these are chosen; `None`: all.
        bad_words: texts or sequences of token ids that never appear whole in the output. Texts need a tokenizer.
        min_tokens: no stop token is chosen and no stop string looked for before the output has this many tokens; up to
            `max_new_tokens`.
        logprobs: how many of the likeliest tokens get a log-probability beside the chosen one, for each token of the
            output; `None`: no log-probabilities. They are those of the model's own logits.
        prompt_logprobs: the same for the tokens of the prompt, of which none is taken from the cache then.
        n: how many outputs a prompt gets, each with a seed of its own; blocks of the prompt are shared.
        best_of: how many outputs are generated, of which `Request.best` returns the `n` most likely ones; `None`: `n`.
        grammar: what the output must follow; needs xgrammar and a tokenizer of transformers.
        skip_special_tokens: whether the text is without special tokens; `None`: if the tokenizer has the option.
        stop_strings: end the text where one of these appears; it is removed. Needs a tokenizer.
        stop_token_ids: end at one of these tokens, which is kept out of the output; `None`: the model's own EOS
            tokens, `()`: none.
        forced_eos_token_id: stands for the last token that the limit allows: an output that reaches it ends as at this
            stop token, which is kept out of it; `None`: such an output ends with the token that was chosen.
        seed: from 0 to 2**64 - 1. A draw depends on it, the token's position and the model's probabilities alone, so
            the other requests of a batch change nothing.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    grammar: Grammar | None = None
    skip_special_tokens: bool | None = None
    forced_eos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, (right, allowed) in _RANGES.items():
            if not right(getattr(self, name)):
                raise _refused(name, getattr(self, name), allowed)
        for name, (right, allowed) in _ITEMS.items():
            object.__setattr__(self, name, _items(name, getattr(self, name), right, allowed))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "bad_words", tuple(map(_word, self.bad_words)))
        if self.min_tokens > self.max_new_tokens:
            raise _refused("min_tokens", self.min_tokens, f"an int up to max_new_tokens={self.max_new_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise _refused("best_of", self.best_of, f"None, or an int from n={self.n} up")
        ignored = [name for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(self, name) != off]
        if self.temperature == 0 and ignored:
            raise ConfigError(
                f"Sampling({ignored[0]}={getattr(self, ignored[0])}) with temperature=0, which is greedy",
                "a temperature above 0, or greedy without it",
                "set temperature=1.0 to sample",
            )
        if self.temperature == 0 and self.candidates > 1:
            raise ConfigError(
                f"Sampling(n={self.n}, best_of={self.best_of}) with temperature=0, which gives equal outputs",
                "a temperature above 0, or one output",
                "set temperature=1.0 to sample",
            )

    @property
    def candidates(self) -> int:
        """How many outputs are generated for a prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def penalised(self) -> bool:
        """Whether tokens become more or less likely by how often they were there."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token of the model's own logits is taken."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen by other logits than the model's own."""
        changes = self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens
        return bool(changes) or self.needs_history

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token takes all tokens before it, on the host."""
        sequences = any(isinstance(word, str) or len(word) > 1 for word in self.bad_words)
        return self.penalised or sequences or self.grammar is not None or bool(self.logits_processors)


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
    "presence_penalty": (lambda value: _number(value) and abs(value) <= 2, "a number from -2 to 2; 0 for none"),
    "frequency_penalty": (lambda value: _number(value) and abs(value) <= 2, "a number from -2 to 2; 0 for none"),
    "min_tokens": (_whole, "an int from 0 up"),
    "logprobs": (lambda value: value is None or _whole(value), "None, or an int from 0 up"),
    "prompt_logprobs": (lambda value: value is None or _whole(value), "None, or an int from 0 up"),
    "grammar": (lambda value: value is None or isinstance(value, Grammar), "a vattn.Grammar, or None"),
    "skip_special_tokens": (lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "forced_eos_token_id": (lambda value: value is None or _whole(value), "None, or a token id from 0 up"),
    "n": (lambda value: _whole(value, 1), "an int, at least 1"),
    "best_of": (lambda value: value is None or _whole(value, 1), "None, or an int from n up"),
    "seed": (lambda value: _whole(value, 0, 2**64 - 1), "an int from 0 to 2**64 - 1"),
}
_ITEMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stop_strings": (lambda item: isinstance(item, str) and bool(item), "a tuple of texts, none empty"),
    "stop_token_ids": (_whole, "a tuple of token ids from 0 up, () for none, None for the model's own"),
    "allowed_token_ids": (_whole, "a tuple of token ids from 0 up, or None for all"),
    "bad_words": (
        lambda word: _word(word) is not None and len(word) > 0,
        "a tuple of texts or of tuples of token ids, none empty",
    ),
    "logits_processors": (callable, "a tuple of logits processors"),
    "stopping_criteria": (callable, "a tuple of stopping criteria"),
}


_EXAMPLES = {
    "stop_strings": '["END"]',
    "stop_token_ids": "[2]",
    "allowed_token_ids": "[5, 7]",
    "bad_words": '["never"]',
    "logit_bias": "{5: -2.0}",
}


def _items(name: str, value: Any, right: Callable[[Any], bool], allowed: str) -> tuple[Any, ...] | None:
    """Return a sequence as a tuple, or refuse it."""
    if value is None and name in ("stop_token_ids", "allowed_token_ids"):
        return None
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(map(right, value)):
        raise _refused(name, value, allowed)
    if name == "allowed_token_ids" and not value:
        raise _refused(name, value, allowed)
    return tuple(map(operator.index, value)) if name.endswith("token_ids") else tuple(value)


def _word(word: Any) -> Any:
    """Return a text, or token ids as a tuple; `None` for what is neither."""
    if isinstance(word, str):
        return word
    return tuple(map(operator.index, word)) if isinstance(word, (list, tuple)) and all(map(_whole, word)) else None


def _biases(given: Any) -> dict[int, float]:
    """Return a mapping from token ids to what is added to their logits, or refuse it."""
    try:
        pairs = dict(given)
    except (TypeError, ValueError):
        pairs = {None: given}
    for token, value in pairs.items():
        if not _whole(token) or not (_number(value) or value == -math.inf):
            raise _refused("logit_bias", given, "a mapping from token ids to numbers, or -inf to forbid a token")
    return {operator.index(token): float(value) for token, value in pairs.items()}


def _refused(name: str, value: Any, allowed: str) -> ConfigError:
    example = _EXAMPLES.get(name)
    if name == "grammar" and isinstance(value, str):
        example = f"vattn.Grammar(regex={value!r:.80})"
    fix = f"pass {name}={example}" if example else f"leave {name} out for its default"
    return ConfigError(f"Sampling({name}={value!r:.80})", allowed, fix)


FIELDS = [each.name for each in fields(Sampling)]

takes_sampling, takes_prompt, takes_prompts = (
    known_keywords({**of_sampling(FIELDS), **others}) for others in ({}, PROMPT, PROMPTS)
)
"""Of functions with an argument `sampling`, and perhaps a prompt, or several."""
