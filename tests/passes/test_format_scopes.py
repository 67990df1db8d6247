"""Every output format in every place where the passes run; what reads the codes dequantises them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import E4M3, dequantised
from harness import COLUMNS, Stack, inputs_of, run
from torch import Tensor

import vattn
from vattn.quantization.codecs import dequant_nvfp4


def grouped(size: int, power: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    def form(o: Tensor, s: Tensor) -> Tensor:
        groups = o.float().unflatten(-1, (-1, size))
        scales = groups.abs().amax(-1).clamp(min=1e-10) / 448
        if power:
            scales = torch.exp2(torch.ceil(torch.log2(scales)))
        codes = (groups / scales.unsqueeze(-1)).clamp(-448, 448).to(E4M3)
        return (codes.float() * scales.unsqueeze(-1)).flatten(-2)

    return form


def nvfp4(swizzled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def form(o: Tensor, s: Tensor) -> Tensor:
        codes, scales = torch.ops.vattn.quant_nvfp4(o, s, swizzled)
        return dequant_nvfp4(codes, scales, s, swizzled)

    return form


FORMATS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fp8_static": dequantised,
    "fp8_per_token": grouped(COLUMNS),
    "fp8_group64": grouped(64),
    "fp8_group128": grouped(128),
    "fp8_group64_pow2": grouped(64, power=True),
    "fp8_group128_pow2": grouped(128, power=True),
    "nvfp4": nvfp4(False),
    "nvfp4_swizzled": nvfp4(True),
}


def mixed() -> Stack:
    """Return one layer for every format."""
    return Stack(list(FORMATS.values()))


def written() -> list[str]:
    return [node.output_format for node in vattn.fusion_report() if node.outcome == "fused"]


@pytest.mark.long
@pytest.mark.parametrize("scope", ["whole", "regions"])
def test_compiled(scope: str) -> None:
    models = [mixed(), mixed()]
    targets: list[Any] = list(models)
    if scope == "whole":
        targets = [vattn.compile(models[0], options=vattn.options(strict=True)), vattn.compile(models[1])]
    else:
        with torch._dynamo.config.patch(recompile_limit=16):
            vattn.compile_regions(models[0], options=vattn.options(strict=True))
            vattn.compile_regions(models[1])
    with torch._dynamo.config.patch(recompile_limit=16):
        for query_lens in ([3, 4], [5, 1, 2], [9, 9]):
            assert torch.equal(*(run(target, model, query_lens) for target, model in zip(targets, models, strict=True)))
    assert sorted(written()) == sorted(FORMATS)


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.12", reason="older ones crash when they load the package")
def test_exported(tmp_path: Any) -> None:
    model = mixed()
    builder = vattn.AttentionMetadataBuilder(8, 64, 64, 16, layers=model)
    sample = builder.build([2, 1], [2, 1], [[1], [2]])
    with torch.no_grad():
        exported = vattn.export_step(model, (inputs_of(3)[0],), sample)
    plain = exported.compile(str(tmp_path / "plain.pt2"))
    with vattn.enable(strict=True):
        fused = exported.compile(str(tmp_path / "fused.pt2"))
    assert written() == list(FORMATS)
    for query_lens in ([2, 1], [3, 4]):
        step_ = builder.build(query_lens, query_lens, [[1], [2]])
        inputs = exported.inputs((inputs_of(sum(query_lens))[0],), step_)
        assert torch.equal(fused(*inputs), plain(*inputs))
