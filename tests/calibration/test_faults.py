"""Memory runs out on the way through a calibration, an audit or an attach: everything is as it was before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vattn
from tests.faults import OpFault

pytest.importorskip("transformers")

from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import PackedModel, enable

PLACES = 12
"""Places of a run, spread evenly, at which memory runs out."""


@pytest.fixture
def packed() -> PackedModel:
    return enable(make_model("llama"), num_blocks=9)


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def each_op_fault(run: Callable[[], Any], check: Callable[[], None]) -> None:
    """Run out of memory at `PLACES` ops of a run, checking after each."""
    with OpFault(None) as counting:
        run()
    total = counting.strike.calls
    assert total > 3
    for place in sorted({1 + index * (total - 1) // (PLACES - 1) for index in range(PLACES)}):
        with pytest.raises((torch.OutOfMemoryError, vattn.errors.VattnError), match="on purpose"), OpFault(place):
            run()
        check()


def test_calibration_and_audit(packed: PackedModel) -> None:
    """No hook stays, no weight changes, and the next run finds what the first one found."""
    texts, weights = [list(range(3, 60)), [7, 5, 90]], {k: v.clone() for k, v in packed.state_dict().items()}
    found, audited = vattn.calibrate(packed, [texts], linears=True), vattn.audit(packed, texts)
    hooks = hooks_of(packed)

    def check() -> None:
        assert hooks_of(packed) == hooks
        assert all(torch.equal(weights[name], tensor) for name, tensor in packed.state_dict().items())

    each_op_fault(lambda: vattn.calibrate(packed, [texts], linears=True), check)
    each_op_fault(lambda: vattn.audit(packed, texts), check)
    assert vattn.calibrate(packed, [texts], linears=True) == found
    assert str(vattn.audit(packed, texts)) == str(audited)


def test_connectors(packed: PackedModel) -> None:
    """An attach that fails leaves caches free and the connector as it was."""
    cache = packed.kv_cache
    assert cache is not None
    connectors: list[vattn.HostMemoryConnector] = []

    def attach() -> None:
        connectors.append(vattn.HostMemoryConnector("1MiB"))
        vattn.KVTransfer(packed, cache, connectors[-1]).detach()

    def check() -> None:
        assert connectors[-1].capacity == 0 and connectors[-1].find(["a"]) == 0
        # It can be attached afterwards.
        vattn.KVTransfer(packed, cache, connectors[-1]).detach()
        assert connectors[-1].capacity > 0

    each_op_fault(attach, check)


def test_a_host_without_room() -> None:
    store = vattn.HostMemoryConnector(1 << 50, pin_memory=False)
    with pytest.raises(vattn.errors.ConfigError, match="which the host does not give"):
        store.attach({"x": 1 << 20}, "f")
    assert store.capacity == 0
