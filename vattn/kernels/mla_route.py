"""Latent attention on a GPU, from queries to outputs: which kernels attend which rows, and what is planned for them.

Kernels in `vattn.kernels.triton.mla` run on any GPU, those in `vattn.kernels.hopper.mla` on Hopper. Both are chosen
here, from the layer and the shapes of a step: no length is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.cache.memory import CacheMemory
from vattn.config.device import DeviceInfo
from vattn.config.mla import MLAConfig
from vattn.errors import ShapeError
from vattn.kernels.hopper.mla import launch as hopper
from vattn.kernels.hopper.mla import prefill_launch as hopper_prefill
from vattn.kernels.hopper.mla import sparse_launch as hopper_sparse
from vattn.kernels.triton.attention.launch import finish
from vattn.kernels.triton.common.bounded_step import bounded_step
from vattn.kernels.triton.common.tiles import Limits
from vattn.kernels.triton.mla.absorb_rule import has_prompts, longest_absorbed, most_aligned
from vattn.kernels.triton.mla.epilogue import clear_scales, kind_of
from vattn.kernels.triton.mla.launch import attend_latents, quantise_query
from vattn.kernels.triton.mla.plan_layout import MIXED, lay_line, step_in, step_room, tiles_in, tiles_shape
from vattn.kernels.triton.mla.prefill import attend_prompts, complete_requests, cut_line
from vattn.kernels.triton.mla.projection import project_output, project_to, spans_heads
from vattn.ops.arguments import PlanArgs
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.ops.reference.attention import write_results
from vattn.ops.reference.mla_absorb import absorb, key_and_value_weights, project_values, take_to_latents, weight_values
from vattn.quantization.formats import MODEL_DTYPES


def missed(config: MLAConfig, device: DeviceInfo, memory: CacheMemory | None = None) -> dict[str, list[str]]:
    """Return why steps of a layer do not run by the kernels made for Hopper; empty lists where they do."""
    of_memory = [] if memory is None else memory.row_refusals()
    if config.sparse:
        return {"steps": hopper_sparse.refusals(config, device) + of_memory}
    short = hopper.refusals(config, device) + of_memory
    if config.kv_cache_dtype == hopper.FP8 and config.num_heads not in hopper.FP8_HEADS:
        short.append(f"num_heads {config.num_heads} with {hopper.FP8} (runs {hopper.FP8_HEADS})")
    return {"decodes": short, "prompts": hopper_prefill.refusals(config, device)}


def attend(args: MLAAttentionArgs, config: MLAConfig, limits: Limits | None = None) -> None:
    """Run `vattn::mla_attention`: short requests absorbed, long ones of steps with prompts expanded.

    With `limits`, the kernels of any GPU attend all rows.
    """
    if args.query.shape[0] == 0:
        empty = args.query.new_empty((0, config.num_heads, config.v_head_dim))
        write_results(args, empty, empty[..., 0], config)
        return
    weight = weight_values(args.kv_b_weight, args.kv_b_scale, config, MODEL_DTYPES[config.dtype])
    may_use_hopper = limits is None and args.query.is_cuda
    limits = limits or Limits.of(args.query.device)
    clear_scales(args, config)
    # Autocast would change the dtype of the products.
    with torch.autocast(args.query.device.type, enabled=False):
        mixes = may_use_hopper and hopper.mixes(args, config)
        if mixes or has_prompts(config, args.query.shape[0], args.seq_lens.shape[0]):
            attend_mixed(args, weight, config, limits, may_use_hopper)
        else:
            _attend_short(args, weight, config, limits, may_use_hopper)


def _attend_short(
    args: MLAAttentionArgs, weight: Tensor, config: MLAConfig, limits: Limits, may_use_hopper: bool
) -> None:
    """Attend a step with all rows absorbed."""
    w_uk, w_uv = key_and_value_weights(weight, config)
    if config.query_format == "none":
        absorbed = absorb(args.query, w_uk, config)
    else:
        nope, rope = args.query.split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        absorbed = nope.new_empty((*nope.shape[:2], config.kv_lora_rank))
        take_to_latents(nope, w_uk, absorbed)
        absorbed = quantise_query(absorbed, rope, args, config, limits)
    if may_use_hopper and hopper_sparse.accepts(absorbed, args, config):
        latent = hopper_sparse.attend_latents(absorbed, args, config)
    elif may_use_hopper and hopper.accepts(absorbed, args, config):
        latent = hopper.attend_latents(absorbed, args, config)
    else:
        latent = attend_latents(absorbed, _bounded(args), config, limits)
    if config.output_format == "none":
        project_values(latent, w_uv, args.output)
    elif spans_heads(config):
        rows = args.query.new_empty((*args.query.shape[:2], config.v_head_dim))
        project_values(latent, w_uv, rows)
        finish(args, config, rows, limits=limits)
    else:
        project_output(latent, w_uv, args, config, limits)


def _bounded(args: MLAAttentionArgs) -> MLAAttentionArgs:
    """Return arguments with offsets in order and lengths that fit int32."""
    starts, lengths = bounded_step(args.query_start_loc, args.seq_lens, args.query.shape[0])
    return args._replace(query_start_loc=starts, seq_lens=lengths)


def attend_mixed(
    args: MLAAttentionArgs, weight: Tensor, config: MLAConfig, limits: Limits, may_use_hopper: bool = False
) -> None:
    """Attend a step in which requests may be long: short ones are absorbed, the others expanded."""
    longest, nope = longest_absorbed(config), config.qk_nope_head_dim
    planned = plan_of(args, config) if hopper_prefill.plans(config, args.query.device) else None
    if planned is None:
        args = _bounded(args)
    else:
        starts, lengths = step_in(planned, args.seq_lens.shape[0])
        args = args._replace(query_start_loc=starts, seq_lens=lengths)
    w_uk, w_uv = key_and_value_weights(weight, config)
    rows = None
    if kind_of(config) == "rows":
        rows = args.query.new_empty((*args.query.shape[:2], config.v_head_dim))
    absorbed = args.query.new_empty((args.query.shape[0], config.num_heads, config.head_size))
    complete = complete_requests(args, config)
    project_to(args.query[..., :nope], w_uk, absorbed, args, config, limits, longest, complete)
    if config.query_format == "none":
        absorbed[..., config.kv_lora_rank :] = args.query[..., nope:]
    else:
        absorbed = quantise_query(absorbed[..., : config.kv_lora_rank], args.query[..., nope:], args, config, limits)
    shortest, latent = 0, None
    if may_use_hopper and hopper.mixes(args, config):
        shortest = hopper.fewest(config)
        latent = hopper.attend_latents(absorbed, args, config)
    if latent is None or shortest < longest:
        latent = attend_latents(absorbed, args, config, limits, longest, complete, shortest, latent)
    project_output(latent, w_uv, args, config, limits, rows, longest, complete)
    _attend_prompts(args, weight, rows, complete, config, limits, may_use_hopper)
    if rows is not None:
        finish(args, config, rows, limits=limits)


def _attend_prompts(
    args: MLAAttentionArgs, weight: Tensor, rows: Tensor | None, complete: Tensor | None, config: MLAConfig,
    limits: Limits, may_use_hopper: bool,
) -> None:  # fmt: skip
    """Attend long requests, by Hopper's kernel where their keys are one chunk."""
    chunks = cut_line(args, config)
    line = line_of(args, complete, chunks.align, config)

    def attend_whole(expanded: Tensor, ropes: Tensor) -> None:
        hopper_prefill.attend_expanded(
            args, config, line, expanded, ropes, rows, longest_absorbed(config), limits, planned_tiles(args, config)
        )

    takes = may_use_hopper and hopper_prefill.accepts(args, config, chunks.align, chunks.count)
    attend_prompts(args, weight, rows, complete, chunks, line, config, limits, attend_whole if takes else None)


