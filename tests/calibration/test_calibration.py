"""Calibration and audit: what is observed, saved, loaded by name, and what a format would cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import vattn
from vattn import errors
from vattn.calibration.audit import Audit, AuditRow

pytest.importorskip("transformers")

from tests.integrations.hf_families import make_model
from tests.integrations.test_mla_models import make_model as make_latent
from tests.integrations.test_transformers import Runner
from vattn.integrations.transformers import PackedModel, disable, enable
from vattn.integrations.transformers.mla import enable_latent_attention

TEXTS = [list(range(3, 60)), [7, 5, 90, 11], [2]]


@pytest.fixture(scope="module")
def packed() -> PackedModel:
    return enable(make_model("llama"), num_blocks=17)


@pytest.fixture(scope="module")
def found(packed: PackedModel) -> vattn.Calibration:
    return vattn.calibrate(packed, [TEXTS[:2], [TEXTS[2]]])


def test_largest_magnitudes_are_those_of_the_layers(packed: PackedModel, found: vattn.Calibration) -> None:
    layers = {m.prefix: m for m in packed.modules() if isinstance(m, vattn.Attention)}
    assert list(found.layers) == list(layers) and found.tokens == sum(map(len, TEXTS))
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        layer.register_forward_pre_hook(lambda m, args: seen.setdefault(m.prefix, []).extend([args[1].clone()]))
        for layer in layers.values()
    ]
    runner = Runner(packed)
    for text in TEXTS:
        runner.step([(text, 0)])
    for handle in handles:
        handle.remove()
    for prefix, keys in seen.items():
        expected = torch.cat(keys).abs().amax(dim=(0, 2))
        # Other token counts sum in another order.
        assert torch.allclose(torch.tensor(found.layers[prefix]["key"]), expected, rtol=1e-5)
        assert len(found.layers[prefix]["query"]) == len(found.layers[prefix]["output"]) == 4


def test_scales(found: vattn.Calibration) -> None:
    prefix = next(iter(found.layers))
    keys = torch.tensor(found.layers[prefix]["key"])
    one = found.quant_config(prefix, margin=2.0)
    assert torch.allclose(one.k_scale, keys.max()[None] * 2 / 448)
    assert torch.allclose(found.quant_config(prefix, per_head=True).k_scale, keys / 448)
    wide = found.quant_config(prefix, cache_dtype="fp8_e5m2", query_format="fp8_e4m3", output_format="fp8_static")
    assert torch.allclose(wide.k_scale, keys.max()[None] / 57344)
    assert wide.q_scale is not None and wide.output_scale is not None
    for dtype in ("auto", "int8_per_token_head"):
        assert found.quant_config(prefix, cache_dtype=dtype).k_scale is None


def test_saved_scales_are_loaded_by_name(found: vattn.Calibration, tmp_path: Path) -> None:
    path = tmp_path / "vattn_scales.json"
    found.save(path)
    assert vattn.Calibration.load(path) == found and [p.name for p in tmp_path.iterdir()] == [path.name]
    model = make_model("llama")
    packed = enable(model, cache_config=vattn.CacheConfig(cache_dtype="fp8"), calibration=path, num_blocks=17)
    for layer in packed.modules():
        if isinstance(layer, vattn.Attention):
            assert layer.v_scale.item() == pytest.approx(max(found.layers[layer.prefix]["value"]) / 448)
    with vattn.observe_clipping(packed):
        Runner(packed).step([(TEXTS[0], 0)])
    # Rounded keys of the first layer move those of the second a little beyond what was seen.
    assert all(rate["key"] < 1e-2 for rate in vattn.clip_rates(packed).values())


def test_audit_tells_what_a_cache_would_cost(packed: PackedModel, found: vattn.Calibration, tmp_path: Path) -> None:
    """The drift for all layers is that of a model with such a cache, but for the order of sums."""
    audit = vattn.audit(packed, TEXTS, "fp8", found)
    model = make_model("llama")
    real = enable(model, cache_config=vattn.CacheConfig(cache_dtype="fp8"), calibration=found, num_blocks=17)
    runners = Runner(packed), Runner(real)
    want, got = (torch.cat([runner.step([(text, 0)])[0] for text in TEXTS]) for runner in runners)
    drift = float((got - want).norm() / want.norm())
    whole = audit.rows[-1]
    assert whole.layer == "all layers" and whole.drift == pytest.approx(drift, rel=1e-3)
    assert all(0 < row.drift < 2 * whole.drift and row.keys_clipped == 0 for row in audit.rows[:-1])
    assert audit.tokens == len(want) and str(audit).count("\n") == 4
    small = vattn.audit(packed, TEXTS, "int4_per_token_head")
    assert small.rows[-1].drift > whole.drift and "-" in str(small)
    poor = {p: {k: [x / 8 for x in xs] for k, xs in seen.items()} for p, seen in found.layers.items()}
    clipped = vattn.audit(packed, TEXTS, "fp8", vattn.Calibration(poor, 1))
    assert clipped.rows[0].keys_clipped > 0.01 and clipped.rows[-1].drift > whole.drift
    pytest.importorskip("matplotlib")
    audit.plot(tmp_path / "drift.png")
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")


def test_audit_of_outputs(packed: PackedModel, found: vattn.Calibration, tmp_path: Path) -> None:
    """Outputs are rounded by their own scales, on top of keys and values; too small ones clip."""
    plain = vattn.audit(packed, TEXTS[1:], "fp8", found)
    both = vattn.audit(packed, TEXTS[1:], "fp8", found, output_format="fp8_static")
    assert both.output_format == "fp8_static" and "outputs fp8_static" in str(both)
    for with_outputs, without in zip(both.rows[:-1], plain.rows[:-1], strict=True):
        assert with_outputs.outputs_clipped == 0 and str(without.outputs_clipped) == "nan"
        assert with_outputs.drift > without.drift
    halved = {p: seen | {"output": [x / 4 for x in seen["output"]]} for p, seen in found.layers.items()}
    path = tmp_path / "scales.json"
    vattn.Calibration(halved, 1).save(path)
    small = vattn.audit(packed, TEXTS[1:], "fp8", path, output_format="fp8_static")
    assert small.rows[0].outputs_clipped > 1e-3 and small.rows[0].keys_clipped == 0
    pytest.importorskip("matplotlib")
    small.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_inputs_of_linears(packed: PackedModel, found: vattn.Calibration, tmp_path: Path) -> None:
    """The output projection's input is what attention put out; files of format 1 know none."""
    assert found.inputs == {}
    seen = vattn.calibrate(packed, [TEXTS], linears=True)
    assert seen.layers == found.layers and len(seen.inputs) == 15
    for prefix, layer in seen.layers.items():
        assert seen.inputs[f"{prefix}.o_proj"] == max(layer["output"])
        assert seen.inputs[f"{prefix}.q_proj"] == seen.inputs[f"{prefix}.v_proj"]
    scale = seen.input_scale("lm_head", margin=2.0)
    assert scale.item() == pytest.approx(2 * seen.inputs["lm_head"] / 448)
    path = tmp_path / "scales.json"
    seen.save(path)
    assert vattn.Calibration.load(path) == seen
    with pytest.raises(errors.ScaleError, match="linears=True"):
        found.input_scale("lm_head")
    old = json.loads(path.read_text()) | {"format": 1}
    del old["inputs"]
    path.write_text(json.dumps(old))
    assert vattn.Calibration.load(path) == vattn.Calibration(seen.layers, seen.tokens)


