"""What `enable` does with linear layers where nothing is requested, and what forbids it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import vattn
from vattn.config.device import DeviceInfo
from vattn.errors import ConfigError, GraphContractError
from vattn.generation.model_steps import sample_inputs

pytest.importorskip("transformers")

from tests.integrations.hf_families import make_model
from tests.integrations.test_transformers import PROMPTS, TOLERANCE, Runner, eager_logits
from tests.support import relative_l2
from vattn.integrations.transformers import disable, enable, linears
from vattn.integrations.transformers.swapped_linears import MergedFP8Part, MergedPart, VattnLinear

FIRST = "model.layers.0.mlp (gate_proj, up_proj)"


def first_mlp(model: Any) -> Any:
    return model.model.layers[0].mlp


def hooked(model: Any) -> None:
    first_mlp(model).up_proj.register_forward_pre_hook(lambda *_: None)


def offloaded(model: Any) -> None:
    up = first_mlp(model).up_proj
    up.forward = lambda x: nn.functional.linear(x, up.weight)


def adapted(model: Any) -> None:
    """As peft wraps a layer."""

    class LoraLinear(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) * 1.5

    first_mlp(model).up_proj = LoraLinear(first_mlp(model).up_proj)


def tied(model: Any) -> None:
    first_mlp(model).up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def with_a_bias(model: Any) -> None:
    up = first_mlp(model).up_proj
    up.bias = nn.Parameter(torch.ones(up.out_features))


def called_with_two_inputs(model: Any) -> None:
    """Equal ones, but only now."""
    mlp = first_mlp(model)
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x + 0))


def written_in_between(model: Any) -> None:
    mlp = first_mlp(model)
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x.clone().mul_(2).div_(2)))


def never_called(model: Any) -> None:
    model.tower = copy.deepcopy(model.model.layers[0])


def scaled_apart(model: Any) -> None:
    mlp = first_mlp(model)
    for name, scale in (("gate_proj", 0.1), ("up_proj", 0.2)):
        linear = getattr(mlp, name)
        setattr(mlp, name, vattn.layers.fp8_linear.FP8Linear.of(linear, "fp8_static", torch.tensor([scale])))


APART: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "hooks": (hooked, FIRST, "hooks"),
    "offloading": (offloaded, FIRST, "a forward of its own"),
    "an adapter": (adapted, FIRST, "layers of class LoraLinear"),
    "shared weights": (tied, "model.layers.0.mlp (gate_proj, up_proj) and 1 more", "weights that other layers share"),
    "one bias": (with_a_bias, FIRST, "differ in kind, input size, bias"),
    "two inputs": (called_with_two_inputs, FIRST, "does not call all of them with one input"),
    "another input": (written_in_between, FIRST, "does not call all of them with one input"),
    "a tower": (never_called, "tower.self_attn (q_proj, k_proj, v_proj) and 1 more", "a trial run of the model"),
    "two scales": (scaled_apart, FIRST, "different scales of their input"),
}


@pytest.mark.parametrize("what", APART)
def test_what_keeps_projections_apart(what: str) -> None:
    """They stay as they are, the others are merged, the results are the model's own, and `True` is refused."""
    prepare, where, why = APART[what]
    model = make_model("llama")
    prepare(model)
    expected = eager_logits(model, PROMPTS[1])
    packed = enable(model, num_blocks=17)
    lines = [line for line in packed.explain().splitlines() if "stay apart" in line]
    assert len(lines) == 1 and lines[0].startswith(f"merge_projections: {where} stay apart: ") and why in lines[0]
    # Two layers of five projections in two groups.
    merged = {"shared weights": 6, "a tower": 10}.get(what, 8)
    assert sum(isinstance(module, MergedPart) for module in model.modules()) == merged
    bound = 0.03 if what == "two scales" else TOLERANCE
    assert relative_l2(Runner(packed).step([(PROMPTS[1], 0)])[0], expected) < bound
    disable(model)
    with pytest.raises(ConfigError, match=r"merge_projections=True.*leave merge_projections out"):
        enable(model, merge_projections=True)
    assert not any(isinstance(module, MergedPart) for module in model.modules())


def test_too_little_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    cat, calls = torch.cat, []

    def fail(tensors: Any, *args: Any, **options: Any) -> Any:
        if isinstance(tensors, list) and tensors[0].shape == first_mlp(model).up_proj.weight.shape:
            calls.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cat(tensors, *args, **options)

    monkeypatch.setattr(torch, "cat", fail)
    packed = enable(model, num_blocks=17)
    assert len(calls) == 2 and f"{FIRST} and 1 more stay apart: too little memory" in packed.explain()


