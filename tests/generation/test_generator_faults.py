"""What goes wrong: each mistake has an error of its own, each failure ends its request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from vattn import errors

pytest.importorskip("transformers")

from tests.generation.generator_support import GREEDY, PROMPTS, Characters, check_empty, make_generator
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable


def raising(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > 44:
        raise KeyError("of the user")
    return scores


def nothing_left(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf)


PROCESSORS: dict[str, tuple[Any, str]] = {
    "raises": (raising, "logits processor raising raised KeyError: 'of the user'"),
    "nothing": (lambda ids, scores: None, "returned NoneType"),
    "shape": (lambda ids, scores: scores[:, :5], r"returned torch.float32 \(1, 5\)"),
    "no chance left": (nothing_left, "of which the logits processors leave some"),
    "nan": (lambda ids, scores: scores * torch.nan, "not finite"),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_ends_its_request_alone(
    packed: PackedModel, expected: list[list[int]], temperature: float, device: str
) -> None:
    if device != "cpu":
        packed = enable(make_model("llama").to(device), num_blocks=64)
    wrong = [
        vattn.Sampling(12, temperature, stop_token_ids=(), logits_processors=(process,))
        for process, _ in PROCESSORS.values()
    ]
    generator = make_generator(packed, max_num_reqs=7, token_budget=512, compile="none")
    prompts = [PROMPTS[0]] * (1 + len(wrong)) + [PROMPTS[1]]
    first, *failed, last = generator.generate(prompts, [GREEDY, *wrong, GREEDY])
    assert [first.output, last.output] == expected[:2]
    for (kind, (_, text)), request in zip(PROCESSORS.items(), failed, strict=True):
        assert request.state == "failed" and len(request.output) == (4 if kind == "raises" else 0)
        with pytest.raises(errors.RequestError, match=text):
            request.result()
    check_empty(generator)


def test_criteria_and_tokenizers_that_raise(packed: PackedModel, expected: list[list[int]]) -> None:
    class Broken(Characters):
        def decode(self, ids: list[int]) -> str:
            if 0 in ids:
                raise OverflowError("no such id")
            return super().decode(ids)

    def criterion(ids: torch.Tensor, scores: None) -> bool:
        raise ValueError("of the user")

    wrong = vattn.Sampling(12, stop_token_ids=(), stopping_criteria=(criterion,))
    generator = make_generator(packed)
    done = generator.generate([PROMPTS[0], PROMPTS[1], PROMPTS[1]], [GREEDY, wrong, GREEDY])
    assert [done[0].output, done[2].output] == expected[:2]
    assert "stopping criterion raised ValueError: of the user" in str(done[1].error)
    failed = make_generator(packed, tokenizer=Broken()).generate(PROMPTS[:1], GREEDY)[0]
    assert "decode() raised OverflowError: no such id" in str(failed.error) and failed.state == "failed"
    check_empty(generator)


def test_a_failed_request_leaves_nothing_to_be_found(packed: PackedModel) -> None:
    generator = make_generator(packed)
    bad = vattn.Sampling(12, stop_token_ids=(), logits_processors=(lambda ids, scores: scores * torch.nan,))
    assert generator.generate([PROMPTS[0]], bad)[0].state == "failed"
    assert generator.generate([PROMPTS[0]], GREEDY)[0].reused == 0


WRONG_SAMPLING: dict[str, dict[str, Any]] = {
    "a float for a count": {"max_new_tokens": 4.0},
    "a bool for a count": {"max_new_tokens": True},
    "a text for a number": {"temperature": "hot"},
    "not a number": {"temperature": float("nan")},
    "top_k of a float": {"temperature": 1.0, "top_k": 2.5},
    "top_p of None": {"temperature": 1.0, "top_p": None},
    "a negative seed": {"seed": -1},
    "a large seed": {"seed": 2**64},
    "a float for a seed": {"seed": 1.5},
    "a negative stop id": {"stop_token_ids": (-1,)},
    "a text for stop ids": {"stop_token_ids": "2"},
    "one stop id": {"stop_token_ids": 2},
    "a float among the stop ids": {"stop_token_ids": (2.0,)},
    "one processor": {"logits_processors": raising},
    "no processor": {"logits_processors": (3,)},
    "no criterion": {"stopping_criteria": ("eos",)},
    "stop strings of a number": {"stop_strings": (1,)},
    "one stop string": {"stop_strings": "x"},
    "an empty stop string": {"stop_strings": ("",)},
    "no new token": {"max_new_tokens": 0},
    "a negative temperature": {"temperature": -1},
    "top_p of 0": {"temperature": 1.0, "top_p": 0},
    "top_k without a temperature": {"top_k": 5},
    "no repetition penalty": {"repetition_penalty": 0},
}


@pytest.mark.parametrize("kind", WRONG_SAMPLING)
def test_wrong_sampling(kind: str) -> None:
    with pytest.raises(errors.ConfigError, match=rf"Sampling\({list(WRONG_SAMPLING[kind])[-1]}="):
        vattn.Sampling(**WRONG_SAMPLING[kind])


def test_what_sampling_takes() -> None:
    numpy = pytest.importorskip("numpy")
    sampling = vattn.Sampling(
        numpy.int64(4), 1, top_k=numpy.int32(3), stop_strings=["a"], stop_token_ids=[numpy.int32(2)]
    )  # type: ignore[arg-type]
    assert sampling.stop_strings == ("a",) and sampling.stop_token_ids == (2,)


NEVER_CHOSEN = vattn.Sampling(stop_token_ids=(2, 97))
WRONG_REQUESTS: dict[str, tuple[Any, Any, type[Exception], str | None]] = {
    "an empty prompt": ([], None, errors.RequestError, "empty prompt"),
    "a long prompt": (list(range(90)) * 2, None, errors.RequestError, "128 tokens together"),
    "a text": ("text", None, errors.RequestError, "tokenizer"),
    "a sampling": ([1], 3, errors.ConfigError, r"vattn\.Sampling"),
    "end tokens": ([1], NEVER_CHOSEN, errors.RequestError, "stop_token_ids with 97, which the model never chooses"),
    "stop strings": (
        [1],
        vattn.Sampling(stop_strings=("x",)),
        errors.RequestError,
        r"stop_strings=\('x',\) for a generator without a tokenizer",
    ),
    "what a tokenizer returned": (
        {"input_ids": [3, 4], "attention_mask": [1, 1], "pixel_values": [0.5]},
        None,
        errors.RequestError,
        "a prompt with pixel_values",
    ),
    "a mask of another length": (
        {"input_ids": [[3, 4, 5]], "attention_mask": [1, 1]},
        None,
        errors.RequestError,
        "an attention_mask of another shape",
    ),
    "a mask without rows": (
        {"input_ids": [[3, 4], 5], "attention_mask": 1},
        None,
        errors.RequestError,
        r"input_ids=\[\[3, 4\], 5\]",
    ),
    "types of tokens": (
        {"input_ids": torch.tensor([[3, 4]]), "token_type_ids": torch.tensor([[0, 1]])},
        None,
        errors.RequestError,
        "a prompt with token_type_ids other than 0",
    ),
    **{
        f"a prompt {wrong!r}": (wrong, None, errors.RequestError, "a flat sequence of token ids")
        for wrong in (
            [True, 2],
            {3: 4},
            {3, 4},
            b"abc",
            frozenset([5]),
            torch.ones(2).bool(),
            torch.ones(2),
            torch.ones(2, 2).int(),
            torch.ones(2, device="meta").int(),
        )
    },
    **{
        f"a prompt {wrong!r}": (wrong, None, errors.RequestError, None)
        for wrong in ([97], [-1], ["a"], [None], [1.5], [[1, 2]], 5, [2**70])
    },
}


def test_wrong_requests(packed: PackedModel) -> None:
    generator = make_generator(packed)
    for prompt, sampling, error, text in WRONG_REQUESTS.values():
        with pytest.raises(error, match=text):
            generator.add(prompt, sampling)
        check_empty(generator)
    first, second = generator.generate([PROMPTS[0], {"input_ids": [3, 4, 5], "attention_mask": 1}], GREEDY)
    assert first.error is None and "attention_mask=1" in str(second.error)


WRONG_GENERATORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tokenizer's name": (
        {"tokenizer": "gpt2"},
        errors.ConfigError,
        r"tokenizer='gpt2'.*encode\(text\) and decode\(ids\)",
    ),
    "a float": ({"max_num_reqs": 2.0}, errors.ConfigError, "max_num_reqs=2.0"),
    "no budget": ({"token_budget": 0}, errors.ConfigError, "token_budget=0"),
    "longer than the cache": ({"max_seq_len": 2000}, errors.ConfigError, "holds a request of 1008 tokens.*up to 1008"),
    "length of a text": ({"max_seq_len": "all"}, errors.ConfigError, "max_seq_len='all'"),
    "end tokens of a text": ({"stop_token_ids": "2"}, errors.ConfigError, "stop_token_ids='2'"),
    "negative end token": ({"stop_token_ids": [-1]}, errors.ConfigError, "stop_token_ids=-1"),
    "end token beyond the vocabulary": (
        {"stop_token_ids": [2, 97]},
        errors.ConfigError,
        "stop_token_ids with 97, which the model never chooses",
    ),
    "queue": ({"max_queue": -1}, errors.ConfigError, "max_queue=-1"),
    "graph sizes": ({"graph_sizes": 8}, errors.ConfigError, "graph_sizes=8"),
    "a graph of no request": ({"graph_sizes": [0]}, errors.ConfigError, "graph_sizes=0"),
    "cache": ({"cache": "1GiB"}, errors.ConfigError, "cache of type str"),
    "reuse": ({"reuse_prefixes": "no"}, errors.ConfigError, "reuse_prefixes='no'"),
    "compile options": ({"compile_options": "max"}, errors.ConfigError, "compile_options='max'"),
    "speculation": ({"speculation": True}, errors.ConfigError, "PromptLookup"),
    "compile": ({"compile": "all"}, errors.ConfigError, "'layers'"),
    "no requests": ({"max_num_reqs": 0}, errors.ConfigError, "max_num_reqs"),
    "options of Inductor": (
        {"compile": "model", "compile_options": {"post_grad_custom_pre_pass": None}},
        errors.ConfigError,
        "compile_options with 'post_grad_custom_pre_pass'",
    ),
    "options without compiling": ({"compile_options": {"mode": "default"}}, errors.ConfigError, "without compiling"),
}


def test_wrong_generators(packed: PackedModel) -> None:
    good = make_generator(packed)
    for options, error, text in WRONG_GENERATORS.values():
        with pytest.raises(error, match=text):
            vattn.Generator(packed, **options)
    # The refused ones have not taken the cache.
    assert good.generate([[1]], vattn.Sampling(1, stop_token_ids=()))[0].state == "finished"


def test_models_that_are_not_on_vattn() -> None:
    with pytest.raises(
        errors.ConfigError, match=r"LlamaForCausalLM, a model of transformers that is not on vattn.*enable"
    ):
        vattn.Generator(make_model("llama"))
    with pytest.raises(errors.ConfigError, match="without a KV cache"):
        vattn.Generator(enable(make_model("llama")))
    with pytest.raises(errors.ConfigError, match="a model of type NoneType"):
        vattn.Generator(None)  # type: ignore[arg-type]


def test_wrong_calls(packed: PackedModel) -> None:
    generator = make_generator(packed)
    for wrong in (None, 3, PROMPTS[0]):
        with pytest.raises(errors.RequestError, match="what add"):
            generator.cancel(wrong)  # type: ignore[arg-type]
    for prompts, sampling, text in (
        ("a text", None, "a list of prompts"), (3, None, "prompts=3"), ([[1]], {"top_k": 3}, "sampling of type dict"),
        ([[1]], [GREEDY] * 2, "2 samplings for 1 prompts"),
        ({"inputs": [3, 4]}, GREEDY, "a list of prompts"),
        ([1, 2, 3], None, r"prompts\[0\]=1 of type int.*pass \[ids\]"), ([[1], None], None, r"prompts\[1\]=None"),
        (torch.arange(3), None, r"prompts\[0\]=tensor\(0\) of type Tensor"),
        ([[1], "hello"], None, r"prompts\[1\]='hello', a text for a generator without a tokenizer"),
    ):  # fmt: skip
        for call in (generator.generate, generator.stream):
            with pytest.raises(errors.ConfigError, match=text):
                call(prompts, sampling)  # type: ignore[arg-type]
            check_empty(generator)
    failed = generator.generate([[1]], [3])[0]  # type: ignore[list-item]
    assert "sampling of type int" in str(failed.error)
    check_empty(generator)


def test_requests_are_no_longer_than_the_model_was_trained_for() -> None:
    packed = enable(make_model("llama"), num_blocks=64)
    assert vattn.Generator(packed).scheduler.max_seq_len == 256
    longer = vattn.Generator(packed, max_seq_len=500)
    assert longer.scheduler.max_seq_len == 500, "a requested length counts"
    with pytest.raises(errors.RequestError, match="a larger max_seq_len= needs a cache and a model for it"):
        longer.add([1] * 500, GREEDY)
    with pytest.raises(errors.ConfigError, match="max_seq_len=257 for a model with a table of 256 positions"):
        vattn.Generator(enable(make_model("gpt2"), num_blocks=64), max_seq_len=257)


def test_cancelling_while_a_step_is_on_its_way(packed: PackedModel, expected: list[list[int]]) -> None:
    """The step that was launched early computes a token that no request gets."""
    for options in ({}, {"speculation": vattn.PromptLookup(shortest=1)}):
        generator = make_generator(packed, **options)
        first, second = (generator.add(prompt, GREEDY) for prompt in PROMPTS[:2])
        for _ in range(4):
            generator.step()
        generator.cancel(first)
        count = len(first.output)
        assert count >= 3 and first.state == "cancelled" and first.table is None
        while generator.busy:
            assert all(one.request is second for one in generator.step())
        assert len(first.output) == count and second.output == expected[1]
        generator.cancel(second)
        assert second.state == "finished"
        check_empty(generator)


def test_a_failed_capture_says_what_to_do(packed: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch raises it where a model copies from the host; other errors stay what they are."""
    older = make_generator(packed)
    for text, kind in (
        ("Cannot copy during CUDA graph capture unless\npinned", errors.UnsupportedRequestError),
        ("out of memory", RuntimeError),
    ):

        def fails(*args: Any, text: str = text) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(vattn.CUDAGraphRunner, "_prepare", fails)
        with pytest.raises(kind, match=text[:10]) as caught:
            vattn.Generator(packed, graph_sizes=[2], max_num_reqs=4)
        assert ("graph_sizes=()" in str(caught.value)) == (kind is errors.UnsupportedRequestError)
    assert older.generate([PROMPTS[1]], GREEDY)[0].state == "finished", "it has the cache still"
