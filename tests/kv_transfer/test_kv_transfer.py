"""KV transfer: round trips, hooks in eager and compiled models, and connectors that misbehave."""

from __future__ import annotations

import copy
import json
import os
import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

import vattn
from vattn.cache.block_pool import BlockPool, BlockTable
from vattn.cache.layout import op_views
from vattn.cache.stored_rows import stored_views
from vattn.errors import BlockError, CacheError, ConfigError, GraphContractError, SignatureError, TransferError
from vattn.kv_transfer import FileConnector, HostMemoryConnector, KVTransfer, TransferRequest, block_keys
from vattn.kv_transfer.jobs import LoadJob, SaveJob
from vattn.kv_transfer.pages import gather_pages, page_bytes, scatter_pages
from vattn.layers.kv_transfer_utils import maybe_transfer_kv_layer
from vattn.ops import kv_transfer_points as registered
from vattn.quantization.formats import KV_FORMATS

BLOCK = 8
LAYOUTS = {
    "nhd": {},
    "hnd": {"kv_cache_layout": "HND"},
    "unequal": {"head_size_v": 24},
    "unequal_hnd": {"head_size_v": 24, "kv_cache_layout": "HND"},
}


def make_layer(index=0, cache_dtype="auto", kv_cache_layout="NHD", head_size_v=None, **changes):
    quantised = cache_dtype.startswith("fp8")
    return vattn.Attention(
        4,
        16,
        0.25,
        num_kv_heads=2,
        head_size_v=head_size_v,
        cache_config=vattn.CacheConfig(BLOCK, cache_dtype, kv_cache_layout=kv_cache_layout),
        quant_config=vattn.QuantConfig(k_scale="unit", v_scale="unit") if quantised else None,
        prefix=f"layers.{index}",
        **changes,
    )


