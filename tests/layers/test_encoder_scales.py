"""FP8 multimodal encoders: scale files, the history of largest values, saving, and what is attended to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import vattn
from tests.layers.encoder_support import dense, offsets, random_qkv
from tests.support import relative_l2
from vattn.errors import ConfigError, DeviceError, ScaleError
from vattn.layers.encoder import mm_encoder_attention
from vattn.quantization.codecs import decode_kv, encode_kv

DYNAMIC = vattn.EncoderFP8Config(dynamic=True)
BACKENDS = ("TORCH_SDPA", "TRITON_ATTN")
SCALES = {"q": 0.011, "k": 0.023, "v": 0.017}

CLOSE = 2e-5
"""Relative L2 in fp32 against dense attention over the values that FP8 holds."""


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def make_layer(prefix: str = "a", quant: vattn.EncoderFP8Config = DYNAMIC, **options: Any) -> vattn.MMEncoderAttention:
    return vattn.MMEncoderAttention(4, 16, num_kv_heads=2, prefix=prefix, quant_config=quant, **options)


def rounded(tensor: Tensor, scale: Tensor) -> Tensor:
    """Return what FP8 holds of a tensor."""
    return decode_kv(encode_kv(tensor, "fp8_e4m3", scale), "fp8_e4m3", scale)


# Files


SPELLINGS: dict[str, Any] = {
    "short": {"a": SCALES, "b": {"q": 1, "k": 1, "v": 1}},
    "long": {"a": {f"{name}_scale": scale for name, scale in SCALES.items()}},
    "mixed": {"a": {"q": 0.011, "k_scale": 0.023, "v": 0.017}},
    "nested": {"layers": {"a": SCALES}},
    "nested beside other keys": {"format": "x", "margin": 2, "layers": {"a": SCALES}},
    "a layer of that name": {"layers": {"q": 1.0, "k": 1.0, "v": 1.0}, "a": SCALES},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "scales.json", SPELLINGS[name])
    assert vattn.read_encoder_scales(path)["a"] == SCALES
    layer = make_layer(quant=vattn.EncoderFP8Config(scale_path=path))
    assert [float(layer.q_scale), float(layer.k_scale)] == pytest.approx([0.011, 0.023], rel=1e-7)
    assert "fp8=static" in repr(layer)


BAD_FILES: dict[str, tuple[Any, str]] = {
    "torn": ('{"a": {"q": 0.1, "k": 0.', "no whole JSON file"),
    "too deep": ("[" * 200_000, "no whole JSON file"),
    "empty": ("", "no whole JSON file"),
    "not UTF-8": (b"\xff\xfe\x00", "no whole JSON file"),
    "a list": ([SCALES], "no scales by layer"),
    "no layers": ({}, "no scales by layer"),
    "no nested layers": ({"layers": {}}, "no scales by layer"),
    "foreign": ({"model_type": "llama", "hidden_size": 4096}, "layer 'model_type' has 'llama'"),
    "foreign entries": ({"a": {"weight": 1.0}}, "layer 'a' has 'weight'"),
    "no v": ({"a": {"q": 1.0, "k": 1.0}}, "layer 'a' has 'q', 'k'"),
    "one more": ({"a": {**SCALES, "o": 1.0}}, "'o'"),
    "both spellings": ({"a": {**SCALES, "q_scale": 1.0}}, "'q_scale'"),
    "negative": ({"a": {**SCALES, "k": -0.1}}, "k=-0.1"),
    "zero": ({"a": {**SCALES, "k": 0}}, "k=0"),
    "another layer is wrong": ({"a": SCALES, "b": {**SCALES, "v": 0}}, "layer 'b': v=0"),
    "NaN": ('{"a": {"q": NaN, "k": 1, "v": 1}}', "q=nan"),
    "infinite": ('{"a": {"q": Infinity, "k": 1, "v": 1}}', "q=inf"),
    "too small for fp32": ({"a": {**SCALES, "v": 1e-50}}, "v=1e-50"),
    "too large for fp32": ({"a": {**SCALES, "v": 1e300}}, r"1e\+300"),
    "text": ({"a": {**SCALES, "v": "0.1"}}, "v='0.1'"),
    "a bool": ({"a": {**SCALES, "v": True}}, "v=True"),
    "a tensor": ({"a": {**SCALES, "v": [0.1]}}, r"v=\[0.1\]"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name: str, tmp_path: Path) -> None:
    content, text = BAD_FILES[name]
    path = tmp_path / "scales.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, content)
    with pytest.raises(ScaleError, match=text) as caught:
        make_layer(quant=vattn.EncoderFP8Config(scale_path=path))
    assert str(path) in str(caught.value)


def test_missing_files_and_layers(tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match="cannot be read: No such file"):
        make_layer(quant=vattn.EncoderFP8Config(scale_path=tmp_path / "none.json"))
    with pytest.raises(ScaleError, match="cannot be read: Is a directory"):
        make_layer(quant=vattn.EncoderFP8Config(scale_path=str(tmp_path)))
    path = write(tmp_path / "scales.json", {"visual.0": SCALES, "visual.1": SCALES})
    with pytest.raises(ScaleError, match=r"no layer 'visual\.2'.*'visual\.0', 'visual\.1'"):
        make_layer("visual.2", vattn.EncoderFP8Config(scale_path=path))


@given(cut=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_damaged_file_is_refused_or_whole(cut: int, byte: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One byte changed, or the end cut off: never scales that no float could be."""
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    text = json.dumps({"layers": {"a": SCALES, "b": SCALES}}).encode()
    for damaged in (text[:cut], text[: cut % len(text)] + bytes([byte]) + text[cut % len(text) + 1 :]):
        path.write_bytes(damaged)
        try:
            found = vattn.read_encoder_scales(path)
        except ScaleError:
            continue
        assert all(set(entry) == {"q", "k", "v"} and min(entry.values()) > 0 for entry in found.values())


