"""TORCH_SDPA: paged attention in plain torch, on every device; the CPU default.

Keys and values are gathered through the block table and decoded; in rotated formats they stay rotated, and query and
result are rotated instead (`vattn.quantization.packed.hadamard`). Plain requests (causal or bidirectional, maybe with a
window) go through `scaled_dot_product_attention`: single-token requests together in one call, others in chunks
of query rows. All other features are math written out, in chunks too, so that memory stays bounded. Everything is
computed in fp32, as precisely as `torch.set_float32_matmul_precision` asks (by default exactly), whatever autocast
says.

Lengths are read on the host: free on CPU, one sync a call on CUDA, hence no CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vattn.backends.base import PACKED_DCP, Backend, Capabilities, refuse_capture
from vattn.backends.torch_sdpa.chunked import Args, Chunk, Request, chunks
from vattn.backends.torch_sdpa.decode import attend_decodes, decode
from vattn.cache.layout import PackedRows
from vattn.cache.stored_rows import stored_views
from vattn.config.attention import AttentionConfig
from vattn.config.device import BLOCK_SIZES, Sizes
from vattn.config.features import FEATURES
from vattn.config.rope import RopeConfig
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, RopeUpdateArgs, VarlenAttentionArgs
from vattn.ops.reference import attention as reference
from vattn.ops.reference import rope as rope_reference
from vattn.ops.reference.mask import visible_at
from vattn.quantization import codecs as quantization
from vattn.quantization import packed as kv_formats
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS, QUERY_FORMATS

Read = Callable[[Request, int, int], tuple[Tensor, Tensor, "Tensor | None"]]
"""Returns the keys `[L, K, D]` and values `[L, K, V]` that are held at `[first, end)` of a request in fp32, and bool
`[L]`: which of them exist (`None`: all)."""


class TorchSDPABackend(Backend):
    """Run every feature of decoder attention with only torch."""

    name = "TORCH_SDPA"
    capabilities = Capabilities(
        devices=("cpu", "cuda"),
        dtypes=tuple(MODEL_DTYPES),
        kv_cache_dtypes=tuple(KV_FORMATS),
        query_formats=QUERY_FORMATS,
        output_formats=tuple(OUTPUT_FORMATS),
        attn_types=("decoder", "encoder", "encoder_only", "encoder_decoder"),
        head_sizes=Sizes(8, 8, 1024),
        block_sizes=BLOCK_SIZES,
        features=frozenset(FEATURES) - {"batch_invariant"},
        exclusions=(PACKED_DCP,),
        query_loads=("plain", "divide", "multiply"),
        output_variants=True,
        rope_update=True,
        cuda_graphs="never",
    )

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        refuse_capture(args.query, "TORCH_SDPA", "it reads lengths on the host", "pass attn_backend='TRITON_ATTN'")
        keys, values = stored_views(args.key_cache, args.value_cache, config)
        if args.query.device.type == "cpu" and config.output_format == "none" and args.value_cache is not None:
            with _without_autocast("cpu"):
                if _is_plain(config) and attend_decodes(args, config, keys.codes, values.codes):
                    return
        capacity = args.block_table.shape[1] * config.block_size if keys.codes.shape[0] else 0
        spans = reference.ranges(args.query_start_loc, args.query.shape[0])
        lengths = reference.held_lengths(None, args.seq_lens, None)
        decodes = _even_decodes(spans, lengths, capacity) if _is_plain(config) else []
        requests: list[Request] = []
        if len(decodes) < len(lengths):
            held = reference.held_lengths(config.dcp_shard, args.seq_lens, args.local_seq_lens)
            readable = [min(length, capacity) for length in held]
            keys_of = lengths if config.context_parallel else readable
            requests = list(_requests(args, config, spans, lengths, keys_of, readable, set(decodes)))
        result = _start_result(args, requests, config)
        with _without_autocast(args.query.device.type):
            if decodes:
                longest = max([lengths[request] for request in decodes])
                rows = [spans[request][0] for request in decodes]
                _plain_decodes(args, config, decodes, rows, longest, keys, values, result)
            if requests:
                _run(args, config, requests, _paged_reader(args, config, keys, values), result)
            _quantise(result, args, config)

    def varlen_attention(self, args: VarlenAttentionArgs, config: AttentionConfig) -> None:
        refuse_capture(args.query, "TORCH_SDPA", "it reads lengths on the host", "pass attn_backend='TRITON_ATTN'")
        of_keys = reference.ranges(args.kv_start_loc, args.key.shape[0])
        lengths = [end - start for start, end in of_keys]
        spans = reference.ranges(args.query_start_loc, args.query.shape[0])
        requests = list(_requests(args, config, spans, lengths, lengths, lengths))

        def read(request: Request, first: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
            start, _ = of_keys[request.index]
            rows = slice(start + first, start + end)
            key = decode(PackedRows(args.key[rows], None), config, False, args.k_scale)
            return key, decode(PackedRows(args.value[rows], None), config, True, args.v_scale), None

        with _without_autocast(args.query.device.type):
            result = _start_result(args, requests, config)
            _run(args, config, requests, read, result)
            _quantise(result, args, config)

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        """Run `vattn::kv_cache_update`, without a sync. Which of two tokens with the same slot wins is undefined."""
        reference.kv_cache_update(args, config)

    def rope_kv_cache_update(self, args: RopeUpdateArgs, rope: RopeConfig, config: AttentionConfig) -> None:
        """Run `vattn::rope_kv_cache_update`, without a sync."""
        with _without_autocast(args.query.device.type):
            self.kv_cache_update(rope_reference.rotate_all(args, rope, config), config)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round fp32 math to a narrower dtype."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _load_query(rows: Tensor, args: Args, config: AttentionConfig) -> Tensor:
    """Return the fp32 values of query rows `[n, H, D]`, in the basis in which keys are stored."""
    query = quantization.load_query(rows, args.q_scale, config.num_kv_heads, config.query_load)
    return kv_formats.rotate_query(query, config.kv_cache_dtype)


def _is_plain(config: AttentionConfig) -> bool:
    """Whether `scaled_dot_product_attention` can express the request with a boolean mask."""
    return not (
        # Some of its kernels mask before they scale: -inf times a scale that is not positive is no mask.
        config.scale <= 0
        or config.lse
        or config.sinks
        or config.tree_bias
        or config.logits_soft_cap is not None
        or config.chunk_lookback is not None
        or config.alibi != "none"
        or config.mm_prefix != "none"
        or config.context_parallel
        or config.context_only
    )


def _even_decodes(spans: list[tuple[int, int]], lengths: list[int], capacity: int) -> list[int]:
    """Return the requests that are readable decodes, if padding them to the longest wastes less than it saves."""
    rows = [end - start for start, end in spans]
    found = [request for request, length in enumerate(lengths) if rows[request] == 1 and 0 < length <= capacity]
    keys = [lengths[request] for request in found]
    return found if len(found) > 1 and max(keys) * len(found) <= 4 * sum(keys) else []


def _requests(
    args: Args,
    config: AttentionConfig,
    spans: list[tuple[int, int]],
    seq_lens: list[int],
    num_keys: list[int],
    held: list[int],
    done: Container[int] = (),
) -> Iterator[Request]:
    """Yield the requests that have query rows, except for those that are done."""
    flags = None if args.causal_flags is None else args.causal_flags.tolist()
    for index, (start, end) in enumerate(spans):
        if end <= start or index in done:
            continue
        causal = bool(flags[index]) if config.causality == "per_request" and flags else config.causality == "causal"
        seq_len = seq_lens[index]
        # Rows that have no position among the keys are counted from 0, which is before no key.
        context_len = 0 if config.attn_type == "encoder_decoder" else seq_len - (end - start)
        yield Request(index, start, end - start, seq_len, context_len, num_keys[index], causal, held[index])


def _start_result(args: Args, requests: list[Request], config: AttentionConfig) -> Tensor:
    """Return zeros `[T, H, V]` in the model dtype (the output itself if it is not quantised) and fill `lse`."""
    if args.lse is not None:
        args.lse.fill_(float("-inf"))
        if args.sinks is not None:
            for request in requests:
                args.lse[request.rows] = args.sinks.float()
    if config.output_format == "none":
        return args.output.zero_()
    shape = (args.query.shape[0], config.num_heads, config.head_size_v)
    return args.query.new_zeros(shape, dtype=MODEL_DTYPES[config.dtype])


def _run(args: Args, config: AttentionConfig, requests: list[Request], read: Read, result: Tensor) -> None:
    plain = _is_plain(config)
    for request in requests:
        query = _load_query(args.query[request.rows], args, config)
        ranges = None if args.mm_ranges is None or config.mm_prefix == "none" else args.mm_ranges[request.index]
        for chunk in chunks(request, config, plain):
            key, value, exists = read(request, chunk.first_key, chunk.end_key)
            rows = query[chunk.first_row : chunk.end_row]
            place = slice(request.first_row + chunk.first_row, request.first_row + chunk.end_row)
            if plain and (exists is None or bool(exists.all())) and request.num_keys == request.seq_len:
                out = _plain_rows(rows, key, value, request, chunk, config)
                # Its kernel for CPUs gives zeros for rows with keys that are all NaN.
                if not bool((out == 0).all(-1).any()):
                    result[place] = out.to(result.dtype)
                    continue
            q, k = chunk.rows_and_keys(request, query.device)
            visible = visible_at(config, q, k, request.causal, ranges)
            if exists is not None:
                visible = visible & exists
            bias = reference.score_bias(args, config, q, k, request.context_len, request.index, request.causal)
            out, lse = reference.attend(rows, key, value, visible, config, bias=bias, sinks=args.sinks)
            result[place] = kv_formats.rotate_back(out, config.kv_cache_dtype).to(result.dtype)
            if args.lse is not None:
                args.lse[place] = lse


def _quantise(result: Tensor, args: Args, config: AttentionConfig) -> None:
    """Write the output of a quantised format; otherwise `result` is the output."""
    if config.output_format != "none":
        quantization.quantise_output(
            result,
            config.output_format,
            args.output,
            args.output_block_scale,
            args.output_scale,
            config.output_arithmetic,
            config.output_min_scale,
            config.output_floor,
        )


def _paged_reader(args: AttentionArgs, config: AttentionConfig, keys: PackedRows, values: PackedRows) -> Read:
    size = config.block_size

    def read(request: Request, first: int, end: int) -> tuple[Tensor, Tensor, Tensor | None]:
        blocks = args.block_table[request.index, first // size : (end + size - 1) // size].long()
        inside = slice(first % size, first % size + end - first)
        known = (blocks >= 0) & (blocks < keys.codes.shape[0])
        blocks = torch.where(known, blocks, 0)
        key = decode(_gather(keys, blocks, inside), config, False, args.k_scale)
        value = decode(_gather(values, blocks, inside), config, True, args.v_scale)
        return key, value, known.repeat_interleave(size)[inside]

    return read


def _gather(rows: PackedRows, blocks: Tensor, tokens: slice | Tensor) -> PackedRows:
    """Return what lies in blocks `[n]`, of their `n * block_size` tokens some: `[tokens, K, ...]`."""

    def some(stored: Tensor) -> Tensor:
        gathered = stored.index_select(0, blocks).flatten(0, 1)
        return gathered[tokens] if isinstance(tokens, slice) else gathered.index_select(0, tokens)

    return PackedRows(some(rows.codes), None if rows.scales is None else some(rows.scales))


def _plain_rows(
    query: Tensor, key: Tensor, value: Tensor, request: Request, chunk: Chunk, config: AttentionConfig
) -> Tensor:
    """Return `[n, H, V]` of one chunk of a plain request."""
    square = request.context_len + chunk.first_row == chunk.first_key and len(query) == len(key)
    windowless = config.sliding_window is None or config.sliding_window >= chunk.end_key - chunk.first_key
    is_causal = request.causal and windowless and square
    mask = None
    everything = windowless and (not request.causal or len(query) == 1)
    if not is_causal and not everything:
        q, k = chunk.rows_and_keys(request, query.device)
        mask = visible_at(config, q, k, request.causal, None)
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=config.scale,
        enable_gqa=config.group_size > 1,
    )
    return kv_formats.rotate_back(out[0].transpose(0, 1), config.kv_cache_dtype)


def _plain_decodes(
    args: AttentionArgs,
    config: AttentionConfig,
    decodes: list[int],
    rows: list[int],
    longest: int,
    keys: PackedRows,
    values: PackedRows,
    result: Tensor,
) -> None:
    """Run all single-token requests in one call, padded to the longest. Causal or not makes no difference to them."""
    size, device = config.block_size, args.query.device
    window = config.sliding_window
    index = torch.tensor(decodes, device=device)
    row, seq_len = torch.tensor(rows, device=device), args.seq_lens[index]
    first_key = (seq_len - (window or longest)).clamp(min=0)
    num_columns = (longest + size - 1) // size
    if window is not None:
        num_columns = min(num_columns, (window + size - 2) // size + 1)
    columns = (first_key // size)[:, None] + torch.arange(num_columns, device=device)
    blocks = args.block_table[index[:, None], columns.clamp(max=args.block_table.shape[1] - 1)].long()
    known = (blocks >= 0) & (blocks < keys.codes.shape[0])
    blocks = torch.where(known, blocks, 0)
    position = (columns[:, :, None] * size + torch.arange(size, device=device)).flatten(1)
    visible = (position >= first_key[:, None]) & (position < seq_len[:, None]) & known.repeat_interleave(size, 1)
    # Hidden keys may be garbage, and masked garbage is still NaN: read the first visible key of the request instead.
    places = torch.arange(visible.numel(), device=device).view_as(visible)
    first_visible = places.gather(1, visible.to(torch.uint8).argmax(1, keepdim=True))
    places = torch.where(visible, places, first_visible).flatten()
    shape = (*visible.shape, config.num_kv_heads, -1)
    key = decode(_gather(keys, blocks.flatten(), places), config, False, args.k_scale).view(shape).transpose(1, 2)
    value = decode(_gather(values, blocks.flatten(), places), config, True, args.v_scale).view(shape).transpose(1, 2)
    out = scaled_dot_product_attention(
        _load_query(args.query[row], args, config)[:, :, None],
        key,
        value,
        attn_mask=visible[:, None, None],
        scale=config.scale,
        enable_gqa=config.group_size > 1,
    )
    empty = ~visible.any(1)[:, None, None]
    out = kv_formats.rotate_back(out[:, :, 0], config.kv_cache_dtype)
    result[row] = out.masked_fill(empty, 0).to(result.dtype)
