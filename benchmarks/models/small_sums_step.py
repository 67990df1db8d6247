"""Decode steps of a sharded model with NCCL's sums behind its row-parallel layers, and with sums of one kernel.

    torchrun --nproc-per-node 2 benchmarks/models/small_sums_step.py --layers 16 --batches 1 32 --new-tokens 64

Options are those of `several_gpus.py`, of which this takes the model and the timing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models.several_gpus import SHAPES, make_generator, make_model, measure, shard
from vattn.integrations.transformers import disable
from vattn.layers.weight_parts import WeightPart

MOST_ROWS = 64

library = torch.library.Library("vattn_bench", "FRAGMENT")
library.define("sum_ranks_(Tensor(a!) x) -> ()")
library.impl("sum_ranks_", lambda x: None, "Meta")
state: dict[str, Any] = {"calls": 0}


def sum_ranks_(x: Tensor) -> None:
    """Sum over ranks in place: few rows by the kernel, others by the group."""
    rows = x.view(-1, x.shape[-1])
    if not x.is_cuda or rows.shape[0] > MOST_ROWS:
        dist.all_reduce(x)
        return
    from benchmarks.models.sum_ranks import launch_sum_ranks

    state["calls"] += 1
    launch_sum_ranks(state["inbox"], rows, rows, early=state["early"])


library.impl("sum_ranks_", sum_ranks_, "CUDA")
library.impl("sum_ranks_", sum_ranks_, "CPU")
finish = WeightPart.finish


def own_finish(self: WeightPart, out: Tensor, bias: Tensor | None) -> Tensor:
    """As `WeightPart.finish`."""
    if self.dim != 1:
        return finish(self, out, bias)
    out = out.contiguous()
    torch.ops.vattn_bench.sum_ranks_(out)
    return out if bias is None else out + bias


def main(options: argparse.Namespace) -> None:
    """Run one rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = options.shape != "tiny"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    numbers = torch.Generator().manual_seed(1)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    prompts = torch.randint(3, vocabulary, (max(options.batches), options.prompt), generator=numbers)
    model = shard(make_model(options, device, torch.bfloat16 if on_gpu else torch.float32), device)
    if on_gpu:
        from benchmarks.models.sum_ranks import Inbox

        state["inbox"] = Inbox(dist.group.WORLD, device, SHAPES[options.shape]["hidden_size"], MOST_ROWS)
    found: dict[str, Any] = {"ranks": world, "shape": options.shape, "layers": options.layers}
    tokens: dict[str, Any] = {}
    for name, own, early in (("nccl", False, False), ("own", True, False), ("own, early", True, True))[: options.kinds]:
        WeightPart.finish, state["early"], state["calls"] = own_finish if own else finish, early, 0  # type: ignore[method-assign]
        torch._dynamo.reset()
        generator = make_generator(model, options, dist.group.WORLD)
        if rank:
            generator.follow()
        else:
            rows = measure(generator, prompts, options)
            generator.close()
            outputs = [row.pop("outputs") for row in rows]
            first = tokens.setdefault("nccl", outputs)
            for row, before, after in zip(rows, first, outputs, strict=True):
                row["tokens as with nccl"] = sum(map(list.__eq__, before, after)) / len(before)
            found[name] = [*rows, {"launches": state["calls"]}]
            print(json.dumps({name: found[name]}), flush=True)
            if options.output:
                options.output.write_text(json.dumps(found, indent=1) + "\n")
        dist.barrier()
        disable(model)
        del generator
        gc.collect()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--kinds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    main(parser.parse_args())
