"""Steps with prefills first: their fields and halves, the other token order, and `advance_step`."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vattn
from tests.metadata.flash_steps import (
    BLOCK,
    TABLES,
    Greedy,
    builder_for,
    decode_steps,
    prefill,
    run_in_order,
    single_steps,
)
from tests.support import make_config
from vattn.backends.advance_step import advance_on_host
from vattn.errors import ConfigError, GraphContractError, MetadataError, UnknownOptionError
from vattn.metadata.flash_attn import DecodeInput, FlashAttentionMetadata
from vattn.ops.arguments import AdvanceArgs

PROMPTS = [[5, 80, 3, 3, 41], [9] * 16, [60, 2, 17, 30, 30, 30, 1, 4, 90, 11, 7, 12, 13, 14]]
LENGTHS = [len(prompt) for prompt in PROMPTS]


def mixed(builder: vattn.FlashAttentionMetadataBuilder, **options: object) -> FlashAttentionMetadata:
    """Two prefills, one of them a chunk, then two decodes."""
    tables = [[4], [6, 2], [9, 8, 7], [11]]
    return builder.build([5, 3, 1, 1], [5, 20, 37, 9], tables, **options)


def plain_builder(**options: object) -> vattn.FlashAttentionMetadataBuilder:
    return vattn.FlashAttentionMetadataBuilder(6, 24, 96, BLOCK, **options)


def same(one: object, other: object, names: str) -> None:
    """Compare tensors and numbers of two steps."""
    for name in names.split():
        got, want = getattr(one, name), getattr(other, name)
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want, name


def test_fields_and_halves() -> None:
    step = mixed(plain_builder())
    assert (step.num_prefills, step.num_prefill_tokens, step.num_decode_tokens) == (2, 8, 2)
    assert (step.max_prefill_seq_len, step.max_decode_seq_len) == (20, 37)
    assert (step.max_query_len, step.max_decode_query_len, step.use_cuda_graph) == (5, 1, False)
    assert step.seq_lens == step.seq_lens_tensor.tolist() == [5, 20, 37, 9]
    assert step.context_lens_tensor.tolist() == [0, 17, 36, 8]
    assert step.query_start_loc.tolist() == [0, 5, 8, 9, 10]
    assert step.seq_start_loc.tolist() == [0, 5, 25, 62, 71]
    slots = [64, 65, 66, 67, 68, 2 * 16 + 1, 2 * 16 + 2, 2 * 16 + 3, 7 * 16 + 4, 11 * 16 + 8]
    assert step.slot_mapping.tolist() == slots
    assert step.block_tables[:, :3].tolist() == [[4, -1, -1], [6, 2, -1], [9, 8, 7], [11, -1, -1]]
    first, then = step.prefill_metadata, step.decode_metadata
    assert first is step.prefill_metadata
    assert then is step.decode_metadata
    assert (first.num_prefills, first.num_prefill_tokens, first.num_decode_tokens) == (2, 8, 0)
    assert (then.num_prefills, then.num_prefill_tokens, then.num_decode_tokens) == (0, 0, 2)
    assert first.slot_mapping.tolist() + then.slot_mapping.tolist() == slots
    assert (first.query_start_loc.tolist(), then.query_start_loc.tolist()) == ([0, 5, 8], [0, 1, 2])
    assert (first.seq_start_loc.tolist(), then.seq_start_loc.tolist()) == ([0, 5, 25], [0, 37, 46])
    assert (first.seq_lens, then.seq_lens) == ([5, 20], [37, 9])
    assert (first.max_query_len, then.max_query_len) == (5, 1)
    assert (first.max_decode_seq_len, then.max_prefill_seq_len) == (0, 0)
    assert first.prefill_metadata.slot_mapping.tolist() == first.slot_mapping.tolist()
    assert first.decode_metadata is None
    assert then.prefill_metadata is None


def test_the_common_metadata_is_what_the_fields_say() -> None:
    """Made from the fields alone, as a user of the fields would, it equals the builder's."""
    step = mixed(plain_builder(), batch_size=5)
    made, built = step._as_common(), step.common
    same(made, built, " ".join(built.tensors()))
    same(made, built, "num_reqs max_query_len max_seq_len num_prefills num_decodes num_prefill_tokens")
    assert made.capture_key()[:3] == built.capture_key()[:3]


