"""Numbers that a caller gives. Counts: integers of any kind, numpy's too; bools, floats, texts and tensors are none.

Seconds: ints and floats above 0.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from vattn.errors import ConfigError, VattnError


def integer(value: Any) -> int | None:
    """Return an integer of any kind as an int, `None` for anything else.

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


MOST_SECONDS = 1e9
"""Some thirty years; operating systems count no further than a few hundred."""


def check_seconds(name: str, value: Any, fix: str) -> None:
    """Refuse a time to wait that is none.

    Raises:
        ConfigError: no int or float, or not above 0, or above `MOST_SECONDS`.

    Example:
        >>> check_seconds("timeout", 0.5, "leave it out for 30")
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_SECONDS:
        raise ConfigError(f"{name}={value!r:.60}", f"seconds above 0, up to {MOST_SECONDS:g}", fix)
