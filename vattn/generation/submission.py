"""`Submission`: a prompt as it comes and how to run it; `SubmissionReader` makes requests of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import NoneType
from typing import Any

from torch import nn

from vattn.errors import ConfigError, RequestError, VattnError
from vattn.generation.chat import Chat, is_conversation
from vattn.generation.grammar import GrammarCompiler, GrammarMatcher
from vattn.generation.prompt_embeddings import PromptEmbeddings
from vattn.generation.prompts import (
    Prompt,
    check_sampling,
    encoded_rows,
    has_media,
    listed_rows,
    read_bad_words,
    read_prompt,
)
from vattn.generation.request import FAILED, Request
from vattn.generation.sampling import Sampling
from vattn.generation.setup import longest_encoder
from vattn.kv_transfer.connector import Salt, salt_digest
from vattn.layers.lora import Adapter, Adapters
from vattn.metadata.prompt_inputs import PromptInputs


@dataclass(frozen=True)
class Submission:
    """A prompt as it comes, and how to run it.

    Attributes:
        prompt, sampling, cache_salt, adapter: see `Generator.add`.
    """

    prompt: Prompt
    sampling: Sampling | None = None
    cache_salt: Salt = ""
    adapter: str | None = None


_KINDS: dict[str, tuple[type, ...]] = {
    "sampling": (Sampling, NoneType),
    "cache_salt": (str, bytes, int),
    "adapter": (str, NoneType),
}
"""Types of a value for all prompts."""


def read_submissions(prompts: Any, tokenizer: Any, **settings: Any) -> list[Submission]:
    """Return each prompt with its settings.

    Args:
        settings: the other attributes of `Submission`, one value for all prompts or one each.

    Raises:
        ConfigError: no list of prompts, texts without a tokenizer, chats without a chat template, or settings that are
            neither one nor as many as the prompts.
    """
    if has_media(prompts):
        if any(_num_rows(name, value) != 1 for name, value in prompts.items()):
            raise ConfigError(
                f"prompts={sorted(prompts)}, a batch of prompts that are more than token ids",
                "a list of prompts",
                "call the processor for each prompt, and pass a list of what it returned",
            )
        prompts = [prompts]
    elif isinstance(prompts, Mapping) and "input_ids" in prompts:
        prompts = encoded_rows(prompts)
    if isinstance(prompts, (str, bytes, Mapping, Chat, PromptEmbeddings)) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts={prompts!s:.60}", "a list of prompts", "pass [prompt] for one")
    prompts = list(prompts)
    if is_conversation(prompts):
        raise ConfigError(
            "prompts that are the messages of a chat", "a list of prompts", "call generator.chat(messages)"
        )
    for index, prompt in enumerate(prompts):
        _check_kind(index, prompt, tokenizer)
    each = {name: _each(name, given, len(prompts)) for name, given in settings.items()}
    for salt in each.get("cache_salt", ()):
        salt_digest(1, salt, "cache_salt")
    return [
        Submission(prompt, **{name: values[index] for name, values in each.items()})
        for index, prompt in enumerate(prompts)
    ]


class SubmissionReader:
    """Make requests of submissions.

    Args:
        model: may have a `vocab_size`.
        tokenizer: of texts; `None` for none.
        block_size: of the cache.
        adapters: of the model; `None` for none.
        on_ranks: whether other ranks run the model too.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, block_size: int, adapters: Adapters | None, on_ranks: bool
    ) -> None:
        self._model, self._tokenizer, self._block_size, self._adapters = model, tokenizer, block_size, adapters
        self._on_ranks = on_ranks
        # Made by the first request that has a grammar.
        self._grammars: GrammarCompiler | None = None

    def read(self, submission: Submission, default: Sampling, stop_token_ids: frozenset[int]) -> tuple[Request, ...]:
        """Return the requests of a submission, one for each choice.

        Args:
            default: the sampling of a submission without one.
            stop_token_ids: those of a sampling without any.

        Raises:
            VattnError: see `Generator.add`.
        """
        salt_digest(self._block_size, submission.cache_salt, "cache_salt")
        vocab_size = getattr(self._model, "vocab_size", None)
        sampling = default if submission.sampling is None else submission.sampling
        check_sampling(sampling, self._tokenizer, vocab_size)
        ids, inputs = self._prompt(submission.prompt, sampling, vocab_size)
        ends = stop_token_ids if sampling.stop_token_ids is None else frozenset(sampling.stop_token_ids)
        words = read_bad_words(sampling, self._tokenizer, vocab_size)
        matchers = [self._matcher(sampling, ends, stop_token_ids) for _ in range(sampling.candidates)]
        # Nothing fails once a request uses an adapter, which could not be removed then.
        with nullcontext() if self._adapters is None else self._adapters.lock:
            adapter = None if submission.adapter is None else self._adapter(submission.adapter)
            uncounted = None if longest_encoder(self._model) else getattr(self._model, "padding_token", None)
            choices = tuple(
                Request(ids, sampling, ends, submission.cache_salt, words, index, adapter, inputs, uncounted)
                for index in range(sampling.candidates)
            )
        for request, matcher in zip(choices, matchers, strict=True):
            request.choices, request.matcher = choices, matcher
        return choices

    def _matcher(
        self, sampling: Sampling, ends: frozenset[int], stop_token_ids: frozenset[int]
    ) -> GrammarMatcher | None:
        """Return what a request's grammar allows; `None` without a grammar."""
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._tokenizer, getattr(self._model, "vocab_size", None), stop_token_ids)
        return self._grammars.matcher(sampling.grammar, ends)

    def _prompt(self, prompt: Any, sampling: Sampling, vocab_size: int | None) -> tuple[list[int], PromptInputs | None]:
        """Return the ids of a prompt, and what it is besides them."""
        with_media = has_media(prompt)
        if longest_encoder(self._model):
            return self._encoder_prompt(prompt, vocab_size)
        if not with_media and not isinstance(prompt, PromptEmbeddings):
            ids = read_prompt(prompt, self._tokenizer, vocab_size)
            self._check_placeholders(ids)
            self._check_padding(ids)
            return ids, None
        if self._on_ranks:
            raise RequestError(
                "embeddings or images for a generator with group=", "token ids", "run such prompts on one device"
            )
        if with_media:
            read: Any = getattr(self._model, "read_media", None)
            return read(prompt) if read is not None else (read_prompt(prompt, self._tokenizer, vocab_size), None)
        inputs = prompt.inputs(self._model, sampling)
        if prompt.token_ids is None:
            return [0] * prompt.rows.shape[0], inputs
        ids = read_prompt(prompt.token_ids, None, vocab_size)
        self._check_padding(ids)
        return ids, inputs

    def _encoder_prompt(self, prompt: Any, vocab_size: int | None) -> tuple[list[int], PromptInputs]:
        """Return the ids of the decoder's prompt, and the states of the encoder, which the prompt is for."""
        name = type(getattr(self._model, "wrapped", self._model)).__name__
        if isinstance(prompt, PromptEmbeddings) or self._on_ranks:
            got = "a generator with group=" if self._on_ranks else "PromptEmbeddings"
            raise RequestError(
                f"{got} for {name}, an encoder-decoder model", "its own inputs on one device", "pass token ids"
            )
        given: dict[str, Any] = dict(prompt) if has_media(prompt) else {"input_ids": prompt}
        if "input_ids" in given:
            ids, mask = given["input_ids"], given.pop("attention_mask", None)
            if mask is not None:
                ids = {"input_ids": ids, "attention_mask": mask}
            given["input_ids"] = read_prompt(ids, self._tokenizer, None)
        if given.get("decoder_input_ids") is not None:
            given["decoder_input_ids"] = read_prompt(given["decoder_input_ids"], None, vocab_size)
        read: Any = self._model.read_media
        first, inputs = read(given)
        self._check_padding(first)
        return first, inputs

    def _check_placeholders(self, ids: list[int]) -> None:
        """Refuse places of images in a text: the model would read the embedding of the place itself."""
        kinds: Mapping[int, str] = getattr(self._model, "placeholders", {})
        token = next((token for token in ids if token in kinds), None) if kinds else None
        if token is not None:
            kind = kinds[token]
            raise RequestError(
                f"token id {token} in a prompt, the place of a part of the {kind}, without {kind}",
                f"what the processor returned for text and {kind}",
                "pass processor(..., return_tensors='pt'), or leave the token out",
            )

    def _check_padding(self, ids: list[int]) -> None:
        """Refuse padding where it changes positions: the model skips it, and its own `generate` does not."""
        token = getattr(self._model, "padding_token", None)
        if token is not None and token in ids:
            name = type(self._model.wrapped).__name__
            raise RequestError(
                f"the padding token {token} in a prompt of {name}, which counts no position for it",
                "prompts without padding",
                "leave it out, or pass what a tokenizer returned, with its attention_mask",
            )

    def refused(self, submission: Submission, error: VattnError) -> Request:
        """Return a failed request of a submission, with the ids of its prompt if it has any."""
        sampling = submission.sampling if isinstance(submission.sampling, Sampling) else Sampling()
        try:
            ids = read_prompt(submission.prompt, self._tokenizer, None)
        except VattnError:
            ids = []
        request = Request(ids, sampling)
        request.end(FAILED, "error", error)
        return request

    def _adapter(self, name: str) -> Adapter:
        """Return a loaded adapter by its name."""
        if self._adapters is None:
            raise RequestError(
                f"adapter={name!r:.80} for a generator whose model has no adapters",
                "adapter=None",
                "enable_adapters(model) before Generator(model)",
            )
        if not isinstance(name, str):
            raise ConfigError(f"adapter={name!r:.80}", "the name of a loaded adapter, or None", "pass one name")
        return self._adapters.get(name)


