"""Connectors: files, host memory, and which model their blocks belong to."""

from __future__ import annotations

import copy
import json
import os
import pickle

import pytest
import torch

import vattn
from tests.kv_transfer.kv_transfer_support import BLOCK, Setup, Stack, make_layer
from vattn.errors import CacheError, ConfigError, TransferError
from vattn.kv_transfer import FileConnector, HostMemoryConnector, KVTransfer, TransferRequest, block_keys

pytestmark = pytest.mark.usefixtures("detached")


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
