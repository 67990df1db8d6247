"""What `vattn::rope_attention` refuses, with nothing written; and that it is the two steps that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.rope_attention_cases import make_step, two_calls
from tests.support import make_config
from vattn import errors
from vattn.ops.arguments import RopeAttentionArgs
from vattn.rope_config import RopeConfig

ROPE = RopeConfig(16, norm="rms", norm_eps=1e-6)
QUANTISED = {"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head", "query_format": "fp8_e4m3", "query_scale": "tensor"}
LENGTHS = [1, 16, 17, 40]


def step(**changes: Any) -> RopeAttentionArgs:
    config = make_config(backend="TORCH_SDPA", lse=True, **{**QUANTISED, **changes})
    return make_step(config, ROPE, [1] * 4, LENGTHS, seed=3)


def output_over_query(args: RopeAttentionArgs) -> RopeAttentionArgs:
    memory = torch.empty(args.query.numel() + args.output.numel() - 8, dtype=args.query.dtype)
    query = memory[: args.query.numel()].view(args.query.shape).copy_(args.query)
    return args._replace(query=query, output=memory[args.query.numel() - 8 :].view(args.output.shape))


REFUSALS: dict[str, tuple[Callable[[RopeAttentionArgs], RopeAttentionArgs], type[Exception], str]] = {
    "a short key": (lambda a: a._replace(key=a.key[:3]), errors.ShapeError, "key"),
    "a table of another width": (lambda a: a._replace(cos=a.cos[:, :3]), errors.ShapeError, "cos"),
    "slots of int32": (lambda a: a._replace(slot_mapping=a.slot_mapping.int()), errors.DtypeError, "slot_mapping"),
    "no factor": (lambda a: a._replace(q_factor=None), errors.ScaleError, "q_scale"),
    "no scale of codes": (lambda a: a._replace(q_scale=None), errors.ScaleError, "q_scale"),
    "a short norm": (lambda a: a._replace(q_weight=a.q_scale.new_ones(5)), errors.ShapeError, "q_weight"),
    "long lengths": (lambda a: a._replace(seq_lens=a.seq_lens.long()), errors.DtypeError, "seq_lens"),
    "a table too few": (lambda a: a._replace(block_table=a.block_table[:2]), errors.ShapeError, "block_table"),
    "an output too long": (lambda a: a._replace(output=a.output.repeat(2, 1, 1)), errors.ShapeError, "output"),
    "an output over queries": (output_over_query, errors.StrideError, "output"),
    "a schedule of fp32": (lambda a: a._replace(plan=[torch.zeros(9, 8)]), errors.DtypeError, "plan"),
    "a schedule with gaps": (
        lambda a: a._replace(plan=[torch.zeros(9, 16, dtype=torch.int32)[:, ::2]]), errors.StrideError, "plan",
    ),
    "no such rotation": (lambda a: a._replace(rope="rope9 rotary_dim=16"), errors.ConfigError, "rope9"),
    "no such config": (lambda a: a._replace(config="attn"), errors.ConfigError, "attn"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", list(REFUSALS))
def test_mistakes_are_refused_and_nothing_is_written(mistake: str) -> None:
    edit, error, message = REFUSALS[mistake]
    args = edit(step())
    written = [args.kv_cache, args.output, args.lse]
    before = [x.view(torch.uint8).clone() for x in written]
    with pytest.raises(error, match=message):
        torch.ops.vattn.rope_attention(*args)
    assert all(torch.equal(x.view(torch.uint8), was) for x, was in zip(written, before, strict=True))


def test_a_query_is_quantised_once() -> None:
    config = replace(make_config(backend="TORCH_SDPA", lse=True, **QUANTISED), query_load="divide")
    args = step()
    before = args.kv_cache.clone()
    with pytest.raises(errors.ConfigError, match="query_load"):
        torch.ops.vattn.rope_attention(*args._replace(config=config.encode()))
    assert torch.equal(args.kv_cache.view(torch.uint8), before.view(torch.uint8))


def test_a_backend_without_the_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vattn.backends.torch_sdpa import TorchSDPABackend

    monkeypatch.setattr(TorchSDPABackend, "capabilities", replace(TorchSDPABackend.capabilities, rope_update=False))
    with pytest.raises(errors.UnsupportedRequestError, match="rope_update=True"):
        torch.ops.vattn.rope_attention(*step())


def test_it_is_the_two_steps() -> None:
    args = step()
    update, call = two_calls(args, make_config(backend="TORCH_SDPA", lse=True, **QUANTISED))
    torch.ops.vattn.rope_kv_cache_update(*update)
    torch.ops.vattn.attention(*call)
    torch.ops.vattn.rope_attention(*args)
    for name in ("kv_cache", "output", "lse"):
        assert torch.equal(getattr(args, name).view(torch.uint8), getattr(call, name).view(torch.uint8)), name
