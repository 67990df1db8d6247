"""Runs tests in forked processes: a first one records what each test reaches, one for each mutant judges it.

A process imports what takes long (torch, pytest), and forks for each room. The room's process collects the tests, and
forks for each mutant: there the code objects of the changed function are replaced. What runs while tests are collected,
such as a module's body, is changed before vattn is imported, in a process that collects anew.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import importlib.machinery
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

from tools.mutation.operators import Function, Mutant
from tools.mutation.rooms import ROOT

MEMORY = 12 << 30
"""Bytes of address space that a process with a mutant may take."""

BROKEN, MISFIT = 70, 71
"""How a process ends that failed, and one whose mutant does not fit functions that exist already."""

Lines = set[tuple[str, int]]


@dataclass
class Reach:
    """What a test runs: lines of the room, and for how many seconds of processor time."""

    lines: Lines
    seconds: float


class Loop:
    """A pytest plugin: collects, and then calls `work` instead of running the tests."""

    def __init__(self, work: Callable[[list[pytest.Item]], None]) -> None:
        self.work = work
        self.reports: list[pytest.TestReport] = []

    def pytest_sessionstart(self) -> None:
        """Let hypothesis stop at the first failure; the settings of the tests have been loaded."""
        settings.register_profile(
            "mutants", settings(), phases=[Phase.explicit, Phase.generate], derandomize=True, database=None
        )
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Do the work."""
        self.work(session.items)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what pytest says about a test."""
        self.reports.append(report)

    def run(self, item: pytest.Item, following: pytest.Item | None) -> str:
        """Run a test and return passed, failed or skipped."""
        self.reports.clear()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        outcomes = {report.outcome for report in self.reports}
        return next((outcome for outcome in ("failed", "skipped") if outcome in outcomes), "passed")


def collect(tests: Sequence[str], loop: Loop) -> int:
    """Collect tests without their output and hand them to a loop; return pytest's exit status."""
    quiet = "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"
    return int(pytest.main([*tests, *quiet], plugins=[loop]))


def fork(work: Callable[[], int], folder: Path) -> int:
    """Run `work` in a new process that leaves its output and its temporary files in a folder; return its id."""
    child = os.fork()
    if child:
        return child
    status = BROKEN
    try:
        os.setpgid(0, 0)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # not the graphs of another mutant
        with open(folder / "output", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        status = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


@contextlib.contextmanager
def folder_for_one() -> Iterator[Path]:
    """Give a process a folder."""
    folder = Path(tempfile.mkdtemp(prefix="mutation"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_group(child: int) -> None:
    """End what a process that is gone has started and left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


@contextlib.contextmanager
def traced(files: set[str], lines: Lines) -> Iterator[None]:
    """Add the lines of some files that run, in any thread that starts meanwhile too."""

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line(frame, event, argument) if frame.f_code.co_filename in files else None

    sys.settrace(call)
    threading.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def clear_caches() -> None:
    """Forget results of cached functions: a test that finds one does not run the function's lines."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "vattn":
            for owner in [module, *(value for value in vars(module).values() if isinstance(value, type))]:
                for value in list(vars(owner).values()):
                    if hasattr(value, "cache_clear") and not isinstance(value, type):
                        value.cache_clear()


def note_lines(files: set[str], lines: Lines) -> None:
    """Let the functions of some files note their statements as they run.

    Under a trace function every other Python function would cost more too, and Inductor calls millions of them.
    """

    def note_line(line: tuple[str, int]) -> None:
        lines.add(line)

    note_line._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced, in compiled functions
    builtins.note_line = note_line  # type: ignore[attr-defined]
    functions = functions_of(files)
    for path in files:
        tree = ast.parse(Path(path).read_bytes())
        inside = {node for function in ast.walk(tree) if isinstance(function, Function) for node in ast.walk(function)}
        for node in inside:
            for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(block, list):
                    block[:] = [part for statement in block for part in (_note(path, statement), statement)]
        for code in codes_in(compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)):
            # A lambda holds no statement, and several may begin in one line.
            if code.co_name != "<lambda>":
                for function in functions.get((path, code.co_name, code.co_firstlineno), []):
                    function.__code__ = code


def _note(path: str, statement: ast.stmt) -> ast.stmt:
    note = ast.Expr(ast.Call(ast.Name("note_line", ast.Load()), [ast.Constant((path, statement.lineno))], []))
    return ast.copy_location(note, statement)


def record(loop: Loop, items: Sequence[pytest.Item], files: set[str]) -> Iterator[tuple[str, Reach | None]]:
    """Run each test by itself, with fixtures of its own, and yield what it reaches; `None` if that does not count."""
    lines: Lines = set()
    note_lines(files, lines)
    for item in items:
        clear_caches()
        lines.clear()
        began = time.process_time()
        outcome = loop.run(item, None)
        counts = outcome == "passed" and lines
        yield item.nodeid, Reach(set(lines), time.process_time() - began) if counts else None
        if outcome == "failed":
            print(f"FAILED without a mutant: {item.nodeid}")


def judge(loop: Loop, items: Sequence[pytest.Item], seconds: dict[str, float], verdict: Path) -> int:
    """Run tests until one fails; return 1 and write its name if one did, else 0. A test that hangs ends the process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    clear_caches()
    for item, following in zip(items, [*items[1:], None], strict=True):
        verdict.write_text(item.nodeid)
        # Of the process's own time: on a busy machine nothing else is a sign of a hang, until much later.
        signal.setitimer(signal.ITIMER_PROF, 30 + 10 * seconds[item.nodeid])
        signal.setitimer(signal.ITIMER_REAL, 600)
        if loop.run(item, following) == "failed":
            return 1
    return 0


def functions_of(files: set[str]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Return every function object of some files, by file, name and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for function in gc.get_objects():
        if type(function) is FunctionType and (code := function.__code__).co_filename in files:
            found.setdefault((code.co_filename, code.co_name, code.co_firstlineno), []).append(function)
    return found


def codes_in(outer: CodeType) -> Iterator[CodeType]:
    """Yield the code objects inside another, however deep."""
    for constant in outer.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes_in(constant)


def twins(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield a code object and those nested in it, each with its changed one."""
    yield old, new
    nested = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    for pair in zip(*nested, strict=True):
        yield from twins(*pair)


def replace(mutant: Mutant, functions: dict[tuple[str, str, int], list[FunctionType]]) -> bool:
    """Give the live functions a mutant's code; False if it has to be there before vattn is imported."""
    if mutant.function is None:
        return False
    path = ROOT / mutant.path
    source = path.read_bytes()
    old, new = (
        next((code for code in codes_in(module) if (code.co_name, code.co_firstlineno) == mutant.function), None)
        for module in (compile(text, str(path), "exec", dont_inherit=True) for text in (source, mutant.apply(source)))
    )
    if old is None or new is None:
        return False
    try:
        pairs = list(twins(old, new))
        for was, now in pairs:
            for function in functions.get((str(path), was.co_name, was.co_firstlineno), []):
                function.__code__ = now
    except ValueError:
        return False
    return True


def import_changed(mutant: Mutant) -> None:
    """Let the import system find a file with a mutant."""
    path, load = str(ROOT / mutant.path), importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if loader.path != path:
            return load(loader, name)
        return compile(mutant.apply(Path(path).read_bytes()), path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def send(path: Path, value: Any) -> None:
    """Leave a value for the process that forked this one."""
    path.write_bytes(pickle.dumps(value))
