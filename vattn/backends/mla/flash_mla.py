"""FLASHMLA: absorbed latent attention by DeepSeek's FlashMLA; the cache is written by vattn's kernel.

Found as the package `flash_mla`, or as the operator `_flashmla_C.dense_decode_fwd` of a library that was loaded by
`load_flash_mla(path)`. FlashMLA takes as many tokens of every request; which step is such a one only the device knows.
So every row is a request of its own, with the keys that it sees: right for every step, and no slower for steps of one
token a request; several tokens read the cache once each.

Values in memory that no request owns must be finite, block ids that name no block are read as the nearest one, and a
sequence longer than its row of the block table ends with it.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vattn.backends.base import Package, refuse_capture
from vattn.backends.external_rows import rows_as_requests, zero_invalid_rows
from vattn.backends.mla.base import MLABackend, TritonMLAUpdate, library_capabilities
from vattn.config.device import DeviceInfo, Sizes
from vattn.config.mla import MLAConfig
from vattn.errors import ConfigError
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.ops.reference.mla_absorb import absorb, project_values, weights_of

CAPABILITIES_OF_GPUS = ((9, 0),)
"""Compute capabilities that its dense kernel is made for."""


def load_flash_mla(path: str | Path) -> None:
    """Load FlashMLA's operators from a shared library.

    Raises:
        ConfigError: the file cannot be loaded, or has no `_flashmla_C.dense_decode_fwd`.
    """
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ConfigError(
            f"FlashMLA library {str(path)!r}: {str(error).strip()}",
            "a shared library for this torch",
            "check the path and the torch version it was built for",
        ) from error
    if _operator() is None:
        raise ConfigError(
            f"library {str(path)!r} without _flashmla_C.dense_decode_fwd", "FlashMLA's operators", "check the path"
        )


class FlashMLABackend(TritonMLAUpdate, MLABackend):
    """Run what FlashMLA's dense decode kernel can run."""

    name = "FLASHMLA"
    capabilities = library_capabilities(
        Package(module="flash_mla", distribution="flash_mla", minimum=(1,), extra="flash_mla"),
        minimum_capability=(9, 0),
        block_sizes=Sizes(values=(64,)),
    )

    def problem(self) -> str | None:
        if _operator() is not None or importlib.util.find_spec("flash_mla") is not None:
            return None
        return "package flash_mla is not installed, and no vattn.backends.mla.flash_mla.load_flash_mla(path) was called"

    def running(self) -> tuple[str, str] | None:
        """Return what runs the attention; its versions are not known."""
        return None if self.problem() is not None else ("flash_mla", "unknown")

    def limits(self, config: Any, device: DeviceInfo) -> list[str]:
        """Return what the capabilities refuse, and GPUs that the kernel is not made for."""
        found = super().limits(config, device)
        if device.type == "cuda" and device.capability not in CAPABILITIES_OF_GPUS and not found:
            found.append(f"{device} (its dense kernel is made for sm_90)")
        return found

    def mla_attention(self, args: MLAAttentionArgs, config: MLAConfig) -> None:
        refuse_capture(args.query, self.name, "that is not tested", "pass attn_backend='TRITON_MLA'")
        tokens = args.query.shape[0]
        if not tokens:
            return
        lengths, table = _rows_as_requests(args, config)
        # Autocast would change the dtype of the products.
        with torch.autocast(args.query.device.type, enabled=False):
            w_uk, w_uv = weights_of(args, config)
            absorbed = absorb(args.query, w_uk, config)
            # Rows that see nothing read one key that does not count.
            out, logs = _attend(absorbed, args.kv_cache, lengths.clamp(min=1), table, config)
            project_values(out, w_uv, args.output)
        zero_invalid_rows(args.output, args.lse, logs, (lengths > 0).unsqueeze(1) & logs.isfinite())


def _rows_as_requests(args: MLAAttentionArgs, config: MLAConfig) -> tuple[Tensor, Tensor]:
    """Return int32 keys `[T]` that each row sees, 0 for padding, and the block tables `[T, W]` of rows."""
    request, lengths, _ = rows_as_requests(args.query_start_loc, args.seq_lens, args.query.shape[0])
    lengths = lengths.clamp(max=args.block_table.shape[1] * config.block_size)
    return lengths, args.block_table[request].clamp(0, args.kv_cache.shape[0] - 1)


def _operator() -> Any:
    namespace = torch.ops._flashmla_C
    return namespace.dense_decode_fwd if hasattr(namespace, "dense_decode_fwd") else None


def _attend(
    absorbed: Tensor, cache: Tensor, lengths: Tensor, table: Tensor, config: MLAConfig
) -> tuple[Tensor, Tensor]:
    """Return `[T, N, L]` and the natural log-sum-exp `[T, N]` of rows."""
    query, pages, width = absorbed.unsqueeze(1), cache.unsqueeze(2), config.kv_lora_rank
    decode = _operator()
    if decode is not None:
        out, logs, *_ = decode(query, pages, width, lengths, table, config.scale, True, None, None, None)
    else:
        flash_mla = importlib.import_module("flash_mla")
        metadata, splits = flash_mla.get_mla_metadata(lengths, config.num_heads, 1)
        out, logs = flash_mla.flash_mla_with_kvcache(
            query, pages, table, lengths, width, metadata, splits, softmax_scale=config.scale, causal=True
        )
    return out.squeeze(1), logs.squeeze(2)
