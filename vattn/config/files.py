"""Write files whole: a reader finds the old file or the new one, and a failure leaves nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from vattn.errors import ConfigError


def write_files(contents: Iterable[tuple[Path, bytes]]) -> None:
    """Write all files under temporary names, then rename them.

    Args:
        contents: of each file. They may be computed on the way.

    Raises:
        OSError: a file cannot be written. Old files are as they were, unless several are written: then those that
            were replaced before the failure are deleted.
    """
    suffix = f".{os.getpid()}.{threading.get_ident()}.tmp"
    staged: list[tuple[Path, Path]] = []
    undo: list[Path] = []
    try:
        for path, content in contents:
            staged.append((path.with_name(f".{path.name}{suffix}"), path))
            with open(staged[-1][0], "wb") as file:
                file.write(content)
                file.flush()
                # A crash must not leave a renamed file without its bytes.
                os.fsync(file.fileno())
        for temporary, path in staged:
            os.replace(temporary, path)
            undo.append(path)
        undo.clear()
    finally:
        for path in (*undo, *(temporary for temporary, _ in staged)):
            with suppress(OSError):
                path.unlink()


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write one file of text.

    Raises:
        ConfigError: it cannot be written; an old file is as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_whole(f"{folder}/scales.json", "{}")
        ...     print([path.name for path in Path(folder).iterdir()])
        ['scales.json']
    """
    try:
        write_files([(Path(path), text.encode())])
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: object, error: OSError) -> ConfigError:
    """Return the error of a file that cannot be written."""
    return ConfigError(
        f"{str(path)!r} cannot be written: {error.strerror or error}",
        "a file on a disk with room, in a folder to write to",
        "free space, or name another file",
    )


def why_unreadable(error: Exception) -> str:
    """Return why a file cannot be read, in the words of the system, without the path and its number.

    Example:
        >>> why_unreadable(FileNotFoundError(2, "No such file or directory", "a.txt"))
        'No such file or directory'
    """
    return getattr(error, "strerror", None) or str(error)
