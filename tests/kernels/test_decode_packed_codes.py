"""The assembly that unpacks codes of packed KV formats, interpreted here line by line, against its plain twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs

from tests.kernels.ptx_emulation import run_ptx
from vattn.kernels.hopper.decode_packed import codes as decode_packed_codes
from vattn.kernels.hopper.decode_packed import codes_3bit as decode_packed_short
from vattn.kernels.hopper.decode_packed import codes_e2m1 as decode_packed_e2m1
from vattn.kernels.hopper.decode_packed.codes import unpack
from vattn.quantization.packed.bit_packing import pack_codes
from vattn.quantization.packed.turboquant import CENTROIDS

ASSEMBLY = {"UNPACK_INT8": "int8", "UNPACK_NIBBLES": "int4", "UNPACK_CODEBOOK": "codebook"}


@triton.jit
def unpack_kernel(codes, results, COUNT: tl.constexpr, CODEC: tl.constexpr, ASSEMBLY: tl.constexpr):
    from_codes = tl.arange(0, COUNT)
    a, b, c, d = unpack(tl.load(codes + from_codes), CODEC, True, ASSEMBLY)
    tl.store(results + from_codes, a)
    tl.store(results + COUNT + from_codes, b)
    tl.store(results + 2 * COUNT + from_codes, c)
    tl.store(results + 3 * COUNT + from_codes, d)


@pytest.mark.parametrize(("name", "codec"), ASSEMBLY.items())
def test_assembly_equals_the_plain_twin(name: str, codec: str) -> None:
    if not knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    ptx = getattr(decode_packed_codes, name).value
    count = 2 if codec == "int8" else 4
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(-1, 2)
    halves = torch.cat((halves, halves.flip(1)))
    words = halves.contiguous().view(torch.int32).flatten().numpy().view(np.uint32)
    registers = run_ptx(ptx, {f"${count}": words})
    got = torch.tensor(np.stack([registers[f"${j}"] for j in range(count)]).view(np.int32)).view(torch.int16)
    plain = torch.empty(4, halves.numel(), dtype=torch.float16)
    unpack_kernel[(1,)](halves.flatten(), plain, COUNT=halves.numel(), CODEC=codec, ASSEMBLY=False)
    expected = plain[:count].view(torch.int16)
    if codec == "codebook":
        # Results of assembly hold pairs of columns: four of them are those of the first int16, four of the second's.
        columns = expected.view(4, -1, 2).permute(1, 2, 0).reshape(-1, 4, 2).permute(1, 0, 2)
        expected = columns.reshape(4, -1)
    assert torch.equal(got.reshape(count, -1), expected)


@pytest.mark.parametrize("name", ["UNPACK_KEYS", "UNPACK_VALUES"])
def test_e2m1_codes_times_scales(name: str) -> None:
    """Every pair of int16 under scales that are each a byte, to the bit; NaN is NaN and zeros keep their signs."""
    of_keys, drawn = name.endswith("KEYS"), np.random.default_rng(5)
    codes = drawn.integers(0, 1 << 16, (1 << 15, 4), dtype=np.uint32)
    codes[:, 0] = np.arange(1 << 15) * 2 + (np.arange(1 << 15) & 1)
    bytes_ = drawn.integers(0, 256, (1 << 15, 2, 4), dtype=np.uint32)
    words = (bytes_ << (8 * np.arange(4, dtype=np.uint32))).sum(-1).astype(np.uint32)
    group = drawn.integers(0, 2, 1 << 15).astype(np.uint32)
    inputs = {"$8": codes[:, 0] | codes[:, 1] << np.uint32(16), "$9": codes[:, 2] | codes[:, 3] << np.uint32(16)}
    inputs |= {f"${10 + i}": words[:, 0 if of_keys else i % 2].copy() for i in range(4)}
    inputs |= {f"${14 + i}": (group + 2 * (i // 2)).astype(np.uint32) * 0x11 + 0x40 for i in range(4)}
    registers = run_ptx(getattr(decode_packed_e2m1, name).value, inputs)
    rows = np.arange(1 << 15)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for i in range(4):
        byte = bytes_[rows, 0 if of_keys else i % 2, group + 2 * (i // 2)].astype(np.uint8)
        scale = torch.from_numpy(byte).view(torch.float8_e4m3fn).double().numpy()
        for j in range(4):
            code = codes[:, i] >> np.uint32(4 * j) & np.uint32(15)
            expected = np.where(code & 8, -1.0, 1.0) * values[code & 7] * scale * 2.0**-14
            got = registers[f"${2 * j + i // 2}"].view(np.float16).reshape(-1, 2)[:, i % 2]
            assert np.array_equal(got.astype(np.float64), expected, equal_nan=True)
            known = ~np.isnan(expected)
            assert np.array_equal(np.signbit(got)[known], np.signbit(expected)[known])


def short_rows() -> tuple[torch.Tensor, np.ndarray]:
    """Return codes of three bits, and their rows as the codec packs them, wider by 16 bytes of something."""
    codes = torch.randint(8, (4000, 128), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    return codes, torch.nn.functional.pad(pack_codes(codes, 3), (0, 16), value=0xA7).numpy()


def test_centroids_of_three_bits() -> None:
    """Every column comes out once, at the result that begins in its word."""
    codes, rows = short_rows()
    words = rows.view(np.uint32)
    first = np.broadcast_to(np.array([-32 * i % 3 for i in range(12)], np.uint32), (4000, 12))
    inputs = {"$6": words[:, :12].ravel(), "$7": words[:, 1:13].ravel(), "$8": first.ravel()}
    registers = run_ptx(decode_packed_short.UNPACK_SHORT_CODEBOOK.value, inputs)
    got = np.stack([registers[f"${j}"] for j in range(6)], 1).view(np.float16).reshape(4000, 12, 12)
    expected = torch.tensor(CENTROIDS[3])[codes].half().numpy()
    found = 0
    for word in range(12):
        begins = slice((32 * word + 2) // 3, (32 * word + 34) // 3)
        count = begins.stop - begins.start
        found += count
        assert np.array_equal(got[:, word, :count], expected[:, begins])
    assert found == 128 and np.isfinite(got).all()


def test_integers_of_three_bits() -> None:
    """The parts of every column add up to it, in both rows of a register."""
    codes, rows = short_rows()
    halves = rows.view(np.uint16).astype(np.uint32)[:, :24]
    pairs = halves[0::2] | (halves[1::2] << np.uint32(16))
    first = np.broadcast_to(np.array([-16 * i % 3 for i in range(24)], np.uint32), pairs.shape)
    registers = run_ptx(decode_packed_short.UNPACK_SHORT.value, {"$6": pairs.ravel(), "$7": first.ravel()})
    parts = np.stack([registers[f"${j}"] for j in range(6)]).view(np.float16).reshape(6, 2000, 24, 2)
    parts = parts.transpose(0, 1, 3, 2).reshape(6, 4000, 8, 3).astype(np.float64) * 2.0**24
    parts /= np.array([1, 8, 64, 1, 8, 1]).reshape(6, 1, 1, 1)
    a, b, c = parts.transpose(3, 0, 1, 2)
    columns = [*a[:5], a[5] + 2 * b[5], *b[:4], b[4] + 4 * c[5], *c[:5]]
    assert np.array_equal(np.stack(columns, -1).reshape(4000, 128), codes.numpy())
