"""`FileConnector`: keep blocks as files, one safetensors file per block with the pages of all layers."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vattn.errors import ConfigError, MissingPackageError, TransferError
from vattn.kv_transfer.connector import TransferRequest


class FileConnector:
    """Keep pages in a folder that outlives the process and may be shared.

    Args:
        folder: made if it is missing. Each fingerprint has a folder of its own below it.

    Raises:
        MissingPackageError: safetensors is not installed.
        ConfigError: no path; when attached: the folder cannot be made.

    A file is written beside its name and renamed when it is whole, and it holds a checksum: one that is torn, damaged
    or of other layers is not found. No file is ever deleted here: delete what you like, what is missing is not found.
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

    def attach(self, page_bytes: Mapping[str, int], fingerprint: str) -> None:
        """Make the folder of this fingerprint."""
        self._page_bytes, self._fingerprint = dict(page_bytes), fingerprint
        try:
            (self.folder / fingerprint[:32]).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"folder {str(self.folder)!r} cannot be made: {error.strerror}",
                "a folder to write to",
                "check the path",
            ) from error

    def path(self, key: str) -> Path:
        """Return the file of a block."""
        return self.folder / self._fingerprint[:32] / f"{key}.safetensors"

    def find(self, keys: Sequence[str]) -> int:
        """Return how many of the first keys have a whole file. Reads them."""
        found = 0
        while found < len(keys) and self._read(keys[found]) is not None:
            found += 1
        return found

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
        """Return all: whether a file is whole is found out when it would be written."""
        return range(request.num_blocks)

    def page_buffer(self, layer_name: str, request: TransferRequest) -> None:
        """Return `None`: pages are written when all layers are there."""

    def save_kv_layer(self, layer_name: str, request: TransferRequest, pages: Tensor | None) -> None:
        """Remember the pages until the request is complete."""
        if pages is not None:  # always: there is no buffer
            with self._lock:
                self._saves.setdefault(id(request), {})[layer_name] = pages.clone()

    def finish(self, request: TransferRequest, saved: bool, error: BaseException | None) -> None:
        """Write the files of a save that is complete."""
        with self._lock:
            pages = (self._saves if saved else self._loads).pop(id(request), {})
        if saved and error is None:
            self._write(request, pages)

    def _write(self, request: TransferRequest, pages: Mapping[str, Tensor]) -> None:
        """Write all files beside their names, then rename them."""
        written: list[tuple[Path, Path]] = []
        try:
            for place, key in enumerate(request.keys):
                if self.path(key).exists() and self._read(key) is not None:
                    continue
                block = {name: rows[place] for name, rows in pages.items()}
                notes = {"key": key, "fingerprint": self._fingerprint, "sha256": _checksum(block)}
                target = self.path(key)
                beside = target.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}.tmp")
                written.append((beside, target))
                with open(beside, "wb") as file:
                    file.write(self._format.torch.save(block, notes))
                    file.flush()
                    os.fsync(file.fileno())
            for beside, target in written:
                os.replace(beside, target)
        finally:
            for beside, _ in written:
                beside.unlink(missing_ok=True)

    def _read(self, key: str) -> dict[str, Tensor] | None:
        """Return the pages of a block by layer; `None` if there is no file, or none that can be trusted."""
        try:
            with self._format.safe_open(self.path(key), framework="pt", device="cpu") as file:
                notes = file.metadata() or {}
                block = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, self._format.SafetensorError):
            return None
        sizes = {name: page.numel() for name, page in block.items() if page.dtype == torch.uint8}
        whole = sizes == self._page_bytes and notes.get("key") == key
        if not whole or notes.get("fingerprint") != self._fingerprint or notes.get("sha256") != _checksum(block):
            return None
        return block

    def __repr__(self) -> str:
        return f"FileConnector({str(self.folder)!r})"


def _checksum(block: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(block):
        total.update(name.encode())
        # The buffer of a NumPy array, which safetensors needs anyhow, is read without a copy.
        total.update(block[name].contiguous().numpy())  # type: ignore[arg-type]
    return total.hexdigest()
