"""A small model on a paged cache, and the tokens that transformers generates with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.generation.generator_support import PROMPTS, one_by_one

if TYPE_CHECKING:
    from vattn.integrations.transformers import PackedModel


@pytest.fixture(scope="module")
def packed() -> PackedModel:
    from tests.integrations.hf_families import make_model
    from vattn.integrations.transformers import enable

    return enable(make_model("llama"), num_blocks=64)


@pytest.fixture(scope="session")
def long_expected() -> list[list[int]]:
    """40 tokens for each of `PROMPTS`. The two best logits are always far enough apart in fp32."""
    from tests.integrations.hf_families import make_model

    model = make_model("llama")
    return [one_by_one(model, prompt, 40) for prompt in PROMPTS]


@pytest.fixture(scope="session")
def expected(long_expected: list[list[int]]) -> list[list[int]]:
    """The first 12 tokens for each of `PROMPTS`."""
    return [tokens[:12] for tokens in long_expected]
