"""What one layer's KV cache stores, and how much of it one request can need."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from vattn.cache.layout import block_bytes, is_in_bytes, kv_cache_dtype, kv_cache_shape
from vattn.config.arguments import read_count
from vattn.config.attention import KV_CACHE_LAYOUTS
from vattn.config.typed import typed, typed_on_error
from vattn.errors import CacheError, ConfigError
from vattn.quantization.formats import KV_FORMATS
from vattn.quantization.mla_formats import MLA_PACKED_DTYPES

PAGE_ALIGNMENT = 16
"""Padded pages are multiples of this many bytes, so that every block starts where kernels may load vectors."""

Spec = TypeVar("Spec", bound="KVCacheSpec")


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse arguments of a method that count nothing; only an encoder length may be `None`."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        for name, value in (*zip(_names(function), args, strict=False), *options.items()):
            if value is not None or name != "max_encoder_len":
                read_count(name, value, 0, f"pass another {name}")
        return function(self, *args, **options)

    return call


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


@dataclass(frozen=True)
class KVCacheSpec:
    """Say what one layer stores per token, and how many blocks one request can need.

    Attributes:
        num_kv_heads, head_size: KV heads, key width of one head.
        head_size_v: value width; default `head_size`.
        kv_cache_dtype: canonical format name (`vattn.quantization.formats.KV_FORMATS`).
        block_size: tokens per block.
        layout: `"NHD"` or `"HND"`.
        page_size_padded: bytes of one block with padding after its content, a multiple of 16; `None` for no padding.
            Only storages in bytes can be padded: `[num_blocks, bytes]`.

    Raises:
        ConfigError: a value out of range, or padding that is too small or of a typed storage.
    """

    more_formats: ClassVar[tuple[str, ...]] = ()
    records: ClassVar[tuple[str, ...]] = ()
    """Fields that only tell what the mask hides: layers with and without may be one group."""

    num_kv_heads: int
    head_size: int
    head_size_v: int = 0
    kv_cache_dtype: str = "bfloat16"
    block_size: int = 16
    layout: str = "NHD"
    page_size_padded: int | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        for name, check in (("max_blocks", _counted), ("first_block", typed_on_error), ("storage_shape", _counted)):
            if name in vars(cls):
                setattr(cls, name, check(vars(cls)[name]))

    def __post_init__(self) -> None:
        if not self.head_size_v:
            object.__setattr__(self, "head_size_v", self.head_size)
        for name in ("num_kv_heads", "head_size", "head_size_v", "block_size"):
            _check_int(name, getattr(self, name), 1)
        for name, allowed in (("kv_cache_dtype", (*KV_FORMATS, *self.more_formats)), ("layout", KV_CACHE_LAYOUTS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise ConfigError(f"{name}={value!r:.60}", ", ".join(allowed), "choose one of these names")
        fmt = KV_FORMATS.get(self.kv_cache_dtype)
        sizes, rows = (self.head_size, self.head_size_v), self.block_size * self.num_kv_heads
        problems = [] if fmt is None else fmt.head_size_problems(*sizes) or fmt.block_problems(rows, *sizes)
        if problems:
            raise ConfigError("; ".join(problems), "sizes that the format takes", "choose another kv_cache_dtype")
        if self.page_size_padded is not None:
            self._check_padding(self.page_size_padded)

    def _check_padding(self, padded: int) -> None:
        _check_int("page_size_padded", padded, 1)
        if not self.in_bytes:
            raise ConfigError(
                f"page_size_padded={padded} for a typed storage {self.storage_shape(1)}",
                "padding for storages in bytes: unequal head sizes and packed formats",
                "leave page_size_padded out",
            )
        if padded < self.content_bytes or padded % PAGE_ALIGNMENT:
            raise ConfigError(
                f"page_size_padded={padded} for blocks of {self.content_bytes} bytes",
                f"a multiple of {PAGE_ALIGNMENT} from {self.content_bytes} on",
                f"page_size_padded={round_up(self.content_bytes, PAGE_ALIGNMENT)}",
            )

    @property
    def kv_cache_layout(self) -> str:
        """`layout`, by the name that `AttentionConfig` has for it."""
        return self.layout

    @property
    def head_pairs(self) -> str:
        """`"none"`: a spec counts all heads; which of them a layer reads is up to its config."""
        return "none"

    @property
    def in_bytes(self) -> bool:
        """Whether the storage is `[num_blocks, bytes]` of uint8, and so can be padded."""
        return is_in_bytes(self)

    @property
    def content_bytes(self) -> int:
        """Bytes that the tokens of one block take, keys and values together."""
        return block_bytes(self)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in the storage: its content, and padding if there is any."""
        return self.page_size_padded or self.content_bytes

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the raw storage."""
        return kv_cache_dtype(self)

    @_counted
    def storage_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of the raw storage for that many blocks."""
        return (num_blocks, self.page_size_bytes) if self.in_bytes else kv_cache_shape(self, num_blocks)

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1, max_encoder_len: int | None = None) -> int:
        """Return how many blocks one request can need at once.

        Args:
            max_seq_len: longest sequence.
            max_new_tokens: most tokens of one request that one step writes.
            max_encoder_len: longest encoder input; only cross attention needs it.
        """
        raise NotImplementedError

    def first_block(self, num_tokens: int) -> int:
        """Return the index of the first block that any query from position `num_tokens` on can read.

        Blocks before it may be freed once `num_tokens` tokens are written.
        """
        return 0

    def max_memory_usage_bytes(
        self, max_seq_len: int, max_new_tokens: int = 1, max_encoder_len: int | None = None
    ) -> int:
        """Return how many bytes of this layer's storage one request can need at once; arguments of `max_blocks`."""
        return self.max_blocks(max_seq_len, max_new_tokens, max_encoder_len) * self.page_size_bytes

    @classmethod
    @typed
    def merge(cls: type[Spec], specs: Sequence[Spec]) -> Spec:
        """Return the one spec that equal specs of a group have.

        The records of a `FullAttentionSpec` may be missing in some layers; where they are given they must agree.

        Raises:
            CacheError: no spec, or specs that differ; the text names the field and its values.
            ConfigError: some layers record a window and others chunks.
        """
        if not specs or not all(isinstance(spec, KVCacheSpec) for spec in specs):
            got = f"{specs!r:.60}" if specs else "no spec"
            raise CacheError(f"{got} to merge", "one spec or more", "pass the specs of a group's layers")
        kinds = sorted({type(spec).__name__ for spec in specs})
        if len(kinds) > 1:
            raise _unequal("type", kinds)
        records: dict[str, Any] = {}
        for name in (each.name for each in dataclasses.fields(specs[0])):
            values = list(dict.fromkeys(getattr(spec, name) for spec in specs))
            if name in specs[0].records:
                values = [value for value in values if value is not None] or [None]
                records[name] = values[0]
            if len(values) > 1:
                raise _unequal(name, values)
        return dataclasses.replace(specs[0], **records)


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token of a request is kept.

    Attributes:
        sliding_window, attention_chunk_size: what the layer's mask hides although it is kept; a record, no bound.

    Raises:
        ConfigError: both a window and chunks.
    """

    records: ClassVar[tuple[str, ...]] = ("sliding_window", "attention_chunk_size")

    sliding_window: int | None = field(default=None, kw_only=True)
    attention_chunk_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ConfigError(
                f"sliding_window={self.sliding_window} together with attention_chunk_size={self.attention_chunk_size}",
                "one of them: a layer has a window or chunks",
                "drop one of them",
            )

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1, max_encoder_len: int | None = None) -> int:
        """Return `ceil(max_seq_len / block_size)`."""
        return ceil_div(max_seq_len, self.block_size)


@dataclass(frozen=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Every token is kept; learned sink tokens are stored once, from block 1 on, and precede every request.

    Attributes:
        sink_len: sink tokens, a multiple of `block_size`.
    """

    sink_len: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int("sink_len", self.sink_len, 1)
        if self.sink_len % self.block_size:
            raise ConfigError(
                f"sink_len={self.sink_len} with block_size={self.block_size}",
                "a multiple of block_size: a request's own tokens start in a block of their own",
                "choose another block_size, or pad the sinks",
            )

    @property
    def sink_blocks(self) -> int:
        """Blocks that the sinks take, once for the whole cache; they follow the null block."""
        return self.sink_len // self.block_size


