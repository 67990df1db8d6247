"""TORCH_MLA: latent attention in plain torch, on every device; the CPU default.

Short requests are absorbed: their queries are projected into the latent space, and the rows of the cache serve as keys
and values of all heads. Longer ones have keys and values of every head expanded, chunk by chunk through a workspace of
bounded size, and the parts are merged by their log-sum-exp. Everything is computed in fp32, even under autocast.

Lengths are read on the host: free on CPU, one sync a call on CUDA, hence no CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vattn.backends.base import refuse_capture
from vattn.backends.mla.base import MLABackend, MLACapabilities
from vattn.cache.layout import row_view
from vattn.config.dcp import DCPShard
from vattn.config.device import BLOCK_SIZES, Sizes
from vattn.config.mla import WEIGHT_FORMATS, MLAConfig
from vattn.ops.arguments_mla import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.reference import mla as mla_reference
from vattn.ops.reference.attention import held_lengths, merge, ranges, softmax, write_results
from vattn.ops.reference.mla_absorb import (
    DEFAULT_WORKSPACE_TOKENS,
    elements_per_token,
    key_and_value_weights,
    weight_values,
    workspace_tokens,
)
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS, QUERY_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS

Part = tuple[Tensor, Tensor]
"""Output `[q, N, X]`, zero for rows that see no key, and LSE `[q, N]`, of some keys."""

_SCORES_PER_CHUNK = 1 << 22
"""Scores held at once (16 MiB in fp32)."""


class _Request(NamedTuple):
    """What the host knows of one request: its rows of the query, its keys, and how many of them this rank holds."""

    number: int
    first_row: int
    query_len: int
    seq_len: int
    held: int


class _Step(NamedTuple):
    """What the requests of a call share."""

    args: MLAAttentionArgs
    config: MLAConfig
    weight: Tensor
    """fp32 `[N, P + V, L]`."""
    rows: Tensor
    """The cache as rows, `[blocks, block_size, *]`."""
    shard: DCPShard | None
    chunk: int
    """Keys that are expanded at a time."""


class TorchMLABackend(MLABackend):
    """Run every latent attention with only torch."""

    name = "TORCH_MLA"
    capabilities = MLACapabilities(
        devices=("cpu", "cuda"),
        dtypes=tuple(MODEL_DTYPES),
        kv_cache_dtypes=tuple(MLA_FORMATS),
        query_formats=QUERY_FORMATS,
        output_formats=tuple(OUTPUT_FORMATS),
        attn_types=("decoder",),
        head_sizes=Sizes(1, 2, 1 << 16),
        block_sizes=BLOCK_SIZES,
        features=frozenset({"lse", "sparse", "context_parallel", "mixed_cache"}),
        weight_formats=WEIGHT_FORMATS,
        output_variants=True,
        cuda_graphs="never",
    )

    def mla_attention(self, args: MLAAttentionArgs, config: MLAConfig) -> None:
        refuse_capture(args.query, self.name, "it reads lengths on the host")
        shape = args.query.shape[0], config.num_heads, config.v_head_dim
        out = args.query.new_zeros(shape, dtype=MODEL_DTYPES[config.dtype])
        lse = out.new_full(shape[:2], -torch.inf, dtype=torch.float32)
        # Autocast would round the fp32 math to a narrower dtype.
        with torch.autocast(args.query.device.type, enabled=False):
            _attend_all(args, config, out, lse)
        write_results(args, out, lse, config)

    def scratch_bytes(self, config: MLAConfig, num_tokens: int, workspace_tokens: int | None) -> int:
        """Return the bytes of weights, queries, a chunk of keys with its scores, and results, all fp32 while they last.

        A bound, with the copies that are there at once; for the largest chunk, though a request may have fewer keys.
        """
        tokens = max(DEFAULT_WORKSPACE_TOKENS, config.block_size) if workspace_tokens is None else workspace_tokens
        rows, latent = num_tokens * config.num_heads, config.kv_lora_rank
        scores = min(max(_SCORES_PER_CHUNK, tokens * config.num_heads), rows * tokens)
        absorbed = num_tokens <= config.decode_threshold
        wide = max(latent, config.v_head_dim) if absorbed else config.v_head_dim
        elements = (
            config.num_heads * (config.qk_nope_head_dim + config.v_head_dim) * latent
            + rows * config.qk_head_dim
            + 3 * tokens * (config.head_size if absorbed else elements_per_token(config))
            + 4 * scores
            + 9 * rows * wide
        )
        return 4 * elements + rows * config.v_head_dim * MODEL_DTYPES[config.dtype].itemsize

    def mla_kv_cache_update(self, args: MLACacheUpdateArgs, config: MLAConfig) -> None:
        """Run `vattn::mla_kv_cache_update`, without a sync. Of two tokens with one slot either may win."""
        mla_reference.mla_kv_cache_update(args, config)


def _attend_all(args: MLAAttentionArgs, config: MLAConfig, results: Tensor, logs: Tensor) -> None:
    """Write results and LSE of every request; rows that belong to none stay as they are."""
    weight = weight_values(args.kv_b_weight, args.kv_b_scale, config, torch.float32)
    chunk = workspace_tokens(args.workspace, config, DEFAULT_WORKSPACE_TOKENS)
    step = _Step(args, config, weight, row_view(args.kv_cache, config), config.dcp_shard, chunk)
    lengths = held_lengths(None, args.seq_lens, None)
    held = held_lengths(step.shard, args.seq_lens, args.local_seq_lens)
    for number, (start, end) in enumerate(ranges(args.query_start_loc, results.shape[0])):
        if end <= start:
            continue
        request = _Request(number, start, end - start, lengths[number], held[number])
        absorbed = request.query_len <= config.decode_threshold
        attend, columns = (_absorbed_parts, config.kv_lora_rank) if absorbed else (_expanded_parts, config.v_head_dim)
        query = args.query[start:end].float()
        parts = attend(query, request, step)
        none = query.new_zeros((*query.shape[:2], columns)), query.new_full(query.shape[:2], -torch.inf)
        out, lse = functools.reduce(merge, parts, next(parts, none))
        if absorbed:
            out = torch.einsum("qnl,nlv->qnv", out, key_and_value_weights(weight, config)[1])
        results[start:end], logs[start:end] = out.to(results.dtype), lse


def _absorbed_parts(query: Tensor, request: _Request, step: _Step) -> Iterator[Part]:
    """Attend a request with heads that all read the cached rows as they are; results stay in the latent space."""
    config = step.config
    absorbed = mla_reference.absorbed_query(query, step.weight[:, : config.qk_nope_head_dim], step.args.q_scale, config)
    chunk = max(1, min(step.chunk, _SCORES_PER_CHUNK // (request.query_len * config.num_heads)))
    for latent, rotated, counts in _keys(request, chunk, step):
        scores = torch.einsum("qnd,sd->nqs", absorbed, torch.cat((latent, rotated), -1)) * config.scale
        weights, lse = softmax(mla_reference.weigh(scores, counts))
        yield torch.einsum("nqs,sl->qnl", weights, latent), lse.t()


def _expanded_parts(query: Tensor, request: _Request, step: _Step) -> Iterator[Part]:
    """Attend a request with keys and values of every head, expanded one chunk of keys at a time."""
    config = step.config
    for latent, rotated, counts in _keys(request, step.chunk, step):
        expanded = torch.einsum("sl,nxl->nsx", latent, step.weight)
        key, value = expanded.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
        key = torch.cat((key, rotated.expand(config.num_heads, -1, -1)), dim=-1)
        most = max(1, _SCORES_PER_CHUNK // (len(latent) * config.num_heads))
        done = []
        for rows, seen in zip(query.split(most), counts.split(most), strict=True):
            scores = torch.einsum("qnd,nsd->nqs", rows, key) * config.scale
            weights, lse = softmax(mla_reference.weigh(scores, seen))
            done.append((torch.einsum("nqs,nsv->qnv", weights, value), lse.t()))
        out, lse = (torch.cat(part) for part in zip(*done, strict=True))
        yield out, lse


def _keys(request: _Request, chunk: int, step: _Step) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield fp32 latents and rotated keys of each chunk of keys that are held, and how often rows see each."""
    args, config, shard, size = step.args, step.config, step.shard, step.config.block_size
    num_keys = min(request.held, args.block_table.shape[1] * size)
    start, device, topk = request.first_row, args.query.device, args.topk_indices
    if topk is not None:
        topk = topk[start : start + request.query_len]
    for first in range(0, num_keys, chunk):
        end = min(first + chunk, num_keys)
        position = torch.arange(first, end, device=device)
        blocks = args.block_table[request.number, position // size].long()
        known = (blocks >= 0) & (blocks < step.rows.shape[0])
        places = position if shard is None else shard.position(position)
        counts = mla_reference.times_seen(request.query_len, request.seq_len, places, topk) * known
        stored = step.rows[torch.where(known, blocks, 0), position % size]
        latent, rotated = mla_reference.read_rows(stored, args.k_scale, config)
        yield mla_reference.only_seen(latent, counts > 0), mla_reference.only_seen(rotated, counts > 0), counts