def _num_rows(name: str, value: Any) -> int:
    """Return how many prompts an input of a processor is for; 1 for those that do not say."""
    if name.endswith("input_ids"):
        return 1 if value is None else len(listed_rows(name, value))
    shape = getattr(value, "shape", None)
    return shape[0] if shape and name in ("input_features", "input_values") else 1


def _each(name: str, given: Any, count: int) -> list[Any]:
    """Return a setting for each prompt: the same, or one each."""
    if isinstance(given, _KINDS[name]):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray)):
        raise ConfigError(f"{name} of type {type(given).__name__}", f"one {name}, or a list of one each", "pass one")
    if len(given) != count:
        raise ConfigError(f"{len(given)} {name}s for {count} prompts", "one, or one each", "check the list")
    return list(given)


def _check_kind(index: int, prompt: Any, tokenizer: Any) -> None:
    """Refuse what is no prompt of this generator, whatever it holds: a mistake of the program, not of one request."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError(
                f"prompts[{index}]={prompt!r:.60}, a text for a generator without a tokenizer",
                "lists of token ids",
                "give the generator tokenizer=, or pass ids",
            )
        return
    if is_conversation(prompt):
        raise ConfigError(
            f"prompts[{index}], a list of messages",
            "a vattn.Chat of them",
            "pass vattn.Chat(messages), or call generator.chat(messages)",
        )
    if isinstance(prompt, PromptEmbeddings):
        return
    if isinstance(prompt, Chat):
        if not prompt.has_template(tokenizer):
            raise ConfigError(
                f"prompts[{index}], a chat for a generator whose tokenizer has no chat template",
                "the tokenizer of a chat model",
                "give the generator such a tokenizer=, or pass vattn.Chat(messages, chat_template=...)",
            )
        return
    try:
        # Tensors and arrays without dimensions have the method and refuse the call.
        iter(prompt)
    except TypeError as error:
        raise ConfigError(
            f"prompts[{index}]={prompt!r:.60} of type {type(prompt).__name__}",
            "a list of prompts, each a text or a list of token ids",
            "pass [ids] for one prompt",
        ) from error
