"""One query row for each row of a batch over keys and values `[B, heads, L, D]` as they lie: one launch, and little
work on the host.

Programs share the keys of a head where the card has room. The last one to end merges what all of them found, and sets
its counter back, so that partial results need no second launch and counters no clearing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from vattn.config.device import multiprocessors
from vattn.kernels.triton.common.tiles import next_power_of_two

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

TILE = 64
"""Keys that a program reads at a time."""

MOST_SPLITS, LEAST_KEYS, PROGRAMS = 32, 128, 2
"""Programs that share a head; keys of one of them; programs of a multiprocessor for which heads are shared."""

MOST_WIDTH, MOST_GROUP = 256, 16
"""Columns of a head, and query heads that share one of keys."""


@triton.jit(do_not_specialize=["num_keys", "oldest", "share", "splits"])
def dense_decode_kernel(
    query, key, value, first, sinks, output, partial, counters, num_keys, oldest, share, splits, scale, soft_cap,
    query_row, query_head, key_row, key_head, key_token, value_row, value_head, value_token, first_row,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, SOFT_CAP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_V: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """See `decode`. Grid: KV heads, rows of the batch, splits of the keys."""
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    member, column, column_v = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, COLUMNS_V)
    exists = member < GROUP
    heads = head * GROUP + member
    q = tl.load(
        query + row * query_row + heads[:, None] * query_head + column[None, :],
        mask=exists[:, None] & (column < WIDTH)[None, :], other=0)  # fmt: skip
    begin = tl.maximum(tl.maximum(tl.load(first + row * first_row), oldest), 0)
    low = begin + split * share
    high = tl.minimum(low + share, num_keys)
    keys = key + row * key_row + head.to(tl.int64) * key_head
    values = value + row * value_row + head.to(tl.int64) * value_head
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, COLUMNS_V], tl.float32)
    for start in range(low, high, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < high
        k = tl.load(
            keys + place.to(tl.int64)[:, None] * key_token + column[None, :],
            mask=inside[:, None] & (column < WIDTH)[None, :], other=0)  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFT_CAP:
            scores = soft_cap * (1 - 2 / (1 + tl.exp2(scores)))
        scores = tl.where(inside[None, :], scores, -float("inf"))
        most = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - most[:, None])
        shrink = tl.exp2(largest - most)
        v = tl.load(
            values + place.to(tl.int64)[:, None] * value_token + column_v[None, :],
            mask=inside[:, None] & (column_v < WIDTH_V)[None, :], other=0)  # fmt: skip
        total = total * shrink + tl.sum(weights, axis=1)
        found = found * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = most
    last = splits == 1
    if splits > 1:
        slot = ((row * NUM_KV_HEADS + head) * splits + split) * (ROWS * (COLUMNS_V + 2))
        stats, sums = (
            partial + slot + member,
            partial + slot + 2 * ROWS + member[:, None] * COLUMNS_V + column_v[None, :],
        )
        tl.store(stats, largest)
        tl.store(stats + ROWS, total)
        tl.store(sums, found)
        tl.debug_barrier()
        counter = counters + row * NUM_KV_HEADS + head
        last = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
        if last:
            tl.debug_barrier()
            tl.store(counter, 0)
            part = tl.arange(0, SPLITS)
            base = partial + (row * NUM_KV_HEADS + head) * splits * (ROWS * (COLUMNS_V + 2))
            place = base + part[:, None] * (ROWS * (COLUMNS_V + 2)) + member[None, :]
            maxima = tl.load(place, mask=(part < splits)[:, None], other=-float("inf"), cache_modifier=".cg")
            totals = tl.load(place + ROWS, mask=(part < splits)[:, None], other=0.0, cache_modifier=".cg")
            largest = tl.max(maxima, axis=0)
            # A row that sees no key has no maximum.
            finite = tl.where(largest == -float("inf"), 0.0, largest)
            total = tl.sum(totals * tl.exp2(maxima - finite[None, :]), axis=0)
            found = tl.zeros([ROWS, COLUMNS_V], tl.float32)
            for other in range(splits):
                stats = base + other * (ROWS * (COLUMNS_V + 2)) + member
                sums = base + other * (ROWS * (COLUMNS_V + 2)) + 2 * ROWS
                sums = sums + member[:, None] * COLUMNS_V + column_v[None, :]
                shrink = tl.exp2(tl.load(stats, cache_modifier=".cg") - finite)
                found += tl.load(sums, cache_modifier=".cg") * shrink[:, None]
    if last:
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=exists, other=-float("inf")).to(tl.float32) * LOG2E
            most = tl.maximum(largest, sink)
            finite = tl.where(most == -float("inf"), 0.0, most)
            found *= tl.exp2(largest - finite)[:, None]
            total = total * tl.exp2(largest - finite) + tl.exp2(sink - finite)
        result = found / tl.where(total > 0, total, 1.0)[:, None]
        target = output + (row * (NUM_KV_HEADS * GROUP) + heads[:, None]) * WIDTH_V + column_v[None, :]
        tl.store(target, result.to(output.dtype.element_ty), mask=exists[:, None] & (column_v < WIDTH_V)[None, :])


class _Call(NamedTuple):
    """A call of `decode`, for those after it that differ in nothing but addresses.

    Attributes:
        layout: what `_layout` returned.
        run: launches the kernel with addresses in place of tensors.
        shape: of the result.
        room: partial results and counters.
        rest: arguments after the tensors.
    """

    layout: tuple[Any, ...]
    run: Any
    shape: tuple[int, ...]
    room: tuple[Tensor, Tensor]
    rest: tuple[Any, ...]


_launchers: dict[tuple[Any, ...], Any] = {}
"""What launches the kernel with addresses in place of tensors, by all that it is compiled for and the grid."""

_calls: dict[int | None, _Call] = {}
"""The last call of each window: layers of a step mostly differ in addresses alone."""

_scratch: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
"""Partial results and counters of a stream, which runs one launch after the other."""


def accepts(query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> bool:
    """Return whether `decode` takes a call: 16-bit tensors on the current GPU, and strides that 16 divides."""
    return _is_ready(query, key, value, first) and _fits(query, key, value)


def _is_ready(query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> bool:
    """Return whether a call may be launched now, whatever the layout of its tensors is."""
    device = query.get_device()
    if not (type(query) is type(key) is type(value) is Tensor) or device < 0 or device != _device():
        return False
    if first.get_device() != device or torch._C._len_torch_dispatch_stack() or _is_capturing():
        return False
    return not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    heads, width, width_v = query.shape[1], query.shape[3], value.shape[3]
    if not (query.dtype is key.dtype is value.dtype and query.dtype in _DTYPES):
        return False
    if width > MOST_WIDTH or width_v > MOST_WIDTH or heads > MOST_GROUP * key.shape[1] or not key.shape[2]:
        return False
    (q0, q1, _, q3), (k0, k1, k2, k3), (v0, v1, v2, v3) = query.stride(), key.stride(), value.stride()
    if not (q3 == k3 == v3 == 1) or max(q0, q1, k0, k1, k2, v0, v1, v2) >= 1 << 31:
        return False
    return not (width | width_v | q0 | q1 | k0 | k1 | k2 | v0 | v1 | v2) & 15


_DTYPES = frozenset({torch.float16, torch.bfloat16})
# What torch.cuda has around these takes longer than they do.
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def try_decode(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float, window: int | None, soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Return what `decode` returns, `None` for a call that it does not take."""
    if not _is_ready(query, key, value, first):
        return None
    call = _calls.get(window)
    if call is None or call.layout != _layout(query, key, value, first, scale, soft_cap, sinks):
        return decode(query, key, value, first, scale, window, soft_cap, sinks) if _fits(query, key, value) else None
    output = query.new_empty(call.shape)
    _launch(call, query, key, value, first, sinks, output)
    return output


