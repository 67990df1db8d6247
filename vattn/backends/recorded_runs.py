"""Records of conformance runs on a GPU, one JSON file per backend in `runs/`.

Capabilities list what a backend accepts; a record lists which of it gave right results, with which version of which
package, on which GPU. `explain` and the support table call the rest untested. Records do not affect the choice.

`python -m tests.conformance.record --backend NAME` writes one; its file is committed unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).with_name("runs")


@dataclass(frozen=True)
class RunRecord:
    """One run of a backend on one GPU.

    Attributes:
        package, version: what ran the attention, such as `"flashinfer-python"` and `"0.6.13"`.
        device, capability: the GPU's name and compute capability.
        torch, triton: their versions; `""` if not installed.
        date: day of the run, ISO.
        requests, accepted, failed: how many were tried, how many the backend took, and how many of those were wrong.
        cells: part of a request (a name of `vattn.config.features.FEATURES` or a pair `field=value`) -> largest
            relative L2 error of one row of one head in the requests that have it; only parts of requests that were
            right. A row that cancels out to less than 1 % of the values' size counts as that large. Errors of a
            quantised output count for its format alone: parts seen with no other output have `None`.
        errors: what went wrong, a line each.
    """

    package: str
    version: str
    device: str
    capability: tuple[int, int]
    torch: str
    triton: str
    date: str
    requests: int
    accepted: int
    failed: int
    cells: dict[str, float | None] = field(default_factory=dict)
    errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.package} {self.version} on {self.device} (sm_{self.capability[0]}{self.capability[1]})"


@lru_cache(maxsize=64)
def runs_of(backend: str) -> tuple[RunRecord, ...]:
    """Return the records of a backend, newest last; empty if it never ran."""
    path = FOLDER / f"{backend}.json"
    return read_runs(path) if path.is_file() else ()


def read_runs(path: Path) -> tuple[RunRecord, ...]:
    """Return the records of a file."""
    entries = json.loads(path.read_text())
    for entry in entries:
        entry["capability"], entry["errors"] = tuple(entry["capability"]), tuple(entry["errors"])
    return tuple(RunRecord(**entry) for entry in entries)


def verdict(
    runs: Iterable[RunRecord], running: tuple[str, str] | None, capability: tuple[int, int], parts: Iterable[str]
) -> str:
    """Return whether a request ran with right results: `"ran: ..."` or `"untested: ..."`.

    Args:
        runs: records of one backend.
        running: package and version that would run it here, `None` if none is installed.
        capability: of the GPU that would run it.
        parts: what the request consists of (`vattn.config.features.request_parts`).
    """
    runs, parts = list(runs), frozenset(parts)
    if not runs:
        return "untested: no run on a GPU is recorded"
    here = [run for run in runs if (run.package, run.version) == running and run.capability == capability]
    for run in reversed(here):
        if parts <= set(run.cells):
            wrong = f", {run.failed} of {run.accepted} accepted requests were wrong" if run.failed else ""
            return f"ran: {run}{wrong}"
    if here:
        missing = parts - frozenset().union(*(run.cells for run in here))
        return f"untested: {', '.join(sorted(missing)) or 'this combination'} never ran on {here[-1]}"
    with_what = " ".join(running) if running else "no package"
    return f"untested: with {with_what} on sm_{capability[0]}{capability[1]}; recorded is {runs[-1]}"
