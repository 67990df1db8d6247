"""transformers, or the error that says what to install."""

from __future__ import annotations

from vattn.errors import MissingPackageError

try:
    import transformers
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise MissingPackageError(
        "vattn.integrations.transformers without transformers", "transformers >= 5", "pip install 'vattn[transformers]'"
    ) from error

__all__ = ["ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS", "transformers"]
