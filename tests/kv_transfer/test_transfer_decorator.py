"""`maybe_transfer_kv_layer`: the hooks around a function of a user's own."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

import vattn
from tests.kv_transfer.kv_transfer_support import BLOCK, Setup
from vattn.errors import ConfigError, SignatureError
from vattn.kv_transfer import HostMemoryConnector, TransferRequest, block_keys
from vattn.layers.kv_transfer_utils import maybe_transfer_kv_layer

pytestmark = pytest.mark.usefixtures("detached")


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