def line_of(args: MLAAttentionArgs, complete: Tensor | None, align: int, config: MLAConfig) -> Tensor:
    """Return the line of a step's keys, int32 `[B + 1]`."""
    line = args.query.new_empty(args.seq_lens.shape[0] + 1, dtype=torch.int32)
    most_keys = args.block_table.shape[1] * config.block_size
    lay_line(args.query_start_loc, args.seq_lens, complete, line, align, most_keys, config)
    return line


def planned_tiles(args: MLAAttentionArgs, config: MLAConfig) -> Tensor | None:
    """Return the row tiles of a step with prompts that was planned, `None` where the call must list them."""
    found, num_reqs = plan_of(args, config), args.seq_lens.shape[0]
    if found is None:
        return None
    room = hopper_prefill.planned_room(config, args.query.shape[0], num_reqs, args.query.device)
    return tiles_in(found, num_reqs, room) if room else None


def plan_of(args: MLAAttentionArgs, config: MLAConfig) -> Tensor | None:
    """Return the plan of a step with prompts, `None` where the call has none."""
    if config.sparse or not args.plan:
        return None
    shape = plan_shape(config, args.query.shape[0], args.seq_lens.shape[0], args.query.device)
    return next((p for p in args.plan if tuple(p.shape) == shape and shape[0] == MIXED), None)


