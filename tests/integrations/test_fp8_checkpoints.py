"""FP8 checkpoints that libraries wrote: their codes and scales arrive in vattn's linears and caches, or are refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.faults import Countdown, disk_full
from tests.support import relative_l2
from vattn.errors import ConfigError, ScaleError, UnsupportedRequestError
from vattn.layers.fp8_linear import LINEAR_FORMATS, FP8Linear

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import transformers
from safetensors.torch import load_file, save_file

from tests.calibration.test_fp8_linears import calibrated, make_llama
from tests.integrations.fp8_checkpoints import (
    INPUT_SCALE,
    edit_config,
    edit_tensors,
    write_compressed_tensors,
    write_transformers_fp8,
)
from tests.integrations.test_transformers import PROMPTS, Runner, eager_logits
from vattn.integrations.transformers import disable, enable, load_fp8_linears
from vattn.integrations.transformers.fp8_checkpoint_config import input_format as read_format

FP8 = vattn.CacheConfig(cache_dtype="fp8")
LINEARS = 14


def input_format(quantization: dict[str, Any], name: str) -> str:
    return read_format(quantization, name, nn.Linear(1, 1))


def load(folder: Path) -> Any:
    """Load a checkpoint as transformers does."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def plain(folder: Path) -> Any:
    """A model of the checkpoint's shape that says where it is from, without transformers' quantisers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name: x for name, x in stored.items() if x.element_size() > 1}, strict=False)
    model.name_or_path = str(folder)
    return model.requires_grad_(False)


class RoundedCache(transformers.DynamicCache):
    """Keys and values in FP8 with the scales that `write_compressed_tensors` gives."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        rounded = []
        for states, first in ((key_states, 0.03), (value_states, 0.05)):
            scale = first * 2**layer_idx
            rounded.append((states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        return super().update(*rounded, layer_idx, *args, **options)


def count_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def scales_of(packed: Any) -> list[float]:
    layers = [module for module in packed.modules() if isinstance(module, vattn.Attention)]
    return [scale.item() for layer in layers for scale in (layer.k_scale, layer.v_scale)]


@pytest.mark.parametrize(
    ("weights", "inputs", "fmt"),
    [("tensor", "tensor", "fp8_static"), ("channel", "tensor", "fp8_static"), ("channel", "token", "fp8_per_token"),
     ("block", "group", "fp8_group128")],
)  # fmt: skip
def test_compressed_tensors(weights: str, inputs: str, fmt: str, tmp_path: Path) -> None:
    """Codes are those of the file; the logits equal compressed-tensors' over rounded keys and values."""
    write_compressed_tensors(tmp_path, make_llama(), weights, inputs)
    model = load(tmp_path)
    theirs = eager_logits(model, PROMPTS[1], cache=RoundedCache())
    hooks = count_hooks(model)
    report = load_fp8_linears(model)
    assert report.pop("lm_head").startswith("left") and list(report.values()) == [fmt] * LINEARS
    stored = load_file(tmp_path / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            assert torch.equal(module.weight.view(torch.uint8), stored[f"{name}.weight"].view(torch.uint8))
            assert module.input_scale is None or module.input_scale.item() == pytest.approx(INPUT_SCALE)
    packed = enable(model, cache_config=FP8, num_blocks=17)
    assert scales_of(packed) == pytest.approx([0.03, 0.05, 0.06, 0.1])
    got = Runner(packed).step([(PROMPTS[1], 0)])[0]
    # Both round inputs, keys and values; a code at a border moves by a step where sums come in another order.
    assert relative_l2(got, theirs) < 0.03
    disable(model)
    assert count_hooks(model) == hooks, "their own cache hooks are back"


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_a_quantised_model_saves_and_loads(fmt: str, tmp_path: Path) -> None:
    """By `save_pretrained` and `from_pretrained`, twice, to the bit; merged the second time."""
    model = make_llama()
    seen = calibrated(model) if fmt == "fp8_static" else None
    report = vattn.quantise_linears(model, fmt, calibration=seen, skip="*.0.mlp.up_proj")
    expected = eager_logits(model, PROMPTS[1])
    for number in range(2):
        folder = tmp_path / str(number)
        if number:
            enable(model, num_blocks=17)
        model.save_pretrained(folder)
        model = load(folder)
        again = load_fp8_linears(model)
        assert {k: v for k, v in again.items() if v == fmt} == {k: v for k, v in report.items() if v == fmt}
        assert torch.equal(eager_logits(model, PROMPTS[1]), expected)


@pytest.mark.parametrize("fmt", ["fp8_per_token", "fp8_group128"])
def test_a_saved_model_without_load_fp8_linears(fmt: str, tmp_path: Path) -> None:
    """transformers reads scales as well; inputs are rounded by compressed-tensors."""
    model = make_llama()
    vattn.quantise_linears(model, fmt)
    model.save_pretrained(tmp_path)
    assert relative_l2(eager_logits(load(tmp_path), PROMPTS[1]), eager_logits(model, PROMPTS[1])) < 0.03


def test_two_formats_in_one_checkpoint_and_a_shared_config(tmp_path: Path) -> None:
    model = make_llama()
    other = type(model)(model.config)
    vattn.quantise_linears(model, "fp8_per_token", skip="*.mlp.*")
    vattn.quantise_linears(model, "fp8_group128", skip="*.self_attn.*")
    assert not hasattr(other.config, "quantization_config")
    expected = eager_logits(model, PROMPTS[1])
    model.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert set(load_fp8_linears(model).values()) >= {"fp8_per_token", "fp8_group128"}
    assert torch.equal(eager_logits(model, PROMPTS[1]), expected)


@pytest.mark.parametrize("blocks", [True, False])
def test_transformers_fp8(blocks: bool, tmp_path: Path) -> None:
    """transformers dequantises on a CPU and drops scales of the cache; the folder still has them."""
    name = "model.layers.{}.self_attn.{}_proj.{}_scale"
    scales = {name.format(i, kind, kind): torch.tensor(0.01 * (i + 1)) for i in (0, 1) for kind in "kv"}
    write_transformers_fp8(tmp_path, make_llama(), blocks, **scales)
    model = plain(tmp_path)
    report = load_fp8_linears(model)
    assert set(report.values()) == {"fp8_group128" if blocks else "fp8_static", "left: not FP8 in the checkpoint"}
    assert relative_l2(eager_logits(model, PROMPTS[1]), eager_logits(make_llama(), PROMPTS[1])) < 0.2
    packed = enable(model, cache_config=FP8, num_blocks=17)
    assert scales_of(packed) == pytest.approx([0.01, 0.01, 0.02, 0.02])
    assert Runner(packed).step([(PROMPTS[1], 0)])[0].isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_transformers_fp8_as_transformers_loads_it(tmp_path: Path) -> None:
    write_transformers_fp8(tmp_path, make_llama())
    model = load(tmp_path)
    dequantised = eager_logits(model, PROMPTS[1]).float()
    load_fp8_linears(model)
    # transformers leaves what is no whole number of blocks: key and value of 64 rows.
    assert sum(isinstance(module, FP8Linear) for module in model.modules()) == LINEARS - 4
    assert relative_l2(eager_logits(model, PROMPTS[1]).float(), dequantised) < 0.2
    with pytest.raises(ScaleError, match="k_scale"):
        enable(model, cache_config=FP8)


def test_a_checkpoint_without_load_fp8_linears(tmp_path: Path) -> None:
    """Scales of the cache come along without any other step, and a cache that has no use for them says so."""
    write_compressed_tensors(tmp_path, make_llama())
    model = load(tmp_path)
    packed = enable(model, cache_config=FP8, num_blocks=17)
    assert scales_of(packed) == pytest.approx([0.03, 0.05, 0.06, 0.1])
    disable(model)
    with pytest.warns(UserWarning, match=r"2 layers, which a cache in 'auto'.*cache_dtype='fp8'"):
        enable(model, num_blocks=17)
    disable(model)
    own = vattn.CacheConfig(cache_dtype="fp8", calculate_kv_scales=True)
    with pytest.warns(UserWarning, match="calculate_kv_scales=False"):
        enable(model, cache_config=own, num_blocks=17)
    disable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = enable(model, cache_config=FP8, quant_config=vattn.QuantConfig(0.5, 0.25), num_blocks=17)
    assert scales_of(given) == [0.5, 0.25] * 2


def tensors(drop: str = "", **extra: Tensor) -> Any:
    """A change of the tensors: those with some end dropped, and others added."""
    return lambda folder: edit_tensors(folder, drop, **extra)


def of_first_layer(name: str, value: float = 1.0) -> Any:
    """A change that gives the first attention layer a tensor of one value."""
    return tensors(**{f"model.layers.0.self_attn.{name}": torch.tensor([value])})


def of_a_cache(scheme: Any) -> Any:
    """A change of what the configuration says about the cache."""
    return lambda folder: edit_config(
        folder, quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    )


def of_modelopt(folder: Path) -> None:
    edit_config(folder, quantization_config=None)
    described = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(described))


CACHE_FAULTS: dict[str, tuple[Any, str]] = {
    "promised": (tensors("_scale"), "kv_cache_scheme.*calibrat"),
    "one layer": (tensors("layers.1.self_attn.k_scale"), r"no model\.layers\.1\.self_attn\.k_scale.*calibrat"),
    "unknown": (tensors(**{"model.vision.self_attn.k_scale": torch.ones(1)}), "model.vision.self_attn.k_scale"),
    "query": (of_first_layer("q_scale"), "q_scale in .*which the cache does not use"),
    "softmax": (of_first_layer("prob_output_scale"), "prob_output_scale in .*, which the cache does not use"),
    "zero points": (of_first_layer("v_zero_point"), "v_zero_point in .*, which the cache does not use"),
    "4 bits": (of_a_cache({"type": "float", "num_bits": 4}), "'num_bits': 4.*calibrat"),
    "integers": (of_a_cache({"type": "int", "num_bits": 8}), "'int'.*calibrat"),
    "asymmetric": (of_a_cache({"symmetric": False}), "'symmetric': False.*zero points"),
    "a word": (of_a_cache("int8"), "kv_cache_scheme='int8'"),
    "ModelOpt": (of_modelopt, "kv_cache_quant_algo='NVFP4'"),
    "negative": (of_first_layer("k_scale", -1.0), "positive"),
}


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_scales_of_the_cache_that_are_missing_or_would_be_ignored(fault: str, scaled: Path, tmp_path: Path) -> None:
    change, text = CACHE_FAULTS[fault]
    shutil.copytree(scaled, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    model = plain(tmp_path)
    with pytest.raises(ScaleError, match=text):
        enable(model, cache_config=FP8)
    assert not any("vattn" in name for name, _ in model.named_modules())
    enable(model, cache_config=FP8, quant_config=vattn.QuantConfig(0.1, 0.1), num_blocks=17)


@pytest.mark.parametrize("scheme", ["static", {"type": "float", "num_bits": 8, "dynamic": False}, {}, None])
def test_scales_of_an_fp8_cache(scheme: Any, scaled: Path, tmp_path: Path) -> None:
    """However the configuration says so, with zero points that are zeros."""
    shutil.copytree(scaled, tmp_path, dirs_exist_ok=True)
    of_a_cache(scheme)(tmp_path)
    of_first_layer("v_zero_point", 0.0)(tmp_path)
    packed = enable(plain(tmp_path), cache_config=FP8, num_blocks=17)
    assert scales_of(packed) == pytest.approx([0.03, 0.05, 0.06, 0.1])


UP = "model.layers.1.mlp.up_proj"


def of_weight(name: str, tensor: Tensor) -> Any:
    """A change that adds a tensor to one linear layer."""
    return tensors(**{f"{UP}.{name}": tensor})


def twice(folder: Path) -> None:
    save_file({f"{UP}.weight": torch.zeros(256, 128).to(torch.float8_e4m3fn)}, folder / "old.safetensors")


def another_tower(folder: Path) -> None:
    edit_tensors(folder, **{f"vision.{UP}.weight": load_file(folder / "model.safetensors")[f"{UP}.weight"]})


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


E4M3_ONE = torch.ones(1).to(torch.float8_e4m3fn)
NAN = torch.full((256, 128), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
LINEAR_FAULTS: dict[str, tuple[Any, type[Exception], str]] = {
    "too many scales": (of_weight("weight_scale", torch.ones(3)), ScaleError, "3 scales .* 1 or 256"),
    "a row of scales": (of_weight("weight_scale", torch.ones(1, 256)), ScaleError, r"\(1, 256\).*\[256, 1\]"),
    "whole scales": (of_weight("weight_scale", torch.ones(256).int()), ScaleError, "weight_scale in torch.int32"),
    "e4m3 of an input": (of_weight("input_scale", E4M3_ONE), ScaleError, "input_scale in torch.float8_e4m3fn"),
    "an FP8 table": (
        tensors(**{"model.embed_tokens.weight": torch.ones(256, 128).to(torch.float8_e4m3fn)}),
        UnsupportedRequestError,
        "embeddings and merged experts",
    ),
    "two names": (of_weight("weight_scale_inv", torch.ones(1)), ScaleError, "weight_scale and weight_scale_inv"),
    "bias": (of_weight("bias", torch.ones(256)), ConfigError, "with a bias. Allowed: none"),
    "zero point": (of_weight("weight_zero_point", torch.ones(1)), ScaleError, "no use for"),
    "smoothing": (of_weight("pre_quant_scale", torch.ones(64)), ScaleError, "no use for"),
    "output scale": (of_weight("output_scale", torch.ones(1)), ScaleError, "no use for"),
    "NaN": (of_weight("weight", NAN), ScaleError, "codes of NaN"),
    "e5m2": (of_weight("weight", NAN.view(torch.float8_e5m2)), UnsupportedRequestError, "float8_e5m2"),
    "shape": (of_weight("weight", NAN[:, :32].contiguous()), ConfigError, r"\(256, 32\)"),
    "twice": (twice, ConfigError, "two files .* old.safetensors"),
    "another tower": (another_tower, UnsupportedRequestError, "one of several weights"),
    "a word": (lambda folder: edit_config(folder, quantization_config="fp8"), ConfigError, "a dictionary"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), ConfigError, "config.json"),
    "cut short": (cut_short, ConfigError, "model.safetensors"),
    "experts": (
        tensors(**{"model.layers.0.mlp.experts.0.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}),
        UnsupportedRequestError,
        "experts",
    ),
    "weight scale": (tensors("layers.1.mlp.up_proj.weight_scale"), ScaleError, "without a scale"),
    "input scale": (tensors("layers.1.mlp.up_proj.input_scale"), ScaleError, "without a scale of its input"),
    "negative": (of_weight("weight_scale", torch.tensor([-1.0])), ScaleError, "positive and finite"),
    "stray": (tensors(**{"lm_head.weight_scale": torch.ones(1)}), ScaleError, "lm_head.weight_scale"),
    "method": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "quark"}),
        UnsupportedRequestError,
        "quark",
    ),
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with scales of the cache."""
    folder: Path = tmp_path_factory.mktemp("scaled")
    write_compressed_tensors(folder, make_llama())
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a fault, and without scales of the cache."""
    folder: Path = tmp_path_factory.mktemp("whole")
    write_compressed_tensors(folder, make_llama(), cache=False)
    return folder


@pytest.mark.parametrize("fault", LINEAR_FAULTS)
def test_linears_that_cannot_be_loaded(fault: str, whole: Path, tmp_path: Path) -> None:
    change, kind, text = LINEAR_FAULTS[fault]
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    model = plain(tmp_path)
    change(tmp_path)
    with pytest.raises(kind, match=text):
        load_fp8_linears(model)
    assert not any(isinstance(module, FP8Linear) for module in model.modules())


def test_files_that_fail_while_they_are_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays as it was, whichever read fails."""
    import safetensors

    model, real = plain(whole), safetensors.safe_open
    before = {name: type(module) for name, module in model.named_modules()}
    place = 0
    while True:
        place += 1
        strike = Countdown(place, disk_full)

        def struck(*args: Any, strike: Countdown = strike) -> Any:
            strike()
            return real(*args)

        monkeypatch.setattr(safetensors, "safe_open", struck)
        try:
            load_fp8_linears(model, whole)
        except ConfigError as error:
            assert "No space left" in str(error)
            assert {name: type(module) for name, module in model.named_modules()} == before
        else:
            break
    assert place > 20


def test_layers_that_are_no_longer_plain(whole: Path) -> None:
    """Hooked, or with a forward of its own: nothing of it would be left."""

    def hooked(model: Any) -> None:
        model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *a: None)

    def offloaded(model: Any) -> None:
        model.model.layers[1].mlp.up_proj.forward = lambda x: x

    for prepare, text in (
        (hooked, "up_proj, which has hooks"),
        (offloaded, "up_proj, which has hooks or a forward"),
    ):
        model = plain(whole)
        prepare(model)
        with pytest.raises(ConfigError, match=text):
            load_fp8_linears(model)
        assert not any(isinstance(module, FP8Linear) for module in model.modules())


def test_the_group_of_a_layer() -> None:
    """Names go before patterns, and those before the class, whatever the order of the groups."""

    def group(targets: list[str], strategy: str) -> dict[str, Any]:
        inputs = {"type": "float", "num_bits": 8, "strategy": strategy, "dynamic": True}
        return {"targets": targets, "weights": {"type": "float", "strategy": "channel"}, "input_activations": inputs}

    groups = {
        "a": group(["Linear"], "tensor"),
        "b": group(["re:.*down_proj"], "token"),
        "c": group(["layers.0.down_proj"], "tensor"),
    }
    asked = {"quant_method": "compressed-tensors", "config_groups": groups}
    names = ("layers.0.down_proj", "layers.1.down_proj", "layers.1.up_proj")
    assert [input_format(asked, name) for name in names] == ["fp8_dynamic", "fp8_per_token", "fp8_dynamic"]


FP8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
HADAMARD = {"config_groups": {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}}
UNREADABLE = (ConfigError, "compressed-tensors cannot read")

GROUP_FAULTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({part: "x"}, *UNREADABLE) for part in ("weights", "input_activations", "output_activations")),
    ({"weights": {**FP8_ARGS, "strategy": ["tensor"]}}, *UNREADABLE),
    ({"weights": {**FP8_ARGS, "symmetric": False}}, UnsupportedRequestError, "zero points of weights"),
    ({"input_activations": {**FP8_ARGS, "symmetric": False}}, UnsupportedRequestError, "zero points"),
    ({"input_activations": {**FP8_ARGS, "dynamic": "false"}}, *UNREADABLE),
    ({"input_activations": {**FP8_ARGS, "unknown": 1}}, *UNREADABLE),
    ({"weights": {**FP8_ARGS, "num_bits": 4}}, UnsupportedRequestError, "weights that are not FP8"),
    ({"weights": {**FP8_ARGS, "type": "int"}}, UnsupportedRequestError, "weights that are not FP8"),
    (
        {"input_activations": {**FP8_ARGS, "scale_dtype": "torch.float8_e4m3fn"}},
        UnsupportedRequestError,
        "scales of inputs in torch.float8_e4m3fn",
    ),
    (
        {
            "weights": {**FP8_ARGS, "strategy": "block", "block_structure": [64, 64]},
            "input_activations": {**FP8_ARGS, "strategy": "group", "group_size": 64, "dynamic": True},
        },
        UnsupportedRequestError,
        r"blocks of \(\[64, 64\], 64\)",
    ),
    ({"weights": None}, UnsupportedRequestError, "weights that are not FP8"),
    ({"input_activations": None}, UnsupportedRequestError, "inputs that are not FP8"),
    ({"output_activations": FP8_ARGS}, UnsupportedRequestError, "quantised outputs"),
    ({"format": "int-quantized"}, UnsupportedRequestError, "format='int-quantized'"),
    ({"targets": None}, *UNREADABLE),
    ({"targets": ["re:("]}, *UNREADABLE),
    ({"targets": ["re:.*self_attn.*"]}, UnsupportedRequestError, "no group"),
]


def grouped(**changes: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group of static FP8, of which some entries are others."""
    group = {"targets": ["Linear"], "weights": FP8_ARGS, "input_activations": FP8_ARGS, **changes}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}}


CONFIGURATIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *((grouped(**change), kind, text) for change, kind, text in GROUP_FAULTS),
    ({"quant_method": "compressed-tensors"}, *UNREADABLE),
    ({**grouped(), "config_groups": [1]}, *UNREADABLE),
    ({**grouped(), "sparsity_config": "x"}, *UNREADABLE),
    ({**grouped(), "sparsity_config": {"format": "sparse-24-bitmask"}}, UnsupportedRequestError, "sparse weights"),
    ({**grouped(), "transform_config": HADAMARD}, UnsupportedRequestError, "rotations"),
    ({**grouped(), "format": "pack-quantized"}, UnsupportedRequestError, "pack-quantized"),
    *(
        ({"quant_method": "fp8", **change}, UnsupportedRequestError, text)
        for change, text in (
            ({"weight_block_size": 128}, "blocks of 128"),
            ({"weight_block_size": [64, 64]}, r"\[64, 64\]"),
            ({"activation_scheme": "foo"}, "activation_scheme='foo'"),
            ({"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, "'ue8m0'"),
            ({"fmt": "e5m2"}, "fmt='e5m2'"),
        )
    ),
]


def test_configurations_that_mean_something_else() -> None:
    for asked, kind, text in CONFIGURATIONS:
        with pytest.raises(kind, match=text):
            input_format(asked, UP)


@pytest.mark.parametrize("fmt", ["float-quantized", "naive-quantized", None])
def test_formats_of_codes_as_they_are(fmt: str | None) -> None:
    """Groups have one of their own where the whole is of several."""
    assert input_format({**grouped(), "format": fmt}, UP) == "fp8_static"
    assert input_format({**grouped(format=fmt), "format": "mixed-precision"}, UP) == "fp8_static"


def test_folders_that_are_none(tmp_path: Path) -> None:
    model = make_llama()
    with pytest.raises(ConfigError, match=r"that was loaded from nowhere.*folder="):
        load_fp8_linears(model)
    with pytest.raises(ConfigError, match=r"\*\.safetensors"):
        load_fp8_linears(model, tmp_path)
    with pytest.raises(ConfigError, match="folder=5"):
        load_fp8_linears(model, 5)
    with pytest.raises(ConfigError, match="a model of type str"):
        load_fp8_linears("model", tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantise_linears"):
        load_fp8_linears(model, tmp_path)
