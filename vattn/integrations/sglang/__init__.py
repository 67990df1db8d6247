"""vattn as SGLang's attention backend: `--attention-backend vattn`. SGLang is imported when it calls `register`."""

from __future__ import annotations

from typing import Any

from vattn.integrations.engine_versions import check_version

TESTED_VERSIONS = ("0.5.17", "0.5.22", "0.5.23")
"""Releases of SGLang that the tests run with."""


def register() -> None:
    """Add `vattn` to the names that `--attention-backend` takes; SGLang calls this in each of its processes."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    if "vattn" not in ATTENTION_BACKENDS:
        register_attention_backend("vattn")(create_backend)
        add_attention_backend_choices(["vattn"])


def create_backend(model_runner: Any) -> Any:
    """Return the backend of a model that SGLang has loaded; SGLang calls this once, when it starts.

    Raises:
        ConfigError: an untested release of SGLang without `VATTN_ALLOW_UNTESTED=1`.
        UnsupportedRequestError: the model, its cache or an option of the server is none that vattn serves.
    """
    check_version("sglang", TESTED_VERSIONS)
    from vattn.integrations.sglang.backend import VattnBackend

    return VattnBackend(model_runner)
