"""Steps and throughput of a model of Llama's shape on several ranks, beside one GPU and transformers' own generate.

    torchrun --nproc-per-node 2 benchmarks/models/several_gpus.py --shape 8b --output several_gpus.json

Weights are random, equal on all ranks, and sharded by `parallelize_module`. A step's time is the difference of runs of
two lengths. On a CPU (`--shape tiny`) it shows that everything runs, over gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import vattn
from vattn.integrations.transformers import disable, enable

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 128},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def make_model(options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the whole model; every rank makes the same."""
    torch.manual_seed(0)
    shape = dict(SHAPES[options.shape])
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    config = transformers.LlamaConfig(**shape, max_position_embeddings=8192, dtype=dtype)
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)


def shard(model: Any, device: torch.device) -> Any:
    """Shard the layers and the head of a model over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        plan: dict[str, Any] = {
            name: ColwiseParallel() if name.endswith(COLUMNS) else RowwiseParallel()
            for name, _ in layer.named_modules()
            if name.endswith((*COLUMNS, "o_proj", "down_proj"))
        }
        parallelize_module(layer, mesh, plan)
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Return the least time of a call."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(run: Callable[[int, int], object], batches: list[int], lengths: tuple[int, int], device: Any) -> list[Any]:
    """Return the time of a step and tokens a second of runs of some numbers of requests; `run` takes both numbers."""
    rows = []
    for batch in batches:
        run(batch, lengths[0])
        short, long = (seconds(lambda b=batch, n=n: run(b, n), device) for n in lengths)  # type: ignore[misc]
        step = (long - short) / (lengths[1] - lengths[0])
        rows.append({"requests": batch, "step_ms": 1e3 * step, "tokens_per_second": batch * lengths[1] / long})
    return rows


def vattn_run(model: Any, prompts: torch.Tensor, options: argparse.Namespace, group: Any) -> Any:
    """Return what rank 0 calls to generate, and the generator."""
    longest = prompts.shape[1] + options.new_tokens
    blocks = max(options.batches) * (-(-longest // 16) + 1) + 16
    packed = enable(model, num_blocks=blocks, prove=False)
    generator = vattn.Generator(packed, max_num_reqs=max(options.batches), max_seq_len=longest, reuse_prefixes=False,
                                stop_token_ids=(), group=group)  # fmt: skip

    def run(batch: int, count: int) -> list[list[int]]:
        done = generator.generate(prompts[:batch].tolist(), vattn.Sampling(count, stop_token_ids=()))
        assert all(request.error is None for request in done), [request.error for request in done]
        return [request.output for request in done]

    return run, generator


def main(options: argparse.Namespace) -> None:
    """Run one rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= world and options.shape != "tiny"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=600))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    lengths = max(1, options.new_tokens // 4), options.new_tokens
    numbers = torch.Generator().manual_seed(1)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    prompts = torch.randint(3, vocabulary, (max(options.batches), options.prompt), generator=numbers)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu", "ranks": world, "torch": torch.__version__,
        "shape": options.shape, "prompt": options.prompt, "new_tokens": options.new_tokens,
    }  # fmt: skip
    alone: list[list[int]] = []
    if not options.sharded_only:
        # Alone, while the others wait.
        if rank == 0:
            run, _ = vattn_run(make_model(options, device, dtype), prompts, options, None)
            found["vattn, one"] = measure(run, options.batches, lengths, device)
            alone = run(options.batches[0], options.new_tokens)
            del run, _
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
        dist.barrier()
    model = shard(make_model(options, device, dtype), device)

    @torch.no_grad()
    def generate(batch: int, count: int) -> None:
        model.generate(prompts[:batch].to(device), max_new_tokens=count, min_new_tokens=count, do_sample=False)

    found["transformers, all"] = measure(generate, options.batches, lengths, device)
    run, generator = vattn_run(model, prompts, options, dist.group.WORLD)
    if rank:
        generator.follow()
    else:
        found["vattn, all"] = measure(run, options.batches, lengths, device)
        together = run(options.batches[0], options.new_tokens)
        generator.close()
        if alone:
            # In 16 bits sums of parts round otherwise: tokens may differ from the first near tie on.
            pairs = [pair for one, other in zip(alone, together, strict=True) for pair in zip(one, other, strict=True)]
            found["equal_tokens"] = sum(a == b for a, b in pairs) / len(pairs)
        text = json.dumps(found, indent=1)
        print(text)
        if options.output:
            options.output.write_text(text + "\n")
    dist.barrier()
    disable(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--sharded-only", action="store_true", help="for models that one GPU cannot hold")
    parser.add_argument("--output", type=Path)
    main(parser.parse_args())
