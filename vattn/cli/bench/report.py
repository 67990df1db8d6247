"""What a benchmark found, for people: a table in the terminal, Markdown, and a summary; `picture` draws it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vattn.cli.doctor import aligned
from vattn.config.files import why_unreadable, write_whole
from vattn.errors import ConfigError

FORMAT = 1
"""Version of the JSON; rises when a key changes its meaning."""

WORST = 10
"""Rows that a summary names."""

EQUAL = 0.97
"""Ratio from which two kernels count as equally fast: GPUs measure no closer."""

COLUMNS = (
    "model", "work", "cache", "vattn us", "best peer", "peer us", "peer / vattn", "stream / vattn", "of HBM", "of GEMM",
    "error",
)  # fmt: skip


def cells_of(row: dict[str, Any]) -> list[str]:
    """Return a row of `COLUMNS` of one row of results."""
    if "failed" in row:
        return [row["model"], row["work"], row["cache"], f"failed: {row['failed']}", *["-"] * 7]
    kernels, best, peer = row["kernels"], row.get("best_own"), row.get("best_peer")
    own = kernels[best] if best else {}
    # Where the kernel that rounds the query was faster, the time of the layer as requested too.
    plain = kernels.get("vattn", {}).get("us")
    also = "" if plain is None else f"; {plain} with a query of 16 bits"
    name = "" if best in (None, "vattn") else f" ({best.removeprefix('vattn').strip(', ')}{also})"
    return [
        row["model"],
        row["work"],
        row["cache"],
        f"{own['us']}{name}" if own else "-",
        peer or "-",
        str(kernels[peer]["us"]) if peer else "-",
        str(row.get("peer_over_own", "-")),
        str(row.get("stream_over_own", "-")),
        str(row.get("of_hbm", "-")),
        str(row.get("of_gemm", "-")),
        f"{own['error']:.1e}" if own else "-",
    ]


def notes_of(row: dict[str, Any]) -> list[str]:
    """Return a line for every kernel that failed or was wrong."""
    where = f"{row['model']}, {row['work']}, {row['cache']}"
    found = []
    for name, entry in row.get("kernels", {}).items():
        for kind in ("failed", "wrong"):
            if kind in entry:
                found.append(f"{where}: {name} {kind}: {entry[kind]}")
    return found


def heading(result: dict[str, Any]) -> list[str]:
    """Return the lines above a table: where and when, the ceilings, and which peers there were."""

    def listed(values: dict[str, Any]) -> str:
        return ", ".join(f"{name} {value}" for name, value in values.items()) or "not measured"

    lines = [f"{result['device']}, {result['date']}; {listed(result['versions'])}"]
    lines.append(f"ceilings of this run: {listed(result['ceilings'])}")
    for part in result.get("resumed", ()):
        lines.append(f"rows from {part['first_row'] + 1} on: {part['date']}, ceilings {listed(part['ceilings'])}")
    return lines + [f"{name}: {state}" for name, state in result["peers"].items()]


def print_table(result: dict[str, Any]) -> None:
    """Print the results, by rich where it is installed."""
    rows = [cells_of(row) for row in result["rows"]]
    print("\n".join(heading(result)))
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(aligned([COLUMNS, *rows]))
    else:
        table = Table(title="attention, us a step")
        for index, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if index < 3 or name == "best peer" else "right", overflow="fold")
        for row, cells in zip(result["rows"], rows, strict=True):
            ratio = row.get("peer_over_own")
            table.add_row(*cells, style=None if ratio is None else "green" if ratio >= 1 else "yellow")
        Console(width=None if Console().is_terminal else 180).print(table)
    for row in result["rows"]:
        for note in notes_of(row):
            print(note)


def markdown(result: dict[str, Any]) -> str:
    """Return the results as a page."""
    lines = [f"# Attention on {result['device']}, {result['date']}", "", f"`{result['command']}`", ""]
    lines += [f"- {line}" for line in heading(result)]
    lines += [
        "",
        "CUDA-graph replays over rotated inputs, kernels interleaved, medians; every result was compared with fp32 on "
        "the stored values first. Above 1 in `peer / vattn`, vattn is faster. Schedules and plans, made once a step, "
        "are not in the times.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
    ]
    lines += ["| " + " | ".join(cells_of(row)) + " |" for row in result["rows"]]
    if lines_below := summary(result):
        lines += ["", "```", *lines_below, "```"]
    notes = [note for row in result["rows"] for note in notes_of(row)]
    return "\n".join(lines + ([""] + [f"- {note}" for note in notes] if notes else [])) + "\n"


def summary(result: dict[str, Any]) -> list[str]:
    """Return lines about all rows: means by kind of step and cache, the share that peers win, the worst ten.

    Rows without a peer are listed and not counted.
    """
    rated = [row for row in result["rows"] if "peer_over_own" in row]
    if not rated:
        return []
    lines = [f"{name}: {_rates(rows)}" for name, rows in _classes(rated).items()]
    worst = sorted(rated, key=lambda row: row["peer_over_own"])[:WORST]
    lines.append(f"the worst {len(worst)}:")
    lines += [f"  {row['peer_over_own']:.3f} {', '.join(name_of(row))} ({row['best_peer']})" for row in worst]
    lonely = [row for row in result["rows"] if "peer_over_own" not in row]
    if lonely:
        lines.append(f"not counted, {len(lonely)} without a peer:")
        lines += [f"  {', '.join(name_of(row))}" for row in lonely]
    return lines


def kind_of(row: dict[str, Any]) -> str:
    """Return the kind of a row's step: the first word of its name."""
    return str(row["work"]).split()[0].rstrip(",")


