"""What ops mean to the passes: one table, and what torch says about its ops by tags and schemas."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

_TABLE = {
    # Moves: ops that only put elements into other places.
    "reshape": "view reshape _unsafe_view squeeze unsqueeze alias detach",
    "part": "permute transpose t slice select split split_with_sizes unbind narrow",
    "spread": "expand repeat",
    "window": "as_strided unfold",
    "same": "clone contiguous lift_fresh_copy view_of",
    "reorder": "flip rev roll index index_select constant_pad_nd",
    "join": "cat stack",
    # Others that place elements or make them of numbers.
    "scatter": "slice_scatter select_scatter",
    "copy": "copy",
    "cast": "convert_element_type _to_copy",
    "fill": "full full_like ones ones_like zeros zeros_like empty empty_like empty_strided empty_permuted new_empty "
    "new_empty_strided",
    # Arithmetic.
    "scaling": "mul div true_divide ldexp",
    "inverse": "reciprocal pow addcdiv",
    "power": "log2 exp2 ceil frexp",
    "sign": "abs neg",
    "limit": "clamp clamp_min clamp_max hardtanh",
    "choice": "sign copysign maximum minimum fmax fmin relu nan_to_num where masked_fill masked_fill_ index_put",
    "extreme": "amax amin aminmax max min",
    "line": "sort topk kthvalue argmax argmin cummax cummin gather",
    "count": "cumsum cumprod logcumsumexp",
    "norm": "linalg_vector_norm norm _fused_rms_norm rms_norm",
    "angle": "cos sin polar",
    # What no region holds, or Inductor generates no code for.
    "complex": "complex view_as_complex view_as_real _fft_c2c _fft_r2c _fft_c2r nonzero",
    "check": "_assert_tensor_metadata _assert_async _assert_scalar",
    "gemm": "mm bmm addmm addbmm baddbmm addmv mv dot vdot linear matmul _scaled_mm _scaled_grouped_mm _grouped_mm "
    "_int_mm convolution _convolution scaled_dot_product_attention _weight_int8pack_mm _weight_int4pack_mm",
}
"""Names of ops by what they do; an op is in one row."""

_MEANINGS = {name: meaning for meaning, names in _TABLE.items() for name in names.split()}

REORDERS = frozenset("part spread window reorder join".split())
MOVES = REORDERS | {"reshape", "same"}
"""Meanings of ops that put what they read into other places; `REORDERS`: not all of it in order."""

PLACING = MOVES | {"scatter", "copy"}
"""Meanings of ops that only put what they read into other places, of one tensor or several."""


def op_name(op: Any) -> str:
    """Return an operator's name without namespace and overload, empty for any other object."""
    return op._schema.name.split("::")[1] if isinstance(op, torch._ops.OpOverload) else ""


def meaning(node: Node) -> str:
    """Return what a node's op does, a row of the table, empty if the op is in none."""
    return _MEANINGS.get(op_name(node.target), "")


def moves(node: Node) -> bool:
    """Return whether a node only puts elements into other places."""
    return meaning(node) in MOVES


def unwritten(node: Node) -> bool:
    """Return whether a node allocates memory without writing it."""
    return op_name(node.target).startswith(("empty", "new_empty"))


def is_pointwise(node: Node) -> bool:
    """Return whether each element of a node is computed from those at its place."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def reduces(node: Node) -> bool:
    """Return whether a node reduces dimensions."""
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def is_view(node: Node) -> bool:
    """Return whether a node shares the memory of what it reads."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
