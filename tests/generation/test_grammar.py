"""Structured outputs: JSON, regular expressions, EBNF."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import vattn
from vattn import errors

pytest.importorskip("transformers")

from tests.generation.generator_support import (
    WORDS,
    Characters,
    Faulty,
    check_empty,
    make_generator,
    make_tokenizer,
    run_to_end,
)
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["a", "bc"]}, "ok": {"type": "boolean"}}}
SCHEMA |= {"required": ["name", "ok"], "additionalProperties": False}


@pytest.fixture(scope="module")
def wide() -> PackedModel:
    return enable(make_model("llama", vocab_size=WORDS), num_blocks=64)


def sampling(seed: int = 0, **options: Any) -> vattn.Sampling:
    return vattn.Sampling(60, 1.0, seed=seed, stop_token_ids=(1,), **options)


@pytest.mark.parametrize("speculation", [None, vattn.PromptLookup(shortest=1)], ids=["plain", "drafts"])
def test_outputs_have_the_form(wide: PackedModel, speculation: Any) -> None:
    """Of each request its own, also after a step that raises."""
    pytest.importorskip("xgrammar")
    faulty = Faulty(wide)
    faulty.bad = -1
    generator = make_generator(faulty, tokenizer=make_tokenizer(), speculation=speculation)
    grammars = [
        vattn.Grammar(json_schema=SCHEMA), vattn.Grammar(json_schema=json.dumps(SCHEMA)),
        vattn.Grammar(regex="(ab|ç)+!"), vattn.Grammar(ebnf='root ::= "x" [0-9] [0-9]'), None,
    ]  # fmt: skip
    requests = [
        generator.add("the text", sampling(seed, grammar=grammar, n=2)) for seed, grammar in enumerate(grammars, 3)
    ]
    faulty.raise_in = 7
    with pytest.raises(ZeroDivisionError):
        run_to_end(generator)
    run_to_end(generator)
    texts = [[choice.text for choice in request.choices if choice.reason == "stop token"] for request in requests]
    for text in texts[0] + texts[1]:
        found = json.loads(text)
        assert found["name"] in ("a", "bc") and isinstance(found["ok"], bool) and len(found) == 2
    assert all(re.fullmatch("(ab|ç)+!", text) for text in texts[2])
    assert all(re.fullmatch("x[0-9][0-9]", text) for text in texts[3]) and len(texts[3]) == 2
    assert sum(map(len, texts)) >= 5


def test_grammars_that_cannot_be_met_fail_alone(wide: PackedModel) -> None:
    pytest.importorskip("xgrammar")
    generator = make_generator(wide, tokenizer=make_tokenizer())
    grammar = vattn.Grammar(regex="abc")
    letter = generator.tokenizer.convert_tokens_to_ids("b")

    def wants(ids: Any, scores: Any) -> Any:
        scores[:] = -float("inf")
        scores[:, 60] = 0.0
        return scores

    done = generator.generate(
        ["one", "two", "the"],
        [
            sampling(grammar=grammar, logit_bias={letter: -float("inf")}),
            sampling(grammar=grammar, logits_processors=(wants,)),
            sampling(grammar=grammar),
        ],
    )
    assert [request.state for request in done] == ["failed", "failed", "finished"]
    assert "grammars" in str(done[0].error) and "which the grammar does not allow" in str(done[1].error)
    assert done[2].text == "abc"
    for wrong, text in (
        (vattn.Grammar(regex="(ab"), "a grammar that xgrammar refuses"),
        (vattn.Grammar(ebnf="no root"), "a grammar that xgrammar refuses"),
        (vattn.Grammar(json_schema="{"), "a grammar that xgrammar refuses"),
    ):
        with pytest.raises(errors.RequestError, match=text):
            generator.add("the", sampling(grammar=wrong))
    with pytest.raises(errors.RequestError, match="without stop tokens"):
        generator.add("the", vattn.Sampling(grammar=grammar, stop_token_ids=()))
    with pytest.raises(errors.RequestError, match="a tokenizer that xgrammar refuses"):
        make_generator(wide, tokenizer=Characters()).add("the", sampling(grammar=grammar))
    check_empty(generator)


@pytest.mark.parametrize(
    "wrong", [{}, {"regex": "a", "ebnf": "b"}, {"regex": 3}, {"ebnf": b"a"}, {"json_schema": [1]}, {"regex": {}}]
)
def test_wrong_grammars(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match=r"Grammar\("):
        vattn.Grammar(**wrong)
    with pytest.raises(errors.ConfigError, match=r"Sampling\(grammar="):
        vattn.Sampling(grammar="yes|no")  # type: ignore[arg-type]


def test_grammars_need_xgrammar(wide: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(errors.MissingPackageError, match=r"vattn\[grammar\]"):
        make_generator(wide, tokenizer=make_tokenizer()).add("the", sampling(grammar=vattn.Grammar(regex="a")))
