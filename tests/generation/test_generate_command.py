"""`python -m vattn generate` on the repository's model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from vattn.__main__ import main
from vattn.cli.checkpoints import DEMO_MODEL
from vattn.cli.generate import _sampling
from vattn.errors import VattnError
from vattn.generation.sampling import Sampling

QUICK = ["generate", "--max-new-tokens", "8", "--device", "cpu", "--memory", "8MiB"]


def run(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    status = main([*QUICK, *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_one_prompt_is_streamed(capsys: Any) -> None:
    status, out, err = run(capsys, "--prompt", "def ")
    assert status == 0 and len(out.strip("\n")) > 3
    assert "8 tokens in" in err and "tokens/s" in err


def test_drafts_and_groups_change_no_text(capsys: Any) -> None:
    arguments = ("--prompt", "x = 1\nx = 1\nx = ", "--max-new-tokens", "16")
    status, text, err = run(capsys, *arguments, "--drafts", "3", "--hybrid")
    assert status == 0 and "drafts right" in err
    before, after = (json.loads(run(capsys, *arguments, "--json", *more)[1]) for more in ((), ("--drafts", "3")))
    assert after["text"] == before["text"] == text.removesuffix("\n") and "drafted_tokens" not in before
    assert after["drafted_tokens"] >= after["accepted_tokens"] > 0


def test_fp8_checkpoints_keep_their_codes(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model, saved in FP8: codes of the files, or with --dequantise what transformers makes of them."""
    pytest.importorskip("compressed_tensors")
    import transformers

    import vattn
    from tests.integrations.fp8_checkpoints import write_compressed_tensors
    from vattn.cli import generate as command
    from vattn.layers.fp8_linear import FP8Linear

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    write_compressed_tensors(tmp_path, model.requires_grad_(False))
    counts = []
    make = command.Generator

    def counting(packed: Any, *arguments: Any, **options: Any) -> vattn.Generator:
        counts.append(sum(isinstance(module, FP8Linear) for module in packed.modules()))
        return make(packed, *arguments, **options)

    monkeypatch.setattr(command, "Generator", counting)
    arguments = ("--prompt", "def ", "--model", str(tmp_path), "--max-new-tokens", "2")
    for more in ((), ("--dequantise",), ("--kv-cache-dtype", "fp8")):
        status, _, err = run(capsys, *arguments, *more)
        assert status == 0 and "CacheConfig" not in err
        assert ("which a cache in 'auto' does not use; --kv-cache-dtype fp8 does" in err) == ("fp8" not in more)
    assert counts == [counts[0], 0, counts[0]] and counts[0] > 0


def test_dequantise_is_for_fp8_checkpoints(capsys: Any) -> None:
    status, out, err = run(capsys, "--prompt", "def ", "--dequantise")
    assert status == 2 and not out and "--dequantise" in err


