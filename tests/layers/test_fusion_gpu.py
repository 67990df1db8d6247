"""The fusion passes on a GPU: what is fused gives the bits of the unfused compiled graph on the same device.

Layers see one token (a window of 1), so that the attention output is the value row: chosen inputs reach the quantiser
unchanged, FP8 rounding ties among them. There an approximate division and an exact one give other codes.

`VATTN_FUSION_DEVICE=cpu` runs what needs no GPU, to try the file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))

from test_entry import ENTRIES

import vattn
from vattn.backends import dispatch
from vattn.passes.probe_inputs import probe_values
from vattn.passes.report import clear_fusion_report

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("VATTN_FUSION_DEVICE", "cuda")
HEADS, KV_HEADS, WIDTH, BLOCK = 8, 2, 128, 16
COLUMNS = HEADS * WIDTH
E4M3 = torch.float8_e4m3fn
SCALE = 0.0137


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    clear_fusion_report()
    dispatch._resolve.cache_clear()
    with torch.no_grad():
        yield
    vattn.disable()
    torch._dynamo.reset()


def cast(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(E4M3)


def dynamic(o: Tensor, group: int, least: float = 1e-10) -> tuple[Tensor, Tensor]:
    groups = o.float().unflatten(-1, (-1, group))
    return groups, groups.abs().amax(-1, keepdim=True).clamp(min=least) / 448.0


def by_groups(group: int, columns: bool = False) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def form(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        groups, scale = dynamic(o, group)
        made = scale.squeeze(-1)
        return cast(groups / scale).flatten(-2), made.t().contiguous().t() if columns else made

    return form


def per_token(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    wide = o.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return cast(wide / scale), scale


def per_token_reciprocal(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    wide = o.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 448.0).clamp(min=3e-7)
    return cast(wide * scale.reciprocal()), scale


def power_of_two(o: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    groups, scale = dynamic(o, 128)
    scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return cast(groups / scale).flatten(-2), scale.squeeze(-1)


EXACT: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "/ s": ("fp8_static", lambda o, s: cast(o.float() / s)),
    "* (1 / s)": ("fp8_static", lambda o, s: cast(o.float() * s.reciprocal())),
    "/ number": ("fp8_static", lambda o, s: cast(o.float() / SCALE)),
    "* number": ("fp8_static", lambda o, s: cast(o.float() * 73.1)),
    "through heads": ("fp8_static", lambda o, s: cast(o.view(-1, HEADS, WIDTH).float() / s).flatten(1)),
    "per token": ("fp8_per_token", per_token),
    "per token, reciprocal, floor of the scale": ("fp8_per_token", per_token_reciprocal),
    "group 128": ("fp8_group128", by_groups(128)),
    "group 64, column-major": ("fp8_group64_col", by_groups(64, columns=True)),
    "our op, static": ("fp8_static", lambda o, s: torch.ops.vattn.quant_fp8_static(o, s)),
    "our op, per token": ("fp8_per_token", lambda o, s: torch.ops.vattn.quant_fp8_per_token(o)),
    "our op, group 128": ("fp8_group128", lambda o, s: torch.ops.vattn.quant_fp8_group(o, 128, False, False)),
    "our op, power of two": ("fp8_group64_pow2", lambda o, s: torch.ops.vattn.quant_fp8_group(o, 64, True, False)),
    "our op, NVFP4": ("nvfp4", lambda o, s: torch.ops.vattn.quant_nvfp4(o, s, False)),
    "our op, swizzled NVFP4": ("nvfp4_swizzled", lambda o, s: torch.ops.vattn.quant_nvfp4(o, s, True)),
}


class Attend(nn.Module):
    """Attention of one visible token, and what a form does to its output."""

    def __init__(self, form: Callable[..., Any], **attention: Any) -> None:
        super().__init__()
        attention = {"per_layer_sliding_window": 1, **attention}
        self.attn = vattn.Attention(HEADS, WIDTH, WIDTH**-0.5, KV_HEADS, prefix="layers.0.attn", **attention)
        self.form = form
        self.register_buffer("scale", torch.tensor([SCALE]))
        self.to(DEVICE)
        vattn.allocate_kv_cache(self, num_blocks=512, dtype=torch.bfloat16, device=DEVICE)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.form(self.attn(query, key, value), self.scale)


def values() -> Tensor:
    """Value rows that tell quantisers apart: ties of FP8 under the scale and under the rows' own, tiny rows, zeros."""
    rows = probe_values(KV_HEADS * WIDTH, SCALE).bfloat16()
    return rows[rows.isfinite().all(1)].to(DEVICE)


