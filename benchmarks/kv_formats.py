"""Time what each KV format costs: a store of 8192 tokens, and decode steps, beside the per-tensor FP8 cache.

    python benchmarks/kv_formats.py [--peers all]
    python benchmarks/kv_formats.py --tiny    # on a CPU, in plain torch: whether it runs, no figure

Every output is first compared with the reference on two of its requests. 32 query and 8 KV heads of 128, bf16, blocks
of 16; CUDA-graph replays, all formats of a cell interleaved, median of 7. Peers are kernels of other libraries on an
FP8 cache of the same shape, and FlashInfer's fa2 on the NVFP4 rows themselves, where it can compile that kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vattn.ops.schemas  # noqa: F401  registers the ops
from vattn.backends import selector
from vattn.bench.cell import Cell
from vattn.bench.peers import NotThisCellError, Peer, choose_peers
from vattn.bench.shapes import LayerShape, Work
from vattn.bench.timing import Timer, WallTimer, interleave
from vattn.config import AttentionConfig
from vattn.formats import KV_FORMATS
from vattn.ops import reference
from vattn.ops.arguments import AttentionArgs
from vattn.ops.cache_layout import kv_cache_dtype, kv_cache_shape, packed_views

BASELINE = "fp8_e4m3"
BLOCK = 16


@dataclass(frozen=True)
class Size:
    """What is timed where.

    Attributes:
        shape: of the layer.
        cells: requests and their lengths.
        blocks: of a cache; every cell reads all of them.
        tokens: of a store.
        backend: that runs it.
    """

    shape: LayerShape
    cells: tuple[tuple[int, int], ...]
    blocks: int
    tokens: int
    device: str
    backend: str


FULL = Size(LayerShape("32/8 of 128", 32, 8, 128), ((32, 8192), (256, 1024)), 16384, 8192, "cuda", "TRITON_ATTN")
TINY = Size(LayerShape("4/2 of 32", 4, 2, 32), ((3, 64), (2, 96)), 12, 24, "cpu", "TORCH_SDPA")


class Filled:
    """A cache of one format that is full of normal keys and values."""

    def __init__(self, name: str, key: Tensor, value: Tensor, size: Size) -> None:
        kind, layer = "tensor" if KV_FORMATS[name].quantised else "none", size.shape
        self.config = AttentionConfig(
            layer.heads, layer.kv_heads, layer.head_size, layer.head_size, layer.head_size**-0.5, "bfloat16", name,
            BLOCK, kv_scale=kind, backend=size.backend,
        )  # fmt: skip
        device = size.device
        self.storage = torch.zeros(
            kv_cache_shape(self.config, size.blocks), dtype=kv_cache_dtype(self.config), device=device
        )
        self.scale = torch.full((1,), 0.02, device=device) if KV_FORMATS[name].quantised else None
        self.key, self.value = key, value
        for first in range(0, size.blocks * BLOCK, size.tokens):
            self.store(torch.arange(first, first + size.tokens, device=device))

    def store(self, slots: Tensor) -> None:
        """Write the keys and values into slots."""
        scales = (self.scale, self.scale)
        torch.ops.vattn.kv_cache_update(self.key, self.value, self.storage, slots, *scales, self.config.encode())

    def step(self, seq_len: int, query: Tensor, table: Tensor) -> AttentionArgs:
        """Return a decode step with its schedule, after comparing two of its rows with the reference."""
        num_reqs, device = table.shape[0], query.device
        starts = torch.arange(num_reqs + 1, device=device, dtype=torch.int32)
        lengths = torch.full((num_reqs,), seq_len, device=device, dtype=torch.int32)
        config, plan = self.config, []
        shape = selector.get_backend(config.backend).plan_shape(config, num_reqs, *table.shape)
        if shape:
            plan = [torch.empty(shape, dtype=torch.int32, device=device)]
            torch.ops.vattn.plan(starts, lengths, plan[0], config.encode())
        args = AttentionArgs(
            query, self.storage, starts, lengths, table, torch.empty_like(query), None, None, None, None, self.scale,
            self.scale, None, None, None, None, None, None, None, plan, None, config.encode(),
        )  # fmt: skip
        torch.ops.vattn.attention(*args)
        two = args._replace(query=query[:2], query_start_loc=starts[:3], seq_lens=lengths[:2], block_table=table[:2])
        expected, _ = reference.paged_attention(two, config)
        error = float((args.output[:2] - expected).norm() / expected.norm())
        if not error < 5e-3:
            raise SystemExit(f"{config.kv_cache_dtype}: relative error {error:.1e}")
        return args


def timer(call: Callable[[], object], size: Size) -> Timer | WallTimer:
    return (Timer if size.device == "cuda" else WallTimer)([call])


def flashinfer_nvfp4(cache: Filled, args: AttentionArgs) -> Callable[[], Tensor]:
    """Return FlashInfer's step over the same NVFP4 rows, codes and block scales copied out of the blocks."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    config = cache.config
    rows = packed_views(cache.storage, config)
    codes = tuple(part.codes.contiguous() for part in rows)
    scales = tuple(part.scales.contiguous().view(torch.float8_e4m3fn) for part in rows)
    num_reqs, columns = args.block_table.shape
    pages = torch.arange(num_reqs + 1, dtype=torch.int32) * columns
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device=args.query.device), "NHD", backend="fa2"
    )
    wrapper.plan(
        qo_indptr=args.query_start_loc.cpu(), paged_kv_indptr=pages, paged_kv_indices=args.block_table.flatten(),
        paged_kv_last_page_len=torch.full((num_reqs,), BLOCK, dtype=torch.int32), num_qo_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads, head_dim_qk=config.head_size, page_size=BLOCK, causal=True,
        sm_scale=config.scale, q_data_type=torch.bfloat16, kv_data_type=torch.uint8,
    )  # fmt: skip
    output, given = torch.empty_like(args.query), float(cache.scale)

    def step() -> Tensor:
        wrapper.run(args.query, codes, k_scale=given, v_scale=given, kv_cache_sf=scales, out=output)
        return output

    return step


