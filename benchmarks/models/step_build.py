"""Time how the metadata of a decode step is made, beside nano-vllm's preparation of the same step.

    python -m benchmarks.models.step_build --json out.json
    python -m benchmarks.models.step_build --nano-vllm folder

The folder is a checkout of https://github.com/GeeeekExplorer/nano-vllm. Requests of one new token each. All forms are
timed in turn; times are those that the thread computes, as in `benchmarks.models.scheduler`, and `advance` is the mean
over the steps of one block. nano-vllm's `ModelRunner.prepare_decode` runs as it is, on its own sequences; it makes the
tensor of token ids too. On a CPU it makes plain tensors, since there is no memory to pin and no GPU to copy to.
"""

from __future__ import annotations

import importlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

import vattn
from benchmarks.harness import machine, parser_of, table, versions_of
from vattn.cli.bench.report import write_result

Call = Callable[[], object]

WARM_UP = 5
"""Rounds that do not count."""


def forms(
    requests: int, length: int, block_size: int, rounds: int, device: str
) -> tuple[list[list[int]], dict[str, Call]]:
    """Return the block tables of a step, and calls that make its metadata."""
    longest = length + block_size * rounds
    width = longest // block_size + 1
    ids = list(range(1, requests * width + 1))
    random.Random(0).shuffle(ids)
    rows = [ids[row * width : (row + 1) * width] for row in range(requests)]
    tables = [row[: -(-length // block_size)] for row in rows]
    layer = vattn.AttentionConfig(32, 8, 128, 128, 0.1, "bfloat16", "bfloat16", block_size=block_size)

    def builder() -> vattn.AttentionMetadataBuilder:
        return vattn.AttentionMetadataBuilder(
            requests, requests, longest, device=device, layers=[layer], num_blocks=len(ids) + 1
        )

    own, other = builder(), builder()
    queries, lengths = [1] * requests, [length] * requests
    tensors = torch.tensor(queries), torch.tensor(lengths), torch.tensor(tables, dtype=torch.int32)
    arrays = [np.asarray(tensor) for tensor in tensors]
    step = own.build(queries, lengths, tables)
    given = step.query_start_loc, step.seq_lens, step.block_table, step.slot_mapping
    on_device = [tensor.clone() for tensor in given]
    last, places = other.build(*tensors), itertools.count(length)

    def advance() -> float:
        nonlocal last
        seconds = 0.0
        for place in itertools.islice(places, block_size):
            new = [] if place % block_size else [row[place // block_size] for row in rows]
            begin = time.thread_time()
            last = other.advance(last, new)
            seconds += time.thread_time() - begin
        return seconds / block_size

    return tables, {
        "build, lists": lambda: own.build(queries, lengths, tables),
        "build, NumPy arrays": lambda: own.build(*arrays),
        "build, host tensors": lambda: own.build(*tensors),
        "build_from_tensors": lambda: own.build_from_tensors(*on_device),
        "advance": advance,
    }


def nano_vllm(folder: Path, tables: list[list[int]], length: int, block_size: int, device: str) -> Call:
    """Return nano-vllm's preparation of the step, after a look at its slots."""
    _import_without_layers(folder)
    runner = importlib.import_module("nanovllm.engine.model_runner")
    sequences = importlib.import_module("nanovllm.engine.sequence")
    context = importlib.import_module("nanovllm.utils.context")
    sequences.Sequence.block_size = block_size
    if device == "cpu":
        runner.torch = _Unpinned("torch")
        torch.Tensor.cuda = lambda tensor, **_: tensor  # type: ignore[method-assign]
    given = []
    for row in tables:
        given.append(sequences.Sequence([7] * length))
        given[-1].block_table = row
    own = SimpleNamespace(block_size=block_size)
    own.prepare_block_tables = lambda seqs: runner.ModelRunner.prepare_block_tables(own, seqs)
    runner.ModelRunner.prepare_decode(own, given)
    expected = [row[-1] * block_size + (length - 1) % block_size for row in tables]
    assert context.get_context().slot_mapping.tolist() == expected
    return lambda: runner.ModelRunner.prepare_decode(own, given)


class _Unpinned(ModuleType):
    """torch for a machine without pinned memory."""

    @staticmethod
    def tensor(*values: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(*values, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _import_without_layers(folder: Path) -> None:
    """Let nano-vllm's engine be imported where the packages that its model needs are not installed."""
    root = ModuleType("nanovllm")
    root.__path__ = [str(folder / "nanovllm")]
    sys.modules["nanovllm"] = root
    for name, member in (
        ("config", "Config"), ("models.qwen3", "Qwen3ForCausalLM"), ("layers.sampler", "Sampler"),
        ("utils.loader", "load_model"),
    ):  # fmt: skip
        module = ModuleType(f"nanovllm.{name}")
        setattr(module, member, object)
        sys.modules[module.__name__] = module


def measure(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return microseconds of each call in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(rounds):
        for name, call in calls.items():
            begin = time.thread_time()
            seconds = call()
            taken = seconds if isinstance(seconds, float) else time.thread_time() - begin
            if repeat >= WARM_UP:
                times[name].append(taken * 1e6)
    return times


def main(given: list[str] | None = None) -> None:
    """Run all forms and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--nano-vllm", type=Path, help="a checkout of nano-vllm")
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    result = machine(args.device)
    rounds = WARM_UP + args.rounds
    tables, calls = forms(args.requests, args.length, args.block_size, rounds, args.device)
    if args.nano_vllm is not None:
        calls["nano-vllm, prepare_decode"] = nano_vllm(
            args.nano_vllm, tables, args.length, args.block_size, args.device
        )
    rows = []
    with torch.inference_mode():
        for name, times in measure(calls, rounds).items():
            median, least = statistics.median(times), min(times)
            rows.append((name, f"{median:.0f}", f"{least:.0f}"))
            result["rows"].append({"form": name, "median_us": median, "least_us": least})
    if args.json:
        write_result(args.json, result)
    print(f"{args.requests} requests of {args.length} tokens, blocks of {args.block_size}, {result['device']}")
    print(f"{versions_of(result)}\n")
    print(table(("form", "median, us", "least, us"), rows))


if __name__ == "__main__":
    main()
