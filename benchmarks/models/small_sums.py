"""Sums of few rows over two GPUs: NCCL, torch's symmetric memory, and one kernel with the residual and the norm.

    torchrun --nproc-per-node 2 benchmarks/models/small_sums.py

Each is captured CALLS times in a CUDA graph; a time is the least of several replays, over CALLS.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from benchmarks.models.sum_ranks import Inbox, launch_sum_ranks

CALLS, EPS = 50, 1e-5
ROWS, WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (4096, 8192)


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def microseconds(call: Callable[[], object]) -> float:
    """Return the time of one call in a captured graph of many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return min(times)


def rms_norm(rows: Tensor, weight: Tensor) -> Tensor:
    wide = rows.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(rows.dtype) * weight


def same_on_ranks(x: Tensor) -> bool:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return all(torch.equal(part.view(torch.int16), parts[0].view(torch.int16)) for part in parts)


def check(inbox: Inbox, rows: int, width: int, early: bool) -> dict[str, Any]:
    """Compare bits of the kernel with sums of gathered parts."""
    x, residual = (torch.randn(rows, width, device="cuda").bfloat16() for _ in range(2))
    weight = torch.rand(width, device="cuda").bfloat16()
    dist.broadcast(residual, 0)
    dist.broadcast(weight, 0)
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    expected = sum(part.float() for part in parts).bfloat16()  # type: ignore[union-attr]
    total, normed, plain = (torch.full_like(x, float("nan")) for _ in range(3))
    launch_sum_ranks(inbox, x, plain, early=early)
    launch_sum_ranks(inbox, x, total, residual, (weight, EPS, normed), early=early)
    added = expected + residual
    exact = rms_norm(added.double(), weight.double())
    torch.cuda.synchronize()
    error = ((normed.double() - exact).abs() / exact.abs().clamp(min=1e-2)).max()
    return {
        "sum": torch.equal(plain, expected), "added": torch.equal(total, added), "norm error": float(error),
        "same": same_on_ranks(plain) and same_on_ranks(total) and same_on_ranks(normed),
    }  # fmt: skip


def stress(inbox: Inbox, width: int, early: bool) -> bool:
    """Replay a graph of many dependent sums of changing numbers of rows, ranks out of step; compare with NCCL's."""
    rank = dist.get_rank()
    sizes = [1, 7, 3, 64, 2, 1, 33, 5] * 4
    state = torch.empty(64, width, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(64, width, device="cuda").bfloat16()

    def run(own: bool) -> None:
        for index, rows in enumerate(sizes):
            part = (state[:rows] * (0.5 + 0.01 * rank)).contiguous()
            if own and index % 5 == rank:
                torch.cuda._sleep(20000)
            if own:
                launch_sum_ranks(inbox, part, part, early=early)
            else:
                dist.all_reduce(part)
            state[:rows] = part.sin()

    found = []
    for own in (True, False):
        state.copy_(start)
        run(own)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run(own)
        state.copy_(start)
        dist.barrier()
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        found.append(state.clone())
    return torch.equal(found[0], found[1])


def routes(inbox: Inbox, alone: Any, part: Tensor, weight: Tensor, group: str) -> dict[str, Callable[[], object]]:
    """Return what is timed by name; `part` is in torch's symmetric memory, `alone` an inbox of one rank."""
    x, residual, total, normed = (torch.randn_like(part) for _ in range(4))
    norm, torch_ops = (weight, EPS, normed), torch.ops.symm_mem

    def apart() -> None:
        dist.all_reduce(x)
        launch_sum_ranks(alone, x, total, residual, norm)

    return {
        "nccl": lambda: dist.all_reduce(x),
        "add and norm": lambda: launch_sum_ranks(alone, x, total, residual, norm),
        "nccl, add, norm": apart,
        "torch one shot": lambda: torch_ops.one_shot_all_reduce_out(part, "sum", group, total),
        "torch one shot copy": lambda: torch_ops.one_shot_all_reduce_copy_out(part, x, "sum", group, total),
        "torch two shot": lambda: torch_ops.two_shot_all_reduce_(part, "sum", group),
        "own sum": lambda: launch_sum_ranks(inbox, x, total),
        "own sum, 16 warps": lambda: launch_sum_ranks(inbox, x, total, warps=16),
        "own sum, early": lambda: launch_sum_ranks(inbox, x, total, early=True),
        "own sum, add, norm": lambda: launch_sum_ranks(inbox, x, total, residual, norm),
        "own sum, add, norm, early": lambda: launch_sum_ranks(inbox, x, total, residual, norm, early=True),
    }


def wait_alone(inbox: Inbox) -> None:
    """Wait for a rank that does not come: the flag ends the wait, and without it the kernel ends by an error."""
    x = torch.randn(4, inbox.width, device="cuda").bfloat16()
    launch_sum_ranks(inbox, x, torch.empty_like(x))
    time.sleep(0.5)
    waits, begin = not torch.cuda.current_stream().query(), time.perf_counter()
    inbox.abort()
    torch.cuda.synchronize()
    say("the flag: waited", waits, "ended after", time.perf_counter() - begin)
    inbox.flag.zero_()
    begin = time.perf_counter()
    launch_sum_ranks(inbox, x, torch.empty_like(x), looks=1000)
    try:
        torch.cuda.synchronize()
        say("no error after 1000 looks")
    except RuntimeError as error:
        say("1000 looks took", time.perf_counter() - begin, f"{error!s:.80}")


def main() -> None:
    """Run one rank."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    group, name = dist.group.WORLD, dist.group.WORLD.group_name
    torch.manual_seed(rank)
    out = Path(os.environ.get("JOB_OUT", "."), "small_sums.json")
    say(torch.cuda.get_device_name(), torch.__version__, symmetric.get_backend(device))
    rows_found: list[dict[str, Any]] = []
    for width in WIDTHS:
        inbox = Inbox(group, device, width, 256)
        say("inbox", width)
        for early in (False, True):
            for rows in (1, 5, 256):
                say("check", width, rows, early, check(inbox, rows, width, early))
        say("stress", width, stress(inbox, width, False), stress(inbox, width, True))
        shared = symmetric.empty((256, width), dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared, group)
        weight = torch.rand(width, device="cuda").bfloat16()
        alone = SimpleNamespace(
            rank=0,
            world_size=1,
            width=width,
            most_rows=256,
            counts=inbox.counts.clone(),
            addresses=inbox.addresses,
            flag=inbox.flag,
        )
        for rows in ROWS:
            calls = routes(inbox, alone, shared[:rows].zero_(), weight, name)
            row: dict[str, Any] = {"width": width, "rows": rows, "KB": rows * width * 2 / 1024}
            for what, call in calls.items():
                try:
                    row[what] = round(microseconds(call), 2)
                except Exception as error:
                    row[what] = f"{type(error).__name__}: {error!s:.120}"
            rows_found.append(row)
            say(json.dumps(row))
            if rank == 0:
                out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows_found}, indent=1))
    dist.barrier()
    if rank == 0:
        wait_alone(inbox)
    else:
        time.sleep(4)
    # The device of rank 0 is broken now, so that no group can end.
    os._exit(0)


if __name__ == "__main__":
    main()
