"""FP8 linear layers on a GPU: `torch._scaled_mm` against the CPU path, in compiled and captured models, fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from tests.calibration.test_fp8_linears import STATIC, calibrated, make_linear, make_llama
from tests.integrations.test_transformers import Runner
from tests.support import relative_l2
from vattn import errors
from vattn.integrations.transformers import enable
from vattn.layers.fp8_linear import LINEAR_FORMATS, FP8Linear

pytestmark = pytest.mark.gpu

FUSED = ("fp8_static", "fp8_per_token", "fp8_group128")
WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1}
"""Sizes that blocks take on a GPU: heads of 128, input features in multiples of 512."""

PROMPTS = [list(range(3, 44)), [7, 5, 90, 11], list(range(50, 70))]


@pytest.fixture(autouse=True)
def cuda() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("blocks need compute capability 9.0")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_products(fmt: str, tokens: int) -> None:
    """Codes are exact; sums are those of FP8 tensor cores (14 bits or more), rounded to bf16."""
    linear = make_linear(512, 208)
    quantised = FP8Linear.of(linear, fmt, STATIC if fmt == "fp8_static" else None)
    x = torch.randn(tokens, 512).bfloat16()
    expected = quantised(x.float()).float()
    got = quantised.bfloat16().cuda()(x.cuda())
    assert got.dtype is torch.bfloat16 and quantised.weight.is_cuda
    assert relative_l2(got.float().cpu(), expected) < 6e-3


@pytest.mark.parametrize("weights", [1, 208])
@pytest.mark.parametrize("fmt", ["fp8_static", "fp8_dynamic", "fp8_per_token"])
def test_scales_of_one_operand_alone(fmt: str, weights: int) -> None:
    """A scale for each row of the weight with one for the input, and the other way round."""
    linear = make_linear(512, 208, bias=False)
    codes = (linear.weight / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.linspace(0.005, 0.02, weights)
    quantised = FP8Linear(codes, scale, fmt, STATIC if fmt == "fp8_static" else None)
    x = torch.randn(9, 512).bfloat16()
    expected = quantised(x.float()).float()
    assert relative_l2(quantised.cuda()(x.cuda()).float().cpu(), expected) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(5, 512).to(dtype)
    quantised = FP8Linear.of(make_linear(512, 208, bias=False), "fp8_static", STATIC)
    expected = quantised(x.float())
    got = quantised.cuda()(x.cuda())
    assert got.dtype is dtype and relative_l2(got.float().cpu(), expected) < 3e-3
    for fmt in ("fp8_per_token", "fp8_group128"):
        with pytest.raises(errors.DtypeError, match="bfloat16"):
            FP8Linear.of(make_linear(512, 208, bias=False), fmt).cuda()(x.cuda())


def make_packed(fmt: str, merge: bool) -> Any:
    model = make_llama(**WIDE).to("cuda", torch.bfloat16)
    found = calibrated(model)
    vattn.quantise_linears(model, fmt, calibration=found if fmt == "fp8_static" else None)
    config = vattn.CacheConfig(cache_dtype="fp8")
    return enable(
        model, cache_config=config, calibration=found, query_format="fp8_e4m3", merge_projections=merge, num_blocks=33
    )


def run(packed: Any, options: dict[str, Any] | None = None) -> list[torch.Tensor]:
    runner = Runner(packed, vattn.compile(packed, options=options) if options is not None else None)
    steps = ([(PROMPTS[0][:20], 0), (PROMPTS[1], 0)], [(PROMPTS[0][20:21], 20), ([5], 4)])
    return [torch.cat(runner.step(parts)) for parts in steps]


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("fmt", FUSED)
def test_fused_equals_unfused(fmt: str, merge: bool) -> None:
    """Bit for bit: the unfused compiled graph on the same device is the oracle. RoPE is left out, it has its own."""
    packed = make_packed(fmt, merge)
    expected = run(packed, {})
    torch._dynamo.reset()
    got = run(packed, vattn.options(rope="never"))
    nodes = vattn.fusion_report().nodes[-2:]
    assert [(node.outcome, node.output_format) for node in nodes] == [("fused", fmt)] * 2, [str(n) for n in nodes]
    for fused, plain in zip(got, expected, strict=True):
        assert torch.equal(fused, plain)


def test_rope_fuses_behind_the_merged_product() -> None:
    """Fused RoPE rounds to FP8 without bf16 before it: no farther from the fp32 model than the plain graph is."""
    exact = run(enable(make_llama(**WIDE).cuda(), num_blocks=33))
    packed = make_packed("fp8_static", True)
    plain = run(packed, {})
    torch._dynamo.reset()
    fused = run(packed, vattn.options(strict=True))
    assert [node.rope_outcome for node in vattn.fusion_report().nodes[-2:]] == ["fused"] * 2
    for step, expected in enumerate(exact):
        errors_of = [relative_l2(got[step].float().cpu(), expected.cpu()) for got in (fused, plain)]
        assert errors_of[0] < 1.1 * errors_of[1] < 0.2, errors_of


@pytest.mark.parametrize("fmt", FUSED)
def test_captured_generator(fmt: str) -> None:
    """Captured decodes give the tokens of the same steps without graphs."""
    packed = make_packed(fmt, True)
    sampling = vattn.Sampling(max_new_tokens=12, stop_token_ids=())
    tokens = []
    for sizes in ((), (4,)):
        generator = vattn.Generator(packed, max_num_reqs=4, max_seq_len=128, compile="none", graph_sizes=sizes)
        tokens.append([request.output for request in generator.generate(PROMPTS, sampling)])
    assert tokens[0] == tokens[1] and all(len(output) == 12 for output in tokens[0])


def test_torchao_linears_fuse() -> None:
    """torchao's own FP8 linears, a scale a token: attention writes what their quantiser would have made."""
    torchao = pytest.importorskip("torchao.quantization")
    from torchao.quantization.quantize_.common import KernelPreference

    model = make_llama(**WIDE).to("cuda", torch.bfloat16)
    config = torchao.Float8DynamicActivationFloat8WeightConfig(
        granularity=torchao.PerRow(), kernel_preference=KernelPreference.TORCH
    )
    torchao.quantize_(model.model, config)
    packed = enable(model, num_blocks=33)
    expected = run(packed, {})
    torch._dynamo.reset()
    got = run(packed, vattn.options(rope="never"))
    assert [node.outcome for node in vattn.fusion_report().nodes[-2:]] == ["fused"] * 2
    for fused, plain in zip(got, expected, strict=True):
        assert relative_l2(fused.float().cpu(), plain.float().cpu()) < 0.02
