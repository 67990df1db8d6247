"""Every example runs on this machine as a user would run it, and prints what it promises."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vattn
from vattn.config.device import parse_version

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[0-9][0-9]_*.py"))


LINES = {"01_paged_decode_by_hand.py": 45, "04_engine.py": 300, "15_http_server.py": 390, "19_single_request.py": 135}
"""How long an example may be, where that is not 120 lines."""


def run(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Run an example in a fresh process and return what it printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # The tests run Triton in its interpreter; a user does not.
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, *launcher, ROOT / "examples" / name, *arguments]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def check_distances(printed: str, count: int) -> None:
    """Assert that an example printed some relative distances, all of them as small as fp32 gives."""
    distances = re.findall(r"relative distance to [a-z ]+ (\S+)", printed)
    assert len(distances) == count and all(float(distance) < 1e-5 for distance in distances)


def test_decode_by_hand() -> None:
    check_distances(run("01_paged_decode_by_hand.py"), 2)


SOME = -1
PRINTED: dict[str, dict[str, int]] = {
    "02_fullgraph_compile.py": {"graphs compiled: 1\n": SOME, "eager and compiled differ by": 4},
    "05_sentence_embeddings.py": {
        "alone and packed differ by": 4,
        "139 rows, where padding would make 336": SOME,
        "graphs compiled: 1\n": SOME,
    },
    "07_whisper_like_decoding.py": {
        "step  3: 1 encoders run, 3 requests, 5 rows": SOME,  # a first step beside later ones
        "0 of 24 tokens differ from dense attention": SOME,
        "graphs compiled: 3\n": SOME,  # with encoder states, without, and a single row
    },
    "08_offload_prefix.py": {
        "33 blocks computed and saved": 2,
        "33 blocks loaded": 7,
        "equal bits every time: True": 3,
    },
    "09_multi_step_decode.py": {
        "tokens equal those of 8 steps built on the host": SOME,
        "lengths on the device: [48, 15, 30, 0]": SOME,
    },
    "11_differential_attention.py 2": {"0 of 144 tokens differ from the written-out formula": SOME},
    "14_hugging_face_model.py": {"all layers": SOME, "-" * 40: 4, "def add(a, b):": SOME, "tokens in": SOME},
}
"""What examples print, and how often."""


@pytest.mark.slow
@pytest.mark.parametrize("command", PRINTED)
def test_what_examples_print(command: str) -> None:
    printed = run(*command.split())
    for text, count in PRINTED[command].items():
        assert text in printed and count in (SOME, printed.count(text)), text


@pytest.mark.slow
def test_cuda_graph() -> None:
    printed = run("03_cuda_graph_changing_lengths.py")
    assert printed.count("differs by") == 6
    expected = "2 CUDA graphs in one memory pool" if torch.cuda.is_available() else "no CUDA graphs: device cpu"
    assert expected in printed


@pytest.mark.slow
def test_context_parallel() -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    printed = run("16_context_parallel.py")
    check_distances(printed, 8)
    assert "rank 0: holds 28 of 55 tokens" in printed and "rank 1: holds 27 of 55 tokens" in printed
    assert printed.count("ranks disagree: seq_lens of rank 1") == 2


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)])
def test_tensor_parallel(world: int) -> None:
    """The same text from 2 and 4 ranks, which have half a KV head each."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    printed = run("21_tensor_parallel.py", launcher=("-m", "torch.distributed.run", f"--nproc-per-node={world}"))
    assert f"{world} ranks, {4 // world} of 4 query heads on each" in printed
    assert "import sys\nimport tempfile" in printed


@pytest.mark.slow
def test_engine() -> None:
    printed = run("04_engine.py")
    assert printed.count("preempted") == 9 and "preempted 1 times" in printed
    assert "72 tokens, 64 of them found" in printed
    assert re.search(r"768 tokens in \S+ s", printed)


