"""Combine two partial results of the same rows by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

from vattn.kernels.triton.common.codec import cast
from vattn.kernels.triton.common.mask import LN2, LOG2E
from vattn.ops.arguments import MergeArgs


@triton.jit
def merge_kernel(
    output, output_lse, prefix, prefix_lse, suffix, suffix_lse,
    stride_ot, stride_oh, stride_pt, stride_ph, stride_st, stride_sh,
    stride_lt, stride_lh, stride_plt, stride_plh, stride_slt, stride_slh,
    V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """See `vattn.ops.reference.attention.merge_attn_states`. Grid: tokens, heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    a = tl.load(prefix_lse + token * stride_plt + head * stride_plh)
    b = tl.load(suffix_lse + token * stride_slt + head * stride_slh)
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    highest = tl.maximum(a, b)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight_a = tl.exp2((a - base) * LOG2E)
    weight_b = tl.exp2((b - base) * LOG2E)
    total = weight_a + weight_b
    divisor = tl.where(total != 0.0, total, 1.0)
    column = tl.arange(0, BLOCK_V)
    # An empty part may hold anything: none of its columns is read.
    in_a = column < tl.where(a > float("-inf"), V, 0)
    in_b = column < tl.where(b > float("-inf"), V, 0)
    x = tl.load(prefix + token * stride_pt + head * stride_ph + column, mask=in_a, other=0.0)
    y = tl.load(suffix + token * stride_st + head * stride_sh + column, mask=in_b, other=0.0)
    merged = x.to(tl.float32) * (weight_a / divisor) + y.to(tl.float32) * (weight_b / divisor)
    out_offsets = token * stride_ot + head * stride_oh + column
    tl.store(output + out_offsets, cast(merged, output.dtype.element_ty), mask=column < V)
    if output_lse is not None:
        lse = tl.where(total != 0.0, base + tl.log2(divisor) * LN2, float("-inf"))
        tl.store(output_lse + token * stride_lt + head * stride_lh, lse)


def merge_attn_states(args: MergeArgs) -> None:
    """Run `vattn::merge_attn_states` on the device of `args.output`."""
    num_tokens, num_heads, width = args.output.shape
    if args.output.numel() == 0:
        return
    lse = args.prefix_lse if args.output_lse is None else args.output_lse
    merge_kernel[(num_tokens, num_heads)](
        args.output, args.output_lse, args.prefix_output, args.prefix_lse, args.suffix_output, args.suffix_lse,
        *args.output.stride()[:2], *args.prefix_output.stride()[:2], *args.suffix_output.stride()[:2],
        *lse.stride(), *args.prefix_lse.stride(), *args.suffix_lse.stride(),
        V=width, BLOCK_V=triton.next_power_of_2(width), num_warps=1 if width <= 256 else 4,
        enable_fp_fusion=True,
    )  # fmt: skip
