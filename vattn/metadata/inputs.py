"""Read one step's host numbers: check them against each other and a builder's capacity, and make tensors of them."""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from vattn.config.arguments import integer
from vattn.errors import MetadataError
from vattn.metadata.block_conflicts import BlockConflicts
from vattn.metadata.checks import check_ids, check_seq_lens, check_slots, check_tree_ids, too_narrow
from vattn.metadata.step import Limits, Step, most_held
from vattn.quantization.formats import dtype_name


class HostArray(Protocol):
    """A NumPy array, which type checkers do not take for a sequence."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


Lengths = Sequence[int] | Tensor | HostArray
"""Host integers: a list, a tuple, or one dimension of a NumPy array or CPU tensor of an integer dtype."""

Tables = Sequence[Sequence[int]] | Tensor | HostArray
"""Block ids of each request: lists, or two dimensions of a NumPy array or CPU tensor of an integer dtype."""

Masks = tuple[bool | Lengths, Tensor | None, Lengths | None, Sequence[Sequence[tuple[int, int]]] | Tensor | None]
"""`causal`, `tree_bias`, `tree_id` and `mm_ranges` of a step."""

_INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def read_step(
    limits: Limits,
    conflicts: BlockConflicts | None,
    query_lens: Lengths,
    seq_lens: Lengths | None,
    block_tables: Tables | None,
    slot_mapping: Lengths | None,
    masks: Masks,
) -> Step:
    """Check a step and compute its positions and slots.

    Args:
        limits: of the builder.
        conflicts: finds blocks that a step writes and others use; `None`: the caller checks tables and slots.
        ...: as in `AttentionMetadataBuilder.build`.

    Raises:
        MetadataError: values that contradict each other, the capacity or the cache.
    """
    causal, tree_bias, tree_id, mm_ranges = masks
    queries = read_integers("query_lens", query_lens)
    lengths = queries if seq_lens is None else read_integers("seq_lens", seq_lens)
    num_reqs = queries.shape[0]
    if lengths.shape[0] != num_reqs:
        check_count("seq_lens", lengths.shape[0], num_reqs)
    cached = lengths - queries
    query_list, length_list = queries.tolist(), lengths.tolist()
    if min(query_list, default=0) < 0 or min(cached.tolist(), default=0) < 0:
        check_seq_lens(queries, lengths)
    num_tokens, longest = sum(query_list), max(length_list, default=0)
    longest_query = max(query_list, default=0)
    for what, count, limit, name in (
        ("requests", num_reqs, limits.num_reqs, "max_num_reqs"),
        ("tokens", num_tokens, limits.num_tokens, "max_num_tokens"),
        ("positions in one request", longest, limits.seq_len, "max_seq_len"),
    ):
        if count > limit:
            raise over_capacity(what, count, limit, name)
    request = torch.arange(num_reqs, device="cpu")
    if num_tokens == num_reqs and longest_query == 1:
        positions = cached
    else:
        request = torch.repeat_interleave(request, queries)
        positions = torch.arange(num_tokens, device="cpu") + (cached - (queries.cumsum(0) - queries))[request]
    packed = block_tables is None
    if block_tables is None:
        _check_packed(queries, lengths, slot_mapping)
        table = torch.zeros((num_reqs, 0), dtype=torch.int64, device="cpu")
        slots = torch.full_like(positions, -1)
    else:
        # Every rank checks what the first one needs, so that all refuse the same tables.
        held = lengths if limits.dcp_shard is None else most_held(limits.dcp_shard, lengths)
        needed = (held + (limits.block_size - 1)) // limits.block_size
        ranks = 1 if limits.dcp_shard is None else limits.dcp_shard.world_size
        table = read_table("block_tables", block_tables, lengths, needed, limits.block_size, ranks)
        slots, places = _slots(table, request, positions, limits)
        own = slots
        if slot_mapping is not None:
            slots = read_per_token("slot_mapping", slot_mapping, num_tokens, -1)
            check_slots(slots, limits.block_size, limits.num_blocks)
        if slot_mapping is not None or limits.dcp_shard is not None:
            stored = slots >= 0
            places, own, kept = places[stored], own[stored], slots[stored]
        else:
            kept = own
        as_told = kept is own or torch.equal(kept, own)
        if conflicts is not None and not (as_told and conflicts.absent(table, kept, limits.block_size, longest)):
            check_ids(table, needed, limits.num_blocks)
            check_slots(slots, limits.block_size, limits.num_blocks)
            contexts = cached if limits.dcp_shard is None else torch.full_like(lengths, -1)
            conflicts.refuse(table, places, kept, needed, contexts, limits.block_size)
        if limits.reserved_blocks:
            _check_reserved(table, lengths, slots, limits)
    if not isinstance(causal, bool):
        causal = read_flags("causal", causal, num_reqs)
    if tree_bias is not None or tree_id is not None:
        tree_bias, tree_id = _trees(limits, tree_bias, tree_id, num_reqs)
    return Step(
        queries,
        lengths,
        table,
        slots,
        positions,
        causal,
        tree_bias,
        tree_id,
        None if mm_ranges is None else _ranges(limits, mm_ranges, num_reqs),
        packed,
        held=None if limits.dcp_shard is None else limits.dcp_shard.count(lengths),
        num_tokens=num_tokens,
        max_query_len=longest_query,
        max_seq_len=longest,
    )


def _slots(table: Tensor, request: Tensor, positions: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Return the slot of each new token, -1 on another rank, and the entry of the flat table that holds it."""
    size, shard = limits.block_size, limits.dcp_shard
    index = positions if shard is None else shard.local_indices(positions)
    column = index // size if shard is None else index.clamp(min=0) // size
    places = request * table.shape[1] + column
    slots = table.reshape(-1).index_select(0, places) * size + index % size
    return (slots if shard is None else torch.where(index < 0, -1, slots)), places


