"""Whisper in a generator: the tokens of transformers' own generate, whatever runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from vattn.errors import ArgumentError, ConfigError, RequestError, UnsupportedRequestError

pytest.importorskip("transformers")

import transformers

from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import disable, enable, enable_adapters
from vattn.integrations.transformers.encoder_decoder import enable_encoder_decoder
from vattn.integrations.transformers.whisper import transcribe, whisper_task

NEW = 9
SAMPLING = vattn.Sampling(max_new_tokens=NEW, stop_token_ids=(), logprobs=0, temperature=0.0)
SIZES = {
    "vocab_size": 97, "num_mel_bins": 8, "d_model": 64, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_source_positions": 37, "max_target_positions": 60, "decoder_start_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def make() -> Any:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**SIZES)
    model = transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.requires_grad_(False)


def prompts(count: int = 3) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(1)
    ids = [[1, 7, 5 + i, *range(10, 10 + 9 * i)] for i in range(count)]
    return [
        {"input_features": torch.randn(1, 8, 74, generator=rng), "decoder_input_ids": torch.tensor([each])}
        for each in ids
    ]


def own(model: Any, prompt: dict[str, torch.Tensor]) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens, one after the other, and their log-probabilities."""
    ids, values, start = prompt["decoder_input_ids"], [], prompt["decoder_input_ids"].shape[1]
    for _ in range(NEW):
        row = model(input_features=prompt["input_features"], decoder_input_ids=ids).logits[0, -1].log_softmax(-1)
        values.append(float(row.max()))
        ids = torch.cat([ids, row.argmax()[None, None]], 1)
    return ids[0, start:].tolist(), values


def check(request: vattn.Request, expected: tuple[list[int], list[float]]) -> None:
    assert request.error is None, request.error
    assert request.output == expected[0]
    assert [one.logprob for one in request.logprobs or ()] == pytest.approx(expected[1], abs=1e-3)


def test_recordings_give_transformers_tokens() -> None:
    """Prompts in chunks of 6 tokens beside decodes; the model is as before afterwards."""
    model = make()
    inputs = prompts()
    expected = [own(model, prompt) for prompt in inputs]
    assert len({tuple(tokens) for tokens, _ in expected}) == 3, "recordings decide about tokens"
    generator = vattn.Generator(
        enable_encoder_decoder(model, num_blocks=40), token_budget=6, max_num_reqs=4, max_seq_len=60
    )
    for request, one in zip(generator.generate(inputs, SAMPLING), expected, strict=True):
        check(request, one)
    used = generator.statistics().used_blocks
    other = {**inputs[1], "decoder_input_ids": inputs[2]["decoder_input_ids"]}
    again = generator.generate([inputs[2], other], SAMPLING)
    check(again[0], expected[2])
    assert [request.reused for request in again] == [16, 0], "blocks are shared by equal recordings alone"
    assert generator.statistics().used_blocks == used == 0
    disable(model)
    assert own(model, inputs[0]) == expected[0]
    generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=40), speculation=vattn.PromptLookup())
    assert generator.scheduler.max_seq_len == SIZES["max_target_positions"]
    check(generator.generate(inputs[1:2], SAMPLING)[0], expected[1])


def test_preempted_recordings_are_written_again() -> None:
    model = make()
    inputs = prompts()[1:] * 2
    expected = [own(model, prompt) for prompt in inputs[:2]] * 2
    generator = vattn.Generator(
        enable_encoder_decoder(model, num_blocks=10), max_num_reqs=4, max_seq_len=60, reuse_prefixes=False
    )
    done = generator.generate(inputs, SAMPLING)
    for request, one in zip(done, expected, strict=True):
        check(request, one)
    assert sum(request.preemptions for request in done) > 0


LANGUAGES, TASKS = {"<|de|>": 63, "<|en|>": 62}, {"transcribe": 64, "translate": 65}


def make_with_timestamps() -> Any:
    """Return a model with times as its last 30 tokens."""
    model = make()
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=61, eos_token_id=60, pad_token_id=60, bos_token_id=60, lang_to_id=LANGUAGES,
        task_to_id=TASKS, no_timestamps_token_id=66, is_multilingual=True, max_initial_timestamp_index=5,
        suppress_tokens=[3, 60], begin_suppress_tokens=[7, 60], return_timestamps=False,
    )  # fmt: skip
    return model


@pytest.mark.parametrize("timestamps", [True, False])
def test_timestamps_follow_the_rules_of_generate(timestamps: bool) -> None:
    """Times in pairs, none early, a bound on the first; and tokens that are suppressed."""
    model, wanted = make_with_timestamps(), [("en", "transcribe"), ("de", "transcribe"), ("de", "translate")]
    pairs = [(prompt["input_features"], each) for prompt, each in zip(prompts(), wanted, strict=True)]
    expected = [
        model.generate(
            features, language=each[0], task=each[1], return_timestamps=timestamps, max_new_tokens=24, do_sample=False,
            num_beams=1, force_unique_generate_call=True,
        )[0].tolist()
        for features, each in pairs
    ]  # fmt: skip
    packed = enable_encoder_decoder(model, num_blocks=40)
    with pytest.warns(UserWarning, match="begin_suppress_tokens"):
        generator = vattn.Generator(packed, max_num_reqs=4, token_budget=8)
    tasks = [whisper_task(packed, *each, timestamps=timestamps) for each in wanted]
    done = generator.generate(
        [
            {"input_features": features, "decoder_input_ids": task.decoder_input_ids}
            for (features, _), task in zip(pairs, tasks, strict=True)
        ],
        [vattn.Sampling(max_new_tokens=24, logits_processors=each.logits_processors) for each in tasks],
    )
    for request, tokens in zip(done, expected, strict=True):
        assert request.prompt + request.output == tokens
    times = [[token > 66 for token in request.output] for request in done]
    assert all(each[0] and 3 <= sum(each) <= 21 for each in times) == timestamps


