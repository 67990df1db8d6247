"""What one layer's KV cache stores, and how much of it one request can need."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vattn.config import KV_CACHE_LAYOUTS
from vattn.errors import ConfigError
from vattn.formats import KV_FORMATS
from vattn.ops.cache_layout import block_bytes, kv_cache_dtype, kv_cache_shape


@dataclass(frozen=True)
class KVCacheSpec:
    """Say what one layer stores per token, and how many blocks one request can need.

    Attributes:
        num_kv_heads, head_size: KV heads, key width of one head.
        head_size_v: value width; default `head_size`.
        kv_cache_dtype: canonical format name (`vattn.formats.KV_FORMATS`).
        block_size: tokens per block.
        layout: `"NHD"` or `"HND"`.
    """

    num_kv_heads: int
    head_size: int
    head_size_v: int = 0
    kv_cache_dtype: str = "bfloat16"
    block_size: int = 16
    layout: str = "NHD"

    def __post_init__(self) -> None:
        if not self.head_size_v:
            object.__setattr__(self, "head_size_v", self.head_size)
        for name in ("num_kv_heads", "head_size", "head_size_v", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}", "a positive int", f"pass {name} >= 1")
        for name, allowed in (("kv_cache_dtype", tuple(KV_FORMATS)), ("layout", KV_CACHE_LAYOUTS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}", ", ".join(allowed), "choose one of these names")

    @property
    def kv_cache_layout(self) -> str:
        """`layout`, by the name that `AttentionConfig` has for it."""
        return self.layout

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block, keys and values together."""
        return block_bytes(self)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the raw storage."""
        return kv_cache_dtype(self)

    def storage_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of the raw storage for that many blocks."""
        return kv_cache_shape(self, num_blocks)

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1) -> int:
        """Return how many blocks one request can need at once.

        Args:
            max_seq_len: longest sequence.
            max_new_tokens: most tokens of one request that one step writes.
        """
        raise NotImplementedError

    def max_memory_bytes(self, max_seq_len: int, max_new_tokens: int = 1) -> int:
        """Return how many bytes of this layer's storage one request can need at once."""
        return self.max_blocks(max_seq_len, max_new_tokens) * self.page_size_bytes


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token of a request is kept."""

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1) -> int:
        """Return `ceil(max_seq_len / block_size)`."""
        return -(-max_seq_len // self.block_size)


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """Only the last `sliding_window` tokens are needed; blocks before them may be freed.

    Attributes:
        sliding_window: tokens visible to the left, itself included.
    """

    sliding_window: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sliding_window, int) or self.sliding_window < 1:
            raise ConfigError(
                f"sliding_window={self.sliding_window!r}", "an int >= 1", "use FullAttentionSpec for none"
            )

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1) -> int:
        """Return the blocks of window and new tokens together, plus one: a window may start inside a block."""
        tokens = min(self.sliding_window - 1 + max_new_tokens, max_seq_len)
        return -(-tokens // self.block_size) + 1
