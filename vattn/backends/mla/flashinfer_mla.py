"""FLASHINFER_MLA: absorbed latent attention by FlashInfer's MLA wrapper; the cache is written by vattn's kernel.

FlashInfer plans on the host: a call reads the lengths, which is one sync, and cannot be captured. Values in memory that
no request owns must be finite, block ids that name no block are read as the nearest one, and a sequence longer than its
row of the block table ends with it. Written after the documentation of 0.6.13.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vattn.backends.base import Package, refuse_capture
from vattn.backends.external_rows import valid_rows, zero_invalid_rows
from vattn.backends.flashinfer.plan import offsets_of, used_blocks
from vattn.backends.mla.base import MLABackend, TritonMLAUpdate, library_capabilities
from vattn.config.device import BLOCK_SIZES
from vattn.config.mla import MLAConfig
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.ops.reference.mla_absorb import absorb, project_values, weights_of
from vattn.quantization.formats import MODEL_DTYPES

_WORKSPACE_BYTES = 128 << 20


class FlashInferMLABackend(TritonMLAUpdate, MLABackend):
    """Run what FlashInfer's MLA kernels can run."""

    name = "FLASHINFER_MLA"
    capabilities = library_capabilities(
        Package(module="flashinfer", distribution="flashinfer-python", minimum=(0, 6), extra="flashinfer"),
        minimum_capability=(8, 0),
        block_sizes=BLOCK_SIZES,
    )

    def mla_attention(self, args: MLAAttentionArgs, config: MLAConfig) -> None:
        refuse_capture(args.query, self.name, "it plans from lengths on the host", "pass attn_backend='TRITON_MLA'")
        args.output.zero_()
        if args.lse is not None:
            args.lse.fill_(-torch.inf)
        reqs = args.seq_lens.shape[0]
        starts, lengths = torch.cat((args.query_start_loc, args.seq_lens)).cpu().split((reqs + 1, reqs))
        lengths = lengths.clamp(0, args.block_table.shape[1] * config.block_size)
        tokens = int(starts[-1])
        if not tokens or not lengths.any():
            return
        # Autocast would change the dtype of the products.
        with torch.autocast(args.query.device.type, enabled=False):
            w_uk, w_uv = weights_of(args, config)
            latent, logs = _attend(absorb(args.query[:tokens], w_uk, config), args, starts, lengths, config)
            project_values(latent, w_uv, args.output[:tokens])
        valid = valid_rows(args.query_start_loc, args.seq_lens, tokens, config) & logs.isfinite()  # type: ignore[arg-type]
        zero_invalid_rows(args.output[:tokens], None if args.lse is None else args.lse[:tokens], logs, valid)


def _attend(
    absorbed: Tensor, args: MLAAttentionArgs, starts: Tensor, lengths: Tensor, config: MLAConfig
) -> tuple[Tensor, Tensor]:
    """Return `[T, N, L]` and the natural log-sum-exp of rows; `starts` and `lengths` are on the host."""
    wrapper, dtype = _wrapper(absorbed.device), MODEL_DTYPES[config.dtype]
    pages = (lengths + config.block_size - 1) // config.block_size
    wrapper.plan(
        qo_indptr=starts,
        kv_indptr=offsets_of(pages),
        kv_indices=used_blocks(args.block_table, pages, args.kv_cache.shape[0]),
        kv_len_arr=lengths,
        num_heads=config.num_heads,
        head_dim_ckv=config.kv_lora_rank,
        head_dim_kpe=config.qk_rope_head_dim,
        page_size=config.block_size,
        causal=True,
        sm_scale=config.scale,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    parts = config.kv_lora_rank, config.qk_rope_head_dim
    query, rope = (part.contiguous() for part in absorbed.split(parts, -1))
    latents, ropes = args.kv_cache.split(parts, -1)
    out, logs = wrapper.run(query, rope, latents, ropes, return_lse=True, return_lse_base_on_e=True)
    return out, logs


@lru_cache(maxsize=16)
def _wrapper(device: torch.device) -> Any:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    return BatchMLAPagedAttentionWrapper(torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device))
