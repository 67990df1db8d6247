"""Run cases by name on the ranks of a group, each rank in a process of its own."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing


def run(rank: int, world: int, folder: str, module: str, names: list[str], backend: str = "gloo") -> None:
    """Run cases on one rank and write what became of each; one that fails does not keep the next from starting."""
    torch.set_num_threads(1)
    # As torchrun does it; transformers reads them.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    cases = importlib.import_module(module)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    found = {}
    for name in names:
        try:
            {**cases.CASES, **cases.SLOW_CASES}[name](rank, world)
            found[name] = "passed"
        except Exception:
            found[name] = traceback.format_exc()
        Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    gc.collect()
    dist.destroy_process_group()


def run_all(
    module: str, world: int, folder: Path, names: list[str], timeout: float = 400, backend: str = "gloo"
) -> list[dict[str, str]]:
    """Run cases of a module on `world` processes; return what became of each, by rank."""
    # One server imports everything and forks the ranks; it has run no kernel and has no thread of its own.
    multiprocessing.set_forkserver_preload([module, "torch._dynamo", "torch._functorch.aot_autograd"])
    context = torch.multiprocessing.start_processes(
        run, (world, str(folder), module, names, backend), nprocs=world, join=False, start_method="forkserver"
    )
    assert context is not None
    deadline = time.monotonic() + timeout
    for process in context.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
    files = [folder / f"rank{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]
