"""`enable_pooling`: put a model that gives embeddings or scores on vattn, without a cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vattn.calibration.fp8_saving import own_config
from vattn.config.arguments import check_switches
from vattn.config.keywords import known_keywords
from vattn.config.other_names import ENABLE_POOLING
from vattn.config.pooling import PoolingConfig
from vattn.errors import ConfigError, UnsupportedRequestError
from vattn.integrations.transformers.attention_interface import (
    PACKED,
    REPLACED,
    ModelAttention,
    ModelEncoderAttention,
    attend,
    register,
)
from vattn.integrations.transformers.attention_notes import AttentionCall
from vattn.integrations.transformers.available import cache_argument, transformers
from vattn.integrations.transformers.checkpoint import folder_of
from vattn.integrations.transformers.checkpoint_scales import remove_cache_hooks
from vattn.integrations.transformers.checks import check_inputs, check_model, check_types
from vattn.integrations.transformers.enabling import disable
from vattn.integrations.transformers.model_layers import install, make_layer
from vattn.integrations.transformers.observe import observe, set_attention
from vattn.integrations.transformers.packed_model import PackedCache
from vattn.integrations.transformers.prove import Proof
from vattn.integrations.transformers.replaced_forwards import replace_forwards, replaced_modules
from vattn.integrations.transformers.rope_frequencies import fix_frequencies
from vattn.integrations.transformers.sentence_transformers import read_pooling
from vattn.integrations.transformers.state_layers import has_states


class PoolingModel(nn.Module):
    """A model of transformers over packed tokens that gives hidden states or scores, as `vattn.Embedder` calls it.

    Args:
        model: what `enable_pooling` was called with.
        first_position: what the model takes as the position of a text's first token, not 0 in RoBERTa.
        rope_length: the longest text, as given to `enable_pooling`; `None`: any.

    Attributes:
        pooling: how embeddings are made, from the files of sentence-transformers in the local folder that the model
            was loaded from; `None` without them.
        num_labels: scores of a text; `None` for a model without a classification head.
        num_token_types: values that `token_type_ids` may have; 0 for a model that takes none.
        hidden_size: columns of a hidden state.
        max_seq_len: the longest text that the model takes; `None` for any.
        mixing_token: a token by whose number the model scales all tokens of a row, and so all texts of a step; `None`
            for none.
    """

    def __init__(self, model: Any, first_position: int = 0, rope_length: int | None = None) -> None:
        super().__init__()
        base, config = base_of(model), model.config.get_text_config()
        self.model: Any = model
        self.first_position, self.enabled = first_position, True
        self.vocab_size: int | None = getattr(config, "vocab_size", None)
        self.num_labels: int | None = None if base is model else model.config.num_labels
        self.hidden_size: int = config.hidden_size
        self.pooling: PoolingConfig | None = None
        self.projections: Any = nn.Sequential()
        folder, longest = folder_of(model), None
        if folder is not None:
            self.pooling, projections, longest = read_pooling(folder)
            self.projections = projections.to(next(model.parameters()).device)
        trained = getattr(config, "max_position_embeddings", None)
        limits = [longest, rope_length, trained - first_position if isinstance(trained, int) else None]
        self.max_seq_len: int | None = min((limit for limit in limits if limit), default=None)
        # Only ESM does.
        self.mixing_token: int | None = config.mask_token_id if getattr(config, "token_dropout", False) else None
        taken = inspect.signature(base.forward).parameters
        name = cache_argument(base.forward)
        self._cache = {name: PackedCache()} if name else {}
        self._options = {"use_cache": False} if "use_cache" in taken else {}
        # GPT-2 takes them too, looks them up as tokens, and is called without.
        self.num_token_types = getattr(config, "type_vocab_size", 0) if "token_type_ids" in taken else 0
        self._attention: str = model.config._attn_implementation

    @property
    def base(self) -> Any:
        """The part that gives hidden states."""
        return self.model.base_model

    @property
    def wrapped(self) -> nn.Module:
        """The model that `enable_pooling` was called with."""
        return self.model

    def forward(self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return hidden states; the step's metadata is that of `vattn.forward_context`.

        Args:
            input_ids, positions: int64 `[T]`.
            token_type_ids: int64 `[T]`, which of a pair a token belongs to; default 0.

        Returns:
            `[T, hidden_size]` in the model's dtype.

        Raises:
            ConfigError: the model is not on vattn any more, or has no use for `token_type_ids`.
            DtypeError, ShapeError, MetadataError: as for the result of `enable`.
        """
        if not self.enabled or self.model.config._attn_implementation != self._attention:
            raise ConfigError("a step of a model that is not on vattn any more", "a model on vattn", "enable it again")
        check_inputs(input_ids, positions, None, self.base)
        options = {**self._cache, **self._options}
        if self.num_token_types:
            if token_type_ids is not None:
                check_types(token_type_ids, input_ids, self.num_token_types)
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            options["token_type_ids"] = types[None]
        elif token_type_ids is not None:
            raise ConfigError("token_type_ids for a model that takes none", "token ids alone", "leave them out")
        if self.first_position:
            positions = self._after_padding(input_ids, positions)
        out = self.base(input_ids=input_ids[None], position_ids=positions[None], **options)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def _after_padding(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return positions as RoBERTa counts them: from the id of padding on, which padding keeps and others skip."""
        padding = self.first_position - 1
        counted = (input_ids != padding).long()
        until = counted.cumsum(0)
        first = torch.arange(positions.shape[0], device=positions.device) - positions
        return (until - (until - counted)[first]) * counted + padding

    def project(self, embeddings: Tensor) -> Tensor:
        """Return fp32 embeddings `[N, H]` after the linear layers that follow the pooling in sentence-transformers."""
        return self.projections(embeddings)  # type: ignore[no-any-return]

    def scores(self, hidden_states: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return what the model's own classification head makes of hidden states.

        Args:
            hidden_states: `[T, H]` of all texts, one after the other.
            texts: their token ids.

        Returns:
            Logits `[len(texts), num_labels]`.
        """
        padding = self.model.config.get_text_config().pad_token_id
        rows = hidden_states.split([len(text) for text in texts])
        if padding is None:
            # Such heads find the last token of a single text only.
            return torch.cat([self._head([row], [text], 0) for row, text in zip(rows, texts, strict=True)])
        return self._head(rows, texts, padding)

    def _head(self, rows: Sequence[Tensor], texts: Sequence[Sequence[int]], padding: int) -> Tensor:
        padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        width, device = padded.shape[1], padded.device
        ids = torch.tensor([[*text, *[padding] * (width - len(text))] for text in texts], device=device)
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts], device=device)
        pooler = getattr(self.base, "pooler", None)
        out = transformers.modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=padded, pooler_output=None if pooler is None else pooler(padded)
        )
        # The head's code is in the whole model's forward, after its call of the base.
        self.base.forward = lambda *args, **options: out
        try:
            return self.model(input_ids=ids, attention_mask=mask).logits  # type: ignore[no-any-return]
        finally:
            del self.base.forward


