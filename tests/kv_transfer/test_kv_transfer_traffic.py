"""Random offload, evict, reload and cancel traffic: nothing leaks, and what is loaded gives equal attention output."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import vattn
from vattn.cache.block_pool import BlockPool
from vattn.cache.layout import key_value_views, op_views
from vattn.errors import OutOfBlocksError, TransferError
from vattn.kv_transfer import FileConnector, HostMemoryConnector, KVTransfer, TransferRequest, block_keys

BLOCK, CAPACITY = 8, 6
PREFIXES = [
    list(range(start, start + BLOCK * blocks)) for start, blocks in ((0, 1), (0, 2), (0, 4), (500, 3), (900, 2))
]


def make_model():
    quant = vattn.QuantConfig(k_scale=0.5, v_scale=0.25)
    config = vattn.CacheConfig(BLOCK, "fp8")
    return torch.nn.ModuleList(
        [
            vattn.Attention(2, 8, 0.4, prefix="plain", cache_config=vattn.CacheConfig(BLOCK)),
            vattn.Attention(2, 8, 0.4, prefix="fp8", cache_config=config, quant_config=quant),
            vattn.Attention(2, 8, 0.4, head_size_v=16, prefix="unequal", cache_config=vattn.CacheConfig(BLOCK)),
        ]
    )


MODEL = make_model()
CACHE = vattn.allocate_kv_cache(MODEL, num_blocks=14, dtype=torch.float32)
TWIN = make_model()
TWIN_CACHE = vattn.allocate_kv_cache(TWIN, num_blocks=14, dtype=torch.float32)
BUILDER = vattn.AttentionMetadataBuilder(2, 4, 64, BLOCK, layers=MODEL)
QUERY = torch.randn(2, 16, generator=torch.Generator().manual_seed(3))


def fill(cache, layers, keys, blocks):
    """Write the content that a key stands for into blocks: random values, from the key alone."""
    for layer, storage in zip(layers, cache.kv_caches, strict=True):
        for view in key_value_views(*op_views(storage, layer.config), layer.config):
            for key, block in zip(keys, blocks, strict=True):
                seed = int(hashlib.sha256(f"{key} {layer.prefix} {view.shape[-1]}".encode()).hexdigest()[:12], 16)
                values = torch.randn(view[block].shape, generator=torch.Generator().manual_seed(seed))
                view[block] = values.to(view.dtype)


def poison(cache, blocks):
    for storage in cache.kv_caches:
        place = (slice(None), blocks) if storage.dim() == 5 else blocks
        storage.view(torch.uint8)[place] = 0xFF


@torch.no_grad()
def attend(layers, blocks):
    """Return what every layer makes of the blocks; nothing is written."""
    length = len(blocks) * BLOCK
    step = BUILDER.build([2], [length], [blocks], slot_mapping=[-1, -1])
    values = [QUERY if layer.head_size_v == 8 else torch.zeros(2, 32) for layer in layers]
    return [layer(QUERY, QUERY, value, metadata=step) for layer, value in zip(layers, values, strict=True)]


class Faulty:
    """A connector that does as it should, except where a rule says otherwise."""

    def __init__(self, inner):
        self.inner, self.fault, self.on_call = inner, None, None

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _maybe(self, doing, layer_name, request):
        if self.fault == (doing, layer_name, request.request_id):
            if self.on_call is None:
                raise OSError("gone")
            self.on_call()

    def wait_for_layer_load(self, layer_name, request):
        self._maybe("load", layer_name, request)
        return self.inner.wait_for_layer_load(layer_name, request)

    def save_kv_layer(self, layer_name, request, pages):
        self._maybe("save", layer_name, request)
        self.inner.save_kv_layer(layer_name, request, pages)


class TransferTraffic(RuleBasedStateMachine):
    """Prefixes come and go; what each block should hold is known from its key."""

    folder = None

    @initialize()
    def begin(self):
        per_block = CACHE.bytes_per_block
        self.connector = Faulty(
            FileConnector(self.folder) if self.folder else HostMemoryConnector(CAPACITY * per_block)
        )
        self.transfer = KVTransfer(MODEL, CACHE, self.connector, timeout=20, namespace=str(id(self)))
        self.pool = BlockPool(CACHE.num_blocks)
        self.saved = set()

    def teardown(self):
        if hasattr(self, "transfer"):
            self.transfer.detach()

    def run_step(self, loads, saves, cancel):
        """Run all hooks as a model would; `cancel` names a request and the layer before which it is cancelled."""
        with self.transfer.step(loads, saves) as step:
            for point in self.transfer.points:
                if cancel and cancel[1] == point.layer_name:
                    self.transfer.cancel(cancel[0])
                self.transfer.before_layer(point)
                self.transfer.after_layer(point)
        for job in step.loads.values():
            assert job.join(20)
        return step, self.transfer.wait_for_saves()

    def set_fault(self, doing, request, how, layer):
        self.connector.fault, cancel = None, None
        if how == "raises":
            self.connector.fault = (doing, layer, request)
        elif how == "cancelled":
            cancel = (request, layer)
        return cancel

    @rule(
        prefix=st.sampled_from(PREFIXES),
        how=st.sampled_from(["works", "works", "raises", "cancelled"]),
        layer=st.sampled_from(["plain", "fp8", "unequal"]),
    )
    def offload(self, prefix, how, layer):
        keys = tuple(block_keys(prefix, BLOCK))
        blocks = self.pool.allocate(len(keys))
        fill(CACHE, MODEL, keys, blocks)
        cancel = self.set_fault("save", "r", how, layer)
        request = TransferRequest("r", keys, tuple(blocks))
        nothing_new = not self.connector.blocks_to_save(request)
        _, failed = self.run_step([], [request], cancel)
        assert set(failed) == (set() if how == "works" or nothing_new else {"r"})
        if how == "works":
            assert self.transfer.find(keys) == len(keys)
        self.pool.free(blocks)
        poison(CACHE, blocks)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        other=st.sampled_from(PREFIXES),
        how=st.sampled_from(["works", "works", "raises", "cancelled"]),
        layer=st.sampled_from(["plain", "fp8", "unequal"]),
    )
    def reload_two(self, prefix, other, how, layer):
        """Load what is held of two prefixes in one step; something may happen to the first."""
        requests = []
        for name, tokens in (("first", prefix), ("second", other)):
            keys = block_keys(tokens, BLOCK)
            keys = tuple(keys[: self.transfer.find(keys)])
            if keys:
                requests.append(TransferRequest(name, keys, tuple(self.pool.allocate(len(keys)))))
        cancel = self.set_fault("load", "first", how, layer)
        step, _ = self.run_step(requests, [], cancel)
        names = {request.request_id for request in requests}
        assert set(step.failed) == (set() if how == "works" else names & {"first"})
        for request in requests:
            if request.request_id not in step.failed:
                expected = list(range(1, len(request.keys) + 1))
                fill(TWIN_CACHE, TWIN, request.keys, expected)
                ours, theirs = attend(MODEL, list(request.block_ids)), attend(TWIN, expected)
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
                assert all(torch.isfinite(a).all() for a in ours)
            self.pool.free(request.block_ids)
            poison(CACHE, list(request.block_ids))

    @rule(prefix=st.sampled_from(PREFIXES))
    def reload_what_is_not_held(self, prefix):
        keys = block_keys([token + 10_000 for token in prefix], BLOCK)
        blocks = self.pool.allocate(len(keys))
        self.connector.fault = None
        with pytest.raises(TransferError):
            self.transfer.reload("r", keys, blocks)
        self.pool.free(blocks)

    @invariant()
    def nothing_leaks(self):
        if not hasattr(self, "transfer"):
            return
        self.pool.check()
        assert self.pool.num_used == 0
        with pytest.raises(OutOfBlocksError):
            self.pool.allocate(CACHE.num_blocks)
        inner = self.connector.inner
        assert not inner._loads and not inner._saves
        if isinstance(inner, HostMemoryConnector):
            assert sorted([*inner._free, *inner._rows.values()]) == list(range(CAPACITY))
            assert not +inner._readers


TestTransferTraffic = TransferTraffic.TestCase
TestTransferTraffic.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)


def test_traffic_through_files(tmp_path):
    from hypothesis.stateful import run_state_machine_as_test

    class ThroughFiles(TransferTraffic):
        folder = tmp_path

    run_state_machine_as_test(ThroughFiles, settings=settings(max_examples=4, stateful_step_count=8, deadline=None))
