"""`PromptEmbeddings`: a prompt given as rows of the embedding layer instead of token ids."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from vattn.errors import ConfigError, RequestError, ShapeError
from vattn.generation.sampling import Sampling
from vattn.kv_transfer.connector import Salt, salt_digest
from vattn.metadata.prompt_inputs import PromptInputs


class PromptEmbeddings:
    """A prompt of n tokens as what the model's embedding layer would give for them.

    Args:
        rows: `[n, H]`, floats; H as `model.get_input_embeddings()` has. They are copied.
        token_ids: the ids that these tokens have, for penalties, logits processors, stopping criteria and
            log-probabilities of the prompt; `None`: they have none, and these are refused.
        identity: text, bytes or an integer: prompts with the same identity, and the same ids, have the same rows, and
            may share cached blocks. `None`: this object shares with no other one.

    Raises:
        ConfigError: no floats, no ids, or another type of identity.
        ShapeError: other shapes, or another number of ids.

    Example:
        >>> import torch, vattn
        >>> vattn.PromptEmbeddings(torch.randn(5, 32))
        PromptEmbeddings(5 tokens of 32)
    """

    def __init__(self, rows: Tensor, token_ids: Sequence[int] | None = None, identity: Salt | None = None) -> None:
        if not isinstance(rows, Tensor) or not rows.is_floating_point() or rows.layout != torch.strided or rows.is_meta:
            what = f"{rows.dtype}, {rows.layout}, on {rows.device}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ConfigError(f"embeddings of {what}", "a tensor of floats [n, H]", "pass rows of the embedding layer")
        if rows.ndim != 2:
            raise ShapeError(f"embeddings of shape {list(rows.shape)}", "[n, H]", "pass one prompt, without a batch")
        self.rows, self.token_ids = rows.detach().clone(), None if token_ids is None else _ids(token_ids)
        if self.token_ids is not None and len(self.token_ids) != rows.shape[0]:
            raise ShapeError(
                f"{len(self.token_ids)} token ids for {rows.shape[0]} rows", "as many", "pass all, or None"
            )
        self.identity = secrets.token_bytes(16) if identity is None else salt_digest(1, identity, "identity")

    def __repr__(self) -> str:
        return f"PromptEmbeddings({self.rows.shape[0]} tokens of {self.rows.shape[1]})"

    def __iter__(self) -> Any:
        raise ConfigError(f"{self!r} as a list of prompts", "a list of prompts", "pass [prompt] for one")

    def inputs(self, model: Any, sampling: Sampling) -> PromptInputs:
        """Return what a model gets besides ids.

        Raises:
            RequestError: a model that takes no embeddings, rows of another width, or a sampling that needs ids.
        """
        if not getattr(model, "takes_embeddings", False):
            raise RequestError(
                f"embeddings for {type(getattr(model, 'wrapped', model)).__name__}, which takes token ids alone",
                "models with inputs_embeds in which they mean what ids mean",
                "pass token ids",
            )
        width = model.embedding_size
        if self.rows.shape[1] != width:
            raise RequestError(f"embeddings of {self.rows.shape[1]} columns", f"{width} columns", "use the model's own")
        called = sampling.logits_processors or sampling.stopping_criteria
        if self.token_ids is None and (sampling.penalised or called or sampling.prompt_logprobs is not None):
            raise RequestError(
                "embeddings without token ids, with penalties, logits processors, stopping criteria or prompt_logprobs",
                "settings that do not go by the ids of the prompt",
                "give PromptEmbeddings token_ids=, or leave these settings out",
            )
        parameter = next(model.parameters())
        rows = self.rows.to(parameter.device, model.embedding_dtype)
        return PromptInputs(rows, identities=((0, rows.shape[0], self.identity),))


def _ids(given: Any) -> list[int]:
    """Return token ids as a list of ints."""
    try:
        return [index(token) for token in (given.tolist() if hasattr(given, "tolist") else given)]
    except TypeError as error:
        raise ConfigError(f"token_ids={given!r:.60}", "a flat list of token ids", "pass one for each row") from error
