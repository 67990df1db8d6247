"""Prompts with images: the tokens of transformers' own generate, in chunks, beside texts, preempted, sharing blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from vattn.errors import RequestError

pytest.importorskip("transformers")

from tests.integrations.media_families import MODELS, make, prompt, table
from vattn.integrations.transformers import disable, enable

NEW = 7
SAMPLING = vattn.Sampling(max_new_tokens=NEW, stop_token_ids=(), logprobs=0, temperature=0.0)
BEFORE, AFTER, TEXT = [5 + i % 80 for i in range(0, 111, 7)], [8, 3, 61, 4], [9 + 3 * i % 70 for i in range(29)]
TOLERANCE = 1e-3
"""Absolute, of log-probabilities in fp32 through a few layers. Without an image, or its positions, they differ by 1."""


def own(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[list[int], list[float]]:
    """Return the tokens of transformers' own generate, and their log-probabilities."""
    out = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True,
        eos_token_id=None,
    )  # fmt: skip
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)]


def check(request: vattn.Request, expected: tuple[list[int], list[float]]) -> None:
    assert request.error is None, request.error
    assert request.output == expected[0]
    assert [one.logprob for one in request.logprobs or ()] == pytest.approx(expected[1], abs=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_images_give_transformers_tokens(name: str, device: str) -> None:
    """Two prompts with images and a text, in chunks of 16 tokens that share steps with decodes."""
    model = make(name).to(device)
    prompts = [
        {key: value.to(device) for key, value in inputs.items()}
        for inputs in (prompt(name, BEFORE, AFTER), prompt(name, [7, 5], AFTER, seed=1))
    ]
    text = torch.tensor([TEXT], device=device)
    expected = [own(model, inputs) for inputs in (*prompts, {"input_ids": text, "attention_mask": text * 0 + 1})]
    generator = vattn.Generator(enable(model, num_blocks=33), token_budget=16, max_num_reqs=4, max_seq_len=64)
    for request, one in zip(generator.generate([*prompts, TEXT], SAMPLING), expected, strict=True):
        check(request, one)
    check(generator.generate(prompts[0], SAMPLING)[0], expected[0])
    disable(model)
    assert own(model, prompts[0])[0] == expected[0][0]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_a_shared_prefix_may_end_inside_an_image(name: str) -> None:
    model = make(name)
    prompts = [prompt(name, BEFORE[:12], [token] * 7) for token in (8, 9)]
    expected = [own(model, inputs) for inputs in prompts]
    generator = vattn.Generator(enable(model, num_blocks=33), max_seq_len=64)
    done = [generator.generate([inputs], SAMPLING)[0] for inputs in prompts]
    for request, one in zip(done, expected, strict=True):
        check(request, one)
    assert [request.reused for request in done] == [0, 16]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_blocks_are_shared_by_equal_images(name: str) -> None:
    model = make(name)
    prompts = [prompt(name, BEFORE, AFTER * 4, seed) for seed in (0, 0, 1)]
    expected = [own(model, inputs) for inputs in prompts]
    generator = vattn.Generator(enable(model, num_blocks=33), max_seq_len=64)
    done = [generator.generate([inputs], SAMPLING)[0] for inputs in prompts]
    for request, one in zip(done, expected, strict=True):
        check(request, one)
    # The first block is text alone.
    assert [request.reused for request in done] == [0, 32, 16]


def test_blocks_are_not_shared_under_another_mask() -> None:
    """Without types of tokens, Gemma's images are causal: their log-probabilities differ by 0.03."""
    model = make("gemma3")
    both_ways = prompt("gemma3", BEFORE[:12], AFTER * 4)
    causal = {name: value for name, value in both_ways.items() if name != "token_type_ids"}
    expected = own(model, causal)
    generator = vattn.Generator(enable(model, num_blocks=33), max_seq_len=64)
    generator.generate([both_ways], SAMPLING)
    request = generator.generate([causal], SAMPLING)[0]
    check(request, expected)
    assert request.reused == 0


def test_a_text_gets_its_token_beside_an_image_that_waits() -> None:
    """The first step ends before the image, which it has no room for, and completes the shorter text after it."""
    model = make("gemma3")
    image, text = prompt("gemma3", BEFORE, AFTER), torch.tensor([TEXT[:3]])
    expected = [own(model, inputs) for inputs in (image, {"input_ids": text, "attention_mask": text * 0 + 1})]
    generator = vattn.Generator(enable(model, num_blocks=33), token_budget=20, max_num_reqs=4, max_seq_len=64)
    for request, one in zip(generator.generate([image, TEXT[:3]], SAMPLING), expected, strict=True):
        check(request, one)


def test_images_in_a_cache_with_groups_and_beside_drafts() -> None:
    model = make("gemma3")
    prompts = [prompt("gemma3", BEFORE, AFTER), prompt("gemma3", [7, 5], AFTER, seed=1)]
    expected = [own(model, inputs) for inputs in prompts]
    packed = enable(model)
    packed.allocate(num_blocks=40, hybrid=True)
    assert len(packed.kv_cache.groups) > 1
    options: dict[str, Any] = {"token_budget": 20, "max_num_reqs": 2, "max_seq_len": 64}
    generator = vattn.Generator(packed, speculation=vattn.PromptLookup(num_drafts=3), **options)
    for request, one in zip(generator.generate([*prompts, TEXT], SAMPLING), expected, strict=False):
        check(request, one)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_preempted_images_are_computed_again(name: str) -> None:
    model = make(name)
    prompts = [prompt(name, BEFORE, AFTER * 2), prompt(name, BEFORE, AFTER * 2, seed=1)]
    expected = [own(model, inputs) for inputs in prompts]
    generator = vattn.Generator(
        enable(model, num_blocks=5), token_budget=40, max_num_reqs=2, max_seq_len=64, reuse_prefixes=False
    )
    done = generator.generate(prompts, SAMPLING)
    for request, one in zip(done, expected, strict=True):
        check(request, one)
    assert sum(request.preemptions for request in done) > 0


def test_refusals() -> None:
    model = make("gemma3")
    good = prompt("gemma3", BEFORE, AFTER)
    generator = vattn.Generator(enable(model, num_blocks=33), token_budget=12, max_num_reqs=4, max_seq_len=64)
    assert generator.add(good, SAMPLING).state == "waiting"
    generator = vattn.Generator(generator.model, token_budget=11, max_num_reqs=4, max_seq_len=64)
    wrong = [
        (good, "9 tokens that see each other.*8 tokens"),
        ({**good, "image_grid_thw": torch.ones(1, 3)}, "image_grid_thw, which Gemma3Model does not take"),
        ({**good, "pixel_values": good["pixel_values"][:0]}, "Gemma3ForConditionalGeneration refuses"),
        ({**good, "pixel_values": [1.0]}, "pixel_values of type list"),
        ({**good, "attention_mask": good["attention_mask"] * 0}, "images and padding"),
        ({**good, "attention_mask": torch.ones(1, 3)}, r"an attention_mask of shape \[1, 3\] for input_ids of"),
        ({**good, "pixel_values": good["pixel_values"].to("meta")}, "pixel_values on the meta device"),
        ({**good, "input_ids": good["input_ids"].repeat(2, 1)}, r"input_ids of shape \[2"),
        ({**good, "input_ids": good["input_ids"] + 90}, "token id 102"),
        ({**good, "position_ids": torch.arange(5, 35)[None]}, "position_ids, which Gemma3Model does not take"),
    ]
    done = generator.generate([inputs for inputs, _ in wrong] + [TEXT[:5]], SAMPLING)
    assert done[-1].state == "finished"
    for request, (_, words) in zip(done, wrong, strict=False):
        with pytest.raises(RequestError, match=words):
            request.result()


def test_places_of_images_need_them() -> None:
    model = make("qwen2_5_vl")
    good = prompt("qwen2_5_vl", BEFORE, AFTER)
    generator = vattn.Generator(enable(model, num_blocks=33), max_seq_len=64)
    wrong: list[tuple[Any, str]] = [
        ([5, 90, 7], "token id 90 in a prompt, the place of a part of the image, without image"),
        ({"input_ids": [5, 91, 7]}, "token id 91 in a prompt, the place of a part of the video, without video"),
        ({k: v for k, v in good.items() if k != "pixel_values"}, "token id 90.* without pixel_values"),
        ({**good, "input_ids": good["input_ids"].where(good["input_ids"] != 90, 91)}, "91.* pixel_values_videos"),
        ({k: v for k, v in good.items() if k != "image_grid_thw"}, "pixel_values without image_grid_thw"),
        (
            {**good, "image_grid_thw": torch.tensor([[1, 4, 60]])},
            r"image_grid_thw=\[\[1, 4, 60\]\], pixel_values of \[24, 96\]",
        ),
    ]
    done = generator.generate([inputs for inputs, _ in wrong] + [TEXT[:5]], SAMPLING)
    assert done[-1].state == "finished"
    for request, (_, words) in zip(done, wrong, strict=False):
        with pytest.raises(RequestError, match=words):
            request.result()


def test_the_documented_models_are_those_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "inputs.md").read_text()
    assert table() in page, "put what tests.integrations.media_families.table() returns into the page"


def test_an_image_in_a_text_model() -> None:
    from tests.integrations.hf_families import make_model

    generator = vattn.Generator(enable(make_model("llama"), num_blocks=9), max_seq_len=64)
    done = generator.generate([prompt("llava", BEFORE, AFTER), TEXT], SAMPLING)
    assert done[1].state == "finished"
    with pytest.raises(RequestError, match="pixel_values for LlamaForCausalLM, a model of text"):
        done[0].result()
    with pytest.raises(RequestError, match="a model of text"):
        generator.add({**prompt("llava", BEFORE, AFTER)})
