"""`BoundCache`: what a layer with a paged KV cache requests, and what binding a storage makes of it.

A subclass says what its arguments mean (`__init__`) and what its cache holds (`get_kv_cache_spec`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vattn.backends import selector
from vattn.cache.allocation import skip_names
from vattn.cache.bindings import check_format, note_format
from vattn.cache.groups import CacheGroup
from vattn.cache.layout import CACHE_BUFFERS, op_views, separate
from vattn.cache.memory import CacheMemory
from vattn.cache.specs import KVCacheSpec
from vattn.config.attention import AttentionConfig, CacheConfig
from vattn.config.device import DeviceInfo
from vattn.config.typed import typed_on_error
from vattn.distributed.group import ContextParallel
from vattn.errors import CacheError, ConfigError
from vattn.layers.base.arguments import (
    StepKind,
    check_sharing,
    check_storage,
    check_views,
    layout_of,
    own_cache_dtype,
    scale_kind,
    step_configs,
)
from vattn.layers.base.cache_scales import CacheScales
from vattn.layers.base.checks import check_storage_kind
from vattn.layers.base.dcp import check_context_parallel, partial_request
from vattn.layers.base.own_heads import OwnHeads
from vattn.layers.base.scales import QuantConfig
from vattn.layers.base.step import CacheViews
from vattn.layers.base.two_parts import CascadeOps, cascade_ops, context_request, step_ops, step_request
from vattn.layers.base.varlen import VarlenOp, ops_without_cache
from vattn.quantization.formats import KV_FORMATS, dtype_name, resolve_kv_cache_dtype


class BoundCache(CacheScales):
    """Layer that requests attention over a paged cache; binding a cache chooses the backend that runs it.

    Args:
        num_heads, head_size, scale, num_kv_heads, head_size_v: as for `Attention`, with `None` for a default.
        prefix, cache_config, quant_config, kv_sharing_target_layer_name, attn_backend: as for `Attention`.
        alibi_slopes, sinks: one value per query head, or `None`.
        fast_prefill: whether queries are `kept_rows` of the step's; only where no key comes from the rows of the query.
        context_parallel: the ranks that share the cache.
        **request: further fields of `AttentionConfig`.
    """

    writes_tokens = True
    """Whether a layer with a cache of its own writes keys for the rows of its query."""

    takes_exact_prefill = False
    """Whether layers of this class can attend to a step's own keys and values instead of cached ones: under
    `CacheConfig.exact_prefill`, and while they are bound to no cache."""

    takes_context_parallel = False
    """Whether this class runs over a cache that several ranks share."""

    alibi_slopes: Tensor | None
    sinks: Tensor | None
    kv_cache: Tensor | None
    key_cache: Tensor | None
    """The keys `[num_blocks, block_size, num_kv_heads, head_size]`, or the storage of a packed format, for the ops."""
    value_cache: Tensor | None
    """The values `[..., head_size_v]`; `None` for a packed format."""
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
        context_parallel: ContextParallel | None = None,
        **request: Any,
    ) -> None:
        super().__init__()
        self._set_sizes(num_heads, head_size, num_kv_heads, head_size_v, prefix, attn_backend)
        self.scale = scale
        self.cache_config = cache_config or CacheConfig()
        self.quant_config = quant_config or QuantConfig()
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        if kv_sharing_target_layer_name is not None and kv_sharing_target_layer_name == prefix:
            raise ConfigError(
                f"layer {prefix!r} shares the KV cache of itself", "an earlier layer", "name another target layer"
            )
        writes_tokens = kv_sharing_target_layer_name is None and self.writes_tokens
        if not isinstance(fast_prefill, bool) or (fast_prefill and writes_tokens):
            raise ConfigError(
                f"fast_prefill={fast_prefill!r} in layer {prefix!r}, which "
                + ("writes every token to its own KV cache" if writes_tokens else "writes no token of the query"),
                "True or False in layers that share a KV cache and in cross attention, False elsewhere",
                "leave fast_prefill out",
            )
        self.fast_prefill = fast_prefill
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
        self.context_parallel = context_parallel
        if context_parallel is not None:
            ordered = bool(request.get("batch_invariant")) and context_parallel.combine != "all_to_all"
            check_context_parallel(
                self, num_heads, self.head_size_v, {"batch_invariant and combine='reduce_scatter'": ordered}
            )
            self._request.update(partial_request(context_parallel), sinks=False)
        self.skip_names = skip_names(prefix, request.get("sliding_window"))
        """What `kv_cache_dtype_skip_layers` may call this layer."""
        self._cache_dtype = own_cache_dtype(self.cache_config, self.skip_names)
        self._ops: dict[StepKind, str] = {}
        self._step_ops: dict[StepKind, str] = {}
        """With `exact_prefill`: the part of the step's own keys and values."""
        self._refused: dict[StepKind, str] = {}
        self._cascade_ops = CascadeOps({}, "", {}, 0)
        self._plan_key = ""
        self._own_heads: OwnHeads | None = None
        """For this rank's heads over all tokens; `None` where prompts are attended in parts."""
        self.kv_cache_group: CacheGroup | None = None
        """The layer's group in a cache that was allocated with `hybrid=True`."""
        self._target: tuple[BoundCache, ...] = ()
        # Buffers made in inference mode could not be calculated or loaded outside of it.
        with torch.inference_mode(False):
            self._register_tensors(alibi_slopes, sinks)
        config = self._request_config(torch.bfloat16)
        self._ops_without_cache: dict[str, VarlenOp] = {}
        """Of `ops_without_cache`: for steps without block tables, while the layer is bound to no cache."""
        if self.takes_exact_prefill and kv_sharing_target_layer_name is None and context_parallel is None:
            self._ops_without_cache = ops_without_cache(config, self._cache_dtype, self.cache_config.exact_prefill)

    def _register_tensors(
        self, alibi_slopes: Tensor | Sequence[float] | None, sinks: Tensor | Sequence[float] | None
    ) -> None:
        self._register_per_head("alibi_slopes", alibi_slopes)
        self._register_per_head("sinks", sinks)
        quantised = self._cache_dtype != "auto" and KV_FORMATS[self._canonical(torch.bfloat16)].quantised
        self._register_scales(quantised, shared=self.kv_sharing_target_layer_name is not None)
        for name in CACHE_BUFFERS:
            self.register_buffer(name, None, persistent=False)
        # Given by KVTransfer; without it the layer has no transfer ops.
        self.register_buffer("kv_transfer_token", None, persistent=False)

    def _canonical(self, dtype: torch.dtype) -> str:
        return resolve_kv_cache_dtype(self._cache_dtype, dtype)

    def _request_config(self, dtype: torch.dtype, k_scale: Tensor | None = None) -> AttentionConfig:
        """Describe the request for a model of `dtype`; `k_scale` replaces the layer's own (a shared cache's)."""
        config = AttentionConfig(
            dtype=dtype_name(dtype),
            kv_cache_dtype=self._canonical(dtype),
            kv_scale=scale_kind(self.k_scale if k_scale is None else k_scale),
            query_scale=scale_kind(self.q_scale),
            **self._request,
        )
        if self.cache_config.exact_prefill and config.kv_cache_dtype != config.dtype:
            return context_request(config, self.prefix)
        return config

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
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        target: BoundCache | None = None,
        memory: CacheMemory | None = None,
    ) -> AttentionConfig:
        """Return what binding a cache would make of the request, backend included; changes nothing.

        Args:
            memory: of the cache, if it is an engine's.

        Raises:
            CacheError: the layer would read the target's bytes differently.
            UnsupportedRequestError: no backend, or not the requested one, runs the request on the device.
        """
        if target is not None:
            self._check_target(target)
            check_sharing(self.prefix, self._request_config(dtype), target._request_config(dtype))
        config = self._request_config(dtype, None if target is None else target.k_scale)
        config = config.replace(backend=self._choose_backend(config, device, memory))
        if config.context_only:
            selector.choose(step_request(config), device, self.prefix)
        return config

    def _choose_backend(
        self, config: AttentionConfig, device: torch.device | str, memory: CacheMemory | None = None
    ) -> str:
        """Return the name of the backend that runs what the layer makes of a request.

        Raises:
            UnsupportedRequestError: no backend, or not the requested one, does.
        """
        return selector.choose(config, device, self.prefix, memory).name

    def _check_target(self, target: BoundCache) -> None:
        """Refuse a target of another kind; what configs tell is compared elsewhere."""
        if type(target) is not type(self):
            raise CacheError(
                f"KV sharing target of layer {self.prefix!r} is a {type(target).__name__}, the layer a "
                f"{type(self).__name__}",
                "layers of one class",
                "share the cache of an equal layer",
            )

    def why_no_ranges(self) -> str | None:
        """Return why the layer takes no steps with multimodal ranges; `None` if it does."""
        return self._refused.get(("causal", False, True))

    def why_no_trees(self) -> str | None:
        """Return why the layer takes no steps with trees of drafts; `None` if it does."""
        return self._refused.get(("causal", True, False))

    @property
    def gathers_keys(self) -> bool:
        """Whether the ranks gather keys for steps with prompts; builders prepare it."""
        return self._own_heads is not None

    @typed_on_error
    def bind_kv_cache(
        self,
        key_cache: Tensor,
        value_cache: Tensor | None = None,
        dtype: torch.dtype | None = None,
        target: BoundCache | None = None,
    ) -> None:
        """Give the layer the memory of its cache and fix dtype, device and backend. Nothing is copied or cleared.

        Args:
            key_cache, value_cache: keys `[num_blocks, block_size, num_kv_heads, head_size]` and values
                `[..., head_size_v]` in memory of your own: any strides but adjacent columns, apart or side by side, a
                layer's part of one tensor for all layers; dtype of the format or uint8. Their strides decide the
                layout, whatever the request says. Or `key_cache` alone: a
                contiguous raw storage of `vattn.kv_cache_shape`; packed formats have no other.
            dtype: of the model, that of the queries; by default that of `key_cache`.
            target: the layer to share the cache and scales with; needed with `kv_sharing_target_layer_name`.

        Raises:
            CacheError: the memory does not fit the request or has no room for static sinks, or the target's geometry
                differs.
            ShapeError, DtypeError, StrideError: views of another shape, dtype or blocks, or with elements that overlap;
                differential attention: values in which the heads of a token lie apart.
            ConfigError: static sinks without values.
            UnsupportedRequestError: no backend, or not the requested one, runs the request on the cache's device.

        Example:
            >>> import torch, vattn
            >>> layer = vattn.Attention(num_heads=2, head_size=16, scale=0.25)
            >>> pool = torch.zeros(12, 4, 16, 2, 32)  # blocks, layers, tokens, heads, a key and a value
            >>> layer.bind_kv_cache(*pool[:, 1].split(16, dim=-1))
        """
        storage, dtype = key_cache, getattr(key_cache, "dtype", None) if dtype is None else dtype
        check_storage_kind(self, storage, dtype)
        self._check_cache(key_cache, value_cache)
        if (target is None) != (self.kv_sharing_target_layer_name is None):
            raise CacheError(
                f"layer {self.prefix!r} bound {'without' if target is None else 'with'} a target layer",
                f"target layer {self.kv_sharing_target_layer_name!r}",
                "use vattn.allocate_kv_cache, which finds it",
            )
        if target is not None and (target.config is None or not target.holds(key_cache, value_cache)):
            raise CacheError(
                f"KV sharing target of layer {self.prefix!r} is not bound to this storage",
                "the target's own storage",
                "bind the target first",
            )
        assert dtype is not None
        requested, memory = self._request["kv_cache_layout"], None
        if isinstance(value_cache, Tensor):
            self._request["kv_cache_layout"], memory = layout_of(key_cache), CacheMemory.of(key_cache, value_cache)
        try:
            config = self.resolve_config(dtype, storage.device, target, memory)
        finally:
            self._request["kv_cache_layout"] = requested
        if value_cache is None:
            check_storage(storage, config)
            views = op_views(storage, config)
        else:
            check_views(key_cache, value_cache, config)
            views = key_cache, value_cache
        check_format(views[0], config)
        self._check_values()
        device = DeviceInfo.of(storage.device)
        if config.context_only:
            self._ops, self._step_ops, self._refused = step_ops(config, device)
        else:
            self._ops, self._refused = step_configs(config, device)
        self._cascade_ops = cascade_ops(config, device)
        self._own_heads = OwnHeads.of(self, config, device)
        self.config = config
        self._plan_key = selector.get_backend(config.backend).plan_key(config)
        views = separate(views)
        self.kv_cache = storage if value_cache is None else views[0]
        self.key_cache, self.value_cache = views if target is None else target.cache_views()
        note_format(self.kv_cache, config)
        self.num_blocks = None if config.attn_type == "encoder_decoder" else views[0].shape[0]
        for name, buffer in self._own_buffers().items():
            self._buffers[name] = buffer.to(storage.device)
        # In a tuple the target is no submodule of this layer.
        self._target = () if target is None else (target,)
        if target is not None:
            self._buffers["k_scale"], self._buffers["v_scale"] = target.k_scale, target.v_scale
        self._finish_binding(config, device)

    def _check_cache(self, key_cache: Tensor, value_cache: Tensor | None) -> None:
        """Refuse memory that layers of this class cannot use, before anything of it is bound."""

    def _finish_binding(self, config: AttentionConfig, device: DeviceInfo) -> None:
        """Set what layers of this class need beside or instead of what the config gives."""

    def __getstate__(self) -> dict[str, Any]:
        storage, state = self._buffers.get("kv_cache"), dict(self.__dict__)
        if storage is not None and storage.dim() != 4:
            # A copy makes them again.
            state["_buffers"] = {**self._buffers, **dict.fromkeys(CACHE_BUFFERS[1:])}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy has a storage of its own, of which its keys and values are views again.
        storage = self._buffers.get("kv_cache")
        if storage is not None and storage.dim() != 4 and self.config is not None:
            self.key_cache, self.value_cache = separate(op_views(storage, self.config))
            note_format(storage, self.config)

    def holds(self, key_cache: Tensor, value_cache: Tensor | None) -> bool:
        """Return whether this is the layer's cache: its storage, or the same views."""
        if not isinstance(value_cache, Tensor):
            return key_cache is self.kv_cache
        key, value = separate((key_cache, value_cache))
        return key is self.key_cache and value is self.value_cache

    def cache_views(self) -> CacheViews:
        """Return the keys and values as ops take them; a storage that was set by hand has none yet."""
        if self.key_cache is not None:
            return self.key_cache, self.value_cache
        assert self.kv_cache is not None and self.config is not None
        return op_views(self.kv_cache, self.config)

    def extra_repr(self) -> str:
        """Show the request and the chosen backend."""
        backend = "none yet (no KV cache bound)" if self.config is None else self.config.backend
        cache = self._cache_dtype if self.config is None else self.config.kv_cache_dtype
        if self.kv_sharing_target_layer_name is not None:
            cache += f" of {self.kv_sharing_target_layer_name!r}" + (", fast_prefill" if self.fast_prefill else "")
        requested = "" if self.attn_backend == "auto" else " (requested)"
        if self.context_parallel is not None:
            requested += f", rank {self.context_parallel.rank} of {self.context_parallel.world_size}"
        block_size = self.cache_config.block_size
        return f"{self._sizes_repr()}, kv_cache={cache}, block_size={block_size}, backend={backend}{requested}"
