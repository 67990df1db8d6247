"""`load_fp8_linears`: the linear layers of an FP8 checkpoint with the codes and scales of its files.

transformers dequantises FP8 checkpoints where it has no kernel for them, and drops tensors that its modules do not
have. The files hold everything: compressed-tensors' names (`weight_scale`, `input_scale`, `k_scale`) and those of
transformers' own FP8 format (`weight_scale_inv`, `activation_scale`).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from vattn.calibration.calibrate import linears_of, root_of
from vattn.calibration.fp8_saving import describe_linears
from vattn.calibration.quantise_linears import check_blocks, check_device, has_own_forward, plain_linears, replace
from vattn.errors import ConfigError, ScaleError, UnsupportedRequestError
from vattn.integrations.transformers.checkpoint import Checkpoint, folder_of
from vattn.integrations.transformers.fp8_checkpoint_config import CACHED, input_format, not_supported
from vattn.layers.fp8_linear import BLOCK, LINEAR_FORMATS, FP8Linear, check_scales
from vattn.layers.weight_parts import part_of, take_back, use_parts, whole_sizes

SCALE_NAMES = ("weight_scale", "weight_scale_inv")
INPUT_NAMES = ("input_scale", "activation_scale")
USED = {"weight", "bias", *SCALE_NAMES, *INPUT_NAMES, "k_scale", "v_scale", "kv_scale"}
"""Names of tensors of an FP8 layer that linear layers or the cache take."""


def load_fp8_linears(model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Replace the linear layers that a checkpoint holds in FP8 by `vattn.layers.fp8_linear.FP8Linear`s, in place.

    Codes and scales are read from the files, also where transformers has dequantised them. Needs no GPU. A
    configuration of compressed-tensors is read by that package, as transformers needs it to load the model.

    Args:
        model: of transformers, loaded from that checkpoint, before `enable`.
        folder: the checkpoint; default where the model was loaded from.

    Returns:
        By name of each linear layer of the model, its format, or "left: not FP8 in the checkpoint".

    Raises:
        ConfigError: no local folder, no FP8 weights in it, files that cannot be read or hold a tensor twice, other
            shapes or biases than the model's, a configuration that cannot be read or leaves out a layer which is in
            FP8, layers with hooks or a forward of their own.
        MissingPackageError: safetensors is not installed, or compressed-tensors for a configuration of its own.
        UnsupportedRequestError: weights, inputs or outputs quantised in another way, rotations, sparse weights, FP8
            weights of other layers than linear ones, such as merged experts.
        ScaleError: missing scales, scales or other tensors that no layer uses, scales of other shapes or dtypes, codes
            of NaN.
        DeviceError: a GPU without FP8.
            After any of these the model is unchanged.

    Example: see the guide, "Hugging Face models".
    """
    root = root_of(model)
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(f"folder={folder!r:.80}", "a path", "name the checkpoint's folder")
    path = folder_of(root) if folder is None else Path(folder)
    if path is None:
        name = getattr(root, "name_or_path", "")
        raise ConfigError(
            f"a {type(root).__name__} {f'from {name!r}' if name else 'that was loaded from nowhere'}, and no folder",
            "a model from a local folder of safetensors, or the folder",
            "pass folder=",
        )
    with plain_linears(root):
        undo = use_parts(root)
        try:
            found = _load(root, Checkpoint(path))
        except BaseException:
            take_back(undo)
            raise
        root.__dict__.pop("_vattn_parts", None)
    return found


