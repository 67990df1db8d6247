"""Models that `enable` refuses by name, with the reason, and leaves as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vattn.errors import UnsupportedRequestError

pytest.importorskip("transformers")

import transformers

from tests.integrations.hf_families import BASE, LATENT, ROUTED_EXPERTS
from vattn.integrations.transformers import enable

SPARSE = {**BASE, **LATENT, **ROUTED_EXPERTS, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
SPEECH = {"d_model": 64, "num_mel_bins": 8, "max_source_positions": 40, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "options", "words"),
    [
        ("deepseek_v32", SPARSE, "an indexer"),
        ("glm_moe_dsa", SPARSE, "an indexer"),
        ("whisper", {**BASE, **SPEECH}, "WhisperForConditionalGeneration, an encoder-decoder"),
        ("t5", {**BASE, "d_model": 64, "d_kv": 16, "d_ff": 96}, "T5ForConditionalGeneration, an encoder-decoder"),
        ("bart", {**BASE, "d_model": 64}, "BartForConditionalGeneration, an encoder-decoder"),
    ],
)
def test_a_model_is_refused_by_name(model_type: str, options: dict[str, Any], words: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**options)
    auto = transformers.AutoModelForCausalLM if options is SPARSE else transformers.AutoModelForSeq2SeqLM
    if model_type == "whisper":
        auto = transformers.AutoModelForSpeechSeq2Seq
    model = auto.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(UnsupportedRequestError, match=words):
        enable(model, num_blocks=9)
    assert model.config._attn_implementation == "eager"
    if options is SPARSE:
        with torch.no_grad():
            assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_a_model_that_looks_tokens_up_by_embeddings_takes_none() -> None:
    from tests.integrations.hf_families import make_model

    assert not enable(make_model("gemma4")).takes_embeddings
