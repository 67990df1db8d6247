"""`CrossAttention`: decoder tokens attend to their request's encoder states, which lie in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vattn.cache.specs import CrossAttentionSpec, KVCacheSpec
from vattn.config.attention import AttentionConfig, AttentionType, CacheConfig
from vattn.config.device import DeviceInfo
from vattn.config.keywords import known_keywords
from vattn.config.other_names import LAYER
from vattn.config.typed import typed_on_error
from vattn.errors import ConfigError, MetadataError, ShapeError
from vattn.layers.base.arguments import check_configs, check_type
from vattn.layers.base.paged_attention import CachedAttention
from vattn.layers.base.scales import QuantConfig
from vattn.layers.base.step import LayerStep, given
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.ops.index_dtypes import as_int32, as_int64


@known_keywords(LAYER)
class CrossAttention(CachedAttention):
    """Attend decoder tokens to all encoder states of their request.

    The keys and values of a request's encoder states are written to the cache in the step in which its encoder ran, and
    read by every later step. Their rows have nothing to do with the rows of the query: they are the encoder
    states of the requests that ran their encoder in this step, one request after the other.

    Args:
        num_heads, head_size, scale, num_kv_heads, logits_soft_cap, cache_config, quant_config, prefix,
        kv_sharing_target_layer_name, attn_backend, head_size_v: as for `Attention`. A `cache_config` with a window is
            refused: queries have no position among the keys.
        attn_type: only `"encoder_decoder"` here.
        sinks, batch_invariant, fast_prefill: as for `Attention`; `fast_prefill` also with a cache of its own, since
            keys do not come from the rows of the query.

    Raises:
        ConfigError, ScaleError, UnknownOptionError, UnsupportedRequestError: as `Attention`.

    Metadata: `builder.build(..., encoder_lens=, new_encoder=, cross_block_tables=)`, in every step; the fields that
    describe self-attention (`seq_lens`, `block_table`, `causal`, trees, ranges) are not read. A request with no encoder
    states gets zeros.

    Compile: steps with and without new encoder states are one graph each. Later steps capture in a CUDA graph like any
    decode; a step with new states too, if `num_encoder_tokens_padded` fixes their number.

    Example:
        >>> import torch, vattn
        >>> layer = vattn.CrossAttention(num_heads=4, head_size=16, scale=0.25, num_kv_heads=2)
        >>> _ = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(2, 8, max_seq_len=32, max_encoder_len=32, layers=layer)
        >>> encoded = {"encoder_lens": [20], "cross_block_tables": [[3, 1]]}
        >>> first = builder.build([2], [2], [[2]], new_encoder=[True], **encoded)
        >>> states = torch.randn(20, 2 * 16)
        >>> layer(torch.randn(2, 64), states, states, metadata=first).shape
        torch.Size([2, 64])
        >>> later = builder.build([1], [3], [[2]], **encoded)
        >>> layer(torch.randn(1, 64), None, None, metadata=later).shape
        torch.Size([1, 64])
    """

    writes_tokens = False

    @typed_on_error
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: QuantConfig | None = None,
        logits_soft_cap: float | None = None,
        prefix: str = "",
        attn_type: str | AttentionType | None = None,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: str | None = None,
        head_size_v: int | None = None,
        *,
        sinks: Tensor | Sequence[float] | None = None,
        batch_invariant: bool = False,
        fast_prefill: bool = False,
    ) -> None:
        own = AttentionType.ENCODER_DECODER
        check_type("CrossAttention", own if attn_type is None else attn_type, own)
        check_configs("CrossAttention", cache_config, quant_config, exact_prefill=False)
        if cache_config is not None and cache_config.sliding_window is not None:
            raise ConfigError(
                f"CacheConfig(sliding_window={cache_config.sliding_window}) for CrossAttention layer {prefix!r}",
                "no window: queries have no position among the encoder states",
                "give cross-attention layers a CacheConfig without sliding_window",
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            head_size_v,
            prefix=prefix,
            cache_config=cache_config,
            quant_config=quant_config,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            attn_backend=attn_backend,
            sinks=sinks,
            fast_prefill=fast_prefill,
            logits_soft_cap=logits_soft_cap,
            attn_type=own,
            causality="bidirectional",
            batch_invariant=batch_invariant,
        )

    def get_kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec | None:
        """Return what cache this layer needs for a model of `dtype`; `None` if it shares another layer's."""
        return None if self.kv_sharing_target_layer_name is not None else CrossAttentionSpec(**self._spec_fields(dtype))

    def _finish_binding(self, config: AttentionConfig, device: DeviceInfo) -> None:
        # Schedules count the keys of self-attention: this key has none, except where an export needs an empty one.
        self._plan_key += " encoder_decoder"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output_shape: torch.Size | Sequence[int] | None = None,
        *,
        metadata: AttentionMetadata | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Write the keys and values of new encoder states to the cache, and attend to all states of each request.

        Args:
            query: `[T, num_heads * head_size]` or `[T, num_heads, head_size]`, decoder tokens; padding rows may hold
                anything.
            key, value: same with KV heads, one row per entry of `metadata.cross_slot_mapping`; both `None` in a step in
                which no encoder ran, and for a layer that shares a cache.
            output_shape, metadata: as for `Attention`.

        Returns:
            As `Attention`; rows of requests without encoder states are zero.

        Raises:
            MetadataError: the step was built without `encoder_lens`.
            CacheNotBoundError, ShapeError, DtypeError: as `Attention`.
        """
        return super().forward(query, key, value, output_shape, metadata=metadata)

    def _check_given(self, key: Tensor | None, value: Tensor | None, metadata: AttentionMetadata | None) -> None:
        shared = self.kv_sharing_target_layer_name is not None
        wanted = key is not None
        if shared:
            wanted = False
        elif metadata is not None:
            wanted = metadata.cross_slot_mapping is not None
        if (key is not None) != wanted or (value is not None) != wanted:
            raise ShapeError(
                f"layer {self.prefix!r} got key {given(key)} and value {given(value)}",
                "both for the encoder states that a step writes (metadata.cross_slot_mapping), neither where no "
                "encoder ran or the layer shares a cache",
                "mark the requests that ran their encoder with builder.build(new_encoder=...), and pass their states",
            )

    def _layer_step(self, metadata: AttentionMetadata) -> LayerStep:
        if metadata.encoder_seq_lens is None or metadata.cross_block_table is None:
            raise MetadataError(
                f"metadata without encoder lengths in cross-attention layer {self.prefix!r}",
                "encoder_seq_lens and cross_block_table",
                "pass encoder_lens= and cross_block_tables= to builder.build",
            )
        return LayerStep(
            query_start_loc=as_int32(metadata.query_start_loc),
            seq_lens=as_int32(metadata.encoder_seq_lens),
            block_table=as_int32(metadata.cross_block_table),
            query_slots=metadata.slot_mapping,
            key_slots=None if metadata.cross_slot_mapping is None else as_int64(metadata.cross_slot_mapping),
            plan=[metadata.plans[self._plan_key]] if self._plan_key in metadata.plans else [],
            causal=False,
            block_size=metadata.block_size,
        )