def _load(root: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    linears = linears_of(root)
    weights = [name for name in checkpoint if name.endswith(".weight") and checkpoint.dtype(name).startswith("F8_")]
    if not weights:
        raise ConfigError(
            f"{checkpoint.folder} without FP8 weights", "FP8 weights", "vattn.quantise_linears(model, ...)"
        )
    made: dict[str, FP8Linear] = {}
    for weight in weights:
        name = _owner_exactly(weight.removesuffix(".weight"), linears)
        if name is None and hasattr(root, "_pp_stage"):
            # Of another stage.
            continue
        if name is None:
            raise UnsupportedRequestError(
                f"{weight} in FP8, which is no linear layer of {type(root).__name__}",
                "FP8 weights of linear layers, which embeddings and merged experts are not",
                "let transformers dequantise this checkpoint, and use vattn.quantise_linears",
            )
        if name in made:
            raise UnsupportedRequestError(
                f"{weight} in FP8, one of several weights that {name} could have",
                "one weight for each linear layer",
                "name a checkpoint of this model alone",
            )
        made[name] = _read(checkpoint, weight.removesuffix("weight"), name, linears[name])
    _check_all_used(checkpoint, set(weights))
    for name, linear in made.items():
        replace(root, name, linear)
    describe_linears(root)
    return {name: made[name].format.name if name in made else "left: not FP8 in the checkpoint" for name in linears}


def _owner_exactly(name: str, linears: dict[str, nn.Linear]) -> str | None:
    same = [ours for ours in linears if ours == name or ours.endswith("." + name) or name.endswith("." + ours)]
    return same[0] if len(same) == 1 else None


def _read(checkpoint: Checkpoint, prefix: str, name: str, linear: nn.Linear) -> FP8Linear:
    _check_linear(checkpoint, prefix, name, linear)
    codes, part = checkpoint.tensor(prefix + "weight"), part_of(linear)
    scale, given = _scale(checkpoint, prefix, SCALE_NAMES), _scale(checkpoint, prefix, INPUT_NAMES)
    if scale is None:
        raise ScaleError(f"{prefix}weight in FP8 without a scale", " or ".join(SCALE_NAMES), "check the checkpoint")
    fmt = input_format(checkpoint.quantization, name, linear)
    if (given is not None) != LINEAR_FORMATS[fmt].given:
        raise ScaleError(
            f"{prefix[:-1]} {'without' if given is None else 'with'} a scale of its input",
            f"{'one' if LINEAR_FORMATS[fmt].given else 'none'}, as the configuration requests {fmt}",
            "check config.json",
        )
    device = linear.weight.device
    check_device(device, LINEAR_FORMATS[fmt])
    dtype = linear.bias.dtype if linear.bias is not None else None
    bias = checkpoint.tensor(prefix + "bias").to(device, dtype) if prefix + "bias" in checkpoint else None
    check_scales({prefix + "weight_scale": scale, prefix + "input_scale": given})
    if not LINEAR_FORMATS[fmt].blocks:
        rows = codes.shape[0]
        if scale.numel() != 1 and tuple(scale.shape) not in ((rows,), (rows, 1)):
            raise ScaleError(
                f"{scale.numel()} scales of {prefix}weight, of shape {tuple(scale.shape)}",
                f"1 or {rows}, of shape [{rows}] or [{rows}, 1]",
                "check the checkpoint",
            )
        scale = scale.reshape(-1)
        if LINEAR_FORMATS[fmt].rows:
            scale = scale.expand(codes.shape[0])
    if part is not None:
        codes = part.of(codes).contiguous()
        if LINEAR_FORMATS[fmt].blocks:
            check_blocks(name, part)
            scale = part.of(scale, BLOCK)
        elif part.dim == 0 and scale.numel() != 1:
            scale = part.of(scale)
        bias = part.of(bias).contiguous() if bias is not None and part.dim == 0 else bias
    codes = codes.to(device)
    if not codes.is_meta and bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ScaleError(f"codes of NaN in {prefix}weight", "finite weights", "check the checkpoint")
    return FP8Linear(codes, scale.float().contiguous().to(device), fmt, given, bias).hold(part)


def _check_linear(checkpoint: Checkpoint, prefix: str, name: str, linear: nn.Linear) -> None:
    """Refuse codes that the linear layer of this name cannot have."""
    codes = checkpoint.tensor(prefix + "weight")
    if codes.dtype is not torch.float8_e4m3fn:
        raise not_supported(f"weights in {codes.dtype}", name)
    if tuple(codes.shape) != whole_sizes(linear):
        raise ConfigError(f"{prefix}weight of {tuple(codes.shape)}", f"that of {name}", "check the checkpoint")
    if (prefix + "bias" in checkpoint) != (linear.bias is not None):
        raise ConfigError(
            f"{prefix}weight {'with' if linear.bias is None else 'without'} a bias",
            f"{'none' if linear.bias is None else 'one'}, as {name} has it",
            "check that this checkpoint is the model's",
        )
    hooks = {**linear._forward_hooks, **linear._forward_pre_hooks}
    if hooks or has_own_forward(linear):
        raise ConfigError(
            f"{name}, which has hooks or a forward of its own", "linear layers without", "remove them first"
        )


def _scale(checkpoint: Checkpoint, prefix: str, names: tuple[str, ...]) -> Tensor | None:
    found = [name for name in names if prefix + name in checkpoint]
    if len(found) > 1:
        raise ScaleError(f"{prefix}{found[0]} and {found[1]}", "one of them", "check the checkpoint")
    return checkpoint.tensor(prefix + found[0]) if found else None


def _check_all_used(checkpoint: Checkpoint, weights: set[str]) -> None:
    """Refuse scales of linear layers that are not in FP8, and what else belongs to one that is: smoothing, an order."""
    for name in checkpoint:
        prefix, _, last = name.rpartition(".")
        quantised = f"{prefix}.weight" in weights
        if last in (*SCALE_NAMES, *INPUT_NAMES) and not quantised:
            raise ScaleError(f"{name} for a weight that is not FP8", "scales of FP8 weights", "check the checkpoint")
        if not quantised or last in USED or (last == "output_scale" and prefix.endswith(CACHED)):
            continue
        if not (last.endswith("zero_point") and not bool(checkpoint.tensor(name).float().any())):
            raise ScaleError(
                f"{name}, which an FP8 linear layer has no use for",
                f"{', '.join(sorted(USED))}",
                "let transformers dequantise this checkpoint, and use vattn.quantise_linears",
            )
