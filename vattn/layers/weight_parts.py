"""Linear layers of a model that is sharded over ranks, as plain layers that hold this rank's part of the weight.

transformers (`tp_plan="auto"`) and torch (`parallelize_module`) keep weights as DTensors, and wrap the forward of each
layer in code that takes the parts out and combines the results. `use_parts` does that once: merged projections, FP8
linears and faster products then work on a part as on a whole weight.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vattn.errors import ConfigError, UnsupportedRequestError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Undo = list[Callable[[], None]]
"""Functions that undo each change, in the order of the changes."""

_WRAPPERS = ("torch.distributed.tensor", "transformers.distributed", "transformers.integrations.tensor_parallel")
"""Modules that hold the hooks and forwards which `use_parts` replaces; other hooks and forwards are kept."""


@dataclass(frozen=True)
class WeightPart:
    """The part of a weight `[N, K]` that a rank holds.

    Attributes:
        dim: 0: some output features, 1: some input features.
        start, size, whole: its first feature, how many it has, and how many the weight has.
        group: the ranks that hold the others.
        gathers: whether the output has the features of all ranks; for dim 0.
    """

    dim: int
    start: int
    size: int
    whole: int
    group: ProcessGroup
    gathers: bool = False

    def of(self, weight: Tensor, unit: int = 1) -> Tensor:
        """Return this part of a whole tensor, in which each entry stands for `unit` features."""
        return weight.narrow(self.dim, self.start // unit, self.size // unit)

    def finish(self, out: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the layer, from the product with this part."""
        from torch import distributed

        if self.dim == 1:
            out = out.contiguous()
            distributed.all_reduce(out, group=self.group)
        if bias is not None:
            out = out + bias
        if not self.gathers:
            return out
        ranks, rows = self.group.size(), out.reshape(-1, out.shape[-1])
        parts = _gather_rows(rows, self.group)
        return parts.view(ranks, *rows.shape).transpose(0, 1).reshape(*out.shape[:-1], -1)

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each value over all ranks."""
        return largest_of_ranks(values, self.group)


def largest_of_ranks(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the largest of each value over the ranks of a group, `None` for one rank."""
    if group is not None:
        from torch import distributed

        values = values.clone()
        distributed.all_reduce(values, distributed.ReduceOp.MAX, group=group)
    return values


