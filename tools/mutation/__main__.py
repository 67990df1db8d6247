"""Draw mutants of each room by a seed, run the room's tests on them, and print how many were noticed.

`python -m tools.mutation` measures every room with a seed from the newest commit's hash, in hours of one core;
`--rooms block_pool --count 10` is a sample. Each mutant meets only the tests that run its line, one case of each first,
until one fails, hangs or crashes the process: then the mutant is killed. One that no test reaches is alive, and so are
those that change nothing a caller could see. Tests marked slow, long or gpu, and what a test does in another process,
do not count. `operators.py` lists the mistakes, and what is left out of the draw.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Read when Triton and Inductor are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import hypothesis
import numpy
import pytest
import torch
import torch._dynamo
import torch._inductor.compile_fx

from tools.mutation import session
from tools.mutation.operators import Mutant
from tools.mutation.rooms import ROOMS, ROOT, draw

QUICK = 0.1
"""Most processor seconds of a test that runs before longer ones."""

PRELOADED = hypothesis, numpy, torch
"""What takes long to import, and comes from elsewhere."""


@dataclass
class Judged:
    """A mutant and what became of it: `killed`, `alive`, or `unreached`, which counts as alive."""

    mutant: Mutant
    result: str
    by: str = ""
    tests: int = 0


@dataclass
class Run:
    """One room in one process that has collected its tests.

    Attributes:
        reach: of each test that passes, the seconds and lines that it takes.
        at_import: lines that run while tests are collected.
        budget: most processor seconds of tests for a mutant, by the recorded times.
        keep: a folder with earlier records, used again while the room's files and the test's file are the same.
    """

    room: str
    mutants: Sequence[Mutant]
    budget: float
    jobs: int
    keep: Path | None
    reach: dict[str, session.Reach] = field(default_factory=dict)
    at_import: session.Lines = field(default_factory=set)
    judged: list[Judged] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        """The paths of the room's files."""
        return {str(ROOT / path) for path in ROOMS[self.room].files}

    def chosen(self, mutant: Mutant, early: bool) -> list[str]:
        """Return the tests that reach a mutant, of an early one those that reach its file.

        All quick tests run first. Of longer ones the fastest case of each function does, then the second of each: cases
        resemble each other.
        """
        path, (first, last) = str(ROOT / mutant.path), mutant.lines
        reaching = [
            (reach.seconds, test)
            for test, reach in self.reach.items()
            if any(file == path and (early or first <= line <= last) for file, line in reach.lines)
        ]
        cases: Counter[str] = Counter()
        turns = []
        for seconds, test in sorted(reaching):
            function = test.partition("[")[0]
            turns.append((cases[function], seconds, test))
            cases[function] += seconds > QUICK
        left, tests = self.budget, []
        for _, seconds, test in sorted(turns):
            left -= seconds
            if tests and left < 0:
                break
            tests.append(test)
        return tests

    def early(self, mutant: Mutant) -> bool:
        """Return whether a mutant's statement runs while tests are collected."""
        path, (first, last) = str(ROOT / mutant.path), mutant.lines
        return mutant.function is None or any((path, line) in self.at_import for line in range(first, last + 1))

    def note(self, mutant: Mutant, result: str, by: str, tests: int) -> None:
        """Keep a verdict and show it."""
        self.judged.append(Judged(mutant, result, by, tests))
        count = len(self.judged)
        print(
            f"{self.room} {count}/{len(self.mutants)} {result:9} {mutant} [{by or tests}]", file=sys.stderr, flush=True
        )


