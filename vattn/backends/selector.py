"""Choose a backend for a request and say why. The only reader of `Backend.reasons`.

An explicit choice never falls back; an automatic one takes the first backend of the device's priority list that has no
reason against it, and logs its choice once per distinct request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

import torch

from vattn.backends.base import Backend, DeviceInfo
from vattn.config import AttentionConfig
from vattn.errors import ConfigError, UnknownOptionError, UnsupportedRequestError

logger = logging.getLogger("vattn")

_BACKENDS: dict[str, Backend] = {}
_PRIORITY: dict[str, tuple[str, ...]] = {
    "cuda": ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_SDPA"),
    "cpu": ("TORCH_SDPA", "TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"),
}


def register_backend(backend: Backend) -> None:
    """Add a backend, after those there are, for every device it names.

    Raises:
        ConfigError: the name is taken.
    """
    _load_builtin()
    if backend.name in _BACKENDS:
        raise ConfigError(f"backend name {backend.name!r} is taken", "a new name", "rename the backend")
    _BACKENDS[backend.name] = backend
    forget_decisions()


def forget_decisions() -> None:
    """Ask the backends again from now on: one of them has found its library."""
    _decide.cache_clear()


def _load_builtin() -> None:
    if "TORCH_SDPA" not in _BACKENDS:
        from vattn.backends.flash_attn import FlashAttentionBackend
        from vattn.backends.flashinfer import FlashInferBackend
        from vattn.backends.torch_sdpa import TorchSDPABackend
        from vattn.backends.triton_attn import TritonAttentionBackend

        for backend in (TorchSDPABackend(), TritonAttentionBackend(), FlashAttentionBackend(), FlashInferBackend()):
            _BACKENDS.setdefault(backend.name, backend)


def backend_names() -> tuple[str, ...]:
    """Return the names of all registered backends."""
    _load_builtin()
    return tuple(_BACKENDS)


def get_backend(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        UnknownOptionError: there is none of that name.
    """
    _load_builtin()
    if name not in _BACKENDS:
        raise UnknownOptionError(f"attn_backend {name!r}", ", ".join(("auto", *_BACKENDS)), "choose one of these names")
    return _BACKENDS[name]


def _candidates(device: DeviceInfo) -> tuple[str, ...]:
    names = backend_names()
    first = [name for name in _PRIORITY.get(device.type, ()) if name in names]
    return tuple(first) + tuple(name for name in names if name not in first)


@dataclass(frozen=True)
class Explanation:
    """Why a backend was chosen, or why none was.

    Attributes:
        config: the request, with `backend` as it was asked for.
        device: where it would run.
        chosen: name of the backend, `None` if every one refuses.
        refusals: reasons of each backend that was asked, empty for one that accepts.
        notes: what the chosen backend does to run the request, such as padding.
    """

    config: AttentionConfig
    device: DeviceInfo
    chosen: str | None
    refusals: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"request: {self.config.encode()}", f"device : {self.device}", f"chosen : {self.chosen or 'none'}"]
        width = max(map(len, self.refusals), default=0)
        for name, reasons in self.refusals.items():
            lines.append(f"  {name:<{width}} : {'; '.join(reasons) if reasons else 'accepts'}")
        lines += [f"note   : {note}" for note in self.notes]
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def _decide(config: AttentionConfig, device: DeviceInfo) -> Explanation:
    if config.backend == "auto":
        names = _candidates(device)
    else:
        names = (get_backend(config.backend).name,)
    refusals = {name: tuple(_BACKENDS[name].reasons(config, device)) for name in names}
    chosen = next((name for name in names if not refusals[name]), None)
    notes = () if chosen is None else tuple(_BACKENDS[chosen].notes(config))
    return Explanation(config, device, chosen, refusals, notes)


def explain(config: AttentionConfig, device: torch.device | str | DeviceInfo = "cpu") -> Explanation:
    """Tell which backend a request gets on a device and why the others refuse; raises nothing for a refusal.

    Example:
        >>> import vattn
        >>> request = vattn.AttentionConfig(8, 2, 64, 64, 0.125, "float32", "float32")
        >>> vattn.explain(request, "cpu").chosen
        'TORCH_SDPA'
    """
    info = device if isinstance(device, DeviceInfo) else DeviceInfo.of(device)
    return _decide(config, info)


@lru_cache(maxsize=4096)
def _log_once(chosen: str, request: str, device: DeviceInfo) -> None:
    logger.info("attention backend %s on %s for %s", chosen, device, request)


def choose(config: AttentionConfig, device: torch.device | str | DeviceInfo) -> Backend:
    """Return the backend for a request.

    Raises:
        UnsupportedRequestError: no backend, or not the one asked for, accepts it; the text lists every reason.
    """
    explanation = explain(config, device)
    if explanation.chosen is None:
        asked = "no backend" if config.backend == "auto" else f"backend {config.backend}"
        verb = "can" if config.backend == "auto" else "cannot"
        raise UnsupportedRequestError(
            f"{asked} {verb} run this attention\n{explanation}\n",
            "a request with no reason against it in the table",
            "change what a reason names, or ask for another backend",
        )
    if config.backend == "auto":
        _log_once(explanation.chosen, config.encode(), explanation.device)
    return _BACKENDS[explanation.chosen]
