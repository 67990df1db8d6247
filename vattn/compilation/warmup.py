"""`warmup`: compile ahead what a model's steps will launch, so that no request waits for a compiler."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vattn.compilation.compile_ahead import can_only_compile, compiling_ahead, is_compiling_ahead, only_compiling
from vattn.compilation.cuda_graph import sample_step
from vattn.config.arguments import integer
from vattn.config.typed import typed_on_error
from vattn.errors import ConfigError
from vattn.layers.attention import Attention
from vattn.layers.base.cache_binding import BoundCache
from vattn.layers.base.checks import check_bound
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context
from vattn.quantization.formats import MODEL_DTYPES

Runs = tuple[list[tuple[str, Callable[[AttentionMetadata], None]]], tuple[str, ...]]


logger = logging.getLogger("vattn")


@dataclass(frozen=True)
class WarmupReport:
    """What was warmed.

    Attributes:
        seconds: name of a step, with the layer it ran on -> wall time, compilation included.
        left_out: prefixes of layers that need more than a query, a key and a value, and were not warmed.
    """

    seconds: dict[str, float]
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{len(self.seconds)} steps warmed in {sum(self.seconds.values()):.1f} s"
        return text + (f"; left out: {', '.join(self.left_out)}" if self.left_out else "")


@typed_on_error
def warmup(
    model: nn.Module,
    builder: AttentionMetadataBuilder,
    *,
    decode_batches: Sequence[int] = (1, 2),
    prefill_lens: Sequence[int] = (),
    function: Callable[..., Any] | None = None,
    make_inputs: Callable[[AttentionMetadata], Sequence[Tensor]] | None = None,
    progress: bool | Callable[[str], None] = True,
) -> WarmupReport:
    """Run empty steps of the given sizes, so that schedules, cache updates and attention are compiled.

    Args:
        model: holds the attention layers, caches bound. Of equal layers one runs.
        builder: builds the steps; give it the model's `layers`.
        decode_batches: numbers of requests with one new token and as many cached ones as the builder allows.
        prefill_lens: numbers of tokens of a single new request; each also in one step with as many more such
            requests as the builder holds, which kernels split in another way, and in one with a decode.
        function, make_inputs: run this (a compiled model, usually) on the inputs made for a (padded) step, as
            `CUDAGraphRunner` does, instead of the layers alone: what the compiler passes fuse is other kernels.
        progress: print a line a step to stderr, or hand it to a function; `False`: say nothing.

    Returns:
        How long every step took.

    Raises:
        ConfigError: another kind of builder, no list of sizes, no layer to warm, a size beyond the builder's capacity,
            or only one of `function` and `make_inputs`.
        CacheNotBoundError: a layer without a cache.

    Nothing is written to a cache and no KV scale is taken: all slots are -1. Reads go to block 0. Waits for the device
    after every step. Call it before capturing CUDA graphs, which cannot wait for a compiler. On GPUs, kernels of
    TRITON_ATTN that are not on disk are compiled by processes, many at a time.

    Example:
        >>> import torch, vattn
        >>> layer = vattn.Attention(num_heads=2, head_size=16, scale=0.25, prefix="attn")
        >>> _ = vattn.allocate_kv_cache(layer, num_blocks=8, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(4, 8, max_seq_len=32, layers=layer)
        >>> report = vattn.warmup(layer, builder, decode_batches=[2], prefill_lens=[5], progress=False)
        >>> list(report.seconds)
        ['decode of 2: attn', 'prefill of 5: attn', 'prefill of 5 and a decode: attn']
    """
    if not hasattr(builder, "build") or not hasattr(builder, "max_num_reqs"):
        raise ConfigError(
            f"warmup with a {type(builder).__name__}", "a vattn.AttentionMetadataBuilder", "pass what builds the steps"
        )
    if (function is None) != (make_inputs is None):
        raise ConfigError("function or make_inputs alone", "both or neither", "pass both")
    steps = _steps(builder, decode_batches, prefill_lens)
    runs, left_out = _runs(model, function, make_inputs)
    say = progress if callable(progress) else (lambda line: print(line, file=sys.stderr, flush=True))
    seconds: dict[str, float] = {}
    total = len(steps) * len(runs)
    with torch.no_grad(), compiling_ahead(builder.device):
        if function is None:
            _compile_ahead(model, builder, (_build(builder, *lengths) for _, *lengths in steps))
        for name, query_lens, seq_lens in steps:
            step = _build(builder, query_lens, seq_lens)
            for where, run in runs:
                start = time.perf_counter()
                run(step)
                if builder.device.type == "cuda":
                    torch.cuda.synchronize(builder.device)
                seconds[f"{name}: {where}"] = time.perf_counter() - start
                if progress:
                    say(f"warmup {len(seconds)}/{total}, {name}: {where}: {seconds[f'{name}: {where}']:.2f} s")
    return WarmupReport(seconds, left_out)


def _build(builder: AttentionMetadataBuilder, query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    tables = [[0] * -(-length // builder.block_size) for length in seq_lens]
    return builder.build(query_lens, seq_lens, tables, slot_mapping=[-1] * sum(query_lens))


def _steps(
    builder: AttentionMetadataBuilder, decode_batches: Sequence[int], prefill_lens: Sequence[int]
) -> list[tuple[str, list[int], list[int]]]:
    """Return name, query lengths and sequence lengths of each step."""
    for name, sizes, most in (
        ("decode_batches", decode_batches, min(builder.max_num_reqs, builder.max_num_tokens)),
        ("prefill_lens", prefill_lens, min(builder.max_num_tokens, builder.max_seq_len)),
    ):
        if not isinstance(sizes, Sequence):
            raise ConfigError(f"{name}={sizes!r:.60}", "a list of sizes", f"{name}=[1, 2]")
        for size in sizes:
            if not 1 <= (integer(size) or 0) <= most:
                raise ConfigError(
                    f"{name} with {size}", f"1 to {most}, what the builder holds", "give it more capacity"
                )
    longest = builder.max_seq_len
    steps = [(f"decode of {count}", [1] * count, [longest] * count) for count in dict.fromkeys(decode_batches)]
    for length in dict.fromkeys(prefill_lens):
        steps.append((f"prefill of {length}", [length], [length]))
        count = min(builder.max_num_reqs, builder.max_num_tokens // length)
        if count > 1:
            steps.append((f"{count} prefills of {length}", [length] * count, [length] * count))
        if length < builder.max_num_tokens:
            steps.append((f"prefill of {length} and a decode", [length, 1], [length, longest]))
    if not steps:
        raise ConfigError("no decode_batches and no prefill_lens", "at least one size", "name the sizes that will run")
    return steps


def compile_steps(
    model: nn.Module,
    builder: AttentionMetadataBuilder,
    sizes: Iterable[tuple[int, int]],
    step_options: Callable[[int], dict[str, Any]] | None = None,
) -> None:
    """Have the kernels compiled that schedules, cache updates and attention of steps will launch.

    Call it in `compiling_ahead`. Each kind of layer runs once a step, without a launch: its output is never written.

    Args:
        model: holds the attention layers, caches bound.
        builder: builds the steps.
        sizes: requests and tokens of each step.
        step_options: of `build`, for a number of requests.
    """
    options = step_options or (lambda num_reqs: {})
    _compile_ahead(model, builder, (sample_step(builder, *size, options) for size in dict.fromkeys(sizes)))


def _compile_ahead(model: nn.Module, builder: AttentionMetadataBuilder, steps: Iterable[AttentionMetadata]) -> None:
    """Have kernels compiled in `compiling_ahead`; steps are built one by one, since that launches kernels too."""
    if not is_compiling_ahead() or not can_only_compile(builder):
        return
    try:
        runs, _ = layer_runs(model)
        with only_compiling(), torch.inference_mode():
            for step in steps:
                for _, run in runs:
                    run(step)
    except Exception as error:
        # Steps that cannot run raise this where they are needed.
        logger.debug("kernels are not compiled ahead: %s", error)


def _runs(
    model: nn.Module,
    function: Callable[..., Any] | None,
    make_inputs: Callable[[AttentionMetadata], Sequence[Tensor]] | None,
) -> Runs:
    """Return what runs every step, by name, and the layers that do not."""
    if function is None or make_inputs is None:
        return layer_runs(model)

    def call(step: AttentionMetadata) -> None:
        with forward_context(step):
            function(*make_inputs(step))

    return [("function", call)], ()


def layer_runs(model: nn.Module) -> Runs:
    """Return what runs a step on one layer of each kind, by the layer's name, and the layers that do not run so.

    Raises:
        ConfigError: no layer takes just a query, a key and a value.
        CacheNotBoundError: a layer without a cache.
    """
    found: dict[str, tuple[str, Callable[[AttentionMetadata], None]]] = {}
    left_out = []
    for layer in model.modules():
        if not isinstance(layer, BoundCache) or layer.kv_sharing_target_layer_name is not None:
            continue
        if type(layer).forward is not Attention.forward:
            left_out.append(layer.prefix or type(layer).__name__)
            continue
        dtype = torch.float32 if layer.config is None else MODEL_DTYPES[layer.config.dtype]
        check_bound(layer, "query", torch.empty(0, dtype=dtype))
        assert layer.config is not None
        found.setdefault(layer.config.encode(), (layer.prefix or type(layer).__name__, _caller(layer)))
    if not found:
        raise ConfigError(
            f"no layer of {type(model).__name__} to warm" + (f" beside {', '.join(left_out)}" if left_out else ""),
            "attention layers that take a query, a key and a value",
            "pass function= and make_inputs= for other layers",
        )
    return list(found.values()), tuple(left_out)


def _caller(layer: Any) -> Callable[[AttentionMetadata], None]:
    config, device, dtype = layer.config, layer.kv_cache.device, MODEL_DTYPES[layer.config.dtype]

    def run(step: AttentionMetadata) -> None:
        tokens = step.slot_mapping.shape[0]
        rows = (
            torch.zeros(tokens, heads * width, device=device, dtype=dtype)
            for heads, width in (
                (config.num_heads, config.head_size),
                (config.num_kv_heads, config.head_size),
                (config.num_kv_heads, config.head_size_v),
            )
        )
        layer(*rows, metadata=step)

    return run
