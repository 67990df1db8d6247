"""`known_keywords`: refuse unknown keywords by an error that names the one that is meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from vattn.errors import UnknownOptionError

T = TypeVar("T", bound=Callable[..., Any])

_MOST = 6
"""Names that an error lists; of more the nearest."""


def known_keywords(meant: Mapping[str, str]) -> Callable[[T], T]:
    """Return a decorator of functions and classes that refuses keywords which they do not have.

    One with `**options` refuses only those in `meant`.

    Args:
        meant: names in other libraries, or of another class, and what to write here, see `other_names`. A name may be
            followed by `=` and a value, for advice that depends on it.

    Example:
        >>> @known_keywords({"max_tokens": "max_new_tokens={value}"})
        ... def sample(max_new_tokens=64): ...
        >>> sample(max_tokens=3)
        Traceback (most recent call last):
        ...
        vattn.errors.UnknownOptionError: sample(max_tokens=3). Allowed: max_new_tokens. Try: write max_new_tokens=3.
    """

    def decorate(function: T) -> T:
        inner: Any = vars(function)["__init__"] if inspect.isclass(function) else function
        parameters = inspect.signature(inner).parameters.values()
        known = [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_KEYWORD]
        takes_others = any(each.kind is each.VAR_KEYWORD for each in parameters)

        @functools.wraps(inner)
        def call(*args: Any, **options: Any) -> Any:
            for name in options:
                if name not in known and (name in meant or not takes_others):
                    raise _unknown(function.__name__, name, options[name], known, meant)
            return inner(*args, **options)

        if not inspect.isclass(function):
            return call  # type: ignore[return-value]
        setattr(function, "__init__", call)  # noqa: B010
        return function

    return decorate


def right_name(name: str, value: str, known: Iterable[str], meant: Mapping[str, str]) -> str:
    """Return what to write instead of a keyword, or `""`; `value` is the source text of what was passed.

    Example:
        >>> right_name("temprature", "0.5", ["temperature"], {})
        'temperature=0.5'
    """
    right = meant.get(f"{name}={value}") or meant.get(name)
    # At lower similarities the nearest name often means something else.
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return (right or (f"{near[0]}={{value}}" if near else "")).replace("{value}", value)


def _unknown(owner: str, name: str, value: Any, known: list[str], meant: Mapping[str, str]) -> UnknownOptionError:
    text = repr(value)
    right = right_name(name, text if len(text) <= 40 else "...", known, meant)
    fix = f"write {right}" if right else f"leave {name} out"
    near = known if len(known) <= _MOST else difflib.get_close_matches(name, known, n=_MOST, cutoff=0.5)
    allowed = ", ".join(near) or f"the {len(known)} keywords of {owner}, which help({owner}) lists"
    return UnknownOptionError(f"{owner}({name}={text:.40})", allowed, fix)
