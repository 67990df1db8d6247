"""Kernels are compiled by steps like those that vLLM will run, before there is a cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.integrations.vllm.engine_parts import (
    HAS_LAYOUTS,
    LAYOUTS,
    NUM_BLOCKS,
    FullAttentionSpec,
    Layer,
    cache_views,
    engine_config,
)
from vattn.integrations.vllm import warm_up
from vattn.integrations.vllm.builder import VattnMetadataBuilder
from vattn.integrations.vllm.impl import VattnImpl

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if not layout.startswith(("BL", "BH", "LH"))])
def test_the_empty_cache_lies_as_vllms_does(layout: str) -> None:
    config = engine_config({})
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    if HAS_LAYOUTS:
        config.cache_config.kv_cache_layout = layout
    empty, real = warm_up._empty_cache(SPEC, config, torch.device("cpu")), cache_views(SPEC, layout)[0]
    assert empty.shape[1:] == real.shape[1:] and empty.stride() == real.stride()
    assert empty.shape[0] % 16 == NUM_BLOCKS % 16


def test_every_number_of_decodes_is_warmed_and_no_step_exceeds_the_engine() -> None:
    found = set(warm_up.shapes(300, 20, drafts=2))
    assert {(count, count) for count in range(1, 21)} <= found
    assert {(3 * count, count) for count in range(1, 21)} <= found
    assert (300, 1) in found and (300, 16) in found and (2, 1) in found
    assert all(reqs <= tokens <= 300 and reqs <= 20 for tokens, reqs in found)


def test_layers_of_one_kind_run_once_with_both_kinds_of_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    layers = {name: Layer(VattnImpl(4, 32, 0.2, 2), torch.float32, 32, *torch.ones(2)) for name in ("0", "1", "2")}
    layers["2"].impl.sliding_window = 5
    layers["2"].impl.writes_fp8 = True
    config = engine_config(layers, max_num_seqs=3, max_num_tokens=9)
    builder = VattnMetadataBuilder(SPEC, list(layers), config, torch.device("cpu"))
    config.model_config = SimpleNamespace(max_model_len=64)
    ran: list[tuple[int | None, torch.dtype]] = []
    forward = VattnImpl.forward

    def watch(self: VattnImpl, layer: Layer, *args: torch.Tensor) -> torch.Tensor:
        output = forward(self, layer, *args)
        assert not output.float().isnan().any()
        ran.append((self.sliding_window, output.dtype))
        return output

    monkeypatch.setattr(VattnImpl, "forward", watch)
    warm_up.warm_up(layers, SPEC, config, torch.device("cpu"), builder.step)
    steps = len(list(warm_up.shapes(9, 3)))
    counts = {kind: ran.count(kind) for kind in set(ran)}
    assert counts == {(None, torch.float32): steps, (5, torch.float32): steps, (5, torch.float8_e4m3fn): steps}