def test_long_recordings_are_cut_as_by_generate() -> None:
    """Several windows of 74 frames, which end at times, at the limit, and at the recording's end."""
    model, rng = make_with_timestamps(), torch.Generator().manual_seed(5)
    recordings = [torch.randn(1, 8, frames, generator=rng) for frames in (300, 74, 411)]
    expected = []
    for features in recordings:
        options = {"language": "de", "task": "transcribe", "return_timestamps": True, "max_new_tokens": 24}
        options |= {"do_sample": False, "num_beams": 1, "return_segments": True, "temperature": 0.0}
        # A short one is a window too.
        features = torch.nn.functional.pad(features, (0, max(0, 75 - features.shape[2])))
        expected.append(model.generate(features, **options)["segments"][0])
    packed = enable_encoder_decoder(model, num_blocks=40)
    with pytest.warns(UserWarning, match="begin_suppress_tokens"):
        generator = vattn.Generator(packed, max_num_reqs=4, token_budget=16)
    task = whisper_task(packed, "de", timestamps=True)
    found = transcribe(generator, recordings, task, vattn.Sampling(max_new_tokens=24))
    for segments, own in zip(found, expected, strict=True):
        assert [one.tokens for one in segments] == [one["tokens"].tolist() for one in own]
        for name in ("start", "end"):
            assert [getattr(one, name) for one in segments] == pytest.approx([float(one[name]) for one in own])
    assert len(found[0]) > 6
    with pytest.raises(ConfigError, match="timestamps=True"):
        transcribe(generator, recordings, whisper_task(packed, "de"))
    with pytest.raises(ConfigError, match=r"a recording of \[8, 74\]"):
        transcribe(generator, [torch.zeros(8, 74)], task)
    with pytest.raises(ConfigError, match="one of a Whisper model"):
        transcribe(vattn.Generator(enable(make_model("llama"), num_blocks=8)), recordings, task)


def test_languages_are_found_and_wrong_ones_refused() -> None:
    model = make_with_timestamps()
    features = prompts(1)[0]["input_features"]
    model.generation_config.begin_suppress_tokens = None
    expected = int(model.detect_language(features)[0])
    generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=12), max_num_reqs=2)
    choice = vattn.Sampling(max_new_tokens=1, allowed_token_ids=tuple(LANGUAGES.values()))
    assert generator.generate([{"input_features": features}], choice)[0].output == [expected]
    with pytest.raises(ConfigError, match=r"language=None.*such as 'de', 'en'"):
        whisper_task(model)
    with pytest.raises(ConfigError, match="task='sing'"):
        whisper_task(model, "en", "sing")
    model.generation_config.is_multilingual = False
    assert whisper_task(model).decoder_input_ids == [61, 66]
    with pytest.raises(ConfigError, match="English-only"):
        whisper_task(model, "en")
    with pytest.raises(ConfigError, match="no no_timestamps_token_id"):
        whisper_task(make())
    with pytest.raises(ConfigError, match="Linear, with no no_timestamps_token_id"):
        whisper_task(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="timestamps='no'"):
        whisper_task(model, timestamps="no")  # type: ignore[arg-type]


def test_refusals() -> None:
    model = make()
    generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=12), max_num_reqs=4, max_seq_len=60)
    good = prompts(1)[0]
    wrong = [
        ({**good, "pixel_values": torch.ones(1)}, "pixel_values for WhisperForConditionalGeneration"),
        ({**good, "input_features": torch.randn(2, 8, 74)}, r"input_features of \[2, 8, 74\]"),
        ({**good, "attention_mask": torch.tensor([[1, 0]])}, "input_features with padding"),
        ({**good, "input_features": good["input_features"].to("meta")}, r"input_features of \[1, 8, 74\] on meta"),
        ({**good, "decoder_input_ids": torch.tensor([[1.0]])}, r"a prompt of .\[1\.0\]"),
        ({**good, "input_features": torch.randn(1, 8, 70)}, "encoder refuses"),
        ({**good, "decoder_input_ids": torch.tensor([[97]])}, "token id 97 in a prompt"),
        ([3, 4], "a prompt without input_features for Whisper"),
    ]
    done = generator.generate([*(prompt for prompt, _ in wrong), good], SAMPLING)
    assert done[-1].state == "finished"
    for request, (_, words) in zip(done, wrong, strict=False):
        with pytest.raises(RequestError, match=words):
            request.result()
    assert generator.generate(good, SAMPLING)[0].state == "finished"
    with pytest.raises(ConfigError, match="a batch of prompts that are more than token ids"):
        generator.generate({**good, "input_features": torch.randn(2, 8, 74)})
    with pytest.raises(ConfigError, match=r"mixed_graph_sizes=\[16\].*graphs of decodes only"):
        vattn.Generator(generator.model, mixed_graph_sizes=[16])
    with pytest.raises(ConfigError, match=r"enable_encoder_decoder\(\) of a model that is on vattn"):
        enable_encoder_decoder(model)
    with pytest.raises(ConfigError, match="EncoderDecoderModel, an encoder-decoder model"):
        vattn.calibrate(generator.model, [[[1, 2]]])
    with pytest.raises(UnsupportedRequestError, match="adapters of an encoder-decoder model"):
        enable_adapters(generator.model)
    generator.model.allocate(num_blocks=12, hybrid=True)
    with pytest.raises(ConfigError, match="without hybrid=True"):
        vattn.Generator(generator.model)
    from tests.integrations.hf_families import make_model

    with pytest.raises(ConfigError, match="an encoder-decoder model with its head"):
        enable_encoder_decoder(make_model("llama"))
