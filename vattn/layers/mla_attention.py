"""`MLAAttention`: multi-head latent attention over a paged cache of latents, as DeepSeek's models have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vattn.backends import selector
from vattn.backends.mla import mla_backends
from vattn.config import CacheConfig
from vattn.context_parallel.steps import telling_others
from vattn.errors import (
    CacheError,
    CacheNotBoundError,
    ConfigError,
    ScaleError,
    UnsupportedRequestError,
)
from vattn.formats import MODEL_DTYPES, dtype_name
from vattn.keywords import known_keywords, refuse_unknown_inputs, required_arguments
from vattn.layers.kv_b_weights import (
    ScalesWithoutValues,
    TensorState,
    WeightsWithoutValues,
    check_values,
    projection_weight,
    weights_version,
)
from vattn.layers.latent_request import (
    check_indexer,
    check_latent_arguments,
    latent_rows,
    listed_positions,
    plain_step,
)
from vattn.layers.latent_rotary import LatentRotary, check_table, rope_string
from vattn.layers.layer_step import LayerResult, split_heads
from vattn.layers.own_buffers import OwnBuffers
from vattn.layers.parallel_request import (
    all_heads,
    attend_parts,
    check_context_parallel,
    check_step_ranks,
    gather_rows,
    partial_arguments,
    partial_request,
)
from vattn.layers.request import check_configs, check_extra, named_arguments
from vattn.layers.scales import QuantConfig, make_scale
from vattn.layers.step_checks import (
    check_block_size,
    check_bound_dtype,
    check_devices,
    check_no_gradients,
    check_tokens,
)
from vattn.metadata import AttentionMetadata
from vattn.mla_config import DECODE_THRESHOLD, MLAConfig
from vattn.mla_formats import MLA_FORMATS, resolve_mla_cache_dtype
from vattn.ops import mla_checks
from vattn.ops.mla_arguments import MLAAttentionArgs, MLACacheUpdateArgs
from vattn.ops.mla_cache_layout import mla_cache_dtype, mla_cache_shape, shape_of_mla_storage
from vattn.ops.mla_chunks import elements_per_token
from vattn.ops.mla_weights import key_and_value_weights

if TYPE_CHECKING:
    from vattn.kv_cache import KVCacheSpec

EXTRA_OPTIONS: dict[str, Any] = {
    "decode_threshold": DECODE_THRESHOLD,
    "workspace_tokens": None,
    "context_parallel": None,
}
"""Options beyond the named arguments, with their defaults."""


class MLAAttention(OwnBuffers):
    """Attend new tokens to everything their requests have seen, through a paged cache of one latent row per token.

    Args:
        num_heads, scale: query heads, factor of the scores.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: columns of a query head without and with rotation, and of a
            value: P, R and V.
        q_lora_rank: rank of the query's own projection, `None` for none; the layer gets finished queries and only
            shows it.
        kv_lora_rank: columns of the latent, L.
        kv_b_proj: linear module from L to `num_heads * (P + V)` columns: `nn.Linear`, one with e4m3 weights and scales,
            or any other; it stays the caller's, and only `process_weights_after_loading` reads it.
        cache_config: block size and cache dtype (`vattn.mla_formats.MLA_FORMATS`); default `CacheConfig()`.
        quant_config: `k_scale` of an FP8 cache; `query_format` with `q_scale`, which quantise queries once they are
            absorbed; output quantisation.
        prefix: unique name of the layer in its model.
        attn_backend: name of a backend, never replaced by another; default: the first that accepts.
        use_sparse: rows see the positions alone that `indexer` lists.
        indexer: with `use_sparse`: an object whose `topk_indices` is int32 `[max_tokens, K]`, filled before the layer
            runs: positions in its request that each row sees, -1 for none.
        **extra: `decode_threshold` (longest query that is absorbed into the latent space), `workspace_tokens` (keys and
            values of how many tokens are expanded at a time), `context_parallel`
            (`vattn.context_parallel.ContextParallel`: the ranks that share the cache; the layer then takes its rank's
            part of the `num_heads` query heads, while `kv_b_proj` has all of them, or on every rank its own).

    Raises:
        ConfigError, ScaleError, ShapeError, DtypeError, UnknownOptionError, UnsupportedRequestError: at construction
            where the values alone decide, at `bind_kv_cache` where dtype, device or weights decide.

    State: the prepared weights are a buffer outside of the state dict, written in place. The cache is one too; moving
    the layer to another device drops it.

    Compile: one graph for equal layers; lengths are tensors and never recompile.

    Example:
        >>> import torch, vattn
        >>> kv_b_proj = torch.nn.Linear(32, 4 * (16 + 16), bias=False)
        >>> layer = vattn.MLAAttention(4, 24**-0.5, 16, 8, 16, None, 32, kv_b_proj)
        >>> _ = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32, layers=layer)
        >>> step = builder.build(query_lens=[3], seq_lens=[3], block_tables=[[1]])
        >>> with torch.no_grad():
        ...     out = layer(torch.randn(3, 4, 24), torch.randn(3, 32), torch.randn(3, 1, 8), metadata=step)
        >>> out.shape
        torch.Size([3, 64])
    """

    takes_context_parallel = True

    kv_b_weight: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    output_scale: Tensor | None
    workspace: Tensor | None

    @required_arguments
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
        **extra: Any,
    ) -> None:
        super().__init__()
        options = {**EXTRA_OPTIONS, **_own_options(type(self), extra)}
        check_configs(type(self).__name__, cache_config, quant_config, exact_prefill=False)
        self.prefix = prefix
        self.cache_config = cache_config or CacheConfig()
        self.quant_config = quant_config or QuantConfig()
        self.attn_backend = "auto" if attn_backend is None else attn_backend
        self.num_heads, self.num_kv_heads, self.scale = num_heads, 1, scale
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.use_sparse, self.indexer = use_sparse, indexer
        self.workspace_tokens = options["workspace_tokens"]
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
            "decode_threshold": options["decode_threshold"],
            "sparse": use_sparse,
            "backend": self.attn_backend,
        }
        self.context_parallel = options["context_parallel"]
        if self.context_parallel is not None:
            check_context_parallel(self, num_heads, v_head_dim, {})
            self._request.update(partial_request(self.context_parallel))
        self._op_config = ""
        self._plan_key = ""
        self._weights_read: tuple[TensorState, ...] | None = None
        # Buffers made in inference mode could not be loaded outside of it.
        with torch.inference_mode(False):
            self._register_tensors()
        self._request_config(torch.bfloat16)

    def _register_tensors(self) -> None:
        quant, scaled = self.quant_config, MLA_FORMATS[self._canonical(torch.bfloat16)].scaled
        if scaled != (quant.k_scale is not None):
            raise ScaleError(
                f"layer {self.prefix!r} has cache_dtype={self.cache_config.cache_dtype!r} and "
                f"{'no' if scaled else 'a'} k_scale",
                "a number, a tensor of one value or 'unit' with an fp8_e4m3 cache, None otherwise",
                "QuantConfig(k_scale='unit') if 1.0 is meant" if scaled else "drop k_scale",
            )
        self.register_buffer("k_scale", make_scale("k_scale", quant.k_scale, (1,)) if scaled else None)
        if (quant.query_format != "none") != (quant.q_scale is not None):
            raise ScaleError(
                f"layer {self.prefix!r} has query_format={quant.query_format!r} and no q_scale",
                "a number, a tensor of one value or 'unit' with an FP8 query",
                "QuantConfig(q_scale='unit') if 1.0 is meant",
            )
        q_scale = quant.q_scale
        self.register_buffer("q_scale", None if q_scale is None else make_scale("q_scale", q_scale, (1,)))
        output_scale = quant.output_scale
        self.register_buffer(
            "output_scale", None if output_scale is None else make_scale("output_scale", output_scale, (1,))
        )
        self.register_buffer("kv_cache", None, persistent=False)
        self.register_buffer("kv_b_weight", None, persistent=False)
        self.register_buffer("workspace", None, persistent=False)

    def _canonical(self, dtype: torch.dtype) -> str:
        return resolve_mla_cache_dtype(self.cache_config.cache_dtype, dtype)

    def _request_config(self, dtype: torch.dtype) -> MLAConfig:
        name = self._canonical(dtype)
        scale = "tensor" if MLA_FORMATS[name].scaled else "none"
        return MLAConfig(dtype=dtype_name(dtype), kv_cache_dtype=name, kv_scale=scale, **self._request)

    @property
    def W_UK_T(self) -> Tensor | None:
        """`[num_heads, P, L]`, a view of the prepared weights: what takes queries into the latent space."""
        weight = self.kv_b_weight
        return None if weight is None else key_and_value_weights(weight, self._request_config(weight.dtype))[0]

    @property
    def W_UV(self) -> Tensor | None:
        """`[num_heads, L, V]`, a view of the prepared weights: what makes values of latents."""
        weight = self.kv_b_weight
        return None if weight is None else key_and_value_weights(weight, self._request_config(weight.dtype))[1]

    @known_keywords
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
        from vattn.kv_cache import MLAAttentionSpec

        config = self._request_config(dtype)
        return MLAAttentionSpec(
            num_kv_heads=1,
            head_size=config.head_size,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=config.block_size,
            row_bytes=config.row_bytes if config.packed else None,
        )

    def resolve_config(self, dtype: torch.dtype, device: torch.device | str, target: object = None) -> MLAConfig:
        """Return what binding a cache would make of the request, backend included; changes nothing.

        Raises:
            UnsupportedRequestError: no backend, or not the one asked for, runs the request; or a cache to share.
        """
        if target is not None:
            raise UnsupportedRequestError(
                f"layer {self.prefix!r} shares a KV cache",
                "latent attention with a cache of its own",
                "drop the target",
            )
        config = self._request_config(dtype)
        return config.replace(backend=selector.choose(config, device).name)

    def bind_kv_cache(self, storage: Tensor, dtype: torch.dtype, target: object = None) -> None:
        """Give the layer its raw storage, fix dtype, device and backend, and read `kv_b_proj`.

        Args:
            storage: contiguous, of `mla_cache_shape(config, num_blocks)`; kept, not copied.
            dtype: model dtype, that of the queries to come.
            target: `None`: latent attention shares no cache.

        Raises:
            CacheError: the storage does not fit the request.
            ConfigError, ShapeError, ScaleError: weights that cannot be read, as of `process_weights_after_loading`, or
                an indexer that is none. Weights on meta or not finite, as before a model is loaded, are refused at
                ranks and where others were read before; elsewhere calls refuse to run until
                `process_weights_after_loading` was called.
            UnsupportedRequestError: no backend, or not the one asked for, runs the request on the storage's device.
        """
        config = self.resolve_config(dtype, storage.device, target)
        blocks = storage.shape[0] if storage.dim() else 0
        shape, stored = shape_of_mla_storage(storage, config, blocks), mla_cache_dtype(config)
        if tuple(storage.shape) != shape or storage.dtype != stored or not storage.is_contiguous():
            raise CacheError(
                f"KV cache storage {tuple(storage.shape)} of {dtype_name(storage.dtype)}, strides {storage.stride()}",
                f"contiguous {mla_cache_shape(config, max(blocks, 1))} of {dtype_name(stored)}, any number of blocks",
                "use vattn.allocate_kv_cache(model, num_blocks=...)",
            )
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
            self._read_what_is_loaded(dtype)
        except BaseException:
            self.config, self.kv_cache = before
            raise
        weight = self.kv_b_weight
        if weight is not None and weight.device != storage.device:
            self._buffers["kv_b_weight"] = weight.to(storage.device)
        self._op_config = config.encode()
        self._plan_key = selector.choose(config, storage.device).plan_key(config)  # type: ignore[arg-type]
        self._buffers["workspace"] = workspace
        for name, buffer in self._own_buffers().items():
            self._buffers[name] = buffer.to(storage.device)

    def _read_what_is_loaded(self, dtype: torch.dtype) -> None:
        """Read `kv_b_proj`, unless it has no values yet and none were read before: then calls ask for them.

        Ranks are refused instead, for all of them must have read the same.
        """
        try:
            self.process_weights_after_loading(dtype)
        except (WeightsWithoutValues, ScalesWithoutValues):
            if self.kv_b_weight is not None or self.context_parallel is not None:
                raise

    def forward(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        output_shape: torch.Size | Sequence[int] | None = None,
        *,
        metadata: AttentionMetadata | None = None,
        rotary: LatentRotary | None = None,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write the new latents and rotated keys to the cache and attend.

        Args:
            q: `[T, num_heads, P + R]` or flattened; the last R columns of a head are rotated. Padding rows may hold
                anything.
            kv_c_normed: `[T, L]`, the latents after their norm.
            k_pe: `[T, 1, R]` or `[T, R]`, rotated.
            output_shape: shape of the result; default `[T, num_heads * V]`.
            metadata: this step's; default the one of `vattn.forward_context`. Without any this is a profiling call: the
                result is zero and no cache is needed.
            rotary: norm and rotation that the store itself does, in one launch: `kv_c_normed` then comes ahead of its
                norm and `k_pe` ahead of its rotation. Queries come finished all the same.

        Returns:
            The output in the query's dtype (or the output format's container); rows of padding are zero. With an output
            format that computes scales, `(output, block_scale)`.

        Raises:
            CacheNotBoundError: metadata but no cache.
            ShapeError, DtypeError: tensors that contradict the layer.
        """
        if unknown:
            refuse_unknown_inputs(self, unknown)
        metadata = plain_step(metadata, self.prefix)
        rope = "" if rotary is None else rope_string(rotary, self.prefix)
        parallel = self.context_parallel
        heads = self.num_heads if parallel is None else self.num_heads // parallel.world_size
        q = split_heads("q", q, heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        kv_c_normed, k_pe = latent_rows(kv_c_normed, k_pe, self)
        result = LayerResult.empty(q, self.v_head_dim, self.quant_config.output_format, output_shape)
        if metadata is None:
            if not torch.compiler.is_compiling():
                # Whoever measures memory by such a call sees what a step may take.
                q.new_empty(self.scratch_bytes(q.shape[0], q.dtype, q.device), dtype=torch.uint8)
            return result.zeroed()
        self._check_bound(q)
        slots, cache, config = metadata.slot_mapping, self.kv_cache, self._op_config
        topk = listed_positions(self, q.shape[0])
        plan = metadata.plans.get(self._plan_key)
        arguments: tuple[Any, ...] = (
            q, cache, metadata.query_start_loc, metadata.seq_lens, metadata.block_table, self.kv_b_weight, None,
            result.output, result.block_scale, None, self.output_scale, self.q_scale, self.k_scale, topk,
            metadata.local_seq_lens, [] if plan is None else [plan], self.workspace, config,
        )  # fmt: skip
        if not torch.compiler.is_compiling():
            check_step_ranks(self.prefix, parallel, metadata)
            if rotary is not None:
                check_table(rotary, metadata, self.prefix)
            self._check_step(q, kv_c_normed, k_pe, metadata, arguments)
        if rotary is None:
            torch.ops.vattn.mla_kv_cache_update(kv_c_normed, k_pe, cache, slots, self.k_scale, config)
        else:
            torch.ops.vattn.mla_rope_kv_cache_update(
                kv_c_normed, k_pe, rotary.cos, rotary.sin, rotary.positions, cache, slots, rotary.norm_weight,
                self.k_scale, rope, config,
            )  # fmt: skip
        if parallel is not None:
            args = MLAAttentionArgs(*arguments)
            attend_parts(torch.ops.vattn.mla_attention, args, q, result, self, self.v_head_dim)
        else:
            torch.ops.vattn.mla_attention(*arguments)
        return result.returned()

    def scratch_bytes(
        self, num_tokens: int, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> int:
        """Return how many bytes a step of some tokens takes beside its result, workspace included.

        They are given back behind each layer. Partial results of requests that are split are not counted.

        Args:
            num_tokens: tokens of the step.
            dtype, device: of the model, for a layer without a cache.

        Raises:
            ConfigError: neither a cache nor a dtype.
            UnsupportedRequestError: no backend runs the layer.
        """
        config: Any = self.config
        if config is None:
            if dtype is None:
                raise ConfigError(
                    f"scratch_bytes of layer {self.prefix!r} without a cache", "a dtype and a device", "pass both"
                )
            config = self.resolve_config(dtype, device)
        parallel, backend = self.context_parallel, mla_backends()[config.backend]
        gathered = 0 if parallel is None else num_tokens * config.num_heads * (config.qk_head_dim + config.v_head_dim)
        own = backend.scratch_bytes(config, num_tokens, self.workspace_tokens)
        return own + gathered * getattr(torch, config.dtype).itemsize

    def _check_bound(self, q: Tensor) -> None:
        if self.kv_cache is None or self.config is None:
            raise CacheNotBoundError(
                f"layer {self.prefix!r} has no KV cache",
                "a bound cache whenever metadata is given",
                "call vattn.allocate_kv_cache(model, num_blocks=...) first",
            )
        if self.kv_b_weight is None:
            raise ConfigError(
                f"kv_b_proj of layer {self.prefix!r} had no values, or wrong ones, when the cache was bound",
                "weights that are read",
                "load them, then call layer.process_weights_after_loading()",
            )
        check_bound_dtype(self, "q", q, self.config.dtype)

    def _check_step(
        self, q: Tensor, kv_c: Tensor, k_pe: Tensor, metadata: AttentionMetadata, arguments: tuple[Any, ...]
    ) -> None:
        """Refuse what either op would refuse, before anything changes. Compiled code leaves it to the ops."""
        config, cache = self.config, self.kv_cache
        assert isinstance(config, MLAConfig) and cache is not None
        rows = {"q": q.shape[0], "kv_c_normed": kv_c.shape[0], "k_pe": k_pe.shape[0]}
        check_tokens(self, rows, metadata.slot_mapping.shape[0])
        check_block_size(self, metadata.block_size, config.block_size)
        check_no_gradients(self, (q, kv_c, k_pe))
        inputs = {"q": q, "kv_c_normed": kv_c, "k_pe": k_pe}
        check_devices(self, inputs, metadata.query_start_loc.device, cache.device)
        if self._weights_read != weights_version(self._kv_b_proj[0]):
            raise ConfigError(
                f"the weights of layer {self.prefix!r}'s kv_b_proj have changed since the layer read them",
                "the weights that it has read",
                "call layer.process_weights_after_loading()",
            )
        update = MLACacheUpdateArgs(kv_c, k_pe, cache, metadata.slot_mapping, self.k_scale, self._op_config)
        mla_checks.check_mla_kv_cache_update(update, config)
        args = MLAAttentionArgs(*arguments)
        if self.context_parallel is not None:
            args = partial_arguments(args, all_heads(q, self.context_parallel), self.v_head_dim, q.dtype)
        mla_checks.check_mla_attention(args, config)

    def extra_repr(self) -> str:
        """Show the request and the chosen backend."""
        dims = f"{self.qk_nope_head_dim}+{self.qk_rope_head_dim}/{self.v_head_dim}"
        backend = "none yet (no KV cache bound)" if self.config is None else self.config.backend
        cache = self.cache_config.cache_dtype if self.config is None else self.config.kv_cache_dtype
        return (
            f"num_heads={self.num_heads}, head dims={dims}, kv_lora_rank={self.kv_lora_rank}, "
            f"q_lora_rank={self.q_lora_rank}, kv_cache={cache}, block_size={self.cache_config.block_size}, "
            f"workspace={'by the backend' if self.workspace_tokens is None else f'{self.workspace_tokens} tokens'}, "
            f"backend={backend}"
        )


def _own_options(layer: type, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the extra options that were given; refuse any but `EXTRA_OPTIONS`."""
    check_extra(layer.__name__, extra, named_arguments(layer), EXTRA_OPTIONS)
    return extra
