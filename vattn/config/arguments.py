"""Unknown, missing and superfluous arguments: refused with our own errors, which say what was meant, as layers do."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from vattn.errors import ArgumentsError, UnknownOptionError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def meant(unknown: Iterable[str], names: Iterable[str]) -> str:
    """Return the known names that unknown ones look like, joined by "or"; `""` if they look like none."""
    unknown, names = list(unknown), list(names)
    close = [match for name in unknown for match in _closest(name, names)]
    # A part of a longer name is no close match: `window` of `per_layer_sliding_window`.
    close += [name for name in names if any(part.replace("_", "") in name.replace("_", "") for part in unknown)]
    return " or ".join(dict.fromkeys(close))


def _closest(unknown: str, names: list[str]) -> list[str]:
    """Return names with all words of an unknown one, else the most alike: of these, one that shares most words."""
    words = set(unknown.split("_"))
    if whole := [name for name in names if len(words) > 1 and words <= set(name.split("_"))]:
        return whole
    alike = difflib.get_close_matches(unknown, names, n=3)
    return [max(alike, key=lambda name: len(words & set(name.split("_"))))] if alike else []


def refuse_unknown(of: str, unknown: Iterable[str], names: Iterable[str]) -> None:
    """Raise for names of arguments that something does not have.

    Raises:
        UnknownOptionError: there is an unknown name; the text has all known ones and the likeliest.
    """
    unknown, names = sorted(unknown), list(names)
    if unknown:
        # Dynamo cannot follow the search for it.
        likeliest = "" if torch.compiler.is_compiling() else meant(unknown, names)
        raise UnknownOptionError(
            f"{of} got unknown option(s) {', '.join(unknown)}",
            ", ".join(names),
            likeliest or "check the spelling; nothing is ignored",
        )


def refuse_unknown_inputs(layer: object, unknown: Iterable[str]) -> None:
    """Raise for keywords that a layer's `forward` does not have, and got as `**unknown`.

    Compiled code would guard all that a wrapper such as that of `known_keywords` reads.

    Raises:
        UnknownOptionError: as `refuse_unknown`.
    """
    parameters = inspect.signature(type(layer).forward).parameters.values()  # type: ignore[attr-defined]
    names = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    refuse_unknown(f"{type(layer).__name__}.forward", unknown, names)


def known_keywords(function: F) -> F:
    """Make a function without `**options` refuse keywords that it does not have, and calls that lack arguments.

    Example:
        >>> from vattn.config.arguments import known_keywords
        >>> @known_keywords
        ... def double(number):
        ...     return 2 * number
        >>> double(nummer=3)
        Traceback (most recent call last):
        ...
        vattn.errors.UnknownOptionError: double got unknown option(s) nummer. Allowed: number. Try: number.
    """
    return _checked(function, function.__qualname__.removesuffix(".__init__"))


def required_arguments(function: F) -> F:
    """Make a function with `**options` refuse calls that lack arguments, or have more by place than there are.

    What its options are called it checks itself.
    """
    return _checked(function, function.__qualname__.removesuffix(".__init__"), options=True)


def known_fields(kind: C) -> C:
    """Make a class refuse unknown keywords and missing ones of its constructor; goes above `@dataclass`."""
    kind.__init__ = _checked(kind.__init__, kind.__qualname__)  # type: ignore[misc]
    return kind


def _checked(function: F, of: str, options: bool = False) -> F:
    every = inspect.signature(function).parameters
    parameters = {name: p for name, p in every.items() if p.kind is not p.VAR_KEYWORD}
    if not options and len(parameters) < len(every):
        raise TypeError(f"{of} takes **options: what it passes them on to knows their names")
    names = [name for name in parameters if name != "self"]
    known = frozenset(names)
    by_place = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    most = sys.maxsize if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()) else len(by_place)

    def called(args: tuple[Any, ...]) -> str:
        """Return what the caller knows the function as: a method by the class of its object, which may inherit it."""
        kind = type(args[0]) if args else object
        owner, dot, name = of.partition(".")
        return kind.__name__ + dot + name if owner in (each.__name__ for each in kind.__mro__) else of

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not options and not known.issuperset(kwargs):
            refuse_unknown(called(args), set(kwargs) - known, names)
        given = by_place[: len(args)]
        if twice := [name for name in given if name in kwargs]:
            raise ArgumentsError(
                f"{called(args)} with {twice[0]} by place and by name", ", ".join(names), "pass it once"
            )
        missing = [name for name in required if name not in kwargs and name not in given]
        if missing or len(args) > most:
            own = "self" in by_place
            came = f"without {', '.join(missing)}" if missing else f"with {len(args) - own} positional arguments"
            allowed = f"at most {most - own}, {', '.join(by_place[own:])}" if not missing else ", ".join(names)
            raise ArgumentsError(f"{called(args)} {came}", allowed, "pass them" if missing else "name the others")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]
