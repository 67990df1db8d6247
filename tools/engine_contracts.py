"""Compare vattn's plugins with the sources of vLLM and SGLang, without installing or importing either.

    python -m tools.engine_contracts [FOLDER]

Fetches the newest release that each plugin names into FOLDER (`.engines/sources`), once, and reports each name that a
plugin imports and the release does not define, and each overridden method that takes other arguments than the engine's.
What the methods do is tested by `tools/test_engine.sh`.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from vattn.integrations import sglang, vllm

PLUGINS = Path(__file__).parents[1] / "vattn" / "integrations"

BASES = {
    "vllm": ("vllm/v1/attention/backend.py", ("AttentionBackend", "AttentionMetadataBuilder", "AttentionImpl")),
    "sglang": ("sglang/srt/layers/attention/base_attn_backend.py", ("AttentionBackend",)),
}
"""Where an engine defines the classes that its plugin inherits."""


def fetch(engine: str, version: str, folder: Path) -> Path:
    """Return the folder with the Python files of a release; vLLM's wheel is large, so its source is taken."""
    target = folder / f"{engine}-{version}"
    if not (target / engine).is_dir():
        pip, environment = [sys.executable, "-m", "pip"], dict(os.environ)
        form = ["--only-binary", engine]
        if engine == "vllm":
            # pip asks a source for its metadata, which takes what builds it, but no device.
            form, build = ["--no-binary", engine, "--no-build-isolation"], folder / "build"
            needed = "setuptools>=77,<81", "setuptools-scm", "setuptools-rust", "wheel"
            subprocess.run([*pip, "install", "-q", "--upgrade", "--target", str(build), *needed], check=True)
            environment |= {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
            environment["PYTHONPATH"] = str(build.resolve())
        command = [*pip, "download", "-q", "--no-deps", *form, "-d", str(target), f"{engine}=={version}"]
        subprocess.run(command, check=True, env=environment)
        (archive,) = target.iterdir()
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(target, [name for name in wheel.namelist() if name.endswith(".py")])
        else:
            with tarfile.open(archive) as source:
                source.extractall(target, [m for m in source if m.name.endswith(".py")], filter="data")
            (target / f"{engine}-{version}" / engine).rename(target / engine)
        archive.unlink()
    return target


def parameters(function: ast.FunctionDef) -> dict[str, str]:
    """Return each parameter's kind and default, by name."""
    args = function.args
    places = [*args.posonlyargs, *args.args]
    required: list[ast.expr | None] = [None] * (len(places) - len(args.defaults))
    found = {p.arg: _with_default("", d) for p, d in zip(places, [*required, *args.defaults], strict=True)}
    found |= {p.arg: _with_default("keyword ", d) for p, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)}
    found |= {p.arg: f"{stars}{p.arg}" for stars, p in (("*", args.vararg), ("**", args.kwarg)) if p is not None}
    found.pop("self", None)
    found.pop("cls", None)
    return found


def _with_default(kind: str, default: ast.expr | None) -> str:
    return f"{kind}without default" if default is None else f"{kind}= {ast.unparse(default)}"


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a file by name."""
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def methods(name: str, known: dict[str, ast.ClassDef]) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class and of those that it inherits in the same file."""
    found: dict[str, ast.FunctionDef] = {}
    for base in reversed(known[name].bases):
        inherited = ast.unparse(base).split("[")[0]
        found |= methods(inherited, known) if inherited in known else {}
    return found | {node.name: node for node in known[name].body if isinstance(node, ast.FunctionDef)}


def changed_methods(plugin: Path, bases: Path, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the overridden methods of a plugin's folder that an engine would call with what they do not take."""
    theirs = classes(bases)
    inherited = set()
    for path in sorted(plugin.glob("*.py")):
        for own in classes(path).values():
            for base in (ast.unparse(base).split("[")[0] for base in own.bases):
                if base not in names:
                    continue
                inherited.add(base)
                expected = methods(base, theirs) if base in theirs else {}
                for method in own.body:
                    if isinstance(method, ast.FunctionDef) and method.name in expected and method.name != "__init__":
                        yield from _differences(f"{path.name}: {own.name}.{method.name}", method, expected[method.name])
    yield from (f"no class of the plugin inherits {name}" for name in sorted({*names} - inherited))
    yield from (f"{bases.name} of the engine has no class {name}" for name in sorted({*names} - {*theirs}))


def _differences(where: str, own: ast.FunctionDef, theirs: ast.FunctionDef) -> Iterator[str]:
    mine, wanted = parameters(own), parameters(theirs)
    order = [name for name in mine if name in wanted]
    if order != [name for name in wanted if name in mine]:
        yield f"{where}: order of parameters is {', '.join(wanted)} in the engine"
    for name, expected in wanted.items():
        got = mine.pop(name, "no parameter")
        if got != expected:
            yield f"{where}: {name} {expected} in the engine, {got} here"
    for name, got in mine.items():
        if "without default" in got:
            yield f"{where}: {name} is not in the engine"


def missing_names(plugin: Path, root: Path, engine: str) -> Iterator[str]:
    """Yield what a plugin imports from an engine that the engine's files do not define."""
    for path in sorted(plugin.glob("*.py")):
        tree = ast.parse(path.read_text())
        guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != engine:
                continue
            place = root / str(node.module).replace(".", "/")
            source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            defined = _top_level_names(source) if source.is_file() else set()
            for alias in node.names:
                inside = place / alias.name
                if alias.name not in defined and not inside.is_dir() and not inside.with_suffix(".py").is_file():
                    note = " (in a try)" if id(node) in guarded else ""
                    yield f"{path.name}: {node.module}.{alias.name} is not in the engine{note}"


def _top_level_names(path: Path) -> set[str]:
    found: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
            continue
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name) for alias in node.names}
    return found


def main() -> None:
    """Print what is wrong; exit with 1 if anything is."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".engines/sources")
    wrong = 0
    for engine, plugin in (("vllm", vllm), ("sglang", sglang)):
        version = plugin.TESTED_VERSIONS[-1]
        root = fetch(engine, version, folder)
        bases, names = BASES[engine]
        found = [*missing_names(PLUGINS / engine, root, engine)]
        found += changed_methods(PLUGINS / engine, root / bases, names)
        print(f"{engine} {version}:", "the plugin fits" if not found else "", *found, sep="\n  ")
        wrong += len(found)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
