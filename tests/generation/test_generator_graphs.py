"""The generator's captured steps, with a stand-in for CUDA graphs: what a replay reads is what the capture read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import vattn
from vattn.errors import ConfigError, GraphContractError
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.hybrid import GroupedMetadata

pytest.importorskip("transformers")

from tests.generation.generator_support import PROMPTS, check_empty, chosen, make_generator
from tests.integrations.hf_families import make_model
from vattn.generation.capture import MIXED_LADDER, mixed_pair, mixed_sizes
from vattn.generation.model_steps import Graphs
from vattn.integrations.transformers import PackedModel, enable

SAMPLINGS = [vattn.Sampling(count, stop_token_ids=()) for count in (7, 20, 11, 15, 9, 18)]


def captured(step: AttentionMetadata) -> AttentionMetadata:
    """Return a step as a graph has it: tensors that builders write again, and nothing that would be refused then."""
    parts = {"parts": tuple(map(captured, step.parts))} if isinstance(step, GroupedMetadata) else {}
    return dataclasses.replace(step, _built=None, **parts)  # type: ignore[arg-type]


class Replay:
    """A graph that computes again from the tensors of its capture, into the memory of its output."""

    def __init__(self, runner: vattn.CUDAGraphRunner, key: Any, log: list[tuple[int, int]]) -> None:
        self.runner, self.entry, self.log = runner, runner._entries[key], log
        self.key, self.metadata = key, captured(runner._sample_step(key.num_reqs, key.num_tokens))
        self.entry.output = runner._run(self.entry, self.metadata).clone()

    def replay(self) -> None:
        """Compute the step that the buffers hold."""
        self.log.append((self.key.num_reqs, self.key.num_tokens))
        self.entry.output.copy_(self.runner._run(self.entry, self.metadata))


def stand_in(generator: vattn.Generator) -> list[tuple[int, int]]:
    """Give every captured size a stand-in; return the list to which replays append their sizes."""
    log: list[tuple[int, int]] = []
    for runner in Graphs(generator.graphs, generator.draft_graphs, generator.mixed_graphs):
        for key in runner._entries if runner is not None else ():
            runner._entries[key].graph = Replay(runner, key, log)  # type: ignore[assignment, union-attr]
    return log


@pytest.mark.parametrize("hybrid", [False, True])
def test_steps_with_prompts_are_replayed(hybrid: bool) -> None:
    """Chunks with decodes, and steps beyond the largest graph, give the tokens of steps without graphs."""
    name = "gemma2" if hybrid else "llama"
    packed, model = enable(make_model(name)), make_model(name)
    packed.allocate(num_blocks=64, hybrid=hybrid, max_seq_len=128)
    options: dict[str, Any] = {"max_num_reqs": 3, "token_budget": 40, "max_seq_len": 128}
    generator = vattn.Generator(packed, graph_sizes=[1, 3], mixed_graph_sizes=range(4, 29, 4), **options)
    log = stand_in(generator)
    # Nothing that a replay must not read reaches a result.
    for cache in packed.kv_cache.kv_caches:
        cache[packed.kv_cache.reserved_blocks :].fill_(torch.nan) if not hybrid else None
    done = generator.generate(PROMPTS, SAMPLINGS)
    assert [len(request.output) for request in done] == [sampling.max_new_tokens for sampling in SAMPLINGS]
    for request in done:
        assert request.output == chosen(model, request.prompt, request.output)
    assert (3, 3) in log and len(set(log)) > 3
    assert len(log) < generator.statistics().steps, "steps beyond the largest size run without"
    check_empty(generator)


def test_a_graph_of_another_adapter_is_not_replayed() -> None:
    """Weights may get other values in place, which replays read; a switch is not in the graph."""
    model = make_model("llama")
    layer = model.model.layers[0].mlp
    layer.active_adapter = "a"
    packed = enable(model, num_blocks=64)
    generator = make_generator(packed, graph_sizes=[2])
    log = stand_in(generator)
    sampling = vattn.Sampling(4, stop_token_ids=())
    before = generator.generate(PROMPTS[:1], sampling)[0].output
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    after = generator.generate(PROMPTS[:1], sampling)[0].output
    assert after != before and len(log) > 4
    layer.active_adapter = "b"
    request = generator.add(PROMPTS[0], sampling)
    with pytest.raises(GraphContractError, match=r"changed since its capture, in .*layers\.0\.mlp"):
        while not request.done:
            generator.step()
    generator.cancel(request)
    check_empty(generator)


def test_a_change_between_two_decodes_is_refused() -> None:
    """Also where the next step follows the last one without a plan: a replay reads weights that may be freed."""
    model = make_model("llama")
    generator = make_generator(enable(model, num_blocks=64), graph_sizes=[2])
    stand_in(generator)
    request = generator.add(PROMPTS[0], vattn.Sampling(40, stop_token_ids=()))
    while len(request.output) < 5:
        generator.step()
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with pytest.raises(GraphContractError, match="changed since its capture"):
        generator.step()
    assert len(request.output) == 5 and request.state == "waiting"
    generator.cancel(request)
    check_empty(generator)


def expected_of_samplings(long_expected: list[list[int]]) -> list[list[int]]:
    return [tokens[: sampling.max_new_tokens] for tokens, sampling in zip(long_expected, SAMPLINGS, strict=True)]


def test_drafts_with_prompts_run_without(packed: PackedModel, long_expected: list[list[int]]) -> None:
    packed.allocate(num_blocks=64)
    lookup = vattn.PromptLookup(num_drafts=3, shortest=1)
    generator = make_generator(packed, graph_sizes=[2, 4], mixed_graph_sizes=[64], speculation=lookup)
    log = stand_in(generator)
    done = generator.generate(PROMPTS, SAMPLINGS)
    assert [request.output for request in done] == expected_of_samplings(long_expected)
    # One token more than requested: 16 for each of 4 requests could be taken for drafts.
    assert {(2, 8), (4, 16), (4, 65)} <= set(log)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [([65], "up to 64 tokens"), ([1], ">= 2"), ([2.0], "mixed_graph_sizes=2.0"), (True, "a list"), ("8", "a list")],
)
def test_sizes_that_no_step_has_are_refused(packed: PackedModel, sizes: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_generator(packed, mixed_graph_sizes=sizes, max_seq_len=64)


@pytest.mark.parametrize("max_num_reqs", [1, 2, 3, 16, 64, 256])
@pytest.mark.parametrize("budget", [2, 60, 512, 2048])
def test_the_ladder_holds_steps_that_are_no_drafts(max_num_reqs: int, budget: int) -> None:
    """Up to the token budget, never less than the requests, never as many tokens for each of them."""

    class Builder:
        device, backends, has_states = torch.device("cuda"), {"TRITON_ATTN"}, False

    builder: Any = Builder()
    sizes = mixed_sizes(None, budget, max_num_reqs, [1], builder)
    assert sizes == sorted(set(sizes))
    assert all(max_num_reqs <= size <= min(budget, MIXED_LADDER[-1]) for size in sizes)
    assert not sizes or sizes[-1] == min(budget, MIXED_LADDER[-1])
    for size in sizes:
        requests, tokens = mixed_pair(max_num_reqs, size, 4096)
        rows, rest = divmod(tokens, max(2, requests))
        assert requests == max_num_reqs and size <= tokens <= size + 1 and (rest or rows > 16)
    assert mixed_sizes(None, budget, max_num_reqs, [], builder) == []
    builder.backends = {"TRITON_ATTN", "FLASHINFER"}
    assert mixed_sizes(None, budget, max_num_reqs, [1], builder) == []
    assert mixed_sizes((), budget, max_num_reqs, [1], builder) == []


@pytest.mark.parametrize("pair", [(5, 8), (0, 8), (4, 0), (4, 65), (1, 33), (4,)])
def test_runner_refuses_pairs_beyond_the_builder(packed: PackedModel, pair: Any) -> None:
    packed.allocate(num_blocks=64)
    builder = vattn.AttentionMetadataBuilder(4, 64, max_seq_len=32, layers=packed)
    with pytest.raises(ConfigError, match="pairs of up to 4 requests and 64 tokens, 32 for each"):
        vattn.CUDAGraphRunner(packed, [pair], builder, lambda step: [])


@pytest.mark.parametrize("compiled", ["layers", pytest.param("model", marks=pytest.mark.long)])
def test_captures_compile_what_steps_without_graphs_run(
    monkeypatch: Any, fresh_dynamo: None, long_expected: list[list[int]], compiled: str
) -> None:
    """One graph: that of the captures is the one of the first prompt that is too long for them."""
    prepare = vattn.CUDAGraphRunner._prepare

    def run_too(runner: vattn.CUDAGraphRunner, *size: int) -> Any:
        cost = prepare(runner, *size)
        metadata = runner._sample_step(*size)
        metadata.mark_dynamic()
        runner._run(runner._entries[metadata.capture_key()], metadata)
        return cost

    monkeypatch.setattr(vattn.CUDAGraphRunner, "_prepare", run_too)
    packed = enable(make_model("llama"), num_blocks=64)
    options: dict[str, Any] = {"compile": compiled, "compile_options": {"backend": "eager"}, "token_budget": 32}
    generator = make_generator(packed, graph_sizes=[1, 4], mixed_graph_sizes=[16], max_seq_len=128, **options)
    counted = torch._dynamo.utils.counters["stats"]
    assert counted["unique_graphs"] == 1 and "device cpu" in str(generator.graphs.report)
    done = generator.generate(PROMPTS, SAMPLINGS)
    assert counted["unique_graphs"] == 1
    assert [request.output for request in done] == expected_of_samplings(long_expected)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(), [1, 2, 4]])
def test_nothing_compiles_after_the_first_requests(device: str, sizes: Any, fresh_dynamo: None) -> None:
    """Rows, ids and positions of prompts, chunks, decodes and following decodes are of one kind, in graphs or not."""
    packed = enable(make_model("llama", head_dim=64).to(device), num_blocks=64)
    options: dict[str, Any] = {"compile": "model", "token_budget": 32}
    if device == "cpu":
        options["compile_options"] = {"backend": "eager"}
    generator = make_generator(packed, graph_sizes=sizes, reuse_prefixes=False, max_seq_len=128, **options)
    generator.generate(PROMPTS, SAMPLINGS)
    seen = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    generator.generate([*PROMPTS, *PROMPTS[:2]], vattn.Sampling(40, stop_token_ids=()))
    # One token alone and one prompt alone make no graph of their own.
    for prompt in ([9], PROMPTS[0]):
        generator.generate([prompt], vattn.Sampling(9, stop_token_ids=()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == seen
