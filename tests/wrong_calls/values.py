"""Values that an argument may get by mistake, and whether its annotation allows them."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

MISTAKES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a bool": lambda: True,
    "a float": lambda: 1.5,
    "NaN": lambda: math.nan,
    "infinity": lambda: math.inf,
    "a text": lambda: "8",
    "no text": lambda: "",
    "bytes": lambda: b"8",
    "an object": object,
    "a class": lambda: int,
    "an empty list": list,
    "a list of None": lambda: [None],
    "a list of floats": lambda: [0.5, math.nan],
    "a list of texts": lambda: ["a"],
    "nested lists": lambda: [[[1]]],
    "a dict": lambda: {"a": 1},
    "a set": lambda: {3},
    "a generator": lambda: iter(()),
    "a function": lambda: math.sin,
    "a dtype": lambda: torch.float64,
    "a module": nn.Identity,
    "an array": lambda: np.ones(3),
    "a complex number": lambda: 1j,
    "a tensor of floats": lambda: torch.ones(2, 3),
    "a tensor of bools": lambda: torch.ones(4, dtype=torch.bool),
    "a tensor of nothing": lambda: torch.ones(0, dtype=torch.int64),
    "a number in a tensor": lambda: torch.tensor(2),
    "a tensor on meta": lambda: torch.ones(2, device="meta"),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
}

COUNTS = {
    "num_blocks", "num_heads", "head_size", "num_kv_heads", "head_size_v", "block_size", "max_num_reqs",
    "max_num_tokens", "max_seq_len", "num_tokens", "num_layers", "num_sequences", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "sliding_window", "num_drafts", "longest", "decode_threshold", "max_new_tokens",
    "rotary_dim", "max_queue", "token_budget", "row", "depth", "length", "keep", "sink_len", "max_nodes",
}  # fmt: skip
"""Arguments that count something: -1 is a mistake."""

HUGE = {"num_blocks", "num_tokens_padded", "num_reqs_padded", "num_sequences"}
"""Arguments that memory is taken for: 2**62 is a mistake."""


def tensor_mistakes(x: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield tensors of other shapes, dtypes, devices and kinds than a right one."""
    yield "one dimension more", lambda: x.unsqueeze(0)
    yield "one dimension less", lambda: x.flatten(-2) if x.dim() > 1 else x.sum()
    yield "one column more", lambda: torch.cat((x, x[..., :1]), -1) if x.dim() else x.repeat(2)
    yield "no rows", lambda: x[:0] if x.dim() else x.repeat(0)
    yield "bool", lambda: x.bool()
    yield "complex", lambda: x.to(torch.complex64)
    yield "another width", lambda: x.to(torch.int16 if x.dtype.is_floating_point else torch.float64)
    yield "on meta", lambda: x.to("meta")
    yield "sparse", lambda: x.to(torch.float32).to_sparse()
    yield "fake", lambda: FakeTensorMode().from_tensor(x)
    yield "a wrapper", lambda: wrapped(x)
    yield "DTensor", lambda: distributed(x)
    yield "torchao", lambda: int8_of_torchao(x)
    yield "nested", lambda: torch.nested.nested_tensor([x, x], layout=torch.jagged) if x.dim() else x.to_sparse()


def wrapped(x: Tensor) -> Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(x.clone(), x.clone())


def distributed(x: Tensor) -> Tensor:
    """A DTensor over one rank that is not there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    return distribute_tensor(x, init_device_mesh("cpu", (1,)), [Replicate()])


def int8_of_torchao(x: Tensor) -> Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = nn.Linear(32, 32, bias=False)
    quantize_(linear, Int8WeightOnlyConfig())
    return linear.weight.data


def fits(value: object, hint: Any) -> bool:
    """Return whether an annotation allows a value, or says nothing about it."""
    if hint in (Any, object, ...) or isinstance(hint, (str, typing.TypeVar, typing.ForwardRef)):
        return True
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in typing.get_args(hint))
    if hint is None or hint is types.NoneType:
        return value is None
    if hint in (int, float):
        right = (int, np.integer) if hint is int else (int, float, np.number)
        return isinstance(value, right) and not isinstance(value, bool) and value == value
    if isinstance(value, bytes) and origin is Sequence and typing.get_args(hint) == (int,):
        return True
    if origin in (Sequence, Iterable, list, tuple, frozenset, set):
        inner = [each for each in typing.get_args(hint) if each is not ...]
        kinds = (list, tuple) if origin is tuple else origin
        if isinstance(value, (str, bytes, dict, Tensor)) or not isinstance(value, kinds):
            return False
        return not isinstance(value, (list, tuple, set)) or not inner or all(fits(each, inner[0]) for each in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if origin is not None:
        return not isinstance(origin, type) or isinstance(value, origin)
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    return not isinstance(hint, type) or isinstance(value, hint)
