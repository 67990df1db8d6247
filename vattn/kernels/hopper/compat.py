"""Gluon names that differ between Triton 3.6 and 3.9, under one name each."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""`load_box(descriptor, coordinates, barrier, destination)`: start a bulk tensor copy into shared memory."""

store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""`store_box(descriptor, coordinates, source)`: start a bulk tensor copy out of shared memory."""

copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""`copy_rows(destination, pointers, mask=...)`: start copying into shared memory, zeros where the mask says no."""

HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

block_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Synchronise the threads of a partition."""


@gluon.jit
def as_boxes(memory, boxes, COUNT: gl.constexpr):
    """Return shared memory as `[COUNT, *box]` of a tensor descriptor, in the descriptor's layout."""
    if HAS_REINTERPRET:
        return memory.reinterpret(memory.dtype, [COUNT] + boxes.block_shape, boxes.layout)
    else:
        return memory._reinterpret(memory.dtype, [COUNT] + boxes.block_shape, boxes.layout)


@gluon.jit
def as_words(memory, COUNT: gl.constexpr):
    """Return shared memory of 32-bit words as `[COUNT, 1]`."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if HAS_REINTERPRET:
        return memory.reinterpret(memory.dtype, [COUNT, 1], layout)
    else:
        return memory._reinterpret(memory.dtype, [COUNT, 1], layout)


@gluon.jit
def as_tiles(memory, DTYPE: gl.constexpr, COUNT: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return shared memory as `[COUNT, *SHAPE]` of another dtype and layout."""
    if HAS_REINTERPRET:
        return memory.reinterpret(DTYPE, [COUNT] + SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, [COUNT] + SHAPE, LAYOUT)


@gluon.jit
def wait_for_previous_kernel():
    """Wait until the kernel before has ended and its results can be read."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def let_next_kernel_start():
    """Let the next kernel be launched while this one runs."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,r", [gl.program_id(0)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def take_over():
    """Wait until the previous kernel has ended, then let the next one start: it may read what earlier kernels wrote."""
    wait_for_previous_kernel()
    let_next_kernel_start()
