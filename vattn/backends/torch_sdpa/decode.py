"""Steps of one token a request on a CPU, where the host may read lengths: few operations, since in a small layer each
of them costs as much as its work."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vattn.cache.layout import PackedRows
from vattn.cache.stored_rows import decode_stored
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.codecs import load_query


def decode(stored: PackedRows, config: AttentionConfig, of_values: bool, scale: Tensor | None) -> Tensor:
    """Return fp32 `[..., K, D]` of contiguous rows, rotated where the format rotates; e4m3 by table on CPU."""
    if config.kv_cache_dtype != "fp8_e4m3" or stored.codes.is_cuda or scale is None:
        return decode_stored(stored, config, of_values, scale, rotated=True)
    # Four times as fast as the conversion, which is not vectorised. One scale is folded into the table.
    codes = torch.arange(256, dtype=torch.uint8, device=stored.codes.device).view(torch.float8_e4m3fn).float()
    per_tensor = scale.numel() == 1
    table = codes * scale.view(1) if per_tensor else codes
    values = table.index_select(0, stored.codes.view(torch.uint8).reshape(-1).int()).view(stored.codes.shape)
    return values if per_tensor else values * scale.view(-1, 1)


def attend_decodes(args: AttentionArgs, config: AttentionConfig, keys: Tensor, values: Tensor) -> bool:
    """Write the output of a step in which the first requests have one row each, and the others none.

    Args:
        config: one that `scaled_dot_product_attention` can express, with a cache and an output that are not packed.
        keys, values: as they are stored, `[num_blocks, block_size, K, D or V]`.

    Returns:
        Whether it did. Nothing is written for another step, for lengths and blocks that do not exist, and where a
        row of the result has zeros: torch's kernel gives them for keys of NaN.
    """
    offsets, lengths, query = args.query_start_loc.tolist(), args.seq_lens.tolist(), args.query
    count = offsets[-1]
    if not 0 < count <= query.shape[0] or offsets != [*range(count), *[count] * (len(offsets) - count)]:
        return False
    shortest, longest = min(lengths[:count]), max(lengths[:count])
    if shortest < 1 or longest > args.block_table.shape[1] * config.block_size:
        return False
    # Views cost as much as work in a small layer.
    table, output = args.block_table, args.output
    if count < query.shape[0]:
        query, output = query[:count], output[:count]
    if count < table.shape[0]:
        table = table[:count]
    try:
        if shortest == longest:
            rows, visible = _equal(table, longest, config, keys, values), None
        else:
            rows, visible = _ragged(table, args.seq_lens[:count, None], config, keys, values)
    except IndexError:  # A block that the cache does not have.
        return False
    key, value = (
        decode(PackedRows(stored, None), config, of_values, scale).transpose(1, 2)
        for stored, of_values, scale in zip(rows, (False, True), (args.k_scale, args.v_scale), strict=True)
    )
    out = scaled_dot_product_attention(
        load_query(query, args.q_scale, config.num_kv_heads, config.query_load).unsqueeze(2),
        key,
        value,
        attn_mask=visible,
        scale=config.scale,
        enable_gqa=config.group_size > 1,
    ).squeeze(2)
    if not bool(out.select(-1, 0).all()):
        return False
    output.copy_(out)
    if count < args.query.shape[0]:
        args.output[count:].zero_()
    return True


def _equal(table: Tensor, length: int, config: AttentionConfig, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the visible keys and values `[B, L, K, ...]` of requests of one length.

    Raises:
        IndexError: a block that does not exist.
    """
    size = config.block_size
    first = 0 if config.sliding_window is None else max(0, length - config.sliding_window)
    begin = first // size
    blocks = table[:, begin : (length + size - 1) // size].reshape(-1)

    def rows(stored: Tensor) -> Tensor:
        found = stored.index_select(0, blocks).view(table.shape[0], -1, *stored.shape[2:])
        start, end = first - begin * size, length - begin * size
        return found if not start and end == found.shape[1] else found[:, start:end]

    return rows(keys), rows(values)


def _ragged(
    table: Tensor, lengths: Tensor, config: AttentionConfig, keys: Tensor, values: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return keys and values `[B, L, K, ...]` of requests of any length, and which of them are visible `[B, 1, 1, L]`.

    The last key of a request is repeated where others have more: hidden garbage could be NaN.

    Raises:
        IndexError: a block that does not exist.
    """
    size, counts = config.block_size, lengths
    if config.sliding_window is not None:
        counts = lengths.clamp(max=config.sliding_window)
    place = torch.arange(int(counts.max()))
    position = torch.minimum(place + (lengths - counts), lengths - 1).long()
    # int64: garbage times the block size must not come out as a block.
    blocks, offsets = table.gather(1, position // size).long(), position % size
    slots = (blocks * size + offsets).view(-1)

    def rows(stored: Tensor) -> Tensor:
        if stored.stride(0) == size * stored.stride(1):
            return stored.flatten(0, 1).index_select(0, slots).view(*position.shape, *stored.shape[2:])
        if bool((blocks < 0).any()):
            raise IndexError
        return stored[blocks, offsets]

    return (rows(keys), rows(values)), (place < counts)[:, None, None]