def peer_timers(
    names: list[str], seq_len: int, size: Size, nvfp4: tuple[Filled, AttentionArgs]
) -> dict[str, Timer | WallTimer]:
    """Return timers of other libraries' kernels that are right; say of the others what is wrong.

    Args:
        nvfp4: our cache in that format and its step.
    """
    num_reqs, found = nvfp4[1].seq_lens.shape[0], {}
    work = Work(f"decode {num_reqs}x{seq_len}", ((1, seq_len),) * num_reqs)
    cell = Cell(size.shape, work, "fp8", BLOCK, 0, size.device)
    right = nvfp4[1].output.float()

    def error_of_nvfp4(output: Tensor) -> float:
        return float((output.float() - right).norm() / right.norm())

    peers: list[tuple[str, Peer, Callable[[], Callable[[], Tensor]], Callable[[Tensor], float]]] = []
    for peer in choose_peers(names):
        peers.append((f"{peer.name}, FP8 cache", peer, lambda peer=peer: peer.make(cell), cell.error))
        if peer.name == "FlashInfer fa2":
            peers.append((f"{peer.name}, NVFP4 cache", peer, lambda: flashinfer_nvfp4(*nvfp4), error_of_nvfp4))
    for name, peer, make, error_of in peers:
        problem = peer.problem()
        if problem is None:
            try:
                call = make()
                error = error_of(call())
                problem = None if error < peer.limit[1] else f"relative error {error:.1e}"
            except NotThisCellError as refusal:
                problem = f"refuses: {refusal}"
            except Exception as thrown:  # A peer that throws stops nothing.
                problem = f"{type(thrown).__name__}: {str(thrown).splitlines()[0] if str(thrown) else ''}"
        if problem is None:
            found[name] = timer(call, size)
        else:
            print(f"{name}: {problem}", file=sys.stderr)
    return found


def main() -> None:
    """Measure and print one line for each format and peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", default=["none"], help="all, none, or fa3, flashinfer, xqa")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU, to see that it runs")
    parser.add_argument("--replays", type=int, default=7)
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    layer = size.shape
    key, value = (
        torch.randn(size.tokens, layer.kv_heads, layer.head_size, device=size.device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    names = [BASELINE, *(name for name, fmt in KV_FORMATS.items() if fmt.packed)]
    caches = {name: Filled(name, key, value, size) for name in names}
    slots = torch.randperm(size.blocks * BLOCK, device=size.device)[: size.tokens]
    stores = {name: timer(lambda c=cache: c.store(slots), size) for name, cache in caches.items()}
    cells: dict[str, dict[str, Timer | WallTimer]] = {f"store {size.tokens}": stores}
    for num_reqs, seq_len in size.cells:
        query = torch.randn(num_reqs, layer.heads, layer.head_size, device=size.device, dtype=torch.bfloat16)
        table = torch.randperm(size.blocks, device=size.device).int().view(num_reqs, seq_len // BLOCK)
        steps = {name: cache.step(seq_len, query, table) for name, cache in caches.items()}
        cells[f"{num_reqs} x {seq_len}"] = {
            **{name: timer(lambda a=args: torch.ops.vattn.attention(*a), size) for name, args in steps.items()},
            **peer_timers(options.peers, seq_len, size, (caches["nvfp4"], steps["nvfp4"])),
        }
    medians = {cell: interleave(timers, options.replays) for cell, timers in cells.items()}
    print("| format | bytes a token and head | " + " | ".join(cells) + " |")
    print("|---" * (len(cells) + 2) + "|")
    for name in dict.fromkeys(name for us in medians.values() for name in us):
        times = [f"{us[name]:.1f} us ({us[name] / us[BASELINE]:.2f})" if name in us else "-" for us in medians.values()]
        kind = name if name in KV_FORMATS else "nvfp4" if "NVFP4" in name else BASELINE
        stored = KV_FORMATS[kind].token_bytes(layer.head_size, layer.head_size)
        print(f"| {name} | {stored} | " + " | ".join(times) + " |")


if __name__ == "__main__":
    main()
