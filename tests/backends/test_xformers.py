"""XFORMERS: what it accepts, who runs what, and its decode against the reference with a stand-in for the package."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.test_xformers_gpu import BASE, DECODED, OWN
from tests.conformance.cases import batch_of_row
from tests.conformance.compare import compare
from tests.conformance.rows import CAP, DECODES, MIXED, Row
from tests.support import make_config
from vattn.backends import selector, xformers
from vattn.config.device import DeviceInfo

HOPPER = DeviceInfo("cuda", (9, 0), "H")
PLAIN = make_config(**{**BASE, "backend": "XFORMERS"})


@dataclass
class SeqInfo:
    seqstart: Tensor
    seqlen: Tensor
    padding: int
    max_seqlen: int


@dataclass
class Mask:
    """Stand-in for xFormers' paged causal mask."""

    q_seqinfo: SeqInfo
    k_seqinfo: SeqInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(cls, q_seqlen: list[int], kv_seqlen: list[int], block_tables: Tensor, page_size: int, device: Any):
        assert all(isinstance(length, int) for length in q_seqlen + kv_seqlen)
        width = block_tables.shape[1] * page_size
        sides = [
            SeqInfo(torch.tensor([0, *lens], device=device).cumsum(0), torch.tensor(lens), width, max(lens))
            for lens in (q_seqlen, kv_seqlen)
        ]
        return cls(*sides, block_tables, page_size)


