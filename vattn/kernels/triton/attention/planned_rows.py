"""Finish a planned FlashInfer call in one launch: base of the log-sum-exp, value scales, sinks, rows without keys.

`vattn.backends.flashinfer.backend` does the same in torch operators for calls without a plan.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vattn.kernels.triton.common.codec import cast
from vattn.kernels.triton.common.mask import LN2, LOG2E

_HEADS = 8


@triton.jit
def planned_rows_kernel(
    output, lse, found, kind, v_scale, sinks, stride_ot, stride_oh, stride_lt, stride_lh, stride_ft, stride_fh,
    NUM_HEADS: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, PER_HEAD: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """See `finish_planned`. Grid: rows, blocks of heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    known = head < NUM_HEADS
    asks = tl.zeros((BLOCK_H,), tl.int32) + tl.load(kind + row)
    seen = known & (asks > 1)
    log = tl.zeros((BLOCK_H,), tl.float32)
    if found is not None:
        log = tl.load(found + row * stride_ft + head * stride_fh, mask=known, other=float("-inf")) * LN2
        # NaN means no keys, too.
        seen = seen & (log > float("-inf")) & (log < float("inf"))
        log = tl.where(seen, log, float("-inf"))
    sink = tl.zeros((BLOCK_H,), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=known, other=0.0).to(tl.float32)
    column = tl.arange(0, BLOCK_V)[None, :]
    target = output + row * stride_ot + (head * stride_oh)[:, None] + column
    written = known[:, None] & (column < V)
    if v_scale is not None or sinks is not None:
        factor = tl.full((BLOCK_H,), 1.0, tl.float32)
        if v_scale is not None:
            factor = tl.load(v_scale + (head // GROUP if PER_HEAD else 0 * head), mask=known, other=0.0)
        if sinks is not None:
            # The sink joins the denominator alone: exp(log) / (exp(log) + exp(sink)).
            factor = factor / (1.0 + tl.exp2((sink - log) * LOG2E))
        values = tl.load(target, mask=written & seen[:, None], other=0.0).to(tl.float32)
        scaled = tl.where(seen[:, None], values * factor[:, None], 0.0)
        tl.store(target, cast(scaled, output.dtype.element_ty), mask=written)
    else:
        zero = tl.zeros((BLOCK_H, BLOCK_V), output.dtype.element_ty)
        tl.store(target, zero, mask=written & ~seen[:, None])
    if lse is not None:
        if sinks is not None:
            highest = tl.maximum(log, sink)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            total = tl.exp2((log - base) * LOG2E) + tl.exp2((sink - base) * LOG2E)
            log = tl.where(asks > 0, base + tl.log2(total) * LN2, float("-inf"))
        tl.store(lse + row * stride_lt + head * stride_lh, log, mask=known)


def finish_planned(
    output: Tensor,
    lse: Tensor | None,
    found: Tensor | None,
    kind: Tensor,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    group_size: int,
) -> None:
    """Correct FlashInfer's output and log-sum-exp, in place.

    Args:
        output: `[T, H, V]`; rows without keys become zero, the others are scaled.
        lse: fp32 `[T, H]`, natural log; written if not `None`.
        found: fp32 `[T, H]`, FlashInfer's log-sum-exp to base 2; `None`: every valid row sees a key.
        kind: int32 `[T]`: 0 padding, 1 before its sequence, 2 valid.
        v_scale: fp32, one value or one per KV head, still to be applied.
        sinks: `[H]`, still to be applied.
        group_size: query heads per KV head.
    """
    num_rows, num_heads, width = output.shape
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    planned_rows_kernel[(num_rows, -(-num_heads // heads))](
        output, lse, found, kind, v_scale, sinks, *output.stride()[:2], *((0, 0) if lse is None else lse.stride()),
        *((0, 0) if found is None else found.stride()), NUM_HEADS=num_heads, V=width, GROUP=group_size,
        PER_HEAD=v_scale is not None and v_scale.numel() > 1, BLOCK_V=triton.next_power_of_2(width), BLOCK_H=heads,
        num_warps=1 if width <= 128 else 4, enable_fp_fusion=True,
    )  # fmt: skip
