"""How many Python calls into vattn one step costs: the host's work, counted where times would depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from vattn.backends.triton_attn import TritonAttentionBackend
from vattn.cache.layout import kv_cache_dtype, kv_cache_shape, op_views
from vattn.config import device as devices
from vattn.config.attention import AttentionConfig
from vattn.ops.arguments import AttentionArgs

REQUESTS = 64


def calls_into_vattn(function: Callable[[], object]) -> list[str]:
    """Return the Python functions of vattn that a second run of `function` calls, by file and name."""
    root = str(Path(vattn.__file__).parent)
    found: list[str] = []

    def profile(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")

    function()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eager_decode_step_of_one_layer(dtype: torch.dtype) -> None:
    layer = vattn.Attention(num_heads=4, head_size=16, scale=0.25, num_kv_heads=2)
    vattn.allocate_kv_cache(layer, num_blocks=2 * REQUESTS + 1, dtype=dtype)
    builder = vattn.AttentionMetadataBuilder(REQUESTS, REQUESTS, max_seq_len=32, layers=layer)
    tables = [[2 * request + 1, 2 * request + 2] for request in range(REQUESTS)]
    step = builder.build([1] * REQUESTS, [17] * REQUESTS, tables)
    qkv = [torch.randn(REQUESTS, heads * 16, dtype=dtype) for heads in (4, 2, 2)]
    with torch.no_grad():
        calls = calls_into_vattn(lambda: layer(*qkv, metadata=step))
    assert 20 < len(calls) <= 100, calls


def test_building_and_advancing_a_step() -> None:
    layer = vattn.Attention(num_heads=4, head_size=16, scale=0.25, num_kv_heads=2)
    vattn.allocate_kv_cache(layer, num_blocks=4 * REQUESTS, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(REQUESTS, REQUESTS, max_seq_len=64, layers=layer)
    tables = [[2 * request + 1, 2 * request + 2] for request in range(REQUESTS)]
    lengths = [32 - request % 4 for request in range(REQUESTS)]
    calls = calls_into_vattn(lambda: builder.build([1] * REQUESTS, lengths, tables))
    assert 10 < len(calls) <= 40, calls
    step, fresh = builder.build([1] * REQUESTS, lengths, tables), iter(range(2 * REQUESTS + 1, 4 * REQUESTS))

    def advance() -> None:
        nonlocal step
        step = builder.advance(step, [next(fresh) for _ in range(REQUESTS // 4)])

    calls = calls_into_vattn(advance)
    assert 5 < len(calls) <= 15, calls


def test_from_the_backend_to_the_launches_of_a_decode_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without storage that say they are on a GPU, and with kernels that are noted instead of launched."""
    pytest.importorskip("triton")
    from vattn.kernels.hopper.decode import gluon_kernel, launch

    launches: list[str] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **arguments: launches.append(self.name)

    for module, name in ((launch, "decode_kernel"), (gluon_kernel, "decode_kernel"), (launch, "reduce_kernel")):
        monkeypatch.setattr(module, name, Kernel(name))
    hopper = devices.DeviceInfo("cuda", (9, 0))
    monkeypatch.setattr(devices.DeviceInfo, "of", staticmethod(lambda device: hopper))
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    launch.runs.cache_clear()

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    config = AttentionConfig(32, 8, 128, 128, 128**-0.5, "bfloat16", "bfloat16", backend="TRITON_ATTN")
    query = meta(REQUESTS, 32, 128, dtype=torch.bfloat16)
    nothing = dict.fromkeys(AttentionArgs._fields)
    key_cache, value_cache = op_views(meta(*kv_cache_shape(config, 64), dtype=kv_cache_dtype(config)), config)
    args = AttentionArgs(
        **{
            **nothing,
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "query_start_loc": meta(REQUESTS + 1),
            "seq_lens": meta(REQUESTS),
            "block_table": meta(REQUESTS, 256),
            "output": meta(REQUESTS, 32, 128, dtype=torch.bfloat16),
            "plan": [meta(*launch.plan_shape(config, REQUESTS, REQUESTS, query.device))],
            "config": config.encode(),
        }
    )  # type: ignore[arg-type]
    backend = TritonAttentionBackend()
    calls = calls_into_vattn(lambda: backend.attention(args, config))
    launch.runs.cache_clear()
    assert launches == 2 * ["decode_kernel", "reduce_kernel"]
    assert len(calls) <= 40, calls
