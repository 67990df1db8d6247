"""Models that give embeddings or scores: packed prompts equal transformers' own runs of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from tests.support import relative_l2
from vattn.config.pooling import POOLING_MODES
from vattn.errors import ConfigError, DtypeError, MetadataError, RequestError, ShapeError, UnsupportedRequestError

pytest.importorskip("transformers")

import transformers

from vattn.integrations.transformers import disable, enable
from vattn.integrations.transformers.pooling import enable_pooling
from vattn.integrations.transformers.sentence_transformers import read_pooling

TOLERANCE = 1e-4
"""Relative L2 of fp32: sums in another order, through a few layers. Prompts that see each other differ by 1e-1."""

PROMPTS = [list(range(5, 44)), [7], [9, 5, 90, 11, 13, 6, 64], list(range(60, 90)), [17, 4, 5]]

BASE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {"max_position_embeddings": 44}
DECODER = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}

EMBEDDING = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "electra": ENCODER,
    "distilbert": {"dim": 64, "n_heads": 4, "n_layers": 3, "hidden_dim": 96, **ENCODER},
    "modernbert": {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
    "eurobert": DECODER,
    "nomic_bert": ENCODER,
    "esm": {**ENCODER, "mask_token_id": 96, "token_dropout": True, "position_embedding_type": "rotary"},
    "gpt2": {"n_positions": 44},
    "qwen3": DECODER,
    "qwen2": DECODER,
    "gemma3_text": {**DECODER, "use_bidirectional_attention": True, "sliding_window": 9, "num_hidden_layers": 6},
    "mistral": {**DECODER, "sliding_window": 5},
}
SCORING = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "modernbert", "qwen3", "gemma3_text")


def make(model_type: str, auto: Any = transformers.AutoModel, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.CONFIG_MAPPING[model_type](**{**BASE, **EMBEDDING[model_type], **changes})
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.requires_grad_(False)


def own_rows(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens], device=model.device)).last_hidden_state[0]


@pytest.mark.parametrize("model_type", EMBEDDING)
def test_embeddings_equal_each_prompt_alone(model_type: str, device: str) -> None:
    """More tokens in a step than a prompt may have, and prompts in several steps."""
    model = make(model_type).to(device)
    expected = [own_rows(model, tokens)[-1] for tokens in PROMPTS]
    embedder = vattn.Embedder(enable_pooling(model), pooling="lasttoken", token_budget=60)
    assert relative_l2(embedder.encode(PROMPTS), torch.stack(expected)) < TOLERANCE
    disable(model)
    assert torch.equal(own_rows(model, PROMPTS[0])[-1], expected[0])


@pytest.mark.parametrize("model_type", SCORING)
def test_scores_equal_a_padded_run(model_type: str) -> None:
    model = make(model_type, transformers.AutoModelForSequenceClassification, num_labels=3)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in PROMPTS])
    expected = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
    embedder = vattn.Embedder(enable_pooling(model))
    assert relative_l2(embedder.score(PROMPTS), expected) < TOLERANCE


def test_positions_skip_padding_inside_a_prompt() -> None:
    """RoBERTa's do; with positions that count it, the rows differ by 0.5."""
    model = make("roberta", pad_token_id=1, bos_token_id=0)
    prompts = [[5, 1, 7, 2], PROMPTS[0], [1, 1, 8, 1], [1], [9, 4, 1]]
    expected = [own_rows(model, tokens).mean(0) for tokens in prompts]
    embedder = vattn.Embedder(enable_pooling(model), pooling="mean")
    assert relative_l2(embedder.encode(prompts), torch.stack(expected)) < TOLERANCE


def test_a_whole_model_is_one_graph_for_all_lengths(fresh_dynamo: None) -> None:
    model = make("bert", num_hidden_layers=1)
    expected = torch.stack([own_rows(model, tokens).mean(0) for tokens in PROMPTS])
    packed = enable_pooling(model)
    embedder = vattn.Embedder(packed, pooling="mean", max_num_reqs=2)
    packed.compile(backend="eager", fullgraph=True, dynamic=True)
    assert relative_l2(embedder.encode(PROMPTS), expected) < TOLERANCE
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_scores_without_padding_and_with_types_of_tokens() -> None:
    model = make("qwen3", transformers.AutoModelForSequenceClassification, num_labels=1, pad_token_id=None)
    expected = torch.cat([model(input_ids=torch.tensor([tokens])).logits for tokens in PROMPTS])
    assert relative_l2(vattn.Embedder(enable_pooling(model)).score(PROMPTS), expected) < TOLERANCE
    model = make("bert", transformers.AutoModelForSequenceClassification, num_labels=2)
    pairs = [{"input_ids": tokens, "token_type_ids": [0] * 3 + [1] * (len(tokens) - 3)} for tokens in PROMPTS[2:]]
    expected = torch.cat([model(**{k: torch.tensor([v]) for k, v in pair.items()}).logits for pair in pairs])
    embedder = vattn.Embedder(enable_pooling(model))
    assert relative_l2(embedder.score(pairs), expected) < TOLERANCE
    assert relative_l2(embedder.score([pair["input_ids"] for pair in pairs]), expected) > 1e-2


