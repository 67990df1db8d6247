"""`python -m vattn doctor | explain | explain-fusion | generate | calibrate | kv-report | bench | tune`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

import vattn
from vattn.cli import calibrate, doctor, explain, explain_fusion, generate, kv_report, tune
from vattn.cli.bench import command as bench
from vattn.config.keywords import right_name
from vattn.config.other_names import GENERATOR, SAMPLING
from vattn.errors import VattnError

COMMANDS = {
    "doctor": (doctor, "", "what vattn can use on this machine"),
    "explain": (explain, "[REQUEST]", "which backend a request gets, and why the others refuse"),
    "explain-fusion": (explain_fusion, "MODULE:FUNCTION", "what the compiler passes make of your model"),
    "generate": (generate, "--prompt TEXT", "a transformers model continues prompts or answers a conversation"),
    "calibrate": (calibrate, "--text FILE", "scales of FP8 caches and linear layers, from a model and a text"),
    "kv-report": (kv_report, "", "what every KV cache format costs and saves on a model and a text"),
    "bench": (bench, "attention", "vattn's speed compared with that of every other library that is found"),
    "tune": (tune, "", "measure which backend is faster on this GPU, and write the table that auto reads"),
}
"""Each command: its module, the arguments that begin its usage, and what it does."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m vattn", description="Paged attention for torch.compile.")
    parser.add_argument("--version", action="version", version=f"vattn {vattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # Without abbreviations a misspelt option is never taken for another.
    add = functools.partial(commands.add_parser, allow_abbrev=False)
    for name, (command, first, text) in COMMANDS.items():
        # Not all options, as argparse lists them: its errors show this line.
        usage = " ".join(filter(None, (parser.prog, name, first, "[options]")))
        command.add_arguments(add(name, help=text, description=f"{text}.", usage=usage))
    add("demo", help="where to find the demo", add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status, which is 2 for a mistake."""
    parser = make_parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "demo":
        print("vattn: no installed package holds the demo. Run `make demo` in a checkout of vattn.", file=sys.stderr)
        return 2
    if rest:
        what = f"{options.command} has no {rest[0]}.{_advice(options.command, rest[0])}"
        print(f"vattn: {what} See python -m vattn {options.command} --help.", file=sys.stderr)
        return 2
    try:
        return COMMANDS[options.command][0].main(options)
    except VattnError as error:
        print(f"vattn: {error}", file=sys.stderr)
        return 2


def _advice(command: str, option: str) -> str:
    """Return a sentence that names what is meant by an option that a command does not have; `""` without a guess."""
    parser = argparse.ArgumentParser()
    COMMANDS[command][0].add_arguments(parser)
    known = {_name(text) for action in parser._actions for text in action.option_strings}
    name = _name(option.split("=")[0])
    right = name if name in known else right_name(name, "", known, GENERATOR | SAMPLING).split("=")[0]
    return f" Try: --{right.replace('_', '-')}." if option.startswith("--") and right in known else ""


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


if __name__ == "__main__":
    sys.exit(main())
