"""The up-projection of a latent attention layer as one tensor, whatever module it comes in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vattn.config.arguments import integer
from vattn.errors import ConfigError, ScaleError, ShapeError
from vattn.ops.reference.mla_absorb import dequantise_blocks
from vattn.quantization.formats import dtype_name

_BLOCK = (128, 128)
"""Rows and columns of a weight block where the module names none."""

_SAME = 1e-3
"""Relative error up to which two results of one linear map are the same."""

_SCALES = ("weight_scale", "weight_scale_inv")

LOAD_FIRST = "load the weights, then call process_weights_after_loading(), or bind a cache, which does it"


class WeightsWithoutValues(ConfigError):
    """Weights on meta, or not finite: of a projection that is not loaded yet, or damaged."""


class ScalesWithoutValues(ScaleError):
    """Scales of weights that are no factors, for the same reasons."""


class TensorState(NamedTuple):
    """What tells one state of a tensor from another without looking at its values."""

    identity: int
    version: int
    """As torch counts changes in place; -1 of a tensor made in inference mode: torch does not count its changes."""
    address: int
    """Of the first value; 0 of a tensor without memory of its own."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def projection_weight(module: nn.Module, rows: int, columns: int, shards: int = 1) -> Tensor:
    """Return the fp32 matrix `[rows, columns]` that a linear module multiplies by, or one rank's `rows / shards` of it.

    Plain weights and e4m3 weights with `weight_scale` or `weight_scale_inv` (one value, one per row, or one per block)
    are read, of distributed ones this rank's part; any other module is called with a unit matrix, and with
    some other inputs to see that it is linear.

    Raises:
        ConfigError: a bias, a module that is not linear, weights on meta (`WeightsWithoutValues`), or scales under both
            names.
        ShapeError: the module projects between other widths, or its scales fit no granularity.
        ScaleError: scales of a dtype that is no float, or some that are not positive and finite
            (`ScalesWithoutValues`).
    """
    weight: Any = getattr(module, "weight", None)
    if type(weight).__name__ == "DTensor":
        weight = weight.to_local()
    allowed = (rows, rows // shards)
    if getattr(module, "bias", None) is not None:
        raise ConfigError(f"kv_b_proj {type(module).__name__} with a bias", "no bias", "make it with bias=False")
    if any(tensor.is_meta for tensor in _tensors(module)):
        raise WeightsWithoutValues("kv_b_proj's weight is on meta, without values", "loaded weights", LOAD_FIRST)
    if type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2 and weight.layout is torch.strided:
        scale = _scale(module)
        if weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) and scale is None:
            _check_shape(tuple(weight.shape), allowed, columns)
            return weight.detach().float()
        if weight.dtype == torch.float8_e4m3fn and isinstance(scale, Tensor):
            upright = weight.shape[1] == columns and weight.shape[0] in allowed
            transposed = not upright and weight.shape[0] == columns and weight.shape[1] in allowed
            matrix = weight.detach().t() if transposed else weight.detach()
            _check_shape(tuple(matrix.shape), allowed, columns)
            return _dequantised(matrix, scale.detach(), getattr(module, "weight_block_size", None))
    return _weight_by_calls(module, allowed, columns)


def check_values(weight: Tensor, dtype: torch.dtype) -> None:
    """Refuse a weight with values that are not finite, or that are not in the dtype it will have. Reads the device.

    Raises:
        WeightsWithoutValues: NaN, infinities, or values beyond the dtype.
    """
    wrong = ~weight.to(dtype).isfinite()
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise WeightsWithoutValues(
            f"kv_b_proj's weight has {int(wrong.sum())} values that are not finite in {dtype_name(dtype)}, such as "
            f"{float(weight[row, column])} in row {row}, column {column}",
            f"weights that are finite in {dtype_name(dtype)}",
            f"{LOAD_FIRST}; check the checkpoint's weights and scales",
        )


def weights_version(module: nn.Module) -> tuple[TensorState, ...]:
    """Return what tells one state of a module's weights from another without looking at values.

    Looked at are the parameters of the module and its parts and buffers called `weight...`; other buffers, which may be
    counters, and plain tensors called so where there are none. Not seen are values written in place where torch does
    not count: to tensors made in inference mode, through `.data` or `.detach().numpy()`.
    """
    found: list[Tensor] = []
    for part in module.modules():
        found += [tensor for tensor in part._parameters.values() if tensor is not None]
        found += [t for name, t in part._buffers.items() if t is not None and name.startswith("weight")]
    if not found:
        found = [t for name, t in vars(module).items() if name.startswith("weight") and isinstance(t, Tensor)]
        found += list(module.buffers())
    return tuple(tensor_state(tensor) for tensor in found)


def tensor_state(tensor: Tensor) -> TensorState:
    """Return what tells a tensor from others, and from itself before torch has seen it change."""
    version = -1 if tensor.is_inference() else tensor._version
    return TensorState(id(tensor), version, _address(tensor), tuple(tensor.shape), tensor.dtype)


def _address(tensor: Tensor) -> int:
    if type(tensor).__name__ == "DTensor":
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Sparse tensors, and classes of tensors that wrap others.
        return 0


def _scale(module: nn.Module) -> Any:
    """Return the scales of a weight, under either name; `None` for none."""
    given = [name for name in _SCALES if getattr(module, name, None) is not None]
    if len(given) > 1:
        raise ConfigError(
            f"kv_b_proj {type(module).__name__} with {' and '.join(given)}",
            "scales under one of these names: both are factors of the codes",
            "set the one that does not belong to the weight to None",
        )
    return getattr(module, given[0]) if given else None


