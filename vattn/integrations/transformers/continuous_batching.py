"""`model.generate_batch` on vattn's ops, over the paged cache of transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vattn.errors import ConfigError
from vattn.integrations.transformers.available import ALL_ATTENTION_FUNCTIONS, transformers
from vattn.integrations.transformers.dense_attention import encoded_config, refuse_options, sinks_of

BATCHED = "paged|vattn" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else "vattn_flash"
"""The name under which `generate_batch` keeps the attention that it is given.

Older versions of transformers keep names that begin with "paged|"; newer ones those that contain "flash", and replace
or refuse others.
"""


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
    model.config._attn_implementation = BATCHED
    try:
        yield model
    finally:
        model.config._attn_implementation = before


def register_batched() -> None:
    """Make `BATCHED` known to transformers, without a mask: its lengths say what each token sees."""
    ALL_ATTENTION_FUNCTIONS.register(BATCHED, attend_batch)


def attend_batch(
    module: nn.Module,
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
    refuse_options(module, is_causal is not False, dropout, {}, query)
    if hasattr(cache, "layer_to_allocator"):
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        kv_start_loc = options["cu_seq_lens_k"]
    else:
        indices = {name: options[name] for name in ("read_index", "write_index")}
        keys, values = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
        kv_start_loc = options["cu_seq_lens_k"]
        if isinstance(kv_start_loc, dict):
            # As transformers' own function finds the group of a layer.
            windowed = bool(getattr(module, "sliding_window", None))
            kv_start_loc = kv_start_loc["sliding_attention" if windowed else "full_attention"]
    queries = query[0].transpose(0, 1)
    config = encoded_config(
        query.shape[1], keys.shape[1], query.shape[3], values.shape[2], scaling, query.dtype, 0, sliding_window,
        softcap, s_aux is not None,
    )  # fmt: skip
    out = queries.new_empty(queries.shape[0], query.shape[1], values.shape[2])
    torch.ops.vattn.varlen_attention(
        queries, keys, values, options["cu_seq_lens_q"], kv_start_loc, out, None, None, None, None, None, None, None,
        sinks_of(s_aux, query), None, None, None, None, [], None, config,
    )  # fmt: skip
    return out[None], None
