"""What Hopper's FP8 matrix instructions make of a sum of products, bit by bit, on the CPU.

An instruction adds 32 products to an fp32 sum. It aligns all of them to the largest exponent among the sum and the
products (that of a product is the sum of its factors' exponents), keeps 13 bits below it and cuts the rest off. Each
instruction thus moves a score by less than 33 * 2^(E - 13), where E is that exponent; a head of 256 takes eight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support import Batch
from vattn.cache.layout import key_value_views

STEP = 32
"""Products of an instruction."""

KEPT_BITS = 13
"""Bits that terms keep below the largest exponent."""


def _exponents(x: Tensor) -> Tensor:
    """Return the exponents of e4m3 values as their codes have them: those of subnormals are that of 2^-6."""
    return torch.floor(torch.log2(x.abs().clamp(min=2.0**-6)))


def summed_products(query: Tensor, keys: Tensor) -> Tensor:
    """Return `query [rows, D]` times `keys [keys, D]`, both e4m3 values, as the instructions sum them, fp64."""
    total = torch.zeros(query.shape[0], keys.shape[0], dtype=torch.float64)
    for first in range(0, query.shape[1], STEP):
        left, right = query[:, None, first : first + STEP], keys[None, :, first : first + STEP]
        terms = torch.cat([left.double() * right.double(), total[..., None]], dim=-1)
        largest = (_exponents(left) + _exponents(right)).masked_fill(left * right == 0, -1e3).amax(-1).double()
        of_sum = torch.floor(torch.log2(total.abs().clamp(min=2.0**-126)))
        unit = torch.exp2(torch.maximum(largest, of_sum).clamp(min=-126) - KEPT_BITS)
        total = torch.trunc(terms / unit[..., None]).sum(-1) * unit
    return total


def summed_lse(batch: Batch, request: int, row: int) -> Tensor:
    """Return the log-sum-exp `[H]` of one causal row of a batch whose queries and keys are e4m3."""
    config, args = batch.config, batch.args
    seq_len, query_len = batch.seq_lens[request], batch.query_lens[request]
    blocks = args.block_table[request, : -(-seq_len // config.block_size)].long()
    keys = key_value_views(args.key_cache, args.value_cache, config)[0][blocks].view(torch.float8_e4m3fn).float()
    keys = keys.flatten(0, 1)[: seq_len - query_len + row + 1]
    query = args.query[int(args.query_start_loc[request]) + row].float()
    found = []
    for head in range(config.num_heads):
        kv_head = head // config.group_size
        scale = config.scale * float(args.q_scale[kv_head]) * float(args.k_scale[kv_head])
        found.append((summed_products(query[head : head + 1], keys[:, kv_head])[0] * scale).logsumexp(0))
    return torch.stack(found)
