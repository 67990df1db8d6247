"""`decode_metadata` and `prefill_metadata`: the halves of a step whose decodes come first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vattn
from tests.support import relative_l2
from vattn.errors import MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata

SIX = vattn.TokenTree.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
TABLES = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]


def make_layer(**options: Any) -> vattn.Attention:
    layer = vattn.Attention(4, 16, 0.25, 2, cache_config=vattn.CacheConfig(8), **options)
    cache = vattn.allocate_kv_cache(layer, num_blocks=17, dtype=torch.float32).kv_caches[0]
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))
    return layer


def make_builder(layer: nn.Module, **options: Any) -> vattn.TreeAttentionMetadataBuilder:
    return vattn.TreeAttentionMetadataBuilder(
        6, 40, 32, 8, layers=layer, tree_choices=SIX, max_mm_ranges=1, **{"decode_threshold": 1, **options}
    )


def split(step: AttentionMetadata) -> tuple[AttentionMetadata, AttentionMetadata]:
    decodes, prefills = step.decode_metadata, step.prefill_metadata
    assert decodes is not None and prefills is not None
    return decodes, prefills


MASKS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "causal": lambda queries: {},
    "bidirectional": lambda queries: {"causal": False},
    "by request": lambda queries: {"causal": [row % 2 == 0 for row in range(len(queries))]},
    "ranges": lambda queries: {"mm_ranges": [[(0, 1)] for _ in queries]},
    "trees": lambda queries: {"trees": [SIX if count == SIX.size else None for count in queries]},
    "shared prefix": lambda queries: {"shared_prefix_len": 0},
}


@pytest.mark.parametrize("mask", MASKS)
@settings(max_examples=8, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    prefills=st.lists(st.tuples(st.sampled_from([1, 3, 6, 9]), st.integers(0, 8)), min_size=1, max_size=2),
    padding=st.booleans(),
)
def test_halves_give_the_rows_of_the_whole(
    mask: str, decodes: list[int], prefills: list[tuple[int, int]], padding: bool
) -> None:
    prefills = [(new, 0 if new == 1 else cached) for new, cached in prefills]  # One token after others is a decode.
    queries = [1] * len(decodes) + [new for new, _ in prefills]
    lengths = [1 + cached for cached in decodes] + [new + cached for new, cached in prefills]
    layer = make_layer()
    padded = {"num_reqs_padded": 5, "num_tokens_padded": sum(queries) + 2} if padding else {}
    options = {"trees": [None] * len(queries), **MASKS[mask](queries), **padded}
    step = make_builder(layer).build(queries, lengths, TABLES[: len(queries)], **options)
    rows = torch.randn(step.slot_mapping.shape[0], 128, generator=torch.Generator().manual_seed(2)).split(
        [64, 32, 32], 1
    )
    with torch.no_grad():
        whole = layer(*rows, metadata=step)
        layer.kv_cache.view(2, -1, 32)[:, step.slot_mapping[step.slot_mapping >= 0]] = torch.nan
        halves, split_at = split(step), [len(decodes), rows[0].shape[0] - len(decodes)]
        own = zip(*(part.split(split_at) for part in rows), strict=True)
        found = [layer(*part, metadata=half) for half, part in zip(halves, own, strict=True)]
    assert relative_l2(torch.cat(found), whole) < 1e-6
    for half in halves:
        half.check(8, 17)


def test_fields_of_halves() -> None:
    builder = make_builder(make_layer())
    step = builder.build([1, 1, 3, 4], [9, 20, 3, 11], TABLES, num_reqs_padded=6, num_tokens_padded=12)
    decodes, prefills = split(step)
    assert decodes.query_start_loc.tolist() == [0, 1, 2]
    assert prefills.query_start_loc.tolist() == [0, 3, 7, 7, 7]
    assert (decodes.seq_lens.tolist(), prefills.seq_lens.tolist()) == ([9, 20], [3, 11, 0, 0])
    assert prefills.slot_mapping.tolist() == step.slot_mapping[2:].tolist()
    assert prefills.positions is not None and prefills.positions[:7].tolist() == [0, 1, 2, 7, 8, 9, 10]
    for half, numbers in ((decodes, (2, 2, 1, 20, 2, 2, 0, 0)), (prefills, (2, 7, 4, 11, 0, 0, 2, 7))):
        names = "num_reqs num_actual_tokens max_query_len max_seq_len num_decodes num_decode_tokens num_prefills "
        names += "num_prefill_tokens"
        assert tuple(getattr(half, name) for name in names.split()) == numbers
    assert decodes.seq_lens.data_ptr() == step.seq_lens.data_ptr(), "views, so that nothing is copied"
    assert (decodes.decode_metadata, decodes.prefill_metadata) == (decodes, None)


def test_a_step_of_one_kind_is_its_half() -> None:
    builder = make_builder(make_layer())
    step = builder.build([1, 1], [9, 20], TABLES[:2])
    assert (step.decode_metadata, step.prefill_metadata) == (step, None)
    after = builder.advance(step, [])
    assert after.decode_metadata is after
    step = builder.build([3], [3], [[1]])
    assert (step.decode_metadata, step.prefill_metadata) == (None, step)


def test_trees_are_decodes_up_to_the_threshold() -> None:
    builder = make_builder(make_layer(), decode_threshold=SIX.size)
    step = builder.build([1, 6, 9], [9, 16, 9], TABLES[:3], trees=[None, SIX, None])
    decodes, prefills = split(step)
    assert (decodes.tree_id.tolist(), prefills.tree_id.tolist()) == ([-1, 0], [-1])
    assert (decodes.max_query_len, prefills.max_query_len) == (6, 9)


def test_halves_of_groups() -> None:
    """Each group's part is split as well."""
    layers = nn.ModuleList(
        vattn.Attention(2, 16, 0.25, prefix=str(index), per_layer_sliding_window=window)
        for index, window in enumerate((None, 16))
    )
    vattn.allocate_kv_cache(layers, num_blocks=16, dtype=torch.float32, hybrid=True, max_seq_len=64)
    builder = vattn.GroupedMetadataBuilder(4, 8, 64, layers=layers)
    step = builder.build([1, 3], [5, 3], [[[1], [2]], [[3], [4]]])
    decodes, prefills = split(step)
    assert [part.block_table[:, 0].tolist() for part in prefills.parts] == [[2], [4]]
    assert [part.slot_mapping.tolist() for part in decodes.parts] == [[20], [52]]


