"""The generator on a GPU: compiled layers, captured decodes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn

pytest.importorskip("transformers")

from tests.generation.eagle_checkpoints import Head
from tests.generation.generator_support import PROMPTS, check_empty, one_by_one, run_to_end
from tests.generation.test_generators_at_once import at_once
from tests.generation.test_mtp_drafts import make as make_with_mtp
from tests.integrations.hf_families import make_model
from vattn import errors
from vattn.integrations.transformers import enable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_generator_gives_the_same_tokens(dtype: torch.dtype) -> None:
    """Where texts part, the two best logits are a near tie of that dtype."""
    model = make_model("llama", head_dim=64).to("cuda", dtype)
    alone = [one_by_one(model, prompt, 16) for prompt in PROMPTS]
    packed = enable(model, num_blocks=64)
    generator = vattn.Generator(packed, max_num_reqs=4, token_budget=32, max_seq_len=128)
    assert generator.graphs is not None and generator.graphs.report.reason is None
    sampling = vattn.Sampling(16, stop_token_ids=())
    done = generator.generate(PROMPTS, sampling) + generator.generate(PROMPTS, sampling)
    assert sum(request.reused for request in done) > 0
    check_empty(generator)
    from vattn.integrations.transformers import disable

    disable(packed)
    assert_near(done, alone * 2, model, 1e-3 if dtype == torch.float32 else 0.1)


def test_two_captured_generators_in_two_threads() -> None:
    """One captures while the other runs; the graphs of each hold its own steps."""
    models = [make_model("llama", head_dim=64).cuda() for _ in range(2)]
    alone = [one_by_one(models[0], prompt, 16) for prompt in PROMPTS]
    generators = [
        vattn.Generator(enable(model, num_blocks=64), max_num_reqs=4, token_budget=32, max_seq_len=128, compile="none")
        for model in models
    ]
    sampling = vattn.Sampling(16, stop_token_ids=())
    found = at_once(lambda index: outputs(generators[index].generate(PROMPTS * 2, sampling)))
    assert found == [alone * 2] * 2


def test_samples_repeat_and_failures_stay_alone() -> None:
    model = make_model("llama").cuda()
    packed = enable(model, num_blocks=64)
    generator = vattn.Generator(packed, max_num_reqs=4, token_budget=64, max_seq_len=128, compile="none")
    wanted = [vattn.Sampling(10, temperature=1.5, top_p=0.9, seed=seed, stop_token_ids=()) for seed in (1, 2, 1)]
    first, second, third = generator.generate([PROMPTS[1]] * 3, wanted)
    assert first.output == third.output != second.output
    with torch.no_grad():
        model.model.embed_tokens.weight[91] = torch.nan
    poisoned, fine = generator.generate([[5, 91], [5, 6]], vattn.Sampling(4, stop_token_ids=()))
    assert (poisoned.state, fine.state) == ("failed", "finished")


def assert_near(requests: Any, wanted: list[list[int]], model: Any, tie: float = 1e-3) -> None:
    """Assert that outputs are equal, up to a step in which the two best logits nearly tie."""
    for request, want in zip(requests, wanted, strict=True):
        if request.output == want:
            continue
        at = next(i for i, (a, b) in enumerate(zip(request.output, want, strict=True)) if a != b)
        ids = torch.tensor([request.prompt + want[:at]], device="cuda")
        with torch.no_grad():
            best = model(input_ids=ids).logits[0, -1].float().topk(2).values
        assert best[0] - best[1] < tie * best[0].abs()


def outputs(requests: Any) -> list[list[int]]:
    return [request.output for request in requests]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_guesses_and_groups_in_graphs(name: str) -> None:
    """Captured steps of one and of several tokens a request, with and without groups, give the tokens of plain ones."""
    changes = {"head_dim": 64} if name == "llama" else {"sliding_window": 20}
    plain = make_model(name, **changes).cuda()
    packed = enable(make_model(name, **changes).cuda())
    if name == "gpt_oss":
        # Grouped products of torch copy from the host, unless they are of bf16.
        packed.model.set_experts_implementation("batched_mm")
    packed.allocate(num_blocks=80, hybrid=name != "llama", max_seq_len=256)
    sampling = vattn.Sampling(40, stop_token_ids=())
    options: dict[str, Any] = {"max_num_reqs": 4, "token_budget": 64, "max_seq_len": 128}
    alone = outputs(vattn.Generator(packed, graph_sizes=(), compile="none", **options).generate(PROMPTS, sampling))
    lookup = vattn.PromptLookup(num_drafts=3, shortest=1)
    steps = []
    for speculation in (None, lookup):
        generator = vattn.Generator(packed, speculation=speculation, compile="none", **options)
        assert generator.graphs is not None and generator.graphs.report.reason is None
        assert (generator.draft_graphs is not None) == (speculation is not None)
        done = generator.generate(PROMPTS, sampling) + generator.generate(PROMPTS, sampling)
        assert_near(done, alone * 2, plain)
        steps.append(generator.statistics().steps)
        check_empty(generator)
    assert steps[1] < steps[0] and generator.statistics().accepted_tokens > 0


@pytest.mark.parametrize("hybrid", [False, True])
def test_drafts_of_a_model_in_graphs(hybrid: bool) -> None:
    """The target as its own draft model is right but for near ties; one with noise is not, and changes no token."""
    name, changes = ("gemma2", {"sliding_window": 20}) if hybrid else ("llama", {"head_dim": 64})
    plain, packed = make_model(name, **changes).cuda(), enable(make_model(name, **changes).cuda())
    packed.allocate(num_blocks=80, hybrid=hybrid, max_seq_len=256)
    samplings = [vattn.Sampling(40, 0.7 * (row % 2), seed=row, stop_token_ids=()) for row in range(len(PROMPTS))]
    options: dict[str, Any] = {"max_num_reqs": 4, "token_budget": 64, "max_seq_len": 128, "compile": "none"}
    alone = outputs(vattn.Generator(packed, graph_sizes=(), **options).generate(PROMPTS, samplings))
    for noise, least in ((0.0, 0.9), (0.02, 0.2)):
        model = make_model(name, **changes).cuda()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + noise * torch.randn_like(parameter))
        generator = vattn.Generator(packed, speculation=vattn.DraftModel(enable(model), 3), **options)
        done = generator.generate(PROMPTS, samplings)
        # Draws that part are near a border of two tokens; greedy ones are near ties.
        assert_near(done[::2], alone[::2], plain)
        assert sum(request.output == want for request, want in zip(done, alone, strict=True)) >= 4
        greedy = sum(request.accepted for request in done[::2]) / sum(request.drafted for request in done[::2])
        assert greedy > least and generator.statistics().draft_seconds > 0
        check_empty(generator)


@pytest.mark.parametrize("tree", [None, [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)]], ids=["chain", "tree"])
def test_heads_of_eagle_in_graphs(tmp_path: Path, tree: Any) -> None:
    """Prompts, graphs of decodes and of drafts, and launches that wait for nothing."""
    plain = make_model("llama", head_dim=64)
    Head(plain, False, [prompt + one_by_one(plain, prompt, 40) for prompt in PROMPTS[:2]]).write(tmp_path)
    packed = enable(make_model("llama", head_dim=64).cuda(), num_blocks=80)
    generator = vattn.Generator(
        packed, max_num_reqs=4, max_seq_len=128, compile="none", speculation=vattn.EagleDraft(tmp_path, tree=tree)
    )
    launch = generator._runner.launch

    def checked(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    generator.generate(PROMPTS, vattn.Sampling(9, stop_token_ids=()))
    generator._runner.launch = checked  # type: ignore[method-assign]
    done = generator.generate(PROMPTS, vattn.Sampling(40, stop_token_ids=()))
    assert_near(done, [one_by_one(plain, prompt, 40) for prompt in PROMPTS], plain.cuda())
    now = generator.statistics()
    assert now.accepted_tokens > 20 and now.draft_seconds > 0
    check_empty(generator)


@pytest.mark.parametrize("kind", ["tree", "mtp"])
def test_trees_of_a_model_and_layers_for_multi_token_prediction_in_graphs(kind: str) -> None:
    if kind == "mtp":
        plain, mtp = make_with_mtp("glm4_moe")
        for each in (plain, mtp):
            each.set_experts_implementation("batched_mm")
        plain.cuda()
        source: Any = vattn.MtpDraft(2, model=mtp.cuda())
    else:
        plain, small = make_model("llama", head_dim=64).cuda(), make_model("llama", head_dim=64).cuda()
        with torch.no_grad():
            for parameter in small.parameters():
                parameter.mul_(1 + 0.03 * torch.randn_like(parameter))
        source = vattn.DraftModel(enable(small), tree=[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])
    alone = [one_by_one(plain, prompt, 40) for prompt in PROMPTS]
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"max_num_reqs": 4, "max_seq_len": 128, "compile": "none", "speculation": source}
    generator = vattn.Generator(enable(model, num_blocks=80), **options)
    assert_near(generator.generate(PROMPTS, vattn.Sampling(40, stop_token_ids=())), alone, plain)
    now = generator.statistics()
    assert now.draft_seconds > 0 and now.drafted_tokens > 200 and (kind == "mtp" or now.accepted_tokens > 20)
    check_empty(generator)


def test_a_model_that_cannot_be_captured_is_refused() -> None:
    packed = enable(make_model("gpt_oss").cuda(), num_blocks=64)
    options: dict[str, Any] = {"max_num_reqs": 4, "max_seq_len": 128, "compile": "none"}
    with pytest.raises(errors.UnsupportedRequestError, match="set_experts_implementation"):
        vattn.Generator(packed, **options)
    done = vattn.Generator(packed, graph_sizes=(), **options).generate(PROMPTS[:2], vattn.Sampling(4))
    assert all(request.state == "finished" for request in done)


def test_launching_a_step_waits_for_nothing() -> None:
    """Greedy, sampled and with guesses: the only wait of a step is the one for its tokens."""
    packed = enable(make_model("llama", head_dim=64).cuda(), num_blocks=64)
    samplings = [vattn.Sampling(30, stop_token_ids=()), vattn.Sampling(30, temperature=0.8, seed=3, stop_token_ids=())]
    draft = enable(make_model("llama", head_dim=64).cuda())
    for speculation in (None, vattn.PromptLookup(shortest=1), vattn.DraftModel(draft, 3)):
        generator = vattn.Generator(packed, max_num_reqs=4, max_seq_len=128, compile="none", speculation=speculation)
        requests = [generator.add(PROMPTS[1], sampling) for sampling in samplings * 2]
        launch = generator._runner.launch

        def checked(*arguments: Any, launch: Any = launch) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        for _ in range(4):
            generator.step()
        generator._runner.launch = checked  # type: ignore[method-assign]
        run_to_end(generator)
        assert requests[0].output == requests[2].output and requests[1].output == requests[3].output


def graph_count() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("compiled", ["none", "layers"])
def test_following_steps_in_graphs_are_those_of_build(compiled: str) -> None:
    """Long runs that cross many blocks: advanced metadata is replayed and gives the tokens of planned steps."""
    packed = enable(make_model("llama", head_dim=64).cuda(), num_blocks=64)
    options: dict[str, Any] = {"max_num_reqs": 4, "token_budget": 64, "max_seq_len": 128, "reuse_prefixes": False}
    sampling = [vattn.Sampling(count, stop_token_ids=()) for count in (50, 70, 33, 64, 90, 20)]
    outputs = []
    for follow in (False, True):
        packed.allocate(num_blocks=64)
        generator = vattn.Generator(packed, compile=compiled if not follow else "none", **options)
        if not follow:
            generator.scheduler.follow = lambda before: None  # type: ignore[method-assign]
        advanced = []
        advance = generator._runner.steps.builder.advance

        def watched(*arguments: Any, advance: Any = advance, advanced: list[int] = advanced) -> Any:
            advanced.append(1)
            return advance(*arguments)

        generator._runner.steps.builder.advance = watched  # type: ignore[method-assign]
        outputs.append([request.output for request in generator.generate(PROMPTS, sampling)])
        assert bool(advanced) == follow
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_steps_with_prompts_in_graphs(name: str) -> None:
    """Every step of up to 64 tokens is captured, padded to the next of four sizes, in one pool with the decodes."""
    changes = {"head_dim": 64} if name == "llama" else {"sliding_window": 20}
    plain = make_model(name, **changes).cuda()
    packed = enable(make_model(name, **changes).cuda())
    packed.allocate(num_blocks=80, hybrid=name != "llama", max_seq_len=256)
    sampling = [vattn.Sampling(count, stop_token_ids=()) for count in (7, 40, 11, 15, 9, 18)]
    options: dict[str, Any] = {"max_num_reqs": 3, "token_budget": 64, "max_seq_len": 128, "compile": "none"}
    alone = outputs(vattn.Generator(packed, graph_sizes=(), **options).generate(PROMPTS, sampling))
    generator = vattn.Generator(packed, mixed_graph_sizes=[8, 16, 32, 64], **options)
    assert generator.graphs is not None and generator.mixed_graphs is not None
    assert generator.mixed_graphs._pool == generator.graphs._pool
    replayed = []
    replay = generator.mixed_graphs.__class__.__call__
    runner, forward = generator.mixed_graphs, generator._runner.steps.forward

    def watched(*inputs: Any, metadata: Any) -> Any:
        replayed.append(metadata.slot_mapping.shape[0])
        return replay(runner, *inputs, metadata=metadata)

    generator._runner.steps.graphs = (generator.graphs, None, _Watched(runner, watched))  # type: ignore[assignment]
    generator._runner.steps.forward = None  # type: ignore[assignment]
    done = generator.generate(PROMPTS, sampling)
    generator._runner.steps.forward = forward
    assert_near(done, alone, plain)
    assert len(set(replayed)) > 1
    check_empty(generator)


@pytest.mark.parametrize("compiled", ["none", "layers"])
def test_steps_with_prompts_are_captured_by_default(compiled: str) -> None:
    """Nothing compiles behind the captures, also where a step is too long for them; tokens are those without graphs."""
    packed = enable(make_model("llama", head_dim=64).cuda(), num_blocks=320)
    prompts = [*PROMPTS, list(range(3, 90)) * 20, list(range(5, 95)) * 3]
    sampling = [vattn.Sampling(count, stop_token_ids=()) for count in (7, 40, 11, 15, 9, 18, 12, 30)]
    options: dict[str, Any] = {"max_num_reqs": 8, "token_budget": 2000, "max_seq_len": 2048, "reuse_prefixes": False}
    alone = outputs(vattn.Generator(packed, graph_sizes=(), compile="none", **options).generate(prompts, sampling))
    generator = vattn.Generator(packed, compile=compiled, **options)
    assert generator.mixed_graphs is not None
    print(generator.graphs.report, generator.mixed_graphs.report, sep="\n")
    sizes = sorted(key.num_tokens for key in generator.mixed_graphs._entries)
    assert sizes == [63, 127, 255, 511, 767, 1023, 1279, 1535]
    seen = graph_count()
    for _ in range(2):
        assert_near(generator.generate(prompts, sampling), alone, make_model("llama", head_dim=64).cuda())
    assert graph_count() == seen
    # As many tokens as for a draft of each request, and one request has most of them.
    packed.allocate(num_blocks=320)
    generator = vattn.Generator(packed, compile="none", mixed_graph_sizes=[32], **options)
    assert_near(generator.generate(PROMPTS, sampling[:6]), alone[:6], make_model("llama", head_dim=64).cuda())


class _Watched:
    """A runner whose calls go through a function."""

    def __init__(self, runner: Any, call: Any) -> None:
        self._runner, self._call = runner, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def __call__(self, *inputs: Any, metadata: Any) -> Any:
        return self._call(*inputs, metadata=metadata)
