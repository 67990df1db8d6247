"""`StaticSinkAttention`: decoder attention in which every request starts with learned keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vattn.cache.specs import KVCacheSpec, SinkFullAttentionSpec
from vattn.errors import CacheError, ConfigError, DtypeError, ScaleError, ShapeError, UnsupportedRequestError
from vattn.layers.attention import Attention
from vattn.layers.base.step import LayerStep
from vattn.metadata.attention_metadata import AttentionMetadata, sink_plan_key, with_sinks
from vattn.quantization.formats import MODEL_DTYPES, dtype_name

if TYPE_CHECKING:
    from vattn.cache.memory import CacheMemory
    from vattn.config.attention import AttentionConfig
    from vattn.config.device import DeviceInfo
    from vattn.layers.base.cache_binding import BoundCache


class StaticSinkAttention(Attention):
    """Attend to learned sink tokens before every request, and to the request's own tokens.

    The sinks are keys and values, stored once in the cache, in blocks `1 .. sink_len / block_size`, which are reserved
    (`BlockPool(cache.num_blocks, reserved=cache.reserved_blocks)`). Metadata is the same as for other layers:
    lengths, tables and positions do not count sinks. (`Attention(sinks=...)` differs: one logit per head in the
    denominator.)

    Args:
        num_heads, head_size, scale, **arguments: as for `Attention`; not `chunk_lookback`, since sinks would shift the
            chunks.
        sink_len: sink tokens, a positive multiple of the block size.
        sink_key, sink_value: `[sink_len, num_kv_heads, head_size]` and `[sink_len, num_kv_heads, head_size_v]`; a
            parameter is kept, a tensor becomes one. Default: parameters of NaN, for loading a state dict. None in a
            layer that shares a cache.

    Raises:
        ConfigError, ShapeError, ScaleError, UnknownOptionError, UnsupportedRequestError: at construction, as
            `Attention`; an unaligned `sink_len`; sinks of another shape; `calculate_kv_scales`, since sinks are stored
            before scales are calculated.
        DtypeError: sinks that are not a tensor of floats.

    Masks treat sinks as tokens before the request's first: a window of W sees the last W of both together, so no sinks
    once the request is long. ALiBi and ranges keep their distances. A request of length 0 stays empty.

    State: sinks are written into the cache when it is bound and after `load_state_dict`. After a change in place an
    eager call writes them again, and so does `build` of an `AttentionMetadataBuilder(layers=...)` with the layer; for
    compiled code and CUDA graphs use that or `refresh_sinks`. Writes through `.data` are not noticed.

    Compile: as `Attention`; shifted lengths and tables are computed on the device.

    Example:
        >>> import torch, vattn
        >>> sinks = torch.randn(2, 16, 2, 16)
        >>> layer = vattn.StaticSinkAttention(4, 16, 0.25, 16, num_kv_heads=2, sink_key=sinks[0], sink_value=sinks[1])
        >>> _ = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(2, 8, max_seq_len=32, layers=layer)
        >>> step = builder.build(query_lens=[3], seq_lens=[3], block_tables=[[2]])
        >>> layer(*(torch.randn(3, heads * 16) for heads in (4, 2, 2)), metadata=step).shape
        torch.Size([3, 64])
    """

    takes_exact_prefill = False
    takes_context_parallel = False

    sink_key: nn.Parameter | None
    sink_value: nn.Parameter | None
    sink_blocks: Tensor

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        sink_len: int,
        *,
        sink_key: Tensor | None = None,
        sink_value: Tensor | None = None,
        **arguments: Any,
    ) -> None:
        if arguments.get("chunk_lookback", -1) != -1:
            raise UnsupportedRequestError(
                "chunk_lookback in StaticSinkAttention", "no chunks: sinks would shift them", "use a sliding window"
            )
        super().__init__(num_heads, head_size, scale, **arguments)
        block_size = self.cache_config.block_size
        if not isinstance(sink_len, int) or isinstance(sink_len, bool) or sink_len < 1 or sink_len % block_size:
            raise ConfigError(
                f"sink_len={sink_len!r} with block_size={block_size}",
                "a positive multiple of block_size, since a request's own tokens start in a new block",
                "choose another block_size, or pad the sinks",
            )
        if self.calculate_kv_scales:
            raise ScaleError(
                f"calculate_kv_scales in layer {self.prefix!r}, which stores its sinks before the first step",
                "given scales",
                "QuantConfig(k_scale=..., v_scale=...)",
            )
        self.sink_len = sink_len
        self._written: list[tuple[Tensor, int]] | None = None
        heads, shared = self.num_kv_heads, self.kv_sharing_target_layer_name is not None
        # Tensors made in inference mode could not be loaded or moved outside of it.
        with torch.inference_mode(False):
            self.sink_key = self._own_sinks("sink_key", sink_key, (sink_len, heads, self.head_size), shared)
            self.sink_value = self._own_sinks("sink_value", sink_value, (sink_len, heads, self.head_size_v), shared)
            # Ids of the reserved blocks; on the CPU so that they have values under `torch.device('meta')`.
            blocks = torch.arange(1, 1 + sink_len // block_size, dtype=torch.int32, device="cpu")
            self.register_buffer("sink_blocks", blocks, persistent=False)

    def _own_sinks(self, name: str, sinks: Tensor | None, shape: tuple[int, ...], shared: bool) -> nn.Parameter | None:
        if shared:
            if sinks is not None:
                raise ConfigError(
                    f"{name} given for layer {self.prefix!r}, which shares a KV cache", "the target's sinks", "drop it"
                )
            return None
        if sinks is None:
            # Binding a cache refuses NaN, so sinks that were never loaded are noticed.
            return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
            got = dtype_name(sinks.dtype) if isinstance(sinks, Tensor) else type(sinks).__name__
            raise DtypeError(f"{name} is {got} in layer {self.prefix!r}", "a tensor of floats", f"convert {name}")
        if tuple(sinks.shape) != shape:
            raise ShapeError(
                f"{name} has shape {tuple(sinks.shape)} in layer {self.prefix!r}",
                f"{shape}: sink tokens, KV heads, width of one head",
                "check sink_len and the head counts",
            )
        return sinks if isinstance(sinks, nn.Parameter) else nn.Parameter(sinks.detach().clone(), requires_grad=False)

    def get_kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec | None:
        """Return what cache this layer needs for a model of `dtype`; `None` if it shares another layer's."""
        if self.kv_sharing_target_layer_name is not None:
            return None
        window = self._request["sliding_window"]
        return SinkFullAttentionSpec(sink_len=self.sink_len, sliding_window=window, **self._spec_fields(dtype))

    def resolve_config(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        target: BoundCache | None = None,
        memory: CacheMemory | None = None,
    ) -> AttentionConfig:
        """Return the config that binding a cache would give; see `Attention`.

        Raises:
            ConfigError: the sinks have no values yet.
        """
        self._check_sinks()
        return super().resolve_config(dtype, device, target, memory)

    def _check_target(self, target: BoundCache) -> None:
        super()._check_target(target)
        theirs = target.sink_len
        if theirs != self.sink_len:
            raise CacheError(
                f"KV sharing target of layer {self.prefix!r} has sink_len {theirs}, the layer {self.sink_len}",
                "equal values",
                "share the cache of an equal layer",
            )

    def _check_cache(self, key_cache: Tensor, value_cache: Tensor | None) -> None:
        needed = 1 + self.sink_len // self.cache_config.block_size
        blocks = key_cache.shape[1 if key_cache.dim() == 5 else 0] if key_cache.dim() > 1 else needed
        if blocks < needed:
            raise CacheError(
                f"a KV cache of {blocks} blocks for layer {self.prefix!r} with {self.sink_len} sink tokens",
                f"more than {needed} blocks, since requests cannot use the null block and those of the sinks",
                "allocate more blocks",
            )

    def _finish_binding(self, config: AttentionConfig, device: DeviceInfo) -> None:
        self._plan_key = sink_plan_key(self._plan_key, self.sink_len)
        self.refresh_sinks()

    def _check_sinks(self) -> None:
        for name, sinks in (("sink_key", self.sink_key), ("sink_value", self.sink_value)):
            if sinks is not None and (sinks.is_meta or not bool(torch.isfinite(sinks).all())):
                raise ConfigError(
                    f"{name} of layer {self.prefix!r} is {'on meta' if sinks.is_meta else 'not finite'}",
                    "learned values",
                    f"pass {name}=, or load a state dict before allocating the KV cache",
                )

    def refresh_sinks(self) -> None:
        """Write the sinks into their blocks of the cache; do nothing if no cache is bound or it is shared.

        Raises:
            ConfigError: the sinks have no values yet.
        """
        if self.sink_key is None or self.sink_value is None or self.kv_cache is None or self.config is None:
            return
        self._check_sinks()
        dtype, device = MODEL_DTYPES[self.config.dtype], self.kv_cache.device
        first = self.config.block_size
        with torch.no_grad():
            torch.ops.vattn.kv_cache_update(
                self.sink_key.to(device, dtype),
                self.sink_value.to(device, dtype),
                *self.cache_views(),
                torch.arange(first, first + self.sink_len, device=device),
                self.k_scale,
                self.v_scale,
                self.config.encode(),
            )
        self._written = self._versions()

    def write_changed_sinks(self) -> None:
        """Call `refresh_sinks` if sinks, scales or cache changed since the last write; host work only."""
        if self.sink_key is None or self.kv_cache is None:
            return
        now, before = self._versions(), self._written
        if before is None or any(a is not b or v != w for (a, v), (b, w) in zip(now, before, strict=True)):
            self.refresh_sinks()

    def _versions(self) -> list[tuple[Tensor, int]]:
        """Return the tensors that decide the stored bytes, with their versions (inference tensors have none)."""
        tensors = [t for t in (self.sink_key, self.sink_value, self.k_scale, self.v_scale) if t is not None]
        found = [(t, 0 if t.is_inference() else t._version) for t in tensors]
        return found if self.kv_cache is None else [*found, (self.kv_cache, 0)]

    def _apply(self, *args: Any, **kwargs: Any) -> StaticSinkAttention:
        super()._apply(*args, **kwargs)
        # A conversion may round the sinks without a new version.
        self._written = None
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh_sinks()

    def _layer_step(self, metadata: AttentionMetadata) -> LayerStep:
        step = super()._layer_step(metadata)
        table = step.block_table
        return step._replace(
            seq_lens=with_sinks(step.seq_lens, self.sink_len),
            block_table=torch.cat((self.sink_blocks.expand(table.shape[0], -1), table), dim=1),
            mm_ranges=None if step.mm_ranges is None else step.mm_ranges + self.sink_len,
        )

    def _check_step(self, *args: Any) -> None:
        super()._check_step(*args)
        self.write_changed_sinks()

    def extra_repr(self) -> str:
        """Show the request, the sinks and the chosen backend."""
        return f"{super().extra_repr()}, sink_len={self.sink_len}"
