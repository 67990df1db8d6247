"""Ways to get one argument of an op wrong: shape, dtype, strides, device, presence, gradients, the config itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Mutation = Callable[[Tensor, random.Random], Tensor]


def _longer(tensor: Tensor, rng: random.Random) -> Tensor:
    """One more entry in some dimension."""
    shape = list(tensor.shape)
    dim = rng.randrange(max(1, len(shape)))
    return _extended(tensor, dim) if shape else tensor.expand(2).clone()


def _extended(tensor: Tensor, dim: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] += 1
    new = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    if new.dtype in (torch.int32, torch.int64):
        new.fill_(-1)  # no block, no slot, no tree
    new.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return new


def _shorter(tensor: Tensor, rng: random.Random) -> Tensor:
    """One entry less in some dimension, as a copy."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size]
    if not dims:
        return tensor[None].clone()
    dim = rng.choice(dims)
    return tensor.narrow(dim, 0, tensor.shape[dim] - 1).clone(memory_format=torch.contiguous_format)


def _flat(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten()


def _deeper(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.unsqueeze(rng.randrange(tensor.dim() + 1))


def _permuted(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.transpose(0, tensor.dim() - 1) if tensor.dim() else tensor


def _other_dtype(tensor: Tensor, rng: random.Random) -> Tensor:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
    dtype = rng.choice([dtype for dtype in dtypes if dtype != tensor.dtype])
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor.float().nan_to_num())


def _sparse_last(tensor: Tensor, rng: random.Random) -> Tensor:
    """Same values, elements of the last dimension two apart."""
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def _sparse_rows(tensor: Tensor, rng: random.Random) -> Tensor:
    """Same values, rows of the first dimension further apart than they need be."""
    if tensor.dim() < 2:
        return _sparse_last(tensor, rng)
    wide = torch.zeros((tensor.shape[0], 2, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    wide[:, 0] = tensor
    return wide[:, 0]


def _on_meta(tensor: Tensor, rng: random.Random) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _elsewhere(tensor: Tensor, rng: random.Random) -> Tensor:
    """On the CPU if the tensor is on a GPU, else on a GPU if there is one."""
    if tensor.is_cuda:
        return tensor.cpu()
    return tensor.cuda() if torch.cuda.is_available() else _on_meta(tensor, rng)


def _gradient(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else _deeper(tensor, rng)


MUTATIONS: dict[str, Mutation] = {
    "longer": _longer,
    "shorter": _shorter,
    "flat": _flat,
    "deeper": _deeper,
    "permuted": _permuted,
    "other dtype": _other_dtype,
    "sparse last dimension": _sparse_last,
    "sparse rows": _sparse_rows,
    "on meta": _on_meta,
    "elsewhere": _elsewhere,
    "requires a gradient": _gradient,
}

OPTIONAL = (
    "output_block_scale", "lse", "output_scale", "q_scale", "k_scale", "v_scale", "alibi_slopes", "sinks",
    "causal_flags", "bias", "tree_id", "mm_ranges", "local_seq_lens",
)  # fmt: skip
"""Arguments that a config asks for or forbids."""


def mutate(args: Any, rng: random.Random) -> tuple[str, Any]:
    """Return the arguments with one of them changed, and what was done to it."""
    if rng.random() < 0.25:
        return _toggle(args, rng)
    if rng.random() < 0.05:
        return rng.choice(wrong_configs(args))
    tensors = [name for name, value in args._asdict().items() if isinstance(value, Tensor)]
    name, kind = rng.choice(tensors), rng.choice(list(MUTATIONS))
    return f"{name} {kind}", args._replace(**{name: MUTATIONS[kind](getattr(args, name), rng)})


def wrong_configs(args: Any) -> list[tuple[str, Any]]:
    """Return the arguments with config strings that nobody encoded."""
    texts = (args.config + " nonsense=1", args.config.replace("vattn1", "vattn9"), "", args.config + "0")
    return [(f"config={text!r}", args._replace(config=text)) for text in texts]


def every_kind(args: Any) -> list[tuple[str, Any]]:
    """Return the arguments with their first tensor wrong in every way, a wrong scale, and wrong config strings."""
    rng, name = random.Random(0), args._fields[0]
    changes = [
        (f"{name} {kind}", args._replace(**{name: f(getattr(args, name), rng)})) for kind, f in MUTATIONS.items()
    ]
    return [*changes, _toggled(args, "k_scale"), *wrong_configs(args)]


def _toggle(args: Any, rng: random.Random) -> tuple[str, Any]:
    return _toggled(args, rng.choice([name for name in OPTIONAL if name in args._fields]))


def _toggled(args: Any, name: str) -> tuple[str, Any]:
    """Leave out an optional tensor that is given, or give one that nobody asked for."""
    if getattr(args, name) is not None:
        return f"{name} missing", args._replace(**{name: None})
    like = args.slot_mapping if "slot_mapping" in args._fields else args.query
    return f"{name} given", args._replace(**{name: torch.ones(1, device=like.device)})
