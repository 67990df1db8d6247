"""`attn_implementation="vattn"`: transformers' own calls give the logits and tokens of eager attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vattn

transformers = pytest.importorskip("transformers")

import vattn.integrations.transformers  # noqa: E402  registers the name
from tests.integrations.hf_families import make_model  # noqa: E402
from vattn.integrations.transformers import continuous_batching, dense_attention, disable, enable  # noqa: E402
from vattn.integrations.transformers.continuous_batching import attend_batch  # noqa: E402

FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "phi3", "cohere2", "gpt2", "deepseek_v3"]
FIRST = {"plain": [0, 0, 0], "padded": [7, 0, 18]}
"""Where the prompts begin in their rows."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def batch(first: list[int], length: int = 21) -> dict[str, torch.Tensor]:
    """Return rows of tokens that begin at some places."""
    ids = torch.randint(3, 97, (len(first), length), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(length) >= torch.tensor(first)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def generate(model: Any, name: str, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """Return what a model generates with an attention of that name: greedy tokens and their logits."""
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **options}
    return model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **options)


def assert_same(given: Any, expected: Any) -> None:
    assert torch.equal(given.sequences, expected.sequences)
    for step, own in zip(given.logits, expected.logits, strict=True):
        torch.testing.assert_close(step, own, atol=1e-5 * float(own.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("rows", list(FIRST))
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_eager_tokens(family: str, rows: str, cache: str) -> None:
    model, inputs = make_model(family), batch(FIRST[rows])
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    assert_same(generate(model, "vattn", inputs, **options), generate(model, "eager", inputs, **options))


@pytest.mark.parametrize("rows", list(FIRST))
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_single_rows_run_by_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch, family: str, rows: str) -> None:
    """As on a GPU: windows, a soft cap, sinks and padding in Triton's interpreter, no op for a decode."""
    pytest.importorskip("triton")
    model, inputs, ops = make_model(family), batch(FIRST[rows]), list[torch.Tensor]()
    expected, own = generate(model, "eager", inputs, max_new_tokens=4, min_new_tokens=4), dense_attention.attend_blocks
    monkeypatch.setattr(dense_attention, "_try_decode", dense_attention._kernels().decode)
    monkeypatch.setattr(dense_attention, "attend_blocks", lambda *args: (ops.append(args[0]), own(*args))[1])
    assert_same(generate(model, "vattn", inputs, max_new_tokens=4, min_new_tokens=4), expected)
    assert len(ops) == model.config.num_hidden_layers


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("first", "length"), [([0], 75), ([3, 0], 75), ([0, 60], 75), ([0, 0], 80), ([5, 0], 80)])
def test_long_prompts_are_read_in_whole_blocks(first: list[int], length: int, cache: str) -> None:
    model, inputs = make_model("gemma2", sliding_window=24), batch(first, length)
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    options["max_new_tokens"] = 40
    assert_same(generate(model, "vattn", inputs, **options), generate(model, "eager", inputs, **options))


@pytest.mark.parametrize("first, new", [([0, 17], 3), ([0, 20], 14), ([20, 20], 2), ([20], 20)])
def test_rows_of_few_tokens_at_the_end_of_a_static_cache(first: list[int], new: int) -> None:
    model, inputs = make_model("llama"), batch(first)
    options = {
        "cache_implementation": "static", "disable_compile": True, "max_new_tokens": new, "min_new_tokens": new
    }  # fmt: skip
    assert_same(generate(model, "vattn", inputs, **options), generate(model, "eager", inputs, **options))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_beams_reorder_the_cache(family: str) -> None:
    model, inputs = make_model(family), batch(FIRST["padded"])
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert_same(generate(model, "vattn", inputs, **options), generate(model, "eager", inputs, **options))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_assisted_generation(family: str) -> None:
    model, assistant, inputs = make_model(family), make_model(family, seed=3), batch([0])
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "assistant_model": assistant}
    tokens = []
    for name in ("vattn", "eager"):
        model.set_attn_implementation(name)
        assistant.set_attn_implementation(name)
        tokens.append(model.generate(**inputs, **options))
    assert torch.equal(*tokens)
    options = {"max_new_tokens": 40, "prompt_lookup_num_tokens": 4}
    tokens = [generate(model, name, inputs, **options).sequences for name in ("vattn", "eager")]
    assert torch.equal(*tokens)


