"""Plans of latent attention: what is worked out of a step's lengths once, on the device, for all layers that ask alike.

A plan is an int32 tensor. On Hopper it begins with the decode schedule (`vattn.kernels.hopper.mla.launch`); every plan
ends with room for the line of keys (`vattn.kernels.triton.mla.prefill`), which is written for steps with prompts: those
whose plan has MIXED as its first dimension. In front of that, where Hopper's kernel attends prompts, is room for row
tiles (`vattn.kernels.hopper.mla.prefill_launch`). Shapes come from shapes, so that a step tells from them how it was
planned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.mla import MLAConfig
from vattn.errors import ShapeError
from vattn.kernels.triton.mla.absorb_rule import has_prompts, longest_absorbed, most_aligned
from vattn.kernels.triton.mla.prefill_kernels import mla_line_kernel
from vattn.ops.arguments import PlanArgs
from vattn.ops.arguments_mla import MLAAttentionArgs

MIXED = 16
"""First dimension of the plans of steps with prompts; those of others have at most 8."""

_ALL_KEYS = 1 << 30


def line_room(num_reqs: int) -> int:
    """Return how many integers a plan has for the line of keys."""
    return -(-(num_reqs + 1) // MIXED) * MIXED


def line_in(plan: Tensor, num_reqs: int) -> Tensor:
    """Return the line of keys in a plan: int32 `[B + 1]`, a view."""
    return plan.view(-1)[plan.numel() - line_room(num_reqs) :][: num_reqs + 1]


def tile_room(config: MLAConfig, num_tokens: int, num_reqs: int, device: torch.device) -> int:
    """Return how many integers a plan has for the row tiles of prompts, whether the step has some or not."""
    if device.type != "cuda":
        return 0
    from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch

    return mla_prefill_launch.tile_room(num_tokens, num_reqs) if mla_prefill_launch.plans(config, device) else 0


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


def plan_shape(config: MLAConfig, num_tokens: int, num_reqs: int, device: torch.device) -> tuple[int, ...]:
    """Return the shape of a step's plan; `()` where nothing is planned."""
    if config.context_parallel:
        return ()
    if device.type == "cuda":
        from vattn.kernels.hopper.mla import launch as mla_launch

        if mla_launch.runs(config, device):
            return mla_launch.plan_shape(config, num_tokens, num_reqs, device)
    # What rows of a sparse layer list is known in its call alone.
    if config.sparse:
        return ()
    tiles = tile_room(config, num_tokens, num_reqs, device)
    return _line_shape(num_reqs, has_prompts(config, num_tokens, num_reqs), tiles)


def _line_shape(num_reqs: int, prompts: bool, tiles: int) -> tuple[int, int]:
    """Return the shape of a plan without a schedule, as large with prompts as without."""
    room = line_room(num_reqs) + tiles
    return (MIXED, room // MIXED) if prompts else (1, room)


def plan_key(config: MLAConfig) -> str:
    """Return what layers must have in common to share a plan."""
    from vattn.kernels.hopper.mla import launch as mla_launch
    from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch

    kind = " sparse" if config.sparse else mla_prefill_launch.plan_key(config)
    return f"{mla_launch.plan_key(config)} longest={longest_absorbed(config)} align={most_aligned(config)}{kind}"


def plan(args: PlanArgs, config: MLAConfig) -> None:
    """Run `vattn::plan`.

    Raises:
        ShapeError: the plan was made for another batch size, or another kind of layer.
    """
    device, num_reqs = args.seq_lens.device, args.seq_lens.shape[0]
    if device.type == "cuda":
        from vattn.kernels.hopper.mla import launch as mla_launch

        if mla_launch.runs(config, device):
            tokens = mla_launch.plan(args.query_start_loc, args.seq_lens, args.schedule, config)
            write_line(args, tokens, config)
            return
    prompts = args.schedule.ndim > 0 and args.schedule.shape[0] == MIXED
    tokens = planned_tokens(args.schedule.numel() - line_room(num_reqs), num_reqs, config, device)
    shape = _line_shape(num_reqs, prompts, tile_room(config, max(tokens, 0), num_reqs, device))
    if config.sparse or tuple(args.schedule.shape) != shape:
        raise ShapeError(f"plan has shape {tuple(args.schedule.shape)}", f"{shape}", "make it by Backend.plan_shape")
    write_line(args, tokens, config)


def planned_tokens(room: int, num_reqs: int, config: MLAConfig, device: torch.device) -> int:
    """Return the tokens of the step that so much room for row tiles was made for; 0 where there is none."""
    if device.type != "cuda":
        return 0
    from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch

    return mla_prefill_launch.tokens_of_room(room, num_reqs) if mla_prefill_launch.plans(config, device) else 0


def write_line(args: PlanArgs, num_tokens: int, config: MLAConfig) -> None:
    """Write the line of keys into a plan of a step with prompts, and row tiles; other plans stay as they are."""
    if args.schedule.shape[0] != MIXED:
        return
    num_reqs = args.seq_lens.shape[0]
    # The lengths of a step fit its block tables.
    lay_line(
        args.query_start_loc, args.seq_lens, None, line_in(args.schedule, num_reqs), most_aligned(config), _ALL_KEYS,
        config,
    )  # fmt: skip
    room = tile_room(config, num_tokens, num_reqs, args.seq_lens.device)
    if room and has_prompts(config, num_tokens, num_reqs):
        from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch

        tiles = tiles_in(args.schedule, num_reqs, room)
        longest = longest_absorbed(config)
        mla_prefill_launch.write_tiles(args.query_start_loc, args.seq_lens, tiles, num_tokens, longest)


def plan_of(args: MLAAttentionArgs, config: MLAConfig) -> Tensor | None:
    """Return the plan of a step with prompts, `None` where none came with the call."""
    if config.sparse or not args.plan:
        return None
    shape = plan_shape(config, args.query.shape[0], args.seq_lens.shape[0], args.query.device)
    return next((p for p in args.plan if tuple(p.shape) == shape and shape[0] == MIXED), None)


def planned_line(args: MLAAttentionArgs, align: int, config: MLAConfig) -> Tensor | None:
    """Return the line of keys of a step that was planned, `None` where it must be laid by the call."""
    found = plan_of(args, config) if align == most_aligned(config) else None
    return None if found is None else line_in(found, args.seq_lens.shape[0])


def planned_tiles(args: MLAAttentionArgs, config: MLAConfig) -> Tensor | None:
    """Return the row tiles of a step with prompts that was planned, `None` where the call must list them."""
    found, num_reqs = plan_of(args, config), args.seq_lens.shape[0]
    room = 0 if found is None else tile_room(config, args.query.shape[0], num_reqs, args.query.device)
    return tiles_in(found, num_reqs, room) if found is not None and room else None