NESTED: dict[str, tuple[Any, str]] = {
    "one text": ([1, 2, 3], r"batches\[0\]=1"),
    "one batch": ([[1, 2, 3]], r"batches\[0\]\[0\] is int 1"),
    "too deep": ([[[[1, 2]]]], r"batches\[0\]\[0\] holds list"),
    "strings": (["def f():"], r"batches\[0\]='def f\(\):'"),
    "texts": ([["def f():"]], "tokenizer.encode"),
    "floats": ([[[1.0, 2.0]]], "holds float"),
    "negative": ([[[1, -2]]], "holds int -2"),
    "vocabulary": ([[[1, 97]]], "0 to 96"),
    "float tensor": ([torch.zeros(1, 2)], r"ints \[B, L\]"),
    "row": ([torch.zeros(2, dtype=torch.long)], r"ints \[B, L\]"),
    "complex tensor": ([torch.zeros(1, 2, dtype=torch.complex64)], r"ints \[B, L\]"),
    "no list": (None, "batches=None. Allowed: a list of batches"),
    "negative tensor": ([torch.tensor([[1, -1]])], "holds int -1"),
}


@pytest.mark.parametrize("case", NESTED)
def test_batches_that_are_none(case: str, packed: PackedModel) -> None:
    batches, text = NESTED[case]
    with pytest.raises(errors.ConfigError, match=text):
        vattn.calibrate(packed, batches)