def test_pipeline() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", eos_token="w2", padding_side="left"
    )
    model, texts = make_model("qwen3"), ["w5 w9 w30", "w7 w8 w9 w10 w11 w40 w41"]
    found = []
    for name in ("vattn", "eager"):
        model.set_attn_implementation(name)
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=fast, batch_size=2)
        found.append(pipe(texts, max_new_tokens=9, do_sample=False))
    assert found[0] == found[1]


def test_the_name_loads_a_model() -> None:
    config = make_model("llama").config
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="vattn").eval()
    assert_same(generate(model, "vattn", batch([0])), generate(model, "eager", batch([0])))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_forward_without_a_cache_and_padding_on_the_right(family: str) -> None:
    model, inputs = make_model(family), batch([0, 0])
    inputs["attention_mask"][1, 9:] = 0
    logits = []
    for name in ("vattn", "eager"):
        model.set_attn_implementation(name)
        logits.append(model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    assert bool(model(**inputs, use_cache=False).logits.isfinite().all())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=pytest.mark.slow), pytest.param("gemma2", marks=pytest.mark.long)]
)
def test_fullgraph_compiles_one_graph(family: str, masked: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model, inputs = make_model(family), batch([0, 4])
    mask = inputs["attention_mask"] if masked else None
    longer = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)
    logits = []
    for name in ("eager", "vattn"):
        model.set_attn_implementation(name)
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        model(inputs["input_ids"], attention_mask=mask, past_key_values=cache)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("inductor")
        step = torch.compile(model, fullgraph=True, backend=counter) if name == "vattn" else model
        logits.append(step(inputs["input_ids"][:, :1], attention_mask=longer, past_key_values=cache).logits)
    assert counter.frame_count == 1
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
    prefill = torch.compile(model, fullgraph=True, backend=CompileCounterWithBackend("inductor"))
    ones = torch.ones_like(inputs["input_ids"])
    found = prefill(inputs["input_ids"], attention_mask=ones, use_cache=False).logits
    model.set_attn_implementation("eager")
    expected = model(inputs["input_ids"], attention_mask=ones, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_prompts_and_steps_over_a_dynamic_cache(family: str) -> None:
    """Inductor moves the first keys of a cache, which it copies from nothing; sizes may all be symbols."""
    model = make_model(family)
    for rows, length, dynamic in ((1, 5, False), (2, 70, None), (2, 33, True)):
        ids = batch([0] * rows, length)["input_ids"]
        model.set_attn_implementation("eager")
        expected = model(ids).logits
        model.set_attn_implementation("vattn")
        torch._dynamo.reset()
        step = torch.compile(model, fullgraph=True, dynamic=dynamic)
        prompt = step(ids[:, :-1])
        last = step(ids[:, -1:], past_key_values=prompt.past_key_values)
        found = torch.cat([prompt.logits, last.logits], 1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_packed_sequences_are_refused() -> None:
    model = make_model("llama")
    model.set_attn_implementation("vattn")
    with pytest.raises(vattn.errors.UnsupportedRequestError, match="goes by the tokens of the step"):
        model(torch.tensor([[3, 4, 5, 6]]), position_ids=torch.tensor([[0, 1, 0, 1]]), use_cache=False)


def test_what_vattn_would_have_to_ignore_is_refused() -> None:
    model, refused = make_model("llama"), vattn.errors.UnsupportedRequestError
    model.set_attn_implementation("vattn")
    ids = torch.tensor([[3, 4, 5, 6]])
    with pytest.raises(refused, match=r"attention_mask of float32 \[1, 1, 4, 4\]"):
        model(ids, attention_mask=torch.zeros(1, 1, 4, 4))
    with pytest.raises(vattn.errors.MetadataError, match="between the tokens"):
        model(ids, attention_mask=torch.tensor([[1, 0, 1, 1]]))
    cache = model(ids).past_key_values
    with pytest.raises(vattn.errors.MetadataError, match="attention_mask of 1 tokens for rows of 5"):
        model(ids[:, :1], attention_mask=torch.ones(1, 1, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(refused, match="output_attentions"):
        model(ids, output_attentions=True)
    layer = model.model.layers[0].self_attn
    layer.attention_dropout = 0.5
    layer.train()
    with pytest.raises(refused, match=r"dropout=0\.5"):
        model(ids)
    layer.eval()
    with torch.enable_grad(), pytest.raises(vattn.errors.GradientError, match="sdpa"):
        model.requires_grad_(True)(ids)


def test_other_masks_and_models_are_refused() -> None:
    refused = vattn.errors.UnsupportedRequestError
    config = transformers.Llama4TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, attention_chunk_size=8, head_dim=16,
    )  # fmt: skip
    chunked = transformers.Llama4ForCausalLM._from_config(config, attn_implementation="vattn").eval()
    with pytest.raises(refused, match="tokens of the step"):
        chunked(torch.arange(3, 23)[None])
    bert = transformers.BertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    encoder = transformers.BertModel._from_config(bert, attn_implementation="vattn").eval()
    with pytest.raises(refused, match="bidirectional"):
        encoder(torch.tensor([[3, 4, 5]]))
    bloom = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(bloom).eval()
    model.config._attn_implementation = "vattn"
    with pytest.raises(refused, match="modeling_bloom"):
        model(torch.tensor([[3, 4, 5]]))
    narrow = make_model("llama", head_dim=12, num_key_value_heads=4)
    narrow.set_attn_implementation("vattn")
    with pytest.raises(refused, match="head_size 12"):
        narrow(torch.tensor([[3, 4, 5]]))


def test_enable_takes_a_model_of_that_name_and_gives_it_back() -> None:
    model = make_model("llama")
    expected = generate(model, "vattn", batch([0]))
    enable(model, num_blocks=8)
    with pytest.raises(vattn.errors.MetadataError, match="Generator"):
        model.generate(**batch([0]), max_new_tokens=2)
    disable(model)
    assert model.config._attn_implementation == "vattn"
    assert_same(generate(model, "vattn", batch([0])), expected)


def generate_batch(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Return what transformers' continuous batching generates, in pages of 16 tokens and steps of at most 48."""
    from transformers import ContinuousBatchingConfig

    page = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
    found = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=96),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=48, **{page: 16}),
        progress_bar=False,
    )
    return sorted(one.generated_tokens for one in found.values())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_generate_batch(family: str) -> None:
    model, prompts = make_model(family), [batch([0], length)["input_ids"][0].tolist() for length in (5, 33, 19, 64)]
    expected = []
    for prompt in prompts:
        inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        tokens = generate(model, "eager", inputs, max_new_tokens=20, min_new_tokens=None, eos_token_id=96).sequences[0]
        expected.append(tokens[len(prompt) :].tolist())
    with continuous_batching(model):
        assert generate_batch(model, prompts, 20) == sorted(expected)
    assert model.config._attn_implementation == "eager"


def test_what_does_not_fit_continuous_batching_is_refused() -> None:
    model = make_model("llama")
    with continuous_batching(model), pytest.raises(vattn.errors.ConfigError, match="leave the block"):
        model(torch.tensor([[3, 4]]))
    heads = [torch.zeros(1, 4, 2, 16)] * 3
    with pytest.raises(vattn.errors.UnsupportedRequestError, match="indices as an argument of attention"):
        attend_batch(model.model.layers[0].self_attn, *heads, cache=object(), indices=torch.zeros(1))
    with pytest.raises(vattn.errors.ConfigError, match="pass the model itself"), continuous_batching("llama"):
        pass
    enable(model, num_blocks=8)
    with pytest.raises(vattn.errors.ConfigError, match="Generator"), continuous_batching(model):
        pass