def _check_packed(queries: Tensor, lengths: Tensor, slot_mapping: Lengths | None) -> None:
    if not torch.equal(queries, lengths):
        row = int((queries != lengths).nonzero()[0])
        raise MetadataError(
            f"request {row}: seq_len {int(lengths[row])} for {int(queries[row])} new tokens, and no block tables",
            "equal lengths where nothing is cached",
            "pass block_tables, or leave seq_lens out",
        )
    if slot_mapping is not None:
        raise MetadataError("slot_mapping without block_tables", "both, or neither without a cache", "leave it out")


def read_per_token(name: str, values: Lengths, num_tokens: int, least: int) -> Tensor:
    """Return one integer from `least` up per new token."""
    found = read_integers(name, values)
    if found.shape[0] != num_tokens or bool((found < least).any()):
        wrong = (found < least).nonzero()
        raise MetadataError(
            f"{name} has {found.shape[0]} entries, the query_lens sum to {num_tokens}"
            if found.shape[0] != num_tokens
            else f"{name}[{int(wrong[0])}]={int(found[wrong[0]])}",
            f"one integer from {least} up per new token",
            f"leave {name} out to take it from the lengths and block tables",
        )
    return found


def read_flags(name: str, values: Lengths, num_reqs: int) -> Tensor:
    """Return one bool per request."""
    try:
        given = values if isinstance(values, Tensor) else [operator.index(flag) for flag in values]
    except TypeError as error:
        raise MetadataError(f"{name}={values!r:.60}", "one flag per request", "pass True or False for each") from error
    flags = read_integers(name, given.long() if isinstance(given, Tensor) and given.dtype == torch.bool else given)
    check_count(name, flags.shape[0], num_reqs)
    return flags != 0


def _check_reserved(table: Tensor, lengths: Tensor, slots: Tensor, limits: Limits) -> None:
    """Refuse tables and slots that name a block of the sinks."""
    used = torch.arange(table.shape[1], device="cpu") * limits.block_size < lengths.unsqueeze(1)
    wrong = used & (table >= 1) & (table <= limits.reserved_blocks)
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise MetadataError(
            f"request {row}: entry {column} of the block table is block {int(table[row, column])}, which holds sinks",
            f"blocks from {limits.reserved_blocks + 1} on",
            f"make the pool with BlockPool(num_blocks, reserved={limits.reserved_blocks + 1})",
        )
    written = slots // limits.block_size
    taken = (written >= 1) & (written <= limits.reserved_blocks)
    if bool(taken.any()):
        row = int(taken.nonzero()[0])
        raise MetadataError(
            f"slot_mapping[{row}]={int(slots[row])} is in block {int(written[row])}, which holds sinks",
            f"slots from {(limits.reserved_blocks + 1) * limits.block_size} on",
            "write to blocks of the request",
        )


