"""Prompts of every kind, conversations, and the text of outputs as it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vattn
from vattn import errors
from vattn.generation.detokenizer import TextStream

pytest.importorskip("transformers")

import transformers

from tests.generation.generator_support import PROMPTS, WORDS, Characters, check_empty, make_generator, make_tokenizer
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable

TOKENIZER = make_tokenizer()
SAMPLING = vattn.Sampling(6, stop_token_ids=())
MESSAGES = [{"role": "system", "content": "the thin"}, {"role": "user", "content": "naïve ☃?"}]


@pytest.fixture(scope="module")
def wide() -> PackedModel:
    return enable(make_model("llama", vocab_size=WORDS), num_blocks=64)


def test_prompts_of_every_kind(wide: PackedModel) -> None:
    """What the tokenizer returns for a conversation, in every form, is the same prompt."""
    generator = make_generator(wide, tokenizer=TOKENIZER)
    template: Any = TOKENIZER.apply_chat_template
    ids = template(MESSAGES, add_generation_prompt=True)["input_ids"]
    forms: list[Any] = [ids, tuple(ids), np.array(ids), torch.tensor(ids), torch.tensor([ids]), vattn.Chat(MESSAGES)]
    for options in (
        {},
        {"return_dict": False},
        {"return_tensors": "pt"},
        {"return_tensors": "np", "return_dict": False},
    ):
        forms.append(template(MESSAGES, add_generation_prompt=True, **options))
    # A begin token in the text is not written twice.
    forms.append(template(MESSAGES, add_generation_prompt=True, tokenize=False))
    for form in forms:
        request = generator.add(form, SAMPLING)
        assert request.prompt == ids and all(type(token) is int for token in request.prompt)
        generator.cancel(request)
    texts = ["the", "thin ☃"]
    plain = [TOKENIZER.encode(text) for text in texts]
    for side in ("left", "right"):
        TOKENIZER.padding_side = side
        for kind in ("pt", "np"):
            padded = TOKENIZER(texts, padding=True, return_tensors=kind)
            assert [request.prompt for request in generator.generate(padded, SAMPLING)] == plain
    assert [request.prompt for request in generator.generate(TOKENIZER(texts), SAMPLING)] == plain
    assert [request.prompt for request in generator.generate(TOKENIZER("the"), SAMPLING)] == plain[:1]
    with pytest.raises(errors.RequestError, match="a prompt of 2 sequences"):
        generator.add(TOKENIZER(texts), SAMPLING)
    check_empty(generator)


def test_conversations(wide: PackedModel) -> None:
    generator = make_generator(wide, tokenizer=TOKENIZER)
    one = generator.chat(MESSAGES, SAMPLING)
    want = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert one.prompt == want and len(one.output) == 6
    half = [*MESSAGES, {"role": "assistant", "content": "in the"}]
    two = generator.chat([MESSAGES, half], SAMPLING, continue_final_message=True)
    assert two[1].prompt == TOKENIZER.apply_chat_template(half, continue_final_message=True)["input_ids"]
    other = generator.chat(MESSAGES, SAMPLING, chat_template="{{ messages[1]['content'] }}{{ extra }}", extra="!")
    assert TOKENIZER.decode(other.prompt, skip_special_tokens=True) == "naïve ☃?!"
    check_empty(generator)


def test_conversations_that_fail_alone(wide: PackedModel) -> None:
    generator = make_generator(wide, tokenizer=TOKENIZER)
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}, {"type": "text", "text": "what"}]}]
    template = "{% if messages|length > 1 %}{{ raise_exception('only one') }}{% endif %}{{ messages[0]['role'] }}"
    good, many, pictures = generator.chat([MESSAGES[:1], MESSAGES, image], SAMPLING, chat_template=template)
    assert (good.state, many.state, pictures.state) == ("finished", "failed", "failed")
    assert "only one" in str(many.error) and "content of type 'image'" in str(pictures.error)
    for name, value in (("enable_thinkin", True), ("tokenize", False), ("return_tensors", "pt")):
        unread = generator.chat(MESSAGES[:1], SAMPLING, chat_template=template, **{name: value})
        assert unread.state == "failed" and f"the option '{name}', which the chat template does not read" in str(
            unread.error
        )
    empty = generator.chat([{"role": "user"}], SAMPLING)
    assert empty.state == "failed" and "a message of role 'user' without content" in str(empty.error)
    for wrong in ("hello", [{"content": "x"}], [[]], 3):
        with pytest.raises(errors.ConfigError, match=r"Chat\("):
            generator.chat(wrong, SAMPLING)  # type: ignore[arg-type]
    check_empty(generator)


def test_conversations_that_nothing_can_turn_into_a_prompt(wide: PackedModel) -> None:
    generator = make_generator(wide, tokenizer=TOKENIZER)
    for messages in ("hello", {"role": "user", "content": "x"}):
        with pytest.raises(errors.ConfigError, match=r"Chat\(.*a list of messages"):
            generator.chat(messages)
    with pytest.raises(errors.ConfigError, match=r"the messages of a chat.*generator\.chat\(messages\)"):
        generator.generate([{"role": "user", "content": "x"}])
    with pytest.raises(errors.ConfigError, match=r"prompts\[1\], a list of messages.*vattn.Chat"):
        generator.generate(["the", MESSAGES], SAMPLING)  # type: ignore[list-item]
    own = "{{ messages[0]['content'] }}"
    for tokenizer in (None, Characters(), make_tokenizer(chat_template=None)):
        generator = make_generator(wide, tokenizer=tokenizer)
        with pytest.raises(errors.ConfigError, match="whose tokenizer has no chat template"):
            generator.chat(MESSAGES, SAMPLING)
        with pytest.raises(errors.RequestError, match="whose tokenizer has no chat template"):
            generator.add(vattn.Chat(MESSAGES))
        check_empty(generator)
    assert generator.chat(MESSAGES, SAMPLING, chat_template=own).prompt == TOKENIZER.encode(
        "the thin", add_special_tokens=False
    )


def test_special_tokens_are_skipped(wide: PackedModel) -> None:
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    generator = make_generator(wide, tokenizer=TOKENIZER)
    texts = []
    for skip in (None, True, False):
        sampling = vattn.Sampling(3, logit_bias={end: 100.0}, stop_token_ids=(), skip_special_tokens=skip)
        texts.append(generator.generate(["the"], sampling)[0].text)
    assert texts == ["", "", "<|im_end|>" * 3]
    with pytest.raises(errors.RequestError, match="skip_special_tokens=True for a tokenizer without"):
        make_generator(wide, tokenizer=Characters()).add("a", vattn.Sampling(skip_special_tokens=True))


class Cleaning(transformers.PreTrainedTokenizerFast):
    """A tokenizer whose `decode` does more than that of the tokenizers library."""

    def _decode(self, *args: Any, **options: Any) -> str:
        return str(super()._decode(*args, **options)).replace("the", "THE")


PIECES = [TOKENIZER.convert_tokens_to_ids(token) for token in ("the", "Ġthe", "<|im_end|>", "in")]
PIECES += TOKENIZER.encode("ï☃漢字\U0001f600", add_special_tokens=False)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES) | st.integers(0, len(TOKENIZER) - 1), max_size=25), st.booleans(),
    st.sampled_from(["library", "own", "breaks"]), st.integers(1, 3),
)  # fmt: skip
def test_text_that_comes_in_pieces_is_that_of_decode(ids: list[int], skip: bool, kind: str, pace: int) -> None:
    """Whole characters alone, however many tokens come at once, and also if the library's stream gives up."""
    tokenizer = Cleaning(tokenizer_object=TOKENIZER.backend_tokenizer) if kind == "own" else TOKENIZER
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    assert (stream._library is None) == (kind == "own")
    if kind == "breaks" and stream._library is not None:
        stream._library = (Breaks(stream._library[0], len(ids) // 2), stream._library[1])
    counts = [*range(pace, len(ids), pace), len(ids)]
    shown = [stream.push(ids[:count], last=count == len(ids)) for count in counts]
    if kind != "own":
        assert "".join(shown) == TOKENIZER.decode(ids, skip_special_tokens=skip) == stream.text
    assert not any("\ufffd" in text and text.endswith("\ufffd") for text in shown[:-1])


class Breaks:
    """A stream that raises after some tokens."""

    def __init__(self, stream: Any, left: int) -> None:
        self.stream, self.left = stream, left

    def step(self, inner: Any, token: int) -> str | None:
        self.left -= 1
        if self.left < 0:
            raise ValueError("Invalid prefix encountered")
        return self.stream.step(inner, token)


def test_progress_bars_count_prompts(packed: PackedModel, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    generator = make_generator(packed)
    sampling = vattn.Sampling(3, temperature=1.0, n=2, stop_token_ids=())
    generator.generate(PROMPTS[:3], sampling, progress=True)
    assert "3/3" in capsys.readouterr().err
