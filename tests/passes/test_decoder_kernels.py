"""What the passes leave of a decoder layer: the benchmark's model, counted in generated code on a CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import generated_code
from torch import Tensor

import vattn
from benchmarks.models import fused_steps
from vattn.passes import pipeline

TINY = "--device cpu --layers 3 --hidden 64 --heads 4 --kv-heads 2 --head-size 16 --ffn 128 --context 20 40"


def bench(layers: int = 3) -> fused_steps.Bench:
    arguments = f"{TINY} --batches 3 --layers {layers}"
    return fused_steps.Bench(fused_steps.arguments().parse_args(arguments.split()))


def code_of(made: fused_steps.Bench, **compile_options: Any) -> str:
    """Return the code that Inductor generates; it is neither compiled nor run."""
    target = vattn.compile(made.model, **compile_options)
    step = made.builder.build([1] * 3, made.lengths, made.tables)
    with vattn.forward_context(step):
        return generated_code(lambda: target(*made._inputs(step)))


def calls_of_a_layer(code: str) -> list[str]:
    """Return kernels and ops from the first attention call to the second."""
    called = r"^\s+(?:torch\.ops\.vattn\.|extern_kernels\.)?((?:cpp_fused|_scaled_mm)\w*|\w+\.default)\("
    names = re.findall(called, code, re.MULTILINE)
    first, second, _ = (place for place, name in enumerate(names) if name == "attention.default")
    return [name.partition("_fused")[0] if "_fused" in name else name for name in names[first:second]]


@pytest.mark.slow
def test_three_kernels_fewer_a_layer() -> None:
    made = bench()
    off = calls_of_a_layer(code_of(made))
    on = calls_of_a_layer(code_of(made, options=vattn.options(strict=True, rope="always")))
    around = ["_scaled_mm", "cpp", "_scaled_mm", "cpp", "_scaled_mm", "cpp", "_scaled_mm"]
    # Output quantisation ahead of these; rotations of query and key, and the cache write, behind.
    assert off == ["attention.default", "cpp", *around, "cpp", "kv_cache_update.default", "cpp"]
    assert on == ["attention.default", *around, "rope_kv_cache_update.default"]


def test_rows_that_several_layers_read_are_gathered_once() -> None:
    code = code_of(bench(), options=vattn.options(rope="always"))
    calls = re.findall(r"^\s+(cpp_fused\w*)\(", code, re.MULTILINE)
    assert len([name for name in calls if "index" in name]) == 1
    tables = re.findall(r"rope_kv_cache_update\.default\([^\n]*, (buf\d+), (buf\d+), None, buf\d+, ", code)
    assert len(tables) == 3 and len(set(tables)) == 1


class Computed(fused_steps.Stack):
    """The same with angles instead of tables, `[1, T, columns]` as transformers has them."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        frequencies = 500000.0 ** (-torch.arange(8) / 8.0)
        angles = (positions.float()[:, None] * frequencies).unsqueeze(0)
        cos, sin = angles.cos().squeeze(0).unsqueeze(1), angles.sin().squeeze(0).unsqueeze(1)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin)
        return self.norm(residual + x)


@pytest.mark.slow
def test_tables_that_are_computed_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_steps, "Stack", Computed)
    code = code_of(bench(), options=vattn.options(rope="always"))
    calls = re.findall(r"^\s+(cpp_fused\w*)\(", code, re.MULTILINE)
    assert code.count("rope_kv_cache_update.default(") == 3
    assert len([name for name in calls if "cos" in name]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["static", pytest.param("token", marks=pytest.mark.long)])
def test_the_benchmark_runs_on_a_cpu(activations: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    options = ["--batches", "1", "3", "--rounds", "1", "--steps", "1", "--rope", "always", "--activations", activations]
    result = fused_steps.main([*TINY.split(), *options, "--json", str(path)])
    rows = [row for row in result["rows"] if "batch" in row]
    assert [row["batch"] for row in rows] == [1, 3] and all(row["bitwise_equal"] and row["finite"] for row in rows)
    assert path.exists() and path.with_suffix(".md").read_text().count("\n| ") == 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_the_passes_take_less_than_two_percent_of_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 layers, everything that can fuse; in calls of Python functions, since seconds depend on the machine."""
    calls, of_passes = 0, []
    run = pipeline.FusionPass.__call__

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def counted(self: Any, graph: torch.fx.Graph) -> None:
        start = calls
        run(self, graph)
        of_passes.append(calls - start)

    monkeypatch.setattr(pipeline.FusionPass, "__call__", counted)
    made = bench(layers=32)
    target = vattn.compile(made.model, options=vattn.options(strict=True, rope="always"))
    step = made.builder.build([1] * 3, made.lengths, made.tables)
    with torch._inductor.config.patch(force_disable_caches=True), vattn.forward_context(step):
        sys.setprofile(count)
        try:
            target(*made._inputs(step))
        finally:
            sys.setprofile(None)
    assert len(of_passes) == 1 and of_passes[0] < 0.02 * calls, (of_passes, calls)
