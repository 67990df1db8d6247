"""`Embedder`: embeddings and scores of many texts, packed into steps without padding and without a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vattn.calibration.eval_mode import EvalMode
from vattn.config.arguments import check_switches, read_count
from vattn.config.device import check_default_device
from vattn.config.keywords import known_keywords
from vattn.config.other_names import EMBEDDER, ENCODE
from vattn.config.pooling import PoolingConfig
from vattn.errors import ConfigError, RequestError, VattnError
from vattn.generation.chat import Chat, is_conversation
from vattn.generation.prompt_embeddings import PromptEmbeddings
from vattn.generation.prompts import listed_rows, read_prompt, unpadded_rows
from vattn.generation.setup import check_tokenizer
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context


class _Text(NamedTuple):
    """Token ids of a text, or of a pair, and which of the pair each belongs to; `None` for models without such ids."""

    ids: list[int]
    types: list[int] | None


@known_keywords(EMBEDDER)
class Embedder:
    """Embed texts, or score them by a classification head: many in one step, of any lengths.

    Args:
        model: what `vattn.integrations.transformers.pooling.enable_pooling` returned.
        tokenizer: with `encode(text)` and `decode(ids)`; without one, prompts are token ids. Pairs of texts need one
            that can be called with both, as transformers' can.
        pooling: `"cls"`, `"max"`, `"mean"`, `"mean_sqrt_len_tokens"`, `"weightedmean"` or `"lasttoken"`, or several of
            them; default: what the files of sentence-transformers in the model's local folder say.
        normalise: whether embeddings have length 1; default: as those files say, else not.
        token_budget: most tokens of one step; no prompt may be longer.
        max_num_reqs: most prompts of one step.

    Raises:
        ConfigError: a model that generates, or is not on vattn; an unknown pooling; a value of another type.

    Example: see `vattn.integrations.transformers.pooling.enable_pooling`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        pooling: str | Sequence[str] | None = None,
        normalise: bool | None = None,
        token_budget: int = 8192,
        max_num_reqs: int = 256,
    ) -> None:
        check_default_device()
        self.token_budget = read_count("token_budget", token_budget, 1, "pass the tokens of a step")
        self.max_num_reqs = read_count("max_num_reqs", max_num_reqs, 1, "pass the prompts of a step")
        check_tokenizer(tokenizer)
        if not callable(getattr(model, "scores", None)):
            raise ConfigError(
                f"Embedder with {type(model).__name__}",
                "what vattn.integrations.transformers.pooling.enable_pooling returned",
                "load the model with transformers.AutoModel and call enable_pooling(model); vattn.Generator is for "
                "models that generate",
            )
        self.model = model
        self.tokenizer = tokenizer
        self.pooling: PoolingConfig | None = self.model.pooling
        if pooling is not None:
            modes = tuple(pooling) if isinstance(pooling, (list, tuple)) else (pooling,)
            self.pooling = replace(self.pooling or PoolingConfig(("cls",)), modes=modes)
        if normalise is not None:
            check_switches(normalise=normalise)
            self.pooling = self.pooling and replace(self.pooling, normalise=normalise)
        self.max_seq_len = min(self.token_budget, self.model.max_seq_len or self.token_budget)
        self.device = next(model.parameters()).device
        self._builder = AttentionMetadataBuilder(
            self.max_num_reqs, self.token_budget, self.max_seq_len, device=self.device
        )
        self._mode = EvalMode(model)

    @known_keywords(ENCODE)
    def encode(self, prompts: Iterable[Any], *, prompt_name: str | None = None) -> Tensor:
        """Return the embedding of each prompt.

        Args:
            prompts: a list, each a text, token ids, or what a tokenizer returned for one text; or what it returned for
                several.
            prompt_name: of the configuration's `prompts`, a text that comes before each text; default: what the
                configuration names.

        Returns:
            fp32 `[len(prompts), size]` on the model's device.

        Raises:
            ConfigError: no pooling, an unknown `prompt_name`, no list, or a model in training mode.
            RequestError: a prompt that is empty or too long, or no prompt; the text says which. Nothing has run then.
        """
        pooling = self.pooling
        if pooling is None:
            raise ConfigError(
                f"embeddings of {type(self.model.wrapped).__name__}, whose folder does not say how to pool them",
                "a folder of sentence-transformers, or pooling=",
                "Embedder(model, pooling='mean'), as the model was trained",
            )
        name = pooling.default_prompt if prompt_name is None else prompt_name
        if name is not None and not pooling.prompts:
            raise ConfigError(
                f"prompt_name={name!r:.60} for a model without prompts", "None", "write it before each text yourself"
            )
        if name is not None and name not in pooling.prompts:
            raise ConfigError(f"prompt_name={name!r:.60}", f"one of {sorted(pooling.prompts)}", "choose of these")
        before = "" if name is None else pooling.prompts[name]

        def prefixed(prompt: Any) -> Any:
            if not isinstance(prompt, str):
                if prompt_name is not None:
                    raise RequestError(f"prompt_name={name!r} with token ids", "texts", "encode its text before them")
                return prompt
            return (before + prompt).lower() if pooling.lower_case else before + prompt

        texts = self._read(prompts, prefixed)
        found = [torch.empty(0, self.model.hidden_size * len(pooling.modes), dtype=torch.float32, device=self.device)]
        for batch in self._batches(texts):
            found.append(_pool(self._hidden_states(batch).float(), [len(text.ids) for text in batch], pooling.modes))
        embeddings = self.model.project(torch.cat(found))
        return nn.functional.normalize(embeddings, dim=-1) if pooling.normalise else embeddings

    @known_keywords(ENCODE)
    def score(self, prompts: Iterable[Any]) -> Tensor:
        """Return what the model's classification head gives each prompt: logits, without a sigmoid or softmax.

        Args:
            prompts: a list, each a text, a pair `(query, document)` of texts, token ids, or what a tokenizer returned
                for one of these; or what it returned for several.

        Returns:
            fp32 `[len(prompts), num_labels]` on the model's device.

        Raises:
            ConfigError, RequestError: as for `encode`; a model without a classification head.
        """
        if self.model.num_labels is None:
            raise ConfigError(
                f"scores of {type(self.model.wrapped).__name__}, which has no classification head",
                "a model that classifies texts",
                "load it with transformers.AutoModelForSequenceClassification, or call encode()",
            )
        texts = self._read(prompts, lambda prompt: prompt)
        found = [self._scores(batch) for batch in self._batches(texts)]
        return (
            torch.cat(found)
            if found
            else torch.empty(0, self.model.num_labels, dtype=torch.float32, device=self.device)
        )

    @torch.no_grad()
    def _scores(self, batch: list[_Text]) -> Tensor:
        scores: Tensor = self.model.scores(self._hidden_states(batch), [text.ids for text in batch])
        return scores.float()

    @torch.no_grad()
    def _hidden_states(self, batch: list[_Text]) -> Tensor:
        """Run a step; return `[T, H]`."""
        step = self._builder.build([len(text.ids) for text in batch])
        ids = torch.tensor([token for text in batch for token in text.ids], device=self.device)
        types = None
        if any(text.types for text in batch):
            each = [text.types or [0] * len(text.ids) for text in batch]
            types = torch.tensor([kind for kinds in each for kind in kinds], device=self.device)
        with forward_context(step):
            rows: Tensor = self.model(ids, step.positions, types)
        return rows

    def _batches(self, texts: list[_Text]) -> Iterator[list[_Text]]:
        """Yield the texts of each step, in their order."""
        batch: list[_Text] = []
        for text in texts:
            size = sum(len(each.ids) for each in batch) + len(text.ids)
            if batch and (size > self.token_budget or len(batch) == self.max_num_reqs):
                yield batch
                batch = []
            batch.append(text)
        if batch:
            yield batch

    def _read(self, prompts: Any, prefixed: Any) -> list[_Text]:
        self._mode.check()
        if isinstance(prompts, Mapping) and "input_ids" in prompts:
            prompts = _each(prompts)
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise ConfigError(f"prompts={prompts!s:.60}", "a list of prompts", "pass [prompt] for one")
        texts = []
        for index, prompt in enumerate(prompts):
            try:
                text = self._text(prefixed(prompt))
            except VattnError as error:
                raise RequestError(f"prompts[{index}]: {error.got}", error.allowed, error.fix) from error
            if not text.ids:
                raise RequestError(f"prompts[{index}] of 0 tokens", "1 token or more", "leave it out")
            if len(text.ids) > self.max_seq_len:
                longest = "token_budget" if self.max_seq_len == self.token_budget else "the model's longest text"
                raise RequestError(
                    f"prompts[{index}] of {len(text.ids)} tokens",
                    f"1 to {self.max_seq_len} tokens ({longest})",
                    "cut it, as tokenizer(text, truncation=True, max_length=...) does",
                )
            texts.append(text)
        return texts

    def _text(self, prompt: Any) -> _Text:
        if isinstance(prompt, tuple) and len(prompt) == 2 and all(isinstance(text, str) for text in prompt):
            if not callable(self.tokenizer):
                raise RequestError(
                    "a pair of texts for a tokenizer that takes one", "a tokenizer of transformers", "pass tokenizer="
                )
            try:
                prompt = self.tokenizer(*prompt)
            except Exception as error:
                raise RequestError(
                    f"a pair that the tokenizer refuses: {error}", "pairs that it can encode", "check both texts"
                ) from error
        if isinstance(prompt, PromptEmbeddings):
            raise RequestError(repr(prompt), "texts and token ids", "pass its token ids")
        if isinstance(prompt, Chat) or is_conversation(prompt):
            raise RequestError(
                "a conversation",
                "texts, pairs of texts and token ids",
                "pass the text that tokenizer.apply_chat_template(messages, tokenize=False) returns",
            )
        if isinstance(prompt, (list, tuple)) and prompt and all(isinstance(text, str) for text in prompt):
            raise RequestError(
                f"{prompt!s:.60}, texts in a {type(prompt).__name__}",
                "a text, or a pair as a tuple",
                "pass (query, document) for a pair, and other texts as prompts",
            )
        given, types = prompt, None
        if isinstance(given, Mapping) and given.get("token_type_ids") is not None:
            prompt = {name: value for name, value in given.items() if name != "token_type_ids"}
        ids = read_prompt(prompt, self.tokenizer, self.model.vocab_size)
        if self.model.mixing_token in ids:
            raise RequestError(
                f"a prompt with the mask token {self.model.mixing_token} for {type(self.model.wrapped).__name__}",
                "prompts without it: the model scales all texts of a step by its number",
                "run this prompt by transformers' own model",
            )
        if prompt is not given:
            types = self._types(unpadded_rows(given, "token_type_ids"), len(ids))
        return _Text(ids, types if types and any(types) else None)

    def _types(self, rows: list[Any], count: int) -> list[int]:
        """Return the types of a prompt's tokens."""
        sizes, kinds = [len(row) for row in rows], range(max(1, self.model.num_token_types))
        if sizes != [count]:
            raise RequestError(
                f"{sizes[0] if len(sizes) == 1 else sizes} token_type_ids for {count} tokens",
                "one for each token",
                "use the model's own tokenizer",
            )
        wrong = [kind for kind in rows[0] if kind not in kinds]
        if wrong:
            raise RequestError(
                f"token_type_ids with {wrong[0]!r:.60}",
                f"0 to {kinds[-1]}" if len(kinds) > 1 else "0, since the model takes no types of tokens",
                "use the model's own tokenizer",
            )
        return [int(kind) for kind in rows[0]]