def test_a_batch_of_a_tokenizer_equals_its_prompts() -> None:
    """Padded on either side; types of tokens belong to their prompt."""
    embedder = vattn.Embedder(enable_pooling(make("bert")), pooling="mean")
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0], [0, 0, 4]]),
        "token_type_ids": torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 1]]),
    }
    pairs = (([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1]), ([4], [1]))
    alone = embedder.encode([{"input_ids": ids, "token_type_ids": types} for ids, types in pairs])
    assert torch.equal(embedder.encode(transformers.BatchEncoding(batch)), alone)
    assert torch.equal(embedder.encode({"input_ids": [5, 6, 7]}), embedder.encode([[5, 6, 7]]))


def test_every_pooling_is_that_of_its_definition() -> None:
    model = make("bert")
    rows = [own_rows(model, tokens) for tokens in PROMPTS]
    packed = enable_pooling(model)
    weights = [torch.arange(1.0, len(each) + 1)[:, None] for each in rows]
    expected = {
        "cls": [each[0] for each in rows],
        "max": [each.max(0).values for each in rows],
        "mean": [each.mean(0) for each in rows],
        "mean_sqrt_len_tokens": [each.sum(0) / len(each) ** 0.5 for each in rows],
        "weightedmean": [(w * each).sum(0) / w.sum() for w, each in zip(weights, rows, strict=True)],
        "lasttoken": [each[-1] for each in rows],
    }
    for mode in POOLING_MODES:
        got = vattn.Embedder(packed, pooling=mode).encode(PROMPTS)
        assert relative_l2(got, torch.stack(expected[mode])) < TOLERANCE, mode
    two = vattn.Embedder(packed, pooling=["mean", "cls"], normalise=True).encode(PROMPTS)
    wanted = torch.cat([torch.stack(expected["cls"]), torch.stack(expected["mean"])], 1)
    assert relative_l2(two, torch.nn.functional.normalize(wanted, dim=-1)) < TOLERANCE


class Tokenizer:
    """A token for each character, a token before each text."""

    def encode(self, text: str) -> list[int]:
        return [1, *(3 + ord(letter) % 90 for letter in text)]

    def decode(self, ids: list[int]) -> str:
        return ""


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    make("gemma3_text").save_pretrained(tmp_path)
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"s.models.{kind}"} for i, kind in enumerate(kinds)
    ]
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {"in_features": 64, "out_features": 7, "activation_function": "torch.nn.Tanh"},
        "config_sentence_transformers.json": {"prompts": {"query": "Q: "}, "default_prompt_name": None},
        "sentence_bert_config.json": {"max_seq_length": 23, "do_lower_case": True},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    weight = torch.randn(7, 64) / 64
    save_file({"linear.weight": weight}, tmp_path / "2_Dense" / "model.safetensors")
    model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = own_rows(model, Tokenizer().encode("q: hello")).mean(0) @ weight.T
    embedder = vattn.Embedder(enable_pooling(model), Tokenizer())
    got = embedder.encode(["Hello"], prompt_name="query")
    assert embedder.encode([]).shape == (0, 7)
    assert relative_l2(got[0], torch.nn.functional.normalize(expected.tanh(), dim=0)) < TOLERANCE
    assert relative_l2(embedder.encode(["hello"]), got) > 1e-2
    with pytest.raises(RequestError, match=r"prompts\[1\] of 24 tokens.*1 to 23"):
        embedder.encode(["", "x" * 23])
    with pytest.raises(ConfigError, match="prompt_name='doc'"):
        embedder.encode(["a"], prompt_name="doc")
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"idx": 4, "path": "4", "type": "s.LayerNorm"}]))
    with pytest.raises(UnsupportedRequestError, match="LayerNorm"):
        read_pooling(tmp_path)


