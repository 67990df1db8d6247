"""One load or save of one request in its own thread, layer by layer; the model's thread waits for it at each layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vattn.errors import TransferError
from vattn.kv_transfer.connector import KVConnector, TransferRequest
from vattn.kv_transfer.pages import gather_pages, page_bytes, scatter_pages
from vattn.ops.kv_transfer_points import TransferPoint

LAYERS_AHEAD = 4
"""Most layers between the model and its load or save: each takes device memory for the pages of one layer."""


@dataclass
class Pages:
    """Pages of one layer in transfer (`None`: in a buffer of the connector), and the event of their arrival."""

    rows: Tensor | None
    arrived: torch.cuda.Event | None = None


class Job:
    """Base of loads and saves: the thread, the error, and the end.

    Args:
        connector, request: stores the pages; the blocks.
        points: the layers, in order.
        block_ids: int64 `[n]` on the caches' device.
        stream: for copies between host and device; `None` without CUDA.
        timeout: seconds that the model's thread waits for one layer.

    Attributes:
        layers_left: layers that the model has not reached yet.
    """

    saves = False

    def __init__(
        self,
        connector: KVConnector,
        request: TransferRequest,
        points: Sequence[TransferPoint],
        block_ids: Tensor,
        stream: torch.cuda.Stream | None,
        timeout: float,
    ) -> None:
        self.connector, self.request, self.points = connector, request, list(points)
        self.block_ids, self.stream, self.timeout = block_ids, stream, timeout
        self.layers_left = {point.layer_name for point in points}
        self.error: BaseException | None = None
        self._ready: dict[str, Pages] = {}
        self._last: Pages | None = None
        self._changed = threading.Condition()
        self.finished = False
        self._thread = threading.Thread(target=self._main, name=f"vattn transfer {request.request_id}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def fail(self, error: BaseException) -> None:
        """Stop with an error; the first one counts. A complete save is not undone."""
        with self._changed:
            if self.error is None and not (self.saves and self.finished):
                self.error = error
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait for the end, including the connector's `finish`; return whether it was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finished, timeout)

    def _main(self) -> None:
        try:
            with torch.no_grad():
                self._work()
        except BaseException as error:
            # Only this request fails.
            self.fail(error)
        try:
            self._settle()
            self.connector.finish(self.request, self.saves, self.error)
        except BaseException as error:
            self.fail(error)
        with self._changed:
            self.finished = True
            self._changed.notify_all()

    def _work(self) -> None:
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait until no copy reads or writes the connector's memory."""
        if self._last is not None and self._last.arrived is not None:
            self._last.arrived.synchronize()

    def _check_pages(self, pages: object, point: TransferPoint) -> list[Tensor]:
        """Return the pieces if they are a page for each block."""
        width, device = page_bytes(point.kv_cache), point.kv_cache.device
        pieces = list(pages) if isinstance(pages, (list, tuple)) else [pages]
        found = [piece for piece in pieces if isinstance(piece, Tensor) and _is_page_rows(piece, width, device)]
        if len(found) == len(pieces) and sum(piece.shape[0] for piece in found) == self.request.num_blocks:
            return found
        got = ", ".join(
            f"{p.dtype} {tuple(p.shape)} on {p.device}" if isinstance(p, Tensor) else repr(p) for p in pieces
        )
        raise TransferError(
            f"{type(self.connector).__name__} returned {got} for layer {point.layer_name!r}",
            f"torch.uint8 {(self.request.num_blocks, width)} on the host or {device}, whole or in pieces",
            "return one row of page_bytes for each block of the request",
        )


def _is_page_rows(piece: Tensor, width: int, device: torch.device) -> bool:
    fits = piece.dtype == torch.uint8 and piece.dim() == 2 and piece.shape[1] == width
    return fits and piece.device in (torch.device("cpu"), device)


