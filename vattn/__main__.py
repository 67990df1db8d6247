"""`python -m vattn doctor | explain | explain-fusion | generate | kv-report | demo | bench | tune`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

import vattn

DESCRIPTION = "Paged attention for torch.compile."


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="python -m vattn", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"vattn {vattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    # Abbreviated options are refused, so that a misspelt one is never taken for another.
    add = functools.partial(commands.add_parser, allow_abbrev=False)
    _add_doctor(add("doctor", help="what vattn can use on this machine"))
    _add_explain(add("explain", help="which backend a request gets, and why the others refuse"))
    _add_explain_fusion(add("explain-fusion", help="what the compiler passes make of your model"))
    commands.add_parser("demo", help="says where to find the demo", add_help=False)
    _add_generate(add("generate", help="a transformers model continues prompts, many at once"))
    _add_kv_report(add("kv-report", help="what every KV cache format costs and saves on a model and a text"))
    _add_bench(add("bench", help="vattn's speed beside every other library's that is found"))
    _add_tune(add("tune", help="measure which backend is faster on this GPU, and write the table that auto reads"))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    if arguments[:1] == ["demo"]:
        print("The demo is no part of the installed package. Run `make demo` in a checkout of vattn.", file=sys.stderr)
        return 2
    options, rest = parser.parse_known_args(arguments)
    if options.command == "bench":
        from vattn.cli.bench import command

        return command.main(options, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "tune":
        from vattn.cli import tune

        return tune.main(options)
    if options.command == "generate":
        from vattn.cli import generate

        return generate.main(options)
    if options.command == "kv-report":
        from vattn.cli import kv_report

        return kv_report.main(options)
    if options.command == "explain-fusion":
        from vattn.cli import explain_fusion

        return explain_fusion.main(options)
    return _doctor(options) if options.command == "doctor" else _explain(options)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    from vattn.cli import generate as command

    command.add_arguments(parser)


def _add_kv_report(parser: argparse.ArgumentParser) -> None:
    from vattn.cli import kv_report

    kv_report.add_arguments(parser)


def _add_explain_fusion(parser: argparse.ArgumentParser) -> None:
    from vattn.cli import explain_fusion

    explain_fusion.add_arguments(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from vattn.cli.bench import command

    command.add_arguments(parser)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    from vattn.cli import tune

    tune.add_arguments(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="also run a small step on every usable backend")
    parser.add_argument("--support-table", action="store_true", help="print docs/support.md instead")


def _doctor(options: argparse.Namespace) -> int:
    from vattn.cli import doctor

    if options.support_table:
        from vattn.cli.support_table import support_table

        print(support_table(), end="")
        return 0
    print(doctor.report())
    if not options.check:
        return 0
    rows = doctor.check_backends()
    print("\na prefill of 37 tokens against dense attention in fp32")
    print(doctor.aligned(rows))
    return 0 if all(outcome.startswith("ok") for _, _, outcome in rows) else 1


def _add_explain(parser: argparse.ArgumentParser) -> None:
    from vattn.cli import explain as explain_request

    explain_request.add_arguments(parser)


def _explain(options: argparse.Namespace) -> int:
    from vattn.cli import explain as explain_request

    return explain_request.main(options)


if __name__ == "__main__":
    sys.exit(main())
