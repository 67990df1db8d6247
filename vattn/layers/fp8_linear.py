"""`FP8Linear`: a linear layer with e4m3 weights and inputs (W8A8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vattn.backends.linear import scaled_product
from vattn.errors import ConfigError, DtypeError, GradientError, ScaleError, ShapeError, StrideError
from vattn.layers.weight_parts import WeightPart, refuse_state_dict
from vattn.quantization.codecs import MIN_ABSMAX, quant_fp8_group, quant_fp8_per_token, quant_fp8_static, to_e4m3
from vattn.quantization.formats import FP8_E4M3_MAX, MODEL_DTYPES, dtype_name

BLOCK = 128
"""Rows and columns of a block of weights, and columns of a group of inputs."""

ALIGNMENT = 16
"""Features must be a multiple of this: FP8 products on GPUs need it."""

INPUT_DTYPES = tuple(MODEL_DTYPES.values())

SCALE_DTYPES = (*INPUT_DTYPES, torch.float64)
"""Dtypes of given scales; a layer keeps them in fp32."""

GPU_COLUMNS = 4 * BLOCK
"""On a GPU the input features of a linear with blocks must be a multiple of this; releases of torch treat others
differently."""


@dataclass(frozen=True)
class LinearFormat:
    """How a linear layer quantises its input.

    Attributes:
        name: of the format.
        given: whether the input's scale is given; otherwise it is computed from every input.
        blocks: whether weights have a scale per block of 128 x 128; otherwise one for all, or one per row.
        rows: whether `FP8Linear.of` makes a weight scale per row.
    """

    name: str
    given: bool = False
    blocks: bool = False
    rows: bool = False


LINEAR_FORMATS = {
    fmt.name: fmt
    for fmt in (
        LinearFormat("fp8_static", given=True),
        LinearFormat("fp8_dynamic"),
        LinearFormat("fp8_per_token", rows=True),
        LinearFormat("fp8_group128", blocks=True),
    )
}


def weight_scale(weight: Tensor, fmt: LinearFormat) -> Tensor:
    """Return the fp32 scales of a weight `[N, K]`: `[1]`, `[N]`, or `[N / 128, K / 128]` rounded up."""
    sizes = weight.detach().abs()
    if fmt.blocks:
        rows, columns = weight.shape
        padded = nn.functional.pad(sizes, (0, -columns % BLOCK, 0, -rows % BLOCK))
        largest = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax(dim=(1, 3))
    else:
        largest = sizes.amax(dim=1) if fmt.rows else sizes.amax()[None]
    return largest.float().clamp(min=MIN_ABSMAX) / FP8_E4M3_MAX


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales of a weight, broadcastable over it."""
    if scale.dim() == 2:
        return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return scale[:, None]


