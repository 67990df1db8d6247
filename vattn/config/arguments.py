"""Read arguments: counts, sizes in bytes, and times to wait."""

from __future__ import annotations

import operator
import re
from typing import Any

from torch import Tensor

from vattn.errors import ConfigError, VattnError

MOST_INT32 = (1 << 31) - 1
"""The largest block id, length or offset of a step."""

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


def check_switches(**switches: object) -> None:
    """Refuse what is neither `True` nor `False`: any other value would count as one of them.

    Raises:
        ConfigError: such a value.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r:.60}", "True or False", f"{name}=True switches it on")


def check_seconds(name: str, value: Any, fix: str) -> None:
    """Refuse a time to wait that is no int or float, not above 0, or above `MOST_SECONDS`.

    Raises:
        ConfigError: such a value.

    Example:
        >>> check_seconds("timeout", 0.5, "leave it out for 30")
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_SECONDS:
        raise ConfigError(f"{name}={value!r:.60}", f"seconds above 0, up to {MOST_SECONDS:g}", fix)


def format_bytes(count: int) -> str:
    """Write a byte count in the largest binary unit that keeps it at least 1, `1572864` -> `"1.50 MiB"`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def parse_bytes(memory: int | str) -> int:
    """Read a byte count: an int, or a number with a unit such as `"2GiB"`, `"1.5 GB"`, `"512 MiB"`.

    Raises:
        ConfigError: not a positive count in a known unit.
    """
    units = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
    units |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
    count = 0
    if isinstance(memory, int) and not isinstance(memory, bool):
        count = memory
    elif isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory)
        if match and match[2].upper() in units:
            count = int(float(match[1]) * units[match[2].upper()])
    if count < 1:
        raise ConfigError(f"memory={memory!r}", "a positive int of bytes, or such as '2GiB', '512MB'", "memory='1GiB'")
    return count
