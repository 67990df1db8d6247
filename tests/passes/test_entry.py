"""The three entry points are equal in effect, keep the user's own passes, and survive the compile caches."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import second_process
import torch
from forms import escaping, static, unquantised
from forms import plain as plain_output
from harness import Attend, captured, code_of, generated_code, inputs_of, step
from torch._inductor.custom_graph_pass import CustomGraphPass

import vattn
from vattn.backends import selector
from vattn.backends.base import Exclusion
from vattn.errors import ConfigError, FusionError, UnknownOptionError
from vattn.ops import fusion_notes
from vattn.passes import pipeline, report
from vattn.passes.region_run import same_bits

SLOT = "post_grad_custom_pre_pass"


def run_and_get_codes(target: Any, model: Attend, query_lens: list[int]) -> tuple[Any, list[str]]:
    from torch._inductor.utils import run_and_get_code

    with step(model, query_lens):
        return run_and_get_code(target, *inputs_of(sum(query_lens)))


def eager(model: Attend) -> torch.Tensor:
    with step(model, [3, 4]):
        return model(*inputs_of(7))


def by_enable(mode: str | None) -> Callable[[Any], Any]:
    def compiled(model: Any) -> Any:
        vattn.enable()
        return torch.compile(model, mode=mode, fullgraph=True)

    return compiled


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "enable": by_enable(None),
    "enable, reduce-overhead": by_enable("reduce-overhead"),
    "enable, max-autotune": by_enable("max-autotune"),
    "enable, max-autotune-no-cudagraphs": by_enable("max-autotune-no-cudagraphs"),
    "backend": lambda m: torch.compile(m, backend=vattn.backend, fullgraph=True),
    "backend, mode": lambda m: torch.compile(m, backend=vattn.backend, mode="reduce-overhead"),
    "backend, options": lambda m: torch.compile(
        m, backend=vattn.backend, options={"max_autotune": False, "vattn.strict": True}
    ),
    "options": lambda m: torch.compile(m, options=vattn.options()),
    "options, mode": lambda m: torch.compile(m, options=vattn.options({"max_autotune": False}, mode="max-autotune")),
    "vattn.compile": lambda m: vattn.compile(m, options=vattn.options(strict=True)),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_point_fuses(name: str) -> None:
    model = Attend(static)
    expected = eager(model)
    got, (code,) = run_and_get_codes(ENTRIES[name](model), model, [3, 4])
    assert same_bits(got, expected)
    assert code.count("torch.ops.vattn.attention.default(") == 1
    assert "output_format=fp8_static" in code
    assert "cpp_fused" not in code  # the quantiser's kernel, the only one this model needs, is gone
    assert [node.outcome for node in vattn.fusion_report()] == ["fused"]


def test_without_the_passes_the_quantiser_is_a_kernel() -> None:
    """What the test above would see if nothing were fused."""
    model = Attend(static)
    code = code_of(torch.compile(model), model, [3, 4], *inputs_of(7))
    assert "cpp_fused" in code and "output_format" not in code
    assert len(vattn.fusion_report()) == 0


class Counting(CustomGraphPass):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "counting"


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_a_pass_in_the_users_options_keeps_running() -> None:
    mine, model = Counting(), Attend(static)
    with torch._inductor.config.patch(force_disable_caches=True):
        run_and_get_codes(torch.compile(model, options=vattn.options({SLOT: mine})), model, [3, 4])
    assert mine.calls == 1
    assert vattn.fusion_report().count("fused") == 1


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(("entry", "listed"), [("enable", True), ("backend", False), ("options", True)])
def test_passes_that_were_there_keep_running(entry: str, listed: bool) -> None:
    """Inductor takes lists from torch 2.12 on; vattn's is one pass that runs them, on older versions too."""
    calls: list[int] = []
    mine, model = Counting(), Attend(static)
    taken = [mine, lambda graph: calls.append(mine.calls)] if listed else mine
    with torch._inductor.config.patch({"force_disable_caches": True, SLOT: taken}):
        run_and_get_codes(ENTRIES[entry](model), model, [3, 4])
        vattn.disable()
        assert getattr(torch._inductor.config, SLOT) == taken
    assert mine.calls == 1 and calls == [1] * listed  # in their order
    assert vattn.fusion_report().count("fused") == 1


