"""Attention over every format and mask errs within a bound that its step size gives, and over a wrong layout does not.

The bound of a format is that of its rows (`tests.quantization.test_kv_formats.ERRORS`, each with its reason) for keys
and values
together: values err by their step, and where scores spread by about 1 the errors of keys move the weights by as much.
Rows differ in size by up to 64 times, and heads by ten, so that scales that are mixed up cannot pass for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from tests.quantization.test_kv_formats import ERRORS, error_of
from tests.support import Batch, make_config, random_paged_batch, relative_l2, storage_of, with_storage
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.cache.stored_rows import stored_views
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import KV_FORMATS

FORMATS = [name for name, fmt in KV_FORMATS.items() if fmt.quantised or fmt.packed]
QUERY_LENS, SEQ_LENS, BLOCK, HEADS, WIDTH = [9, 1, 24], [61, 40, 51], 8, 2, 64
SIZES = torch.tensor([4.0, 3.0, 5.0, 6.0, 0.5, 1.0, 0.0, 2.5])

SLACK = 1.1
"""Over the expected error: the scales of rows vary, and a row of attention averages over few large keys."""

MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causality": "bidirectional"},
    "flags": {"causality": "per_request"},
    "window": {"sliding_window": 13},
    "chunks": {"sliding_window": 16, "chunk_lookback": 1},
    "soft-cap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi": "linear"},
    "alibi-sqrt": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
    "tree": {"tree_bias": True},
    "ranges": {"mm_prefix": "full", "sliding_window": 9},
    "cross": {"attn_type": "encoder_decoder", "causality": "bidirectional"},
    "context": {"context_only": True},
}


def bound_of(name: str) -> float:
    """Return the bound of a format's keys and values together."""
    if not KV_FORMATS[name].packed:
        # Two mantissa bits instead of three: steps are twice as large.
        row = ERRORS["e4m3"] * (2 if name == "fp8_e5m2" else 1)
        return math.hypot(row, row) * SLACK
    return math.hypot(error_of(name, False), error_of(name, True)) * SLACK


def sized(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return slots `[n]`, and keys and values `[n, K, D]` of the batch in sizes of their own, for all requests."""
    slots, keys, values = [], [], []
    for request, seq_len in enumerate(SEQ_LENS):
        position = torch.arange(seq_len)
        slots.append(batch.args.block_table[request, position // BLOCK].long() * BLOCK + position % BLOCK)
        # The large rows of a head lie where another layout has those of the other head.
        size = 2.0 ** -SIZES[position % BLOCK][:, None, None] * torch.tensor([1.0, 0.1])[:, None]
        keys.append(batch.keys[request] * size)
        values.append(batch.values[request] * size)
    return torch.cat(slots), torch.cat(keys), torch.cat(values)


def stored(batch: Batch, rows: tuple[Tensor, Tensor, Tensor], config: AttentionConfig) -> AttentionArgs:
    """Return the batch's arguments over a cache that holds the rows."""
    slots, key, value = rows
    storage = torch.zeros(kv_cache_shape(config, batch.args.key_cache.shape[0]), dtype=kv_cache_dtype(config))
    scale = None
    if KV_FORMATS[config.kv_cache_dtype].quantised:
        sizes = torch.tensor([1.0, 0.1] if config.kv_scale == "head" else [1.0])
        scale = sizes * 4.5 / KV_FORMATS[config.kv_cache_dtype].max_value
    torch.ops.vattn.kv_cache_update(key, value, *op_views(storage, config), slots, scale, scale, config.encode())
    args = batch.args._replace(k_scale=scale, v_scale=scale, config=config.encode())
    return with_storage(args, storage)


def run(args: AttentionArgs) -> Tensor:
    output = torch.zeros_like(args.output)
    torch.ops.vattn.attention(*args._replace(output=output))
    return output


def mutants(args: AttentionArgs, config: AttentionConfig) -> dict[str, AttentionArgs]:
    """Return the same bytes as a wrong reader would take them."""

    def changed(change: Callable[[Tensor, Tensor | None], None], of: Sequence[int] = (0, 1)) -> AttentionArgs:
        storage = storage_of(args).clone()
        for rows in (stored_views(*op_views(storage, config), config)[index] for index in of):
            change(rows.codes.view(torch.uint8) if rows.codes.dtype != torch.uint8 else rows.codes, rows.scales)
        return with_storage(args, storage)

    def put(target: Tensor, source: Tensor) -> None:
        target.copy_(source.clone())

    def swap_nibbles(codes: Tensor, scales: Tensor | None) -> None:
        put(codes, (codes >> 4) | (codes << 4))

    other, blocks = (config.replace(kv_cache_layout="HND"), args.key_cache.shape[0])
    found = {
        "heads": changed(lambda codes, scales: put(codes, codes.flip(2))),
        "columns": changed(lambda codes, scales: put(codes, codes.roll(codes.shape[-1] // 3 + 1, -1))),
        "values of other tokens": changed(lambda codes, scales: put(codes, codes.roll(3, 1)), of=[1]),
        "layout": with_storage(
            args._replace(config=other.encode()), storage_of(args).view(kv_cache_shape(other, blocks))
        ),
    }
    fmt = KV_FORMATS[config.kv_cache_dtype]
    if all(part.scale_dtype is not None for part in fmt.parts) if fmt.packed else False:
        found["scales of other tokens"] = changed(lambda codes, scales: put(scales, scales.flip(1)))
        found["scales of other heads"] = changed(lambda codes, scales: put(scales, scales.flip(2)))
    if fmt.packed and all(part.bits == 4 for part in fmt.parts):
        found["nibbles"] = changed(swap_nibbles)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_bound_holds_and_mutants_miss_it(name: str) -> None:
    """Within the bound under every mask; under every third one, misread bytes are outside of three times the bound."""
    bound, worst = bound_of(name), {}
    for mask, changes in MASKS.items():
        shape = {
            "num_heads": 4,
            "num_kv_heads": HEADS,
            "head_size": WIDTH,
            "block_size": BLOCK,
            "backend": "TORCH_SDPA",
        }
        plain = make_config(**shape, **changes)
        batch = random_paged_batch(plain, QUERY_LENS, SEQ_LENS, poison=False)
        rows = sized(batch)
        # A scale for every head would make the blocks' scales of NVFP4 alike.
        kind = "none" if not KV_FORMATS[name].quantised else "tensor" if KV_FORMATS[name].packed else "head"
        config = plain.replace(kv_cache_dtype=name, kv_scale=kind)
        expected, args = run(stored(batch, rows, plain)), stored(batch, rows, config)
        assert relative_l2(run(args), expected) < bound, mask
        if list(MASKS).index(mask) % 3 != FORMATS.index(name) % 3:
            continue
        for wrong, mutant in mutants(args, config).items():
            worst[mask, wrong] = relative_l2(run(mutant), expected) / bound
    low = min(worst, key=worst.__getitem__)
    assert worst[low] > 3, f"{low}: {worst[low]:.2f} times the bound"
