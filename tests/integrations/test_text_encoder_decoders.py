"""Encoder-decoders of text and sound in a generator: tokens and log-probabilities of transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from vattn.errors import ConfigError, MetadataError, RequestError, UnsupportedRequestError

pytest.importorskip("transformers")

import transformers

from vattn.integrations.transformers import disable
from vattn.integrations.transformers.encoder_decoder import enable_encoder_decoder

NEW = 9
SAMPLING = vattn.Sampling(max_new_tokens=NEW, stop_token_ids=(), logprobs=0)
SIZES = {
    "vocab_size": 97, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 40,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
PART = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5, "cross_attention_hidden_size": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", SIZES),
    "mbart": ("MBartForConditionalGeneration", {**SIZES, "scale_embedding": True}),
    "marian": (
        "MarianMTModel",
        {
            **SIZES, "pad_token_id": 82, "decoder_start_token_id": 82, "decoder_vocab_size": 83,
            "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False,
        },
    ),
    "pegasus": ("PegasusForConditionalGeneration", {**SIZES, "decoder_start_token_id": 1}),
    "m2m_100": ("M2M100ForConditionalGeneration", SIZES),
    "blenderbot": ("BlenderbotForConditionalGeneration", SIZES),
    "blenderbot-small": ("BlenderbotSmallForConditionalGeneration", SIZES),
    "plbart": ("PLBartForConditionalGeneration", SIZES),
    "bigbird_pegasus": ("BigBirdPegasusForConditionalGeneration", {**SIZES, "attention_type": "original_full"}),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        {"vocab_size": 97, "decoder_start_token_id": 2, "encoder": PART, "decoder": PART},
    ),
    "speech_to_text": (
        "Speech2TextForConditionalGeneration",
        {**SIZES, "input_feat_per_channel": 8, "conv_channels": 16, "max_target_positions": 40},
    ),
    "moonshine": (
        "MoonshineForConditionalGeneration",
        {
            "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
            "pad_token_id": 2, "pad_head_dim_to_multiple_of": 12,
        },
    ),
}  # fmt: skip


def make(kind: str) -> Any:
    torch.manual_seed(0)
    name, sizes = CASES[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for path, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed_positions" not in path:
            parameter.normal_(std=0.2)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    model.tie_weights()
    own = model.generation_config
    own.forced_eos_token_id = own.max_length = own.encoder_no_repeat_ngram_size = None
    own.forced_bos_token_id = 7 if kind == "mbart" else None
    return model


def prompts(kind: str) -> list[Any]:
    rng = torch.Generator().manual_seed(1)
    if kind == "moonshine":
        return [{"input_values": torch.randn(1, 1000 * count, generator=rng)} for count in (3, 7, 2)]
    if kind == "speech_to_text":
        return [{"input_features": torch.randn(1, count, 8, generator=rng)} for count in (31, 90, 12)]
    texts = [[5, 6, 7, 8, 9, 10, 11, 2], [20, 21, 2], [*range(30, 63), 2]]
    first = torch.tensor([[CASES[kind][1]["decoder_start_token_id"], 9, 11, 12, 50, 51, 52]])
    return [texts[0], {"input_ids": torch.tensor([texts[1]]), "decoder_input_ids": first}, texts[2]]


def own(model: Any, prompt: Any, **options: Any) -> tuple[list[int], list[float]]:
    """Return the tokens of transformers' generate, those that the decoder was given too, and log-probabilities."""
    given = prompt if isinstance(prompt, dict) else {"input_ids": torch.tensor([prompt])}
    done = model.generate(
        **given, **{"max_new_tokens": NEW, **options}, do_sample=False, num_beams=1, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    tokens = done.sequences[0].tolist()
    rows = torch.cat(done.logits).log_softmax(-1)
    return tokens, [float(row[token]) for row, token in zip(rows, tokens[-len(rows) :], strict=True)]


def check(request: vattn.Request, expected: tuple[list[int], list[float]]) -> None:
    """Compare what both have: a forced first token is part of the prompt here, and of the output there."""
    request.result()
    tokens, logprobs = expected
    count = len(tokens) - len(request.prompt)
    assert count >= len(request.output) - 1
    assert request.prompt + request.output[:count] == tokens
    # fp32: the paged cache sums over other blocks.
    ours = [one.logprob for one in request.logprobs or ()]
    assert ours[:count] == pytest.approx(logprobs[-count:], abs=1e-4)


@pytest.mark.parametrize("kind", CASES)
def test_tokens_of_transformers(kind: str) -> None:
    """Chunks of 5 tokens beside decodes, over encoders of several lengths; the model is as before afterwards."""
    model, inputs = make(kind), prompts(kind)
    expected = [own(model, prompt) for prompt in inputs]
    generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=40), token_budget=5, max_num_reqs=3)
    for request, one in zip(generator.generate(inputs, SAMPLING), expected, strict=True):
        check(request, one)
    disable(model)
    assert own(model, inputs[0]) == expected[0]


