"""Refuse one wrong tensor: its shape, dtype, device, strides, and whether it is there. See `vattn.ops.checks`."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, Generic, NoReturn, TypeGuard, TypeVar

import torch
from torch import Tensor

from vattn.errors import ConfigError, DeviceError, DtypeError, ScaleError, ShapeError, StrideError, VattnError
from vattn.quantization.formats import dtype_name

_LAYOUTS = {
    "query": "[T, num_heads, head_size]",
    "key": "[T, num_kv_heads, head_size]",
    "value": "[T, num_kv_heads, head_size_v]",
    "kv_cache": "vattn.kv_cache_shape(config, num_blocks) with num_blocks >= 1",
    "key_cache": "[num_blocks, block_size, num_kv_heads, head_size] with num_blocks >= 1",
    "value_cache": "[num_blocks, block_size, num_kv_heads, head_size_v], the blocks of key_cache",
    "cos": "[N, rotary_dim / 2] or [N, rotary_dim]; N = T without positions",
    "sin": "as cos",
    "positions": "[T]",
    "query_out": "[T, num_heads, head_size]",
    "q_weight": "[head_size]",
    "k_weight": "[head_size]",
    "slot_mapping": "[T], one slot per row of key",
    "kv_c": "[T, kv_lora_rank]",
    "k_pe": "[T, qk_rope_head_dim]",
    "kv_b_weight": "[num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]",
    "kv_b_scale": "the scales of weight_format",
    "topk_indices": "[T, K] with K >= 1",
    "norm_weight": "[kv_lora_rank]",
    "weights": "[T, H]",
    "index_cache": "[num_blocks, block_size, D + 4]",
    "query_start_loc": "[B + 1] with B = len(seq_lens)",
    "kv_start_loc": "[B + 1] with B >= 1",
    "seq_lens": "[B] with B >= 1",
    "block_table": "[B, W] with W >= 1",
    "output": "[T, num_heads, head_size_v], or head_size_v // 2 columns for NVFP4",
    "output_block_scale": "the output format's block_scale_shape(T, num_heads * head_size_v)",
    "lse": "[T, num_heads]",
    "alibi_slopes": "[num_heads]",
    "sinks": "[num_heads]",
    "causal_flags": "[B]",
    "bias": "[trees, n, n]",
    "tree_id": "[B]",
    "mm_ranges": "[B, R, 2]",
    "local_seq_lens": "[B]",
    "output_lse": "[T, H]",
    "prefix_output": "[T, H, V], as output",
    "suffix_output": "[T, H, V], as output",
    "prefix_lse": "[T, H]",
    "suffix_lse": "[T, H]",
    "input": "[T, N]",
}
"""What each tensor's shape means, for messages."""

_ASKED_BY = {
    "lse": "lse=True",
    "alibi_slopes": "alibi='linear' or 'sqrt'",
    "sinks": "sinks=True",
    "causal_flags": "causality='per_request'",
    "bias": "tree_bias=True",
    "tree_id": "tree_bias=True",
    "mm_ranges": "mm_prefix='full' or 'clamped'",
    "local_seq_lens": "context_parallel=True",
    "output_block_scale": "an output_format with dynamic scales",
    "output_scale": "an output_format with a static scale",
    "topk_indices": "sparse=True",
    "kv_b_scale": "weight_format for e4m3 weights",
    "norm_weight": "norm in its rope config",
    "q_weight": "norm in its rope config",
    "k_weight": "norm in its rope config",
    "q_scale": "query_format='fp8_e4m3'",
    "k_scale": "kv_scale='tensor' or 'head'",
    "v_scale": "kv_scale='tensor' or 'head'",
}
"""Which config value goes with each optional tensor, for messages."""


Args = TypeVar("Args")

_MOST_SIGNATURES = 4096


class OncePerSignature(Generic[Args]):
    """Run a check of an op's arguments once for each signature that it accepts.

    A signature is the config strings, the shape, strides, dtype and device of each tensor, and how the cache is
    aligned; the check must depend on nothing else. Later steps of the same shapes are then cheap.
    """

    def __init__(self, check: Callable[[Args], None]) -> None:
        self._check = check
        self._accepted: dict[tuple[Any, ...], dict[Any, Any]] = {}
        self._ahead: Any = None

    def ahead(self, args: Args) -> None:
        """Check what an attention op gets after another op has written; the op then accepts these very objects."""
        self._ahead = args, self(args)

    def forget(self) -> None:
        """Drop what was checked for an op that will not run."""
        self._ahead = None

    def __call__(self, args: Any) -> dict[Any, Any]:
        """Raise what the check raises for these arguments; return a dict for what callers keep of their signature."""
        before, self._ahead = self._ahead, None
        if before is not None and _same_objects(before[0], args):
            return before[1]  # type: ignore[no-any-return]
        plan, cache = getattr(args, "plan", ()), getattr(args, "key_cache", None)
        if cache is None:
            cache = getattr(args, "kv_cache", None)
        signature = [
            (x.shape, x.stride(), x.dtype, x.device) if x is not None and isinstance(x, Tensor) else x
            for x in (*args, *plan)
            if x is not plan
        ]
        key = (*signature, 0 if cache is None else cache.storage_offset() % 16)
        try:
            kept = self._accepted.get(key)
        except TypeError:  # Sizes of a symbolic trace have no hash.
            self._check(args)
            return {}
        if kept is None:
            self._check(args)
            if len(self._accepted) >= _MOST_SIGNATURES:
                self._accepted.clear()
            kept = self._accepted[key] = {}
        return kept