@known_keywords(ENABLE_POOLING)
@torch.inference_mode(False)
def enable_pooling(
    model: Any,
    *,
    attn_backend: str | None = None,
    batch_invariant: bool = False,
    rope_length: int | None = None,
    prove: bool = True,
) -> PoolingModel:
    """Put a model that gives embeddings or scores on vattn, in place: encoders, embedding models, rerankers.

    Texts of any lengths run in one step, without padding and without a cache. Attention is what the model's own run on
    a few tokens shows: causal or both ways, full or in a window. `disable` takes the model off vattn.

    Args:
        model: of `transformers.AutoModel` or `AutoModelForSequenceClassification`, in eval mode, on its device.
        attn_backend, batch_invariant: as for `vattn.Attention`.
        rope_length, prove: as for `enable`.

    Returns:
        What `vattn.Embedder` takes.

    Raises:
        ConfigError, UnsupportedRequestError: as for `enable`; a model with another head.

    Example:
        >>> import transformers, vattn
        >>> from vattn.integrations.transformers.pooling import enable_pooling
        >>> config = transformers.BertConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> model = transformers.BertModel(config).eval()
        >>> embedder = vattn.Embedder(enable_pooling(model), pooling="mean")
        >>> embedder.encode([[1, 2, 3], [4, 5]]).shape
        torch.Size([2, 32])
    """
    check_model(model, "enable_pooling", "AutoModel")
    check_switches(batch_invariant=batch_invariant, prove=prove)
    base = base_of(model)
    if has_states(base):
        raise UnsupportedRequestError(
            f"{type(model).__name__}, which keeps a state for each request",
            "models whose tokens meet in attention alone",
            "keep this model on transformers' own attention",
        )
    own_config(model)
    frequencies = fix_frequencies(model, rope_length)
    model.__dict__["_vattn_before"] = model.config._attn_implementation, remove_cache_hooks(model), frequencies
    try:
        seen = observe(base, PackedCache(), pools=True)
        modules = {name: call.module for name, call in seen.calls.items()}
        layers = {
            name: make_layer(_kind(call), call, name, attn_backend, batch_invariant)
            for name, call in seen.calls.items()
        }
        proof = Proof(base, modules, rope_length, seen.first_position) if prove else None
        expected = None if proof is None or base is model else _own_scores(model, proof.requests)
        register()
        replace_forwards(model, attend)
        set_attention(model, REPLACED if replaced_modules(model) else PACKED)
        install(modules, layers)
        packed = PoolingModel(model, seen.first_position, rope_length)
        if proof is not None:
            proof.check_without_cache(packed)
            if expected is not None:
                rows = torch.cat(proof.logits)
                with torch.no_grad():
                    proof.check_rows(packed.scores(rows, proof.requests), expected, "scores")
    except BaseException:
        disable(model)
        raise
    model.__dict__["_vattn_packed"] = [packed]
    return packed


def base_of(model: Any) -> Any:
    """Return the part of a model that gives hidden states; the model itself if it has no head.

    Raises:
        ConfigError: another head than one that classifies texts.
    """
    base = model.base_model
    if base is not model and "ForSequenceClassification" not in type(model).__name__:
        raise ConfigError(
            f"enable_pooling() of {type(model).__name__}",
            "models without a head, and those that classify texts",
            "load it with transformers.AutoModel or AutoModelForSequenceClassification; enable(model) is for causal "
            "language models",
        )
    return base


def _own_scores(model: Any, requests: list[list[int]]) -> Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([request], device=device)).logits for request in requests])


def _kind(call: AttentionCall) -> type[ModelAttention | ModelEncoderAttention]:
    return ModelAttention if call.causal else ModelEncoderAttention