def test_the_cache_key_is_that_of_everything_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**arguments: Any) -> Any:
        return vattn.options(**arguments)[SLOT].uuid()

    plain, mine = key(), Counting()
    assert vattn.options() == vattn.options() != vattn.options(strict=True)
    assert plain == key() and isinstance(plain, str)
    assert len({plain, key(strict=True), key(output_formats=["fp8_static"]), key(base={SLOT: mine})}) == 4
    assert key(base={SLOT: print}) is None  # a plain function has no key, so nothing may be cached
    keys = {plain}
    backend = selector.get_backend("TORCH_SDPA")
    changes: tuple[tuple[Any, str, Any], ...] = (
        ("vattn.passes.pipeline", "SCHEMA_VERSION", -1),
        ("vattn.passes.pipeline", "__version__", "0"),
        ("vattn.passes.pipeline", "_source_digest", lambda: "other sources"),
        (torch, "__version__", "2.0"),
        (backend, "capabilities", replace(backend.capabilities, query_loads=("plain",))),
    )
    for owner, name, changed in changes:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name, changed)
            keys.add(key())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for capability in ((9, 0), (10, 0)):
            patch.setattr(torch.cuda, "get_device_capability", lambda index=0, found=capability: found)
            keys.add(key())
    assert len(keys) == len(changes) + 3 and key() == plain
    # No order that differs from process to process decides: that of a set, or of the files in a folder.
    rules, same = [Exclusion(frozenset(names), "why") for names in ([0, 8], [8, 0])], []
    for rule in rules:
        with monkeypatch.context() as patch:
            changed = replace(backend.capabilities, features=rule.names, exclusions=(rule,))
            patch.setattr(backend, "capabilities", changed)
            same.append(key())
    digest, glob = pipeline._source_digest(), Path.glob
    pipeline._source_digest.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", lambda *args: [*glob(*args)][::-1])
        assert pipeline._source_digest() == digest and same[0] == same[1] != plain
    assert all(any(pipeline._PACKAGE.glob(pattern)) for pattern in pipeline._SOURCES)


def test_several_models_in_one_process() -> None:
    """Compiled in turn by different entries; each keeps its graph and its part of the report."""
    models = [Attend(static), Attend(plain_output), Attend(static)]
    expected = [eager(model) for model in models]
    targets = [ENTRIES["options"](models[0]), ENTRIES["backend"](models[1]), torch.compile(models[2])]
    for _ in range(2):
        for target, model, want in zip(targets, models, expected, strict=True):
            with step(model, [3, 4]):
                assert same_bits(target(*inputs_of(7)), want)
    assert [node.outcome for node in vattn.fusion_report()] == ["fused", "refused"]


def test_enable_nests_and_restores() -> None:
    config = torch._inductor.config
    with vattn.enable():
        outer = getattr(config, SLOT)
        with vattn.enable(strict=True):
            assert getattr(config, SLOT).strict
        assert getattr(config, SLOT) is outer and not outer.strict
        vattn.enable(strict=True)
        assert getattr(config, SLOT).inner == () and fusion_notes.is_strict()
        vattn.disable()
        assert getattr(config, SLOT) is None and not fusion_notes.is_strict()
    assert getattr(config, SLOT) is None
    vattn.disable()


def test_disable_leaves_alone_what_others_put_into_the_slot() -> None:
    config, mine = torch._inductor.config, Counting()
    with config.patch({SLOT: mine}):
        vattn.enable()
    assert getattr(config, SLOT) is None  # as the end of the patch left it
    vattn.disable()
    assert getattr(config, SLOT) is None
    vattn.enable()
    vattn.disable()
    assert getattr(config, SLOT) is None
    with config.patch({SLOT: None}):
        vattn.enable()
        setattr(config, SLOT, mine)
        vattn.disable()
        assert getattr(config, SLOT) is mine
        setattr(config, SLOT, vattn.options()[SLOT])
        vattn.disable()
        assert getattr(config, SLOT) == vattn.options()[SLOT]


