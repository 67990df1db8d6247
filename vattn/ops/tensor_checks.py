"""Refuse one wrong tensor: its shape, dtype, device, strides, and whether it is there. See `vattn.ops.checks`."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from vattn.errors import (
    ConfigError,
    DeviceError,
    DtypeError,
    ScaleError,
    ShapeError,
    StrideError,
    VattnError,
)
from vattn.quantization.formats import dtype_name

_LAYOUTS = {
    "query": "[T, num_heads, head_size]",
    "key": "[T, num_kv_heads, head_size]",
    "value": "[T, num_kv_heads, head_size_v]",
    "kv_cache": "vattn.kv_cache_shape(config, num_blocks) with num_blocks >= 1",
    "cos": "[N, rotary_dim / 2] or [N, rotary_dim]; N = T without positions",
    "sin": "as cos",
    "positions": "[T]",
    "query_out": "[T, num_heads, head_size]",
    "q_weight": "[head_size]",
    "k_weight": "[head_size]",
    "slot_mapping": "[T], one slot per row of key",
    "query_start_loc": "[B + 1] with B = len(seq_lens)",
    "kv_start_loc": "[B + 1] with B >= 1",
    "seq_lens": "[B] with B >= 1",
    "block_table": "[B, W] with W >= 1",
    "output": "[T, num_heads, head_size_v], or head_size_v // 2 columns for NVFP4",
    "output_block_scale": "the output format's block_scale_shape(T, num_heads * head_size_v)",
    "lse": "[T, num_heads]",
    "alibi_slopes": "[num_heads]",
    "sinks": "[num_heads]",
    "causal_flags": "[B]",
    "bias": "[trees, n, n]",
    "tree_id": "[B]",
    "mm_ranges": "[B, R, 2]",
    "local_seq_lens": "[B]",
    "output_lse": "[T, H]",
    "prefix_output": "[T, H, V], as output",
    "suffix_output": "[T, H, V], as output",
    "prefix_lse": "[T, H]",
    "suffix_lse": "[T, H]",
    "input": "[T, N]",
}
"""What each tensor's shape means, for messages."""

_ASKED_BY = {
    "lse": "lse=True",
    "alibi_slopes": "alibi='linear' or 'sqrt'",
    "sinks": "sinks=True",
    "causal_flags": "causality='per_request'",
    "bias": "tree_bias=True",
    "tree_id": "tree_bias=True",
    "mm_ranges": "mm_prefix='full' or 'clamped'",
    "local_seq_lens": "context_parallel=True",
    "output_block_scale": "an output_format with dynamic scales",
    "output_scale": "an output_format with a static scale",
    "q_weight": "a norm in its rope config",
    "k_weight": "a norm in its rope config",
    "q_scale": "query_scale='tensor' or 'head'",
    "k_scale": "kv_scale='tensor' or 'head'",
    "v_scale": "kv_scale='tensor' or 'head'",
}
"""Which config value goes with each optional tensor, for messages."""


def count_of(name: str, tensor: Tensor, least: int) -> int:
    """Return the length of a vector that other shapes are derived from."""
    if tensor.ndim == 1 and tensor.shape[0] >= least:
        return tensor.shape[0]
    raise ShapeError(f"{name} has shape {tuple(tensor.shape)}", _LAYOUTS[name], "pass one entry per request")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Check a tensor that must be contiguous."""
    if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device and tensor.is_contiguous():
        return
    refuse(name, tensor, shape, dtypes, device)
    raise StrideError(
        f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}",
        "contiguous memory",
        f"allocate {name} contiguous; a copy made on the way would not be written back",
    )


def check_column_major(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Check a tensor whose first dimension must be dense."""
    if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device and tensor.t().is_contiguous():
        return
    refuse(name, tensor, shape, dtypes, device)
    raise StrideError(
        f"{name} has strides {tensor.stride()} for shape {shape}",
        f"column-major memory, strides (1, {shape[0]})",
        f"allocate {name} as {shape[::-1]} and pass its transpose",
    )


def check_rows(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Check a tensor whose last dimension alone must be dense."""
    if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device and tensor.stride(-1) == 1:
        return
    refuse(name, tensor, shape, dtypes, device)
    if tensor.shape[-1] > 1 and tensor.numel():
        raise StrideError(
            f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            "a last dimension of stride 1",
            f"call {name}.contiguous()",
        )


def check_optional(
    name: str,
    tensor: Tensor | None,
    wanted: bool,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a contiguous tensor, or that there is none where none is wanted."""
    if tensor is None:
        if wanted:
            refuse_presence(name, given=False, error=ConfigError)
        return
    if not wanted:
        refuse_presence(name, given=True, error=ConfigError)
    check_tensor(name, tensor, shape, dtypes, device)


def check_scale(name: str, scale: Tensor | None, kind: str, num_kv_heads: int, device: torch.device) -> None:
    """Check a scale of one value (`tensor`), of one value per KV head (`head`), or that there is none (`none`)."""
    if scale is None:
        if kind != "none":
            refuse_presence(name, given=False, error=ScaleError)
        return
    if kind == "none":
        refuse_presence(name, given=True, error=ScaleError)
    right = scale.shape == (num_kv_heads,) if kind == "head" else scale.shape in ((), (1,))
    if right and scale.dtype == torch.float32 and scale.device == device and scale.is_contiguous():
        return
    if not right:
        allowed = f"shape ({num_kv_heads},), one per KV head" if kind == "head" else "one value: shape () or (1,)"
        raise ScaleError(f"{name} has shape {tuple(scale.shape)}", allowed, "match the scale kind of the config")
    refuse(name, scale, tuple(scale.shape), (torch.float32,), device)
    raise StrideError(f"{name} has strides {scale.stride()}", "contiguous memory", f"call {name}.contiguous()")


STEP_FIX = "pass query and key of the step's tokens, padding included, or build the step for the tokens of this call"
"""For slots of other rows than those of the call: compiled layers leave it to the op to compare them."""


def refuse(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise for a wrong shape, dtype or device; return if the fault is elsewhere."""
    if tensor.shape != shape:
        meaning = _LAYOUTS[name]
        fix = STEP_FIX if name == "slot_mapping" else f"build {name} from the config and the lengths of this call"
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}", f"{shape} = {meaning}", fix)
    if tensor.dtype not in dtypes:
        refuse_dtype(name, tensor, dtypes)
    if tensor.device != device and device.type == "meta":
        # The others are measured by the call's first tensor, which is the odd one here.
        raise DeviceError(
            f"a tensor on meta beside {name} on {tensor.device}", "all on one device", "pass tensors with values"
        )
    if tensor.device != device:
        raise DeviceError(f"{name} is on {tensor.device}", f"{device}, as the other tensors", f"move {name} there once")


def refuse_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> NoReturn:
    """Raise for a wrong dtype."""
    allowed = dict.fromkeys(dtype_name(dtype) for dtype in dtypes)
    raise DtypeError(
        f"{name} has dtype {dtype_name(tensor.dtype)}", " or ".join(allowed), f"convert {name} or change the config"
    )


def refuse_presence(name: str, *, given: bool, error: type[VattnError]) -> NoReturn:
    """Raise for a tensor that is missing, or that nothing asks for."""
    asked_by = _ASKED_BY[name]
    if given:
        raise error(f"{name} was given, but the config has no {asked_by}", "None", f"pass None or set {asked_by}")
    layout = _LAYOUTS.get(name, "1 value or one per KV head")
    raise error(f"{name} is missing, but the config has {asked_by}", f"a tensor: {layout}", f"pass {name}")
