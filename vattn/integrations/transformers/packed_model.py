"""`PackedModel`: a causal language model over packed tokens; `PackedCache`: the cache that transformers sees."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation, allocate_kv_cache
from vattn.errors import ConfigError, MetadataError, MissingAttributeError, RequestError, UnsupportedRequestError
from vattn.integrations.transformers import linears
from vattn.integrations.transformers.available import cache_argument, transformers
from vattn.integrations.transformers.checks import check_inputs, model_dtype
from vattn.integrations.transformers.media import MOST_RANGES, placeholders, read_media, run_with_added, takes_media
from vattn.integrations.transformers.pipeline import StageModel, stage_of
from vattn.integrations.transformers.state_rows import RowGroup, row_groups
from vattn.metadata import forward_context as context
from vattn.metadata.prompt_inputs import PromptInputs, StepEmbeddings


class _NoStates(list[Any]):
    """The states of layers, of which there are none."""

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedRequestError(
            "layers that keep a state besides keys and values (state-space, linear attention, convolution, an indexer)",
            "models whose tokens meet in causal attention, full or in a window, and nowhere else",
            "keep this model on transformers' own attention",
        )


class PackedCache(transformers.Cache):
    """A cache for transformers that holds nothing: the attention layers own the paged cache.

    Keys and values pass through, so that attention gets only keys and values of the step's tokens.

    Args:
        groups: rows of the step that modules with states run together; `None` outside of steps.

    Attributes:
        seq_length: what the cache says that it holds; `position_ids` hold the positions.
    """

    def __init__(self, groups: tuple[RowGroup, ...] | None = None) -> None:
        super().__init__(layers=_NoStates())
        self.seq_length, self.groups = 0, groups

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return `seq_length`."""
        return self.seq_length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the size of a mask over the step's tokens."""
        return query_length, 0


class _Users:
    """The `PackedModel`s of a model, which keeps them in its attributes; it keeps none of them alive."""

    def __init__(self) -> None:
        self._users: weakref.WeakSet[PackedModel] = weakref.WeakSet()

    def add(self, packed: PackedModel) -> None:
        self._users.add(packed)

    def __iter__(self) -> Iterator[PackedModel]:
        return iter(list(self._users))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Users:
        """Return the users that are copied too."""
        users = _Users()
        for packed in self:
            if id(packed) in memo:
                users.add(memo[id(packed)])
        return users

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "torch.save or pickle of a whole model on vattn, with its caches and layers",
            "state dicts, and models that are not on vattn",
            "torch.save(packed.model.state_dict(), path), or disable(model) and model.save_pretrained(folder)",
        )