def measure(run: Run) -> Run:
    """Return a run with its mutants judged."""
    room = run.room
    with session.folder_for_one() as folder:

        def inside() -> int:
            def work(items: list[pytest.Item]) -> None:
                collecting.close()
                session.send(folder / "run", _in_room(run, loop, items))

            loop = session.Loop(work)
            with contextlib.ExitStack() as collecting:
                collecting.enter_context(session.traced(run.files, run.at_import))
                return session.collect(ROOMS[room].tests, loop)

        child = session.fork(inside, folder)
        _wait(child)
        if not (folder / "run").exists():
            raise SystemExit(f"{room}: no result\n{(folder / 'output').read_text()[-4000:]}")
        done: Run = pickle.loads((folder / "run").read_bytes())
        print((folder / "output").read_text(), end="", file=sys.stderr)
    judged = {one.mutant for one in done.judged}
    _judge(done, [mutant for mutant in run.mutants if mutant not in judged], _collect_and_judge)
    _check_killers(done)
    return done


def _check_killers(run: Run) -> None:
    """Run the tests that killed a mutant on the files as they are: they have to pass."""
    killers = sorted({one.by.split(" (")[0] for one in run.judged if one.result == "killed"} & set(run.reach))
    if not killers:
        return
    with session.folder_for_one() as folder:
        child = session.fork(lambda: _collect_and_judge(run, None, killers, folder / "verdict"), folder)
        if _wait(child):
            print((folder / "output").read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"{(folder / 'verdict').read_text()} fails without a mutant after other tests")


def _wait(child: int) -> int:
    _, status = os.waitpid(child, 0)
    session.end_group(child)
    return status


def _in_room(run: Run, loop: session.Loop, items: list[pytest.Item]) -> Run:
    """Record, and judge every mutant that can be put into the running process."""
    began = time.monotonic()
    keys = _keys(run, items)
    kept = run.keep / f"{run.room}.pickle" if run.keep else None
    known = pickle.loads(kept.read_bytes()) if kept and kept.exists() else {}
    found = {test: known[test] for test, key in keys.items() if known.get(test, (None,))[0] == key}

    def record() -> Any:
        for test, reach in session.record(loop, [item for item in items if item.nodeid not in found], run.files):
            found[test] = keys[test], reach
            if kept:
                session.send(kept, found)
        return found

    found = _answer(record)
    run.reach = {test: reach for test, (_, reach) in found.items() if reach is not None}
    print(f"{run.room}: {len(items)} tests, {len(run.reach)} count, recorded in {time.monotonic() - began:.0f} s")
    by_name = {item.nodeid: item for item in items}
    functions = session.functions_of(run.files)
    seconds = {test: reach.seconds for test, reach in run.reach.items()}

    def judge(run: Run, mutant: Mutant, tests: list[str], verdict: Path) -> int:
        if not session.replace(mutant, functions):
            return session.MISFIT
        return session.judge(loop, [by_name[test] for test in tests], seconds, verdict)

    _judge(run, [mutant for mutant in run.mutants if not run.early(mutant)], judge)
    return run


def _keys(run: Run, items: list[pytest.Item]) -> dict[str, str]:
    """Return for each test what its record depends on: the room's files and its own."""
    room = str(ROOT).encode() + b"".join(Path(path).read_bytes() for path in sorted(run.files))
    keys = {path: hashlib.sha256(room + path.read_bytes()).hexdigest() for path in {item.path for item in items}}
    return {item.nodeid: keys[item.path] for item in items}


