"""Models in training mode are refused where tokens or magnitudes come of them: dropout would change those."""

from __future__ import annotations

from typing import Any

from torch import nn

from vattn.errors import ConfigError


class EvalMode:
    """The parts of a transformers model on vattn, found once: looking at their mode costs microseconds a call.

    Args:
        model: what `enable` returned; of any other model nothing is known, and nothing is refused.
    """

    def __init__(self, model: Any) -> None:
        wrapped: Any = getattr(model, "wrapped", None)
        named = wrapped.named_modules() if isinstance(wrapped, nn.Module) else ()
        # Layers of ours do the same in both modes, and are in training mode where they came behind `eval()`.
        self._parts = [(name, part) for name, part in named if not type(part).__module__.startswith("vattn.")]

    def check(self, what: str = "") -> None:
        """Refuse the model if any part of it is in training mode.

        Args:
            what: ahead of the model in errors, such as "a calibration of ".

        Raises:
            ConfigError: such a part.
        """
        for name, part in self._parts:
            if part.training:
                raise ConfigError(
                    f"{what}a model in training mode" if not name else f"{what}a model with {name!r} in training mode",
                    "one in eval mode: dropout would change tokens",
                    "model.eval()",
                )

    def check_whole(self, what: str = "") -> None:
        """Refuse the model if it was put in training mode as a whole; free of charge, for every step."""
        if self._parts and self._parts[0][1].training:
            self.check(what)
