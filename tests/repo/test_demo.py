"""The demo: what it prints, how well the model does with each cache format, and what it says of mistakes."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vattn
from examples.demo import main as demo
from examples.demo import quality
from examples.demo.checkpoint import build_llama, read_checkpoint
from examples.demo.model import AttentionOptions, Llama
from examples.demo.report import Progress, quoted
from vattn.cache.allocation import KVCacheAllocation
from vattn.calibration.plant_outliers import plant_outliers
from vattn.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "demo_model"


@pytest.fixture(scope="module")
def heldout() -> bytes:
    return (FOLDER / "heldout.txt").read_bytes()


def build(num_blocks: int) -> tuple[Llama, KVCacheAllocation]:
    model = build_llama(*read_checkpoint(FOLDER), AttentionOptions(*demo.CACHES["auto"]))
    return model, vattn.allocate_kv_cache(model, num_blocks=num_blocks)


@pytest.mark.slow
def test_bits_per_byte_are_those_of_the_model_card(heldout: bytes) -> None:
    """1.0122 was computed by transformers on dense attention, in fp32 and the same blocks; here it is four digits."""
    assert "1.0122" in (FOLDER / "README.md").read_text()
    assert quality.bits_per_byte(*build(quality.blocks_needed(16)), heldout) == pytest.approx(1.0122, abs=1e-4)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first two layers of the model, and less text."""
    from safetensors.torch import load_file, save_file

    folder: Path = tmp_path_factory.mktemp("two_layers")
    config = json.loads((FOLDER / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(FOLDER / "model.safetensors")
    left = {name: t for name, t in tensors.items() if ".layers." not in name or name.split(".")[2] in "01"}
    save_file(left, folder / "model.safetensors")
    (folder / "heldout.txt").write_bytes((FOLDER / "heldout.txt").read_bytes()[:1500])
    return folder


def quick_arguments(*more: str) -> list[str]:
    return ["--quick", "--max-new-tokens", "6", *more]


def test_quick_demo(two_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fresh_dynamo: None) -> None:
    numbers = tmp_path / "numbers.json"
    arguments = quick_arguments("--json", str(numbers), "--device", "cpu", "--model", str(two_layers))
    assert demo.main(arguments) == 0
    printed = capsys.readouterr()
    assert "36/36 tokens" in printed.err
    assert "chosen : TORCH_SDPA" in printed.out
    assert "no CUDA graphs: device cpu" in printed.out
    assert "6 of 6 equal, eager against compiled" in printed.out
    found = json.loads(numbers.read_text())
    assert found["compile"]["graphs"] == 1
    assert min(found["tokens_per_second"].values()) > 0
    assert [len(c["output"]) for c in found["continuations"]] == [6] * 6
    table = {(row["weights"], row["cache"]): row["bits_per_byte"] for row in found["bits_per_byte"]}
    assert len(table) == 6
    assert table["outliers planted", "fp8, unit scales"] > 1.01 * table["plain", "auto"]
    for line in table.values():
        assert f"{line:.4f}" in printed.out


def run_in_fresh_process(code: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


SETTING = """
from examples.demo import main as demo
setting = demo.read_setting(demo._parser().parse_args(["--quick", "--max-new-tokens", "2", "--device", "cpu"]))
model, cache = demo._build(setting, setting.tensors, demo.CACHES["auto"], demo._pool_blocks(setting))
"""


def test_demo_needs_torch_and_safetensors_alone() -> None:
    without = """
import sys
for name in ("transformers", "tqdm", "rich", "triton", "flashinfer", "hypothesis"):
    sys.modules[name] = None
"""
    run = """
requests, speed = demo._generate(setting, demo._generator(setting, model, cache), "eager")
assert all(len(request.output) == 2 for request in requests) and speed > 0
"""
    run_in_fresh_process(without + SETTING + run)


@pytest.mark.slow
def test_without_a_compiler_the_demo_says_why_and_goes_on(tmp_path: Path) -> None:
    one_layer = """
import dataclasses
tensors = {name: t for name, t in setting.tensors.items() if ".layers." not in name or ".layers.0." in name}
setting = dataclasses.replace(setting, config=dataclasses.replace(setting.config, num_layers=1), tensors=tensors)
model, cache = demo._build(setting, setting.tensors, demo.CACHES["auto"], demo._pool_blocks(setting))
"""
    run = """
results = demo.Results()
demo._compare_speed(setting, model, cache, results)
assert list(results.tokens_per_second) == ["eager"]
"""
    printed = run_in_fresh_process(
        SETTING + one_layer + run, CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)
    )
    assert "not compiled: InvalidCxxCompiler" in printed


@pytest.fixture
def copy(two_layers: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_layers, tmp_path / "model"))


def damage_json(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.v_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "no folder .*run the demo from a clone of the repository"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json cannot be read"),
    "half a config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "another model": (lambda f: damage_json(f, model_type="gpt2"), "model_type 'gpt2'. Allowed: 'llama'"),
    "another vocabulary": (lambda f: damage_json(f, vocab_size=300), "vocabulary of 300"),
    "another size": (lambda f: damage_json(f, hidden_size=128), "weights do not fit config.json"),
    "cut weights": (truncate, "model.safetensors cannot be read"),
    "a weight missing": (drop_a_weight, "weights do not fit config.json .*layers.1.self_attn.v_proj"),
    "no held-out text": (lambda f: (f / "heldout.txt").unlink(), "heldout.txt cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_model(copy: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    damage, message = DAMAGES[name]
    damage(copy)
    arguments = quick_arguments("--device", "cpu", "--model", str(copy))
    with pytest.raises(ConfigError, match=message):
        demo.run(demo.read_setting(demo._parser().parse_args(arguments)))
    assert demo.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("vattn demo: ")
    assert "Traceback" not in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device tpu"),
        (["--device", "cuda:99"], "--device cuda:99, which is not here"),
        (["--backend", "FASTEST"], "'FASTEST'. Allowed: auto, TORCH_SDPA"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--max-new-tokens", "2000"], "2048 bytes together"),
        (["--temperature", "-1"], "temperature >= 0"),
        (["--prompts", "no/such/file"], "no/such/file cannot be read"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--quick", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("def f():\\n\\treturn\n\nimport \n", encoding="utf-8")
    options = demo._parser().parse_args(["--prompts", str(file), "--quick", "--device", "cpu"])
    assert demo.read_setting(options).prompts == [b"def f():\n\treturn", b"import "]


def test_plant_outliers_touches_what_it_says() -> None:
    config, tensors = read_checkpoint(FOLDER)
    planted = plant_outliers(tensors, config.head_size, key_exponent=3, value_exponent=5)
    changed = {name for name in tensors if not torch.equal(tensors[name], planted[name])}
    assert changed == {
        f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(config.num_layers) for part in "qkvo"
    }
    ratio = (
        planted["model.layers.0.self_attn.k_proj.weight"].float() / tensors["model.layers.0.self_attn.k_proj.weight"]
    )
    rows = ratio.nanmean(1)
    assert rows.unique().tolist() == [1.0, 8.0]
    assert int((rows == 8).sum()) == 2 * 2 * config.num_kv_heads, "two channels of two pairs in every KV head"


def test_progress_is_a_bar_on_a_terminal_and_a_line_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, drawn in ((Terminal(), 3), (io.StringIO(), 1)):
        with Progress("work", total=2, unit="steps", stream=stream) as bar:
            bar.advance()
            bar.advance()
        assert stream.getvalue().count("work [") == drawn
        assert "2/2 steps" in stream.getvalue()


def test_bytes_that_are_no_text_are_shown_escaped() -> None:
    assert quoted(b"a\x1b", b"\xff\tb") == "    a\\x1b>>>\\xff\\tb"


def test_steps_of_a_measurement_are_counted_right(heldout: bytes) -> None:
    model, storage = build(quality.blocks_needed(16))
    steps = iter(range(1000))
    for length in (1, 129, 1025):
        before = next(steps)
        quality.bits_per_byte(model, storage, heldout[:length], progress=lambda: next(steps) and None)
        assert next(steps) - before - 1 == quality.num_steps(length)


def test_the_command_says_where_the_demo_is(capsys: pytest.CaptureFixture[str]) -> None:
    from vattn.__main__ import main

    assert main(["demo", "--quick"]) == 2
    assert (
        capsys.readouterr().err
        == "vattn: no installed package holds the demo. Run `make demo` in a checkout of vattn.\n"
    )
