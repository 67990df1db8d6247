"""Counts that a caller gives: integers of any kind, numpy's too; bools, floats, texts and tensors are none."""

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
