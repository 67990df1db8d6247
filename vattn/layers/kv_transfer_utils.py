"""KV transfer in a layer: an op before the cache is read, one after it was written, and a decorator with both."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from vattn.config.typed import typed
from vattn.errors import ConfigError, SignatureError
from vattn.ops import kv_transfer_points

Function = TypeVar("Function", bound=Callable[..., Any])


def wait_for_layer_load(key_cache: Tensor, value_cache: Tensor | None, kv_cache: Tensor | None = None) -> None:
    """Wait until this step's loads of a layer have reached its cache; call it before the cache is read.

    Compilers order by tensors: `kv_cache` is the storage, for readers of it beside those of its keys and values.
    """
    torch.ops.vattn.kv_transfer_wait(key_cache, value_cache, kv_cache)


def save_kv_layer(key_cache: Tensor, value_cache: Tensor | None, token: Tensor, kv_cache: Tensor | None = None) -> None:
    """Start this step's saves of a layer; call it after the cache was written."""
    torch.ops.vattn.kv_transfer_save(key_cache, value_cache, kv_cache, token)


@typed
def maybe_transfer_kv_layer(function: Function) -> Function:
    """Decorate a function that reads the KV cache of a layer, so that a connector loads before it and saves after it.

    Without a connector it only calls the function. Works in eager and compiled code; raises in the capture of a full
    CUDA graph.

    Args:
        function: has a parameter `layer_name`, the layer's name in its allocation.

    Raises:
        SignatureError: it has no such parameter.
        ConfigError: (when called) two models with connectors have a layer of that name.

    Example:
        >>> from vattn.layers.kv_transfer_utils import maybe_transfer_kv_layer
        >>> @maybe_transfer_kv_layer
        ... def attend(query, layer_name):
        ...     return query + 1
        >>> attend(1, "layers.0"), attend(1, layer_name="layers.0")
        (2, 2)
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise SignatureError(f"{function!r:.60}: {error}", "a Python function", "wrap it in one") from error
    layer_name = parameters.get("layer_name")
    if layer_name is None or layer_name.kind in (layer_name.VAR_POSITIONAL, layer_name.VAR_KEYWORD):
        raise SignatureError(
            f"{getattr(function, '__name__', 'function')}({', '.join(parameters)}) has no parameter 'layer_name'",
            "a function that gets the name of its layer",
            "add a parameter layer_name",
        )
    # A keyword-only parameter has no position.
    index = sys.maxsize if layer_name.kind is layer_name.KEYWORD_ONLY else list(parameters).index("layer_name")
    default = layer_name.default

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        name = kwargs["layer_name"] if "layer_name" in kwargs else args[index] if len(args) > index else default
        if name not in kv_transfer_points.by_name:
            return function(*args, **kwargs)
        point = kv_transfer_points.by_name[name]
        if point is None:
            raise ConfigError(
                f"two models with connectors have a layer {name!r}", "different prefixes", "detach() one of them"
            )
        storage = None if point.key_cache is point.kv_cache else point.kv_cache
        wait_for_layer_load(point.key_cache, point.value_cache, storage)
        result = function(*args, **kwargs)
        save_kv_layer(point.key_cache, point.value_cache, point.token, storage)
        return result

    return call  # type: ignore[return-value]