def test_padding_for_a_graph() -> None:
    builder = plain_builder()
    step = builder.build([1, 1], [7, 30], [[3], [5, 6]], batch_size=4)
    assert step.use_cuda_graph
    assert (step.num_prefills, step.num_decode_tokens) == (0, 4)
    assert step.slot_mapping.tolist() == [3 * 16 + 6, 6 * 16 + 13, -1, -1]
    assert step.seq_lens_tensor.tolist() == [7, 30, 0, 0]
    assert step.seq_lens == [7, 30]
    assert step.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    key = step.common.capture_key()
    again = builder.build([1], [9], [[8]], batch_size=4, capture_key=key)
    assert again.common.capture_key() == key
    assert again.seq_start_loc.tolist() == [0, 9, 9, 9, 9]
    assert again.seq_start_loc.data_ptr() == step.seq_start_loc.data_ptr()


def test_a_batch_of_one_has_one_row() -> None:
    step = plain_builder().build([1], [7], [[3]])
    assert step.seq_lens_tensor.tolist() == [7]
    assert step.common.seq_lens.tolist() == [7, 0]
    inputs = DecodeInput(torch.tensor([4]), step.common.positions)
    later = plain_builder().build([7], [7], [[3]], num_lookahead_slots=3)
    start = DecodeInput(torch.tensor([4]), torch.zeros(1, dtype=torch.int64))
    later.advance_step(start, torch.tensor([50]), BLOCK, 1, 1, turn_prefills_into_decodes=True)
    assert later.common.query_start_loc.tolist() == [0, 1, 1]
    assert later.common.seq_lens.tolist() == [8, 0]
    assert later.slot_mapping.tolist() == [3 * 16 + 7]
    assert inputs.input_positions.tolist() == [6]
    short = plain_builder().build([1], [1], [[3]], num_lookahead_slots=1)  # a prompt of one token has one row already
    short.advance_step(start, torch.tensor([50]), BLOCK, 1, 1, turn_prefills_into_decodes=True)
    assert short.slot_mapping.tolist() == [3 * 16 + 1]


def test_entries_behind_a_request_name_no_block() -> None:
    step = plain_builder().build([7, 7], [7, 20], [[3, 9], [5, 6]], num_lookahead_slots=3)
    width = step.common.block_table.shape[1]
    assert step.common.block_table[:2].tolist() == [[3] + [-1] * (width - 1), [5, 6] + [-1] * (width - 2)]


def test_encoder_fields() -> None:
    builder = plain_builder(max_encoder_len=40)
    step = builder.build(
        [3, 1], [3, 20], [[1], [2, 3]], encoder_lens=[17, 4], new_encoder=[1, 0], cross_block_tables=[[7, 8], [9]]
    )
    assert step.encoder_seq_lens == step.encoder_seq_lens_tensor.tolist() == [17, 4]
    assert step.encoder_seq_start_loc.tolist() == [0, 17, 21]
    assert (step.max_encoder_seq_len, step.num_encoder_tokens) == (17, 21)
    assert step.cross_slot_mapping.tolist() == [*range(112, 128), 128]
    assert step.cross_block_tables[:, :2].tolist()[0] == [7, 8]
    assert step.is_all_encoder_attn_metadata_set
    assert step.is_all_cross_attn_metadata_set
    first, then = step.prefill_metadata, step.decode_metadata
    assert (first.encoder_seq_lens, then.encoder_seq_lens) == ([17], [4])
    assert (first.encoder_seq_start_loc.tolist(), then.encoder_seq_start_loc.tolist()) == ([0, 17], [0, 4])
    assert first.cross_slot_mapping is step.cross_slot_mapping
    assert then.cross_slot_mapping is None
    for kind, queries, keys in (
        ("decoder", [0, 3, 23], [0, 3, 23]),
        ("encoder", [0, 17, 21], [0, 17, 21]),
        ("encoder_decoder", [0, 3, 23], [0, 17, 21]),
    ):
        offsets = step.sequence_offsets(kind)
        assert (offsets.query_start_loc.tolist(), offsets.key_start_loc.tolist()) == (queries, keys)
    assert step.sequence_offsets("encoder_decoder").max_key_len == 17


