"""Steps with a shared prefix on a GPU: equal to steps without, eager and in graphs that replay other lengths."""

from __future__ import annotations

import pytest
import torch

import vattn
from tests.support import capture
from vattn.backends import selector

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 64, 16
TABLES = [[1, 3, 2, 9], [1, 3, 5, 6], [1, 3, 7, 8], [1, 3, 4, 10]]
# Each of the two partial results is rounded to the model dtype before they are merged, values and their difference:
# 2^-11 in fp16, 2^-8 in bf16.
CLOSE = {torch.float16: {"rtol": 2e-3, "atol": 2e-3}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2}}


def make_layer(backend: str, size: int = SIZE, dtype: torch.dtype = torch.float16) -> vattn.Attention:
    layer = vattn.Attention(
        HEADS, size, size**-0.5, KV_HEADS, attn_backend=backend, cache_config=vattn.CacheConfig(BLOCK)
    ).cuda()
    for storage in vattn.allocate_kv_cache(layer, num_blocks=12, dtype=dtype, device="cuda").kv_caches:
        storage.copy_(torch.randn(storage.shape, generator=torch.Generator().manual_seed(0)))
    return layer


def inputs(rows: int, size: int = SIZE, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(9)
    return [torch.randn(rows, n * size, generator=made).to(dtype).cuda() for n in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [3, 1, 5, 9]])
@pytest.mark.parametrize("backend", ["TRITON_ATTN", "TORCH_SDPA", "FLASHINFER", "FLASH_ATTN"])
def test_equals_attending_per_request(backend: str, queries: list[int]) -> None:
    problem = selector.get_backend(backend).problem()
    if problem:
        pytest.skip(problem)
    # The kernel that every build of FlashInfer comes with.
    kind = (128, torch.bfloat16) if backend == "FLASHINFER" else (SIZE, torch.float16)
    layer = make_layer(backend, *kind)
    lengths = [40 + count for count in queries]
    results = []
    for options in ({}, {"shared_prefix_len": 0}, {"shared_prefix_len": 32}):
        builder = vattn.AttentionMetadataBuilder(4, 24, 64, BLOCK, "cuda", layers=[layer])
        step = builder.build(queries, lengths, TABLES, **options)
        with torch.no_grad():
            results.append(layer(*inputs(sum(queries), *kind), metadata=step))
    torch.testing.assert_close(results[1], results[0], **CLOSE[kind[1]])
    torch.testing.assert_close(results[2], results[0], **CLOSE[kind[1]])


def test_a_graph_replays_other_prefixes() -> None:
    layer = make_layer("TRITON_ATTN")
    builder = vattn.AttentionMetadataBuilder(4, 24, 64, BLOCK, "cuda", layers=[layer])
    rows = inputs(4)
    step = builder.build([1] * 4, [41, 43, 45, 50], TABLES, shared_prefix_len=16)
    with torch.no_grad():
        for _ in range(2):
            layer(*rows, metadata=step)
        graph, captured = capture(lambda: layer(*rows, metadata=step))
        for shared, lengths in ((32, [41, 43, 45, 50]), (0, [41, 60, 45, 50]), (16, [33, 43, 64, 50])):
            builder.build([1] * 4, lengths, TABLES, shared_prefix_len=shared)
            graph.replay()
            other = vattn.AttentionMetadataBuilder(4, 24, 64, BLOCK, "cuda", layers=[layer])
            expected = layer(*rows, metadata=other.build([1] * 4, lengths, TABLES))
            torch.testing.assert_close(captured, expected, **CLOSE[torch.float16])
