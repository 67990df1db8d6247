"""Decoders that number their tokens themselves: find their table of positions, and look up those of a step instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PositionTable:
    """The module of a decoder that gives each token a row of a table, counted from the first token on.

    In a step of packed tokens it gives them the rows of the step's positions.

    Args:
        module: of the decoder.
        name: of its parameter or buffer `[rows, H]`.
        first: the row of position 0.
        leading: dimensions of what it returns before the dimension of tokens.
        padding: the token that gets the row before `first`, wherever it is; `None` for none.

    Attributes:
        length: how many positions the table has.
    """

    def __init__(self, module: nn.Module, name: str, first: int, leading: int, padding: int | None) -> None:
        self.module, self.name, self.first, self.leading, self.padding = module, name, first, leading, padding
        self.length = self._table().shape[0] - first
        self._ids: Tensor | None = None
        self._positions: Tensor | None = None

    def replace(self) -> None:
        """Make the module give the rows of steps, until `restore`."""
        self.module.forward = self._rows

    def restore(self) -> None:
        """Give the module its own forward back."""
        self.module.__dict__.pop("forward", None)

    def set(self, ids: Tensor | None, positions: Tensor | None) -> None:
        """Take the ids and positions of a step, `[T]` each; `None` after it."""
        self._ids, self._positions = ids, positions

    def _table(self) -> Tensor:
        table: Tensor = getattr(self.module, self.name)
        return table

    def _rows(self, *args: Any, **options: Any) -> Tensor:
        if self._positions is None or self._ids is None:
            own: Tensor = type(self.module).forward(self.module, *args, **options)
            return own
        index = self._positions + self.first
        if self.padding is not None:
            index = torch.where(self._ids == self.padding, self.first - 1, index)
        rows = F.embedding(index, self._table())
        return rows[(None,) * self.leading]


def find_positions(
    decoder: nn.Module, run: Callable[[Sequence[int]], None], ids: Sequence[int], padding: int | None
) -> PositionTable | None:
    """Run a decoder and return its table of positions, `None` if no module looks positions up in one.

    Args:
        run: runs the decoder on token ids, with attention that gives all tokens the same.
        ids: `2 * T` of them, all different, none of them padding.
        padding: the token that may have no position.
    """
    count = len(ids) // 2
    outputs: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim > 1 and output.shape[-2] == count:
            outputs[module] = output.detach()

    leaves = [module for module in decoder.modules() if not any(True for _ in module.children())]
    hooks = [module.register_forward_hook(note) for module in leaves]
    try:
        runs = []
        for tokens in (ids[:count], ids[count:], [*ids[: count - 2], padding, ids[0]] if padding is not None else None):
            outputs.clear()
            if tokens is not None:
                run(tokens)
            runs.append(dict(outputs))
    finally:
        for hook in hooks:
            hook.remove()
    for module, rows in runs[0].items():
        other = runs[1].get(module)
        if other is None or not torch.equal(rows, other) or bool((rows == rows[..., :1, :]).all()):
            continue
        flat = rows.reshape(-1, rows.shape[-1])
        found = _place(module, flat) if len(flat) == count else None
        if found is None:
            continue
        name, first = found
        padded = runs[2].get(module, rows).reshape(flat.shape)
        if torch.equal(padded, flat):
            return PositionTable(module, name, first, rows.ndim - 2, None)
        if first and torch.equal(padded[-2], getattr(module, name)[first - 1]):
            return PositionTable(module, name, first, rows.ndim - 2, padding)
    return None


def _place(module: nn.Module, rows: Tensor) -> tuple[str, int] | None:
    """Return the parameter or buffer of a module that holds some rows one after the other, and where they begin."""
    for name, table in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if table.ndim == 2 and table.shape[1] == rows.shape[1]:
            for first in (table == rows[0]).all(1).nonzero().flatten().tolist():
                if torch.equal(table[first : first + len(rows)], rows):
                    return name, first
    return None
