"""`CachedAttention`: what every attention layer with a paged KV cache does, whatever it attends to.

A subclass says what its arguments mean (`__init__`), what its cache holds (`get_kv_cache_spec`), which tensors of a
step it reads (`_layer_step`), and when it takes keys and values (`_check_given`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vattn import context
from vattn.backends import selector
from vattn.backends.base import DeviceInfo
from vattn.config import AttentionConfig, CacheConfig
from vattn.errors import (
    CacheError,
    CacheNotBoundError,
    ConfigError,
    DtypeError,
    GradientError,
    MetadataError,
    ShapeError,
    UnsupportedRequestError,
)
from vattn.formats import KV_FORMATS, OUTPUT_FORMATS, dtype_name, resolve_kv_cache_dtype
from vattn.grouped_metadata import CacheGroup, GroupedMetadata
from vattn.layers.cache_scales import CacheScales
from vattn.layers.kv_transfer_utils import save_kv_layer, wait_for_layer_load
from vattn.layers.layer_step import LayerStep, check_output_shape, given, split_heads
from vattn.layers.request import (
    StepKind,
    check_per_head,
    check_sharing,
    check_storage,
    layer_index,
    own_tensor,
    scale_kind,
    step_configs,
)
from vattn.layers.scales import QuantConfig
from vattn.metadata import AttentionMetadata
from vattn.ops import checks
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs
from vattn.quantization import encode_query

if TYPE_CHECKING:
    from vattn.kv_cache import KVCacheSpec


class CachedAttention(CacheScales):
    """Base of the layers that read keys and values from a paged cache.

    Args:
        num_heads, head_size, scale, num_kv_heads, head_size_v: as for `Attention`, with `None` for a default.
        prefix, cache_config, quant_config, kv_sharing_target_layer_name, attn_backend: as for `Attention`.
        alibi_slopes, sinks: one value per query head, or `None`.
        fast_prefill: whether queries are `kept_rows` of the step's; only for a layer that shares a cache.
        **request: further fields of `AttentionConfig`.
    """

    alibi_slopes: Tensor | None
    kv_cache: Tensor | None
    kv_transfer_token: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None,
        head_size_v: int | None,
        *,
        prefix: str,
        cache_config: CacheConfig | None,
        quant_config: QuantConfig | None,
        kv_sharing_target_layer_name: str | None,
        attn_backend: str | None,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        sinks: Tensor | Sequence[float] | None = None,
        fast_prefill: bool = False,
        **request: Any,
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
        if not isinstance(prefix, str):
            raise ConfigError(f"prefix={prefix!r}", "a string", "name the layer, such as 'model.layers.3.attn'")
        if kv_sharing_target_layer_name is not None and kv_sharing_target_layer_name == prefix:
            raise ConfigError(
                f"layer {prefix!r} shares the KV cache of itself", "an earlier layer", "name another target layer"
            )
        if not isinstance(fast_prefill, bool) or (fast_prefill and kv_sharing_target_layer_name is None):
            raise ConfigError(
                f"fast_prefill={fast_prefill!r} in layer {prefix!r}, which shares "
                + ("no KV cache" if kv_sharing_target_layer_name is None else "a KV cache"),
                "True in layers that share a KV cache: one that writes its own needs every token",
                "leave fast_prefill out",
            )
        self.fast_prefill = fast_prefill
        if self.attn_backend != "auto":
            selector.get_backend(self.attn_backend)
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
            "sinks": sinks is not None,
            "backend": self.attn_backend,
            **request,
        }
        self._cache_dtype = self._choose_cache_dtype(request.get("sliding_window"))
        self._ops: dict[StepKind, str] = {}
        self._refused: dict[StepKind, str] = {}
        self._plan_key = ""
        self.kv_cache_group: CacheGroup | None = None
        """The layer's group in a cache that was allocated with `hybrid=True`."""
        self._target: tuple[CachedAttention, ...] = ()
        # Buffers made in inference mode could not be calculated or loaded outside of it.
        with torch.inference_mode(False):
            self._register_tensors(alibi_slopes, sinks)
        self._request_config(torch.bfloat16)

    def _choose_cache_dtype(self, window: int | None) -> str:
        skip = self.cache_config.kv_cache_dtype_skip_layers
        index = layer_index(self.prefix)
        skipped = ("sliding_window" in skip and window is not None) or (index is not None and str(index) in skip)
        return "auto" if skipped else self.cache_config.cache_dtype

    def _register_tensors(
        self, alibi_slopes: Tensor | Sequence[float] | None, sinks: Tensor | Sequence[float] | None
    ) -> None:
        slopes = None
        if alibi_slopes is not None:
            slopes = own_tensor(alibi_slopes)
            check_per_head("alibi_slopes", slopes, self.num_heads)
        self.register_buffer("alibi_slopes", slopes, persistent=False)
        learned = sinks if sinks is None or isinstance(sinks, nn.Parameter) else own_tensor(sinks)
        if learned is not None:
            check_per_head("sinks", learned, self.num_heads)
        if isinstance(learned, nn.Parameter):
            self.sinks: Tensor | None = learned
        else:
            self.register_buffer("sinks", learned, persistent=False)
        quantised = self._cache_dtype != "auto" and KV_FORMATS[self._canonical(torch.bfloat16)].quantised
        self._register_scales(quantised, shared=self.kv_sharing_target_layer_name is not None)
        self.register_buffer("kv_cache", None, persistent=False)
        # Given by KVTransfer; without it the layer has no transfer ops.
        self.register_buffer("kv_transfer_token", None, persistent=False)

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
        raise NotImplementedError

    def _spec_fields(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the fields that all cache specs have."""
        config = self._request_config(dtype)
        return {
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
            "head_size_v": config.head_size_v,
            "kv_cache_dtype": config.kv_cache_dtype,
            "block_size": config.block_size,
            "layout": config.kv_cache_layout,
        }

    def resolve_config(
        self, dtype: torch.dtype, device: torch.device | str, target: CachedAttention | None = None
    ) -> AttentionConfig:
        """Return what binding a cache would make of the request, backend included; changes nothing.

        Raises:
            CacheError: the layer would read the target's bytes differently.
            UnsupportedRequestError: no backend, or not the one asked for, runs the request on the device.
        """
        if target is not None:
            self._check_target(target)
            check_sharing(self.prefix, self._request_config(dtype), target._request_config(dtype))
        config = self._request_config(dtype, None if target is None else target.k_scale)
        return config.replace(backend=selector.choose(config, device).name)

    def _check_target(self, target: CachedAttention) -> None:
        """Refuse a target of another kind; what configs tell is compared elsewhere."""
        if type(target) is not type(self):
            raise CacheError(
                f"KV sharing target of layer {self.prefix!r} is a {type(target).__name__}, the layer a "
                f"{type(self).__name__}",
                "layers of one class",
                "share the cache of an equal layer",
            )

    def bind_kv_cache(self, storage: Tensor, dtype: torch.dtype, target: CachedAttention | None = None) -> None:
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
        # In a tuple the target is no submodule of this layer.
        self._target = () if target is None else (target,)
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
        metadata = self._own_part(metadata)
        query = split_heads("query", query, self.num_heads, self.head_size)
        self._check_given(key, value, metadata)
        fmt = OUTPUT_FORMATS[self.quant_config.output_format]
        output, block_scale = fmt.allocate(query, self.head_size_v, query.dtype)
        if output_shape is not None:
            check_output_shape(output, output_shape)
        if metadata is None:
            output.zero_()
            if block_scale is not None:
                block_scale.zero_()
            return self._shaped(output, block_scale, output_shape)
        self._check_bound(query)
        step = self._layer_step(metadata)
        if self.fast_prefill:
            step = step.kept(metadata)
        op_config = self._op_config(step)
        if key is not None and value is not None:
            key = split_heads("key", key, self.num_kv_heads, self.head_size)
            value = split_heads("value", value, self.num_kv_heads, self.head_size_v)
        if not torch.compiler.is_compiling():
            self._check_step(query, key, value, step, output, block_scale, op_config)
        if self.kv_transfer_token is not None:
            wait_for_layer_load(self.kv_cache)
        if key is not None and value is not None and step.key_slots is not None:
            self._write_cache(query, key, value, step.query_slots, step.key_slots, op_config)
        if self.q_scale is not None:
            query = encode_query(query, self.q_scale, self.num_kv_heads)
        torch.ops.vattn.attention(*self._arguments(query, step, output, block_scale, op_config))
        if self.kv_transfer_token is not None:
            save_kv_layer(self.kv_cache, self.kv_transfer_token)
        return self._shaped(output, block_scale, output_shape)

    def _own_part(self, metadata: AttentionMetadata | None) -> AttentionMetadata | None:
        """Return the metadata to use: that of the call or of the forward context, or its part for the layer's group."""
        if self.kv_cache_group is not None:
            return self.kv_cache_group.part(metadata, context.current)
        metadata = context.current if metadata is None else metadata
        if isinstance(metadata, GroupedMetadata):
            raise MetadataError(
                f"metadata with groups in layer {self.prefix!r}, whose cache has none",
                "metadata of AttentionMetadataBuilder",
                "allocate the cache with hybrid=True, or build steps without groups",
            )
        return metadata

    def _check_given(self, key: Tensor | None, value: Tensor | None, metadata: AttentionMetadata | None) -> None:
        """Refuse a key or value that is missing or too many."""
        if (key is None) != (value is None) or (key is None) != (self.kv_sharing_target_layer_name is not None):
            raise ShapeError(
                f"layer {self.prefix!r} got key {given(key)} and value {given(value)}",
                "both for a layer with its own cache, neither for one that shares a cache",
                "pass key and value, or None for both",
            )

    def _check_bound(self, query: Tensor) -> None:
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

    def _layer_step(self, metadata: AttentionMetadata) -> LayerStep:
        """Return what this layer reads of a step."""
        return LayerStep.of(metadata, self._plan_key)

    def _op_config(self, step: LayerStep) -> str:
        variant = step.kind()
        if variant not in self._ops:
            raise UnsupportedRequestError(
                f"layer {self.prefix!r} cannot run this step: causality {variant[0]}, tree bias {variant[1]}, "
                f"multimodal ranges {variant[2]}\n{self._refused[variant]}\n",
                "what its backend accepts",
                "ask for another attn_backend",
            )
        return self._ops[variant]

    def _check_step(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        step: LayerStep,
        output: Tensor,
        block_scale: Tensor | None,
        op_config: str,
    ) -> None:
        """Refuse what either op would refuse, before anything changes. Compiled code leaves it to the ops."""
        self._check_rows(query, key, step)
        for target in self._target:
            if target.kv_cache is not self.kv_cache:
                raise CacheError(
                    f"the KV sharing target of layer {self.prefix!r} has another cache by now",
                    "the cache that both were bound to",
                    "bind the sharing layer again, or use vattn.allocate_kv_cache for the whole model",
                )
        inputs = (query, key, value, self.sinks)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            raise GradientError(
                f"layer {self.prefix!r} got an input that requires a gradient while grad mode is on",
                "inference only; attention has no backward",
                "call the model under torch.no_grad() or torch.inference_mode()",
            )
        config = AttentionConfig.parse(op_config)
        if step.block_size not in (0, config.block_size):
            raise MetadataError(
                f"metadata for blocks of {step.block_size} tokens in layer {self.prefix!r}",
                f"blocks of {config.block_size} tokens",
                "give the builder layers=model, or the block_size of CacheConfig",
            )
        if key is not None and value is not None and step.key_slots is not None:
            assert self.kv_cache is not None
            update = CacheUpdateArgs(key, value, self.kv_cache, step.key_slots, self.k_scale, self.v_scale, op_config)
            checks.check_kv_cache_update(update, config)
        if self.q_scale is not None:
            query = torch.empty_like(query, dtype=torch.float8_e4m3fn)
        args = self._arguments(query, step, output, block_scale, op_config)
        checks.check_attention(AttentionArgs(*args), config)

    def _check_rows(self, query: Tensor, key: Tensor | None, step: LayerStep) -> None:
        """Refuse tensors of other row counts than the step's."""
        if key is not None and key.shape[0] != query.shape[0]:
            raise ShapeError(
                f"key has {key.shape[0]} tokens and query {query.shape[0]} in layer {self.prefix!r}",
                "the same tokens for query, key and value",
                "check what was projected",
            )
        if query.shape[0] != step.query_slots.shape[0]:
            fix = "build the step for the tokens of this call"
            if self.fast_prefill:
                fix = "pass vattn.kept_rows of the queries, or of what they are projected from"
            raise ShapeError(
                f"query has {query.shape[0]} tokens in layer {self.prefix!r}",
                f"{step.query_slots.shape[0]}, the tokens of the metadata, padding included",
                fix,
            )

    def _arguments(
        self, query: Tensor, step: LayerStep, output: Tensor, block_scale: Tensor | None, op_config: str
    ) -> tuple[Any, ...]:
        inputs = {
            "output_scale": self.output_scale,
            "q_scale": self.q_scale,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }
        return step.arguments(query, self.kv_cache, output, block_scale, inputs, op_config)

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