def _trees(limits: Limits, bias: Tensor | None, tree_id: Lengths | None, num_reqs: int) -> tuple[Tensor, Tensor]:
    if bias is None or tree_id is None:
        raise MetadataError(
            f"tree_bias {'missing' if bias is None else 'given'}, tree_id {'missing' if tree_id is None else 'given'}",
            "both or neither",
            "pass tree_id=[-1 or the index of a bias, ...] with tree_bias",
        )
    if not isinstance(bias, Tensor):
        raise MetadataError(f"tree_bias={bias!r:.60}", "an fp32 tensor [trees, n, n]", "torch.stack the biases")
    square = bias.dim() == 3 and bias.shape[1] == bias.shape[2]
    if not square or bias.shape[0] > limits.trees or bias.shape[1] > limits.tree_size:
        raise MetadataError(
            f"tree_bias has shape {tuple(bias.shape)}",
            f"[trees, n, n] with at most {limits.trees} trees and n at most {limits.tree_size}",
            "give the builder max_trees= and max_tree_size=",
        )
    if bias.is_complex() or bool((bias.isnan() | (bias == torch.inf)).any()):
        raise MetadataError(
            f"tree_bias of {dtype_name(bias.dtype)} with " + ("complex numbers" if bias.is_complex() else "NaN or inf"),
            "finite numbers, and -inf for what a token does not see",
            "check how the bias was made",
        )
    ids = read_integers("tree_id", tree_id)
    check_count("tree_id", ids.shape[0], num_reqs)
    check_tree_ids(ids, bias.shape[0])
    return bias, ids


def _ranges(limits: Limits, ranges: Sequence[Sequence[tuple[int, int]]] | Tensor, num_reqs: int) -> Tensor:
    try:
        check_count("mm_ranges", len(ranges), num_reqs)
        if not isinstance(ranges, Tensor):
            most = max((len(row) for row in ranges), default=0)
            rows = [[tuple(map(operator.index, pair)) for pair in row] + [(0, 0)] * (most - len(row)) for row in ranges]
            ranges = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(num_reqs, most, 2)
        if ranges.dim() != 3 or ranges.shape[2] != 2 or ranges.is_floating_point() or ranges.device.type != "cpu":
            raise TypeError("no ranges")
    except (TypeError, ValueError, RuntimeError) as error:
        raise MetadataError(
            f"mm_ranges={ranges!r:.60}", "CPU integers [requests, ranges, 2]", "one list of (start, end) per request"
        ) from error
    if ranges.shape[1] > limits.mm_ranges:
        raise MetadataError(
            f"{ranges.shape[1]} multimodal ranges in one request",
            f"at most {limits.mm_ranges}",
            "give the builder max_mm_ranges=",
        )
    ranges = ranges.long()
    if ranges.numel() and not -(2**31) <= int(ranges.min()) <= int(ranges.max()) < 2**31:
        raise MetadataError(
            f"mm_ranges with positions from {int(ranges.min())} to {int(ranges.max())}",
            "positions of 32 bits",
            "give the first and last position of each range",
        )
    return ranges


def read_integers(name: str, values: Lengths) -> Tensor:
    """Return host integers as int64 `[n]`; refuse anything else."""
    if isinstance(values, (list, tuple, range)):
        return _from_list(name, values)
    if not isinstance(values, Tensor):
        try:
            values = torch.as_tensor(values, device="cpu") if len(values) else torch.empty(0, device="cpu").long()
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise _no_integers(name, values) from error
    if values.device.type != "cpu":
        raise MetadataError(
            f"{name} is on {values.device}", "host values", f"keep {name} on the host, or pass {name}.cpu()"
        )
    if values.dim() != 1 or values.dtype not in _INTEGERS or values.layout != torch.strided:
        kind = f"{values.dtype} of shape {tuple(values.shape)}"
        kind += "" if values.layout == torch.strided else f" and {values.layout}"
        raise MetadataError(f"{name} is {kind}", "a flat sequence of ints", "pass a list of ints")
    return values.long()


def _from_list(name: str, values: Iterable[int]) -> Tensor:
    """Return a list of ints as int64 `[n]`, several times as fast as torch reads one."""
    try:
        numbers = array("q", values)
    except (TypeError, OverflowError) as error:
        raise _no_integers(name, values) from error
    if bool in map(type, values):
        raise _no_integers(name, values)
    return torch.frombuffer(numbers, dtype=torch.int64) if numbers else torch.empty(0, dtype=torch.int64, device="cpu")


