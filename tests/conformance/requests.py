"""Random requests over the whole config space, and the grid of requests of the acceptance table.

A request is a config (its backend included), the lengths of a batch and a seed; its `line()` reproduces it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from tests.conformance.cases import make_batch, make_cache_update
from tests.support import Batch, is_storable
from vattn.backends import selector
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.features import FEATURES, requested_features
from vattn.ops.arguments import CacheUpdateArgs
from vattn.quantization.formats import (
    KV_FORMATS,
    MODEL_DTYPES,
    OUTPUT_FACTORS,
    OUTPUT_FORMATS,
    QUERY_FORMATS,
    QUERY_LOADS,
)

_EXCLUSIVE = (
    {"bidirectional", "causal_flags"},
    {"sliding_window", "chunk_lookback"},
    {"alibi", "alibi_sqrt"},
    {"tree_bias", "bidirectional"},
    {"tree_bias", "causal_flags"},
    {"alibi_sqrt", "bidirectional"},
    {"alibi_sqrt", "causal_flags"},
    {"contiguous_kv", "hnd_layout"},
    {"context_only", "context_parallel"},
    {"head_pairs", "unequal_head_sizes"},
    {"head_pairs", "hnd_layout"},
    {"head_pairs", "contiguous_kv"},
)
"""Pairs that no config can ask for: a choice between them, or a contradiction that `AttentionConfig` refuses."""

PAIRS: tuple[tuple[str, str], ...] = tuple(
    pair for pair in itertools.combinations(FEATURES, 2) if not any(set(pair) == both for both in _EXCLUSIVE)
)
"""Every pair of features that a config can ask for."""

_SELDOM = {
    "context_parallel": 0.14,
    "context_only": 0.14,
    "batch_invariant": 0.14,
    "contiguous_kv": 0.14,
    "hnd_layout": 0.35,
    "head_pairs": 0.15,
}
"""How often a feature is drawn, if not one time in four."""

_POSITIONS = {
    "bidirectional", "causal_flags", "sliding_window", "chunk_lookback", "alibi", "alibi_sqrt", "mm_prefix",
    "context_only",
}  # fmt: skip
"""Features that compare the positions of queries and keys; cross attention has the first, and no other."""

MEDIUM, WIDE = range(8, 72, 8), (80, 96, 128, 192, 256, 512)


@dataclass(frozen=True)
class Size:
    """How large random batches are: longest sequence, most requests, and how many draws have wide heads."""

    seq_len: int = 48
    reqs: int = 5
    wide_heads: float = 0.1


SMALL = Size()


@dataclass(frozen=True)
class Request:
    """A config, the lengths of one batch (see `rows.Row`) and the seed of its values."""

    config: AttentionConfig
    lens: tuple[tuple[int, int], ...]
    padding: tuple[int, int] = (0, 0)
    table: str = "fit"
    seed: int = 0

    def line(self, device: str) -> str:
        """Return the shell command that runs this request alone."""
        lens = ",".join(f"{q}:{s}" for q, s in self.lens)
        return (
            f"python -m tests.conformance.fuzz --device {device} --lens {lens} --padding {self.padding[0]}:"
            f"{self.padding[1]} --table {self.table} --seed {self.seed} '{self.config.encode()}'"
        )

    def batch(self, device: str) -> Batch:
        """Return the arguments of the attention op."""
        return make_batch(self.config, self.lens, self.padding, self.table, device=device, seed=self.seed)

    def cache_update(self, device: str) -> CacheUpdateArgs:
        """Return the arguments of a cache update."""
        return make_cache_update(self.config, device=device, seed=self.seed)


def config_with(features: frozenset[str], base: AttentionConfig) -> AttentionConfig:
    """Return a config that asks for exactly these features on top of a plain paged one."""
    changes: dict[str, Any] = {}
    if "bidirectional" in features or "causal_flags" in features:
        changes["causality"] = "bidirectional" if "bidirectional" in features else "per_request"
    if "sliding_window" in features or "chunk_lookback" in features:
        changes["sliding_window"] = 7
        changes["chunk_lookback"] = 1 if "chunk_lookback" in features else None
    if "alibi" in features or "alibi_sqrt" in features:
        changes["alibi"] = "linear" if "alibi" in features else "sqrt"
    if "mm_prefix" in features:
        changes["mm_prefix"] = "full"
    if "logits_soft_cap" in features:
        changes["logits_soft_cap"] = 2.5
    if "unequal_head_sizes" in features:
        changes["head_size_v"] = base.head_size + 8
    if "head_pairs" in features:
        changes.update(head_pairs="odd", head_size_v=2 * base.head_size)
    if "kv_scale_per_head" in features:
        fmt = base.kv_cache_dtype if KV_FORMATS[base.kv_cache_dtype].quantised else "fp8_e4m3"
        changes.update(kv_cache_dtype=fmt, kv_scale="head")
    if "query_scale_per_head" in features:
        changes.update(query_format="fp8_e4m3", query_scale="head")
    if "hnd_layout" in features:
        changes["kv_cache_layout"] = "HND"
    if "contiguous_kv" in features:
        changes["block_size"] = 0
    if "context_parallel" in features:
        changes.update(context_rank=1, context_world=3, context_interleave=2)
    for name in ("sinks", "tree_bias", "lse", "context_parallel", "context_only", "batch_invariant"):
        changes[name] = name in features
    return base.replace(**changes)


def draw_features(
    rng: random.Random, required: tuple[str, ...] = (), known: Container[str] = FEATURES
) -> frozenset[str]:
    """Return a random set of features that a config can ask for, the required ones among them, unknown ones seldom."""
    chosen = list(required)
    others = [
        name
        for name in FEATURES
        if name not in required and rng.random() < min(_SELDOM.get(name, 0.25), 1 if name in known else 0.015)
    ]
    rng.shuffle(others)
    for name in others:
        if not any({name, other} == both for other in chosen for both in _EXCLUSIVE):
            chosen.append(name)
    return frozenset(chosen)


T = TypeVar("T")


def _pick(rng: random.Random, values: Iterable[T], allowed: Container[T]) -> T:
    """Return one of the values, one of the allowed ones nearly always, if there are any."""
    values = list(values)
    fitting = [value for value in values if value in allowed]
    return rng.choice(fitting if fitting and rng.random() >= 0.015 else values)


def _draw_base(rng: random.Random, features: frozenset[str], backend: str, size: Size) -> AttentionConfig:
    can = selector.get_backend(backend).capabilities
    kv_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3, 5))
    widths: Any = MEDIUM if rng.random() >= size.wide_heads else WIDE
    if not any(width in can.head_sizes for width in widths):
        widths = (*MEDIUM, *WIDE)
    head_size = _pick(rng, widths, can.head_sizes)
    if rng.random() < 0.015:
        head_size = rng.choice((4, 12, 20, 1032))
    formats = [name for name, fmt in KV_FORMATS.items() if not (fmt.packed and "head_pairs" in features)]
    kv_format = _pick(rng, formats, can.kv_cache_dtypes)
    query = _pick(rng, QUERY_FORMATS, can.query_formats)
    return AttentionConfig(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_size=head_size,
        head_size_v=head_size,
        scale=rng.choice((head_size**-0.5, 0.5 * head_size**-0.5, -0.1)),
        dtype=_pick(rng, ("float32", "float32", "bfloat16", "float16"), can.dtypes),
        kv_cache_dtype=kv_format,
        kv_scale="tensor" if KV_FORMATS[kv_format].quantised else "none",
        query_format=query,
        query_scale="none" if query == "none" else "tensor",
        query_load="plain" if query == "none" else _pick(rng, ("plain", "divide", "multiply"), can.query_loads),
        block_size=_pick(rng, (8, 8, 16, 24, 1, 2, 4, 56, 256, 528, 12, 2056), can.block_sizes),
        attn_type=rng.choice(("encoder", "encoder_only")) if "contiguous_kv" in features else "decoder",
        backend=backend,
    )


def _draw_sizes(rng: random.Random, config: AttentionConfig) -> AttentionConfig:
    """Vary what a feature leaves open: windows, caps, value widths, ranges and output formats."""
    changes: dict[str, Any] = {}
    if config.chunk_lookback is not None:
        lookback = rng.choice((0, 1, 2))
        changes.update(chunk_lookback=lookback, sliding_window=(lookback + 1) * rng.choice((1, 4, 8, 13)))
    elif config.sliding_window is not None:
        changes["sliding_window"] = rng.choice((1, 2, 5, 8, 17, 64, 5000))
    if config.logits_soft_cap is not None:
        changes["logits_soft_cap"] = rng.choice((0.3, 2.5, 50.0))
    if config.mm_prefix != "none":
        changes["mm_prefix"] = rng.choice(("full", "clamped"))
    if config.head_pairs != "none":
        changes["head_pairs"] = rng.choice(("even", "odd"))
    elif config.head_size_v != config.head_size:
        changes["head_size_v"] = rng.choice([size for size in MEDIUM if size != config.head_size])
    if requested_features(config) & _POSITIONS == {"bidirectional"} and rng.random() < 0.4:
        changes["attn_type"] = "encoder_decoder"
    config = config.replace(**changes)
    columns = config.num_heads * config.head_size_v
    formats = [f.name for f in OUTPUT_FORMATS.values() if f.group_size <= 0 or columns % f.group_size == 0]
    can = selector.get_backend(config.backend).capabilities
    output = OUTPUT_FORMATS["none" if rng.random() < 0.4 else _pick(rng, formats, can.output_formats)]
    exact = [name for name in output.arithmetics if not name.startswith("approximate")]
    arithmetic = rng.choice(("divide", rng.choice(exact)))
    changes = {"output_format": output.name, "output_arithmetic": arithmetic}
    if arithmetic in OUTPUT_FACTORS:
        changes |= {"output_floor": "maximum", "output_min_scale": rng.choice((1e-7, 0.003))}
    elif output.has_fp32_scales:
        changes["output_min_scale"] = rng.choice((None, None, 1e-7, 0.003))
    return config.replace(**changes)


def draw_request(
    rng: random.Random,
    backend: str,
    required: tuple[str, ...] = (),
    size: Size = SMALL,
    accepts: Callable[[AttentionConfig], bool] | None = None,
) -> Request:
    """Return a random request for a backend that asks for the required features at least.

    Formats, sizes and features are drawn from the backend's capabilities but for a few. Where many combinations are
    excluded, `accepts` makes nine of ten requests acceptable ones, as far as a few draws find them.
    """
    wanted = accepts is not None and rng.random() < 0.9
    for _ in range(40):
        config = _draw_config(rng, backend, required, size)
        if not wanted or accepts is None or accepts(config):
            break
    return draw_batch(rng, config, size)


def draw_batch(rng: random.Random, config: AttentionConfig, size: Size = SMALL) -> Request:
    """Return a request of a config with random lengths, padding, block table and values."""
    lens = tuple(_draw_lens(rng, size.seq_len) for _ in range(rng.randint(1, size.reqs)))
    paged = config.block_size > 0
    return Request(
        config,
        lens,
        padding=(rng.choice((0, 0, 1, 3)), rng.choice((0, 0, 2))),
        table=rng.choices(("fit", "narrow", "broken"), (8, 1, 1))[0] if paged else "fit",
        seed=rng.randrange(1 << 30),
    )


def _draw_config(rng: random.Random, backend: str, required: tuple[str, ...], size: Size) -> AttentionConfig:
    can = selector.get_backend(backend).capabilities
    needed = [name for name in can.required_features if name not in required]
    # A pair that contradicts what the backend requires is drawn all the same, and refused.
    fitting = [name for name in needed if not any({name, other} == both for other in required for both in _EXCLUSIVE)]
    features = draw_features(rng, (*required, *fitting), can.features)
    config = _draw_sizes(rng, config_with(features, _draw_base(rng, features, backend, size)))
    if not is_storable(config) and rng.random() >= 0.03:
        scaled = KV_FORMATS[config.kv_cache_dtype].quantised
        alike = [name for name in can.kv_cache_dtypes if KV_FORMATS[name].quantised == scaled]
        fitting = [name for name in alike if is_storable(config.replace(kv_cache_dtype=name))]
        config = config.replace(kv_cache_dtype=rng.choice(fitting)) if fitting else config
    return config


def _draw_lens(rng: random.Random, longest: int) -> tuple[int, int]:
    seq_len = rng.randint(1, longest)
    kind = rng.choice(("decode", "decode", "prefill", "chunk", "chunk", "no query", "nothing", "query too long"))
    return {
        "decode": (1, seq_len),
        "prefill": (min(seq_len, 24), min(seq_len, 24)),
        "chunk": (rng.randint(1, min(seq_len, 9)), seq_len),
        "no query": (0, seq_len),
        "nothing": (0, 0),
        "query too long": (seq_len % 4 + 2, seq_len % 3),
    }[kind]


def simpler(request: Request) -> Iterator[Request]:
    """Yield requests that have one thing less than this one, except those that contradict themselves."""
    if request.table != "fit":
        yield replace(request, table="fit")
    if request.padding != (0, 0):
        yield replace(request, padding=(0, 0))
    for index in range(len(request.lens) if len(request.lens) > 1 else 0):
        yield replace(request, lens=request.lens[:index] + request.lens[index + 1 :])
    less: tuple[dict[str, Any], ...] = (
        {"output_arithmetic": "divide", "output_min_scale": None},
        {"output_format": "none", "output_arithmetic": "divide", "output_min_scale": None},
        {"query_load": "plain"},
        {"query_format": "none", "query_scale": "none", "query_load": "plain"},
        {"kv_cache_dtype": "float32", "kv_scale": "none"},
        {"dtype": "float32"},
        {"causality": "causal"},
        {"sliding_window": None, "chunk_lookback": None},
        {"chunk_lookback": None},
        {"logits_soft_cap": None},
        {"alibi": "none"},
        {"sinks": False},
        {"context_parallel": False, "context_rank": 0, "context_world": 1, "context_interleave": 1},
        {"tree_bias": False},
        {"mm_prefix": "none"},
        {"context_only": False},
        {"lse": False},
        {"kv_cache_layout": "NHD"},
        {"head_size_v": request.config.head_size, "head_pairs": "none"},
        {"num_heads": request.config.num_kv_heads},
        {"num_heads": 1, "num_kv_heads": 1},
        {"attn_type": "decoder"},
        {"attn_type": "decoder", "causality": "causal"},
    )
    for changes in less:
        if any(getattr(request.config, name) != value for name, value in changes.items()):
            try:
                yield replace(request, config=request.config.replace(**changes))
            except ValueError:
                continue


PLAIN = AttentionConfig(8, 2, 64, 64, 0.125, "bfloat16", "bfloat16")
"""What the grid of the acceptance table varies."""

DEVICES: dict[str, DeviceInfo] = {
    "cpu": DeviceInfo("cpu"),
    "interpreter": DeviceInfo("cpu", triton_interpreter=True),
    "sm_80": DeviceInfo("cuda", (8, 0), "sm_80"),
    "sm_90": DeviceInfo("cuda", (9, 0), "sm_90"),
    "sm_100": DeviceInfo("cuda", (10, 0), "sm_100"),
}
"""Where the acceptance table is taken; only data, no device is needed."""


def acceptance(backend: str, accepts: Callable[[AttentionConfig], bool]) -> dict[str, dict[str, str]]:
    """Return which requests of a grid are accepted, as section -> line -> names."""
    return {
        section: {
            line: " ".join(name for name, config in row.items() if accepts(config)) for line, row in lines.items()
        }
        for section, lines in _grids(backend).items()
    }


@lru_cache(maxsize=1)
def _grids(backend: str) -> dict[str, dict[str, dict[str, AttentionConfig]]]:
    base = PLAIN.replace(backend=backend)
    return {
        "features": {"alone": {name: config_with(frozenset({name}), base) for name in FEATURES}},
        "pairs": {
            first: {b: config_with(frozenset({a, b}), base) for a, b in PAIRS if a == first}
            for first in dict.fromkeys(a for a, _ in PAIRS)
        },
        "attn_types": {
            kind: {
                place: base.replace(
                    attn_type=kind,
                    block_size=size,
                    causality="bidirectional" if kind == "encoder_decoder" else "causal",
                )
                for place, size in (("paged", 16), ("packed", 0))
            }
            for kind in ("decoder", "encoder", "encoder_only", "encoder_decoder")
        },
        "sizes": {
            "head_size": {str(d): base.replace(head_size=d, head_size_v=d) for d in range(8, 1025, 8)},
            "block_size": {str(b): base.replace(block_size=b) for b in (1, 2, 4, *range(8, 2049, 8))},
        },
        "output_variants": {
            "multiply": {
                fmt.name: base.replace(output_format=fmt.name, output_arithmetic="multiply")
                for fmt in OUTPUT_FORMATS.values()
                if "multiply" in fmt.arithmetics
            },
            "factor": {
                fmt.name: base.replace(
                    output_format=fmt.name, output_arithmetic="factor", output_floor="maximum", output_min_scale=1e-4
                )
                for fmt in OUTPUT_FORMATS.values()
                if "factor" in fmt.arithmetics
            },
            "min_scale": {
                fmt.name: base.replace(output_format=fmt.name, output_min_scale=1e-4)
                for fmt in OUTPUT_FORMATS.values()
                if fmt.has_fp32_scales
            },
        },
        "query_loads": {
            kind: {
                load: base.replace(query_format="fp8_e4m3", query_scale=kind, query_load=load) for load in QUERY_LOADS
            }
            for kind in ("tensor", "head")
        },
        "outputs": _format_grid(base),
    }


def _format_grid(base: AttentionConfig) -> dict[str, dict[str, AttentionConfig]]:
    """Return configs by model dtype, KV format and query format, then by output format."""
    grid = {}
    for dtype, kv, query in itertools.product(MODEL_DTYPES, KV_FORMATS, QUERY_FORMATS):
        config = base.replace(
            dtype=dtype,
            kv_cache_dtype=kv,
            kv_scale="tensor" if KV_FORMATS[kv].quantised else "none",
            query_format=query,
            query_scale="none" if query == "none" else "tensor",
        )
        line = f"{dtype}, kv {kv}, query {query}"
        grid[line] = {output: config.replace(output_format=output) for output in OUTPUT_FORMATS}
    return grid
