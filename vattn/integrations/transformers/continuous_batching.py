"""`model.generate_batch` on vattn's ops, over the paged cache of transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.errors import ConfigError
from vattn.integrations.transformers.available import ALL_ATTENTION_FUNCTIONS, cache_argument, transformers
from vattn.integrations.transformers.dense_attention import as_sinks, attend_blocks, refuse_options
from vattn.integrations.transformers.dense_caches import BLOCK, as_blocks, with_room

BATCHED = "paged|vattn" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "vattn_flash"
"""The name under which `generate_batch` keeps the attention that it is given.

Older versions of transformers keep names that begin with "paged|"; newer ones those that contain "flash", and replace
or refuse others.
"""

_OF_THE_STEP = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "logits_indices", "logits_processor_args", "block_table"})
"""Tensors of continuous batching itself; any other is an argument of the model's own attention."""

FULL = "full_attention"
"""What transformers calls layers that see all keys."""


@contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    """Let `generate_batch`, and all other continuous batching of a model, run on vattn inside the block.

    `attn_implementation="vattn"` does not reach continuous batching: transformers replaces it there by flash attention,
    or refuses it.

    Args:
        model: a causal language model of transformers, with any attention but that of `enable`.

    Yields:
        The model.

    Raises:
        ConfigError: no such model, or one that `enable` was called with.

    Example:
        >>> import transformers
        >>> from vattn.integrations.transformers import continuous_batching
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> with continuous_batching(transformers.LlamaForCausalLM(config).eval()) as model:
        ...     model.config._attn_implementation in ("vattn_flash", "paged|vattn")
        True
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"continuous_batching of {type(model).__name__}", "a model of transformers", "pass the model itself"
        )
    if "_vattn_before" in model.__dict__:
        raise ConfigError(
            "continuous_batching of a model that enable() was called with",
            "a model with transformers' caches",
            "use vattn.Generator(model, ...), or disable(model) first",
        )
    before = model.config._attn_implementation
    hooks = []
    if cache_argument(model.forward) == "cache":
        # Layers update the cache themselves since transformers 5.24.
        hooks.append(model.register_forward_pre_hook(_leave_updates, with_kwargs=True))
    model.config._attn_implementation = BATCHED
    try:
        yield model
    finally:
        model.config._attn_implementation = before
        for hook in hooks:
            hook.remove()


def _leave_updates(model: Any, args: Any, options: dict[str, Any]) -> None:
    """Let the layers of a model hand new keys and values, and the cache, to `attend_batch`, which updates it."""
    cache: Any = options.get("cache")

    def update(key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        kwargs["cache"] = cache
        return key, value

    if hasattr(cache, "layer_to_allocator"):
        cache.update = update


def register_batched() -> None:
    """Make `BATCHED` known to transformers, without a mask: its lengths say what each token sees."""
    ALL_ATTENTION_FUNCTIONS.register(BATCHED, attend_batch)


def attend_batch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write keys and values into a cache of continuous batching and attend to it; transformers' attention interface.

    Args:
        module: the attention module.
        query: `[1, heads, T, head_size]`, the tokens of all requests.
        key, value: `[1, num_kv_heads, T, head_size]`.
        attention_mask: `None`.
        scaling, dropout, sliding_window, softcap, s_aux, is_causal: as in `attend_dense`.
        cache: transformers' `PagedAttentionCache`.
        **options: what continuous batching passes: `cu_seq_lens_q`, `cu_seq_lens_k`, and what the cache needs.

    Returns:
        `[1, T, heads, head_size_v]`, and no weights.

    Raises:
        ConfigError: outside of continuous batching.
        UnsupportedRequestError, GradientError: as `attend_dense`.
    """
    if cache is None or attention_mask is not None:
        raise ConfigError(
            "a call other than of generate_batch inside of continuous_batching(model)",
            "steps of transformers' continuous batching",
            "leave the block, and use attn_implementation='vattn' for generate()",
        )
    own = {name: given for name, given in options.items() if name not in _OF_THE_STEP}
    refuse_options(module, is_causal is not False, dropout, own, query)
    found = _update(cache, module.layer_idx, key, value, options)
    lengths, token = _lengths_and_table(cache, module.layer_idx, found)
    queries = query[0].transpose(0, 1)
    key_blocks, value_blocks = as_blocks(found.key, BLOCK)[0], as_blocks(found.value, BLOCK)[0]
    out = attend_blocks(
        queries, key_blocks, value_blocks, options["cu_seq_lens_q"], lengths, token, scaling, sliding_window, softcap,
        as_sinks(s_aux, query),
    )  # fmt: skip
    return out[None], None


