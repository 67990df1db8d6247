"""FLASH_ATTN: attention by a FlashAttention library, whichever is found; the cache is written by our own kernel.

A binary promises less than our kernels: values in memory that no request owns must be finite, block ids that name no
block are read as the nearest one, and a sequence longer than its row of the block table ends with it. In FP8 it rounds
the weights of the values to e4m3 too, which costs up to 2^-4 of a result. It has no quantised output, no ALiBi, no tree
and no chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.backends.base import Backend, Capabilities, DeviceInfo, Exclusion, Package, Sizes
from vattn.config import AttentionConfig
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs, VarlenAttentionArgs
from vattn.ops.cache_layout import key_value_views
from vattn.ops.flash_attention import LIBRARY_VARIABLE, FlashCall, FlashLibrary, find_library, library_error, run_flash

_TRITON = Package(module="triton", distribution="triton", minimum=(3, 6), extra="triton")

FLASH_ATTENTION_3 = Capabilities(
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    kv_cache_dtypes=("float16", "bfloat16", "fp8_e4m3"),
    query_formats=("none", "fp8_e4m3"),
    output_formats=("none",),
    attn_types=("decoder", "encoder", "encoder_only", "encoder_decoder"),
    head_sizes=Sizes(8, 32, 256),
    block_sizes=Sizes(16, 16, 256),
    features=frozenset(
        "bidirectional sliding_window logits_soft_cap sinks kv_scale_per_head query_scale_per_head lse hnd_layout "
        "contiguous_kv".split()
    ),
    exclusions=(
        Exclusion(
            frozenset({"kv_cache_dtype=fp8_e4m3", "query_format=none"}),
            "FlashAttention-3 multiplies FP8 keys by FP8 queries alone: ask for query_format='fp8_e4m3'",
        ),
        Exclusion(
            frozenset({"kv_cache_dtype=float16", "query_format=fp8_e4m3"}),
            "FlashAttention-3 multiplies FP8 queries by FP8 keys alone: use an FP8 cache",
        ),
        Exclusion(
            frozenset({"kv_cache_dtype=bfloat16", "query_format=fp8_e4m3"}),
            "FlashAttention-3 multiplies FP8 queries by FP8 keys alone: use an FP8 cache",
        ),
        Exclusion(
            frozenset({"kv_cache_dtype=fp8_e4m3", "dtype=float16"}),
            "FlashAttention-3 in FP8 writes bf16: use a bf16 model",
        ),
        Exclusion(frozenset({"sinks", "dtype=float16"}), "FlashAttention-3 takes sinks in bf16: use a bf16 model"),
        Exclusion(frozenset({"sinks", "lse"}), "FlashAttention-3 rounds sinks to bf16, too coarse for a log-sum-exp"),
    ),
    minimum_capability=(9, 0),
    garbage_safe=False,
)
"""What a FlashAttention-3 library does; also what the documentation shows."""

TORCH_VARLEN = Capabilities(
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    kv_cache_dtypes=("float16", "bfloat16"),
    query_formats=("none",),
    output_formats=("none",),
    attn_types=("decoder", "encoder", "encoder_only", "encoder_decoder"),
    head_sizes=Sizes(8, 32, 256),
    block_sizes=Sizes(8, 8, 256),
    features=frozenset({"bidirectional", "sliding_window", "lse", "contiguous_kv"}),
    minimum_capability=(8, 0),
    garbage_safe=False,
)
"""What torch's own varlen attention does: attention without a cache."""


