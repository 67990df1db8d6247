"""A few PTX instructions on arrays, for inline assembly of kernels that is to be right without a GPU.

A register is an array of uint32, a predicate one of booleans; an element of them is a thread.
"""

from __future__ import annotations

import re

import numpy as np
import torch

Registers = dict[str, np.ndarray]


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


def funnel(low: np.ndarray, high: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """`shf.r.wrap.b32`: the lower half of two registers shifted right as one."""
    pool = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    return (pool >> (amount & np.uint32(31)).astype(np.uint64)).astype(np.uint32)


def _floats(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32)


def convert_e4m3(pair: np.ndarray) -> np.ndarray:
    """`cvt.rn.f16x2.e4m3x2`: two bytes as two fp16."""
    codes = torch.from_numpy((pair & np.uint32(0xFFFF)).astype(np.uint16).view(np.uint8).copy())
    return codes.view(torch.float8_e4m3fn).half().numpy().view(np.uint32)


OPERATIONS = {
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "shf.r.wrap.b32": funnel,
    "add.u32": np.add,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.rn.f16x2": lambda a, b: (a.view(np.float16) * b.view(np.float16)).view(np.uint32),
    "cvt.rn.f16x2.e4m3x2": convert_e4m3,
    "add.rn.f32": lambda a, b: (_floats(a) + _floats(b)).view(np.uint32),
    "mul.rn.f32": lambda a, b: (_floats(a) * _floats(b)).view(np.uint32),
    "fma.rn.f32": lambda a, b, c: (
        (_floats(a).astype(np.float64) * _floats(b) + _floats(c)).astype(np.float32).view(np.uint32)
    ),
    "neg.f32": lambda a: a ^ np.uint32(1 << 31),
    "abs.f32": lambda a: a & np.uint32((1 << 31) - 1),
    "min.f32": lambda a, b: np.fmin(_floats(a), _floats(b)).view(np.uint32),
    "min.xorsign.abs.f32": lambda a, b: (
        np.fmin(np.abs(_floats(a)), np.abs(_floats(b))).view(np.uint32) | ((a ^ b) & np.uint32(1 << 31))
    ),
    "setp.lt.f32": lambda a, b: _floats(a) < _floats(b),
    "setp.ge.f32": lambda a, b: _floats(a) >= _floats(b),
    "prmt.b32": permute,
}


def run_ptx(ptx: str, inputs: Registers) -> Registers:
    """Return the registers after a block of assembly without branches."""
    registers = dict(inputs)
    shape = next(iter(inputs.values())).shape

    def value(name: str) -> np.ndarray:
        constant = re.fullmatch(r"-?(0x[0-9a-fA-F]+|0f[0-9a-fA-F]{8}|\d+)", name)
        return np.full(shape, int(name.replace("0f", "0x"), 0) & 0xFFFFFFFF, np.uint32) if constant else registers[name]

    for line in ptx.strip("{} \n").split(";"):
        guard, line = re.fullmatch(r"(?:@(\S+)\s)?(.*)", line.strip(), re.DOTALL).groups()
        instruction, _, rest = line.strip().partition(" ")
        names = [name.strip() for name in rest.split(",")]
        if not instruction or instruction.startswith("."):
            continue
        if "{" in rest:
            halves = [name.strip() for name in re.search(r"{(.*)}", rest)[1].split(",")]
            if rest.startswith("{"):
                word = value(names[-1])
                registers |= {halves[0]: word & np.uint32(0xFFFF), halves[1]: word >> np.uint32(16)}
            else:
                registers[names[0]] = value(halves[0]) | (value(halves[1]) << np.uint32(16))
            continue
        target, operands = names[0], [value(n) for n in names[1:] if not n.startswith("%")]
        if instruction.startswith("mov"):
            # Lane 31's mask has all bits but the last; the code is to be right in every lane.
            result = operands[0] if operands else np.full(shape, 0x7FFFFFFF, np.uint32)
        elif instruction.startswith("lop3"):
            result = look_up(*operands[:3], int(names[4], 0))
        elif instruction.startswith("selp"):
            result = np.where(operands[2], operands[0], operands[1])
        else:
            result = OPERATIONS[instruction](*operands)
        registers[target] = result if guard is None else np.where(registers[guard], result, registers[target])
    return registers
