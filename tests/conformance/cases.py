"""Turn a request into the arguments of an op."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.conformance.rows import Row
from tests.support import (
    Batch,
    make_config,
    poisoned_empty,
    random_packed_batch,
    random_paged_batch,
    random_scale,
    storage_of,
    with_storage,
)
from vattn.backends import selector
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES


def batch_of_row(row: Row, backend: str, *, device: str = "cpu", seed: int = 0) -> Batch:
    """Return a random batch for a row on a backend."""
    config = make_config(**fitted({"block_size": 8, **row.changes, "backend": backend}, row.changes))
    return make_batch(config, row.lens, row.padding, row.table, device=device, seed=seed)


def fitted(values: dict[str, Any], fixed: Collection[str] = ()) -> dict[str, Any]:
    """Return arguments of `make_config` with model dtype, head and block sizes that the named backend runs.

    A row is about what it names: `fixed` fields stay, others become the smallest the backend has, not below what they
    were.
    """
    can = selector.get_backend(values["backend"]).capabilities
    values = dict(values)
    packed = KV_FORMATS[values.get("kv_cache_dtype", "float32")].packed
    if "head_pairs" in can.required_features and not packed and not {"kv_cache_layout", "head_size_v"} & set(values):
        values.setdefault("head_pairs", "odd" if values.get("block_size", 16) else "none")
    if "dtype" not in fixed and values.get("dtype", "float32") not in can.dtypes:
        values["dtype"] = can.dtypes[-1]
    sizes = {"head_size": (16, can.head_sizes), "head_size_v": (16, can.head_sizes), "block_size": (8, can.block_sizes)}
    for name, (default, allowed) in sizes.items():
        wanted = values.get(name, default)
        if name not in fixed and (name in values or name == "head_size") and wanted and wanted not in allowed:
            values[name] = next((size for size in range(wanted, 1025) if size in allowed), wanted)
    if values.get("head_pairs", "none") != "none":
        values["head_size_v"] = 2 * values.get("head_size", 16)
    return values


def make_batch(
    config: AttentionConfig,
    lens: Sequence[tuple[int, int]],
    padding: tuple[int, int] = (0, 0),
    table: str = "fit",
    *,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Return a random batch, full of garbage wherever garbage is allowed; the arguments are those of `Row`.

    A backend that is not `garbage_safe` gets finite values everywhere and no table that is broken or too narrow.
    """
    can = selector.get_backend(config.backend).capabilities
    safe = can.garbage_safe
    query_lens, seq_lens = [q for q, _ in lens], [s for _, s in lens]
    common = {"seed": seed, "device": device, "num_padding_tokens": padding[0], "num_padding_reqs": padding[1]}
    if config.block_size == 0:
        batch = _with_reciprocal(random_packed_batch(config, query_lens, seq_lens, **common))
        return batch if safe else finite(batch)
    width = max(1, max(seq_lens) // config.block_size - 1) if table == "narrow" and safe else None
    batch = random_paged_batch(config, query_lens, seq_lens, table_width=width, **common)
    if can.tree_masks_only and batch.args.bias is not None:
        batch.args.bias.masked_fill_(batch.args.bias.isfinite(), 0)
    if table == "broken" and safe:
        break_table(batch, seed)
    batch = _with_reciprocal(batch)
    return batch if safe else finite(batch)


def _with_reciprocal(batch: Batch) -> Batch:
    """Give a static scale as its reciprocal where the config multiplies by it."""
    if batch.config.output_arithmetic == "multiply" and batch.args.output_scale is not None:
        batch.args = batch.args._replace(output_scale=batch.args.output_scale.reciprocal())
    return batch


def finite(batch: Batch) -> Batch:
    """Replace NaN and infinities in what a binary may read beyond a request."""

    def cleaned(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.uint8:
            values = tensor.view(torch.float8_e4m3fn).float()
            return torch.where(values.isnan(), 0, values).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.nan_to_num(tensor.float(), 0, 0, 0).to(tensor.dtype)

    args = batch.args
    if isinstance(args, AttentionArgs):
        batch.args = with_storage(args, cleaned(storage_of(args)))
    else:
        batch.args = args._replace(key=cleaned(args.key), value=cleaned(args.value))
    return batch


def break_table(batch: Batch, seed: int) -> None:
    """Put ids outside the cache into a third of the table's entries, used ones included: their keys do not exist.

    A third of the tree ids, if there are any, become ids of no tree.
    """
    rng = torch.Generator().manual_seed(seed)
    table, tree_id = batch.args.block_table, batch.args.tree_id
    num_blocks = batch.args.key_cache.shape[0]
    _overwrite_a_third(table, [-1, num_blocks, 2**31 - 1, -(2**31)], rng)
    if tree_id is not None:
        _overwrite_a_third(tree_id, [-2, 2, 2**31 - 1, -(2**31)], rng)


def _overwrite_a_third(tensor: Tensor, choices: list[int], rng: torch.Generator) -> None:
    chosen = torch.rand(tensor.shape, generator=rng) < 0.34
    values = torch.tensor(choices)[torch.randint(len(choices), tensor.shape, generator=rng)].int()
    tensor.copy_(torch.where(chosen, values, tensor.cpu()))


def make_cache_update(config: AttentionConfig, *, device: str = "cpu", seed: int = 0) -> CacheUpdateArgs:
    """Return an update with slots in and out of range over a cache of garbage, and values that saturate FP8."""
    rng = torch.Generator().manual_seed(seed)
    num_tokens, heads, dtype = 19, config.num_kv_heads, MODEL_DTYPES[config.dtype]
    num_blocks = max(4, -(-24 // config.block_size))
    slots = torch.randperm(num_blocks * config.block_size, generator=rng)[:num_tokens]
    outside = torch.tensor([-1, -7, num_blocks * config.block_size, 2**62, -(2**62)])
    slots[torch.randperm(num_tokens, generator=rng)[: len(outside)]] = outside
    scales = [random_scale(config.kv_scale, heads, 4.0, rng) for _ in range(2)]

    def rows(width: int) -> Tensor:
        values = torch.randn(num_tokens, heads, width, generator=rng) * 3
        values[0, 0, 0], values[1, 0, 1], values[2, 0, 2] = 6e4, -torch.inf, torch.nan
        # Strides as of a slice of one projection's result.
        return torch.cat([values, values], dim=1).to(dtype).to(device)[:, :heads]

    storage = poisoned_empty(kv_cache_shape(config, num_blocks), kv_cache_dtype(config), device)
    key_cache, value_cache = op_views(storage, config)
    return CacheUpdateArgs(
        key=rows(config.head_size),
        value=rows(config.head_size_v),
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slots.to(device),
        k_scale=None if scales[0] is None else scales[0].to(device),
        v_scale=None if scales[1] is None else scales[1].to(device),
        config=config.encode(),
    )