def _dequantised(weight: Tensor, scale: Tensor, block: Any) -> Tensor:
    if not scale.is_floating_point():
        raise ScaleError(
            f"kv_b_proj's scales of {dtype_name(scale.dtype)}",
            "scales of a float dtype, float8_e8m0fnu for stored exponents",
            "view exponents as torch.float8_e8m0fnu",
        )
    wide_scale = scale.float()
    wrong = ~(wide_scale.isfinite() & (wide_scale > 0))
    if bool(wrong.any()):
        raise ScalesWithoutValues(
            f"{int(wrong.sum())} of {scale.numel()} scales of kv_b_proj are no factors, such as "
            f"{float(wide_scale[wrong][0])}",
            "positive finite scales",
            f"{LOAD_FIRST}; check the checkpoint's scales",
        )
    if scale.numel() == 1:
        return weight.float() * wide_scale.view(1)
    if scale.shape in ((weight.shape[0],), (weight.shape[0], 1)):
        return weight.float() * wide_scale.view(-1, 1)
    high, wide = _block_size(block)
    blocks = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
    if tuple(scale.shape) != blocks:
        raise ShapeError(
            f"kv_b_proj's weight {tuple(weight.shape)} with scales {tuple(scale.shape)}",
            f"one value, {weight.shape[0]} (one per row), or {blocks} for blocks of {high} x {wide}",
            "set weight_block_size on the module",
        )
    return dequantise_blocks(weight, scale, high, wide)


def _block_size(block: Any) -> tuple[int, int]:
    sizes = _BLOCK if block is None else [integer(n) for n in block] if isinstance(block, (list, tuple)) else []
    if len(sizes) != 2 or not all(size and size > 0 for size in sizes):
        raise ConfigError(
            f"weight_block_size={block!r:.60} on kv_b_proj",
            "two positive ints, rows and columns",
            "set it to [128, 128]",
        )
    return sizes[0], sizes[1]  # type: ignore[return-value]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]


def _weight_by_calls(module: nn.Module, rows: tuple[int, int], columns: int) -> Tensor:
    """Return what a module makes of a unit matrix: its weight, to the precision that it computes in."""
    tensors = _tensors(module)
    dtypes = [t.dtype for t in tensors if t.dtype in (torch.float16, torch.bfloat16, torch.float32)]
    given = getattr(module, "params_dtype", None) or (dtypes[0] if dtypes else torch.get_default_dtype())
    device = tensors[0].device if tensors else torch.device("cpu")
    unit = torch.eye(columns, dtype=given, device=device)
    made = _made(module, unit)
    if not isinstance(made, Tensor) or tuple(made.shape) not in [(columns, count) for count in rows]:
        got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise ShapeError(
            f"kv_b_proj makes {got} of {columns} latents of {columns} columns", f"({columns}, {_either(rows)})",
            "check kv_lora_rank, num_heads and the head dimensions",
        )  # fmt: skip
    _check_linear(module, unit, made.float())
    return made.t().float()


def _made(module: nn.Module, rows: Tensor) -> Any:
    try:
        with torch.no_grad():
            made = module(rows)
    except Exception as error:
        raise ConfigError(
            f"kv_b_proj {type(module).__name__} fails on latents {tuple(rows.shape)} of {dtype_name(rows.dtype)}: "
            f"{type(error).__name__}: {error!s:.160}",
            "a linear module of a weight that is read (16 or 32 bits, or e4m3 with scales), or that runs on latents",
            "the cause is attached",
        ) from error
    return made[0] if isinstance(made, tuple) and made else made


def _check_linear(module: nn.Module, unit: Tensor, made: Tensor) -> None:
    """Refuse a module that a weight cannot replace, by its outputs for zeros and for unit rows changed and added.

    No probe is larger than the unit matrix, so that a static scale of activations clips none that it did not clip.
    Signs and halves survive every rounding; a sum is rounded once more.
    """
    if not made.isfinite().all():
        # No probe could tell; `check_values` refuses these.
        return
    sums = max(_SAME, 4 * torch.finfo(unit.dtype).eps)
    probes = {
        "0": (torch.zeros_like(unit), torch.zeros_like(made), 0.0),
        "-x": (-unit, -made, _SAME),
        "x / 2": (unit / 2, made / 2, _SAME),
        "x + y": (unit + unit.roll(1, 0), made + made.roll(1, 0), sums),
    }
    for name, (rows, expected, tolerance) in probes.items():
        got = _made(module, rows)
        # In fp64, where squares of large weights do not overflow.
        if not (got.double() - expected.double()).norm() <= tolerance * made.double().norm():
            raise ConfigError(
                f"kv_b_proj {type(module).__name__} is not linear: of {name} it makes what no weight does",
                "a linear module without a bias, dropout or activation: latent attention multiplies by its weight",
                "pass the projection alone, in eval mode",
            )


def _either(rows: tuple[int, int]) -> str:
    return " or ".join(str(count) for count in dict.fromkeys(rows))


def _check_shape(shape: tuple[int, ...], rows: tuple[int, int], columns: int) -> None:
    if shape not in [(count, columns) for count in rows]:
        raise ShapeError(
            f"kv_b_proj's weight has shape {shape}",
            f"({_either(rows)}, {columns}) = [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]",
            "check kv_lora_rank, num_heads (after tensor-parallel splitting) and the head dimensions",
        )