def _answer(work: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own, so that this one stays as it is."""
    with session.folder_for_one() as folder:

        def inside() -> int:
            session.send(folder / "answer", work())
            return 0

        _wait(session.fork(inside, folder))
        print((folder / "output").read_text(), end="", flush=True)
        return pickle.loads((folder / "answer").read_bytes())


def _collect_and_judge(run: Run, mutant: Mutant | None, tests: list[str], verdict: Path) -> int:
    status = 1
    seconds = {test: reach.seconds for test, reach in run.reach.items()}

    def work(items: list[pytest.Item]) -> None:
        nonlocal status
        by_name = {item.nodeid: item for item in items}
        status = session.judge(loop, [by_name[test] for test in tests if test in by_name], seconds, verdict)

    loop = session.Loop(work)
    verdict.write_text("import")
    if mutant is not None:
        session.import_changed(mutant)
    signal.setitimer(signal.ITIMER_REAL, 900)
    session.collect(list(dict.fromkeys(test.split("::")[0] for test in tests)), loop)
    return status


def _judge(run: Run, mutants: Sequence[Mutant], judge: Callable[[Run, Mutant, list[str], Path], int]) -> None:
    """Run the tests on mutants, `jobs` at a time, each in a process of its own."""
    waiting = list(reversed(mutants))
    running: dict[int, tuple[Mutant, list[str], Any, Path]] = {}
    while waiting or running:
        while waiting and len(running) < run.jobs:
            mutant = waiting.pop()
            tests = run.chosen(mutant, run.early(mutant))
            if not tests:
                run.note(mutant, "unreached", "", 0)
                continue
            place = session.folder_for_one()
            folder = place.__enter__()

            def inside(mutant: Mutant = mutant, tests: list[str] = tests, folder: Path = folder) -> int:
                return judge(run, mutant, tests, folder / "verdict")

            running[session.fork(inside, folder)] = mutant, tests, place, folder
        if running:
            child, status = os.waitpid(-1, 0)
            session.end_group(child)
            mutant, tests, place, folder = running.pop(child)
            last = (folder / "verdict").read_text() if (folder / "verdict").exists() else ""
            if status == session.BROKEN << 8:
                print((folder / "output").read_text()[-4000:], file=sys.stderr)
            _decide(run, mutant, tests, status, last)
            place.__exit__(None, None, None)


def _decide(run: Run, mutant: Mutant, tests: list[str], status: int, last: str) -> None:
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == session.BROKEN:
        raise SystemExit(f"the tool failed on {mutant}")
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == session.MISFIT:
        # The change does not fit the live functions: it is made before the import.
        run.at_import.add((str(ROOT / mutant.path), mutant.lines[0]))
        return
    if os.WIFSIGNALED(status):
        last += f" ({'hangs' if os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF) else 'crashes'})"
    run.note(mutant, "killed" if status else "alive", last if status else "", len(tests))


def _table(runs: Sequence[Run], seed: str) -> str:
    lines = [f"Seed {seed}.", "", "| room | drawn | killed | score |", "|---|---|---|---|"]
    for run in runs:
        count = Counter(judged.result for judged in run.judged)
        total = len(run.judged)
        lines.append(f"| {run.room} | {total} | {count['killed']} | {count['killed'] / total:.1%} |")
    lines += ["", "| alive | tests that ran |", "|---|---|"]
    for run in runs:
        alive = [judged for judged in run.judged if judged.result != "killed"]
        lines += [f"| `{judged.mutant}` | {judged.tests} |".replace("vattn/", "", 1) for judged in alive]
    return "\n".join(lines)


def main() -> None:
    """Measure rooms and print a table."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--seed", default=commit.strip() or "1", help="any text; the commit's hash if left out")
    parser.add_argument("--count", type=int, default=42, help="mutants of each room")
    parser.add_argument("--budget", type=float, default=60, help="most processor seconds of tests for one mutant")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--least", type=float, default=0, help="fail if a smaller part of all mutants is killed")
    parser.add_argument("--keep", type=Path, help="a folder for records of what tests reach, to be used again")
    parser.add_argument("--json", type=Path, help="where to write every verdict")
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
    runs = []
    for room in args.rooms:
        drawn = draw(room, args.seed, args.count)
        runs.append(measure(Run(room, drawn, args.budget, args.jobs, args.keep)))
        if args.json:
            verdicts = {run.room: [asdict(judged) for judged in run.judged] for run in runs}
            args.json.write_text(json.dumps({"seed": args.seed, "rooms": verdicts}, indent=1))
    print(_table(runs, args.seed))
    judged = [judged for run in runs for judged in run.judged]
    killed = sum(one.result == "killed" for one in judged)
    if killed < args.least * len(judged):
        raise SystemExit(f"{killed} of {len(judged)} mutants were killed, and at least {args.least:.0%} have to be")


if __name__ == "__main__":
    main()
