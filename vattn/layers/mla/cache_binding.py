"""What a latent attention layer is before it runs: its request, its weights, and the cache that it is bound to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vattn.backends import selector
from vattn.cache.bindings import check_format, note_format
from vattn.cache.layout import mla_cache_dtype, mla_cache_shape, separate, shape_of_mla_storage
from vattn.cache.memory import CacheMemory
from vattn.cache.specs import KVCacheSpec, MLAAttentionSpec
from vattn.config.attention import CacheConfig
from vattn.config.dcp import without_dcp
from vattn.config.mla import DECODE_THRESHOLD, MLAConfig
from vattn.config.typed import typed_on_error
from vattn.distributed.group import ContextParallel
from vattn.errors import CacheError, ConfigError, ScaleError, UnsupportedRequestError
from vattn.layers.base.arguments import check_configs
from vattn.layers.base.buffers import OwnBuffers
from vattn.layers.base.checks import check_storage_kind
from vattn.layers.base.dcp import check_context_parallel, gather_rows, partial_request
from vattn.layers.base.scales import QuantConfig, ScaleSource, first_scale, make_scale
from vattn.layers.base.step import CacheViews
from vattn.layers.mla.arguments import check_indexer, check_latent_arguments
from vattn.layers.mla.kv_b_proj import (
    ScalesWithoutValues,
    TensorState,
    WeightsWithoutValues,
    check_values,
    projection_weight,
    weights_version,
)
from vattn.metadata.dcp import telling_others
from vattn.ops.arguments_mla import MLACacheUpdateArgs
from vattn.ops.checks_mla import check_latent_strides
from vattn.ops.reference.mla_absorb import elements_per_token, key_and_value_weights
from vattn.quantization.formats import FP8_E4M3_MAX, MODEL_DTYPES, dtype_name
from vattn.quantization.mla_formats import MLA_FORMATS, resolve_mla_cache_dtype


class BoundLatents(OwnBuffers):
    """Base of `MLAAttention`, which documents the arguments: all of a layer but its steps."""

    takes_context_parallel = True

    kv_b_weight: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    output_scale: Tensor | None
    workspace: Tensor | None
    scales_ready: Tensor | None
    """int32 `[1]`: whether `k_scale` is calculated; `None` where it is given."""

    @typed_on_error
    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        kv_b_proj: nn.Module,
        cache_config: CacheConfig | None = None,
        quant_config: QuantConfig | None = None,
        prefix: str = "",
        attn_backend: str | None = None,
        use_sparse: bool = False,
        indexer: object | None = None,
        *,
        decode_threshold: int = DECODE_THRESHOLD,
        workspace_tokens: int | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        check_configs(type(self).__name__, cache_config, quant_config, exact_prefill=False)
        self.prefix = prefix
        self.cache_config = cache_config or CacheConfig()
        self.quant_config = quant_config or QuantConfig()
        self.attn_backend = "auto" if attn_backend is None else attn_backend
        self.num_heads, self.num_kv_heads, self.scale = num_heads, 1, scale
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.use_sparse, self.indexer = use_sparse, indexer
        self.workspace_tokens = workspace_tokens
        self.config: Any = None
        """What the bound cache made of the request, backend included; `None` before `bind_kv_cache`."""
        # In a tuple it is no submodule: its owner saves and moves it.
        self._kv_b_proj = (kv_b_proj,)
        check_latent_arguments(self, kv_b_proj)
        self.head_size = kv_lora_rank + qk_rope_head_dim
        self._request: dict[str, Any] = {
            "num_heads": num_heads,
            "qk_nope_head_dim": qk_nope_head_dim,
            "qk_rope_head_dim": qk_rope_head_dim,
            "v_head_dim": v_head_dim,
            "kv_lora_rank": kv_lora_rank,
            "scale": scale,
            "block_size": self.cache_config.block_size,
            "query_format": self.quant_config.query_format,
            "output_format": self.quant_config.output_format,
            "decode_threshold": decode_threshold,
            "sparse": use_sparse,
            "backend": self.attn_backend,
        }
        self.context_parallel = context_parallel
        if context_parallel is not None:
            check_context_parallel(self, num_heads, v_head_dim, {})
            self._request.update(partial_request(context_parallel))
        self._op_config = ""
        self._own_heads: MLAConfig | None = None
        """For this rank's heads over all tokens; `None` where steps with prompts gather no latents."""
        self._own_op_config = ""
        self._plan_key = ""
        self._weights_read: tuple[TensorState, ...] | None = None
        # Buffers made in inference mode could not be loaded outside of it.
        with torch.inference_mode(False):
            self._register_tensors()
        self._request_config(torch.bfloat16)

    def _register_tensors(self) -> None:
        quant, scaled = self.quant_config, MLA_FORMATS[self._canonical(torch.bfloat16)].scaled
        calculate, unit = (
            self.cache_config.calculate_kv_scales,
            isinstance(quant.k_scale, str) and quant.k_scale == "unit",
        )
        sources = [quant.k_scale is not None and not (unit and not scaled), calculate]
        if sum(sources) != scaled:
            raise ScaleError(
                f"layer {self.prefix!r} has cache_dtype={self.cache_config.cache_dtype!r}, "
                f"{'no' if quant.k_scale is None else 'a'} k_scale and calculate_kv_scales={calculate}",
                "a number, a tensor of one value, 'unit' or a calculation with an fp8_e4m3 cache, None or 'unit' "
                "otherwise",
                "QuantConfig(k_scale='unit') if 1.0 is meant" if scaled else "drop k_scale and the calculation",
            )
        if (quant.query_format != "none") != (quant.q_scale is not None):
            raise ScaleError(
                f"layer {self.prefix!r} has query_format={quant.query_format!r} and no q_scale",
                "a number, a tensor of one value or 'unit' with an FP8 query",
                "QuantConfig(q_scale='unit') if 1.0 is meant",
            )
        for name in ("k_scale", "q_scale", "output_scale"):
            given: ScaleSource = getattr(quant, name)
            if name == "k_scale":
                given = ("unit" if calculate else given) if scaled else None
            self.register_buffer(name, None if given is None else make_scale(name, given, (1,)))
        ready = torch.zeros(1, dtype=torch.int32, device="cpu") if calculate else None
        self.register_buffer("scales_ready", ready)
        for name in ("kv_cache", "kv_b_weight", "workspace"):
            self.register_buffer(name, None, persistent=False)

    def _canonical(self, dtype: torch.dtype) -> str:
        return resolve_mla_cache_dtype(self.cache_config.cache_dtype, dtype)

    def _request_config(self, dtype: torch.dtype) -> MLAConfig:
        name = self._canonical(dtype)
        scale = "tensor" if MLA_FORMATS[name].scaled else "none"
        return MLAConfig(dtype=dtype_name(dtype), kv_cache_dtype=name, kv_scale=scale, **self._request)

    @property
    def W_UK_T(self) -> Tensor | None:
        """`[num_heads, P, L]`, a view of the prepared weights: what takes queries into the latent space."""
        return self._projections()[0]

    @property
    def W_UV(self) -> Tensor | None:
        """`[num_heads, L, V]`, a view of the prepared weights: what makes values of latents."""
        return self._projections()[1]

    def _projections(self) -> tuple[Tensor | None, Tensor | None]:
        weight = self.kv_b_weight
        return (None, None) if weight is None else key_and_value_weights(weight, self._request_config(weight.dtype))

    def process_weights_after_loading(self, act_dtype: torch.dtype | None = None) -> None:
        """Read `kv_b_proj` into the layer's own weights, in place where they exist: captured graphs stay valid.

        `bind_kv_cache` does it too, unless they have no values then; call it after the weights were loaded or changed.
        Eager calls refuse to run until then where a change shows in a tensor's identity, version, address, shape or
        dtype. Values written through `.data` (`weight.data.mul_`, `.data.copy_`), through `.detach().numpy()` or to
        tensors made in inference mode show in none of them, and nothing is noticed in compiled code and graphs: there
        the old weights go on being used.

        Args:
            act_dtype: model dtype; default that of the bound cache.

        Under context parallelism every rank calls it, for a `kv_b_proj` that holds a rank's heads is gathered.

        Raises:
            ConfigError: no dtype is known yet, or one that no model has, or the weights are on meta or not finite in
                it, or the module has a bias, scales under two names or is not linear.
            ShapeError: the projection has another geometry than the layer.
            ScaleError: scales of e4m3 weights that are not positive and finite.
            RankError: under context parallelism, some ranks have all heads in `kv_b_proj` and others their own.
        """
        model = tuple(MODEL_DTYPES.values()) if self.config is None else (MODEL_DTYPES[self.config.dtype],)
        dtype = model[0] if act_dtype is None and self.config is not None else act_dtype
        if not isinstance(dtype, torch.dtype) or dtype not in model:
            raise ConfigError(
                f"process_weights_after_loading(act_dtype={act_dtype!r:.60}) in layer {self.prefix!r}",
                f"{', '.join(map(str, model))}{'' if self.config is None else ', that of the bound cache'}",
                "pass act_dtype=torch.bfloat16, or bind a cache first" if self.config is None else "leave it out",
            )
        columns = self.qk_nope_head_dim + self.v_head_dim
        weight = self._all_heads_weight(columns, dtype).view(self.num_heads, columns, self.kv_lora_rank)
        kept, self._weights_read = self.kv_b_weight, weights_version(self._kv_b_proj[0])
        device = weight.device if self.kv_cache is None else self.kv_cache.device
        with torch.inference_mode(False), torch.no_grad():
            if kept is not None and kept.dtype == dtype:
                kept.copy_(weight)
            else:
                self._buffers["kv_b_weight"] = weight.to(device, dtype, copy=True)

    def _all_heads_weight(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Return `[num_heads * columns, L]`, which ranks gather if each has the rows of its own heads."""
        parallel, rows = self.context_parallel, self.num_heads * columns
        shards = 1 if parallel is None else parallel.world_size
        with telling_others(parallel):
            # Transposed weights come as views, and clones keep their strides.
            weight = projection_weight(self._kv_b_proj[0], rows, self.kv_lora_rank, shards).contiguous()
            check_values(weight, dtype)
        if parallel is None:
            return weight
        parallel.agree({"layer": self.prefix, "rows of kv_b_proj": weight.shape[0]})
        if weight.shape[0] == rows:
            return weight
        device = weight.device if self.kv_cache is None else self.kv_cache.device
        with torch.no_grad():
            return gather_rows(weight.to(device, dtype), parallel, f"kv_b_proj of layer {self.prefix!r}")

    def get_kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return what cache this layer needs for a model of `dtype`."""
        config = self._request_config(dtype)
        return MLAAttentionSpec(
            num_kv_heads=1,
            head_size=config.head_size,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=config.block_size,
            row_bytes=config.row_bytes if config.packed else None,
        )

    def resolve_config(
        self, dtype: torch.dtype, device: torch.device | str, target: object = None, memory: CacheMemory | None = None
    ) -> MLAConfig:
        """Return what binding a cache would make of the request, backend included; changes nothing.

        Args:
            memory: of the cache.

        Raises:
            UnsupportedRequestError: no backend, or not the requested one, runs the request; or a cache to share.
        """
        if target is not None:
            raise UnsupportedRequestError(
                f"layer {self.prefix!r} shares a KV cache",
                "latent attention with a cache of its own",
                "drop the target",
            )
        config = self._request_config(dtype)
        return config.replace(backend=selector.choose(config, device, self.prefix, memory).name)

    def bind_kv_cache(self, storage: Tensor, dtype: torch.dtype, target: object = None) -> None:
        """Give the layer its raw storage, fix dtype, device and backend, and read `kv_b_proj`.

        Args:
            storage: of `mla_cache_shape(config, num_blocks)`, its blocks contiguous; they may lie apart, as a layer's
                part of one tensor for all layers. Kept, not copied.
            dtype: model dtype, that of the queries to come.
            target: `None`: latent attention shares no cache.

        Raises:
            CacheError, DtypeError, StrideError: the storage does not fit the request, or no model has the dtype.
            ConfigError, ShapeError, ScaleError: weights that cannot be read, as of `process_weights_after_loading`, or
                an indexer that is none. Weights on meta or not finite, as before a model is loaded, are refused at
                ranks and where others were read before; elsewhere calls refuse to run until
                `process_weights_after_loading` was called.
            UnsupportedRequestError: no backend, or not the requested one, runs the request on the storage's device.
        """
        check_storage_kind(self, storage, dtype)
        config = self.resolve_config(dtype, storage.device, target, CacheMemory.of(storage))
        blocks = storage.shape[0] if storage.dim() else 0
        shape, stored = shape_of_mla_storage(storage, config, blocks), mla_cache_dtype(config)
        if tuple(storage.shape) != shape or storage.dtype != stored or not blocks:
            raise CacheError(
                f"KV cache storage {tuple(storage.shape)} of {dtype_name(storage.dtype)}",
                f"{mla_cache_shape(config, max(blocks, 1))} of {dtype_name(stored)}, any number of blocks",
                "use vattn.allocate_kv_cache(model, num_blocks=...)",
            )
        check_latent_strides("KV cache storage", storage, config)
        check_format(storage, config)
        if storage.nbytes < storage.untyped_storage().nbytes():
            storage, _ = separate((storage, None))
        self._check_values()
        if self.use_sparse:
            check_indexer(self.indexer, self.prefix)
        workspace = None
        if self.workspace_tokens is not None:
            elements = int(self.workspace_tokens) * elements_per_token(config)
            with torch.inference_mode(False):
                workspace = torch.empty(elements, dtype=dtype, device=storage.device)
        before = self.config, self.kv_cache
        # Ranks gather weights where the cache is.
        self.config, self.kv_cache = config, storage
        try:
            self.process_weights_after_loading(dtype)
        except BaseException as error:
            # Weights may be loaded later, where none were read before: calls refuse to run until then. Ranks must all
            # have read the same.
            unloaded = isinstance(error, (WeightsWithoutValues, ScalesWithoutValues))
            if not unloaded or self.kv_b_weight is not None or self.context_parallel is not None:
                self.config, self.kv_cache = before
                raise
        weight = self.kv_b_weight
        if weight is not None and weight.device != storage.device:
            self._buffers["kv_b_weight"] = weight.to(storage.device)
        note_format(storage, config)
        self.num_blocks = blocks
        self._op_config = config.encode()
        self._own_heads = self._config_of_own_heads(config, storage.device)
        self._own_op_config = "" if self._own_heads is None else self._own_heads.encode()
        self._plan_key = selector.choose(config, storage.device).plan_key(config)  # type: ignore[arg-type]
        self._buffers["workspace"] = workspace
        for name, buffer in self._own_buffers().items():
            self._buffers[name] = buffer.to(storage.device)

    def _may_gather_latents(self) -> bool:
        parallel = self.context_parallel
        ranks = 1 if parallel is None or not parallel.group_name else parallel.world_size
        return ranks > 1 and not self.use_sparse

    def _config_of_own_heads(self, config: MLAConfig, device: torch.device) -> MLAConfig | None:
        parallel = self.context_parallel
        if parallel is None or not self._may_gather_latents():
            return None
        heads, fmt = self.num_heads // parallel.world_size, self.quant_config.output_format
        own: MLAConfig = without_dcp(config).replace(num_heads=heads, lse=False, output_format=fmt)
        try:
            selector.choose(own, device, self.prefix)
        except UnsupportedRequestError:
            return None
        return own

    @property
    def gathers_keys(self) -> bool:
        """Whether the ranks gather the latents of steps with prompts; builders prepare it."""
        return self._own_heads is not None

    def _calculate_scale(self, update: MLACacheUpdateArgs) -> None:
        """Set the scale of the cache from the first step that has a real token, before anything of it is written."""
        assert self.k_scale is not None and self.scales_ready is not None
        rows = torch.cat((update.kv_c, update.k_pe), dim=-1).unsqueeze(1)
        scale, ready = first_scale(rows, update.slot_mapping >= 0, self.k_scale, self.scales_ready, FP8_E4M3_MAX)
        self.k_scale.copy_(scale)
        self.scales_ready.copy_(ready)

    def cache_views(self) -> CacheViews:
        """Return the storage, as `vattn.explain` reads it."""
        assert self.kv_cache is not None
        return self.kv_cache, None

    def extra_repr(self) -> str:
        """Show the request and the chosen backend."""
        dims = f"{self.qk_nope_head_dim}+{self.qk_rope_head_dim}/{self.v_head_dim}"
        backend = "none yet (no KV cache bound)" if self.config is None else self.config.backend
        cache = self.cache_config.cache_dtype if self.config is None else self.config.kv_cache_dtype
        return (
            f"num_heads={self.num_heads}, head dims={dims}, scale={self.scale:.4g}, kv_lora_rank={self.kv_lora_rank}, "
            f"q_lora_rank={self.q_lora_rank}, kv_cache={cache}, block_size={self.cache_config.block_size}, "
            f"workspace={'by the backend' if self.workspace_tokens is None else f'{self.workspace_tokens} tokens'}, "
            f"backend={backend}"
        )
