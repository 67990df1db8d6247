"""A replayed call launches what the launcher launches, with the addresses of its own tensors."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_launching import RECORDED
from tests.repo.test_packaging import run_python
from vattn.kernels import replay

ROOT = Path(__file__).parents[2]


class Call:
    """An op's call of two tensors: a launch for each pair of tensors that it is told to make."""

    def __init__(self) -> None:
        self.recordings: dict[Any, Any] = {}
        self.runs, self.launched = 0, list[list[Any]]()

    def launch(self, *values: Any, stream: int) -> None:
        assert stream == 7
        self.launched.append([*values])

    def __call__(self, *tensors: Tensor, work: Any = None) -> list[Any]:
        def run() -> None:
            self.runs += 1
            values = [5, *(tensors if work is None else work(*tensors))]
            self.launched.append(values)
            if replay.active.recorder is not None:
                replay.active.recorder.launches.append((self.launch, [*values]))

        self.launched.clear()
        replay.replay_or_run(self.recordings, [*tensors], run)
        (launched,) = self.launched
        return [value.data_ptr() if isinstance(value, Tensor) else value for value in launched]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(replay, "_device", lambda: 0)
    monkeypatch.setattr(replay, "_stream", lambda device: 7)
    return Call()


def zeros(offset: int = 0) -> Tensor:
    return torch.zeros(64 + offset)[offset:]


def test_a_second_call_gets_its_own_addresses(call: Call) -> None:
    for _ in range(3):
        first, second = zeros(), zeros()
        assert call(first, second) == [5, first.data_ptr(), second.data_ptr()]
    assert call.runs == 1


def test_views_and_new_memory_are_found(call: Call) -> None:
    def work(first: Tensor, second: Tensor) -> list[Tensor]:
        scratch, counter = torch.empty(100, dtype=torch.uint8), torch.zeros(9, dtype=torch.int32)
        return [second[16:], first.view(torch.int32), scratch, scratch[32:], counter]

    call(zeros(), zeros(), work=work)
    first, second = zeros(), zeros()
    _, tail, whole, scratch, part, counter = call(first, second, work=work)
    assert call.runs == 1 and tail == second.data_ptr() + 64 and whole == first.data_ptr()
    assert part == scratch + 32 and len({scratch, counter, first.data_ptr(), second.data_ptr()}) == 4
    (recording,) = call.recordings.values()
    assert recording.allocations == [(torch.empty, 100), (torch.zeros, 36)]


@pytest.mark.parametrize("aligned", [True, False])
def test_other_alignments_and_aliases_have_recordings_of_their_own(call: Call, aligned: bool) -> None:
    one = zeros()
    for first, second in ((zeros(), zeros()), (zeros(1), zeros()) if aligned else (one, one), (zeros(), zeros())):
        assert call(first, second) == [5, first.data_ptr(), second.data_ptr()]
    assert call.runs == 2


@pytest.mark.parametrize(
    "work",
    [
        lambda first, second: [first, second.zero_()],
        lambda first, second: [first, second.clone()],
        lambda first, second: [first, _ELSEWHERE],
        lambda first, second: [replay.unrecorded(first), second],
    ],
    ids=["a write", "a copy", "memory of unknown origin", "an unrecorded launch"],
)
def test_what_is_more_than_launches_runs_each_time(call: Call, work: Any) -> None:
    for _ in range(3):
        call(zeros(), zeros(), work=work)
    assert call.runs == 3


_ELSEWHERE = torch.zeros(3)


def test_a_view_of_memory_that_two_arguments_share_is_not_guessed(call: Call) -> None:
    for _ in range(2):
        memory = zeros()
        first, second = memory[:16], memory[16:]
        call(first, second, work=lambda first, second: [first, second[4:]])
    assert call.runs == 2


def test_an_error_leaves_no_recording(call: Call) -> None:
    def fails(first: Tensor, second: Tensor) -> list[Tensor]:
        raise ValueError

    with pytest.raises(ValueError):
        call(zeros(), zeros(), work=fails)
    assert replay.active.recorder is None and not call.recordings


REPLAYED = """
from vattn.kernels import replay
from vattn.kernels.replay import replay_or_run, tensors_of
replay._device, replay._stream = lambda: 0, lambda device: 0

def addresses(calls):
    def number(value):
        if hasattr(value, "block_shape"):
            return number(value.base), value.shape, value.strides, value.block_shape, type(value)
        return value.data_ptr() if isinstance(value, torch.Tensor) else value
    return [(grid, [number(value) for value in values]) for grid, values in calls]

def again(args, update):
    launches.clear()
    replay_or_run(recordings[0], tensors_of(args), lambda: decode.decode(args, config))
    replay_or_run(recordings[1], tensors_of(update), lambda: general.update_kv_cache(update, config))
    return addresses(launches)

recordings = {}, {}
again(*step())
calls = step()
launching.launch = decode.launch_again = general.launch = None
replayed = again(*calls)
decode.launch_again = general.launch = launch
assert len(replayed) == 3 and replayed == addresses(run(*calls))
print("replayed")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's driver for the GPU launches")
def test_a_decode_step_is_replayed_as_it_was_launched() -> None:
    script = RECORDED.replace("run(*step())\n", "launch = launching.launch\nrun(*step())\n", 1) + REPLAYED
    assert run_python(script, TRITON_INTERPRET="0").split()[-1] == "replayed"


def test_no_launch_of_a_replayable_op_goes_unseen() -> None:
    """TRITON_ATTN's ops launch by `launch`, which records, or mark the launch as `unrecorded`."""
    folders = ("triton/attention", "triton/cache", "triton/common", "hopper/decode", "hopper/decode_packed")
    files = [file for folder in folders for file in (ROOT / "vattn/kernels" / folder).glob("*.py")]
    files += [*(ROOT / "vattn/kernels/hopper").glob("*.py"), *(ROOT / "vattn/kernels/hopper/prefill").glob("*.py")]
    bare = {
        f"{file.stem}: {ast.unparse(node.func.value)}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }
    others = {"advance_step", "dense_decode", "encoder", "external_rows", "merge", "planned_rows", "rope_update"}
    kernels = {name for name in bare if name.endswith("kernel") and name.split(":")[0] not in others}
    assert kernels == {"launching: kernel"}, "launch these by `launching.launch`, or as `unrecorded(kernel)[grid](...)`"
