"""XFORMERS: what it accepts, which kernel runs a row, and its decodes against the reference.

On a CPU a stand-in takes the place of the package.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import vattn
from tests.conformance.cases import batch_of_row
from tests.conformance.compare import call, compare, on_cpu
from tests.conformance.rows import CAP, DECODES, FP8, LSE, MIXED, SINKS, Row
from tests.layers.layer_support import make_inputs, make_layer
from tests.support import Batch, capture, make_config, storage_of, usable, with_storage
from vattn.backends import selector, xformers
from vattn.backends.triton_attn import TritonAttentionBackend
from vattn.config.device import DeviceInfo
from vattn.errors import MetadataError, MissingPackageError

BASE = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_size": 64, "head_size_v": 64, "block_size": 64}
FAR = ((1, 1), (1, 700), (1, 64), (1, 65), (0, 9), (1, 1500), (1, 0))
SOME = ((1, 30), (0, 0), (2, 90), (0, 4))
"""As many tokens as requests, though they are not one each."""

DECODED: dict[str, Row] = {
    "decodes": Row({}, DECODES, padding=(0, 2)),
    "decodes-far": Row({}, FAR),
    "unequal-counts": Row({}, SOME, padding=(0, 0)),
    "one": Row({}, ((1, 213),), padding=(0, 1)),
    "padded-rows": Row({}, ((1, 300), (1, 2)), padding=(3, 3)),
    "all-padding": Row({}, ((0, 0), (0, 5)), padding=(2, 1)),
    "half": Row({"dtype": "float16", "kv_cache_dtype": "float16"}, FAR),
    "one-head": Row({"num_heads": 1, "num_kv_heads": 1}, FAR),
    "no-groups": Row({"num_heads": 3, "num_kv_heads": 3}, FAR),
    "group-5": Row({"num_heads": 10, "num_kv_heads": 2}, FAR),
    "group-32": Row({"num_heads": 32, "num_kv_heads": 1}, FAR),
    "block-192": Row({"block_size": 192}, FAR),
    "negative-scale": Row({"scale": -0.1}, FAR),
    **{f"head-size-{size}": Row({"head_size": size, "head_size_v": size}, FAR) for size in (32, 128, 256)},
}
"""What xFormers' paged kernel runs."""

OWN: dict[str, Row] = {
    "plain": Row({}, MIXED),
    "fp32": Row({"dtype": "float32", "kv_cache_dtype": "float32"}, DECODES),
    "head-size-80": Row({"head_size": 80, "head_size_v": 80}, DECODES),
    "block-16": Row({"block_size": 16}, DECODES),
    "hnd": Row({"kv_cache_layout": "HND"}, DECODES),
    "window": Row({"sliding_window": 37}, DECODES),
    "cap": Row(CAP, DECODES),
    "scales-heads": Row({**FP8, "kv_scale": "head"}, DECODES),
    "sinks-lse": Row({**SINKS, **LSE}, DECODES),
    "out": Row({"output_format": "fp8_static"}, DECODES),
}
"""What vattn's own kernels run."""

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


