"""How the linear layers of a model run: several projections by one product, and all by `vattn::linear`.

Both are on wherever they can be. What forbids them is kept, layer by layer, for `PackedModel.explain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vattn.config.device import DeviceInfo
from vattn.errors import ConfigError
from vattn.integrations.transformers.merged_linear import MergedLinear
from vattn.integrations.transformers.shared_inputs import SharedInputs, groups
from vattn.integrations.transformers.swapped_linears import (
    SWAPPED,
    merge,
    merged_linears,
    merged_product,
    restore,
    swap,
)
from vattn.layers.fp8_linear import BLOCK, FP8Linear
from vattn.layers.lora import LoRAProduct
from vattn.layers.weight_parts import PartLinear

NAME = "_vattn_linears"
"""Where a model on vattn keeps its `Linears`."""


class Linears:
    """How `enable` runs the linear layers of a model.

    Args:
        model: on vattn.
        shared: how it calls its projections.
        merge: merge projections: `None` for wherever it can be, `True` for all or an error.
        own: run linear layers by `vattn::linear`, likewise.
        batch_invariant: whether results of a request must not depend on the other requests of a step.

    Attributes:
        num_merged, num_own: how many groups are merged, and how many layers run by `vattn::linear`.
        apart, left: names of groups and of layers that do not, and why.
    """

    def __init__(
        self, model: nn.Module, shared: SharedInputs, merge: bool | None, own: bool | None, batch_invariant: bool
    ) -> None:
        self.model, self.shared, self.merge, self.own = model, shared, merge, own
        self.batch_invariant = batch_invariant
        self._forget()

    def _forget(self) -> None:
        self.num_merged = self.num_own = 0
        self.apart: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self.own_off = ""
        self._merged: list[MergedLinear] = []

    def apply(self, strict: bool = True) -> None:
        """Merge and replace.

        Args:
            strict: refuse what was requested and cannot be.

        Raises:
            ConfigError: a layer that forbids what was requested by `True`.
        """
        if self.merge is not False:
            self._merge()
        if strict and self.merge and self.apart:
            where, why = next(iter(self.apart.items()))
            raise ConfigError(
                f"merge_projections=True for {type(self.model).__name__}, in which {where} stay apart: {why}",
                "projections of one kind, which the model calls with one input",
                "leave merge_projections out: it merges what it can",
            )
        if self.own is not False:
            self._replace()
        if strict and self.own and self.left:
            where, why = next(iter(self.left.items()))
            raise ConfigError(
                f"vattn_linears=True for {type(self.model).__name__}, in which {where!r} cannot run so: {why}",
                "linear layers with weights of torch's own, and no hooks",
                "leave vattn_linears out: it replaces what it can",
            )

    def undo(self) -> None:
        """Give all linear layers their own forward back."""
        restore(self.model.modules(), "merged", "own")
        for module in self.model.modules():
            if isinstance(module, FP8Linear):
                module.__dict__.pop("uses_vattn_linear", None)
        self._forget()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo it inside the block, where linear layers may be replaced."""
        if any(isinstance(part.__dict__.get("lora"), LoRAProduct) for part in self.model.modules()) or any(
            merged.lora is not None for merged in merged_linears(self.model)
        ):
            raise ConfigError(
                "other linear layers for a model with adapters",
                "models without",
                "disable(model), change them, enable it, and call enable_adapters afterwards",
            )
        self.undo()
        try:
            yield
        finally:
            self.apply(strict=False)

    def renew(self) -> None:
        """Take in weights of merged projections that were moved or replaced since; separate those that differ now.

        Raises:
            ConfigError: projections with adapters that differ now.
        """
        for merged in self._merged:
            if not merged.moved:
                continue
            if why := _why_different(merged.parts):
                if merged.lora is not None:
                    raise ConfigError(
                        "merged projections with adapters, of which some have weights of another kind since",
                        "weights of one kind",
                        "disable(model), enable it with the new weights, and call enable_adapters again",
                    )
                restore(merged.parts, "merged")
                self._merged = merged_linears(self.model)
                self.num_merged = len(self._merged)
                self.apart["some projections"] = f"they were changed after enable: {why}"
            else:
                merged.take_in()

    def explain(self) -> list[str]:
        """Return what runs how, a line for each reason against it."""
        lines = [f"merge_projections: {self.num_merged} groups of projections are one product each"]
        if self.merge is False:
            lines = ["merge_projections: off, as requested"]
        lines += [f"merge_projections: {each}" for each in _by_reason(self.apart, "stay apart")]
        if self.own is False:
            return [*lines, "vattn_linears: off, as requested"]
        if self.own_off:
            return [*lines, f"vattn_linears: off: {self.own_off}"]
        lines.append(f"vattn_linears: {self.num_own} linear layers run by vattn::linear")
        return lines + [f"vattn_linears: {each}" for each in _by_reason(self.left, "stay as they are")]

    def _merge(self) -> None:
        owners = _owners(self.model)
        moved = False
        for (name, names), parts in groups(self.model).items():
            why = self.shared.apart.get((name, names)) or _why_apart(parts, owners)
            if not why:
                try:
                    merge(parts)  # type: ignore[arg-type]
                except torch.OutOfMemoryError:
                    why = "too little memory for a copy of their weights"
            if why:
                self.apart[f"{name} ({', '.join(names)})"] = why
            else:
                moved |= bool(parts[0].weight.is_cuda)  # type: ignore[union-attr]
                self.num_merged += 1
        self._merged = merged_linears(self.model)
        if moved:
            # The separate weights were freed, and a cache needs their memory in one piece.
            torch.cuda.empty_cache()

    def _replace(self) -> None:
        if self.own is None:
            self.own_off = self._no_kernels()
            if self.own_off:
                return
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            why = _why_left(module)
            if why:
                self.left[name] = why
                continue
            self.num_own += 1
            if (merged := merged_product(module)) is not None:
                merged.uses_vattn_linear = True
                if merged.quantised is not None:
                    merged.quantised.uses_vattn_linear = True
            elif isinstance(module, FP8Linear):
                module.uses_vattn_linear = True
            else:
                swap(module, "own")

    def _no_kernels(self) -> str:
        """Return why `vattn::linear` has no kernel for this model, "" if it may have one."""
        from vattn.kernels.hopper.availability import CAPABILITY

        weight = next(self.model.parameters())
        info = DeviceInfo.of(weight.device)
        if info.type != "cuda" or info.capability != CAPABILITY:
            return f"its kernels are for GPUs of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, not {info}"
        if self.batch_invariant:
            return "batch_invariant=True, and its kernels round products of few rows differently"
        if self.model.dtype == torch.float32:
            return "its kernels are for 16-bit models"
        return ""


