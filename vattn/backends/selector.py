"""Choose a backend for a request and say why. The only reader of `Backend.reasons`.

An explicit choice never falls back; an automatic one takes the first backend of the device's priority list that has no
reason against it, and logs its choice once per distinct request. Where speeds were measured for the kind of layer, the
fastest backend is tried first (`vattn.backends.choice_table`).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from vattn.backends import choice_table
from vattn.backends.base import Backend
from vattn.backends.mla.registry import MLA_PRIORITY, mla_backends
from vattn.backends.recorded_runs import runs_of, verdict
from vattn.cache.memory import CacheMemory
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.mla import MLAConfig
from vattn.errors import ConfigError, UnknownOptionError, UnsupportedRequestError

logger = logging.getLogger("vattn")

BUILTIN: dict[str, str] = {
    "TORCH_SDPA": "torch_sdpa.backend:TorchSDPABackend",
    "TRITON_ATTN": "triton_attn:TritonAttentionBackend",
    "FLASH_ATTN": "flash_attn.backend:FlashAttentionBackend",
    "FLASHINFER": "flashinfer.backend:FlashInferBackend",
    "DIFFERENTIAL_FLASH_ATTN": "differential_flash_attn:DifferentialFlashAttentionBackend",
    "XFORMERS": "xformers:XFormersBackend",
    "TREE_ATTN": "tree_attn:TreeAttentionBackend",
}
"""The backends of vattn: name -> module under `vattn.backends`, class."""

PRIORITY: dict[str, tuple[str, ...]] = {
    "cpu": ("TORCH_SDPA", "TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"),
    "cuda": ("TRITON_ATTN", "TORCH_SDPA", "FLASH_ATTN", "FLASHINFER"),
    "sm_80": ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_SDPA"),
    "sm_90": ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_SDPA"),
    "sm_100": ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN", "TORCH_SDPA"),
}
"""Order in which backends are tried, by device type and, on CUDA, by the newest architecture not newer than the GPU.

Backends that are not in a list follow it, in the order of `BUILTIN`, then of registration.
"""

_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Add a backend, after those there are, for every device it names.

    Raises:
        ConfigError: the name is taken, or the object is not a backend.
    """
    _load_builtin()
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"a backend of type {type(backend).__name__}" + (", a class" if isinstance(backend, type) else ""),
            "an instance of a class derived from vattn.backends.base.Backend",
            "register_backend(MyBackend())",
        )
    if backend.name in _BACKENDS:
        raise ConfigError(f"backend name {backend.name!r} is taken", "a new name", "rename the backend")
    _BACKENDS[backend.name] = backend
    forget_decisions()


def forget_decisions() -> None:
    """Forget all choices: a backend has found its library."""
    _decide.cache_clear()


def _load_builtin() -> None:
    if "TORCH_SDPA" not in _BACKENDS:
        for name, where in BUILTIN.items():
            module, _, kind = where.partition(":")
            _BACKENDS.setdefault(name, getattr(importlib.import_module(f"vattn.backends.{module}"), kind)())


def backend_names() -> tuple[str, ...]:
    """Return the names of all registered backends."""
    _load_builtin()
    return tuple(_BACKENDS)


