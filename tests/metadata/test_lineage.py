"""A builder writes every step into the same tensors: metadata of an older step is refused wherever it enters."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vattn
from tests.cache.test_hybrid_cache import Hybrid
from tests.layers import test_cross_attention as cross
from tests.layers import test_mla_layer as latent
from tests.layers.layer_support import BLOCK, HEADS, KV_HEADS, SIZE, make_builder, make_inputs, make_layer
from tests.metadata.flash_steps import Greedy, builder_for
from tests.support import make_config, unchanged
from vattn.compilation.export import ExportedStep
from vattn.errors import MetadataError, ShapeError, VattnError
from vattn.metadata.attention_metadata import AttentionMetadata

TABLES = [[3, 5, 6, 1], [2, 7, 4, 0]]
OLDER = r"got step \d+ of a builder, over which its step \d+ has been written"


def refused(where: str = "") -> Any:
    return pytest.raises(MetadataError, match=f"{where}.*{OLDER}")


def zeroed(layer: Any) -> Any:
    layer.kv_cache.zero_()
    return layer


def test_a_layer_refuses_an_older_step_and_changes_nothing() -> None:
    layer, builder = zeroed(make_layer(prefix="layers.0")), make_builder()
    older = builder.build([2, 3], [2, 3], TABLES)
    newest = builder.build([3, 2], [3, 2], TABLES)
    with torch.no_grad():
        with unchanged(layer), pytest.raises(MetadataError) as found:
            layer(*make_inputs(5), metadata=older)
        assert layer(*make_inputs(5), metadata=newest).any()
    text = str(found.value)
    assert text.startswith("layer 'layers.0' got step 1 of a builder, over which its step 2 has been written.")
    assert "run what build() or advance() returned last" in text and "a builder of their own" in text


def test_a_context_refuses_an_older_step_and_one_that_became_older_inside() -> None:
    layer, builder = zeroed(make_layer()), make_builder()
    older = builder.build([2, 3], [2, 3], TABLES)
    with torch.no_grad(), vattn.forward_context(older):
        layer(*make_inputs(5))
        newest = builder.build([3, 2], [3, 2], TABLES)
        with refused("layer"):
            layer(*make_inputs(5))
        with vattn.forward_context(newest):
            layer(*make_inputs(5))
        with refused("layer"):
            layer(*make_inputs(5))
    with refused(r"forward_context\(\)"), vattn.forward_context(older):
        pass
    assert vattn.metadata.forward_context.current_step() is None


def test_a_step_stays_the_newest_where_the_next_one_is_refused() -> None:
    layer, builder = zeroed(make_layer()), make_builder()
    step = builder.build([1, 1], [8, 5], TABLES)
    for wrong in (lambda: builder.build([1, 1], [99, 5], TABLES), lambda: builder.advance(step, [1, 2, 3])):
        with pytest.raises(MetadataError):
            wrong()
        with torch.no_grad():
            layer(*make_inputs(2), metadata=step)
    step = builder.advance(step, [6])
    with torch.no_grad():
        layer(*make_inputs(2), metadata=step)


def test_tensors_that_no_build_rewrites_last() -> None:
    """Copies of a step's tensors, those of other builders, and metadata made by hand."""
    layer, builder, other = zeroed(make_layer()), make_builder(), make_builder()
    step = builder.build([2, 3], [2, 3], TABLES)
    kept = copy.deepcopy(step)
    elsewhere = other.build([2, 3], [2, 3], TABLES)
    tensors = {name: tensor.clone() for name, tensor in step.tensors().items()}
    by_hand = AttentionMetadata(**tensors, num_reqs=2, num_actual_tokens=5)  # type: ignore[arg-type]
    inputs = make_inputs(5)
    with torch.no_grad():
        expected = layer(*inputs, metadata=step)
        builder.build([4, 1], [4, 1], TABLES[::-1])
        for lasting in (kept, elsewhere, by_hand):
            assert torch.equal(layer(*inputs, metadata=lasting), expected)
        for copied in (dataclasses.replace(step, num_reqs=2), copy.copy(step), copy.deepcopy(step)):
            with refused():
                layer(*inputs, metadata=copied)


