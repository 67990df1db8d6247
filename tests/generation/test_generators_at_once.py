"""Two models and two generators in two threads, and models that are enabled at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.generation.generator_support import GREEDY, PROMPTS, make_generator, one_by_one
from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import enable


def at_once(work: Callable[[int], Any], count: int = 2) -> list[Any]:
    """Return what a function returns in as many threads, which begin together; raise what it raises."""
    begin = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        begin.wait()
        try:
            results[index] = work(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("families", [("llama", "llama"), ("llama", "gemma2")])
def test_generators_in_two_threads(families: tuple[str, str]) -> None:
    """Models are enabled, and generators run, at the same time; a cache with groups beside one without."""
    models = [make_model(family) for family in families]
    expected = [[one_by_one(model, prompt, 12) for prompt in PROMPTS] for model in models]
    packed = at_once(lambda index: enable(models[index]))
    compiled: list[Any] = []
    torch.compile(lambda x: x + 1, backend=lambda graph, inputs: compiled.append(graph) or graph)(torch.ones(2))
    assert compiled  # Torch compiles again afterwards.
    for index, one in enumerate(packed):
        one.allocate(num_blocks=64, hybrid=families[index] == "gemma2")
    generators = [make_generator(one) for one in packed]
    outputs = at_once(lambda index: [request.output for request in generators[index].generate(PROMPTS, GREEDY)])
    assert outputs == expected
