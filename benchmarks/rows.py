"""Results of a benchmark as lines of JSON, one a cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_row(row: dict[str, Any], path: Path | None) -> None:
    """Print one cell's result, and append it to a file if there is one."""
    line = json.dumps(row)
    print(line, flush=True)
    if path:
        with path.open("a") as file:
            file.write(line + "\n")