def test_a_file_of_prompts_as_json(capsys: Any, tmp_path: Path) -> None:
    lines = [
        {"prompt": "def "}, {"prompt": "import ", "max_new_tokens": 3}, {"prompt": "x" * 9000},
        {"prompt": "def ", "temperature": 1.0, "seed": 4}, {"prompt": "class A:\n", "stop_strings": [" "]},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    status, out, _ = run(capsys, "--file", str(path), "--json")
    rows = {row["index"]: row for row in map(json.loads, out.splitlines())}
    assert status == 1 and len(rows) == 5
    assert "RequestError" in rows[2]["error"] and len(rows[1]["tokens"]) == 3
    assert rows[0]["text"] == bytes(rows[0]["tokens"]).decode() != rows[3]["text"]
    assert rows[4]["reason"] == "stop string" and " " not in rows[4]["text"]


@pytest.mark.parametrize("scales", [["--kv-scales", "unit"], []])
def test_fp8_caches_want_scales(capsys: Any, scales: list[str]) -> None:
    status, out, err = run(capsys, "--prompt", "def ", "--kv-cache-dtype", "fp8", *scales)
    assert (status, bool(out)) == ((0, True) if scales else (2, False))
    if not scales:
        assert "\nvattn: " in err and "--kv-scales unit" in err and "QuantConfig" not in err


WRONG = {
    "no such device": (["--prompt", "x", "--device", "cuda:99"], "cuda:99"),
    "a length without need": (["--prompt", "x", "--rope-length", "8"], "same for every length"),
    "no prompt": ([], "--prompt TEXT or --file"),
    "no folder": (["--prompt", "x", "--model", "nowhere"], "config.json"),
    "greedy cut": (["--prompt", "x", "--top-k", "3"], "temperature"),
    "scales": (["--prompt", "x", "--kv-scales", "unit"], "--kv-scales with --kv-cache-dtype auto"),
    "scales file": (["--prompt", "x", "--kv-cache-dtype", "fp8", "--kv-scales", "none.json"], "calibration file"),
    "drafts": (["--prompt", "x", "--drafts", "-2"], "num_drafts=-2"),
    "file": (["--file", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory."),
    "grammar file": (["--prompt", "x", "--ebnf", "nowhere.ebnf"], "nowhere.ebnf: No such file or directory."),
    "another library's name": (["--prompt", "x", "--max-tokens", "3"], "no --max-tokens. Try: --max-new-tokens."),
    "underscores": (["--prompt", "x", "--max_num_reqs=3"], "no --max_num_reqs=3. Try: --max-num-reqs."),
    "an option without a likeness": (["--prompt", "x", "--mirostat", "2"], "no --mirostat. See"),
    "system": (["--prompt", "x", "--system", "Be brief."], "--chat"),
    "log-probabilities": (["--prompt", "x", "--logprobs", "2"], "--json"),
    "two grammars": (["--prompt", "x", "--regex", "a", "--ebnf", __file__], "one of json_schema"),
    "a model without chats": (["--chat"], "no chat template"),
    "chat as rows": (["--chat", "--json"], "nothing to generate"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_use(capsys: Any, kind: str) -> None:
    arguments, text = WRONG[kind]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and text in err and err.splitlines()[-1].startswith("vattn: ")


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "x"], ["kv-report"]], ids=str)
def test_a_wheel_carries_no_model(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("vattn.cli.checkpoints.DEMO_MODEL", tmp_path / "demo_model")
    assert main([*arguments, "--device", "cpu"]) == 2
    assert "a wheel carries no model), or pass --model DIR" in capsys.readouterr().err


LINES = [
    "{",
    "[]",
    '["a"]',
    "3",
    '{"text": "x"}',
    '{"prompt": "x", "top_p": 3}',
    '{"prompt": 3}',
    '{"prompt": "x", "temprature": 1}',
    '{"prompt": "x", "stop_strings": "END"}',
]


@pytest.mark.parametrize("line", LINES)
def test_wrong_lines_of_a_file(capsys: Any, tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    status, _, err = run(capsys, "--file", str(path))
    assert status == 2 and "prompts.jsonl:2" in err
    assert "TypeError" not in err
    if not isinstance(json.loads(line) if line != "{" else {}, dict):
        assert "no object" in err and "dictionary update" not in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 3}, "Try: write max_new_tokens=3."),
        ({"grammar": "yes|no"}, 'Try: grammar={"regex": "yes|no"}.'),
        ({"grammar": {"json": "{}"}}, "Try: write json_schema='{}'."),
    ],
)
def test_lines_with_options_of_other_libraries(options: dict[str, Any], says: str) -> None:
    with pytest.raises(VattnError, match=re.escape(says)):
        _sampling(Sampling(), options, "prompts.jsonl:2")


def test_a_file_that_is_no_text(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "d\xff"}')
    status, _, err = run(capsys, "--file", str(path))
    assert status == 2 and "UTF-8" in err


@pytest.mark.parametrize("kind", ["torn", "other sizes"])
def test_checkpoints_that_cannot_be_loaded(capsys: Any, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    if kind == "torn":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    status, _, err = run(capsys, "--model", str(folder), "--prompt", "x")
    assert status == 2 and "check the checkpoint" in err


def test_a_folder_without_a_tokenizer_is_refused(capsys: Any, tmp_path: Path) -> None:
    """transformers made one of a few special tokens, and every text came out empty."""
    import tokenizers
    import transformers

    shape: dict[str, int] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Qwen2Config(vocab_size=300, num_attention_heads=2, num_key_value_heads=2, **shape)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    status, out, err = run(capsys, "--model", str(tmp_path), "--prompt", "def ")
    assert status == 2 and not out
    assert "without a tokenizer" in err and "tokenizer.json" in err and "save_pretrained" in err
    # The settings of a tokenizer are no vocabulary.
    (tmp_path / "tokenizer_config.json").write_text("{}")
    status, _, err = run(capsys, "--model", str(tmp_path), "--prompt", "def ")
    assert status == 2 and "without a tokenizer" in err
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"def": 0, "x": 1}, unk_token="x"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    _, _, err = run(capsys, "--model", str(tmp_path), "--prompt", "def")
    assert "without a tokenizer" not in err