class _Keys(NamedTuple):
    """Keys that the requests of a step see, those of the step included.

    Attributes:
        group: kind and number of the layers that see keys at the same places.
        key, value: `[1, num_kv_heads, rows, head_size]`, with room for a block after the last key.
        kv_start_loc: `[B + 1]`, where the keys of each request begin.
        longest: no request has more keys.
        places: the row of each key; `None`: they follow each other.
    """

    group: tuple[str, int]
    key: Tensor
    value: Tensor
    kv_start_loc: Tensor
    longest: int
    places: Tensor | None


def _lengths_and_table(cache: Any, layer: int, found: _Keys) -> tuple[Tensor, Tensor]:
    """Return how many keys each request sees, and the rows at which blocks of them begin; once a step for each group.

    Layers run in their order: one that does not come after the layer that computed these begins another step, whose
    numbers may lie in the same tensors.
    """
    known: dict[tuple[str, int], tuple[int, Tensor, Tensor]] = cache.__dict__.setdefault("_vattn_tables", {})
    before = None if torch.compiler.is_compiling() else known.get(found.group)
    if before is not None and before[0] < layer:
        return before[1:]
    starts = found.kv_start_loc
    lengths, token = torch.diff(starts), torch.arange(0, found.longest, BLOCK, device=starts.device) + starts[:-1, None]
    if found.places is not None:
        token = found.places[token.clamp(max=found.places.shape[0] - 1)]
    if not torch.compiler.is_compiling():
        known[found.group] = layer, lengths, token
    return lengths, token


def _update(cache: Any, layer: int, key: Tensor, value: Tensor, options: dict[str, Any]) -> _Keys:
    """Write the keys and values of a step into a cache, and return those that its requests see.

    Layers that see all keys read them where the cache has them. Those with a window get them gathered: a ring of pages
    holds them.
    """
    kind, group, rows, page = _place(cache, layer)
    longest_name = "max_length_k" if "max_length_k" in options else "max_seqlen_k"
    starts, longest = _of_kind(options["cu_seq_lens_k"], kind), _of_kind(options[longest_name], kind)
    read, write = options["read_index"][group], options["write_index"][group]
    if kind == FULL and read.numel() and page % BLOCK == 0:
        for held, new in zip(rows, (key, value), strict=True):
            held.index_copy_(0, write, new[0].transpose(0, 1)[: write.shape[0]])
        # Views of one tensor in which values begin later: after the last page keys have more rows.
        shared = min(held.shape[0] for held in rows)
        held_key, held_value = (held[:shared].transpose(0, 1)[None] for held in rows)
        return _Keys((kind, group), held_key, held_value, starts, longest, read)
    if hasattr(cache, "layer_to_allocator"):
        key, value = type(cache).update(cache, key, value, layer, options)
    else:
        indices = {name: options[name] for name in ("read_index", "write_index")}
        pair = cache.update(key_states=key, value_states=value, layer_idx=layer, **indices)
        key, value = (states.transpose(0, 1)[None] for states in pair)
    return _Keys((kind, group), with_room(key), with_room(value), starts, longest, None)


def _place(cache: Any, layer: int) -> tuple[str, int, tuple[Tensor, Tensor], int]:
    """Return the kind and the number of a layer's group, its keys and values by token, and the tokens of a page."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        return allocator.layer_type, allocator.index, allocator._kv_token_views[layer], allocator.tokens_per_page
    group, place = cache.layer_index_to_group_indices[layer]
    kind = FULL if cache.sliding_windows[layer] == 1 else "sliding_attention"
    return kind, group, (cache.key_cache[place], cache.value_cache[place]), cache.block_size


def _of_kind(value: Any, kind: str) -> Any:
    """Return the part of an argument for layers of a kind; models with one kind may get it alone."""
    return value[kind] if isinstance(value, dict) else value
