"""transformers, or the error that says what to install."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vattn.errors import MissingPackageError

try:
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise MissingPackageError(
        "vattn.integrations.transformers without transformers", "transformers >= 5", "pip install 'vattn[transformers]'"
    ) from error

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "CACHE_ARGUMENTS",
    "cache_argument",
    "transformers",
]

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the argument that takes a cache: the first since transformers 5.24, the others before."""


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the argument with which a forward takes a cache, empty without one."""
    taken = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in taken), "")