def plan_shape(config: MLAConfig, num_tokens: int, num_reqs: int, device: torch.device) -> tuple[int, ...]:
    """Return the shape of a step's plan; `()` where nothing is planned."""
    if config.context_parallel:
        return ()
    if device.type == "cuda" and hopper.runs(config, device):
        return hopper.plan_shape(config, num_tokens, num_reqs, device)
    # What rows of a sparse layer list is known in its call alone.
    if config.sparse:
        return ()
    tiles = hopper_prefill.planned_room(config, num_tokens, num_reqs, device)
    return tiles_shape(num_reqs, has_prompts(config, num_tokens, num_reqs), tiles)


def plan_key(config: MLAConfig) -> str:
    """Return what layers must have in common to share a plan."""
    kind = " sparse" if config.sparse else hopper_prefill.plan_key(config)
    return f"{hopper.plan_key(config)} longest={longest_absorbed(config)} align={most_aligned(config)}{kind}"


def plan(args: PlanArgs, config: MLAConfig) -> None:
    """Run `vattn::plan`.

    Raises:
        ShapeError: the plan was made for another batch size, or another kind of layer.
    """
    device, num_reqs = args.seq_lens.device, args.seq_lens.shape[0]
    if device.type == "cuda" and hopper.runs(config, device):
        tokens = hopper.plan(args.query_start_loc, args.seq_lens, args.schedule, config)
        write_tiles(args, tokens, config)
        return
    prompts = args.schedule.ndim > 0 and args.schedule.shape[0] == MIXED
    tokens = hopper_prefill.planned_tokens(args.schedule.numel() - step_room(num_reqs), num_reqs, config, device)
    shape = tiles_shape(num_reqs, prompts, hopper_prefill.planned_room(config, max(tokens, 0), num_reqs, device))
    if config.sparse or tuple(args.schedule.shape) != shape:
        raise ShapeError(f"plan has shape {tuple(args.schedule.shape)}", f"{shape}", "make it by Backend.plan_shape")
    if prompts:
        bounded_step(args.query_start_loc, args.seq_lens, tokens, step_in(args.schedule, num_reqs))
    write_tiles(args, tokens, config)


def write_tiles(args: PlanArgs, num_tokens: int, config: MLAConfig) -> None:
    """Write row tiles into a plan of a step with prompts; other plans stay as they are."""
    if args.schedule.shape[:1] != (MIXED,):
        return
    num_reqs = args.seq_lens.shape[0]
    room = hopper_prefill.planned_room(config, num_tokens, num_reqs, args.seq_lens.device)
    if room:
        tiles = tiles_in(args.schedule, num_reqs, room)
        hopper_prefill.write_tiles(args.query_start_loc, args.seq_lens, tiles, num_tokens, longest_absorbed(config))
