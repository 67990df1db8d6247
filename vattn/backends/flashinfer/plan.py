"""FlashInfer's schedules: planned on the host once a step, outside of CUDA graphs, and read by the calls inside.

A plan belongs to one builder's schedule buffer and one padded size. Its buffers are in that schedule, so that a
captured call reads the lengths of the step that is replayed. Other arguments of FlashInfer's launch must not change
between the capture and a replay: `plan` raises if they do.

The schedule is int32: FlashInfer's own workspace, the offsets of queries and pages, the fill of last pages, the kind of
every row (0 padding, 1 before its sequence, 2 valid), and the ids of the pages, each section aligned to 16 bytes. The
last request of FlashInfer's batch is extra: rows of padding are its query, over no keys.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.backends.external_rows import valid_rows
from vattn.backends.flashinfer.jit import runs_xqa
from vattn.config.attention import AttentionConfig
from vattn.errors import GraphContractError, MetadataError
from vattn.ops.arguments import HostPlanArgs
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES

NUMBERS = 1
"""Elements of the host plan: the number of the plan in this process, 0 where the step is not planned."""

_WORKSPACE = 8 << 18
"""int32 elements of FlashInfer's integer workspace, 8 MiB."""

_FLOAT_BYTES = (128 << 20, 256 << 20, 512 << 20)
"""Sizes of its workspace for partial results; a step that needs more is not planned."""

_KEPT = 24
"""Plans that no graph was captured with, kept for the next step of their size."""

_HOPPER_ROWS = 64
"""Query rows per request from which on FlashInfer's Hopper kernels, which do not split the keys, are worth it."""

PLAN_FIELDS = (
    "num_heads num_kv_heads head_size scale dtype kv_cache_dtype block_size kv_cache_layout causality sliding_window "
    "logits_soft_cap query_format query_scale kv_scale sinks lse"
).split()
"""Fields of a config that FlashInfer plans by, or that choose its kernels."""


class Sections(NamedTuple):
    """Where the parts of a schedule begin, and its size, in int32 elements."""

    query_start: int
    kv_start: int
    last_page: int
    kind: int
    pages: int
    size: int


def sections(num_tokens: int, num_reqs: int, table_width: int) -> Sections:
    """Return the layout of the schedule for a padded size."""
    starts, at = [], _WORKSPACE
    for size in (num_reqs + 2, num_reqs + 2, num_reqs + 1, num_tokens, num_reqs * table_width):
        starts.append(at)
        at += -(-size // 4) * 4
    return Sections._make((*starts, at))


def plan_text(config: AttentionConfig) -> str:
    """Return a key that is equal for layers that can share a plan."""
    return " ".join(f"{name}={getattr(config, name)}" for name in PLAN_FIELDS)


def kernel_family(config: AttentionConfig, num_tokens: int, num_reqs: int, device: torch.device) -> str:
    """Return FlashInfer's name of the kernels that a step runs on: `"fa3"` (Hopper, prefill) or `"fa2"`."""
    # Its kernels for Hopper read no FP8 keys under a 16-bit query, and take no mask of one's own.
    if KV_FORMATS[config.kv_cache_dtype].quantised or config.tree_bias:
        return "fa2"
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "fa3" if hopper and num_tokens >= _HOPPER_ROWS * num_reqs else "fa2"


def plan_options(config: AttentionConfig, kv_dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of FlashInfer's `plan` that follow from a config."""
    return {
        "num_qo_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim_qk": config.head_size,
        "causal": config.causality == "causal",
        # Its kernels find the largest score before they scale: the query takes the sign.
        "sm_scale": abs(config.scale) or 1.0,
        "window_left": -1 if config.sliding_window is None else config.sliding_window - 1,
        "logits_soft_cap": config.logits_soft_cap or 0.0,
        "q_data_type": MODEL_DTYPES[config.dtype],
        "kv_data_type": kv_dtype,
        "o_data_type": MODEL_DTYPES[config.dtype],
    }


@lru_cache(maxsize=8)
def xqa_workspace(device: torch.device) -> Tensor:
    """Return the workspace of XQA: its first part counts CTAs, starts as zeros and is left so by every call."""
    # Its prebuilt library wants the driver's symbols.
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    with torch.inference_mode(False):
        return torch.zeros(160 << 20, dtype=torch.uint8, device=device)


@lru_cache(maxsize=8)
def workspace(device: torch.device, size: int = _FLOAT_BYTES[0]) -> Tensor:
    """Return FlashInfer's workspace for partial results; all calls on a device share it, on one stream."""
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=torch.uint8, device=device)


def _float_bytes(config: AttentionConfig, num_tokens: int, num_reqs: int) -> int | None:
    """Return a size that holds the partial results of a captured step, `None` if none does."""
    rows = (num_tokens - num_reqs) * config.group_size
    tile = 16 if 0 <= rows <= 16 else 64 if 0 <= rows <= 64 or config.head_size >= 256 else 128
    tiles = -(-num_tokens * config.group_size // tile) + num_reqs + 264 // config.num_kv_heads
    needed = config.num_heads * tiles * tile * (config.head_size + 1) * 4 + (1 << 20)
    return next((size for size in _FLOAT_BYTES if size >= needed), None)


def offsets_of(counts: Tensor) -> Tensor:
    """Return int32 `[n + 1]`: where each of some counts begins, and where the last ends."""
    return torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)])