@dataclass(frozen=True)
class TQFullAttentionSpec(FullAttentionSpec):
    """Every token is kept as one TurboQuant slot per KV head, in a storage of bytes.

    Attributes:
        tq_slot_size: bytes of one token's key and value in one head, an even number.
    """

    tq_slot_size: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _check_int("tq_slot_size", self.tq_slot_size, 2)
        if self.tq_slot_size % 2:
            raise ConfigError(
                f"tq_slot_size={self.tq_slot_size}", "an even number of bytes", f"tq_slot_size={self.tq_slot_size + 1}"
            )
        super().__post_init__()

    @property
    def in_bytes(self) -> bool:
        """Always: slots are packed."""
        return True

    @property
    def content_bytes(self) -> int:
        """`block_size * num_kv_heads * tq_slot_size`."""
        return self.block_size * self.num_kv_heads * self.tq_slot_size

    @property
    def storage_dtype(self) -> torch.dtype:
        """uint8."""
        return torch.uint8


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent row per token, key and value at once: `head_size` is its width, and there are no separate values.

    Attributes:
        row_bytes: bytes of one row of a packed format; `None`: `head_size` elements of `kv_cache_dtype`.
    """

    more_formats: ClassVar[tuple[str, ...]] = MLA_PACKED_DTYPES

    row_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.head_size_v not in (0, self.head_size):
            raise ConfigError(
                f"head_size_v={self.head_size_v} of an MLA cache", "0: a row is both", "leave head_size_v out"
            )
        if self.row_bytes is not None:
            _check_int("row_bytes", self.row_bytes, 1)
        super().__post_init__()
        if self.row_bytes is None and self.kv_cache_dtype in MLA_PACKED_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} without row_bytes",
                "the bytes of a row with a packed format",
                "pass row_bytes, such as MLAConfig.row_bytes",
            )
        if self.num_kv_heads != 1:
            raise ConfigError(f"num_kv_heads={self.num_kv_heads} of an MLA cache", "1", "pass num_kv_heads=1")

    @property
    def in_bytes(self) -> bool:
        """Only a packed format."""
        return self.row_bytes is not None

    @property
    def content_bytes(self) -> int:
        """`block_size` rows."""
        return self.block_size * (self.row_bytes or self.head_size * KV_FORMATS[self.kv_cache_dtype].element_size)

    @property
    def storage_dtype(self) -> torch.dtype:
        """That of the format, or uint8 for a packed one."""
        return torch.uint8 if self.in_bytes else KV_FORMATS[self.kv_cache_dtype].storage_dtype

    def storage_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return `(num_blocks, block_size, head_size)`, or `(num_blocks, bytes)` for a packed format."""
        return (num_blocks, self.page_size_bytes) if self.in_bytes else (num_blocks, self.block_size, self.head_size)


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """Only the last `sliding_window` tokens are needed; blocks before them may be freed.

    Attributes:
        sliding_window: tokens visible to the left, itself included.
        extra_retained_tokens: tokens before the window that are kept too, such as drafts that may be rejected.
    """

    sliding_window: int = field(default=0, kw_only=True)
    extra_retained_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        read_count("sliding_window", self.sliding_window, 1, "use FullAttentionSpec for none")
        _check_int("extra_retained_tokens", self.extra_retained_tokens, 0)

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1, max_encoder_len: int | None = None) -> int:
        """Return the blocks of window and new tokens together, plus one: a window may start inside a block."""
        tokens = self.sliding_window - 1 + self.extra_retained_tokens + max_new_tokens
        return ceil_div(min(tokens, max_seq_len), self.block_size) + 1

    def first_block(self, num_tokens: int) -> int:
        """Return the block of the oldest token that the query at position `num_tokens` sees, or that is retained."""
        return max(0, num_tokens - (self.sliding_window - 1) - self.extra_retained_tokens) // self.block_size


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """Only the tokens of the query's own chunk are needed, and of `chunk_lookback` chunks before it.

    Attributes:
        attention_chunk_size: tokens per chunk; position p is in chunk `p // attention_chunk_size`.
        chunk_lookback: chunks before the own one that are visible too.
    """

    attention_chunk_size: int = field(default=0, kw_only=True)
    chunk_lookback: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int("attention_chunk_size", self.attention_chunk_size, 1)
        _check_int("chunk_lookback", self.chunk_lookback, 0)

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1, max_encoder_len: int | None = None) -> int:
        """Return the blocks of the visible chunks and new tokens; one more if a chunk may start inside a block."""
        tokens = self.attention_chunk_size * (self.chunk_lookback + 1) + max_new_tokens
        return ceil_div(min(tokens, max_seq_len), self.block_size) + bool(self.attention_chunk_size % self.block_size)

    def first_block(self, num_tokens: int) -> int:
        """Return the block in which the oldest chunk starts that the query at position `num_tokens` sees."""
        chunk = max(0, num_tokens // self.attention_chunk_size - self.chunk_lookback)
        return chunk * self.attention_chunk_size // self.block_size


@dataclass(frozen=True)
class CrossAttentionSpec(KVCacheSpec):
    """The encoder's states of a request, written once and read by every later step."""

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1, max_encoder_len: int | None = None) -> int:
        """Return `ceil(max_encoder_len / block_size)`, whatever the decoder's lengths.

        Raises:
            ConfigError: `max_encoder_len` is missing.
        """
        if max_encoder_len is None:
            raise ConfigError(
                "blocks of a CrossAttentionSpec without max_encoder_len",
                "the longest encoder input in tokens",
                "pass max_encoder_len=",
            )
        return ceil_div(max_encoder_len, self.block_size)


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(KVCacheSpec):
    """Nothing is stored: every token's keys and values are used in the step that computes them."""

    @property
    def content_bytes(self) -> int:
        """0."""
        return 0

    def storage_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return `(num_blocks, 0)`: blocks without content."""
        return num_blocks, 0

    def max_blocks(self, max_seq_len: int, max_new_tokens: int = 1, max_encoder_len: int | None = None) -> int:
        """Return 0."""
        return 0


def _unequal(name: str, values: Sequence[object]) -> CacheError:
    return CacheError(
        f"specs of one group with {name} {' and '.join(map(str, values))}",
        f"one {name}: the layers of a group share blocks",
        "give the layers equal settings, or put them into different groups",
    )


def ceil_div(count: int, size: int) -> int:
    """Return a count of tokens / `size`, rounded up.

    Raises:
        ConfigError: the count is no int from 0 up.
    """
    return -(-read_count("tokens", count, 0, "pass lengths in tokens") // size)


def round_up(count: int, size: int) -> int:
    """Return the smallest multiple of `size` that is at least `count`."""
    return ceil_div(count, size) * size


def _check_int(name: str, value: object, least: int) -> None:
    read_count(name, value, least, f"pass {name} >= {least}")
