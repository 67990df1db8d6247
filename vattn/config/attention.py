"""What one attention layer requests: frozen, hashable, and one canonical string.

`AttentionConfig` is the only static argument of the attention ops. It travels as the string `config.encode()`, equal
for equal layers, so equal layers share one compiled graph and a graph dump can be read. `AttentionConfig.parse` is
cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from vattn.config import encoding
from vattn.config.arguments import integer, read_count
from vattn.config.dcp import DCPShard, check_shard, shard_of
from vattn.config.device import BLOCK_SIZES
from vattn.config.encoding import check as _check
from vattn.config.typed import typed
from vattn.quantization.formats import (
    KV_FORMATS,
    MODEL_DTYPES,
    OUTPUT_ARITHMETICS,
    OUTPUT_FACTORS,
    OUTPUT_FLOORS,
    OUTPUT_FORMATS,
    QUERY_FORMATS,
    QUERY_LOADS,
    SCALE_KINDS,
    kv_cache_dtypes,
)
from vattn.quantization.mla_formats import MLA_PACKED_DTYPES


class AttentionType(str, Enum):
    """Who attends to what. A string enum, so plain strings compare equal."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


MAX_WINDOW = 1 << 30
"""Largest sliding window: lengths are int32, and a position plus a window must be one too."""

CAUSALITIES = ("causal", "bidirectional", "per_request")
ALIBI_KINDS = ("none", "linear", "sqrt")
MM_PREFIX_KINDS = ("none", "full", "clamped")
KV_CACHE_LAYOUTS = ("NHD", "HND")
HEAD_PAIRS = ("none", "even", "odd")


def check_window(window: object, name: str = "sliding_window") -> None:
    """Refuse what is no window; `name`: name of the argument.

    Raises:
        ConfigError: neither `None` nor an integer in range.
    """
    count = integer(window)
    _check(
        window is None or (count is not None and 1 <= count <= MAX_WINDOW),
        f"{name}={window!r:.60}",
        f"None or an int from 1 to {MAX_WINDOW}",
        "pass None for none",
    )


def check_output(config: Any, columns: int) -> None:
    """Refuse an output format, or a smallest scale, that rows of `columns` columns cannot have.

    Raises:
        ConfigError: so it is.
    """
    fmt, lowest = OUTPUT_FORMATS[config.output_format], config.output_min_scale
    _check(
        fmt.group_size <= 0 or columns % fmt.group_size == 0,
        f"output_format={config.output_format!r} with rows of {columns} columns",
        f"rows that are a multiple of {fmt.group_size}",
        "use another group size or per-token scales",
    )
    _check(
        config.output_arithmetic in fmt.arithmetics,
        f"output_arithmetic={config.output_arithmetic!r} with output_format={config.output_format!r}",
        ", ".join(fmt.arithmetics),
        "use output_arithmetic='divide'",
    )
    _check(
        lowest is None or (fmt.has_fp32_scales and lowest >= 0),
        f"output_min_scale={lowest} with output_format={config.output_format!r}",
        "a number from 0 up with output formats that compute scales in fp32",
        "pass None for the default",
    )
    floor, factor = config.output_floor, config.output_arithmetic.removeprefix("approximate_") in OUTPUT_FACTORS
    fits = {"scale": True, "maximum": True, "rounded_scale": fmt.power_of_two, "zero": not fmt.power_of_two}
    _check(
        factor == (floor == "maximum") and fits[floor] and (floor == "scale" or lowest is not None),
        f"output_floor={floor!r} with output_format={config.output_format!r}, "
        f"output_arithmetic={config.output_arithmetic!r} and output_min_scale={lowest}",
        "an output_min_scale; 'maximum' with factors, 'rounded_scale' where scales are powers of two, 'zero' elsewhere",
        "use output_floor='scale', or 'maximum' with a factor",
    )


