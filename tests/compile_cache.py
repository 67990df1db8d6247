"""A compile cache of this run alone, for folders of tests that compile: import the fixture in their `conftest.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    yield
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    if before is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
