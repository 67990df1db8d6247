"""Checks of result files before anything is measured, and matplotlib for pictures."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from vattn.config.files import unwritable, write_files
from vattn.errors import ConfigError, MissingPackageError


def check_output(option: str, path: Path | None, *, replaced: bool = False) -> None:
    """Raise ConfigError if a file cannot be written; `None` is none, and `replaced` checks only its folder."""
    if path is None:
        return
    place = path if path.exists() and not replaced else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"{option} {path}, which cannot be written",
            "a file in a folder that exists and may be written to",
            "make the folder first, or name another file",
        )


def write_picture(figure: Any, path: Path, **options: Any) -> None:
    """Write a figure of matplotlib, of the kind that the suffix names.

    Raises:
        ConfigError: it cannot be written; an old file is as it was.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), **options)
    try:
        write_files([(path, picture.getvalue())])
    except OSError as error:
        raise unwritable(path, error) from error


def figures() -> Any:
    """Return matplotlib's class of figures, or raise MissingPackageError."""
    try:
        import matplotlib  # noqa: F401  a missing package, though a module of it were imported
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("a plot without matplotlib", "matplotlib", "pip install 'vattn[bench]'") from error
    return Figure


def check_picture(path: str | os.PathLike[str], got: str, fix: str) -> None:
    """Raise ConfigError with these texts unless matplotlib, which must be there, writes files with this suffix."""
    kinds = sorted(figures()().canvas.get_supported_filetypes())
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix[1:].lower() not in kinds:
        raise ConfigError(got, f"a file that ends in one of {', '.join(kinds)}", fix)