@dataclass(frozen=True)
class AttentionConfig(encoding.Encoded):
    """Describe one attention completely and statically.

    Attributes:
        num_heads, num_kv_heads: query heads and KV heads; the first is a multiple of the second.
        head_size, head_size_v: key and value width of one head.
        scale: factor of the scores before anything else.
        dtype: model dtype by name; also the dtype that a quantised output is rounded to first.
        kv_cache_dtype: canonical KV format name (`vattn.quantization.formats.KV_FORMATS`), never `"auto"`.
        block_size: tokens per cache block; 0 for `varlen_attention`, which has no cache.
        kv_cache_layout: `"NHD"` or `"HND"`, the physical order inside a block.
        kv_scale, query_scale: `"none"`, `"tensor"` or `"head"` (one value per KV head).
        head_pairs: `"even"` or `"odd"`: the cache holds pairs of KV heads, `2 * num_kv_heads` of `head_size`. Keys are
            the even (odd) ones, values those of both side by side: `head_size_v = 2 * head_size`. The two halves of
            differential attention. `NHD` caches of formats that are not packed only.
        query_format: `"none"` or `"fp8_e4m3"`.
        query_load: `"plain"`: the query comes in its format. Other names of `vattn.quantization.formats.QUERY_LOADS`:
            an FP8 query comes in the model dtype and is rounded as it is loaded; `"divide"` by `q_scale`, or
            `"multiply"` by its reciprocal, in fp32.
        output_format: name in `vattn.quantization.formats.OUTPUT_FORMATS`.
        output_arithmetic: `"divide"` by the scale, or `"multiply"` by its reciprocal; a static `output_scale` is then
            that reciprocal. Names of `OUTPUT_FACTORS` scale by a factor made of the maximum. Names with `approximate_`
            divide as code that Inductor generates for CUDA does, which may differ in the last two places. See
            `vattn.quantization.formats`.
        output_min_scale: computed fp32 scales are at least this; `None`: `vattn.quantization.codecs.MIN_ABSMAX / 448`.
            With 0, rows of zeros become NaN.
        output_floor: `"scale"`: a smaller scale is raised to it; `"rounded_scale"`: after it is rounded to a power of
            two; `"zero"`: a scale of zero alone is replaced by it; `"maximum"`: with factors, it is the least maximum.
        attn_type: see `AttentionType`. `"encoder_decoder"`: queries and keys count their positions apart, so every row
            sees every key of its request, and nothing that compares positions can be requested.
        causality: `"causal"`, `"bidirectional"`, or `"per_request"` with `causal_flags`.
        sliding_window: tokens visible to the left, itself included; bidirectional rows see |q - k| < window.
        chunk_lookback: with `sliding_window=W`: chunks of `W // (lookback + 1)` tokens, a row sees its own chunk and
            `lookback` chunks before it, instead of the window. 0 is chunked local attention. Bidirectional rows see as
            many chunks after theirs.
        logits_soft_cap: `cap * tanh(score / cap)` on scaled scores.
        alibi: `"none"`, `"linear"` or `"sqrt"`; slopes are a tensor argument.
        sinks: one learned logit per head joins the denominator.
        tree_bias: `bias` and `tree_id` arguments apply.
        mm_prefix: `"none"`, `"full"` (bidirectional ranges ignore the window) or `"clamped"`.
        lse: the op also writes the log-sum-exp.
        context_parallel: the cache holds one rank's share of each request's tokens, and `local_seq_lens` applies.
        context_rank, context_world, context_interleave: which share: token i lies on rank
            `i // context_interleave % context_world` (`vattn.distributed.DCPShard`).
        context_only: rows see keys before their request's first row alone, `k < seq_len - query_len`; those of the step
            are attended apart, as they are given, and the two results merged (`CacheConfig.exact_prefill`).
        batch_invariant: results must not depend, bitwise, on the other requests of the batch.
        backend: name of the backend that runs the op.
    """

    head = "vattn1"

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    dtype: str
    kv_cache_dtype: str
    block_size: int = 16
    kv_cache_layout: str = "NHD"
    head_pairs: str = "none"
    kv_scale: str = "none"
    query_format: str = "none"
    query_scale: str = "none"
    query_load: str = "plain"
    output_format: str = "none"
    output_arithmetic: str = "divide"
    output_min_scale: float | None = None
    output_floor: str = "scale"
    attn_type: str = "decoder"
    causality: str = "causal"
    sliding_window: int | None = None
    chunk_lookback: int | None = None
    logits_soft_cap: float | None = None
    alibi: str = "none"
    sinks: bool = False
    tree_bias: bool = False
    mm_prefix: str = "none"
    lse: bool = False
    context_parallel: bool = False
    context_rank: int = 0
    context_world: int = 1
    context_interleave: int = 1
    context_only: bool = False
    batch_invariant: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        encoding.make_canonical(self)
        self._check_sizes()
        self._check_names()
        self._check_mask()
        check_shard(self)

    def _check_sizes(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size", "head_size_v"):
            value = getattr(self, name)
            _check(value > 0, f"{name}={value!r}", "a positive int", f"pass {name} >= 1")
        _check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}",
            "num_heads % num_kv_heads == 0",
            "check the head counts of the model (after tensor-parallel splitting)",
        )
        _check(self.block_size >= 0, f"block_size={self.block_size}", "a positive int", "pass block_size=16")

    def _check_names(self) -> None:
        choices = {
            "dtype": tuple(MODEL_DTYPES),
            "kv_cache_dtype": tuple(KV_FORMATS),
            "kv_cache_layout": KV_CACHE_LAYOUTS,
            "head_pairs": HEAD_PAIRS,
            "kv_scale": SCALE_KINDS,
            "query_scale": SCALE_KINDS,
            "query_format": QUERY_FORMATS,
            "query_load": QUERY_LOADS,
            "output_format": tuple(OUTPUT_FORMATS),
            "output_arithmetic": OUTPUT_ARITHMETICS,
            "output_floor": OUTPUT_FLOORS,
            "attn_type": tuple(t.value for t in AttentionType),
            "causality": CAUSALITIES,
            "alibi": ALIBI_KINDS,
            "mm_prefix": MM_PREFIX_KINDS,
        }
        encoding.check_names(self, choices)
        quantised = KV_FORMATS[self.kv_cache_dtype].quantised
        _check(
            (self.kv_scale != "none") == quantised,
            f"kv_scale={self.kv_scale!r} with kv_cache_dtype={self.kv_cache_dtype!r}",
            "kv_scale 'tensor' or 'head' for "
            + ", ".join(fmt.name for fmt in KV_FORMATS.values() if fmt.quantised)
            + "; 'none' for the others",
            "give scales to a format that takes them, and only to one",
        )
        _check(
            (self.query_scale != "none") == (self.query_format != "none"),
            f"query_scale={self.query_scale!r} with query_format={self.query_format!r}",
            "query_scale 'tensor' or 'head' for an FP8 query, 'none' otherwise",
            "give q_scale with an FP8 query, and only with one",
        )
        _check(
            self.query_load == "plain" or self.query_format != "none",
            f"query_load={self.query_load!r} with query_format={self.query_format!r}",
            "another query_load than 'plain' for an FP8 query alone",
            "set query_format='fp8_e4m3'",
        )
        self._check_head_pairs()
        check_output(self, self.num_heads * self.head_size_v)

    def _check_head_pairs(self) -> None:
        if self.head_pairs == "none":
            return
        asked = f"head_pairs={self.head_pairs!r} with "
        _check(
            self.head_size_v == 2 * self.head_size,
            f"{asked}head_size={self.head_size} and head_size_v={self.head_size_v}",
            "head_size_v = 2 * head_size: the values of a pair lie side by side",
            f"pass head_size_v={2 * self.head_size}",
        )
        _check(
            self.kv_cache_layout == "NHD" and self.block_size > 0,
            f"{asked}kv_cache_layout={self.kv_cache_layout!r} and block_size={self.block_size}",
            "a cache in the layout 'NHD', where the heads of a token are neighbours",
            "use kv_cache_layout='NHD' and block_size=16",
        )
        packed = [fmt.name for fmt in KV_FORMATS.values() if fmt.packed]
        _check(
            self.kv_cache_dtype not in packed,
            f"{asked}kv_cache_dtype={self.kv_cache_dtype!r}",
            ", ".join(name for name in KV_FORMATS if name not in packed),
            "choose a format that stores plain rows",
        )

    def _check_mask(self) -> None:
        window, cap, lookback = self.sliding_window, self.logits_soft_cap, self.chunk_lookback
        check_window(window)
        _check(
            cap is None or (cap > 0 and cap < float("inf")),
            f"logits_soft_cap={cap}",
            "None or a positive finite number",
            "pass None for no soft cap, also where an engine's 0.0 means none (cap or None)",
        )
        if lookback is not None:
            _check(
                window is not None and lookback >= 0 and window // (lookback + 1) >= 1,
                f"chunk_lookback={lookback} with sliding_window={window}",
                "chunk_lookback >= 0 with sliding_window >= chunk_lookback + 1",
                "give the window that the chunks divide",
            )
        causal = self.causality == "causal"
        asked = {
            "causality": self.causality != "bidirectional",
            "sliding_window": window is not None,
            "alibi": self.alibi != "none",
            "mm_prefix": self.mm_prefix != "none",
            "context_only": self.context_only,
        }
        for name, compares in asked.items() if self.attn_type == "encoder_decoder" else ():
            _check(
                not compares,
                f"{name}={getattr(self, name)!r} with attn_type='encoder_decoder'",
                "bidirectional attention without windows, ALiBi and ranges: queries have no position among the keys",
                "use causality='bidirectional'" if name == "causality" else f"leave {name} to self-attention",
            )
        _check(
            causal or self.alibi != "sqrt",
            f"alibi='sqrt' with causality={self.causality!r}",
            "sqrt ALiBi with causal attention",
            "use linear ALiBi",
        )
        _check(
            not (self.context_only and self.context_parallel),
            "context_only with context_parallel",
            "one of the two: a rank's share of the cache holds some tokens of the step",
            "leave exact_prefill out under context parallelism",
        )
        _check(
            causal or not self.tree_bias,
            f"tree_bias with causality={self.causality!r}",
            "a tree over causal attention",
            "use causality='causal'",
        )

    def with_plain_output(self) -> AttentionConfig:
        """Return the same request with results in the model dtype. Kernels ask at each launch, so it is made once."""
        return _with_plain_output(self)

    @property
    def dcp_shard(self) -> DCPShard | None:
        """The share of each request's tokens that the cache holds; `None`: all."""
        return shard_of(self)

    @property
    def chunk_size(self) -> int | None:
        """Tokens per local chunk, `None` when `chunk_lookback` is off."""
        if self.chunk_lookback is None or self.sliding_window is None:
            return None
        return self.sliding_window // (self.chunk_lookback + 1)

    @property
    def takes_fp8_query(self) -> bool:
        """Whether the query argument of the ops is e4m3; otherwise it is in the model dtype."""
        return self.query_format != "none" and self.query_load == "plain"

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@lru_cache(maxsize=4096)
def _with_plain_output(config: AttentionConfig) -> AttentionConfig:
    return config.replace(output_format="none", output_arithmetic="divide", output_min_scale=None, output_floor="scale")