class FlashAttentionBackend(Backend):
    """Run what the FlashAttention library that was found can run."""

    name = "FLASH_ATTN"

    @property
    def library(self) -> FlashLibrary | None:
        """The library that runs the calls, `None` if there is none."""
        return find_library()

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What the library that was found can do; without one, what FlashAttention-3 could."""
        library = self.library
        return FLASH_ATTENTION_3 if library is None or library.paged else TORCH_VARLEN

    def problem(self) -> str | None:
        """Return why no FlashAttention library can be used, `None` if one can."""
        if self.library is not None:
            return _TRITON.problem()
        return library_error() or (
            "no FlashAttention library was found (vattn.load_flash_attn(path), or the path in the environment "
            f"variable {LIBRARY_VARIABLE}; torch's own needs a CUDA build of torch)"
        )

    def reasons(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Return why this backend refuses a request, naming the library that it runs on."""
        found = super().reasons(config, device)
        library = self.library
        if library is None:
            return found
        if not library.paged and config.block_size:
            found.insert(0, "a paged cache: load FlashAttention-3 with vattn.load_flash_attn(path)")
        return [f"{reason} [runs on {library}]" for reason in found]

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::attention`."""
        key, value = key_value_views(args.kv_cache, config)
        num_reqs, width = args.block_table.shape
        # An id that names no block would be read outside the cache.
        table = args.block_table.clamp(0, max(key.shape[0] - 1, 0))
        call = self._call(args, config, key, value, num_reqs)._replace(
            seq_lens=args.seq_lens.clamp(max=width * config.block_size),
            block_table=table,
            max_seq_len=width * config.block_size,
        )
        self._run(args, call, config)

    def varlen_attention(self, args: VarlenAttentionArgs, config: AttentionConfig) -> None:
        """Run `vattn::varlen_attention`."""
        num_reqs = args.kv_start_loc.shape[0] - 1
        call = self._call(args, config, args.key, args.value, num_reqs)._replace(
            kv_start_loc=args.kv_start_loc, max_seq_len=args.key.shape[0]
        )
        self._run(args, call, config)

    def kv_cache_update(self, args: CacheUpdateArgs, config: AttentionConfig) -> None:
        """Run `vattn::kv_cache_update` by the Triton kernel, which every format has."""
        from vattn.ops.triton.launch import update_kv_cache

        update_kv_cache(args, config)

    def _call(
        self,
        args: AttentionArgs | VarlenAttentionArgs,
        config: AttentionConfig,
        key: Tensor,
        value: Tensor,
        num_reqs: int,
    ) -> FlashCall:
        scales = (args.q_scale, args.k_scale, args.v_scale)
        quantised = config.query_format != "none"
        causal = config.causality == "causal"
        reach = -1 if config.sliding_window is None else config.sliding_window - 1
        return FlashCall(
            query=args.query,
            key=key,
            value=value,
            query_start_loc=args.query_start_loc,
            kv_start_loc=None,
            seq_lens=None,
            block_table=None,
            max_query_len=args.query.shape[0],
            max_seq_len=0,
            scale=config.scale,
            causal=causal,
            window=(reach, 0 if causal and reach >= 0 else reach),
            soft_cap=config.logits_soft_cap or 0.0,
            sinks=None if args.sinks is None else args.sinks.to(torch.bfloat16),
            descales=_descales(scales, num_reqs, config.num_kv_heads) if quantised else None,
        )

    def _run(self, args: AttentionArgs | VarlenAttentionArgs, call: FlashCall, config: AttentionConfig) -> None:
        library = self.library
        assert library is not None  # `reasons` refused the call otherwise
        args.output.zero_()
        if args.lse is not None:
            args.lse.fill_(float("-inf"))
        asked = _rows_that_ask(args, call, config)
        if not call.query.shape[0] or not call.key.shape[0]:
            if args.lse is not None and args.sinks is not None:
                args.lse.copy_(torch.where(asked, args.sinks.float(), float("-inf")))
            return
        if library.paged:
            lse = run_flash(library, call, args.output)
        else:
            output = torch.empty_like(args.output)
            lse = run_flash(library, call, output)
            args.output.copy_(output)
        _put_right(args, lse, asked)


def _descales(scales: tuple[Tensor | None, ...], num_reqs: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    given = (scale for scale in scales if scale is not None)
    query, key, value = (scale.expand(num_kv_heads).expand(num_reqs, num_kv_heads) for scale in given)
    return query, key, value


def _rows_that_ask(args: AttentionArgs | VarlenAttentionArgs, call: FlashCall, config: AttentionConfig) -> Tensor:
    """Return bool `[T, 1]`: rows of requests, but for those of a query longer than its sequence that lie before it."""
    rows = torch.arange(args.query.shape[0], device=args.query.device)
    starts = call.query_start_loc
    real = rows < starts[-1]
    if config.causality == "causal" or config.attn_type == "encoder_decoder":
        # The library's own causal mask hides every key from rows before the sequence; cross attention has no positions.
        return real.unsqueeze(1)
    lengths = call.seq_lens if call.kv_start_loc is None else call.kv_start_loc.diff()
    assert lengths is not None
    request = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=lengths.shape[0] - 1)
    return (real & (rows >= starts[request + 1] - lengths[request])).unsqueeze(1)


def _put_right(args: AttentionArgs | VarlenAttentionArgs, lse: Tensor, asked: Tensor) -> None:
    """Make rows of padding and rows that see no key what our contract says: zeros, and a log of nothing."""
    found = lse.transpose(0, 1)
    # Without a visible key the library gives plus infinity, or with a sink the sink; both rows hold zeros.
    seen = asked & (found < float("inf"))
    args.output.masked_fill_(~seen.unsqueeze(2), 0)
    if args.lse is not None:
        args.lse.copy_(torch.where(seen, found, float("-inf")))
