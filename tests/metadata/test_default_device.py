"""Builders read host numbers on the CPU, whatever device new tensors get by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import vattn
from tests.support import make_config, with_cache
from vattn.errors import MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata

LENS = [3, 1, 0], [3, 18, 9]
TABLES = [[1], [2, 5], [7]]


def plain(**options: Any) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(4, 16, 64, 16, num_blocks=20, **options)


def with_masks() -> AttentionMetadata:
    bias = torch.zeros(1, 2, 2, device="cpu")
    masks = {"tree_bias": bias, "tree_id": [0, -1, -1], "mm_ranges": [[(0, 1)], [], []], "causal": [True, False, True]}
    return plain(max_trees=1, max_tree_size=2, max_mm_ranges=2).build([2, 1, 0], LENS[1], TABLES, **masks)


def with_encoder() -> AttentionMetadata:
    encoder = {"encoder_lens": [20, 0, 5], "new_encoder": [1, 0, 1], "cross_block_tables": [[8, 9], [], [11]]}
    return plain(max_encoder_len=32).build(*LENS, TABLES, **encoder, num_encoder_tokens_padded=30)


def with_logits() -> AttentionMetadata:
    step = plain().build(*LENS, TABLES, num_logits=[2, 1, 0], num_tokens_padded=8, num_reqs_padded=4)
    step.check(16, 20)
    return step


def with_prefix() -> AttentionMetadata:
    return plain().build([1, 1], [17, 18], [[3, 4], [3, 5]], shared_prefix_len=16)


def advanced() -> AttentionMetadata:
    builder = plain()
    step = builder.build([1, 1], [16, 31], torch.tensor([[1, 0], [2, 5]], device="cpu"))
    return builder.advance(builder.advance(step, [9]), [4])


def of_trees() -> AttentionMetadata:
    builder = vattn.TreeAttentionMetadataBuilder(4, 16, 64, tree_choices=[(0,), (1,)], num_blocks=20)
    return builder.build([3, 1, 0], [20, 18, 9], [[1, 3], [2, 5], [7]], trees=[builder.tree, None, None])


def of_flash_attention() -> AttentionMetadata:
    builder = vattn.FlashAttentionMetadataBuilder(4, 16, 64, num_blocks=20)
    return builder.build([3, 1], [3, 18], [[1], [2, 5]], num_lookahead_slots=3).common


def of_groups() -> AttentionMetadata:
    windows = (None, 24)
    model = torch.nn.ModuleList(vattn.Attention(2, 16, 0.25, per_layer_sliding_window=window) for window in windows)
    vattn.allocate_kv_cache(model, num_blocks=16, dtype=torch.float32, device="cpu", hybrid=True)
    builder = vattn.GroupedMetadataBuilder(2, 8, max_seq_len=64, layers=model)
    return builder.build([1], [49], block_tables=[[[1, 2, 3, 4]], [[0, 5, 6, 7]]])


def of_arrays() -> AttentionMetadata:
    table = np.array([[1, 0], [2, 5], [7, -1]], dtype=np.int32)
    return plain().build(np.array(LENS[0]), np.array(LENS[1], dtype=np.uint16), table)


def from_tensors() -> AttentionMetadata:
    given = ([0, 3, 4], [3, 18], [[1, 0], [2, 5]], [16, 17, 18, 81])
    return plain().build_from_tensors(*(torch.tensor(each, device="cpu") for each in given))


STEPS: dict[str, Callable[[], AttentionMetadata]] = {
    "lists": lambda: plain(layers=[make_config(block_size=16)]).build(*LENS, TABLES),
    "no cache": lambda: plain().build([3, 1], None, None),
    "no requests": lambda: plain().build([], [], []),
    "slots": lambda: plain().build(*LENS, TABLES, slot_mapping=[-1, 17, 18, 81], positions=[0, 0, 1, 5]),
    "masks": with_masks,
    "encoder": with_encoder,
    "logits": with_logits,
    "prefix": with_prefix,
    "advance": advanced,
    "trees": of_trees,
    "flash": of_flash_attention,
    "groups": of_groups,
    "arrays": of_arrays,
    "tensors": from_tensors,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_default_device_cpu(name: str) -> None:
    expected = STEPS[name]()
    with torch.device("meta"):
        got = STEPS[name]()
    assert got.tensors().keys() == expected.tensors().keys()
    for key, tensor in expected.tensors().items():
        assert torch.equal(got.tensors()[key], tensor), key


WRONG: dict[str, Callable[[], object]] = {
    "conflict": lambda: plain().build([1, 1], [3, 4], [[5], [5]]),
    "narrow": lambda: plain().build([1, 1], [3, 40], [[5], [6]]),
    "block id": lambda: plain().build([1], [3], [[20]]),
    "slots": lambda: plain().build([2], [2], [[1]], slot_mapping=[16, 16]),
    "encoder": lambda: plain(max_encoder_len=32).build(
        [1, 1], [1, 1], [[1], [2]], encoder_lens=[9, 20], new_encoder=[1, 0], cross_block_tables=[[4], [5, 4]]
    ),
    "an array of floats": lambda: plain().build([1], [3], np.ones((1, 1))),
    "new blocks": lambda: (builder := plain()).advance(builder.build([1, 1], [16, 3], [[1], [2]]), [2]),
}


@pytest.mark.parametrize("name", WRONG)
def test_refusals_are_those_of_the_default_device_cpu(name: str) -> None:
    with pytest.raises(MetadataError) as expected:
        WRONG[name]()
    with torch.device("meta"), pytest.raises(MetadataError) as got:
        WRONG[name]()
    assert str(got.value) == str(expected.value)


def test_arrays_are_read_as_lists_are() -> None:
    expected = STEPS["lists"]()
    assert torch.equal(of_arrays().slot_mapping, expected.slot_mapping)
    table = np.array([[0, 1], [5, 2], [0, 7]])
    for form in (
        table[:, ::-1],
        table[:, ::-1].astype(">i4"),
        [np.array(row) for row in TABLES],
        table[:, ::-1].astype(object),
    ):
        assert torch.equal(plain().build(*LENS, form).slot_mapping, expected.slot_mapping)


def test_token_order() -> None:
    expected = vattn.token_order([1, 3, 1], [9, 3, 20], first="prefill")
    with torch.device("meta"):
        assert torch.equal(vattn.token_order([1, 3, 1], [9, 3, 20], first="prefill").tokens, expected.tokens)


def test_layers_run_such_a_step() -> None:
    layer = with_cache(vattn.Attention(2, 16, 0.25), 12)
    inputs: list[Tensor] = list(torch.randn(3, 4, 32))
    with torch.no_grad(), torch.device("meta"):
        builder = vattn.AttentionMetadataBuilder(4, 16, 64, layers=layer)
        step = builder.build(*LENS, TABLES)
        assert layer(*inputs, metadata=step).isfinite().all()
