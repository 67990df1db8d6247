"""Options of the command line that become a `Sampling`; what is not given is the generator's default."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vattn.config.files import why_unreadable
from vattn.errors import ConfigError
from vattn.generation.grammar import Grammar
from vattn.generation.sampling import Sampling

_NAMES = frozenset(field.name for field in fields(Sampling))


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options; the destination of each is a field of `Sampling`, except for grammars."""
    group = parser.add_argument_group(
        "sampling", "what is not given here is as the generation config of the model says, and greedy without one"
    )
    add = group.add_argument
    add("--max-new-tokens", type=int, help="default that of the model, or 64")
    add("--min-tokens", type=int)
    add("--temperature", type=float, help="0 is greedy")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--min-p", type=float)
    add("--seed", type=int)
    add("--repetition-penalty", type=float)
    add("--presence-penalty", type=float)
    add("--frequency-penalty", type=float)
    add("--stop", action="append", dest="stop_strings", metavar="TEXT", help="end a text where this appears")
    add("--stop-token-ids", type=int, nargs="*", metavar="ID", help="default the model's own; none to go on past them")
    add("--forced-eos-token-id", type=int, metavar="ID", help="end a text that reaches its limit as at this token")
    add("--bad-word", action="append", dest="bad_words", metavar="TEXT", help="never generate this")
    add("--logit-bias", action="append", type=_bias, metavar="ID=VALUE", help="add to a token's logit; -inf forbids it")
    add("--allowed-token-ids", type=int, nargs="+", metavar="ID")
    add("--logprobs", type=int, metavar="K", help="log-probabilities of each token and the K likeliest (with --json)")
    add("--prompt-logprobs", type=int, metavar="K", help="the same for the tokens of the prompt (with --json)")
    add("--n", type=int, help="outputs for each prompt")
    add("--best-of", type=int, help="generate this many outputs and keep the --n likeliest")
    add("--json-schema", type=Path, metavar="FILE", help="the output follows this JSON schema (needs xgrammar)")
    add("--regex", help="the output follows this regular expression (needs xgrammar)")
    add("--ebnf", type=Path, metavar="FILE", help="the output follows this grammar (needs xgrammar)")
    add(
        "--special-tokens", action="store_false", default=None, dest="skip_special_tokens", help="keep them in the text"
    )


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Sampling` that the command line gives.

    Raises:
        ConfigError: a grammar file that cannot be read, or several grammars.
    """
    given = {name: value for name, value in vars(options).items() if name in _NAMES and value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    texts = {"json_schema": _read(options.json_schema), "regex": options.regex, "ebnf": _read(options.ebnf)}
    grammar = {name: text for name, text in texts.items() if text is not None}
    return given | ({"grammar": Grammar(**grammar)} if grammar else {})


def sampling_of(default: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """Return a sampling with fields as the command line or a line of a file gives them.

    A grammar may be a mapping, such as `{"regex": "yes|no"}`.

    Raises:
        ConfigError: a value that `Sampling` refuses.
        UnknownOptionError: a field that it does not have.
    """
    changes = dict(changes)
    grammar = changes.get("grammar")
    if isinstance(grammar, str):
        raise ConfigError(f"grammar={grammar!r:.80}", "a mapping", f"grammar={json.dumps({'regex': grammar}):.80}")
    if isinstance(grammar, Mapping):
        changes["grammar"] = Grammar(**grammar)
    return replace(default, **changes)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}. Allowed: ID=VALUE, such as 42=-1.5") from error


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {why_unreadable(error)}", "a readable text file", "check the path") from error
