"""`HostMemoryConnector`: store blocks in host memory and evict the least recently used ones."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vattn.config.arguments import format_bytes, parse_bytes
from vattn.config.typed import typed
from vattn.errors import ConfigError, TransferError
from vattn.kv_transfer.connector import TransferRequest, attached_already, refuse_copy

_Runs: TypeAlias = list[tuple[int, int]]
"""First row of each run of consecutive rows, and the row after its last."""


class HostMemoryConnector:
    """Store pages in host memory that is allocated once.

    Args:
        memory: bytes for all layers together, an int or a string such as `"8GiB"`; rounded down to whole blocks.
            (PyTorch rounds pinned allocations, one per layer, up to powers of two.)
        pin_memory: default: if CUDA is available.

    Attributes:
        capacity: blocks that fit; 0 until a `KVTransfer` attaches it.

    Raises:
        ConfigError: not a byte count; when attached: memory for less than one block, or another model than the first.

    Blocks are not evicted while a load reads them. The end of a prefix is evicted before its beginning.
    """

    @typed
    def __init__(self, memory: int | str, *, pin_memory: bool | None = None) -> None:
        self.memory = parse_bytes(memory)
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.capacity = 0
        self._lock = threading.Lock()
        self._arenas: dict[str, Tensor] = {}
        self._attached: tuple[dict[str, int], str] = {}, ""
        self._rows: OrderedDict[str, int] = OrderedDict()
        """Row of each key, least recently used first."""
        self._free: list[int] = []
        self._readers: Counter[int] = Counter()
        self._loads: dict[int, _Runs] = {}
        self._saves: dict[int, tuple[dict[str, int], _Runs]] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy(self)

    def attach(self, page_bytes: Mapping[str, int], fingerprint: str) -> None:
        """Allocate the memory; attached again to the same caches, keep the blocks."""
        if self._arenas:
            if self._attached == (dict(page_bytes), fingerprint):
                return
            raise attached_already(self)
        per_block = sum(page_bytes.values())
        if self.memory < per_block:
            raise ConfigError(
                f"memory={format_bytes(self.memory)} for blocks of {format_bytes(per_block)}",
                "at least one block",
                "give the connector more memory",
            )
        capacity = self.memory // per_block
        try:
            self._arenas = {
                name: torch.empty((capacity, size), dtype=torch.uint8, pin_memory=self.pin_memory)
                for name, size in page_bytes.items()
            }
        except RuntimeError as error:
            raise ConfigError(
                f"memory={format_bytes(self.memory)}, which the host does not give: {error!s:.200}",
                "as much as is free" + (", pinned" if self.pin_memory else ""),
                "give the connector less memory",
            ) from error
        self._attached, self.capacity, self._free = (dict(page_bytes), fingerprint), capacity, list(range(capacity))

    @property
    def num_blocks(self) -> int:
        """Blocks held now."""
        return len(self._rows)

    @typed
    def find(self, keys: Sequence[str]) -> int:
        """Return how many of the first keys are held; they count as used."""
        with self._lock:
            held = list(takewhile(self._rows.__contains__, keys))
            self._touch(held)
            return len(held)

    def wait_for_layer_load(self, layer_name: str, request: TransferRequest) -> list[Tensor]:
        """Return views of the memory, one per run of adjacent pages."""
        with self._lock:
            runs = self._loads.get(id(request))
            if runs is None:
                missing = [key for key in request.keys if key not in self._rows]
                if missing:
                    raise TransferError(
                        f"{len(missing)} of {request.num_blocks} blocks of request {request.request_id!r} are not held",
                        "keys that find() counted; they may have been evicted since",
                        "compute the request without the connector",
                    )
                rows = [self._rows[key] for key in request.keys]
                runs = self._loads[id(request)] = _runs(rows)
                self._readers.update(rows)
                self._touch(request.keys)
        return [self._arenas[layer_name][start:end] for start, end in runs]

    def blocks_to_save(self, request: TransferRequest) -> list[int]:
        """Return the indices of the blocks that are not held; the others count as used."""
        with self._lock:
            self._touch(request.keys)
            return [place for place, key in enumerate(request.keys) if key not in self._rows]

    def page_buffer(self, layer_name: str, request: TransferRequest) -> list[Tensor] | None:
        """Return the rows that the request's pages will have; `None` if some blocks are held already."""
        with self._lock:
            rows, runs = self._reserve(request)
        return [self._arenas[layer_name][a:b] for a, b in runs] if len(rows) == request.num_blocks else None

    def save_kv_layer(self, layer_name: str, request: TransferRequest, pages: Tensor | None) -> None:
        """Copy the pages of new blocks into their rows, unless they are there already."""
        with self._lock:
            rows, _ = self._reserve(request)
        arena = self._arenas[layer_name]
        if rows and pages is not None:
            index = {key: place for place, key in enumerate(request.keys)}
            arena[list(rows.values())] = pages[[index[key] for key in rows]]

    def finish(self, request: TransferRequest, saved: bool, error: BaseException | None) -> None:
        """Release the rows of a load; keep or drop the rows of a save."""
        with self._lock:
            if not saved:
                runs = self._loads.pop(id(request), [])
                self._readers.subtract(row for start, end in runs for row in range(start, end))
                return
            reserved, _ = self._saves.pop(id(request), ({}, []))
            for key, row in reserved.items():
                if error is None and key not in self._rows:
                    self._rows[key] = row
                else:
                    self._free.append(row)
            if error is None:
                self._touch(request.keys)

    def _touch(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            if key in self._rows:
                self._rows.move_to_end(key)

    def _reserve(self, request: TransferRequest) -> tuple[dict[str, int], _Runs]:
        """Return rows for the request's keys that are not held yet; the first call evicts and reserves them."""
        if id(request) in self._saves:
            return self._saves[id(request)]
        new = [key for key in request.keys if key not in self._rows]
        self._touch(request.keys)
        known = set(request.keys)
        unused = [key for key, row in self._rows.items() if not self._readers[row] and key not in known]
        room = len(self._free) + len(unused)
        if room < len(new):
            raise TransferError(
                f"{len(new)} blocks of request {request.request_id!r} to save, and room for {room}",
                f"up to {self.capacity} blocks, less what is being loaded and saved",
                "give the connector more memory, or save fewer blocks",
            )
        for key in unused[: max(0, len(new) - len(self._free))]:
            self._free.append(self._rows.pop(key))
        rows = self._take(len(new))
        self._saves[id(request)] = dict(zip(new, rows, strict=True)), _runs(rows)
        return self._saves[id(request)]

    def _take(self, count: int) -> list[int]:
        """Take free rows: adjacent ones if possible, else the lowest."""
        self._free.sort()
        free, last = self._free, count - 1
        runs = (i for i in range(len(free) - last) if free[i + last] == free[i] + last)
        start = next(runs, 0) if count else 0
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def __repr__(self) -> str:
        return f"HostMemoryConnector({self.num_blocks} of {self.capacity} blocks, {format_bytes(self.memory)})"


def _runs(rows: Sequence[int]) -> _Runs:
    """Return rows, in their order, as the fewest ranges."""
    starts = [place for place, row in enumerate(rows) if not place or row != rows[place - 1] + 1]
    ends = [*starts[1:], len(rows)] if starts else []
    return [(rows[start], rows[start] + end - start) for start, end in zip(starts, ends, strict=True)]
