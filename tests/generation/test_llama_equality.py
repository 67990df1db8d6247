"""Logits of the demo's Llama equal those of transformers' `LlamaForCausalLM` on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from examples.demo.checkpoint import build_llama, read_checkpoint
from examples.demo.model import AttentionOptions
from tests.support import relative_l2
from vattn.generation import model_inputs

pytest.importorskip("transformers")

from tests.integrations.hf_families import make_model
from tests.integrations.test_transformers import PROMPTS, TOLERANCE, Runner, eager_logits, logits_in_chunks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Ours and theirs: untied, grouped queries, heads wider together than the hidden size, norms that are not 1."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    sizes = {"hidden_size": 72, "intermediate_size": 112, "num_attention_heads": 6, "head_dim": 16}
    theirs = make_model("llama", seed=1, rope_parameters=rope, tie_word_embeddings=False, **sizes)
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.3, 2.0)
    folder = tmp_path_factory.mktemp("tiny")
    theirs.save_pretrained(folder)
    ours = build_llama(*read_checkpoint(folder), AttentionOptions(vattn.CacheConfig()))
    vattn.allocate_kv_cache(ours, num_blocks=17)
    return ours, theirs


def test_logits_and_the_measure_that_would_notice_a_wrong_angle(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    expected = [eager_logits(theirs, prompt) for prompt in PROMPTS]
    for turned in (False, True):
        if turned:
            ours.rope[1].neg_()
        for got, want in zip(logits_in_chunks(ours), expected, strict=True):
            assert relative_l2(got, want) > 10 * TOLERANCE if turned else relative_l2(got, want) < TOLERANCE
    ours.rope[1].neg_()


def test_only_the_requested_rows_go_through_the_head(pair: tuple[Any, Any]) -> None:
    ours, theirs = pair
    metadata = Runner(ours).builder.build([7, 0, 4], [7, 0, 4], [[1], [2], [3]], num_reqs_padded=4)
    ids = [*PROMPTS[0][:7], *PROMPTS[1][:4]]
    with vattn.forward_context(metadata), torch.no_grad():
        rows = ours(*model_inputs(ids, metadata))
    assert rows.shape == (4, 97)
    assert relative_l2(rows[0], eager_logits(theirs, ids[:7])[-1]) < TOLERANCE
    assert relative_l2(rows[2], eager_logits(theirs, ids[7:])[-1]) < TOLERANCE
