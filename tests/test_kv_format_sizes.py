"""Every format at every head size, layout and block size, in the interpreter: bytes stored, and rows read back.

Slow as a whole: `pytest -m slow tests/test_kv_format_sizes.py`. One size of each format runs by default.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import vattn
from tests.conformance.compare import run_and_compare
from tests.support import make_config, random_paged_batch
from vattn.config import AttentionConfig
from vattn.formats import KV_FORMATS, MODEL_DTYPES
from vattn.ops.cache_layout import kv_cache_dtype, kv_cache_shape

pytest.importorskip("triton")

FORMATS = [name for name, fmt in KV_FORMATS.items() if fmt.quantised or fmt.packed]
SIZES = range(8, 257, 8)
BLOCKS = (8, 16, 24, 40, 64, 256)


def config_of(name: str, size: int, size_v: int, index: int) -> AttentionConfig:
    """Return a config whose layout, block size, dtype and kind of scales take turns."""
    kinds = ("tensor", "head") if KV_FORMATS[name].quantised else ("none",)
    return make_config(
        num_heads=4, num_kv_heads=2, head_size=size, head_size_v=size_v, kv_cache_dtype=name,
        dtype=list(MODEL_DTYPES)[index % 3], block_size=BLOCKS[index % len(BLOCKS)],
        kv_cache_layout=("NHD", "HND")[index // 2 % 2], kv_scale=kinds[index % len(kinds)], backend="TRITON_ATTN",
    )  # fmt: skip


def rows(width: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return `[20, 2, width]`: normal rows of many magnitudes, and one of each kind that has a rule of its own."""
    x = torch.randn(20, 2, width, generator=torch.Generator().manual_seed(seed))
    x[:8] *= torch.logspace(-6, 5, 8)[:, None, None]
    x[8], x[9], x[10], x[11] = 0.0, -2.5, 1e-42, 1e-30
    x[12, 0, 0], x[12, 1, width - 1] = torch.nan, torch.inf
    x[13, 0, width // 2], x[13, 1] = -torch.inf, 1e30
    x[14] *= 1e7
    x[15, :, 1:] = 0.0
    x[16] = x[16].abs()
    x[17] = 65504.0
    x[18, :, ::2], x[18, :, 1::2] = 3.0, -3.0
    return x.to(dtype)


def check_store(config: AttentionConfig, seed: int) -> None:
    """The kernel stores the reference's bytes, and writes to no other."""
    dtype, slots = MODEL_DTYPES[config.dtype], torch.randperm(3 * config.block_size)[:19]
    key, value = rows(config.head_size, seed, dtype), rows(config.head_size_v, seed + 1, dtype)
    count = min(19, len(slots))
    slots = torch.cat([slots[:count], torch.tensor([-1])])
    key, value = (torch.cat([x[:count], x[-1:]]) for x in (key, value))
    scale = None
    if config.kv_scale != "none":
        scale = torch.tensor([0.013, 0.0071])[: 2 if config.kv_scale == "head" else 1]
    stored = []
    for backend in ("TRITON_ATTN", "TORCH_SDPA"):
        one = config.replace(backend=backend)
        storage = torch.empty(kv_cache_shape(one, 3), dtype=kv_cache_dtype(one))
        storage.view(torch.uint8).fill_(0xA5)
        torch.ops.vattn.kv_cache_update(key, value, storage, slots, scale, scale, one.encode())
        stored.append(storage.view(torch.uint8))
    differ = (stored[0] != stored[1]).flatten().nonzero()
    assert not len(differ), f"{len(differ)} bytes differ, the first at {int(differ[0])}: {config.encode()}"


def check_load(config: AttentionConfig, seed: int) -> None:
    """Decodes and a short prefill over stored rows equal the reference."""
    batch = random_paged_batch(config, [1, 3], [config.block_size + 5, 7], seed=seed)
    assert run_and_compare(batch), config.encode()


def runs(config: AttentionConfig) -> bool:
    return not vattn.explain(config, "cpu").refusals["TRITON_ATTN"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_size_below_its_tile(name: str) -> None:
    index = FORMATS.index(name)
    pairs = [(8, 16), (24, 8), (40, 56), (48, 16)]
    config = next(c for pair in pairs if runs(c := config_of(name, *pair, index)))
    check_store(config, index)
    check_load(config, index)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_every_size(name: str, size: int) -> None:
    """Keys of every size with values of the same and of two others."""
    found = 0
    others = (size, SIZES[(size * 5 // 8 + 3) % 32], SIZES[(size * 3 // 8 + 17) % 32])
    for turn, size_v in itertools.product(range(2), dict.fromkeys(others)):
        index = size // 8 + 3 * turn + 7 * (size_v // 8) + FORMATS.index(name)
        config = config_of(name, size, size_v, index)
        if runs(config):
            found += 1
            check_store(config, index)
            check_load(config, index)
    if not found:
        assert config.head_size & (config.head_size - 1) or size % 16, "refused without a reason of its own"
        pytest.skip(f"{name} takes no keys of {size} columns")
