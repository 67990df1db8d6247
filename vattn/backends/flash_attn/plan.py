"""How a paged call is handed to FlashAttention: rows as requests, splits, and a schedule made once a step.

The longest query is a number on the host, and inside a CUDA graph nothing on the host may depend on a step's lengths.
Where there are at most two rows a request, every row is therefore made a request of its own, with a query of one
token whatever the lengths are; more rows are passed as they are, with their number as the bound.

A schedule is int32 `[T + 2, 8]` (9 columns where attention is not causal), used as flat memory: the library's partition
of the work, then for rows as requests the request of each row, its keys, and its start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.backends.external_rows import Rows
from vattn.backends.flash_attn.calls import make_schedule
from vattn.backends.flash_attn.libraries import FlashCall
from vattn.config.attention import AttentionConfig
from vattn.config.device import multiprocessors
from vattn.ops.arguments import AttentionArgs, PlanArgs
from vattn.quantization.formats import MODEL_DTYPES

_COLUMNS = 8
_MAX_SPLITS = 32
_MAX_SPLIT_REQUESTS = 992
"""The library balances the splits of at most so many requests."""
_PARTIAL_BYTES = 128 << 20
"""Most memory for partial results of one call."""
_TILE_ROWS = 128
_LONGEST = 1 << 24
"""More tokens than a table has: a schedule takes its lengths from the device."""

_schedule_sizes: dict[tuple[object, ...], int] = {}


def takes_rows(config: AttentionConfig, num_tokens: int, num_reqs: int) -> bool:
    """Return whether the rows of such a step go as requests of their own.

    Not under batch invariance, where the neighbours of a request must not choose how it is computed, nor under a window
    or ALiBi to both sides, which count from the row's own position.
    """
    one_sided = config.causality == "causal" or (config.sliding_window is None and config.alibi == "none")
    return num_tokens <= 2 * num_reqs and one_sided and not config.batch_invariant


def write_rows(query_start_loc: Tensor, seq_lens: Tensor, config: AttentionConfig, to: Rows) -> None:
    """Fill the rows of a step as requests, by one kernel, without a sync."""
    from vattn.kernels.triton.attention import external_rows as kernels

    causal = config.causality == "causal" and config.attn_type != "encoder_decoder"
    kernels.write_rows(query_start_loc, seq_lens, *to, causal)


def paged_call(call: FlashCall, args: AttentionArgs, config: AttentionConfig, scheduled: bool) -> FlashCall:
    """Complete a call over a paged cache: its table, lengths, bounds, splits and schedule.

    Args:
        call: without them.
        scheduled: whether the library takes a schedule; `args.plan` may hold one.
    """
    from vattn.kernels.triton.attention.external_rows import table_of_rows

    num_tokens, (num_reqs, width) = args.query.shape[0], args.block_table.shape
    capacity = width * config.block_size
    schedule = next((plan for plan in args.plan if tuple(plan.shape) == plan_shape(config, num_tokens)), None)
    flat = None if schedule is None else schedule.view(-1)
    seq_lens, starts, request = args.seq_lens, args.query_start_loc, None
    if takes_rows(config, num_tokens, num_reqs):
        if flat is None:
            room = torch.empty(3 * num_tokens + 1, dtype=torch.int32, device=seq_lens.device)
            rows = _stored_rows(room, num_tokens)
            write_rows(starts, seq_lens, config, rows)
        else:
            rows = _stored_rows(flat, num_tokens)
        request, seq_lens, starts = rows
    table, seq_lens = table_of_rows(args.block_table, request, seq_lens, call.key.shape[0], config.block_size)
    call = call._replace(
        block_table=table,
        seq_lens=seq_lens,
        query_start_loc=starts,
        max_query_len=_longest_query(config, num_tokens, num_reqs),
        max_seq_len=capacity,
        num_splits=num_splits(config, num_tokens, num_reqs, args.query.device),
    )
    # The library forgets a window that is wider than the table, and then wants another schedule.
    if scheduled and flat is not None and max(call.window) < capacity - 1:
        size = _schedule_sizes.get(_size_key(call))
        return call if size is None else call._replace(schedule=flat[:size])
    return call


def plan_shape(config: AttentionConfig, num_tokens: int) -> tuple[int, ...]:
    """Return the shape of a step's schedule: room for four words of the library and three of vattn for each row.

    A step may make causal layers bidirectional: their schedule then has another shape, and is not used.
    """
    return num_tokens + 2, _COLUMNS + (config.causality != "causal")


def plan_key(name: str, config: AttentionConfig) -> str:
    """Return a key that is equal for layers that can share a schedule."""
    fields = (
        "num_heads", "num_kv_heads", "head_size", "dtype", "query_format", "causality", "sliding_window", "attn_type",
        "alibi",
    )  # fmt: skip
    parts = [f"{field}={getattr(config, field)}" for field in fields]
    return " ".join([name, *parts, f"capped={config.logits_soft_cap is not None}"])


def fill_plan(args: PlanArgs, config: AttentionConfig, window: tuple[int, int]) -> None:
    """Fill a step's schedule on the device."""
    num_tokens, num_reqs = args.schedule.shape[0] - 2, args.seq_lens.shape[0]
    flat, seq_lens, starts = args.schedule.view(-1), args.seq_lens, args.query_start_loc
    if takes_rows(config, num_tokens, num_reqs):
        rows = _stored_rows(flat, num_tokens)
        write_rows(starts, seq_lens, config, rows)
        seq_lens, starts = rows.seq_lens, rows.start_loc
    dtype = MODEL_DTYPES[config.dtype] if config.query_format == "none" else torch.float8_e4m3fn
    call = FlashCall(
        query=torch.empty(num_tokens, config.num_heads, config.head_size, dtype=dtype, device="meta"),
        key=flat,
        value=flat,
        query_start_loc=starts,
        seq_lens=seq_lens,
        max_query_len=_longest_query(config, num_tokens, num_reqs),
        max_seq_len=_LONGEST,
        scale=config.scale,
        causal=config.causality == "causal",
        window=window,
        soft_cap=config.logits_soft_cap or 0.0,
        num_splits=num_splits(config, num_tokens, num_reqs, flat.device),
    )
    made = make_schedule(call, config.block_size, config.num_kv_heads, config.head_size_v)
    if made.numel() <= _stored_at(flat, num_tokens):
        _schedule_sizes[_size_key(call)] = made.numel()
        flat[: made.numel()].copy_(made)


