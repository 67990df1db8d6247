"""`known_keywords`: refuse unknown keywords by an error that names the one that is meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from vattn.errors import UnknownOptionError

T = TypeVar("T", bound=Callable[..., Any])


def known_keywords(**meant: str) -> Callable[[T], T]:
    """Return a decorator of functions and classes that refuses keywords which they do not have.

    Args:
        meant: names in other libraries, or of another class, and what to write here.

    Example:
        >>> @known_keywords(max_tokens="max_new_tokens")
        ... def sample(max_new_tokens=64): ...
        >>> sample(max_tokens=3)
        Traceback (most recent call last):
        ...
        vattn.errors.UnknownOptionError: sample(max_tokens=3). Allowed: max_new_tokens. Try: write max_new_tokens=.
    """

    def decorate(function: T) -> T:
        inner: Any = vars(function)["__init__"] if inspect.isclass(function) else function
        known = [name for name in inspect.signature(inner).parameters if name != "self"]

        @functools.wraps(inner)
        def call(*args: Any, **options: Any) -> Any:
            for name in options:
                if name not in known:
                    raise _unknown(function.__name__, name, options[name], known, meant)
            return inner(*args, **options)

        if not inspect.isclass(function):
            return call  # type: ignore[return-value]
        setattr(function, "__init__", call)  # noqa: B010
        return function

    return decorate


def _unknown(owner: str, name: str, value: Any, known: list[str], meant: dict[str, str]) -> UnknownOptionError:
    near = difflib.get_close_matches(name, known, n=1)
    right = meant.get(name) or (near[0] if near else "")
    fix = f"write {right}{'' if '=' in right else '='}" if right else f"leave {name} out"
    return UnknownOptionError(f"{owner}({name}={value!r:.40})", ", ".join(known), fix)
