"""Everything that the documentation claims in code is run: Markdown blocks, docstrings, support table, links."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import linecache
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vattn.backends import selector

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted(path for path in (ROOT / "vattn").rglob("*.py") if ">>> " in path.read_text())


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Return the `python` blocks of a page with the line each starts at."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def same_backends_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A page may register a backend; no other test shall meet it."""
    selector.backend_names()
    monkeypatch.setattr(selector, "_BACKENDS", dict(selector._BACKENDS))
    yield
    selector._decide.cache_clear()


@pytest.mark.usefixtures("same_backends_afterwards")
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=relative)
def test_code_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    torch.manual_seed(0)
    torch._dynamo.reset()
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, block in python_blocks(page):
        name = f"{relative(page)}:{line + 1}"
        linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
        capsys.readouterr()
        exec(compile(block, name, "exec"), namespace)
        printed = capsys.readouterr().out
        for expected in re.findall(r"^ *print\(.*\)  # prints (.+)$", block, re.MULTILINE):
            assert expected in printed, f"{name} says it prints {expected!r}, it printed {printed!r}"


@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_examples_in_docstrings(source: Path) -> None:
    module = importlib.import_module(".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    torch.manual_seed(0)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_tables_of_sampling_and_the_generator_name_every_default() -> None:
    import vattn

    parameters = list(inspect.signature(vattn.Generator).parameters.values())
    expected = [(each.name, "" if each.default is each.empty else repr(each.default)) for each in parameters]
    assert rows_of("generating.md") == expected
    samplings = vars(vattn.Sampling())
    fields = dataclasses.fields(vattn.Sampling)
    assert rows_of("sampling.md") == [(each.name, repr(samplings[each.name])) for each in fields]


def rows_of(page: str) -> list[tuple[str, str]]:
    """Return the names and the defaults of a page's tables."""
    return re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", (ROOT / "docs" / page).read_text(), re.MULTILINE)


def test_support_table_is_up_to_date() -> None:
    from tools.support_table import support_table

    page = (ROOT / "docs" / "support.md").read_text()
    assert page == support_table(), "run: python -m tools.support_table > docs/support.md"


def anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown page has, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            found = page.parent / target if target else page
            assert found.exists(), f"{relative(page)} links to {target}"
            assert not anchor or anchor in anchors(found), f"{relative(page)} links to {target}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "support.md"], ids=relative)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= (100 if page.name == "README.md" else 200)


def test_first_steps_need_few_names() -> None:
    names = set(re.findall(r"vattn\.([A-Za-z_]+)", (ROOT / "docs" / "first-steps.md").read_text()))
    assert len(names) <= 12, names


def test_public_names_are_documented() -> None:
    import vattn

    public = {name: getattr(vattn, name) for name in vattn.__all__}
    assert [name for name, thing in public.items() if callable(thing) and not thing.__doc__] == []


def test_readme_names_every_backend_command_and_page() -> None:
    from vattn.__main__ import make_parser
    from vattn.backends import selector
    from vattn.backends.mla.registry import mla_backends

    readme = (ROOT / "README.md").read_text()
    commands = next(action for action in make_parser()._actions if action.choices)
    for name in (*selector.backend_names(), *mla_backends()):
        assert f"`{name}`" in readme, f"README.md lacks backend {name}"
    for name in set(commands.choices) - {"demo", "tune", "explain-fusion"}:  # pages of their own tell of these
        assert f"python -m vattn {name}" in readme, f"README.md lacks python -m vattn {name}"
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, f"README.md lacks docs/{page.name}"
