"""`FileConnector`: store each block as a safetensors file with the pages of all layers."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from vattn.config.files import write_files
from vattn.config.typed import typed
from vattn.errors import ConfigError, MissingPackageError, TransferError
from vattn.kv_transfer.connector import TransferRequest, attached_already


class FileConnector:
    """Store pages in a folder, which processes may share.

    Args:
        folder: created if missing, with a subfolder per fingerprint; its `model.json` says which, and names the layers.

    Raises:
        MissingPackageError: safetensors is not installed.
        ConfigError: not a path; when attached: the folder cannot be created, or its `model.json` names another model.

    A file is written under a temporary name, then renamed, and holds a checksum: damaged files and files of other
    layers are not found. The connector never deletes a file; you may. A copy, by pickle too, is a connector of the same
    folder that is not attached.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            import safetensors.torch
        except ImportError as error:
            raise MissingPackageError(
                "safetensors is not installed", "safetensors >= 0.5", "pip install 'vattn[demo]'"
            ) from error
        self._format = safetensors
        if not isinstance(folder, (str, os.PathLike)):
            raise ConfigError(f"folder of type {type(folder).__name__}", "a path", "FileConnector('cache')")
        self.folder = Path(folder)
        self._page_bytes: dict[str, int] = {}
        self._fingerprint = ""
        self._lock = threading.Lock()
        self._loads: dict[int, dict[str, Tensor]] = {}
        self._saves: dict[int, dict[str, Tensor]] = {}

    def __reduce__(self) -> tuple[type[FileConnector], tuple[Path]]:
        return FileConnector, (self.folder,)

    def attach(self, page_bytes: Mapping[str, int], fingerprint: str) -> None:
        """Create the folder of this fingerprint. A connector serves one model; several may share a folder."""
        if self._fingerprint not in ("", fingerprint):
            raise attached_already(self)
        owner = {"fingerprint": fingerprint, "page_bytes": dict(page_bytes)}
        try:
            (self.folder / fingerprint[:32]).mkdir(parents=True, exist_ok=True)
            _claim(self.folder / fingerprint[:32] / "model.json", json.dumps(owner, indent=1))
        except OSError as error:
            raise ConfigError(
                f"folder {str(self.folder)!r} cannot be created: {error.strerror or error}",
                "a folder to write to",
                "check the path",
            ) from error
        self._page_bytes, self._fingerprint = dict(page_bytes), fingerprint

    def path(self, key: str) -> Path:
        """Return the file of a block. Raises `ConfigError` for a key that is no file name on every system."""
        if not isinstance(key, str) or re.fullmatch("[A-Za-z0-9_-]{1,128}", key) is None:
            raise ConfigError(
                f"key {key!r:.60}", "1 to 128 letters, digits, - and _", "pass keys of block_keys, or hash your own"
            )
        return self.folder / self._fingerprint[:32] / f"{key}.safetensors"

    @typed
    def find(self, keys: Sequence[str]) -> int:
        """Return how many of the first keys have a valid file. Reads the files."""
        return sum(1 for _ in takewhile(lambda key: self._read(key) is not None, keys))

    def wait_for_layer_load(self, layer_name: str, request: TransferRequest) -> Tensor:
        """Read the files of the request at its first layer; return the pages of one layer."""
        with self._lock:
            pages = self._loads.get(id(request))
        if pages is None:
            blocks = [self._read(key) for key in request.keys]
            if any(block is None for block in blocks):
                raise TransferError(
                    f"{sum(block is None for block in blocks)} of {request.num_blocks} files of request "
                    f"{request.request_id!r} are missing or damaged",
                    "keys that find() counted",
                    "compute the request without the connector",
                )
            pages = {name: torch.stack([block[name] for block in blocks if block]) for name in self._page_bytes}
            with self._lock:
                self._loads[id(request)] = pages
        return pages[layer_name]

    def blocks_to_save(self, request: TransferRequest) -> Sequence[int]:
        """Return all blocks: existing files are checked when they would be written."""
        return range(request.num_blocks)

    def page_buffer(self, layer_name: str, request: TransferRequest) -> None:
        """Return `None`: files are written when all layers are saved."""

    def save_kv_layer(self, layer_name: str, request: TransferRequest, pages: Tensor | None) -> None:
        """Keep the pages until the request is complete."""
        if pages is not None:  # always: `page_buffer` returns None
            with self._lock:
                self._saves.setdefault(id(request), {})[layer_name] = pages.clone()

    def finish(self, request: TransferRequest, saved: bool, error: BaseException | None) -> None:
        """Write the files of a save that is complete."""
        with self._lock:
            pages = (self._saves if saved else self._loads).pop(id(request), {})
        if saved and error is None:
            self._write(request, pages)

    def _write(self, request: TransferRequest, pages: Mapping[str, Tensor]) -> None:
        """Write a file for each block that has none."""
        try:
            write_files(self._contents(request, pages))
        except OSError as error:
            raise TransferError(
                f"blocks of request {request.request_id!r} cannot be written: {error.strerror or error}",
                "a folder on a disk with room",
                "free space; the request goes on without being saved",
            ) from error

    def _contents(self, request: TransferRequest, pages: Mapping[str, Tensor]) -> Iterator[tuple[Path, bytes]]:
        for place, key in enumerate(request.keys):
            if self.path(key).exists() and self._read(key) is not None:
                continue
            block = {name: rows[place] for name, rows in pages.items()}
            notes = {"key": key, "fingerprint": self._fingerprint, "sha256": _checksum(block)}
            yield self.path(key), self._format.torch.save(block, notes)

    def _read(self, key: str) -> dict[str, Tensor] | None:
        """Return the pages of a block by layer; `None` without a valid file."""
        try:
            if not self.path(key).is_file():  # A pipe would block.
                return None
            with self._format.safe_open(self.path(key), framework="pt", device="cpu") as file:
                notes = file.metadata() or {}
                block = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, self._format.SafetensorError):
            return None
        sizes = {name: page.numel() for name, page in block.items() if page.dtype == torch.uint8}
        expected = {"key": key, "fingerprint": self._fingerprint, "sha256": _checksum(block)}
        return block if sizes == self._page_bytes and notes == expected else None

    def __repr__(self) -> str:
        return f"FileConnector({str(self.folder)!r})"


def _claim(path: Path, owner: str) -> None:
    """Write the model into its folder; refuse the folder of another model."""
    if path.exists() and path.read_text(errors="replace") != owner:
        raise ConfigError(
            f"{str(path)!r}, which names another model or is damaged",
            "a folder of this model's blocks",
            "use another folder, or delete this one",
        )
    write_files([(path, owner.encode())])


def _checksum(block: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(block):
        total.update(name.encode())
        # Without a copy; safetensors needs NumPy anyway.
        total.update(block[name].contiguous().numpy())  # type: ignore[arg-type]
    return total.hexdigest()
