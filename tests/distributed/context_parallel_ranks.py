"""What runs on every rank of `test_context_parallel`: cases by name, each of which raises where it fails."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import vattn
from tests.support import poisoned_empty, relative_l2, unchanged, with_cache
from vattn.backends.mla.registry import mla_backends
from vattn.distributed import ContextParallel
from vattn.distributed.combine import combine, combine_parts, gather_heads
from vattn.errors import ConfigError, MetadataError, RankError, UnknownOptionError, VattnError
from vattn.quantization.codecs import quantise_output
from vattn.quantization.formats import OUTPUT_FORMATS

HEADS, KV_HEADS, SIZE = 8, 2, 16
STEPS = (([5, 1, 19], [5, 1, 19]), ([1, 1, 1], [6, 2, 20]), ([3, 1, 7], [9, 3, 27]), ([1, 2], [10, 5]))
"""Prefill (with a rank or more that has no key of request 1), decode, several tokens, and fewer requests."""
BLOCKS = [[1, 5, 7, 2], [3, 4, 6, 8], [9, 10, 11, 12]]

PATIENT = 300
"""Seconds that ranks wait where one may compile longer than the other."""

CASES: dict[str, Callable[[int, int], None]] = {}
SLOW_CASES: dict[str, Callable[[int, int], None]] = {}
"""Cases that compile by Inductor."""


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


def compare(got: Tensor, expected: Tensor, most: float) -> None:
    error = relative_l2(got.float(), expected.float())
    assert error <= most, f"relative error {error} above {most}"


@contextmanager
def refused(pattern: str, kind: type[VattnError] = RankError) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert pattern in str(error), f"{error} does not say {pattern!r}"
    else:
        raise AssertionError(f"no {kind.__name__} with {pattern!r}")


@contextmanager
def counting_collectives() -> Iterator[Counter[str]]:
    """Count the collectives of layers inside the block."""
    found: Counter[str] = Counter()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "_c10d_functional":
                found[func._opname] += 1
            return func(*args, **(kwargs or {}))

    with Mode():
        yield found


class Pair:
    """One layer over all ranks, and the same layer alone with a cache of all tokens."""

    def __init__(self, parallel: ContextParallel, make: Callable[..., nn.Module], dtype: torch.dtype) -> None:
        self.layers = make(context_parallel=parallel), make()
        self.parallel, self.dtype = parallel, dtype
        self.builders = []
        for layer, more in zip(self.layers, ({"context_parallel": parallel}, {}), strict=True):
            vattn.allocate_kv_cache(layer, num_blocks=13, dtype=dtype)
            # What was never written must not be read.
            layer.kv_cache.view(torch.uint8).fill_(0xFF)
            self.builders.append(vattn.AttentionMetadataBuilder(4, 64, 64, layers=layer, **more))


class Twin(Pair):
    def __init__(self, parallel: ContextParallel, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        make = functools.partial(vattn.Attention, HEADS, SIZE, SIZE**-0.5, KV_HEADS, **options)
        super().__init__(parallel, make, dtype)

    def inputs(self, tokens: int, seed: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        return [torch.randn(tokens, heads, SIZE, generator=rng).to(self.dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def step(
        self, call: Callable[..., Any], queries: list[int], lengths: list[int], seed: int, padding: int | None = 1
    ) -> tuple[Any, Tensor]:
        """Return what this rank gets by `call`, and what its heads should be; `None`: ranks may gather keys."""
        query, key, value = self.inputs(sum(queries) + (padding or 0), seed)
        tokens = None if padding is None else sum(queries) + padding
        metadata = [
            builder.build(queries, lengths, BLOCKS[: len(queries)], num_tokens_padded=tokens)
            for builder in self.builders
        ]
        mine = self.own(query)
        with torch.no_grad():
            got = call(mine, key, value, metadata=metadata[0])
            whole = self.layers[1](query, key, value, metadata=metadata[1])
        return got, self.own(whole.unflatten(1, (HEADS, SIZE)))

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.parallel.world_size, 1)[self.parallel.rank].contiguous()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 again": {"dtype": torch.bfloat16},
    "window-alibi": {"per_layer_sliding_window": 6, "alibi_slopes": [0.1 * head for head in range(HEADS)]},
    "sinks-cap": {"sinks": [0.5 * head - 1 for head in range(HEADS)], "logits_soft_cap": 3.0},
    "fp8": {
        "cache_config": vattn.CacheConfig(cache_dtype="fp8"),
        "quant_config": vattn.QuantConfig(
            k_scale=[0.1, 0.2], v_scale=[0.1, 0.2], query_format="fp8_e4m3", q_scale=[0.02, 0.03]
        ),
    },
}


@case
def attention_equals_one_rank(rank: int, world: int) -> None:
    """Partial results in bf16 are rounded once more: half a step of bf16 each, which the weights average."""
    for index, (name, options) in enumerate(OPTIONS.items()):
        parallel = ContextParallel.of(
            interleave=(1, 2, 2, 3, 16, 2)[index], combine=("reduce_scatter", "all_to_all")[index % 2]
        )
        twin = Twin(parallel, **options)
        for seed, (queries, lengths) in enumerate(STEPS):
            got, expected = twin.step(twin.layers[0], queries, lengths, seed)
            compare(got.view_as(expected), expected, 2**-8 if twin.dtype == torch.bfloat16 else 1e-5)
            assert not got[-1].any(), f"{name}: the row of padding is not zero"
            gathers = max(queries) > 1 and twin.parallel.world_size > 1
            with counting_collectives() as count:
                got, expected = twin.step(twin.layers[0], queries, lengths, seed, padding=None)
            assert count["all_to_all_single"] == 2 * gathers or not gathers, (name, queries, count)
            compare(got.view_as(expected), expected, 2**-8 if twin.dtype == torch.bfloat16 and not gathers else 1e-5)


@case
def outputs_are_quantised_after_the_combine(rank: int, world: int) -> None:
    """Codes are those of the one-rank layer's rounded result, but for values whose rounding the combine moved."""
    for name in ("fp8_static", "fp8_per_token", "fp8_group64", "nvfp4"):
        fmt = OUTPUT_FORMATS[name]
        if HEADS // world * SIZE % max(fmt.group_size, 1):
            continue
        scale = 0.01 if fmt.static_scale else None
        quant = vattn.QuantConfig(output_format=name, output_scale=scale)
        parallel = ContextParallel.of(combine="all_to_all")
        twin, plain = Twin(parallel, quant_config=quant), Twin(parallel)
        for seed, (queries, lengths) in enumerate(STEPS):
            plain_out, _ = plain.step(plain.layers[0], queries, lengths, seed)
            # The twin's own one-rank layer quantises all heads: only rows of one head's format compare.
            query, key, value = twin.inputs(sum(queries) + 1, seed)
            step = twin.builders[0].build(queries, lengths, BLOCKS[: len(queries)], num_tokens_padded=sum(queries) + 1)
            with torch.no_grad():
                got = twin.layers[0](twin.own(query), key, value, metadata=step)
            rounded = plain_out.unflatten(1, (HEADS // world, SIZE))
            output, block_scale = fmt.allocate(rounded, SIZE, torch.float32)
            quantise_output(rounded, fmt, output, block_scale, None if scale is None else torch.tensor([scale]))
            codes, scales = got if isinstance(got, tuple) else (got, None)
            assert torch.equal(codes.view(torch.uint8), output.flatten(1).view(torch.uint8)), name
            assert scales is None or torch.equal(scales.view(torch.uint8), block_scale.view(torch.uint8)), name


@case
def combine_is_its_reference(rank: int, world: int) -> None:
    """All-to-all bit for bit; sums of a reduce-scatter too for two ranks, else in any order: a few steps of fp32."""
    rng = torch.Generator().manual_seed(3)
    for dtype, sinks in ((torch.float32, None), (torch.bfloat16, torch.linspace(-2, 2, HEADS))):
        outputs = torch.randn(world, 7, HEADS, 5, generator=rng).to(dtype)
        lses = 30 * torch.randn(world, 7, HEADS, generator=rng)
        lses[rank % world if world == 1 else 1, 2] = -torch.inf
        lses[:, 3] = -torch.inf
        outputs[lses == -torch.inf] = torch.nan
        own = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
        parts = [outputs[r][:, own] for r in range(world)]
        expected, expected_lse = combine_parts(parts, lses[:, :, own], None if sinks is None else sinks[own])
        for name in ("all_to_all", "reduce_scatter"):
            parallel = ContextParallel.of(combine=name, check=False)
            got, lse = combine(outputs[rank], lses[rank], parallel, sinks)
            assert torch.equal(lse, expected_lse), name
            if name == "all_to_all" or world == 2:
                assert torch.equal(got, expected), f"{name}: {(got - expected).abs().max()}"
            else:
                assert torch.allclose(got, expected, rtol=4 * 2**-23, atol=4 * 2**-23 * float(expected.abs().max()))
            assert not got[3].any() and not got.isnan().any()


@case
def heads_are_gathered_in_order(rank: int, world: int) -> None:
    parallel = ContextParallel.of(check=False)
    whole = torch.arange(3 * HEADS * 2.0).view(3, HEADS, 2)
    assert torch.equal(gather_heads(whole.chunk(world, 1)[rank], parallel), whole)
    assert gather_heads(whole[:0, : HEADS // world], parallel).shape == (0, HEADS, 2)


class LatentTwin(Pair):
    sizes = (12, 6, 10, None, 20)

    def __init__(self, parallel: ContextParallel, **options: Any) -> None:
        torch.manual_seed(1)
        nope, rope, value, _, latent = self.sizes
        projection = nn.Linear(latent, HEADS * (nope + value), bias=False)

        scale = (nope + rope) ** -0.5
        make = functools.partial(vattn.MLAAttention, HEADS, scale, *self.sizes, projection, **options)
        super().__init__(parallel, make, torch.float32)

    def step(self, call: Callable[..., Any], queries: list[int], lengths: list[int], seed: int) -> tuple[Any, Tensor]:
        nope, rope, value, _, latent = self.sizes
        rng, tokens = torch.Generator().manual_seed(seed), sum(queries)
        query = torch.randn(tokens, HEADS, nope + rope, generator=rng)
        new = torch.randn(tokens, latent, generator=rng), torch.randn(tokens, 1, rope, generator=rng)
        steps = [builder.build(queries, lengths, BLOCKS[: len(queries)]) for builder in self.builders]
        world, rank = self.parallel.world_size, self.parallel.rank
        with torch.no_grad():
            got = call(query.chunk(world, 1)[rank], *new, metadata=steps[0])
            whole = self.layers[1](query, *new, metadata=steps[1])
        return got, whole.unflatten(1, (HEADS, value)).chunk(world, 1)[rank].flatten(1)


@case
def latent_attention_equals_one_rank(rank: int, world: int) -> None:
    for interleave, name in ((1, "all_to_all"), (5, "reduce_scatter")):
        fp8 = {"cache_config": vattn.CacheConfig(cache_dtype="fp8"), "quant_config": vattn.QuantConfig(k_scale=0.05)}
        for options in ({}, fp8):
            twin = LatentTwin(ContextParallel.of(interleave=interleave, combine=name), **options)
            for seed, (queries, lengths) in enumerate(STEPS):
                got, expected = twin.step(twin.layers[0], queries, lengths, seed)
                compare(got, expected, 1e-5)


@case
def latent_prompts_run_on_own_heads(rank: int, world: int) -> None:
    """Each rank attends a prompt with its own heads; not padded steps, and not few rows of long contexts."""
    twin, seen = LatentTwin(ContextParallel.of(interleave=3)), []
    layer, builder = twin.layers[0], twin.builders[0]
    backend = mla_backends()[layer.config.backend]
    attend = backend.mla_attention

    def watch(args: Any, config: Any) -> None:
        seen.append((config.num_heads, config.context_parallel))
        attend(args, config)

    backend.mla_attention = watch
    try:
        for queries, lengths in (([30, 9], [30, 9]), ([1, 1], [31, 10])):
            compare(*twin.step(layer, queries, lengths, 0), 1e-5)
    finally:
        del backend.mla_attention
    # Every second call is of the layer that has no ranks.
    assert seen[::2] == ([(HEADS // world, False), (HEADS, True)] if world > 1 else [(HEADS, True)] * 2)
    for queries, lengths, options, gathers in (
        ([3, 2], [50, 9], {}, True),
        ([3, 2], [50, 9], {"num_tokens_padded": 8}, False),
        ([2, 0, 0], [64, 64, 64], {}, False),
    ):
        step = builder.build(queries, lengths, BLOCKS[: len(queries)], **options)
        assert (step.whole_blocks is not None) == (gathers and world > 1)


class OfOneRank(nn.Module):
    """A projection of one rank's heads as engines have it: rows of its own, and a tuple for a result."""

    def __init__(self, whole: nn.Linear, parallel: ContextParallel, tuples: bool) -> None:
        super().__init__()
        own = whole.weight.detach().chunk(parallel.world_size, 0)[parallel.rank].clone()
        if tuples:
            self.register_buffer("values", own)
        else:
            self.weight = nn.Parameter(own, requires_grad=False)

    def forward(self, latent: Tensor) -> tuple[Tensor, None]:
        return latent @ self.values.t(), None


@case
def projections_of_own_heads_are_gathered(rank: int, world: int) -> None:
    for tuples in (False, True):
        parallel = ContextParallel.of(interleave=3, timeout=PATIENT)
        whole = LatentTwin(parallel)
        projection = whole.layers[1]._kv_b_proj[0]
        part = OfOneRank(projection, parallel, tuples)
        scale, sizes = whole.layers[1].scale, LatentTwin.sizes
        layer = with_cache(vattn.MLAAttention(HEADS, scale, *sizes, part, context_parallel=parallel), 13)
        compare(layer.kv_b_weight, whole.layers[1].kv_b_weight, 1e-6)
        layer.kv_cache.view(torch.uint8).fill_(0xFF)
        whole.layers = layer, whole.layers[1]
        for seed, (queries, lengths) in enumerate(STEPS):
            compare(*whole.step(layer, queries, lengths, seed), 1e-5)
        if not tuples:
            kept = layer.kv_b_weight
            part.weight.mul_(2)
            layer.process_weights_after_loading()
            assert layer.kv_b_weight is kept
            compare(kept, 2 * whole.layers[1].kv_b_weight, 1e-6)
        if not tuples:
            split = nn.Linear(*projection.weight.t().shape, bias=False)
            split.load_state_dict(projection.state_dict())
            parallelize_module(split, init_device_mesh("cpu", (world,)), ColwiseParallel())
            other = with_cache(vattn.MLAAttention(HEADS, scale, *sizes, split, context_parallel=parallel), 13)
            compare(other.kv_b_weight, whole.layers[1].kv_b_weight, 1e-6)
        mixed = vattn.MLAAttention(HEADS, scale, *sizes, projection if rank == 1 else part, context_parallel=parallel)
        with refused("rows of kv_b_proj of rank 1"):
            vattn.allocate_kv_cache(mixed, num_blocks=13, dtype=torch.float32)


@case
def compiled_layers_are_one_graph(rank: int, world: int) -> None:
    """Fullgraph, and other lengths and other numbers of tokens do not recompile."""
    of_sums, of_parts = (ContextParallel.of(combine=name, timeout=PATIENT) for name in ("reduce_scatter", "all_to_all"))
    sinks = [0.1] * HEADS
    for twin, backend, options in (
        (Twin(of_sums, sinks=sinks), "aot_eager", {}),
        (Twin(of_sums, sinks=sinks), "aot_eager", {"padding": None}),
        (LatentTwin(of_parts), "eager", {}),
    ):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(twin.layers[0], fullgraph=True, backend=backend)
        graphs = []
        for seed, (queries, lengths) in enumerate(STEPS):
            got, expected = twin.step(compiled, queries, lengths, seed, **options)
            compare(got.view_as(expected), expected, 1e-5)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        # Prompts of which keys are gathered are a graph of their own.
        most = 2 + (isinstance(twin, LatentTwin) or bool(options))
        assert graphs[0] == 1 and graphs[-1] == graphs[-2] <= most, f"graphs after each step: {graphs}"


def inductor_quantises_behind_the_combine(rank: int, world: int) -> None:
    """With the passes on: codes equal eager's, and the report says that nothing was fused into a rank's part."""
    twin, scale = Twin(ContextParallel.of(combine="all_to_all", timeout=PATIENT)), torch.tensor([0.01])

    def quantised(*qkv: Tensor, metadata: Any) -> Tensor:
        return (twin.layers[0](*qkv, metadata=metadata) / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    with vattn.enable():
        compiled = torch.compile(quantised, fullgraph=True)
        for seed, (queries, lengths) in enumerate(STEPS):
            expected, _ = twin.step(quantised, queries, lengths, seed)
            got, _ = twin.step(compiled, queries, lengths, seed)
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert "0 fused" in str(vattn.fusion_report())


SLOW_CASES["inductor_quantises_behind_the_combine"] = inductor_quantises_behind_the_combine


@case
def ranks_that_disagree_are_told(rank: int, world: int) -> None:
    parallel = ContextParallel.of(timeout=PATIENT)
    builder = vattn.AttentionMetadataBuilder(4, 64, 64, context_parallel=parallel)
    with unchanged(builder.build([2], [5], [[1]])):
        with refused("seq_lens of rank 1"):
            builder.build([2], [5 + (rank == 1)], [[1]])
        with refused("query_lens of rank 1"):
            builder.build([2 + (rank == 1)], [5], [[1]])
        with refused("block_tables of rank 1"):
            builder.build([2], [5], [[1 + (rank == 1)]])
        with refused("padded sizes of rank 1"):
            builder.build([2], [5], [[1]], num_tokens_padded=4 + (rank == 1))
        with refused("masks of rank 1"):
            builder.build([2], [5], [[1]], causal=rank != 1)
    with refused("interleave=2 on rank 1, interleave=1 on rank 0"):
        ContextParallel.of(interleave=1 + (rank == 1))
    with refused("check=False on rank 1"):
        ContextParallel.of(check=rank != 1)
    with refused("check='no'", ConfigError):
        ContextParallel.of(check="no")  # type: ignore[arg-type]
    with refused("capacity of the builder of rank 1"):
        vattn.AttentionMetadataBuilder(4, 64, 64 + (rank == 1), context_parallel=parallel)
    layer = with_cache(vattn.Attention(HEADS, SIZE, 0.25 + (rank == 1), KV_HEADS, context_parallel=parallel), 4)
    with refused("layers of rank 1"):
        vattn.AttentionMetadataBuilder(4, 64, 64, layers=layer, context_parallel=parallel)
    with refused("what is compared of rank 1"):
        if rank == 1:
            parallel.agree({"something else": 1})
        else:
            builder.build([2], [5], [[1]])


@case
def what_one_rank_refuses_the_others_are_told(rank: int, world: int) -> None:
    """At once, and all go on with the next step; a rank keeps its own error."""
    begin = time.monotonic()
    if rank == 1:
        with refused("combine='sum'", UnknownOptionError):
            ContextParallel.of(combine="sum")
    else:
        with refused("rank 1 refused its arguments"):
            ContextParallel.of()
    parallel = ContextParallel.of(timeout=PATIENT)
    builder = vattn.AttentionMetadataBuilder(4, 64, 64, context_parallel=parallel)
    for _ in range(2):
        if rank == 1:
            with refused("request 0: seq_len 40 over 2 ranks needs 2 blocks", MetadataError):
                builder.build([2], [40], [[1]])
        else:
            with refused("rank 1 refused what rank 0 accepts"):
                builder.build([2], [40], [[1, 2]])
        assert builder.build([2], [5], [[1]]).num_actual_tokens == 2
    with refused("seq_len 40 over", MetadataError):
        builder.build([2], [40], [[1]])
    other = vattn.Attention(HEADS, SIZE, 0.25, KV_HEADS, context_parallel=parallel if rank != 1 else None)
    vattn.allocate_kv_cache(other, num_blocks=4, dtype=torch.float32)
    with refused("the builder with" if rank == 1 else "rank 1 refused", VattnError):
        vattn.AttentionMetadataBuilder(4, 64, 64, layers=other, context_parallel=parallel)
    assert time.monotonic() - begin < PATIENT / 2


@case
def a_missed_of_keeps_no_later_one_from_meeting(rank: int, world: int) -> None:
    """A late rank does not read what was said when it was missed, and the next call of all ranks meets."""
    # By files a wait lasts whole seconds.
    if rank != 1:
        with refused(
            "got no answer of all others about interleave, combine, check within 0.2 s: rank 1 did not answer"
        ):
            ContextParallel.of(interleave=4, timeout=0.2)
    dist.barrier()
    if rank == 1:
        with refused("got no answer of all others"):
            ContextParallel.of(timeout=0.2)
    dist.barrier()
    for parallel in [ContextParallel.of(timeout=PATIENT) for _ in range(2)]:
        parallel.agree({"after a missed one": 1})


@case
def a_group_of_checks_that_one_rank_cannot_make_is_told(rank: int, world: int) -> None:
    """All ranks raise, whether torch counts the group on that rank or not, and their next call makes one."""
    make = dist.new_group

    def broken(ranks: list[int], **options: Any) -> Any:
        if len(ranks) > 1:
            make(ranks, **options)
            raise RuntimeError("no route to host")
        return make(ranks, **options)

    def absent(ranks: list[int], **options: Any) -> Any:
        if len(ranks) > 1:
            raise RuntimeError("no route to host")
        return make(ranks, **options)

    for function, seconds in ((broken, PATIENT), (absent, 1)):
        dist.new_group = function if rank == 1 else make
        try:
            with refused("no route to host" if rank == 1 else "could not make the group in which ranks compare"):
                ContextParallel.of(timeout=seconds)
        finally:
            dist.new_group = make
        ContextParallel.of(timeout=PATIENT).agree({"after a broken one": 1})


@case
def a_lost_connection_is_no_timeout(rank: int, world: int) -> None:
    parallel, gather = ContextParallel.of(timeout=PATIENT), dist.all_gather

    def closed(*tensors: object, group: object) -> None:
        raise RuntimeError("Connection closed by peer")

    dist.all_gather = closed
    try:
        with refused(f"rank {rank} of {world} lost another rank 0.0 s into the check of a fact"):
            parallel.agree({"a fact": 1})
    finally:
        dist.all_gather = gather


@case
def a_rank_that_does_not_come_is_told(rank: int, world: int) -> None:
    parallel = ContextParallel.of(timeout=1)
    builder = vattn.AttentionMetadataBuilder(4, 64, 64, context_parallel=parallel)
    if rank != 1:
        with refused("got no answer of all others"):
            builder.build([2], [5], [[1]])
        with refused("another rank did not answer about number of steps"):
            builder.build([2], [5], [[1]])
    dist.barrier()
    # The group of the layers is as it was.
    assert gather_heads(poisoned_empty((2, 1, 4), torch.float32), parallel).shape == (2, world, 4)
    again = ContextParallel.of(timeout=PATIENT)
    assert again == dataclasses.replace(parallel, timeout=PATIENT)
    builder = vattn.AttentionMetadataBuilder(4, 64, 64, context_parallel=again)
    assert builder.build([2], [5], [[1]]).num_actual_tokens == 2
