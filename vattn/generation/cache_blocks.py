"""`CacheBlocks`: the blocks of the cache that running requests hold, in every group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.cache.block_pool import BlockPool, BlockTable
from vattn.cache.hybrid_block_table import HybridBlockTable
from vattn.cache.model_identity import ModelIdentity
from vattn.cache.specs import KVCacheSpec
from vattn.generation.request import Request
from vattn.generation.state_snapshots import StateSnapshots
from vattn.generation.transfers import on_host


class CacheBlocks:
    """Take blocks for requests, give them back, and find them again by their content.

    A cache without groups has one block table; a request keeps its blocks to its end. In a cache with groups
    (`hybrid=True`) each group has its own, and blocks before a window go back to the pool while the request runs.

    Args:
        cache: what `vattn.allocate_kv_cache` returned.
        max_num_reqs: requests that run at once; each has a row in the tables.
        max_seq_len: longest request.
        reuse: whether whole blocks get a name by their content.
        model: decides the content; after a change that `look` sees, earlier blocks are not found any more.
        snapshots: for a model that keeps a state for each request; a request reuses blocks up to one of them.

    Attributes:
        pool: where blocks come from.
        tables: int64 `[max_num_reqs, ceil(max_seq_len / block_size)]`, one for each group, block ids by row.
        computes_last: whether a request computes the last block that it finds again: a draft head needs the hidden
            states, and its row of the last token depends on the token after it.
    """

    def __init__(
        self,
        cache: KVCacheAllocation,
        max_num_reqs: int,
        max_seq_len: int,
        reuse: bool,
        model: nn.Module | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.cache, self.reuse, self.snapshots = cache, reuse, snapshots
        self._identity = ModelIdentity(model) if reuse and model is not None else None
        self._calculated = [] if model is None else _calculating_layers(model)
        self._scales, self._scale_changes, self._epoch = _scale_values(self._calculated), 0, 0
        self.block_size, self.computes_last = cache.block_size, False
        self.with_encoder = getattr(model, "max_encoder_len", 0) > 0
        self._specs: list[KVCacheSpec | None] = [group.spec for group in cache.groups] or [None]
        width = -(-max_seq_len // cache.block_size)
        self._all_tables = torch.zeros(len(self._specs) * max_num_reqs, width, dtype=torch.int64)
        self.tables = self._all_tables.split(max_num_reqs)
        self._max_num_reqs = max_num_reqs
        self.start_over()

    def start_over(self) -> None:
        """Take all blocks back and forget their content."""
        self.pool = BlockPool(self.cache.num_blocks, reserved=self.cache.reserved_blocks)
        # Not yet written into the tables: row, column and block.
        self._fresh: list[tuple[int, int, int]] = []
        self._rows = list(range(self._max_num_reqs))
        if self.snapshots is not None:
            self.snapshots.clear()

    def state_slots(self, requests: Sequence[Request]) -> list[int] | None:
        """Return where requests have their states; `None` for models without."""
        return [request.row + 1 for request in requests] if self.cache.states is not None else None

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be opened."""
        return len(self._rows)

    def look(self) -> None:
        """Notice changes of the model: what was computed before is not found again, nor what running requests compute.

        Scales that layers calculate are written in every step, so their values are compared, which waits for the
        device: only while no request runs. The first calculation is no change.
        """
        if self._identity is None:
            return
        if self._calculated and len(self._rows) == self._max_num_reqs:
            before, self._scales = self._scales, _scale_values(self._calculated)
            self._scale_changes += any(old not in (None, new) for old, new in zip(before, self._scales, strict=True))
        self._epoch = self._identity.look() + self._scale_changes

    def open(self, request: Request) -> None:
        """Give a request a row, and the blocks that already hold the beginning of its tokens."""
        grouped = bool(self.cache.groups)
        request.table = HybridBlockTable(self.pool, self.cache) if grouped else BlockTable(self.pool, self.block_size)
        request.row = self._rows.pop()
        # The tokens of a prompt that is measured are computed: their logits are needed.
        if self.reuse and request.has_prompt_logprobs:
            # One token at least is computed: its logits are needed.
            count = (request.num_tokens - 1) // self.block_size
            keys = request.keys(count, self.block_size)[:count]
            self._take(request.table, keys if self.snapshots is None else self._until_snapshot(request, keys))
        found = request.table.num_tokens
        request.cached = request.room = request.drafted_until = found
        request.epoch = self._epoch
        request.published = found // self.block_size
        request.freed = [0] * len(self._specs)
        self._note(request, 0)

    def _until_snapshot(self, request: Request, keys: list[str]) -> list[str]:
        """Return the keys of the blocks of the longest prefix that has a snapshot and all its blocks.

        The request will save its state at the end of its last whole block, and where its tokens begin to differ from
        those in the cache: the next request that differs from there on finds a snapshot.
        """
        assert self.snapshots is not None
        names = [[self._name(key, group) for key in keys] for group in range(len(self._specs))]
        shared = self._found(names)
        count = next(
            (
                end
                for end in range(shared, 0, -1)
                if names[0][end - 1] in self.snapshots and self._found([name[:end] for name in names]) == end
            ),
            0,
        )
        request.cuts = {end * self.block_size for end in (shared, len(keys)) if end > count}
        return keys[:count]

    def load_state(self, request: Request) -> None:
        """Give an opened request the state after the tokens that it has found."""
        if self.snapshots is not None and request.cached:
            self.snapshots.load(self._snapshot_name(request, request.cached), request.row + 1)

    def _snapshot_name(self, request: Request, end: int) -> str:
        count = end // self.block_size
        return self._name(request.keys(count, self.block_size)[count - 1], 0)

    def until_cut(self, request: Request, count: int) -> int:
        """Return how many of a request's next `count` tokens one step computes: no further than its next snapshot.

        Tokens that see each other both ways are computed in one step.
        """
        if request.cuts:
            count = min([count, *(cut - request.cached for cut in request.cuts if cut > request.cached)])
        if request.inputs is not None:
            count = request.inputs.whole(request.cached, request.cached + count) - request.cached
        return count

    def save_states(self, requests: Sequence[Request], ends: Sequence[int]) -> None:
        """Save the state of each request that a step has brought to one of its cuts."""
        if self.snapshots is None:
            return
        for request, end in zip(requests, ends, strict=False):
            if end in request.cuts and request.epoch == self._epoch:
                self.snapshots.save(self._snapshot_name(request, end), request.row + 1)

    def grow(self, request: Request, count: int) -> None:
        """Make room for `count` more tokens after `request.cached`.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        table = request.table
        if table is not None and request.cached + count > request.room:
            before = request.room // self.block_size
            # Room that was taken for wrong drafts is used again.
            table.num_tokens = request.cached
            table.append(count)
            request.room = len(_rows(table)[0]) * self.block_size
            if self.cache.groups and count > self.block_size:
                # The next step frees blocks that this chunk leaves before its windows.
                request.room = request.cached + count
            self._note(request, before)

    def begun(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """Return the blocks in which requests of some lengths have their last token, for each group."""
        columns = [(length - 1) // self.block_size for length in lengths]
        return [
            [_rows(request.table)[group][column] for request, column in zip(requests, columns, strict=True)]
            for group in range(len(self._specs))
        ]

    def open_encoder(self, request: Request) -> None:
        """Take blocks for a request's encoder states; nothing for models without.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
        """
        request.has_encoder = False
        request.encoder_blocks = self.pool.allocate(self.encoder_blocks(request))

    def has_encoders(self, requests: Sequence[Request]) -> bool:
        """Return whether the encoder states of requests are in the cache, or the model has none."""
        return not self.with_encoder or all(request.has_encoder for request in requests)

    def encoder_blocks(self, request: Request) -> int:
        """Return how many blocks a request's encoder states take."""
        states = None if request.inputs is None else request.inputs.encoder_states
        return 0 if states is None else -(-states.shape[0] // self.block_size)

    def close(self, request: Request) -> None:
        """Give a request's row and blocks back."""
        if request.table is not None:
            request.table.free()
            if request.encoder_blocks:
                self.pool.free(request.encoder_blocks)
                request.encoder_blocks = []
            # Before the next request of the row notes its own blocks.
            self._write_fresh()
            self._rows.append(request.row)
            request.table, request.cuts = None, set()
            request.cached = request.room = request.published = 0

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the whole blocks of a request's first tokens, which a running step fills, known by their content."""
        first, last = request.published, num_tokens // self.block_size
        if not self.reuse or request.table is None or request.epoch != self._epoch:
            return
        keys = request.keys(last, self.block_size)
        for index, row in enumerate(_rows(request.table)):
            for place in range(first, last):
                if row[place]:
                    self.pool.publish(row[place], self._name(keys[place], index))
        request.published = last

    def new_keys(self, request: Request, start: int, end: int) -> list[str]:
        """Return the content keys of the blocks that are whole after positions `start` to `end - 1`."""
        first, last = start // self.block_size, end // self.block_size
        return request.keys(last, self.block_size)[first:last] if self.reuse else []

    def next_key(self, request: Request) -> str | None:
        """Return the content key of the block that an opened request computes first; `None` if it finds none."""
        place = request.cached // self.block_size
        if self.computes_last and self._holds(request, place):
            place += 1
        if not self.reuse or not request.has_prompt_logprobs or place >= (request.num_tokens - 1) // self.block_size:
            return None
        return request.keys(place + 1, self.block_size)[place]

    def _holds(self, request: Request, place: int) -> bool:
        """Return whether a whole block of a request's tokens is known."""
        keys = request.keys(place + 1, self.block_size)[place : place + 1]
        return bool(keys) and self._found([[self._name(keys[0], group)] for group in range(len(self._specs))]) == 1

    def forget(self, request: Request) -> None:
        """Make the blocks of a failed request unknown again."""
        if request.table is not None:
            self.pool.forget(block for row in _rows(request.table) for block in row if block)
            if self.snapshots is not None:
                keys = request.keys(request.cached // self.block_size, self.block_size)
                self.snapshots.forget(self._name(key, 0) for key in keys)

    def moves(self, request: Request, root: int, path: Sequence[int]) -> list[tuple[int, int]]:
        """Return slots from which to copy the accepted nodes of a tree, and to which: the places after its root.

        Args:
            request: with its blocks.
            root: the place of the tree's root.
            path: the rows of the nodes, which lie as many places after the root.
        """
        row, size = _rows(request.table)[0], self.block_size
        moved = [(root + node, root + depth) for depth, node in enumerate(path, 1) if node != depth]
        return [tuple(row[place // size] * size + place % size for place in pair) for pair in moved]  # type: ignore[misc]

    def rows(self, requests: Sequence[Request], num_tokens: int) -> Tensor | list[Tensor]:
        """Return int64 `[len(requests), W]`, block ids of requests of up to `num_tokens` tokens; one for each group."""
        self._write_fresh()
        width = -(-num_tokens // self.block_size)
        rows = on_host([request.row for request in requests])
        found = [table.narrow(1, 0, width).index_select(0, rows) for table in self.tables]
        return found if self.cache.groups else found[0]

    def _write_fresh(self) -> None:
        """Write the noted blocks into the tables."""
        if self._fresh:
            row, column, block = on_host([number for each in self._fresh for number in each]).view(-1, 3).unbind(1)
            # Rows of the groups follow each other.
            self._all_tables[row, column] = block
            self._fresh = []

    def num_wasted(self, requests: Sequence[Request]) -> int:
        """Return the places in the blocks of running requests that hold no token which a query still reads."""
        wasted = 0
        for request in requests:
            for spec, row, freed in zip(self._specs, _rows(request.table), request.freed, strict=True):
                gone = _first_block(spec, request.cached) * self.block_size
                wasted += (len(row) - freed) * self.block_size - (request.cached - gone)
        return wasted

    def _note(self, request: Request, first: int) -> None:
        """Remember a request's blocks from column `first` on, and those that were freed, for the tables."""
        for group, (spec, row) in enumerate(zip(self._specs, _rows(request.table), strict=True)):
            place = group * self._max_num_reqs + request.row
            self._fresh += [(place, column, row[column]) for column in range(first, len(row))]
            gone = min(_first_block(spec, request.cached), first)
            self._fresh += [(place, column, 0) for column in range(request.freed[group], gone)]
            request.freed[group] = max(request.freed[group], gone)
        if len(self._fresh) > _MOST_FRESH:
            self._write_fresh()

    def _name(self, key: str, group: int) -> str:
        return f"{self._epoch}/{group}/{key}"

    def _take(self, table: BlockTable | HybridBlockTable, keys: Sequence[str]) -> None:
        """Put blocks that hold the first tokens into an empty table, as many as every group has."""
        names = [[self._name(key, group) for key in keys] for group in range(len(self._specs))]
        count = self._found(names)
        if self.computes_last and count:
            count = self._found([name[: count - 1] for name in names])
        for row, spec, name in zip(_rows(table), self._specs, names, strict=True):
            first = _first_block(spec, count * self.block_size)
            row += [0] * first + self.pool.take(name[first:count])
        table.num_tokens = count * self.block_size

    def _found(self, names: Sequence[Sequence[str]]) -> int:
        """Return how many first blocks can be taken: a group needs those that its next query still reads."""
        most, windows = len(names[0]), []
        for spec, group in zip(self._specs, names, strict=True):
            if spec is not None and spec.first_block(most * self.block_size):
                windows.append((spec, group))
            else:
                most = min(most, self.pool.find(group))
        held = [(spec, _run_lengths([self.pool.find([name]) for name in group[:most]])) for spec, group in windows]
        while most and not all(
            runs[most - 1] >= most - _first_block(spec, most * self.block_size) for spec, runs in held
        ):
            most -= 1
        return most


_MOST_FRESH = 4096
"""Entries of the tables that are kept to be written at once."""


def _rows(table: BlockTable | HybridBlockTable | None) -> list[list[int]]:
    assert table is not None
    return [table.blocks] if isinstance(table, BlockTable) else table.rows


def blocks_needed(cache: KVCacheAllocation, num_tokens: int, chunk: int) -> int:
    """Return how many blocks a request of `num_tokens` tokens can need at once, in steps of up to `chunk` tokens."""
    if not cache.groups:
        return -(-num_tokens // cache.block_size)
    return sum(group.spec.max_blocks(num_tokens, min(chunk, num_tokens)) for group in cache.groups)


def longest_that_fits(cache: KVCacheAllocation, chunk: int) -> int:
    """Return how long a request can be that has the cache for itself, in steps of up to `chunk` tokens."""
    usable = cache.num_blocks - cache.reserved_blocks
    low, high = 0, usable * cache.block_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks_needed(cache, middle, chunk) <= usable else (low, middle - 1)
    return low


def _first_block(spec: KVCacheSpec | None, num_tokens: int) -> int:
    return 0 if spec is None else spec.first_block(num_tokens)


def _run_lengths(present: Sequence[int]) -> list[int]:
    """Return, for each entry, how many entries up to it are present without a gap."""
    lengths: list[int] = []
    for one in present:
        lengths.append((lengths[-1] if lengths else 0) + 1 if one else 0)
    return lengths


def _scales_of(layer: nn.Module) -> list[Tensor]:
    return [scale for name in ("k_scale", "v_scale", "q_scale") if (scale := layer._buffers.get(name)) is not None]


def _calculating_layers(model: nn.Module) -> list[Any]:
    """Return the layers that calculate their scales."""
    parts: list[Any] = list(model.modules())
    return [part for part in parts if "kv_cache" in part._buffers and getattr(part, "calculate_kv_scales", False)]


def _scale_values(layers: list[Any]) -> list[tuple[float, ...] | None]:
    """Return the scales of each layer, `None` for those that are not calculated yet; one copy from each device."""
    tensors = [[layer.scales_ready, *_scales_of(layer)] for layer in layers]
    pieces = [tensor.detach().reshape(-1).float() for each in tensors for tensor in each if not tensor.is_meta]
    if not pieces or len(pieces) != sum(map(len, tensors)):
        return [None] * len(layers)
    numbers = torch.cat([piece.to(pieces[0].device) for piece in pieces]).tolist()
    values: list[tuple[float, ...] | None] = []
    for ready, *scales in tensors:
        count = ready.numel() + sum(scale.numel() for scale in scales)
        own, numbers = numbers[:count], numbers[count:]
        values.append(tuple(own[ready.numel() :]) if all(own[: ready.numel()]) else None)
    return values
