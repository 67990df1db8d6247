"""Layers without a cache on a GPU: the encoder kernel against the reference, no sync, captured, FP8."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import vattn
from tests.conformance.compare import compare, on_cpu
from tests.layers.encoder_support import dense, offsets, random_qkv
from tests.support import capture, make_config, no_sync, random_packed_batch, relative_l2
from vattn.quantization.codecs import decode_kv, encode_kv
from vattn.quantization.formats import OUTPUT_FORMATS

pytestmark = pytest.mark.gpu

FP8 = {"kv_cache_dtype": "fp8_e4m3", "query_format": "fp8_e4m3"}
LENS = ([729, 0, 1, 130, 64, 300, 7], [729, 0, 1, 130, 64, 300, 5])
BACKENDS = ("TRITON_ATTN", "FLASH_ATTN", "FLASHINFER", "TORCH_SDPA")


@pytest.mark.parametrize("size", [64, 72, 80, 88, 96, 112, 120, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["16bit", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_encoder_kernel(size: int, fp8: bool, dtype: str) -> None:
    from vattn.kernels.triton.attention import encoder

    config = make_config(
        num_heads=4, num_kv_heads=2, head_size=size, dtype=dtype, block_size=0, causality="bidirectional",
        attn_type="encoder", backend="TRITON_ATTN", **(FP8 if fp8 else {}),
    )  # fmt: skip
    batch = random_packed_batch(config, *LENS, num_padding_tokens=9, num_padding_reqs=2, device="cuda", seed=size)
    expected = batch.expected()
    assert encoder.accepts(batch.args, config)
    encoder.attend(batch.args, config)
    compare(on_cpu(batch), *(t.cpu() for t in expected))


@pytest.mark.parametrize("output", [name for name in OUTPUT_FORMATS if name != "none"])
@pytest.mark.parametrize("size", [72, 128])
def test_encoder_kernel_with_quantised_outputs(size: int, output: str) -> None:
    from vattn.kernels.triton.attention import encoder

    config = make_config(
        num_heads=16, num_kv_heads=16, head_size=size, dtype="bfloat16", block_size=0, causality="bidirectional",
        attn_type="encoder", backend="TRITON_ATTN", output_format=output,
    )  # fmt: skip
    batch = random_packed_batch(config, *LENS, num_padding_tokens=9, device="cuda", seed=size)
    expected = batch.expected()
    encoder.attend(batch.args, config)
    compare(on_cpu(batch), *(t.cpu() for t in expected))


@pytest.mark.parametrize("fp8", [False, True], ids=["16bit", "fp8"])
@pytest.mark.parametrize("size", [72, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_layers_on_every_backend(name: str, size: int, fp8: bool) -> None:
    """FlashAttention rounds the weights to e4m3 too, half a unit of which is 2**-4."""
    quant = vattn.EncoderFP8Config(dynamic=True) if fp8 else None
    layer = vattn.MMEncoderAttention(4, size, num_kv_heads=2, attn_backend=name, quant_config=quant).cuda()
    refusal = vattn.explain(vattn.AttentionConfig.parse(layer._ops["bfloat16"]), "cuda").refusals[name]
    if refusal:
        pytest.skip("; ".join(refusal))
    lens = [300, 0, 17, 64]
    qkv = [t.cuda() for t in random_qkv(sum(lens), 4, 2, size, dtype=torch.bfloat16)]
    out = layer(*(t[None] for t in qkv), offsets(lens).cuda(), 300)
    parts = [t.cpu() for t in qkv]
    if fp8:
        parts = [rounded(t.float(), t.abs().max().float().view(1) / 448) for t in parts]
    assert relative_l2(out[0], dense(*parts, lens)) < (2**-4 if fp8 and name == "FLASH_ATTN" else 2**-7)


def test_text_encoder_with_windows() -> None:
    lens = [300, 1, 0, 17, 513]
    builder = vattn.AttentionMetadataBuilder(8, 1024, 1024, device="cuda")
    step = builder.build(lens, num_tokens_padded=840)
    windowed = ({"per_layer_sliding_window": 65, "logits_soft_cap": 3.0}, {"window": 65, "soft_cap": 3.0})
    for options, meaning in (({}, {}), windowed):
        layer = vattn.EncoderOnlyAttention(4, 64, 0.125, 2, **options)
        qkv = [t.cuda() for t in random_qkv(840, 4, 2, 64, real=831, dtype=torch.bfloat16)]
        out = layer(*qkv, metadata=step).view(840, 4, 64)
        assert relative_l2(out, dense(*(t.cpu() for t in qkv), lens, scale=0.125, **meaning)) < 2**-7


def rounded(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return decode_kv(encode_kv(tensor, "fp8_e4m3", scale), "fp8_e4m3", scale)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_captured_dynamic_fp8_layer_goes_on_counting(compiled: bool) -> None:
    """One graph serves other images, fewer of them, and moves the history on; nothing in it synchronises."""
    torch._dynamo.reset()
    layer = vattn.MMEncoderAttention(4, 72, quant_config=vattn.EncoderFP8Config(dynamic=True)).cuda()
    attend: Any = vattn.compile(layer) if compiled else layer
    rows = torch.zeros(1, 1024, 3 * 288, device="cuda", dtype=torch.bfloat16)
    starts = torch.zeros(9, dtype=torch.int32, device="cuda")
    longest = torch.tensor(1024, device="cuda")

    def put(lens: list[int], seed: int) -> list[torch.Tensor]:
        qkv = random_qkv(1024, 4, 4, 72, real=sum(lens), dtype=torch.bfloat16, seed=seed)
        rows.copy_(torch.stack(qkv, dim=1).flatten(1)[None])
        starts.copy_(vattn.pad_cu_seqlens(offsets(lens), 8))
        return qkv

    def step() -> torch.Tensor:
        return attend(*rows.chunk(3, dim=-1), starts, longest, padded=True)

    with torch.no_grad():
        put([500, 300], 0)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        with no_sync():
            step()
        graph, out = capture(step)
        layer.reset_amax_history()
        seen = []
        for seed, lens in enumerate([[729, 200, 1], [64] * 8, [1024], [3, 0, 700]] * 5):
            qkv = put(lens, seed)
            real = sum(lens)
            seen.append(torch.stack([t[:real].abs().max() for t in qkv]).float())
            graph.replay()
            scales = torch.stack(seen[-16:]).amax(0) / 448
            expected = dense(*(rounded(t.float(), s.view(1)) for t, s in zip(qkv, scales, strict=True)), lens)
            assert not out[:, real:].any()
            assert relative_l2(out.view(1024, 4, 72), expected) < 2**-6
        assert int(layer.amax_steps) == 20


def test_no_sync_in_eager_calls() -> None:
    layers = [vattn.MMEncoderAttention(4, 80, quant_config=q) for q in (None, vattn.EncoderFP8Config(dynamic=True))]
    text = vattn.EncoderOnlyAttention(4, 80, 0.1)
    qkv = [t.cuda() for t in random_qkv(300, 4, 4, 80, dtype=torch.bfloat16)]
    starts = offsets([100, 200]).cuda()
    step = vattn.AttentionMetadataBuilder(8, 512, 512, device="cuda").build([100, 200])
    calls = [lambda layer=layer: layer.cuda()(*(t[None] for t in qkv), starts, 200) for layer in layers]
    calls += [lambda layer=layer: layer(*(t.view(3, 100, 4, 80) for t in qkv)) for layer in layers]
    calls.append(lambda: text(*qkv, metadata=step))
    for mode in (contextlib.nullcontext, no_sync):
        with mode(), torch.no_grad():
            for call in calls:
                call()


def test_text_encoder_captures() -> None:
    layer = vattn.EncoderOnlyAttention(4, 64, 0.125)
    builder = vattn.AttentionMetadataBuilder(8, 512, 512, device="cuda")
    padding = {"num_reqs_padded": 8, "num_tokens_padded": 512}
    rows = torch.zeros(3, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
    step = builder.build([512], **padding)
    with torch.no_grad():
        layer(*rows, metadata=step)
        graph, out = capture(lambda: layer(*rows, metadata=step))
        for lens in ([512], [100, 3, 200], [64] * 8):
            qkv = random_qkv(512, 4, 4, 64, real=sum(lens), dtype=torch.bfloat16)
            rows.copy_(torch.stack(qkv))
            builder.build(lens, **padding, capture_key=step.capture_key())
            graph.replay()
            assert relative_l2(out.view(512, 4, 64), dense(*qkv, lens, scale=0.125)) < 2**-7
            assert not out[sum(lens) :].any()


def test_offsets_behind_the_end_stay_inside_the_tensors() -> None:
    layer = vattn.MMEncoderAttention(4, 72)
    qkv = [t.cuda()[None] for t in random_qkv(300, 4, 4, 72, dtype=torch.bfloat16)]
    layer(*qkv, torch.tensor([0, 300, 1 << 28], dtype=torch.int32, device="cuda"), 300)
    torch.cuda.synchronize()
