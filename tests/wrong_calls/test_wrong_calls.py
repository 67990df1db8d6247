"""Every public callable with wrong arguments: refused by Python's own signature or by an error of ours, never silently.

Wrong calls are made of right ones: one argument becomes what its annotation does not allow, a count below zero, a size
beyond all memory, or a tensor of another shape, dtype, device or kind.
"""

from __future__ import annotations

import inspect
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.wrong_calls.calls import FAMILIES
from tests.wrong_calls.values import COUNTS, HUGE, MISTAKES, fits, tensor_mistakes
from vattn.errors import VattnError

EMPTY = {"no text", "a generator", "a set", "a tensor of nothing"}

EXEMPT = {
    "resolve_config": "a device of None is torch's default one",
    "find": "schedulers call it for every request; a text is a sequence of texts",
    "take": "as find",
    "num_kept_of": "as find",
    "first_block": "hybrid tables call it for every request of a step, and most specs do not read its argument",
}
"""Methods that may ignore a wrong argument, and why."""

OWN_ERRORS = {("Attention.forward", "torchao"): "torchao's tensors name the operator that they lack"}
"""Raw errors of others that say enough, and why."""


def hints_of(function: Any) -> dict[str, Any]:
    function = getattr(function, "__wrapped__", function)
    target = function.__init__ if inspect.isclass(function) else function
    if isinstance(function, torch.nn.Module):
        target = type(function).forward
    try:
        return typing.get_type_hints(target)
    except NameError:
        return {}


def wrong_calls(
    name: str, function: Any, arguments: dict[str, Any]
) -> Iterator[tuple[str, str, Callable[[], Any], bool]]:
    """Yield argument, mistake, value and whether it must be refused."""
    hints = hints_of(function)
    for argument, right in arguments.items():
        hint = hints.get(argument, Any)
        for mistake, make in MISTAKES.items():
            # An empty iterable is one of any kind.
            empty = mistake in EMPTY and any(kind in str(hint) for kind in ("Iterable", "Sequence", "tuple"))
            yield argument, mistake, make, hint is not Any and not empty and not fits(make(), hint)
        if argument in COUNTS and right is not None:
            yield argument, "-1", lambda: -1, True
        if argument in HUGE and not name.endswith(("shape", "check")):
            yield argument, "2**62", lambda: 1 << 62, True
        if isinstance(right, Tensor):
            for mistake, make in tensor_mistakes(right):
                yield argument, mistake, make, False


def outcome(function: Any, arguments: dict[str, Any]) -> tuple[str, str]:
    """Return "right", "ours", "signature" or "raw", and the error."""
    try:
        with torch.no_grad():
            function(**arguments)
    except VattnError as error:
        return "ours", str(error)
    except TypeError as error:
        own = error.__traceback__ is not None and error.__traceback__.tb_next is None
        return ("signature" if own else "raw"), f"TypeError: {error}"
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    return "right", ""


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_calls(
    family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # Some paths are right.
    counts: Counter[str] = Counter()
    bad: list[str] = []
    for name in FAMILIES[family]():
        bad += problems(family, name, counts)
    with capsys.disabled():
        print(f"\n{family}: {sum(counts.values())} calls, " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items())))
    assert not bad, f"{len(bad)} of {sum(counts.values())} calls:\n" + "\n".join(bad)


def problems(family: str, name: str, counts: Counter[str]) -> Iterator[str]:
    function, arguments = FAMILIES[family]()[name]
    for argument, mistake, make, wrong in wrong_calls(name, function, arguments):
        # Calls change what they get: each gets new ones.
        function, arguments = FAMILIES[family]()[name]
        kind, error = outcome(function, {**arguments, argument: make()})
        counts[kind] += 1
        silent = kind == "right" and wrong and name.rpartition(".")[2] not in EXEMPT
        if silent or (kind == "raw" and (name, mistake) not in OWN_ERRORS):
            yield f"{name}({argument}: {mistake}): {error[:150] if error else 'silent'}"
