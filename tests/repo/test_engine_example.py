"""The engine of one file and the loop for one request: tokens of transformers' greedy decoding, whatever happens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import load_example

FOLDER = Path(__file__).parents[2] / "examples"
ENGINE, LOOP = "04_engine.py", "19_single_request.py"
COMMON = "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def test_"


def ids(text: str) -> list[int]:
    return [0, *text.encode()]


@pytest.fixture(scope="module")
def engine() -> Any:
    return load_example(ENGINE)


@pytest.fixture(scope="module")
def model(engine: Any) -> Any:
    return engine.build_llama(*engine.read_checkpoint(engine.DEMO_MODEL))


@pytest.fixture(scope="module")
def plain() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(FOLDER / "demo_model", dtype=torch.float32).eval()


def greedy(plain: Any, prompt: list[int], count: int) -> list[int]:
    """Return transformers' greedy tokens."""
    with torch.no_grad():
        out = plain.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return list(out[0, len(prompt) :].tolist())


def finish(engine: Any) -> None:
    while engine.busy:
        engine.step()
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize("graph_sizes", [(), (4, 2)])
def test_tokens_are_transformers_own(engine: Any, model: Any, plain: Any, graph_sizes: tuple[int, ...]) -> None:
    texts = ["x", "for i in range(", *(COMMON + name for name in ("push", "pop", "peek")), COMMON * 3]
    runner = engine.Engine(model, num_blocks=22, max_running=4, budget=40, graph_sizes=graph_sizes)
    requests = [engine.Request(ids(text), 20 + 4 * number) for number, text in enumerate(texts)]
    ended = list(runner.generate(requests))
    assert sorted(map(id, ended)) == sorted(map(id, requests))
    assert sum(request.preemptions for request in requests) > 0
    assert sum(request.reused > 0 for request in requests) >= 3
    assert max(len(request.prompt) for request in requests) > 40, "one is computed in chunks"
    finish(runner)
    for request in requests:
        assert request.output == greedy(plain, request.prompt, request.max_tokens)


def test_a_blocks_of_equal_tokens_after_other_beginnings_are_not_shared(engine: Any, model: Any, plain: Any) -> None:
    runner = engine.Engine(model)
    block = list(b"0123456789abcdef")
    requests = [engine.Request([*beginning, *block, 40], 6) for beginning in (b"x" * 16, b"y" * 16, b"", b"x" * 16)]
    for request in requests:
        runner.add(request)
        finish(runner)
        assert request.output == greedy(plain, request.prompt, 6)
    assert [request.reused for request in requests] == [0, 0, 0, 32]
    whole = runner.add(engine.Request([*b"x" * 16, *block], 6))
    finish(runner)
    assert whole.output == greedy(plain, whole.prompt, 6)
    assert whole.reused == 16, "the last token is computed, for its logits"


def test_a_seed_gives_one_text(engine: Any, model: Any) -> None:
    def texts(**options: Any) -> list[list[int]]:
        runner = engine.Engine(model, **options)
        requests = [engine.Request(ids(COMMON), 16, temperature=1.0, seed=seed) for seed in (1, 2)]
        list(runner.generate(requests))
        return [request.output for request in requests]

    together = texts()
    assert together == texts(max_running=1) == texts(budget=20, num_blocks=8)
    assert together[0] != together[1]


def test_a_stop_token_ends_a_request(engine: Any, model: Any, plain: Any) -> None:
    whole = greedy(plain, ids("import "), 12)
    stop = whole[6]
    (request,) = engine.Engine(model).generate([engine.Request(ids("import "), 12, stop=stop)])
    assert request.output == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize(("prompt", "count"), [(0, 1), (1, 0), (60, 64)])
def test_what_can_never_run_is_refused(engine: Any, model: Any, prompt: int, count: int) -> None:
    runner = engine.Engine(model, num_blocks=8)
    with pytest.raises(ValueError, match="112 together are allowed"):
        runner.add(engine.Request([1] * prompt, count))
    assert not runner.busy


@pytest.mark.slow
def test_random_traffic_is_that_of_requests_alone(engine: Any, model: Any, plain: Any) -> None:
    draw = random.Random(0)
    runner = engine.Engine(model, num_blocks=24, max_running=5, budget=32)
    text = (FOLDER / "demo_model" / "heldout.txt").read_text()
    requests = []
    for _ in range(24):
        start = draw.choice([0, 500, 1000])
        prompt = ids(text[start : start + draw.randint(1, 150)])
        requests.append(runner.add(engine.Request(prompt, draw.randint(1, 40))))
        for _ in range(draw.randint(0, 12)):
            if runner.busy:
                runner.step()
    finish(runner)
    assert sum(request.preemptions for request in requests) and sum(request.reused for request in requests)
    for request in requests:
        assert request.output == greedy(plain, request.prompt, request.max_tokens)


@pytest.mark.slow
def test_compiled_layers_give_the_same_tokens(engine: Any, plain: Any) -> None:
    model = engine.build_llama(*engine.read_checkpoint(engine.DEMO_MODEL))
    runner = engine.Engine(model, compile=True)
    requests = [engine.Request(ids(text), 10) for text in ("import ", COMMON)]
    list(runner.generate(requests))
    assert [request.output for request in requests] == [greedy(plain, request.prompt, 10) for request in requests]


@pytest.fixture(scope="module")
def loop() -> Any:
    return load_example(LOOP)


def test_one_request_after_another(loop: Any, model: Any, plain: Any) -> None:
    one = loop.Loop(model, max_seq_len=100, compile=False)
    for text, count in (("import ", 40), (COMMON, 24), ("x", 1), ("import ", 40)):
        assert one.generate(ids(text), count) == greedy(plain, ids(text), count)
    assert len(one.generate([0], 99)) == 99
    for prompt, count in ([0] * 61, 40), ([], 1), ([0], 0):
        with pytest.raises(ValueError, match="100 together are allowed"):
            one.generate(prompt, count)


def test_a_loop_samples(loop: Any, model: Any) -> None:
    one = loop.Loop(model, max_seq_len=64, compile=False, temperature=1.0)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(one.generate(ids("import "), 16))
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.slow
def test_the_decode_step_compiles_once(loop: Any, plain: Any) -> None:
    from torch._dynamo.utils import counters

    one = loop.Loop(loop.build_llama(*loop.read_checkpoint(loop.DEMO_MODEL)), max_seq_len=100)
    before = counters["stats"]["unique_graphs"]
    for text, count in (("import ", 20), (COMMON, 24)):
        assert one.generate(ids(text), count) == greedy(plain, ids(text), count)
    assert counters["stats"]["unique_graphs"] - before == 1