def test_weights_are_merged_once_and_keep_their_gradients() -> None:
    """A second `enable` finds them in one storage."""
    model = make_model("llama").requires_grad_(True)
    enable(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters() if ".vattn." not in name}
    disable(model)
    packed = enable(model)
    assert "merge_projections: 4 groups of projections are one product each" in packed.explain().splitlines()
    disable(model)
    assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_merged_weights_that_differ_later_are_separated() -> None:
    model, other = make_model("llama"), make_model("llama")
    packed = enable(model, num_blocks=17)
    for each in (model, other):
        with_a_bias(each)
    got = Runner(packed).step([(PROMPTS[1], 0)])[0]
    assert relative_l2(got, eager_logits(other, PROMPTS[1])) < TOLERANCE
    assert "3 groups" in packed.explain() and "changed after enable: layers that differ in kind" in packed.explain()


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrised(model: Any) -> None:
    parametrize.register_parametrization(first_mlp(model).up_proj, "weight", Doubled())


def all_parametrised(model: Any) -> None:
    for name in ("gate_proj", "up_proj"):
        parametrize.register_parametrization(getattr(first_mlp(model), name), "weight", Doubled())


def all_normalised_by_hooks(model: Any) -> None:
    """The older `weight_norm`, which computes weights in hooks."""
    for name in ("gate_proj", "up_proj"):
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(getattr(first_mlp(model), name))


def replaced(model: Any) -> None:
    up = first_mlp(model).up_proj
    up.weight = nn.Parameter(-2 * up.weight.detach())


def written_original(model: Any) -> None:
    up = first_mlp(model).up_proj
    (up.weight_g if hasattr(up, "weight_g") else up.parametrizations.weight.original).data.mul_(3)


@pytest.mark.parametrize("change", [parametrised, all_parametrised, all_normalised_by_hooks])
def test_weights_that_are_computed_since_are_followed(change: Callable[[Any], None]) -> None:
    """They were read once, or never, and `disable` left a class of merged layers under the parametrisation."""
    model, other = make_model("llama"), make_model("llama")
    packed = enable(model, num_blocks=17)
    runner = Runner(packed)
    for changes in (change, written_original):
        changes(model)
        changes(other)
        assert relative_l2(runner.step([(PROMPTS[1], 0)])[0], eager_logits(other, PROMPTS[1])) < TOLERANCE
    assert "3 groups" in packed.explain() and "a parametrisation or a hook computes" in packed.explain()
    disable(model)
    assert relative_l2(eager_logits(model, PROMPTS[1]), eager_logits(other, PROMPTS[1])) == 0.0
    if change is parametrised:
        parametrize.remove_parametrizations(first_mlp(model).up_proj, "weight")
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert not any(isinstance(module, (MergedPart, VattnLinear)) for module in linears)
    assert change is not parametrised or {type(module) for module in linears} == {nn.Linear}


