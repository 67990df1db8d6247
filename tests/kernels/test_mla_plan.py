"""Plans of latent attention in the interpreter: made once a step, read by every layer; requests that are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import vattn
from tests.layers.mla_support import deepseek, make_mla_config, random_mla_batch
from vattn.errors import ShapeError
from vattn.kernels import mla_route
from vattn.ops.arguments import PlanArgs

pytest.importorskip("triton")

from vattn.kernels.triton.common.tiles import Limits
from vattn.kernels.triton.mla import launch as mla_launch
from vattn.kernels.triton.mla import plan_layout as mla_plan

if torch.cuda.is_available():
    pytest.skip("a GPU runs the compiled kernels instead", allow_module_level=True)

N, P, R, V, L = 2, 12, 6, 10, 20
TABLES = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12]]


def layers(count: int, **options: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    made = nn.ModuleList()
    for _ in range(count):
        proj = nn.Linear(L, N * (P + V), bias=False)
        sizes = (N, (P + R) ** -0.5, P, R, V, None, L, proj)
        made.append(vattn.MLAAttention(*sizes, attn_backend="TRITON_MLA", decode_threshold=2, **options))
    vattn.allocate_kv_cache(made, num_blocks=64, dtype=torch.float32)
    return made


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(tokens, N, P + R), torch.randn(tokens, L), torch.randn(tokens, 1, R)


def test_small_workspaces_lay_their_own_line() -> None:
    small, plain = layers(1, workspace_tokens=16), layers(1)
    given, results = inputs(26), []
    for model in (small, plain):
        builder = vattn.AttentionMetadataBuilder(4, 64, max_seq_len=80, layers=model)
        with torch.no_grad():
            results.append(model[0](*given, metadata=builder.build([18, 1, 7], [18, 1, 7], TABLES)))
    assert (results[0] - results[1]).abs().max() < 1e-5


@pytest.mark.parametrize("queries", [[1, 30, 2, 1], [1, 1, 90, 1]])
def test_row_tiles_are_written_for_every_step_that_reads_them(
    queries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of few rows a request have prompts and padding too."""
    monkeypatch.setattr(mla_route.hopper_prefill, "plans", lambda *of: True)
    config = deepseek(num_heads=16, qk_nope_head_dim=128, v_head_dim=128)
    tokens, device = sum(queries) + 2, torch.device("cpu")
    room = mla_route.hopper_prefill.planned_room(config, tokens, 4, device) + mla_plan.step_room(4)
    plan = torch.full((mla_plan.MIXED, room // mla_plan.MIXED), -7, dtype=torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    args = PlanArgs(starts, torch.tensor([600, 640, 64, 5]).int(), plan, config.encode())
    mla_route.write_tiles(args, tokens, config)
    count, *records = mla_plan.tiles_in(plan, 4, room - mla_plan.step_room(4)).view(-1, 8)
    found = {(int(record[1]), int(record[2])) for record in records[: int(count[0])]}
    prompts = [(int(start), rows) for start, rows in zip(starts, queries, strict=False) if rows > 42]
    assert found == {*prompts, (tokens - 2, 2)}


def test_plans_of_other_sizes_are_refused() -> None:
    config = make_mla_config(backend="TRITON_MLA")
    starts, lens = torch.tensor([0, 30, 31]).int(), torch.tensor([30, 5]).int()
    for shape in ((mla_plan.MIXED, 2), (2, 16), (16,)):
        with pytest.raises(ShapeError):
            mla_route.plan(PlanArgs(starts, lens, torch.zeros(shape, dtype=torch.int32), ""), config)


@pytest.mark.parametrize("longest", [0, 5])
@pytest.mark.parametrize("splits", [1, 3])
def test_requests_of_few_rows_are_left_out(longest: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = mla_launch.choose_tiles
    monkeypatch.setattr(mla_launch, "choose_tiles", lambda *a: replace(choose(*a), num_splits=splits))
    config, limits = make_mla_config(lse=True, num_heads=1), Limits.of(torch.device("cpu"))
    queries = [1, 5, 2, 0, 3, 7]
    args = random_mla_batch(config, queries, [40, 19, 2, 5, 3, 20], padding_tokens=3)
    absorbed = torch.randn(21, config.num_heads, config.head_size)
    assert args.lse is not None
    whole = mla_launch.attend_latents(absorbed, args, config, limits)
    logs = args.lse.clone()
    args.lse.fill_(7.0)
    part = torch.full_like(whole, 7.0)
    given = mla_launch.attend_latents(absorbed, args, config, limits, longest, shortest=2, output=part)
    assert given is part
    row = 0
    for query in [*queries, 3]:
        rows = slice(row, row + query)
        attended = query > 2 and (not longest or query <= longest) and row < sum(queries)
        assert torch.allclose(part[rows], whole[rows] if attended else torch.tensor(7.0), atol=1e-6)
        assert torch.allclose(args.lse[rows], logs[rows] if attended else torch.tensor(7.0), atol=1e-6)
        row += query


def test_plans_of_hopper_have_room_for_row_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone tell the tokens of a step; a smaller step never needs more room, and other shapes are refused."""
    from vattn.config.device import DeviceInfo
    from vattn.kernels.hopper.mla import launch as mla_launch
    from vattn.kernels.hopper.mla import prefill_launch as mla_prefill_launch
    from vattn.kernels.hopper.prefill.schedule import max_row_tiles

    hopper, device = DeviceInfo("cuda", (9, 0)), torch.device("cuda")
    monkeypatch.setattr(mla_prefill_launch, "_can_run", lambda c, d: not mla_prefill_launch.refusals(c, hopper))
    monkeypatch.setattr(mla_launch, "_can_run", lambda c, d: not mla_launch.refusals(c, hopper))
    monkeypatch.setattr("vattn.config.device.multiprocessors", lambda d: 132)
    large = deepseek(backend="TRITON_MLA")
    for config in (large, large.replace(num_heads=12)):
        sizes = {}
        for reqs in (2, 7):
            for tokens in (reqs, reqs + 1, 8 * reqs + 1, 42 * reqs + 1, 5000):
                shape = mla_route.plan_shape(config, tokens, reqs, device)
                sizes[tokens, reqs] = torch.Size(shape).numel()
                room = mla_prefill_launch.planned_room(config, tokens, reqs, device)
                assert room >= 8 * (1 + 2 * max_row_tiles(tokens, reqs, 128)) and room % 16 == 0
                plan = torch.empty(shape, dtype=torch.int32)
                assert mla_prefill_launch.planned_tokens(room, reqs, config, device) == tokens
                tiles, (starts, lengths) = mla_plan.tiles_in(plan, reqs, room), mla_plan.step_in(plan, reqs)
                assert tiles.data_ptr() + 4 * room == starts.data_ptr()
                assert (starts.numel(), lengths.numel()) == (reqs + 1, reqs)
        for (tokens, reqs), size in sizes.items():
            assert all(size <= other for (t, r), other in sizes.items() if t >= tokens and r >= reqs)
        assert mla_route.plan_key(config).endswith(" tiles")
        assert mla_route.plan_key(config.replace(qk_nope_head_dim=96)).endswith("align=128")
    starts = torch.tensor([0, 300, 301]).int()
    for room in (8, 16, 16 * 4 + 8):
        assert mla_prefill_launch.planned_tokens(room, 3, large, device) < 0
    with pytest.raises(ShapeError, match="elements"):
        mla_launch.plan(starts, starts[1:], torch.zeros(mla_plan.MIXED, 700, dtype=torch.int32), large)
