"""Steps and throughput of a model of Llama's shape on several ranks, beside one GPU and transformers' own generate.

    torchrun --nproc-per-node 2 benchmarks/models/several_gpus.py --shape 8b --output several_gpus.json

Weights are random, equal on all ranks, and sharded by `parallelize_module`. A step's time is the median between two
steps of decodes. `--parts` runs some parts only:

- `one`: vattn on one GPU, while the others wait
- `graphs`: replays of captured decodes over all ranks, the same without collectives, and the collectives alone
- `all`: vattn over all ranks, with what the host takes for a step
- `peer`: transformers' generate on the same shards, and `peer-one` on one GPU

On a CPU (`--shape tiny`) it shows that everything runs, over gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from benchmarks.kernels import profile_kernels
from vattn.generation.capture import capture_runner
from vattn.generation.model_steps import sample_inputs
from vattn.integrations.transformers import disable, enable
from vattn.layers.weight_parts import part_of

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 128},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
PARTS = ("one", "graphs", "all", "peer", "peer-one")
REPLAYS = 20


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


def make_generator(model: Any, options: argparse.Namespace, group: Any) -> vattn.Generator:
    """Return a generator over a model, or over this rank's part of it."""
    longest = options.prompt + options.new_tokens
    blocks = max(options.batches) * (-(-longest // 16) + 1) + 16
    packed = enable(model, num_blocks=blocks, prove=False)
    return vattn.Generator(
        packed, max_num_reqs=max(options.batches), max_seq_len=longest, reuse_prefixes=False, stop_token_ids=(),
        graph_sizes=options.batches, group=group,
    )  # fmt: skip


def measure(generator: vattn.Generator, prompts: torch.Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the time of a step and tokens a second of runs of some numbers of requests."""
    rows = []
    for batch in options.batches:
        _run(generator, prompts[:batch], 4)
        best: dict[str, Any] = {}
        for _ in range(2):
            begin = time.perf_counter()
            ends, outputs = _run(generator, prompts[:batch], options.new_tokens)
            steps = [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
            found = {
                "requests": batch,
                "step_ms": statistics.median(steps[-(options.new_tokens // 2) :]),
                "tokens_per_second": batch * options.new_tokens / (ends[-1] - begin),
                "outputs": outputs,
            }
            if not best or found["tokens_per_second"] > best["tokens_per_second"]:
                best = found
        rows.append(best)
    return rows


def _run(generator: vattn.Generator, prompts: torch.Tensor, count: int) -> tuple[list[float], list[list[int]]]:
    """Return when each step ended, and the tokens of all requests."""
    added = [generator.add(prompt, vattn.Sampling(count, stop_token_ids=())) for prompt in prompts.tolist()]
    ends = []
    while generator.busy:
        generator.step()
        ends.append(time.perf_counter())
    assert all(request.error is None for request in added), [request.error for request in added]
    return ends, [request.output for request in added]


@contextmanager
def timing_host(generator: vattn.Generator) -> Iterator[dict[str, list[float]]]:
    """Yield lists of the seconds that parts of a step take on the host of this rank."""
    found: dict[str, list[float]] = {}
    steps: Any = generator._runner.steps
    leader = steps._leader

    def timed(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                found.setdefault(name, []).append(time.perf_counter() - begin)

        setattr(owner, name, call)

    for owner, name in ((leader, "send"), (leader, "broadcast"), (leader, "receive"), (steps, "run"),
                        (steps, "compute")):  # fmt: skip
        timed(owner, name)
    try:
        yield found
    finally:
        for owner in (leader, steps):
            for name in found:
                owner.__dict__.pop(name, None)


def replay_of(runner: Any, batch: int, options: argparse.Namespace) -> Callable[[], object]:
    """Return what replays decodes of some requests, after one of them has run."""
    tables = torch.arange(1, 1 + batch * (options.prompt // 16 + 1)).view(batch, -1)
    metadata = runner.build([1] * batch, [options.prompt] * batch, tables)
    inputs = sample_inputs(metadata)
    runner(*inputs, metadata=metadata)
    graph = runner._entries[metadata.capture_key()].graph
    return (lambda: runner(*inputs, metadata=metadata)) if graph is None else graph.replay


def milliseconds(replay: Callable[[], object], repeats: int = REPLAYS) -> float:
    """Return the mean time of a replay of all ranks, which begin at once."""
    replay()
    if not torch.cuda.is_available():
        return 0.0
    ready = torch.zeros(1, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.all_reduce(ready)
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def collectives_alone(generator: vattn.Generator, batch: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return what replays the collectives of a step, on tensors of their own."""
    device, parts = generator.device, [(module, part_of(module)) for module in generator.model.modules()]
    rows = max(2, batch)
    hidden = torch.zeros(rows, generator.model.model.config.hidden_size, dtype=dtype, device=device)
    ran = [
        (part, torch.zeros(rows, module.weight.shape[0], dtype=dtype, device=device) if part.gathers else hidden)
        for module, part in parts
        if part is not None and (part.gathers or part.dim == 1)
    ]

    def one(part: Any, tensor: torch.Tensor) -> torch.Tensor:
        return part.finish(tensor, None)

    call = torch.compile(one, fullgraph=True) if device.type == "cuda" else one

    def run() -> None:
        for part, tensor in ran:
            call(part, tensor)

    with torch.inference_mode():
        run()
        if device.type != "cuda":
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    # A graph does not hold its inputs.
    graph.inputs = ran
    return graph.replay


def measure_graphs(generator: vattn.Generator, options: argparse.Namespace, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return times of captured steps of decodes over all ranks, and of their parts; every rank calls it."""
    rows = []
    for batch in options.batches:
        replay = replay_of(generator.graphs, batch, options)
        row: dict[str, Any] = {"requests": batch, "step_ms": milliseconds(replay)}
        row["kernels"] = _by_name(replay) if generator.device.type == "cuda" else []
        row["collectives_ms"] = milliseconds(collectives_alone(generator, batch, dtype))
        rows.append(row)
    steps: Any = generator._runner.steps
    alone, changed = dist.new_group([dist.get_rank()], use_local_synchronization=True), []
    for module in generator.model.modules():
        part = part_of(module)
        if part is not None:
            changed.append((module, part))
            module.part = dataclasses.replace(part, group=alone)
    runner = capture_runner(steps.forward, options.batches, steps.builder, sample_inputs, output_rows="requests")
    for row, batch in zip(rows, options.batches, strict=True):
        row["without_collectives_ms"] = milliseconds(replay_of(runner, batch, options))
        both = row["without_collectives_ms"] + row["collectives_ms"]
        row["over_both"] = row["step_ms"] / both - 1 if both else 0.0
    for module, part in changed:
        module.part = part
    return rows


def _by_name(replay: Callable[[], object]) -> list[str]:
    total: dict[str, list[float]] = {}
    for kernel in profile_kernels(replay):
        total.setdefault(kernel.name[:70], []).append(kernel.us)
    ordered = sorted(total.items(), key=lambda item: -sum(item[1]))[:24]
    return [f"{sum(us):.0f} us in {len(us)} of {statistics.median(us):.1f}: {name}" for name, us in ordered]


def measure_peer(model: Any, prompts: torch.Tensor, options: argparse.Namespace, device: torch.device) -> list[Any]:
    """Return times of steps of transformers' generate: of the difference of runs of two lengths."""
    rows, counts = [], (2, 2 + options.peer_tokens)

    @torch.no_grad()
    def seconds(batch: int, count: int) -> float:
        begin = time.perf_counter()
        model.generate(prompts[:batch].to(device), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    for batch in options.batches:
        seconds(batch, 2)
        short, long = (seconds(batch, count) for count in counts)
        rows.append({"requests": batch, "step_ms": 1e3 * (long - short) / options.peer_tokens})
    return rows


def main(options: argparse.Namespace) -> None:
    """Run one rank."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    on_gpu = torch.cuda.device_count() >= world and options.shape != "tiny"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    if world > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=600))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    numbers = torch.Generator().manual_seed(1)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    prompts = torch.randint(3, vocabulary, (max(options.batches), options.prompt), generator=numbers)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu", "ranks": world, "torch": torch.__version__,
        "shape": options.shape, "layers": options.layers or SHAPES[options.shape]["num_hidden_layers"],
        "prompt": options.prompt, "new_tokens": options.new_tokens,
    }  # fmt: skip
    begin = time.monotonic()

    def note(name: str, rows: Any) -> None:
        rows = [{key: value for key, value in row.items() if key != "outputs"} for row in rows]
        found[name] = rows
        print(f"rank {rank}, {time.monotonic() - begin:.0f} s: {name} {json.dumps(rows, indent=1)}", flush=True)
        if options.output and rank == 0:
            options.output.write_text(json.dumps(found, indent=1) + "\n")

    if rank == 0 and ("one" in options.parts or "peer-one" in options.parts):
        model = make_model(options, device, dtype)
        if "one" in options.parts:
            note("vattn, one", measure(make_generator(model, options, None), prompts, options))
            disable(model)
        if "peer-one" in options.parts:
            note("transformers, one", measure_peer(model, prompts, options, device))
        del model
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    if world == 1:
        return
    dist.barrier()
    model = shard(make_model(options, device, dtype), device)
    if on_gpu:
        torch.cuda.empty_cache()
    if "graphs" in options.parts or "all" in options.parts:
        generator = make_generator(model, options, dist.group.WORLD)
        print(f"rank {rank}, {time.monotonic() - begin:.0f} s: the generator is ready", flush=True)
        if "graphs" in options.parts:
            rows = measure_graphs(generator, options, dtype)
            if rank == 0:
                note("graphs", rows)
        if "all" in options.parts:
            run_all(generator, prompts, options, note)
        disable(model)
        del generator
    if "peer" in options.parts:
        rows = measure_peer(model, prompts, options, device)
        if rank == 0:
            note("transformers, all", rows)
    dist.barrier()
    # What is captured holds the group: taking it down may wait.
    os._exit(0)


def run_all(
    generator: vattn.Generator, prompts: torch.Tensor, options: argparse.Namespace, note: Callable[[str, Any], None]
) -> None:
    """Measure vattn over all ranks."""
    with timing_host(generator) as seconds:
        if dist.get_rank():
            generator.follow()
        else:
            note("vattn, all", measure(generator, prompts, options))
            generator.close()
    host = {name: f"{1e6 * statistics.median(each):.0f} us, {len(each)} times" for name, each in seconds.items()}
    note(f"host of rank {dist.get_rank()}", [host])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--peer-tokens", type=int, default=16, help="steps that transformers is timed for")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["one", "graphs", "all", "peer"])
    parser.add_argument("--output", type=Path)
    main(parser.parse_args())
