"""How the demo talks: a progress bar, aligned tables, and text laid out for a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

BAR_WIDTH = 30


class Progress:
    """A bar on stderr while a `with` block runs; where stderr is no terminal, one line when it is over.

    Example:
        >>> import io
        >>> with Progress("reading", total=2, unit="pages", stream=io.StringIO()) as bar:
        ...     bar.update(1)
    """

    def __init__(self, label: str, total: int, unit: str, stream: TextIO | None = None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.stream = sys.stderr if stream is None else stream
        self.done, self.start = 0, time.perf_counter()
        self._live = self.stream.isatty()

    def __enter__(self) -> Progress:
        sys.stdout.flush()
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self.stream.write("\n")
        elif kind is None:
            self.stream.write(self._line() + "\n")
        self.stream.flush()

    @property
    def seconds(self) -> float:
        """Time since the bar was made."""
        return time.perf_counter() - self.start

    def update(self, done: int) -> None:
        """Show how much is done by now."""
        self.done = done
        self._draw()

    def advance(self) -> None:
        """Show that one more is done."""
        self.update(self.done + 1)

    def _line(self) -> str:
        share = min(1.0, self.done / max(1, self.total))
        bar = ("#" * round(share * BAR_WIDTH)).ljust(BAR_WIDTH, ".")
        return f"{self.label} [{bar}] {self.done}/{self.total} {self.unit}, {self.seconds:.1f} s"

    def _draw(self) -> None:
        if self._live:
            self.stream.write("\r" + self._line() + "\x1b[K")
            self.stream.flush()


def heading(text: str) -> str:
    """Return a title set off by a blank line and underlined."""
    return f"\n{text}\n{'-' * len(text)}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return aligned columns: `left` of them to the left, the others to the right, the last as it is.

    Example:
        >>> print(table(["cache", "bits", "note"], [["auto", "1.5", ""], ["fp8 unit", "12.5", "clips"]]))
        cache     bits  note
        auto       1.5
        fp8 unit  12.5  clips
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    texts = []
    for line in lines:
        columns = enumerate(zip(line[:-1], widths, strict=True))
        cells = [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in columns]
        texts.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(texts)


def quoted(prompt: bytes, output: bytes, tail: int = 160) -> str:
    """Return a prompt's end and its continuation, which starts at `>>>`, indented; what is no text is escaped."""
    start = "..." if len(prompt) > tail else ""
    text = start + _text(prompt[-tail:]) + ">>>" + _text(output)
    return "\n".join("    " + line for line in text.split("\n"))


def _text(data: bytes) -> str:
    text = data.decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
