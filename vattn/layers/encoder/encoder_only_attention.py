"""`EncoderOnlyAttention`: every token of a text or of encoder states sees every other one, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vattn.cache.allocation import skip_names
from vattn.config.attention import AttentionType, CacheConfig, check_window
from vattn.config.keywords import known_keywords
from vattn.config.other_names import LAYER
from vattn.config.typed import typed_on_error
from vattn.errors import MetadataError, ScaleError, UnsupportedRequestError
from vattn.layers.base.arguments import alibi_kind, check_configs, check_type, layer_scales, own_cache_dtype, scale_kind
from vattn.layers.base.checks import check_tokens, given_step
from vattn.layers.base.scales import QuantConfig
from vattn.layers.base.step import LayerResult, split_heads
from vattn.layers.base.varlen import VarlenOp, attend_rows, check_rows
from vattn.layers.encoder.varlen_attention import VarlenAttention
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.ops.index_dtypes import as_int32
from vattn.quantization.formats import KV_FORMATS, dtype_name, resolve_kv_cache_dtype


@known_keywords(LAYER)
class EncoderOnlyAttention(VarlenAttention):
    """Attend the tokens of each request to all tokens of the same request, both ways.

    Args:
        num_heads, head_size, scale: query heads, key width of one head, factor of the scores.
        num_kv_heads: KV heads, a divisor of `num_heads`; default `num_heads`.
        alibi_slopes: one slope per query head; scores get minus the slope times the distance.
        use_alibi_sqrt: refused, since it is defined for causal attention alone.
        cache_config: this layer has no cache; of the model's `CacheConfig` it takes the default window, and the cache
            dtype as the format that keys and values are rounded to before attention (FP8 needs scales in
            `quant_config`). Block size and layout mean nothing to it.
        quant_config: scales of FP8 keys and values, query and output quantisation.
        logits_soft_cap: `cap * tanh(score / cap)`.
        per_layer_sliding_window: window W of this layer: tokens i and j see each other if `|i - j| < W`. Where given,
            it counts, and `cache_config.sliding_window`, the default of layers that name none, does not.
        prefix: name of the layer in its model, such as `"encoder.layers.3.attn"`.
        attn_type: `"encoder_only"` (or `None`): the rows are the step's tokens. `"encoder"`: the rows are the encoder
            states of the requests whose encoder runs in the step, those that `CrossAttention` stores; the step's tokens
            and masks do not concern the layer.
        kv_sharing_target_layer_name: refused; there is no cache to share.
        attn_backend: name of a backend, never replaced by another; default: the first that accepts on the device.
        head_size_v: value width; default `head_size`.
        sinks: `[num_heads]` learned logits; a parameter is kept, anything else copied as fp32.
        chunk_lookback: as for `Attention`; chunks reach as far to the right.
        batch_invariant: as for `Attention`.

    Raises:
        ConfigError, ScaleError, UnknownOptionError, UnsupportedRequestError: what the values alone decide. What dtype
            and device decide is refused by the call, before anything is written.

    State: scales are fp32 buffers, saved in the state dict, and keep their dtype under `model.to(dtype)`.

    Compile: one graph for equal layers; lengths are tensors and never recompile. Nothing is bound, so nothing has to
    happen before the first call.

    Example:
        >>> import torch, vattn
        >>> layer = vattn.EncoderOnlyAttention(num_heads=4, head_size=16, scale=0.25)
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=16, max_seq_len=16)
        >>> step = builder.build(query_lens=[5, 9])
        >>> qkv = [torch.randn(14, 4 * 16) for _ in range(3)]
        >>> layer(*qkv, metadata=step).shape
        torch.Size([14, 64])
    """

    @typed_on_error
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
        attn_type: str | AttentionType | None = None,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: str | None = None,
        head_size_v: int | None = None,
        *,
        sinks: Tensor | Sequence[float] | None = None,
        chunk_lookback: int = -1,
        batch_invariant: bool = False,
    ) -> None:
        kind = AttentionType.ENCODER_ONLY if attn_type is None else attn_type
        check_type("EncoderOnlyAttention", kind, AttentionType.ENCODER_ONLY, AttentionType.ENCODER)
        check_configs("EncoderOnlyAttention", cache_config, quant_config, exact_prefill=False)
        super().__init__()
        self.attn_type = AttentionType(kind).value
        self._set_sizes(num_heads, head_size, num_kv_heads, head_size_v, prefix, attn_backend)
        if kv_sharing_target_layer_name is not None:
            raise UnsupportedRequestError(
                f"kv_sharing_target_layer_name={kv_sharing_target_layer_name!r} in EncoderOnlyAttention {prefix!r}",
                "None: it has no cache to share",
                "leave it out",
            )
        self.cache_config, self.quant_config = cache_config or CacheConfig(), quant_config or QuantConfig()
        check_window(per_layer_sliding_window, "per_layer_sliding_window")
        window = self.cache_config.sliding_window if per_layer_sliding_window is None else per_layer_sliding_window
        self.sliding_window = window
        # Buffers made in inference mode could not be loaded outside of it.
        with torch.inference_mode(False):
            self._register_per_head("alibi_slopes", alibi_slopes)
            self._register_per_head("sinks", sinks)
            cache_dtype = self._register_scales()
        self._set_request(
            scale,
            cache_dtype,
            attn_type=self.attn_type,
            kv_scale=scale_kind(self.k_scale),
            query_format=self.quant_config.query_format,
            query_scale=scale_kind(self.q_scale),
            output_format=self.quant_config.output_format,
            sliding_window=window,
            chunk_lookback=None if chunk_lookback == -1 else chunk_lookback,
            logits_soft_cap=logits_soft_cap,
            alibi=alibi_kind(alibi_slopes, use_alibi_sqrt),
            sinks=self.sinks is not None,
            batch_invariant=batch_invariant,
        )

    def _register_scales(self) -> str:
        """Make the scales that the formats need, or refuse what is missing or too many; return the format of keys."""
        cache = self.cache_config
        self.skip_names = skip_names(self.prefix, self.sliding_window)
        cache_dtype = own_cache_dtype(cache, self.skip_names)
        quantised = KV_FORMATS[resolve_kv_cache_dtype(cache_dtype, torch.bfloat16)].quantised
        if quantised and cache.calculate_kv_scales:
            raise ScaleError(
                f"calculate_kv_scales=True in layer {self.prefix!r}, which keeps nothing between steps",
                "given scales, or 'unit'",
                "QuantConfig(k_scale=..., v_scale=...), or a CacheConfig of its own for this layer",
            )
        for name, scale in layer_scales(self, cache_dtype, quantised=quantised).items():
            self.register_buffer(name, scale)
        return cache_dtype

    @typed_on_error
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: torch.Size | Sequence[int] | None = None,
        *,
        metadata: AttentionMetadata | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend the rows of each request to each other.

        Args:
            query: `[T, num_heads * head_size]` or `[T, num_heads, head_size]`; padding rows may hold anything.
            key, value: same with KV heads, in the query's dtype, or stored already in the layer's FP8 format.
            output_shape: shape of the result; default `[T, num_heads * head_size_v]`.
            metadata: this step's (`builder.build(query_lens)`); default the one of `vattn.forward_context`. Only
                `query_start_loc` is read, or `encoder_start_loc` by the type `"encoder"`. Without any this is a
                profiling call: the result is zero.

        Returns:
            The output in the query's dtype (or the output format's container); rows of padding are zero. With an output
            format that computes scales, `(output, block_scale)`.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that contradict the layer or the step.
            MetadataError: a step with cached tokens (of a step from device tensors the largest lengths are compared),
                per-request causal flags, trees or multimodal ranges; for the type `"encoder"`, one in which no encoder
                ran.
            UnsupportedRequestError: no backend, or not the requested one, runs the layer on this device.
        """
        metadata = given_step(self, metadata)
        query = split_heads("query", query, self.num_heads, self.head_size)
        key = split_heads("key", key, self.num_kv_heads, self.head_size)
        value = split_heads("value", value, self.num_kv_heads, self.head_size_v)
        op = VarlenOp(self._op_config(query.dtype), self._kv_formats[dtype_name(query.dtype)])
        check_rows(self, op.kv_format, query, key, value)
        result = LayerResult.empty(query, self.head_size_v, self.quant_config.output_format, output_shape)
        if metadata is None:
            return result.zeroed()
        attend_rows(self, op, (query, key, value), self._starts(query, metadata), result)
        return result.returned()

    def _starts(self, query: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return where each sequence starts; refuse a step that contradicts the layer or the query."""
        if self.attn_type == "encoder":
            slots, starts = metadata.cross_slot_mapping, metadata.encoder_start_loc
            if slots is None or starts is None:
                raise MetadataError(
                    f"a step in which no encoder ran, in layer {self.prefix!r}",
                    "encoder_start_loc and cross_slot_mapping",
                    "pass encoder_lens=, new_encoder= and cross_block_tables= to builder.build",
                )
            check_tokens(self, "query", query, slots.shape[0], "pass the new encoder states of the step")
            return as_int32(starts)
        check_tokens(self, "query", query, metadata.slot_mapping.shape[0])
        extras = {
            "causal flags": isinstance(metadata.causal, Tensor),
            "tree_bias": metadata.tree_bias is not None,
            "mm_ranges": metadata.mm_ranges is not None,
        }
        given = [name for name, present in extras.items() if present]
        if given:
            raise MetadataError(
                f"metadata with {', '.join(given)} in layer {self.prefix!r}",
                "a step without them: all tokens of a request see each other here",
                "build it with query_lens alone",
            )
        # Compiled code must not read what the host knows.
        if not torch.compiler.is_compiling() and metadata.has_cached_tokens:
            raise MetadataError(
                f"a step with cached tokens (seq_len up to {metadata.max_seq_len}, {metadata.max_query_len} new) in "
                f"layer {self.prefix!r}",
                "whole texts: nothing is cached",
                "build it with query_lens alone",
            )
        return as_int32(metadata.query_start_loc)

    def extra_repr(self) -> str:
        """Show the request."""
        window = "" if self.sliding_window is None else f", sliding_window={self.sliding_window}"
        return f"{self._sizes_repr()}{window}, {self._backend_repr()}"