def _each(encoded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a tokenizer gave each of several texts."""
    given = {name: values for name, values in encoded.items() if values is not None or name == "input_ids"}
    columns = {name: listed_rows(name, values) for name, values in given.items()}
    sizes = {name: len(rows) for name, rows in columns.items()}
    if len({*sizes.values()}) > 1:
        raise RequestError(
            f"a batch of {sizes} rows", "a row of each for every prompt", "pass what a tokenizer returned"
        )
    return [dict(zip(columns, rows, strict=True)) for rows in zip(*columns.values(), strict=True)]


def _pool(rows: Tensor, lengths: list[int], modes: Sequence[str]) -> Tensor:
    """Return `[N, H * len(modes)]` of fp32 rows `[T, H]`, the tokens of one text after those of another."""
    sizes = torch.tensor(lengths, device=rows.device)
    ends = sizes.cumsum(0)

    def reduce(how: str, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, how, lengths=sizes, axis=0)

    found = []
    for mode in modes:
        if mode == "cls":
            found.append(rows[ends - sizes])
        elif mode == "lasttoken":
            found.append(rows[ends - 1])
        elif mode in ("max", "mean"):
            found.append(reduce(mode, rows))
        elif mode == "mean_sqrt_len_tokens":
            found.append(reduce("sum", rows) / sizes[:, None].sqrt())
        else:
            weights = torch.cat([torch.arange(1.0, length + 1) for length in lengths]).to(rows.device)[:, None]
            found.append(reduce("sum", rows * weights) / reduce("sum", weights))
    return torch.cat(found, 1)
