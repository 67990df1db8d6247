"""What `save_pretrained` has to write about FP8 linear layers: a configuration as compressed-tensors has it.

Codes and scales are in the state dict under the names of compressed-tensors already. Without the configuration
transformers would read the codes as weights, and drop the scales.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from vattn.layers.fp8_linear import BLOCK, FP8Linear

GROUPS: dict[int, dict[str, Any]] = {
    1: {"strategy": "tensor"},
    2: {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
}
"""How compressed-tensors calls scales of a weight, by their dimensions, where they are not one for each row."""

INPUTS: dict[str, dict[str, Any]] = {
    "fp8_static": {"strategy": "tensor", "dynamic": False},
    "fp8_dynamic": {"strategy": "tensor", "dynamic": True},
    "fp8_per_token": {"strategy": "token", "dynamic": True},
    "fp8_group128": {"strategy": "group", "dynamic": True, "group_size": BLOCK},
}
"""Same for the input, by our formats."""


def own_config(model: Any) -> None:
    """Give a model a config of its own, since which attention runs is written there and models may share a config."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if hasattr(value, "_attn_implementation") and id(value) in copies:
                module.__dict__[name] = copies[id(value)]


def describe_linears(model: Any) -> None:
    """Write into the configuration of a transformers model which of its linear layers are FP8, and how.

    The configuration becomes the model's own, should others share it.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    groups: dict[str, dict[str, Any]] = {}
    for name, linear in linears.items():
        if isinstance(linear, FP8Linear):
            scheme = _scheme(linear)
            groups.setdefault(str(scheme), scheme)["targets"].append(name)
    own_config(model)
    model.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups.values())},
        "ignore": [name for name, linear in linears.items() if not isinstance(linear, FP8Linear)],
        "kv_cache_scheme": None,
    }
    # What transformers loaded the model with, if anything, describes what it was then.
    model.hf_quantizer = None


def _scheme(linear: FP8Linear) -> dict[str, Any]:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {"strategy": "channel"} if linear.scales_rows else GROUPS[linear.weight_scale.dim()]
    return {
        "targets": [],
        "weights": {**fp8, "dynamic": False, **weights},
        "input_activations": {**fp8, **INPUTS[linear.format.name]},
    }
