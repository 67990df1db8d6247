"""The assembly that unpacks codes of packed KV formats, interpreted here line by line, against its plain twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs

from tests.ptx_emulation import run_ptx
from vattn.ops.triton import decode_packed_codes
from vattn.ops.triton.decode_packed_codes import unpack

ASSEMBLY = {"int8": "UNPACK_INT8", "int4": "UNPACK_NIBBLES", "codebook": "UNPACK_CODEBOOK"}


@triton.jit
def unpack_kernel(codes, results, COUNT: tl.constexpr, CODEC: tl.constexpr, ASSEMBLY: tl.constexpr):
    from_codes = tl.arange(0, COUNT)
    a, b, c, d = unpack(tl.load(codes + from_codes), CODEC, True, ASSEMBLY)
    tl.store(results + from_codes, a)
    tl.store(results + COUNT + from_codes, b)
    tl.store(results + 2 * COUNT + from_codes, c)
    tl.store(results + 3 * COUNT + from_codes, d)


@pytest.mark.parametrize("codec", ASSEMBLY)
def test_assembly_equals_the_plain_twin(codec: str) -> None:
    if not knobs.runtime.interpret:
        pytest.skip("needs Triton's interpreter")
    ptx = getattr(decode_packed_codes, ASSEMBLY[codec]).value
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
