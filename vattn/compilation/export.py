"""`export_step`: a model's step as a `torch.export` program that takes KV caches and metadata as inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.layout import CACHE_BUFFERS
from vattn.config.device import parse_version
from vattn.errors import CacheNotBoundError, ConfigError, MetadataError, UnsupportedRequestError
from vattn.metadata.attention_metadata import TENSOR_FIELDS, AttentionMetadata, step_of
from vattn.metadata.forward_context import forward_context

StepInputs = tuple[tuple[Tensor, ...], dict[str, Tensor], dict[str, Tensor]]
"""What an exported program takes: the model's arguments, the metadata's tensors by name, the caches by buffer."""


class _Step(nn.Module):
    """Run a model with caches and metadata from its arguments."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module], causal: bool) -> None:
        super().__init__()
        self.model = model
        self._layers = layers
        self._causal = causal

    def forward(self, args: tuple[Tensor, ...], metadata: dict[str, Tensor], kv_caches: dict[str, Tensor]) -> Any:
        fields: dict[str, Any] = {"causal": self._causal}
        fields |= {name: tensor for name, tensor in metadata.items() if name in TENSOR_FIELDS}
        plans = {name.removeprefix("plans."): plan for name, plan in metadata.items() if name.startswith("plans.")}
        step = AttentionMetadata(**fields, plans=plans)
        for name, layer in self._layers.items():
            found = {buffer: kv_caches.get(f"{name}.{buffer}") for buffer in CACHE_BUFFERS}
            held = {buffer: cache for buffer, cache in found.items() if cache is not None}
            layer._buffers.update({"kv_cache": held.get("key_cache"), **held})
            # AOTInductor hands an op None for an empty list, so a missing schedule is one of no elements.
            step.plans.setdefault(getattr(layer, "_plan_key", ""), step.seq_lens.new_empty(0))
        try:
            with forward_context(step):
                return self.model(*args)
        finally:
            for layer in self._layers.values():
                layer._buffers.update(dict.fromkeys(layer._buffers.keys() & CACHE_BUFFERS))


@dataclass(frozen=True)
class ExportedStep:
    """A program, and what to feed it.

    Attributes:
        program: takes `(args, metadata tensors, kv caches)` and updates the caches in place; holds no cache bytes.
        model: the exported model; `inputs` passes its caches on.
    """

    program: torch.export.ExportedProgram
    model: nn.Module

    def inputs(self, args: tuple[Tensor, ...], metadata: AttentionMetadata) -> StepInputs:
        """Return the positional arguments of `program.module()`, or of what AOTInductor made of it, for one step.

        Raises:
            MetadataError: an older step than the newest of its builder.
        """
        step_of(metadata, "inputs() of an exported step")
        return args, metadata.tensors(), _caches(_cached_layers(self.model))

    def compile(self, package_path: str | os.PathLike[str]) -> Callable[..., Any]:
        """Compile the program with AOTInductor into the file `package_path` and load it; a serving process only loads.

        The process that loads the file must import vattn first, which registers the ops.

        Raises:
            ConfigError: no path of a file called `.pt2` in a folder that exists.
            UnsupportedRequestError: torch is older than 2.12, where loading the file ends the process (seen on 2.11).
        """
        path = Path(package_path) if isinstance(package_path, (str, os.PathLike)) else None
        if path is None or path.suffix != ".pt2" or not path.absolute().parent.is_dir():
            raise ConfigError(f"package_path={package_path!r:.80}", "a file.pt2 in a folder that exists", "model.pt2")
        if parse_version(torch.__version__) < (2, 12):
            raise UnsupportedRequestError(
                f"AOTInductor of an exported step on torch {torch.__version__}",
                "torch 2.12 or newer; older ones crash when they load it",
                "update torch, or run program.module() or vattn.compile(model)",
            )
        written = torch._inductor.aoti_compile_and_package(self.program, package_path=str(path))
        return torch._inductor.aoti_load_package(written)