def step_of(model: nn.Module, query_lens: list[int], seq_lens: list[int]) -> vattn.AttentionMetadata:
    builder = vattn.AttentionMetadataBuilder(128, 1024, 512, BLOCK, DEVICE, layers=model)
    starts = [sum(-(-n // BLOCK) for n in seq_lens[:i]) for i in range(len(seq_lens))]
    tables = [list(range(s, s - (-n // BLOCK))) for s, n in zip(starts, seq_lens, strict=True)]
    return builder.build(query_lens, seq_lens, tables)


def inputs_of(tokens: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(tokens)
    sizes = (COLUMNS, KV_HEADS * WIDTH)
    query, key = (torch.randn(tokens, size, generator=rng).bfloat16().to(DEVICE) for size in sizes)
    rows = values()
    return [query, key, rows.repeat(-(-tokens // len(rows)), 1)[:tokens]]


STEPS = {"decode": ([1] * 61, [1 + 7 * i % 90 for i in range(61)]), "prefill": ([130], [130]), "few": ([1, 1], [3, 9])}


def outputs(target: Any, model: nn.Module, name: str) -> list[Tensor]:
    query_lens, seq_lens = STEPS[name]
    with vattn.forward_context(step_of(model, query_lens, seq_lens)):
        made = target(*inputs_of(sum(query_lens)))
    return list(made) if isinstance(made, tuple) else [made]


def differing(a: Tensor, b: Tensor) -> int:
    """Return how many bytes differ."""
    assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


PLAIN = {"max_autotune": False}
"""Options that ask for nothing, so that both graphs of a pair are compiled by options."""


def compiled_pair(model: nn.Module) -> tuple[Any, Any]:
    return vattn.compile(model, options=vattn.options(strict=True)), vattn.compile(model, options=PLAIN)


@pytest.mark.parametrize("name", EXACT)
def test_fused_equals_the_unfused_compiled_graph(name: str) -> None:
    output_format, form = EXACT[name]
    model = Attend(form)
    fused, unfused = compiled_pair(model)
    for step in STEPS:
        got, want = outputs(fused, model, step), outputs(unfused, model, step)
        assert [differing(a, b) for a, b in zip(got, want, strict=True)] == [0] * len(got), step
        codes = want[0].contiguous().view(torch.uint8)
        if step != "few":
            assert len(codes.unique()) > (100 if want[0].dtype == E4M3 else 20), "the inputs must reach the quantiser"
    (node,) = {node.output_format for node in vattn.fusion_report()}
    assert node == output_format


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_power_of_two_scales_differ_by_one_code_at_most(cache: str) -> None:
    scales = {} if cache == "auto" else {"quant_config": vattn.QuantConfig(k_scale=0.05, v_scale=0.05)}
    model = Attend(power_of_two, cache_config=vattn.CacheConfig(cache_dtype=cache), **scales)
    fused, unfused = compiled_pair(model)
    for step in STEPS:
        (codes, scale), (want, expected) = outputs(fused, model, step), outputs(unfused, model, step)
        assert bool(((scale / expected).log2().abs() <= 1).all())
        apart = (codes.float() * scale.repeat_interleave(128, 1)) != (want.float() * expected.repeat_interleave(128, 1))
        assert float(apart.float().mean()) <= 1e-4, step


@pytest.mark.parametrize("name", ["/ s", "per token", "group 128"])
def test_an_fp8_cache(name: str) -> None:
    """The values of other tokens come in, so that sums are rounded: both graphs call the same kernel."""
    output_format, form = EXACT[name]
    quant = vattn.QuantConfig(k_scale=0.05, v_scale=0.05, query_format="fp8_e4m3", q_scale=0.02)
    model = Attend(form, cache_config=vattn.CacheConfig(cache_dtype="fp8"), quant_config=quant,
                   per_layer_sliding_window=None)  # fmt: skip
    fused, unfused = compiled_pair(model)
    for step in STEPS:
        got, want = outputs(fused, model, step), outputs(unfused, model, step)
        assert [differing(a, b) for a, b in zip(got, want, strict=True)] == [0] * len(got), step
    assert {node.output_format for node in vattn.fusion_report()} == {output_format}


@pytest.mark.parametrize("name", ["/ s", "per token"])
def test_divisions_rounded_by_inductor(name: str) -> None:
    """`division_rounding` makes static codes those of an exact division; computed scales have no such epilogue."""
    model = Attend(EXACT[name][1])
    with torch._inductor.config.patch({"eager_numerics.division_rounding": True}):
        fused = vattn.compile(model, options=vattn.options())
        unfused = vattn.compile(model, options=PLAIN)
        got, want = outputs(fused, model, "decode"), outputs(unfused, model, "decode")
    assert [differing(a, b) for a, b in zip(got, want, strict=True)] == [0] * len(got)
    outcomes = {node.outcome for node in vattn.fusion_report()}
    assert outcomes == ({"fused"} if name == "/ s" or DEVICE == "cpu" else {"near miss"})


def generated(target: Any, model: nn.Module) -> str:
    from torch._inductor.utils import run_and_get_code

    query_lens, seq_lens = STEPS["decode"]
    with vattn.forward_context(step_of(model, query_lens, seq_lens)):
        _, codes = run_and_get_code(target, *inputs_of(sum(query_lens)))
    return "".join(codes)


def kernels(code: str) -> list[str]:
    """Return the calls of generated kernels."""
    return re.findall(r"^\s+((?:cpp|triton)_\w*fused\w*?)(?:\.run)?\(", code, re.MULTILINE)


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_point_fuses(name: str) -> None:
    model = Attend(EXACT["/ s"][1])
    code = generated(ENTRIES[name](model), model)
    assert "output_format=fp8_static" in code and kernels(code) == []
    assert [node.outcome for node in vattn.fusion_report()] == ["fused"]


def test_without_the_passes_the_quantiser_is_a_kernel() -> None:
    model = Attend(EXACT["/ s"][1])
    assert len(kernels(generated(torch.compile(model), model))) == 1


def test_reduce_overhead_captures() -> None:
    model = Attend(EXACT["/ s"][1])
    reference = vattn.compile(model, options=PLAIN)
    expected = {name: outputs(reference, model, name)[0].clone() for name in STEPS}
    vattn.enable(strict=True)
    target = vattn.compile(model, mode="reduce-overhead")
    for name in ("decode", "few", "decode", "few", "decode", "prefill", "prefill", "prefill"):
        torch.compiler.cudagraph_mark_step_begin()
        got = outputs(target, model, name)[0].clone()
        assert differing(got, expected[name]) == 0
    assert {node.output_format for node in vattn.fusion_report()} == {"fp8_static"}
    if DEVICE == "cuda":
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
        manager = torch._inductor.cudagraph_trees.get_manager(0, create_if_none_exists=False)
        assert manager is not None and any(manager.roots.values())


def test_captured_by_our_runner() -> None:
    model = Attend(EXACT["/ s"][1])
    fused, unfused = compiled_pair(model)
    builder = vattn.AttentionMetadataBuilder(64, 64, 512, BLOCK, DEVICE, layers=model)

    def make(step: vattn.AttentionMetadata) -> list[Tensor]:
        return inputs_of(step.slot_mapping.shape[0])

    runners = [vattn.CUDAGraphRunner(target, [4, 64], builder, make) for target in (fused, unfused)]
    for count in (3, 61, 4):
        lengths = [1 + (5 * i + count) % 60 for i in range(count)]
        results = []
        for runner in runners:
            step = runner.build([1] * count, lengths, [list(range(4 * i, 4 * i + 4)) for i in range(count)])
            results.append(runner(*inputs_of(count), metadata=step).clone())
        assert results[0].shape[0] == count and differing(*results) == 0


class Rotated(nn.Module):
    """RoPE and query quantisation ahead of attention, behind a GEMM, as a decoder layer has them."""

    def __init__(self) -> None:
        super().__init__()
        quant = vattn.QuantConfig(query_format="fp8_e4m3", q_scale=0.03)
        self.attn = vattn.Attention(HEADS, WIDTH, WIDTH**-0.5, KV_HEADS, prefix="layers.0.attn", quant_config=quant)
        self.proj = nn.Linear(COLUMNS, COLUMNS, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("angles", torch.randn(1, 1, WIDTH // 2))
        self.register_buffer("scale", torch.tensor([SCALE]))
        self.to(DEVICE)
        vattn.allocate_kv_cache(self, num_blocks=512, dtype=torch.bfloat16, device=DEVICE)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first, second = self.proj(query).view(-1, HEADS, WIDTH).float().chunk(2, dim=-1)
        cos, sin = self.angles.cos(), self.angles.sin()
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()
        return EXACT["/ s"][1](self.attn(rotated, key, value), self.scale)


def test_query_quantisation_stays_in_the_kernel_of_rope() -> None:
    model = Rotated()
    code = generated(vattn.compile(model, options=vattn.options(strict=True)), model)
    (kernel,) = kernels(code)
    assert "cos" in kernel
    (node,) = vattn.fusion_report()
    assert node.query == "FP8, quantised in the kernel of its pointwise producer"


def explained() -> tuple[Any, ...]:
    model = Attend(EXACT["group 128"][1])
    query_lens, seq_lens = STEPS["decode"]
    return model, inputs_of(sum(query_lens)), step_of(model, query_lens, seq_lens)


def test_explain_fusion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vattn.__main__ import main

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main(["explain-fusion", f"{Path(__file__).stem}:explained", "--strict"]) == 0
    assert "fused, writes fp8_group128" in capsys.readouterr().out


def compile_once() -> None:
    """What the processes of the next test run."""
    torch._dynamo.utils.counters.clear()
    model = Attend(EXACT["per token"][1])
    with torch.no_grad():
        made = outputs(vattn.compile(model, options=vattn.options(strict=True)), model, "decode")
    counters = torch._dynamo.utils.counters["inductor"]
    said = {
        "cache": {name: count for name, count in counters.items() if name.startswith("fxgraph_cache")},
        "report": vattn.fusion_report().as_dict(),
        "sums": [float(tensor.float().sum()) for tensor in made],
    }
    print(json.dumps(said))


def test_second_process_hits_the_cache_and_has_the_report(tmp_path: Path) -> None:
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", "import test_fusion_gpu as t; t.compile_once()"]
    said = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = said
    assert first["cache"] == {"fxgraph_cache_miss": 1} and second["cache"] == {"fxgraph_cache_hit": 1}
    assert first["sums"] == second["sums"]
    ((node,),) = first["report"].values()
    ((again,),) = second["report"].values()
    assert again == {**node, "cached": True} and not node["cached"]
    assert node["outcome"] == "fused" and node["output_format"] == "fp8_per_token"
