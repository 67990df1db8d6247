"""`python -m vattn explain` takes any request: an option for every field, or the string that explain itself writes."""

import argparse
import dataclasses
import random

import pytest

import vattn
from tests.conformance.requests import draw_request
from tests.layers.mla_support import make_mla_config
from vattn import errors
from vattn.__main__ import main
from vattn.cli import explain as explain_request
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo


def test_every_field_of_a_request_has_an_option() -> None:
    parser = argparse.ArgumentParser()
    explain_request.add_arguments(parser)
    options = {action.dest for action in parser._actions}
    assert {field.name for field in dataclasses.fields(AttentionConfig)} <= options


def test_a_request_as_a_string(capsys) -> None:
    rng = random.Random(3)
    drawn = [draw_request(rng, "TORCH_SDPA").config.replace(backend="auto") for _ in range(20)]
    for text in (config.encode() for config in (*drawn, make_mla_config(backend="auto"))):
        status = main(["explain", text, "--device", "cpu"])
        assert capsys.readouterr().out.startswith(f"request: {text}\n")
    assert status == 0


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--head-pairs", "odd", "--head-size", "64"], 0, "head_size_v=128"),
        (["--scale", "0.5"], 0, "scale=0.5"),
        (["--output-format", "fp8_per_token", "--output-min-scale", "0.25"], 0, "output_min_scale=0.25"),
        (["--head-size", "12"], 1, "chosen : none"),
        (["vattn1 num_heads=2"], 2, "config string"),
        (["--query-scale", "head"], 2, "--query-scale head without a --query-format"),
        (["--query-scale", "head", "--query-format", "fp8_e4m3", "--kv-cache-dtype", "fp8"], 0, "query_scale=head"),
        (["--kv-scale", "head"], 2, "--kv-scale head without"),
        (["--kv-scale", "head", "--kv-cache-dtype", "int8_per_token_head"], 2, "--kv-scale head without"),
        (["--kv-scale", "head", "--kv-cache-dtype", "fp8"], 0, "kv_scale=head"),
        (["--context-only", "--output-format", "fp8_static"], 0, "layers refuse it"),
        (["--context-only", "--batch-invariant"], 0, "layers refuse it"),
        (["--alibi", "sqrt", "--causality", "bidirectional"], 2, "alibi='sqrt'"),
        (["vattn9 num_heads=2"], 2, "vattn9"),
        (["--cache-strides", "4096", "256"], 2, "three positive numbers: of blocks, tokens, heads"),
        (["--cache-strides", "4096", "256", "132", "--num-heads", "2"], 0, "gaps between blocks, tokens or heads, or"),
        (["--cache-strides", "4096", "256", "128", "--num-heads", "2"], 0, "cache  : no gaps between"),
    ],
)
def test_answers(arguments, status, text, capsys) -> None:
    assert main(["explain", *arguments, "--device", "cpu"]) == status
    printed = capsys.readouterr()
    assert text in printed.out + printed.err


def test_strides_that_hoppers_kernels_do_not_read_are_named(capsys) -> None:
    latent = make_mla_config(
        num_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512, dtype="bfloat16",
        kv_cache_dtype="bfloat16", block_size=64, backend="auto",
    ).encode()  # fmt: skip
    for arguments, strides, expected in (
        (["--num-heads", "2"], ["8192", "520", "260"], 2),
        (["--num-heads", "2"], ["8192", "512", "256"], 0),
        (["--num-heads", "2", "--kv-cache-dtype", "int4_per_token_head"], ["5000"], 2),
        ([latent], [str(64 * 576 * 3)], 0),
        ([latent], [str(64 * 576 + 4)], 1),
        ([latent], [str(64 * 576 + 64)], 1),
    ):
        assert main(["explain", *arguments, "--device", "sm_90", "--cache-strides", *strides]) == 0
        notes = [line for line in capsys.readouterr().out.splitlines() if "general kernel, not on Hopper's" in line]
        assert len([note for note in notes if "rows of the cache" in note or "blocks of the cache" in note]) == expected


def test_a_string_and_options_are_refused_together(capsys) -> None:
    request = AttentionConfig(8, 2, 64, 64, 0.125, "float32", "float32").encode()
    assert main(["explain", request, "--sinks", "--device", "cpu"]) == 2
    assert "--sinks" in capsys.readouterr().err
    assert main(["explain", request, "--backend", "TORCH_SDPA", "--device", "cpu"]) == 0
    assert main(["explain", "--context-only", "--kv-cache-dtype", "nvfp4", "--device", "cpu"]) == 0
    assert "layers refuse" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["sm_999", "sm_9", "sm_91", "sm90", "sm_90a", "sm_"])
def test_architectures_that_there_are_not_are_refused(name, capsys) -> None:
    assert main(["explain", "--device", name]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"vattn: device '{name}'") and "sm_86" in told and "sm_90" in told
    assert main(["explain", "--device", "sm_120"]) < 2


def test_the_version_is_told(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"vattn {vattn.__version__}\n"


def test_gpus_elsewhere_are_told_by_their_architectures_in_python_too(capsys: pytest.CaptureFixture[str]) -> None:
    request = AttentionConfig(8, 2, 64, 64, 0.125, "bfloat16", "bfloat16")
    for name, capability in (("sm_90", (9, 0)), ("sm_120", (12, 0))):
        explanation = vattn.explain(request, name)
        assert explanation.device == DeviceInfo("cuda", capability, "GPU") and explanation.chosen
        main(["explain", request.encode(), "--device", name])
        assert capsys.readouterr().out == f"{explanation}\n"
    with pytest.raises(errors.DeviceError, match=r"sm_91.*sm_90"):
        vattn.explain(request, "sm_91")


def test_a_string_without_its_head_says_which_one_it_begins_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "num_heads=32 head_size=128", "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert "put vattn1 in front of the fields: 'vattn1 num_heads=32 ...'" in told and "export again" not in told
    with pytest.raises(errors.ConfigError, match=r"export again with this version"):
        AttentionConfig.parse("vattn0 num_heads=32")
