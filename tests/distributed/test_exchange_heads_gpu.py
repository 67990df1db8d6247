"""Heads of ranks through each other's memory: two ranks on two streams of one GPU, against the combine in fp32."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vattn.distributed.combine import combine_parts

pytestmark = pytest.mark.gpu

MOST_ROWS = 64


def make_inboxes(width: int) -> list[Any]:
    shape = 2, 2, MOST_ROWS, width // 2
    memory = [torch.zeros(shape, dtype=torch.int64, device="cuda") for _ in range(2)]
    addresses = torch.tensor([each.data_ptr() for each in memory], device="cuda")
    return [
        SimpleNamespace(
            rank=rank, world_size=2, width=width, most_rows=MOST_ROWS, addresses=addresses, memory=memory,
            counts=torch.zeros(MOST_ROWS, dtype=torch.int32, device="cuda"),
            flag=torch.zeros(1024, dtype=torch.int32, pin_memory=True),
        )
        for rank in range(2)
    ]  # fmt: skip


def on_both(call: Callable[[int], None]) -> None:
    """Run what each rank does at the same time."""
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            call(rank)
    torch.cuda.synchronize()


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "size"), [(3, 80), (16, 128), (1, 2)])
def test_heads_of_both_ranks(heads: int, size: int, dtype: torch.dtype) -> None:
    from vattn.kernels.triton.attention.exchange_heads import launch_gather_heads

    inboxes = make_inboxes(size)
    for seed, tokens in enumerate((1, 4, 2, 4, 4)):
        torch.manual_seed(seed)
        parts = [torch.randn(tokens, heads, size, device="cuda").to(dtype) for _ in range(2)]
        got = [poisoned(tokens, 2 * heads, size, dtype=dtype) for _ in range(2)]
        on_both(lambda rank, parts=parts, got=got: launch_gather_heads(inboxes[rank], parts[rank], got[rank]))  # type: ignore[misc]
        assert all(torch.equal(each, torch.cat(parts, 1)) for each in got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("heads", "size"), [(3, 80), (16, 128)])
def test_parts_are_combined(heads: int, size: int, with_sinks: bool, dtype: torch.dtype) -> None:
    from vattn.kernels.triton.attention.exchange_heads import launch_combine_heads

    inboxes, sinks = make_inboxes(size + 2), None
    if with_sinks:
        sinks = torch.linspace(-3, 3, 2 * heads, device="cuda").to(dtype)
    for seed, tokens in enumerate((4, 1, 3, 4)):
        torch.manual_seed(seed)
        outputs = [torch.randn(tokens, 2 * heads, size, device="cuda").to(dtype) for _ in range(2)]
        lses = [20 * torch.randn(tokens, 2 * heads, device="cuda") for _ in range(2)]
        # No keys on one rank, and on none; such parts may hold anything.
        lses[seed % 2][0] = -torch.inf
        for lse in lses:
            lse[-1, ::2] = -torch.inf
        for output, lse in zip(outputs, lses, strict=True):
            output[lse == -torch.inf] = torch.nan
        got = [poisoned(tokens, heads, size, dtype=dtype) for _ in range(2)]

        def run(rank: int, outputs: Any = outputs, lses: Any = lses, got: Any = got) -> None:
            launch_combine_heads(inboxes[rank], outputs[rank], lses[rank], got[rank], sinks)

        on_both(run)
        for rank in range(2):
            own = slice(rank * heads, (rank + 1) * heads)
            expected, _ = combine_parts(
                [output[:, own] for output in outputs],
                torch.stack(lses)[:, :, own],
                None if sinks is None else sinks[own],
            )
            # Rounded once; exp of another library may move a value over the middle of two neighbours.
            step = torch.finfo(dtype).eps
            assert torch.allclose(got[rank].float(), expected, rtol=step, atol=1e-6)
            assert not got[rank].isnan().any()


def test_a_rank_that_waits_ends_at_a_flag() -> None:
    from vattn.kernels.triton.attention.exchange_heads import launch_gather_heads

    inboxes = make_inboxes(16)
    part, got = torch.ones(1, 1, 16, dtype=torch.bfloat16, device="cuda"), poisoned(1, 2, 16, dtype=torch.bfloat16)
    inboxes[0].flag.fill_(1)
    launch_gather_heads(inboxes[0], part, got)
    torch.cuda.synchronize()
    assert torch.equal(got[:, :1], part)