@pytest.mark.parametrize("options", [{}, {"scale_path": "x", "dynamic": True}, {"dynamic": 1}, {"scale_path": 3}])
def test_a_decision_is_asked_for(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scale_path"):
        vattn.EncoderFP8Config(**options)


# What is attended to


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_static_scales(backend: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write(tmp_path / "scales.json", {"a": SCALES})
    layer = make_layer(quant=vattn.EncoderFP8Config(scale_path=path), attn_backend=backend)
    qkv = random_qkv(25, real=22, dtype=dtype)
    lens = [7, 0, 15]
    out = layer(*(t[None] for t in qkv), offsets(lens), 15, padded=True)
    expected = dense(*(rounded(t, torch.tensor([s])) for t, s in zip(qkv, SCALES.values(), strict=True)), lens)
    assert out.dtype == dtype and not out[:, 22:].any()
    assert relative_l2(out[0], expected) < (CLOSE if dtype == torch.float32 else 2**-7)


def test_a_scale_of_one_is_a_plain_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "scales.json", {"a": {"q": 1, "k": 1.0, "v": 1}})
    layer = make_layer(quant=vattn.EncoderFP8Config(scale_path=path))
    seen: list[Tensor] = []
    arguments = mm_encoder_attention.varlen_arguments

    def watched(layer: nn.Module, qkv: Sequence[Tensor], *rest: Any) -> Any:
        seen.extend(qkv)
        return arguments(layer, qkv, *rest)

    monkeypatch.setattr(mm_encoder_attention, "varlen_arguments", watched)
    qkv = [t[None] * 300 for t in random_qkv(9)]
    layer(*qkv)
    for codes, given_tensor in zip(seen, qkv, strict=True):
        cast = given_tensor[0].clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(codes.view(torch.uint8), cast.view(torch.uint8))


def rows(step: int, size: float = 1.0) -> list[Tensor]:
    return [t[None] * size * (1 + 0.1 * step) for t in random_qkv(9, seed=step)]


def largest(qkv: list[Tensor]) -> Tensor:
    return torch.stack([t.abs().max() for t in qkv])


@pytest.mark.parametrize(("backend", "steps"), [("TORCH_SDPA", 40), ("TRITON_ATTN", 2)])
def test_dynamic_scales_are_those_of_the_last_sixteen_steps(backend: str, steps: int) -> None:
    layer, seen = make_layer(attn_backend=backend), []
    for step in range(steps):
        qkv = rows(step, size=100.0 if step == 3 else 1.0)
        seen.append(largest(qkv))
        out = layer(*qkv)
        scales = torch.stack(seen[-16:]).amax(0) / 448
        expected = dense(*(rounded(t[0], s.view(1)) for t, s in zip(qkv, scales, strict=True)), [9])
        assert relative_l2(out[0], expected) < CLOSE
        assert int(layer.amax_steps) == step + 1


def test_padding_rows_infinities_and_dry_runs_decide_nothing() -> None:
    layer = make_layer()
    qkv = [torch.cat([t, torch.full_like(t, 1e4)], dim=1) for t in rows(0)]
    layer(*qkv, offsets([4, 5]), 5, padded=True)
    assert torch.equal(layer.amax_history[0], largest(rows(0)))
    broken = [t.clone() for t in rows(1)]
    broken[0][0, 0, 0, 0], broken[1][0, 2, 1, 3] = torch.inf, torch.nan
    out = layer(*broken)
    assert layer.amax_history.isfinite().all() and int(layer.amax_steps) == 2
    assert out[..., 2:4, :].isnan().any()  # the NaN of key head 1 reaches the heads that read it
    before = layer.amax_history.clone()
    for tensor in range(3):
        dry = rows(2, size=1e3)
        dry[tensor].zero_()
        out = layer(*dry)
        scales = torch.maximum(before.amax(0), largest(dry)) / 448
        expected = dense(*(rounded(t[0], s.view(1)) for t, s in zip(dry, scales, strict=True)), [9])
        assert relative_l2(out[0], expected) < CLOSE, "a step that is not counted is scaled by its own values too"
    assert torch.equal(layer.amax_history, before) and int(layer.amax_steps) == 2
    layer(*[torch.empty(1, 0, t.shape[2], 16) for t in qkv])
    assert int(layer.amax_steps) == 2
    layer.reset_amax_history()
    assert not layer.amax_history.any() and not layer.amax_steps.any()


def test_steps_of_zeros_before_any_other() -> None:
    layer = make_layer()
    assert not layer(*[torch.zeros_like(t) for t in rows(0)]).any()
    assert int(layer.amax_steps) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_against_the_model_dtype(dtype: torch.dtype) -> None:
    """e4m3 keeps 3 bits: 2^-4 of a value at most, 3 % in the mean; queries and keys blur the weights as well."""
    plain, fp8 = vattn.MMEncoderAttention(4, 64), vattn.MMEncoderAttention(4, 64, quant_config=DYNAMIC)
    qkv = [torch.randn(1, 200, 256).to(dtype) for _ in range(3)]
    assert 0.005 < relative_l2(fp8(*qkv), plain(*qkv)) < 0.06


# State


def test_state_dict_and_conversion(tmp_path: Path) -> None:
    layer, other = make_layer(), make_layer()
    for step in range(5):
        layer(*rows(step))
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    assert set(state) == {"amax_history", "amax_steps"}
    history = other.amax_history
    other.load_state_dict(state)
    assert other.amax_history is history, "CUDA graphs hold the tensor"
    layer.to(torch.bfloat16)
    assert layer.amax_history.dtype == torch.float32 and layer.amax_steps.dtype == torch.int64
    for step in range(5, 20):
        assert torch.equal(layer(*rows(step)), other(*rows(step)))
    static = make_layer(quant=vattn.EncoderFP8Config(scale_path=write(tmp_path / "s.json", {"a": SCALES})))
    assert set(static.state_dict()) == {"q_scale", "k_scale", "v_scale"}


def test_a_history_on_another_device_is_refused_before_it_changes() -> None:
    layer = make_layer()
    with pytest.raises(DeviceError, match="on meta beside q_scale on cpu"):
        layer(*[torch.empty(t.shape, device="meta") for t in rows(0)])
    assert not layer.amax_history.any()


# Saving


def filled(model: nn.ModuleDict, steps: int = 16) -> None:
    for name, layer in model.items():
        for step in range(steps):
            layer(*rows(step + len(name)))


def test_save_and_load(tmp_path: Path) -> None:
    model, path = nn.ModuleDict({name: make_layer(f"visual.{name}") for name in ("x", "yy")}), tmp_path / "s.json"
    filled(model)
    write(path, "an older file")
    vattn.save_encoder_scales(model, path, margin=1.5)
    assert sorted(os.listdir(tmp_path)) == ["s.json"]
    loaded = vattn.read_encoder_scales(path)
    for name, layer in model.items():
        expected = (layer.amax_history.amax(0) * 1.5 / 448).tolist()
        assert list(loaded[f"visual.{name}"].values()) == pytest.approx(expected, rel=1e-6)
        static = make_layer(f"visual.{name}", vattn.EncoderFP8Config(scale_path=path))
        scales = layer.amax_history.amax(0) * 1.5 / 448
        exact = dense(*(rounded(t[0], s.view(1)) for t, s in zip(rows(3), scales, strict=True)), [9])
        assert relative_l2(static(*rows(3))[0], exact) < 1e-3  # a scale's last digit moves a few ties
    # A model that runs on the file can be saved again, unchanged by the margin.
    again = nn.ModuleDict({n: make_layer(f"visual.{n}", vattn.EncoderFP8Config(scale_path=path)) for n in ("x", "yy")})
    vattn.save_encoder_scales(again, tmp_path / "t.json", margin=3.0)
    copied = vattn.read_encoder_scales(tmp_path / "t.json")
    for name, entry in loaded.items():
        assert copied[name] == pytest.approx(entry, rel=1e-6)


def test_saving_waits_for_every_layer(tmp_path: Path) -> None:
    model, path = nn.ModuleDict({name: make_layer(name) for name in ("x", "y")}), tmp_path / "s.json"
    filled(model, steps=15)
    with pytest.raises(ScaleError, match=r"2 of 2 layers have seen fewer than 16 steps: 'x' \(15\), 'y' \(15\)"):
        vattn.save_encoder_scales(model, path)
    model["x"](*rows(0))
    with pytest.raises(ScaleError, match=r"1 of 2 layers .*: 'y' \(15\)"):
        vattn.save_encoder_scales(model, path)
    assert not path.exists()
    model["y"](*rows(0))
    vattn.save_encoder_scales(model, path)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = nn.ModuleDict({"x": make_layer("x")}), write(tmp_path / "s.json", {"x": SCALES})
    filled(model)

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=r"s.json' cannot be written: the disk is full"),
    ):
        patch.setattr(os, "replace", fail)
        vattn.save_encoder_scales(model, path)
    assert vattn.read_encoder_scales(path) == {"x": SCALES}
    assert os.listdir(tmp_path) == ["s.json"]


