"""Time what each KV format costs: a store of 8192 tokens, and decode steps, beside the per-tensor FP8 cache.

    python -m benchmarks.attention.kv_formats [--peers all] [--json out.json]
    python -m benchmarks.attention.kv_formats --tiny    # on a CPU, in plain torch: whether it runs, no figure

Every output is first compared with the reference on two of its requests. 32 query and 8 KV heads of 128, bf16, blocks
of 16; CUDA-graph replays, each format or peer interleaved with the FP8 cache alone, median of 7; in brackets what it
takes of the time of that. Peers are kernels of other libraries on an FP8 cache of the same shape, and those of
`kv_format_peers` on copies of the very rows; the ones that did not run are named with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from benchmarks.attention.kv_format_peers import DECODE_PEERS, STORE_PEERS, DecodePeer, StorePeer
from benchmarks.harness import machine, parser_of, table, timer
from vattn.backends import selector
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.cli.bench.cell import Cell
from vattn.cli.bench.peers import NotThisCellError, Peer, choose_peers
from vattn.cli.bench.report import write_result
from vattn.cli.bench.shapes import LayerShape, Work
from vattn.cli.bench.timing import Timer, WallTimer, interleave
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs
from vattn.ops.reference import attention as reference
from vattn.quantization.formats import KV_FORMATS

AnyTimer = Timer | WallTimer
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
        torch.ops.vattn.kv_cache_update(
            self.key, self.value, *op_views(self.storage, self.config), slots, *scales, self.config.encode()
        )

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
            query, *op_views(self.storage, config), starts, lengths, table, torch.empty_like(query),
            None, None, None, None, self.scale, self.scale, None, None, None, None, None, None, None, plan, None,
            config.encode(),
        )  # fmt: skip
        torch.ops.vattn.attention(*args)
        two = args._replace(query=query[:2], query_start_loc=starts[:3], seq_lens=lengths[:2], block_table=table[:2])
        expected, _ = reference.paged_attention(two, config)
        error = float((args.output[:2] - expected).norm() / expected.norm())
        if not error < 5e-3:
            raise SystemExit(f"{config.kv_cache_dtype}: relative error {error:.1e}")
        return args


class Peers:
    """Timers of other libraries' kernels that are right, and of the others what is wrong."""

    def __init__(self, names: list[str], size: Size) -> None:
        self.names, self.size, self.problems = names, size, dict[str, str]()

    def chosen(self, key: str) -> bool:
        """Return whether the command line asks for what has this key."""
        return "none" not in self.names and ("all" in self.names or key in self.names)

    def timer(self, name: str, make: Callable[[], tuple[Callable[[], object], float, float]]) -> dict[str, AnyTimer]:
        """Return a timer by its name; nothing, and a note, if `make` throws or its error is over its limit."""
        try:
            call, error, limit = make()
            if not error < limit:
                raise ValueError(f"relative error {error:.1e}")
            return {name: timer([call], self.size.device)}
        except NotThisCellError as refusal:
            self.problems[name] = f"refuses: {refusal}"
        except Exception as thrown:  # A peer that throws stops nothing.
            self.problems[name] = f"{type(thrown).__name__}: {str(thrown).splitlines()[0] if str(thrown) else ''}"
        return {}

    def decodes(self, seq_len: int, caches: dict[str, Filled], steps: dict[str, AttentionArgs]) -> dict[str, AnyTimer]:
        """Return timers of a decode step: over a cache in FP8 of their own, and over copies of our rows."""
        num_reqs, found = steps[BASELINE].seq_lens.shape[0], dict[str, AnyTimer]()
        work = Work(f"decode {num_reqs}x{seq_len}", ((1, seq_len),) * num_reqs)
        cell = Cell(self.size.shape, work, "fp8", BLOCK, 0, self.size.device)

        def over_own(peer: Peer) -> tuple[Callable[[], object], float, float]:
            call = peer.make(cell)
            return call, cell.error(call()), peer.limit[1]

        def over_ours(peer: DecodePeer) -> tuple[Callable[[], object], float, float]:
            call, right = peer.make(caches[peer.cache], steps[peer.cache]), steps[peer.cache].output.float()
            return call, float((call().float() - right).norm() / right.norm()), peer.limit

        for peer in choose_peers(self.names):
            name, problem = f"{peer.name}, {BASELINE}", peer.problem()
            if problem is None:
                found |= self.timer(name, lambda peer=peer: over_own(peer))
            else:
                self.problems[name] = problem
        for other in DECODE_PEERS:
            if self.chosen(other.key):
                found |= self.timer(f"{other.name}, {other.cache}", lambda peer=other: over_ours(peer))
        return found

    def stores(self, caches: dict[str, Filled], slots: Tensor) -> dict[str, AnyTimer]:
        """Return timers of stores, whose keys are compared with the keys as they came: within one step of codes."""
        found = dict[str, AnyTimer]()

        def make(peer: StorePeer) -> tuple[Callable[[], object], float, float]:
            cache = caches[peer.cache]
            call, read = peer.make(cache, slots)
            right = cache.key.float()
            # NVFP4's is 0.095 of normal values, FP8's 0.027.
            return call, float((read() - right).norm() / right.norm()), 0.11 if peer.cache == "nvfp4" else 0.03

        for peer in STORE_PEERS:
            if self.chosen(peer.key):
                found |= self.timer(f"{peer.name}, {peer.cache}", lambda peer=peer: make(peer))
        return found


