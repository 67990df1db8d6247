"""Quantise a query for kernels that do not support `query_load`."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch
import triton
import triton.language as tl

from vattn.config.attention import AttentionConfig
from vattn.kernels.replay import unrecorded
from vattn.kernels.triton.common.epilogue import quantise_dynamic
from vattn.ops.arguments import AttentionArgs, VarlenAttentionArgs

Args = TypeVar("Args", AttentionArgs, VarlenAttentionArgs)


@triton.jit
def round_query_kernel(
    query, codes, q_scale, stride_t, stride_h, COLUMNS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    PER_HEAD: tl.constexpr, LOAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `vattn.quantization.codecs.encode_query`. Grid: tokens, blocks of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    head = column // D
    x = tl.load(query + token * stride_t + head * stride_h + column % D, mask=inside, other=0.0)
    step = tl.load(q_scale + (head // GROUP if PER_HEAD else 0 * head), mask=inside, other=1.0)
    tl.store(codes + token * COLUMNS + column, quantise_dynamic(x.to(tl.float32), step, LOAD), mask=inside)


@lru_cache(maxsize=4096)
def after_rounding(config: AttentionConfig) -> AttentionConfig:
    """Return the config of a request with a quantised query."""
    return config.replace(query_load="plain")


def round_query(args: Args, config: AttentionConfig) -> Args:
    """Return the arguments with an e4m3 query."""
    query = args.query
    codes = torch.empty(query.shape, dtype=torch.float8_e4m3fn, device=query.device)
    columns = config.num_heads * config.head_size
    if query.shape[0]:
        block = min(1024, triton.next_power_of_2(columns))
        unrecorded(round_query_kernel)[(query.shape[0], -(-columns // block))](
            query, codes.view(torch.uint8), args.q_scale, query.stride(0), query.stride(1), COLUMNS=columns,
            D=config.head_size, GROUP=config.group_size, PER_HEAD=config.query_scale == "head",
            LOAD=config.query_load, BLOCK=block, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return args._replace(query=codes, config=after_rounding(config).encode())
