"""`vattn::linear`: against fp64, as torch sees the op, what it refuses, and the kernel in the interpreter."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import relative_l2
from vattn import errors
from vattn.ops.linear_arguments import E4M3, LinearArgs


def make_args(rows: int, codes: str = "", features: int = 48, columns: int = 1024, seed: int = 0) -> LinearArgs:
    """Random arguments whose rows lie apart, with NaN between them; `codes`: `""`, `"tensor"` or `"row"`."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dtype = E4M3 if codes else torch.float16
    room = torch.full((rows + 2, columns + 64), torch.nan).to(dtype)
    room[1 : rows + 1, :columns] = randn(rows, columns).to(dtype)
    weight = (randn(features, columns) / columns**0.5 * (64 if codes else 1)).to(dtype)
    x = room[1 : rows + 1, :columns]
    if not codes:
        return LinearArgs(x, weight, None, None, "float16")
    by_row = codes == "row"
    scales = ((rows, 1), (features,)) if by_row else ((1,), (1,))
    scale, other = (torch.rand(shape, generator=generator) * 0.01 + 0.01 for shape in scales)
    return LinearArgs(x, weight, scale, other, "bfloat16")


def expected(args: LinearArgs) -> Tensor:
    product = args.input.double() @ args.weight.double().t()
    if args.input_scale is not None and args.weight_scale is not None:
        product = product * args.input_scale * args.weight_scale
    return product


def call(args: LinearArgs) -> Tensor:
    return torch.ops.vattn.linear(*args)


