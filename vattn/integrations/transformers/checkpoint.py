"""`Checkpoint`: the tensors and the configuration of a local folder of safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vattn.errors import ConfigError, MissingPackageError


class Checkpoint:
    """The tensors of a folder of safetensors, by name.

    Args:
        folder: with `config.json` and one or more `.safetensors`.

    Raises:
        ConfigError: no such folder, files that cannot be read. MissingPackageError: safetensors is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise MissingPackageError("a checkpoint without safetensors", "safetensors", "pip install") from error
        files = sorted(folder.glob("*.safetensors"))
        if not files or not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder}, which holds no checkpoint", "config.json and *.safetensors", "name the checkpoint's folder"
            )
        self.folder, self._open = folder, safe_open
        self._where: dict[str, Path] = {}
        self._twice: dict[str, Path] = {}
        for file in files:
            with self._opened(file) as opened:
                names = list(opened.keys())
            self._twice |= {name: file for name in names if name in self._where}
            self._where |= dict.fromkeys(names, file)
        self.config = read_json(folder / "config.json")

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, on the CPU.

        Raises:
            ConfigError: two files hold it, or a file that cannot be read.
        """
        if name in self._twice:
            raise ConfigError(
                f"{name} in two files of {self.folder}, one of them {self._twice[name].name}",
                "every tensor once",
                "remove the files that do not belong to this checkpoint",
            )
        with self._opened(self._where[name]) as opened:
            return opened.get_tensor(name)

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as safetensors writes it, such as `"F8_E4M3"`."""
        with self._opened(self._where[name]) as opened:
            return opened.get_slice(name).get_dtype()

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        try:
            with self._open(file, "pt") as opened:
                yield opened
        except Exception as error:  # SafetensorError is no public name.
            raise ConfigError(f"{file}: {error}", "a file of safetensors", "fetch the checkpoint again") from error

    @property
    def quantization(self) -> dict[str, Any]:
        """The configuration of the quantisation, from `config.json` or ModelOpt's own file; `{}` if there is none.

        Raises:
            ConfigError: the entry is no dictionary, or a file cannot be read.
        """
        found = self.config.get("quantization_config") or self.config.get("compression_config") or {}
        other = self.folder / "hf_quant_config.json"
        if not found and other.is_file():
            found = read_json(other).get("quantization") or {}
        if not isinstance(found, dict):
            raise ConfigError(f"quantization_config={found!r:.80}", "a dictionary", "check config.json")
        return found


def read_json(file: Path, kind: type = dict) -> Any:
    """Return what a file of JSON holds, of a type.

    Raises:
        ConfigError: no such file, or something else in it.
    """
    try:
        return kind(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        name = "a list" if kind is list else "an object"
        raise ConfigError(f"{file}: {error}", f"{name} of JSON", "fetch the checkpoint again") from error


def folder_of(model: nn.Module) -> Path | None:
    """Return the local folder that a model was loaded from, `None` if there is none with safetensors."""
    name = getattr(model, "name_or_path", "") or ""
    folder = Path(name)
    return folder if name and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None
