"""Layout of a plan of latent attention: work done once on the device for all layers that plan alike.

A plan is an int32 tensor; its first dimension is MIXED in steps with prompts. It ends with offsets and lengths of the
requests as `bounded_step` returns them; before these is room for row tiles where Hopper's kernel attends prompts,
and before that the decode schedule of Hopper's kernels. The shape of a plan follows from the step's, so a step
finds its parts without reading it. Lines of keys are no part of it: their ends follow from block tables.
"""

from __future__ import annotations

from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.kernels.triton.mla.absorb_rule import longest_absorbed
from vattn.kernels.triton.mla.prefill_kernels import mla_line_kernel

MIXED = 16
"""First dimension of the plans of steps with prompts; those of others have at most 8."""


def step_room(num_reqs: int) -> int:
    """Return how many integers a plan has for offsets and lengths."""
    return 2 * -(-(num_reqs + 1) // MIXED) * MIXED


def step_in(plan: Tensor, num_reqs: int) -> tuple[Tensor, Tensor]:
    """Return offsets `[B + 1]` and lengths `[B]` in a plan: views."""
    starts, lengths = plan.view(-1)[plan.numel() - step_room(num_reqs) :].chunk(2)
    return starts[: num_reqs + 1], lengths[:num_reqs]


def tiles_in(plan: Tensor, num_reqs: int, room: int) -> Tensor:
    """Return the room for row tiles in a plan: a view."""
    end = plan.numel() - step_room(num_reqs)
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


def tiles_shape(num_reqs: int, prompts: bool, tiles: int) -> tuple[int, ...]:
    """Return the shape of a plan without a schedule, as large with prompts as without; `()` if it has no row tiles."""
    room = step_room(num_reqs) + tiles
    if not tiles:
        return ()
    return (MIXED, room // MIXED) if prompts else (1, room)