def built(builder: vattn.AttentionMetadataBuilder, *lengths: Any, **options: Any) -> AttentionMetadata:
    return builder.build(*lengths, TABLES[: len(lengths[0])], **options)


def rewritten(builder: vattn.AttentionMetadataBuilder) -> AttentionMetadata:
    step = built(builder, [1, 3], [9, 3])
    built(builder, [1, 3], [9, 3])
    return step


def from_tensors(builder: vattn.AttentionMetadataBuilder) -> AttentionMetadata:
    starts, lengths, slots = torch.tensor([0, 1, 4]), torch.tensor([9, 3]), torch.tensor([16, 8, 9, 10])
    return builder.build_from_tensors(starts, lengths, torch.tensor([[1, 2], [3, 4]]), slots)


REFUSED: dict[str, tuple[Callable[[vattn.AttentionMetadataBuilder], AttentionMetadata], str]] = {
    "prefills first": (lambda builder: built(builder, [3, 1], [3, 9]), "prefills before decodes"),
    "a prompt of one token first": (lambda builder: built(builder, [1, 1], [1, 9]), "prefills before decodes"),
    "kept rows": (lambda builder: built(builder, [1, 3], [9, 3], num_logits=[1, 1]), "logits_indices"),
    "an older step": (rewritten, "over which its step 2"),
    "a step from tensors": (from_tensors, "without lengths on the host"),
    "an encoder that runs": (
        lambda builder: built(
            builder, [1, 3], [9, 3], encoder_lens=[0, 4], new_encoder=[False, True], cross_block_tables=[[], [1]]
        ),
        "cross_slot_mapping",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: str) -> None:
    make, text = REFUSED[kind]
    step = make(vattn.AttentionMetadataBuilder(6, 40, 32, 8, max_encoder_len=8))
    for name in ("decode_metadata", "prefill_metadata"):
        with pytest.raises(MetadataError, match=text):
            getattr(step, name)
