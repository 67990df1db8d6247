"""`Attention`: decoder attention over a paged KV cache, for an `nn.Module` that compiles fullgraph."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vattn import context
from vattn.backends import selector
from vattn.backends.base import DeviceInfo
from vattn.config import AttentionConfig, AttentionType, CacheConfig
from vattn.errors import (
    CacheError,
    CacheNotBoundError,
    ConfigError,
    DtypeError,
    GradientError,
    MetadataError,
    ScaleError,
    ShapeError,
    UnsupportedRequestError,
)
from vattn.formats import FP8_E4M3_MAX, KV_FORMATS, OUTPUT_FORMATS, dtype_name, resolve_kv_cache_dtype
from vattn.layers.own_buffers import OwnBuffers
from vattn.layers.request import (
    StepKind,
    alibi_kind,
    check_decoder,
    check_extra,
    check_per_head,
    check_same_bytes,
    check_storage,
    kv_scale,
    layer_index,
    own_tensor,
    query_scale,
    scale_kind,
    step_configs,
)
from vattn.layers.scales import QuantConfig, count_clipped, first_scale, make_scale
from vattn.metadata import AttentionMetadata
from vattn.ops import checks
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs
from vattn.quantization import encode_query

if TYPE_CHECKING:
    from vattn.kv_cache import KVCacheSpec


class Attention(OwnBuffers):
    """Attend new tokens to everything their requests have seen, through a paged KV cache.

    Args:
        num_heads, head_size, scale: query heads, key width of one head, factor of the scores.
        num_kv_heads: KV heads, a divisor of `num_heads`; default `num_heads`.
        alibi_slopes: one slope per query head.
        use_alibi_sqrt: ALiBi by the square root of the distance.
        cache_config: block size, cache dtype, default window, scale calculation; default `CacheConfig()`.
        quant_config: scales and query or output quantisation.
        logits_soft_cap: `cap * tanh(score / cap)`.
        per_layer_sliding_window: window of this layer, before `cache_config.sliding_window`.
        prefix: unique name of the layer in its model, such as `"model.layers.3.attn"`.
        attn_type: only `"decoder"` here; other types are layers of their own.
        kv_sharing_target_layer_name: prefix of an earlier layer whose cache this layer reads and never writes.
        attn_backend: name of a backend, never replaced by another; default: the first that accepts.
        head_size_v: value width; default `head_size`.
        **extra: `sinks` (`[num_heads]` learned logits; a parameter is kept, anything else copied as fp32),
            `chunk_lookback` (int >= 0), `mm_prefix` (`"full"` or `"clamped"`), `batch_invariant` (bool).

    Raises:
        ConfigError, ScaleError, UnknownOptionError, UnsupportedRequestError: at construction where the values alone
            decide, at `bind_kv_cache` where dtype or device decide.

    State: scale buffers are fp32, saved in the state dict, and keep their dtype under `model.to(dtype)`, as the cache
    does. The cache is a non-persistent buffer: "reduce-overhead" mode captures it, and Inductor updates it in place.
    Moving the layer to another device drops the cache.

    Compile: one graph for equal layers; lengths are tensors and never recompile. Make caches with
    `vattn.allocate_kv_cache(model, ...)` first.

    Example:
        >>> import torch, vattn
        >>> layer = vattn.Attention(num_heads=4, head_size=16, scale=0.25, num_kv_heads=2)
        >>> _ = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32, block_size=16)
        >>> step = builder.build(query_lens=[3], seq_lens=[3], block_tables=[[1]])
        >>> qkv = [torch.randn(3, heads * 16) for heads in (4, 2, 2)]
        >>> layer(*qkv, metadata=step).shape
        torch.Size([3, 64])
    """

    alibi_slopes: Tensor | None
    # None for what the layer does not quantise; declared for the type checker as what the code that uses them finds.
    k_scale: Tensor
    v_scale: Tensor
    q_scale: Tensor
    output_scale: Tensor
    scales_ready: Tensor
    clip_counts: Tensor
    kv_cache: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        use_alibi_sqrt: bool | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: QuantConfig | None = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        attn_type: str | AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: str | None = None,
        head_size_v: int | None = None,
        **extra: Any,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.cache_config = cache_config or CacheConfig()
        self.quant_config = quant_config or QuantConfig()
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_backend = attn_backend or "auto"
        self.observing = False
        if not isinstance(prefix, str):
            raise ConfigError(f"prefix={prefix!r}", "a string", "name the layer, such as 'model.layers.3.attn'")
        options = check_extra(extra, _NAMED_ARGUMENTS)
        check_decoder(attn_type)
        if kv_sharing_target_layer_name is not None and kv_sharing_target_layer_name == prefix:
            raise ConfigError(
                f"layer {prefix!r} shares the KV cache of itself", "an earlier layer", "name another target layer"
            )
        if self.attn_backend != "auto":
            selector.get_backend(self.attn_backend)

        window = per_layer_sliding_window
        if window is None:
            window = self.cache_config.sliding_window
        lookback = options["chunk_lookback"]
        self.config: AttentionConfig | None = None
        """What the bound cache made of the request, backend included; `None` before `bind_kv_cache`."""
        self._request: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": head_size,
            "head_size_v": self.head_size_v,
            "scale": scale,
            "block_size": self.cache_config.block_size,
            "kv_cache_layout": self.cache_config.kv_cache_layout,
            "query_format": self.quant_config.query_format,
            "output_format": self.quant_config.output_format,
            "sliding_window": window,
            "chunk_lookback": None if lookback == -1 else lookback,
            "logits_soft_cap": logits_soft_cap,
            "alibi": alibi_kind(alibi_slopes, use_alibi_sqrt),
            "sinks": options["sinks"] is not None,
            "mm_prefix": options["mm_prefix"],
            "batch_invariant": options["batch_invariant"],
            "backend": self.attn_backend,
        }
        self._cache_dtype = self._choose_cache_dtype(window)
        self._ops: dict[StepKind, str] = {}
        self._refused: dict[StepKind, str] = {}
        self._plan_key = ""
        # Buffers made in inference mode could not be calculated or loaded outside of it.
        with torch.inference_mode(False):
            self._register_tensors(alibi_slopes, options["sinks"])
        self._request_config(torch.bfloat16)

    def _choose_cache_dtype(self, window: int | None) -> str:
        skip = self.cache_config.kv_cache_dtype_skip_layers
        index = layer_index(self.prefix)
        skipped = ("sliding_window" in skip and window is not None) or (index is not None and str(index) in skip)
        return "auto" if skipped else self.cache_config.cache_dtype

    def _register_tensors(
        self, alibi_slopes: Tensor | Sequence[float] | None, sinks: Tensor | Sequence[float] | None
    ) -> None:
        heads = self.num_heads
        slopes = None
        if alibi_slopes is not None:
            slopes = own_tensor(alibi_slopes)
            check_per_head("alibi_slopes", slopes, heads)
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        learned = sinks if sinks is None or isinstance(sinks, nn.Parameter) else own_tensor(sinks)
        if learned is not None:
            check_per_head("sinks", learned, heads)
        if isinstance(learned, nn.Parameter):
            self.sinks: Tensor | None = learned
        else:
            self.register_buffer("sinks", learned, persistent=False)

        quant, shared = self.quant_config, self.kv_sharing_target_layer_name is not None
        quantised = self._cache_dtype != "auto" and KV_FORMATS[self._canonical(torch.bfloat16)].quantised
        self.calculate_kv_scales = self.cache_config.calculate_kv_scales and quantised and not shared
        where: dict[str, Any] = {
            "prefix": self.prefix,
            "cache_dtype": self._cache_dtype,
            "quantised": quantised,
            "calculate": self.calculate_kv_scales,
            "shared": shared,
            "kv_heads": self.num_kv_heads,
        }
        # A skipped layer has no use for the scales that its model's one QuantConfig carries.
        skipped = self._cache_dtype != self.cache_config.cache_dtype
        k_scale = kv_scale("k_scale", None if skipped else quant.k_scale, **where)
        v_scale = kv_scale("v_scale", None if skipped else quant.v_scale, **where)
        if k_scale is not None and v_scale is not None and k_scale.numel() != v_scale.numel():
            raise ScaleError(
                f"k_scale has {k_scale.numel()} values and v_scale {v_scale.numel()}",
                "the same granularity for both",
                "repeat the single value for every KV head",
            )
        # A state dict holds scales once: a shared layer's entry would overwrite its target's when it is loaded.
        self.register_buffer("k_scale", k_scale, persistent=not shared)
        self.register_buffer("v_scale", v_scale, persistent=not shared)
        q_scale = query_scale(
            quant.q_scale,
            prefix=self.prefix,
            query_format=quant.query_format,
            calculate=self.calculate_kv_scales,
            kv_heads=self.num_kv_heads,
        )
        self.register_buffer("q_scale", q_scale)
        output_scale = quant.output_scale
        self.register_buffer(
            "output_scale", None if output_scale is None else make_scale("output_scale", output_scale, (1,))
        )
        # Of k_scale, v_scale and q_scale: 1 once it is calculated, or given.
        query_ready = int(q_scale is None or quant.q_scale is not None)
        ready = [0, 0, query_ready]
        self.register_buffer(
            "scales_ready",
            torch.tensor(ready, dtype=torch.int32, device="cpu") if self.calculate_kv_scales else None,
        )
        counts = torch.zeros((2, 2), dtype=torch.int64, device="cpu") if quantised else None
        self.register_buffer("clip_counts", counts, persistent=False)
        self.register_buffer("kv_cache", None, persistent=False)

    def _canonical(self, dtype: torch.dtype) -> str:
        return resolve_kv_cache_dtype(self._cache_dtype, dtype)

    def _request_config(self, dtype: torch.dtype, k_scale: Tensor | None = None) -> AttentionConfig:
        """Describe the request for a model of `dtype`; `k_scale` stands in for the layer's own (a shared cache's)."""

        return AttentionConfig(
            dtype=dtype_name(dtype),
            kv_cache_dtype=self._canonical(dtype),
            kv_scale=scale_kind(self.k_scale if k_scale is None else k_scale),
            query_scale=scale_kind(self.q_scale),
            **self._request,
        )

    def get_kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec | None:
        """Return what cache this layer needs for a model of `dtype`; `None` if it shares another layer's."""
        from vattn.kv_cache import FullAttentionSpec, SlidingWindowSpec

        if self.kv_sharing_target_layer_name is not None:
            return None
        config = self._request_config(dtype)
        common: dict[str, Any] = {
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
            "head_size_v": config.head_size_v,
            "kv_cache_dtype": config.kv_cache_dtype,
            "block_size": config.block_size,
            "layout": config.kv_cache_layout,
        }
        if config.sliding_window is None or config.mm_prefix == "full":
            return FullAttentionSpec(**common)
        return SlidingWindowSpec(sliding_window=config.sliding_window, **common)

    def resolve_config(
        self, dtype: torch.dtype, device: torch.device | str, target: Attention | None = None
    ) -> AttentionConfig:
        """Return what binding a cache would make of the request, backend included; changes nothing.

        Raises:
            CacheError: the layer would read the target's bytes differently.
            UnsupportedRequestError: no backend, or not the one asked for, runs the request on the device.
        """
        if target is not None:
            check_same_bytes(self.prefix, self._request_config(dtype), target._request_config(dtype))
        config = self._request_config(dtype, None if target is None else target.k_scale)
        return config.replace(backend=selector.choose(config, device).name)

    def bind_kv_cache(self, storage: Tensor, dtype: torch.dtype, target: Attention | None = None) -> None:
        """Give the layer its raw storage and fix dtype, device and backend.

        Args:
            storage: contiguous, of `kv_cache_shape(config, num_blocks)`; kept, not copied.
            dtype: model dtype, that of the queries to come.
            target: the layer whose storage and scales this one shares; needed with `kv_sharing_target_layer_name`.

        Raises:
            CacheError: the storage does not fit the request, or the target's geometry differs.
            UnsupportedRequestError: no backend, or not the one asked for, runs the request on the storage's device.
        """
        if (target is None) != (self.kv_sharing_target_layer_name is None):
            raise CacheError(
                f"layer {self.prefix!r} bound {'without' if target is None else 'with'} a target layer",
                f"target layer {self.kv_sharing_target_layer_name!r}",
                "use vattn.allocate_kv_cache, which finds it",
            )
        if target is not None and (target.config is None or storage is not target.kv_cache):
            raise CacheError(
                f"KV sharing target of layer {self.prefix!r} is not bound to this storage",
                "the target's own storage",
                "bind the target first",
            )
        config = self.resolve_config(dtype, storage.device, target)
        check_storage(storage, config)
        self._check_values()
        device = DeviceInfo.of(storage.device)
        self._ops, self._refused = step_configs(config, device)
        self.config = config
        self._plan_key = selector.get_backend(config.backend).plan_key(config)
        self.kv_cache = storage
        for name, buffer in self._own_buffers().items():
            self._buffers[name] = buffer.to(storage.device)
        if target is not None:
            self._buffers["k_scale"], self._buffers["v_scale"] = target.k_scale, target.v_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output_shape: torch.Size | Sequence[int] | None = None,
        *,
        metadata: AttentionMetadata | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write the new keys and values to the cache and attend.

        Args:
            query: `[T, num_heads * head_size]` or `[T, num_heads, head_size]`; padding rows may hold anything.
            key, value: same with KV heads; both `None` for a layer that shares a cache.
            output_shape: shape of the result; default `[T, num_heads * head_size_v]`.
            metadata: this step's; default the one of `vattn.forward_context`. Without any this is a profiling call: the
                result is zero and no cache is needed.

        Returns:
            The output in the query's dtype (or the output format's container); rows of padding are zero. With an output
            format that computes scales, `(output, block_scale)`.

        Raises:
            CacheNotBoundError: metadata but no cache.
            ShapeError, DtypeError: tensors that contradict the layer.
        """
        if metadata is None:
            metadata = context.current
        query = _split_heads("query", query, self.num_heads, self.head_size)
        if (key is None) != (value is None) or (key is None) != (self.kv_sharing_target_layer_name is not None):
            raise ShapeError(
                f"layer {self.prefix!r} got key {_given(key)} and value {_given(value)}",
                "both for a layer with its own cache, neither for one that shares a cache",
                "pass key and value, or None for both",
            )
        fmt = OUTPUT_FORMATS[self.quant_config.output_format]
        output, block_scale = fmt.allocate(query, self.head_size_v, query.dtype)
        if output_shape is not None:
            _check_output_shape(output, output_shape)
        if metadata is None:
            output.zero_()
            if block_scale is not None:
                block_scale.zero_()
            return self._shaped(output, block_scale, output_shape)
        if self.kv_cache is None or self.config is None:
            raise CacheNotBoundError(
                f"layer {self.prefix!r} has no KV cache",
                "a bound cache whenever metadata is given",
                "call vattn.allocate_kv_cache(model, num_blocks=...) first",
            )
        came = dtype_name(query.dtype)
        if came != self.config.dtype:
            raise DtypeError(
                f"query is {came} in layer {self.prefix!r}",
                f"{self.config.dtype}, the dtype its cache was bound for",
                f"allocate the KV cache again after model.to(dtype); under autocast, with dtype=torch.{came}",
            )
        op_config = self._op_config(metadata)
        if key is not None and value is not None:
            key = _split_heads("key", key, self.num_kv_heads, self.head_size)
            value = _split_heads("value", value, self.num_kv_heads, self.head_size_v)
        if not torch.compiler.is_compiling():
            self._check_step(query, key, value, metadata, output, block_scale, op_config)
        if key is not None and value is not None:
            self._write_cache(query, key, value, metadata, op_config)
        if self.q_scale is not None:
            query = encode_query(query, self.q_scale, self.num_kv_heads)
        torch.ops.vattn.attention(*self._attention_args(query, metadata, output, block_scale, op_config))
        return self._shaped(output, block_scale, output_shape)

    def _check_step(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        metadata: AttentionMetadata,
        output: Tensor,
        block_scale: Tensor | None,
        op_config: str,
    ) -> None:
        """Refuse what either op would refuse, before anything changes. Compiled code leaves it to the ops."""
        if key is not None and key.shape[0] != query.shape[0]:
            raise ShapeError(
                f"key has {key.shape[0]} tokens and query {query.shape[0]} in layer {self.prefix!r}",
                "the same tokens for query, key and value",
                "check what was projected",
            )
        if query.shape[0] != metadata.slot_mapping.shape[0]:
            raise ShapeError(
                f"query has {query.shape[0]} tokens in layer {self.prefix!r}",
                f"{metadata.slot_mapping.shape[0]}, the tokens of the metadata, padding included",
                "build the step for the tokens of this call",
            )
        inputs = (query, key, value, self.sinks)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            raise GradientError(
                f"layer {self.prefix!r} got an input that requires a gradient while grad mode is on",
                "inference only; attention has no backward",
                "call the model under torch.no_grad() or torch.inference_mode()",
            )
        config = AttentionConfig.parse(op_config)
        if metadata.block_size not in (0, config.block_size):
            raise MetadataError(
                f"metadata for blocks of {metadata.block_size} tokens in layer {self.prefix!r}",
                f"blocks of {config.block_size} tokens",
                "give the builder layers=model, or the block_size of CacheConfig",
            )
        if key is not None and value is not None:
            assert self.kv_cache is not None
            update = CacheUpdateArgs(
                key, value, self.kv_cache, metadata.slot_mapping, self.k_scale, self.v_scale, op_config
            )
            checks.check_kv_cache_update(update, config)
        if self.q_scale is not None:
            query = torch.empty_like(query, dtype=torch.float8_e4m3fn)
        args = self._attention_args(query, metadata, output, block_scale, op_config)
        checks.check_attention(AttentionArgs(*args), config)

    def _op_config(self, metadata: AttentionMetadata) -> str:
        if isinstance(metadata.causal, Tensor):
            causality = "per_request"
        elif isinstance(metadata.causal, bool):
            causality = "causal" if metadata.causal else "bidirectional"
        else:
            raise MetadataError(
                f"metadata.causal={metadata.causal!r}", "a bool, or int32 flags [B]", "make it with builder.build"
            )
        variant = (causality, metadata.tree_bias is not None, metadata.mm_ranges is not None)
        if variant not in self._ops:
            raise UnsupportedRequestError(
                f"layer {self.prefix!r} cannot run this step: causality {variant[0]}, tree bias {variant[1]}, "
                f"multimodal ranges {variant[2]}\n{self._refused[variant]}\n",
                "what its backend accepts",
                "ask for another attn_backend",
            )
        return self._ops[variant]

    def _write_cache(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata, op_config: str
    ) -> None:
        if self.calculate_kv_scales:
            self._calculate_scales(query, key, value, metadata.slot_mapping)
        if self.observing and self.clip_counts is not None and self.config is not None:
            real, largest = metadata.slot_mapping >= 0, KV_FORMATS[self.config.kv_cache_dtype].max_value
            keys = count_clipped(key, real, self.k_scale, largest)
            values = count_clipped(value, real, self.v_scale, largest)
            self.clip_counts.add_(torch.stack((keys, values)))
        torch.ops.vattn.kv_cache_update(
            key, value, self.kv_cache, metadata.slot_mapping, self.k_scale, self.v_scale, op_config
        )

    def _calculate_scales(self, query: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Set the scales from the first step that has a real token, before anything of it is written."""
        assert self.config is not None
        if key.dtype != query.dtype or value.dtype != query.dtype:
            raise ScaleError(
                f"key is {dtype_name(key.dtype)} and value {dtype_name(value.dtype)} in layer {self.prefix!r}, which "
                "calculates its scales",
                f"{dtype_name(query.dtype)}: what is quantised already has its scale",
                "QuantConfig(k_scale=..., v_scale=...) without calculate_kv_scales",
            )
        real, ready = slot_mapping >= 0, self.scales_ready.split(1)
        largest = KV_FORMATS[self.config.kv_cache_dtype].max_value
        new_k, k_ready = first_scale(key, real, self.k_scale, ready[0], largest)
        new_v, v_ready = first_scale(value, real, self.v_scale, ready[1], largest)
        q_ready = ready[2]
        if self.q_scale is not None and self.quant_config.q_scale is None:
            new_q, q_ready = first_scale(query, real, self.q_scale, q_ready, FP8_E4M3_MAX)
            self.q_scale.copy_(new_q)
        self.k_scale.copy_(new_k)
        self.v_scale.copy_(new_v)
        self.scales_ready.copy_(torch.cat((k_ready, v_ready, q_ready)))

    def _attention_args(
        self, query: Tensor, metadata: AttentionMetadata, output: Tensor, block_scale: Tensor | None, op_config: str
    ) -> tuple[Any, ...]:
        """Return the arguments of `vattn::attention` in the schema's order."""
        plan = metadata.plans.get(self._plan_key)
        tree = metadata.tree_bias is not None
        return (
            query,
            self.kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            output,
            block_scale,
            None,
            self.output_scale,
            self.q_scale,
            self.k_scale,
            self.v_scale,
            self.alibi_slopes,
            self.sinks,
            metadata.causal if isinstance(metadata.causal, Tensor) else None,
            metadata.tree_bias,
            metadata.tree_id if tree else None,
            metadata.mm_ranges,
            None,
            [] if plan is None else [plan],
            None,
            op_config,
        )

    def _shaped(
        self, output: Tensor, block_scale: Tensor | None, output_shape: torch.Size | Sequence[int] | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        output = output.flatten(1) if output_shape is None else output.view(*output_shape)
        return output if block_scale is None else (output, block_scale)

    def extra_repr(self) -> str:
        """Show the request and the chosen backend."""
        kv = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_size={self.head_size}"
        if self.head_size_v != self.head_size:
            kv += f", head_size_v={self.head_size_v}"
        backend = "none yet (no KV cache bound)" if self.config is None else self.config.backend
        cache = self._cache_dtype if self.config is None else self.config.kv_cache_dtype
        asked = "" if self.attn_backend == "auto" else " (asked for)"
        return f"{kv}, kv_cache={cache}, block_size={self.cache_config.block_size}, backend={backend}{asked}"


_NAMED_ARGUMENTS = [name for name in inspect.signature(Attention).parameters if name != "extra"]


def _given(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"of shape {tuple(tensor.shape)}"


def _check_output_shape(output: Tensor, shape: torch.Size | Sequence[int]) -> None:
    size = 1
    for length in shape:
        size *= length
    if size != output.numel():
        raise ShapeError(
            f"output_shape={tuple(shape)} for {output.numel()} elements",
            f"a shape of {tuple(output.shape)}'s size, without -1",
            "leave it out for [tokens, num_heads * head_size_v]",
        )


def _split_heads(name: str, tensor: Tensor, heads: int, width: int) -> Tensor:
    if tensor.dim() == 2 and tensor.shape[1] == heads * width:
        return tensor.unflatten(1, (heads, width))
    if tensor.dim() == 3 and tensor.shape[1] == heads and tensor.shape[2] == width:
        return tensor
    raise ShapeError(
        f"{name} has shape {tuple(tensor.shape)}",
        f"[tokens, {heads * width}] or [tokens, {heads}, {width}]",
        "reshape it, or check the head counts of the layer",
    )
