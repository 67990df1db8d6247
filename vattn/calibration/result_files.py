"""Files that commands write results to, refused before anything is measured, and what draws pictures: matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vattn.errors import ConfigError, MissingPackageError


def check_output(option: str, path: Path | None, *, replaced: bool = False) -> None:
    """Refuse a file that an option names, `None` for none, and that could not be written.

    Args:
        replaced: a new file takes the place of an old one, so that the folder alone counts.

    Raises:
        ConfigError: a folder, or a file in one that does not exist or may not be written to.
    """
    if path is None:
        return
    place = path if path.exists() and not replaced else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"{option} {path}, which cannot be written",
            "a file in a folder that exists and may be written to",
            "make the folder first, or name another file",
        )


def figures(came: str = "a plot without matplotlib", fix: str = "pip install matplotlib") -> Any:
    """Return matplotlib's class of figures.

    Raises:
        MissingPackageError: matplotlib is missing; errors call that what came, and tell the fix.
    """
    try:
        import matplotlib  # noqa: F401  a missing package, though a module of it were imported
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(came, "matplotlib", fix) from error
    return Figure


def check_picture(path: str | os.PathLike[str], came: str, fix: str) -> None:
    """Refuse a file that matplotlib, which is there, would not write: its name says the kind.

    Raises:
        ConfigError: another kind, or none; errors call it what came, and tell the fix.
    """
    kinds = sorted(figures()().canvas.get_supported_filetypes())
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix[1:].lower() not in kinds:
        raise ConfigError(came, f"a file that ends in one of {', '.join(kinds)}", fix)