class Stack(nn.Module):
    """Layers in a row: each attends with what the one before it returned as query, key and value."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers or (make_layer(0), make_layer(1), make_layer(2)))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x[:, :32], x[:, 32:])
        return x


ATTACHED = []
"""Setups that the fixture `detached` detaches."""


class Setup:
    """A stack of three layers with a cache of 12 blocks, and a connector."""

    def __init__(self, connector, model=None, **options):
        self.model = model or Stack()
        self.cache = vattn.allocate_kv_cache(self.model, num_blocks=12, dtype=torch.float32)
        self.builder = vattn.AttentionMetadataBuilder(4, 64, 64, BLOCK, layers=self.model)
        self.connector = connector
        self.transfer = KVTransfer(self.model, self.cache, connector, **options)
        self.pool = BlockPool(self.cache.num_blocks)
        ATTACHED.append(self)

    @torch.no_grad()
    def run(self, x, query_lens, seq_lens, tables, forward=None, loads=(), saves=()):
        metadata = self.builder.build(query_lens, seq_lens, tables)
        with self.transfer.step(loads, saves) as step, vattn.forward_context(metadata):
            out = (self.model if forward is None else forward)(x)
        return out, step

    def run_hooks(self, loads=(), saves=()):
        """Run the hooks of a step without its model."""
        with self.transfer.step(loads, saves) as step:
            for point in self.transfer.points:
                self.transfer.before_layer(point)
                self.transfer.after_layer(point)
        return step

    def run_other_hooks(self, done):
        """Run the hooks of all layers but one within a step."""
        for point in self.transfer.points:
            if point.layer_name != done:
                self.transfer.before_layer(point)
                self.transfer.after_layer(point)

    def fill(self):
        for storage in self.cache.kv_caches:
            storage.normal_()

    def holds(self, blocks, others):
        """Whether blocks have the content of others in every layer."""
        return all(torch.equal(storage[:, blocks], storage[:, others]) for storage in self.cache.kv_caches)

    def poison(self):
        for storage in self.cache.kv_caches:
            storage.view(torch.uint8).fill_(0xFF)


PLAIN = [name for name, fmt in KV_FORMATS.items() if not fmt.packed]


@pytest.fixture(autouse=True)
def detached():
    yield
    while ATTACHED:
        ATTACHED.pop().transfer.detach()
    left = [*registered._by_address, *registered.by_name]
    registered._by_address.clear()
    registered.by_name.clear()
    assert not left, "a test left a KVTransfer attached"


@pytest.fixture(params=["host", "file"])
def connector(request, tmp_path):
    return HostMemoryConnector("1MiB") if request.param == "host" else FileConnector(tmp_path)


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


class Bad(HostMemoryConnector):
    """Does something wrong for requests named "bad", at the second layer."""

    def __init__(self, how):
        super().__init__("1MiB")
        self.how, self.release = how, threading.Event()

    def act(self, method, layer_name, request):
        if request.request_id != "bad" or layer_name != "layers.1":
            return None
        if self.how == f"raises in {method}":
            raise OSError("the disk is gone")
        if self.how == f"hangs in {method}":
            self.release.wait(20)
        return self.how

    def wait_for_layer_load(self, layer_name, request):
        how = self.act("load", layer_name, request)
        pages = torch.cat(super().wait_for_layer_load(layer_name, request))
        return {
            "another shape": pages[:, :-8],
            "too few": pages[:1],
            "another dtype": pages.view(torch.int8),
            "nothing": None,
            "meta": torch.empty(pages.shape, dtype=torch.uint8, device="meta"),
        }.get(how, pages)

    def page_buffer(self, layer_name, request):
        self.act("buffer", layer_name, request)
        pages = super().page_buffer(layer_name, request)
        return pages[0][:1] if self.how == "another buffer" and request.request_id == "bad" else pages

    def save_kv_layer(self, layer_name, request, pages):
        self.act("save", layer_name, request)
        super().save_kv_layer(layer_name, request, pages)

    def finish(self, request, saved, error):
        super().finish(request, saved, error)
        if self.how == "raises in finish" and request.request_id == "bad":
            raise OSError("cannot finish")

    def sound(self):
        """Whether every row is free or has a key, and nothing is held."""
        rows = sorted([*self._free, *self._rows.values()])
        return rows == list(range(self.capacity)) and not +self._readers and not self._loads and not self._saves


LOAD_FAULTS = {
    "raises in load": (OSError, "the disk is gone"),
    "hangs in load": (TransferError, "not loaded within 0.2 s"),
    "another shape": (TransferError, r"\(2, 2040\) on cpu for layer 'layers.1'"),
    "too few": (TransferError, r"returned torch.uint8 \(1, 2048\)"),
    "another dtype": (TransferError, "torch.int8"),
    "nothing": (TransferError, "Bad returned None for layer 'layers.1'"),
    "meta": (TransferError, "on meta"),
    "raises in finish": (OSError, "cannot finish"),
}


@pytest.mark.parametrize("how", LOAD_FAULTS)
def test_a_load_that_fails_fails_its_request_alone_and_leaks_nothing(how):
    bad = Bad("nothing wrong yet")
    setup = Setup(bad, Stack(*(make_layer(i) for i in range(3))), timeout=0.2)
    keys = {name: tuple(block_keys(range(start, start + 16), BLOCK)) for name, start in (("bad", 0), ("good", 500))}
    x = torch.randn(36, 64)
    tables = {}
    for name in keys:
        table = BlockTable(setup.pool, BLOCK)
        table.append(16)
        tables[name] = table
    before = {name: table.blocks[:] for name, table in tables.items()}
    saves = [TransferRequest(name, keys[name], tuple(before[name])) for name in keys]
    setup.run(x[:32], [16, 16], [16, 16], list(before.values()), saves=saves)
    assert setup.transfer.wait_for_saves() == {}
    tables["good"].append(4)
    expected, _ = setup.run(x[32:], [4], [20], [tables["good"].blocks])
    for table in tables.values():
        table.free()
    setup.poison()

    bad.how = how
    for table in tables.values():
        table.append(20)
    loads = [TransferRequest(name, keys[name], tuple(table.blocks[:2])) for name, table in tables.items()]
    both = torch.cat([torch.randn(4, 64), x[32:]])
    start = time.monotonic()
    out, step = setup.run(both, [4, 4], [20, 20], [t.blocks for t in tables.values()], loads=loads)
    assert time.monotonic() - start < 10
    kind, text = LOAD_FAULTS[how]
    assert set(step.failed) == {"bad"}
    with pytest.raises(kind, match=text):
        raise step.failed["bad"]
    assert torch.equal(out[4:], expected)
    bad.release.set()
    for job in step.loads.values():
        assert job.join(10)
    assert bad.sound()
    for table in tables.values():
        table.free()
    setup.pool.check()
    assert setup.pool.num_used == 0


SAVE_FAULTS = {
    "raises in save": (OSError, "the disk is gone"),
    "hangs in save": (TransferError, "took too long"),
    "raises in buffer": (OSError, "the disk is gone"),
    "another buffer": (TransferError, r"returned torch.uint8 \(1, 2048\)"),
    "raises in finish": (OSError, "cannot finish"),
}


@pytest.mark.parametrize("how", SAVE_FAULTS)
def test_a_save_that_fails_changes_no_output_and_the_others_are_kept(how):
    bad = Bad(how)
    setup = Setup(bad, timeout=0.2)
    keys = {name: tuple(block_keys(range(start, start + 16), BLOCK)) for name, start in (("bad", 0), ("good", 500))}
    x = torch.randn(32, 64)
    expected, _ = setup.run(x, [16, 16], [16, 16], [[1, 2], [3, 4]])
    saves = [TransferRequest("bad", keys["bad"], (1, 2)), TransferRequest("good", keys["good"], (3, 4))]
    out, _ = setup.run(x, [16, 16], [16, 16], [[1, 2], [3, 4]], saves=saves)
    assert torch.equal(out, expected)
    failed = setup.transfer.wait_for_saves()
    kind, text = SAVE_FAULTS[how]
    assert set(failed) == {"bad"}
    with pytest.raises(kind, match=text):
        raise failed["bad"]
    bad.release.set()
    assert setup.transfer.find(keys["good"]) == 2
    if how != "raises in finish":
        assert setup.transfer.find(keys["bad"]) == 0
    deadline = time.monotonic() + 10
    while not bad.sound() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert bad.sound()


def test_cancel_in_the_middle_of_a_step(monkeypatch):
    bad = Bad("cancels")
    setup = Setup(bad)
    keys = tuple(block_keys(range(16), BLOCK))
    setup.fill()
    setup.transfer.offload("a", keys, [1, 2])
    seen = [storage[:, [5, 6]].clone() for storage in setup.cache.kv_caches]
    cancelled, after_layer = [], setup.transfer.after_layer

    def cancel(point):
        after_layer(point)
        if not cancelled:
            cancelled.append(setup.transfer.cancel("bad"))

    monkeypatch.setattr(setup.transfer, "after_layer", cancel)
    new = tuple(block_keys(range(100, 116), BLOCK))
    loads, saves = [TransferRequest("bad", keys, (5, 6))], [TransferRequest("bad", new, (1, 2))]
    _, step = setup.run(torch.randn(4, 64), [4], [20], [[5, 6, 7]], loads=loads, saves=saves)
    assert cancelled == [True] and "cancelled" in str(step.failed["bad"])
    assert "cancelled" in str(setup.transfer.wait_for_saves()["bad"])
    assert step.loads["bad"].join(10)
    first, second, third = setup.cache.kv_caches
    assert torch.equal(first[:, [5, 6]], first[:, [1, 2]]), "the first layer was loaded before"
    assert torch.equal(second[:, [5, 6]], seen[1]) and torch.equal(third[:, [5, 6]], seen[2])
    assert setup.transfer.find(new) == 0 and setup.transfer.find(keys) == 2
    assert bad.sound() and not setup.transfer.cancel("bad")


def test_a_model_that_raises_ends_its_transfers():
    bad = Bad("")
    setup = Setup(bad)
    keys = tuple(block_keys(range(16), BLOCK))
    setup.transfer.offload("a", keys, [1, 2])
    new = tuple(block_keys(range(100, 116), BLOCK))
    with pytest.raises(ZeroDivisionError):
        with setup.transfer.step([TransferRequest("a", keys, (3, 4))], [TransferRequest("b", new, (1, 2))]):
            raise ZeroDivisionError
    assert isinstance(setup.transfer.wait_for_saves()["b"], ZeroDivisionError)
    assert setup.transfer.find(new) == 0
    with setup.transfer.step(loads=[TransferRequest("a", keys, (3, 4))]) as step:
        pass
    assert "ended without layer layers.0, layers.1, layers.2" in str(step.failed["a"])
    assert step.loads["a"].join(10) and bad.sound()


@pytest.mark.parametrize("wrong", ["host", HostMemoryConnector, object()])
def test_what_is_no_connector_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"without attach|is a class"):
        Setup(wrong)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created: "):
        Setup(FileConnector(tmp_path / "file"))


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "other key", "other model", "no checksum", "gone"])
def test_a_damaged_file_is_a_miss_and_changes_nothing(damage, tmp_path):
    setup = Setup(FileConnector(tmp_path))
    setup.fill()
    keys = block_keys(range(24), BLOCK)
    setup.transfer.offload("a", keys, [1, 2, 3])
    file = setup.connector.path(keys[1])
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "other key":
        file.write_bytes(setup.connector.path(keys[0]).read_bytes())
    elif damage in ("other model", "no checksum"):
        name = b"fingerprint" if damage == "other model" else b"sha256"
        at = content.index(b'"' + name + b'":"') + len(name) + 4
        file.write_bytes(content[:at] + (b"0" if content[at : at + 1] != b"0" else b"1") + content[at + 1 :])
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes({"cut": content[:-7], "empty": b"", "flipped": flipped}[damage])
    assert setup.transfer.find(keys) == 1
    before = [storage.clone() for storage in setup.cache.kv_caches]
    with pytest.raises(TransferError, match="1 of 3 files of request 'b' are missing or damaged"):
        setup.transfer.reload("b", keys, [5, 6, 7])
    assert all(torch.equal(old, new) for old, new in zip(before, setup.cache.kv_caches, strict=True))
    setup.transfer.offload("c", keys, [1, 2, 3])
    assert setup.transfer.find(keys) == 3, "saving again mends the file"


def test_files_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    setup = Setup(FileConnector(tmp_path))
    keys = block_keys(range(16), BLOCK)

    def no_space(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(TransferError, match="blocks of request 'a' cannot be written: no space left"):
        setup.transfer.offload("a", keys, [1, 2])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.json"]


def test_files_are_found_by_another_process_of_the_same_model_only(tmp_path):
    first = Setup(FileConnector(tmp_path))
    first.cache.kv_caches[0].normal_()
    keys = block_keys(range(16), BLOCK)
    first.transfer.offload("a", keys, [1, 2])
    first.transfer.detach()
    second = Setup(FileConnector(tmp_path), Stack())
    assert second.transfer.find(keys) == 2
    second.transfer.reload("b", keys, [3, 4])
    assert torch.equal(second.cache.kv_caches[0][:, [3, 4]], first.cache.kv_caches[0][:, [1, 2]])
    second.transfer.detach()
    for other, options in (
        (Stack(make_layer(0), make_layer(1)), {}),
        (Stack(*(make_layer(i, kv_cache_layout="HND") for i in range(3))), {}),
        (Stack(), {"namespace": "fine-tuned"}),
    ):
        third = Setup(FileConnector(tmp_path), other, **options)
        assert third.transfer.find(keys) == 0
        third.transfer.detach()


def other_weights(model):
    model.mix.mul_(2)


def other_hooks(model):
    model.layers[1].register_forward_hook(lambda module, args, out: out * 2)


def other_attribute(model):
    model.adapters = {"active": ["b"]}


@pytest.mark.parametrize("change", [other_weights, other_hooks, other_attribute])
def test_no_block_of_another_model_is_loaded(tmp_path, change, caplog):
    """Two models of equal layout share a folder; one is changed while it is attached, one before."""
    keys = block_keys(range(16), BLOCK)
    first, model = Setup(FileConnector(tmp_path), adapted()), adapted()
    first.transfer.offload("a", keys, [1, 2])
    assert first.transfer.find(keys) == 2
    with torch.no_grad():
        change(first.model)
        change(model)
    assert first.transfer.find(keys) == 0 and "the model has changed since" in caplog.text
    for refused in (first.transfer.offload, first.transfer.reload):
        with pytest.raises(TransferError, match="the model has changed since"):
            refused("b", keys, [3, 4])
    requests = [TransferRequest("c", tuple(keys), (5, 6))], [TransferRequest("d", tuple(keys), (1, 2))]
    _, step = first.run(torch.randn(4, 64), [4], [20], [[5, 6, 7]], loads=requests[0], saves=requests[1])
    assert "has changed" in str(step.failed["c"]) and "has changed" in str(first.transfer.wait_for_saves()["d"])
    first.transfer.detach()
    second = Setup(FileConnector(tmp_path), model)
    assert second.transfer.fingerprint != first.transfer.fingerprint and second.transfer.find(keys) == 0
    second.transfer.detach()
    again = Setup(FileConnector(tmp_path), adapted())
    assert again.transfer.fingerprint == first.transfer.fingerprint and again.transfer.find(keys) == 2
    again.transfer.detach()


def adapted():
    model = Stack()
    model.mix, model.adapters = torch.nn.Parameter(torch.arange(9.0)), {"active": ["a"]}
    return model


def test_a_folder_names_its_model(tmp_path):
    first = Setup(FileConnector(tmp_path))
    first.transfer.detach()
    (folder,) = tmp_path.iterdir()
    owner = json.loads((folder / "model.json").read_text())
    assert owner == {"fingerprint": first.transfer.fingerprint, "page_bytes": first.transfer.page_bytes}
    (folder / "model.json").write_text(json.dumps(owner | {"fingerprint": "0" * 64}))
    with pytest.raises(ConfigError, match="names another model"):
        Setup(FileConnector(tmp_path))


def test_scales_are_part_of_what_bytes_mean(tmp_path):
    prints = set()
    for scale in (0.5, 0.25):
        layer = make_layer(cache_dtype="fp8")
        layer.k_scale.fill_(scale)
        cache = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
        transfer = KVTransfer(layer, cache, FileConnector(tmp_path))
        prints.add(transfer.fingerprint)
        transfer.detach()
    assert len(prints) == 2
    config = vattn.CacheConfig(BLOCK, "fp8", calculate_kv_scales=True)
    layer = vattn.Attention(2, 16, 0.25, cache_config=config)
    cache = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    with pytest.raises(CacheError, match="has not calculated its scales yet"):
        KVTransfer(layer, cache, FileConnector(tmp_path))


def test_host_memory_evicts_the_least_recently_used():
    setup = Setup(HostMemoryConnector(4 * 3 * 2048))
    assert setup.connector.capacity == 4
    a, b, c = (block_keys(range(start, start + 16), BLOCK) for start in (0, 100, 200))
    setup.transfer.offload("a", a, [1, 2])
    setup.transfer.offload("b", b, [3, 4])
    assert setup.transfer.find(a) == 2
    setup.transfer.offload("c", c[:1], [5])
    assert [setup.transfer.find(keys) for keys in (a, b, c)] == [2, 1, 1], "the end of a prefix goes first"
    setup.transfer.offload("c", c, [5, 6])
    assert [setup.transfer.find(keys) for keys in (a, b, c)] == [1, 1, 2], "finding is using, and a was found first"
    with pytest.raises(TransferError, match="5 blocks of request 'd' to save, and room for 4"):
        setup.transfer.offload("d", block_keys(range(500, 540), BLOCK), [1, 2, 3, 4, 5])
    assert setup.connector.num_blocks == 4, "a save that does not fit evicts nothing"
    with pytest.raises(TransferError, match="1 of 2 blocks of request 'b' are not held"):
        setup.transfer.reload("b", b, [1, 2])


def test_what_a_load_reads_is_not_evicted():
    bad = Bad("hangs in load")
    bad.memory = 2 * 3 * 2048
    setup = Setup(bad)
    keys, other = (block_keys(range(start, start + 16), BLOCK) for start in (0, 100))
    setup.fill()
    setup.transfer.offload("a", keys, [1, 2])
    request = TransferRequest("bad", tuple(keys), (5, 6))
    with setup.transfer.step(loads=[request]) as step:
        job = step.loads["bad"]
        setup.transfer.before_layer(setup.transfer.points[0])
        save = TransferRequest("b", tuple(other), (3, 4))
        with pytest.raises(TransferError, match="room for 0"):
            bad.page_buffer("layers.0", save)
        bad.release.set()
        for point in setup.transfer.points[1:]:
            setup.transfer.before_layer(point)
    assert not step.failed and job.finished
    assert setup.holds([5, 6], [1, 2])


def test_the_decorator_takes_the_name_by_position_or_keyword():
    setup = Setup(HostMemoryConnector("1MiB"))
    calls = []

    @maybe_transfer_kv_layer
    def attend(x, layer_name="layers.2", *, factor=2):
        calls.append(layer_name)
        return x * factor

    keys = tuple(block_keys(range(8), BLOCK))
    setup.cache.kv_caches[1][:, 1].normal_()
    with setup.transfer.step(saves=[TransferRequest("a", keys, (1,))]):
        assert attend(3, "layers.0") == 6
        assert attend(3, layer_name="layers.1", factor=3) == 9
        assert attend(3) == 6
    assert setup.transfer.wait_for_saves() == {} and setup.transfer.find(keys) == 1
    with setup.transfer.step(loads=[TransferRequest("a", keys, (7,))]) as step:
        compiled = vattn.compile(lambda x, name: attend(x, layer_name=name) + 1, backend="eager")
        for name in ("layers.0", "layers.1", "layers.2"):
            assert compiled(torch.ones(3), name).tolist() == [3, 3, 3]
    assert not step.failed
    assert torch.equal(setup.cache.kv_caches[1][:, 7], setup.cache.kv_caches[1][:, 1])
    assert attend(3, layer_name="unknown") == 6
    setup.transfer.detach()
    assert attend(3, layer_name="layers.0") == 6
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        attend(layer_name="layers.0")


@pytest.mark.slow
def test_the_decorator_orders_readers_of_the_storage_and_of_the_layers_own_tensors():
    setup = Setup(HostMemoryConnector("1MiB"))
    layer = setup.model.layers[0]

    @maybe_transfer_kv_layer
    def total(layer_name):
        return layer.kv_cache[:, 7].sum(), layer.key_cache[7].sum() + layer.value_cache[7].sum()

    keys = tuple(block_keys(range(8), BLOCK))
    setup.cache.kv_caches[0][:, 1].normal_()
    wanted = setup.cache.kv_caches[0][:, 1].sum()
    setup.transfer.offload("a", keys, [1])
    backend = EagerAndRecordGraphs()
    with torch.no_grad():
        for how in (backend, "inductor"):
            torch._dynamo.reset()
            setup.cache.kv_caches[0][:, 7].zero_()
            with setup.transfer.step(loads=[TransferRequest("a", keys, (7,))]):
                for found in torch.compile(total, backend=how, fullgraph=True)("layers.0"):
                    torch.testing.assert_close(found, wanted)
                setup.run_other_hooks("layers.0")
    (wait,) = (node for node in backend.graphs[0].graph.nodes if "kv_transfer_wait" in str(node.target))
    assert len({node.name for node in wait.args}) == 3 and all(node.op == "placeholder" for node in wait.args)


def test_the_decorator_finds_the_model_that_is_left_of_two():
    first, second = (Setup(HostMemoryConnector("1MiB")) for _ in range(2))

    @maybe_transfer_kv_layer
    def attend(x, layer_name):
        return x

    with pytest.raises(ConfigError, match=r"two models with connectors have a layer 'layers\.0'"):
        attend(1, "layers.0")
    first.transfer.detach()
    first.transfer.detach()
    keys = tuple(block_keys(range(8), BLOCK))
    with second.transfer.step(saves=[TransferRequest("a", keys, (1,))]):
        for name in second.transfer.page_bytes:
            attend(1, name)
    assert second.transfer.wait_for_saves() == {} and second.transfer.find(keys) == 1
    second.transfer.detach()


def test_detaching_twice_leaves_the_next_connector_alone():
    setup = Setup(HostMemoryConnector("1MiB"))
    old, keys = setup.transfer, tuple(block_keys(range(8), BLOCK))
    old.detach()
    new = setup.transfer = KVTransfer(setup.model, setup.cache, HostMemoryConnector("1MiB"))
    old.detach()
    setup.run(torch.randn(8, 64), [8], [8], [[1]], saves=[TransferRequest("a", keys, (1,))])
    assert new.wait_for_saves() == {} and new.find(keys) == 1
    new.detach()


def test_the_decorator_needs_the_parameter():
    @maybe_transfer_kv_layer
    def collect(*args, layer_name=None):
        return args

    assert collect([1], [2]) == ([1], [2]), "no position gives a name that follows *args"
    with pytest.raises(SignatureError, match="has no parameter"):
        maybe_transfer_kv_layer(lambda *layer_name: None)
    with pytest.raises(SignatureError, match=r"f\(x, name\) has no parameter 'layer_name'"):

        @maybe_transfer_kv_layer
        def f(x, name):
            return x

    assert issubclass(SignatureError, TypeError)


@pytest.mark.parametrize(
    "keys, blocks, text",
    [
        (("a",), (1, 2), "1 keys and 2 block ids"),
        ((), (), "0 keys"),
        (("a", "b"), (3, 3), "a block id twice"),
        (("a", "a"), (3, 4), "a key twice"),
        (("a",), (0,), "block id 0; 0 is the null block"),
    ],
)
def test_wrong_requests(keys, blocks, text):
    with pytest.raises(ConfigError, match=text):
        TransferRequest("r", keys, blocks)


def test_wrong_steps_begin_nothing():
    setup = Setup(HostMemoryConnector("1MiB"))
    one, two = TransferRequest("a", ("k",), (3,)), TransferRequest("b", ("l",), (3,))
    wrong = {
        "block 12": [TransferRequest("a", ("k",), (12,))],
        "block 3 loaded for two requests": [one, two],
        "request 'a' twice": [one, TransferRequest("a", ("l",), (4,))],
    }
    threads = threading.active_count()
    for text, loads in wrong.items():
        with pytest.raises((BlockError, ConfigError), match=text), setup.transfer.step(loads):
            pass
    with setup.transfer.step(), pytest.raises(ConfigError, match="inside another"), setup.transfer.step():
        pass
    assert threading.active_count() == threads
    for timeout in (0, True, "1", float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"timeout={timeout!r}.*seconds above 0"):
            KVTransfer(setup.model, setup.cache, HostMemoryConnector("1MiB"), timeout=timeout)
    with pytest.raises(ConfigError, match=r"layer 'layers\.0' has a connector already"):
        KVTransfer(setup.model, setup.cache, HostMemoryConnector("1MiB"))
    setup.transfer.detach()
    with pytest.raises(ConfigError, match="at least one block"):
        KVTransfer(setup.model, setup.cache, HostMemoryConnector(100))
    with pytest.raises(ConfigError, match="attached to another model"):
        KVTransfer(setup.model, setup.cache, setup.connector, namespace="another")
    assert all(layer.kv_transfer_token is None for layer in setup.model.layers)


def test_a_file_connector_serves_one_model_and_keys_that_are_file_names(tmp_path):
    connector = FileConnector(tmp_path)
    setup = Setup(connector)
    setup.transfer.detach()
    with pytest.raises(ConfigError, match="attached to another model"):
        KVTransfer(setup.model, setup.cache, connector, namespace="another")
    for key in ("", "..", "a/b", "line\n", "k" * 129):
        with pytest.raises(ConfigError, match="letters, digits"):
            connector.find([key])
    os.mkfifo(connector.path("pipe"))
    assert connector.find(["pipe"]) == 0


def test_copies_of_transfers_and_connectors(tmp_path):
    """Memory and running transfers have one owner; a folder may have many."""
    stack = Setup(FileConnector(tmp_path))
    for owner in (HostMemoryConnector("1MiB"), stack.transfer):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(ConfigError, match=f"a copy of a {type(owner).__name__}"):
                copied(owner)
    for copied in (copy.copy, copy.deepcopy, lambda connector: pickle.loads(pickle.dumps(connector))):
        another = copied(stack.connector)
        assert another.folder == tmp_path
        another.attach({"x": 64}, "f" * 64)
    stack.connector.attach(stack.transfer.page_bytes, stack.transfer.fingerprint)


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


def test_pages_that_lie_apart_in_host_memory_are_copied_in_pieces():
    setup = Setup(HostMemoryConnector(7 * 3 * 2048))
    setup.fill()
    a, b, c, d = (
        block_keys(range(start, start + 8 * count), BLOCK) for start, count in ((0, 2), (100, 2), (200, 1), (300, 4))
    )
    for keys, blocks in ((a, [1, 2]), (b, [3, 4]), (c, [5])):
        setup.transfer.offload("r", keys, blocks)
    assert setup.transfer.find(b) == 2 and setup.transfer.find(c) == 1
    # Rows 0 and 1 are evicted, 5 and 6 are free.
    setup.transfer.offload("d", d, [6, 7, 8, 9])
    request = TransferRequest("d", tuple(d), (6, 7, 8, 9))
    assert [len(piece) for piece in setup.connector.wait_for_layer_load("layers.0", request)] == [2, 2]
    setup.connector.finish(request, False, None)
    setup.transfer.reload("d", d, [1, 2, 10, 11])
    assert setup.holds([1, 2, 10, 11], [6, 7, 8, 9])
    # Two of these are held: only the others are written.
    more = block_keys(range(300, 348), BLOCK)
    setup.transfer.offload("e", more, [6, 7, 8, 9, 3, 4])
    setup.transfer.reload("e", more, [1, 2, 10, 11, 5, 6])
    assert setup.holds([5, 6], [3, 4])


def test_cross_attention_is_refused():
    layer = vattn.CrossAttention(4, 16, 0.25, 2, prefix="cross", cache_config=vattn.CacheConfig(BLOCK))
    cache = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    with pytest.raises(CacheError, match="cross attention, layer 'cross'"):
        KVTransfer(layer, cache, HostMemoryConnector("1MiB"))


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


def test_attached_again_a_connector_still_holds_what_it_held(caplog):
    setup = Setup(HostMemoryConnector("1MiB"))
    setup.fill()
    keys = block_keys(range(16), BLOCK)
    setup.transfer.offload("a", keys, [1, 2])
    setup.transfer.detach()
    setup.transfer = KVTransfer(setup.model, setup.cache, setup.connector)
    setup.transfer.reload("b", keys, [3, 4])
    assert setup.holds([3, 4], [1, 2])
    assert setup.transfer.find([["no string"]]) == 0
    assert "cannot list its blocks: ArgumentError" in caplog.text


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


def test_memory_is_given_back_only_when_no_copy_uses_it(monkeypatch, caplog):
    """Copies of a CUDA device, played by events on the CPU."""
    order = []

    class Copy:
        def __init__(self, request_id):
            self.request_id = request_id

        def synchronize(self):
            time.sleep(0.02)
            order.append(f"copied {self.request_id}")

    class Watched(HostMemoryConnector):
        def finish(self, request, saved, error):
            order.append(f"finished {request.request_id}")
            super().finish(request, saved, error)

    for kind, method in ((LoadJob, "_to_device"), (SaveJob, "_to_host")):
        real = getattr(kind, method)

        def issue(job, *arguments, real=real):
            pages = real(job, *arguments)
            pages.arrived = Copy(job.request.request_id)
            return pages

        monkeypatch.setattr(kind, method, issue)
    setup = Setup(Watched("1MiB"))
    keys = tuple(block_keys(range(16), BLOCK))
    with setup.transfer.step(saves=[TransferRequest("cancelled", keys, (1, 2))]):
        setup.transfer.after_layer(setup.transfer.points[0])
        setup.transfer.cancel("cancelled")
    assert "cancelled" in setup.transfer.wait_for_saves()
    assert order[-2:] == ["copied cancelled", "finished cancelled"]
    setup.run_hooks(saves=[TransferRequest("whole", keys, (1, 2))])
    assert setup.transfer.wait_for_saves() == {} and order[-2:] == ["copied whole", "finished whole"]
    with setup.transfer.step(loads=[TransferRequest("load", keys, (3, 4))]) as step:
        while step.loads["load"]._last is None:
            time.sleep(0.001)
        setup.transfer.cancel("load")
    assert step.loads["load"].join(5)
    assert order[-2:] == ["copied load", "finished load"]
    with setup.transfer.step(saves=[TransferRequest("late", (*keys, "another"), (1, 2, 3))]):
        setup.transfer.cancel("late")
    setup.transfer.detach()
    assert "saving request 'late' failed: TransferError: request 'late' was cancelled" in caplog.text


def test_only_blocks_that_are_not_held_are_saved():
    setup = Setup(HostMemoryConnector("1MiB"))
    setup.fill()
    keys = block_keys(range(32), BLOCK)
    setup.transfer.offload("a", [keys[0], keys[2]], [1, 3])
    request = TransferRequest("b", tuple(keys), (1, 2, 3, 4))
    step = setup.run_hooks(saves=[request])
    assert step.saves["b"].request.keys == (keys[1], keys[3]) and step.saves["b"].request.block_ids == (2, 4)
    assert setup.transfer.wait_for_saves() == {}
    setup.transfer.reload("c", keys, [5, 6, 7, 8])
    assert setup.holds(slice(5, 9), slice(1, 5))
    assert not setup.run_hooks(saves=[request]).saves and setup.transfer.wait_for_saves() == {}


@pytest.mark.parametrize("answer", [None, [0, 7], ["a"], [0, 0]])
def test_a_connector_that_names_wrong_blocks_fails_that_save(answer):
    class Wrong(HostMemoryConnector):
        def blocks_to_save(self, request):
            return answer if request.request_id == "bad" else super().blocks_to_save(request)

    setup = Setup(Wrong("1MiB"))
    saves = [TransferRequest("bad", ("a", "b"), (1, 2)), TransferRequest("good", ("c", "d"), (3, 4))]
    setup.run(torch.randn(4, 64), [4], [4], [[1]], saves=saves)
    assert set(setup.transfer.wait_for_saves()) == {"bad"}
    assert setup.transfer.find(("c", "d")) == 2 and setup.transfer.find(("a",)) == 0
