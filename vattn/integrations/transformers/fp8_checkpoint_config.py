"""What the configuration of an FP8 checkpoint says about its linear layers: how inputs are quantised, what is left out.

Every entry that decides how codes are read is checked: one that cannot be read or means something else is refused.
"""

from __future__ import annotations

import re
from typing import Any

from vattn.errors import ConfigError, UnsupportedRequestError
from vattn.layers.fp8_linear import BLOCK

CACHED = ("k_proj", "v_proj")
"""Linear layers whose output's scale is the cache's."""

FORMATS = ("float-quantized", "naive-quantized", "mixed-precision")
"""Formats of compressed-tensors in which e4m3 codes lie as they are; the last leaves it to the groups."""

INPUT_SCHEMES = ("dynamic", "static")
"""How transformers' own format quantises inputs."""

SCALE_FORMATS = ("float", "ue8m0")
"""How transformers' own format stores scales; the second also rounds those of inputs to powers of two."""

SCALE_DTYPES = (None, "torch.float32", "torch.bfloat16", "torch.float16")
"""In which compressed-tensors may keep the scales of inputs."""

LEFT_OUT = ("ignore", "ignored_layers", "modules_to_not_convert")
"""Entries that list what is not quantised; `ignored_layers` is what AutoFP8 writes."""

BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
"""Where a pattern of `modules_to_not_convert` ends: with a part of a name."""

STRATEGIES = {
    ("tensor", "tensor", False): "fp8_static", ("channel", "tensor", False): "fp8_static",
    ("tensor", "tensor", True): "fp8_dynamic", ("channel", "tensor", True): "fp8_dynamic",
    ("tensor", "token", True): "fp8_per_token", ("channel", "token", True): "fp8_per_token",
    ("block", "group", True): "fp8_group128",
}  # fmt: skip
"""Our formats, by compressed-tensors' strategies of weights and inputs and whether the latter is dynamic."""


def input_format(quantization: dict[str, Any], name: str) -> str:
    """Return how a checkpoint's configuration wants the input of a linear layer quantised, as a name of ours.

    Raises:
        UnsupportedRequestError: in a way that FP8Linear does not. ConfigError: an entry that cannot be read.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        return _of_transformers(quantization, name)
    if method == "compressed-tensors":
        return _of_compressed_tensors(quantization, name)
    raise not_supported(f"quant_method={method!r:.80}", name)


def _of_transformers(quantization: dict[str, Any], name: str) -> str:
    fmt, scheme = quantization.get("fmt", "e4m3"), quantization.get("activation_scheme", "dynamic")
    blocks, scales = quantization.get("weight_block_size"), quantization.get("scale_fmt", "float")
    if fmt != "e4m3":
        raise not_supported(f"fmt={fmt!r:.80}", name)
    if scheme not in INPUT_SCHEMES:
        raise _unreadable(f"activation_scheme={scheme!r:.80}", " or ".join(INPUT_SCHEMES))
    if scales not in SCALE_FORMATS:
        raise _unreadable(f"scale_fmt={scales!r:.80}", " or ".join(SCALE_FORMATS))
    if scales != "float":
        raise not_supported(f"scales that are powers of two (scale_fmt={scales!r})", name)
    if blocks is None:
        return "fp8_static" if scheme == "static" else "fp8_per_token"
    if not isinstance(blocks, list):
        raise _unreadable(f"weight_block_size={blocks!r:.80}", "a list of two sizes, or null")
    if blocks == [BLOCK, BLOCK] and scheme == "dynamic":
        return "fp8_group128"
    raise not_supported(f"blocks of {blocks!r:.80}, {scheme} inputs", name)


def _of_compressed_tensors(quantization: dict[str, Any], name: str) -> str:
    sparse, rotated = _part(quantization, "sparsity_config"), _part(quantization, "transform_config")
    if rotated.get("config_groups"):
        raise not_supported("rotations (transform_config)", name)
    if sparse.get("format", "dense") != "dense":
        raise not_supported("sparse weights", name)
    group = _group(quantization, name)
    for found in (quantization.get("format"), group.get("format")):
        if found is not None and found not in FORMATS:
            raise not_supported(f"format={found!r:.80}", name)
    if group.get("input_activations") is None:
        raise not_supported("inputs that are not FP8", name)
    weights, inputs = _part(group, "weights"), _part(group, "input_activations")
    # The codes themselves say what weights are where the configuration does not; nothing else does for inputs.
    if (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        raise not_supported("inputs that are not FP8", name)
    if (weights.get("type", "float"), weights.get("num_bits", 8)) != ("float", 8):
        raise not_supported("weights that are not FP8 by the configuration", name)
    if not (_flag(weights, "symmetric", True) and _flag(inputs, "symmetric", True)):
        raise not_supported("zero points (symmetric is false)", name)
    if _part(group, "output_activations") and not name.endswith(CACHED):
        raise not_supported("quantised outputs", name)
    # Scales of weights are in the files; those of inputs would be rounded to this dtype.
    if inputs.get("scale_dtype") not in SCALE_DTYPES:
        raise not_supported(f"scales of inputs in {inputs['scale_dtype']!r:.80}", name)
    kind = (_strategy(weights), _strategy(inputs), _flag(inputs, "dynamic", False))
    if kind not in STRATEGIES:
        raise not_supported(f"weights by {kind[0]}, inputs by {kind[1]}, {'dynamic' if kind[2] else 'static'}", name)
    sizes = (weights.get("block_structure"), inputs.get("group_size"))
    if kind[0] == "block" and sizes not in (([BLOCK, BLOCK], BLOCK), (f"{BLOCK}x{BLOCK}", BLOCK)):
        raise not_supported(f"blocks of {sizes[0]!r:.80}, inputs in groups of {sizes[1]!r:.80}", name)
    return STRATEGIES[kind]


def _group(quantization: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the group of a compressed-tensors configuration that a linear layer belongs to.

    As that library has it: names before patterns, those in alphabetical order, and the class at last.
    """
    try:
        groups = {target: group for group in quantization["config_groups"].values() for target in group["targets"]}
        named = [target for target in groups if target == name]
        patterns = sorted(target for target in groups if target.startswith("re:"))
        matching = [*named, *(target for target in patterns if re.match(target[3:], name)), "Linear"]
    except (AttributeError, KeyError, TypeError, re.error) as error:
        raise ConfigError(
            f"config_groups that cannot be read ({type(error).__name__}: {error})",
            "groups with targets",
            "check config.json",
        ) from error
    for target in matching:
        if isinstance(groups.get(target), dict):
            return groups[target]
    raise not_supported("no group of the configuration", name)


