"""Layout of a plan of latent attention: work done once on the device for all layers that plan alike.

A plan is an int32 tensor; its first dimension is MIXED in steps with prompts. It ends with room for their line of keys.
In front of that is room for row tiles where Hopper's kernel attends prompts, and in front of both the decode schedule
of Hopper's kernels. Shapes follow from shapes, so a step tells from them how it was planned.
"""

from __future__ import annotations

from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.kernels.triton.mla.absorb_rule import longest_absorbed
from vattn.kernels.triton.mla.prefill_kernels import mla_line_kernel

MIXED = 16
"""First dimension of the plans of steps with prompts; those of others have at most 8."""


def line_room(num_reqs: int) -> int:
    """Return how many integers a plan has for the line of keys."""
    return -(-(num_reqs + 1) // MIXED) * MIXED


def line_in(plan: Tensor, num_reqs: int) -> Tensor:
    """Return the line of keys in a plan: int32 `[B + 1]`, a view."""
    return plan.view(-1)[plan.numel() - line_room(num_reqs) :][: num_reqs + 1]


def tiles_in(plan: Tensor, num_reqs: int, room: int) -> Tensor:
    """Return the room for row tiles in a plan: a view."""
    end = plan.numel() - line_room(num_reqs)
    return plan.view(-1)[end - room : end]


def lay_line(
    query_start_loc: Tensor, seq_lens: Tensor, complete: Tensor | None, line: Tensor, align: int, most_keys: int,
    config: MLAConfig,
) -> None:  # fmt: skip
    """Write int32 `[B + 1]`: where each request begins on the line of a step's keys, and where the line ends."""
    mla_line_kernel[(1,)](
        query_start_loc, seq_lens, complete, line, seq_lens.shape[0], most_keys, LONGEST=longest_absorbed(config),
        ALIGN=align, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def line_shape(num_reqs: int, prompts: bool, tiles: int) -> tuple[int, int]:
    """Return the shape of a plan without a schedule, as large with prompts as without."""
    room = line_room(num_reqs) + tiles
    return (MIXED, room // MIXED) if prompts else (1, room)
