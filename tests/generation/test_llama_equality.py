"""Logits of the demo's Llama equal those of transformers' `LlamaForCausalLM` on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vattn
from examples.demo.checkpoint import build_llama, read_checkpoint
from examples.demo.model import AttentionOptions, Llama
from tests.integrations.hf_families import make_model
from tests.support import relative_l2
from vattn.generation import model_inputs

transformers = pytest.importorskip("transformers")

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"

TOLERANCE = 1e-4
"""Relative L2 in fp32. What is seen is 1e-6 and less (another order of sums); a wrong angle or norm gives 1e-2."""

BLOCK_SIZE, NUM_BLOCKS = 8, 64

Step = list[tuple[int, int]]
"""What one step computes: (request, number of new tokens)."""

STEPS: dict[str, list[Step]] = {
    "prefill": [[(0, 37)]],
    "prefill of three": [[(0, 37), (1, 8), (2, 19)]],
    "chunked prefill": [[(0, 16)], [(0, 2)], [(0, 19)]],
    "decode": [[(0, 5), (1, 2)]] + [[(0, 1), (1, 1)]] * 6,
    "decode alone": [[(0, 9)]] + [[(0, 1)]] * 3,
    "mixed": [
        [(0, 20)],
        [(0, 1), (1, 8)],
        [(2, 11), (0, 1), (1, 0)],
        [(1, 1), (0, 1), (2, 8)],
        [(0, 14)],
    ],
}
LENGTHS = (37, 9, 19)


@dataclass
class Pair:
    """Ours and theirs on the same weights."""

    model: Llama
    builder: vattn.AttentionMetadataBuilder
    texts: list[Tensor]
    expected: list[Tensor]


def make_pair(folder: Path) -> Pair:
    config, tensors = read_checkpoint(folder)
    model = build_llama(config, tensors, AttentionOptions(vattn.CacheConfig(BLOCK_SIZE)))
    vattn.allocate_kv_cache(model, num_blocks=NUM_BLOCKS)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad():
        expected = [theirs(text[None], use_cache=False).logits[0] for text in texts]
    builder = vattn.AttentionMetadataBuilder(4, 128, 64, BLOCK_SIZE, layers=model)
    return Pair(model, builder, texts, expected)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied GQA model whose heads together are wider than its hidden size, with norms that are not 1."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    sizes = {"hidden_size": 72, "intermediate_size": 112, "num_attention_heads": 6, "head_dim": 16}
    model = make_model("llama", seed=1, rope_parameters=rope, tie_word_embeddings=False, **sizes)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.3, 2.0)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Pair:
    return make_pair(tiny_folder)


def run_steps(pair: Pair, steps: list[Step]) -> list[tuple[Tensor, Tensor]]:
    """Return (got, expected) logits of each step that computed something; blocks are permuted, padding is garbage."""
    order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(5)) + 1
    tables = order[: 8 * len(LENGTHS)].view(len(LENGTHS), 8).tolist()
    for module in pair.model.modules():
        if isinstance(module, vattn.Attention):
            module.kv_cache.fill_(float("nan"))
    seen = [0] * len(LENGTHS)
    results = []
    for step in steps:
        ids, expected = [], []
        for request, new in step:
            ids += pair.texts[request][seen[request] : seen[request] + new].tolist()
            expected.append(pair.expected[request][seen[request] : seen[request] + new])
            seen[request] += new
        metadata = pair.builder.build(
            [new for _, new in step],
            [seen[request] for request, _ in step],
            [tables[request] for request, _ in step],
            num_tokens_padded=len(ids) + 3,
        )
        with vattn.forward_context(metadata), torch.no_grad():
            logits = pair.model(torch.tensor([*ids, 5, 6, 7]), metadata.positions)
        results.append((logits[: len(ids)], torch.cat(expected)))
    return results


@pytest.mark.parametrize("name", STEPS)
def test_tiny_model(tiny: Pair, name: str) -> None:
    for got, expected in run_steps(tiny, STEPS[name]):
        assert relative_l2(got, expected) <= TOLERANCE


def test_demo_model_over_a_long_text() -> None:
    """In chunks of many blocks."""
    theirs = transformers.LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    model = build_llama(*read_checkpoint(DEMO_MODEL), AttentionOptions(vattn.CacheConfig(BLOCK_SIZE)))
    ids = torch.tensor(list(b"\0" + (DEMO_MODEL / "heldout.txt").read_bytes()[:511]))
    vattn.allocate_kv_cache(model, num_blocks=65)
    builder = vattn.AttentionMetadataBuilder(1, 300, 512, BLOCK_SIZE, layers=model)
    table, logits = list(range(64, 0, -1)), []
    for start in range(0, 512, 300):
        piece = ids[start : start + 300]
        metadata = builder.build([len(piece)], [start + len(piece)], [table])
        with vattn.forward_context(metadata), torch.no_grad():
            logits.append(model(piece, metadata.positions))
    with torch.no_grad():
        expected = theirs(ids[None], use_cache=False).logits[0]
    assert relative_l2(torch.cat(logits), expected) <= TOLERANCE


def test_only_the_requested_rows_go_through_the_head(tiny: Pair) -> None:
    pair = tiny
    metadata = pair.builder.build([7, 0, 4], [7, 0, 4], [[1], [2], [3]], num_reqs_padded=4)
    ids = torch.cat((pair.texts[0][:7], pair.texts[1][:4]))
    inputs = model_inputs(ids.tolist(), metadata)
    with vattn.forward_context(metadata), torch.no_grad():
        rows = pair.model(*inputs)
    assert rows.shape == (4, 97)
    assert relative_l2(rows[0], pair.expected[0][6]) <= TOLERANCE
    assert relative_l2(rows[2], pair.expected[1][3]) <= TOLERANCE


def test_the_measure_would_notice_a_wrong_angle(tiny_folder: Path) -> None:
    pair = make_pair(tiny_folder)
    pair.model.rope[1].neg_()
    ((got, expected),) = run_steps(pair, STEPS["prefill"])
    assert relative_l2(got, expected) > 10 * TOLERANCE
