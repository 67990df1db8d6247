"""Definitions, shape functions and autograd guards of every `vattn::` op. Imports torch and `vattn.errors` alone.

What an op reads or writes is an argument; what it writes is marked. There is no layer name and no context inside an op.
Device implementations are found when an op is called (`vattn.backends.dispatch`), so registering costs no import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad

from vattn.errors import DeviceError, GradientError

SCHEMA_VERSION = 10
"""Rises with every change of a signature or of what an argument means; part of every compile-cache key of ours."""

_OPTIONAL_INPUTS = (
    "Tensor? output_scale, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? causal_flags, Tensor? bias, Tensor? tree_id, Tensor? mm_ranges, "
)

MUTATING_OPS: dict[str, str] = {
    "kv_cache_update": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor slot_mapping, "
        "Tensor? k_scale, Tensor? v_scale, str config) -> ()"
    ),
    "rope_kv_cache_update": (
        "(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor? positions, Tensor(a!) query_out, "
        "Tensor(b!) key_cache, Tensor(c!)? value_cache, Tensor slot_mapping, Tensor? q_weight, Tensor? k_weight, "
        "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, str rope, str config) -> ()"
    ),
    "attention": (
        "(Tensor query, Tensor key_cache, Tensor? value_cache, Tensor query_start_loc, Tensor seq_lens, "
        "Tensor block_table, Tensor(a!) output, Tensor(b!)? output_block_scale, Tensor(c!)? lse, "
        + _OPTIONAL_INPUTS
        + "Tensor? local_seq_lens, Tensor[] plan, Tensor(d!)? workspace, str config) -> ()"
    ),
    "varlen_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor query_start_loc, Tensor kv_start_loc, "
        "Tensor(a!) output, Tensor(b!)? output_block_scale, Tensor(c!)? lse, "
        + _OPTIONAL_INPUTS
        + "Tensor[] plan, Tensor(d!)? workspace, str config) -> ()"
    ),
    "mla_kv_cache_update": (
        "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? k_scale, str config) -> ()"
    ),
    "mla_rope_kv_cache_update": (
        "(Tensor kv_c, Tensor k_pe, Tensor cos, Tensor sin, Tensor? positions, Tensor(a!) kv_cache, "
        "Tensor slot_mapping, Tensor? norm_weight, Tensor? k_scale, str rope, str config) -> ()"
    ),
    "mla_indexer_update": "(Tensor key, Tensor(a!) index_cache, Tensor slot_mapping) -> ()",
    "mla_indexer_select": (
        "(Tensor query, Tensor weights, Tensor index_cache, Tensor query_start_loc, Tensor seq_lens, "
        "Tensor block_table, Tensor(a!) topk_indices) -> ()"
    ),
    "mla_attention": (
        "(Tensor query, Tensor kv_cache, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
        "Tensor kv_b_weight, Tensor? kv_b_scale, Tensor(a!) output, Tensor(b!)? output_block_scale, Tensor(c!)? lse, "
        "Tensor? output_scale, Tensor? q_scale, Tensor? k_scale, Tensor? topk_indices, Tensor? local_seq_lens, "
        "Tensor[] plan, "
        "Tensor(d!)? workspace, str config) -> ()"
    ),
    "plan": "(Tensor query_start_loc, Tensor seq_lens, Tensor(a!) schedule, str config) -> ()",
    "merge_attn_states": (
        "(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, Tensor prefix_lse, "
        "Tensor suffix_output, Tensor suffix_lse) -> ()"
    ),
    "add_lora": (
        "(Tensor input, Tensor(a!) output, Tensor lora_a, Tensor lora_b, Tensor scales, Tensor rows, Tensor tiles, "
        "int[] sizes) -> ()"
    ),
}
"""Ops that write into tensors the caller gives."""

TRANSFER_OPS: dict[str, str] = {
    "kv_transfer_wait": "(Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor(c!)? kv_cache) -> ()",
    "kv_transfer_save": "(Tensor key_cache, Tensor? value_cache, Tensor? kv_cache, Tensor(a!) token) -> ()",
}
"""Ops around a layer with a connector: loads arrive in the cache, saves mark a token so that nothing drops them. They
wait on the host, so no CUDA graph may hold them."""

QUANTISING_OPS: dict[str, str] = {
    "quant_fp8_static": "(Tensor input, Tensor scale) -> Tensor",
    "quant_fp8_per_token": "(Tensor input) -> (Tensor, Tensor)",
    "quant_fp8_group": "(Tensor input, int group_size, bool power_of_two, bool column_major) -> (Tensor, Tensor)",
    "quant_nvfp4": "(Tensor input, Tensor scale, bool swizzled) -> (Tensor, Tensor)",
}
"""Functional quantisers of `[T, N]` activations; what each computes is `vattn.quantization.codecs`'s function of that
name."""

PRODUCT_OPS: dict[str, str] = {
    "linear": "(Tensor input, Tensor weight, Tensor? input_scale, Tensor? weight_scale, str dtype) -> Tensor"
}
"""Functional products of `[T, K]` activations with weights `[N, K]`; see `vattn.backends.linear`."""

ATTENTION_OPS: tuple[str, ...] = ("attention", "varlen_attention", "mla_attention")
"""Ops that the fusion passes treat as attention nodes."""

_DEVICE_KEYS = ("CPU", "CUDA")

library = torch.library.Library("vattn", "FRAGMENT")


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (tensor for tensor in arg if isinstance(tensor, Tensor))


def wanted_gradient(tensors: Iterable[Tensor | None]) -> tuple[str, str] | None:
    """Return how a tensor needs a gradient, backwards or forwards, and how to avoid it; `None` if none does.

    Tangents are followed without grad mode too.
    """
    backwards, forwards = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not (backwards or forwards):
        return None
    given = [tensor for tensor in tensors if tensor is not None]
    if backwards and any(tensor.requires_grad for tensor in given):
        return "requires a gradient while grad mode is on", ""
    if forwards and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given):
        return "carries a tangent of forward-mode AD", "pass torch.autograd.forward_ad.unpack_dual(input).primal"
    return None


def _autograd_guard(name: str) -> Callable[..., Any]:
    """Return a kernel that refuses inputs with gradients and passes everything else on.

    Without it gradients would vanish in silence: the op has no backward.
    """
    op = getattr(torch.ops.vattn, name).default

    def guard(*args: Any) -> Any:
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            wanted = wanted_gradient(_tensors(args))
            if wanted is not None:
                raise GradientError(
                    f"vattn::{name} got an input that {wanted[0]}",
                    "inference only; the op has no backward",
                    wanted[1] or "call it under torch.no_grad() or torch.inference_mode(), or detach the input",
                )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return keep_out_of_dynamo(guard)


def implement(name: str, kernel: Callable[..., Any]) -> None:
    """Register what runs when an op is called on a CPU or a GPU."""
    for key in _DEVICE_KEYS:
        library.impl(name, keep_out_of_dynamo(kernel), key)


def keep_out_of_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo leave a function of this code, and all that it calls, alone, and return it.

    Kernels of ops run outside of graphs too, where compiled code has a graph break, as after an error that a layer
    raises. There Dynamo traces them like any function, and fails in what no graph may hold. This is what
    `torch.compiler.disable` does, without its import of Dynamo and its half a microsecond a call: code is marked once.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def _fake_nothing(*args: Any) -> None:
    """Shape function of an op that only writes into its arguments."""


def _fake_static(input: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(input, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)


def _fake_per_token(input: Tensor) -> tuple[Tensor, Tensor]:
    quantised = torch.empty_like(input, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    return quantised, input.new_empty((input.shape[0], 1), dtype=torch.float32)


def _fake_group(input: Tensor, group_size: int, power_of_two: bool, column_major: bool) -> tuple[Tensor, Tensor]:
    quantised = torch.empty_like(input, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    rows, groups = input.shape[0], input.shape[1] // group_size
    if column_major:
        return quantised, input.new_empty((groups, rows), dtype=torch.float32).t()
    return quantised, input.new_empty((rows, groups), dtype=torch.float32)


def _fake_nvfp4(input: Tensor, scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    rows, groups = input.shape[0], input.shape[1] // 16
    if swizzled:
        rows, groups = (rows + 127) // 128 * 128, (groups + 3) // 4 * 4
    quantised = input.new_empty((input.shape[0], input.shape[1] // 2), dtype=torch.uint8)
    return quantised, input.new_empty((rows, groups), dtype=torch.float8_e4m3fn)


def _fake_linear(
    input: Tensor, weight: Tensor, input_scale: Tensor | None, weight_scale: Tensor | None, dtype: str
) -> Tensor:
    return input.new_empty((input.shape[0], weight.shape[0]), dtype=getattr(torch, dtype))


_FAKES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys([*MUTATING_OPS, *TRANSFER_OPS], _fake_nothing),
    "quant_fp8_static": _fake_static,
    "quant_fp8_per_token": _fake_per_token,
    "quant_fp8_group": _fake_group,
    "quant_nvfp4": _fake_nvfp4,
    "linear": _fake_linear,
}


def _shape_function(name: str) -> Callable[..., Any]:
    """Return an op's shape function, which refuses real tensors among meta tensors.

    PyTorch runs it instead of the op as soon as one argument is on meta: a call with both would do nothing, in silence.
    """
    fake = _FAKES[name]

    def checked(*args: Any) -> Any:
        devices = {tensor.device.type for tensor in _tensors(args)}
        if "meta" in devices and len(devices) > 1:
            raise DeviceError(
                f"vattn::{name} got tensors on {' and '.join(sorted(devices))}",
                "all on one device",
                "give the meta tensors real memory, or move the others to meta",
            )
        return fake(*args)

    return checked


def all_ops() -> dict[str, str]:
    """Return the schema of every op by name."""
    return {**MUTATING_OPS, **TRANSFER_OPS, **QUANTISING_OPS, **PRODUCT_OPS}


def _register() -> None:
    for name, schema in all_ops().items():
        library.define(name + schema, tags=(torch.Tag.cudagraph_unsafe,) if name in TRANSFER_OPS else ())
        torch.library.register_fake(f"vattn::{name}", _shape_function(name), lib=library)
        library.impl(name, _autograd_guard(name), "Autograd")


_register()
