"""What a model over packed tokens refuses about a step's token ids, positions and rows of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vattn.errors import DtypeError, ShapeError
from vattn.formats import dtype_name

_INTEGERS = (torch.int32, torch.int64)


def check_inputs(input_ids: Any, positions: Any, logits_indices: Any) -> None:
    """Refuse inputs by what the host knows of them: values are not read.

    Raises:
        DtypeError: no tensors of integers.
        ShapeError: other than one dimension, or other numbers of ids and positions.
    """
    _check_line("input_ids", input_ids, "T", "pack the requests of a step one behind the other, without a batch")
    _check_line("positions", positions, "T", "pass the positions of the step's metadata")
    if logits_indices is not None:
        _check_line("logits_indices", logits_indices, "B", "pass the rows of the step that go through the head")
    if positions.shape[0] != input_ids.shape[0]:
        raise ShapeError(
            f"{positions.shape[0]} positions for {input_ids.shape[0]} tokens",
            "as many",
            "pass the positions of the metadata that was built for these tokens",
        )


def _check_line(name: str, given: Any, rows: str, fix: str) -> None:
    if not isinstance(given, Tensor):
        raise DtypeError(f"{name} of type {type(given).__name__}", f"an int64 tensor [{rows}]", fix)
    if given.dtype not in _INTEGERS:
        raise DtypeError(f"{name} of {dtype_name(given.dtype)}", "int64 (int32 too)", fix)
    if given.ndim != 1:
        raise ShapeError(f"{name} of shape {list(given.shape)}", f"[{rows}]", fix)
