"""Models with layers that keep a state for each request: every family equals itself without vattn, in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from tests.support import relative_l2

pytest.importorskip("transformers")

from tests.integrations.hybrid_families import HYBRIDS, make_hybrid, table
from vattn.errors import CacheError, CacheNotBoundError, ConfigError, MetadataError
from vattn.integrations.transformers import PackedModel, disable, enable
from vattn.kv_transfer import HostMemoryConnector, KVTransfer

TOLERANCE = 1e-4
PROMPTS = [list(range(3, 44)), [7, 5, 90, 11, 13, 2, 64], [9, 4]]
STEPS = [
    [(0, 0, 20), (1, 0, 3)],
    [(0, 20, 33), (1, 3, 4), (2, 0, 1)],
    [(2, 1, 2), (1, 4, 5), (0, 33, 34)],
    [(1, 5, 7), (0, 34, 36)],
    [(0, 36, 41)],
]
"""Request, first token and end: prefills, a chunk beside a decode and a prompt of one token, decodes, equal chunks."""

SLOTS = [3, 1, 2]


def own_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]


def logits_in_steps(packed: PackedModel, slots: list[int] = SLOTS, requests: range = range(3)) -> list[torch.Tensor]:
    device = next(packed.parameters()).device
    builder = vattn.AttentionMetadataBuilder(4, 64, 128, device=device, layers=packed)
    tables = [list(range(1 + 4 * request, 5 + 4 * request)) for request in range(3)]
    found: list[list[torch.Tensor]] = [[], [], []]
    for parts in ([part for part in step if part[0] in requests] for step in STEPS):
        if not parts:
            continue
        lens = [end - start for _, start, end in parts]
        step = builder.build(
            lens,
            [end for *_, end in parts],
            [tables[request] for request, *_ in parts],
            state_slots=[slots[request] for request, *_ in parts],
        )
        ids = torch.tensor([token for request, start, end in parts for token in PROMPTS[request][start:end]])
        with torch.no_grad(), vattn.forward_context(step):
            out = packed(ids.to(device), step.positions).split(lens)
        for (request, *_), rows in zip(parts, out, strict=True):
            found[request].append(rows)
    return [torch.cat(found[request]) for request in requests]


@pytest.mark.parametrize("name", HYBRIDS)
def test_family_equals_itself(name: str, device: str) -> None:
    """Prefills, chunks, decodes and mixed steps; afterwards the model is its own again."""
    model = make_hybrid(name).to(device)
    expected = [own_logits(model, tokens) for tokens in PROMPTS]
    packed = enable(model, num_blocks=13, max_num_reqs=3)
    for got, want in zip(logits_in_steps(packed), expected, strict=True):
        assert relative_l2(got, want) < (TOLERANCE if device == "cpu" else 1e-3)
    disable(packed)
    assert torch.equal(own_logits(model, PROMPTS[0]), expected[0])


def test_the_documented_families_are_those_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hybrid-models.md").read_text()
    assert table() in page, "put what tests.integrations.hybrid_families.table() returns between the marks"


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_a_slot_of_an_earlier_request_starts_anew(name: str) -> None:
    packed = enable(make_hybrid(name), num_blocks=13, max_num_reqs=3)
    before = logits_in_steps(packed)
    for tensors in packed.kv_cache.states.layers.values():
        for tensor in tensors:
            assert not tensor[-1].any()
            tensor[1:-1] = torch.nan
    for got, want in zip(logits_in_steps(packed, [1, 2, 3]), before, strict=True):
        torch.testing.assert_close(got, want)


def test_states_are_part_of_the_memory() -> None:
    packed = enable(make_hybrid("bamba"))
    cache = packed.allocate(memory="1MiB", max_num_reqs=4)
    total = cache.total_bytes + cache.states.total_bytes
    assert 2**20 - cache.bytes_per_block < total <= 2**20
    assert "states of 4 requests in 2 layers" in str(cache)
    with pytest.raises(CacheError, match="states of 64 requests"):
        packed.allocate(memory="1MiB")


def test_wrong_slots_are_refused() -> None:
    packed = enable(make_hybrid("lfm2"), num_blocks=8, max_num_reqs=2)
    builder = vattn.AttentionMetadataBuilder(4, 64, 128, layers=packed)
    for options, words in [
        ({}, "without state_slots"),
        ({"state_slots": [1]}, "describes 1 requests"),
        ({"state_slots": [1, 1]}, "each of one request"),
        ({"state_slots": [0, 1]}, "from 1 to 2"),
        ({"state_slots": [1, 3]}, "from 1 to 2"),
    ]:
        with pytest.raises(MetadataError, match=words):
            builder.build([3, 2], [3, 2], [[1], [2]], **options)
    with pytest.raises(MetadataError, match="have a new token"):
        builder.build([3, 0], [3, 2], [[1], [2]], state_slots=[1, 2])
    plain = vattn.AttentionMetadataBuilder(4, 64, 128)
    with pytest.raises(MetadataError, match="layers without states"):
        plain.build([3], [3], [[1]], state_slots=[1])


def test_wrong_use_is_refused() -> None:
    model = make_hybrid("lfm2")
    packed = enable(model)
    with pytest.raises(MetadataError, match=r"vattn\.Generator"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    with vattn.forward_context(None), pytest.raises((MetadataError, CacheNotBoundError)):
        packed(torch.tensor([1, 2]), torch.tensor([0, 1]))
    cache = packed.allocate(num_blocks=8)
    with pytest.raises(CacheError, match="KV transfer for a model that keeps a state"):
        KVTransfer(packed, cache, HostMemoryConnector("1MiB"))
    with pytest.raises(ConfigError, match="keeps a state for each request"):
        vattn.calibrate(packed, [[[1, 2, 3]]])
    disable(packed)
    with pytest.raises(ConfigError, match="max_num_reqs without"):
        enable(model, max_num_reqs=2)


def test_requests_without_states_take_no_number_of_them() -> None:
    layer = vattn.Attention(num_heads=2, head_size=16, scale=0.25)
    with pytest.raises(ConfigError, match="keeps no state"):
        vattn.allocate_kv_cache(layer, num_blocks=4, max_num_reqs=2)