class LoadJob(Job):
    """Copy pages to the device before the layers need them."""

    _awaited: str | None = None

    def _work(self) -> None:
        for point in self.points:
            with self._changed:
                self._changed.wait_for(lambda: self.error or self._awaited or len(self._ready) < LAYERS_AHEAD)
            if self.error:
                break
            pages = self._check_pages(self.connector.wait_for_layer_load(point.layer_name, self.request), point)
            arriving = self._last = self._to_device(pages, point.kv_cache.device)
            with self._changed:
                if self.error is None:
                    self._ready[point.layer_name] = arriving
                self._changed.notify_all()

    def _to_device(self, pieces: list[Tensor], device: torch.device) -> Pages:
        if self.stream is None:
            return Pages(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        with torch.cuda.stream(self.stream):
            rows = torch.empty((self.request.num_blocks, pieces[0].shape[1]), dtype=torch.uint8, device=device)
            for piece, place in _parts(rows, pieces):
                place.copy_(piece, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return Pages(rows, event)

    def deliver(self, point: TransferPoint) -> None:
        """Wait for the pages of a layer and write them into its cache, on the current stream; once."""
        name = point.layer_name
        if name not in self.layers_left:
            return
        with self._changed:
            self._awaited = name
            self._changed.notify_all()
            ready = self._changed.wait_for(lambda: self.error or name in self._ready, self.timeout)
            self._awaited = None
            pages = self._ready.pop(name, None)
            self.layers_left.discard(name)
            self._changed.notify_all()
        if not ready:
            self.fail(
                TransferError(
                    f"layer {name!r} of request {self.request.request_id!r} was not loaded within {self.timeout} s",
                    "pages within the timeout of KVTransfer",
                    "compute the request without the connector, or raise timeout=",
                )
            )
        if pages is None or pages.rows is None or self.error is not None:
            return
        if pages.arrived is not None:
            current = torch.cuda.current_stream(point.kv_cache.device)
            current.wait_event(pages.arrived)
            pages.rows.record_stream(current)
        scatter_pages(point.kv_cache, self.block_ids, pages.rows)


class SaveJob(Job):
    """Copy pages out of the cache after the layers that wrote them, and give them to the connector."""

    saves = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._issuing = threading.Lock()
        self._staging: list[Pages] = []

    def collect(self, point: TransferPoint) -> None:
        """Copy the pages of a layer out of its cache, on the current stream, once; they may change afterwards."""
        with self._issuing:
            if point.layer_name not in self.layers_left or self.error is not None:
                return
            self.layers_left.discard(point.layer_name)
            try:
                buffer = self.connector.page_buffer(point.layer_name, self.request)
                pieces = None if buffer is None else self._check_pages(buffer, point)
                pages = self._last = self._to_host(point.kv_cache, pieces)
            except Exception as error:
                # Only this request fails.
                self.fail(error)
                return
        with self._changed:
            self._ready[point.layer_name] = pages
            self._changed.notify_all()

    def _settle(self) -> None:
        # All layers are collected or there is an error: no copy is issued after this.
        with self._issuing:
            super()._settle()

    def release(self) -> None:
        """Free staging memory; the allocator keeps it while copies read it."""
        self._staging.clear()

    def _to_host(self, storage: Tensor, buffer: list[Tensor] | None) -> Pages:
        if self.stream is None:
            pages = gather_pages(storage, self.block_ids)
            for piece, part in _parts(pages, buffer or []):
                piece.copy_(part)
            return Pages(pages if buffer is None else None)
        staged = self._stage(storage)
        self.stream.wait_stream(torch.cuda.current_stream(storage.device))
        with torch.cuda.stream(self.stream):
            rows = torch.empty(staged.shape, dtype=staged.dtype, pin_memory=True) if buffer is None else None
            for piece, part in _parts(staged, [rows] if rows is not None else buffer or []):
                piece.copy_(part, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        self._staging.append(Pages(staged, event))
        return Pages(rows, event)

    def _stage(self, storage: Tensor) -> Tensor:
        """Copy a layer's pages out of its blocks; if all staging tensors are full, the stream waits for one."""
        rows = None
        if len(self._staging) == LAYERS_AHEAD:
            oldest = self._staging.pop(0)
            assert oldest.arrived is not None and self.stream is not None
            torch.cuda.current_stream(storage.device).wait_event(oldest.arrived)
            if oldest.rows is not None and oldest.rows.shape[1] == page_bytes(storage):
                rows = oldest.rows
        staged = gather_pages(storage, self.block_ids, rows)
        if rows is None and self.stream is not None:
            staged.record_stream(self.stream)
        return staged

    def _work(self) -> None:
        for point in self.points:
            with self._changed:
                while point.layer_name not in self._ready and self.error is None:
                    self._changed.wait()
                if self.error is not None:
                    return
                pages = self._ready.pop(point.layer_name)
            if pages.arrived is not None:
                pages.arrived.synchronize()
            self.connector.save_kv_layer(point.layer_name, self.request, pages.rows)


def _parts(pages: Tensor, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each piece with its part of the pages."""
    return zip(pieces, pages.split([len(piece) for piece in pieces]) if pieces else (), strict=True)
