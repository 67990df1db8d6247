"""`AttentionMetadataBuilder.advance`: the step behind a step of decodes, as `build` would return it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

import vattn
from tests.support import make_config, unchanged, with_cache
from vattn.distributed import ContextParallel
from vattn.errors import MetadataError

NUMBERS = "num_reqs num_actual_tokens max_query_len max_seq_len num_prefills num_prefill_tokens num_decodes".split()


def make(block_size: int = 16, **options: Any) -> vattn.AttentionMetadataBuilder:
    return vattn.AttentionMetadataBuilder(8, 40, 96, block_size, num_blocks=200, **options)


def assert_same_step(got: vattn.AttentionMetadata, want: vattn.AttentionMetadata, lengths: list[int]) -> None:
    size = want.block_size
    for name, tensor in want.tensors().items():
        if name == "block_table":
            for row, length in enumerate(lengths):
                used = -(-length // size)
                assert torch.equal(got.block_table[row, :used], tensor[row, :used])
        else:
            assert torch.equal(got.tensors()[name], tensor), name
    assert [getattr(got, name) for name in NUMBERS] == [getattr(want, name) for name in NUMBERS]
    assert got.capture_key()[:6] == want.capture_key()[:6]
    got.check(size, 200)


@pytest.mark.parametrize(
    ("block_size", "padded", "seed"), [(1, (6, 9), 0), (3, (None, None), 1), (16, (8, 40), 2), (16, (None, None), 3)]
)
def test_steps_are_those_of_build(block_size: int, padded: tuple[Any, Any], seed: int) -> None:
    """Runs of steps behind built ones, in one pair of builders: nothing of earlier steps shows in later ones."""
    rng = random.Random(seed)
    builder, reference = make(block_size), make(block_size)
    reqs, tokens = padded
    for _ in range(6):
        count = rng.randint(1, 5)
        lengths = [rng.choice([1, 2, block_size, block_size + 1, 40, rng.randint(1, 60)]) for _ in range(count)]
        free = iter(rng.sample(range(1, 200), 190 if block_size > 1 else 199))
        lengths = [min(length, 20) if block_size == 1 else length for length in lengths]
        tables = [[next(free) for _ in range(-(-length // block_size))] for length in lengths]
        given = torch.tensor(lengths)
        step = builder.build([1] * count, given, tables, num_reqs_padded=reqs, num_tokens_padded=tokens)
        given.fill_(-7)  # the caller's own tensor from here on
        for _ in range(rng.choice([1, 2 * block_size + 1, 18])):
            new = []
            for row, length in enumerate(lengths):
                if length % block_size == 0:
                    new.append(next(free))
                    tables[row].append(new[-1])
                lengths[row] += 1
            step = builder.advance(step, new)
            options = {"num_reqs_padded": reqs, "num_tokens_padded": tokens}
            assert_same_step(step, reference.build([1] * count, lengths, tables, **options), lengths)


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no block where one begins": ({}, [], "0 new blocks, and 1 requests"),
    "a block too many": ({}, [7, 8], "2 new blocks, and 1"),
    "a block outside of the cache": ({}, [200], "from 0 to 199"),
    "a negative block": ({}, [-1], "from 0 to 199"),
    "a block that is no int": ({}, [1.5], r"new_blocks is \[1.5\]"),
    "no list": ({}, 7, "a list of block ids"),
    "a text": ({}, "7", "a list of block ids"),
    "the same block twice": ({"seq_lens": [16, 32]}, [7, 7], "given twice"),
    "a prompt": ({"query_lens": [2, 1]}, [7], "query_lens"),
    "flags": ({"causal": [1, 1]}, [7], "causal="),
    "slots": ({"slot_mapping": [40, 41]}, [7], "slot_mapping="),
    "positions": ({"positions": [3, 4]}, [7], "positions="),
    "kept rows": ({"num_logits": [1, 0]}, [7], "num_logits="),
    "a shared prefix": ({"shared_prefix_len": 0}, [7], "shared_prefix_len="),
    "a request that becomes too long": ({"seq_lens": [16, 96]}, [7, 8], "at most 96"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_touch_nothing(name: str) -> None:
    changes, blocks, text = REFUSED[name]
    builder = make()
    arguments: dict[str, Any] = {"query_lens": [1, 1], "seq_lens": [16, 20], **changes}
    tables = [[1, 9], list(range(20, 28))]
    step = builder.build(arguments.pop("query_lens"), arguments.pop("seq_lens"), tables, **arguments)
    with unchanged(step), pytest.raises(MetadataError, match=text):
        builder.advance(step, blocks)


def test_encoder_states_of_earlier_steps_stay() -> None:
    """Also behind a capture's padding; a step that writes states is not followed, for they would be written again."""
    builder, reference = make(max_encoder_len=40), make(max_encoder_len=40)
    given: dict[str, Any] = {"encoder_lens": [33, 0, 7], "cross_block_tables": [[50, 51, 52], [], [60]]}
    sizes = {"num_reqs_padded": 5, "num_tokens_padded": 5}
    step = builder.build([1] * 3, [16, 5, 9], [[1], [2], [3]], **given, **sizes)
    begun = {1: [4], 8: [5], 12: [6], 17: [7]}
    for length in range(1, 20):
        step = builder.advance(step, begun.get(length, []))
        lengths = [16 + length, 5 + length, 9 + length]
        tables = [[1, 4, 7], [2, 6], [3, 5]]
        tables = [row[: -(-each // 16)] for row, each in zip(tables, lengths, strict=True)]
        assert_same_step(step, reference.build([1] * 3, lengths, tables, **given, **sizes), lengths)
    step = builder.build([1] * 3, [16, 5, 9], [[1], [2], [3]], **given, new_encoder=[0, 0, 1])
    with unchanged(step), pytest.raises(MetadataError, match="new_encoder="):
        builder.advance(step, [4])


def test_only_the_last_step_can_be_advanced() -> None:
    builder = make()
    first = builder.build([1], [20], [[1, 2]])
    second = builder.advance(first, [])
    for wrong, named in (
        (first, "step 1 of a builder, over which its step 2 has been written"),
        (make().build([1], [20], [[1, 2]]), "metadata of type AttentionMetadata that is not"),
        (copy.copy(second), "metadata of type AttentionMetadata that is not"),
        (None, "metadata of type NoneType"),
    ):
        with pytest.raises(MetadataError, match=f"after {named}.*Try: pass that, or call build"):
            builder.advance(wrong, [])  # type: ignore[arg-type]
    with pytest.raises(MetadataError):
        builder.build([1], [2000], [[1, 2]])
    # A step that was refused has touched nothing.
    assert builder.advance(second, []).seq_lens.tolist() == [22, 0]


@pytest.mark.usefixtures("planned_backends")
def test_schedules_are_made_of_the_new_lengths() -> None:
    builder = make(layers=[make_config(block_size=16, backend="PLANNED")])
    step = builder.advance(builder.build([1, 1], [5, 20], [[1], [2, 3]]), [])
    (plan,) = step.plans.values()
    assert plan[0].tolist() == [6, 21]
    assert step.decode_metadata is step and step.prefill_metadata is None


def test_reserved_blocks_and_groups() -> None:
    sinks = torch.zeros(16, 2, 16)
    layer = with_cache(vattn.StaticSinkAttention(2, 16, 0.25, sink_len=16, sink_key=sinks, sink_value=sinks), 200)
    builder = vattn.AttentionMetadataBuilder(8, 40, 96, layers=layer)
    step = builder.build([1], [16], [[5]])
    with pytest.raises(MetadataError, match="holds sinks"):
        builder.advance(step, [1])
    assert builder.advance(step, [6]).slot_mapping.tolist() == [96]
    both = builder.build([1, 1], [16, 32], [[5], [6, 7]])
    with pytest.raises(MetadataError, match="of which one holds sinks"):
        builder.advance(both, [8, 1])
    model = torch.nn.ModuleList(vattn.Attention(2, 16, 0.25, per_layer_sliding_window=w) for w in (None, 24))
    vattn.allocate_kv_cache(model, num_blocks=8, dtype=torch.float32, hybrid=True)
    grouped = vattn.GroupedMetadataBuilder(2, 8, max_seq_len=64, layers=model)
    with pytest.raises(MetadataError, match="with groups"):
        grouped.advance(grouped.build([1], [20], [[[1, 2]], [[3, 4]]]), [])


@pytest.mark.parametrize("block", [1 << 31, (1 << 32) + 3, 1 << 63, 1 << 70])
def test_ids_beyond_int32_are_refused(block: int) -> None:
    """Without a known size of the cache too; the last id of int32 is one."""
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=32, max_seq_len=64)
    step = builder.build([1], [16], [[1]])
    with unchanged(step):
        with pytest.raises(MetadataError):
            builder.build([16], [16], [[block]])
        if block < 1 << 63:
            with pytest.raises(MetadataError, match="from 0 to 2147483647"):
                builder.build([16], [16], torch.tensor([[block]]))
        with pytest.raises(MetadataError, match="from 0 to 2147483647"):
            builder.advance(step, [block])
    step = builder.advance(step, [(1 << 31) - 1])
    builder.check(step)
    assert step.block_table[0].tolist() == [1, (1 << 31) - 1, 0, 0]
    with pytest.raises(MetadataError, match="block -5"):
        step.block_table[0, 0] = -5
        builder.check(step)


@pytest.mark.parametrize("kind", [np.array, np.uint8, torch.tensor, torch.IntTensor, tuple])
def test_blocks_of_numpy_and_torch(kind: Any) -> None:
    builder = make()
    step = builder.build([1, 1], [16, 20], [[1], [2, 3]])
    for wrong in (np.array([4.5]), torch.tensor([[4]]), np.array(4), torch.tensor([True]), np.array(["4"])):
        with pytest.raises(MetadataError, match="a flat sequence of ints"):
            builder.advance(step, wrong)  # type: ignore[arg-type]
    step = builder.advance(step, np.array([4], np.uint8) if kind is np.uint8 else kind([4]))
    assert step.slot_mapping.tolist() == [64, 52]
    assert builder.advance(step, kind([])[:0] if kind is torch.IntTensor else []).seq_lens.tolist() == [18, 22]


def test_sharded_caches_do_not_advance() -> None:
    ranks = ContextParallel(rank=0, world_size=2, interleave=16)
    builder = vattn.AttentionMetadataBuilder(2, 8, 64, context_parallel=ranks)
    with pytest.raises(MetadataError, match="context_parallel="):
        builder.advance(builder.build([1], [20], [[1]]), [])