def test_models_that_are_not_on_vattn() -> None:
    model = make_model("llama")
    for call in (lambda m: vattn.calibrate(m, [[[1]]]), lambda m: vattn.audit(m, [[1]])):
        with pytest.raises(errors.ConfigError, match=r"not on vattn.*enable\(model, memory"):
            call(model)
    packed = enable(model)
    for call in (lambda m: vattn.calibrate(m, [[[1]]]), lambda m: vattn.audit(m, [[1]])):
        with pytest.raises(errors.ConfigError, match=r"what enable\(\) returned"):
            call(model)
        with pytest.raises(errors.ConfigError, match="allocate_kv_cache"):
            call(packed)


def test_caches_that_cannot_be_calibrated() -> None:
    grouped = enable(make_model("gemma2"))
    grouped.allocate(num_blocks=33, hybrid=True)
    latent = enable_latent_attention(make_latent("DeepSeek-V2-Lite"), num_blocks=8)
    for model, text in ((grouped, "a cache of groups"), (latent, "latent attention")):
        for call in (lambda m: vattn.calibrate(m, [[[1]]]), lambda m: vattn.audit(m, [[1]])):
            with pytest.raises(errors.ConfigError, match=text):
                call(model)


def test_audits_that_cannot_be(packed: PackedModel, found: vattn.Calibration) -> None:
    for texts, options, text in (
        ([], {}, "no text"),
        (5, {}, r"texts=5.*audit\(model, \[\[1, 2, 3\]"),
        ([[[1, 2]]], {}, r"texts\[0\] holds list .* Try: audit\(model"),
        ([[1]], {"per_heads": True}, "write per_head=True"),
        ("abc", {}, r"texts\[0\] is a text"),
        ([1, 2], {}, r"texts\[0\] is int"),
        ([[1]], {"calibration": 5}, "calibration=5"),
        ([[1]], {"output_format": "fp8_per_token", "calibration": found}, "fp8_per_token"),
        ([[1]], {"output_format": "fp8_static"}, "without calibration"),
        ([[1]], {"per_head": True}, "per_head and scales of 1"),
        ([[1]], {"kv_cache_dtype": "int8_per_token_head", "calibration": found}, "with a calibration"),
        (
            [[1]],
            {
                "kv_cache_dtype": "int8_per_token_head",
                "calibration": found,
                "output_format": "fp8_static",
                "per_head": True,
            },
            "scales beside the codes",
        ),
    ):
        with pytest.raises((errors.ConfigError, errors.UnknownOptionError), match=text):
            vattn.audit(packed, texts, **options)  # type: ignore[arg-type]
    done = vattn.audit(packed, iter([[1]]))
    for path in ("drift", "drift.foo", 5):
        with pytest.raises(errors.ConfigError, match="png"):
            done.plot(path)  # type: ignore[arg-type]


def test_a_generator_stops_behind_what_writes_to_its_cache(found: vattn.Calibration) -> None:
    """A calibration and an audit write over blocks whose prefixes a generator knows: its next tokens would be wrong."""
    packed = enable(make_model("llama"), num_blocks=17)
    sampling = vattn.Sampling(max_new_tokens=4, stop_token_ids=())
    for write in (lambda: vattn.calibrate(packed, [[TEXTS[0][::-1]]]), lambda: vattn.audit(packed, [TEXTS[0][::-1]])):
        generator = vattn.Generator(packed, max_num_reqs=2, token_budget=64)
        expected = generator.generate([TEXTS[0]], sampling)[0].output
        with pytest.raises(errors.ConfigError):
            vattn.calibrate(packed, [[[97]]])  # refused: nothing was written
        assert generator.generate([TEXTS[0]], sampling)[0].output == expected
        write()
        with pytest.raises(errors.CacheError, match="a calibration or an audit"):
            generator.generate([TEXTS[0]], sampling)
        assert vattn.Generator(packed, max_num_reqs=2).generate([TEXTS[0]], sampling)[0].output == expected


