"""What Inductor makes of the ops: in-place caches, one compile for equal layers, a cache for later processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from tests.compile.toy_models import Model, caches, fill_caches, make_builder, make_model, make_step

TOLERANCE = 2e-5  # fp32 sums over 32 columns in another order, through a softmax


def compare(target: Any, model: Model, query_lens: list[int]) -> None:
    """Run a step compiled and eager on equal caches."""
    ids, step = make_step(make_builder(model), query_lens)
    results = []
    for function in (target, model):
        fill_caches(model)
        with vattn.forward_context(step):
            results.append([function(ids), *caches(model)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def cache_arguments(code: str) -> set[str]:
    """Names that the generated code passes to the ops as `kv_cache`."""
    updates = re.findall(r"vattn\.kv_cache_update\.default\((.*)\)", code)
    attends = re.findall(r"vattn\.attention\.default\((.*)\)", code)
    return {split_arguments(call)[2] for call in updates} | {split_arguments(call)[1] for call in attends}


def split_arguments(call: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in call:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def test_the_cache_is_updated_in_place() -> None:
    from torch._inductor.utils import run_and_get_code

    model = make_model(1)
    target = vattn.compile(model)
    ids, step = make_step(make_builder(model), [3, 4])
    with vattn.forward_context(step):
        _, codes = run_and_get_code(target, ids)
    assert len(codes) == 1
    code = codes[0]
    assert code.count("torch.ops.vattn.attention.default(") == 1
    # Each op gets a graph input itself: no view, no buffer that Inductor made.
    names = cache_arguments(code)
    assert len(names) == 1 and all(re.fullmatch(r"arg\d+_1", name) for name in names)
    for line in code.splitlines():
        if "vattn." not in line and any(re.search(rf"\b{name}\b", line) for name in names):
            assert not re.search(r"copy|clone|empty|cpp_fused", line), line
    assert "aten.clone" not in code and ".copy_(" not in code
    compare(target, model, [3, 4])
    compare(target, model, [1] * 9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_equal_regions_are_compiled_once() -> None:
    model, reference = make_model(3), make_model(3)
    vattn.compile_regions(model)
    ids, step = make_step(make_builder(model), [3, 4])
    with vattn.forward_context(step):
        got, want = model(ids), reference(ids)
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE * 3)
    counters = torch._dynamo.utils.counters["inductor"]
    assert counters["fxgraph_cache_miss"] + counters["fxgraph_cache_hit"] == 1
    assert counters["fxgraph_cache_bypass"] == 0


def run_process(folder: Path) -> dict[str, Any]:
    environment = {**os.environ}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    # Workers and precompiled headers cost more than they save on one small graph.
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile.first_act"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_first_act_of_a_process_and_the_cache_of_the_second(tmp_path: Path) -> None:
    first, second = run_process(tmp_path), run_process(tmp_path)
    assert (first["graphs"], first["breaks"]) == (1, 0)
    assert first["inductor"]["fxgraph_cache_miss"] == 1
    assert (second["graphs"], second["breaks"]) == (1, 0)
    assert "fxgraph_cache_miss" not in second["inductor"] and "fxgraph_cache_bypass" not in second["inductor"]
    assert second["inductor"]["fxgraph_cache_hit"] == 1 and second["autograd"]["autograd_cache_hit"] == 1
    assert first["outputs"] == second["outputs"]
