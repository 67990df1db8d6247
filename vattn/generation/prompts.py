"""Prompts as they come: texts or token ids; and whether a model and its tokenizer can meet a sampling."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vattn.errors import ConfigError, RequestError, VattnError
from vattn.generation.chat import Chat, is_conversation
from vattn.generation.detokenizer import takes
from vattn.generation.prompt_embeddings import PromptEmbeddings
from vattn.generation.sampling import Sampling

Prompt = str | Sequence[int] | Mapping[str, Any] | Chat | PromptEmbeddings
"""A text, token ids, what a tokenizer or a processor returned, a conversation, or embeddings."""


def read_prompt(prompt: Any, tokenizer: Any, vocab_size: int | None, special: bool = True) -> list[int]:
    """Return a prompt's token ids.

    Args:
        special: whether the tokenizer may put tokens around a text, such as BOS.

    Raises:
        RequestError: a text without a tokenizer, one that it refuses, or what is no token id.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "a text without a tokenizer", "token ids", "give the generator or embedder tokenizer=, or pass ids"
            )
        try:
            # A chat template has written the BOS token already.
            bos = getattr(tokenizer, "bos_token", None)
            alone = not special or (isinstance(bos, str) and prompt.startswith(bos))
            alone = alone and takes(tokenizer.encode, "add_special_tokens")
            prompt = tokenizer.encode(prompt, **({"add_special_tokens": False} if alone else {}))
        except Exception as error:
            raise RequestError(
                f"a text that the tokenizer refuses: {error}", "texts that it can encode", "check the prompt"
            ) from error
    if is_conversation(prompt):
        raise RequestError("a list of messages", "a vattn.Chat of them", "pass vattn.Chat(messages)")
    if isinstance(prompt, Chat):
        prompt = prompt.token_ids(tokenizer)
    elif isinstance(prompt, Mapping) and "input_ids" in prompt:
        rows = encoded_rows(prompt)
        if len(rows) != 1:
            raise RequestError(f"a prompt of {len(rows)} sequences", "one", "pass each as a prompt")
        prompt = rows[0]
    try:
        if hasattr(prompt, "tolist"):
            # Tensors and arrays, such as those of return_tensors="pt": one sequence, in a batch or not.
            prompt = (prompt[0] if getattr(prompt, "ndim", 1) == 2 and len(prompt) == 1 else prompt).tolist()
        tokens = list(prompt)
        if isinstance(prompt, (bytes, set, frozenset, Mapping)) or any(isinstance(token, bool) for token in tokens):
            raise TypeError("no sequence of token ids")
        ids = [operator.index(token) for token in tokens]
    except (TypeError, RuntimeError) as error:  # Tensors on meta have no ids.
        raise RequestError(
            f"a prompt of {str(prompt)[:60]!r}",
            "a text, a flat sequence of token ids, or what a tokenizer returned",
            "encode it first, each prompt apart",
        ) from error
    wrong = [token for token in ids if token < 0 or (vocab_size is not None and token >= vocab_size)]
    if wrong:
        allowed = "ids from 0 up" if vocab_size is None else f"ids from 0 to {vocab_size - 1}, the model's vocabulary"
        raise RequestError(f"token id {wrong[0]} in a prompt", allowed, "encode it with the model's tokenizer")
    return ids


