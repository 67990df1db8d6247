"""Encode frozen dataclasses as strings, equal for equal objects: the static arguments of ops.

A string is a head with a version, then `name=value` of every field that differs from its default.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Collection, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import torch

from vattn.errors import ConfigError

NOTE_MARK = " # "
"""Starts a note of the compiler passes in a config string; `parse` skips it."""

_T = TypeVar("_T", bound="Encoded")


def check(condition: bool, got: str, allowed: str, fix: str) -> None:
    """Raise ConfigError unless a condition holds."""
    if not condition:
        raise ConfigError(got, allowed, fix)


def check_names(settings: Any, choices: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigError unless each of these fields has one of its names."""
    for name, allowed in choices.items():
        value = getattr(settings, name)
        check(value in allowed, f"{name}={value!r}", ", ".join(allowed), "choose one of these names")


def make_canonical(settings: Any) -> None:
    """Convert every field of a dataclass to exactly its declared type, or raise ConfigError."""
    for field in dataclasses.fields(settings):
        value = _canonical(field.name, str(field.type), getattr(settings, field.name))
        object.__setattr__(settings, field.name, value)


class Encoded:
    """Base of the frozen dataclasses that ops take as a string."""

    head: ClassVar[str]
    """What the string begins with: a name and a version."""

    def replace(self: _T, **changes: object) -> _T:
        """Return a copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def encode(self) -> str:
        """Return the canonical string: version, then `name=value` of every field that differs from its default."""
        parts = [self.head]
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={value!r}" if isinstance(value, float) else f"{field.name}={value}")
        return " ".join(parts)

    @classmethod
    def parse(cls: type[_T], text: str) -> _T:
        """Read what `encode` wrote, without a note after it.

        Raises:
            ConfigError: another version, an unknown field or a value out of range.
        """
        if not isinstance(text, str):
            raise ConfigError(f"config {text!r:.60}", "a string made by encode()", f"use {cls.__name__}.encode")
        return _parse(cls, text)  # type: ignore[arg-type, no-any-return]


@lru_cache(maxsize=8192)
def _parse(kind: Any, text: str) -> Any:
    given, *pairs = text.partition(NOTE_MARK)[0].split(" ")
    # A head of another version has no "="; what has one is a field.
    fix = f"put {kind.head} in front of the fields: '{kind.head} {given} ...'"
    if "=" not in given:
        fix = "compile or export again with this version of vattn"
    check(given == kind.head, f"config string starts with {given!r}", f"{kind.head}, then its fields", fix)
    kinds = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        check(name in kinds, f"config field {name!r}", ", ".join(kinds), "check the spelling")
        values[name] = _parse_value(kinds[name], value)
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(
            f"config string {text!r}: {error}", "a string made by encode()", f"use {kind.__name__}.encode"
        ) from None


def _canonical(name: str, kind: str, value: object) -> object:
    base = kind.split(" ")[0]
    if value is None and kind.endswith("None"):
        return None
    if base == "str" and isinstance(value, str):
        value = value.value if isinstance(value, Enum) else value
        fits = bool(value) and not any(character.isspace() for character in value)
    elif base == "float" and isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = float(value)
        fits = math.isfinite(value)
    elif base == "int" and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value, fits = int(value), True
    else:
        fits = type(value).__name__ == base
    fix = f"pass {name}={str(value)[6:]!r}" if isinstance(value, torch.dtype) else f"pass {name} as {kind}"
    check(fits, f"{name}={value!r}", f"{kind}{', finite' if base == 'float' else ''}", fix)
    return value


def _parse_value(kind: str, text: str) -> object:
    if text == "None":
        return None
    try:
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
        if kind == "bool":
            return {"True": True, "False": False}[text]
    except (ValueError, KeyError):
        raise ConfigError(
            f"config value {text!r}", f"a value of type {kind}", "pass a string made by encode()"
        ) from None
    return text
