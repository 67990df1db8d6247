"""Time cuts of the decode kernel and of the store for packed KV formats on one Hopper GPU, beside per-tensor FP8.

    python benchmarks/packed.py --json packed.json
    python benchmarks/packed.py --formats int4_per_token_head --what decode
    python benchmarks/packed.py --formats turboquant_4bit_nc,nvfp4 --what lone    # the cut in use, CTAs of one warp

Every output of an attention step is first compared with the reference on two of its requests, every store with its
bytes for 64 tokens. 32 query and 8 KV heads of 128, bf16, blocks of 16; CUDA-graph replays, each cut interleaved with
the FP8 cache alone, median of `--rounds`. The first cut of a format is the one in use: `TUNINGS` of
`vattn.kernels.hopper.decode_packed.launch`, `UPDATE_CUTS` of `vattn.kernels.triton.cache.packed_update`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vattn.ops.schemas  # noqa: F401  registers the ops
from benchmarks.kv_formats import BASELINE, BLOCK, FULL, Filled, beside_baseline
from benchmarks.timing import Timer
from vattn.backends import selector
from vattn.kernels.hopper.decode import launch as decode_fast
from vattn.kernels.hopper.decode.launch import Tuning
from vattn.kernels.hopper.decode_packed import launch as decode_packed
from vattn.kernels.triton.cache import packed_update
from vattn.kernels.variants import ALLOWED, using
from vattn.ops.arguments import CacheUpdateArgs
from vattn.ops.reference import attention as reference
from vattn.quantization.formats import KV_FORMATS

CUTS = tuple(
    Tuning(*cut, **more)
    for cut, more in (
        ((2, 4, 4), {}), ((2, 3, 6), {"max_registers": 168}), ((2, 4, 6), {"max_registers": 168}),
        ((2, 4, 8), {"max_registers": 128}), ((4, 4, 3), {"max_registers": 168}), ((2, 3, 4), {"slots": 2}),
        ((2, 4, 4), {"slots": 2}), ((2, 3, 6), {"slots": 2, "max_registers": 168}),
        ((2, 4, 6), {"slots": 2, "max_registers": 168}), ((2, 4, 8), {"slots": 2, "max_registers": 128}),
        ((2, 3, 8), {"slots": 2, "max_registers": 128}), ((4, 4, 3), {"slots": 2, "max_registers": 168}),
        ((4, 4, 4), {"slots": 2, "max_registers": 128}), ((1, 4, 12), {"slots": 2, "max_registers": 168}),
    )
)  # fmt: skip
"""Cuts of the decode kernel; those whose buffers don't fit a multiprocessor run fewer CTAs than they count on."""

UPDATES = ((1024, 1), (512, 1))
"""Columns and warps of a program of the store."""


def name_of(tuning: Tuning) -> str:
    return " ".join(f"{field} {value}" for field, value in asdict(tuning).items() if value)


LONE = (
    Tuning(1, 3, 16, max_registers=128), Tuning(1, 3, 12, slots=2, max_registers=168),
    Tuning(2, 3, 6, max_registers=168), Tuning(2, 3, 6, slots=2, max_registers=168),
)  # fmt: skip
"""Those of one warp a CTA, in which barriers cost nothing, and the same with two."""


SHORT_CUTS = (
    Tuning(1, 3, 8), Tuning(1, 4, 8), Tuning(2, 3, 4), Tuning(1, 3, 12, max_registers=168), Tuning(1, 3, 8, slots=2),
    Tuning(1, 2, 8, slots=2),
)  # fmt: skip
"""Those of codes of three bits, which need many registers."""


