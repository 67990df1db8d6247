"""Stores that pack eight codes into a word: their assembly, interpreted here line by line, against the codec."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.ptx_emulation import run_ptx
from vattn.kernels.triton.cache import packed_words
from vattn.kernels.triton.cache.packed_update import choose_store, has_words
from vattn.kernels.triton.common.tiles import Limits
from vattn.quantization.formats import KV_FORMATS
from vattn.quantization.packed.turboquant import BOUNDARIES, CENTROIDS, pairwise_sum


@pytest.mark.parametrize("bits", [3, 4])
def test_eight_codes_and_the_sum_of_their_squares(bits: int) -> None:
    """Of columns on boundaries of either sign, of their neighbours, of zeros and of others."""
    draw, count, half = np.random.default_rng(bits), 40_000, 1 << (bits - 1)
    unit = np.exp(4 * draw.standard_normal(count)).astype(np.float32)
    bounds = np.stack([unit * np.float32(bound) for bound in BOUNDARIES[bits]])
    near = np.take_along_axis(bounds, draw.integers(0, len(bounds), (8, count)), 0)
    kinds = [near, np.nextafter(near, np.float32(9e9)), np.nextafter(near, np.float32(-9e9)), np.zeros_like(near)]
    kinds += [unit * draw.standard_normal((8, count)).astype(np.float32) for _ in range(4)]
    y = np.choose(draw.integers(0, 8, (8, count)), kinds)
    tables = getattr(packed_words, f"TABLES_{bits}").value
    columns = [*y, *(unit * np.float32(bound) for bound in BOUNDARIES[bits][half:])]
    inputs = {f"${2 + i}": column.view(np.uint32) for i, column in enumerate(columns)}
    inputs |= {
        f"${2 + len(columns) + k}": np.full(count, table & 0xFFFFFFFF, np.uint32) for k, table in enumerate(tables)
    }
    registers = run_ptx(getattr(packed_words, f"WORD_{bits}").value, inputs)
    codes = (y[:, None] >= bounds[None]).sum(1).astype(np.uint32)
    assert np.array_equal(registers["$0"], np.bitwise_or.reduce([codes[e] << np.uint32(bits * e) for e in range(8)]))
    levels = torch.tensor(CENTROIDS[bits])[torch.tensor(codes.astype(np.int64)).T]
    assert np.array_equal(registers["$1"].view(np.float32), pairwise_sum(levels * levels)[:, 0].numpy())


def test_words_are_stored_in_caches_that_begin_at_one() -> None:
    native, parts = Limits(132, 227 << 10, native_fp8=True), KV_FORMATS["turboquant_4bit_nc"].parts
    storage = torch.zeros(4, 64, dtype=torch.uint8)
    assert has_words((storage[:, 4:], storage[:, 8:]), parts, native)
    assert not has_words((storage[:, 2:], storage[:, 8:]), parts, native)
    assert not has_words((storage, storage[:, 18:]), parts, native)
    odd = storage.view(-1)[:252].view(4, 63)
    assert not has_words((odd, odd[:, 4:]), parts, native)
    assert not has_words((storage, storage), KV_FORMATS["turboquant_k8v4"].parts, native)
    assert not has_words((storage, storage), parts, Limits(8, 1 << 16, native_fp8=False))
    assert choose_store(parts[0], True) is packed_words.store_codebook
