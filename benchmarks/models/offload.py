"""Rates of offloading and reloading blocks, beside what plain copies between pinned memory and the device reach.

    python -m benchmarks.models.offload [--json out.json] [--layers 32] [--tokens 4096 16384]

Bytes are those of whole blocks over all layers; times are wall times from the call until the device has finished.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

import vattn
from benchmarks.harness import add_row, machine, parser_of
from vattn.cli.bench.report import write_result
from vattn.kv_transfer import FileConnector, HostMemoryConnector, KVTransfer, TransferRequest, block_keys

REPEATS = 5
BLOCK_SIZE = 16


def wall_times(calls: Iterable[Callable[[], object]]) -> list[float]:
    """Return the wall times of calls, the device's work included."""
    times = []
    for call in calls:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def seconds(call: Callable[[], object]) -> float:
    """Return the median wall time of a call; the first one is not counted."""
    return statistics.median(wall_times([call] * (REPEATS + 1))[1:])


def copy_rates(size: int = 64 << 20, count: int = 16) -> dict[str, float]:
    """Return GB/s of plain copies of large pinned tensors."""
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = torch.empty(size, dtype=torch.uint8, device="cuda")

    def run(to_device: bool) -> None:
        for index in range(count):
            source, target = (host[index % 2], device) if to_device else (device, host[index % 2])
            target.copy_(source, non_blocking=True)

    return {
        name: size * count / seconds(lambda to=to: run(to)) / 1e9  # type: ignore[misc]
        for name, to in (("host_to_device", True), ("device_to_host", False))
    }


def make_model(layers: int) -> nn.ModuleList:
    """Return layers with 8 KV heads of 128."""
    return nn.ModuleList(vattn.Attention(32, 128, 128**-0.5, 8, prefix=f"layers.{i}") for i in range(layers))


def measure(transfer: KVTransfer, tokens: int, scattered: bool) -> dict[str, Any]:
    """Return GB/s of saving and loading the blocks of that many tokens."""
    count = tokens // BLOCK_SIZE
    size = count * sum(transfer.page_bytes.values())
    blocks = list(range(1, count + 1))
    if scattered:
        random.Random(0).shuffle(blocks)
    # New keys every time: what is held already would not be written again.
    keys = [block_keys(range(tokens), BLOCK_SIZE, salt=f"{tokens} {scattered} {run}") for run in range(REPEATS + 1)]
    saves = wall_times(partial(transfer.offload, "a", names, blocks) for names in keys)[1:]
    loads = wall_times(partial(transfer.reload, "a", keys[-1], blocks) for _ in keys)[1:]
    save, load = statistics.median(saves), statistics.median(loads)
    return {
        "tokens": tokens,
        "bytes": size,
        "blocks": "scattered" if scattered else "in order",
        "offload_gb_s": size / save / 1e9,
        "reload_gb_s": size / load / 1e9,
        "offload_ms": [round(each * 1e3, 2) for each in saves],
        "reload_ms": [round(each * 1e3, 2) for each in loads],
    }


def overlap(transfer: KVTransfer, tokens: int) -> dict[str, float]:
    """Return times of a load alone, of layers of matrix products that take as long, and of both in one step."""
    count = tokens // BLOCK_SIZE
    keys, blocks = block_keys(range(tokens), BLOCK_SIZE, salt="overlap"), list(range(1, count + 1))
    transfer.offload("a", keys, blocks)
    request = TransferRequest("a", tuple(keys), tuple(blocks))
    load = seconds(lambda: transfer.reload("a", keys, blocks))
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one = seconds(lambda: [a @ b for _ in range(64)]) / 64
    products = max(1, round(load / len(transfer.points) / one))

    def compute(loads: list[TransferRequest]) -> None:
        with transfer.step(loads=loads):
            for point in transfer.points:
                transfer.before_layer(point)
                for _ in range(products):
                    a @ b

    return {
        "load_ms": load * 1e3,
        "compute_ms": seconds(lambda: compute([])) * 1e3,
        "both_ms": seconds(lambda: compute([request])) * 1e3,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--files", type=int, default=2048, help="tokens for the file connector, 0 for none")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    rates = copy_rates()
    results = {**rates, **machine()}
    print(f"plain copies: {rates['host_to_device']:.1f} GB/s to the device, {rates['device_to_host']:.1f} GB/s back")
    model = make_model(arguments.layers)
    blocks = max(arguments.tokens) // BLOCK_SIZE
    cache = vattn.allocate_kv_cache(model, num_blocks=blocks + 1, device="cuda", dtype=torch.bfloat16)
    transfer = KVTransfer(model, cache, HostMemoryConnector(2 * blocks * cache.bytes_per_block))
    for tokens in arguments.tokens:
        for scattered in (False, True):
            row = measure(transfer, tokens, scattered)
            row["offload_share"] = row["offload_gb_s"] / rates["device_to_host"]
            row["reload_share"] = row["reload_gb_s"] / rates["host_to_device"]
            shown = (
                f"{tokens} tokens, blocks {row['blocks']}: offload {row['offload_gb_s']:.1f} GB/s "
                f"({row['offload_share']:.0%}), reload {row['reload_gb_s']:.1f} GB/s ({row['reload_share']:.0%})"
            )
            add_row(results, row, arguments.json, shown)
    results["overlap"] = overlap(transfer, max(arguments.tokens))
    print("overlap: " + ", ".join(f"{name} {value:.1f}" for name, value in results["overlap"].items()))
    transfer.detach()
    if arguments.files:
        with tempfile.TemporaryDirectory() as folder:
            transfer = KVTransfer(model, cache, FileConnector(folder))
            results["files"] = measure(transfer, arguments.files, False)
            print("files: " + ", ".join(f"{name} {value}" for name, value in results["files"].items()))
            transfer.detach()
    if arguments.json:
        write_result(arguments.json, results)


if __name__ == "__main__":
    main()
