"""KV transfer: round trips, and hooks in eager and compiled models."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

import vattn
from tests.kv_transfer.kv_transfer_support import BLOCK, Setup, Stack, make_layer
from vattn.cache.layout import op_views
from vattn.cache.stored_rows import stored_views
from vattn.errors import BlockError, CacheError, ConfigError, GraphContractError
from vattn.kv_transfer import HostMemoryConnector, KVTransfer, TransferRequest, block_keys
from vattn.kv_transfer.pages import gather_pages, page_bytes, scatter_pages
from vattn.quantization.formats import KV_FORMATS

pytestmark = pytest.mark.usefixtures("detached")


LAYOUTS = {
    "nhd": {},
    "hnd": {"kv_cache_layout": "HND"},
    "unequal": {"head_size_v": 24},
    "unequal_hnd": {"head_size_v": 24, "kv_cache_layout": "HND"},
}


PLAIN = [name for name, fmt in KV_FORMATS.items() if not fmt.packed]


def random_bytes(storage):
    storage.view(-1).view(torch.uint8).random_(256)


@pytest.mark.parametrize(
    ("layout", "connector"),
    [("nhd", "host"), ("hnd", "file"), ("unequal", "file"), ("unequal_hnd", "host")],
    indirect=["connector"],
)
@pytest.mark.parametrize("cache_dtype", [*PLAIN, "int4_per_token_head"])
def test_round_trips_are_bit_equal(cache_dtype, layout, connector):
    model = Stack(make_layer(0, cache_dtype, **LAYOUTS[layout]), make_layer(1, cache_dtype, **LAYOUTS[layout]))
    cache = vattn.allocate_kv_cache(model, num_blocks=9, dtype=torch.float32)
    transfer = KVTransfer(model, cache, connector)
    for storage in cache.kv_caches:
        random_bytes(storage)
    before = [
        views_as_bytes(storage, layer.config) for storage, layer in zip(cache.kv_caches, model.layers, strict=True)
    ]
    keys = block_keys(range(3 * BLOCK), BLOCK)
    transfer.offload("a", keys, [5, 1, 7])
    for storage in cache.kv_caches:
        storage.view(-1).view(torch.uint8).bitwise_not_()
    assert transfer.find([*keys, "unknown"]) == 3
    transfer.reload("a", keys, [2, 8, 3])
    for storage, layer, old in zip(cache.kv_caches, model.layers, before, strict=True):
        for new, then in zip(views_as_bytes(storage, layer.config), old, strict=True):
            expected = then.bitwise_not()
            expected[[2, 8, 3]] = then[[5, 1, 7]]
            assert torch.equal(new, expected)
    transfer.detach()


def views_as_bytes(storage, config):
    parts = [
        part for rows in stored_views(*op_views(storage.clone(), config), config) for part in rows if part is not None
    ]
    return [part.contiguous().view(torch.uint8).flatten(1) for part in parts]


@pytest.mark.parametrize("shape", [(2, 5, 3, 1, 3), (5, 21), (5, 4, 6)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_pages_of_any_size(shape, dtype):
    storage = torch.empty(shape, dtype=dtype)
    random_bytes(storage)
    before = storage.view(torch.uint8).clone()
    pages = gather_pages(storage, torch.tensor([4, 0]))
    assert pages.shape == (2, page_bytes(storage)) and pages.dtype == torch.uint8
    axis = 1 if len(shape) == 5 else 0
    blocks = before.movedim(axis, 0).flatten(1)
    assert torch.equal(pages, blocks[[4, 0]])
    scatter_pages(storage, torch.tensor([1, 3]), pages)
    blocks = blocks.clone()
    blocks[[1, 3]] = blocks[[4, 0]]
    assert torch.equal(storage.view(torch.uint8).movedim(axis, 0).flatten(1), blocks)
    # Rows that do not start on a word, as a connector may return them.
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), pages.flatten()])[1:].view(pages.shape)
    scatter_pages(storage, torch.tensor([2, 0]), odd)
    assert torch.equal(gather_pages(storage, torch.tensor([2, 0])), pages)


def check_prefix_continues(setup, forward=None):
    """Save a prefix of three blocks in the step that computes it, load it elsewhere, and continue: equal bits."""
    prefix, rest = torch.randn(3 * BLOCK, 64), torch.randn(5, 64)
    keys = tuple(block_keys(range(3 * BLOCK), BLOCK))
    saves = [TransferRequest("first", keys, (4, 9, 2))]
    _, step = setup.run(prefix, [24], [24], [[4, 9, 2]], forward, saves=saves)
    assert not setup.transfer.wait_for_saves() and not step.failed
    expected, _ = setup.run(rest, [5], [29], [[4, 9, 2, 6]], forward)
    setup.poison()
    loads = [TransferRequest("b", keys, (7, 1, 11))]
    out, step = setup.run(rest, [5], [29], [[7, 1, 11, 3]], forward, loads=loads)
    assert not step.failed and torch.equal(out.float(), expected.float())
    return out


def test_a_prefix_is_saved_evicted_loaded_and_continued_with_equal_bits(connector):
    check_prefix_continues(Setup(connector))


def test_differential_layers_save_and_load_their_blocks():
    lambdas = {f"lambda_{name}": torch.randn(16) / 4 for name in ("q1", "k1", "q2", "k2")}
    config = vattn.CacheConfig(BLOCK)
    layers = (
        vattn.DifferentialAttention(
            4, 16, 0.25, num_kv_heads=2, lambda_init=0.5, cache_config=config, prefix=f"layers.{index}", **lambdas
        )
        for index in range(2)
    )
    check_prefix_continues(Setup(HostMemoryConnector("1MiB"), Stack(*layers)))


def test_without_a_connector_the_graph_has_no_transfer_op_and_with_one_it_is_one_graph():
    setup = Setup(HostMemoryConnector("1MiB"), Stack(make_layer(0), make_layer(1)))
    setup.transfer.detach()
    for attached in (False, True):
        torch._dynamo.reset()
        if attached:
            setup.transfer = KVTransfer(setup.model, setup.cache, HostMemoryConnector("1MiB"))
        backend = EagerAndRecordGraphs()
        compiled = vattn.compile(setup.model, backend=backend)
        for tokens in (6, 9, 17):
            setup.run(torch.randn(tokens, 64), [tokens - 2, 2], [tokens - 2, 12], [[1, 2, 3], [4, 5]], compiled)
        (graph,) = backend.graphs
        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        for op in ("kv_transfer_wait", "kv_transfer_save"):
            assert sum(op in call for call in calls) == (2 if attached else 0)


def test_equal_layers_share_one_graph_with_a_connector_too():
    setup, backend = Setup(HostMemoryConnector("1MiB"), Stack(make_layer(0), make_layer(1))), EagerAndRecordGraphs()
    torch._dynamo.reset()
    vattn.compile_regions(setup.model.layers, backend=backend)
    setup.run(torch.randn(6, 64), [4, 2], [4, 12], [[1], [4, 5]])
    assert len(backend.graphs) == 1


def test_a_compiler_that_copies_the_cache_is_refused():
    setup = Setup(HostMemoryConnector("1MiB"), Stack(make_layer()))
    forward = torch.compile(setup.model, backend="aot_eager", fullgraph=True)
    with pytest.raises(GraphContractError, match="the compiler copied it"):
        setup.run(torch.randn(6, 64), [4, 2], [4, 12], [[1], [4, 5]], forward)


def test_a_cache_that_was_bound_again_is_refused():
    setup = Setup(HostMemoryConnector("1MiB"))
    vattn.allocate_kv_cache(setup.model, num_blocks=12, dtype=torch.float32)
    with pytest.raises(GraphContractError, match="bound again"):
        setup.run(torch.randn(2, 64), [1, 1], [1, 1], [[1], [2]])
    with pytest.raises(CacheError, match=r"'layers\.0' is bound to another storage"):
        KVTransfer(setup.model, setup.cache, HostMemoryConnector("1MiB"))


def test_detaching_twice_leaves_the_next_connector_alone():
    setup = Setup(HostMemoryConnector("1MiB"))
    old, keys = setup.transfer, tuple(block_keys(range(8), BLOCK))
    old.detach()
    new = setup.transfer = KVTransfer(setup.model, setup.cache, HostMemoryConnector("1MiB"))
    old.detach()
    setup.run(torch.randn(8, 64), [8], [8], [[1]], saves=[TransferRequest("a", keys, (1,))])
    assert new.wait_for_saves() == {} and new.find(keys) == 1
    new.detach()


def test_blocks_of_sinks_are_not_written(detached):
    config = vattn.CacheConfig(BLOCK)
    layer = vattn.StaticSinkAttention(4, 16, 0.25, num_kv_heads=2, cache_config=config, sink_len=BLOCK, prefix="sink")
    layer.sink_key.normal_(), layer.sink_value.normal_()
    cache = vattn.allocate_kv_cache(layer, num_blocks=6, dtype=torch.float32)
    transfer = KVTransfer(layer, cache, HostMemoryConnector("1MiB"))
    keys = block_keys(range(2 * BLOCK), BLOCK)
    transfer.offload("a", keys, [2, 3])
    before = cache.kv_caches[0].clone()
    with pytest.raises(BlockError, match=r"block 1.*2 to 5"):
        transfer.reload("b", keys, [1, 4])
    assert torch.equal(cache.kv_caches[0], before)
    transfer.reload("b", keys, [4, 5])
    transfer.detach()


def test_keys_tell_prefixes_apart():
    tokens = list(range(40))
    keys = block_keys(tokens, BLOCK)
    assert len(keys) == 5 and len(set(keys)) == 5
    assert block_keys(tokens[:39], BLOCK) == keys[:4]
    assert block_keys([99, *tokens[1:]], BLOCK)[1] != keys[1], "a key depends on all tokens before"
    assert block_keys(tokens, BLOCK, salt="adapter") != keys and block_keys(tokens, 4)[1] != keys[0]
    assert block_keys([1, 23], 2) != block_keys([12, 3], 2)
    salts = "", "1", 1, b"1", "b'1'", 2**70, "\ud800"
    assert len({block_keys(tokens, BLOCK, salt)[0] for salt in salts}) == len(salts)
    with pytest.raises(ConfigError, match="block_size=0"):
        block_keys(tokens, 0)
    for salt in (None, True, 1.5, torch.zeros(9)):
        with pytest.raises(ConfigError, match="text, bytes or an integer"):
            block_keys(tokens, BLOCK, salt)
    for parent in ("", "ab", "x" * 64, b"a" * 64, keys[0].upper() + "\n"):
        with pytest.raises(ConfigError, match="a key of block_keys"):
            block_keys(tokens, BLOCK, parent=parent)
    with pytest.raises(ConfigError, match="with a parent"):
        block_keys(tokens, BLOCK, "tenant", parent=keys[0])


class Quantised(nn.Module):
    """An attention layer and an FP8 quantisation of its output."""

    def __init__(self):
        super().__init__()
        self.attn = make_layer()
        self.register_buffer("scale", torch.tensor([0.02]))

    def forward(self, x):
        output = self.attn(x, x[:, :32], x[:, 32:])
        return (output.float() / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def test_output_quantisation_fuses_across_the_hooks():
    setup = Setup(HostMemoryConnector("1MiB"), Quantised())
    forward = vattn.compile(setup.model, options=vattn.options(strict=True))
    assert check_prefix_continues(setup, forward).dtype == torch.float8_e4m3fn


def test_a_second_pass_in_one_step_transfers_nothing_again():
    setup = Setup(HostMemoryConnector("1MiB"), timeout=5)
    setup.fill()
    old, new = block_keys(range(16), BLOCK), block_keys(range(50, 66), BLOCK)
    setup.transfer.offload("a", old, [1, 2])
    before = [storage.clone() for storage in setup.cache.kv_caches]
    start = time.monotonic()
    loads, saves = [TransferRequest("b", tuple(old), (3, 4))], [TransferRequest("c", tuple(new), (1, 2))]
    with setup.transfer.step(loads, saves) as step:
        for _ in range(2):
            for point in setup.transfer.points:
                setup.transfer.before_layer(point)
                setup.transfer.after_layer(point)
            for storage in setup.cache.kv_caches:
                storage[:, 1:3].zero_()
    assert not step.failed and setup.transfer.wait_for_saves() == {} and time.monotonic() - start < 4
    setup.transfer.reload("d", new, [5, 6])
    for storage, then in zip(setup.cache.kv_caches, before, strict=True):
        assert torch.equal(storage[:, [5, 6]], then[:, [1, 2]]) and torch.equal(storage[:, [3, 4]], then[:, [1, 2]])
