"""The request of one latent attention (MLA) layer: frozen, hashable, and one canonical string.

Multi-head latent attention stores one row per token for all heads: a latent of `kv_lora_rank` columns and a rotated key
of `qk_rope_head_dim` columns. Keys and values of a head are projections of the latent by `kv_b_weight`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vattn.config import encoding
from vattn.config.attention import check_output
from vattn.config.dcp import DCPShard, check_shard, shard_of
from vattn.config.encoding import check as _check
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_ARITHMETICS, OUTPUT_FLOORS, OUTPUT_FORMATS, QUERY_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS

WEIGHT_FORMATS = ("none", "fp8_tensor", "fp8_block128")
"""How `kv_b_weight` reaches the op: in the model dtype, or as e4m3 with one scale or one per 128 x 128 block."""

DECODE_THRESHOLD = 8

_MOST_SCALE = (2 - 2.0**-23) * 2.0**127
"""The largest number of fp32."""


@dataclass(frozen=True)
class MLAConfig(encoding.Encoded):
    """Describe one latent attention completely and statically.

    Attributes:
        num_heads: query heads N.
        qk_nope_head_dim, qk_rope_head_dim: columns of a query head without and with rotation, P and R.
        v_head_dim: value columns of a head, V.
        kv_lora_rank: columns of the latent, L.
        scale: factor of the scores.
        dtype: model dtype by name; also the dtype that a quantised output is rounded to first.
        kv_cache_dtype: row format (`vattn.quantization.mla_formats.MLA_FORMATS`), never `"auto"`.
        block_size: tokens per cache block.
        kv_scale: `"tensor"` with an FP8 cache that takes one scale for latent and rotated key, `"none"` otherwise.
        query_format: `"fp8_e4m3"`, with an `fp8_e4m3` cache: queries that a backend absorbs into the latent space are
            quantised there, latent and rotated columns by one scale, after rounding to the model dtype; queries that
            meet expanded keys are not. `"none"`: queries stay in the model dtype.
        weight_format: see `WEIGHT_FORMATS`.
        output_format, output_arithmetic, output_min_scale, output_floor: as in `AttentionConfig`, over rows of N * V
            columns.
        lse: the op also writes the log-sum-exp.
        decode_threshold: requests of at most this many rows are absorbed: their queries are projected into the latent
            space and read the cache as it is. Longer ones may have keys and values expanded instead, where a backend
            can do that without reading lengths from the device. Results differ by rounding alone.
        sparse: `topk_indices` applies: rows see the listed positions alone.
        context_parallel, context_rank, context_world, context_interleave: as in `AttentionConfig`.
        backend: name of the backend that runs the op.

    Example:
        >>> from vattn.config.mla import MLAConfig
        >>> MLAConfig(16, 128, 64, 128, 512, 192**-0.5, "bfloat16", "bfloat16", block_size=64).head_size
        576
    """

    head = "mla1"

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    scale: float
    dtype: str
    kv_cache_dtype: str
    block_size: int = 16
    kv_scale: str = "none"
    query_format: str = "none"
    weight_format: str = "none"
    output_format: str = "none"
    output_arithmetic: str = "divide"
    output_min_scale: float | None = None
    output_floor: str = "scale"
    lse: bool = False
    decode_threshold: int = DECODE_THRESHOLD
    sparse: bool = False
    context_parallel: bool = False
    context_rank: int = 0
    context_world: int = 1
    context_interleave: int = 1
    backend: str = "auto"

    def __post_init__(self) -> None:
        encoding.make_canonical(self)
        sizes = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "block_size")
        for name in (*sizes, "decode_threshold"):
            value = getattr(self, name)
            _check(value > 0, f"{name}={value!r}", "a positive int", f"pass {name} >= 1")
        choices = {
            "dtype": tuple(MODEL_DTYPES),
            "kv_cache_dtype": tuple(MLA_FORMATS),
            "kv_scale": ("none", "tensor"),
            "query_format": QUERY_FORMATS,
            "weight_format": WEIGHT_FORMATS,
            "output_format": tuple(OUTPUT_FORMATS),
            "output_arithmetic": OUTPUT_ARITHMETICS,
            "output_floor": OUTPUT_FLOORS,
        }
        encoding.check_names(self, choices)
        _check(abs(self.scale) <= _MOST_SCALE, f"scale={self.scale!r}", "a factor that fp32 holds", "check the scale")
        self._check_formats()
        check_shard(self)

    def _check_formats(self) -> None:
        row = MLA_FORMATS[self.kv_cache_dtype]
        _check(
            (self.kv_scale == "tensor") == row.scaled,
            f"kv_scale={self.kv_scale!r} with kv_cache_dtype={self.kv_cache_dtype!r}",
            "'tensor' for an fp8_e4m3 cache, 'none' otherwise: packed rows carry their scales",
            "give a scale with an fp8_e4m3 cache, and only with one",
        )
        _check(
            self.query_format == "none" or self.kv_cache_dtype == self.query_format,
            f"query_format={self.query_format!r} with kv_cache_dtype={self.kv_cache_dtype!r}",
            "FP8 queries over an fp8_e4m3 cache",
            "drop query_format, or store the cache as fp8_e4m3",
        )
        _check(
            self.kv_lora_rank % row.latent_multiple == 0,
            f"kv_lora_rank={self.kv_lora_rank} with kv_cache_dtype={self.kv_cache_dtype!r}",
            f"a multiple of {row.latent_multiple}",
            "use a plain cache format",
        )
        _check(
            not row.packed or self.row_bytes % row.alignment == 0,
            f"qk_rope_head_dim={self.qk_rope_head_dim} with kv_cache_dtype={self.kv_cache_dtype!r}",
            "an even width, so that the scales of every row are aligned",
            "use a plain cache format",
        )
        check_output(self, self.num_heads * self.v_head_dim)
        fmt = OUTPUT_FORMATS[self.output_format]
        _check(
            fmt.group_size != 16 or self.v_head_dim % 16 == 0,
            f"output_format={self.output_format!r} with v_head_dim={self.v_head_dim}",
            "v_head_dim that is a multiple of 16",
            "use an FP8 output format",
        )

    @property
    def dcp_shard(self) -> DCPShard | None:
        """The share of each request's tokens that the cache holds; `None`: all."""
        return shard_of(self)

    @property
    def num_kv_heads(self) -> int:
        """1: one row serves all heads."""
        return 1

    @property
    def head_size(self) -> int:
        """Columns of a cached row, L + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def head_size_v(self) -> int:
        """Columns of a row that are values of the absorbed form, L."""
        return self.kv_lora_rank

    @property
    def qk_head_dim(self) -> int:
        """Columns of a query head, P + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attn_type(self) -> str:
        """Always `"decoder"`."""
        return "decoder"

    @property
    def row_bytes(self) -> int:
        """Bytes of one cached row."""
        return MLA_FORMATS[self.kv_cache_dtype].row_bytes(self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def packed(self) -> bool:
        """Whether the storage is `[num_blocks, bytes]` of uint8."""
        return MLA_FORMATS[self.kv_cache_dtype].packed
