"""Latent decode beside FlashMLA and FlashInfer: every cell's kernels in turn, in one process, by graph replays.

`python -m benchmarks.mla --peers FOLDER` looks for `flashmla.so` and `flashmla_ext.so` in a folder; FlashInfer is used
where it is installed. Prints one line a cell: microseconds, the ratio of the best peer to vattn, and bytes a second of
the cache. `--check` compares every kernel with fp32 first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Timer, interleave
from vattn.mla_config import MLAConfig
from vattn.ops.mla_arguments import MLAAttentionArgs

LATENT, ROPE, BLOCK = 512, 64, 64
SCALE = 192**-0.5

CELLS: tuple[tuple[int, int, int, int], ...] = (
    (16, 1, 8192, 1), (16, 8, 8192, 1), (16, 64, 8192, 1), (16, 128, 4096, 1),
    (128, 1, 8192, 1), (128, 8, 8192, 1), (128, 32, 4096, 1), (128, 128, 4096, 1),
    (32, 64, 4096, 1), (64, 32, 4096, 1), (16, 32, 4096, 2), (16, 32, 4096, 4), (128, 16, 4096, 2),
    (16, 64, -4096, 1), (128, 32, -4096, 1),
)  # fmt: skip
"""Heads, requests, length (negative: skewed, up to that), tokens of the query."""


class Cell:
    """Inputs of one cell."""

    def __init__(self, heads: int, batch: int, length: int, tokens: int, device: str = "cuda") -> None:
        rng = torch.Generator(device=device).manual_seed(0)
        self.heads, self.batch, self.tokens = heads, batch, tokens
        longest = abs(length)
        lengths = torch.full((batch,), longest, dtype=torch.int32, device=device)
        if length < 0:
            # A few long requests among many short ones.
            share = torch.rand(batch, generator=rng, device=device) ** 4
            lengths = (tokens + share * (longest - tokens)).int()
            lengths[0] = longest
        self.seq_lens, self.per_request = lengths, -(-longest // BLOCK)
        blocks = batch * self.per_request
        self.cache = torch.empty(blocks + 1, BLOCK, LATENT + ROPE, device=device, dtype=torch.bfloat16)
        for part in self.cache.split(4096):
            part.copy_(0.3 * torch.randn(part.shape, generator=rng, device=device))
        ids = torch.randperm(blocks, generator=rng, device=device).int() + 1
        self.table = ids.view(batch, self.per_request)
        shape = (batch * tokens, heads, LATENT + ROPE)
        self.query = torch.randn(shape, generator=rng, device=device).bfloat16()
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cache that one step must read."""
        return int(self.seq_lens.sum()) * (LATENT + ROPE) * self.cache.itemsize

    def expected(self, request: int) -> Tensor:
        """Return one request's result in fp32, `[tokens, N, L]`."""
        length = int(self.seq_lens[request])
        rows = self.cache[self.table[request].long()].flatten(0, 1)[:length].float()
        query = self.query[request * self.tokens : (request + 1) * self.tokens].float()
        scores = torch.einsum("qnd,sd->qns", query, rows) * SCALE
        position = length - self.tokens + torch.arange(self.tokens, device=rows.device)
        hidden = torch.arange(length, device=rows.device)[None, :] > position[:, None]
        return torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), -1) @ rows[:, :LATENT]

    def error(self, result: Tensor) -> float:
        """Return the worst relative L2 error over a few requests."""
        result = result.view(self.batch, self.tokens, self.heads, LATENT).float()
        errors = []
        for request in sorted({0, self.batch // 2, self.batch - 1}):
            expected = self.expected(request)
            errors.append(float((result[request] - expected).norm() / expected.norm()))
        return max(errors)


def ours(cell: Cell) -> Callable[[], Tensor]:
    """Return a step of vattn's decode path, its schedule made before as a builder does."""
    from vattn.ops.gluon import mla_launch

    config = MLAConfig(cell.heads, 128, ROPE, 128, LATENT, SCALE, "bfloat16", "bfloat16", block_size=BLOCK)
    shape = mla_launch.plan_shape(len(cell.query), cell.batch, cell.query.device)
    schedule = torch.zeros(shape, dtype=torch.int32, device="cuda")
    mla_launch.plan(cell.starts, cell.seq_lens, schedule, config)
    none: dict[str, Any] = dict.fromkeys(MLAAttentionArgs._fields)
    args = MLAAttentionArgs(**{
        **none, "query": cell.query, "kv_cache": cell.cache, "query_start_loc": cell.starts, "seq_lens": cell.seq_lens,
        "block_table": cell.table, "plan": [schedule], "config": config.encode(),
    })  # fmt: skip
    return lambda: mla_launch.attend_latents(cell.query, args, config)


def flash_mla(cell: Cell) -> Callable[[], Tensor]:
    """Return a step of FlashMLA with its metadata made before."""
    decode = torch.ops._flashmla_C.dense_decode_fwd
    query, cache = cell.query.view(cell.batch, cell.tokens, cell.heads, -1), cell.cache.unsqueeze(2)
    _, _, metadata, splits = decode(query, cache, LATENT, cell.seq_lens, cell.table, SCALE, True, None, None, None)

    def step() -> Tensor:
        return decode(query, cache, LATENT, cell.seq_lens, cell.table, SCALE, True, metadata, splits, None)[0]

    return step


def flashinfer_mla(cell: Cell) -> Callable[[], Tensor]:
    """Return a step of FlashInfer's MLA wrapper (FA3), planned before."""
    import flashinfer

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), use_cuda_graph=False, backend="fa3"
    )
    used = (cell.seq_lens + BLOCK - 1) // BLOCK
    pages = torch.arange(cell.per_request, device="cuda") < used[:, None]
    wrapper.plan(
        qo_indptr=cell.starts, kv_indptr=torch.nn.functional.pad(used.cumsum(0), (1, 0)).int(),
        kv_indices=cell.table[pages].contiguous(), kv_len_arr=cell.seq_lens, num_heads=cell.heads, head_dim_ckv=LATENT,
        head_dim_kpe=ROPE, page_size=BLOCK, causal=cell.tokens > 1, sm_scale=SCALE, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip
    query, rope = cell.query[..., :LATENT].contiguous(), cell.query[..., LATENT:].contiguous()
    latents, ropes = cell.cache[..., :LATENT].contiguous(), cell.cache[..., LATENT:].contiguous()
    return lambda: wrapper.run(query, rope, latents, ropes)


def peers(folder: Path) -> dict[str, Callable[[Cell], Callable[[], Tensor]]]:
    """Return the peers that are found."""
    found: dict[str, Callable[[Cell], Callable[[], Tensor]]] = {}
    if (folder / "flashmla.so").exists():
        for name in ("flashmla.so", "flashmla_ext.so"):
            if (folder / name).exists():
                torch.ops.load_library(str(folder / name))
        found["flashmla"] = flash_mla
    try:
        import flashinfer  # noqa: F401

        found["flashinfer"] = flashinfer_mla
    except ImportError as error:
        print(f"FlashInfer is left out: {error!r}", file=sys.stderr)
    return found


def run_cell(shape: tuple[int, int, int, int], found: dict[str, Any], check: bool) -> dict[str, Any]:
    """Time one cell: vattn alone first, then in turn with its peers."""
    cell, timers, errors = Cell(*shape), {}, {}
    names = ("heads", "batch", "length", "tokens")
    row: dict[str, Any] = dict(zip(names, shape, strict=True))
    for name, make in {"vattn": ours, **found}.items():
        try:
            step = make(cell)
            if check:
                errors[name] = round(cell.error(step()), 5)
            timers[name] = Timer([step])
            if name == "vattn":
                alone = interleave({name: timers[name]})[name]
                print(json.dumps({**row, "vattn alone, us": round(alone, 2), "error": errors}), flush=True)
        except Exception as error:  # A peer that cannot run a cell is left out of it.
            print(f"{name} in {shape}: {str(error)[:200]!r}", file=sys.stderr)
            torch.cuda.synchronize()
    times = interleave(timers)
    best = min((time for name, time in times.items() if name != "vattn"), default=float("nan"))
    own = times.get("vattn", float("nan"))
    row |= {
        "us": {name: round(time, 2) for name, time in times.items()}, "best_peer_over_vattn": round(best / own, 3),
        "TB/s": round(cell.cached_bytes / own / 1e6, 2), "error": errors,
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def run_apart(number: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Time one cell in a process of its own: what a peer breaks there stays there."""
    command = [sys.executable, "-m", "benchmarks.mla", "--inline", "--only", str(number), "--peers", options.peers]
    done = subprocess.run([*command, *["--check"] * options.check], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return next((row for row in reversed(rows) if "us" in row), None)


def main() -> int:
    """Run the cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path("."), help="folder with FlashMLA's libraries")
    parser.add_argument("--check", action="store_true", help="compare with fp32 first")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cells")
    parser.add_argument("--inline", action="store_true", help="all cells in this process")
    options = parser.parse_args()
    numbers = range(len(CELLS)) if options.only is None else options.only
    found, rows = peers(options.peers) if options.inline else {}, []
    for number in numbers:
        row = run_cell(CELLS[number], found, options.check) if options.inline else run_apart(number, options)
        rows += [] if row is None else [row]
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
