"""Every KV format at every head size, layout and block size, to the byte: rows stored by the kernels, and read back.

    python -m tests.conformance.format_sizes                     # forty cases of each format, drawn by VATTN_FUZZ_SEED
    python -m tests.conformance.format_sizes --all --part 0 2    # the first half of all of them
    python -m tests.conformance.format_sizes --formats nvfp4 --only 17

A case compares the bytes that Triton's kernel writes, and those that it must leave alone, with the reference codec's;
of packed formats the rows that the kernels' loads make of these bytes with what the codec reads, bit for bit; and, one
case of each value size, attention over stored rows. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

if __name__ == "__main__" and "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Before Triton is imported; tests have it of their own.

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.conformance.compare import run_and_compare
from tests.conformance.fuzz import failure_of, fuzz_seed
from tests.support import make_config, random_paged_batch
from vattn.backends import selector
from vattn.cache.layout import PackedRows, kv_cache_dtype, kv_cache_shape, op_views, packed_views
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.kernels.triton.cache.packed_rows import TRITON_CODECS, part_constants
from vattn.quantization.formats import KV_FORMATS, MODEL_DTYPES, PackedPart
from vattn.quantization.packed import decode_rows

FORMATS = [name for name, fmt in KV_FORMATS.items() if fmt.quantised or fmt.packed]
SIZES = range(8, 513, 8)
BLOCKS = (8, 16, 24, 40, 64, 256)
NUM_BLOCKS, TOKENS, HEADS = 3, 5, 6
"""Of a case's cache, its rows, and its KV heads: rows of all heads of a token are one program's up to 128 columns."""


def config_of(name: str, size: int, size_v: int, index: int) -> AttentionConfig:
    """Return a config whose layout, block size, dtype and kind of scales take turns."""
    kinds = ("tensor", "head") if KV_FORMATS[name].quantised else ("none",)
    return make_config(
        num_heads=HEADS, num_kv_heads=HEADS, head_size=size, head_size_v=size_v, kv_cache_dtype=name,
        dtype=list(MODEL_DTYPES)[index // 2 % 3], block_size=BLOCKS[index // 2 % len(BLOCKS)],
        kv_cache_layout=("NHD", "HND")[index % 2], kv_scale=kinds[index // 2 % len(kinds)], backend="TRITON_ATTN",
    )  # fmt: skip


def is_accepted(config: AttentionConfig) -> bool:
    """Return whether the Triton backend runs a config."""
    return not selector.explain(config, DeviceInfo.of("cpu")).refusals["TRITON_ATTN"]


def cases(name: str) -> list[AttentionConfig]:
    """Return the configs of a format: values of every size, each with keys of three sizes, in both layouts."""
    fmt = KV_FORMATS[name]
    keys = [size for size in SIZES if not fmt.head_size_problems(size, 0)]
    values = [size for size in SIZES if not fmt.head_size_problems(0, size)]
    found = []
    for turn, size_v in enumerate(values):
        same = size_v if size_v in keys else keys[turn % len(keys)]
        others = keys[(5 * turn + 3) % len(keys)], keys[(3 * turn + 17) % len(keys)]
        for pair, size in enumerate(dict.fromkeys((same, *others))):
            for layout in range(2):
                found.append(config_of(name, size, size_v, 2 * (turn + 5 * pair + FORMATS.index(name)) + layout))
    return found


def rows(width: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return `[tokens, heads, width]`: normal rows of many magnitudes, and one of each kind that has its own rule."""
    x = torch.randn(TOKENS * HEADS, width, generator=torch.Generator().manual_seed(seed))
    x[:8] *= torch.logspace(-6, 5, 8)[:, None]
    x[8], x[9], x[10], x[11] = 0.0, -2.5, 1e-42, 1e-30
    x[12, 0], x[13, width - 1], x[14, width // 2], x[15] = torch.nan, torch.inf, -torch.inf, 1e30
    x[16], x[17], x[18, 1:] = x[16] * 1e7, x[17].abs(), 0.0
    x[19], x[20, ::2], x[20, 1::2] = 65504.0, 3.0, -3.0
    # A kind goes with another head in every case.
    return x.roll(seed, 0).view(TOKENS, HEADS, width).to(dtype)


def stored(config: AttentionConfig, backend: str, slots: Tensor, seed: int, scale: Tensor | None) -> Tensor:
    """Return the raw storage `[bytes]` after rows have been written into what held one byte everywhere."""
    config, device, dtype = config.replace(backend=backend), slots.device, MODEL_DTYPES[config.dtype]
    storage = torch.empty(kv_cache_shape(config, NUM_BLOCKS), dtype=kv_cache_dtype(config), device=device)
    storage.view(torch.uint8).fill_(0xA5)
    widths = (config.head_size, config.head_size_v)
    key, value = (rows(width, seed + i, dtype).to(device) for i, width in enumerate(widths))
    torch.ops.vattn.kv_cache_update(key, value, *op_views(storage, config), slots, scale, scale, config.encode())
    return storage


def check_bytes(config: AttentionConfig, seed: int, device: str = "cpu") -> None:
    """The kernel stores the reference's bytes and writes to no other; its loads read what the reference does.

    Raises:
        AssertionError: says how much differs and where.
    """
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(NUM_BLOCKS * config.block_size, generator=generator)[:TOKENS].to(device)
    slots[TOKENS // 2] = -1
    scale = None
    if config.kv_scale != "none":
        scale = torch.tensor([0.013, 0.0071, 1.0, 2e-5, 300.0, 0.11], device=device)
        scale = scale[: HEADS if config.kv_scale == "head" else 1].contiguous()
    got, expected = (stored(config, name, slots, seed, scale) for name in ("TRITON_ATTN", "TORCH_SDPA"))
    differ = (got.view(torch.uint8) != expected.view(torch.uint8)).flatten().nonzero()
    assert not len(differ), f"{len(differ)} bytes stored differ, the first at {int(differ[0])}"
    if KV_FORMATS[config.kv_cache_dtype].packed:
        for of_values, part in enumerate(packed_views(got, config)):
            check_load(config, bool(of_values), part, slots[slots >= 0])


def check_load(config: AttentionConfig, of_values: bool, stored_rows: PackedRows, slots: Tensor) -> None:
    """Rows that the kernels' load makes of bytes equal those of the codec, and what lies beyond them is finite."""
    part = KV_FORMATS[config.kv_cache_dtype].parts[of_values]
    width = config.head_size_v if of_values else config.head_size
    block, inside = slots // config.block_size, slots % config.block_size
    scales = None if stored_rows.scales is None else stored_rows.scales[block, inside]
    expected = decode_rows(
        stored_rows.codes[block, inside], scales, config.kv_cache_dtype, of_values, width, rotated=True
    )
    got = loaded(stored_rows, slots, config.block_size, part, width)
    same = (got[..., :width] == expected) | (got[..., :width].isnan() & expected.isnan())
    what = "values" if of_values else "keys"
    assert bool(same.all()), f"{int((~same).sum())} columns of {what} read differ, the first at {(~same).nonzero()[0]}"
    finite = expected.isfinite().all(-1, keepdim=True)
    assert bool((got[..., width:].isfinite() | ~finite).all()), f"columns beyond the {width} of {what} are not finite"


@triton.jit
def _load_kernel(
    codes, scales, slots, out, BLOCK_SIZE: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, LOAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0))
    head = tl.arange(0, TILE)[:, None]
    known = head < HEADS
    place = (slot // BLOCK_SIZE) * CODES[0] + (slot % BLOCK_SIZE) * CODES[1] + head * CODES[2]
    scale_place = scales
    if scales is not None:
        scale_place = scales + (slot // BLOCK_SIZE) * SCALES[0] + (slot % BLOCK_SIZE) * SCALES[1] + head * SCALES[2]
    x, factor = LOAD(codes + place, scale_place, known, PART, NATIVE)
    column = tl.arange(0, PART[1])[None, :]
    tl.store(out + (tl.program_id(0) * HEADS + head) * PART[1] + column, x * factor, mask=known)


def loaded(stored_rows: PackedRows, slots: Tensor, block_size: int, part: PackedPart, width: int) -> Tensor:
    """Return fp32 rows `[slots, heads, columns of a tile]` as the kernels read them, in the stored basis."""
    constants, scales = part_constants(part, width), stored_rows.scales
    out = torch.full((len(slots), HEADS, constants[1]), torch.nan, device=slots.device)
    _load_kernel[(len(slots),)](
        stored_rows.codes, scales, slots, out, block_size, tuple(stored_rows.codes.stride()[:3]),
        (1, 1, 1) if scales is None else tuple(scales.stride()[:3]), HEADS, 8, constants,
        TRITON_CODECS[part.codec].load, slots.is_cuda,
        # The codec rounds a product and then a sum.
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def check_attention(config: AttentionConfig, seed: int, device: str = "cpu") -> None:
    """A decode and a short prefill over stored rows equal the reference.

    Raises:
        Mismatch: says where they do not.
    """
    config = config.replace(num_heads=4, num_kv_heads=2)
    batch = random_paged_batch(config, [1, 3], [config.block_size + 5, 7], seed=seed, device=device)
    assert run_and_compare(batch), "refused"


def check_case(config: AttentionConfig, index: int, device: str = "cpu") -> int:
    """Check a case; return how many bytes were compared, those that had to stay as they were included."""
    check_bytes(config, index, device)
    if index % 6 == 0:
        check_attention(config, index, device)
    shape = kv_cache_shape(config, NUM_BLOCKS)
    return torch.Size(shape).numel() * kv_cache_dtype(config).itemsize


def drawn(name: str, count: int, seed: int) -> Iterator[tuple[int, AttentionConfig]]:
    """Yield so many cases of a format with their numbers, the same ones for the same seed."""
    found = list(enumerate(cases(name)))
    yield from random.Random(f"{seed} {name}").sample(found, min(count, len(found)))


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a run; whoever asks for cases that there are not is told so by argparse, and exits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every case; otherwise a sample by VATTN_FUZZ_SEED")
    which.add_argument("--count", type=int, default=40, help="cases of each format in a sample")
    which.add_argument("--only", type=int, help="the one case of this number")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="cases I, I + N and so on"
    )
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    part, parts = options.part
    if not 0 <= part < parts:
        parser.error(f"argument --part: {part} {parts}; I is from 0 to N - 1")
    if options.count < 1:
        parser.error(f"argument --count: {options.count}; at least 1")
    if options.only is not None:
        if parts > 1:
            parser.error("argument --only: one case has no parts; leave --part out")
        for name in options.formats:
            last = len(cases(name)) - 1
            if not 0 <= options.only <= last:
                parser.error(f"argument --only: {options.only}; {name} has the cases 0 to {last}")
    return options


def main() -> int:
    """Check and count; return 1 if anything was wrong."""
    options = read_options()
    count, wrong, done = 1 << 30 if options.all else options.count, 0, Counter[str]()
    for name in options.formats:
        start, chosen = time.monotonic(), sorted(drawn(name, count, fuzz_seed()), key=lambda c: c[0])
        if options.only is not None:
            chosen = [(options.only, cases(name)[options.only])]
        for index, config in itertools.islice(chosen, options.part[0], None, options.part[1]):
            problem = failure_of(lambda: done.update(compared=check_case(config, index, options.device)))  # noqa: B023
            done[name] += 1
            if problem is not None:
                wrong += 1
                print(f"WRONG --formats {name} --only {index}: {problem}\n    {config.encode()}", flush=True)
        print(f"{name}: {done[name]} cases in {time.monotonic() - start:.0f} s", flush=True)
    print(f"{sum(done[name] for name in options.formats)} cases, {done['compared']} bytes of caches, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
