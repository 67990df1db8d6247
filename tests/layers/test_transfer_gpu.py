"""KV transfer and hybrid caches on the GPU: streams of their own, CUDA graphs between hooks, refusal inside of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.cache.test_hybrid_cache import Hybrid, Stack
from vattn.errors import GraphContractError
from vattn.kv_transfer import FileConnector, HostMemoryConnector, KVTransfer, TransferRequest, block_keys

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo", "no_grad")]

BLOCK, WIDTH = 16, 256
KEYS = tuple(block_keys(range(4 * BLOCK), BLOCK))


class Model(nn.Module):
    """Linear layers between attention layers, so that graphs have something to hold."""

    def __init__(self, layers: int = 3, **attention: Any) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.attn = nn.ModuleList(
            vattn.Attention(4, 64, 0.125, num_kv_heads=2, prefix=f"layers.{i}", **attention) for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for qkv, attn, out in zip(self.qkv, self.attn, self.out, strict=True):
            query, key, value = qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
            x = x + out(torch.nn.functional.silu(attn(query, key, value)))
        return x


class Setup:
    def __init__(self, connector: Any, **attention: Any) -> None:
        torch.manual_seed(0)
        self.model = Model(**attention).to("cuda", torch.float16)
        self.cache = vattn.allocate_kv_cache(self.model, num_blocks=32)
        self.builder = vattn.AttentionMetadataBuilder(4, 128, 256, BLOCK, "cuda", layers=self.model)
        self.transfer = KVTransfer(self.model, self.cache, connector)
        self.prefix = torch.randn(4 * BLOCK, WIDTH).to("cuda", torch.float16)
        self.rest = torch.randn(5, WIDTH).to("cuda", torch.float16)

    def step(self, forward: Any, x: Tensor, end: int, table: list[int], **transfers: Any) -> Tensor:
        metadata = self.builder.build([x.shape[0]], [end], [table])
        with self.transfer.step(**transfers) as step, vattn.forward_context(metadata):
            out = forward(x)
        assert not step.failed
        return out.clone()

    def poison(self) -> None:
        for storage in self.cache.kv_caches:
            storage.view(torch.uint8).fill_(0xFF)

    def save_and_continue(self, forward: Any) -> Tensor:
        """Save a prefix in the step that computes it, overwrite it at once, and return what follows from it."""
        self.step(forward, self.prefix, 64, [3, 9, 4, 7], saves=[TransferRequest("a", KEYS, (3, 9, 4, 7))])
        expected = self.step(forward, self.rest, 69, [3, 9, 4, 7, 1])
        self.poison()
        assert self.transfer.wait_for_saves() == {}
        return expected

    def load_and_continue(self, forward: Any) -> Tensor:
        loads = [TransferRequest("b", KEYS, (20, 11, 30, 5))]
        return self.step(forward, self.rest, 69, [20, 11, 30, 5, 2], loads=loads)


CONNECTORS = {"host": lambda folder: HostMemoryConnector("4MiB"), "file": FileConnector}
FORMATS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "hnd": {"cache_config": vattn.CacheConfig(kv_cache_layout="HND")},
    "fp8": {
        "cache_config": vattn.CacheConfig(cache_dtype="fp8"),
        "quant_config": vattn.QuantConfig(k_scale="unit", v_scale="unit"),
    },
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("where", CONNECTORS)
def test_a_prefix_loaded_again_continues_with_equal_bits(where: str, fmt: str, tmp_path: Path) -> None:
    setup = Setup(CONNECTORS[where](tmp_path), **FORMATS[fmt])
    expected = setup.save_and_continue(setup.model)
    assert torch.equal(setup.load_and_continue(setup.model), expected)
    setup.transfer.detach()


def test_each_layer_waits_for_its_own_pages_and_no_copy_overtakes_the_model() -> None:
    setup = Setup(HostMemoryConnector("4MiB"))
    slow = 50_000_000
    torch.cuda._sleep(slow)
    expected = setup.save_and_continue(setup.model)
    loading, _ = setup.transfer._streams
    assert loading is not None and loading != torch.cuda.current_stream()
    with torch.cuda.stream(loading):
        torch.cuda._sleep(slow)
    assert torch.equal(setup.load_and_continue(setup.model), expected)
    setup.poison()
    torch.cuda._sleep(slow)
    assert torch.equal(setup.load_and_continue(setup.model), expected)
    setup.transfer.detach()


def test_pinned_memory_is_read_in_place() -> None:
    setup = Setup(HostMemoryConnector("4MiB"))
    setup.save_and_continue(setup.model)
    connector = setup.transfer.connector
    assert isinstance(connector, HostMemoryConnector) and all(arena.is_pinned() for arena in connector._arenas.values())
    request = TransferRequest("c", KEYS, (1, 2, 3, 4))
    (pages,) = connector.wait_for_layer_load("layers.0", request)
    assert pages.data_ptr() == connector._arenas["layers.0"].data_ptr()
    connector.finish(request, False, None)
    setup.transfer.detach()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_transfer_between_their_cuda_graphs(mode: str) -> None:
    setup = Setup(HostMemoryConnector("4MiB"))
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = vattn.compile(setup.model, mode=mode)
    expected = setup.save_and_continue(compiled)
    for _ in range(4):  # warm-up, recording and replays
        setup.poison()
        assert torch.equal(setup.load_and_continue(compiled), expected)
    assert not counters["graph_break"]
    print(mode, dict(counters["inductor"]))
    setup.transfer.detach()


def test_a_full_capture_is_refused_with_the_reason() -> None:
    setup = Setup(HostMemoryConnector("4MiB"))

    def inputs(step: vattn.AttentionMetadata) -> list[Tensor]:
        return [torch.zeros(step.slot_mapping.shape[0], WIDTH, device="cuda", dtype=torch.float16)]

    with pytest.raises(GraphContractError, match="inside the capture of a full CUDA graph"):
        vattn.CUDAGraphRunner(setup.model, [2], setup.builder, inputs)
    setup.transfer.detach()
    runner = vattn.CUDAGraphRunner(setup.model, [2], setup.builder, inputs)
    step = runner.build([1, 1], [5, 9], [[1], [2]])
    assert runner(setup.rest[:2], metadata=step).shape == (2, WIDTH)


def test_a_hybrid_cache_gives_what_one_table_gives() -> None:
    hybrid = Hybrid(device="cuda")
    requests = [hybrid.request() for _ in range(2)]
    for counts in ([30, 3], [1, 1], [7, 20], [1, 2], [1, 1]):
        hybrid.compare(requests, counts)


def test_a_hybrid_step_replays_in_a_cuda_graph() -> None:
    hybrid = Hybrid(device="cuda", kinds=Stack.KINDS[:4])
    runner = vattn.CUDAGraphRunner(
        hybrid.model, [2], hybrid.builder, lambda step: [torch.zeros(step.slot_mapping.shape[0], 64, device="cuda")]
    )
    requests = [hybrid.request() for _ in range(2)]
    hybrid.compare(requests, [30, 17])
    for _ in range(20):
        for table, plain in requests:
            table.append(1)
            plain.append(1)
        hybrid.poison_free()
        x = torch.randn(2, 64, device="cuda")
        ends = [plain.num_tokens for _, plain in requests]
        rows = [[table.rows[index] for table, _ in requests] for index in range(len(hybrid.cache.groups))]
        replayed = runner(x, metadata=runner.build([1, 1], ends, rows)).clone()
        step = hybrid.plain_builder.build([1, 1], ends, [plain.blocks for _, plain in requests])
        with vattn.forward_context(step):
            torch.testing.assert_close(replayed, hybrid.plain(x), rtol=1e-5, atol=1e-5)
