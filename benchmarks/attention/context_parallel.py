"""One layer of attention over the caches of several ranks, beside one GPU with the whole cache, as CUDA graphs.

    torchrun --nproc-per-node 2 -m benchmarks.attention.context_parallel --json context_parallel.json

One request of 131,072 tokens, 32 query and 8 KV heads of 128, bf16: a decode, chunks of a prompt and the whole prompt.
A row has microseconds of one GPU and of all, the collectives alone, the kernels of a step, and a step as the host sees
it: `build`, a replay, and waiting for it. Results are compared first. `--device cpu` runs tiny sizes over gloo: that it
runs, no more.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import vattn
from benchmarks.harness import Call, add_row, machine, parser_of
from benchmarks.kernels import profile_kernels
from vattn.cli.bench.timing import LEAD_CYCLES
from vattn.distributed import ContextParallel

BLOCK = 16


@dataclass(frozen=True)
class Cell:
    """New tokens of one request, and how long it is."""

    rows: int
    length: int
    combine: str = "reduce_scatter"
    heads: int = 32
    kv_heads: int = 8
    size: int = 128

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"{self.rows} of {self.length}, {self.combine}"


LENGTH = 131072
CELLS = [Cell(rows, LENGTH, combine) for rows in (1, 2048, 8192) for combine in ("reduce_scatter", "all_to_all")]
CELLS.append(Cell(LENGTH, LENGTH))
TINY = [Cell(rows, 150, combine, 8, 4, 16) for rows in (1, 40) for combine in ("reduce_scatter", "all_to_all")]


class Graph:
    """Calls in a CUDA graph, which every rank replays at once; on a CPU the calls themselves."""

    def __init__(self, call: Call, count: int, on_gpu: bool) -> None:
        for _ in range(2):
            call()
        self.count, self.call, self.graph = count, call, None
        if on_gpu:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                for _ in range(count):
                    call()

    def replay(self) -> None:
        """Run all calls."""
        if self.graph is None:
            self.call()
        else:
            self.graph.replay()

    def microseconds(self, replays: int, together: bool = True) -> float:
        """Return the median time of a call.

        Args:
            together: whether all ranks replay; they begin at once.
        """
        if self.graph is None:
            self.call()
            return 0.0
        times, ready = [], torch.zeros(1, device="cuda")
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LEAD_CYCLES)
            if together:
                dist.all_reduce(ready)
            start.record()
            self.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / self.count)
        return statistics.median(times)


class Side:
    """A layer with its cache and the step of a cell, on one rank."""

    def __init__(self, cell: Cell, keys: Tensor, parallel: ContextParallel | None) -> None:
        self.cell, device, dtype = cell, keys.device, keys.dtype
        config = vattn.CacheConfig(block_size=BLOCK)
        self.layer = vattn.Attention(
            cell.heads, cell.size, cell.size**-0.5, cell.kv_heads, cache_config=config, context_parallel=parallel
        ).to(device)
        world = 1 if parallel is None else parallel.world_size
        self.blocks = -(-cell.length // (world * BLOCK))
        cache = vattn.allocate_kv_cache(self.layer, num_blocks=self.blocks + 1, dtype=dtype, device=device)
        more = {} if parallel is None else {"context_parallel": parallel}
        self.builder = vattn.AttentionMetadataBuilder(
            1, cell.rows, cell.length, block_size=BLOCK, device=device, layers=self.layer, **more
        )
        rank = 0 if parallel is None else parallel.rank
        # A run of tokens on a rank is a block.
        own = keys.unflatten(1, (-1, BLOCK))[:, rank::world]
        cache.kv_caches[0][:, 1 : 1 + own.shape[1]] = own
        self.step = self.build()
        queries = torch.randn(cell.rows, cell.heads, cell.size, generator=_numbers(2, device), device=device)
        share = cell.heads // world
        query = queries[:, rank * share : (rank + 1) * share].to(dtype).contiguous()
        new = [part[cell.length - cell.rows : cell.length].contiguous() for part in keys]
        self.inputs = [query, *new]
        self.compiled = vattn.compile(self.layer, fullgraph=True) if device.type == "cuda" else self.layer

    def build(self) -> Any:
        """Return the step, as the host makes it for each."""
        return self.builder.build([self.cell.rows], [self.cell.length], [list(range(1, self.blocks + 1))])

    def run(self) -> Tensor:
        """Run the layer on the step."""
        with torch.no_grad(), vattn.forward_context(self.step):
            out: Tensor = self.compiled(*self.inputs)
            return out


def _numbers(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def collectives_of(side: Side, parallel: ContextParallel, ran: list[tuple[str, Tensor]]) -> Callable[[], None]:
    """Return a call of the collectives that the layer ran, on tensors of their own."""
    ops: Any = torch.ops._c10d_functional
    world, group = parallel.world_size, parallel.group_name

    def run() -> None:
        for name, sent in ran:
            if name == "gather":
                ops.wait_tensor(ops.all_gather_into_tensor(sent, world, group))
            elif name == "scatter":
                ops.wait_tensor(ops.reduce_scatter_tensor(sent, "sum", world, group))
            else:
                sizes = [sent.shape[0] // world] * world
                ops.wait_tensor(ops.all_to_all_single(sent, sizes, sizes, group))

    return run


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the collectives that run inside of it."""

    NAMES: ClassVar = {
        "all_gather_into_tensor": "gather",
        "reduce_scatter_tensor": "scatter",
        "all_to_all_single": "exchange",
    }

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective and run it."""
        name = func._schema.name.partition("::")[2]
        if name in self.NAMES:
            self.ran.append((self.NAMES[name], torch.randn_like(args[0].float()).to(args[0].dtype)))
        return func(*args, **(kwargs or {}))


def host_microseconds(side: Side, graph: Graph, repeats: int) -> float:
    """Return the median time of a step as the host sees it."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        side.step = side.build()
        graph.replay()
        if graph.graph is not None:
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def run_cell(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Return the row of a cell; every rank calls it."""
    on_gpu, dtype = device.type == "cuda", torch.bfloat16 if device.type == "cuda" else torch.float32
    rank, parallel = dist.get_rank(), ContextParallel.of(interleave=BLOCK, combine=cell.combine)
    padded = -(-cell.length // (parallel.world_size * BLOCK)) * parallel.world_size * BLOCK
    keys = torch.randn(2, padded, cell.kv_heads, cell.size, generator=_numbers(1, device), device=device).to(dtype)
    count = 1 if cell.rows > 64 else 20
    replays = 3 if cell.rows > 8192 else 7
    row: dict[str, Any] = {}
    whole = Side(cell, keys, None)
    expected = whole.run()
    # Alone, one after the other: a GPU that waits may not slow the other.
    graph = Graph(whole.run, count, on_gpu)
    if rank == 0:
        row["one"] = graph.microseconds(replays, together=False)
        if cell.rows == 1:
            single = Graph(whole.run, 1, on_gpu)
            row["host step, one"] = host_microseconds(whole, single, 20)
            del single
    dist.barrier()
    del graph
    shared = Side(cell, keys, parallel)
    del keys
    got = shared.run()
    own = expected.view(len(expected), parallel.world_size, -1)[:, rank]
    error = torch.linalg.vector_norm((got - own).float()) / torch.linalg.vector_norm(own.float())
    row["relative error"] = float(error)
    del expected, own, whole
    graph = Graph(shared.run, count, on_gpu)
    row["all"] = graph.microseconds(replays)
    del graph
    if cell.rows == 1:
        single = Graph(shared.run, 1, on_gpu)
        row["host step, all"] = host_microseconds(shared, single, 20)
        del single
    eager, recorder = shared.compiled, Recorder()
    shared.compiled = shared.layer
    with recorder:
        shared.run()
    row["collectives"] = [f"{name} {sent.numel() * sent.element_size()}" for name, sent in recorder.ran]
    graph = Graph(collectives_of(shared, parallel, recorder.ran), count, on_gpu)
    row["collectives alone"] = graph.microseconds(replays)
    for name, sent in recorder.ran:
        one = Graph(collectives_of(shared, parallel, [(name, sent)]), count, on_gpu)
        row[f"{name} {sent.numel() * sent.element_size()} alone"] = one.microseconds(replays)
        del one
    shared.compiled = eager
    if on_gpu and cell.rows <= 8192:
        single = Graph(shared.run, 1, on_gpu)
        row["kernels"] = [f"{kernel.us:.1f} {kernel.name[:70]}" for kernel in profile_kernels(single.replay)]
    return row


def main(given: list[str] | None = None) -> int:
    """Run one rank."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells")
    options = parser.parse_args(given)
    rank, on_gpu = int(os.environ["LOCAL_RANK"]), options.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    cells = CELLS if on_gpu else TINY
    result = {**machine(options.device), "ranks": dist.get_world_size()}
    for number, cell in enumerate(cells):
        if options.only is not None and number not in options.only:
            continue
        row = run_cell(cell, device)
        if rank == 0:
            add_row(result, {"name": cell.name, **row}, options.json)
        if on_gpu:
            torch.cuda.empty_cache()
    dist.barrier()


if __name__ == "__main__":
    main()
