"""`quantise_linears`: make the linear layers of a model FP8, weights and inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from vattn.calibration.calibrate import Calibration, as_calibration, linears_of, root_of
from vattn.config.keywords import known_keywords
from vattn.config.typed import typed
from vattn.errors import ConfigError, DeviceError, DtypeError, ScaleError, ShapeError
from vattn.layers.fp8_linear import (
    BLOCK,
    FP8Linear,
    LinearFormat,
    check_sizes,
    encode_weight,
    linear_format,
    weight_scale,
)
from vattn.layers.weight_parts import PartLinear, WeightPart, part_of, take_back, use_parts
from vattn.quantization.formats import MODEL_DTYPES

SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers that a module of transformers calls with one input, and that may run as one product."""

PLAIN = ("FalconLinear",)
"""Classes of transformers that compute what `nn.Linear` does by a forward of their own."""

CAPABILITY = (8, 9)
"""Of the first GPUs with FP8 products."""


@known_keywords({})
@typed
def quantise_linears(
    model: nn.Module,
    format: str,
    *,
    skip: str | Iterable[str] = (),
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """Replace the linear layers of a model by `FP8Linear`s, in place: e4m3 weights and inputs.

    Layers that take one input (query, key and value; gate and up) get one scale for their weights where a format has
    one for a whole weight, so that `enable` can run them as one product.

    Args:
        model: on its device, in its dtype; a model of transformers, before or after `enable`, or any other.
            Its configuration then describes the FP8 layers, so that `save_pretrained` writes a checkpoint which
            `load_fp8_linears` reads.
        format: of inputs and weights; see `FP8Linear`. `"fp8_static"`: a given scale for the input, one for the weight.
            `"fp8_dynamic"`: a scale over all tokens of a step, so that requests of one step differ by what else is in
            it. `"fp8_per_token"`: a scale for each token, and for each row of the weight. `"fp8_group128"`: for every
            128 columns of a token, and every 128 x 128 of the weight.
        skip: names or patterns such as `"*.down_proj"` of layers that stay as they are. The head of a model of
            transformers always stays.
        calibration: of `vattn.calibrate(..., linears=True)`, or its file; for `"fp8_static"` alone.

    Returns:
        By name of each linear layer, its format, or why it was left.

    Raises:
        ConfigError: no linear layer, a pattern without a match, layers with hooks, or a weight that two layers share.
        ShapeError: sizes that are no multiple of 16 (input features of blocks: 128).
        ScaleError: no or too many calibrations, weights that are not finite.
        DeviceError: a GPU without FP8.
            After any of these the model is unchanged.

    Example:
        >>> import torch, vattn
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)).eval()
        >>> vattn.quantise_linears(model, "fp8_per_token", skip=["2"])
        {'0': 'fp8_per_token', '2': 'left: skip'}
    """
    fmt, root = linear_format(format), root_of(model)
    with plain_linears(root):
        undo = use_parts(root)
        try:
            made = _quantise(root, fmt, skip, calibration)
        except BaseException:
            take_back(undo)
            raise
        # FP8 layers stay parts; `disable` takes nothing back then.
        root.__dict__.pop("_vattn_parts", None)
    return made


def _quantise(
    root: nn.Module,
    fmt: LinearFormat,
    skip: str | Iterable[str],
    calibration: Calibration | str | os.PathLike[str] | None,
) -> dict[str, str]:
    found = linears_of(root)
    left = _left(root, found, (skip,) if isinstance(skip, str) else tuple(skip))
    chosen = {name: linear for name, linear in found.items() if name not in left}
    if not chosen:
        kept = "; ".join(f"{name}: {why}" for name, why in left.items()) or "it has none"
        raise ConfigError(
            f"{type(root).__name__} without linear layers to quantise ({kept:.200})", "one at least", "check skip="
        )
    for name, linear in chosen.items():
        check_linear(root, name, linear, fmt)
    inputs = _input_scales(list(chosen), fmt, calibration)
    scales = _weight_scales(chosen, fmt)
    _share(inputs)
    if not (fmt.rows or fmt.blocks):
        _share(scales)
    for name, linear in chosen.items():
        scale = scales[name]
        codes = encode_weight(linear.weight, scale)
        made = FP8Linear(codes, scale, fmt.name, inputs.get(name), linear.bias)
        replace(root, name, made.hold(part_of(linear)))
    if callable(getattr(root, "save_pretrained", None)):
        from vattn.calibration.fp8_saving import describe_linears

        describe_linears(root)
    return {name: left.get(name, fmt.name) for name in found}


def plain_linears(root: nn.Module) -> AbstractContextManager[None]:
    """Undo inside the block what `enable` did to linear layers, and do it again to the layers there after it."""
    own: Any = root.__dict__.get("_vattn_linears")
    return nullcontext() if own is None else own.undone()  # type: ignore[no-any-return]


def has_own_forward(linear: nn.Linear) -> bool:
    """Return whether a linear layer itself, not its class, has another forward, as offloading gives it.

    That of compressed-tensors does not count: it rounds a dequantised layer's input, which quantising it replaces.
    """
    forward = linear.__dict__.get("forward")
    if forward is None:
        return False
    where = getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", "")
    return not where.startswith("compressed_tensors.")


def replace(root: nn.Module, name: str, linear: FP8Linear) -> None:
    """Put a linear layer in the place of another."""
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, linear.train(root.training))