def attend(query: Tensor, key: Tensor, value: Tensor, attn_bias: Mask, scale: float, op: object) -> Tensor:
    """Stand-in for `memory_efficient_attention_forward`: one query row per request, 5 dimensions, in fp32."""
    assert op == "triton_splitKF"
    assert query.shape[0] == key.shape[0] == 1 and query.shape[2:] == key.shape[2:] == value.shape[2:]
    assert key.stride(3) == 0 or key.shape[3] == 1, "heads of a group must share their keys"
    assert query.shape[1] == len(attn_bias.k_seqinfo.seqlen) == len(attn_bias.q_seqinfo.seqstart) - 1
    assert attn_bias.page_size % 64 == 0 and key.shape[1] % attn_bias.page_size == 0
    output = torch.empty_like(query)
    for row, length in enumerate(attn_bias.k_seqinfo.seqlen.tolist()):
        assert 1 <= length <= attn_bias.k_seqinfo.padding
        position = torch.arange(length)
        block = attn_bias.block_tables[row, position // attn_bias.page_size].long()
        place = block * attn_bias.page_size + position % attn_bias.page_size
        scores = torch.einsum("ghd,nghd->ghn", query[0, row].float(), key[0, place].float()) * scale
        output[0, row] = torch.einsum("ghn,nghd->ghd", scores.softmax(-1), value[0, place].float()).to(query.dtype)
    return output


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Install the stand-in; returns the rows of each of its calls."""
    calls: list[int] = []

    def counted(query: Tensor, *rest: Any, **named: Any) -> Tensor:
        calls.append(query.shape[1])
        return attend(query, *rest, **named)

    fmha = types.ModuleType("xformers.ops.fmha")
    fmha.memory_efficient_attention_forward = counted
    fmha.triton_splitk = types.SimpleNamespace(FwOp="triton_splitKF")
    fmha.attn_bias = types.ModuleType("xformers.ops.fmha.attn_bias")
    fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask = Mask
    ops = types.ModuleType("xformers.ops")
    ops.fmha = fmha
    modules = {"xformers": types.ModuleType("xformers"), "xformers.ops": ops, "xformers.ops.fmha": fmha}
    for name, module in {**modules, "xformers.ops.fmha.attn_bias": fmha.attn_bias}.items():
        monkeypatch.setitem(sys.modules, name, module)
    xformers._bias_template.cache_clear()
    yield calls
    xformers._bias_template.cache_clear()


def run(row: Row) -> None:
    changes = {**BASE, **row.changes}
    batch = batch_of_row(Row(changes, row.lens, row.padding), "XFORMERS", seed=3)
    selector.get_backend("XFORMERS").attention(batch.args, batch.config)
    compare(batch, *batch.expected())


@pytest.mark.parametrize("name", DECODED)
def test_decodes_run_in_xformers(name: str, package: list[int]) -> None:
    run(DECODED[name])
    assert len(package) == 1


@pytest.mark.parametrize("name", ["plain", "block-16", "window-decode", "cap-decode", "scales-heads-decode"])
def test_everything_else_runs_in_our_kernels(name: str, package: list[int]) -> None:
    row = OWN[name]
    run(Row(row.changes, row.lens if name == "plain" else DECODES, row.padding))
    assert package == []


def test_a_mixed_step_runs_in_our_kernels(package: list[int]) -> None:
    run(Row({}, MIXED))
    assert package == []


def reasons(monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    monkeypatch.setattr(xformers.XFormersBackend, "problem", lambda self: None)
    return selector.get_backend("XFORMERS").reasons(PLAIN.replace(**changes), HOPPER)


@pytest.mark.parametrize("size", range(32, 257, 8))
def test_accepts_every_eighth_head_size(size: int, monkeypatch) -> None:
    assert reasons(monkeypatch, head_size=size, head_size_v=size) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"alibi": "linear"}, "alibi is not implemented"),
        ({"alibi": "sqrt"}, "alibi_sqrt is not implemented"),
        ({"alibi": "linear"}, "XFormers does not support alibi slopes yet"),
        ({"head_size": 24, "head_size_v": 24}, "head_size 24 (runs multiples of 8 from 32 to 256)"),
        ({"head_size": 264, "head_size_v": 264}, "head_size 264"),
        ({"causality": "bidirectional", "attn_type": "encoder_decoder"}, "attn_type encoder_decoder (runs decoder)"),
        ({"tree_bias": True}, "tree_bias is not implemented"),
        ({"block_size": 0}, "contiguous_kv is not implemented"),
    ],
)
def test_refuses(changes: dict[str, Any], why: str, monkeypatch) -> None:
    assert [reason for reason in reasons(monkeypatch, **changes) if why in reason]


def test_a_missing_package_is_named_with_its_extra(monkeypatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    assert "vattn[xformers]" in selector.get_backend("XFORMERS").problem()


def test_an_old_package_is_refused_by_its_version(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.31.post1")
    assert "0.0.31.post1 is older than 0.0.33" in selector.get_backend("XFORMERS").problem()


def test_a_package_that_cannot_run_is_refused_with_its_own_words(monkeypatch) -> None:
    library = types.ModuleType("xformers._cpp_lib")
    library._cpp_library_load_exception = RuntimeError("built for PyTorch 1.0\nwith CUDA 1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha", types.ModuleType("xformers.ops.fmha"))
    monkeypatch.setitem(sys.modules, "xformers._cpp_lib", library)
    assert "built for PyTorch 1.0 with CUDA 1" in xformers._library_problem.__wrapped__()
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha", None)
    assert "cannot be imported: " in xformers._library_problem.__wrapped__()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "by xFormers' memory_efficient_attention_forward"),
        ({"sliding_window": 9, **CAP}, "lacks logits_soft_cap, sliding_window"),
        ({"batch_invariant": True}, "lacks batch_invariant"),
        ({"block_size": 16}, "lacks blocks of 16 (multiples of 64)"),
        ({"kv_cache_dtype": "fp8_e4m3", "kv_scale": "tensor"}, "lacks a cache of fp8_e4m3"),
    ],
)
def test_explain_says_which_kernel_runs(changes: dict[str, Any], says: str, monkeypatch) -> None:
    monkeypatch.setattr(xformers.XFormersBackend, "problem", lambda self: None)
    selector.forget_decisions()
    explanation = selector.explain(PLAIN.replace(**changes), HOPPER)
    selector.forget_decisions()
    assert says in str(explanation)