def used_blocks(table: Tensor, pages: Tensor, num_blocks: int) -> Tensor:
    """Return the ids of all used blocks, request after request, on the device."""
    rows = torch.repeat_interleave(torch.arange(len(pages)), pages)
    columns = torch.arange(int(pages.sum())) - torch.repeat_interleave(offsets_of(pages)[:-1].long(), pages)
    index = (rows * table.shape[1] + columns).to(table.device, non_blocking=True)
    # An id that names no block would be read outside the cache.
    return table.reshape(-1)[index].clamp(0, max(num_blocks - 1, 0))


class Plan:
    """One FlashInfer wrapper over the buffers of one schedule, for one padded size.

    Args:
        args: the step with the schedule and sizes that it is for.
        config: any layer's that shares the plan.
        family: FlashInfer's name of the kernels.
        float_bytes: size of the workspace for partial results.
        number: what it is found by.
    """

    def __init__(self, args: HostPlanArgs, config: AttentionConfig, family: str, float_bytes: int, number: int) -> None:
        self.number, self.text, self.device, self.family = number, plan_text(config), args.schedule.device, family
        self.config = config
        self.num_reqs, self.table_width = args.block_table.shape
        self.num_tokens = args.num_tokens
        self.addresses = (args.schedule.data_ptr(), args.block_table.data_ptr())
        at = self._sections = sections(self.num_tokens, self.num_reqs, self.table_width)
        schedule = args.schedule
        self.query_start = schedule[at.query_start :][: self.num_reqs + 2]
        self.kv_start = schedule[at.kv_start :][: self.num_reqs + 2]
        self.last_page = schedule[at.last_page :][: self.num_reqs + 1]
        self.pages = schedule[at.pages :][: self.num_reqs * self.table_width]
        # XQA's workspace must not be made, and zeroed, inside of a capture.
        self.xqa_workspace = xqa_workspace(self.device) if family == "xqa" else None
        self.wrapper = None if family == "xqa" else self._wrap(config, float_bytes, schedule[:_WORKSPACE])
        self._host = torch.zeros(3, self.num_reqs + 2, dtype=torch.int32, pin_memory=schedule.is_cuda)
        self._copied = torch.cuda.Event() if schedule.is_cuda else None
        self.captured: tuple[int, ...] | None = None

    def _wrap(self, config: AttentionConfig, float_bytes: int, integers: Tensor) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace(self.device, float_bytes),
            config.kv_cache_layout,
            use_cuda_graph=True,
            qo_indptr_buf=self.query_start,
            paged_kv_indptr_buf=self.kv_start,
            paged_kv_indices_buf=self.pages,
            paged_kv_last_page_len_buf=self.last_page,
            backend=self.family,
        )
        wrapper.reset_workspace_buffer(workspace(self.device, float_bytes), integers.view(torch.uint8))
        return wrapper

    def kind(self, schedule: Tensor) -> Tensor:
        """Return int32 `[T]`, what every row is."""
        return schedule[self._sections.kind :][: self.num_tokens]

    def update(self, args: HostPlanArgs, config: AttentionConfig) -> None:
        """Plan a step. Enqueues copies on the current stream; waits only for the copies of the previous step.

        Raises:
            GraphContractError: FlashInfer launches this step in another way than the captured one.
        """
        real = torch.arange(self.num_tokens, device=self.device) < args.query_start_loc[-1]
        valid = valid_rows(args.query_start_loc, args.seq_lens, self.num_tokens, config)[:, 0]
        args.schedule[self._sections.kind :][: self.num_tokens].copy_(real.int() + valid)
        if self.wrapper is None:
            self._write_table(args, config)
        else:
            self._plan(args, config)

    def _plan(self, args: HostPlanArgs, config: AttentionConfig) -> None:
        assert self.wrapper is not None
        # FlashInfer's staging memory, and this one, may still be read.
        if self._copied is not None:
            self._copied.synchronize()
        query, start, last = self._host
        size = config.block_size
        lengths = args.kv_lens.clamp(0, self.table_width * size)
        pages = (lengths + size - 1) // size
        count = len(lengths)
        query[0] = start[0] = 0
        query[1 : count + 1] = args.query_lens.cumsum(0)
        query[count + 1 : -1], query[-1] = query[count].clone(), self.num_tokens
        start[1 : count + 1] = pages.cumsum(0)
        start[count + 1 :] = start[count].clone()
        last.zero_()
        last[:count] = lengths - (pages - 1).clamp(min=0) * size
        before = self.captured
        self.wrapper.plan(
            qo_indptr=query,
            paged_kv_indptr=start,
            # Found on the device, below.
            paged_kv_indices=self.pages[:0],
            paged_kv_last_page_len=last[:-1],
            page_size=size,
            **plan_options(config, KV_FORMATS[config.kv_cache_dtype].value_dtype),
        )
        if self._copied is not None:
            self._copied.record()
        if before is not None and before != self.launch():
            raise GraphContractError(
                f"FlashInfer launches a step of {self.num_reqs} requests and {self.num_tokens} tokens as "
                f"{self.launch()}, and {before} was captured",
                "steps that FlashInfer launches as the captured one",
                "capture again, or run this step without the graph",
            )
        self._write_pages(args)

    def _write_table(self, args: HostPlanArgs, config: AttentionConfig) -> None:
        """Copy lengths and block table for XQA, which must find a key for every row and a block for every key."""
        longest = self.table_width * config.block_size
        torch.clamp(args.seq_lens, 1, longest, out=self.last_page[: self.num_reqs])
        table = self.pages.view(self.num_reqs, self.table_width)
        torch.clamp(args.block_table, 0, max(args.num_blocks - 1, 0), out=table)

    def run(
        self, query: Tensor, cache: tuple[Tensor, Tensor], output: Tensor, scales: tuple[Tensor, Tensor] | None
    ) -> Tensor | None:
        """Run FlashInfer on all rows; return its log-sum-exp to base 2, fp32 `[T, H]`, `None` from XQA.

        Args:
            query: in the model dtype; scaled, but for XQA.
            cache: typed key and value views in the cache's layout.
            output: written.
            scales: of scores (the layer's and both tensors') and of values, fp32 on the device; only for XQA.
        """
        if self.wrapper is not None:
            result: Tensor = self.wrapper.run(query, cache, out=output, return_lse=True)[1]
            return result
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        assert scales is not None
        rows, window = self.num_tokens, self.config.sliding_window
        xqa_batch_decode_with_kv_cache(
            query,
            cache,
            self.xqa_workspace,
            self.pages.view(self.num_reqs, self.table_width)[:rows],
            self.last_page[:rows].view(torch.uint32),
            self.table_width * self.config.block_size,
            bmm1_scale=scales[0],
            bmm2_scale=scales[1],
            window_left=-1 if window is None else window - 1,
            out=output,
            kv_layout=self.config.kv_cache_layout,
        )
        return None

    def _write_pages(self, args: HostPlanArgs) -> None:
        """Pack the used entries of the block table, request after request."""
        slots = torch.arange(self.pages.shape[0], dtype=torch.int32, device=self.device)
        starts = self.kv_start[:-1]
        row = torch.searchsorted(starts[1:], slots, right=True).clamp(max=self.num_reqs - 1)
        column = (slots - starts[row]).clamp(0, max(self.table_width - 1, 0))
        ids = args.block_table.reshape(-1)[row * self.table_width + column]
        # An id that names no block would be read outside the cache.
        torch.clamp(ids, 0, max(args.num_blocks - 1, 0), out=self.pages)

    def launch(self) -> tuple[int, ...]:
        """Return what FlashInfer bakes into a launch."""
        if self.wrapper is None:
            return ()
        return tuple(int(value) for value in getattr(self.wrapper, "_plan_info", None) or ())


_plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
_numbers: dict[int, Plan] = {}


def plan(args: HostPlanArgs, config: AttentionConfig) -> None:
    """Plan one step for all layers like `config`; writes the schedule, and the plan's number into `args.host_plan`.

    A step of no tokens, or whose partial results need too much memory, gets number 0: its calls plan by themselves.
    """
    num_reqs, width = args.block_table.shape
    family = _family(args, config)
    float_bytes = _float_bytes(config, args.num_tokens, num_reqs) if family == "fa2" else _FLOAT_BYTES[0]
    if float_bytes is None or not args.num_tokens or not width:
        args.host_plan.zero_()
        return
    key = (args.schedule.data_ptr(), args.block_table.data_ptr(), args.num_tokens, num_reqs, width, plan_text(config))
    found = _plans.get(key)
    if found is not None and found.family != family:
        _refuse_other_kernels(found, family)
        del _numbers[_plans.pop(key).number]
        found = None
    if found is None:
        _forget()
        with torch.inference_mode(False):
            found = Plan(args, config, family, float_bytes, max(_numbers, default=0) + 1)
        _plans[key] = _numbers[found.number] = found
    _plans.move_to_end(key)
    found.update(args, config)
    args.host_plan[0] = found.number


def _family(args: HostPlanArgs, config: AttentionConfig) -> str:
    """Return the kernels of a step: XQA where every request has one row, in its place among the rows."""
    device, num_reqs = args.schedule.device, args.block_table.shape[0]
    decodes = bool((args.query_lens == 1).all()) and 0 < args.num_tokens <= num_reqs
    if decodes and runs_xqa(config, device):
        return "xqa"
    return kernel_family(config, args.num_tokens, num_reqs, device)