def _left(root: nn.Module, found: dict[str, nn.Linear], skip: tuple[str, ...]) -> dict[str, str]:
    """Return which layers stay as they are, and why."""
    left = {}
    head = root.get_output_embeddings() if callable(getattr(root, "get_output_embeddings", None)) else None  # type: ignore[operator]
    for name, linear in found.items():
        if linear is head:
            left[name] = "left: the head"
        elif not (
            type(linear).forward in (nn.Linear.forward, PartLinear.forward)
            or type(linear).__name__ in ("FP8Linear", *PLAIN)
        ):
            left[name] = f"left: {type(linear).__name__} has a forward of its own"
        elif has_own_forward(linear):
            left[name] = "left: it has a forward of its own"
    for pattern in skip:
        same = [name for name in found if fnmatch(name, pattern) or name.rpartition(".")[2] == pattern]
        if not same:
            names = ", ".join([*found][:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
            raise ConfigError(f"skip={pattern!r}, which no linear layer is called", names, "check the pattern")
        left.update(dict.fromkeys(same, "left: skip"))
    return left


def check_linear(root: nn.Module, name: str, linear: nn.Linear, fmt: LinearFormat) -> None:
    """Refuse a linear layer that cannot become FP8.

    Raises:
        ConfigError, ShapeError, DtypeError, DeviceError: see `quantise_linears`.
    """
    if not name:
        raise ConfigError("a linear layer itself", "a model that holds it", "use FP8Linear.of(linear, format)")
    if isinstance(linear, FP8Linear):
        raise ConfigError(f"{name}, which is {linear.format.name} already", "plain linear layers", "load it anew")
    if linear._forward_hooks or linear._forward_pre_hooks:
        raise ConfigError(f"{name}, which has hooks", "linear layers without", "remove them, or skip this layer")
    weight: Tensor = linear.weight
    if weight.dtype not in MODEL_DTYPES.values() or type(weight.data) is not Tensor:
        raise DtypeError(
            f"{name} with a weight in {weight.dtype} ({type(weight.data).__name__})",
            "weights in fp32, bf16 or fp16",
            "skip it, or load the model without that quantisation",
        )
    others = [other for other, p in root.named_parameters(remove_duplicate=False) if p is weight]
    if len(others) > 1:
        raise ConfigError(f"a weight that is {' and '.join(others)}", "a layer's own", f"skip {name}")
    part = part_of(linear)
    if part is not None and fmt.blocks:
        check_blocks(name, part)
    try:
        check_sizes(linear.in_features, linear.out_features, fmt)
    except ShapeError as error:
        raise ShapeError(f"{name}: {error.got}", error.allowed, error.fix) from error
    check_device(weight.device, fmt)


def check_blocks(name: str, part: WeightPart) -> None:
    """Raise ShapeError for a part of a weight that does not end with a block."""
    if part.size % BLOCK:
        raise ShapeError(
            f"{name}, of which each rank has {part.size} of {part.whole} features, in blocks of {BLOCK}",
            f"multiples of {BLOCK} on each rank",
            "take another number of ranks, or a checkpoint without blocks (fp8_per_token)",
        )


def check_device(device: torch.device, fmt: LinearFormat) -> None:
    """Raise DeviceError for a GPU without FP8 products, or without products of blocks."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY or (fmt.blocks and capability[0] != 9):
        raise DeviceError(
            f"{fmt.name} of linear layers on {torch.cuda.get_device_name(device)}",
            "compute capability 9.0" if fmt.blocks else "compute capability 8.9 and newer",
            "take fp8_per_token" if fmt.blocks and capability >= CAPABILITY else "run on a CPU",
        )


def _input_scales(names: list[str], fmt: LinearFormat, calibration: Any) -> dict[str, Tensor]:
    if (calibration is not None) != fmt.given:
        raise ScaleError(
            f"{fmt.name} {'without a' if calibration is None else 'with a'} calibration",
            "a calibration with fp8_static, and with it alone",
            "vattn.calibrate(model, batches, linears=True)" if fmt.given else "drop it",
        )
    if calibration is None:
        return {}
    found = as_calibration(calibration)
    return {name: found.input_scale(name) for name in names}


def _weight_scales(chosen: dict[str, nn.Linear], fmt: LinearFormat) -> dict[str, Tensor]:
    scales = {name: weight_scale(linear.weight, fmt) for name, linear in chosen.items()}
    for name, linear in chosen.items():
        part = part_of(linear)
        # The scales of the whole weight, where one stands for features of several ranks.
        if part is not None and not fmt.blocks and (part.dim == 1 or not fmt.rows):
            scales[name] = part.largest(scales[name])
    for name, scale in scales.items():
        if not scale.is_meta and not bool(scale.isfinite().all()):
            raise ScaleError(f"weights of {name} that are not finite", "finite ones", "check the checkpoint")
    return scales


def _share(scales: dict[str, Tensor]) -> None:
    """Give layers with one input the largest of their scales."""
    for name in scales:
        parent, _, child = name.rpartition(".")
        for group in SHARED_INPUT:
            if child == group[0]:
                names = [f"{parent}.{other}".lstrip(".") for other in group]
                if all(other in scales for other in names):
                    scales.update(dict.fromkeys(names, torch.stack([scales[other] for other in names]).amax(0)))
