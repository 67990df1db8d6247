"""FP8 linear layers: against fp64, in models, through state dicts, merged; what cannot be FP8 is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.support import relative_l2
from vattn.errors import ConfigError, DtypeError, GradientError, ScaleError, ShapeError, StrideError
from vattn.layers.fp8_linear import LINEAR_FORMATS, FP8Linear

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from tests.integrations.hf_families import make_model
from tests.integrations.test_transformers import PROMPTS, Runner, eager_logits
from vattn.integrations.transformers import disable, enable

E4M3 = torch.float8_e4m3fn
FORMATS = list(LINEAR_FORMATS)
STATIC = torch.tensor([0.02])


def make_linear(inputs: int = 256, outputs: int = 208, bias: bool = True) -> nn.Linear:
    """A layer whose last block of rows is not whole."""
    torch.manual_seed(1)
    linear = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    linear.weight[3] *= 5
    return linear


def make_fp8(fmt: str, linear: nn.Linear | None = None) -> FP8Linear:
    return FP8Linear.of(linear or make_linear(), fmt, STATIC if fmt == "fp8_static" else None)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3 from its definition, in fp64: three bits behind the leading one, steps of 2**-9 below 2**-6."""
    size = x.double() / scale
    step = 2.0 ** (torch.frexp(size.abs().clamp(min=2.0**-6))[1] - 4).double()
    return ((size / step).round() * step).clamp(-448, 448) * scale


def expected(linear: nn.Linear, x: Tensor, fmt: str) -> Tensor:
    """The product of rounded inputs and weights in fp64, each scale the largest magnitude over 448."""

    def by(largest: Tensor) -> Tensor:
        return (largest.clamp(min=1e-10) / 448).float().double()

    weight = linear.weight
    if fmt == "fp8_group128":
        rows = [rounded(part, by(part.abs().amax())) for part in torch.cat(
            [block for group in weight.split(128) for block in group.split(128, 1)]).split(
                [len(group) for group in weight.split(128) for _ in weight.split(128, 1)])]  # fmt: skip
        per_row = len(weight.split(128, 1))
        wide = torch.cat([torch.cat(rows[i : i + per_row], 1) for i in range(0, len(rows), per_row)])
        inputs = torch.cat([rounded(part, by(part.abs().amax(1, keepdim=True))) for part in x.split(128, 1)], 1)
    elif fmt == "fp8_per_token":
        wide = rounded(weight, by(weight.abs().amax(1, keepdim=True)))
        inputs = rounded(x, by(x.abs().amax(1, keepdim=True)))
    else:
        wide = rounded(weight, by(weight.abs().amax()))
        inputs = rounded(x, STATIC.double() if fmt == "fp8_static" else by(x.abs().amax()))
    return inputs @ wide.t() + (0 if linear.bias is None else linear.bias.double())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_products(fmt: str, tokens: int) -> None:
    """Codes are exact and products in fp32: what differs from fp64 is the order of a sum."""
    linear = make_linear()
    x = torch.randn(tokens, 256)
    x[0, 5] = 30.0  # beyond what the given scale stores
    x[-1] *= 0 if tokens > 1 else 1
    quantised = make_fp8(fmt, linear)
    got = quantised(x)
    assert relative_l2(got, expected(linear, x, fmt)) < 1e-6
    shaped = quantised(x.view(1, tokens, 1, 256))
    assert shaped.shape == (1, tokens, 1, 208) and torch.equal(shaped.flatten(0, 2), got)
    # Three bits of every factor are kept; errors of 2**-4 average out over a row.
    x[0, 5] = 1.0
    assert 1e-3 < relative_l2(quantised(x), linear(x)) < 0.06


@pytest.mark.parametrize("fmt", ["fp8_static", "fp8_dynamic", "fp8_per_token"])
def test_the_gpu_product_takes_these_operands(fmt: str) -> None:
    """`torch._scaled_mm` runs on a CPU too where torch has it; blocks it has on GPUs alone."""
    quantised = make_fp8(fmt, make_linear(bias=False))
    x = torch.randn(5, 256).bfloat16()
    codes, scale = quantised.quantise_input(x)
    try:  # Whether this torch has it, told by operands that are right for certain.
        ones, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
        torch._scaled_mm(ones, ones.t(), one, one, out_dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__}: {error}"[:120])
    got = quantised._scaled_mm(codes, scale, torch.bfloat16)
    assert relative_l2(got.float(), quantised(x).float()) < 4e-3  # bf16, rounded once or twice


