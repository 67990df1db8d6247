"""`EngineLayer`: one attention layer of an engine, over the engine's own cache and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vattn.backends import dispatch
from vattn.config.attention import AttentionConfig
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.plans import plan_key


@dataclass(eq=False)
class EngineLayer:
    """What the ops take of a layer at every call.

    The ops are called where PyTorch's dispatcher would arrive: engines run without gradients, outside of traced code.

    Attributes:
        config, device: what it requests, and where.
        k_scale, v_scale: fp32, for an FP8 cache; the engine's own tensors, as the next.
        alibi_slopes: fp32 `[num_heads]`.
    """

    config: AttentionConfig
    device: torch.device
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    alibi_slopes: Tensor | None = None
    encoded: str = field(init=False)
    plan_key: str = field(init=False)

    def __post_init__(self) -> None:
        self.encoded, self.plan_key = self.config.encode(), plan_key(self.config, self.device)

    def write(self, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], slot_mapping: Tensor) -> None:
        """Store keys `[T, K, D]` and values `[T, K, V]` in their slots of a cache of keys and values `[N, S, K, D]`."""
        dispatch.kv_cache_update(key, value, *cache, slot_mapping, self.k_scale, self.v_scale, self.encoded)

    def attend(
        self,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        step: AttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        sinks: Tensor | None = None,
        encoded: str = "",
    ) -> None:
        """Attend queries `[T, H, D]` to a cache and write `output` `[T, H, V]`; `encoded`: with an output format."""
        # A schedule is for all rows of its step; an engine may attend fewer.
        plan = step.plans.get(self.plan_key) if query.shape[0] == step.slot_mapping.shape[0] else None
        dispatch.attention(
            query, *cache, step.query_start_loc, step.seq_lens, step.block_table, output,
            None, None, output_scale,  # block scales, lse
            None, self.k_scale, self.v_scale, self.alibi_slopes, sinks,
            None, None, None, None, None,  # masks of other kinds, context parallelism
            [] if plan is None else [plan], None, encoded or self.encoded,
        )  # fmt: skip