def _same_objects(before: Any, args: Any) -> bool:
    """Return whether two arguments of an attention op, which end with plan, workspace and config, are the same."""
    if before.config != args.config or len(before.plan) != len(args.plan):
        return False
    return all(map(is_, (*before[:-3], before.workspace, *before.plan), (*args[:-3], args.workspace, *args.plan)))


def count_of(name: str, tensor: Tensor, least: int) -> int:
    """Return the length of a vector that other shapes are derived from."""
    if tensor.ndim == 1 and tensor.shape[0] >= least:
        return tensor.shape[0]
    raise ShapeError(f"{name} has shape {tuple(tensor.shape)}", _LAYOUTS[name], "pass one entry per request")


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    meaning: str = "",
    column_major: bool = False,
) -> None:
    """Check a tensor that must be contiguous, or its transpose; `meaning`: of its shape, if not that of `_LAYOUTS`."""
    refuse(name, tensor, shape, dtypes, device, meaning)
    if not (tensor.t() if column_major else tensor).is_contiguous():
        fix = f"allocate {name} contiguous; a copy made on the way would not be written back"
        raise StrideError(
            f"{name} has strides {tensor.stride()} for shape {shape}",
            f"column-major memory, strides (1, {shape[0]})" if column_major else "contiguous memory",
            f"allocate {name} as {shape[::-1]} and pass its transpose" if column_major else fix,
        )


def check_rows(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    meaning: str = "",
) -> None:
    """Check a tensor that must be dense only in its last dimension."""
    refuse(name, tensor, shape, dtypes, device, meaning)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel():
        raise StrideError(
            f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}",
            "a last dimension of stride 1",
            f"call {name}.contiguous()",
        )


def check_optional(
    name: str,
    tensor: Tensor | None,
    wanted: bool,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a contiguous tensor, or that there is none where none is wanted."""
    if is_given(tensor, name, wanted):
        check_tensor(name, tensor, shape, dtypes, device)


def check_scale(name: str, scale: Tensor | None, kind: str, num_kv_heads: int, device: torch.device) -> None:
    """Check a scale of one value (`tensor`), of one value per KV head (`head`), or that there is none (`none`)."""
    if not is_given(scale, name, kind != "none", ScaleError):
        return
    if scale.shape != (num_kv_heads,) if kind == "head" else scale.shape not in ((), (1,)):
        allowed = f"shape ({num_kv_heads},), one per KV head" if kind == "head" else "one value: shape () or (1,)"
        raise ScaleError(f"{name} has shape {tuple(scale.shape)}", allowed, "match the scale kind of the config")
    check_tensor(name, scale, tuple(scale.shape), (torch.float32,), device, "1 value or one per KV head")


def is_given(
    tensor: Tensor | None, name: str, wanted: bool, error: type[VattnError] = ConfigError
) -> TypeGuard[Tensor]:
    """Return whether an optional tensor is there; raise if it is missing, or if the config does not ask for it."""
    if (tensor is not None) == wanted:
        return wanted
    wanted_by = _ASKED_BY[name]
    if wanted:
        layout = _LAYOUTS.get(name, "1 value or one per KV head")
        raise error(f"{name} is missing, but the config has {wanted_by}", f"a tensor: {layout}", f"pass {name}")
    raise error(f"{name} was given, but the config has no {wanted_by}", "None", f"pass None or set {wanted_by}")


STEP_FIX = "pass query and key of the step's tokens, padding included, or build the step for the tokens of this call"
"""What to do about a slot mapping of other rows than the call; in compiled layers the op is the first to compare."""


def refuse(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    meaning: str = "",
) -> None:
    """Raise for a wrong shape, dtype or device."""
    if tensor.shape != shape:
        fix = STEP_FIX if name == "slot_mapping" else f"build {name} from the config and the lengths of this call"
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}", f"{shape} = {meaning or _LAYOUTS[name]}", fix)
    if tensor.dtype not in dtypes:
        refuse_dtype(name, tensor, dtypes)
    if tensor.device != device and device.type == "meta":
        # The device of the first tensor counts, and here that one is the odd one.
        raise DeviceError(
            f"a tensor on meta beside {name} on {tensor.device}", "all on one device", "pass tensors with values"
        )
    if tensor.device != device:
        raise DeviceError(f"{name} is on {tensor.device}", f"{device}, as the other tensors", f"move {name} there once")


def refuse_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> NoReturn:
    """Raise for a wrong dtype."""
    allowed = dict.fromkeys(dtype_name(dtype) for dtype in dtypes)
    raise DtypeError(
        f"{name} has dtype {dtype_name(tensor.dtype)}", " or ".join(allowed), f"convert {name} or change the config"
    )
