"""Corrupt metadata, tensors between guard bytes, and what kernels must do with both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support import relative_l2, storage_of, with_storage
from vattn.cache.layout import num_blocks_of
from vattn.config.attention import AttentionConfig
from vattn.config.mla import MLAConfig
from vattn.ops.arguments import CacheUpdateArgs
from vattn.ops.arguments_mla import MLACacheUpdateArgs
from vattn.ops.reference import attention as reference
from vattn.ops.reference import mla as mla_reference
from vattn.ops.reference.attention import ranges
from vattn.quantization.formats import MODEL_DTYPES

GUARD_BYTES = 1 << 13
METADATA = ("query_start_loc", "seq_lens", "block_table", "kv_start_loc", "causal_flags", "tree_id", "mm_ranges",
        "local_seq_lens", "topk_indices", "slot_mapping")  # fmt: skip
WRITTEN = {"output", "output_block_scale", "lse", "query_out"}
EXTREMES = (-(2**31), -(2**31) + 1, -(2**30), -7, -1, 0, 1, 2**30, 2**31 - 2, 2**31 - 1)


def corrupted(tensor: Tensor, share: float, most: int, rng: torch.Generator) -> Tensor:
    """Return integers of which about `share` are replaced: by values up to a little more than `most`, or extremes."""
    near = torch.randint(-2, most + 3, tensor.shape, generator=rng)
    far = torch.tensor(EXTREMES)[torch.randint(len(EXTREMES), tensor.shape, generator=rng)]
    values = torch.where(torch.rand(tensor.shape, generator=rng) < 0.5, near, far)
    chosen = torch.rand(tensor.shape, generator=rng) < share
    return torch.where(chosen, values, tensor.cpu().long()).to(tensor.dtype).to(tensor.device)


def with_corrupt_metadata(args: Any, seed: int, most: int) -> Any:
    """Return an op's arguments with some values of some of its metadata replaced."""
    rng = torch.Generator().manual_seed(seed)
    changed = {}
    for name in METADATA:
        tensor = getattr(args, name, None)
        if tensor is not None and torch.rand(1, generator=rng) < 0.5:
            changed[name] = corrupted(tensor, 0.4, most, rng)
    return args._replace(**changed)


def with_full_cache(args: Any) -> Any:
    """Return an op's arguments with a row in every slot of the cache, and a query without NaN."""
    rng = torch.Generator().manual_seed(7)
    if hasattr(args, "kv_cache"):
        latent = MLAConfig.parse(args.config)
        slots = torch.arange(args.kv_cache.shape[0] * latent.block_size)
        parts = [
            torch.randn(len(slots), width, generator=rng) for width in (latent.kv_lora_rank, latent.qk_rope_head_dim)
        ]
        row, rope = (part.to(MODEL_DTYPES[latent.dtype]) for part in parts)
        of_latents = MLACacheUpdateArgs(row, rope, args.kv_cache, slots, args.k_scale, args.config)
        mla_reference.mla_kv_cache_update(of_latents, latent)
        return args._replace(query=args.query.nan_to_num())
    config = AttentionConfig.parse(args.config)
    slots = torch.arange(num_blocks_of(storage_of(args), config) * config.block_size)
    key, value = (
        torch.randn(len(slots), config.num_kv_heads, width, generator=rng).to(MODEL_DTYPES[config.dtype])
        for width in (config.head_size, config.head_size_v)
    )
    update = CacheUpdateArgs(
        key, value, args.key_cache, args.value_cache, slots, args.k_scale, args.v_scale, args.config
    )
    reference.kv_cache_update(update, config)
    return args


def is_in_order(offsets: Tensor, most: int) -> bool:
    """Return whether offsets, clamped to what they count, never fall."""
    clamped = offsets.long().clamp(0, most)
    return bool((clamped[1:] >= clamped[:-1]).all())


class Guarded:
    """Holds an op's arguments, every tensor a copy with guard bytes around it.

    Attributes:
        args: the copies; what the op is to write holds bytes that are NaN in every float format.
    """

    def __init__(self, args: Any) -> None:
        self._guards: list[tuple[str, Tensor]] = []
        copies = {name: self._copy(name, value) for name, value in args._asdict().items() if isinstance(value, Tensor)}
        self.args = args._replace(**copies)
        if hasattr(args, "key_cache"):
            self.args = with_storage(self.args, self._copy("cache", storage_of(args)))
        if getattr(args, "plan", None):
            self.args = self.args._replace(plan=[self._copy("plan", plan) for plan in args.plan])
        self._before = {
            name: value.clone()
            for name, value in self.args._asdict().items()
            if isinstance(value, Tensor) and name not in WRITTEN
        }

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = extent * tensor.itemsize if tensor.numel() else 0
        room = torch.full((size + 2 * GUARD_BYTES,), 0xFF, dtype=torch.uint8, device=tensor.device)
        copy = room[GUARD_BYTES : GUARD_BYTES + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        if name not in WRITTEN:
            copy.view(torch.uint8).copy_(tensor.view(torch.uint8))
        self._guards += [(name, room[:GUARD_BYTES]), (name, room[GUARD_BYTES + size :])]
        return copy

    def check(self, may_change: Sequence[str] = ()) -> None:
        """Assert that neither a guard nor an input has changed."""
        for name, guard in self._guards:
            assert bool((guard == 0xFF).all()), f"bytes around {name} were written"
        for name, value in self._before.items():
            if name not in may_change:
                now = getattr(self.args, name)
                assert torch.equal(now.view(torch.uint8), value.view(torch.uint8)), f"{name} was written"


def check_attention(
    args: Any,
    call: Callable[[Any], Tensor],
    expected: Callable[[Any], tuple[Tensor, Tensor]],
    limit: float | None,
    limit_of_lse: float = 2e-3,
) -> None:
    """Assert that a call keeps to its tensors, writes every row, and that rows of a step in order are right.

    Args:
        call: runs the op on arguments and returns the output as fp32.
        expected: returns output and LSE of the reference.
        limit: relative L2 error; `None`: results are not compared, as with the plan of another step.
    """
    guarded = Guarded(args)
    got = call(guarded.args).cpu()
    guarded.check()
    lse = None if args.lse is None else guarded.args.lse.cpu()
    assert not got.isnan().any(), "rows are not written, or of memory outside of the tensors"
    assert lse is None or not lse.isnan().any()
    if limit is None:
        return
    num_tokens = got.shape[0]
    offsets = [args.query_start_loc, *([args.kv_start_loc] if hasattr(args, "kv_start_loc") else [])]
    counts = [num_tokens, *([args.key.shape[0]] if hasattr(args, "kv_start_loc") else [])]
    if all(is_in_order(*pair) for pair in zip(offsets, counts, strict=True)):
        output, log = expected(args)
        assert relative_l2(got, output) < limit
        if lse is not None:
            assert relative_l2(lse.nan_to_num(neginf=0.0), log.nan_to_num(neginf=0.0)) < limit_of_lse
            assert torch.equal(lse == -torch.inf, log == -torch.inf)
    owned = torch.zeros(num_tokens, dtype=torch.bool)
    for start, end in ranges(args.query_start_loc.cpu(), num_tokens):
        owned[start:end] = True
    if is_in_order(args.query_start_loc, num_tokens):
        assert not got[~owned].any(), "rows of no request are not zero"
