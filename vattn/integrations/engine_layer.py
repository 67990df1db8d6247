"""`EngineLayer`: one attention layer of an engine, over the engine's own cache and tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vattn.backends import dispatch
from vattn.config.attention import AttentionConfig
from vattn.kernels.replay import replay, tensors_of
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.plans import plan_key
from vattn.ops import checks
from vattn.ops.arguments import AttentionArgs, CacheUpdateArgs


class EngineLayer:
    """What the ops take of a layer at every call.

    The ops are called where PyTorch's dispatcher would arrive: engines run without gradients, outside of traced code.

    Args:
        config: what the layer requests.
        key_cache, value_cache: `[N, S, K, D]` and `[N, S, K, V]`, the engine's own memory, as the tensors below.
        k_scale, v_scale: fp32, for an FP8 cache.
        alibi_slopes: fp32 `[num_heads]`.
    """

    def __init__(
        self,
        config: AttentionConfig,
        key_cache: Tensor,
        value_cache: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        self.config, self.encoded, self.plan_key = config, config.encode(), plan_key(config, key_cache.device)
        self.key_cache, self.value_cache = key_cache, value_cache
        self.k_scale, self.v_scale, self.alibi_slopes = k_scale, v_scale, alibi_slopes
        own = (key_cache, value_cache, k_scale, v_scale, alibi_slopes)
        self._signature = *map(_signature, own), key_cache.storage_offset() % 16
        self._on_gpu = key_cache.is_cuda

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store keys `[T, K, D]` and values `[T, K, V]` in their slots."""
        args = key, value, self.key_cache, self.value_cache, slot_mapping, self.k_scale, self.v_scale, self.encoded
        signature = self._signature, self.encoded, *map(_signature, (key, value, slot_mapping))
        recordings = _recordings.get(signature)
        if recordings is None or not self._on_gpu or replay(recordings, tensors_of(args)) is not None:
            dispatch.kv_cache_update(*args)
        if recordings is None:
            _recordings[signature] = checks.check_kv_cache_update(CacheUpdateArgs(*args))

    def attend(
        self,
        query: Tensor,
        step: AttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        sinks: Tensor | None = None,
        encoded: str = "",
    ) -> None:
        """Attend queries `[T, H, D]` to the cache and write `output` `[T, H, V]`; `encoded`: with an output format."""
        encoded = encoded or self.encoded
        starts, lengths, table = step.query_start_loc, step.seq_lens, step.block_table
        # A schedule is for all rows of its step; an engine may attend fewer.
        plan = step.plans.get(self.plan_key) if query.shape[0] == step.slot_mapping.shape[0] else None
        args = (
            query, self.key_cache, self.value_cache, starts, lengths, table, output,
            None, None, output_scale,  # block scales, lse
            None, self.k_scale, self.v_scale, self.alibi_slopes, sinks,
            None, None, None, None, None,  # masks of other kinds, context parallelism
            [] if plan is None else [plan], None, encoded,
        )  # fmt: skip
        given = (query, starts, lengths, table, output, output_scale, sinks, plan)
        signature = self._signature, encoded, *map(_signature, given)
        recordings = _recordings.get(signature)
        if recordings is None or not self._on_gpu or replay(recordings, tensors_of(args)) is not None:
            dispatch.attention(*args)
        if recordings is None:
            _recordings[signature] = checks.check_attention(AttentionArgs(*args))


_recordings: dict[Any, dict[Any, Any]] = {}
"""The ops' recordings of calls that passed their checks, by all that the checks read."""


def _signature(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