def test_attention_types_without_their_fields_are_refused() -> None:
    step = mixed(plain_builder())
    with pytest.raises(MetadataError, match=r"Encoder attention requires setting encoder metadata attributes\."):
        step.sequence_offsets("encoder")
    with pytest.raises(MetadataError, match="cross-attention requires setting cross-attention metadata"):
        step.sequence_offsets("encoder_decoder")
    with pytest.raises(MetadataError, match="whole texts"):
        step.sequence_offsets("encoder_only")
    with pytest.raises(UnknownOptionError, match="Invalid attention type 'both'"):
        step.sequence_offsets("both")
    texts = plain_builder().build([4, 6], [4, 6], None)
    assert texts.sequence_offsets("encoder_only").key_start_loc.tolist() == [0, 4, 10]


def test_orders_of_tokens() -> None:
    order = vattn.token_order([1, 3, 1, 2], [9, 3, 20, 8], first="prefill")
    assert order.requests == [1, 3, 0, 2]
    assert order.tokens.tolist() == [1, 2, 3, 5, 6, 0, 4]
    back = vattn.token_order([3, 2, 1, 1], [3, 8, 9, 20], first="decode")
    assert back.requests == [2, 3, 0, 1]
    assert vattn.token_order([3, 2], [3, 8], "decode", decode_threshold=2).requests == [1, 0]
    assert vattn.token_order([3, 1], [3, 8], "decode", decode_threshold=0).requests == [0, 1]  # there are no decodes
    with pytest.raises(UnknownOptionError, match="'prefill', 'decode'"):
        vattn.token_order([1], [1], first="extend")
    for queries, lengths in (([1, 2], [3]), ([1], [3, 4])):
        with pytest.raises(MetadataError, match="seq_lens describes"):
            vattn.token_order(queries, lengths, first="decode")


