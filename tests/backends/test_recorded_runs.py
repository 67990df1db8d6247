"""Records of runs: what they cover is called tested, everything else untested."""

import dataclasses

import pytest

from tests.conformance.record import Recorder, merge_files, merged, write_runs
from vattn.backends import recorded_runs, selector
from vattn.backends.mla.registry import mla_backends
from vattn.backends.recorded_runs import FOLDER, RunRecord, read_runs, verdict
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.config.features import request_parts

HOPPER = DeviceInfo("cuda", (9, 0), "H")
PLAIN = AttentionConfig(8, 2, 64, 64, 0.125, "bfloat16", "bfloat16", backend="TORCH_SDPA")
RUN = RunRecord(
    package="engine",
    version="1.2",
    device="GPU X",
    capability=(9, 0),
    torch="2.11.0",
    triton="3.6.0",
    date="2026-01-01",
    requests=10,
    accepted=8,
    failed=0,
    cells=dict.fromkeys(request_parts(PLAIN), 0.001),
)


def of(config, running=("engine", "1.2"), capability=(9, 0), runs=(RUN,)):
    return verdict(runs, running, capability, request_parts(config))


def test_what_a_run_covers_is_tested() -> None:
    assert of(PLAIN) == "ran: engine 1.2 on GPU X (sm_90)"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda: of(PLAIN.replace(sinks=True, lse=True)), "untested: lse, sinks never ran on engine 1.2"),
        (lambda: of(PLAIN.replace(dtype="float16")), "untested: dtype=float16 never ran"),
        (lambda: of(PLAIN, ("engine", "1.3")), "untested: with engine 1.3 on sm_90; recorded is engine 1.2"),
        (lambda: of(PLAIN, None), "untested: with no package on sm_90; recorded is engine 1.2"),
        (lambda: of(PLAIN, capability=(10, 0)), "untested: with engine 1.2 on sm_100; recorded is engine 1.2"),
        (lambda: of(PLAIN, runs=()), "untested: no run on a GPU is recorded"),
    ],
)
def test_everything_else_is_untested(answer, text) -> None:
    assert answer().startswith(text)


def test_wrong_requests_are_told() -> None:
    assert of(PLAIN, runs=[dataclasses.replace(RUN, failed=2)]).endswith(", 2 of 8 accepted requests were wrong")


def test_parts_of_two_runs_do_not_make_one() -> None:
    other = dataclasses.replace(RUN, torch="2.13.0", cells={**RUN.cells, "sinks": 0.1})
    alone = dataclasses.replace(RUN, cells={**RUN.cells, "lse": 0.1})
    assert of(PLAIN.replace(sinks=True, lse=True), runs=[other, alone]).startswith("untested: this combination")


def test_explain_tells_on_a_gpu_and_not_on_a_cpu(monkeypatch) -> None:
    run = dataclasses.replace(RUN, package="torch", version=selector.get_backend("TORCH_SDPA").running()[1])
    monkeypatch.setattr(selector, "runs_of", lambda name: (run,))
    selector.forget_decisions()
    try:
        assert "TORCH_SDPA : accepts; ran: torch" in str(selector.explain(PLAIN, HOPPER))
        assert "TORCH_SDPA : accepts; untested: sinks" in str(selector.explain(PLAIN.replace(sinks=True), HOPPER))
        assert str(selector.explain(PLAIN, "cpu")).endswith("TORCH_SDPA : accepts")
    finally:
        selector.forget_decisions()


def test_records_are_read_as_they_were_written(tmp_path) -> None:
    run = dataclasses.replace(RUN, cells={"lse": 0.0012345, "sinks": None}, errors=("one",))
    write_runs(tmp_path / "new" / "A.json", [run])
    assert read_runs(tmp_path / "new" / "A.json") == (dataclasses.replace(run, cells={"lse": 0.00123, "sinks": None}),)


def test_runs_with_the_same_versions_are_joined() -> None:
    first = dataclasses.replace(RUN, cells={"lse": 0.1, "alibi": None}, errors=("one",))
    second = dataclasses.replace(RUN, cells={"lse": 0.2, "sinks": 0.3}, failed=1, errors=("two",))
    other = dataclasses.replace(RUN, version="2.0")
    joined = merged([first, other, second])
    assert [run.version for run in joined] == ["1.2", "2.0"]
    assert joined[0].cells == {"lse": 0.2, "alibi": None, "sinks": 0.3}
    assert (joined[0].requests, joined[0].failed, joined[0].errors) == (20, 1, ("one", "two"))


def test_merging_replaces_the_run_of_the_same_version_and_keeps_others(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr("tests.conformance.record.FOLDER", folder)
    old = dataclasses.replace(RUN, version="1.0")
    write_runs(folder / "X.json", [old, RUN])
    for part in ("0", "1"):
        write_runs(tmp_path / f"X-{part}.json", [dataclasses.replace(RUN, requests=7)])
    assert merge_files([tmp_path / "X-0.json", tmp_path / "X-1.json"]) == [folder / "X.json"]
    assert [(run.version, run.requests) for run in read_runs(folder / "X.json")] == [("1.0", 10), ("1.2", 14)]


def test_committed_records_are_of_backends_that_exist() -> None:
    for path in FOLDER.glob("*.json"):
        assert path.stem in (*selector.backend_names(), *mla_backends())
        assert recorded_runs.runs_of(path.stem)


def test_a_long_run_leaves_what_it_saw_when_it_is_killed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tests.conformance.record.SAVE_SECONDS", -1.0)
    recorder = Recorder("TORCH_SDPA", "cpu", out=tmp_path / "TORCH_SDPA-0.json")
    parts = request_parts(PLAIN)
    recorder.count(lambda: 0.25, parts, "")
    recorder.count(lambda: 1 / 0, parts, "how to repeat it")
    (run,) = read_runs(recorder.out)
    assert (run.requests, run.accepted, run.failed) == (2, 2, 1)
    assert run.cells["dtype=bfloat16"] == 0.25
    assert run.errors == ("ZeroDivisionError: division by zero [how to repeat it]",)
