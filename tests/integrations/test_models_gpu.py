"""Encoder-decoders and transformers' own calls on a GPU, against transformers there; in fp32 unless said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vattn

pytest.importorskip("transformers")

import transformers

from tests.integrations import test_encoder_decoder_models as whisper
from tests.integrations import test_text_encoder_decoders as texts
from tests.integrations.hf_families import make_model
from tests.integrations.test_attn_implementation import assert_same, batch, generate, generate_batch
from vattn.integrations.transformers import continuous_batching
from vattn.integrations.transformers.encoder_decoder import enable_encoder_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def moved(inputs: Any) -> dict[str, torch.Tensor]:
    """Return a prompt as tensors on the GPU."""
    given = inputs if isinstance(inputs, dict) else {"input_ids": torch.tensor([inputs])}
    return {name: tensor.cuda() for name, tensor in given.items()}


@pytest.mark.parametrize("kind", [*texts.CASES, "whisper"])
def test_encoder_decoders_in_graphs(kind: str) -> None:
    """Prompts in chunks, and decodes that are captured by default, over encoders of several lengths."""
    module: Any = whisper if kind == "whisper" else texts
    model = module.make() if kind == "whisper" else module.make(kind)
    inputs = [moved(each) for each in (module.prompts() if kind == "whisper" else module.prompts(kind))]
    model.cuda()
    expected = [module.own(model, each) for each in inputs]
    packed = enable_encoder_decoder(model, num_blocks=40)
    generator = vattn.Generator(packed, token_budget=5 if kind != "whisper" else 6, max_num_reqs=3)
    assert generator.graphs is not None and generator.graphs.report.reason is None
    for cache in packed.kv_cache.kv_caches:
        cache[packed.kv_cache.reserved_blocks :].fill_(torch.nan)
    for _ in range(2):
        for request, one in zip(generator.generate(inputs, module.SAMPLING), expected, strict=True):
            module.check(request, one)


@pytest.mark.parametrize("first", [[0, 0, 0], [7, 0, 18]], ids=["plain", "padded"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_generate_gives_eager_tokens(family: str, first: list[int]) -> None:
    model, inputs = make_model(family).cuda(), moved(batch(first))
    assert_same(generate(model, "vattn", inputs), generate(model, "eager", inputs))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_single_rows_in_bf16(family: str) -> None:
    """By the kernel over dense keys: no further from the logits of fp32 than eager attention in bf16, or half as far
    again, since both round at other places.
    """
    model, inputs = make_model(family, head_dim=64).cuda(), moved(batch([7, 0, 18], 60))
    tokens = generate(model, "eager", inputs, max_new_tokens=5, min_new_tokens=5).sequences
    length, mask = inputs["input_ids"].shape[1], torch.nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
    found: dict[str, torch.Tensor] = {}
    for name, dtype in (("exact", torch.float32), ("eager", torch.bfloat16), ("vattn", torch.bfloat16)):
        model.to(dtype).set_attn_implementation("vattn" if name == "vattn" else "eager")
        cache = transformers.DynamicCache(config=model.config)
        model(tokens[:, :length], attention_mask=mask[:, :length], past_key_values=cache)
        found[name] = torch.cat([
            model(tokens[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=cache).logits.float()
            for at in range(length, length + 5)
        ])  # fmt: skip
    errors = {name: float((found[name] - found["exact"]).norm()) for name in ("eager", "vattn")}
    assert errors["vattn"] < 1.5 * errors["eager"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_prompts_and_steps(family: str) -> None:
    """One graph over a dynamic cache, and the decodes of a static one that `generate` compiles itself."""
    model = make_model(family).cuda()
    ids = moved(batch([0, 0], 33))["input_ids"]
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("vattn")
    step = torch.compile(model, fullgraph=True, dynamic=True)
    prompt = step(ids[:, :-1])
    last = step(ids[:, -1:], past_key_values=prompt.past_key_values)
    torch.testing.assert_close(torch.cat([prompt.logits, last.logits], 1), expected, atol=1e-4, rtol=1e-4)
    inputs = moved(batch([7, 0]))
    static = generate(model, "vattn", inputs, cache_implementation="static")
    assert_same(static, generate(model, "eager", inputs))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_continuous_batching(family: str) -> None:
    model, prompts = make_model(family).cuda(), [batch([0], length)["input_ids"][0].tolist() for length in (5, 33, 64)]
    expected = []
    for prompt in prompts:
        options = {"max_new_tokens": 20, "min_new_tokens": None, "eos_token_id": 96}
        expected.append(generate(model, "eager", moved(prompt), **options).sequences[0, len(prompt) :].tolist())
    with continuous_batching(model):
        assert generate_batch(model, prompts, 20) == sorted(expected)
