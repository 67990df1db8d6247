"""Read arguments: counts, times to wait, and the names of extra options."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from vattn.errors import ConfigError, UnknownOptionError, VattnError

MOST_SECONDS = 1e9
"""About thirty years. Operating systems count no further than a few hundred."""


def integer(value: Any) -> int | None:
    """Return an integer of any type, NumPy's included, as an int; `None` for bools, floats, strings and tensors.

    Example:
        >>> integer(3), integer(True), integer(3.0), integer("3")
        (3, None, None, None)
    """
    if isinstance(value, (bool, Tensor)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def read_count(name: str, value: Any, least: int, fix: str, error: type[VattnError] = ConfigError) -> int:
    """Return an argument that counts something, as an int.

    Args:
        name: of the argument.
        least: smallest count that makes sense.
        fix: what to do about another one.
        error: class of the refusal.

    Raises:
        VattnError: no integer, or a smaller one; of the class `error`.
    """
    count = integer(value)
    if count is None or count < least:
        raise error(f"{name}={value!r:.60}", f"an int, {name} >= {least}", fix)
    return count


def check_seconds(name: str, value: Any, fix: str) -> None:
    """Refuse a time to wait that is no int or float, not above 0, or above `MOST_SECONDS`.

    Raises:
        ConfigError: such a value.

    Example:
        >>> check_seconds("timeout", 0.5, "leave it out for 30")
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_SECONDS:
        raise ConfigError(f"{name}={value!r:.60}", f"seconds above 0, up to {MOST_SECONDS:g}", fix)


def refuse_unknown(of: str, unknown: Iterable[str], names: Iterable[str]) -> None:
    """Refuse options that something does not have.

    Raises:
        UnknownOptionError: there is an unknown name; the text has all known ones.
    """
    unknown = sorted(unknown)
    if unknown:
        raise UnknownOptionError(
            f"{of} got unknown option(s) {', '.join(unknown)}", ", ".join(names), "check the spelling"
        )