def _no_integers(name: str, given: object) -> MetadataError:
    return MetadataError(f"{name} is {given!r:.80}", "a flat sequence of ints", "pass a list of ints")


def read_table(name: str, tables: Tables, seq_lens: Tensor, needed: Tensor, block_size: int, ranks: int = 1) -> Tensor:
    """Return the tables as int64 `[B, W]` on the CPU, rows of a list padded with 0 to the longest.

    Args:
        seq_lens, needed: int64 `[B]`, tokens and blocks of each request.
        ranks: over which the tokens are spread.

    Raises:
        MetadataError: no tables of integers, or a row with fewer blocks than its request needs.
    """
    if not hasattr(tables, "__len__") or getattr(tables, "ndim", 1) == 0:
        raise MetadataError(
            f"{name}={tables!r:.60}", "one list of block ids per request", f"pass {name}=[[...], [...]]"
        )
    check_count(name, len(tables), needed.shape[0])
    if hasattr(tables, "__array_interface__"):
        # Arrays that torch refuses, such as reversed ones, are read row by row.
        with suppress(TypeError, ValueError):
            tables = torch.as_tensor(tables, device="cpu")
    if isinstance(tables, Tensor):
        strided = tables.layout == torch.strided
        if tables.dim() != 2 or tables.dtype not in _INTEGERS or not strided or tables.device.type != "cpu":
            raise MetadataError(
                f"{name} is {tables.dtype} of shape {tuple(tables.shape)} on {tables.device}",
                "an integer tensor [requests, blocks] on the CPU, or one list of block ids per request",
                f"give {name} an integer dtype, two dimensions and the CPU, or pass lists",
            )
        widths, table = [tables.shape[1]] * len(tables), tables.long()
    else:
        widths, table = _read_rows(name, tables)
    if any(map(operator.lt, widths, needed.tolist())):
        row = int((torch.tensor(widths, device="cpu") < needed).nonzero()[0])
        raise too_narrow(row, int(seq_lens[row]), int(needed[row]), block_size, widths[row], ranks)
    return table


def _read_rows(name: str, tables: Sequence[Sequence[int]] | HostArray) -> tuple[list[int], Tensor]:
    """Return the widths of some lists of block ids, and the lists as one table."""
    row: Any = tables
    try:
        widths = []
        for row in tables:
            if type(row) is not list and isinstance(row, (str, bytes, Set, Mapping)):
                raise TypeError("no list of ints")
            widths.append(len(row))
        width = max(widths, default=0)
        # Packing rows takes a third of the time of `array.extend`, and a tenth of that of `torch.tensor`.
        flat, stride = bytearray(8 * width * len(widths)), 8 * width
        for place, (row, count) in enumerate(zip(tables, widths, strict=True)):
            struct.pack_into(f"{count}q", flat, place * stride, *row)
    except (TypeError, struct.error) as error:
        raise MetadataError(
            f"{name} has {row!r:.60} for a request", "one list of block ids per request", f"pass {name}=[[...], [...]]"
        ) from error
    table = torch.frombuffer(flat, dtype=torch.int64) if flat else torch.empty(0, dtype=torch.int64, device="cpu")
    return widths, table.view(len(widths), width)


def check_count(name: str, count: int, num_reqs: int) -> None:
    """Refuse a list that is not one entry per request."""
    if count != num_reqs:
        raise MetadataError(
            f"{name} describes {count} requests, query_lens {num_reqs}", "equal counts", f"check {name}"
        )


def over_capacity(what: str, count: int, limit: int, name: str) -> MetadataError:
    """Return the error of a count beyond the builder's argument `name`."""
    return MetadataError(
        f"a step of {count} {what}", f"at most {limit}", f"make the builder with {name}={count} or more"
    )


def padded_size(what: str, real: int, given: Any, limit: int) -> int:
    """Return the size that a step of so many requests or tokens is padded to, or refuse it."""
    size = integer(given)
    if size is None:
        raise MetadataError(f"{real} {what} padded to {given!r:.60}", "an int", "pass a count, or None")
    least = max(real, 2) if what == "requests" else real
    if not least <= size <= limit:
        raise MetadataError(
            f"{real} {what} padded to {size}",
            f"{least} to {limit} {what}",
            "pad to a size between the real one and the builder's capacity",
        )
    return size