def test_what_the_gpu_product_does_not_take() -> None:
    rows, blocks = make_fp8("fp8_per_token"), make_fp8("fp8_group128")
    with pytest.raises(DtypeError, match="bfloat16"):
        rows._scaled_mm(*rows.quantise_input(torch.randn(2, 256)), torch.float32)
    with pytest.raises(ShapeError, match="multiples of 512"):
        blocks._scaled_mm(*blocks.quantise_input(torch.randn(2, 256)), torch.bfloat16)


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_survive_what_happens_to_models(fmt: str, tmp_path: Path) -> None:
    model = nn.Sequential(make_fp8(fmt))
    x = torch.randn(3, 256)
    got = model(x)
    moved = copy.deepcopy(model).bfloat16()
    assert moved[0].weight.dtype is E4M3 and moved[0].weight_scale.dtype is torch.float32
    assert moved[0].bias.dtype is torch.bfloat16
    assert torch.equal(moved[0].weight.view(torch.uint8), model[0].weight.view(torch.uint8))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    other = nn.Sequential(FP8Linear.of(nn.Linear(256, 208), fmt, STATIC * 3 if fmt == "fp8_static" else None))
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(other(x), got)
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    empty.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(empty(x), got)
    assert isinstance(model[0], nn.Linear) and (model[0].in_features, model[0].out_features) == (256, 208)
    assert fmt in repr(model)


def test_the_bias_has_the_dtype_of_the_input() -> None:
    linear = make_fp8("fp8_per_token")
    with pytest.raises(DtypeError, match="bfloat16 with a bias in"):
        linear(torch.randn(2, 256).bfloat16())
    assert linear.bfloat16()(torch.randn(2, 256).bfloat16()).dtype is torch.bfloat16


def test_gradients_are_refused() -> None:
    linear = make_fp8("fp8_per_token")
    with pytest.raises(GradientError, match="FP8Linear"):
        linear(torch.randn(2, 256, requires_grad=True))
    with torch.no_grad():
        assert linear(torch.randn(2, 256, requires_grad=True)).shape == (2, 208)


