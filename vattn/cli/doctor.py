"""Say what vattn can use on this machine, in plain text and with torch alone: `python -m vattn doctor`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable, Sequence

import torch

from vattn.backends import selector
from vattn.backends.base import Backend
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.quantization.formats import KV_FORMATS

OPTIONAL_PACKAGES: dict[str, str] = {
    "triton": "TRITON_ATTN; comes with CUDA builds of torch",
    "flashinfer-python": "FLASHINFER; needs nvcc",
    "flash-attn-4": "FLASH_ATTN; a FlashAttention-3 library goes before it",
    "flash-attn": "FLASH_ATTN, on GPUs that no newer one has kernels for",
    "xformers": "XFORMERS",
    "safetensors": "weights of the demo; FP8 checkpoints",
    "transformers": "vattn.integrations.transformers.enable, from version 5; sampling of vattn.Generator",
}
"""Distributions that vattn can use, and what for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    parser.add_argument("--check", action="store_true", help="also run a small step on every usable backend")


def main(options: argparse.Namespace) -> int:
    """Run the command; return 1 if a backend fails its small step, else 0."""
    print(report())
    rows = check_backends() if options.check else []
    if rows:
        print("\na prefill of 37 tokens against dense attention in fp32")
        print(aligned(rows))
    return 0 if all(outcome.startswith("ok") for _, _, outcome in rows) else 1


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, `None` if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[DeviceInfo]:
    """Return the devices of this machine: the CPU, then every GPU that torch sees."""
    found = [DeviceInfo.of("cpu")]
    if torch.cuda.is_available():
        found += [DeviceInfo.of(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    return found


def plain_request(backend: Backend) -> AttentionConfig:
    """Return the plainest request that a backend can run, so that only packages and devices can refuse it."""
    can = backend.capabilities
    dtype = can.dtypes[0]
    cache = dtype if dtype in can.kv_cache_dtypes else can.kv_cache_dtypes[0]
    head_size = next(size for size in (64, 128, *range(8, 520, 8)) if size in can.head_sizes)
    return AttentionConfig(
        num_heads=2,
        num_kv_heads=1,
        head_size=head_size,
        head_size_v=head_size,
        scale=0.125,
        dtype=dtype,
        kv_cache_dtype=cache,
        block_size=next(size for size in (16, 32, 64, *range(8, 2056, 8)) if size in can.block_sizes),
        kv_scale="tensor" if KV_FORMATS[cache].quantised else "none",
        attn_type=can.attn_types[0],
        backend=backend.name,
    )


def _backends() -> list[Backend]:
    """Return the backends that run plain requests: one for a single kind of layer hands its requests to another."""
    found = map(selector.get_backend, selector.backend_names())
    return [backend for backend in found if not backend.capabilities.required_features]


def unusable(backend: Backend, device: DeviceInfo) -> str | None:
    """Return why a backend cannot run on a device, `None` if it can."""
    reasons = selector.explain(plain_request(backend), device).refusals[backend.name]
    return "; ".join(reasons) or None


def _torch_rows() -> list[tuple[str, str]]:
    candidates = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    compiler = next((path for path in map(shutil.which, candidates) if path), None)
    interpreter = os.environ.get("TRITON_INTERPRET", "0") == "1"
    rows = [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", torch.__version__),
        ("CUDA", _cuda()),
        ("C++ compiler", compiler or "not found: torch.compile on CPU needs one (set CXX, or install g++)"),
        (
            "triton interpreter",
            "on: Triton kernels run on CPU tensors, slowly" if interpreter else "off (TRITON_INTERPRET=1 turns it on)",
        ),
    ]
    for index, info in enumerate(devices()[1:]):
        memory = torch.cuda.get_device_properties(index).total_memory
        rows.append((f"GPU {index}", f"{info}, {memory / 2**30:.0f} GiB"))
    return rows


def _cuda() -> str:
    if torch.version.cuda is None:
        return "none: this is a build of torch without CUDA"
    if not torch.cuda.is_available():
        return f"torch was built for {torch.version.cuda}, but no usable GPU or driver was found"
    return torch.version.cuda


def _backend_rows() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for backend in _backends():
        running = backend.running()
        version = "not installed" if running is None else "part of torch" if running[0] == "torch" else running[1]
        for device in devices():
            problem = unusable(backend, device)
            rows.append((backend.name, version, str(device), "usable" if problem is None else f"not usable: {problem}"))
    return rows


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as lines with aligned columns."""
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  " + "  ".join(cells).rstrip() for cells in padded)


def report() -> str:
    """Return the text of `python -m vattn doctor`."""
    import vattn

    parts = [
        f"vattn {vattn.__version__}",
        aligned(_torch_rows()),
        "",
        "optional packages",
        aligned((name, version_of(name) or "not installed", use) for name, use in OPTIONAL_PACKAGES.items()),
        "",
        "backends, for a plain request (python -m vattn explain --help: for yours)",
        aligned(_backend_rows()),
    ]
    return "\n".join(parts)


def check_backends() -> list[tuple[str, str, str]]:
    """Run a small step on every usable backend and compare it with dense attention written out.

    Returns:
        Rows of backend, device, and `"ok"` with the relative L2 error, or `"wrong"` with it, or the exception.
    """
    rows = []
    for backend in _backends():
        for index, device in enumerate(devices()):
            if unusable(backend, device) is not None:
                continue
            where = "cpu" if device.type == "cpu" else f"cuda:{index - 1}"
            try:
                error = _error_of_a_step(plain_request(backend), where)
                limit = 2 * torch.finfo(getattr(torch, plain_request(backend).dtype)).eps
                outcome = f"{'ok' if error <= limit else 'wrong'}, relative L2 error {error:.1e}"
            except Exception as error:  # a broken toolchain raises anything, and the next backend still counts
                outcome = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            rows.append((backend.name, str(device), outcome))
    return rows


def _error_of_a_step(config: AttentionConfig, device: str) -> float:
    """Return the relative L2 error of a prefill of 37 tokens against dense fp32 attention."""
    import vattn

    tokens, dtype = 37, getattr(torch, config.dtype)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, width: int) -> torch.Tensor:
        return torch.randn(tokens, heads, width, generator=generator).to(dtype).to(device)

    query = random(config.num_heads, config.head_size)
    key, value = random(config.num_kv_heads, config.head_size), random(config.num_kv_heads, config.head_size_v)
    blocks = -(-tokens // config.block_size)
    cache = torch.zeros(vattn.kv_cache_shape(config, blocks), dtype=dtype, device=device)
    builder = vattn.AttentionMetadataBuilder(
        max_num_reqs=1, max_num_tokens=tokens, max_seq_len=tokens, block_size=config.block_size, device=device
    )
    step = builder.build(query_lens=[tokens], seq_lens=[tokens], block_tables=[list(range(blocks))[::-1]])
    vattn.update_kv_cache(key, value, cache, step.slot_mapping, config)
    output = vattn.paged_attention(query, cache, step, config).output.float()
    q, k, v = (x.float().transpose(0, 1)[None] for x in (query, key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, is_causal=True, scale=config.scale, enable_gqa=True)[0].transpose(0, 1)
    return float((output - expected).norm() / expected.norm())
