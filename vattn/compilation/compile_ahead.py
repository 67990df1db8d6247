"""Compile the kernels of steps to come, many at a time.

Triton holds Python's lock nearly as long as it compiles, so threads do not help. Each kernel is compiled by a process
that puts it into Triton's cache on disk, where this process finds it. What goes wrong there is compiled here, as ever.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from vattn.kernels import replay
from vattn.metadata.builder import AttentionMetadataBuilder

logger = logging.getLogger("vattn")

WORKER = Path(__file__).with_name("compile_worker.py")

MOST_PROCESSES = 16

MOST_SECONDS = 120
"""For a kernel, after which it is compiled here."""


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Inside the block, what `compile_steps` finds is compiled by processes, on machines with a GPU.

    A launch in this thread waits only for its own kernel; the end of the block waits for all.
    """
    mode = _active_mode()
    # The executable of a frozen program is the program.
    if device.type != "cuda" or mode is None or mode.get() is not None or getattr(sys, "frozen", False):
        yield
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(MOST_PROCESSES, max(1, cores - 1))
    from triton import knobs

    # Inductor sets it too, when it first compiles, to another folder: kernels would be looked for where they are not.
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    try:
        with ThreadPoolExecutor(processes, "vattn compile") as threads, _mode(threads):
            try:
                yield
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        # Triton leaves it as it is where its own end is interrupted.
        mode.set(None)


def can_only_compile(builder: AttentionMetadataBuilder) -> bool:
    """Return whether steps of a builder may run in `only_compiling`: the launches of other backends ignore it."""
    return builder.backends == {"TRITON_ATTN"}


@contextmanager
def only_compiling() -> Iterator[None]:
    """Inside the block, what TRITON_ATTN launches in this thread is compiled and computes nothing."""
    replay.active.compile_only = True
    try:
        yield
    finally:
        replay.active.compile_only = False


def _active_mode() -> Any:
    """Return Triton's variable for the mode of this thread, `None` where it has none."""
    try:
        from triton import knobs
        from triton.runtime._async_compile import active_mode
    except ImportError:
        return None
    return None if knobs.runtime.interpret else active_mode


def is_compiling_ahead() -> bool:
    """Return whether this thread is in `compiling_ahead`, where it does something."""
    mode = _active_mode() if "triton" in sys.modules else None
    return mode is not None and getattr(mode.get(), "of_vattn", False)


def is_busy() -> bool:
    """Return whether `compiling_ahead` of this thread has had kernels to compile, as with an empty cache."""
    return is_compiling_ahead() and bool(_active_mode().get().busy)


def start_inductor() -> None:
    """Import Inductor, and start the process that its workers are forked from, which imports torch first."""
    with suppress(ImportError, AttributeError):
        from torch._inductor import compile_fx as compile_fx
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()


def _mode(threads: ThreadPoolExecutor) -> Any:
    """Return Triton's mode for compiling in the background, with processes started by threads."""
    from triton import AsyncCompileMode

    class Processes(AsyncCompileMode):
        of_vattn, busy = True, False

        def submit(self, key: str, compile_here: Callable[[], Any], *finish: Any) -> Any:
            job = _job(key, compile_here)
            self.busy |= job is not None
            self.executor = _Now() if job is None else _Then(threads, job)
            return super().submit(key, compile_here, *finish)

    return Processes(None, ignore_errors=True)


class _Now:
    """Run what is submitted at once."""

    def submit(self, compile_here: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(compile_here())
        except Exception as error:
            future.set_exception(error)
        return future


class _Then:
    """Run what is submitted after a job of another process."""

    def __init__(self, threads: ThreadPoolExecutor, job: bytes) -> None:
        self.threads, self.job = threads, job

    def submit(self, compile_here: Callable[[], Any]) -> Future[Any]:
        return self.threads.submit(_compile_in_process, self.job, compile_here)


def _compile_in_process(job: bytes, compile_here: Callable[[], Any]) -> Any:
    """Compile a kernel in a process, and load it."""
    # Python passes over entries that are no strings.
    paths = os.pathsep.join(path for path in sys.path if path and isinstance(path, str))
    try:
        subprocess.run(
            [sys.executable, str(WORKER)],
            input=job,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": paths},
            timeout=MOST_SECONDS,
            check=True,
        )
    except Exception as error:
        text = getattr(error, "stderr", None) or b""
        logger.debug("a kernel was not compiled ahead: %r %s", error, text.decode(errors="replace")[-2000:])
    return compile_here()


def _job(key: str, compile_here: Callable[[], Any]) -> bytes | None:
    """Return what a process needs to compile a kernel; `None` for those on disk, of others, or to be launched now.

    Args:
        key: what Triton's cache has it under.
        compile_here: Triton's own function, around the source and how it is compiled.
    """
    try:
        from triton.runtime.cache import triton_key

        names, cells = compile_here.__code__.co_freevars, compile_here.__closure__ or ()
        found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        source, target, options = found["src"], found["target"], found["options"]
        # Files that import torch would take longer than their kernels.
        small = source.fn.__module__.startswith("vattn.") and not hasattr(sys.modules[source.fn.__module__], "torch")
        if not replay.active.compile_only or not small or _on_disk(key, source.name):
            return None
        kernel, arguments = source.fn, (source.signature, source.constants, source.attrs)
        file = io.BytesIO()
        _Writer(file).dump(
            (triton_key(), type(source), kernel, kernel.cache_key, arguments, target, dict(vars(options)))
        )
        return file.getvalue()
    except (AttributeError, KeyError, ValueError, TypeError, ImportError, pickle.PicklingError) as error:
        logger.debug("kernels are not compiled ahead by this Triton: %s", error)
        return None


def _on_disk(key: str, name: str) -> bool:
    """Return whether Triton's cache has a kernel."""
    from triton.runtime.cache import get_cache_manager

    file = f"{name[:150]}.json"
    group = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(file)
    return file in (group or {})


class _Writer(pickle.Pickler):
    """Writes kernels by module and name."""

    def persistent_id(self, obj: Any) -> Any:
        from triton.runtime.jit import JITFunction

        return (obj.fn.__module__, obj.fn.__qualname__) if isinstance(obj, JITFunction) else None
