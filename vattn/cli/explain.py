"""`python -m vattn explain`: which backend any request gets, why the others refuse, and what of it was seen to run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from vattn.cache.layout import kv_cache_shape, mla_cache_dtype, mla_cache_shape
from vattn.config import attention as config
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.mla import MLAConfig
from vattn.errors import ConfigError
from vattn.quantization import formats

FLAGS = ("sinks", "tree_bias", "lse", "context_parallel", "context_only", "batch_invariant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field of `AttentionConfig`, and the request as one string."""

    def number(name: str, default: int | None, text: str, kind: type = int) -> None:
        parser.add_argument(name, type=kind, default=default, metavar="N", help=text)

    def choice(name: str, choices: Sequence[str], default: str, text: str = "") -> None:
        parser.add_argument(name, choices=choices, default=default, help=f"{text} (default: {default})".strip())

    parser.add_argument(
        "request",
        nargs="?",
        help="a whole request as explain, errors and graph dumps write it ('vattn1 num_heads=...'), latent attention "
        "included; instead of the options but --backend and --device",
    )
    number("--num-heads", 32, "query heads (default: 32)")
    number("--num-kv-heads", None, "KV heads (default: num-heads)")
    number("--head-size", 128, "key width of a head (default: 128)")
    number("--head-size-v", None, "value width of a head (default: head-size; twice it with --head-pairs)")
    number("--scale", None, "factor of the scores (default: head-size ** -0.5)", float)
    number("--block-size", 16, "tokens per cache block; 0: keys and values without a cache (default: 16)")
    choice("--dtype", tuple(formats.MODEL_DTYPES), "bfloat16")
    choice("--kv-cache-dtype", formats.kv_cache_dtypes(), "auto")
    choice("--kv-scale", ("tensor", "head"), "tensor", "scales of an FP8 cache: one value, or one per KV head")
    choice("--kv-cache-layout", config.KV_CACHE_LAYOUTS, "NHD")
    choice("--head-pairs", config.HEAD_PAIRS, "none", "one half of differential attention")
    choice("--query-format", formats.QUERY_FORMATS, "none")
    choice("--query-scale", ("tensor", "head"), "tensor", "scales of an FP8 query")
    choice("--query-load", formats.QUERY_LOADS, "plain", "who rounds an FP8 query: plain, the caller, or the kernel")
    choice("--output-format", tuple(formats.OUTPUT_FORMATS), "none")
    choice("--output-arithmetic", formats.OUTPUT_ARITHMETICS, "divide")
    number("--output-min-scale", None, "least FP8 scale of an output that computes them", float)
    choice("--output-floor", formats.OUTPUT_FLOORS, "scale", "what that raises")
    choice("--attn-type", tuple(kind.value for kind in config.AttentionType), "decoder")
    choice("--causality", config.CAUSALITIES, "causal")
    number("--sliding-window", None, "tokens visible to the left, itself included")
    number("--chunk-lookback", None, "chunks before its own that a row sees, instead of the window")
    number("--logits-soft-cap", None, "cap * tanh(score / cap)", float)
    choice("--alibi", config.ALIBI_KINDS, "none")
    choice("--mm-prefix", config.MM_PREFIX_KINDS, "none", "multimodal ranges that see each other both ways")
    number("--context-rank", 0, "with --context-parallel: the rank whose share of the keys is attended (default: 0)")
    number("--context-world", 1, "ranks that share the cache (default: 1)")
    number("--context-interleave", 1, "neighbouring tokens on one rank (default: 1)")
    for name in FLAGS:
        parser.add_argument("--" + name.replace("_", "-"), action="store_true")
    parser.add_argument(
        "--cache-strides",
        type=int,
        nargs="+",
        metavar="N",
        help="elements from block to block, token to token and head to head of keys and of values; of latents, from "
        "block to block (default: a cache of vattn's)",
    )
    parser.add_argument("--backend", default="auto", help="a backend by name (default: auto)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, or sm_90 for a GPU elsewhere (default: cuda or cpu)")
    parser.set_defaults(defaults=parser.get_default)


