"""vLLM's attention on vattn's kernels: a plugin that vLLM finds by the entry point `vllm.general_plugins`.

This file imports nothing of vLLM; vLLM imports `backend` when it chooses the backend.
"""

from __future__ import annotations

NAME = "VATTN"

TESTED_VERSIONS = ("0.26.0", "0.32.0", "0.33.0")
"""Releases of vLLM that the tests run with."""

BACKEND = "vattn.integrations.vllm.backend.VattnBackend"


def register() -> None:
    """Register the backend with vLLM: as `VATTN`, or as `CUSTOM` in releases that take no other names.

    vLLM calls this in every process, some more than once.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not hasattr(AttentionBackendEnum, "register"):
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    elif NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