def export_step(model: nn.Module, args: tuple[Tensor, ...], metadata: AttentionMetadata) -> ExportedStep:
    """Export one step of a model with token count, batch size, and number of cache blocks left open.

    A cache in a module buffer would be exported with its bytes; here each is an input of the program, and so are the
    metadata's tensors. What is not a tensor is fixed: `causal` as a bool, and which optional tensors there are.

    Args:
        model: a model with bound KV caches that takes its metadata from `vattn.forward_context`.
        args: its tensor arguments for a sample step, tokens in the first dimension.
        metadata: of the sample step, with at least 2 tokens: a size of 1 would be fixed.

    Raises:
        CacheNotBoundError: the model has no layer with a bound cache.
        MetadataError: the sample has fewer than 2 tokens or requests.
        UnsupportedRequestError: the cache has groups (layers share storages) or a connector.

    Example:
        >>> import torch, vattn
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.attn = vattn.Attention(num_heads=2, head_size=16, scale=0.25)
        ...     def forward(self, x):
        ...         return self.attn(x, x, x)
        >>> model = Model()
        >>> _ = vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=4, max_num_tokens=8, max_seq_len=32, block_size=16)
        >>> step = builder.build(query_lens=[2, 1], seq_lens=[2, 5], block_tables=[[1], [2]])
        >>> exported = vattn.export_step(model, (torch.randn(3, 32),), step)
        >>> step = builder.build(query_lens=[4], seq_lens=[4], block_tables=[[3]])
        >>> exported.program.module()(*exported.inputs((torch.randn(4, 32),), step)).shape
        torch.Size([4, 32])
    """
    layers = _cached_layers(model)
    if not layers and not any(hasattr(layer, "get_kv_cache_spec") for layer in model.modules()):
        raise CacheNotBoundError(
            f"{type(model).__name__} has no layer with a KV cache",
            "a model with bound caches",
            "call vattn.allocate_kv_cache(model, num_blocks=...) before export",
        )
    _refuse_unexportable(layers)
    sizes = (metadata.slot_mapping.shape[0], metadata.seq_lens.shape[0])
    if min(sizes) < 2:
        raise MetadataError(
            f"a sample step of {sizes[0]} tokens and {sizes[1]} requests",
            "2 or more of each, since export fixes a size of 1",
            "export with a sample of two requests; the program then runs any number from 2",
        )
    causal = metadata.causal if isinstance(metadata.causal, bool) else True
    wrapper = _Step(model, layers, causal).eval()
    # Sample inputs are saved with the program: two blocks of cache represent all of them.
    caches = {name: _two_blocks(cache) for name, cache in _caches(layers).items()}
    sample = (args, metadata.tensors(), caches)
    with _without_caches(layers), torch.no_grad():
        program = torch.export.export(wrapper, sample, dynamic_shapes=_dynamic_shapes(sample), strict=False)
    return ExportedStep(program, model)


def _refuse_unexportable(layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        wrong = {
            "belongs to a group of a hybrid cache": getattr(layer, "kv_cache_group", None),
            "has a connector": getattr(layer, "kv_transfer_token", None),
        }
        for what, found in wrong.items():
            if found is not None:
                raise UnsupportedRequestError(
                    f"export of a model whose layer {name!r} {what}",
                    "caches that are inputs of their own, one for each layer",
                    "allocate without hybrid=True, and detach() the KVTransfer, before exporting",
                )


def _dynamic_shapes(sample: StepInputs) -> tuple[Any, ...]:
    auto = torch.export.Dim.AUTO
    args, metadata, caches = sample

    def batch(tensor: Tensor) -> dict[int, Any]:
        return {0: auto} if tensor.dim() else {}

    blocks = {name: {0: auto} for name in caches}
    wide = {name: {0: auto, 1: auto} if name == "block_table" else batch(tensor) for name, tensor in metadata.items()}
    return tuple(batch(tensor) for tensor in args), wide, blocks


def _caches(layers: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Return what the ops take of each layer's cache, by the name of the buffer; latent layers have a storage alone."""
    found = {}
    for name, layer in layers.items():
        if layer._buffers.get("key_cache") is None:
            found[f"{name}.kv_cache"] = layer.get_buffer("kv_cache")
            continue
        views = {f"{name}.{buffer}": layer._buffers[buffer] for buffer in CACHE_BUFFERS[1:]}
        found |= {buffer: view for buffer, view in views.items() if view is not None}
    return found


def _two_blocks(cache: Tensor) -> Tensor:
    return cache.new_empty_strided((2, *cache.shape[1:]), cache.stride()).zero_()


def _cached_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if hasattr(layer, "bind_kv_cache") and isinstance(layer._buffers.get("kv_cache"), Tensor)
    }


@contextmanager
def _without_caches(layers: dict[str, nn.Module]) -> Iterator[None]:
    held = [{name: layer._buffers[name] for name in layer._buffers.keys() & CACHE_BUFFERS} for layer in layers.values()]
    for layer, caches in zip(layers.values(), held, strict=True):
        layer._buffers.update(dict.fromkeys(caches))
    try:
        yield
    finally:
        for layer, caches in zip(layers.values(), held, strict=True):
            layer._buffers.update(caches)
