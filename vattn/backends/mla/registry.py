"""The backends of latent attention by name, and the order in which each device tries them."""

from __future__ import annotations

from functools import lru_cache

from vattn.backends.mla.base import MLABackend

MLA_PRIORITY: dict[str, tuple[str, ...]] = {"cuda": ("TRITON_MLA", "TORCH_MLA"), "cpu": ("TORCH_MLA", "TRITON_MLA")}


@lru_cache(maxsize=1)
def mla_backends() -> dict[str, MLABackend]:
    """Return every backend of latent attention by name."""
    from vattn.backends.mla.flash_mla import FlashMLABackend
    from vattn.backends.mla.flashinfer_mla import FlashInferMLABackend
    from vattn.backends.mla.torch_mla import TorchMLABackend
    from vattn.backends.mla.triton_mla import TritonMLABackend

    found = (TorchMLABackend(), TritonMLABackend(), FlashInferMLABackend(), FlashMLABackend())
    return {backend.name: backend for backend in found}