@pytest.mark.parametrize("margin", [0.99, 0.0, -1.0, float("nan"), float("inf"), "2", True], ids=str)
def test_bad_margins(margin: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="margin="):
        vattn.save_encoder_scales(nn.ModuleDict({"x": make_layer()}), tmp_path / "s.json", margin=margin)


def test_a_margin_that_leaves_fp32_writes_nothing(tmp_path: Path) -> None:
    model, path = nn.ModuleDict({"x": make_layer("x")}), write(tmp_path / "s.json", {"x": SCALES})
    filled(model)
    with pytest.raises(ScaleError, match=r"layer 'x' has scales .* with margin=1e\+300.*smaller margin"):
        vattn.save_encoder_scales(model, path, margin=1e300)
    assert vattn.read_encoder_scales(path) == {"x": SCALES} and os.listdir(tmp_path) == ["s.json"]


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    model = nn.ModuleDict({"x": make_layer("x")})
    filled(model)
    vattn.save_encoder_scales(model, tmp_path / "s.json")
    other = write(tmp_path / "other.json", {})
    assert (tmp_path / "s.json").stat().st_mode == other.stat().st_mode


def test_models_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Linear has no encoder layer in FP8"):
        vattn.save_encoder_scales(nn.Linear(2, 2), tmp_path / "s.json")
    for prefixes in (("", "b"), ("b", "b")):
        model = nn.ModuleList(make_layer(prefix) for prefix in prefixes)
        with pytest.raises(ConfigError, match="a prefix that no other layer has"):
            vattn.save_encoder_scales(model, tmp_path / "s.json")


