"""How many graphs Dynamo makes, counted with a backend that runs them as they are, so that results must be equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.compile.toy_models import Model, caches, fill_caches, make_builder, make_model, make_step
from vattn.errors import CacheNotBoundError, ConfigError

STEPS = [[1], [2], [7], [64], [300], [1, 1], [1] * 3, [1] * 9, [3, 4], [100] * 3]


class CountingBackend:
    """Counts the graphs it is given and runs each as it is."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


def compiled(model: Model, how: str, backend: CountingBackend) -> Callable[..., Tensor]:
    """Compile a model without marking anything."""
    if how == "whole":
        return vattn.compile(model, backend=backend)
    if how == "function":
        return vattn.compile(lambda ids, metadata=None: model(ids, metadata), backend=backend)
    assert vattn.compile_regions(model, backend=backend) == len(model.layers)
    return model


def run_both(
    compiled_model: Callable[..., Tensor],
    model: Model,
    ids: Tensor,
    step: vattn.AttentionMetadata,
    argument: bool = False,
) -> None:
    """Run a step compiled and eager from the same caches and compare everything."""
    results = []
    for target in (compiled_model, make_eager(model)):
        fill_caches(model)
        if argument:
            results.append([target(ids, metadata=step), *caches(model)])
        else:
            with vattn.forward_context(step):
                results.append([target(ids), *caches(model)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def make_eager(model: Model) -> Callable[..., Tensor]:
    """The model without what `compile_regions` did to its layers."""

    def run(ids: Tensor, metadata: vattn.AttentionMetadata | None = None) -> Tensor:
        x = model.embed(ids)
        for layer in model.layers:
            x = type(layer).forward(layer, x, metadata)
        return x @ model.embed.weight.t()

    return run


@pytest.mark.parametrize(("how", "first"), [("whole", [1]), ("regional", [1] * 4), ("function", [7])], ids=str)
def test_token_counts_and_batch_sizes_make_two_graphs(how: str, first: list[int]) -> None:
    model, backend = make_model(), CountingBackend()
    builder, target = make_builder(model), compiled(model, how, backend)
    for query_lens in [first, *random.Random(len(first)).sample(STEPS, len(STEPS))]:
        run_both(target, model, *make_step(builder, query_lens))
    assert len(backend.graphs) == 2  # one token, and more


@pytest.mark.parametrize("how", ["whole", "regional"])
def test_metadata_as_an_argument(how: str) -> None:
    """Two tokens or more make one graph, which holds all layers or one of them, run again for the others."""
    model, backend = make_model(3), CountingBackend()
    builder, target = make_builder(model), compiled(model, how, backend)
    for query_lens in ([2], [1, 1], [0, 3], [5, 5, 5], [1] * 16, [512]):
        run_both(target, model, *make_step(builder, query_lens), argument=True)
    assert len(backend.graphs) == 1
    ops = sum(node.target is torch.ops.vattn.attention for node in backend.graphs[0].graph.nodes)
    assert ops == (3 if how == "whole" else 1)


def test_layers_of_two_kinds_make_two_regions() -> None:
    model, backend = make_model(4), CountingBackend()
    for index in (1, 3):
        old = model.layers[index].attn
        new = vattn.Attention(4, old.head_size, 0.3, 2, prefix=old.prefix, per_layer_sliding_window=4)
        model.layers[index].attn = new
    vattn.allocate_kv_cache(model, num_blocks=96)
    target = compiled(model, "regional", backend)
    run_both(target, model, *make_step(make_builder(model), [3, 4]))
    assert len(backend.graphs) == 2


INTS = ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "num_prefills"]
INTS += ["num_prefill_tokens", "num_decodes", "num_decode_tokens"]


def test_no_integer_of_the_metadata_is_compiled_in() -> None:
    model, backend = make_model(1), CountingBackend()
    builder, target = make_builder(model), compiled(model, "whole", backend)
    ids, step = make_step(builder, [3, 4])
    for value in range(1, 9):
        for offset, name in enumerate(INTS):
            setattr(step, name, value + offset)
        with vattn.forward_context(step):
            target(ids)
    assert len(backend.graphs) == 1


def test_an_integer_that_is_read_would_recompile() -> None:
    """What the test above would see if the layer read one."""
    model, backend = make_model(1), CountingBackend()
    builder = make_builder(model)

    def reads(ids: Tensor, metadata: vattn.AttentionMetadata) -> Tensor:
        return model(ids, metadata) + metadata.max_seq_len

    target = vattn.compile(reads, backend=backend)
    for cached in (5, 6, 7):
        target(*make_step(builder, [3, 4], cached))
    assert len(backend.graphs) > 1


QUANT = vattn.QuantConfig(k_scale="unit", v_scale="unit")
FLAVOURS: dict[str, dict[str, Any]] = {
    "fp8": {"cache_config": vattn.CacheConfig(cache_dtype="fp8"), "quant_config": QUANT},
    "calculated scales": {"cache_config": vattn.CacheConfig(cache_dtype="fp8", calculate_kv_scales=True)},
    "window and soft cap": {"per_layer_sliding_window": 3, "logits_soft_cap": 5.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])},
    "HND": {"cache_config": vattn.CacheConfig(kv_cache_layout="HND")},
    "unequal": {"head_size_v": 8},
}


