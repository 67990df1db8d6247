"""Reject models in training mode, where dropout would change the results."""

from __future__ import annotations

from typing import Any

from torch import nn

from vattn.errors import ConfigError


class EvalMode:
    """The parts of a transformers model on vattn, listed once: a check takes microseconds.

    Args:
        model: what `enable` returned; any other model is accepted.
    """

    def __init__(self, model: Any) -> None:
        wrapped: Any = getattr(model, "wrapped", None)
        named = wrapped.named_modules() if isinstance(wrapped, nn.Module) else ()
        # vattn's own layers do the same in both modes, and were added after `eval()`.
        self._parts = [(name, part) for name, part in named if not type(part).__module__.startswith("vattn.")]

    def check(self, what: str = "") -> None:
        """Raise ConfigError if any part is in training mode; `what` precedes the model in the error."""
        for name, part in self._parts:
            if part.training:
                raise ConfigError(
                    f"{what}a model in training mode" if not name else f"{what}a model with {name!r} in training mode",
                    "one in eval mode: dropout would change tokens",
                    "model.eval()",
                )

    def check_whole(self) -> None:
        """Raise ConfigError if the whole model was put in training mode: one attribute, for every step."""
        if self._parts and self._parts[0][1].training:
            self.check()
