"""Prompts given as embeddings: the tokens of the ids that they stand for, and no blocks of another prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from vattn.errors import ConfigError, RequestError, ShapeError

pytest.importorskip("transformers")

from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import enable

SAMPLING = vattn.Sampling(max_new_tokens=9, stop_token_ids=())
LONG, SHORT = [5 + 7 * i % 90 for i in range(43)], [9, 3, 77]


def made(name: str = "llama", num_blocks: int = 17, **options: Any) -> tuple[vattn.Generator, Any]:
    model = make_model(name)
    generator = vattn.Generator(enable(model, num_blocks=num_blocks), token_budget=24, max_seq_len=64, **options)
    return generator, model.get_input_embeddings()


def embedded(embedding: Any, ids: list[int], **options: Any) -> vattn.PromptEmbeddings:
    return vattn.PromptEmbeddings(embedding(torch.tensor(ids)), **options)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_embeddings_of_ids_give_their_tokens(name: str) -> None:
    """In chunks, beside texts and decodes; Gemma scales what its embedding layer gives, GPT-2 adds positions later."""
    generator, embedding = made(name)
    expected = [request.output for request in generator.generate([LONG, SHORT], SAMPLING)]
    prompts = [embedded(embedding, LONG), SHORT, embedded(embedding, SHORT)]
    got = [request.output for request in generator.generate(prompts, SAMPLING)]
    assert got == [*expected, expected[1]]


def test_preempted_prompts_keep_their_embeddings() -> None:
    expected = [request.output for request in made()[0].generate([LONG, SHORT * 9], SAMPLING)]
    generator, embedding = made(num_blocks=6)
    done = generator.generate([embedded(embedding, ids) for ids in (LONG, SHORT * 9)], SAMPLING)
    assert [request.output for request in done] == expected
    assert sum(request.preemptions for request in done) > 0
    assert all(request.inputs is None for request in done), "rows are kept as long as they are needed"


def test_blocks_are_shared_by_identity_alone() -> None:
    generator, embedding = made()
    one, other = embedded(embedding, LONG), embedded(embedding, LONG[::-1])
    outputs = [generator.generate([prompt], SAMPLING)[0] for prompt in (LONG, one, other, one)]
    assert [request.reused for request in outputs] == [0, 0, 0, 32]
    assert outputs[0].output == outputs[1].output == outputs[3].output
    named = [embedded(embedding, LONG, identity=name) for name in ("a", "a", "b")]
    assert [generator.generate([prompt], SAMPLING)[0].reused for prompt in named] == [0, 32, 0]
    # Where the output differs, so do the blocks behind the prompt.
    assert outputs[2].output != outputs[1].output
    choices = generator.generate([one], vattn.Sampling(max_new_tokens=3, n=2, temperature=1.0, seed=3))[0].choices
    assert all(choice.reused == 32 for choice in choices)


def test_ids_beside_embeddings() -> None:
    """Penalties and log-probabilities of the prompt go by the ids."""
    generator, embedding = made()
    sampling = vattn.Sampling(max_new_tokens=5, repetition_penalty=1.7, prompt_logprobs=0, stop_token_ids=())
    ids, rows = generator.generate([LONG, embedded(embedding, LONG, token_ids=LONG)], sampling)
    assert ids.output == rows.output
    assert ids.prompt_logprobs and rows.prompt_logprobs
    assert rows.prompt_logprobs[7].logprob == pytest.approx(ids.prompt_logprobs[7].logprob, abs=1e-4)
    for needs_ids in (sampling, vattn.Sampling(stopping_criteria=[lambda ids, scores: 7 in ids])):
        with pytest.raises(RequestError, match="embeddings without token ids"):
            generator.add(embedded(embedding, LONG), needs_ids)


def test_prompt_lookup_beside_embeddings() -> None:
    expected = made()[0].generate([LONG], SAMPLING)[0].output
    generator, embedding = made(speculation=vattn.PromptLookup())
    assert generator.generate([embedded(embedding, LONG)], SAMPLING)[0].output == expected


def test_refusals() -> None:
    generator, _ = made()
    for rows, error, words in (
        ([[1.0]], ConfigError, "embeddings of list"),
        (torch.ones(3, 64, dtype=torch.int64), ConfigError, "int64"),
        (torch.ones(3, 64, device="meta"), ConfigError, "on meta"),
        (torch.ones(1, 3, 64), ShapeError, r"\[1, 3, 64\]"),
    ):
        with pytest.raises(error, match=words):
            vattn.PromptEmbeddings(rows)
    with pytest.raises(ShapeError, match="2 token ids for 3 rows"):
        vattn.PromptEmbeddings(torch.ones(3, 64), [1, 2])
    with pytest.raises(ConfigError, match="a flat list of token ids"):
        vattn.PromptEmbeddings(torch.ones(1, 64), torch.tensor([[1, 2, 3]]))
    with pytest.raises(ConfigError, match="a list of prompts"):
        generator.generate(vattn.PromptEmbeddings(torch.ones(3, 64)))
    wide, good = vattn.PromptEmbeddings(torch.ones(3, 65)), SHORT
    done = generator.generate([wide, good], SAMPLING)
    assert isinstance(done[0].error, RequestError) and "65 columns" in str(done[0].error)
    assert done[1].state == "finished"
    with pytest.raises(RequestError, match="an empty prompt"):
        generator.add(vattn.PromptEmbeddings(torch.ones(0, 64)))
    spoiled = generator.generate([vattn.PromptEmbeddings(torch.full((3, 64), torch.nan)), good], SAMPLING)
    assert [request.state for request in spoiled] == ["failed", "finished"]
    bloom = vattn.Generator(enable(make_model("mpt"), num_blocks=9), max_seq_len=64)
    bloom.model.takes_embeddings = False
    with pytest.raises(RequestError, match="takes token ids alone"):
        bloom.add(vattn.PromptEmbeddings(torch.ones(3, 64)))
