"""Adapters on a device, without PEFT: tokens are those of models whose weights have the adapter merged in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import vattn
from vattn.integrations.transformers import enable, enable_adapters

transformers = pytest.importorskip("transformers")

SHARES = {"small": 0.4, "large": -0.7}
PROMPTS = [list(range(3, 40)), list(range(5, 9)), list(range(50, 71))]


def weights(linear: Any, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the A and B of an adapter, the same in each call."""
    random = torch.Generator().manual_seed(sum(map(ord, name)) + rank * sum(linear.weight.shape))
    rows, columns = linear.weight.shape
    found = [torch.randn(shape, generator=random) * 0.3 for shape in ((rank, columns), (rows, rank))]
    return found[0].to(linear.weight), found[1].to(linear.weight)


def linears(model: Any) -> dict[str, Any]:
    return {name: each for name, each in model.named_modules() if name.endswith(("q_proj", "v_proj", "down_proj"))}


def generate(packed: Any, names: list[str | None], **options: Any) -> list[list[int]]:
    generator = vattn.Generator(packed, max_num_reqs=len(names), **options)
    sampling = vattn.Sampling(max_new_tokens=9, stop_token_ids=())
    prompts = [PROMPTS[row % len(PROMPTS)] for row in range(len(names))]
    return [request.output for request in generator.generate(prompts, sampling, adapter=names)]


def test_tokens_are_those_of_merged_weights(device: str) -> None:
    """In fp32, prompts and decodes, in graphs on a GPU; 70 requests of one adapter fill more than one tile."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().to(device)
    names: list[str | None] = [None, "small", "large", "small", "large", None, *["small"] * 70]
    expected: list[list[int]] = [[] for _ in names]
    for name in (None, *SHARES):
        merged = copy.deepcopy(model)
        for path, linear in linears(merged).items() if name else ():
            a, b = weights(linear, path, 3)
            linear.weight.data += SHARES[name or ""] * (b @ a)
        rows = [row for row, own in enumerate(names) if own == name]
        found = generate(enable(merged, num_blocks=400), [None] * len(names))
        for row in rows:
            expected[row] = found[row]
    packed = enable(model, num_blocks=400, merge_projections=True)
    adapters = enable_adapters(packed, max_adapters=3, max_rank=5, target_modules=["q_proj", "v_proj", "down_proj"])
    own = linears(copy.deepcopy(merged))
    for name, share in SHARES.items():

        def store(slot: int, name: str = name, share: float = share) -> None:
            for path, (product, part) in adapters.products.items():
                key = next(each for each in own if path.endswith(each) or each.endswith(path))
                product.put(slot, part, *weights(own[key], key, 3), share)

        adapters._add(name, store)
    assert generate(packed, names) == expected
    assert len({tuple(each) for each in expected[:6]}) > 3
