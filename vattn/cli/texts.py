"""Texts that commands measure or calibrate a model on."""

from __future__ import annotations

from pathlib import Path

from vattn.config.files import why_unreadable
from vattn.errors import ConfigError


def read_text(path: Path, most: int) -> str:
    """Return the first `most` bytes of a text.

    Raises:
        ConfigError: a file that cannot be read.
    """
    try:
        return path.read_bytes()[:most].decode(errors="ignore")
    except OSError as error:
        raise ConfigError(
            f"text {path}: {why_unreadable(error)}", "a readable text file", "pass --text FILE"
        ) from error


def split_text(ids: list[int], what: str, most: int) -> list[list[int]]:
    """Cut the ids of a text into requests of `most` tokens and one more to predict; `what` names the text in errors.

    Each begins with the last token of the one before.

    Raises:
        ConfigError: fewer than two ids.
    """
    if len(ids) < 2:
        raise ConfigError(
            f"{what}: {len(ids)} of the tokenizer's tokens", "at least 2", "pass a longer text, or --calibration-text"
        )
    return [list(ids[start : start + most + 1]) for start in range(0, len(ids) - 1, most)]
