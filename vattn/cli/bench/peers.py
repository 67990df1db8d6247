"""The kernels that a cell is timed on: vattn's, and the kernels of every other library that is found.

A peer that is missing says what is missing; one that cannot do a cell says why; one that throws is reported. None of
them stops a run.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from vattn.backends import selector
from vattn.cli.bench.cell import WIDEST, Cell
from vattn.config.device import DeviceInfo
from vattn.errors import UnknownOptionError
from vattn.ops.arguments import AttentionArgs, HostPlanArgs

Call = Callable[[], Tensor]
"""Run one step; returns the output, `[T, H, D]` or `[B, H, tokens, D]`."""


class NotThisCellError(Exception):
    """A kernel has no such request; the text says what."""


@dataclass(frozen=True)
class Peer:
    """One kernel to time.

    Attributes:
        name: in tables.
        key: on the command line.
        problem: returns why it cannot be used on this machine, `None` if it can.
        make: returns a step of a cell; what happens once a step of a model (schedules, plans) is done in it.
        limit: largest relative error that counts as right, on a bf16 and on an FP8 cache. Kernels that round query and
            weights to e4m3 get what that costs.
        paged: whether it reads a cache of blocks; others get a copy of keys and values without blocks.
        attends: whether it computes attention; what does not is a ceiling, which nothing is compared with.
    """

    name: str
    key: str
    problem: Callable[[], str | None]
    make: Callable[[Cell], Call]
    limit: tuple[float, float] = (1.6e-2, 1.6e-2)
    paged: bool = True
    attends: bool = True


FEW_ROWS, MOST_SPLIT_ROWS = 16, 512
"""Of a request: up to which FA3 loads alike from blocks of any size, and up to which it may split its keys."""

ROUNDED = (1.6e-2, 6.3e-2)
"""Limits of kernels that multiply in e4m3."""


def attention_arguments(cell: Cell, backend: str, fp8_query: bool = False) -> AttentionArgs:
    """Return the arguments of `vattn::attention` for a cell, its output filled with NaN, what is made once a step made.

    Raises:
        NotThisCellError: the backend has no such request.
    """
    if fp8_query and not cell.fp8:
        raise NotThisCellError("a bf16 cache")
    query = {"query_format": "fp8_e4m3", "query_scale": "tensor"} if fp8_query else {}
    config = cell.config(backend, **query)
    explanation = selector.explain(config, DeviceInfo.of(cell.device))
    if explanation.chosen is None:
        raise NotThisCellError("; ".join(explanation.refusals.get(backend, ("refused",))))
    given = {
        "query": cell.query.to(torch.float8_e4m3fn) if fp8_query else cell.query,
        "key_cache": cell.kv_cache[0],
        "value_cache": cell.kv_cache[1],
        "query_start_loc": cell.starts,
        "seq_lens": cell.seq_lens,
        "block_table": cell.table,
        "output": torch.full_like(cell.query, float("nan")),
        "q_scale": cell.one if fp8_query else None,
        "k_scale": cell.one,
        "v_scale": cell.one,
        "sinks": cell.sinks,
        "plan": _plan(cell, config),
        "config": config.encode(),
    }
    return AttentionArgs(**{name: given.get(name) for name in AttentionArgs._fields})  # type: ignore[arg-type]


def _vattn(cell: Cell, backend: str = "TRITON_ATTN", fp8_query: bool = False) -> Call:
    args = attention_arguments(cell, backend, fp8_query)

    def step() -> Tensor:
        torch.ops.vattn.attention(*args)
        return args.output

    return step


def _plan(cell: Cell, config: Any) -> list[Tensor]:
    """Make what a metadata builder makes once a step."""
    backend = selector.get_backend(config.backend)
    shape = backend.plan_shape(config, cell.query.shape[0], *cell.table.shape)
    if not shape:
        return []
    schedule = torch.zeros(shape, dtype=torch.int32, device=cell.device)
    size = backend.host_plan_size(config)
    if not size:
        torch.ops.vattn.plan(cell.starts, cell.seq_lens, schedule, config.encode())
        return [schedule]
    host_plan = torch.zeros(size, dtype=torch.int64)
    lens = torch.tensor(cell.work.requests)
    backend.plan_on_host(
        HostPlanArgs(
            query_lens=lens[:, 0],
            kv_lens=lens[:, 1],
            query_start_loc=cell.starts,
            seq_lens=cell.seq_lens,
            block_table=cell.table,
            num_tokens=cell.query.shape[0],
            num_blocks=cell.kv_cache.shape[1],
            schedule=schedule,
            host_plan=host_plan,
        ),
        config,
    )
    if size == 1 and not int(host_plan[0]):
        raise NotThisCellError("the plan's partial results need too much memory")
    return [schedule, host_plan]


def _backend_problem(name: str = "TRITON_ATTN") -> str | None:
    return selector.get_backend(name).problem()


def _fa3_problem() -> str | None:
    from vattn.backends.flash_attn.libraries import LIBRARY_VARIABLE, NAMESPACE, find_library

    find_library()
    if hasattr(torch.ops, NAMESPACE) and hasattr(getattr(torch.ops, NAMESPACE), "fwd"):
        return None
    return f"no FlashAttention-3 library (its path in {LIBRARY_VARIABLE}, or --fa3 PATH)"


def _fa3(cell: Cell, wide: bool = False) -> Call:
    from vattn.backends.flash_attn.libraries import NAMESPACE

    ops = getattr(torch.ops, NAMESPACE)
    layer, work = cell.layer, cell.work
    num_reqs, output = len(work.requests), torch.empty_like(cell.query)
    max_q, max_k = (max(lengths) for lengths in zip(*work.requests, strict=True))
    if wide and max_q <= FEW_ROWS:
        raise NotThisCellError("few rows, which it loads alike from blocks of any size")
    key, value, table = cell.wide(WIDEST) if wide else (*cell.kv_cache, cell.table)
    left, right = (-1, -1) if layer.window is None else (layer.window - 1, 0)
    query = cell.query.to(torch.float8_e4m3fn) if cell.fp8 else cell.query
    descale = torch.ones(num_reqs, layer.kv_heads, device="cuda") if cell.fp8 else None
    sinks = None if cell.sinks is None else cell.sinks.bfloat16()
    # Its own choice, but for prompts, where that would be none.
    splits = 0 if max_q <= MOST_SPLIT_ROWS else 1
    schedule = ops.get_scheduler_metadata(
        num_reqs, max_q, max_k, layer.heads, layer.kv_heads, layer.head_size, layer.head_size, query.dtype,
        cell.seq_lens, cell.starts, None, None, None, None, key.shape[1], 0, True, left, right,
        layer.soft_cap is not None, splits, None, 0,
    )  # fmt: skip

    def step() -> Tensor:
        ops.fwd(
            query, key, value, None, None, None, output, cell.starts, None, None, None, cell.seq_lens, max_q,
            max_k, table, None, None, None, None, None, descale, descale, descale, cell.scale, True, left, right,
            layer.soft_cap or 0.0, True, schedule, splits, None, 0, sinks, 1, 0, None,
        )  # fmt: skip
        return output

    return step


def _flashinfer(cell: Cell, family: str, fp8_query: bool = False) -> Call:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    from vattn.backends.flashinfer.jit import can_compile, is_built
    from vattn.backends.flashinfer.plan import plan_options

    config = cell.config("FLASHINFER")
    if cell.layer.sinks:
        raise NotThisCellError("sinks are dropped in silence by these wrappers")
    if fp8_query and not cell.fp8:
        raise NotThisCellError("a cache that is not FP8")
    if family == "fa3" and cell.fp8 and not fp8_query:
        raise NotThisCellError("a 16-bit query on an FP8 cache")
    query = cell.query.to(torch.float8_e4m3fn) if fp8_query else cell.query
    if not can_compile() and not is_built(config, family, query.dtype):
        raise NotThisCellError("the kernel is not built")
    sizes = [-(-keys // cell.block_size) for _, keys in cell.work.requests]
    pages = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    ids = torch.cat([row[:size] for row, size in zip(cell.table, sizes, strict=True)])
    last = torch.tensor([(keys - 1) % cell.block_size + 1 for _, keys in cell.work.requests], dtype=torch.int32)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=cell.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        # Planned for these lengths alone: its schedules for graphs that meet other lengths are slower.
        backend=family,
    )
    wrapper.plan(
        qo_indptr=cell.starts.cpu(),
        paged_kv_indptr=pages,
        paged_kv_indices=ids,
        paged_kv_last_page_len=last,
        page_size=cell.block_size,
        **plan_options(config, cell.kv_cache.dtype) | {"q_data_type": query.dtype},
    )
    output = torch.empty_like(cell.query)
    heads = (cell.layer.heads, cell.layer.kv_heads, cell.layer.kv_heads)
    scales = [torch.ones(count, device=cell.device) for count in heads] if fp8_query else []

    def step() -> Tensor:
        wrapper.run(query, (cell.kv_cache[0], cell.kv_cache[1]), *scales, out=output)
        return output

    return step


def _xqa(cell: Cell) -> Call:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    from vattn.backends.flashinfer.jit import can_compile

    layer = cell.layer
    if cell.work.rows > len(cell.work.requests) or not cell.fp8:
        raise NotThisCellError("several rows per request, or a bf16 cache")
    if layer.soft_cap is not None:
        raise NotThisCellError("a soft cap")
    prebuilt = (layer.head_size, layer.heads // layer.kv_heads, layer.window) == (128, 4, None)
    if not prebuilt and not can_compile():
        raise NotThisCellError("the kernel is not built")
    workspace = torch.zeros(160 << 20, dtype=torch.uint8, device=cell.device)
    output, lengths = torch.empty_like(cell.query), cell.seq_lens.view(torch.uint32)
    key, value, table = cell.wide(64)
    longest = max(keys for _, keys in cell.work.requests)

    def step() -> Tensor:
        result: Tensor = xqa_batch_decode_with_kv_cache(
            cell.query, (key, value), workspace, table, lengths, longest, bmm1_scale=cell.scale,
            bmm2_scale=1.0, window_left=-1 if layer.window is None else layer.window - 1, out=output,
            sinks=cell.sinks, kv_layout="NHD",
        )  # fmt: skip
        return result

    return step


def _flashinfer_problem() -> str | None:
    problem = selector.get_backend("FLASHINFER").problem()
    if problem is None:
        try:
            # Its prebuilt XQA library wants the driver's symbols.
            ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            return f"libcuda: {error}"
    return problem


def _contiguous_only(cell: Cell) -> None:
    layer = cell.layer
    if cell.fp8 or not cell.work.equal or layer.sinks:
        raise NotThisCellError("an FP8 cache, lengths that differ, or sinks")
    query, keys = cell.work.requests[0]
    if query not in (1, keys):
        raise NotThisCellError("chunks")


def _sdpa(cell: Cell, kind: str) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _contiguous_only(cell)
    if cell.layer.window is not None or cell.layer.soft_cap is not None:
        raise NotThisCellError("a window or a soft cap")
    query, key, value = cell.contiguous
    causal = query.shape[2] > 1
    backend = getattr(SDPBackend, kind)

    def step() -> Tensor:
        with sdpa_kernel(backend):
            result: Tensor = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=cell.scale, enable_gqa=True
            )
        return result

    return step


def _flex(cell: Cell) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _contiguous_only(cell)
    query, key, value = cell.contiguous
    context, window, cap = key.shape[2] - query.shape[2], cell.layer.window, cell.layer.soft_cap

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        seen = column <= row + context
        return seen if window is None else seen & (row + context - column < window)

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    mask = create_block_mask(visible, None, None, query.shape[2], key.shape[2], device=cell.device)
    run = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = {
        "block_mask": mask,
        "scale": cell.scale,
        "enable_gqa": True,
        "score_mod": None if cap is None else capped,
    }

    def step() -> Tensor:
        result: Tensor = run(query, key, value, **options)
        return result

    return step


def _stream(cell: Cell) -> Call:
    from vattn.cli.bench.stream import stream_decode

    query, keys = cell.work.requests[0]
    if not cell.work.equal or query > 8 or cell.layer.window is not None:
        raise NotThisCellError("lengths that differ, a window, or many rows a request")
    key, value = cell.kv_cache
    return stream_decode(key, value, cell.table, len(cell.work.requests), keys)


def _cuda_problem() -> str | None:
    return None if torch.cuda.is_available() else "no usable GPU"


def _triton_problem() -> str | None:
    return _cuda_problem() if importlib.util.find_spec("triton") else "package triton is not installed"


OWN: tuple[Peer, ...] = (
    Peer("vattn", "vattn", _backend_problem, _vattn),
    Peer("vattn, FP8 query", "vattn-fp8", _backend_problem, partial(_vattn, fp8_query=True), ROUNDED),
)
"""vattn's own kernels; the first is what ratios are taken of."""