class Net(nn.Module):
    """Projections as a transformers model names them."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
            setattr(self, name, nn.Linear(64, size))
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(self.norm(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.out(q + torch.cat([k, v], -1))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"block": Net()}).requires_grad_(False).eval()


def test_layers_with_one_input_share_scales() -> None:
    model = make_net()
    largest = max(float(getattr(model["block"], f"{n}_proj").weight.abs().max()) for n in "qkv")
    seen = {f"block.{n}": top for n, top in (("q_proj", 3.0), ("k_proj", 4.0), ("v_proj", 3.5), ("out", 9.0))}
    found = vattn.Calibration({}, 1, seen)
    report = vattn.quantise_linears(model, "fp8_static", calibration=found)
    assert report == dict.fromkeys(seen, "fp8_static")
    parts = [getattr(model["block"], f"{n}_proj") for n in "qkv"]
    assert all(part.weight_scale.item() == pytest.approx(largest / 448) for part in parts)
    assert all(part.input_scale.item() == pytest.approx(4 / 448) for part in parts)
    assert model["block"].out.input_scale.item() == pytest.approx(9 / 448)
    rows = make_net()
    vattn.quantise_linears(rows, "fp8_per_token", skip="*.k_proj")
    assert rows["block"].q_proj.weight_scale.shape == (64,) and type(rows["block"].k_proj) is nn.Linear


def hooked(model: Any) -> None:
    model["block"].out.register_forward_hook(lambda *a: None)


def tied(model: Any) -> None:
    model["block"].q_proj.weight = model["block"].out.weight


def odd(model: Any) -> None:
    model["block"].out = nn.Linear(64, 60)


def broken(model: Any) -> None:
    model["block"].out.weight[3, 2] = float("nan")


def quantised(model: Any) -> None:
    vattn.quantise_linears(model, "fp8_per_token")


def many(model: Any) -> None:
    model["extra"] = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9)))


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "format": (None, {"format": "fp8"}, ConfigError, "fp8_per_token"),
    "pattern": (None, {"skip": ["o_proj"]}, ConfigError, "o_proj"),
    "pattern among many": (many, {"skip": "oproj"}, ConfigError, r"block\.\w+, extra\.[\w., ]+ and \d more\. Try"),
    "all": (None, {"skip": "*"}, ConfigError, "without linear layers"),
    "no calibration": (None, {"format": "fp8_static"}, ScaleError, "linears=True"),
    "calibration": (None, {"calibration": vattn.Calibration({}, 1)}, ScaleError, "drop it"),
    "of others": (
        None,
        {"format": "fp8_static", "calibration": vattn.Calibration({}, 1)},
        ScaleError,
        "no calibration of the input of 'block.q_proj'",
    ),
    "no path": (None, {"format": "fp8_static", "calibration": 5}, ConfigError, "calibration=5"),
    "hooks": (hooked, {}, ConfigError, "hooks"),
    "double": (lambda model: model.double(), {}, DtypeError, "float64"),
    "tied": (tied, {}, ConfigError, "block.q_proj.weight and block.out.weight"),
    "sizes": (odd, {}, ShapeError, "block.out.*60 output"),
    "blocks": (None, {"format": "fp8_group128"}, ShapeError, "multiples of 128"),
    "NaN": (broken, {}, ScaleError, "block.out"),
    "twice": (quantised, {}, ConfigError, "already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_the_model_alone(case: str) -> None:
    prepare, options, kind, text = REFUSED[case]
    model = make_net()
    if prepare is not None:
        prepare(model)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(kind, match=text):
        vattn.quantise_linears(model, **{"format": "fp8_per_token", **options})
    assert before == {name: type(module) for name, module in model.named_modules()}


def test_a_layer_with_a_forward_of_its_own_is_left() -> None:
    """As offloading gives it: its weight may not even be there."""
    model = make_net()
    model["block"].out.forward = lambda x: x
    report = vattn.quantise_linears(model, "fp8_per_token")
    assert report["block.out"] == "left: it has a forward of its own"
    assert type(model["block"].out) is nn.Linear and isinstance(model["block"].q_proj, FP8Linear)


def test_plain_weights_are_no_codes() -> None:
    """Also where missing scales would be forgiven: the old scale would multiply other weights."""
    model, plain = make_net(), make_net().state_dict()
    vattn.quantise_linears(model, "fp8_per_token")
    before = model["block"].q_proj.weight.clone()
    with pytest.raises(DtypeError, match=r"block\.\w+\.weight in torch.float32"):
        model.load_state_dict(plain, strict=False)
    assert torch.equal(before.view(torch.uint8), model["block"].q_proj.weight.view(torch.uint8))
    broken = model.state_dict() | {"block.q_proj.weight_scale": torch.zeros(64, 1)}
    with pytest.raises(ScaleError, match=r"block\.q_proj\.weight_scale that is not positive"):
        model.load_state_dict(broken)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((torch.zeros(32, 32), torch.ones(1), "fp8_dynamic"), DtypeError),
        ((torch.zeros(32, 40, dtype=E4M3), torch.ones(1), "fp8_dynamic"), ShapeError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.ones(3), "fp8_dynamic"), ShapeError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.ones(1), "fp8_static"), ScaleError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.ones(1), "fp8_dynamic", torch.ones(1)), ScaleError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.tensor([float("nan")]), "fp8_dynamic"), ScaleError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.ones(1), "fp8_static", torch.zeros(1)), ScaleError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.ones(1), "fp8_static", torch.ones(1).cfloat()), ScaleError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.ones(1).to(E4M3), "fp8_dynamic"), ScaleError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.ones(1).bool(), "fp8_dynamic"), ScaleError),
        ((None, torch.ones(1), "fp8_dynamic"), DtypeError),
        ((torch.zeros(32, 64, dtype=E4M3).t(), torch.ones(1), "fp8_dynamic"), StrideError),
        ((torch.zeros(32, 32, dtype=E4M3), torch.ones(1), "fp8_dynamic", None, torch.zeros(5)), ShapeError),
        ((torch.zeros(32, 32, dtype=E4M3), 1.0, "fp8_dynamic"), DtypeError),
        (([0], torch.ones(1), "fp8_dynamic"), DtypeError),
    ],
)
def test_wrong_parts(arguments: tuple[Any, ...], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        FP8Linear(*arguments)


@pytest.mark.parametrize("fmt", FORMATS)
def test_wrong_inputs(fmt: str) -> None:
    """Not one of them is cut, joined or rounded to something that fits."""
    quantised = make_fp8(fmt, make_linear(bias=False))
    for shape in ((2, 128), (4, 128), (0, 128), (2, 512), ()):
        with pytest.raises(ShapeError, match=r"\[\.\.\., 256\]"):
            quantised(torch.zeros(shape))
    for dtype in (torch.int64, torch.float64, torch.complex64, E4M3):
        with pytest.raises(DtypeError, match="bfloat16"):
            quantised(torch.zeros(2, 256, dtype=dtype))
    assert quantised(torch.zeros(0, 256)).shape == (0, 208)


def test_what_is_no_plain_layer() -> None:
    for layer in (3, make_fp8("fp8_dynamic")):
        with pytest.raises(ConfigError, match=r"plain nn\.Linear"):
            FP8Linear.of(layer, "fp8_dynamic")  # type: ignore[arg-type]


# In transformers models


def make_llama(**changes: Any) -> Any:
    model = make_model("llama", **{"hidden_size": 128, "intermediate_size": 256, **changes})
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        linear.weight *= 0.4  # so that layers do not blow rounding up
    return model


def calibrated(model: Any) -> vattn.Calibration:
    found = vattn.calibrate(enable(model, num_blocks=17), [PROMPTS], linears=True)
    disable(model)
    return found


@pytest.mark.parametrize("fmt", FORMATS)
def test_models_equal_their_rounded_selves(fmt: str, tmp_path: Path) -> None:
    """The paged model with FP8 linears equals transformers' own attention with the same linears; merged too."""
    model = make_llama()

    plain = eager_logits(model, PROMPTS[1])
    found = tmp_path / "vattn_scales.json" if fmt == "fp8_static" else None
    if found is not None:
        calibrated(model).save(found)
    report = vattn.quantise_linears(model, fmt, calibration=found)
    assert report.pop("lm_head") == "left: the head" and set(report.values()) == {fmt} and len(report) == 14
    expected = eager_logits(model, PROMPTS[1])
    assert 1e-3 < relative_l2(expected, plain) < 0.5
    for merge in (False, True):
        packed = enable(model, merge_projections=None if merge else False, num_blocks=17)
        assert all(linear.quantises_input for linear in packed.modules() if isinstance(linear, FP8Linear))
        got = Runner(packed).step([(PROMPTS[1], 0)])[0]
        # Codes at a rounding border move by a step where a sum in another order moves their input.
        assert relative_l2(got, expected) < 0.03
        if merge:
            merged = {id(m.merged): m.merged for m in packed.modules() if hasattr(m, "merged")}
            # Blocks of 128 rows go over the border between the 64 rows of key and value.
            assert len(merged) == (2 if fmt == "fp8_group128" else 4)
            assert all(m.quantised is not None for m in merged.values())
            single = fmt in ("fp8_static", "fp8_dynamic")
            with pytest.raises(ConfigError, match="merged") if single else nullcontext():
                model.load_state_dict(model.state_dict())
        disable(model)
    assert sum(type(module) is FP8Linear for module in model.modules()) == 14
    assert torch.equal(eager_logits(model, PROMPTS[1]), expected)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "gemma2", "phi3", "falcon-alibi", "bloom", "gpt_oss"])