def main(options: argparse.Namespace) -> int:
    """Print the explanation; return 0 if a backend accepts, 1 if none does."""
    from vattn.backends import selector

    request = _request(options)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    explanation = selector.explain(request, DeviceInfo.anywhere(device), _cache(options.cache_strides, request))
    print(explanation)
    if refusal := _layer_refusal(request):
        print(f"layers refuse it, whichever backend accepts: {refusal}")
    return 0 if explanation.chosen else 1


def _cache(
    strides: Sequence[int] | None, request: AttentionConfig | MLAConfig
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return a cache of two blocks on meta with these strides."""
    if strides is None:
        return None
    is_latent = isinstance(request, MLAConfig)
    packed = not is_latent and formats.KV_FORMATS[request.kv_cache_dtype].packed
    wanted = 1 if is_latent or packed else 3
    if len(strides) != wanted or min(strides) < 1:
        allowed = (
            "one positive number, of blocks" if wanted == 1 else "three positive numbers: of blocks, tokens, heads"
        )
        raise ConfigError(f"--cache-strides {' '.join(map(str, strides))}", allowed, "count in elements of the cache")
    if isinstance(request, MLAConfig):
        sizes = mla_cache_shape(request, 2)
        steps = (*strides, 1) if request.packed else (*strides, request.head_size, 1)
        return torch.empty_strided(sizes, steps, dtype=mla_cache_dtype(request), device="meta"), None
    if packed:
        return torch.empty_strided(kv_cache_shape(request, 2), (*strides, 1), dtype=torch.uint8, device="meta"), None
    dtype = formats.KV_FORMATS[request.kv_cache_dtype].value_dtype
    key, value = (
        torch.empty_strided(
            (2, request.block_size, request.num_kv_heads, width), (*strides, 1), dtype=dtype, device="meta"
        )
        for width in (request.head_size, request.head_size_v)
    )
    return key, value


def _layer_refusal(request: AttentionConfig | MLAConfig) -> str:
    """Return why no layer asks for a request that ops can run; `""`: nothing is known against it."""
    from vattn.layers.base.two_parts import context_request

    if isinstance(request, MLAConfig) or not request.context_only:
        return ""
    try:
        context_request(request, "")
    except ConfigError as error:
        return str(error)
    return ""


def _request(options: argparse.Namespace) -> AttentionConfig | MLAConfig:
    values = {name: value for name, value in vars(options).items() if name not in _NO_FIELDS}
    if options.request is not None:
        given = [name for name, value in values.items() if value != options.defaults(name) and name != "backend"]
        if given:
            raise ConfigError(
                f"a request as a string and --{given[0].replace('_', '-')}", "one of the two", "put it into the string"
            )
        kind: Any = MLAConfig if options.request.startswith(MLAConfig.head) else AttentionConfig
        parsed = kind.parse(options.request)
        return parsed if options.backend == "auto" else parsed.replace(backend=options.backend)
    values["num_kv_heads"] = options.num_heads if options.num_kv_heads is None else options.num_kv_heads
    if options.head_size_v is None:
        values["head_size_v"] = options.head_size * (1 if options.head_pairs == "none" else 2)
    if options.scale is None:
        values["scale"] = max(1, options.head_size) ** -0.5
    if options.query_format == "none":
        _refuse_head(options.query_scale, "--query-scale", "a --query-format")
        values["query_scale"] = "none"
    dtype = formats.MODEL_DTYPES[options.dtype]
    values["kv_cache_dtype"] = formats.resolve_kv_cache_dtype(options.kv_cache_dtype, dtype)
    if not formats.KV_FORMATS[values["kv_cache_dtype"]].quantised:
        _refuse_head(options.kv_scale, "--kv-scale", "a --kv-cache-dtype with given scales, such as fp8")
        values["kv_scale"] = "none"
    return AttentionConfig(**values)


def _refuse_head(granularity: str, option: str, where: str) -> None:
    if granularity != "tensor":
        raise ConfigError(f"{option} {granularity} without {where}", f"{option} with {where}", f"leave {option} out")


_NO_FIELDS = ("command", "device", "request", "defaults", "cache_strides")