def test_refusals() -> None:
    model = make("bert")
    packed = enable_pooling(model)
    with pytest.raises(ConfigError, match=r"use vattn\.Embedder"):
        vattn.Generator(packed)
    with pytest.raises(ConfigError, match="does not say how to pool"):
        vattn.Embedder(packed).encode(PROMPTS)
    with pytest.raises(ConfigError, match="no classification head"):
        vattn.Embedder(packed).score(PROMPTS)
    for pooling in ("average", 3, "mean+max"):
        with pytest.raises(ConfigError, match=re.escape(f"pooling={pooling!r}") + r'.*pooling=\["mean", "max"\]'):
            vattn.Embedder(packed, pooling=pooling)
    with pytest.raises(ConfigError, match=r"enable_pooling\(\) of a model that is on vattn"):
        enable_pooling(model)
    embedder = vattn.Embedder(packed, pooling="mean", token_budget=50)
    with pytest.raises(ConfigError, match="prompt_name='query' for a model without prompts"):
        embedder.encode(["text"], prompt_name="query")
    typed = {"input_ids": [3, 4, 5], "token_type_ids": [0, 1, 1]}
    for prompts, words in (
        ([[3], []], r"prompts\[1\] of 0 tokens.*leave it out"),
        ([[3], ["a", "b"]], r"prompts\[1\]: \['a', 'b'\], texts in a list.*pair as a tuple"),
        ([vattn.Chat([{"role": "user", "content": "a"}])], "a conversation.*apply_chat_template"),
        ([[{"role": "user", "content": "a"}]], "a conversation"),
        ({"input_ids": [[3, 4], [5]], "attention_mask": [[1, 1]]}, "a batch of {'input_ids': 2, 'attention_mask': 1}"),
        ({"input_ids": [[3, 4], [5, 0]], "attention_mask": [[1, 1], [1]]}, r"prompts\[1\]: an attention_mask"),
        ([list(range(45))], r"1 to 44 tokens \(the model's longest text\)"),
        ([[97]], r"prompts\[0\]: token id 97"),
        ([typed, {**typed, "token_type_ids": [0, 0, 2]}], r"prompts\[1\]: token_type_ids with 2\. Allowed: 0 to 1"),
        ([typed, {**typed, "token_type_ids": [0, 0, "a"]}], r"prompts\[1\]: token_type_ids with 'a'"),
        ([{**typed, "token_type_ids": [0, 1]}], "2 token_type_ids for 3 tokens"),
        ([{**typed, "token_type_ids": [0]}], "1 token_type_ids for 3 tokens"),
        ([{**typed, "token_type_ids": [[0, 1, 1]] * 2}], r"\[3, 3\] token_type_ids for 3 tokens"),
        ([typed, {**typed, "token_type_ids": 1}], r"prompts\[1\]: token_type_ids=1"),
        ([{**typed, "attention_mask": 1}], r"prompts\[0\]: attention_mask=1"),
        ([{"input_ids": [[3, 4], 5], "attention_mask": [[1, 1], 1]}], r"prompts\[0\]: input_ids=\[\[3, 4\], 5\]"),
        ([{"input_ids": 3, "attention_mask": 1}], r"prompts\[0\]: input_ids=3"),
        ([{**typed, "attention_mask": [1, 1]}], "an attention_mask of another shape"),
        ([vattn.PromptEmbeddings(torch.ones(3, 64))], r"prompts\[0\]: PromptEmbeddings"),
        (["text"], r"prompts\[0\]: a text without a tokenizer"),
    ):
        with pytest.raises(RequestError, match=words):
            embedder.encode(prompts)
    ids = torch.tensor([3, 4, 5])
    for types, error in ((ids[:1] * 0, ShapeError), (ids, MetadataError), (ids / 9, DtypeError)):
        with pytest.raises(error, match="token_type_ids"):
            packed(ids, torch.arange(3), types)
    try:
        torch.set_default_dtype(torch.float64)
        assert embedder.encode([[5, 6]]).dtype == embedder.encode([]).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(RequestError, match="input_ids=None"):
        embedder.encode({"input_ids": None})
    with pytest.raises(ConfigError, match="pass \\[prompt\\]"):
        embedder.encode("text")
    embedder.tokenizer = transformers.BertTokenizer({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "[MASK]": 4})
    with pytest.raises(RequestError, match="a pair that the tokenizer refuses"):
        embedder.encode([("a", "b\ud800")])
    with pytest.raises(ConfigError, match="pass the whole model"):
        disable(model.encoder)
    disable(packed)
    disable(model)
    with pytest.raises(ConfigError, match="not on vattn any more"):
        embedder.encode(PROMPTS)
    embedder = vattn.Embedder(enable_pooling(make("esm")), pooling="mean")
    with pytest.raises(RequestError, match="the mask token 96 for EsmModel"):
        embedder.encode([[5, 6], [7, 96]])
    causal = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING["qwen3"](**BASE, **DECODER))
    with pytest.raises(ConfigError, match="AutoModelForSequenceClassification"):
        enable_pooling(causal.eval())
    with pytest.raises(ConfigError, match="enable_pooling"):
        vattn.Embedder(enable(causal))
    with pytest.raises(ConfigError, match=r"transformers\.pooling"):
        enable(make("bert"))


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("albert", "attends twice"),
        ("mpnet", "no exchangeable"),
        ("deberta-v2", "no exchangeable"),
        ("t5", "position_ids"),
    ],
)
def test_models_that_vattn_cannot_express_are_refused(model_type: str, words: str) -> None:
    sizes = {**BASE, **ENCODER, "embedding_size": 16, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16}
    config = transformers.CONFIG_MAPPING[model_type](**sizes)
    kind = transformers.T5EncoderModel._from_config if model_type == "t5" else transformers.AutoModel.from_config
    model = kind(config, attn_implementation="eager").eval()
    with pytest.raises(UnsupportedRequestError, match=words):
        enable_pooling(model)
    assert model(input_ids=torch.tensor([[3, 4]])).last_hidden_state.isfinite().all()