def beside_baseline(timers: Mapping[str, AnyTimer], replays: int) -> dict[str, tuple[float, float]]:
    """Return the microseconds of each timer and those of the FP8 cache, the two of them interleaved alone.

    Kernels that are bound by instructions run up to 15 % slower where others of them have made the clock fall.
    """
    base, found = timers[BASELINE], dict[str, tuple[float, float]]()
    for name, other in timers.items():
        base.microseconds.clear()
        times = interleave({BASELINE: base, name: other}, replays)
        found[name] = times[name], times[BASELINE]
    return found


def main() -> None:
    """Measure and print one line for each format and peer."""
    parser = parser_of(__doc__)
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
    peers = Peers(options.peers, size)
    cells: dict[str, dict[str, AnyTimer]] = {}
    for num_reqs, seq_len in size.cells:
        query = torch.randn(num_reqs, layer.heads, layer.head_size, device=size.device, dtype=torch.bfloat16)
        blocks = torch.randperm(size.blocks, device=size.device).int().view(num_reqs, seq_len // BLOCK)
        steps = {name: cache.step(seq_len, query, blocks) for name, cache in caches.items()}
        cells[f"{num_reqs} x {seq_len}"] = {
            **{n: timer([lambda a=args: torch.ops.vattn.attention(*a)], size.device) for n, args in steps.items()},
            **peers.decodes(seq_len, caches, steps),
        }
    stores = {name: timer([lambda c=cache: c.store(slots)], size.device) for name, cache in caches.items()}
    cells[f"store {size.tokens}"] = {**stores, **peers.stores(caches, slots)}
    times = {cell: beside_baseline(timers, options.replays) for cell, timers in cells.items()}
    rows = []
    for name in dict.fromkeys(name for us in times.values() for name in us):
        found = [
            f"{us[name][0]:.1f} us ({us[name][0] / us[name][1]:.3f})" if name in us else "-" for us in times.values()
        ]
        stored = KV_FORMATS[name.split(", ")[-1]].token_bytes(layer.head_size, layer.head_size)
        rows.append((name, stored, *found))
    print(table(("format", "bytes a token and head", *cells), rows), end="")
    for name, problem in peers.problems.items():
        print(f"- {name}: {problem}")
    if options.json:
        result = machine(size.device) | {"not timed": peers.problems}
        result["rows"] = [{"cell": cell, "us, and us of fp8_e4m3": us} for cell, us in times.items()]
        write_result(options.json, result)


if __name__ == "__main__":
    main()
