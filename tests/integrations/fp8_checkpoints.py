"""Small FP8 checkpoints in a folder, as compressed-tensors and transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

INPUT_SCALE = 0.05


def write_compressed_tensors(
    folder: Path, model: Any, weights: str = "tensor", inputs: str = "tensor", cache: bool = True
) -> None:
    """Quantise a model and save it by compressed-tensors.

    Args:
        weights: strategy, `"tensor"`, `"channel"` or `"block"`.
        inputs: `"tensor"` for given scales, `"token"` or `"group"` for computed ones.
        cache: whether keys and values have scales: 0.03 and 0.05, times 2 in each later layer.
    """
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    def fp8(strategy: str, **more: Any) -> Any:
        if strategy == "block":
            more["block_structure"] = [128, 128]
        if strategy == "group":
            more["group_size"] = 128
        return QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **more)

    scheme = QuantizationScheme(
        targets=["Linear"], weights=fp8(weights), input_activations=fp8(inputs, dynamic=inputs != "tensor")
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, kv_cache_scheme=fp8("tensor", dynamic=False) if cache else None,
        ignore=["lm_head"], format="float-quantized",
    )  # fmt: skip
    apply_quantization_config(model, config)
    for module in model.modules():
        if type(module) is nn.Linear and hasattr(module, "weight_scale"):
            _set_scales(module)
            compress_module(module, "float-quantized")
    model.save_pretrained(folder)
    if cache:
        # compressed-tensors 0.20 finds no attention in transformers 5.24, and gives it no scales.
        names = [name for name, _ in model.named_modules() if name.endswith("self_attn")]
        edit_tensors(folder, **{
            f"{name}.{kind}_scale": torch.tensor([first * 2**layer])
            for layer, name in enumerate(names) for kind, first in (("k", 0.03), ("v", 0.05))
        })  # fmt: skip
    described = {**config.model_dump(mode="json"), "quant_method": "compressed-tensors"}
    edit_config(folder, quantization_config={**described, "quantization_status": "compressed"})


def _set_scales(linear: Any) -> None:
    """Give a linear layer the scales that compressed-tensors' own observers would."""
    shape, weight = linear.weight_scale.shape, linear.weight.abs()
    if (len(shape) == 2 and shape[1] > 1) or linear.quantization_scheme.weights.strategy == "block":
        weight = nn.functional.pad(weight, (0, -weight.shape[1] % 128, 0, -weight.shape[0] % 128))
        largest = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))
    else:
        largest = weight.amax(1, keepdim=True) if len(shape) == 2 else weight.amax()[None]
    linear.weight_scale.copy_(largest.reshape(shape) / 448)
    if hasattr(linear, "input_scale"):
        linear.input_scale.fill_(INPUT_SCALE)


def write_transformers_fp8(folder: Path, model: Any, blocks: bool = True, **extra: torch.Tensor) -> None:
    """Quantise the linear layers of a model but the head by transformers' own FP8 format, and save it.

    Args:
        blocks: 128 x 128, with computed scales of the input; otherwise one scale a weight and given ones.
        extra: further tensors by name.
    """
    from safetensors.torch import save_file
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    scheme = "dynamic" if blocks else "static"
    config = FineGrainedFP8Config(scheme, weight_block_size=(128, 128) if blocks else None)
    quantise = Fp8Quantize(FineGrainedFP8HfQuantizer(config))
    model.save_pretrained(folder)
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            tensors |= quantise.convert({f"{name}.weight": tensors[f"{name}.weight"]})
            if not blocks:
                scale = tensors[f"{name}.weight_scale_inv"]
                tensors[f"{name}.weight_scale_inv"] = scale.reshape(())
                tensors[f"{name}.activation_scale"] = torch.tensor(INPUT_SCALE)
    save_file({name: x.contiguous() for name, x in (tensors | extra).items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=config.to_dict())


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of a checkpoint's configuration; `None` drops one."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(folder: Path, drop: str = "", **extra: torch.Tensor) -> None:
    """Drop the tensors whose name ends with something, and add others."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    kept = {name: x for name, x in load_file(path).items() if not drop or not name.endswith(drop)}
    save_file(kept | extra, path, metadata={"format": "pt"})
