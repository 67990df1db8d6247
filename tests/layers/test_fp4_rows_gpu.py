"""NVFP4 of finished rows on a Hopper GPU: the bytes of plain Triton's kernel, and of `vattn.quantization.codecs`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import poisoned_empty
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.codecs import quantise_output
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS

pytestmark = pytest.mark.gpu(capability=(9, 0))


def rows(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Normal values of every size, ties of codes and of block scales, zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator) * 2.0 ** torch.randint(-12, 12, (tokens, 1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, -0.0, 6.0, -0.25, -2.5, -3.5, -5.0, 1.0, -6.0])
    x[1] = ties.repeat(columns // 16) * 2.0 ** (torch.arange(columns) // 16 % 9 - 4)
    x[2] = x[1] * 1.0625  # Maxima whose sixth is a tie of e4m3.
    x[3] = 0.0
    x[4, ::37] = torch.inf
    x[5, ::53] = torch.nan
    x[6, ::41] = -torch.inf
    x[7] *= 1e-30
    return x.to(dtype)


@pytest.mark.parametrize("scale", [1.0, 3e-3, 2.0**-30, -0.02, 2.0**60, 1e-41])
@pytest.mark.parametrize("arithmetic", ["divide", "approximate_divide"])
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_swizzled"])
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"),
    [(32, 128, "bfloat16"), (3, 80, "bfloat16"), (40, 128, "float16"), (65, 64, "bfloat16")],
)
def test_bytes(heads: int, head_size: int, dtype: str, fmt: str, arithmetic: str, scale: float) -> None:
    from vattn.kernels.hopper import fp4_rows
    from vattn.kernels.triton.attention.launch import finish

    config = AttentionConfig(
        heads, 1, head_size, head_size, 0.1, dtype, kv_cache_dtype=dtype, output_format=fmt,
        output_arithmetic=arithmetic,
    )  # fmt: skip
    values = rows(133, heads * head_size, MODEL_DTYPES[dtype]).view(133, heads, head_size).cuda()

    def arguments() -> AttentionArgs:
        output, scales = OUTPUT_FORMATS[fmt].allocate(values, head_size, values.dtype)
        assert scales is not None
        given = {
            "query": values, "output": poisoned_empty(output.shape, output.dtype).cuda(),
            "output_block_scale": scales.view(torch.uint8).fill_(0xA5).view(scales.dtype),
            "output_scale": torch.full((1,), scale, device="cuda"),
            "query_start_loc": torch.tensor([0, 133], dtype=torch.int32, device="cuda"),
        }  # fmt: skip
        return AttentionArgs(**{**dict.fromkeys(AttentionArgs._fields), **given})  # type: ignore[arg-type]

    args, plain = arguments(), arguments()
    fp4_rows.launch(args, config, values)
    finish(plain, config, values)
    assert args.output_block_scale is not None and plain.output_block_scale is not None
    scales, wanted = (x.float().nan_to_num(500.0) for x in (args.output_block_scale, plain.output_block_scale))
    assert torch.equal(scales, wanted)
    assert torch.equal(args.output, plain.output)
    if arithmetic == "divide":
        quantise_output(values, fmt, plain.output, plain.output_block_scale, plain.output_scale, "divide")
        assert torch.equal(args.output, plain.output)
        assert torch.equal(scales, plain.output_block_scale.float().nan_to_num(500.0))
