"""The FlashAttention libraries that can be found, each behind one function: packed queries over paged or packed keys.

A binary keeps contracts of its own. What differs from ours is put right in `vattn.backends.flash_attn`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vattn.errors import ConfigError, UnknownOptionError

LIBRARY_VARIABLE = "VATTN_FLASH_ATTN_LIBRARY"
"""Environment variable with the path of a FlashAttention-3 library."""

_NAMESPACE = "_vllm_fa3_C"
_loaded: dict[str, str] = {}


class FlashCall(NamedTuple):
    """One attention call in FlashAttention's words.

    Attributes:
        query: `[T, H, D]`; key, value: `[blocks, block_size, K, D]` with a table, `[Tk, K, D]` without.
        query_start_loc, kv_start_loc: int32 `[B + 1]`; the second without a table.
        seq_lens, block_table: int32 `[B]` and `[B, W]`, or `None`.
        max_query_len, max_seq_len: upper bounds.
        window: tokens visible to the left and to the right, -1 = all.
        descales: of query, key and value, fp32 `[B, K]`, or `None`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_start_loc: Tensor
    kv_start_loc: Tensor | None
    seq_lens: Tensor | None
    block_table: Tensor | None
    max_query_len: int
    max_seq_len: int
    scale: float
    causal: bool
    window: tuple[int, int]
    soft_cap: float
    sinks: Tensor | None
    descales: tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True)
class FlashLibrary:
    """A FlashAttention library that was found.

    Attributes:
        name: `"FlashAttention-3"` or `"torch varlen_attn"`.
        version: file name of a library, or torch's version.
        paged: whether it reads a paged cache.
    """

    name: str
    version: str
    paged: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.version})"


def load_flash_attn(path: str | os.PathLike[str]) -> FlashLibrary:
    """Load a FlashAttention-3 library for the backend FLASH_ATTN; from then on it runs on it.

    Args:
        path: a shared object that registers the operators of FlashAttention-3 with paged KV under the namespace
            `_vllm_fa3_C`, as vLLM's wheels carry it.

    Raises:
        ConfigError: no such file, or not such a library.

    The environment variable `VATTN_FLASH_ATTN_LIBRARY` names one to load when the backend is first asked.
    """
    _load(path)
    find_library.cache_clear()
    from vattn.backends import selector

    selector.forget_decisions()
    return FlashLibrary("FlashAttention-3", _loaded["path"], paged=True)


def library_error() -> str | None:
    """Return why the library that the environment names could not be loaded, `None` if it could or none is named."""
    return _loaded.get("error")


def _load(path: str | os.PathLike[str]) -> None:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"FlashAttention library {str(path)!r}", "the path of a file", "check the path")
    try:
        torch.ops.load_library(str(file.resolve()))
    except OSError as error:
        raise ConfigError(
            f"FlashAttention library {str(path)!r}: {str(error).splitlines()[0]}",
            f"a library built for torch {torch.__version__} and its CUDA",
            "take the build that fits this torch",
        ) from error
    if not hasattr(getattr(torch.ops, _NAMESPACE), "fwd"):
        raise ConfigError(
            f"library {str(path)!r} registers no torch.ops.{_NAMESPACE}.fwd",
            "a FlashAttention-3 library with paged KV",
            "take the file _vllm_fa3_C.abi3.so of a vLLM wheel",
        )
    _loaded["path"] = file.name
    _loaded.pop("error", None)


@lru_cache(maxsize=1)
def find_library() -> FlashLibrary | None:
    """Return the newest FlashAttention library there is, `None` if there is none."""
    path = os.environ.get(LIBRARY_VARIABLE)
    if path and "path" not in _loaded:
        try:
            _load(path)
        except ConfigError as error:
            # An explicit choice never falls back to another library.
            _loaded["error"] = f"{LIBRARY_VARIABLE}: {error}"
            return None
    if "path" in _loaded:
        return FlashLibrary("FlashAttention-3", _loaded["path"], paged=True)
    if torch.version.cuda is not None:
        # The paged arguments of varlen_attn came with torch 2.12 and have not run here; without them it is packed only.
        return FlashLibrary("torch varlen_attn", torch.__version__, paged=False)
    return None


def run_flash(library: FlashLibrary, call: FlashCall, output: Tensor) -> Tensor:
    """Write the output `[T, H, V]`, but no row behind the last request; return the LSE, fp32 `[H, T]`."""
    if library.name == "FlashAttention-3":
        return _run_fa3(call, output)
    if library.name == "torch varlen_attn":
        return _run_torch(call, output)
    raise UnknownOptionError(f"library {library.name!r}", "FlashAttention-3, torch varlen_attn", "use find_library()")


def _run_fa3(call: FlashCall, output: Tensor) -> Tensor:
    ops: Any = getattr(torch.ops, _NAMESPACE)
    q_descale, k_descale, v_descale = call.descales or (None, None, None)
    schedule = None
    left, right = call.window
    if call.block_table is not None:
        heads, width = call.query.shape[1:]
        schedule = ops.get_scheduler_metadata(
            call.block_table.shape[0], call.max_query_len, call.max_seq_len, heads, call.key.shape[2], width,
            call.value.shape[-1], call.query.dtype, call.seq_lens, call.query_start_loc, None, None, None, None,
            call.key.shape[1], 0, call.causal, left, right, call.soft_cap > 0, 0, None, 0,
        )  # fmt: skip
    lse: Tensor
    _, lse, *_ = ops.fwd(
        call.query, call.key, call.value, None, None, None, output, call.query_start_loc, call.kv_start_loc, None,
        None, call.seq_lens, call.max_query_len, call.max_seq_len, call.block_table, None, None, None, None, None,
        q_descale, k_descale, v_descale, call.scale, call.causal, left, right, call.soft_cap, True, schedule, 0, None,
        0, call.sinks, 1, 0, None,
    )  # fmt: skip
    return lse


def _run_torch(call: FlashCall, output: Tensor) -> Tensor:
    assert call.kv_start_loc is not None
    left, right = call.window
    result, lse, *_ = torch.ops.aten._flash_attention_forward(
        call.query, call.key, call.value, call.query_start_loc, call.kv_start_loc, call.max_query_len,
        call.max_seq_len, 0.0, call.causal, False, scale=call.scale,
        window_size_left=None if left < 0 else left, window_size_right=None if right < 0 else right,
    )  # fmt: skip
    output.copy_(result)
    return lse
