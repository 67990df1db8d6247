"""Random calls of `vattn::rope_attention` over a poisoned cache, and the two calls that each stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.rope_cases import MAX_POSITIONS, make_call
from tests.support import Batch, poisoned_empty, random_paged_batch
from vattn.config import AttentionConfig
from vattn.formats import MODEL_DTYPES
from vattn.ops.arguments import AttentionArgs, RopeAttentionArgs, RopeUpdateArgs
from vattn.ops.cache_layout import key_value_views
from vattn.rope_config import RopeConfig


def make_step(
    config: AttentionConfig,
    rope: RopeConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    padding: int = 0,
    written: Sequence[bool] | None = None,
    device: str = "cpu",
    seed: int = 0,
    **changes: Any,
) -> RopeAttentionArgs:
    """Return a step whose new keys are in no cache yet: their slots hold NaN.

    Args:
        padding: requests more than real ones; rows are as many as requests.
        written: which tokens have a slot, by default all; the key and value of the others lie in the cache already.
        changes: for `make_call`.
    """
    rows = len(query_lens) + padding
    batch = random_paged_batch(
        config, query_lens, seq_lens, num_padding_reqs=padding, num_padding_tokens=rows - sum(query_lens), seed=seed
    )
    update = make_call(config, rope, num_tokens=rows, seed=seed, **changes)
    args: AttentionArgs = batch.args
    slots = _slots(batch, rows, written or [True] * rows)
    blank(args.kv_cache, config, slots)
    given: dict[str, Any] = {**update._asdict(), **args._asdict(), "slot_mapping": slots, "rope": rope.encode()}
    # Columns grow by 3 standard deviations in `make_call`; behind a rotation by random factors scores would be huge.
    for name in ("query", "key", "value"):
        given[name] = getattr(update, name) * 0.25
    given["q_factor"] = args.q_scale if args.q_scale is None or rope.query_arithmetic == "divide" else 1 / args.q_scale
    fields = {name: given[name] for name in RopeAttentionArgs._fields}
    assert MAX_POSITIONS > 0
    return moved(RopeAttentionArgs(**fields), device)


def moved(args: RopeAttentionArgs, device: str) -> RopeAttentionArgs:
    """Return a copy of a step on a device."""
    copies: Any = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in args]
    return RopeAttentionArgs(*copies)


def _slots(batch: Batch, rows: int, written: Sequence[bool]) -> Tensor:
    slots, size = torch.full((rows,), -1, dtype=torch.int64), batch.config.block_size
    row = 0
    for request, (count, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        for position in range(length - count, length):
            if written[row] and position >= 0:
                slots[row] = int(batch.args.block_table[request, position // size]) * size + position % size
            row += 1
    return slots


def blank(cache: Tensor, config: AttentionConfig, slots: Tensor) -> None:
    """Fill slots with NaN."""
    for view in key_value_views(cache, config):
        for slot in slots[slots >= 0].tolist():
            view[slot // config.block_size, slot % config.block_size].view(torch.uint8).fill_(0xFF)


def two_calls(args: RopeAttentionArgs, config: AttentionConfig) -> tuple[RopeUpdateArgs, AttentionArgs]:
    """Return the calls that a copy of a step stands for, with outputs of their own."""
    copied = moved(args, args.query.device.type)
    dtype = MODEL_DTYPES[config.dtype] if config.query_format == "none" else torch.float8_e4m3fn
    return copied.parts(poisoned_empty(args.query.shape, dtype, args.query.device))
