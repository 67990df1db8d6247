"""`Attention`: decoder attention over a paged KV cache, for an `nn.Module` that compiles fullgraph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vattn.cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
)
from vattn.config.attention import AttentionType, CacheConfig, check_window
from vattn.config.keywords import known_keywords
from vattn.config.other_names import LAYER
from vattn.config.typed import typed_on_error
from vattn.distributed.group import ContextParallel
from vattn.layers.base.arguments import alibi_kind, check_configs, check_type
from vattn.layers.base.paged_attention import CachedAttention
from vattn.layers.base.scales import QuantConfig
from vattn.quantization.formats import KV_FORMATS


@known_keywords(LAYER)
class Attention(CachedAttention):
    """Attend new tokens to everything their requests have seen, through a paged KV cache.

    Args:
        num_heads, head_size, scale: query heads, key width of one head, factor of the scores.
        num_kv_heads: KV heads, a divisor of `num_heads`; default `num_heads`.
        alibi_slopes: one slope per query head.
        use_alibi_sqrt: ALiBi by the square root of the distance.
        cache_config: block size, cache dtype, default window, scale calculation, what a step sees of itself; default
            `CacheConfig()`.
        quant_config: scales and query or output quantisation.
        logits_soft_cap: `cap * tanh(score / cap)`.
        per_layer_sliding_window: window of this layer; where given, it counts, and `cache_config.sliding_window`, the
            default of layers that name none, does not.
        prefix: unique name of the layer in its model, such as `"model.layers.3.attn"`.
        attn_type: only `"decoder"` here; other types are layers of their own.
        kv_sharing_target_layer_name: prefix of an earlier layer; this layer reads its cache and never writes it.
        attn_backend: name of a backend, never replaced by another; default: the first that accepts.
        head_size_v: value width; default `head_size`.
        sinks: `[num_heads]` learned logits; a parameter is kept, anything else copied as fp32.
        chunk_lookback: chunks before its own that a token sees, from 0, and as many after it in steps that are not
            causal; -1: no chunks.
        mm_prefix: `"full"` or `"clamped"`: how multimodal ranges see each other; `"none"`: not.
        batch_invariant: whether a row's result depends on no other row of the batch.
        fast_prefill: for a layer that shares a cache: its queries are `vattn.kept_rows` of the step's.
        context_parallel: the ranks that share the cache; the layer then takes its rank's part of the `num_heads` query
            heads, and all KV heads.

    Raises:
        ConfigError, ScaleError, UnknownOptionError, UnsupportedRequestError: at construction where the values alone
            decide, at `bind_kv_cache` where dtype or device decide.

    State: scale buffers are fp32, saved in the state dict, and keep their dtype under `model.to(dtype)`, as the cache
    does. The cache is a non-persistent buffer: "reduce-overhead" mode captures it, and Inductor updates it in place.
    Moving the layer to another device drops the cache.

    Without a cache: a layer that is bound to none runs steps that were built without block tables. Rows attend to those
    of their own request, as for a prompt of which nothing is kept. A bound layer refuses such a step.

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

    takes_exact_prefill = True
    takes_context_parallel = True

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
        attn_type: str | AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: str | None = None,
        head_size_v: int | None = None,
        *,
        sinks: Tensor | Sequence[float] | None = None,
        chunk_lookback: int = -1,
        mm_prefix: str = "none",
        batch_invariant: bool = False,
        fast_prefill: bool = False,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        layer = type(self)
        check_type(layer.__name__, attn_type, AttentionType.DECODER)
        exact = layer.takes_exact_prefill and kv_sharing_target_layer_name is None
        check_configs(layer.__name__, cache_config, quant_config, exact_prefill=exact)
        window = per_layer_sliding_window
        check_window(window, "per_layer_sliding_window")
        if window is None and cache_config is not None:
            window = cache_config.sliding_window
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
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            fast_prefill=fast_prefill,
            sliding_window=window,
            chunk_lookback=None if chunk_lookback == -1 else chunk_lookback,
            logits_soft_cap=logits_soft_cap,
            alibi=alibi_kind(alibi_slopes, use_alibi_sqrt),
            mm_prefix=mm_prefix,
            batch_invariant=batch_invariant,
            context_parallel=context_parallel,
        )

    def get_kv_cache_spec(self, dtype: torch.dtype) -> KVCacheSpec | None:
        """Return what cache this layer needs for a model of `dtype`; `None` if it shares another layer's."""
        if self.kv_sharing_target_layer_name is not None:
            return None
        window, fields = self._request["sliding_window"], self._spec_fields(dtype)
        if window is None or self._request["mm_prefix"] == "full":
            name = fields["kv_cache_dtype"]
            if name.startswith("turboquant_"):
                slot = KV_FORMATS[name].token_bytes(fields["head_size"], fields["head_size_v"])
                return TQFullAttentionSpec(tq_slot_size=slot, sliding_window=window, **fields)
            return FullAttentionSpec(sliding_window=window, **fields)
        lookback = self._request["chunk_lookback"]
        if lookback is not None:
            size = window // (lookback + 1)
            return ChunkedLocalAttentionSpec(attention_chunk_size=size, chunk_lookback=lookback, **fields)
        return SlidingWindowSpec(sliding_window=window, **fields)