def refuse_ignored(quantization: dict[str, Any], names: tuple[str, ...]) -> None:
    """Refuse a configuration that leaves out a linear layer whose weight is in FP8.

    Args:
        quantization: the configuration.
        names: of the layer, in the model and in the files.

    Raises:
        ConfigError: so it is, or what it leaves out cannot be read.
    """
    for key in LEFT_OUT:
        for entry in _entries(quantization, key):
            if any(_leaves_out(key, entry, name) for name in names):
                raise ConfigError(
                    f"{names[-1]}.weight in FP8, which {key} leaves out by {entry!r:.80}",
                    "FP8 weights of layers that the configuration quantises",
                    "check config.json, or fetch the checkpoint again",
                )


def refuse_converted(quantization: dict[str, Any], tables: list[str], plain: list[str]) -> None:
    """Refuse a configuration that makes more FP8 than linear layers, or linear layers whose weights are not.

    transformers reads `modules_to_convert` as ends of names, of embedding tables above all, and leaves out of it what
    `modules_to_not_convert` names.

    Args:
        quantization: the configuration.
        tables: names of the model's embeddings.
        plain: of its linear layers whose weights are not in FP8.

    Raises:
        UnsupportedRequestError: it names an embedding. ConfigError: it names a plain layer, or cannot be read.
    """
    left_out = _entries(quantization, "modules_to_not_convert")
    for entry in _entries(quantization, "modules_to_convert"):
        for name in (*tables, *plain):
            if not name.endswith(entry) or any(_leaves_out("modules_to_not_convert", left, name) for left in left_out):
                continue
            if name in tables:
                raise not_supported(f"an embedding table in FP8 (modules_to_convert has {entry!r:.80})", name)
            raise ConfigError(
                f"{name}, which modules_to_convert makes FP8 by {entry!r:.80}, and whose weight is not in FP8",
                "FP8 weights of every layer that the configuration quantises",
                "check config.json, or fetch the checkpoint again",
            )


def _entries(quantization: dict[str, Any], key: str) -> list[str]:
    """Return an entry that is a list of names and patterns, empty if there is none."""
    entries = quantization.get(key)
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise _unreadable(f"{key}={entries!r:.80}", "a list of names and patterns")
    return entries


def _leaves_out(key: str, entry: str, name: str) -> bool:
    """Return whether an entry leaves a layer out, by the rules of the library that reads it.

    transformers also takes the end of a part of a name; older releases did not, so that this decides nothing here.
    """
    try:
        if key == "modules_to_not_convert":
            return name.endswith("." + entry) or re.match(f"(?:{entry}){BOUNDARY}", name) is not None
        if entry.startswith("re:"):
            return re.match(entry.removeprefix("re:"), name) is not None
    except re.error as error:
        raise _unreadable(f"{key} with {entry!r:.80} ({error})", "names and regular expressions") from error
    return entry in (name, "Linear")


def _part(holder: dict[str, Any], key: str) -> dict[str, Any]:
    """Return an entry that is a dictionary, empty if there is none."""
    found = holder.get(key)
    if found is not None and not isinstance(found, dict):
        raise _unreadable(f"{key}={found!r:.80}", "a dictionary, or null")
    return found or {}


def _flag(holder: dict[str, Any], key: str, default: bool) -> bool:
    found = holder.get(key, default)
    if not isinstance(found, bool):
        raise _unreadable(f"{key}={found!r:.80}", "true or false")
    return found


def _strategy(holder: dict[str, Any]) -> str | None:
    found = holder.get("strategy")
    if found is not None and not isinstance(found, str):
        raise _unreadable(f"strategy={found!r:.80}", "a name, such as tensor or channel")
    return found


def _unreadable(what: str, allowed: str) -> ConfigError:
    return ConfigError(f"a quantisation configuration with {what}", allowed, "check config.json")


def not_supported(what: str, name: str) -> UnsupportedRequestError:
    """Return the error for a layer that is quantised in a way that FP8Linear does not have."""
    return UnsupportedRequestError(
        f"{name}: {what}",
        "FP8 of weights and inputs: transformers' fp8, compressed-tensors' float-quantized",
        "let transformers dequantise this checkpoint, and use vattn.quantise_linears",
    )
