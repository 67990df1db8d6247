"""Compile tests start from nothing: no graphs of other tests, and a compile cache of this run alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.compile_cache import cache_folder  # noqa: F401


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()