@pytest.mark.parametrize("codes", ["", "tensor", "row"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_products(rows: int, codes: str) -> None:
    args = make_args(rows, codes)
    got = call(args)
    assert got.dtype is (torch.bfloat16 if codes else torch.float16) and got.shape == (rows, 48)
    # Rounded once to the result's dtype: 2**-9 and 2**-12 of a value at most.
    assert not rows or relative_l2(got.double(), expected(args)) < (2e-3 if codes else 3e-4)


@pytest.mark.parametrize(("rows", "features"), [(3, 48), (4, 96), (7, 16), (19, 80), (32, 64)])
def test_the_kernel(rows: int, features: int) -> None:
    """In the interpreter: all numbers of rows round up to a tile, and the last block of features is not whole."""
    pytest.importorskip("triton")
    from vattn.kernels.hopper.linear.small_m import WIDE, small_m_linear, takes

    args = make_args(rows, "", features)
    # The interpreter knows no Gluon.
    assert takes(args) and not takes(make_args(rows, "tensor", features))
    assert not any(takes(make_args(other, "", features)) for other in (0, 1, 2, 33))
    assert not takes(make_args(rows, "", features, columns=1024 + 16))
    assert not takes(make_args(rows, "", features + 8))
    for cut in (None, WIDE):
        got = small_m_linear(args, cut)
        assert got.isfinite().all() and relative_l2(got.double(), expected(args)) < 4e-4


@pytest.mark.parametrize("codes", ["", "tensor"])
def test_what_is_streamed(codes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which products the Hopper kernel takes, and that its boxes are panels of 128 bytes of the rows."""
    pytest.importorskip("triton.experimental.gluon")
    from vattn.kernels.hopper import availability as hopper
    from vattn.kernels.hopper.linear.launch import RING, _boxes, accepts

    args = make_args(5, codes, columns=1024)
    assert not accepts(args)
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert accepts(args) and accepts(make_args(8, codes, 17, 128)) and accepts(make_args(1, codes))
    assert not accepts(make_args(9, codes)) and not accepts(make_args(0, codes))
    assert not accepts(make_args(5, codes, columns=1024 + 16))
    assert not accepts(args._replace(input=args.input[:, :-32], weight=args.weight[:, :-32].contiguous()))
    assert accepts(args._replace(input=args.input[:, :-128], weight=args.weight[:, :-128].contiguous()))
    odd = torch.zeros(5 * 1032, dtype=args.input.dtype).as_strided((5, 1024), (1028 if codes else 1026, 1))
    assert not accepts(args._replace(input=odd))  # Rows that are no whole number of 16 bytes apart.
    for apart in (0, 512):
        assert not accepts(args._replace(input=args.input.as_strided((5, 1024), (apart, 1))))
    plain = args.input.view(torch.uint8) if codes else args.input  # CPUs do not compare e4m3.
    boxes = _boxes(args.input, 8, RING)
    panels = plain.as_strided(boxes.shape, boxes.strides, args.input.storage_offset())
    assert torch.equal(panels.permute(1, 0, 2).flatten(1), plain)
    assert boxes.block_shape == [RING.panels, 8, 128 if codes else 64]


def test_which_kernel_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows: torch, that of up to eight rows, and the plain Triton one."""
    pytest.importorskip("triton.experimental.gluon")
    from vattn.kernels.hopper import availability as hopper
    from vattn.kernels.hopper.linear import small_m

    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(small_m, "INTERPRETED", types.SimpleNamespace(value=False))
    for rows, streamed in ((1, True), (8, True), (9, False), (32, False), (33, False)):
        for codes in ("", "tensor", "row"):
            args = make_args(rows, codes)
            assert small_m.streams(args) == streamed
            assert small_m.takes(args) == (streamed or (not codes and rows <= 32))


@pytest.mark.parametrize("codes", ["", "tensor", "row"])
def test_opcheck(codes: str) -> None:
    args = make_args(3, codes)
    # The schema's test multiplies arguments, which torch cannot do with FP8.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    result = torch.library.opcheck(torch.ops.vattn.linear.default, tuple(args), test_utils=utilities[bool(codes) :])
    assert set(result.values()) == {"SUCCESS"}


PLAIN, CODES = make_args(3), make_args(3, "row")
REFUSED: dict[str, tuple[LinearArgs, type[Exception], str]] = {
    "dtype": (PLAIN._replace(dtype="bf16"), errors.ConfigError, "bfloat16"),
    "another result": (PLAIN._replace(dtype="bfloat16"), errors.DtypeError, "both in bfloat16"),
    "another weight": (PLAIN._replace(weight=PLAIN.weight.float()), errors.DtypeError, "weight in float32"),
    "codes and a plain weight": (CODES._replace(weight=PLAIN.weight), errors.DtypeError, "both e4m3"),
    "columns": (PLAIN._replace(weight=PLAIN.weight[:, :512].contiguous()), errors.ShapeError, r"\(48, 512\)"),
    "three dimensions": (PLAIN._replace(input=PLAIN.input[None]), errors.ShapeError, "view the input"),
    "a transposed weight": (PLAIN._replace(weight=PLAIN.weight.t().contiguous().t()), errors.StrideError, "weight"),
    "no scale": (CODES._replace(input_scale=None), errors.ScaleError, "input_scale missing"),
    "a scale": (PLAIN._replace(weight_scale=torch.ones(1)), errors.ScaleError, "weight_scale with float16"),
    "scales of other rows": (CODES._replace(input_scale=torch.ones(4, 1)), errors.ShapeError, r"\(3, 1\)"),
    "scales in bf16": (CODES._replace(weight_scale=torch.ones(48).bfloat16()), errors.ShapeError, "fp32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    args, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        call(args)


def test_gradients_are_refused() -> None:
    with pytest.raises(errors.GradientError, match="vattn::linear"):
        call(PLAIN._replace(weight=PLAIN.weight.clone().requires_grad_()))


@pytest.mark.parametrize("fmt", ["", "fp8_per_token", "fp8_group128"])
@pytest.mark.parametrize("merge", [False, True])
def test_models(fmt: str, merge: bool) -> None:
    """On vattn with its products and without: the same on a CPU, to the bit; and back."""
    pytest.importorskip("transformers")
    import vattn
    from tests.calibration.test_fp8_linears import make_llama
    from tests.integrations.test_transformers import PROMPTS, Runner
    from vattn.integrations.transformers import disable, enable

    model: Any = make_llama()
    if fmt:
        vattn.quantise_linears(model, fmt)
    before = [type(module) for module in model.modules()]
    logits = []
    if fmt == "fp8_group128":
        with pytest.raises(errors.ConfigError, match=r"vattn_linears=True.*FP8 weights in blocks"):
            enable(model, merge_projections=None if merge else False, vattn_linears=True)
        return
    for own in (False, True):
        packed = enable(model, num_blocks=17, merge_projections=merge, vattn_linears=own)
        assert any(type(module).__name__ == "VattnLinear" for module in packed.modules()) == own
        logits.append(Runner(packed).step([(PROMPTS[1], 0)])[0])
        disable(model)
        assert before == [type(module) for module in model.modules()]
        assert not any("uses_vattn_linear" in module.__dict__ for module in model.modules())
    assert torch.equal(*logits)