@pytest.mark.slow
def test_single_request() -> None:
    printed = run("19_single_request.py", "import ")
    assert printed.count("200 tokens in") == 2 and "import sys\nimport unittest" in printed


@pytest.mark.slow
@pytest.mark.skipif(parse_version(torch.__version__) < (2, 12), reason="older ones crash when they load the package")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cpp_decode() -> None:
    printed = run("20_cpp_decode.py", "2")
    assert "attention of 2 layers writes FP8" in printed and "the text of vattn.Generator: True" in printed


@pytest.mark.slow
def test_vision_tower_in_fp8() -> None:
    printed = run("06_vision_tower_fp8.py")
    assert "fp8=dynamic" in printed and "fp8=static" in printed
    assert "too early to save: 3 of 3 layers have seen fewer than 16 steps" in printed
    errors = [float(number) for number in re.findall(r"differs from bf16 by (\S+)%", printed)]
    assert len(errors) == 3 and all(0.1 < error < 5 for error in errors)


@pytest.mark.slow
def test_speculative_tree() -> None:
    printed = run("10_speculative_tree.py")
    assert printed.count("equal to greedy decoding: True") == 3
    plain, trees = map(int, re.search(r"(\d+) steps of one token a request, (\d+) with trees", printed).groups())
    assert plain == 64 and trees < plain * 0.75


@pytest.mark.slow
def test_fp8_end_to_end() -> None:
    pytest.importorskip("transformers")
    printed = run("17_fp8_end_to_end.py")
    assert "all layers" in printed and "linear layers: 56 fp8_static, 1 left: the head" in printed
    assert printed.count("attention 1/1: fused, writes fp8_static; query FP8") == 1, "layers share one graph"
    assert abs(float(re.search(r"in FP8 \S+ \((\S+)%\)", printed)[1])) < 2
    same, of = map(int, re.search(r"as it was: (\d+) of (\d+)", printed).groups())
    assert of == 72 and same > 24, "what is rounded otherwise may choose another token, and then another text"


@pytest.mark.slow
def test_prompt_lookup() -> None:
    pytest.importorskip("transformers")
    printed = run("18_prompt_lookup.py")
    assert printed.count("equal to greedy decoding: True") == 3
    plain, guessed = map(int, re.search(r"(\d+) steps without guesses, (\d+) with", printed).groups())
    assert plain == 96 and guessed < plain * 0.8
    right, guesses = map(int, re.search(r"(\d+) of (\d+) guesses were right", printed).groups())
    assert 0 < right <= guesses


@pytest.mark.long
def test_differential_attention_after_a_minute_of_training() -> None:
    printed = run("11_differential_attention.py")
    assert "0 of 144 tokens differ from the written-out formula" in printed
    assert float(re.search(r"loss (\S+),", printed)[1]) < 2.5


@pytest.mark.slow
def test_latent_attention() -> None:
    printed = run("13_latent_attention.py")
    assert "80 values a token in the cache instead of 640" in printed
    check_distances(printed, 5)


def test_all_examples_are_tested_and_short() -> None:
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert EXAMPLES
    for name in EXAMPLES:
        assert f'"{name}"' in source
        lines = len((ROOT / "examples" / name).read_text().splitlines())
        assert lines <= LINES.get(name, 120), f"{name} has {lines} lines"
        assert f"[{name}]({name})" in (ROOT / "examples" / "README.md").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_says_what_it_shows_and_finds_what_it_imports(name: str) -> None:
    tree = ast.parse((ROOT / "examples" / name).read_text())
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "vattn":
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vattn":
            assert hasattr(vattn, node.attr), ast.unparse(node)


@pytest.mark.slow
def test_a_kv_format_of_your_own() -> None:
    name = "12_a_kv_format_of_your_own.py"
    printed = run(name)
    assert "two_bits NHD, 2 KV heads of 64" in printed
    assert re.search(r"36 bytes a token and head on \S+, output \(50, 512\)", printed)
    # All of it, blank lines and comments included.
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 80
