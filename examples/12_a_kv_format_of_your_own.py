"""Add a KV cache format: two bits a value and one fp16 scale a row, as one codec and one Triton load and store.

Nothing else is written: allocation, attention on the CPU, and on a GPU (or in Triton's interpreter) the kernels with
every mask take the format from its entry. The conformance suite's own comparison shows that it is right.
"""

from __future__ import annotations

import torch

import vattn
from vattn.quantization.formats import KVFormat, PackedPart
from vattn.quantization.packed.bit_packing import to_fp16


class TwoBits:
    """`x = (code - 1.5) * scale`, the scale half the row's largest magnitude; NaN for a row that is not finite."""

    def encode(self, x, part, scale):
        scales = to_fp16(x.abs().amax(-1, keepdim=True) / 2)
        codes = (x / scales.float().clamp(min=1e-7) + 2.0).floor().clamp(0, 3)
        codes = torch.where(scales.isnan(), 0, codes).to(torch.uint8)
        places = codes.unflatten(-1, (-1, 4)) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=x.device)
        return places.sum(-1, dtype=torch.uint8), scales

    def decode(self, codes, scales, part, width):
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=codes.device)
        levels = ((codes.unsqueeze(-1) >> shifts) & 3).flatten(-2).float() - 1.5
        return levels * scales.float()


TRITON = None
try:
    import triton
    import triton.language as tl

    from vattn.kernels.triton.common.epilogue import absolute_maximum

    @triton.jit
    def load_two_bits(codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
        column = tl.arange(0, PART[1])[None, :]
        mask = column < PART[0] if rows is None else rows & (column < PART[0])
        code = (tl.load(codes + column // 4, mask=mask, other=0).to(tl.int32) >> (2 * (column % 4))) & 3
        scale = tl.load(scales) if rows is None else tl.load(scales, mask=rows, other=0.0)
        return code.to(tl.float32) - 1.5, scale.to(tl.float32)

    @triton.jit
    def store_two_bits(x, given, codes, scales, rows, PART: tl.constexpr, NATIVE: tl.constexpr):
        half = absolute_maximum(x)[:, None] * 0.5
        known = half < float("inf")
        scale = tl.where(known, tl.minimum(half, 65504.0), float("nan")).to(tl.float16)
        divisor = tl.zeros_like(x) + tl.maximum(scale.to(tl.float32), 1e-7)
        code = tl.minimum(tl.maximum(tl.floor(tl.div_rn(x, divisor) + 2.0), 0.0), 3.0)
        code = tl.where(known, code, 0.0).to(tl.int32)
        groups = tl.reshape(code, [code.shape[0], PART[1] // 4, 4]) << (2 * tl.arange(0, 4))[None, None, :]
        column = tl.arange(0, PART[1] // 4)[None, :]
        tl.store(codes + column, tl.sum(groups, axis=2).to(tl.uint8), mask=rows & (column < PART[0] // 4))
        tl.store(scales, scale, mask=rows)

    TRITON = {"two_bits": (load_two_bits, store_two_bits)}
except ImportError:
    pass

part = PackedPart("two_bits", bits=2, scale_dtype=torch.float16, scales=1)
two_bits = KVFormat("two_bits", torch.uint8, torch.uint8, key=part, value=part)
vattn.register_kv_format(two_bits, {"two_bits": TwoBits()}, TRITON)

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = vattn.Attention(8, 64, 0.125, 2, cache_config=vattn.CacheConfig(cache_dtype="two_bits"))
print(vattn.allocate_kv_cache(layer, num_blocks=8, dtype=torch.float32, device=device))
builder = vattn.AttentionMetadataBuilder(max_num_reqs=1, max_num_tokens=64, max_seq_len=64, layers=layer, device=device)
step = builder.build(query_lens=[50], seq_lens=[50], block_tables=[[5, 2, 7, 1]])
query, key, value = (torch.randn(50, heads * 64, device=device) for heads in (8, 2, 2))
with torch.no_grad(), vattn.forward_context(step):
    output = layer(query, key, value)
print(f"{two_bits.token_bytes(64, 64)} bytes a token and head on {layer.config.backend}, output {tuple(output.shape)}")
