"""`CrossAttention`: states written once and read later, mixed batches, refusals, compiled, against Whisper's."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import vattn
from tests.layers import layer_support
from tests.layers.layer_support import BLOCK, CLOSE, HEADS, KV_HEADS, NUM_BLOCKS, SIZE, UNIT, backends, bind, dense
from tests.support import unchanged
from vattn.config.device import parse_version
from vattn.errors import ConfigError, GraphContractError, MetadataError, ShapeError, UnsupportedRequestError
from vattn.metadata.cross_attention import write_cross_slots
from vattn.passes.report import clear_fusion_report

BACKENDS = backends("encoder_decoder")
make_layer = partial(layer_support.make_layer, kind=vattn.CrossAttention)
make_builder = partial(layer_support.make_builder, max_encoder_len=24)


def rows(count, heads, width=SIZE, seed=0, real=None):
    """Return random `[count, heads * width]`; NaN from row `real` on."""
    found = torch.randn(count, heads * width, generator=torch.Generator().manual_seed(seed))
    if real is not None:
        found[real:] = torch.nan
    return found


def expected(query, query_lens, keys, values):
    """Return `[T, H * V]` of requests whose encoder states are `keys[i]`, `values[i]`, 2-D."""
    return dense(query.split(list(query_lens)), keys, values).flatten(1)


ENCODER = {"encoder_lens": [11, 0, 3], "cross_block_tables": [[6, 2], [], [4]]}


def first_step(builder, query_lens=(4, 2, 9), **options):
    """Return a prefill in which the encoders of requests 0 and 2 run; request 2 has more tokens than states."""
    lens = list(query_lens)
    tables = [[1], [3], [5, 7]]
    return builder.build(lens, lens, tables, **{"new_encoder": [True] * 3, **ENCODER, **options})


def run_two_steps(layer, value_size=SIZE, **padding):
    """Run a first and a later step, compare both, and return their outputs."""
    builder = make_builder()
    keys = [rows(n, KV_HEADS, seed=n) for n in ENCODER["encoder_lens"]]
    values = [rows(n, KV_HEADS, value_size, seed=n + 50) for n in ENCODER["encoder_lens"]]
    step = first_step(builder, **padding)
    tokens, states = step.slot_mapping.shape[0], step.cross_slot_mapping.shape[0]
    query = rows(tokens, HEADS, real=15)
    key, value = (
        torch.cat([*parts, torch.full((states - 14, parts[0].shape[1]), torch.nan)]) for parts in (keys, values)
    )
    out = layer(query, key, value, metadata=step)
    want = expected(query[:15], (4, 2, 9), keys, values)
    later = builder.build([1, 1, 1], [5, 3, 10], [[1], [3], [5, 7]], **ENCODER)
    query_later = rows(3, HEADS, seed=9)
    out_later = layer(query_later, None, None, metadata=later)
    return (out, want), (out_later, expected(query_later, (1, 1, 1), keys, values))


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_are_written_once_and_read_by_later_steps(backend):
    """Requests without states get zeros."""
    empty = (slice(4, 6), slice(1, 2))
    for (out, want), rows_of_none in zip(run_two_steps(make_layer(attn_backend=backend)), empty, strict=True):
        torch.testing.assert_close(out, want, **CLOSE)
        assert not out[rows_of_none].any()


def test_padding_writes_nothing_and_comes_out_zero():
    layer = make_layer()
    (out, want), _ = run_two_steps(layer, num_reqs_padded=4, num_tokens_padded=20, num_encoder_tokens_padded=17)
    torch.testing.assert_close(out[:15], want, **CLOSE)
    assert not out[15:].any()
    # 14 states of 16 values in 2 heads, key and value; everything else is still NaN.
    assert int(layer.kv_cache.isfinite().sum()) == 14 * SIZE * KV_HEADS * 2


def test_unequal_head_sizes_and_hnd_layout():
    layer = make_layer(head_size_v=24, cache={"kv_cache_layout": "HND"})
    for out, want in run_two_steps(layer, value_size=24):
        torch.testing.assert_close(out, want, **CLOSE)


@pytest.mark.parametrize(
    "scales", [UNIT, vattn.QuantConfig(k_scale=[0.01, 0.013], v_scale=[0.02, 0.011])], ids=["unit", "heads"]
)
def test_fp8_cache(scales):
    layer = make_layer(cache={"cache_dtype": "fp8"}, quant_config=scales)
    for out, want in run_two_steps(layer):
        # e4m3 rounds keys and values by up to 1/16 of their size; softmax over few states keeps about that.
        assert (out - want).norm() < 0.05 * want.norm()


def test_calculated_scales_come_from_the_first_encoder_states():
    quant = vattn.QuantConfig(query_format="fp8_e4m3")
    layer = make_layer(cache={"cache_dtype": "fp8", "calculate_kv_scales": True}, quant_config=quant)
    (out, want), (later, want_later) = run_two_steps(layer, num_encoder_tokens_padded=17, num_tokens_padded=20)
    assert layer.scales_ready.tolist() == [1, 1, 1]
    assert layer.k_scale.item() == pytest.approx(
        torch.cat([rows(n, KV_HEADS, seed=n) for n in (11, 0, 3)]).abs().max().item() * 2 / 448
    )
    # Query and keys are rounded by up to 1/16, and so are values.
    assert (out[:15] - want).norm() < 0.1 * want.norm()
    assert (later - want_later).norm() < 0.1 * want_later.norm()


def test_soft_cap_and_sinks_reach_the_op():
    plain = run_two_steps(make_layer())[0][0]
    for options in ({"logits_soft_cap": 0.2}, {"sinks": torch.tensor([0.1, 2.0, -1.0, 0.0])}):
        out = run_two_steps(make_layer(**options))[0][0]
        assert out.isfinite().all() and not torch.allclose(out, plain, rtol=1e-3, atol=1e-3)


def test_what_describes_self_attention_is_not_read():
    """Flags, ranges and lengths of the decoder belong to the layers that attend to it."""
    builder = make_builder(max_mm_ranges=1)
    inputs = rows(15, HEADS), rows(14, KV_HEADS, seed=1), rows(14, KV_HEADS, seed=2)
    plain = make_layer()(*inputs, metadata=first_step(builder)).clone()
    other = first_step(builder, causal=[0, 1, 1], mm_ranges=[[(0, 1)], [], []])
    assert torch.equal(make_layer()(*inputs, metadata=other), plain)


def test_a_profiling_call_needs_nothing():
    layer = make_layer(bound=False)
    for key in (None, rows(7, KV_HEADS)):
        out = layer(rows(5, HEADS), key, key)
        assert out.shape == (5, HEADS * SIZE) and not out.any()


def test_spec_and_repr():
    layer = make_layer()
    spec = make_layer(bound=False).get_kv_cache_spec(torch.float32)
    assert isinstance(spec, vattn.CrossAttentionSpec) and spec.max_blocks(1000, max_encoder_len=17) == 3
    assert "CrossAttention(num_heads=4" in repr(layer) and "scale=0.25, " in repr(layer) and "backend=" in repr(layer)


# Metadata


def host_slots(lens, new, tables):
    return [
        t[i // BLOCK] * BLOCK + i % BLOCK for n, run, t in zip(lens, new, tables, strict=True) if run for i in range(n)
    ]


@given(st.lists(st.tuples(st.integers(0, 24), st.booleans()), min_size=1, max_size=4), st.integers(0, 3), st.randoms())
def test_slots_made_on_the_device_are_those_counted_on_the_host(requests, padding, random):
    lens, new = [n for n, _ in requests], [flag for _, flag in requests]
    free = iter(random.sample(range(1, 100), 12))
    tables = [[next(free) for _ in range(3)] for _ in lens]
    wanted = host_slots(lens, new, tables)
    slots = torch.full((len(wanted) + padding,), 77)
    starts = torch.tensor([0, *(length * flag for length, flag in zip(lens, new, strict=True))]).cumsum(0)
    write_cross_slots(starts.int(), torch.tensor(tables).int(), BLOCK, slots)
    assert slots.tolist() == wanted + [-1] * padding
    step = make_builder(max_encoder_len=24).build(
        [1] * len(lens), [1] * len(lens), [[i] for i in range(len(lens))],
        encoder_lens=lens, new_encoder=new, cross_block_tables=tables,
        num_encoder_tokens_padded=len(wanted) + padding or None,
    )  # fmt: skip
    if wanted or padding:
        assert step.cross_slot_mapping.tolist() == wanted + [-1] * padding
    else:
        assert step.cross_slot_mapping is None
    assert step.encoder_seq_lens.tolist() == lens + [0] * (max(2, len(lens)) - len(lens))
    step.check(BLOCK, 100)


def test_metadata_keeps_its_addresses_and_says_what_a_capture_bakes_in():
    builder = make_builder()
    first = first_step(builder)
    kept = first.capture_key()
    assert first_step(builder).capture_key() == kept
    assert dict(kept.optional)["cross_slot_mapping"] == (14,)
    later = builder.build([1, 1, 1], [5, 3, 10], [[1], [3], [5, 7]], **ENCODER)
    assert "cross_slot_mapping" not in dict(later.capture_key().optional)
    assert later.encoder_seq_lens.data_ptr() == first.encoder_seq_lens.data_ptr()
    again = builder.build(
        [2, 1], [2, 1], [[1], [3]], encoder_lens=[9, 2], new_encoder=[1, 0], cross_block_tables=[[6, 2], [4]],
        capture_key=builder.build(
            [4, 2], [4, 2], [[1], [3]], encoder_lens=[14, 0], new_encoder=[1, 0], cross_block_tables=[[6, 2], []]
        ).capture_key(),
    )  # fmt: skip
    assert again.cross_slot_mapping.shape == (14,)
    assert again.cross_slot_mapping[9:].tolist() == [-1] * 5
    with pytest.raises(GraphContractError, match="14 encoder states for a graph captured with 9"):
        small = {"encoder_lens": [9, 0, 0], "new_encoder": [1, 0, 0], "cross_block_tables": [[6, 2], [], []]}
        first_step(builder, capture_key=first_step(builder, **small).capture_key())


BAD_STEPS = {
    "too few encoder lengths": ({"encoder_lens": [11, 0]}, "encoder_lens describes 2 requests"),
    "too few flags": ({"new_encoder": [True]}, "new_encoder describes 1 requests"),
    "too many tables": ({"cross_block_tables": [[6, 2], [], [4], [1]]}, "cross_block_tables describes 4 requests"),
    "negative length": ({"encoder_lens": [11, -1, 3]}, "encoder_lens[1]=-1"),
    "too long": ({"encoder_lens": [25, 0, 3], "cross_block_tables": [[6, 2, 1, 3], [], [4]]}, "max_encoder_len=25"),
    "table too short": ({"cross_block_tables": [[6], [], [4]]}, "needs 2 blocks"),
    "block out of range": ({"cross_block_tables": [[6, 99], [], [4]]}, "is block 99"),
    "block given twice": ({"cross_block_tables": [[6, 4], [], [4]]}, "block 4 is given twice"),
    "no tables": ({"cross_block_tables": None}, "encoder_lens, new_encoder alone"),
    "no lengths": ({"encoder_lens": None}, "cross_block_tables, new_encoder alone"),
    "padded to too few": ({"num_encoder_tokens_padded": 13}, "14 encoder states padded to 13"),
    "padding without lengths": (
        {"encoder_lens": None, "cross_block_tables": None, "new_encoder": None, "num_encoder_tokens_padded": 4},
        "num_encoder_tokens_padded=4 without encoder_lens",
    ),
    "more states than the builder holds": ({"num_encoder_tokens_padded": 300}, "padded to 300"),
}


@pytest.mark.parametrize(("changes", "named"), BAD_STEPS.values(), ids=BAD_STEPS.keys())
def test_contradicting_steps_are_refused_and_touch_no_buffer(changes, named):
    builder = make_builder(num_blocks=NUM_BLOCKS)
    with unchanged(first_step(builder)), pytest.raises(MetadataError) as caught:
        first_step(builder, query_lens=(1, 1, 1), **changes)
    assert named in str(caught.value)


WRONG_TENSORS = {
    "block out of range": ({"cross_block_table": torch.full((3, 3), 50).int()}, "is block 50"),
    "slot out of range": ({"cross_slot_mapping": torch.full((14,), 400)}, "cross_slot_mapping[0]=400"),
    "slot given twice": ({"cross_slot_mapping": torch.full((14,), 4)}, "slot 4 is given to two tokens"),
    "too long for the table": ({"encoder_seq_lens": torch.full((3,), 99).int()}, "needs 13 blocks"),
    "lengths of fp32": ({"encoder_seq_lens": torch.zeros(3)}, "encoder_seq_lens is torch.float32"),
    "lengths of fewer requests": ({"encoder_seq_lens": torch.zeros(2).int()}, "encoder_seq_lens is torch.int32 (2,)"),
    "no table": ({"cross_block_table": None}, "both or neither. Try: give cross_block_table too."),
}


@pytest.mark.parametrize(("changes", "named"), WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_check_finds_what_only_a_sync_can_tell(changes, named):
    step = first_step(make_builder())
    step.check(BLOCK, NUM_BLOCKS)
    with pytest.raises(MetadataError) as caught:
        dataclasses.replace(step, **changes).check(BLOCK, NUM_BLOCKS)
    assert named in str(caught.value)


def test_a_builder_without_room_for_encoder_states_says_so():
    with pytest.raises(MetadataError, match="max_encoder_len="):
        make_builder(max_encoder_len=0).build([1], [1], [[1]], encoder_lens=[0], cross_block_tables=[[]])


def test_a_request_may_read_the_states_that_another_wrote():
    """Two requests about one recording: the second is not new."""
    shared = {"encoder_lens": [9, 9], "cross_block_tables": [[6, 2], [6, 2]]}
    step = make_builder().build([1, 1], [1, 1], [[1], [3]], new_encoder=[1, 0], **shared)
    query = rows(1, HEADS).expand(2, -1).contiguous()
    out = make_layer()(query, rows(9, KV_HEADS, seed=1), rows(9, KV_HEADS, seed=2), metadata=step)
    torch.testing.assert_close(out[0], out[1])


# Refusals of the layer

BAD_OPTIONS = {
    "decoder": ({"attn_type": "decoder"}, UnsupportedRequestError, "vattn.Attention"),
    "encoder": ({"attn_type": "encoder_only"}, UnsupportedRequestError, "'encoder_decoder'"),
    "unknown type": ({"attn_type": "cross"}, ConfigError, "attn_type='cross'"),
    "scales of another layer": (
        {"quant_config": vattn.EncoderFP8Config(dynamic=True)}, ConfigError, "quant_config of type EncoderFP8Config"
    ),
    "window of the model": ({"cache": {"sliding_window": 8}}, ConfigError, "sliding_window=8"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "named"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options_are_refused_at_construction(options, error, named):
    with pytest.raises(error) as caught:
        make_layer(bound=False, **options)
    assert named in str(caught.value)


def bad_calls():
    """Name -> (key, value, changes of the metadata, error)."""
    key, value = rows(14, KV_HEADS, seed=1), rows(14, KV_HEADS, seed=2)
    gone = {"encoder_seq_lens": None, "cross_block_table": None}
    return {
        "no states": (None, None, {}, ShapeError),
        "no value": (key, None, {}, ShapeError),
        "too few states": (key[:13], value[:13], {}, ShapeError),
        "states of another count than their values": (key, value[:13], {}, ShapeError),
        "states nobody has": (key, value, {"cross_slot_mapping": None}, ShapeError),
        "no encoder lengths": (key, value, gone, MetadataError),
        "table of fewer requests": (key, value, {"cross_block_table": torch.zeros(2, 3).int()}, ShapeError),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_wrong_calls_leave_the_cache_alone(name):
    layer, step = make_layer(), first_step(make_builder())
    key, value, changes, error = bad_calls()[name]
    with unchanged(layer), pytest.raises(error) as caught:
        layer(rows(15, HEADS), key, value, metadata=dataclasses.replace(step, **changes))
    assert caught.value.fix


# Random traffic


@st.composite
def traffic(draw):
    """Steps of requests that arrive with or without an encoder input and decode for a while."""
    arrivals = draw(
        st.lists(st.tuples(st.integers(0, 24), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=4)
    )
    return arrivals, draw(st.integers(2, 5)), draw(st.integers(0, 2**16))


@given(traffic())
def test_random_steps_equal_dense_attention(case):
    """Requests start in different steps, so first and later steps mix in a batch."""
    arrivals, num_steps, seed = case
    layer = bind(make_layer(bound=False), num_blocks=40)
    builder = make_builder(layers=layer)
    blocks = iter(torch.randperm(39, generator=torch.Generator().manual_seed(seed)).tolist())
    tables = [[next(blocks) + 1 for _ in range(-(-n // BLOCK))] for n, _, _ in arrivals]
    keys = [rows(n, KV_HEADS, seed=seed + i) for i, (n, _, _) in enumerate(arrivals)]
    values = [rows(n, KV_HEADS, seed=seed + i + 99) for i, (n, _, _) in enumerate(arrivals)]
    for now in range(num_steps):
        active = [i for i, (_, _, start) in enumerate(arrivals) if start <= now]
        if not active:
            continue
        new = [arrivals[i][2] == now for i in active]
        query_lens = [arrivals[i][1] if run else 1 for i, run in zip(active, new, strict=True)]
        step = builder.build(
            query_lens,
            query_lens,
            [[0]] * len(active),
            slot_mapping=[-1] * sum(query_lens),
            encoder_lens=[arrivals[i][0] for i in active],
            new_encoder=new,
            cross_block_tables=[tables[i] for i in active],
        )
        written = [i for i, run in zip(active, new, strict=True) if run and arrivals[i][0]]
        query = rows(sum(query_lens), HEADS, seed=seed + now)
        states = [torch.cat([part[i] for i in written]) if written else None for part in (keys, values)]
        out = layer(query, *states, metadata=step)
        want = expected(query, query_lens, [keys[i] for i in active], [values[i] for i in active])
        torch.testing.assert_close(out, want, **CLOSE)


# Compiled and exported


class Decoder(nn.Module):
    """One block: projections, cross attention, projection, and a quantised output if asked for."""

    def __init__(self, quantise=False, **options):
        super().__init__()
        self.attn = make_layer(bound=False, **options)
        self.q, self.o = nn.Linear(32, HEADS * SIZE), nn.Linear(HEADS * SIZE, 32)
        self.k, self.v = nn.Linear(32, KV_HEADS * SIZE), nn.Linear(32, KV_HEADS * SIZE)
        self.quantise = quantise

    def forward(self, x, states=None):
        key = value = None
        if states is not None:
            key, value = self.k(states), self.v(states)
        out = self.attn(self.q(x), key, value)
        if self.quantise:
            return (out / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn)
        return self.o(out)


def decoder_steps(builder):
    """Yield steps of several sizes with their inputs: first, mixed, later."""
    for lens, new in (
        ([5, 3], [1, 1]),
        ([1, 4, 1], [0, 1, 1]),
        ([1, 1], [0, 0]),
        ([2, 2, 3], [1, 0, 1]),
        ([1, 1, 1], [0, 0, 0]),
    ):
        encoder = [9, 20, 3][: len(lens)]
        step = builder.build(
            lens, lens, [[0]] * len(lens), slot_mapping=[-1] * sum(lens), encoder_lens=encoder,
            new_encoder=new, cross_block_tables=[[1, 2], [3, 4, 5], [6]][: len(lens)],
        )  # fmt: skip
        count = sum(n for n, run in zip(encoder, new, strict=True) if run)
        states = torch.randn(count, 32) if count else None
        yield step, (torch.randn(sum(lens), 32), *(() if states is None else (states,)))


def test_compiles_into_one_graph_for_first_and_one_for_later_steps(fresh_dynamo):
    model = Decoder().eval()
    bind(model)
    builder = make_builder(layers=model)
    compiled = vattn.compile(model, backend="eager")
    counters = torch._dynamo.utils.counters
    with torch.no_grad():
        for step, inputs in decoder_steps(builder):
            with vattn.forward_context(step):
                want = model(*inputs)
                torch.testing.assert_close(compiled(*inputs), want, **CLOSE)
    assert counters["stats"]["unique_graphs"] == 2


def test_exports_with_the_cache_and_the_encoder_side_as_inputs():
    model = Decoder().eval()
    bind(model)
    builder = make_builder(layers=model)
    step, inputs = next(decoder_steps(builder))
    with torch.no_grad():
        exported = vattn.export_step(model, inputs, step)
        for other, arguments in decoder_steps(make_builder(layers=model)):
            if other.cross_slot_mapping is None:
                continue
            with vattn.forward_context(other):
                want = model(*arguments)
            got = exported.program.module()(*exported.inputs(arguments, other))
            torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.long
@pytest.mark.skipif(parse_version(torch.__version__) < (2, 12), reason="loading the package crashes torch 2.11")
def test_aot_inductor_equals_eager(tmp_path):
    model = Decoder().eval()
    bind(model)
    step, inputs = next(decoder_steps(make_builder(layers=model)))
    with torch.no_grad(), torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        exported = vattn.export_step(model, inputs, step)
        run = exported.compile(str(tmp_path / "step.pt2"))
        for other, arguments in decoder_steps(make_builder(layers=model)):
            if other.cross_slot_mapping is not None:
                with vattn.forward_context(other):
                    want = model(*arguments)
                torch.testing.assert_close(run(*exported.inputs(arguments, other)), want, **CLOSE)


def test_output_quantisation_fuses_after_cross_attention(fresh_dynamo):
    clear_fusion_report()
    model = Decoder(quantise=True).eval()
    bind(model)
    step, inputs = next(decoder_steps(make_builder(layers=model)))
    with torch.no_grad(), vattn.forward_context(step):
        want = model(*inputs)
        compiled = torch.compile(model, backend=vattn.backend, fullgraph=True)
        got = compiled(*inputs)
    assert [node.outcome for node in vattn.fusion_report().nodes] == ["fused"]
    # Inductor's projections may round differently: codes one step apart, 1/8 of a value.
    assert ((got.float() - want.float()).abs() <= want.float().abs() / 8 + 1e-2).all()