# Saving by itself


class Tower(nn.Module):
    """Two layers in FP8; `skip` leaves out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = make_layer("x"), make_layer("y")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, skip: bool = False) -> Tensor:
        out = self.x(query, key, value)
        return out if skip else out + self.y(query, key, value)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_scales_are_saved_by_themselves_once_every_history_is_full(
    compiled: bool, tmp_path: Path, fresh_dynamo: None
) -> None:
    model, path = Tower(), tmp_path / "s.json"
    target = vattn.compile(model, backend="eager") if compiled else model
    vattn.save_encoder_scales_when_full(target, path, margin=1.5)
    for step in range(17):
        target(*rows(step), step == 4)
        assert path.exists() == (step == 16), "the second layer has seen one step less"
    scales = vattn.read_encoder_scales(path)
    for name, layer in (("x", model.x), ("y", model.y)):
        assert list(scales[name].values()) == pytest.approx((layer.amax_history.amax(0) * 1.5 / 448).tolist())
    path.unlink()
    for step in range(40):
        target(*rows(step))
    assert not path.exists(), "saved again"


def test_a_save_by_itself_that_fails_warns_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = Tower(), write(tmp_path / "s.json", {"x": SCALES})

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    handle = vattn.save_encoder_scales_when_full(model, path)
    expected = Tower()(*rows(15))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        for step in range(15):
            model(*rows(step))
        with pytest.warns(UserWarning, match="not saved yet: .*the disk is full"):
            assert model(*rows(15)).shape == expected.shape
    assert vattn.read_encoder_scales(path) == {"x": SCALES} and os.listdir(tmp_path) == ["s.json"]
    for step in range(16):
        assert "y" not in vattn.read_encoder_scales(path)
        model(*rows(step))
    assert "y" in vattn.read_encoder_scales(path)
    handle.remove()


def test_saving_by_itself_is_called_off_and_refused(tmp_path: Path) -> None:
    model, path = Tower(), tmp_path / "s.json"
    vattn.save_encoder_scales_when_full(model, path).remove()
    for step in range(20):
        model(*rows(step))
    assert not path.exists()
    vattn.save_encoder_scales(model, path)
    static = make_layer("x", vattn.EncoderFP8Config(scale_path=path))
    for call, text in (
        (lambda: vattn.save_encoder_scales_when_full(static, path), "static scales alone"),
        (lambda: vattn.save_encoder_scales_when_full(model, tmp_path / "none" / "s.json"), "make it first"),
        (lambda: vattn.save_encoder_scales_when_full(model, path, margin=0.5), "margin=0.5"),
        (lambda: vattn.save_encoder_scales_when_full(nn.Linear(2, 2), path), "no encoder layer in FP8"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()
    assert not model._forward_hooks and not static._forward_hooks


def test_an_outer_graph_says_what_to_pass(tmp_path: Path, fresh_dynamo: None) -> None:
    model = Tower()
    vattn.save_encoder_scales_when_full(model, tmp_path / "s.json")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"what torch\.compile returned"):
        torch.compile(lambda *x: model(*x), fullgraph=True, backend="eager")(*rows(0))
