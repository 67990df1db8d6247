"""`typed`: refuse arguments that a function's annotations do not allow, by one rule for all functions."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from vattn.config.arguments import integer
from vattn.errors import ArgumentError, VattnError

T = TypeVar("T", bound=Callable[..., Any])
Allows = Callable[[Any], bool]


def typed(function: T) -> T:
    """Check the arguments of a function, or of a class when an instance is made, before it runs.

    Ints are of any integer type and never bools, floats are numbers other than NaN, sequences are no texts, tensors are
    strided and of no class that changes their ops. What an annotation says less about passes. Compiled code is not
    checked.

    Raises:
        ArgumentError: at the call, an argument of another type.

    Example:
        >>> @typed
        ... def double(count: int) -> int:
        ...     return 2 * count
        >>> double("3")
        Traceback (most recent call last):
        ...
        vattn.errors.ArgumentError: double(count='3'). Allowed: int. Try: pass another count.
    """
    if inspect.isclass(function):
        setattr(function, "__init__", _checked(function.__init__, function.__name__))  # noqa: B010
        return function
    return cast(T, _checked(function, function.__qualname__.removesuffix(".__init__")))


def typed_on_error(function: T) -> T:
    """Check the arguments as `typed` does, but only where the function has failed: right calls cost nothing.

    For functions that steps call. Their own checks must leave no wrong argument unnoticed.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **options)
        try:
            return function(*args, **options)
        except VattnError:
            raise
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError, NotImplementedError, AssertionError):
            _check(function, function.__qualname__.removesuffix(".__init__"), args, options)
            raise

    return cast(T, call)


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            _check(function, name, args, options)
        return function(*args, **options)

    return call


def _check(function: Callable[..., Any], name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    signature, rules = _rules(function)
    try:
        given = signature.bind(*args, **options).arguments
    except TypeError:
        return  # The call says it.
    for argument, value in given.items():
        if argument in rules and not rules[argument](value):
            hint = typing.get_type_hints(function)[argument]
            # An alias says nothing to a user.
            allowed = str(hint if isinstance(hint, types.UnionType) else function.__annotations__[argument])
            allowed = re.sub(r"\b(torch|collections\.abc|typing)\.", "", allowed).replace(" | None", " or None")
            raise ArgumentError(f"{name}({argument}={_show(value)})", allowed, f"pass another {argument}")


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {type(value).__name__}, {value.layout}" + (" on meta" if value.is_meta else "")
    return f"{value!r:.60}"


@functools.cache
def _rules(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Allows]]:
    signature = inspect.signature(function)
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # A name that only type checkers import.
        hints = {}
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, each in signature.parameters.items() if each.kind not in various]
    found = {name: _rule(hints[name]) for name in named if name in hints}
    return signature, {name: rule for name, rule in found.items() if rule is not _anything}


def _anything(value: Any) -> bool:
    return True


def _rule(hint: Any) -> Allows:
    """Return whether a value fits an annotation, as a function."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    simple: dict[Any, Allows] = {int: _is_int, float: _is_float, None: _is_none, types.NoneType: _is_none}
    if hint is Any:
        return _anything
    if hint is Tensor:
        return is_plain
    if origin in (typing.Union, types.UnionType):
        rules = [_rule(each) for each in inner]
        return _anything if _anything in rules else lambda value: any(rule(value) for rule in rules)
    if isinstance(hint, type) and hint in simple:
        return simple[hint]
    if hint is None:
        return _is_none
    if origin in (Sequence, Iterable, list, tuple, set, frozenset):
        rules, kinds = [_rule(each) for each in inner if each is not ...], (list, tuple) if origin is tuple else origin
        return _all(kinds, rules, fixed=origin is tuple and ... not in inner)
    if origin is Mapping or origin is dict:
        of_values = _rule(inner[1]) if inner else _anything
        return lambda value: isinstance(value, Mapping) and all(map(of_values, value.values()))
    if getattr(hint, "_is_protocol", False):
        members = [name for name in vars(hint) if not name.startswith("_")]
        return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in members)
    if isinstance(hint, TypeVar):
        return _anything if hint.__bound__ is None else _rule(hint.__bound__)
    kind = origin or hint
    if isinstance(kind, type) and kind is not object:
        return lambda value: isinstance(value, kind)
    return _anything


def _all(origin: type | tuple[type, ...], rules: list[Allows], fixed: bool) -> Allows:
    def allows(value: Any) -> bool:
        # Arrays and tensors have elements of any kind.
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, origin) or hasattr(value, "__array__"):
            return False
        # An iterator is not consumed.
        if not rules or not isinstance(value, (list, tuple, set, frozenset)):
            return True
        if fixed:
            return len(value) == len(rules) and all(rule(each) for rule, each in zip(rules, value, strict=True))
        return all(map(rules[0], value))

    return allows


def _is_int(value: Any) -> bool:
    return integer(value) is not None or isinstance(value, torch.SymInt)


def _is_float(value: Any) -> bool:
    number = isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
    return number and bool(value == value)


def _is_none(value: Any) -> bool:
    return value is None


def is_plain(value: Any) -> bool:
    """Return whether ops take a tensor: strided, and of no subclass that intercepts them."""
    if not isinstance(value, Tensor):
        return False
    # A subclass that only adds attributes runs like a tensor.
    own = type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
    return own and value.layout is torch.strided and not value.is_nested
