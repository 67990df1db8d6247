"""Record what a backend was seen to do right on a GPU, as data that `explain` and the support table read.

    python -m tests.conformance.record --backend FLASHINFER --seconds 60 --out FOLDER  # on the GPU: rows, then fuzz
    python -m tests.conformance.record --merge FOLDER/*.json  # then commit vattn/backends/runs

Runs of one backend with the same versions on the same GPU become one record. What differs from the reference is in the
record's errors, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import random
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch

from tests.conformance.cases import batch_of_row
from tests.conformance.compare import compare, compare_cache_update, largest_error, run_on_backend
from tests.conformance.fuzz import failure_of, fuzz_seed
from tests.conformance.requests import PAIRS, PLAIN, Request, Size, config_with, draw_batch, draw_request
from tests.conformance.rows import ROWS
from tests.support import Batch
from vattn.backends import selector
from vattn.backends.base import Backend
from vattn.backends.recorded_runs import FOLDER, RunRecord, read_runs
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.features import request_parts

LARGE = Size(seq_len=700, reqs=8, wide_heads=0.3)
"""Sequences that span many blocks and tiles."""

MOST_ERRORS = 20
"""Lines of errors that a record keeps."""

SAVE_SECONDS = 20.0
"""How often a long run writes its record, so that whatever ends it leaves what was seen."""


def write_runs(path: Path, runs: Iterable[RunRecord]) -> None:
    """Write a file of records, errors with three digits."""

    def short(error: float | None) -> float | None:
        return None if error is None else float(f"{error:.2e}")

    entries = [dataclasses.asdict(run) for run in runs]
    for entry in entries:
        entry["cells"] = {part: short(error) for part, error in sorted(entry["cells"].items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(json.dumps(entries, indent=1) + "\n")
    partial.replace(path)


class Recorder:
    """Run requests on one backend and keep what was right.

    Args:
        backend: name of the backend.
        device: where it runs.
        made: the backend itself, if `vattn.backends.selector` does not know it.
        out: file of the record, written every now and then; default none.
    """

    def __init__(self, backend: str, device: str, made: Backend | None = None, out: Path | None = None) -> None:
        self.backend, self.device, self.out = backend, device, out
        self.saved = time.monotonic()
        self.made = made or selector.get_backend(backend)
        self.requests = self.accepted = self.failed = 0
        self.cells: dict[str, float | None] = {}
        self.errors: list[str] = []

    def attempt(self, batch: Batch, line: str) -> None:
        """Run one batch; `line` says how to repeat it."""
        self.count(lambda: _error_of(batch), request_parts(batch.config), line)

    def count(self, run: Callable[[], float | None], parts: Collection[str], line: str) -> None:
        """Run a request that gives its error, or `None` for a refusal as it should be; keep what it consists of."""
        self.requests += 1
        error: list[float | None] = []
        problem = failure_of(lambda: error.append(run()))
        if problem is not None:
            self.accepted += 1
            self.failed += 1
            self.errors.append(f"{problem.splitlines()[0][:200]} [{line}]")
        elif error[0] is not None:
            self.accepted += 1
            plain = "output_format=none" in parts
            for part in parts:
                counts = plain or part.startswith("output_format=")
                self.cells[part] = _larger(self.cells.get(part), error[0] if counts else None)
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Write what was seen so far, if there is a file for it."""
        if self.out is not None:
            write_runs(self.out, [self.record()])
        self.saved = time.monotonic()

    def report(self) -> None:
        """Print and save what was seen."""
        run = self.record()
        print(f"{self.backend}: {run}: {run.requests} requests, {run.accepted} accepted, {run.failed} wrong")
        for line in self.errors:
            print("  ", line)
        self.save()

    def record(self) -> RunRecord:
        """Return what was seen so far."""
        running = self.made.running()
        info = DeviceInfo.of(self.device)
        return RunRecord(
            package=running[0] if running else "",
            version=running[1] if running else "",
            device=info.name,
            capability=info.capability,
            torch=torch.__version__,
            triton=_version("triton"),
            date=datetime.date.today().isoformat(),
            requests=self.requests,
            accepted=self.accepted,
            failed=self.failed,
            cells=self.cells,
            errors=tuple(self.errors[:MOST_ERRORS]),
        )


def _larger(first: float | None, second: float | None) -> float | None:
    return max((error for error in (first, second) if error is not None), default=None)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _error_of(batch: Batch) -> float | None:
    """Run and compare a batch; return its largest error, `None` if it was refused as it should be."""
    result = run_on_backend(batch)
    if result is None:
        return None
    expected = result.expected()
    compare(result, *expected)
    return largest_error(result, expected[0])