PEERS: tuple[Peer, ...] = (
    Peer("FA3", "fa3", _fa3_problem, _fa3, ROUNDED),
    Peer("FA3, wide blocks", "fa3", _fa3_problem, partial(_fa3, wide=True), ROUNDED),
    Peer("FlashInfer fa2", "flashinfer", _flashinfer_problem, partial(_flashinfer, family="fa2")),
    Peer("FlashInfer fa3", "flashinfer", _flashinfer_problem, partial(_flashinfer, family="fa3")),
    Peer(
        "FlashInfer fa3, FP8 query",
        "flashinfer",
        _flashinfer_problem,
        partial(_flashinfer, family="fa3", fp8_query=True),
        ROUNDED,
    ),
    Peer("XQA", "xqa", _flashinfer_problem, _xqa, ROUNDED),
    Peer("SDPA flash (contiguous)", "sdpa", _cuda_problem, partial(_sdpa, kind="FLASH_ATTENTION"), paged=False),
    Peer("SDPA cuDNN (contiguous)", "cudnn", _cuda_problem, partial(_sdpa, kind="CUDNN_ATTENTION"), paged=False),
    Peer("FlexAttention (contiguous)", "flex", _triton_problem, _flex, paged=False),
)
"""What vattn's kernels are compared with."""