@pytest.mark.parametrize(
    ("entry", "form"),
    [("enable", escaping), ("backend", unquantised), ("options", escaping)],
)
@pytest.mark.parametrize("cached", [True, False])
def test_strict_raises_our_error(entry: str, form: Any, cached: bool) -> None:
    model = Attend(form)
    if entry == "enable":
        vattn.enable(strict=True)
        target = torch.compile(model)
    elif entry == "backend":
        target = torch.compile(model, backend=vattn.backend, options={"vattn.strict": True})
    else:
        target = torch.compile(model, options=vattn.options(strict=True))
    without = torch._inductor.config.patch(fx_graph_cache=cached)
    with pytest.raises(FusionError, match="attention 1/1") as refused, without, step(model, [3, 4]):
        target(*inputs_of(7))
    # The user's own line, and none of torch's advice about errors of its own.
    assert "harness.py" in str(refused.value) or "forms.py" in str(refused.value)
    assert "TORCHDYNAMO_VERBOSE" not in str(refused.value)
    assert "StrictFusionError" not in repr(refused.value) and type(refused.value).__module__ == "vattn.errors"
    twin = pickle.loads(pickle.dumps(refused.value))
    assert type(twin) is FusionError and str(twin) == str(refused.value)


def test_formats_can_be_left_out() -> None:
    model = Attend(static)
    target = torch.compile(model, options=vattn.options(output_formats=["fp8_per_token"]))
    code = code_of(target, model, [3, 4], *inputs_of(7))
    assert "output_format=" not in code
    (node,) = vattn.fusion_report()
    assert (node.outcome, node.reason) == ("near miss", "it is fp8_static, which is not among output_formats")


@pytest.mark.parametrize("listed", ["fp8_group64", "fp8_group64_col"])
def test_scales_are_written_in_a_listed_layout_alone(listed: str) -> None:
    def columns(o: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.vattn.quant_fp8_group(o, 64, False, True)

    (node,) = captured(Attend(columns), formats=(listed,)).report
    assert node.output_format == ("fp8_group64_col" if listed.endswith("col") else "none")


def test_log_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = Attend(escaping)
    with caplog.at_level(logging.INFO, "vattn"):
        code_of(torch.compile(model, options=vattn.options()), model, [3, 4], *inputs_of(7))
    (line,) = [r.message for r in caplog.records if r.message.startswith("fusion:")]
    assert line.startswith("fusion: 1 attention nodes: 0 fused, 0 refused, 1 near miss; near miss: ")


@pytest.mark.parametrize("place", ["find.find", "rewrite._replacements"])
def test_a_matcher_that_throws_breaks_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("for the test")

    monkeypatch.setattr(f"vattn.passes.output_quant.{place}", broken)
    model = Attend(static)
    capture = captured(model)
    with step(model, [3, 4]):
        assert same_bits(*capture.both(lambda: capture.target(*inputs_of(7))))
    (node,) = capture.report
    assert node.outcome == "refused" and node.reason == "the matcher failed: ZeroDivisionError: for the test"


def test_passes_that_throw_as_a_whole_break_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: torch.fx.Graph) -> None:
        raise ZeroDivisionError("for the test")

    monkeypatch.setattr("vattn.passes.pipeline.attention_calls", broken)
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    vattn.options()[SLOT](graph)
    assert "this graph has no report" in caplog.text and len(graph.nodes) == 3
    with pytest.raises(ZeroDivisionError):
        vattn.options(strict=True)[SLOT](graph)


def test_threads_compile_for_themselves() -> None:
    models = [Attend(static) for _ in range(2)]
    expected = [eager(model) for model in models]
    results: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        with torch.no_grad(), step(models[index], [3, 4]):
            target = torch.compile(lambda *inputs: models[index](*inputs), options=vattn.options())
            results[index] = target(*inputs_of(7))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same_bits(results[index], expected[index]) for index in range(2))
    assert {node.outcome for node in vattn.fusion_report()} == {"fused"}


