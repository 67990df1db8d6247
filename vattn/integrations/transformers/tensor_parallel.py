"""Heads of a model that transformers, or its user, has sharded over ranks by DTensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from vattn.errors import UnsupportedRequestError

Kept = list[tuple[Any, str, Any]]
"""Modules, names of attributes or parameters, and what they were."""


def replicate_kv_heads(model: nn.Module) -> Kept:
    """Give each rank whole KV heads where there are fewer than ranks; every rank calls it.

    DTensors shard a projection by rows, so that a rank would get a part of a head. Ranks whose query heads share a
    KV head get all of it.

    Returns:
        What it changed, for `restore_kv_heads`.

    Raises:
        UnsupportedRequestError: heads that cannot be sharded; nothing has changed.
    """
    kept: Kept = []
    for name, module in model.named_modules():
        parts: list[Any] = [getattr(module, part, None) for part in ("q_proj", "k_proj", "v_proj")]
        head_size = getattr(module, "head_dim", None)
        if head_size is None or not all(isinstance(getattr(part, "weight", None), nn.Parameter) for part in parts):
            continue
        query, key = parts[0].weight, parts[1].weight
        mesh = getattr(key, "device_mesh", None)
        if mesh is None or not all(getattr(placement, "dim", None) == 0 for placement in key.placements):
            continue
        ranks, num_heads, num_kv_heads = mesh.size(), query.shape[0] // head_size, key.shape[0] // head_size
        if num_heads % ranks or (num_kv_heads % ranks and ranks % num_kv_heads):
            restore_kv_heads(kept)
            raise UnsupportedRequestError(
                f"{num_heads} query and {num_kv_heads} KV heads of {name!r} over {ranks} ranks",
                "as many query heads on every rank, and KV heads that ranks divide, or that divide the ranks",
                "take another number of ranks",
            )
        if num_kv_heads % ranks == 0:
            continue
        own = mesh.get_local_rank() * num_kv_heads // ranks
        kept.append((module, "num_key_value_groups", getattr(module, "num_key_value_groups", None)))
        module.num_key_value_groups = num_heads // ranks
        for part in parts[1:]:
            for own_name, parameter in list(part.named_parameters(recurse=False)):
                kept.append((part, own_name, parameter))
                head = parameter.full_tensor().unflatten(0, (num_kv_heads, -1))[own]
                rows: Any = nn.Parameter(head.clone(), requires_grad=False)
                rows.differs_between_ranks = True
                setattr(part, own_name, rows)
    return kept


def restore_kv_heads(kept: Kept) -> None:
    """Undo `replicate_kv_heads`."""
    for module, name, value in kept:
        setattr(module, name, value)
