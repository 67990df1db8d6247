"""Compile one kernel into Triton's cache on disk: the program of the processes that `compile_ahead` starts.

It reads the kernel from standard input, and imports it without torch, which takes longer to import than most kernels
take to compile. Kernels in files that need torch fail here, and are compiled where they are launched.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from operator import attrgetter
from pathlib import Path
from typing import Any


class Reader(pickle.Unpickler):
    """Read what `compile_ahead` wrote: kernels are written by module and name."""

    def persistent_load(self, pid: Any) -> Any:
        """Return a kernel."""
        module, name = pid
        return attrgetter(name)(importlib.import_module(module))


def main() -> None:
    """Compile the kernel that standard input describes."""
    folder = Path(__file__).parent  # Python puts it into the path, unless it runs with -P or PYTHONSAFEPATH.
    sys.path = [path for path in sys.path if Path(path) != folder]
    # The package without its `__init__`, which imports torch.
    package = types.ModuleType("vattn")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules.update({"vattn": package, "torch": None})  # type: ignore[dict-item]
    import triton

    versions, source, kernel, key, arguments, target, options = Reader(sys.stdin.buffer).load()
    # Triton would read all its files once more, and its key goes by the order in which kernels are looked at.
    triton.runtime.cache.triton_key = lambda: versions
    kernel.hash = key
    triton.compile(source(kernel, *arguments), target=target, options=options)


if __name__ == "__main__":
    main()
