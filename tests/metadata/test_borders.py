"""Steps at the borders of what a builder takes: values beside the last right one, and fields that few steps have."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import vattn
from vattn.backends import selector
from vattn.backends.tree_attn import TreeAttentionBackend
from vattn.errors import ConfigError, MetadataError
from vattn.metadata.cross_attention import write_cross_slots
from vattn.metadata.forward_context import current_step


def make(**options: Any) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(4, 32, 64, **options)


def grouped(*windows: int | None) -> vattn.GroupedMetadataBuilder:
    model = nn.ModuleList(vattn.Attention(2, 16, 0.25, per_layer_sliding_window=window) for window in windows)
    vattn.allocate_kv_cache(model, num_blocks=40, dtype=torch.float32, hybrid=True)
    return vattn.GroupedMetadataBuilder(4, 32, max_seq_len=96, layers=model)


def test_kept_rows_are_the_last_ones_of_each_request() -> None:
    builder = make()
    step = builder.build([3, 4, 2], num_logits=[1, 0, 2], num_logits_padded=5)
    assert step.logits_indices is not None and step.logits_indices.tolist() == [2, 7, 8, 0, 0]
    assert vattn.kept_rows(torch.arange(9), step).tolist() == [2, 7, 8, 0, 0]
    for counts, text in (([1, -1, -2], "request 1: logits of -1"), ([1, 5, 3], "request 1: logits of 5 tokens")):
        with pytest.raises(MetadataError, match=text):
            builder.build([3, 4, 2], num_logits=counts)
    for rows in ([-1], [9], [1, 2, 9], [1], [8, 7], [7, 7, 8], [2, 2]):
        with pytest.raises(MetadataError, match="the last ones of each request"):
            builder.build([3, 4, 2], logits_indices=rows)
    with pytest.raises(MetadataError, match="one of them"):
        builder.build([3, 4, 2], num_logits=[1, 1, 1], logits_indices=[2, 6, 8])
    step = builder.build([3, 4, 2])
    for metadata, rows in ((step, [2]), (None, torch.tensor([2])), (step, torch.tensor([2.0]))):
        with pytest.raises((MetadataError, vattn.errors.DtypeError, vattn.errors.ConfigError)):
            vattn.fast_prefill(metadata, rows)  # type: ignore[arg-type]
    assert vattn.fast_prefill(step, torch.arange(9)).logits_start_loc.tolist() == [0, 3, 7, 9]
    with pytest.raises(MetadataError, match="up to 9 rows"):
        vattn.fast_prefill(step, torch.zeros(10, dtype=torch.int64))


def test_ranges_are_padded_to_the_most_of_a_request() -> None:
    builder = make(max_mm_ranges=3)
    one = builder.build([5, 4], mm_ranges=[[(0, 2)], []]).mm_ranges
    assert one is not None and one.tolist() == [[[0, 2], [0, 0], [0, 0]], [[0, 0]] * 3]
    three = builder.build([5, 4], mm_ranges=torch.arange(12).view(2, 3, 2)).mm_ranges
    assert three is not None and three.tolist() == torch.arange(12).view(2, 3, 2).tolist()
    for wrong in (torch.zeros(3, 1, 2, dtype=torch.int64), [[(0, 1)]], torch.zeros(2, 4, 2, dtype=torch.int64)):
        with pytest.raises(MetadataError, match=r"mm_ranges|multimodal ranges"):
            builder.build([5, 4], mm_ranges=wrong)


def test_the_small_buffers_are_aligned() -> None:
    for most in (2, 63, 64, 65, 130):
        step = vattn.AttentionMetadataBuilder(most, 130, 64).build([1] * 2, [3] * 2, [[1], [2]])
        assert (step.seq_lens.data_ptr() - step.query_start_loc.data_ptr()) % 256 == 0, most


def test_encoder_arguments_come_together() -> None:
    builder = make(max_encoder_len=40)
    for options, text in (
        ({"encoder_lens": [3, 4]}, "^encoder_lens alone"),
        ({"cross_block_tables": [[1], [2]]}, "^cross_block_tables alone"),
        ({"new_encoder": [1, 0]}, "^new_encoder alone"),
    ):
        with pytest.raises(MetadataError, match=text):
            builder.build([1, 1], [3, 4], [[1], [2]], **options)  # type: ignore[arg-type]


def test_rows_behind_the_encoder_states_have_no_slot() -> None:
    slots = torch.empty(40, dtype=torch.int64)
    write_cross_slots(torch.tensor([0, 3]).int(), torch.tensor([[5]]).int(), 8, slots)
    assert slots.tolist() == [40, 41, 42] + [-1] * 37


def test_halves_keep_the_longest_encoder_input() -> None:
    builder = vattn.FlashAttentionMetadataBuilder(4, 32, 64, max_encoder_len=40)
    step = builder.build([1, 1], [3, 20], [[1], [2, 3]], encoder_lens=[4, 17], cross_block_tables=[[9], [7, 8]])
    decodes = step.decode_metadata
    assert decodes is not None and (decodes.max_encoder_seq_len, decodes.num_encoder_tokens) == (17, 21)
    for name in ("encoder_seq_lens", "encoder_seq_lens_tensor", "max_encoder_seq_len"):
        part = dataclasses.replace(step, **{name: None})
        assert not part.is_all_encoder_attn_metadata_set and not part.is_all_cross_attn_metadata_set
    assert not dataclasses.replace(step, cross_block_tables=None).is_all_cross_attn_metadata_set


def test_a_new_block_out_of_range_among_right_ones_is_refused() -> None:
    for blocks in ([-1, 5], [5, -1], [5, 10], [10, 5]):
        builder = make(num_blocks=10)
        step = builder.build([1, 1], [16, 32], [[1], [2, 3]])
        with pytest.raises(MetadataError, match="block ids from 0 to 9"):
            builder.advance(step, blocks)
        assert builder.advance(step, [5, 9]).slot_mapping.tolist() == [80, 144]


def test_blocks_of_sinks_are_the_largest_of_any_layer() -> None:
    layers = nn.ModuleList(
        vattn.StaticSinkAttention(
            2, 16, 0.25, sink_len=size, sink_key=torch.zeros(size, 2, 16), sink_value=torch.zeros(size, 2, 16)
        )
        for size in (16, 32)
    )
    vattn.allocate_kv_cache(layers, num_blocks=10, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(4, 32, 64, layers=layers)
    for table in ([[1]], [[2]]):
        with pytest.raises(MetadataError, match=r"which holds sinks.*blocks from 3 on"):
            builder.build([1], [3], table)
    for slot in (16, 47):
        with pytest.raises(MetadataError, match=rf"slot_mapping\[1\]={slot} is in block {slot // 16}, which holds"):
            builder.build([2], [3], [[3]], slot_mapping=[50, slot])
    assert builder.build([2], [3], [[3]], slot_mapping=[50, -1]).slot_mapping.tolist() == [50, -1]


def test_halves_of_a_model_with_groups() -> None:
    builder = grouped(None, 24)
    step = builder.build([1, 3], [40, 3], [[[1, 2, 3], [4]], [[0, 5, 6], [7]]])
    decodes, prefills = step.decode_metadata, step.prefill_metadata
    assert decodes is not None and prefills is not None
    assert [part.block_table[:, 2].tolist() for part in decodes.parts] == [[3], [6]]
    assert [part.block_table[0, 0].item() for part in prefills.parts] == [4, 7]
    assert [part.slot_mapping.tolist() for part in prefills.parts] == [[64, 65, 66], [112, 113, 114]]
    alone = builder.build([1], [40], [[[1, 2, 3]], [[0, 5, 6]]])
    assert alone.decode_metadata is alone and alone.prefill_metadata is None


def test_groups_that_share_storages_share_no_block() -> None:
    builder = grouped(None, 24, 40)
    right = [[[1, 2], [3, 4, 5]], [[6, 7], [8, 9, 10]], [[11, 12], [13, 14, 15]]]
    builder.build([1, 1], [20, 40], right)
    for group, row, column, block in ((0, 0, 1, 15), (1, 1, 2, 12), (2, 1, 2, 2), (2, 0, 1, 10), (1, 0, 0, 15)):
        tables = [[list(blocks) for blocks in table] for table in right]
        tables[group][row][column] = block
        with pytest.raises(MetadataError, match=f"block {block} is written by"):
            builder.build([1, 1], [20, 40], tables)
    # After a request's blocks its table may hold anything, here a block that another group writes.
    right[0][0].append(12)
    builder.build([1, 1], [20, 40], right)
    with pytest.raises(MetadataError, match=r"request 1: entry 1 .* is 0, a block that was freed"):
        builder.build([1, 1], [20, 40], [right[0], [[6, 7], [8, 0, 10]], right[2]])


def test_groups_of_storages_in_common_with_one_of_several() -> None:
    """The third group shares a storage with the second alone, which shares another one with the first."""
    model = nn.ModuleList(
        vattn.Attention(2, size, 0.25, per_layer_sliding_window=window)
        for size, window in ((16, None), (16, 24), (32, 24), (32, 40))
    )
    vattn.allocate_kv_cache(model, num_blocks=40, dtype=torch.float32, hybrid=True)
    builder = vattn.GroupedMetadataBuilder(4, 32, max_seq_len=96, layers=model)
    assert len(builder.groups) == 3
    builder.build([1], [20], [[[1, 2]], [[3, 4]], [[5, 6]]])
    for tables in ([[[1, 2]], [[3, 4]], [[5, 4]]], [[[1, 2]], [[3, 2]], [[5, 6]]], [[[1, 2]], [[3, 4]], [[4, 6]]]):
        with pytest.raises(MetadataError, match="is written by"):
            builder.build([1], [20], tables)


def test_branches_of_which_one_is_no_sequence_are_refused() -> None:
    for branches in ([[1, 2], 3], [3, [1, 2]], [[1], "2"]):
        with pytest.raises(ConfigError, match="branches="):
            vattn.TokenTree.merge(branches)  # type: ignore[list-item]


def test_backends_name_their_builders() -> None:
    assert TreeAttentionBackend.get_builder_cls() is vattn.TreeAttentionMetadataBuilder
    assert selector.get_backend("TORCH_SDPA").get_builder_cls() is vattn.AttentionMetadataBuilder


def test_compiled_code_restores_the_step_around_it(fresh_dynamo: None) -> None:
    outer, inner = make().build([2]), make().build([3])

    @torch.compile(backend="eager", fullgraph=True)
    def run(x: torch.Tensor, step: vattn.AttentionMetadata) -> torch.Tensor:
        with vattn.forward_context(step):
            now = current_step()
            assert now is not None
            return x + now.seq_lens[0]

    for _ in range(2):
        assert run(torch.zeros(1), inner).item() == 3
        assert current_step() is None
    with vattn.forward_context(outer):
        assert run(torch.zeros(1), inner).item() == 3
        assert current_step() is outer
    assert current_step() is None


def test_a_thread_without_a_step_is_refused_while_another_is_in_one() -> None:
    step = make().build([2])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_step).result() is None
        with vattn.forward_context(step):
            assert current_step() is step
            with pytest.raises(MetadataError, match="a thread without a forward context"):
                pool.submit(current_step).result()
        assert pool.submit(current_step).result() is None


def test_positions_to_come_of_any_request_have_room() -> None:
    builder = vattn.FlashAttentionMetadataBuilder(4, 32, 64)
    builder.build([1, 1], [20, 60], [[1, 2], [3, 4, 5, 6]], num_lookahead_slots=4)
    for lengths in ([20, 61], [61, 20]):
        with pytest.raises(MetadataError, match="those to come included"):
            builder.build([1, 1], lengths, [[1, 2, 7, 8], [3, 4, 5, 6]], num_lookahead_slots=4)