BROKEN = {
    "absent": None,
    "torn": '{"format": 1, "lay',
    "other": '{"format": 7, "tokens": 1, "layers": {}}',
    "list": "[]",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    if (content := BROKEN[kind]) is not None:
        path.write_text(content)
    with pytest.raises(errors.ScaleError, match="calibration file"):
        vattn.Calibration.load(path)


def test_wrong_use(packed: PackedModel, found: vattn.Calibration, tmp_path: Path) -> None:
    with pytest.raises(errors.ScaleError, match="no calibration of layer"):
        found.quant_config("layers.9")
    for batches in ([[[]]], [[list(range(90)) * 9]]):
        with pytest.raises(errors.ConfigError, match="what the cache holds"):
            vattn.calibrate(packed, batches)
    prefix = next(iter(found.layers))
    for margin in ("x", -1.0, float("nan"), True):
        with pytest.raises(errors.ScaleError, match="margin="):
            found.quant_config(prefix, margin=margin)
    expected = found.quant_config(prefix, margin=1.5).k_scale
    assert torch.equal(found.quant_config(prefix, margin=numpy.float32(1.5)).k_scale, expected)  # type: ignore[arg-type]
    with pytest.raises(errors.ScaleError, match="no layer was called"):
        vattn.calibrate(packed, [])
    with pytest.raises(errors.ConfigError, match="without a bound KV cache"):
        vattn.calibrate(torch.nn.Linear(2, 2), [[[1]]])
    zeros: Any = json.loads(json.dumps(found.layers))
    prefix = next(iter(zeros))
    zeros[prefix]["key"] = [0.0, 1.0]
    dead = vattn.Calibration(zeros, 1)
    with pytest.raises(errors.ScaleError, match="per_head=False"):
        dead.quant_config(prefix, per_head=True)
    assert dead.quant_config(prefix).k_scale is not None
    model = make_model("llama")
    config = vattn.CacheConfig(cache_dtype="fp8")
    fewer = {prefix: {**seen, "key": seen["key"][:1]} for prefix, seen in found.layers.items()}
    with pytest.raises(errors.ScaleError, match="1 KV heads"):
        enable(model, cache_config=config, calibration=vattn.Calibration(fewer, 1))
    with pytest.raises(errors.ConfigError, match="one of them"):
        enable(model, cache_config=config, calibration=found, quant_config=vattn.QuantConfig("unit", "unit"))
    quantised = enable(model, cache_config=config, calibration=found, num_blocks=4)
    with pytest.raises(errors.ConfigError, match="with a cache in fp8_e4m3"):
        vattn.audit(quantised, TEXTS)
    disable(quantised)


def test_files_that_cannot_be_written_are_refused_by_their_names(found: vattn.Calibration, tmp_path: Path) -> None:
    """A missing folder was told as that of a temporary file which nobody had named."""
    (tmp_path / "kept.json").write_text("old")
    places = (tmp_path / "missing" / "s.json", tmp_path, tmp_path / "kept.json" / "s.json")
    for place in places:
        with pytest.raises(errors.ConfigError, match="which cannot be written") as told:
            found.save(place)
        assert str(place) in str(told.value) and ".tmp" not in str(told.value)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    pytest.importorskip("matplotlib")
    row = AuditRow("layers.0", 0.0, 0.0, 0.0, 0.1, 0.1, 1.0)
    done = Audit("fp8_e4m3", 1, (row, row))
    with pytest.raises(errors.ConfigError, match=r"missing/drift\.png, which cannot be written"):
        done.plot(tmp_path / "missing" / "drift.png")


def test_magnitudes_that_give_no_scale_say_what_to_do() -> None:
    def told(keys: list[float], **options: Any) -> str:
        seen = {"query": [1.0, 1.0], "key": keys, "value": [1.0, 1.0], "output": [1.0, 1.0]}
        with pytest.raises(errors.ScaleError) as error:
            vattn.Calibration({"layers.0": seen}, 1).quant_config("layers.0", **options)
        return str(error.value)

    for keys in ([float("nan"), 1.0], [-1.0, -2.0], [float("inf"), 1.0]):
        assert "whose values are finite" in told(keys) and "per_head" not in told(keys)
    assert "calibrate with text that reaches it" in told([0.0, 0.0]) and "per_head" not in told([0.0, 0.0])
    assert "scales_per_head=False of enable()" in told([0.0, 1.0], per_head=True)


def test_a_folder_is_no_model_and_says_how_to_load_it(tmp_path: Path) -> None:
    for folder in ("some/folder", tmp_path):
        with pytest.raises(errors.ConfigError, match=r"AutoModelForCausalLM.from_pretrained\(folder\)"):
            enable(folder)
        with pytest.raises(errors.ConfigError, match=r"AutoModelForCausalLM.from_pretrained\(folder\)"):
            enable_latent_attention(folder)  # type: ignore[arg-type]
