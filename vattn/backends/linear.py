"""`vattn::linear`: the product of a linear layer, plain or of e4m3 codes, which is fast for few rows too.

A step of few tokens reads every weight once for a handful of rows. Its time is that of reading, which general matrix
products do not reach on weights of some tens of megabytes.

Letters: T rows, N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.device import has_triton
from vattn.ops.linear_arguments import LinearArgs
from vattn.quantization.formats import MODEL_DTYPES


def linear(args: LinearArgs) -> Tensor:
    """Return the product, by the kernel for few rows where there is one for these sizes, and by torch otherwise."""
    if args.input.is_cuda and has_triton():
        from vattn.kernels.hopper.linear.small_m import small_m_linear, takes

        if takes(args):
            return small_m_linear(args)
    dtype = MODEL_DTYPES[args.dtype]
    if args.input_scale is None or args.weight_scale is None:
        return args.input @ args.weight.t()
    return scaled_product(args.input, args.weight, args.input_scale, args.weight_scale, dtype)


def scaled_product(codes: Tensor, weight: Tensor, scale: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of codes, with scales as `vattn::linear` has them: in fp32 off a GPU, by torch on one."""
    if not codes.is_cuda:
        return (codes.float() @ weight.float().t() * scale * other).to(dtype)
    if scale.dim() == 2 or other.numel() != 1:
        # Scales for the rows of one operand ask for such scales of the other.
        scale = scale.expand(codes.shape[0], 1).contiguous()
        other = other.expand(weight.shape[0])[None].contiguous()
    return torch._scaled_mm(codes, weight.t(), scale, other, out_dtype=dtype, use_fast_accum=True)