def get_backend(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        UnknownOptionError: there is no backend of that name.
    """
    _load_builtin()
    if name not in _BACKENDS:
        raise UnknownOptionError(f"attn_backend {name!r}", ", ".join(("auto", *_BACKENDS)), "choose one of these names")
    return _BACKENDS[name]


def priority(device: DeviceInfo) -> tuple[str, ...]:
    """Return the names of all backends in the order in which they are tried on a device."""
    names = backend_names()
    first = [name for name in PRIORITY.get(_priority_key(device), ()) if name in names]
    return tuple(first) + tuple(name for name in names if name not in first)


def _priority_key(device: DeviceInfo) -> str:
    if device.type != "cuda":
        return device.type
    listed = [(int(key[3:-1]), int(key[-1])) for key in PRIORITY if key.startswith("sm_")]
    older = [capability for capability in listed if capability <= device.capability]
    return "sm_{}{}".format(*max(older)) if older else "cuda"


@dataclass(frozen=True)
class Explanation:
    """Why a backend was chosen, or why none was.

    Attributes:
        config: the request, with the `backend` that was requested.
        device: where it would run.
        chosen: name of the backend, `None` if every one refuses.
        refusals: reasons of each backend that was tried, empty for one that accepts.
        notes: what the chosen backend does to run the request, such as padding, and which steps miss the kernels that
            were made for the device.
        tested: for each backend that accepts on a GPU, the recorded run that covers the request, or that it is
            untested and why (`vattn.backends.recorded_runs`). On a CPU the tests of every change run.
        memory: how the cache lies, if it was given.
    """

    config: AttentionConfig | MLAConfig
    device: DeviceInfo
    chosen: str | None
    refusals: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    tested: dict[str, str] = field(default_factory=dict)
    memory: CacheMemory | None = None

    def problem(self) -> str:
        """Return in a sentence why no backend runs the request.

        It names the reasons of the requested backend, or of the backend with the fewest.
        """
        nearest = min(self.refusals, key=lambda name: len(self.refusals[name]))
        reasons = "; ".join(self.refusals[nearest])
        if self.config.backend == "auto":
            return f"no backend can run this attention on {self.device}; the nearest is {nearest}: {reasons}"
        return f"backend {nearest} cannot run this attention on {self.device}: {reasons}"

    def __str__(self) -> str:
        lines = [f"request: {self.config.encode()}", f"device : {self.device}", f"chosen : {self.chosen or 'none'}"]
        lines += [] if self.memory is None else [f"cache  : {self.memory}"]
        width = max(map(len, self.refusals), default=0)
        for name, reasons in self.refusals.items():
            accepts = "; ".join(["accepts", *([self.tested[name]] if name in self.tested else [])])
            lines.append(f"  {name:<{width}} : {'; '.join(reasons) if reasons else accepts}")
        lines += [f"note   : {note}" for note in self.notes]
        return "\n".join(lines)


def _candidates(config: AttentionConfig | MLAConfig, device: DeviceInfo) -> tuple[dict[str, Backend], str | None]:
    """Return the backends that may run a request in the order in which they are tried, and what was measured."""
    measured = None
    if isinstance(config, MLAConfig):
        known: Mapping[str, Backend] = mla_backends()
        names = MLA_PRIORITY.get(device.type, MLA_PRIORITY["cpu"])
    else:
        _load_builtin()
        known = _BACKENDS
        if config.backend == "auto":
            names, measured = choice_table.order(priority(device), config, device)
    if config.backend != "auto":
        if config.backend not in known:
            raise UnknownOptionError(
                f"attn_backend {config.backend!r}", ", ".join(("auto", *known)), "choose one of these names"
            )
        names = (config.backend,)
    return {name: known[name] for name in names}, measured


@lru_cache(maxsize=4096)
def _decide(config: Any, device: DeviceInfo, memory: CacheMemory | None = None) -> Explanation:
    backends, measured = _candidates(config, device)
    refusals = {name: tuple(backend.reasons(config, device)) for name, backend in backends.items()}
    if memory is not None:
        of_memory = {name: backend.capabilities.memory_refusals(memory) for name, backend in backends.items()}
        refusals = {name: (*reasons, *of_memory[name]) for name, reasons in refusals.items()}
    accepting = [name for name, reasons in refusals.items() if not reasons]
    chosen = accepting[0] if accepting else None
    notes: list[str] = []
    if chosen is not None:
        notes = [*backends[chosen].notes(config), *backends[chosen].general_steps(config, device, memory)]
    notes += [] if measured is None else [measured]
    tested = {}
    for name in accepting if device.type == "cuda" else []:
        backend = backends[name]
        tested[name] = verdict(runs_of(name), backend.running(), device.capability, backend.parts(config))
    return Explanation(config, device, chosen, refusals, tuple(notes), tested, memory)


class BoundLayer(Protocol):
    """A layer with a KV cache, as `explain` reads it."""

    @property
    def config(self) -> AttentionConfig | MLAConfig | None:
        """What the bound cache made of the request; `None` without a cache."""

    def cache_views(self) -> tuple[Tensor, Tensor | None]:
        """Return keys and values, or a storage alone."""


def explain(
    request: AttentionConfig | MLAConfig | BoundLayer,
    device: torch.device | str | DeviceInfo | None = None,
    cache: tuple[Tensor, Tensor | None] | CacheMemory | None = None,
) -> Explanation:
    """Explain which backend a request gets on a device and why the others refuse; raises nothing for a refusal.

    Args:
        request: a config, or a layer with a KV cache: then device and cache are the layer's.
        device: of torch, or a GPU elsewhere by its architecture, such as `"sm_90"`; default the CPU.
        cache: keys and values as `paged_attention` takes them, or tensors on meta of the same strides. Backends that
                cannot read such memory refuse.

    Raises:
        ConfigError: no request, or a layer without a cache. DeviceError: no such device.

    Example:
        >>> import torch, vattn
        >>> request = vattn.AttentionConfig(8, 2, 64, 64, 0.125, "bfloat16", "bfloat16")
        >>> vattn.explain(request, "cpu").chosen
        'TORCH_SDPA'
        >>> pool = torch.empty(2, 100, 16, 2, 68, dtype=torch.bfloat16, device="meta")[..., :64]
        >>> vattn.explain(request.replace(backend="FLASH_ATTN"), "sm_90", (pool[0], pool[1])).memory
        CacheMemory(dense=False, row_alignment=8, whole_rows=True)
    """
    config: Any = request
    if hasattr(config, "cache_views"):
        layer, config = config, config.config
        if config is None:
            raise ConfigError(
                "a layer without a KV cache", "a layer with one", "vattn.allocate_kv_cache(model, num_blocks=...)"
            )
        views = layer.cache_views()
        device, cache = views[0].device if device is None else device, CacheMemory.of(*views)
    if not isinstance(config, (AttentionConfig, MLAConfig)):
        raise ConfigError(
            f"a request of type {type(config).__name__}",
            "an AttentionConfig, an MLAConfig or a layer with a KV cache",
            "AttentionConfig.parse('vattn1 ...') reads one that was written",
        )
    info = device if isinstance(device, DeviceInfo) else DeviceInfo.anywhere("cpu" if device is None else device)
    return _decide(config, info, CacheMemory.of(*cache) if isinstance(cache, tuple) else cache)


@lru_cache(maxsize=4096)
def _log_once(chosen: str, request: str, device: DeviceInfo) -> None:
    logger.info("attention backend %s on %s for %s", chosen, device, request)


def choose(
    config: AttentionConfig | MLAConfig,
    device: torch.device | str | DeviceInfo,
    layer: str | None = None,
    memory: CacheMemory | None = None,
) -> Backend:
    """Return the backend for a request.

    Args:
        layer: prefix of the layer that requests it, for the error.
        memory: of its cache, if that is not vattn's own.

    Raises:
        UnsupportedRequestError: no backend, or not the requested one, accepts it; the text has the reasons of the
            nearest one.
    """
    explanation = explain(config, device, memory)
    if explanation.chosen is None:
        request = config.replace(backend="auto").encode()
        raise UnsupportedRequestError(
            explanation.problem() if layer is None else f"layer {layer!r}: {explanation.problem()}",
            "",
            f"change what it names; `python -m vattn explain '{request}'` lists all backends",
        )
    if config.backend == "auto":
        _log_once(explanation.chosen, config.encode(), explanation.device)
    return mla_backends()[explanation.chosen] if isinstance(config, MLAConfig) else _BACKENDS[explanation.chosen]
