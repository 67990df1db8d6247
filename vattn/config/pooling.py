"""`PoolingConfig`: how the hidden states of a text become its embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vattn.errors import ConfigError

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Names as in sentence-transformers, in the order in which it concatenates several: the first token, largest values,
mean, sum divided by the root of the length, mean weighted by the position from 1, the last token."""


@dataclass(frozen=True)
class PoolingConfig:
    """How the hidden states of a text become its embedding.

    Args:
        modes: of `POOLING_MODES`; the embedding is what all of them give, concatenated in that order.
        normalise: whether embeddings have length 1.
        prompts: texts that come before a text, by name.
        default_prompt: the name of the one that comes before texts without another; `None` for none.
        lower_case: whether texts are written in lower case first.

    Raises:
        ConfigError: an unknown mode, or a default prompt without a text.

    Example:
        >>> from vattn.config.pooling import PoolingConfig
        >>> PoolingConfig(("lasttoken", "cls")).modes
        ('cls', 'lasttoken')
    """

    modes: tuple[str, ...]
    normalise: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False

    def __post_init__(self) -> None:
        wrong = [mode for mode in self.modes if mode not in POOLING_MODES]
        if wrong or not self.modes:
            raise ConfigError(
                f"pooling={wrong[0] if wrong else ()!r:.60}",
                ", ".join(POOLING_MODES),
                'choose one of these, or several as pooling=["mean", "max"]',
            )
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ConfigError(
                f"default_prompt={self.default_prompt!r:.60} without a text",
                f"None or one of {sorted(self.prompts)}",
                "check the configuration",
            )
        object.__setattr__(self, "modes", tuple(mode for mode in POOLING_MODES if mode in self.modes))