STEP = [1, 5, 1, 3, 1], [37, 5, 9, 20, 2], [[9, 8, 7], [4], [11], [6, 2], [13]]
"""Query lengths, lengths and blocks of prefills and decodes."""


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_both_orders_of_tokens_give_equal_outputs(first: str) -> None:
    """The same requests, packed either way, over caches with the same contents, and each alone."""
    torch.manual_seed(3)
    model = Greedy("TORCH_SDPA", torch.float32, "cpu")
    tokens = torch.randint(97, (sum(STEP[0]),))
    found = run_in_order(model, tokens, STEP, first)
    requests = zip(tokens.split(STEP[0]), *STEP, strict=True)
    alone = [
        run_in_order(model, rows, ([query], [length], [table]), "decode") for rows, query, length, table in requests
    ]
    assert torch.allclose(found, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_halves_run_on_their_own() -> None:
    """The outputs of the prefills' half and the decodes' half are those of the whole."""
    model = Greedy("TORCH_SDPA", torch.float32, "cpu")
    step = mixed(builder_for(model))
    tokens = torch.arange(10)
    with torch.no_grad():
        with vattn.forward_context(step.common):
            whole = model(tokens, step.common.positions)
        parts = []
        for half, rows in ((step.prefill_metadata, tokens[:8]), (step.decode_metadata, tokens[8:])):
            with vattn.forward_context(half.common):
                parts.append(model(rows, half.common.positions))
    assert torch.allclose(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [None, 5])
def test_eight_steps_equal_eight_single_steps(batch_size: int | None) -> None:
    with torch.no_grad():
        model = Greedy("TORCH_SDPA", torch.float32, "cpu")
        first = prefill(model, PROMPTS)
        expected = single_steps(model, LENGTHS, first, 8)
        caches = [layer.kv_cache.clone() for layer in model.layers]
        for layer in model.layers:
            layer.kv_cache.zero_()
        prefill(model, PROMPTS)
        grown = [length + 1 for length in LENGTHS]
        step = builder_for(model).build([1] * 3, grown, TABLES, batch_size=batch_size, num_lookahead_slots=7)
        rows = batch_size or 3
        inputs = DecodeInput(torch.zeros(rows, dtype=torch.int64), step.common.positions)
        inputs.input_tokens[:3] = torch.tensor(first)
        found = torch.empty(8, rows, dtype=torch.int64)
        decode_steps(model, step, inputs, rows, 3, found)
    assert found[:, :3].tolist() == expected
    for layer, cache in zip(model.layers, caches, strict=True):
        # Projections of other numbers of rows may be summed in another order.
        torch.testing.assert_close(
            layer.kv_cache, cache, rtol=1e-5 if batch_size else 0, atol=1e-6 if batch_size else 0
        )
    step.common.check(BLOCK, 64)


@settings(max_examples=20)
@given(st.data())
def test_any_batch_moved_on_is_the_batch_of_its_new_lengths(data: st.DataObject) -> None:
    """Random lengths, padding and steps: every tensor is what the builder makes of the grown lengths."""
    real = data.draw(st.integers(1, 6))
    rows = data.draw(st.integers(max(2, real), 6))
    steps = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(2, 96 - steps), min_size=real, max_size=real))
    order = data.draw(st.permutations(range(1, 37)))
    tables = [list(order[6 * row : 6 * row + 6]) for row in range(real)]
    padded = {"batch_size": rows} if data.draw(st.booleans()) else {}
    rows = rows if padded else real
    step = plain_builder(num_blocks=37).build([1] * real, lengths, tables, num_lookahead_slots=steps, **padded)
    inputs = DecodeInput(torch.full((rows,), -3), step.common.positions)
    in_place = data.draw(st.booleans())
    for index in range(steps):
        sampled = torch.arange(real) + 10 * index
        if in_place:
            inputs.input_tokens[:real] = sampled
        step.advance_step(inputs, None if in_place else sampled, BLOCK, rows, real)
    expected = plain_builder(num_blocks=37).build([1] * real, [n + steps for n in lengths], tables, **padded)
    for name, tensor in expected.common.tensors().items():
        assert torch.equal(step.common.tensors()[name], tensor), name
    same(step, expected, "context_lens_tensor seq_start_loc seq_lens max_decode_seq_len num_decode_tokens")
    assert inputs.input_tokens.tolist() == [*(torch.arange(real) + 10 * (steps - 1)).tolist(), *[-3] * (rows - real)]
    with pytest.raises(MetadataError, match="no room left"):
        step.advance_step(inputs, torch.zeros(real, dtype=torch.int64), BLOCK, rows, real)