def test_generated_padding_has_no_position() -> None:
    """M2M100 gives padding no position; later tokens are counted as transformers' cache counts them."""

    def pad(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] in (3, 4):
            scores = scores.clone()
            scores[:, 1] += 1e4
        return scores

    model = make("m2m_100")
    expected = own(model, [5, 6, 2], logits_processor=[pad])
    assert expected[0][3:5] == [1, 1]
    generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=12), max_num_reqs=2)
    sampling = vattn.Sampling(max_new_tokens=NEW, stop_token_ids=(), logprobs=0, logits_processors=(pad,))
    check(generator.generate([[5, 6, 2]], sampling)[0], expected)
    with pytest.raises(RequestError, match="the padding token 1 in a prompt of M2M100"):
        generator.add({"input_ids": [5], "decoder_input_ids": [2, 1]})


def test_to_the_end_of_the_table() -> None:
    model = make("bart")
    expected = own(model, [5, 6, 2], max_new_tokens=39)
    packed = enable_encoder_decoder(model, num_blocks=12)
    generator = vattn.Generator(packed, max_num_reqs=2)
    assert generator.scheduler.max_seq_len == packed.max_positions == 40
    sampling = vattn.Sampling(max_new_tokens=39, stop_token_ids=(), logprobs=0)
    check(generator.generate([[5, 6, 2]], sampling)[0], expected)
    with pytest.raises(ConfigError, match="max_seq_len=41 for a model with a table of 40 positions"):
        vattn.Generator(packed, max_seq_len=41)
    builder = vattn.AttentionMetadataBuilder(2, 64, 64, layers=packed, max_encoder_len=32)
    step = builder.build([41], [41], [[1, 2, 3]], encoder_lens=[0], cross_block_tables=[[]])
    with vattn.forward_context(step), pytest.raises(MetadataError, match="a request of 41 tokens"):
        packed(torch.zeros(41, dtype=torch.int64), step.positions)


def test_prompts_of_text() -> None:
    """Padding goes, the forced token follows the start token, and each invalid prompt has its own error."""
    model = make("mbart")
    expected = own(model, [5, 6, 2])
    generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=12), max_num_reqs=2)
    batch = {"input_ids": torch.tensor([[5, 6, 2, 1, 1]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    for prompt in (batch, {**batch, "decoder_input_ids": [2]}, {"input_ids": [5, 6, 2], "decoder_input_ids": [2, 7]}):
        request = generator.generate([prompt], SAMPLING)[0]
        assert request.prompt == [2, 7]
        check(request, expected)
    alone = {"input_ids": [5, 6, 2], "decoder_input_ids": [2, 7]}
    assert [request.prompt for request in generator.generate(alone, SAMPLING)] == [[2, 7]]
    none = {"input_ids": [5, 6, 2], "decoder_input_ids": None}
    assert [request.prompt for request in generator.generate(none, SAMPLING)] == [[2, 7]]
    for sound in (None, 5, torch.tensor(3.0)):
        error = generator.generate({"input_features": sound}, SAMPLING)[0].error
        assert "without input_ids" in str(error)
    with pytest.raises(ConfigError, match="a batch of prompts that are more than token ids"):
        generator.generate({"input_ids": [[5], [6]], "decoder_input_ids": [[2], [2]]}, SAMPLING)
    rows = model.get_input_embeddings()(torch.tensor([5, 6]))
    wrong = [
        ([5, 97], "token id 97 in a prompt"),
        ([5] * 41, "a prompt of 41 tokens"),
        ([], "a prompt of 0 tokens"),
        ({"input_ids": [5], "decoder_input_ids": [2, 97]}, "token id 97 in a prompt"),
        ({"input_ids": [5], "decoder_input_ids": [2], "pixel_values": 1}, "pixel_values for MBart"),
        ({"input_features": torch.zeros(1, 8, 8)}, "a prompt without input_ids for MBart"),
        (vattn.PromptEmbeddings(rows), "PromptEmbeddings for MBart"),
    ]
    for prompt, words in wrong:
        with pytest.raises(RequestError, match=words):
            generator.add(prompt, SAMPLING)
    disable(model)
    with pytest.raises(ConfigError, match="max_encoder_len=41 for a model that was made for 40"):
        enable_encoder_decoder(model, max_encoder_len=41)
    generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=12, max_encoder_len=3), max_num_reqs=2)
    check(generator.generate([[5, 6, 2]], SAMPLING)[0], expected)
    with pytest.raises(RequestError, match="a prompt of 4 tokens"):
        generator.add([5, 6, 7, 2])


REFUSED = {
    "t5": ({"d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}, "adds position_bias to its scores"),
    "mvp": ({}, "attention transformers does not let exchange"),
    "pegasus_x": ({"num_global_tokens": 4, "block_size": 16}, "looks positions up in no table"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_what_they_do(kind: str) -> None:
    more, words = REFUSED[kind]
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedRequestError, match=words):
        enable_encoder_decoder(model)
    assert model.config._attn_implementation == before
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())


def test_another_model_than_it_seems_is_refused() -> None:
    """Only the logits show that attention scores go through something else as well."""
    model = make("bart")
    layer = model.model.decoder.layers[1]
    layer.self_attn.register_forward_hook(lambda module, inputs, out: (out[0].cumsum(1), out[1]))
    with pytest.raises(UnsupportedRequestError, match="computes other logits on vattn"):
        enable_encoder_decoder(model)
