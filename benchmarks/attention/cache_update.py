"""Time vattn's cache updates on one GPU, plain and with RoPE and query quantisation, after checking every result.

    python -m benchmarks.attention.cache_update --json out.json

Beside them in one run: FlashInfer's fused kernel where its package is importable, the code that Inductor generates for
the same steps, and a copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vattn.ops.schemas  # noqa: F401  registers the ops
from benchmarks.harness import add_row, machine, parser_of, table, time_in_turn, versions_of
from vattn.cache.layout import op_views
from vattn.config.attention import AttentionConfig
from vattn.config.rope import RopeConfig
from vattn.kernels.triton.attention.launch import update_kv_cache
from vattn.kernels.triton.cache import rope_update
from vattn.ops.arguments import CacheUpdateArgs, RopeUpdateArgs
from vattn.ops.reference import rope as rope_reference
from vattn.quantization.codecs import encode_kv, encode_query

HEADS, KV_HEADS, WIDTH, BLOCK, POSITIONS = 32, 8, 128, 16, 8192
TOKENS = (1, 64, 256, 2048, 8192)
ROTATED_BYTES, MAX_ROTATIONS = 300 << 20, 8
ROPE = RopeConfig(WIDTH, round_query=False)
CONFIG = AttentionConfig(
    HEADS, KV_HEADS, WIDTH, WIDTH, WIDTH**-0.5, "bfloat16", "fp8_e4m3", block_size=BLOCK, kv_scale="tensor",
    query_format="fp8_e4m3", query_scale="tensor",
)  # fmt: skip
ENCODED = CONFIG.encode()
HOW = (
    "32 query and 8 KV heads of 128, bf16 in, FP8 query and cache, blocks of 16 NHD, slots scattered; CUDA-graph "
    "replays over rotated inputs, kernels interleaved, median of 7"
)


class Case:
    """Inputs of one update of some tokens."""

    def __init__(self, tokens: int, seed: int) -> None:
        rng = torch.Generator("cuda").manual_seed(seed)
        sizes = [HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH]
        self.projected = torch.randn(tokens, sum(sizes), device="cuda", dtype=torch.bfloat16, generator=rng) * 3
        rows = [part.unflatten(1, (-1, WIDTH)) for part in self.projected.split(sizes, dim=1)]
        self.query, self.key, self.value = rows
        blocks = -(-tokens // BLOCK) + 8
        self.cache = torch.zeros(2, blocks, BLOCK, KV_HEADS, WIDTH, device="cuda", dtype=torch.uint8)
        self.block_ids = torch.randperm(blocks, device="cuda", generator=rng)
        at = torch.arange(tokens, device="cuda")
        self.slots = self.block_ids[at // BLOCK] * BLOCK + at % BLOCK
        self.positions = at % POSITIONS
        angles = torch.rand(POSITIONS, WIDTH // 2, device="cuda", generator=rng) * 7
        self.cos, self.sin = angles.cos(), angles.sin()
        self.query_out = torch.empty(tokens, HEADS, WIDTH, device="cuda", dtype=torch.float8_e4m3fn)
        self.scales = [torch.tensor([scale], device="cuda") for scale in (0.0313, 0.0413, 0.0217)]

    def rope_args(self) -> RopeUpdateArgs:
        return RopeUpdateArgs(
            self.query, self.key, self.value, self.cos, self.sin, self.positions, self.query_out,
            *op_views(self.cache, CONFIG), self.slots, None, None, *self.scales, ROPE.encode(), CONFIG.encode(),
        )  # fmt: skip

    def fused(self) -> Callable[[], None]:
        args = self.rope_args()
        return lambda: rope_update.rope_update(args, ROPE, CONFIG)

    def plain(self) -> Callable[[], None]:
        args = CacheUpdateArgs(
            self.key, self.value, *op_views(self.cache, CONFIG), self.slots, *self.scales[1:], CONFIG.encode()
        )
        return lambda: update_kv_cache(args, CONFIG)

    def generated(self, compiled: Any) -> Callable[[], None]:
        return lambda: compiled(
            self.projected, self.cos, self.sin, self.positions, self.cache, self.slots, *self.scales
        )

    def flashinfer(self) -> Callable[[], None]:
        from flashinfer.rope import rope_quantize_fp8_append_paged_kv_cache as run

        tokens, ints = self.query.shape[0], {"device": "cuda", "dtype": torch.int32}
        table = torch.cat((self.cos, self.sin), dim=1)
        pages = self.block_ids[: -(-tokens // BLOCK)].int()
        key_cache, value_cache = self.cache.view(torch.float8_e4m3fn)
        starts = torch.tensor([0, len(pages)], **ints)
        batch, at = torch.zeros(tokens, **ints), torch.arange(tokens, **ints)
        empty = torch.empty(tokens, HEADS, 0, device="cuda", dtype=torch.bfloat16)
        empty_key, empty_out = empty[:, :KV_HEADS].contiguous(), empty.to(torch.float8_e4m3fn)
        positions = self.positions.int()

        def call() -> None:
            run(
                self.query, self.key, empty, empty_key, self.value, table, positions, (key_cache, value_cache), pages,
                starts, batch, at, page_size=BLOCK, quant_scale_q=1 / 0.0313, quant_scale_kv=1 / 0.0413,
                q_rope_out=self.query_out, q_nope_out=empty_out,
            )  # fmt: skip

        return call

    def copy(self) -> Callable[[], None]:
        """Move as many bytes: read what is read, write half as many."""
        source, target = self.projected.view(torch.uint8), torch.empty_like(self.projected.view(torch.uint8))
        read = source.numel()
        moved = (read + read // 2) // 2
        a, b = source.view(-1)[:moved], target.view(-1)[:moved]
        return lambda: b.copy_(a)

    @property
    def bytes(self) -> int:
        """Bytes read once and written once, tables aside."""
        return self.projected.numel() * 3


def written_out(
    projected: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: Tensor, slots: Tensor, *scales: Tensor
) -> Tensor:
    """The same steps for Inductor: it fuses rotation and quantisation, and calls the cache update."""
    query, key, value = (
        part.unflatten(1, (-1, WIDTH))
        for part in projected.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=1)
    )
    cos, sin = cos[positions][:, None], sin[positions][:, None]

    def turn(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    codes = encode_query(turn(query), scales[0], KV_HEADS)
    torch.ops.vattn.kv_cache_update(turn(key), value, *op_views(cache, CONFIG), slots, scales[1], scales[2], ENCODED)
    return codes


def check(case: Case) -> dict[str, float]:
    """Compare the fused kernel with the reference; returns the shares of codes that differ, at most one step."""
    case.query_out.view(torch.uint8).fill_(0x7F)
    case.fused()()
    keys, values = op_views(torch.zeros_like(case.cache), CONFIG)
    args = case.rope_args()._replace(query_out=torch.empty_like(case.query_out), key_cache=keys, value_cache=values)
    update = rope_reference.rotate_all(args, ROPE, CONFIG)
    key_cache, value_cache = (view.view(torch.uint8) for view in op_views(case.cache, CONFIG))
    at = case.slots // BLOCK, case.slots % BLOCK
    pairs = {
        "query": (case.query_out, args.query_out),
        "key": (key_cache[at], encode_kv(update.key, "fp8_e4m3", case.scales[1])),
        "value": (value_cache[at], encode_kv(case.value, "fp8_e4m3", case.scales[2])),
    }
    shares = {}
    for name, (got, want) in pairs.items():
        apart = (got.view(torch.uint8).int() - want.view(torch.uint8).int()).abs()
        if int(apart.max()) > 1:
            raise AssertionError(f"{name}: codes are up to {int(apart.max())} steps apart")
        shares[name] = float((apart > 0).float().mean())
    return shares


def run_tokens(tokens: int, flashinfer: bool, compiled: Any) -> dict[str, Any]:
    """Check and time everything for one token count."""
    size = tokens * (HEADS + 2 * KV_HEADS) * WIDTH * 3
    cases = [Case(tokens, seed) for seed in range(max(2, min(MAX_ROTATIONS, ROTATED_BYTES // size)))]
    ways: dict[str, Callable[[Case], Callable[[], None]]] = {
        "fused": Case.fused, "plain": Case.plain, "copy": Case.copy,
    }  # fmt: skip
    if compiled is not None:
        ways["generated + plain"] = lambda case: case.generated(compiled)
    if flashinfer:
        ways["FlashInfer"] = Case.flashinfer
    row: dict[str, Any] = {"tokens": tokens, "bytes": cases[0].bytes, "differing": check(cases[0])}
    times, failed = time_in_turn({n: lambda make=make: [make(case) for case in cases] for n, make in ways.items()})
    return row | {"us": {name: round(us, 2) for name, us in times.items()}, "failed": failed}


def markdown(result: dict[str, Any]) -> str:
    """Return the results as a page."""
    columns = (
        "tokens", "fused us", "TB/s", "generated + plain us", "FlashInfer us", "copy us", "plain update us",
        "FlashInfer / fused", "generated / fused", "query, key, value codes that differ",
    )  # fmt: skip
    rows = []
    for row in result["rows"]:
        us = row["us"]
        fused, peer, generated = us["fused"], us.get("FlashInfer"), us.get("generated + plain")
        rows.append((
            row["tokens"], fused, f"{row['bytes'] / fused / 1e6:.2f}", generated or "-", peer or "-", us["copy"],
            us["plain"], f"{peer / fused:.2f}" if peer else "-", f"{generated / fused:.2f}" if generated else "-",
            ", ".join(f"{share:.0e}" for share in row["differing"].values()),
        ))  # fmt: skip
    return (
        f"# Cache updates on {result['device']}, {result['date']}\n\n"
        f"{versions_of(result)}; {HOW}. Fused: RoPE, FP8 query and cache write in one kernel. Generated + plain: "
        "Inductor's kernel for RoPE and the query, then the cache update. Copy: as many bytes moved by `copy_`. Codes "
        f"that differ from the reference are one step apart.\n\n{table(columns, rows)}"
    )


def main() -> None:
    """Run every token count and print one line each."""
    parser = parser_of(__doc__)
    parser.add_argument("--markdown", type=Path, help="write a page with a table")
    parser.add_argument("--flashinfer", action="store_true", help="time FlashInfer's kernel, which may be built first")
    parser.add_argument("--no-compile", action="store_true", help="leave out the code that Inductor generates")
    options = parser.parse_args()
    compiled = None if options.no_compile else torch.compile(written_out, dynamic=True)
    result = machine()
    with torch.no_grad():
        for tokens in TOKENS:
            add_row(result, run_tokens(tokens, options.flashinfer, compiled), options.json)
            if options.markdown:
                options.markdown.write_text(markdown(result))


if __name__ == "__main__":
    main()