@typed
@dataclass(frozen=True)
class CacheConfig:
    """Say how the KV caches of a model are stored.

    Attributes:
        block_size: tokens per block: 1, 2, 4 or a multiple of 8 from 8 to 2048. Which of them a backend and its fast
            kernels take, `vattn.explain` says.
        cache_dtype: `"auto"` (the model dtype), `"float16"`, `"bfloat16"`, `"float32"`, `"fp8"` (`"fp8_e4m3"`),
            `"fp8_e5m2"`, or a packed format of `vattn.quantization.formats.KV_FORMATS`, such as
            `"int8_per_token_head"`; for latent attention also `"fp8_ds_mla"` and `"nvfp4_ds_mla"`.
        sliding_window: default window of layers that name none.
        calculate_kv_scales: compute the scales of a quantised cache on the device, once, from the first real tokens;
            layers with a cache that takes none refuse it.
        kv_cache_dtype_skip_layers: layers that keep `"auto"`: a layer index as a string, or `"sliding_window"` for
            every layer with a window. With `cache_dtype="auto"` they are what all layers are. What matches no layer is
            refused where the whole model is known (`enable`), and warned of by `vattn.allocate_kv_cache`.
        kv_cache_layout: `"NHD"` or `"HND"`.
        exact_prefill: rows see the keys and values of their own step as they are given, and only those of earlier steps
            as they are stored. Results then depend on how a prompt is split into steps. Nothing changes in layers with
            a cache of the model dtype.
    """

    block_size: int = 16
    cache_dtype: str = "auto"
    sliding_window: int | None = None
    calculate_kv_scales: bool = False
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    kv_cache_layout: str = "NHD"
    exact_prefill: bool = False

    def __post_init__(self) -> None:
        skip = self.kv_cache_dtype_skip_layers
        _check(
            isinstance(skip, (tuple, list)),
            f"kv_cache_dtype_skip_layers={skip!r}",
            "a tuple of strings",
            "write a tuple, e.g. ('0', 'sliding_window')",
        )
        object.__setattr__(self, "kv_cache_dtype_skip_layers", tuple(skip))
        _check(
            type(self.block_size) is int and self.block_size in BLOCK_SIZES,
            f"block_size={self.block_size!r}",
            f"{BLOCK_SIZES}",
            "block_size=16",
        )
        choices = {"cache_dtype": (*kv_cache_dtypes(), *MLA_PACKED_DTYPES), "kv_cache_layout": KV_CACHE_LAYOUTS}
        encoding.check_names(self, choices)
        check_window(self.sliding_window)
        for name in ("calculate_kv_scales", "exact_prefill"):
            switch = getattr(self, name)
            _check(isinstance(switch, bool), f"{name}={switch!r:.60}", "True or False", f"{name}=True")
        for entry in self.kv_cache_dtype_skip_layers:
            _check(
                entry == "sliding_window" or (isinstance(entry, str) and entry.isdigit()),
                f"kv_cache_dtype_skip_layers entry {entry!r}",
                "a layer index as a string, or 'sliding_window'",
                "write the index of the layer, e.g. '0'",
            )


@typed
def boundary_layers(num_layers: int, keep: int = 2) -> tuple[str, ...]:
    """Return the first and last layers of a model, for `CacheConfig.kv_cache_dtype_skip_layers`.

    They are the most sensitive to coarse caches, and cost little memory among many.

    Args:
        num_layers: layers of the model.
        keep: layers at either end; where there are fewer than twice as many, `num_layers // 2` at either end, so that
            none is named twice: both of 2 layers, `('0', '2')` of 3, and none of 1, which is all that the cache has.

    Raises:
        ConfigError: a number out of range.

    Example:
        >>> boundary_layers(32)
        ('0', '1', '30', '31')
    """
    for name, value, least in (("num_layers", num_layers, 1), ("keep", keep, 0)):
        read_count(name, value, least, "count the layers of the model")
    keep = min(keep, num_layers // 2)
    return tuple(str(index) for index in (*range(keep), *range(num_layers - keep, num_layers)))
