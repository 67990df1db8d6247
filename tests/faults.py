"""Faults on purpose: the n-th call to a file, or the n-th torch op, fails."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vattn.errors import VattnError


class Countdown:
    """Raise at the n-th call, once; `None` only counts."""

    def __init__(self, place: int | None, error: Callable[[], BaseException]) -> None:
        self.place, self.error, self.calls = place, error, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.place:
            raise self.error()


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _File:
    """A file whose writes, flushes and end may fail; it is closed all the same."""

    def __init__(self, file: Any, strike: Countdown) -> None:
        self._file, self._strike = file, strike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        self._strike()

    def write(self, data: Any) -> int:
        # Half of it arrives.
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._strike()
        return int(self._file.write(data[len(data) // 2 :]))

    def flush(self) -> None:
        self._strike()
        self._file.flush()


@contextmanager
def file_fault(place: int | None) -> Iterator[Countdown]:
    """Fail at the n-th of: opening a file to write, writing, flushing, closing, syncing, renaming."""
    strike = Countdown(place, disk_full)
    old = {(module, name): getattr(module, name) for module, name in _CALLS}

    def opening(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return old[io, "open"](file, mode, *args, **options)
        strike()
        return _File(old[io, "open"](file, mode, *args, **options), strike)

    def first(call: Any) -> Any:
        def struck(*args: Any, **options: Any) -> Any:
            strike()
            return call(*args, **options)

        return struck

    for (module, name), call in old.items():
        setattr(module, name, opening if name == "open" else first(call))
    try:
        yield strike
    finally:
        for (module, name), call in old.items():
            setattr(module, name, call)


_CALLS = ((builtins, "open"), (io, "open"), (os, "fsync"), (os, "replace"))


class OpFault(TorchDispatchMode):
    """Run out of memory at the n-th op of this thread."""

    def __init__(self, place: int | None) -> None:
        super().__init__()
        self.strike = Countdown(place, lambda: torch.OutOfMemoryError("no memory, on purpose"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.strike()
        return func(*args, **(kwargs or {}))


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def each_file_fault(run: Callable[[], object], check: Callable[[BaseException], None]) -> int:
    """Run once for each place where a file call can fail, checking after each; return how many there are."""
    place = 0
    while True:
        place += 1
        with file_fault(place) as strike:
            try:
                run()
                error = None
            except Exception as raised:
                error = raised
        if strike.calls < place:
            assert error is None
            return place - 1
        assert isinstance(error, VattnError), f"call {place}: {error!r}"
        check(error)