BESIDE: tuple[Peer, ...] = (
    Peer("vattn FLASHINFER", "flashinfer", _flashinfer_problem, partial(_vattn, backend="FLASHINFER")),
    Peer("vattn FLASH_ATTN", "fa3", _fa3_problem, partial(_vattn, backend="FLASH_ATTN")),
)
"""The same libraries behind a backend of vattn, with what it adds."""

STREAM = Peer("stream", "stream", _triton_problem, _stream, attends=False)
"""What loads every key and value of a decode step by the block table, and does next to nothing with them."""

ON_CPU = Peer("vattn TORCH_SDPA", "vattn", lambda: None, partial(_vattn, backend="TORCH_SDPA"))


def choose_peers(names: Sequence[str]) -> list[Peer]:
    """Return the peers that the command line names, `all` or `none` among the names.

    Raises:
        UnknownOptionError: a name of none.
    """
    known = list(dict.fromkeys(peer.key for peer in PEERS))
    for name in names:
        if name not in (*known, "all", "none"):
            raise UnknownOptionError(f"--peers {name!r}", ", ".join(("all", "none", *known)), "choose from these names")
    if "none" in names:
        return []
    return [peer for peer in (*PEERS, *BESIDE) if "all" in names or peer.key in names]


def backend_peer(name: str) -> Peer:
    """Return a backend of vattn as a kernel to time, by its own name."""
    limit = ROUNDED if name == "FLASH_ATTN" else (1.6e-2, 1.6e-2)
    return Peer(name, name, partial(_backend_problem, name), partial(_vattn, backend=name), limit)