def entrances() -> dict[str, Callable[[AttentionMetadata], object]]:
    """Return what takes metadata beside layers and contexts."""
    layer = zeroed(make_layer())
    cache = torch.zeros(2, 8, BLOCK, KV_HEADS, SIZE)
    config = make_config(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, head_size_v=SIZE, block_size=BLOCK, backend="TORCH_SDPA"
    )
    program = ExportedStep(None, layer)  # type: ignore[arg-type]
    trees = vattn.TreeAttentionMetadataBuilder(3, 24, 32, BLOCK, tree_choices=[(0,)])
    return {
        "paged_attention()": lambda step: vattn.paged_attention(torch.randn(5, HEADS, SIZE), cache, step, config),
        "kept_rows()": lambda step: vattn.kept_rows(torch.randn(5, 3), step),
        "fast_prefill()": lambda step: vattn.fast_prefill(step, torch.tensor([1, 4])),
        "build_for_drafting()": lambda step: trees.build_for_drafting(step, 0),
        "check()": lambda step: step.check(BLOCK),
        "inputs() of an exported step": lambda step: program.inputs((), step),
    }


def test_every_entrance_refuses_an_older_step() -> None:
    for name, enter in entrances().items():
        builder = make_builder()
        step = builder.build([2, 3], [2, 3], TABLES)
        enter(step)
        builder.build([3, 2], [3, 2], TABLES)
        with refused(re.escape(name)):
            enter(step)


def layer_kinds() -> dict[str, tuple[Any, Callable[[int], Any], tuple[Tensor, ...] | list[Tensor]]]:
    """Return a layer, what builds a step of it for a number of cached tokens, and inputs of one token a request."""
    decoder, builder = zeroed(make_layer()), make_builder()
    lambdas: dict[str, Any] = {f"lambda_{name}": torch.full((SIZE,), 0.1) for name in ("q1", "k1", "q2", "k2")}
    differential = zeroed(make_layer(kind=vattn.DifferentialAttention, **lambdas, lambda_init=0.3))
    encoder = vattn.EncoderOnlyAttention(HEADS, SIZE, 0.25, KV_HEADS)
    mla = latent.make_layer()
    mla_builder, cross_layer, cross_builder = latent.make_builder(mla), cross.make_layer(), cross.make_builder()
    zeroed(cross_layer)

    def decode(cached: int) -> AttentionMetadata:
        return builder.build([1, 1], [cached, cached + 9], TABLES)

    def cross_step(cached: int) -> AttentionMetadata:
        return cross_builder.build(
            [1, 1],
            [cached, cached + 1],
            [[1, 2, 3, 4], [5, 8, 9, 10]],
            encoder_lens=[5, 3],
            cross_block_tables=[[6], [7]],
        )

    two = make_inputs(2)
    return {
        "Attention": (decoder, decode, two),
        "DifferentialAttention": (differential, decode, two),
        "EncoderOnlyAttention": (encoder, lambda cached: builder.build([1, 1]), two),
        "MLAAttention": (
            mla,
            lambda cached: mla_builder.build([1, 1], [cached, cached + 9], latent.TABLES[:2]),
            latent.inputs(2),
        ),
        "CrossAttention": (cross_layer, cross_step, (cross.rows(2, cross.HEADS), None, None)),
    }


