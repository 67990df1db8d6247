"""Fixtures of KV transfer."""

from __future__ import annotations

import pytest

from tests.kv_transfer.kv_transfer_support import ATTACHED
from vattn.kv_transfer import FileConnector, HostMemoryConnector
from vattn.ops import kv_transfer_points as registered


@pytest.fixture
def detached():
    """Detach every `Setup` of a test, and check that nothing else is attached."""
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
