"""Captured decodes of encoder-decoders, with a stand-in for CUDA graphs, and steps that are not planned anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vattn

pytest.importorskip("transformers")

from tests.generation.test_generator_graphs import stand_in
from tests.integrations.test_text_encoder_decoders import CASES, SAMPLING, check, make, own, prompts
from vattn.integrations.transformers.encoder_decoder import enable_encoder_decoder
from vattn.metadata.builder import AttentionMetadataBuilder


@pytest.mark.parametrize("kind", ["m2m_100", "t5gemma"])
def test_replayed_decodes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with other encoder lengths come and go; tables of positions and `position_ids` are read from buffers."""
    model, inputs = make(kind), [*prompts(kind), prompts(kind)[2]]
    expected = [own(model, prompt) for prompt in inputs]
    packed = enable_encoder_decoder(model, num_blocks=40)
    generator = vattn.Generator(packed, max_num_reqs=3, token_budget=12, graph_sizes=[1, 3])
    log, advances, advance = stand_in(generator), [], AttentionMetadataBuilder.advance
    monkeypatch.setattr(
        AttentionMetadataBuilder, "advance", lambda self, *args: advances.append(args) or advance(self, *args)
    )
    # Nothing that a replay must not read reaches a result.
    for cache in packed.kv_cache.kv_caches:
        cache[packed.kv_cache.reserved_blocks :].fill_(torch.nan)
    for request, one in zip(generator.generate(inputs, SAMPLING), expected, strict=True):
        check(request, one)
    steps = generator.statistics().steps
    assert len(advances) > 4 and len(advances) < len(log) < steps
    assert {size for size, _ in log} == {2, 3}


def test_replayed_drafts() -> None:
    model, inputs = make("bart"), prompts("bart")
    expected = [own(model, prompt) for prompt in inputs]
    packed = enable_encoder_decoder(model, num_blocks=40)
    options: dict[str, Any] = {"speculation": vattn.PromptLookup(num_drafts=3), "graph_sizes": [3]}
    generator = vattn.Generator(packed, max_num_reqs=3, **options)
    log = stand_in(generator)
    for request, one in zip(generator.generate(inputs, SAMPLING), expected, strict=True):
        check(request, one)
    assert (3, 12) in log


class Reads(TorchDispatchMode):
    """Notes what reads a tensor's values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "aten.equal")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", CASES)
def test_decodes_read_no_values_on_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would be waited for, which a capture refuses."""
    packed = enable_encoder_decoder(make(kind), num_blocks=12)
    # Only ids on the CPU are checked.
    monkeypatch.setattr("vattn.integrations.transformers.checks._readable", lambda given: False)
    builder = vattn.AttentionMetadataBuilder(2, 8, 32, layers=packed, max_encoder_len=32)
    step = builder.build([1, 1], [1, 2], [[1], [2]], encoder_lens=[0, 0], cross_block_tables=[[], []])
    with torch.no_grad(), vattn.forward_context(step), Reads() as reads:
        packed(torch.tensor([3, 4]), step.positions, torch.tensor([0, 1]))
    assert reads.found == []