def _refuse_other_kernels(plan: Plan, family: str) -> None:
    if plan.captured is not None:
        raise GraphContractError(
            f"a step of {plan.num_reqs} requests and {plan.num_tokens} tokens runs on FlashInfer's {family} "
            f"kernels, and {plan.family} was captured",
            "steps of decodes only where decodes were captured",
            "capture again, or run this step without the graph",
        )


def _forget() -> None:
    """Make room for a plan: drop the one without a capture that was used longest ago."""
    loose = [key for key, plan in _plans.items() if plan.captured is None]
    for key in loose[: max(0, len(loose) - _KEPT + 1)]:
        del _numbers[_plans.pop(key).number]


def find(tensors: list[Tensor], config: AttentionConfig, num_tokens: int, table: Tensor) -> Plan | None:
    """Return the plan that a call's `plan` tensors are of; `None` where the step was not planned.

    Raises:
        MetadataError: tensors that no builder made, or made for another step or kind of layer.
    """
    if not tensors:
        return None
    problem = "one tensor" if len(tensors) != 2 else "a host plan on the device"
    if len(tensors) == 2 and tensors[1].device.type == "cpu" and tensors[1].numel() == NUMBERS:
        number = int(tensors[1][0])
        if number == 0:
            return None
        found = _numbers.get(number)
        if found is not None:
            made_for = (*found.addresses, found.num_tokens, found.num_reqs, found.table_width, found.text)
            if made_for == (tensors[0].data_ptr(), table.data_ptr(), num_tokens, *table.shape, plan_text(config)):
                return found
        problem = f"plan {number}, made for another step or kind of layer"
    raise MetadataError(
        f"FLASHINFER got {problem}",
        "the schedule and the host plan of this step",
        "make the metadata with AttentionMetadataBuilder(layers=...), and pass no other plan",
    )
