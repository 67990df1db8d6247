"""`python -m vattn explain-fusion module:function`: compile a user's model with the passes and print the report.

The function takes no arguments and returns what to compile and what to call it with: `(model, args)`, or
`(model, args, metadata)` for a model with layers that take the step from `vattn.forward_context`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vattn.calibration.result_files import check_output
from vattn.config.files import write_whole
from vattn.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the subcommand's arguments."""
    parser.add_argument("target", metavar="module:function", help="returns (model, args) or (model, args, metadata)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--strict", action="store_true", help="exit status 1 unless there is attention and all of it is fused"
    )
    parser.add_argument(
        "--dot", type=Path, metavar="FILE", help="write graphs before and after the passes for Graphviz"
    )


def main(options: argparse.Namespace) -> int:
    """Run the subcommand; return 1 for a miss under `--strict`, else 0."""
    check_output("--dot", options.dot)
    report, pictures = explain_fusion(load(options.target))
    print(json.dumps(report.as_dict(), indent=1) if options.json else report)
    if not report:
        print(
            f"vattn: no attention was compiled: {report.why_empty}. A layer without metadata makes a profiling call: "
            "return (model, args, metadata), with a step of the model's builder",
            file=sys.stderr,
        )
    if options.dot:
        write_whole(options.dot, "\n".join(pictures))
    return 1 if options.strict and (not report or report.count("fused") < len(report)) else 0


def load(target: str) -> Callable[[], Sequence[Any]]:
    """Import the function that a `module:function` names, from the working directory too.

    Raises:
        ConfigError: there is no such module or function.
    """
    module_name, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"target {target!r}: {error}", "module:function that can be imported", "e.g. my_package.models:example"
        ) from error
    if not callable(function):
        raise ConfigError(f"target {target!r} is no function", "a function without arguments", "name the function")
    return function  # type: ignore[no-any-return]


def explain_fusion(make: Callable[[], Sequence[Any]]) -> tuple[Any, list[str]]:
    """Compile and call once what `make` returns, past every cache.

    Returns:
        The report of all that was compiled, and one Graphviz text per graph, before and after the passes.

    Raises:
        ConfigError: `make` returns something else than a model and its arguments.
    """
    import vattn
    from vattn.passes.graphviz import drawing_options

    made = make()
    parts = made if isinstance(made, (tuple, list)) else ()
    if len(parts) not in (2, 3) or not callable(parts[0]) or not isinstance(parts[1], (tuple, list)):
        raise ConfigError(
            f"the function returned {type(made).__name__} ({', '.join(type(part).__name__ for part in parts)})",
            "(model, args) or (model, args, metadata), args a tuple or list",
            "return (model, (x,), metadata)",
        )
    model, args, metadata = (*parts, None)[:3]
    vattn.clear_fusion_report()
    texts: list[str] = []
    # Plain functions as passes have no cache key, so that nothing comes from a cache.
    options = vattn.options(drawing_options(texts))
    with torch.no_grad(), vattn.forward_context(metadata):
        torch.compile(model, options=options)(*args)
    return vattn.fusion_report(), texts
