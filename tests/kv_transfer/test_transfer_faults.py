"""KV transfer with connectors that fail, hang or answer nonsense, with cancelled requests and wrong steps."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import vattn
from tests.kv_transfer.kv_transfer_support import BLOCK, Setup, Stack, make_layer
from vattn.cache.block_pool import BlockTable
from vattn.errors import BlockError, CacheError, ConfigError, TransferError
from vattn.kv_transfer import HostMemoryConnector, KVTransfer, TransferRequest, block_keys
from vattn.kv_transfer.jobs import LoadJob, SaveJob

pytestmark = pytest.mark.usefixtures("detached")


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


def test_cross_attention_is_refused():
    layer = vattn.CrossAttention(4, 16, 0.25, 2, prefix="cross", cache_config=vattn.CacheConfig(BLOCK))
    cache = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
    with pytest.raises(CacheError, match="cross attention, layer 'cross'"):
        KVTransfer(layer, cache, HostMemoryConnector("1MiB"))


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