def encode_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the e4m3 codes `[N, K]` of a weight; dequantised = codes * scale."""
    return to_e4m3(weight.detach().float() / spread(scale, *weight.shape))


class FP8Linear(nn.Linear):
    """`nn.Linear` with e4m3 weights that quantises its input to e4m3.

    The input is quantised in plain torch ops: a compiler can fuse them into the producer of the input, and vattn's
    passes into attention. On a GPU the product is `torch._scaled_mm`; on a CPU codes are multiplied in fp32, and blocks
    are dequantised first. The result is rounded to the input's dtype once, then the bias is added.

    Args:
        weight: e4m3 `[N, K]`, contiguous; not copied. K and N are multiples of 16.
        weight_scale: fp32 `[1]`, `[N]`, or one per block of 128 x 128.
        format: `"fp8_static"`, one given scale for the input; `"fp8_dynamic"`, one computed over all tokens of a call,
            padding included; `"fp8_per_token"`; `"fp8_group128"`, one for every 128 columns of a token, with blocks.
        input_scale: fp32 `[1]`, only for `"fp8_static"`.
        bias: `[N]` in the dtype of inputs, or `None`.

    Attributes:
        weight: a parameter without gradient. Codes and scales keep their dtype under `model.to(dtype)`.
        weight_scale, input_scale: buffers in the state dict. Scales of rows are saved as `[N, 1]`, as
            compressed-tensors does; both shapes load.
        part: which part of a sharded weight this rank has, `None` for all of it; set by `hold`.

    Raises:
        ConfigError, ShapeError, StrideError, ScaleError, DtypeError: at construction. DtypeError,
            ShapeError: when called, with an input of another width, in another dtype than the bias or in none of a
            model, and for what `torch._scaled_mm` cannot do on a GPU, scales of rows and blocks in other dtypes than
            bf16, and blocks with K that is no multiple of 512.
            GradientError: gradients are enabled and the input requires one. DtypeError, ScaleError: when the weight of
            a loaded state dict is not of codes, or its scales are not positive, finite and in a float dtype.

    Example:
        >>> import torch
        >>> from vattn.layers.fp8_linear import FP8Linear
        >>> plain = torch.nn.Linear(32, 16, bias=False).requires_grad_(False)
        >>> linear = FP8Linear.of(plain, "fp8_per_token")
        >>> x = torch.randn(3, 32)
        >>> bool((linear(x) - plain(x)).norm() / plain(x).norm() < 0.1)
        True
    """

    input_scale: Tensor | None
    weight_scale: Tensor
    part: WeightPart | None = None
    quantises_input = True
    uses_vattn_linear = False

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        format: str,
        input_scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.format = linear_format(format)
        given = {"weight": weight, "weight_scale": weight_scale, "input_scale": input_scale, "bias": bias}
        for name, x in given.items():
            if not isinstance(x, Tensor) and (x is not None or name.startswith("weight")):
                raise DtypeError(f"{name} of type {type(x).__name__}", "a tensor", "torch.tensor([...])")
        if weight.dim() != 2 or not weight.is_contiguous():
            got = f"a weight of shape {tuple(weight.shape)} with strides {weight.stride()}"
            raise StrideError(got, "[N, K], contiguous", "call weight.contiguous()")
        self.out_features, self.in_features = weight.shape
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ShapeError(f"a bias of shape {tuple(bias.shape)}", f"({self.out_features},)", "check the bias")
        check_sizes(self.in_features, self.out_features, self.format)
        if weight.dtype is not torch.float8_e4m3fn:
            raise DtypeError(f"a weight in {weight.dtype}", "e4m3 codes", "make it with FP8Linear.of(linear, format)")
        blocks = (-(-self.out_features // BLOCK), -(-self.in_features // BLOCK))
        shapes = [blocks] if self.format.blocks else [(1,), (self.out_features,)]
        if tuple(weight_scale.shape) not in shapes:
            raise ShapeError(
                f"weight_scale of shape {tuple(weight_scale.shape)}",
                " or ".join(map(str, shapes)),
                f"check the scales of this {format} layer",
            )
        if (input_scale is not None) != self.format.given or (input_scale is not None and input_scale.numel() != 1):
            raise ScaleError(
                f"{'no input_scale' if input_scale is None else f'an input_scale of {input_scale.numel()} values'} "
                f"with {format}",
                "one value with fp8_static, and with it alone",
                "calibrate with vattn.calibrate(model, batches, linears=True)",
            )
        check_scales({"a weight_scale": weight_scale, "an input_scale": input_scale})
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        # A copy: safetensors cannot save layers that share a scale.
        self.register_buffer("weight_scale", weight_scale.detach().float().clone())
        if input_scale is not None:
            input_scale = input_scale.detach().float().reshape(1).to(weight.device).clone()
        self.register_buffer("input_scale", input_scale)

    @classmethod
    def of(cls, linear: nn.Linear, format: str, input_scale: Tensor | None = None) -> FP8Linear:
        """Return a quantised copy of a linear layer; it shares the bias.

        Raises:
            ConfigError: not a plain `nn.Linear`; and what the class raises.
        """
        if not isinstance(linear, nn.Linear) or isinstance(linear, FP8Linear):
            raise ConfigError(f"a layer of type {type(linear).__name__}", "a plain nn.Linear", "pass the plain layer")
        scale = weight_scale(linear.weight, linear_format(format))
        return cls(encode_weight(linear.weight, scale), scale, format, input_scale, linear.bias)

    def hold(self, part: WeightPart | None) -> FP8Linear:
        """Note which part of its weight the layer has, and return it; outputs are combined with other ranks'."""
        if part is not None:
            self.part = part
            self.register_state_dict_pre_hook(refuse_state_dict)
        return self

    @property
    def needs_ranks(self) -> bool:
        """Return whether outputs are combined with the other ranks'."""
        return self.part is not None and (self.part.dim == 1 or self.part.gathers)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias` of x `[..., K]`, in its dtype."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise GradientError("a gradient through FP8Linear", "inference", "call the model under torch.no_grad()")
        if x.dtype not in INPUT_DTYPES:
            raise DtypeError(f"an input in {x.dtype}", ", ".join(MODEL_DTYPES), "cast it")
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ShapeError(f"an input of {tuple(x.shape)}", f"[..., {self.in_features}]", "check the layer before")
        if self.bias is not None and self.bias.dtype is not x.dtype:
            raise DtypeError(
                f"an input in {x.dtype} with a bias in {self.bias.dtype}", "one dtype", "linear.to(x.dtype)"
            )
        rows = x.reshape(-1, self.in_features)
        if self.quantises_input:
            out = self._product(*self.quantise_input(rows), x.dtype)
        else:
            out = (rows.float() @ self.dequantised().t()).to(x.dtype)
        if self.part is not None:
            out = self.part.finish(out, self.bias)
        elif self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def quantise_input(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of rows `[T, K]` and their scales: `[1]`, `[T, 1]`, or column-major `[T, K / 128]`."""
        if self.input_scale is not None:
            return quant_fp8_static(rows, self.input_scale), self.input_scale
        if self.format.blocks:
            return quant_fp8_group(rows, BLOCK, column_major=True)
        if self.format.rows:
            return quant_fp8_per_token(rows)
        if not rows.shape[0]:
            return rows.to(torch.float8_e4m3fn), torch.ones(1, device=rows.device)
        largest = rows.float().abs().amax().clamp(min=MIN_ABSMAX)
        scale = (largest / largest.new_full((), FP8_E4M3_MAX)).reshape(1)
        return quant_fp8_static(rows, scale), scale

    def dequantised(self) -> Tensor:
        """Return the weight in fp32."""
        return self.weight.float() * spread(self.weight_scale, self.out_features, self.in_features)

    def _product(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if codes.is_cuda:
            return self._scaled_mm(codes, scale, dtype)
        if self.format.blocks:
            wide = codes.float().unflatten(1, (-1, BLOCK)) * scale.unsqueeze(-1)
            return (wide.flatten(1) @ self.dequantised().t()).to(dtype)
        return scaled_product(codes, self.weight, scale, self.weight_scale, dtype)

    def _scaled_mm(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        other = self.weight_scale
        if self.format.blocks and self.in_features % GPU_COLUMNS:
            raise ShapeError(
                f"fp8_group128 with in_features={self.in_features} on a GPU",
                f"multiples of {GPU_COLUMNS}",
                "skip this layer, or use fp8_per_token",
            )
        fine = scale.dim() == 2 or other.numel() != 1
        if fine and dtype is not torch.bfloat16:
            raise DtypeError(
                f"{self.format.name} with scales of rows or blocks in {dtype} on a GPU", "bfloat16", "model.bfloat16()"
            )
        if self.format.blocks:
            return self._product_of_blocks(codes, scale, dtype)
        if self.uses_vattn_linear:
            return torch.ops.vattn.linear(codes, self.weight, scale, other, dtype_name(dtype))  # type: ignore[no-any-return]
        return scaled_product(codes, self.weight, scale, other, dtype)

    def _product_of_blocks(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        # Scales are column-major, and every column must start at a multiple of 16 bytes.
        tokens = codes.shape[0]
        more = -tokens % 4
        codes = nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, more)).view(codes.dtype)
        scale = nn.functional.pad(scale.t(), (0, more)).t()
        return torch._scaled_mm(codes, self.weight.t(), scale, self.weight_scale.t(), out_dtype=dtype)[:tokens]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Linear:
        """Move with the model, but keep codes e4m3 and scales fp32."""
        weight, buffers = self._parameters["weight"], dict(self._buffers)
        assert weight is not None
        self._parameters["weight"] = None
        self._buffers.update(dict.fromkeys(buffers))
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = weight
            self._buffers.update(buffers)
        moved = _moved(weight.data, fn)
        if moved is not weight.data:
            self.weight = nn.Parameter(moved, requires_grad=False)
        self._buffers.update({name: None if x is None else _moved(x, fn) for name, x in buffers.items()})
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scales_rows:
            destination[prefix + "weight_scale"] = destination[prefix + "weight_scale"][:, None]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.dtype is not torch.float8_e4m3fn:
            raise DtypeError(
                f"{prefix}weight in {weight.dtype} for an FP8 linear layer",
                "e4m3 codes with their scale",
                "load plain weights into the plain model, and quantise it then",
            )
        check_scales({prefix + name: state_dict.get(prefix + name) for name in ("weight_scale", "input_scale")})
        scale = state_dict.get(prefix + "weight_scale")
        if self.scales_rows and scale is not None and scale.shape == (self.out_features, 1):
            state_dict[prefix + "weight_scale"] = scale[:, 0]
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def scales_rows(self) -> bool:
        """Return whether every row of the weight has a scale."""
        return self.weight_scale.dim() == 1 and self.weight_scale.numel() > 1

    def extra_repr(self) -> str:
        """Show the sizes and the format."""
        granularity = {0: "", 1: f", {self.weight_scale.numel()} weight scale(s)", 2: ", blocks of 128 x 128"}
        return f"{super().extra_repr()}, {self.format.name}{granularity[self.weight_scale.dim()]}"


def check_scales(scales: dict[str, Tensor | None]) -> None:
    """Check that scales are positive and finite and in a float dtype.

    Raises:
        ScaleError: one is not.
    """
    for name, scale in scales.items():
        if scale is not None and scale.dtype not in SCALE_DTYPES:
            raise ScaleError(f"{name} in {scale.dtype}", "fp32, fp64, bf16 or fp16", "check the checkpoint")
        if scale is not None and not scale.is_meta and not bool(((scale > 0) & scale.isfinite()).all()):
            raise ScaleError(f"{name} that is not positive and finite", "positive ones", "check the checkpoint")


def _moved(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    device = fn(torch.empty(0, dtype=torch.uint8, device=x.device)).device
    return torch.empty_like(x, device=device) if x.is_meta else x.to(device)


def linear_format(name: Any) -> LinearFormat:
    """Return a format by its name.

    Raises:
        ConfigError: the name is unknown.
    """
    if not isinstance(name, str) or name not in LINEAR_FORMATS:
        raise ConfigError(f"format={name!r} of linear layers", ", ".join(LINEAR_FORMATS), "choose one of these names")
    return LINEAR_FORMATS[name]


def check_sizes(in_features: int, out_features: int, fmt: LinearFormat) -> None:
    """Check that FP8 products take these sizes.

    Raises:
        ShapeError: they do not.
    """
    columns = BLOCK if fmt.blocks else ALIGNMENT
    if in_features % columns or out_features % ALIGNMENT:
        raise ShapeError(
            f"{fmt.name} of a linear layer with {in_features} input and {out_features} output features",
            f"multiples of {columns} and {ALIGNMENT}",
            "leave this layer out with skip=",
        )


@contextmanager
def exact_inputs(model: nn.Module) -> Iterator[None]:
    """Do not quantise the inputs of a model's FP8 linears inside the block."""
    linears = [module for module in model.modules() if isinstance(module, FP8Linear)]
    for linear in linears:
        linear.quantises_input = False
    try:
        yield
    finally:
        for linear in linears:
            del linear.quantises_input