def num_splits(config: AttentionConfig, num_tokens: int, num_reqs: int, device: torch.device) -> int:
    """Return into how many parts a sequence may be split: a bound that depends only on the sizes of a step.

    The library splits each sequence by its length, up to this bound, and allocates memory for the bound.
    """
    rows = takes_rows(config, num_tokens, num_reqs)
    if config.batch_invariant or (num_tokens if rows else num_reqs) > _MAX_SPLIT_REQUESTS:
        return 1
    if not rows:
        tiles = config.num_kv_heads * -(-num_tokens * config.group_size // _TILE_ROWS)
        processors = multiprocessors(device)
        return 1 if tiles >= 0.8 * processors else min(_MAX_SPLITS, processors // tiles)
    partial = 4 * num_tokens * config.num_heads * config.head_size_v
    return max(1, min(_MAX_SPLITS, _PARTIAL_BYTES // partial))


def _longest_query(config: AttentionConfig, num_tokens: int, num_reqs: int) -> int:
    """Return the bound of the longest query; never so small that a few tokens more would choose another kernel."""
    return 1 if takes_rows(config, num_tokens, num_reqs) else max(num_tokens, _TILE_ROWS)


def _stored_at(flat: Tensor, num_tokens: int) -> int:
    # The library's part comes first, where its address is aligned: at most four words a request.
    return flat.numel() - 3 * num_tokens - 1


def _stored_rows(flat: Tensor, num_tokens: int) -> Rows:
    return Rows(*flat[_stored_at(flat, num_tokens) :].split([num_tokens, num_tokens, num_tokens + 1]))


def _size_key(call: FlashCall) -> tuple[object, ...]:
    assert call.seq_lens is not None
    return call.seq_lens.shape[0], call.max_query_len == 1, call.causal, call.window, call.num_splits
