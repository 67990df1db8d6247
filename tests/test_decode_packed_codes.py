"""The assembly that unpacks codes of packed KV formats, interpreted here line by line, against its plain twin."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs

from vattn.ops.triton import decode_packed_codes
from vattn.ops.triton.decode_packed_codes import unpack

Registers = dict[str, np.ndarray]

ASSEMBLY = {"int8": "UNPACK_INT8", "int4": "UNPACK_NIBBLES", "codebook": "UNPACK_CODEBOOK"}


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """`prmt.b32`: bytes of two registers by the nibbles of a third; bit 3 repeats the byte's sign."""
    pool = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((pool >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64))) & np.uint64(255)).astype(np.uint32)
        byte = np.where(nibble & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
        result |= byte << np.uint32(8 * place)
    return result


def look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """`lop3.b32`: any function of three bits."""
    result = np.zeros_like(a)
    for case in range(8):
        if table >> case & 1:
            terms = (x if case >> bit & 1 else ~x for x, bit in ((a, 2), (b, 1), (c, 0)))
            result |= np.bitwise_and.reduce(list(terms))
    return result


def run_ptx(ptx: str, source: str, words: np.ndarray) -> Registers:
    """Return the registers after a block of assembly whose input is `source`."""
    registers: Registers = {source: words}

    def value(name: str) -> np.ndarray:
        constant = re.fullmatch(r"0x[0-9a-fA-F]+|\d+", name)
        return np.full_like(words, int(name, 0)) if constant else registers[name]

    for line in ptx.strip("{} \n").split(";"):
        instruction, _, rest = line.strip().partition(" ")
        names = [name.strip() for name in rest.split(",")]
        if not instruction or instruction.startswith("."):
            continue
        target, operands = names[0], [value(n) for n in names[1:] if not n.startswith("%")]
        kind = instruction.split(".")[0]
        if kind == "mov":
            # Lane 31's mask has all bits but the last; the code is to be right in every lane.
            registers[target] = operands[0] if operands else np.full_like(words, 0x7FFFFFFF)
        elif kind == "prmt":
            registers[target] = permute(*operands)
        elif kind == "lop3":
            registers[target] = look_up(*operands[:3], int(names[4], 0))
        else:
            run = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shr": np.right_shift}
            registers[target] = {**run, "shl": np.left_shift}[kind](*operands)
    return registers


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
    registers = run_ptx(ptx, f"${count}", words)
    got = torch.tensor(np.stack([registers[f"${j}"] for j in range(count)]).view(np.int32)).view(torch.int16)
    plain = torch.empty(4, halves.numel(), dtype=torch.float16)
    unpack_kernel[(1,)](halves.flatten(), plain, COUNT=halves.numel(), CODEC=codec, ASSEMBLY=False)
    expected = plain[:count].view(torch.int16)
    if codec == "codebook":
        # Results of assembly hold pairs of columns: four of them are those of the first int16, four of the second's.
        columns = expected.view(4, -1, 2).permute(1, 2, 0).reshape(-1, 4, 2).permute(1, 0, 2)
        expected = columns.reshape(4, -1)
    assert torch.equal(got.reshape(count, -1), expected)