def _classes(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = {"all": list(rows)}
    for row in rows:
        found.setdefault(f"{kind_of(row)}, {row['cache']}", []).append(row)
    return found


def _rates(rows: Sequence[dict[str, Any]]) -> str:
    ratios = [row["peer_over_own"] for row in rows]
    low = sum(ratio < EQUAL for ratio in ratios)
    mean = statistics.geometric_mean(ratios)
    return f"{len(rows)} rows, peer / vattn {mean:.3f} (geometric mean), {low} below {EQUAL} ({low / len(rows):.0%})"


def name_of(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return what tells a row from others: model, work and cache."""
    return row["model"], row["work"], row["cache"]


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a file that is whole, whenever the run ends."""
    write_whole(path, json.dumps(result, indent=1))


def resumed(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Return earlier results, less cells that failed as a whole, for a run to add its rows to.

    Raises:
        ConfigError: a torn file, or results that were measured in another way than `run`.
    """
    result = read_result(path)
    for key in ("device", "capability", "versions", "peers", "block_size"):
        if result.get(key) != run[key]:
            raise ConfigError(
                f"--resume of {path}, with {key} {result.get(key)}, in a run with {key} {run[key]}",
                "the same machine, versions, peers and block size",
                "give another --json, or run as before",
            )
    result["rows"] = [row for row in result["rows"] if "failed" not in row]
    part = {name: run[name] for name in ("date", "command", "ceilings")}
    result.setdefault("resumed", []).append({"first_row": len(result["rows"]), **part})
    return result


def read_result(path: Path) -> dict[str, Any]:
    """Read what `--json` wrote.

    Raises:
        ConfigError: no such file, a torn one, or one that something else wrote.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {why_unreadable(error)}", "a file of `vattn bench attention --json`", "run it again"
        ) from error
    try:
        whole = result["format"] == FORMAT and bool(markdown(result))
    except (KeyError, TypeError, AttributeError, ValueError):
        whole = False
    if whole is False:
        raise ConfigError(
            f"{path}", f"results of format {FORMAT}", "run `python -m vattn bench attention --json` again"
        )
    return result  # type: ignore[no-any-return]


def failures(rows: Sequence[dict[str, Any]]) -> int:
    """Return how many cells vattn itself failed in or was wrong."""
    return sum(any("vattn" in note.split(": ", 1)[1] for note in notes_of(row)) or "failed" in row for row in rows)
