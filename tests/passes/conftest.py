"""Pass tests start from nothing: no graphs or reports of other tests, and a compile cache of this run alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import vattn
from vattn.backends import dispatch
from vattn.passes.report import clear_fusion_report


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    yield
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    if before is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


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
