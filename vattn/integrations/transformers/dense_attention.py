"""`attn_implementation="vattn"`: transformers' own calls on vattn's ops, over whatever cache transformers has."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import vattn.ops.schemas  # noqa: F401  registers the ops
from vattn.config.attention import AttentionConfig
from vattn.config.device import has_triton
from vattn.errors import GradientError, UnsupportedRequestError
from vattn.integrations.transformers.available import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    CACHE_ARGUMENTS,
)
from vattn.integrations.transformers.dense_caches import (
    BLOCK,
    DenseStep,
    as_blocks,
    is_decode,
    pack_decode,
    unpack_step,
    with_room,
)
from vattn.integrations.transformers.step_masks import ELSEWHERE, ends_with_blocks, step_mask
from vattn.quantization.formats import dtype_name

IMPLEMENTATION = "vattn"
"""The name for `attn_implementation`."""

_NO_PART_OF_ATTENTION = frozenset({"position_ids", "cache_position", "position_embeddings", *CACHE_ARGUMENTS})
"""Tensors and caches that models pass on to attention, which has no use for them."""


def attend_dense(
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
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend queries to the keys of a cache of transformers; transformers' attention interface.

    Args:
        module: the attention module.
        query: `[B, heads, T, head_size]`.
        key, value: `[B, num_kv_heads, L, head_size]`, those of the step included.
        attention_mask: what `step_mask` returned.
        scaling, sliding_window, softcap, s_aux, is_causal: of the model; `s_aux` are sinks.
        dropout: 0.
        **options: whatever else the model passes; refused where it would change the result.

    Returns:
        `[B, T, heads, head_size_v]`, and no weights.

    Raises:
        UnsupportedRequestError: attention that vattn does not run so; the text says what to do.
        GradientError: in training.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refuse_options(module, causal, dropout, options, query)
    if not isinstance(attention_mask, Tensor) or attention_mask.dtype != torch.int32 or attention_mask.dim() != 4:
        raise _refused(_describe_mask(attention_mask, query.shape[0], key.shape[2]))
    sinks = as_sinks(s_aux, query)
    given = (query, key, value, attention_mask, scaling, sliding_window, softcap, sinks)
    # Compiled code lays keys out as it likes: only an op sees where they lie.
    return (_attend_compiled(*given) if torch.compiler.is_compiling() else _attend(*given)), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    shared: bool = True,
) -> Tensor:
    """Attend as `attend_dense` does.

    Args:
        shared: whether a later layer that gets the same mask object gets the same numbers in it.
    """
    batch_size, _, query_len, _ = query.shape
    step = None
    if not is_decode(mask):
        step = _unpacked(mask, batch_size, key.shape[2], shared)
    elif (mask.shape[0], query_len, mask.shape[3]) == (batch_size, 1, key.shape[2]):
        _check_window(mask.shape[2] == 2, sliding_window)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        out = _try_decode(query, key, value, mask, scale, sliding_window, softcap, sinks)
        if out is not None:
            return out
        step = _unpacked(_packed(mask, sliding_window, shared), batch_size, key.shape[2], shared)
    if step is None:
        raise _refused(_describe_mask(mask, batch_size, key.shape[2]))
    _check_window(step.windowed, sliding_window)
    if query_len > 1 and step.block_size == BLOCK and not (shared and ends_with_blocks(mask)):
        key, value = with_room(key), with_room(value)
    key_blocks, pitch = as_blocks(key, step.block_size)
    value_blocks, value_pitch = as_blocks(value, step.block_size)
    if pitch != value_pitch:
        key_blocks, pitch = as_blocks(key.contiguous(), step.block_size)
        value_blocks, _ = as_blocks(value.contiguous(), step.block_size)
    table = step.block_table
    if batch_size > 1:
        rows = torch.arange(0, batch_size * pitch, pitch, dtype=torch.int32, device=query.device)
        table = table + rows[:, None]
    # A row alone sees the keys that its step lists.
    window = sliding_window if query_len > 1 else None
    queries = query.transpose(1, 2).flatten(0, 1)
    heads = attend_blocks(
        queries, key_blocks, value_blocks, step.query_start_loc, step.seq_lens, table, scaling, window, softcap, sinks
    )
    return heads.view(batch_size, query_len, -1, value.shape[3])


@torch.library.custom_op(
    "vattn::attend_dense",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor mask, float? scaling, int? sliding_window, float? softcap, "
    "Tensor? sinks) -> Tensor",
)
def _attend_compiled(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, sliding_window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    # Memory of a mask that is not needed any more may become another one, as the same object.
    return _attend(query, key, value, mask, scaling, sliding_window, softcap, sinks, shared=False)


@_attend_compiled.register_fake
def _attend_shape(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *options: Any) -> Tensor:
    batch_size, heads, query_len, _ = query.shape
    return query.new_empty(batch_size, query_len, heads, value.shape[3])


def _check_window(windowed: bool, sliding_window: int | None) -> None:
    if windowed != (sliding_window is not None):
        seen = "a window" if windowed else "no window"
        raise _refused(f"sliding_window={sliding_window} beside a mask with {seen}")


def register_dense() -> None:
    """Make `attn_implementation="vattn"` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_dense)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, step_mask)


