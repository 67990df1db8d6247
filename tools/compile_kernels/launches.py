"""Launches recorded from the real launchers, which run on tensors without storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.config import device
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.kernels.hopper import availability
from vattn.kernels.triton.common import launching
from vattn.kernels.triton.common.tiles import Limits
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

TARGETS: dict[str, Limits] = {
    "sm_80": Limits(108, 163 << 10, native_fp8=False, warpgroups=False),
    "sm_90": Limits(132, 227 << 10, native_fp8=True, hopper=True),
    "sm_100": Limits(148, 227 << 10, native_fp8=True),
    "gfx942": Limits(304, 64 << 10, native_fp8=False, most_rows=32, warpgroups=False),
}
"""Targets of the kernels in kernels/triton, with what a launcher needs to know of them."""

HOPPER = DeviceInfo("cuda", availability.CAPABILITY, "a Hopper GPU")


@dataclass
class Launch:
    """One recorded kernel launch.

    Attributes:
        name: of the kernel and the case, for a person to read.
        target: name in `TARGETS`.
        kernel: the jitted function.
        arguments: by parameter name.
        options: compile options such as `num_warps`.
        spills: bytes of a thread's registers that may go to memory; `None`: by kernel and target.
        drops_limit: whether the compiler may say that it ignores the register limit: where a CTA has more registers
            for each thread than a thread can name.
    """

    name: str
    target: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    spills: int | None = None
    drops_limit: bool = False


def record(
    name: str,
    target: str,
    call: Callable[[], object],
    spills: int | None = None,
    drops_limit: bool = False,
    processors: int = 132,
) -> Iterator[Launch]:
    """Yield the launches that `call` makes, instead of making them, on a GPU of so many multiprocessors."""
    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> SimpleNamespace:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **given}
        arguments = {key: value for key, value in given.items() if key in kernel.arg_names}
        options = {key: value for key, value in given.items() if key not in arguments or key == "num_warps"}
        title = f"{kernel.__name__} {name}"
        found.append(Launch(title, target, kernel, arguments, options, spills, drops_limit))
        return SimpleNamespace(packed_metadata=(0, 0, 0))

    with (
        mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
        # Each launch is recorded: none repeats an earlier one.
        mock.patch.object(launching, "JITFunction", ()),
        mock.patch.object(device, "multiprocessors", lambda _: processors),
    ):
        call()
    yield from found


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> Tensor:
    """Return an int32 tensor without storage."""
    return meta(*shape, dtype=torch.int32)


def shared_arguments(config: AttentionConfig, num_tokens: int, num_reqs: int) -> dict[str, Any]:
    """Return the arguments that attention over a cache and attention without one have in common."""
    fmt = OUTPUT_FORMATS[config.output_format]
    query_dtype = torch.float8_e4m3fn if config.takes_fp8_query else MODEL_DTYPES[config.dtype]
    query = meta(num_tokens, config.num_heads, config.head_size, dtype=query_dtype)
    output, block_scale = fmt.allocate(query, config.head_size_v, MODEL_DTYPES[config.dtype])

    def scale(kind: str) -> Tensor | None:
        return None if kind == "none" else meta(config.num_kv_heads if kind == "head" else 1)

    return {
        "query": query,
        "query_start_loc": integers(num_reqs + 1),
        "output": output,
        "output_block_scale": block_scale,
        "lse": meta(num_tokens, config.num_heads) if config.lse else None,
        "output_scale": meta(1) if fmt.static_scale else None,
        "q_scale": scale(config.query_scale),
        "k_scale": scale(config.kv_scale),
        "v_scale": scale(config.kv_scale),
        "alibi_slopes": meta(config.num_heads) if config.alibi != "none" else None,
        "sinks": meta(config.num_heads) if config.sinks else None,
        "causal_flags": integers(num_reqs) if config.causality == "per_request" else None,
        "bias": meta(2, 5, 5) if config.tree_bias else None,
        "tree_id": integers(num_reqs) if config.tree_bias else None,
        "mm_ranges": integers(num_reqs, 3, 2) if config.mm_prefix != "none" else None,
        "plan": [],
        "workspace": None,
        "config": config.encode(),
    }


def cache_arguments(config: AttentionConfig, num_blocks: int) -> tuple[Tensor, Tensor | None]:
    """Return the keys and values of a cache as the ops take them."""
    return op_views(meta(*kv_cache_shape(config, num_blocks), dtype=kv_cache_dtype(config)), config)


def paged_arguments(
    config: AttentionConfig, num_tokens: int, num_reqs: int, table_width: int, num_blocks: int = 64
) -> AttentionArgs:
    """Return the arguments of `vattn::attention`."""
    key_cache, value_cache = cache_arguments(config, num_blocks)
    return AttentionArgs(
        key_cache=key_cache,
        value_cache=value_cache,
        seq_lens=integers(num_reqs),
        block_table=integers(num_reqs, table_width),
        local_seq_lens=integers(num_reqs) if config.context_parallel else None,
        **shared_arguments(config, num_tokens, num_reqs),
    )
