"""What each FlashAttention library can do, as data."""

from __future__ import annotations

from vattn.backends.base import Capabilities, Exclusion
from vattn.backends.flash_attn.libraries import FlashLibrary
from vattn.cache.memory import ALIGNED
from vattn.config.device import Sizes

HEAD_SIZES = (32, 64, 96, 128, 160, 192, 224, 256)
"""Head sizes that every FlashAttention has kernels for; these libraries run the multiples of 8 between them too."""

_EVERY_8 = Sizes(8, 32, 256)
_COMMON = frozenset("bidirectional sliding_window lse hnd_layout contiguous_kv".split())
_SINKS_IN_BF16 = (
    Exclusion(frozenset({"sinks", "dtype=float16"}), "FlashAttention takes sinks in bf16: use a bf16 model"),
    Exclusion(frozenset({"sinks", "lse"}), "FlashAttention rounds sinks to bf16, too coarse for a log-sum-exp"),
)
_SAME_DTYPES = tuple(
    Exclusion(
        frozenset({f"dtype={dtype}", f"kv_cache_dtype={other}"}),
        f"FlashAttention multiplies queries and keys of one dtype: use a {dtype} cache",
    )
    for dtype, other in (("float16", "bfloat16"), ("bfloat16", "float16"))
)


def _capabilities(
    features: frozenset[str],
    block_sizes: Sizes,
    minimum_capability: tuple[int, int],
    exclusions: tuple[Exclusion, ...] = (),
    formats: tuple[str, ...] = (),
    head_sizes: Sizes = _EVERY_8,
) -> Capabilities:
    return Capabilities(
        devices=("cuda",),
        dtypes=("float16", "bfloat16"),
        kv_cache_dtypes=("float16", "bfloat16", *formats),
        query_formats=("none", *formats),
        output_formats=("none",),
        attn_types=("decoder", "encoder", "encoder_only", "encoder_decoder"),
        head_sizes=head_sizes,
        block_sizes=block_sizes,
        features=_COMMON | features,
        exclusions=(*exclusions, *_SAME_DTYPES),
        minimum_capability=minimum_capability,
        format_head_sizes=dict.fromkeys(formats, Sizes(16, 32, 256)),
        fp8_weights=bool(formats),
        row_alignment=ALIGNED,
        garbage_safe=False,
    )


_FP8_OF_3 = (
    Exclusion(
        frozenset({"kv_cache_dtype=fp8_e4m3", "query_format=none"}),
        "FlashAttention-3 multiplies FP8 keys only by FP8 queries: use query_format='fp8_e4m3'",
    ),
    *(
        Exclusion(
            frozenset({f"kv_cache_dtype={dtype}", "query_format=fp8_e4m3"}),
            "FlashAttention-3 multiplies FP8 queries only by FP8 keys: use an FP8 cache",
        )
        for dtype in ("float16", "bfloat16")
    ),
    Exclusion(
        frozenset({"kv_cache_dtype=fp8_e4m3", "dtype=float16"}), "FlashAttention-3 in FP8 writes bf16: use a bf16 model"
    ),
)
_WINDOW_INVARIANT = (
    Exclusion(
        frozenset({"batch_invariant", "sliding_window"}),
        "FlashAttention with a window rounds a row depending on its neighbours: use TRITON_ATTN",
    ),
)
_FEATURES_OF_3 = frozenset("logits_soft_cap kv_scale_per_head query_scale_per_head batch_invariant".split())
_ANY_16 = Sizes(16, 16, 256)
_LARGE_16 = Sizes(16, 16, 2048)
_PAGES_OF_2 = Sizes(256, 256, 2048)

FLASH_ATTENTION_3 = _capabilities(
    _FEATURES_OF_3 | {"sinks"}, _LARGE_16, (9, 0), (*_FP8_OF_3, *_SINKS_IN_BF16, *_WINDOW_INVARIANT), ("fp8_e4m3",)
)
"""What a FlashAttention-3 library given by path does; also what the documentation shows."""

FLASH_ATTENTION_3_PACKAGE = _capabilities(
    _FEATURES_OF_3, _LARGE_16, (9, 0), (*_FP8_OF_3, *_WINDOW_INVARIANT), ("fp8_e4m3",)
)
"""What the package of FlashAttention-3 does: it has no sinks."""

_FEATURES_OF_4 = frozenset({"logits_soft_cap", "sinks", "batch_invariant"})
FLASH_ATTENTION_4 = _capabilities(_FEATURES_OF_4, _ANY_16, (9, 0), (*_SINKS_IN_BF16, *_WINDOW_INVARIANT))
"""What the package of FlashAttention-4 does on sm_90."""

FLASH_ATTENTION_4_NEWER = _capabilities(
    _FEATURES_OF_4,
    _ANY_16,
    (10, 0),
    (*_SINKS_IN_BF16, *_WINDOW_INVARIANT),
    head_sizes=Sizes(values=(*range(32, 129, 8), 256)),
)
"""The same on newer GPUs, where it has fewer head sizes."""

FLASH_ATTENTION_2 = _capabilities(
    frozenset({"logits_soft_cap", "alibi"}),
    _PAGES_OF_2,
    (8, 0),
    (
        Exclusion(
            frozenset({"alibi", "lse"}),
            "FlashAttention-2 adds another constant to each row of ALiBi, which a log-sum-exp sees: use TRITON_ATTN",
        ),
    ),
)
"""What the package of FlashAttention-2 does; the only one with ALiBi."""

TORCH_VARLEN = _capabilities(frozenset(), _ANY_16, (8, 0))
"""What torch's own varlen attention does; torch's built-in implementation only runs attention without a cache."""


def capabilities_of(library: FlashLibrary | None, capability: tuple[int, int] | None = None) -> Capabilities:
    """Return what a library can do, on a GPU of that capability; for none, what FlashAttention-3 could."""
    if library is None or library.name == "FlashAttention-3":
        return FLASH_ATTENTION_3_PACKAGE if library is not None and library.module else FLASH_ATTENTION_3
    if library.name == "FlashAttention-4":
        return FLASH_ATTENTION_4_NEWER if capability is not None and capability >= (10, 0) else FLASH_ATTENTION_4
    return FLASH_ATTENTION_2 if library.name == "FlashAttention-2" else TORCH_VARLEN
