"""What `tools.engine_contracts` finds between a plugin and an engine's source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.engine_contracts import changed_methods, missing_names

ENGINE = """
class Base:
    def plan(self, step, fast=False): ...
    @classmethod
    def sizes(cls, *, spec=None): ...
class Backend(Base):
    def forward(self, query, key, scale=1.0, **kwargs): ...
"""
PLUGIN = """
from engine.base import Backend
class Own(Backend):
    def __init__(self, config): ...
    def plan(self, step, fast=False): ...
    @classmethod
    def sizes(cls, *, spec=None, layout="NHD"): ...
    def forward(self, query, key, scale=1.0, **kwargs): ...
    def helper(self, anything): ...
"""


def found(folder: Path, engine: str = ENGINE, plugin: str = PLUGIN) -> list[str]:
    (folder / "engine").mkdir()
    (folder / "plugin").mkdir()
    (folder / "engine" / "base.py").write_text(engine)
    (folder / "plugin" / "own.py").write_text(plugin)
    names = missing_names(folder / "plugin", folder, "engine")
    return [*names, *changed_methods(folder / "plugin", folder / "engine" / "base.py", ("Backend",))]


def test_a_plugin_that_takes_what_the_engine_passes_fits(tmp_path: Path) -> None:
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("fast=False", "fast=True", "own.py: Own.plan: fast = True in the engine, = False here"),
        ("step, fast", "step, cache, fast", "own.py: Own.plan: cache without default in the engine, no parameter here"),
        ("*, spec", "spec", "own.py: Own.sizes: spec = None in the engine, keyword = None here"),
        ("query, key, scale", "query, scale", "own.py: Own.forward: key is not in the engine"),
        (", **kwargs", "", ""),
        (
            "query, key,",
            "key, query,",
            "own.py: Own.forward: order of parameters is key, query, scale, kwargs in the engine",
        ),
    ],
)
def test_a_release_that_changes_an_interface_is_reported(tmp_path: Path, before: str, after: str, message: str) -> None:
    engine = ENGINE.replace(before, after)
    assert engine != ENGINE
    assert found(tmp_path, engine) == ([message] if message else [])


def test_a_release_that_renames_a_base_class_is_reported(tmp_path: Path) -> None:
    assert found(tmp_path, ENGINE.replace("class Backend", "class Renamed")) == [
        "own.py: engine.base.Backend is not in the engine",
        "base.py of the engine has no class Backend",
    ]


def test_a_plugin_that_inherits_nothing_of_the_engine_is_reported(tmp_path: Path) -> None:
    assert found(tmp_path, plugin="class Own: ...") == ["no class of the plugin inherits Backend"]
