"""Pass tests start from nothing: no graphs or reports of other tests, and a compile cache of this run alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import vattn
from tests.compile_cache import cache_folder  # noqa: F401
from vattn.backends import dispatch
from vattn.passes.report import clear_fusion_report


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    clear_fusion_report()
    dispatch._resolve.cache_clear()  # code from a cache reports when a config string is first read
    with torch.no_grad():
        yield
    vattn.disable()
    torch._dynamo.reset()