def linears_of_enabled(model: Any) -> Linears | None:
    """Return how the linear layers of a model on vattn run; `None` for another one."""
    return model.__dict__.get(NAME)  # type: ignore[no-any-return]


def _by_reason(found: dict[str, str], what: str) -> Iterator[str]:
    """Yield a text for each reason, with the first name and the number of others."""
    names: dict[str, list[str]] = {}
    for name, why in found.items():
        names.setdefault(why, []).append(name)
    for why, each in names.items():
        more = f" and {len(each) - 1} more" if len(each) > 1 else ""
        yield f"{each[0]}{more} {what}: {why}"


def _owners(model: nn.Module) -> dict[int, int]:
    """Return how many names each parameter of a model has, by its `id`."""
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return counts


def _why_left(linear: nn.Module) -> str:
    """Return what keeps a linear layer from another forward, "" for nothing."""
    if type(linear) not in (nn.Linear, PartLinear, FP8Linear, *SWAPPED["merged"].values()):
        return f"{type(linear).__name__} computes in a way of its own"
    if type(linear.weight) not in (nn.Parameter, Tensor):
        # torchao's weights and DTensors bring products of their own.
        return f"weights of class {type(linear.weight).__name__}"
    if "forward" in linear.__dict__:
        return "a forward of its own, as offloading gives it"
    if linear._forward_hooks or linear._forward_pre_hooks:
        return "hooks"
    if isinstance(linear, FP8Linear) and linear.format.blocks:
        return "FP8 weights in blocks, which it has no kernel for"
    return ""


def _why_apart(parts: list[Any], owners: dict[int, int]) -> str:
    """Return what keeps projections from being one product, "" for nothing."""
    for part in parts:
        if not isinstance(part, nn.Linear) or isinstance(part, PartLinear):
            return f"layers of class {type(part).__name__}"
        why = "" if isinstance(part, FP8Linear) and part.format.blocks else _why_left(part)
        if why:
            return why
    if any(owners[id(part.weight)] > 1 for part in parts):
        return "weights that other layers share"
    if any(isinstance(part, FP8Linear) and part.needs_ranks for part in parts):
        return "outputs that need other ranks"
    return _why_different(parts)


def _why_different(parts: list[Any]) -> str:
    """Return what two of some layers differ in that one product has for all, "" for nothing."""
    first = parts[0]
    if not all(part._parameters.keys() >= {"weight", "bias"} for part in parts):
        return "weights that a parametrisation or a hook computes in each call"
    if _differ(parts):
        return "layers that differ in kind, input size, bias, dtype or device"
    if not isinstance(first, FP8Linear):
        return ""
    if any(part.format != first.format for part in parts):
        return "FP8 layers of different formats"
    if first.input_scale is not None and not all(torch.equal(part.input_scale, first.input_scale) for part in parts):
        return "FP8 layers with different scales of their input"
    if first.format.blocks and any(part.out_features % BLOCK for part in parts[:-1]):
        return f"FP8 layers in blocks of {BLOCK} rows that go over the border between them"
    return ""


def _differ(parts: list[Any]) -> bool:
    """Return whether parts cannot be concatenated, or some have a bias."""

    def kind(part: Any) -> Any:
        weight = part.weight
        return type(part), type(weight), weight.shape[1:], weight.dtype, weight.device, part.bias is None

    return any(kind(part) != kind(parts[0]) for part in parts)