def test_prefills_turn_into_decodes() -> None:
    """The step after prompts, two of them with a decode beside them, equals one built on the host."""
    with torch.no_grad():
        model = Greedy("TORCH_SDPA", torch.float32, "cpu")
        step = builder_for(model).build([5, 3, 1], [5, 20, 30], TABLES, num_lookahead_slots=1)
        inputs = DecodeInput(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
        half = step.prefill_metadata
        step.advance_step(inputs, torch.tensor([[50], [51], [52]]), BLOCK, 3, 3, turn_prefills_into_decodes=True)
    expected = builder_for(model).build([1, 1, 1], [6, 21, 31], TABLES)
    for name, tensor in expected.common.tensors().items():
        if not name.startswith("block"):
            assert torch.equal(step.common.tensors()[name], tensor), name
    same(step, expected, "context_lens_tensor seq_start_loc seq_lens_tensor query_start_loc slot_mapping")
    same(step, expected, "num_prefills num_prefill_tokens num_decode_tokens max_query_len max_decode_query_len")
    assert half is not None
    assert step.prefill_metadata is None
    assert inputs.input_tokens.tolist() == [50, 51, 52]
    assert inputs.input_positions.tolist() == [5, 20, 30]


def advance_args(
    reqs: int, real: int, width: int, from_prefills: bool, seed: int, replayed: bool = False
) -> AdvanceArgs:
    """Lengths up to beyond the table, entries that are no block, tables in a wider tensor.

    Args:
        replayed: as in a graph captured for all requests, where empty ones alone tell padding.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width * 16 + 3, (reqs,), dtype=torch.int32, generator=rng)
    lengths[real:] = 0
    return AdvanceArgs(
        input_tokens=torch.full((reqs,), -5),
        input_positions=torch.full((reqs,), -6, dtype=torch.int32),
        positions=torch.full((reqs,), -7),
        sampled=torch.randint(999, (reqs if replayed else real,), generator=rng),
        seq_lens=lengths,
        context_lens=lengths - 1,
        query_start_loc=torch.arange(reqs + 1, dtype=torch.int32).clamp(max=real),
        seq_start_loc=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        slot_mapping=torch.full((reqs,), -1),
        block_table=torch.randint(-1, 50, (reqs, width + 3), dtype=torch.int32, generator=rng)[:, :width],
        block_size=16,
        num_queries=reqs if replayed else real,
        from_prefills=from_prefills,
    )


@pytest.mark.parametrize(("reqs", "real", "width"), [(5, 4, 3), (200, 130, 7), (1, 1, 2), (128, 128, 1)])
@pytest.mark.parametrize(("from_prefills", "replayed"), [(False, False), (True, False), (False, True)])
def test_the_kernel_does_what_torch_does(
    device: str, reqs: int, real: int, width: int, from_prefills: bool, replayed: bool
) -> None:
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    launch = pytest.importorskip("vattn.kernels.triton.attention.advance_step").advance
    here, there = (advance_args(reqs, real, width, from_prefills, seed=reqs, replayed=replayed) for _ in range(2))
    there = AdvanceArgs(*(value.to(device) if isinstance(value, torch.Tensor) else value for value in there))
    # A table of more columns than are used, as a builder's slice is.
    wide = torch.zeros(reqs, width + 5, dtype=torch.int32, device=device)
    wide[:, :width] = there.block_table
    there = there._replace(block_table=wide[:, :width])
    for _ in range(3):
        advance_on_host(here)
        launch(there)
    for name, one, other in zip(here._fields, here, there, strict=True):
        assert not isinstance(one, torch.Tensor) or torch.equal(one, other.cpu()), name


def test_empty_requests_stay_as_they_are() -> None:
    args = advance_args(5, 2, 3, False, seed=1, replayed=True)
    advance_on_host(args)
    assert args.seq_lens[2:].tolist() == [0, 0, 0]
    assert args.slot_mapping[2:].tolist() == [-1, -1, -1]
    assert args.input_tokens[2:].tolist() == [-5, -5, -5]
    assert args.seq_start_loc[3:].tolist() == [int(args.seq_lens.sum())] * 3


def test_a_table_without_room_writes_nothing() -> None:
    args = advance_args(2, 2, 2, False, seed=1)
    args.seq_lens.copy_(torch.tensor([32, 15]))
    args.block_table.copy_(torch.tensor([[3, 4], [5, -1]]))
    advance_on_host(args)
    assert args.slot_mapping.tolist() == [-1, 5 * 16 + 15]
    advance_on_host(args)
    assert args.slot_mapping.tolist() == [-1, -1]
    assert args.seq_lens.tolist() == [34, 17]


def snapshot(step: FlashAttentionMetadata, inputs: DecodeInput) -> list[object]:
    tensors = [*step.common.tensors().values(), step.context_lens_tensor, step.seq_start_loc, *inputs]
    return [t.tolist() for t in tensors] + [step.seq_lens, step.num_prefills, step.lookahead, step.max_query_len]


@pytest.mark.parametrize(
    ("lens", "options", "changes", "error", "why"),
    [
        ([5, 1, 1], {}, {}, MetadataError, "batch with 1 prefills"),
        ([1, 1, 1], {}, {"num_seqs": 4}, GraphContractError, "num_queries=3"),
        ([1, 1, 1], {"batch_size": 4}, {"num_seqs": 3}, MetadataError, "one row a request"),
        ([1, 1, 1], {"batch_size": 4}, {"num_seqs": 4, "num_queries": 5}, GraphContractError, "num_queries=5"),
        ([1, 1, 1], {}, {"block_size": 32}, MetadataError, "blocks of 16"),
        ([1, 1, 1], {"num_lookahead_slots": 0}, {}, MetadataError, "no room left"),
        ([1, 1, 1], {}, {"sampled": torch.zeros(2, dtype=torch.int64)}, MetadataError, "sampled_token_ids"),
        ([1, 1, 1], {}, {"sampled": torch.zeros(3)}, MetadataError, "sampled_token_ids"),
        ([1, 1, 1], {}, {"tokens": torch.zeros(4, dtype=torch.int64)}, MetadataError, "input_tokens"),
        ([2, 2, 1], {"threshold": 2}, {"num_seqs": 3}, MetadataError, "decodes of up to 2 tokens"),
        ([5, 1, 1], {}, {"turn": True, "num_seqs": 2, "num_queries": 2}, MetadataError, "one row a request"),
    ],
)
def test_steps_that_cannot_move_on_are_refused_and_nothing_changes(lens, options, changes, error, why) -> None:
    options = {"num_lookahead_slots": 4, **options}
    builder = plain_builder(decode_threshold=options.pop("threshold", 1))
    seqs = [5 if query == 5 else 20 for query in lens]
    step = builder.build(lens, seqs, TABLES, **options)
    rows = step.seq_lens_tensor.shape[0]
    inputs = DecodeInput(changes.get("tokens", torch.zeros(rows, dtype=torch.int64)), torch.zeros(rows).long())
    before = snapshot(step, inputs)
    with pytest.raises(error, match=why):
        step.advance_step(
            inputs,
            changes.get("sampled", torch.zeros(3, dtype=torch.int64)),
            changes.get("block_size", BLOCK),
            changes.get("num_seqs", 3),
            changes.get("num_queries", 3),
            changes.get("turn", False),
        )
    assert snapshot(step, inputs) == before


def test_requests_behind_the_queries_stay_where_they_are() -> None:
    step = plain_builder().build([1, 1, 1], [20, 9, 37], TABLES, batch_size=4, num_lookahead_slots=1)
    inputs = DecodeInput(torch.zeros(4).long(), torch.zeros(4).long())
    step.advance_step(inputs, torch.zeros(2, dtype=torch.int64), BLOCK, 4, 2)
    assert step.seq_lens == step.seq_lens_tensor[:3].tolist() == [21, 10, 37]


def test_prompts_that_become_decodes_run_no_encoder_again() -> None:
    builder = plain_builder(max_encoder_len=16)
    encoder = {"encoder_lens": [9], "new_encoder": [1], "cross_block_tables": [[6]]}
    step = builder.build([5], [5], [[4]], num_lookahead_slots=1, **encoder)
    assert step.common.cross_slot_mapping is not None
    inputs = DecodeInput(torch.zeros(1).long(), torch.zeros(1).long())
    step.advance_step(inputs, torch.zeros(1, dtype=torch.int64), BLOCK, 1, 1, turn_prefills_into_decodes=True)
    assert step.common.cross_slot_mapping is step.common.encoder_start_loc is step.cross_slot_mapping is None


@pytest.mark.parametrize(
    ("arguments", "options", "why"),
    [
        (([1, 5], [9, 5], [[1], [2]]), {}, "request 1, a prefill of 5 tokens, after request 0, a decode"),
        (([1, 0], [9, 5], [[1], [2]]), {}, "request 1 has 0 new tokens"),
        (([1], [16], [[1]]), {"num_lookahead_slots": 1}, "needs 2 blocks of 16 tokens, its block table has 1"),
        (([1], [90], [[1] * 8]), {"num_lookahead_slots": 7}, "a step of 97 positions in one request"),
        (([1], [9], [[1]]), {"num_lookahead_slots": -1}, "num_lookahead_slots >= 0"),
        (([1, 1, 1], [9, 9, 9], [[1], [2], [3]]), {"batch_size": 2}, "3 requests padded to 2"),
        (([1], [9], torch.tensor([[1.0]])), {}, "block_tables is torch.float32 .* give block_tables an integer dtype"),
        (([1], [9], [[1], [2]]), {}, "block_tables describes 2 requests"),
        (([1], [9, 9], [[1], [2]]), {}, "requests"),
    ],
)
def test_steps_that_contradict_themselves_are_refused(arguments, options, why) -> None:
    with pytest.raises(MetadataError, match=why):
        plain_builder().build(*arguments, **options)


def test_blocks_are_multiples_of_16() -> None:
    with pytest.raises(ConfigError, match=r"Block size must be a multiple of 16\."):
        vattn.FlashAttentionMetadataBuilder(2, 2, 32, 24)


def test_steps_without_a_cache_do_not_move_on() -> None:
    step = plain_builder().build([2, 3], [2, 3], None)
    inputs = DecodeInput(torch.zeros(2).long(), torch.zeros(2).long())
    with pytest.raises(MetadataError, match="without a cache"):
        step.advance_step(inputs, torch.zeros(2).long(), BLOCK, 2, 2, turn_prefills_into_decodes=True)


def planned_config(backend: str) -> vattn.AttentionConfig:
    return make_config(block_size=BLOCK, backend=backend)


@pytest.mark.usefixtures("planned_backends")
def test_schedules_are_made_anew_in_the_size_of_the_step() -> None:
    builder = plain_builder(layers=[planned_config("PLANNED")])
    step = builder.build([5, 3, 1], [5, 20, 30], TABLES, num_lookahead_slots=2)
    (key,) = step.common.plans
    assert step.common.plans[key].shape == (10, 3)
    address = step.common.plans[key].data_ptr()
    inputs = DecodeInput(torch.zeros(3).long(), torch.zeros(3).long())
    step.advance_step(inputs, torch.zeros(3).long(), BLOCK, 3, 3, turn_prefills_into_decodes=True)
    assert step.common.plans[key].tolist() == [[6, 21, 31]] * 4
    step.advance_step(inputs, torch.zeros(3).long(), BLOCK, 3, 3)
    assert step.common.plans[key].tolist() == [[7, 22, 32]] * 4
    assert step.common.plans[key].data_ptr() == address


@pytest.mark.usefixtures("planned_backends")
def test_schedules_of_the_host_do_not_move_on() -> None:
    builder = plain_builder(layers=[planned_config("PLANNED_ON_HOST")], num_blocks=64)
    step = builder.build([1, 1], [9, 20], TABLES[:2], num_lookahead_slots=2)
    inputs = DecodeInput(torch.zeros(2).long(), torch.zeros(2).long())
    before = snapshot(step, inputs)
    with pytest.raises(MetadataError, match="schedules that the device cannot remake"):
        step.advance_step(inputs, torch.zeros(2).long(), BLOCK, 2, 2)
    assert snapshot(step, inputs) == before


def test_metadata_made_by_hand_moves_on() -> None:
    """An engine may fill the fields itself; the metadata of the layers follows them."""
    lengths = torch.tensor([7, 16], dtype=torch.int32)
    step = FlashAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=2,
        slot_mapping=torch.tensor([3 * 16 + 6, 5 * 16 + 15]),
        seq_lens=[7, 16],
        seq_lens_tensor=lengths,
        max_prefill_seq_len=0,
        max_decode_seq_len=16,
        context_lens_tensor=lengths - 1,
        block_tables=torch.tensor([[3, 4], [5, 6]], dtype=torch.int32),
        use_cuda_graph=False,
        max_query_len=1,
        max_decode_query_len=1,
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_start_loc=torch.tensor([0, 7, 23], dtype=torch.int32),
    )
    assert step.common.positions.tolist() == [6, 15]
    inputs = DecodeInput(torch.tensor([1, 2]), torch.tensor([6, 15], dtype=torch.int32))
    step.advance_step(inputs, torch.tensor([50, 60], dtype=torch.int32), BLOCK, 2, 2)
    expected = plain_builder().build([1, 1], [8, 17], [[3, 4], [5, 6]])
    same(step.common, expected.common, "query_start_loc seq_lens slot_mapping positions")
    same(step, expected, "seq_start_loc context_lens_tensor seq_lens max_decode_seq_len")
    assert inputs.input_tokens.tolist() == [50, 60]
    assert inputs.input_positions.tolist() == [7, 16]
    with pytest.raises(MetadataError, match="one input_token a request"):
        step.advance_step(DecodeInput(torch.zeros(3).long(), inputs[1]), torch.zeros(2).long(), BLOCK, 2, 2)


def test_layers_name_what_they_take() -> None:
    step = plain_builder().build([1], [7], [[3]])
    with pytest.raises(MetadataError, match=r"its \.common"), vattn.forward_context(step):
        pass
