"""`python -m vattn doctor | explain | explain-fusion | generate | calibrate | kv-report | bench | tune`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

import vattn
from vattn.cli import calibrate, doctor, explain, explain_fusion, generate, kv_report, tune
from vattn.cli.bench import command as bench
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
        print(
            f"vattn: {options.command} has no {rest[0]}. See python -m vattn {options.command} --help.", file=sys.stderr
        )
        return 2
    try:
        return COMMANDS[options.command][0].main(options)
    except VattnError as error:
        print(f"vattn: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
