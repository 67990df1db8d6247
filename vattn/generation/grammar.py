"""`Grammar`: structured outputs, by a JSON schema, a regular expression or EBNF; xgrammar finds allowed tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vattn.config.keywords import known_keywords
from vattn.errors import ConfigError, MissingPackageError, RequestError


@known_keywords({"json": "json_schema={value}", "grammar": "ebnf={value}"})
@dataclass(frozen=True)
class Grammar:
    """Say what an output must follow; needs xgrammar.

    Attributes:
        json_schema: a JSON schema: a mapping, its text, or a class of pydantic's `BaseModel`; `{}` for any JSON.
        regex: a regular expression for the whole output.
        ebnf: a grammar in the EBNF of llama.cpp (GBNF) with a rule `root`.

    Raises:
        ConfigError: none or several of them, or one of another type.
        UnknownOptionError: a name that is none of these.

    Example:
        >>> import vattn
        >>> sampling = vattn.Sampling(grammar=vattn.Grammar(regex="yes|no"))
    """

    json_schema: Any = field(default=None, hash=False)
    regex: str | None = None
    ebnf: str | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ConfigError(
                f"Grammar({', '.join(given)})", "one of json_schema, regex and ebnf", "Grammar(json_schema={...})"
            )
        name, value = next(iter(given.items()))
        schema = isinstance(value, Mapping) or hasattr(value, "model_json_schema")
        if not isinstance(value, str) and not (name == "json_schema" and schema):
            raise ConfigError(
                f"Grammar({name}={value!r:.80})", "a text, or a mapping for json_schema", f"change {name}"
            )


class GrammarCompiler:
    """Compile grammars for a tokenizer; each one once.

    Args:
        tokenizer: of transformers.
        vocab_size: of the model's logits.
        stop_token_ids: of the generator.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None, stop_token_ids: Iterable[int]) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise MissingPackageError(
                "a grammar without xgrammar", "xgrammar", "pip install 'vattn[grammar]'"
            ) from error
        self._xgrammar: Any = xgrammar
        try:
            stops = sorted(stop_token_ids) or None
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops)
        except Exception as error:
            raise RequestError(
                f"a grammar with a tokenizer that xgrammar refuses: {error}",
                "tokenizers of transformers",
                "give the generator tokenizer=AutoTokenizer.from_pretrained(folder)",
            ) from error
        self._compiler: Any = xgrammar.GrammarCompiler(info)
        self.vocab_size: int = info.vocab_size

    def matcher(self, grammar: Grammar, stop_token_ids: Iterable[int]) -> GrammarMatcher:
        """Return a matcher of one output.

        Raises:
            RequestError: a grammar that xgrammar refuses, or an output without a stop token.
        """
        stops = sorted(stop_token_ids)
        if not stops:
            raise RequestError(
                "a grammar for a request without stop tokens",
                "a stop token, which ends the output where the grammar does",
                "Sampling(stop_token_ids=[tokenizer.eos_token_id])",
            )
        try:
            compiled = self._compile(grammar)
        except Exception as error:
            text = str(error).strip().splitlines()[-1:] or [""]
            raise RequestError(
                f"a grammar that xgrammar refuses: {text[0]:.200}", "what xgrammar compiles", "correct the grammar"
            ) from error
        return GrammarMatcher(self._xgrammar, compiled, stops, self.vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.regex is not None:
            return self._compiler.compile_regex(grammar.regex)
        if grammar.ebnf is not None:
            return self._compiler.compile_grammar(grammar.ebnf)
        schema = grammar.json_schema
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        return self._compiler.compile_json_schema(schema if isinstance(schema, str) else json.dumps(dict(schema)))


class GrammarMatcher:
    """Which tokens may follow the output of one request."""

    def __init__(self, xgrammar: Any, compiled: Any, stop_token_ids: list[int], vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop_token_ids)
        self._bitmask: Tensor = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._accepted = 0

    def bitmask(self, output: Sequence[int]) -> Tensor:
        """Return int32 `[ceil(vocab_size / 32)]`, a bit for each token that may follow; the next call overwrites it.

        Raises:
            RequestError: the output has a token that the grammar does not allow.
        """
        if self._accepted > len(output):
            # A step that failed took tokens back.
            self._matcher.reset()
            self._accepted = 0
        for token in output[self._accepted :]:
            if not self._matcher.accept_token(token):
                raise RequestError(
                    f"token {token}, which the grammar does not allow",
                    "logits processors that forbid tokens and allow none",
                    "leave out the logits processors",
                )
            self._accepted += 1
        self._matcher.fill_next_token_bitmask(self._bitmask, 0)
        return self._bitmask[0]


def apply_bitmask(scores: Tensor, rows: Tensor, bitmasks: Tensor) -> None:
    """Set scores to `-inf`, in place, where a bitmask has no bit.

    Args:
        scores: fp32 `[n, vocab_size]`.
        rows: int64 `[m]`.
        bitmasks: int32 `[m, words]`; tokens beyond them are forbidden.
    """
    bits = bitmasks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmasks.device) & 1
    allowed = bits.flatten(1)[:, : scores.shape[1]].bool()
    allowed = torch.nn.functional.pad(allowed, (0, scores.shape[1] - allowed.shape[1]))
    scores.index_copy_(0, rows, scores.index_select(0, rows).masked_fill(~allowed, -torch.inf))