@pytest.mark.parametrize("name", FLAVOURS)
def test_flavours_of_layers(name: str) -> None:
    model, backend = make_model(1, **FLAVOURS[name]), CountingBackend()
    builder, target = make_builder(model), compiled(model, "whole", backend)
    for query_lens in ([3, 4], [1] * 4, [64]):
        run_both(target, model, *make_step(builder, query_lens))
    assert len(backend.graphs) == 1


STEP_FLAVOURS: dict[str, Callable[[int], dict[str, Any]]] = {
    "bidirectional": lambda n: {"causal": False},
    "flags": lambda n: {"causal": [i % 2 for i in range(n)]},
    "ranges": lambda n: {"mm_ranges": [[(0, 2)]] * n},
    "trees": lambda n: {"tree_bias": torch.randn(2, 3, 3), "tree_id": [i % 3 - 1 for i in range(n)]},
    "padded": lambda n: {"num_reqs_padded": 12, "num_tokens_padded": 500},
}


@pytest.mark.parametrize("name", STEP_FLAVOURS)
def test_flavours_of_steps(name: str) -> None:
    model, backend = make_model(1), CountingBackend()
    builder = make_builder(model, max_mm_ranges=2, max_trees=2, max_tree_size=4)
    target = compiled(model, "whole", backend)
    for query_lens in ([3, 4], [1] * 4, [64]):
        ids, step = make_step(builder, query_lens, **STEP_FLAVOURS[name](len(query_lens)))
        ids = torch.cat([ids, ids.new_zeros(step.slot_mapping.shape[0] - len(ids))])
        run_both(target, model, ids, step)
    assert len(backend.graphs) == 1


def test_profiling_call_compiles_without_metadata() -> None:
    model, backend = make_model(1), CountingBackend()
    target = compiled(model, "whole", backend)
    for tokens in (2, 9, 100):
        with vattn.forward_context(None):
            assert target(torch.arange(tokens) % 64).shape == (tokens, 64)
    assert len(backend.graphs) == 1


def test_compiled_module_is_still_the_module() -> None:
    model = make_model()
    target = vattn.compile(model, backend="eager")
    assert isinstance(target, nn.Module)
    assert {id(p) for p in target.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("how", ["whole", "function", "regional"])
def test_a_graph_break_raises(how: str) -> None:
    model, backend = make_model(1), CountingBackend()
    layer = model.layers[0]
    layer.out = Breaking(layer.out)
    target = compiled(model, how, backend)
    ids, step = make_step(make_builder(model), [3, 4])
    with vattn.forward_context(step), pytest.raises(torch._dynamo.exc.Unsupported):
        target(ids)


class Breaking(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


def test_an_error_in_compiled_code_says_what_is_wrong() -> None:
    layer = vattn.Attention(4, 16, 0.25, prefix="layers.7.attn")
    builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32)
    step = builder.build([3], [3], [[1]])
    with pytest.raises(CacheNotBoundError) as caught:
        vattn.compile(layer, backend="eager")(*(torch.randn(3, 64) for _ in range(3)), metadata=step)
    for text in ("layer 'layers.7.attn' has no KV cache", "vattn.allocate_kv_cache"):
        assert text in str(caught.value)


def test_regions_without_attention_are_refused() -> None:
    with pytest.raises(ConfigError, match="Sequential"):
        vattn.compile_regions(nn.Sequential(nn.Linear(2, 2)))


def test_regions_of_a_list() -> None:
    model, backend = make_model(2), CountingBackend()
    assert vattn.compile_regions(list(model.layers)[:1], backend=backend) == 1
    run_both(model, model, *make_step(make_builder(model), [3, 4]))
    assert len(backend.graphs) == 1