def heads_of_rank(whole: int, own: int, group: ProcessGroup | None) -> slice | None:
    """Return which heads of all a rank has, `None` if it cannot have `own` of `whole` heads."""
    if own == whole:
        return slice(0, whole)
    if group is None or own != max(1, whole // group.size()):
        return None
    start = group.rank() * whole // group.size()
    return slice(start, start + own)


def gather_heads(values: Tensor, whole: int, group: ProcessGroup) -> Tensor:
    """Return the values `[whole]` of all heads, from the values `[N]` of each rank's heads; ranks may share heads."""
    if values.shape[0] == whole:
        return values
    parts = _gather_rows(values, group)
    return parts.view(group.size(), -1)[:: max(1, parts.numel() // whole)].flatten()


def _gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Return the rows of all ranks, one rank after the other. Releases of torch have this under different names."""
    from torch.distributed import _functional_collectives  # noqa: F401

    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(rows.contiguous(), group.size(), group.group_name))


class PartLinear(nn.Linear):
    """A linear layer with a part of its weight, and an output that needs the other ranks.

    Attributes:
        part: which part it is.
    """

    part: WeightPart
    multiply: Callable[[Tensor, Tensor, None], Tensor] = staticmethod(linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, combined with the products of other ranks, plus the bias."""
        return self.part.finish(self.multiply(x, self.weight, None), self.bias)


def part_of(module: nn.Module) -> WeightPart | None:
    """Return which part of its weight a layer holds, `None` for all of it."""
    return getattr(module, "part", None)


def whole_sizes(linear: nn.Linear) -> tuple[int, int]:
    """Return the output and input features of the whole weight."""
    sizes, part = [linear.out_features, linear.in_features], part_of(linear)
    if part is not None:
        sizes[part.dim] = part.whole
    return sizes[0], sizes[1]


def distributed_tensor() -> Any:
    """Return DTensor, if anything has imported it: without that no weight is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def ranks_of(model: nn.Module) -> ProcessGroup | None:
    """Return the ranks over which weights of a model are sharded, `None` for a whole model."""
    kind = distributed_tensor()
    for module in model.modules():
        part = part_of(module)
        if part is not None:
            return part.group
        for parameter in module._parameters.values():
            if isinstance(parameter, kind) and parameter.device_mesh.ndim == 1:
                group: ProcessGroup = parameter.device_mesh.get_group()
                return group
    return None


def use_parts(model: nn.Module) -> Undo:
    """Give sharded linear layers, and KV heads fewer than ranks, a plain weight on each rank; every rank calls it.

    Layers are run once to learn what their wrappers do. Those that do something else than sum, gather or keep the
    outputs stay as they are, and so do those with other hooks.

    Raises:
        UnsupportedRequestError: heads that ranks cannot share. The model is unchanged.
    """
    undo = _replicate_kv_heads(model)
    found: list[tuple[nn.Linear, WeightPart | None]] = [(module, _observe(module)) for module in _sharded(model)]
    if not found:
        return undo
    first: Any = found[0][0].weight
    # All ranks or none: a rank that differs would wait in a collective that no other one calls.
    missing = torch.tensor([part is None for _, part in found], dtype=torch.int32, device=first.device)
    missing = largest_of_ranks(missing, first.device_mesh.get_group())
    tied = _tied(model)
    for (module, part), left in zip(found, missing.tolist(), strict=True):
        if part is not None and not left:
            wholes = {name: each for name, each in module._parameters.items() if isinstance(each, distributed_tensor())}
            values = {name: _local(whole).detach() for name, whole in wholes.items()}
            _take_part(module, part, values, tied, undo)
    return undo


def take_back(undo: Undo) -> None:
    """Undo `use_parts`; layers must be what it made of them."""
    while undo:
        undo.pop()()


def _sharded(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) is not nn.Linear or not isinstance(weight, distributed_tensor()):
            continue
        dim = getattr(weight.placements[0], "dim", None)
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        own = [module.__dict__["forward"]] if "forward" in module.__dict__ else []
        if (
            weight.device_mesh.ndim == 1
            and dim in (0, 1)
            and weight.shape[dim] % weight.device_mesh.size() == 0
            and all(getattr(each, "__module__", "").startswith(_WRAPPERS) for each in hooks + own)
        ):
            yield module


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, distributed_tensor()) else tensor


@torch.no_grad()
def _observe(module: nn.Linear) -> WeightPart | None:
    """Return which part of its weight a sharded layer holds, `None` if the layer does anything else with it."""
    weight: Any = module.weight
    mesh, dim = weight.device_mesh, weight.placements[0].dim
    size = weight.shape[dim] // mesh.size()
    part = WeightPart(dim, mesh.get_local_rank() * size, size, weight.shape[dim], mesh.get_group())
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(2, weight.shape[1], generator=numbers).to(weight.device, weight.dtype)
    x = (part.of(x) if dim == 1 else x)[None]
    try:
        got = module(x)
    except (RuntimeError, ValueError, TypeError):
        return None
    own, bias = weight.to_local(), _local(module.bias)
    if not isinstance(got, Tensor) or isinstance(got, distributed_tensor()) or own.shape[dim] != size:
        return None
    part = replace(part, gathers=dim == 0 and got.shape[-1] != size)
    want = part.finish(linear(x, own), bias)
    # Other kernels may round differently; another way to combine parts differs by more.
    near = got.shape == want.shape and bool((got - want).abs().max() <= 2.0**-6 * want.abs().max())
    return part if near else None


def _tied(model: nn.Module) -> set[int]:
    """Return the ids of weights that several modules have."""
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {one for one, count in counts.items() if count > 1}


def _take_part(module: nn.Linear, part: WeightPart, values: dict[str, Tensor], kept: set[int], undo: Undo) -> None:
    """Make a layer a plain one.

    Args:
        module, part: the layer, and which part of its weight it gets.
        values: the part, and the bias if it is sharded too.
        kept: ids of DTensors that come back as they are.
        undo: gets the functions that undo the change.
    """
    for name, value in values.items():
        whole: Any = module._parameters[name]
        undo.append(_giver_back(module, name, whole, id(whole) in kept))
        setattr(module, name, nn.Parameter(value, requires_grad=whole.requires_grad))
    forward, features = module.__dict__.pop("forward", None), (module.in_features, module.out_features)
    hooks = [(own, dict(own)) for own in (module._forward_hooks, module._forward_pre_hooks)]
    handle = module.register_state_dict_pre_hook(refuse_state_dict)

    def restore() -> None:
        module.__class__ = nn.Linear  # type: ignore[assignment]
        del module.part
        module.in_features, module.out_features = features
        for own, before in hooks:
            own.update(before)
        if forward is not None:
            module.forward = forward  # type: ignore[method-assign]
        handle.remove()

    for own, _ in hooks:
        own.clear()
    module.part = part  # type: ignore[assignment]
    module.out_features, module.in_features = module.weight.shape
    if part.dim == 1 or part.gathers:
        module.__class__ = PartLinear  # type: ignore[assignment]
    undo.append(restore)


def _giver_back(module: nn.Module, name: str, whole: Any, keep: bool) -> Callable[[], None]:
    """Return a function that restores the DTensor: the same one, or, to save memory, a new one around the part."""
    mesh, placements, shape, stride, grad = (
        whole.device_mesh, whole.placements, whole.shape, whole.stride(), whole.requires_grad
    )  # fmt: skip
    kept = whole if keep else None

    def give_back() -> None:
        from torch.distributed.tensor import DTensor

        again = kept
        if again is None:
            local = module._parameters[name].detach()  # type: ignore[union-attr]
            again = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
            again = nn.Parameter(again, requires_grad=grad)
        setattr(module, name, again)

    return give_back


def refuse_state_dict(module: nn.Module, *_: Any) -> None:
    """Refuse a state dict that would hold one rank's part under the name of the whole weight."""
    raise ConfigError(
        "a state dict of layers that hold one rank's part of their weights",
        "state dicts of models whose weights are whole, or DTensors",
        "disable(model) first; save FP8 linears from one device",
    )


def _replicate_kv_heads(model: nn.Module) -> Undo:
    """Give each rank whole KV heads where there are fewer than ranks.

    DTensors shard a projection by rows, so that a rank would get a part of a head. Ranks whose query heads share a
    KV head get all of it.
    """
    undo: Undo = []
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
            take_back(undo)
            raise UnsupportedRequestError(
                f"{num_heads} query and {num_kv_heads} KV heads of {name!r} over {ranks} ranks",
                "as many query heads on every rank, and KV heads that ranks divide, or that divide the ranks",
                "take another number of ranks",
            )
        if num_kv_heads % ranks == 0:
            continue
        groups = getattr(module, "num_key_value_groups", None)
        undo.append(lambda module=module, groups=groups: setattr(module, "num_key_value_groups", groups))  # type: ignore[misc]
        module.num_key_value_groups = num_heads // ranks  # type: ignore[assignment]
        start = mesh.get_local_rank() * num_kv_heads // ranks * head_size
        for part in parts[1:]:
            rows = WeightPart(0, start, head_size, part.weight.shape[0], mesh.get_group())
            wholes = {name: whole for name, whole in part._parameters.items() if whole is not None}
            values = {name: rows.of(whole.full_tensor()).clone() for name, whole in wholes.items()}
            _take_part(part, rows, values, set(map(id, wholes.values())), undo)
    return undo