def attend_blocks(
    queries: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Run `vattn::attention` for queries `[T, heads, head_size]`; return `[T, heads, head_size_v]`."""
    config = _constant_config(
        queries.shape[1], key_blocks.shape[2], queries.shape[2], value_blocks.shape[3], scaling, queries.dtype,
        key_blocks.shape[1], window, softcap, sinks is not None,
    )  # fmt: skip
    out = queries.new_empty(queries.shape[0], queries.shape[1], value_blocks.shape[3])
    torch.ops.vattn.attention(
        queries, key_blocks, value_blocks, query_start_loc, seq_lens, block_table, out, None, None, None, None, None,
        None, None, sinks, None, None, None, None, None, [], None, config,
    )  # fmt: skip
    return out


def as_sinks(s_aux: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the sinks of a model as the ops take them."""
    return None if s_aux is None else s_aux.detach().to(query.device, query.dtype)


@lru_cache(maxsize=1)
def _kernels() -> Any:
    from vattn.kernels.triton.attention import dense_decode

    return dense_decode


def _try_decode(query: Tensor, *rest: Any) -> Tensor | None:
    """Run the kernel of single rows over dense keys, if it takes a call."""
    if not (query.is_cuda and has_triton()):
        return None
    out: Tensor | None = _kernels().try_decode(query, *rest)
    return out


@torch.compiler.assume_constant_result
def _constant_config(*parts: Any) -> str:
    return _encoded_config(*parts)


@lru_cache(maxsize=1024)
def _encoded_config(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    scale: float | None,
    dtype: torch.dtype,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    sinks: bool,
) -> str:
    """Return the config of a call as the ops take it."""
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size_v,
        scale=head_size**-0.5 if scale is None else float(scale),
        dtype=dtype_name(dtype),
        kv_cache_dtype=dtype_name(dtype),
        block_size=block_size,
        sliding_window=window,
        logits_soft_cap=soft_cap or None,
        sinks=sinks,
    ).encode()


def refuse_options(module: nn.Module, causal: bool, dropout: float, options: dict[str, Any], query: Tensor) -> None:
    """Refuse what vattn would have to ignore, and training.

    Raises:
        UnsupportedRequestError, GradientError: either.
    """
    if torch.is_grad_enabled() and query.requires_grad:
        raise GradientError(
            "attn_implementation='vattn' with gradients, as in training",
            "inference",
            "call the model under torch.no_grad(), or train with model.set_attn_implementation('sdpa')",
        )
    if dropout:
        raise _refused(f"dropout={dropout} in attention (is the model in training mode?)")
    if not causal:
        raise _refused(f"{type(module).__name__}, whose attention is not causal,")
    if options.get("output_attentions"):
        raise _refused("output_attentions=True")
    if options.get("cache") is not None:
        raise UnsupportedRequestError(
            "generate_batch with attn_implementation='vattn'",
            "generate(), with beams or an assistant too",
            "with continuous_batching(model): of vattn.integrations.transformers, around generate_batch",
        )
    for name, given in options.items():
        if isinstance(given, Tensor) and name not in _NO_PART_OF_ATTENTION:
            raise _refused(f"{name} as an argument of attention")


def _packed(first: Tensor, window: int | None, shared: bool) -> Tensor:
    """Return `pack_decode`, once for all layers that share a mask."""
    if not shared:
        return pack_decode(first, window)
    known: dict[int | None, Tensor] = first.__dict__.setdefault("_vattn_packed", {})
    if window not in known:
        known[window] = pack_decode(first, window)
    return known[window]


def _unpacked(packed: Tensor, batch_size: int, num_keys: int, shared: bool) -> DenseStep | None:
    """Return `unpack_step`, once for all layers that share a mask."""
    if not shared:
        return unpack_step(packed, batch_size, num_keys)
    known = packed.__dict__.setdefault("_vattn_steps", {})
    if (batch_size, num_keys) not in known:
        known[batch_size, num_keys] = unpack_step(packed, batch_size, num_keys)
    found: DenseStep | None = known[batch_size, num_keys]
    return found


def _describe_mask(mask: Any, batch_size: int, num_keys: int) -> str:
    if mask is None:
        return "attention without a mask of transformers' mask functions"
    if isinstance(mask, Tensor) and mask.dtype != torch.int32:
        return f"an attention_mask of {dtype_name(mask.dtype)} {list(mask.shape)}"
    return f"an attention_mask that was made for other keys than {batch_size} rows of {num_keys}"


def _refused(got: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        f"{got} with attn_implementation='vattn'",
        "causal attention, windows, soft caps and sinks, under 2D attention masks",
        ELSEWHERE,
    )