@pytest.mark.slow
def test_second_process_hits_the_caches_and_has_the_report() -> None:
    first = json.loads(json.dumps(second_process.compiled()))
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(here / "second_process.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout.splitlines()[-1])
    assert first["inductor"] == {"fxgraph_cache_miss": 1}
    assert second["inductor"] == {"fxgraph_cache_hit": 1} and second["autograd"]["autograd_cache_hit"] == 1
    assert first["outputs"] == second["outputs"]
    ((name, nodes),) = first["report"].items()
    assert not any(node["cached"] for node in nodes)
    assert second["report"] == {name: [{**node, "cached": True} for node in nodes]}
    assert [node["outcome"] for node in nodes] == ["fused", "refused", "refused", "refused"]
    assert [node["query_outcome"] for node in nodes] == ["", "", "fused", "fused"]
    assert [node["rope_outcome"] for node in nodes] == ["", "", "", "fused"]
    assert "forms.py" in nodes[0]["source"] and "queries.py" in nodes[2]["query_source"]


@pytest.mark.parametrize("taken", [3, "pass", [3], [print, None]])
def test_a_slot_taken_by_something_that_is_no_pass(taken: Any) -> None:
    with torch._inductor.config.patch({SLOT: taken}):
        for call in (vattn.enable, vattn.options):
            with pytest.raises(ConfigError, match=f"{SLOT} holds"):
                call()
    with pytest.raises(ConfigError, match=f"{SLOT} holds"):
        vattn.options({SLOT: taken})


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="fp9"):
        vattn.enable(output_formats=["fp8_static", "fp9"])
    for listed in ("fp8_static", 3):
        with pytest.raises(ConfigError, match=f"output_formats={listed!r}"):
            vattn.options(output_formats=listed)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode='fastest'"):
        vattn.options(mode="fastest")
    with pytest.raises(ConfigError, match="name a mode as mode="):
        vattn.options("max-autotune")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="strict='yes'"):
        vattn.options(strict="yes")  # type: ignore[arg-type]
    assert getattr(torch._inductor.config, SLOT) is None


def test_unknown_option_of_the_backend() -> None:
    target = torch.compile(lambda x: x + 1, backend=vattn.backend, options={"vattn.stict": True})
    with pytest.raises(Exception, match=r"vattn\.stict") as raised:
        target(torch.ones(2))
    assert isinstance(raised.value, UnknownOptionError) or isinstance(
        getattr(raised.value, "inner_exception", None), UnknownOptionError
    )


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_an_error_of_another_pass_is_raised_without_a_cache() -> None:
    def broken(graph: torch.fx.Graph) -> None:
        raise ZeroDivisionError("for the test")

    target = torch.compile(lambda x: x + 1, backend=vattn.backend, options={SLOT: broken})
    with torch._inductor.config.patch(force_disable_caches=True), pytest.raises(Exception, match="for the test"):
        target(torch.ones(2))


def test_mode_and_options_together_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="mode or options"):
        torch.compile(lambda x: x, backend=vattn.backend, mode="max-autotune", options={"vattn.strict": True})


def test_a_model_without_attention() -> None:
    target = torch.compile(lambda x: x * 3, options=vattn.options())
    generated_code(lambda: target(torch.ones(4)))
    assert len(vattn.fusion_report()) == 0
    why = vattn.fusion_report().why_empty
    assert why.startswith("the passes ran on 1 graph, none with attention of vattn")


def test_an_empty_report_says_whether_the_passes_were_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without `vattn.options` reads like one in which nothing could be fused."""
    monkeypatch.setattr(report, "_enabled", False)
    off = vattn.fusion_report()
    assert off.why_empty.startswith("the passes are off: ") and "options=vattn.options()" in off.why_empty
    assert str(off) == f"0 attention nodes: 0 fused, 0 refused, 0 near miss\n  {off.why_empty}"
    vattn.options()
    assert vattn.fusion_report().why_empty.startswith("the passes were switched on, and have run on no graph")
    assert not report.FusionReport(()).why_empty


def test_graphs_on_which_the_passes_fail_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("vattn.passes.pipeline.fuse_graph", fail)
    generated_code(lambda: torch.compile(lambda x: x * 5, options=vattn.options())(torch.ones(4)))
    assert vattn.fusion_report().why_empty == "the passes failed on 1 graph; the log says why"