def test_sampling_options_change_what_the_model_asks_for() -> None:
    """Each option has a field of `Sampling`; what is not given stays as the generation config says."""
    import vattn
    from vattn.__main__ import make_parser
    from vattn.cli.sampling_options import given_sampling, sampling_of

    default = vattn.Sampling(temperature=0.7, top_k=9, max_new_tokens=5)
    line = "--top-p 0.5 --stop END --bad-word never --logit-bias 3=-inf --logit-bias 4=1.5 --stop-token-ids --n 2"
    options = make_parser().parse_args(["generate", *line.split(), "--regex", "a|b", "--special-tokens"])
    assert sampling_of(default, given_sampling(options)) == vattn.Sampling(
        temperature=0.7, top_k=9, max_new_tokens=5, top_p=0.5, stop_strings=("END",), bad_words=("never",),
        logit_bias={3: -float("inf"), 4: 1.5}, stop_token_ids=(), n=2, grammar=vattn.Grammar(regex="a|b"),
        skip_special_tokens=False,
    )  # fmt: skip
    assert given_sampling(make_parser().parse_args(["generate"])) == {}
    assert sampling_of(default, {"grammar": {"json_schema": {}}}).grammar == vattn.Grammar(json_schema={})


def test_several_outputs_of_a_prompt(capsys: Any) -> None:
    arguments = ("--prompt", "def ", "--prompt", "import ", "--temperature", "1", "--seed", "3")
    _, out, _ = run(capsys, *arguments, "--n", "2")
    assert sorted(line.split("]")[0] for line in out.splitlines() if line.startswith("[")) == [
        "[0.0", "[0.1", "[1.0", "[1.1"
    ]  # fmt: skip
    _, out, _ = run(capsys, *arguments, "--best-of", "3", "--n", "1", "--json", "--logprobs", "0")
    rows = [json.loads(line) for line in out.splitlines()]
    assert sorted(row["index"] for row in rows) == [0, 1]
    assert all(len(row["logprobs"]) == len(row["tokens"]) for row in rows)


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """A folder with a model that writes its tokens at random, and a tokenizer with a chat template."""
    import torch
    import transformers

    from tests.generation.generator_support import WORDS, make_tokenizer

    torch.manual_seed(5)
    shape: dict[str, int] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Qwen2Config(vocab_size=WORDS, num_attention_heads=2, num_key_value_heads=2, **shape)
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_prompts_as_chats(capsys: Any, tmp_path: Path, chat_model: Path) -> None:
    """A prompt with --chat, and messages of a file, are the same conversation."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the end?"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    model = ("--model", str(chat_model), "--json")
    _, asked, _ = run(capsys, *model, "--chat", "--system", "Be brief.", "--prompt", "the end?")
    _, read, _ = run(capsys, *model, "--file", str(path))
    assert json.loads(asked) == json.loads(read) and json.loads(asked)["prompt_tokens"] > 20


def test_a_conversation_over_the_standard_input(capsys: Any, monkeypatch: pytest.MonkeyPatch, chat_model: Path) -> None:
    """Each answer is that to the whole conversation before it."""
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("the end?\nand then\n\n"))
    status, out, _ = run(capsys, "--model", str(chat_model), "--chat")
    first, second = out.split("\n")[:2]
    messages = [("user", "the end?"), ("assistant", first), ("user", "and then")]
    path = chat_model / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in messages]}))
    _, alone, _ = run(capsys, "--model", str(chat_model), "--file", str(path), "--json")
    assert status == 0 and json.loads(alone)["text"] == second


def test_names_of_the_hub_are_models_that_were_downloaded(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    status, _, err = run(capsys, "--model", "some/model", "--prompt", "x")
    assert status == 2 and "hf download some/model" in err
    snapshot = tmp_path / "models--some--model" / "snapshots" / "a1"
    shutil.copytree(DEMO_MODEL, snapshot)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("a1")
    assert run(capsys, "--model", "some/model", "--prompt", "def ")[0] == 0


def test_calibrated_scales_are_found_beside_the_checkpoint(capsys: Any, tmp_path: Path) -> None:
    import vattn

    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    text = str(DEMO_MODEL / "heldout.txt")
    arguments = ["calibrate", "--model", str(folder), "--device", "cpu", "--text", text, "--length", "70"]
    assert main([*arguments, "--max-bytes", "200", "--linears"]) == 0
    out, seen = capsys.readouterr().out, vattn.Calibration.load(folder / "vattn_scales.json")
    assert f"Wrote {folder / 'vattn_scales.json'}" in out and "200 tokens" in out and seen.tokens == 200 and seen.inputs
    assert run(capsys, "--model", str(folder), "--prompt", "def ", "--kv-cache-dtype", "fp8")[0] == 0
    for wrong in (["--length", "0"], ["--text", "nowhere"], ["--out", str(tmp_path / "no" / "folder.json")]):
        assert main([*arguments, *wrong]) == 2


def test_what_a_conversation_would_ignore_is_refused(capsys: Any, tmp_path: Path, chat_model: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    model = ("--model", str(chat_model), "--chat")
    assert "--system" in run(capsys, *model, "--system", "Be brief.", "--file", str(path))[2]
    assert "one output" in run(capsys, *model, "--n", "2", "--temperature", "1")[2]
