"""Read the configuration of an FP8 checkpoint: how each linear layer quantises its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vattn.errors import ConfigError, MissingPackageError, UnsupportedRequestError
from vattn.layers.fp8_linear import BLOCK

CACHED = ("k_proj", "v_proj")
"""Linear layers whose output scale is that of the cache."""

FORMATS = (None, "float-quantized", "naive-quantized", "mixed-precision")
"""Formats of compressed-tensors that store e4m3 codes as they are; the last one leaves the format to the groups."""

STRATEGIES = {
    ("tensor", "tensor", False): "fp8_static", ("channel", "tensor", False): "fp8_static",
    ("tensor", "tensor", True): "fp8_dynamic", ("channel", "tensor", True): "fp8_dynamic",
    ("tensor", "token", True): "fp8_per_token", ("channel", "token", True): "fp8_per_token",
    ("block", "group", True): "fp8_group128",
}  # fmt: skip
"""Linear formats by compressed-tensors' strategy of weights, strategy of inputs, and whether inputs are dynamic."""


def input_format(quantization: dict[str, Any], name: str, linear: nn.Linear) -> str:
    """Return the linear format that a checkpoint's configuration gives a layer.

    Args:
        quantization: the entry `quantization_config` of `config.json`.
        name: of the layer in the model.
        linear: the layer.

    Raises:
        ConfigError: an entry that cannot be read.
        MissingPackageError: a configuration of compressed-tensors without that package.
        UnsupportedRequestError: a scheme that FP8Linear does not have.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        return _of_transformers(quantization, name)
    if method == "compressed-tensors":
        return _of_compressed_tensors(quantization, name, linear)
    raise not_supported(f"quant_method={method!r:.80}", name)


def _of_transformers(quantization: dict[str, Any], name: str) -> str:
    fmt, scheme = quantization.get("fmt", "e4m3"), quantization.get("activation_scheme", "dynamic")
    blocks, scales = quantization.get("weight_block_size"), quantization.get("scale_fmt", "float")
    if fmt != "e4m3":
        raise not_supported(f"fmt={fmt!r:.80}", name)
    if scheme not in ("dynamic", "static"):
        raise not_supported(f"activation_scheme={scheme!r:.80}", name)
    if scales != "float":
        # With "ue8m0" the scales of inputs are rounded to powers of two.
        raise not_supported(f"scale_fmt={scales!r:.80}", name)
    if blocks is None:
        return "fp8_static" if scheme == "static" else "fp8_per_token"
    if blocks == [BLOCK, BLOCK] and scheme == "dynamic":
        return "fp8_group128"
    raise not_supported(f"blocks of {blocks!r:.80}, {scheme} inputs", name)


def _of_compressed_tensors(quantization: dict[str, Any], name: str, linear: nn.Linear) -> str:
    scheme, formats = _scheme(quantization, name, linear)
    wrong = [fmt for fmt in formats if fmt not in FORMATS]
    if wrong:
        raise not_supported(f"format={wrong[0]!r:.80}", name)
    weights, inputs = scheme.weights, scheme.input_activations
    for what, args in (("weights", weights), ("inputs", inputs)):
        if args is None or (args.type, args.num_bits) != ("float", 8):
            raise not_supported(f"{what} that are not FP8", name)
        if not args.symmetric:
            raise not_supported(f"zero points of {what} (symmetric is false)", name)
    if scheme.output_activations is not None and not name.endswith(CACHED):
        raise not_supported("quantised outputs", name)
    if inputs.scale_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        # The scales of inputs would be rounded to this dtype.
        raise not_supported(f"scales of inputs in {inputs.scale_dtype}", name)
    kind = (weights.strategy, inputs.strategy, inputs.dynamic)
    sizes = (weights.block_structure, inputs.group_size)
    if kind not in STRATEGIES or sizes not in ((None, None), ([BLOCK, BLOCK], BLOCK)):
        raise not_supported(f"weights by {kind[0]}, inputs by {kind[1]}, dynamic={kind[2]}, blocks of {sizes}", name)
    return STRATEGIES[kind]


def _scheme(quantization: dict[str, Any], name: str, linear: nn.Linear) -> tuple[Any, tuple[str | None, ...]]:
    """Return the scheme that compressed-tensors gives a layer, and the formats of its codes."""
    try:
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.utils import match_targets
    except ImportError as error:
        raise MissingPackageError(
            "a checkpoint of compressed-tensors without that package",
            "compressed-tensors >= 0.12",
            "pip install compressed-tensors",
        ) from error
    try:
        given = {key: value for key, value in quantization.items() if value is not None}
        rotated = bool(given.get("transform_config", {}).get("config_groups"))
        sparse = given.get("sparsity_config", {}).get("format", "dense") != "dense"
        groups = QuantizationConfig.model_validate(given).config_groups.values()
        schemes = {target: scheme for scheme in groups for target in scheme.targets}
        targets = match_targets(name, linear, schemes)
    except Exception as error:  # pydantic's, re.error, or what a validator raises
        raise ConfigError(
            f"a quantisation configuration that compressed-tensors cannot read: {' '.join(str(error).split()):.200}",
            "what that library writes",
            "check config.json",
        ) from error
    if rotated or sparse:
        raise not_supported("rotations (transform_config)" if rotated else "sparse weights", name)
    if not targets:
        raise not_supported("no group of the configuration", name)
    scheme = schemes[targets[0]]
    return scheme, (given.get("format"), scheme.format)


def not_supported(what: str, name: str) -> UnsupportedRequestError:
    """Return the error for a layer that is quantised in a way that FP8Linear does not have."""
    return UnsupportedRequestError(
        f"{name}: {what}",
        "FP8 of weights and inputs: transformers' fp8, compressed-tensors' float-quantized",
        "let transformers dequantise this checkpoint, and use vattn.quantise_linears",
    )