def install_stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the stand-in where xFormers would be; returns its module `fmha`."""
    fmha = types.ModuleType("xformers.ops.fmha")
    fmha.memory_efficient_attention_forward = attend
    fmha.triton_splitk = types.SimpleNamespace(FwOp="triton_splitKF")
    fmha.attn_bias = types.ModuleType("xformers.ops.fmha.attn_bias")
    fmha.attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask = Mask
    ops = types.ModuleType("xformers.ops")
    ops.fmha = fmha
    modules = {"xformers": types.ModuleType("xformers"), "xformers.ops": ops, "xformers.ops.fmha": fmha}
    for name, module in {**modules, "xformers.ops.fmha.attn_bias": fmha.attn_bias}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fmha


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[list[int]]:
    """Rows of every call of xFormers: of the package on a GPU, of the stand-in on a CPU."""
    seen: list[int] = []
    if device == "cpu":
        fmha = install_stand_in(monkeypatch)
    else:
        usable("XFORMERS")
        from xformers.ops import fmha
    real = fmha.memory_efficient_attention_forward

    def counted(query: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.append(query.shape[1])
        return real(query, *rest, **named)

    monkeypatch.setattr(fmha, "memory_efficient_attention_forward", counted)
    xformers._bias_template.cache_clear()
    yield seen
    xformers._bias_template.cache_clear()


def batch_of(row: Row, device: str) -> Batch:
    return batch_of_row(replace(row, changes={**BASE, **row.changes}), "XFORMERS", device=device, seed=3)


@pytest.mark.parametrize("name", DECODED)
def test_decodes_run_in_xformers(name: str, calls: list[int], device: str) -> None:
    batch = batch_of(DECODED[name], device)
    selector.get_backend("XFORMERS").attention(batch.args, batch.config)
    result = on_cpu(batch)
    compare(result, *result.expected())
    assert len(calls) == 1


@pytest.mark.parametrize("name", OWN)
def test_everything_else_runs_in_our_kernels(name: str, calls: list[int], device: str, monkeypatch) -> None:
    own: list[Any] = []
    monkeypatch.setattr(TritonAttentionBackend, "attention", lambda self, args, config: own.append(args))
    batch = batch_of(OWN[name], device)
    selector.get_backend("XFORMERS").attention(batch.args, batch.config)
    assert len(own) == 1 and calls == []


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_a_captured_decode_follows_lengths_and_tables(calls: list[int]) -> None:
    first, second = (
        batch_of_row(Row(BASE, lens, padding=(0, 1)), "XFORMERS", device="cuda", seed=5)
        for lens in (((1, 40), (1, 900), (1, 64)), ((1, 700), (1, 1), (1, 333)))
    )
    width = max(batch.args.block_table.shape[1] for batch in (first, second))
    cache = torch.zeros_like(storage_of(max((first, second), key=lambda batch: batch.args.key_cache.numel()).args))
    table = torch.zeros(first.args.block_table.shape[0], width, dtype=torch.int32, device="cuda")
    args = with_storage(first.args._replace(block_table=table), cache)

    def fill(batch: object) -> None:
        cache[:, : batch.args.key_cache.shape[0]] = storage_of(batch.args)
        args.block_table[:, : batch.args.block_table.shape[1]] = batch.args.block_table
        for name in ("query", "query_start_loc", "seq_lens"):
            getattr(args, name).copy_(getattr(batch.args, name))

    kept = [tensor.clone() for tensor in (first.args.query, first.args.query_start_loc, first.args.seq_lens)]
    fill(first)
    call(args)
    graph, _ = capture(lambda: call(args))
    fill(second)
    args.output.fill_(float("nan"))
    graph.replay()
    second.args = second.args._replace(output=args.output.clone())
    compare(on_cpu(second), *on_cpu(second).expected())
    for tensor, before in zip((first.args.query, first.args.query_start_loc, first.args.seq_lens), kept, strict=True):
        tensor.copy_(before)
    cache[:, : first.args.key_cache.shape[0]] = storage_of(first.args)
    args.block_table[:, : first.args.block_table.shape[1]] = first.args.block_table
    graph.replay()
    first.args = first.args._replace(output=args.output.clone())
    compare(on_cpu(first), *on_cpu(first).expected())


def reasons(monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[str]:
    monkeypatch.setattr(xformers.XFormersBackend, "problem", lambda self: None)
    return selector.get_backend("XFORMERS").reasons(PLAIN.replace(**changes), HOPPER)


def test_accepts_every_eighth_head_size(monkeypatch) -> None:
    for size in range(32, 257, 8):
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
    with pytest.raises(MissingPackageError, match=r"vattn\[xformers\]"):
        vattn.XFormersMetadataBuilder(4, 24, 64)


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


# `XFormersMetadata`: layers take it, and its mask is that of the leading decodes.


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a fake xFormers."""
    install_stand_in(monkeypatch)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.35" if name == "xformers" else real(name))
    xformers._bias_template.cache_clear()
    yield
    xformers._bias_template.cache_clear()


@pytest.fixture
def builder(package: None) -> vattn.XFormersMetadataBuilder:
    return vattn.XFormersMetadataBuilder(4, 24, 64, 64)


def test_the_mask_holds_the_leading_decodes(builder: vattn.XFormersMetadataBuilder) -> None:
    step = builder.build([1, 1, 5], [9, 64, 12], [[3], [1], [4]])
    bias = step.attn_bias
    assert isinstance(bias, Mask)
    assert (bias.k_seqinfo.seqlen.tolist(), bias.block_tables.tolist()) == ([9, 64], [[3], [1]])
    assert (bias.page_size, bias.q_seqinfo.seqstart.tolist()) == (64, [0, 1, 2])
    assert step.attn_bias is bias
    assert bias.k_seqinfo.seqlen.data_ptr() == step.seq_lens.data_ptr(), "no copy, so a graph may hold it"
    assert (step.num_decodes, step.num_prefills, step.max_query_len) == (2, 1, 5)


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([3, 1], [3, 9]), ([1, 2], [1, 7]), ([], [])])
def test_no_mask_without_leading_decodes(
    query_lens: list[int], seq_lens: list[int], builder: vattn.XFormersMetadataBuilder
) -> None:
    assert builder.build(query_lens, seq_lens, [[1], [2]][: len(query_lens)]).attn_bias is None


def test_all_requests_are_leading_decodes_after_an_advance(builder: vattn.XFormersMetadataBuilder) -> None:
    """The first request of the built step has no cached tokens yet, so that step has no mask."""
    first = builder.build([1, 1], [1, 9], [[3], [1]])
    assert first.attn_bias is None
    step = builder.advance(first, [])
    assert isinstance(step, vattn.XFormersMetadata) and isinstance(step.attn_bias, Mask)
    assert step.attn_bias.k_seqinfo.seqlen.tolist() == [2, 10]
    with pytest.raises(MetadataError, match="over which its step"):
        builder.advance(first, [])


def test_layers_take_it_like_any_other(package: None) -> None:
    outputs = []
    for kind in (vattn.AttentionMetadataBuilder, vattn.XFormersMetadataBuilder):
        layer = make_layer()
        step = kind(3, 24, 32, 8, layers=layer).build([3, 2], [3, 2], [[3], [1]])
        with torch.no_grad(), vattn.forward_context(step):
            outputs.append(layer(*make_inputs(5)))
    assert torch.equal(*outputs)