class PackedModel(nn.Module):
    """A causal language model over packed tokens, as `vattn.Generator` and `CUDAGraphRunner` call it.

    Args:
        model: what `enable` was called with.

    Attributes:
        kv_cache: what `allocate` returned last; `None` before.
        rope_length: the longest request, as given to `enable`; `None`: any.
        stage: which part of a pipeline this rank has; `None` for a whole model.
        first_position: what the model takes as the position of a request's first token, not 0 in RoBERTa.
        padding_token: a token that no prompt may hold: of models that count positions from its id on; else `None`.
        adapters: what `enable_adapters` returned; `None` before.
        takes_embeddings: whether rows of a step may come as embeddings.
        embedding_size, embedding_dtype: of such rows.
        placeholders: the tokens that stand for an image, a video or a recording, and which of these.
        max_ranges: most bidirectional ranges of a prompt.

    Example: see `enable`.
    """

    def __init__(
        self,
        model: nn.Module,
        rope_length: int | None = None,
        first_position: int = 0,
        takes_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.rope_length, self.first_position = model, rope_length, first_position
        self.padding_token = first_position - 1 if first_position else None
        self.takes_embeddings = takes_embeddings and stage_of(model) is None
        self.placeholders = placeholders(model)
        self.max_ranges = MOST_RANGES if self.takes_embeddings and takes_media(model) else 0
        self.kv_cache: KVCacheAllocation | None = None
        self.adapters: Any = None
        self.vocab_size: int | None = getattr(model.config.get_text_config(), "vocab_size", None)  # type: ignore[operator,union-attr]
        self.enabled = True
        self._implementation: str = model.config._attn_implementation  # type: ignore[assignment,union-attr]
        model.__dict__.setdefault("_vattn_packed", _Users()).add(self)
        self.stage = stage_of(model)
        self._packed_cache = PackedCache()
        self._states: list[Any] = [module for module in model.modules() if hasattr(module, "bind_states")]
        self._cache_argument = cache_argument(model.forward)
        # Models with ALiBi know no positions.
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def wrapped(self) -> nn.Module:
        """The model that `enable` was called with; checkpoints and calibrations use its names."""
        return self.model

    def __getattr__(self, name: str) -> Any:
        """Say where an attribute is that the model has and this has not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(self._modules.get("model"), name):
                raise
        raise MissingAttributeError(
            f"PackedModel.{name}",
            "steps of packed tokens, packed(input_ids, positions), and vattn.Generator(packed)",
            "vattn.Generator(packed, tokenizer).generate(prompts)"
            if name == "generate"
            else f"packed.model.{name}; call disable(model) before anything that runs the model, such as a pipeline",
        )

    @property
    def embedding_size(self) -> int:
        """Columns of what the embedding layer gives."""
        embedding: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        return int(embedding.weight.shape[1])

    @property
    def embedding_dtype(self) -> torch.dtype:
        """The dtype of what the embedding layer gives."""
        return model_dtype(self.model)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor | None = None,
        given: StepEmbeddings | None = None,
    ) -> Tensor:
        """Return logits; the step's metadata is that of `vattn.forward_context`.

        Args:
            input_ids, positions: int64 `[T]`; padding rows may hold any valid id and position. Positions may be
                `[K, T]`, for models with K positions a token.
            logits_indices: int64 `[B]`, the rows that go through the head; `None`: all of them.
            given: which rows come as embeddings and not as ids.

        Returns:
            `[B, vocab_size]`, or `[T, vocab_size]`, in the model's dtype.

        Raises:
            ConfigError: `disable` took the model off vattn, or it got another `attn_implementation`.
            DtypeError, ShapeError: inputs that are no such tensors.
            MetadataError: a request longer than `rope_length`, and on the CPU token ids beyond the vocabulary and rows
                that the step does not have; compiled code does not check this.
        """
        self.check_step(input_ids, positions, logits_indices)
        options = self.model_options(positions, logits_indices)
        if given is None:
            return self.model(input_ids=input_ids[None], **options).logits[0]
        rows = self.model.get_input_embeddings()(input_ids)  # type: ignore[operator]
        options["inputs_embeds"] = rows.index_copy(0, given.rows, given.embeddings)[None]
        if given.added is None:
            return self.model(**options).logits[0]
        return run_with_added(self.model, given, rows.shape[0], **options).logits[0]  # type: ignore[no-any-return]

    def check_step(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor | None) -> None:
        """Refuse a step; see `forward`."""
        if not self.enabled:
            raise ConfigError("a step of a model that disable() took off vattn", "a model on vattn", "enable it again")
        config: Any = self.model.config
        implementation: str = config._attn_implementation
        if implementation != self._implementation:
            raise ConfigError(
                f"a step of a model on vattn whose attention is {implementation!r} since",
                "the attention that enable() chose",
                "disable(model) before set_attn_implementation(...), or enable(model) again after disable(model)",
            )
        line = positions[-1] if isinstance(positions, Tensor) and positions.ndim == 2 else positions
        check_inputs(input_ids, line, logits_indices, self.embedding_owner())
        # Compiled code reads no lengths; a generator refuses longer requests before.
        if not torch.compiler.is_compiling():
            self.renew()
            if self.rope_length is not None:
                _check_lengths(self.rope_length)

    def embedding_owner(self) -> Any:
        """Return the module that embeds the tokens of steps."""
        return self.model

    def read_media(self, encoded: Mapping[str, Any]) -> tuple[list[int], PromptInputs]:
        """Return the ids of a prompt with images, and what it gives the model besides them; see `media.read_media`.

        Raises:
            RequestError: also for a model without images.
        """
        if not (self.takes_embeddings and takes_media(self.model)):
            names = sorted(set(encoded) - {"input_ids", "attention_mask"})
            why = "whose tokens are more than embeddings" if takes_media(self.model) else "a model of text"
            raise RequestError(
                f"a prompt with {', '.join(names)} for {type(self.model).__name__}, {why}",
                "input_ids and attention_mask",
                "pass its input_ids, or load a model that takes images",
            )
        return read_media(self.model, encoded)

    def model_options(self, positions: Tensor, logits_indices: Tensor | None) -> dict[str, Any]:
        """Return what the model's forward takes in a step besides token ids."""
        if self.first_position:
            positions = positions + self.first_position
        # [K, T] becomes [K, 1, T].
        options: dict[str, Any] = {"position_ids": positions.unsqueeze(-2)} if self._takes_positions else {}
        if logits_indices is not None:
            options["logits_to_keep"] = logits_indices
        cache = self._packed_cache
        if self._states:
            cache = PackedCache(_row_groups(self._states[0], positions.shape[-1]))
        if self._cache_argument:
            options[self._cache_argument] = cache
        return {**options, "use_cache": False}

    def one_stage(self, capacity: int) -> StageModel:
        """Return what a generator runs of a pipeline on this rank, for steps of up to `capacity` tokens."""
        return StageModel(self, capacity)

    def explain(self) -> str:
        """Return how the linear layers run, with a line for each reason that keeps some from running faster."""
        found = linears.linears_of_enabled(self.model)
        return "\n".join([] if found is None else found.explain())

    def renew(self) -> None:
        """Take in weights of merged projections that were moved, replaced or parametrised since.

        Steps do so, also those compiled by `vattn.compile`. Call it yourself if `torch.compile` made code of the whole
        model.

        Raises:
            ConfigError: projections with adapters that differ now.
        """
        found = linears.linears_of_enabled(self.model)
        if found is not None:
            found.renew()

    def allocate(
        self,
        *,
        num_blocks: int | None = None,
        memory: int | str | None = None,
        device: torch.device | str | None = None,
        hybrid: bool = False,
        max_seq_len: int = 32768,
        max_num_reqs: int | None = None,
    ) -> KVCacheAllocation:
        """Allocate the paged cache in the model's dtype and keep it; arguments of `vattn.allocate_kv_cache`."""
        self.renew()
        self.kv_cache = allocate_kv_cache(
            self,
            num_blocks=num_blocks,
            memory=memory,
            device=device,
            dtype=model_dtype(self.model),
            hybrid=hybrid,
            max_seq_len=max_seq_len,
            max_num_reqs=max_num_reqs,
        )
        return self.kv_cache


def _row_groups(states: Any, num_tokens: int) -> tuple[RowGroup, ...] | None:
    """Return the groups of the step that runs; `None` without a step, or without a cache: modules refuse both."""
    step = context.current_step()
    return None if step is None else row_groups(step, num_tokens, states.num_state_slots)


def _check_lengths(longest: int) -> None:
    step = context.current_step()
    if step is not None and step.max_seq_len > longest:
        raise MetadataError(
            f"a request of {step.max_seq_len} tokens for a model with rope_length={longest}",
            f"requests of up to {longest} tokens",
            "call disable(model) and enable(model, rope_length=...) with the longest request",
        )
