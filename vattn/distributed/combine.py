"""Combine the partial attention results of all ranks by their log-sum-exp in fp32.

Only functional collectives, which compile without a graph break. Every rank does the same: a rank without keys has a
log-sum-exp of -inf, and its output is not read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Registers the functional collectives' shape functions.
from torch.distributed import _functional_collectives  # noqa: F401

from vattn.distributed.group import ContextParallel


def gather_heads(part: Tensor, parallel: ContextParallel) -> Tensor:
    """Return `[T, world * h, ...]` of every rank's `[T, h, ...]`, in the order of ranks."""
    if parallel.world_size == 1:
        return part
    ops = torch.ops._c10d_functional
    world, rows = parallel.world_size, part.shape[0]
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(part.contiguous(), world, parallel.group_name))
    return gathered.unflatten(0, (world, rows)).transpose(0, 1).flatten(1, 2)


def combine(
    output: Tensor, lse: Tensor, parallel: ContextParallel, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combine the results of all ranks over their keys; every rank gets its own heads.

    Args:
        output: `[T, H, V]`, this rank's partial result for all heads; rows with an LSE of -inf may hold anything.
        lse: fp32 `[T, H]`, natural log of the denominator over this rank's keys, without sinks.
        sinks: `[H]`, one logit per head that joins the denominator, once.

    Returns:
        fp32 `[T, H / world, V]` and LSE `[T, H / world]` of this rank's heads.
    """
    world = parallel.world_size
    heads = output.shape[1] // world
    own = slice(parallel.rank * heads, (parallel.rank + 1) * heads)
    own_sinks = None if sinks is None else sinks[own]
    if world == 1:
        return combine_parts([output], lse[None], own_sinks)
    if parallel.combine == "all_to_all":
        outputs, lses = (_exchange_heads(part, parallel) for part in (output, lse))
        return combine_parts(list(outputs.unbind(0)), lses, own_sinks)
    ops = torch.ops._c10d_functional
    lses = ops.wait_tensor(ops.all_gather_into_tensor(lse.contiguous(), world, parallel.group_name))
    total = joint_lse(lses.unflatten(0, (world, lse.shape[0])), sinks)
    scaled = _by_rank(weighed(output, lse, total), world).flatten(0, 1)
    summed = ops.wait_tensor(ops.reduce_scatter_tensor(scaled, "sum", world, parallel.group_name))
    return summed, total[:, own]


def combine_parts(outputs: Sequence[Tensor], lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Combine parts of one process, as `combine` does for parts of ranks.

    Args:
        outputs: of each part `[T, h, V]`.
        lses: fp32 `[parts, T, h]`.
        sinks: `[h]`.

    Returns:
        fp32 `[T, h, V]`, zero where no part has a key, and LSE `[T, h]`.

    Example:
        >>> import torch
        >>> parts = [torch.tensor([[[2.0]]]), torch.tensor([[[float("nan")]]])]
        >>> combine_parts(parts, torch.tensor([[[0.5]], [[float("-inf")]]]))
        (tensor([[[2.]]]), tensor([[0.5000]]))
    """
    total = joint_lse(lses, sinks)
    combined = weighed(outputs[0], lses[0], total)
    for output, lse in zip(outputs[1:], lses[1:].unbind(0), strict=True):
        combined = combined + weighed(output, lse, total)
    return combined, total


def joint_lse(lses: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the log of the sum of all parts' denominators `[parts, T, h]` and of the sinks: fp32 `[T, h]`."""
    peak = lses.amax(0)
    base = torch.where(peak == -torch.inf, 0.0, peak)
    denominator = torch.exp(lses[0] - base)
    for lse in lses[1:].unbind(0):
        denominator = denominator + torch.exp(lse - base)
    total = base + torch.log(denominator)
    return total if sinks is None else torch.logaddexp(total, sinks.float())


def weighed(output: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    """Return a part `[T, h, V]` times its share of the denominator, in fp32; zero, whatever it holds, if empty."""
    share = torch.exp(lse - torch.where(total == -torch.inf, 0.0, total)).unsqueeze(-1)
    return torch.where(lse.unsqueeze(-1) == -torch.inf, 0.0, output.float() * share)


def _by_rank(part: Tensor, world: int) -> Tensor:
    """Return `[world, T, h, ...]` of `[T, world * h, ...]`, contiguous."""
    return part.unflatten(1, (world, part.shape[1] // world)).transpose(0, 1).contiguous()


def _exchange_heads(part: Tensor, parallel: ContextParallel) -> Tensor:
    """Return `[world, T, h, ...]`: this rank's heads as every rank computed them."""
    ops = torch.ops._c10d_functional
    world, rows = parallel.world_size, part.shape[0]
    sizes = [rows] * world
    sent = _by_rank(part, world).flatten(0, 1)
    return ops.wait_tensor(ops.all_to_all_single(sent, sizes, sizes, parallel.group_name)).unflatten(0, (world, rows))
