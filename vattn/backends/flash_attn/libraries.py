"""Finds FlashAttention libraries, newest first, and defines one call in FlashAttention's terms.

`vattn.backends.flash_attn.calls` runs a call. Where results differ from vattn's contract,
`vattn.backends.flash_attn.backend` corrects them.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vattn.backends.base import Package
from vattn.errors import ConfigError

LIBRARY_VARIABLE = "VATTN_FLASH_ATTN_LIBRARY"
"""Environment variable with the path of a FlashAttention-3 library."""

NAMESPACE = "_vllm_fa3_C"
"""Where a FlashAttention-3 library given by path registers its operators."""

_loaded: dict[str, str] = {}


class FlashCall(NamedTuple):
    """One attention call in FlashAttention's terms.

    Attributes:
        query: `[T, H, D]`; key, value: `[blocks, block_size, K, D]` with a table, `[Tk, K, D]` without.
        query_start_loc, kv_start_loc: int32 `[B + 1]`; the second without a table.
        seq_lens, block_table: int32 `[B]` and `[B, W]`, or `None`.
        max_query_len, max_seq_len: upper bounds.
        window: tokens visible to the left and to the right, -1 = all.
        alibi_slopes: fp32 `[H]`, or `None`.
        descales: of query, key and value, fp32 `[B, K]`, or `None`.
        num_splits: most parts that a sequence is split into, each with a partial result; 0: the library chooses.
        schedule: int32, the library's own partition of the work, made once a step; `None`: it makes one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    causal: bool
    window: tuple[int, int]
    soft_cap: float
    kv_start_loc: Tensor | None = None
    seq_lens: Tensor | None = None
    block_table: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    descales: tuple[Tensor, Tensor, Tensor] | None = None
    num_splits: int = 0
    schedule: Tensor | None = None


@dataclass(frozen=True)
class FlashLibrary:
    """A FlashAttention library that was found.

    Attributes:
        name: `"FlashAttention-3"`, `"FlashAttention-4"`, `"FlashAttention-2"` or `"torch varlen_attn"`.
        version: file name of a library, version of a package, or torch's version.
        paged: whether it reads a paged cache.
        module: what to import; `""` for a library given by path and for torch.
    """

    name: str
    version: str
    paged: bool
    module: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({f'{self.module} {self.version}' if self.module else self.version})"


@dataclass(frozen=True)
class FlashPackage(Package):
    """A Python package of FlashAttention.

    Attributes:
        name: of the library in it.
        majors: major compute capabilities that it has kernels for.
    """

    name: str
    majors: tuple[int, ...]


PACKAGES = (
    FlashPackage("flash_attn_interface", "flash_attn_3", (3, 0), "", "FlashAttention-3", (9,)),
    FlashPackage("flash_attn.cute", "flash-attn-4", (4, 0), "flash-attn-4", "FlashAttention-4", (9, 10, 11)),
    FlashPackage("flash_attn", "flash-attn", (2, 6), "flash-attn-2", "FlashAttention-2", (8, 9, 10, 11, 12)),
)
"""The packages that are looked for, in this order. FlashAttention-2 has soft caps and paged caches from 2.6 on."""


def load_flash_attn(path: str | os.PathLike[str]) -> FlashLibrary:
    """Load a FlashAttention-3 library for the backend FLASH_ATTN; from then on it runs on it.

    Args:
        path: a shared object that registers the operators of FlashAttention-3 with paged KV under the namespace
            `_vllm_fa3_C`, as vLLM's wheels carry it.

    Raises:
        ConfigError: no such file, or not such a library.

    The environment variable `VATTN_FLASH_ATTN_LIBRARY` names one to load when the backend is first used.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"path of type {type(path).__name__}", "the path of a file", "pass the path of the library")
    _load(path)
    find_library.cache_clear()
    from vattn.backends import selector

    selector.forget_decisions()
    return _by_path()


def library_error() -> str | None:
    """Return why the library that the environment names could not be loaded, `None` if it could or none is named."""
    return _loaded.get("error")


def library_digest() -> str:
    """Return the start of the SHA-256 of the FlashAttention-3 library given by path, `""` without one."""
    return _digest(_loaded["file"]) if "file" in _loaded else ""


@lru_cache(maxsize=4)
def _digest(file: str) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()[:12]


def _by_path() -> FlashLibrary:
    return FlashLibrary("FlashAttention-3", _loaded["path"], paged=True)


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
    if not hasattr(getattr(torch.ops, NAMESPACE), "fwd"):
        raise ConfigError(
            f"library {str(path)!r} registers no torch.ops.{NAMESPACE}.fwd",
            "a FlashAttention-3 library with paged KV",
            "take the file _vllm_fa3_C.abi3.so of a vLLM wheel",
        )
    _loaded.update(path=file.name, file=str(file.resolve()))
    _loaded.pop("error", None)


@lru_cache(maxsize=16)
def find_library(capability: tuple[int, int] | None = None, alibi: bool = False) -> FlashLibrary | None:
    """Return the newest FlashAttention library there is, `None` if there is none.

    Args:
        capability: of the GPU that it must have kernels for; `None`: of any.
        alibi: prefer the package that has ALiBi, FlashAttention-2, to newer ones. A library given by path stays.
    """
    path = os.environ.get(LIBRARY_VARIABLE)
    if path and "path" not in _loaded:
        try:
            _load(path)
        except ConfigError as error:
            # An explicit choice never falls back to another library.
            _loaded["error"] = f"{LIBRARY_VARIABLE}: {error}"
            return None
    if "path" in _loaded:
        return _by_path()
    for package in PACKAGES:
        fits = capability is None or capability[0] in package.majors
        fits = fits and (package.name == "FlashAttention-2" or not alibi)
        version = package.version()
        if fits and version is not None and package_problem(package) is None:
            return FlashLibrary(package.name, version, True, package.module)
    if alibi:
        return find_library(capability)
    return None if torch.version.cuda is None else _torchs_own(capability)


def _torchs_own(capability: tuple[int, int] | None) -> FlashLibrary:
    """Return torch's varlen attention.

    Block tables need torch 2.12. torch's built-in implementation refuses them; one that the user has activated takes
    them: FlashAttention-3, or FlashAttention-4 on GPUs newer than sm_90.
    """
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    newer = capability is not None and capability >= (10, 0)
    paged = torch.__version__ >= "2.12" and active == ("FA4" if newer else "FA3")
    name = torch.__version__.split("+")[0]
    return FlashLibrary("torch varlen_attn", f"{name}+{active}" if paged else name, paged)


def passed_over() -> list[str]:
    """Return why packages that are installed are not used: too old, or broken."""
    found = (package_problem(package) for package in PACKAGES if package.version() is not None)
    return [problem for problem in found if problem is not None]


@lru_cache(maxsize=8)
def package_problem(package: FlashPackage) -> str | None:
    """Return why a package that is installed cannot be used, `None` if it can."""
    problem = package.problem()
    if problem is not None:
        return problem
    try:
        importlib.import_module(package.module)
    except Exception as error:  # a binary for another torch fails in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"package {package.distribution} {package.version()} cannot be imported: {reason}"
    return None