def record_rows(recorder: Recorder, until: float, part: int, parts: int) -> None:
    """Run this part's share of the hand-picked rows, until the time is up."""
    for name, row in list(ROWS.items())[part::parts]:
        if time.monotonic() > until:
            return
        batch = batch_of_row(row, recorder.backend, device=recorder.device, seed=len(name))
        recorder.attempt(batch, f"row {name}")


def record_fuzz(recorder: Recorder, until: float, most: int, part: int, batches: int = 1) -> None:
    """Run random requests, most of which the backend accepts, until time or count is up.

    Args:
        batches: requests of one config, one after the other: more of them where compiling its kernels takes the time.
    """
    reasons = selector.get_backend(recorder.backend).reasons
    info = DeviceInfo.of(recorder.device)
    rng = random.Random(f"record {fuzz_seed()} {recorder.backend} {part}")
    base = PLAIN.replace(backend=recorder.backend)
    pairs = [(), (), *(pair for pair in PAIRS if not reasons(config_with(frozenset(pair), base), info))]
    while time.monotonic() < until and recorder.requests < most:
        required = rng.choice(pairs)
        request = draw_request(rng, recorder.backend, required, LARGE, lambda config: not reasons(config, info))
        again = (draw_batch(rng, request.config, LARGE) for _ in range(batches - 1))
        for each in itertools.chain((request,), again):
            recorder.attempt(each.batch(recorder.device), each.line(recorder.device))
        if request.config.block_size and not reasons(request.config, info):
            _attempt_cache_update(recorder, request)


def _attempt_cache_update(recorder: Recorder, request: Request) -> None:
    config: AttentionConfig = request.config
    problem = failure_of(lambda: compare_cache_update(request.cache_update(recorder.device), config))
    if problem is not None:
        recorder.failed += 1
        recorder.errors.append(f"cache update: {problem.splitlines()[0][:200]} [{request.line(recorder.device)}]")


def merged(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Join records of the same versions and GPU: counts add up, of two errors of a cell the larger stays."""
    joined: dict[tuple[object, ...], RunRecord] = {}
    for new in records:
        key = (new.package, new.version, new.device, new.torch, new.triton)
        old = joined.get(key)
        if old is None:
            joined[key] = new
            continue
        names = {**old.cells, **new.cells}
        cells = {name: _larger(old.cells.get(name), new.cells.get(name)) for name in names}
        joined[key] = dataclasses.replace(
            new,
            requests=old.requests + new.requests,
            accepted=old.accepted + new.accepted,
            failed=old.failed + new.failed,
            cells=cells,
            errors=tuple(dict.fromkeys(old.errors + new.errors))[:MOST_ERRORS],
        )
    return list(joined.values())


def merge_files(paths: Iterable[Path]) -> list[Path]:
    """Write the records of files named `BACKEND.json` or `BACKEND-anything.json` in the place of those there are."""
    found: dict[str, list[RunRecord]] = {}
    for path in paths:
        found.setdefault(path.stem.split("-")[0], []).extend(read_runs(path))
    written = []
    for backend, records in found.items():
        new = merged(records)
        target = FOLDER / f"{backend}.json"
        versions = {(run.package, run.version, run.device) for run in new}
        kept = [run for run in (read_runs(target) if target.is_file() else ()) if _identity(run) not in versions]
        write_runs(target, [*kept, *new])
        written.append(target)
    return written


def _identity(run: RunRecord) -> tuple[str, str, str]:
    return run.package, run.version, run.device


def main() -> None:
    """Record, or merge what was recorded."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.record")
    parser.add_argument("--backend")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=60, help="rows first, then random requests until so many are over"
    )
    parser.add_argument("--most", type=int, default=1_000_000, help="requests in all, rows included")
    parser.add_argument("--part", default="0/1", help="0/3 to 2/3: a third of the rows, and requests of its own")
    parser.add_argument("--batches", type=int, default=1, help="random requests of each random config")
    parser.add_argument("--no-rows", action="store_true", help="random requests alone")
    parser.add_argument("--out", type=Path, help="folder for the record; default: print what was found alone")
    parser.add_argument("--merge", type=Path, nargs="+", help="files to merge into vattn/backends/runs")
    given = parser.parse_args()
    if given.merge:
        print(*merge_files(given.merge), sep="\n")
        return
    part, parts = map(int, given.part.split("/"))
    recorder = Recorder(given.backend, given.device, out=given.out and given.out / f"{given.backend}-{part}.json")
    problem = selector.get_backend(given.backend).problem()
    if problem is not None:
        parser.exit(1, f"{given.backend}: {problem}\n")
    until = time.monotonic() + given.seconds
    # Who interrupts a long run gets what it has seen.
    with contextlib.suppress(KeyboardInterrupt):
        if not given.no_rows:
            record_rows(recorder, until, part, parts)
        record_fuzz(recorder, until, given.most, part, given.batches)
    recorder.report()


if __name__ == "__main__":
    main()