@pytest.mark.parametrize("enabled", [True, False])
def test_a_model_saves_and_loads(enabled: bool, tmp_path: Any) -> None:
    model = make_model("qwen2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    enable(model, num_blocks=8)
    if not enabled:
        disable(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == before.keys() and all(torch.equal(loaded[name], before[name]) for name in before)


ON_HOPPER: dict[str, tuple[Any, dict[str, Any], str]] = {
    "everything": (torch.bfloat16, {}, "15 linear layers run by vattn::linear"),
    "fp32": (torch.float32, {}, "off: its kernels are for 16-bit models"),
    "batch invariance": (torch.bfloat16, {"batch_invariant": True}, "off: batch_invariant=True"),
    "requested": (torch.bfloat16, {"vattn_linears": False}, "off, as requested"),
}


@pytest.mark.parametrize("what", ON_HOPPER)
def test_own_products_on_hopper(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, options, text = ON_HOPPER[what]
    hopper = DeviceInfo("cuda", (9, 0), "a Hopper GPU")
    monkeypatch.setattr(linears, "DeviceInfo", type("Hopper", (), {"of": staticmethod(lambda _: hopper)}))
    packed = enable(make_model("llama").to(dtype), num_blocks=17, **options)
    assert f"vattn_linears: {text}" in packed.explain()
    kinds = {type(module) for module in packed.modules()}
    assert (VattnLinear in kinds) == (what == "everything")


def test_own_products_elsewhere_and_of_some_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "vattn_linears: off: its kernels are for GPUs of compute capability 9.0, not"
        in enable(make_model("llama")).explain()
    )
    hopper = DeviceInfo("cuda", (9, 0), "a Hopper GPU")
    monkeypatch.setattr(linears, "DeviceInfo", type("Hopper", (), {"of": staticmethod(lambda _: hopper)}))
    model = make_model("llama", hidden_size=128, intermediate_size=128).bfloat16()
    hooked(model)
    vattn.quantise_linears(model, "fp8_group128", skip="*mlp*")
    lines = enable(model).explain().splitlines()
    assert "vattn_linears: 6 linear layers run by vattn::linear" in lines
    assert any("up_proj stay as they are: hooks" in line for line in lines)
    assert any("q_proj and 7 more stay as they are: FP8 weights in blocks" in line for line in lines)


def test_a_projection_that_is_called_again_sees_changed_weights() -> None:
    model = make_model("llama")
    packed = enable(model, num_blocks=8)
    query = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, query.in_features)
    with torch.no_grad():
        first = query(x)
        query.weight.mul_(2.0)
        torch.testing.assert_close(query(x), 2 * first)
        x.mul_(3.0)
        torch.testing.assert_close(query(x), 6 * first)
    disable(packed)


SCALES: dict[str, tuple[str, tuple[str, ...]]] = {
    "rows": ("fp8_per_token", ("gate_proj",)),
    "blocks": ("fp8_group128", ("up_proj",)),
    "all of them": ("fp8_dynamic", ("gate_proj", "up_proj")),
    "one of them": ("fp8_dynamic", ("up_proj",)),
}


@pytest.mark.parametrize("what", SCALES)
def test_scales_of_merged_projections_that_are_written_in_place(what: str) -> None:
    fmt, names = SCALES[what]
    models = []
    for merges in (None, False):
        model = make_model("llama", hidden_size=128, intermediate_size=128)
        vattn.quantise_linears(model, fmt)
        packed = enable(model, num_blocks=17, merge_projections=merges)
        runner = Runner(packed)
        before = runner.step([(PROMPTS[1], 0)])[0]
        assert isinstance(first_mlp(model).up_proj, MergedFP8Part) == (merges is None)
        for name in names:
            getattr(first_mlp(model), name).weight_scale.mul_(3.0)
        models.append(runner.step([(PROMPTS[1], 0)])[0])
        assert not torch.equal(before, models[-1])
    # The same products over the same codes; a product of more columns may sum in another order.
    assert relative_l2(models[0], models[1]) < 1e-3
    disable(packed)


@pytest.mark.parametrize("alike", [True, False])
def test_a_captured_graph_of_merged_scales_refuses_those_that_it_cannot_read(alike: bool) -> None:
    """A graph reads the first part's scale, or a copy of scales that differ: a replay would not see other ones."""
    model = make_model("llama", hidden_size=128, intermediate_size=128)
    vattn.quantise_linears(model, "fp8_dynamic")
    mlp = first_mlp(model)
    if not alike:
        mlp.up_proj.weight_scale.mul_(2.0)
    packed = enable(model, num_blocks=17)
    builder = vattn.AttentionMetadataBuilder(2, 2, 64, layers=packed)
    runner = vattn.CUDAGraphRunner(packed, [2], builder, sample_inputs)
    product = mlp.gate_proj.merged
    assert (product.quantised.weight_scale.data_ptr() == mlp.gate_proj.weight_scale.data_ptr()) == alike
    for linear in (mlp.gate_proj, mlp.up_proj) if alike else ():
        linear.weight_scale.mul_(3.0)
    runner.check_model()
    mlp.up_proj.weight_scale.mul_(3.0)
    with pytest.raises(GraphContractError, match="capture it again by a new runner"):
        runner.check_model()
    vattn.CUDAGraphRunner(packed, [2], builder, sample_inputs).check_model()


@pytest.mark.slow
def test_a_model_that_is_compiled_whole_sees_replaced_and_parametrised_weights() -> None:
    """Compiled code does not look at weights, so its generator does."""
    sampling = vattn.Sampling(max_new_tokens=8, stop_token_ids=())
    outputs = []
    for merges in (None, False):
        model = make_model("llama")
        generator = vattn.Generator(enable(model, num_blocks=17, merge_projections=merges), compile="model")
        outputs.append([generator.generate([PROMPTS[1]], sampling)[0].output])
        for change in (replaced, parametrised):
            change(model)
            outputs[-1].append(generator.generate([PROMPTS[1]], sampling)[0].output)
    assert outputs[0] == outputs[1] and len(set(map(tuple, outputs[0]))) == 3
