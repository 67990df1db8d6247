"""The hand-picked requests for every backend: each feature alone, pairs that meet in the code, every format."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, OUTPUT_FORMATS


@dataclass(frozen=True)
class Row:
    """One request.

    Attributes:
        changes: what differs from `tests.support.make_config()` (4 heads, 2 KV heads, head size 16, fp32, blocks of 8).
        lens: pairs (query_len, seq_len), one per request.
        padding: padding tokens and padding requests.
        table: `"fit"`, `"narrow"` (too few columns for the longest request) or `"broken"` (used entries out of range).
    """

    changes: dict[str, Any] = field(default_factory=dict)
    lens: tuple[tuple[int, int], ...] = ()
    padding: tuple[int, int] = (3, 2)
    table: str = "fit"


MIXED = ((0, 7), (1, 26), (5, 5), (3, 19), (1, 1), (0, 0), (2, 1))
"""No query, decode, whole prefill, chunk of a prefill, first token, nothing, and a query longer than its sequence."""

DECODES = ((1, 9), (1, 40), (1, 8), (1, 33), (1, 0))
LONG = ((1, 150), (6, 131))
TEXTS = ((7, 7), (0, 0), (21, 21), (1, 1), (4, 4))
"""Whole texts, or images, without a cache."""

ENCODED = ((9, 4), (1, 26), (3, 0), (0, 7), (6, 6), (40, 150), (1, 1))
"""Queries of any length over encoder states: longer, shorter, none, and a request that is not asked."""

IMAGES = ((9, 21), (20, 20), (1, 30), (4, 3))

WINDOW = {"sliding_window": 5}
TREE = {"tree_bias": True}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
FP8_HEADS = {**FP8, "kv_scale": "head"}
FP8_QUERY = {"query_format": "fp8_e4m3"}
ROUNDED_QUERY = {**FP8_QUERY, "query_load": "divide"}
SINKS = {"sinks": True}
LSE = {"lse": True}
ALIBI = {"alibi": "linear"}
CAP = {"logits_soft_cap": 1.3}
FLAGS = {"causality": "per_request"}
BOTH_WAYS = {"causality": "bidirectional"}
CROSS = {**BOTH_WAYS, "attn_type": "encoder_decoder"}
PACKED = {"block_size": 0}

_SINGLE: dict[str, Row] = {
    "plain": Row({}, MIXED),
    "plain-no-padding": Row({}, MIXED, padding=(0, 0)),
    "plain-decodes": Row({}, DECODES, padding=(0, 2)),
    "plain-long": Row({}, LONG),
    "uneven-decodes": Row({}, ((1, 300), (1, 3), (1, 1), (1, 2), (1, 0))),
    "plain-all-padding": Row({}, ((0, 0), (0, 5)), padding=(4, 1)),
    "narrow-table": Row({}, ((2, 30), (1, 9), (20, 40)), table="narrow"),
    "narrow-table-decodes": Row({}, DECODES, table="narrow"),
    "broken-table": Row({}, MIXED, table="broken"),
    "broken-table-decodes": Row({}, DECODES, table="broken"),
    "lse": Row(LSE, MIXED),
    "bidirectional": Row(BOTH_WAYS, MIXED),
    "causal-flags": Row(FLAGS, MIXED),
    "window1": Row({"sliding_window": 1}, MIXED),
    "window5": Row(WINDOW, MIXED),
    "window8-decodes": Row({"sliding_window": 8}, DECODES),
    "window-longer-than-all": Row({"sliding_window": 1000}, MIXED),
    "window37-long": Row({"sliding_window": 37}, LONG),
    "chunk8": Row({"sliding_window": 8, "chunk_lookback": 0}, MIXED),
    "chunk3-lookback2": Row({"sliding_window": 10, "chunk_lookback": 2}, MIXED),
    "soft-cap": Row(CAP, MIXED),
    "soft-cap-saturated": Row({"logits_soft_cap": 0.01, "scale": 20.0}, MIXED),
    "alibi": Row(ALIBI, MIXED),
    "alibi-sqrt": Row({"alibi": "sqrt"}, MIXED),
    "sinks": Row(SINKS, MIXED),
    "sinks-decodes": Row(SINKS, DECODES),
    "tree": Row(TREE, MIXED),
    "tree-decodes": Row(TREE, DECODES),
    "mm-full": Row({"mm_prefix": "full"}, IMAGES),
    "mm-clamped": Row({"mm_prefix": "clamped", "sliding_window": 6}, IMAGES),
    "context-only": Row({"context_only": True}, MIXED),
    "context-only-long": Row({"context_only": True, "sliding_window": 9, "sinks": True, "lse": True}, LONG),
    "context-only-flags": Row({"context_only": True, **FLAGS, "alibi": "linear"}, MIXED),
    "hnd": Row({"kv_cache_layout": "HND"}, MIXED),
    "pairs-even": Row({"head_pairs": "even", "head_size_v": 32}, MIXED),
    "pairs-odd-decodes": Row({"head_pairs": "odd", "head_size_v": 32}, DECODES),
    "packed": Row(PACKED, MIXED),
    "fp8-heads": Row(FP8_HEADS, MIXED),
    "fp8-query-heads": Row({**FP8_QUERY, "query_scale": "head"}, MIXED),
    "rounded-query": Row(ROUNDED_QUERY, MIXED),
    "rounded-query-heads": Row({**ROUNDED_QUERY, "query_scale": "head"}, MIXED),
    "rounded-query-multiply": Row({**ROUNDED_QUERY, "query_load": "multiply", "query_scale": "head"}, DECODES),
    "scale-zero": Row({"scale": 0.0}, MIXED),
    "scale-negative": Row({"scale": -0.7}, MIXED),
}

_PAIRS: dict[str, Row] = {
    "window+sinks+lse": Row({**WINDOW, **SINKS, **LSE}, MIXED),
    "window+alibi+soft-cap": Row({**WINDOW, **ALIBI, **CAP}, MIXED),
    "pairs+fp8-heads+fp8-query": Row({"head_pairs": "odd", "head_size_v": 32, **FP8_HEADS, **FP8_QUERY}, MIXED),
    "pairs+window+sinks+lse-long": Row({"head_pairs": "even", "head_size_v": 32, **WINDOW, **SINKS, **LSE}, LONG),
    "window+tree": Row({**WINDOW, **TREE}, MIXED),
    "window+flags": Row({**WINDOW, **FLAGS}, MIXED),
    "window+bidirectional+lse": Row({**WINDOW, **BOTH_WAYS, **LSE}, MIXED),
    "chunk+flags": Row({"sliding_window": 9, "chunk_lookback": 1, **FLAGS}, MIXED),
    "chunk+sinks+hnd": Row({"sliding_window": 9, "chunk_lookback": 1, **SINKS, "kv_cache_layout": "HND"}, MIXED),
    "chunk+mm-full": Row({"sliding_window": 9, "chunk_lookback": 0, "mm_prefix": "full"}, IMAGES),
    "alibi+bidirectional": Row({**ALIBI, **BOTH_WAYS}, MIXED),
    "alibi+flags+mm-full": Row({**ALIBI, **FLAGS, "mm_prefix": "full"}, IMAGES),
    "alibi-sqrt+mm-full+lse": Row({"alibi": "sqrt", "mm_prefix": "full", **LSE}, IMAGES),
    "alibi-sqrt+sinks+soft-cap": Row({"alibi": "sqrt", **SINKS, **CAP}, MIXED),
    "alibi+tree": Row({**ALIBI, **TREE}, MIXED),
    "mm-full+window": Row({"mm_prefix": "full", **WINDOW}, IMAGES),
    "mm-clamped+window+flags+sinks": Row({"mm_prefix": "clamped", **WINDOW, **FLAGS, **SINKS}, IMAGES),
    "mm-full+tree": Row({"mm_prefix": "full", **TREE}, IMAGES),
    "mm-clamped+bidirectional+window": Row({"mm_prefix": "clamped", **WINDOW, **BOTH_WAYS}, IMAGES),
    "tree+sinks+lse+soft-cap": Row({**TREE, **SINKS, **LSE, **CAP}, MIXED),
    "lse+sinks-long": Row({**LSE, **SINKS}, LONG),
    "lse+decodes": Row(LSE, DECODES),
    "lse+soft-cap+flags": Row({**LSE, **CAP, **FLAGS}, MIXED),
    "fp8-heads+hnd+window": Row({**FP8_HEADS, "kv_cache_layout": "HND", **WINDOW}, MIXED),
    "fp8-heads+fp8-query-heads": Row({**FP8_HEADS, **FP8_QUERY, "query_scale": "head"}, MIXED),
    "fp8-heads+fp8-query": Row({**FP8_HEADS, **FP8_QUERY}, MIXED),
    "fp8+fp8-query-heads": Row({**FP8, **FP8_QUERY, "query_scale": "head"}, MIXED),
    "fp8-heads+rounded-query-heads-long": Row({**FP8_HEADS, **ROUNDED_QUERY, "query_scale": "head"}, LONG),
    "rounded-query+soft-cap+packed": Row({**PACKED, **ROUNDED_QUERY, **CAP}, MIXED),
    "fp8+tree+alibi+lse": Row({**FP8, **TREE, **ALIBI, **LSE}, MIXED),
    "fp8+decodes+sinks": Row({**FP8, **SINKS}, DECODES),
    "fp8-unequal-hnd": Row({**FP8_HEADS, "head_size_v": 24, "kv_cache_layout": "HND"}, MIXED),
    "cross+lse": Row({**CROSS, **LSE}, ENCODED),
    "cross+soft-cap+sinks+decodes": Row({**CROSS, **CAP, **SINKS}, DECODES),
    "cross+fp8-heads+fp8-query": Row({**CROSS, **FP8_HEADS, **FP8_QUERY}, ENCODED),
    "cross+unequal+hnd+broken-table": Row(
        {**CROSS, "head_size_v": 24, "kv_cache_layout": "HND"}, ENCODED, table="broken"
    ),
    "packed+cross+fp8-static": Row({**PACKED, **CROSS, "output_format": "fp8_static"}, ENCODED),
    "packed+window+flags+lse": Row({**PACKED, **WINDOW, **FLAGS, **LSE}, MIXED),
    "packed+bidirectional+alibi": Row({**PACKED, **BOTH_WAYS, **ALIBI}, MIXED),
    "packed+tree+sinks": Row({**PACKED, **TREE, **SINKS}, MIXED),
    "packed+mm-full": Row({**PACKED, "mm_prefix": "full"}, IMAGES),
    "packed+fp8-heads+fp8-query": Row({**PACKED, **FP8_HEADS, **FP8_QUERY}, MIXED),
    "packed+unequal+encoder": Row({**PACKED, **BOTH_WAYS, "head_size_v": 40, "attn_type": "encoder"}, MIXED),
    "packed+encoder-only+window+alibi+sinks": Row(
        {**PACKED, **BOTH_WAYS, **WINDOW, **ALIBI, **SINKS, "attn_type": "encoder_only"}, TEXTS
    ),
    "packed+encoder-only+chunk+lse": Row(
        {**PACKED, **BOTH_WAYS, "sliding_window": 9, "chunk_lookback": 1, **LSE, "attn_type": "encoder_only"}, TEXTS
    ),
    "packed+encoder-only+fp8-heads+out": Row(
        {**PACKED, **BOTH_WAYS, **FP8_HEADS, "output_format": "fp8_per_token", "attn_type": "encoder_only"}, TEXTS
    ),
    "packed+encoder+fp8+fp8-query": Row(
        {**PACKED, **BOTH_WAYS, **FP8, **FP8_QUERY, "head_size": 72, "dtype": "bfloat16", "attn_type": "encoder"}, TEXTS
    ),
    "packed+encoder-only+soft-cap": Row({**PACKED, **BOTH_WAYS, **CAP, "attn_type": "encoder_only"}, MIXED),
    "broken-table+window+sinks+lse": Row({**WINDOW, **SINKS, **LSE}, MIXED, table="broken"),
    "broken-table+mm-full": Row({"mm_prefix": "full"}, IMAGES, table="broken"),
    "narrow-table+bidirectional+lse": Row({**BOTH_WAYS, **LSE}, ((2, 30), (1, 9)), table="narrow"),
}

_SIZES: dict[str, Row] = {
    **{
        f"heads{h}-kv{k}": Row({"num_heads": h, "num_kv_heads": k}, MIXED)
        for h, k in ((1, 1), (3, 3), (7, 1), (6, 2), (10, 2), (33, 1))
    },
    **{f"head-size{d}": Row({"head_size": d}, ((1, 18), (4, 11))) for d in (8, 24, 80, 96, 128, 256, 512, 1024)},
    **{
        f"head-size{d}-value{v}": Row({"head_size": d, "head_size_v": v}, ((1, 18), (4, 11)))
        for d, v in ((16, 8), (24, 56), (192, 128), (8, 16))
    },
    **{f"block-size{b}": Row({"block_size": b}, MIXED) for b in (1, 2, 4, 16, 24, 56, 128, 256)},
    # More tokens than a box of a tensor map has, and as many as models with state layers put into a block.
    **{f"block-size{b}-long": Row({"block_size": b}, ((1, b + 9), (5, 2 * b + 3), (9, 9))) for b in (528, 784, 2048)},
    # Tiles that need no mask follow each other, over rows that are no power of two wide.
    **{
        f"prefill-head-size{d}-value{v}": Row({"head_size": d, "head_size_v": v, "num_heads": 6}, ((37, 37), (22, 40)))
        for d, v in ((40, 40), (96, 24), (24, 96), (128, 128))
    },
    "unequal-hnd-fp16": Row({"head_size_v": 24, "kv_cache_layout": "HND", "dtype": "float16"}, MIXED),
}


def _formats() -> dict[str, Row]:
    """Every KV format with every output format; model dtypes, queries and scale kinds take turns."""
    rows = {}
    dtypes, queries, kinds = itertools.cycle(MODEL_DTYPES), itertools.cycle((False, False, True)), itertools.cycle("th")
    loads = itertools.cycle(("divide", "multiply"))
    plain = [name for name, fmt in KV_FORMATS.items() if not fmt.packed]
    for kv in plain:
        for output in OUTPUT_FORMATS:
            changes: dict[str, Any] = {"dtype": next(dtypes), "kv_cache_dtype": kv, "output_format": output}
            changes.update(num_heads=6, num_kv_heads=2, head_size=64, **LSE)
            if KV_FORMATS[kv].quantised:
                changes["kv_scale"] = {"t": "tensor", "h": "head"}[next(kinds)]
            if next(queries):
                changes.update(FP8_QUERY)
            rows[f"{changes['dtype']}-kv-{kv}-out-{output}"] = Row(changes, ((3, 9), (1, 20), (2, 1)))
    for dtype, kv in itertools.product(MODEL_DTYPES, plain):
        rows[f"{dtype}-kv-{kv}"] = Row({"dtype": dtype, "kv_cache_dtype": kv}, MIXED)
        rows[f"{dtype}-kv-{kv}-fp8-query"] = Row({"dtype": dtype, "kv_cache_dtype": kv, **FP8_QUERY}, DECODES)
        rounded = {"dtype": dtype, "kv_cache_dtype": kv, **ROUNDED_QUERY, "query_load": next(loads)}
        rows[f"{dtype}-kv-{kv}-rounded-query"] = Row(rounded, LONG)
    for output in ("fp8_static", "fp8_per_token", "fp8_group128_pow2_col", "nvfp4_swizzled"):
        # A split over the keys ends in another kernel than one pass does.
        rows[f"long-out-{output}"] = Row({"output_format": output, "num_heads": 8, "dtype": "bfloat16"}, LONG)
        rows[f"sinks-window-out-{output}"] = Row({"output_format": output, "num_heads": 8, **SINKS, **WINDOW}, MIXED)
        rows[f"packed-out-{output}"] = Row({"output_format": output, "num_heads": 8, **PACKED}, MIXED)
    # More rows than one tile of swizzled scales.
    rows["many-rows-out-nvfp4_swizzled"] = Row(
        {"output_format": "nvfp4_swizzled", "num_heads": 2, "num_kv_heads": 1}, ((3, 3),), (127, 1)
    )
    for output in ("fp8_static", "fp8_per_token", "fp8_group64_pow2", "fp8_group128_col"):
        for lens, kind in ((MIXED, "mixed"), (LONG, "long")):
            changes = {"output_format": output, "num_heads": 8, "output_arithmetic": "multiply"}
            if output != "fp8_static":
                changes["output_min_scale"] = 0.003
            rows[f"multiply-{kind}-out-{output}"] = Row(changes, lens)
    rows["nvfp4-odd-groups"] = Row({"output_format": "nvfp4_swizzled", "num_heads": 3, "num_kv_heads": 1}, MIXED)
    return rows


_MASKS: dict[str, tuple[dict[str, Any], tuple[tuple[int, int], ...]]] = {
    "causal": ({}, MIXED),
    "decodes+lse+sinks": ({**LSE, **SINKS}, DECODES),
    "window+soft-cap+fp8-query": ({**WINDOW, **CAP, **FP8_QUERY}, MIXED),
    "chunks+flags": ({"sliding_window": 9, "chunk_lookback": 1, **FLAGS}, MIXED),
    "bidirectional+alibi": ({**BOTH_WAYS, **ALIBI}, MIXED),
    "tree+alibi-sqrt": ({**TREE, "alibi": "sqrt"}, MIXED),
    "mm-clamped+window": ({"mm_prefix": "clamped", **WINDOW}, IMAGES),
    "cross+lse": ({**CROSS, **LSE}, ENCODED),
    "context+lse": ({"context_only": True, **LSE}, MIXED),
    "long": ({"num_heads": 6}, LONG),
    "prefill": ({}, ((37, 37), (22, 40))),
}
"""Masks and kinds of steps that every packed format meets."""


def _packed_formats() -> dict[str, Row]:
    """Every packed format with every mask; dtypes, layouts, scales, block, head and table sizes take turns."""
    rows = {}
    dtypes, blocks, layouts = itertools.cycle(MODEL_DTYPES), itertools.cycle((8, 16, 24, 56)), itertools.cycle("NH")
    sizes = itertools.cycle(((16, 16), (64, 64), (32, 48), (128, 128), (64, 32)))
    outputs, kinds, tables = (
        itertools.cycle(names) for names in (OUTPUT_FORMATS, ("tensor", "head"), ("fit", "fit", "broken", "narrow"))
    )
    for kv in (name for name, fmt in KV_FORMATS.items() if fmt.packed):
        for mask, (asked, lens) in _MASKS.items():
            size, size_v = next(sizes)
            changes: dict[str, Any] = {"kv_cache_dtype": kv, "dtype": next(dtypes), "num_heads": 4, **asked}
            changes.update(head_size=size, head_size_v=size_v, block_size=next(blocks))
            changes["kv_cache_layout"] = "HND" if next(layouts) == "H" else "NHD"
            if KV_FORMATS[kv].quantised:
                changes["kv_scale"] = next(kinds)
            rows[f"{kv}-{mask}"] = Row(changes, lens, table=next(tables) if lens is not IMAGES else "fit")
        for output in ("none", next(outputs), next(outputs), next(outputs)):
            changes = {"kv_cache_dtype": kv, "output_format": output, "num_heads": 8, "head_size": 64}
            rows[f"{kv}-out-{output}"] = Row({**changes, "dtype": next(dtypes)}, ((3, 9), (1, 20), (2, 1)))
        # A width that its rotation or its groups may not take.
        rows[f"{kv}-head-size40"] = Row({"kv_cache_dtype": kv, "head_size": 40}, MIXED)
        rows[f"{kv}-packed"] = Row({"kv_cache_dtype": kv, **PACKED}, MIXED)
    return rows


_DCP: dict[str, Any] = {
    "context_parallel": True, "context_rank": 1, "context_world": 3, "context_interleave": 2, "lse": True,
}  # fmt: skip

_DCP_ROWS: dict[str, Row] = {
    "dcp-of-one": Row({"context_parallel": True}, MIXED),
    "dcp-alibi-window": Row({**_DCP, "alibi": "linear", "sliding_window": 9}, MIXED),
    "dcp-tree-fp8": Row({**_DCP, "tree_bias": True, "kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}, MIXED),
    "dcp-images": Row({**_DCP, "mm_prefix": "full", "sliding_window": 5, "causality": "bidirectional"}, IMAGES),
    "dcp-chunks-flags": Row(
        {**_DCP, "sliding_window": 12, "chunk_lookback": 1, "causality": "per_request", "sinks": True}, MIXED
    ),
    "dcp-packed": Row({**_DCP, "kv_cache_dtype": "int8_per_token_head"}, MIXED),
    "dcp-without-cache": Row({**_DCP, **PACKED}, MIXED),
}


def _blocks() -> dict[str, Row]:
    """Blocks of one token, of no power of two, and of more tokens than a box of a tensor map has, with much else."""
    rows = {}
    formats = itertools.cycle(("nvfp4", "int8_per_token_head", "turboquant_4bit_nc", "turboquant_3bit_nc"))
    wide = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16"}
    for size in (1, 4, 24, 528, 2048):
        reach = max(size, 40)
        lens = ((1, reach + 9), (5, 2 * reach + 3), (9, 9), (0, 0))
        packed = {"head_size": 64, "head_size_v": 64}
        variants: dict[str, dict[str, Any]] = {
            "window+sinks+hnd": {**WINDOW, **SINKS, "kv_cache_layout": "HND"},
            "fp8-heads+soft-cap+lse": {**FP8_HEADS, **CAP, **LSE, "dtype": "bfloat16"},
            "fp8-unequal+hnd": {**FP8, "head_size_v": 24, "kv_cache_layout": "HND"},
            "tree+lse": {**TREE, **LSE},
            "dcp+alibi": {**_DCP, **ALIBI},
            "cross": CROSS,
            "broken-table+flags": FLAGS,
            "pairs": {"head_pairs": "odd", "head_size_v": 32},
        }
        name, other = next(formats), next(formats)
        variants[f"{name}+hnd"] = {**packed, "kv_cache_dtype": name, "kv_cache_layout": "HND"}
        variants[other] = {**packed, "kv_cache_dtype": other}
        for name, changes in variants.items():
            table = "broken" if "broken" in name else "fit"
            rows[f"block-size{size}+{name}"] = Row({"block_size": size, **changes}, lens, table=table)
        # The kernels made for Hopper, where there is one.
        rows[f"block-size{size}+wide-decodes"] = Row({"block_size": size, **wide}, ((1, 2 * reach + 9), (1, 3)), (0, 0))
        rows[f"block-size{size}+wide-prompts"] = Row({"block_size": size, **wide}, ((70, 70), (90, reach + 95)), (0, 0))
        hnd = {**wide, "kv_cache_layout": "HND", "kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}
        rows[f"block-size{size}+wide-mixed"] = Row(
            {"block_size": size, **hnd}, ((1, reach), (200, reach + 203)), (0, 0)
        )
    return rows


_REFUSED: dict[str, Row] = {
    "batch-invariant": Row({"batch_invariant": True}, MIXED),
    "head-size12": Row({"head_size": 12}, MIXED),
    "head-size1032": Row({"head_size": 1032}, ((1, 9),)),
    "block-size12": Row({"block_size": 12}, MIXED),
    "block-size2056": Row({"block_size": 2056}, MIXED),
}
"""Refused by every backend there is today; one that learns to run a row must then be right."""

FORMATS: dict[str, Row] = {**_formats(), **_packed_formats()}

ROWS: dict[str, Row] = {**_SINGLE, **_PAIRS, **_SIZES, **FORMATS, **_DCP_ROWS, **_blocks(), **_REFUSED}