def test_families(name: str) -> None:
    """Biases, merged projections, experts that stay, forwards of ours; everything that is quantised is equal."""

    model = make_model(name)
    report = vattn.quantise_linears(model, "fp8_per_token")
    assert sum(why == "fp8_per_token" for why in report.values()) >= 8 and report["lm_head"] == "left: the head"
    expected = eager_logits(model, PROMPTS[1])
    got = Runner(enable(model, num_blocks=17, merge_projections=True)).step([(PROMPTS[1], 0)])[0]
    assert relative_l2(got, expected) < 0.03


def test_models_without_linear_layers() -> None:
    with pytest.raises(ConfigError, match="lm_head: left: the head"):
        vattn.quantise_linears(make_model("gpt2"), "fp8_per_token")
    with pytest.raises(ShapeError, match=r"kv_a_proj_with_mqa.*24 output"):
        vattn.quantise_linears(make_model("deepseek_v3"), "fp8_per_token")


def test_quantised_after_enable_and_merged_first() -> None:
    model = make_llama()

    packed = enable(model, num_blocks=17)
    before = Runner(packed).step([(PROMPTS[1], 0)])[0]
    assert "model.layers.0.mlp.up_proj" in vattn.quantise_linears(packed, "fp8_per_token")
    assert 1e-3 < relative_l2(Runner(packed).step([(PROMPTS[1], 0)])[0], before) < 0.5
    disable(model)


def test_quantised_while_merged_and_under_vattn_linears() -> None:
    """Layers are quantised one by one, and merged again."""
    model, other = make_llama(), make_llama()
    packed = enable(model, merge_projections=True, vattn_linears=True, num_blocks=17)
    vattn.quantise_linears(packed, "fp8_per_token")
    vattn.quantise_linears(other, "fp8_per_token")
    expected = Runner(enable(other, merge_projections=False, num_blocks=17)).step([(PROMPTS[1], 0)])[0]
    # Sums in another order move inputs over a rounding border.
    assert relative_l2(Runner(packed).step([(PROMPTS[1], 0)])[0], expected) < 0.03
    assert "4 groups" in packed.explain() and "15 linear layers" in packed.explain()
    with pytest.raises(ConfigError, match="fp8_per_token already"):
        vattn.quantise_linears(packed, "fp8_per_token", skip="lm_head")
    assert "4 groups" in packed.explain()
    disable(model)
    assert sum(type(module) is FP8Linear for module in model.modules()) == 14