def decode_steps(
    cache: Filled, num_reqs: int, seq_len: int, query: Tensor, table: Tensor, lone: bool = False
) -> dict[str, Callable]:
    """Return the calls to time by name, each compared with the reference on two requests."""
    config = cache.config
    args = cache.step(seq_len, query, table)
    steps: dict[str, Callable] = {"in use": lambda: torch.ops.vattn.attention(*args)}
    two = args._replace(
        query=query[:2], query_start_loc=args.query_start_loc[:3], seq_lens=args.seq_lens[:2], block_table=table[:2]
    )
    fmt = KV_FORMATS[config.kv_cache_dtype]
    if not fmt.packed or not decode_packed.accepts(args, config):
        return steps
    expected, _ = reference.paged_attention(two, config)
    shape = selector.get_backend("TRITON_ATTN").plan_shape(config, num_reqs, *table.shape)
    cuts = SHORT_CUTS if any(part.bits == 3 for part in fmt.parts) else LONE if lone else (*CUTS, *LONE)
    for tuning in cuts:
        schedule = torch.empty(shape, dtype=torch.int32, device="cuda")
        decode_fast.plan(args.query_start_loc, args.seq_lens, schedule, config, tuning)
        own = args._replace(plan=[schedule], output=torch.full_like(args.output, float("nan")))
        try:
            decode_packed.decode(own, config, tuning)
            error = float((own.output[:2] - expected).norm() / expected.norm())
            if not error < 5e-3:
                raise ValueError(f"relative error {error:.1e}")
        except Exception as problem:  # a cut that fails is reported, the rest goes on
            print(f"{config.kv_cache_dtype}, {name_of(tuning)}: {problem!r}"[:300], file=sys.stderr)
            continue
        steps[name_of(tuning)] = lambda own=own, tuning=tuning: decode_packed.decode(own, config, tuning)
    return steps


def store_timers(cache: Filled, slots: Tensor) -> dict[str, Timer]:
    """Return timers of stores by name; each was compared with the reference's bytes for 64 tokens."""
    config, name = cache.config, cache.config.kv_cache_dtype
    in_use, few = packed_update.UPDATE_CUTS[name], slots[:64]
    expected, got = (torch.zeros_like(cache.storage) for _ in range(2))
    scales = (cache.scale, cache.scale)
    small = CacheUpdateArgs(cache.key[:64], cache.value[:64], expected, few, *scales, config.encode())
    reference.kv_cache_update(small, config)
    timers = {"in use": Timer([lambda: cache.store(slots)])}
    for way, cut in itertools.product(ALLOWED["packed_store"], UPDATES):
        packed_update.UPDATE_CUTS[name] = cut
        got.zero_()
        with using(packed_store=way):
            packed_update.update_packed(small._replace(kv_cache=got), config)
            if not torch.equal(got, expected):
                print(f"{name}, {way}, {cut}: {int((got != expected).sum())} bytes differ", file=sys.stderr)
            # Captured while this cut is in use.
            timers[f"{way} columns {cut[0]} warps {cut[1]}"] = Timer([lambda: cache.store(slots)])
    packed_update.UPDATE_CUTS[name] = in_use
    return timers


def main() -> None:
    """Measure; print one line for each format, cell and cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--formats", default="", help="comma separated; default: every packed one")
    parser.add_argument("--what", choices=("both", "decode", "lone", "store"), default="both")
    parser.add_argument("--rounds", type=int, default=5, help="of replays, of which the median counts")
    parser.add_argument("--compile", action="store_true", help="compile and compare all cuts, time none")
    options = parser.parse_args()
    names = options.formats.split(",") if options.formats else [n for n, fmt in KV_FORMATS.items() if fmt.packed]
    key, value = (torch.randn(FULL.tokens, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    base = Filled(BASELINE, key, value, FULL)
    slots = torch.randperm(FULL.blocks * BLOCK, device="cuda")[: FULL.tokens]
    inputs = {
        (num_reqs, seq_len): (
            torch.randn(num_reqs, 32, 128, device="cuda", dtype=torch.bfloat16),
            torch.randperm(FULL.blocks, device="cuda").int().view(num_reqs, seq_len // BLOCK),
        )
        for num_reqs, seq_len in FULL.cells
    }
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "us": {}}
    for name in names:
        cache = Filled(name, key, value, FULL)
        cells: dict[str, dict[str, Timer]] = {}
        if options.what in ("both", "store"):
            cells["store 8192"] = {BASELINE: Timer([lambda: base.store(slots)]), **store_timers(cache, slots)}
        for (num_reqs, seq_len), (query, table) in inputs.items() if options.what != "store" else ():
            calls = {BASELINE: decode_steps(base, num_reqs, seq_len, query, table)["in use"]}
            calls |= decode_steps(cache, num_reqs, seq_len, query, table, options.what == "lone")
            cells[f"{num_reqs} x {seq_len}"] = {label: Timer([call]) for label, call in calls.items()}
        for cell, timers in cells.items() if not options.compile else ():
            times = beside_baseline(timers, options.rounds)
            result["us"].setdefault(name, {})[cell] = times
            for label, (us, base_us) in sorted(times.items(), key=lambda item: item[1][0] / item[1][1]):
                print(f"{name} | {cell} | {label}: {us:.1f} us, {us / base_us:.3f}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
        del cache, cells
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
