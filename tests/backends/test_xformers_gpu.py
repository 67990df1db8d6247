"""XFORMERS on a CUDA GPU against the reference, with the real package: which kernel takes a row, and both in graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conformance.cases import batch_of_row, make_cache_update
from tests.conformance.compare import call, compare, compare_cache_update, on_cpu, run_and_compare
from tests.conformance.rows import CAP, DECODES, FP8, LONG, LSE, MIXED, SINKS, Row
from tests.support import make_config
from vattn.backends import selector
from vattn.config.device import DeviceInfo

pytestmark = pytest.mark.gpu

BASE = {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_size": 64, "head_size_v": 64, "block_size": 64}
SCALED = {**FP8, "kv_scale": "tensor"}
WINDOW = {"sliding_window": 37}
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
    "long": Row({}, LONG),
    "fp32": Row({"dtype": "float32", "kv_cache_dtype": "float32"}, DECODES),
    "head-size-80": Row({"head_size": 80, "head_size_v": 80}, DECODES),
    "block-16": Row({"block_size": 16}, DECODES),
    "hnd": Row({"kv_cache_layout": "HND"}, DECODES),
    **{
        f"{name}-{kind}": Row(changes, lens)
        for name, changes in {
            "window": WINDOW,
            "cap": CAP,
            "scales": SCALED,
            "scales-heads": {**FP8, "kv_scale": "head"},
            "sinks-lse": {**SINKS, **LSE},
            "out": {"output_format": "fp8_static"},
        }.items()
        for kind, lens in {"prefill": LONG, "decode": FAR}.items()
    },
}
"""What our own kernels run."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of every call of xFormers; skips where it cannot be used."""
    problem = selector.get_backend("XFORMERS").problem()
    if problem is not None:
        pytest.skip(problem)
    from xformers.ops import fmha

    seen: list[int] = []
    real = fmha.memory_efficient_attention_forward

    def counted(query: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        seen.append(query.shape[1])
        return real(query, *rest, **named)

    monkeypatch.setattr(fmha, "memory_efficient_attention_forward", counted)
    yield seen


def check(row: Row) -> None:
    changes = {**BASE, **row.changes}
    if changes["dtype"] == "float32":
        changes["kv_cache_dtype"] = "float32"
    config = make_config(**{**changes, "backend": "XFORMERS"})
    assert selector.get_backend("XFORMERS").reasons(config, DeviceInfo.of("cuda")) == []
    assert run_and_compare(
        batch_of_row(Row(changes, row.lens, row.padding, row.table), "XFORMERS", device="cuda", seed=3)
    )


@pytest.mark.parametrize("name", DECODED)
def test_decodes_run_in_xformers(name: str, calls: list[int]) -> None:
    check(DECODED[name])
    assert len(calls) == 1


@pytest.mark.parametrize("name", OWN)
def test_everything_else_runs_in_our_kernels(name: str, calls: list[int]) -> None:
    check(OWN[name])
    assert calls == []


def test_cache_update(calls: list[int]) -> None:
    config = make_config(**{**BASE, **SCALED, "backend": "XFORMERS"})
    assert compare_cache_update(make_cache_update(config, device="cuda"), config)


def test_a_captured_decode_follows_lengths_and_tables(calls: list[int]) -> None:
    first, second = (
        batch_of_row(Row(BASE, lens, padding=(0, 1)), "XFORMERS", device="cuda", seed=5)
        for lens in (((1, 40), (1, 900), (1, 64)), ((1, 700), (1, 1), (1, 333)))
    )
    width = max(batch.args.block_table.shape[1] for batch in (first, second))
    cache = torch.zeros_like(max((first, second), key=lambda batch: batch.args.kv_cache.numel()).args.kv_cache)
    args = first.args._replace(
        kv_cache=cache,
        block_table=torch.zeros(first.args.block_table.shape[0], width, dtype=torch.int32, device="cuda"),
    )

    def fill(batch: object) -> None:
        cache[:, : batch.args.kv_cache.shape[1]] = batch.args.kv_cache
        args.block_table[:, : batch.args.block_table.shape[1]] = batch.args.block_table
        for name in ("query", "query_start_loc", "seq_lens"):
            getattr(args, name).copy_(getattr(batch.args, name))

    kept = [tensor.clone() for tensor in (first.args.query, first.args.query_start_loc, first.args.seq_lens)]
    fill(first)
    call(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(args)
    fill(second)
    args.output.fill_(float("nan"))
    graph.replay()
    second.args = second.args._replace(output=args.output.clone())
    compare(on_cpu(second), *on_cpu(second).expected())
    for tensor, before in zip((first.args.query, first.args.query_start_loc, first.args.seq_lens), kept, strict=True):
        tensor.copy_(before)
    cache[:, : first.args.kv_cache.shape[1]] = first.args.kv_cache
    args.block_table[:, : first.args.block_table.shape[1]] = first.args.block_table
    graph.replay()
    first.args = first.args._replace(output=args.output.clone())
    compare(on_cpu(first), *on_cpu(first).expected())
