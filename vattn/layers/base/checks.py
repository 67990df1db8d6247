"""Checks of a step and of the inputs of a call, with the same error messages for every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vattn.config.typed import is_plain
from vattn.errors import (
    CacheError,
    CacheNotBoundError,
    DeviceError,
    DtypeError,
    GradientError,
    MetadataError,
    ShapeError,
)
from vattn.metadata import forward_context as context
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.lineage import called, is_rewritten, rewritten
from vattn.ops.schemas import wanted_gradient
from vattn.quantization.formats import MODEL_DTYPES, dtype_name


def given_step(layer: Any, metadata: AttentionMetadata | None) -> AttentionMetadata | None:
    """Return the metadata of the call, else of the forward context; `None`: a profiling call.

    Raises:
        MetadataError: it is something else, its builder has written another step over it, or is for more blocks than
            the layer's cache has.
        CacheError: the layer was bound to another cache since its builder was made.
    """
    metadata = context.current_step() if metadata is None else metadata
    if metadata is not None and not isinstance(metadata, AttentionMetadata):
        raise MetadataError(
            f"metadata of type {type(metadata).__name__} in {called(layer)}",
            "AttentionMetadata, or None for a profiling call",
            "pass what builder.build returned, or its .common where it has one",
        )
    if metadata is None:
        return None
    # Layers share compiled code, which may read nothing of one alone: its name is read for errors only, and its cache
    # is left to `forward_context` and the builder.
    if is_rewritten(metadata):
        raise rewritten(metadata, called(layer))
    if metadata._built is not None and not torch.compiler.is_compiling():
        metadata._built.lineage.check_layer(layer)
    return metadata


def check_inputs(layer: Any, inputs: dict[str, Any], slots: Tensor, block_size: int, fix: str = "") -> None:
    """Refuse inputs that do not go with the step, and a step that does not go with the layer's cache.

    Args:
        inputs: by name; the first one has the rows of the step.
        slots: the step's, one per row.
        block_size: tokens per block that the step counts in; 0: unknown.
        fix: as of `check_tokens`.
    """
    query = next(iter(inputs))
    check_tokens(layer, query, inputs[query], slots.shape[0], fix)
    check_block_size(layer, block_size, layer.config.block_size)
    cache = layer._buffers["kv_cache"]
    device, dispatch = cache.device, type(cache).__torch_dispatch__
    for name, tensor in inputs.items():
        if tensor is None:
            continue
        # Under a mode, as while fx traces, all tensors are of its kind.
        if type(tensor).__torch_dispatch__ is not dispatch and not torch._C._len_torch_dispatch_stack():
            raise DtypeError(
                f"{name} is a {type(tensor).__name__} in {called(layer)}",
                "a plain tensor, as the layer's KV cache",
                "pass to_local() of a DTensor, and dequantise() of a quantised tensor",
            )
        if tensor.device != device:
            fix = (
                "pass a tensor with values" if tensor.is_meta else f"move {name} there, or allocate the cache elsewhere"
            )
            raise DeviceError(
                f"{name} is on {tensor.device} in {called(layer)}", f"{device}, where the layer's KV cache is", fix
            )
    if slots.device != device:
        raise DeviceError(
            f"metadata on {slots.device} in {called(layer)}",
            f"{device}, where the layer's KV cache is",
            f"build it with device={str(device)!r}",
        )


def check_tokens(layer: Any, name: str, rows: Tensor, tokens: int, fix: str = "") -> None:
    """Refuse an input that has other rows than the step has tokens.

    Args:
        name: of the input.
        tokens: of the step.
        fix: what to do; by default: build the step for them.
    """
    if rows.shape[0] != tokens:
        raise ShapeError(
            f"{name} has {rows.shape[0]} tokens in {called(layer)}",
            f"{tokens}, the tokens of the metadata, padding included",
            fix or "build the step for the tokens of this call",
        )


def check_block_size(
    layer: Any, given: int, own: int, fix: str = "give the builder layers=model, or the block_size of CacheConfig"
) -> None:
    """Refuse a step that counts in other blocks than the layer's cache; 0: the step does not tell."""
    if given not in (0, own):
        raise MetadataError(f"metadata for blocks of {given} tokens in {called(layer)}", f"blocks of {own} tokens", fix)


def check_no_gradients(
    layer: Any,
    inputs: Iterable[Tensor | None],
    what: str = "attention has no backward",
    fix: str = "call the model under torch.no_grad() or torch.inference_mode()",
) -> None:
    """Refuse inputs that want a gradient, backwards or forwards."""
    wanted = wanted_gradient(inputs)
    if wanted is not None:
        raise GradientError(
            f"{called(layer)} got an input that {wanted[0]}", f"inference only; {what}", wanted[1] or fix
        )


def check_storage_kind(layer: Any, storage: object, dtype: object) -> None:
    """Refuse what is no storage to bind, or no model dtype.

    Raises:
        CacheError: no tensor. DtypeError: no dtype that models have.
    """
    if not is_plain(storage) or isinstance(storage, nn.Parameter):
        raise CacheError(
            f"a KV cache storage of type {type(storage).__name__} for {called(layer)}",
            "a strided tensor of no class that changes its ops",
            "pass keys and values as two tensors, or call vattn.allocate_kv_cache(model, num_blocks=...)",
        )
    if dtype not in MODEL_DTYPES.values():
        allowed = ", ".join(map(str, MODEL_DTYPES.values()))
        raise DtypeError(f"dtype={dtype!r:.60} for {called(layer)}", allowed, "pass the dtype of the model")


def check_bound(layer: Any, name: str, query: Tensor) -> None:
    """Refuse a layer without a cache, and queries of another dtype than its cache is for; `name`: of the argument."""
    if layer.config is None or layer._buffers.get("kv_cache") is None:
        raise CacheNotBoundError(
            f"{called(layer)} has no KV cache",
            "a bound cache whenever metadata is given",
            "call vattn.allocate_kv_cache(model, num_blocks=...) or layer.bind_kv_cache(...) first",
        )
    bound = layer.config.dtype
    if query.dtype == MODEL_DTYPES[bound]:
        return
    got = dtype_name(query.dtype)
    fix = f"pass queries of torch.{bound}; a cache can be bound for {', '.join(MODEL_DTYPES)}"
    if got in MODEL_DTYPES:
        fix = f"allocate the KV cache again after model.to(dtype); under autocast, with dtype=torch.{got}"
    elif got.startswith("float8"):
        fix = "let the layer quantise it, QuantConfig(query_format='fp8_e4m3', q_scale=...), or vattn.paged_attention"
    raise DtypeError(f"{name} is {got} in {called(layer)}", f"{bound}, the dtype its cache was bound for", fix)
