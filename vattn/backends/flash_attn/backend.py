"""FLASH_ATTN: attention by a FlashAttention library, the newest that is found; the cache is written by vattn's kernel.

Libraries guarantee less than vattn's kernels: values in memory that no request owns must be finite, block ids that
name no block are read as the nearest one, and a sequence longer than its row of the block table ends with it. In FP8
the weights of the values are rounded to e4m3 too, which costs up to 2^-4 of a result. There is no quantised output, no
tree and no chunks, and ALiBi with FlashAttention-2 alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.backends.base import Backend, Capabilities, Package
from vattn.backends.external_rows import TritonCacheUpdate, valid_rows, zero_invalid_rows
from vattn.backends.flash_attn import plan as planning
from vattn.backends.flash_attn.calls import has_schedule, run_flash
from vattn.backends.flash_attn.capabilities import HEAD_SIZES, capabilities_of
from vattn.backends.flash_attn.libraries import (
    LIBRARY_VARIABLE,
    PACKAGES,
    FlashCall,
    FlashLibrary,
    find_library,
    library_digest,
    library_error,
    passed_over,
)
from vattn.cache.layout import key_value_views
from vattn.config.arguments import integer
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.errors import CacheError
from vattn.ops.arguments import AttentionArgs, PlanArgs, VarlenAttentionArgs

_TRITON = Package(module="triton", distribution="triton", minimum=(3, 6), extra="triton")


class FlashAttentionBackend(TritonCacheUpdate, Backend):
    """Run what the FlashAttention library that was found can run."""

    name = "FLASH_ATTN"

    @property
    def library(self) -> FlashLibrary | None:
        """The library that runs the calls on this process's GPU, `None` if there is none."""
        return find_library(_current_capability())

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What the library that was found can do; without one, what FlashAttention-3 could."""
        return capabilities_of(self.library, _current_capability())

    def problem(self) -> str | None:
        return self._problem(self.library)

    def running(self) -> tuple[str, str] | None:
        """Return the library and its version; one given by path is known by its digest."""
        library = self.library
        if library is None:
            return None
        if library.name == "torch varlen_attn":
            return "torch", library.version
        return library.module or "FlashAttention-3 library", library.version if library.module else library_digest()

    def reasons(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Return why this backend refuses a request, naming the library that it runs on."""
        problem = self._problem(_library_on(device, config))
        return ([] if problem is None else [problem]) + self.limits(config, device)

    def limits(self, config: AttentionConfig, device: DeviceInfo) -> list[str]:
        """Return what the library for a device refuses; for none, what FlashAttention-3 would."""
        library, found = _library_on(device, config), []
        if library is not None and not library.paged and config.block_size:
            found.append(
                "a paged cache: load FlashAttention-3 with vattn.load_flash_attn(path), or activate an implementation "
                "that pages: torch.nn.attention.activate_flash_attention_impl('FA3'), with torch 2.12 or newer"
            )
        if library is not None and library.name == "FlashAttention-3" and device.capability[0] > 9:
            found.append(f"{device} (FlashAttention-3 has kernels only for sm_90)")
        found += capabilities_of(library, device.capability).refusals(config, device)
        return found if library is None else [f"{reason} [runs on {library}]" for reason in found]

    def notes(self, config: AttentionConfig) -> list[str]:
        """Say which library runs it, and why installed ones do not."""
        found = [f"runs on {_current_library(config)}"] + [f"passed over: {reason}" for reason in passed_over()]
        if config.batch_invariant:
            return [*found, "sequences are not cut into parts"]
        return found

    def plan_shape(self, config: AttentionConfig, num_tokens: int, num_reqs: int, table_width: int) -> tuple[int, ...]:
        """Return the shape of the schedule; `()` for libraries that take none, and under batch invariance."""
        if not has_schedule(_current_library(config)) or config.batch_invariant or not config.block_size:
            return ()
        return planning.plan_shape(config, num_tokens)

    def plan_key(self, config: AttentionConfig) -> str:
        return planning.plan_key(self.name, config)

    def plan(self, args: PlanArgs, config: AttentionConfig) -> None:
        """Fill the schedule: the library's own, and the rows of a decode as requests."""
        planning.fill_plan(args, config, _window(config))

    def attention(self, args: AttentionArgs, config: AttentionConfig) -> None:
        if self._has_nothing_to_read(args, args.seq_lens, args.key_cache, config):
            return
        library = self._library_of(args.query, config)
        key, value = key_value_views(args.key_cache, args.value_cache, config)
        call = planning.paged_call(_call(args, config, key, value), args, config, has_schedule(library))
        self._run(library, call, args, args.seq_lens, config)

    def varlen_attention(self, args: VarlenAttentionArgs, config: AttentionConfig) -> None:
        lengths = args.kv_start_loc.diff()
        if self._has_nothing_to_read(args, lengths, args.key, config):
            return
        call = _call(args, config, args.key, args.value)._replace(
            kv_start_loc=args.kv_start_loc, max_seq_len=args.key.shape[0], num_splits=1 if config.batch_invariant else 0
        )
        self._run(self._library_of(args.query, config), call, args, lengths, config)

    def get_supported_head_sizes(self) -> list[int]:
        """Return the head sizes that every FlashAttention has."""
        return list(HEAD_SIZES)

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return `(2, num_blocks, block_size, num_kv_heads, head_size)`, the shape of a layer's cache.

        Raises:
            CacheError: a block size that is no multiple of 16, or sizes that are no positive integers.
        """
        size = integer(block_size)
        if size is None or size < 1 or size % 16:
            raise CacheError(f"block_size {block_size!r:.40}: Block size must be a multiple of 16.", "16, 32", "use 16")
        return super().get_kv_cache_shape(num_blocks, size, num_kv_heads, head_size)

    def _problem(self, library: FlashLibrary | None) -> str | None:
        if library is not None:
            return _TRITON.problem()
        if library_error():
            return library_error()
        extras = " or ".join(f"pip install 'vattn[{package.extra}]'" for package in PACKAGES if package.extra)
        return "; ".join(
            [
                "no FlashAttention library was found (vattn.load_flash_attn(path), or the path in the environment "
                f"variable {LIBRARY_VARIABLE}; {extras}; torch's own needs a CUDA build of torch)",
                *passed_over(),
            ]
        )

    @staticmethod
    def _library_of(query: Tensor, config: AttentionConfig) -> FlashLibrary:
        library = find_library(_capability_of(query.device), config.alibi != "none")
        assert library is not None  # `reasons` refused the call otherwise
        return library

    @staticmethod
    def _has_nothing_to_read(
        args: AttentionArgs | VarlenAttentionArgs, lengths: Tensor, keys: Tensor, config: AttentionConfig
    ) -> bool:
        """Write the result of a call without rows or without any key, where the library must not be called."""
        if args.query.shape[0] and keys.numel():
            return False
        args.output.zero_()
        if args.lse is not None:
            valid = valid_rows(args.query_start_loc, lengths, args.query.shape[0], config, hidden_by_kernel=True)
            empty = torch.full_like(args.lse, float("-inf"))
            args.lse.copy_(empty if args.sinks is None else torch.where(valid, args.sinks.float(), empty))
        return True

    @staticmethod
    def _run(
        library: FlashLibrary,
        call: FlashCall,
        args: AttentionArgs | VarlenAttentionArgs,
        lengths: Tensor,
        config: AttentionConfig,
    ) -> None:
        if config.query_format != "none":
            num_reqs = call.query_start_loc.shape[0] - 1
            scales = (args.q_scale, args.k_scale, args.v_scale)
            call = call._replace(descales=_descales(scales, num_reqs, config.num_kv_heads))
        found = run_flash(library, call, args.output).transpose(0, 1)
        # Without a visible key a library gives an infinity of either sign, or with a sink the sink with zeros.
        all_ask = config.causality == "causal" or config.attn_type == "encoder_decoder"
        if all_ask:
            from vattn.kernels.triton.attention.external_rows import finish_rows

            finish_rows(args.output, args.lse, found, args.query_start_loc)
            return
        valid = valid_rows(args.query_start_loc, lengths, args.query.shape[0], config, hidden_by_kernel=True)
        zero_invalid_rows(args.output, args.lse, found, valid & ~found.isinf())


def _call(args: AttentionArgs | VarlenAttentionArgs, config: AttentionConfig, key: Tensor, value: Tensor) -> FlashCall:
    """Return a call without keys' lengths; its bound is that of any query.

    The libraries find the largest score before they scale: a negative or zero scale is applied to the query.
    """
    return FlashCall(
        query=_with_positive_scale(args.query, config.scale),
        key=key,
        value=value,
        query_start_loc=args.query_start_loc,
        # FlashAttention-2 takes a bound of 1 for one token of every request.
        max_query_len=max(args.query.shape[0], 2),
        max_seq_len=0,
        scale=abs(config.scale) or 1.0,
        causal=config.causality == "causal",
        window=_window(config),
        soft_cap=config.logits_soft_cap or 0.0,
        sinks=None if args.sinks is None else args.sinks.to(torch.bfloat16),
        alibi_slopes=args.alibi_slopes,
    )


def _with_positive_scale(query: Tensor, scale: float) -> Tensor:
    """Return the query with the same scores under a positive scale: negated, or zeros for a scale of zero."""
    if scale > 0:
        return query
    if query.dtype != torch.float8_e4m3fn:
        return -query if scale else torch.zeros_like(query)
    codes = query.view(torch.uint8)
    return (codes ^ 0x80 if scale else torch.zeros_like(codes)).view(query.dtype)


def _window(config: AttentionConfig) -> tuple[int, int]:
    reach = -1 if config.sliding_window is None else config.sliding_window - 1
    return reach, 0 if config.causality == "causal" and reach >= 0 else reach


def _descales(scales: tuple[Tensor | None, ...], num_reqs: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    given = (scale for scale in scales if scale is not None)
    query, key, value = (scale.expand(num_kv_heads).expand(num_reqs, num_kv_heads) for scale in given)
    return query, key, value


def _library_on(device: DeviceInfo, config: AttentionConfig) -> FlashLibrary | None:
    return find_library(device.capability if device.type == "cuda" else None, config.alibi != "none")


def _current_library(config: AttentionConfig) -> FlashLibrary | None:
    return find_library(_current_capability(), config.alibi != "none")


def _capability_of(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _current_capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