def _layout(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> tuple[Any, ...]:
    """Return all that a call hangs on but its window and addresses."""
    device = query.get_device()
    return (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), first.shape[0],
        first.stride(0), query.dtype, key.dtype, value.dtype, scale, soft_cap,
        None if sinks is None else sinks.data_ptr() & 15, device, _stream(device) if device >= 0 else 0,
    )  # fmt: skip


def _launch(
    call: _Call, query: Tensor, key: Tensor, value: Tensor, first: Tensor, sinks: Tensor | None, output: Tensor
) -> None:
    partial, counters = call.room
    call.run(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), first.data_ptr(),
        None if sinks is None else sinks.data_ptr(), output.data_ptr(), partial.data_ptr(), counters.data_ptr(),
        *call.rest, stream=call.layout[-1],
    )  # fmt: skip


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention `[B, 1, heads, D_v]` of a query row each to the keys from its first one on.

    Args:
        query: `[B, heads, 1, D]`.
        key, value: `[B, num_kv_heads, L, D]` and `[..., D_v]`.
        first: int32, its first dimension `[B]` or 1 row for all: the first visible key of each row.
        window: only so many last keys are visible; `None` for all.
        soft_cap: of the scores, `None` for none.
        sinks: `[heads]` in the dtype of the query.
    """
    (batch, heads, _, width), (_, num_kv_heads, num_keys, width_v) = query.shape, value.shape
    oldest = 0 if window is None else max(0, num_keys - window)
    cap = soft_cap or None
    factor = scale * LOG2E.value if cap is None else 2 * scale * LOG2E.value / cap
    output = query.new_empty((batch, 1, heads, width_v))
    group = heads // num_kv_heads
    rows, columns = max(16, next_power_of_two(group)), max(16, next_power_of_two(width_v))
    splits, share = _cut(num_keys - oldest, batch * num_kv_heads, query.device)
    room = _room(query, batch * num_kv_heads * splits * rows * (columns + 2), batch * num_kv_heads)
    (query_row, query_head, *_), (key_row, key_head, key_token, _) = query.stride(), key.stride()
    value_row, value_head, value_token, _ = value.stride()
    first_row = first.stride(0) if first.shape[0] > 1 else 0
    numbers = (
        num_keys, oldest, share, splits, factor, 1.0 if cap is None else cap * LOG2E.value, query_row, query_head,
        key_row, key_head, key_token, value_row, value_head, value_token, first_row,
    )  # fmt: skip
    options = {
        "GROUP": group, "NUM_KV_HEADS": num_kv_heads, "WIDTH": width, "WIDTH_V": width_v, "SOFT_CAP": cap is not None,
        "ROWS": rows, "COLUMNS": max(16, next_power_of_two(width)), "COLUMNS_V": columns,
        "TILE": TILE if max(width, width_v) <= 128 else TILE // 2, "SPLITS": MOST_SPLITS,
    }  # fmt: skip
    grid, layout = (num_kv_heads, batch, splits), _layout(query, key, value, first, scale, soft_cap, sinks)
    # Layouts end with what the sinks' address is a multiple of, the device and the stream.
    kind = query.dtype, group, width, width_v, cap is None, first_row, *layout[-3:-1], grid
    run = _launchers.get(kind)
    if run is not None:
        call = _calls[window] = _Call(layout, run, tuple(output.shape), room, (*numbers, *options.values()))
        _launch(call, query, key, value, first, sinks, output)
        return output
    tensors = query, key, value, first, sinks, output, *room
    compiled = dense_decode_kernel[grid](*tensors, *numbers, **options, num_warps=4, num_stages=3)
    if isinstance(dense_decode_kernel, JITFunction) and hasattr(compiled, "__getitem__"):
        _launchers[kind] = compiled[grid]
    return output


def _cut(num_keys: int, heads: int, device: torch.device) -> tuple[int, int]:
    """Return how many programs share the keys of a head, and how many keys of them each gets."""
    processors = multiprocessors(device) if device.type == "cuda" else 8
    splits = max(1, min(MOST_SPLITS, PROGRAMS * processors // heads, -(-num_keys // LEAST_KEYS)))
    share = -(-num_keys // (splits * TILE)) * TILE
    return max(1, -(-num_keys // share)), share


def _room(query: Tensor, partial: int, counters: int) -> tuple[Tensor, Tensor]:
    """Return fp32 room for partial results and int32 counters at 0, of the current stream."""
    device = query.get_device()
    key = device, _stream(device) if query.is_cuda else 0
    found = _scratch.get(key)
    if found is None or found[0].numel() < partial or found[1].numel() < counters:
        before = (0, 0) if found is None else (found[0].numel(), found[1].numel())
        sizes = [next_power_of_two(max(size, old)) for size, old in zip((partial, counters), before, strict=True)]
        with torch.inference_mode(False):
            found = _scratch[key] = (
                torch.empty(sizes[0], dtype=torch.float32, device=query.device),
                torch.zeros(sizes[1], dtype=torch.int32, device=query.device),
            )
    return found
