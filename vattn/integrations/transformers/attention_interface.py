"""The attention and mask functions that `enable` registers with transformers, and the layer that they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vattn.errors import ConfigError, MetadataError, ShapeError, UnsupportedRequestError
from vattn.integrations.transformers.available import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
from vattn.layers import Attention, EncoderOnlyAttention
from vattn.metadata import forward_context as context

NAME = "vattn"
"""Name of the layer in an attention module."""

PACKED = "vattn_packed"
"""Name, in transformers' registries, of the functions of models that `enable` was called with."""

REPLACED = "vattn_replaced"
"""The same for models whose attention modules get another forward, and which need a tensor as a mask."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Run the layer that `enable` made for a module; transformers' attention interface.

    Args:
        module: the attention module.
        query, key, value: `[1, heads, T, head_size]`, of the step's tokens.
        attention_mask: `None`, or without elements; the layer knows its mask.
        **options: what the model passes; refused where it differs from what `enable` saw.

    Returns:
        `[1, T, heads, head_size]`, and no weights.
    """
    layer = module._modules.get(NAME)
    if layer is None:
        raise ConfigError(
            f"{type(module).__name__} without a vattn layer",
            "models that enable() was called with",
            "call enable(model)",
        )
    if context.current_step() is None:
        raise no_step()
    if query.shape[0] != 1:
        raise ShapeError(
            f"a batch of {query.shape[0]} rows of tokens",
            "one row of packed tokens, [1, T]",
            "concatenate the tokens of all requests, and build a step for them",
        )
    if attention_mask is not None and attention_mask.shape != (0,):
        raise _masked()
    layer.check_options(options)  # type: ignore[operator]
    # The heads of a token are contiguous; tokens may have gaps, as parts of a merged projection.
    rows = [t[0].transpose(0, 1).flatten(1).unflatten(1, (t.shape[1], t.shape[3])) for t in (query, key, value)]
    out = layer(*rows)
    return out.view(1, rows[0].shape[0], -1, layer.head_size_v), None  # type: ignore[union-attr]


def no_mask(attention_mask: Tensor | None = None, **options: Any) -> None:
    """Return no mask, since the layers know theirs; transformers' mask interface."""
    if context.current_step() is None:
        raise no_step()
    if attention_mask is not None:
        raise _masked()


def empty_mask(attention_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return a mask without elements, for models that convert their mask."""
    no_mask()
    return torch.empty(0, dtype=torch.bool)


def register() -> None:
    """Make the functions known to transformers by their names."""
    for name, mask in ((PACKED, no_mask), (REPLACED, empty_mask)):
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)


class _CheckedCall:
    """Checks how a transformers model calls the layer of one of its modules."""

    _expected: dict[str, Any]
    prefix: str

    def check_options(self, options: dict[str, Any]) -> None:
        """Refuse a call with other arguments than the layer was made for."""
        for name, expected in self._expected.items():
            if options.get(name) != expected:
                raise UnsupportedRequestError(
                    f"{name}={options.get(name)!r} in layer {self.prefix!r}",
                    f"{expected!r}, as the layer was made",
                    "call disable(model) and enable(model) again after changing the model",
                )


class ModelAttention(_CheckedCall, Attention):
    """`Attention` of one module of a transformers model."""


class ModelEncoderAttention(_CheckedCall, EncoderOnlyAttention):
    """`EncoderOnlyAttention` of one module of a transformers model."""


def _masked() -> MetadataError:
    return MetadataError(
        "an attention_mask in a step of packed tokens",
        "none: the step's metadata says which tokens see each other",
        "leave attention_mask out; slot_mapping marks padding",
    )


def no_step() -> MetadataError:
    """Return the error of a call without a step."""
    return MetadataError(
        "a call of a model on vattn outside of vattn.forward_context, such as by model.generate()",
        "steps of packed tokens",
        "use vattn.Generator(model, ...) or vattn.Embedder(model), run steps under vattn.forward_context(metadata), "
        "or disable(model) and model.set_attn_implementation('vattn')",
    )