@pytest.mark.parametrize(
    "kind", ["Attention", "DifferentialAttention", "EncoderOnlyAttention", "MLAAttention", "CrossAttention"]
)
def test_compiled_layers_refuse_older_steps_and_compile_once(kind: str, fresh_dynamo: None) -> None:
    """Ten steps of other numbers make one graph; an older one is refused with our own error, and breaks nothing."""
    layer, build, inputs = layer_kinds()[kind]
    run = vattn.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        for cached in range(2, 12):
            step = build(cached)
            with vattn.forward_context(step):
                run(*inputs)
        older, newest = step, build(9)
        expected = layer(*inputs, metadata=newest)
        with vattn.forward_context(newest):
            step = build(9)
            with refused():
                run(*inputs)
        with refused():
            layer(*inputs, metadata=older)
        with vattn.forward_context(step):
            assert torch.equal(run(*inputs), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_compiled_functions_refuse_older_steps_that_are_arguments(fresh_dynamo: None) -> None:
    """No context is entered, so that compiled code alone can tell; `torch.compile` hides our error in its own."""
    layer, builder = zeroed(make_layer()), make_builder()
    for compiled, error in (
        (vattn.compile(layer, backend="eager"), MetadataError),
        (torch.compile(layer, fullgraph=True, backend="eager"), torch._dynamo.exc.Unsupported),
    ):
        with torch.no_grad():
            step = builder.build([1, 1], [4, 9], TABLES)
            for count in range(9):
                compiled(*make_inputs(2), metadata=step)
                older, step = step, builder.build([1, 1], [4 + count, 9], TABLES)
            with pytest.raises(error) as found:
                compiled(*make_inputs(2), metadata=older)
            assert error is MetadataError or type(vattn.compilation.compile.own_error(found.value)) is MetadataError
            compiled(*make_inputs(2), metadata=step)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Replays:
    """What stands in for a captured graph: it runs what was captured, with the step that was captured."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run, self.count = run, 0

    def replay(self) -> None:
        self.count += 1
        self.run()


def test_a_runner_replays_the_newest_step_alone() -> None:
    """What was captured has an older step, whose tensors hold the newest one on purpose: nothing is checked there."""
    layer = zeroed(make_layer())
    builder = make_builder()

    def inputs(step: AttentionMetadata) -> list[Tensor]:
        return [torch.zeros(step.slot_mapping.shape[0], heads * SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    runner = vattn.CUDAGraphRunner(layer, [2], builder, inputs)
    (entry,) = runner._entries.values()
    entry.output = torch.zeros(2, HEADS * SIZE)
    entry.graph = graph = Replays(lambda: entry.output.add_(1))  # type: ignore[assignment]
    older = runner.build([1, 1], [3, 4], TABLES)
    for length in range(4, 9):
        step = runner.build([1, 1], [length, 3], TABLES)
        assert runner(*make_inputs(2), metadata=step).shape == (2, HEADS * SIZE)
        with refused("CUDAGraphRunner"):
            runner(*make_inputs(2), metadata=older)
    assert graph.count == 5


def test_parts_of_groups_are_steps_too() -> None:
    hybrid = Hybrid()
    requests = [hybrid.request() for _ in range(2)]
    hybrid.compare(requests, [5, 3])
    ends = [plain.num_tokens for _, plain in requests]
    rows = [[table.rows[index] for table, _ in requests] for index in range(len(hybrid.cache.groups))]
    older = hybrid.builder.build([1, 1], ends, rows)
    x = torch.randn(2, 64)
    with torch.no_grad(), vattn.forward_context(older):
        hybrid.model(x)
        newest = hybrid.builder.build([1, 1], ends, rows)
        with refused("layer "):
            hybrid.model(x)
        layer = hybrid.model.layers[1]
        with refused("layer "):
            layer(x, x[:, :32], x[:, 32:], metadata=older)
        layer(x, x[:, :32].contiguous(), x[:, 32:].contiguous(), metadata=newest)
    with refused(), vattn.forward_context(older.parts[-1]):
        pass


def test_steps_that_the_device_moves_on() -> None:
    """`advance_step` keeps its object; halves and copies from before, and steps built before, are older."""
    model = Greedy("TORCH_SDPA", torch.float32, "cpu")
    builder = builder_for(model)
    first = builder.build([1, 1], [5, 9], [[9, 3], [22, 8]])
    step = builder.build([1, 1], [5, 9], [[9, 3], [22, 8]], num_lookahead_slots=3)
    tokens = torch.zeros(2, dtype=torch.int64)
    inputs = vattn.DecodeInput(tokens.clone(), torch.zeros(2, dtype=torch.int64))

    def run(metadata: AttentionMetadata) -> None:
        with torch.no_grad(), vattn.forward_context(metadata):
            model(tokens, metadata.positions)

    run(step.common)
    with refused(r"advance_step\(\)"):
        first.advance_step(inputs, tokens, 16, 2, 2)
    for _ in range(2):
        half, copied = step.decode_metadata, dataclasses.replace(step.common)
        assert half is not None
        run(half.common)
        step.advance_step(inputs, tokens, 16, 2, 2)
        run(step.common)
        assert step.decode_metadata is not None
        run(step.decode_metadata.common)
        for older in (first.common, half.common, copied):
            with refused():
                run(older)
    fresh, copied = step.decode_metadata, dataclasses.replace(step)
    step.advance_step(inputs, tokens, 16, 2, 2)
    with refused(r"advance_step\(\)"):  # a copy shares the tensors, not the numbers on the host
        copied.advance_step(inputs, tokens, 16, 2, 2)
    assert step.seq_lens_tensor.tolist() == [8, 12] == step.seq_lens
    newest = builder.build([1, 1], [5, 9], [[9, 3], [22, 8]])
    # Also where nobody has asked a half, or a copy, for what layers take.
    for stale in (step, fresh, copied):
        with refused(r"advance_step\(\)"):
            stale.advance_step(inputs, tokens, 16, 2, 2)
        with refused(r"sequence_offsets\(\)"):
            stale.sequence_offsets("decoder")
        with refused():
            run(stale.common)
    assert newest.seq_lens_tensor.tolist() == [5, 9]
    run(newest.common)


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["build", "advance", "refused", "copy"]), max_size=12), st.randoms())
def test_any_program_runs_the_newest_step_of_each_builder_alone(program: list[str], random: Random) -> None:
    """The model: an object may run if nothing was written behind it, or if it is a copy of one that may."""
    layer, builders = zeroed(make_layer()), [make_builder(), make_builder()]
    steps: list[tuple[AttentionMetadata, int]] = []
    newest: dict[int, list[AttentionMetadata]] = {0: [], 1: []}
    lengths = {0: 0, 1: 0}
    for action in program:
        which = random.randrange(2)
        own = newest[which]
        if action == "advance" and own and lengths[which] % BLOCK:
            lengths[which] += 1
            newest[which] = [builders[which].advance(own[0], [])]
        elif action == "refused":
            with pytest.raises(MetadataError):
                builders[which].build([1, 1], [99, 1], TABLES)
            continue
        elif action == "copy" and own:
            own.append(dataclasses.replace(random.choice(own)))
        else:
            lengths[which] = random.randint(1, 3 * BLOCK)
            newest[which] = [builders[which].build([1], [lengths[which]], TABLES[which:][:1])]
        steps += [(step, which) for step in newest[which] if all(step is not known for known, _ in steps)]
    for step, which in steps:
        with torch.no_grad():
            if any(step is each for each in newest[which]):
                layer(*make_inputs(step.slot_mapping.shape[0]), metadata=step)
            else:
                with refused():
                    layer(*make_inputs(step.slot_mapping.shape[0]), metadata=step)


def wrong_calls() -> dict[str, tuple[type[VattnError], Callable[[], object]]]:
    """Return calls that take a step, with something else."""
    layer, builder = zeroed(make_layer()), make_builder()
    step, rows = builder.build([2, 3], [2, 3], TABLES), torch.randn(5, 3)

    def inputs(step: AttentionMetadata) -> list[Tensor]:
        return [torch.zeros(step.slot_mapping.shape[0], heads * SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    runner = vattn.CUDAGraphRunner(layer, [2], make_builder(layers=layer), inputs)
    return {
        "a block size that is a text": (MetadataError, lambda: step.check("16")),  # type: ignore[arg-type]
        "a block size of none": (MetadataError, lambda: step.check(0)),
        "blocks that are a text": (MetadataError, lambda: step.check(BLOCK, "8")),  # type: ignore[arg-type]
        "a builder's check of nothing": (MetadataError, lambda: builder.check(None)),  # type: ignore[arg-type]
        "rows of a builder": (MetadataError, lambda: vattn.kept_rows(rows, builder)),  # type: ignore[arg-type]
        "rows that are a list": (ShapeError, lambda: vattn.kept_rows([1.0], step)),  # type: ignore[arg-type]
        "rows that are a number": (ShapeError, lambda: vattn.kept_rows(torch.tensor(1.0), step)),
        "a replay of nothing": (MetadataError, lambda: runner(*inputs(step), metadata=None)),  # type: ignore[arg-type]
        "a step of nothing": (MetadataError, lambda: runner.build(None, [1], [[1]])),  # type: ignore[arg-type]
    }


def test_what_is_no_step_is_refused() -> None:
    for name, (error, call) in wrong_calls().items():
        try:
            call()
        except error:
            continue
        raise AssertionError(f"{name} is not refused")


def test_a_layer_with_fewer_blocks_than_the_builder_is_for_is_refused() -> None:
    """Kernels see no keys behind the end of a cache: the layer gave zeros without a word."""
    large, small = make_layer(), make_layer(prefix="layers.7")
    vattn.allocate_kv_cache(large, num_blocks=16, dtype=torch.float32)
    vattn.allocate_kv_cache(small, num_blocks=2, dtype=torch.float32)
    small.kv_cache.zero_()
    builder, inputs = make_builder(layers=large), make_inputs(9)
    step = builder.build([9], [9], [[5, 6]])
    with torch.no_grad():
        with pytest.raises(MetadataError) as found:
            small(*inputs, metadata=step)
        with vattn.forward_context(step), pytest.raises(MetadataError, match=r"'layers\.7' with a cache of 2"):
            small(*inputs)
        assert not small.kv_cache.any()
        assert large(*inputs, metadata=step).any()
        # Where nobody said how many there are, and where the builder is for as many or fewer.
        for fits in (make_builder(), make_builder(num_blocks=2), make_builder(layers=small)):
            assert small(*inputs, metadata=fits.build([9], [9], [[1, 0]])).any()
    text = str(found.value)
    assert text.startswith("metadata of a builder for 16 blocks in layer 'layers.7' with a cache of 2.")
    assert "at most 2 blocks" in text and "layers=model" in text


def test_a_latent_layer_with_fewer_blocks_than_the_builder_is_for_is_refused() -> None:
    layer = latent.make_layer()
    own = layer.kv_cache.shape[0]
    builder = make_builder(block_size=layer.cache_config.block_size, num_blocks=own + 1)
    with torch.no_grad(), pytest.raises(MetadataError, match=f"a builder for {own + 1} blocks in layer"):
        layer(*latent.inputs(2), metadata=builder.build([2], [2], [[1]]))