def encoded_rows(encoded: Mapping[str, Any]) -> list[Any]:
    """Return the token ids of each sequence that a tokenizer encoded, without padding.

    Raises:
        RequestError: inputs besides ids, or a mask of other lengths.
    """
    others = sorted(set(encoded) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
    if others:
        raise RequestError(
            f"a prompt with {', '.join(others)}", "input_ids and attention_mask, for a text model", "pass its input_ids"
        )
    named = next((name for name in sorted(encoded) if name.endswith("token_type_ids") and _some(encoded[name])), None)
    if named is not None:
        raise RequestError(
            f"a prompt with {named} other than 0",
            "one kind of token",
            f"leave {named} out; with images, pass all that the processor returned",
        )
    return unpadded_rows(encoded, "input_ids")


def unpadded_rows(encoded: Mapping[str, Any], name: str) -> list[Any]:
    """Return what a tokenizer gave each sequence under a name, such as `token_type_ids`, without padding.

    Raises:
        RequestError: no sequences, or a mask of other lengths.
    """
    rows = listed_rows(name, encoded[name])
    if encoded.get("attention_mask") is None:
        return rows
    mask = listed_rows("attention_mask", encoded["attention_mask"])
    if [*map(len, rows)] != [*map(len, mask)]:
        raise RequestError(
            f"an attention_mask of another shape than {name}", "a number for each id", "pass what a tokenizer returned"
        )
    return [[value for value, real in zip(*row, strict=True) if real] for row in zip(rows, mask, strict=True)]


def has_media(prompt: Any) -> bool:
    """Return whether a prompt is what a processor returned for images, sound or other media."""
    if not isinstance(prompt, Mapping) or not {"input_ids", "input_features", "input_values"} & prompt.keys():
        return False
    return any(name not in ("input_ids", "attention_mask") and not name.endswith("token_type_ids") for name in prompt)


def listed_rows(name: str, values: Any) -> list[Any]:
    """Return the rows of a batch, or the one of a single sequence.

    Raises:
        RequestError: no sequences.
    """
    try:
        rows = values.tolist() if hasattr(values, "tolist") else values
    except RuntimeError:  # Tensors on meta hold nothing.
        rows = None
    nested = isinstance(rows, (list, tuple)) and len(rows) > 0 and isinstance(rows[0], (list, tuple))
    found = list(rows) if nested else [rows]
    if not all(isinstance(row, Sequence) and not isinstance(row, (str, bytes)) for row in found):
        raise RequestError(
            f"{name}={str(values)[:60]}", "a list of numbers, or one for each prompt", "pass what a tokenizer returned"
        )
    return found


def _some(values: Any) -> bool:
    values = values.tolist() if hasattr(values, "tolist") else values
    return any(map(_some, values)) if isinstance(values, (list, tuple)) else bool(values)


def check_sampling(sampling: Any, tokenizer: Any, vocab_size: int | None) -> None:
    """Refuse what is no sampling of a request.

    Raises:
        ConfigError: something else.
        RequestError: settings that this model or tokenizer can never meet.
    """
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling of type {type(sampling).__name__}", "vattn.Sampling", "vattn.Sampling(...)")
    if sampling.stop_strings and tokenizer is None:
        raise RequestError(
            f"stop_strings={sampling.stop_strings!r} for a generator without a tokenizer",
            "stop_token_ids, or a generator with tokenizer=",
            "give the generator tokenizer=",
        )
    if sampling.skip_special_tokens is not None and not takes(
        getattr(tokenizer, "decode", None), "skip_special_tokens"
    ):
        raise RequestError(
            f"skip_special_tokens={sampling.skip_special_tokens} for a tokenizer without this option",
            "None, or a tokenizer of transformers",
            "leave it out",
        )
    check_stop_ids(sampling.stop_token_ids or (), vocab_size, RequestError)
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", [token for word in sampling.bad_words if not isinstance(word, str) for token in word]),
        ("logprobs", [(sampling.logprobs or 1) - 1]),
        ("prompt_logprobs", [(sampling.prompt_logprobs or 1) - 1]),
    ):
        if vocab_size is not None and max(ids, default=0) >= vocab_size:
            number = max(ids) + name.endswith("logprobs")
            allowed = f"up to {vocab_size}" if name.endswith("logprobs") else f"ids from 0 to {vocab_size - 1}"
            raise RequestError(f"{name} with {number} for a vocabulary of {vocab_size}", allowed, f"change {name}")


def read_bad_words(sampling: Sampling, tokenizer: Any, vocab_size: int | None) -> list[list[int]]:
    """Return the token ids of what must not appear: a text as it is at the beginning of a text, and after a space.

    Raises:
        RequestError: a text without a tokenizer, or one that it refuses.
    """
    words: list[list[int]] = []
    for word in sampling.bad_words:
        forms: list[Any] = [word, f" {word}"] if isinstance(word, str) else [word]
        words += [read_prompt(form, tokenizer, vocab_size, special=False) for form in forms]
    return [word for index, word in enumerate(words) if word and word not in words[:index]]


def check_stop_ids(stop_token_ids: Iterable[int], vocab_size: int | None, error: type[VattnError]) -> None:
    """Refuse stop tokens beyond a vocabulary by an error of some class."""
    never = [token for token in stop_token_ids if vocab_size is not None and token >= vocab_size]
    if never:
        raise error(
            f"stop_token_ids with {never[0]}, which the model never chooses",
            f"ids from 0 to {(vocab_size or 0) - 1}",
            "take the ids of the model's own tokenizer",
        )
