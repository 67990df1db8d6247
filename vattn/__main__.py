"""`python -m vattn doctor | explain | explain-fusion | generate | kv-report | demo | bench | tune`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vattn.backends.base import DeviceInfo

DESCRIPTION = "Paged attention for torch.compile."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m vattn", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    # Abbreviated options are refused, so that a misspelt one is never taken for another.
    add = functools.partial(commands.add_parser, allow_abbrev=False)
    _add_doctor(add("doctor", help="what vattn can use on this machine"))
    _add_explain(add("explain", help="which backend a request gets, and why the others refuse"))
    _add_explain_fusion(add("explain-fusion", help="what the compiler passes make of your model"))
    commands.add_parser("demo", help="a small compiled model answers prompts on the paged cache", add_help=False)
    _add_generate(add("generate", help="a transformers model continues prompts, many at once"))
    _add_kv_report(add("kv-report", help="what every KV cache format costs and saves on a model and a text"))
    _add_bench(add("bench", help="vattn's speed beside every other library's that is found"))
    _add_tune(add("tune", help="measure which backend is faster on this GPU, and write the table that auto reads"))
    if arguments[:1] == ["demo"]:
        from vattn.demo.main import main as demo

        return demo(arguments[1:])
    options, rest = parser.parse_known_args(arguments)
    if options.command == "bench":
        from vattn.bench import command

        return command.main(options, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "tune":
        from vattn import tune

        return tune.main(options)
    if options.command == "generate":
        from vattn.generation import command as generate

        return generate.main(options)
    if options.command == "kv-report":
        from vattn import kv_report

        return kv_report.main(options)
    if options.command == "explain-fusion":
        from vattn import explain_fusion

        return explain_fusion.main(options)
    return _doctor(options) if options.command == "doctor" else _explain(options)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    from vattn.generation import command

    command.add_arguments(parser)


def _add_kv_report(parser: argparse.ArgumentParser) -> None:
    from vattn import kv_report

    kv_report.add_arguments(parser)


def _add_explain_fusion(parser: argparse.ArgumentParser) -> None:
    from vattn import explain_fusion

    explain_fusion.add_arguments(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from vattn.bench import command

    command.add_arguments(parser)


def _add_tune(parser: argparse.ArgumentParser) -> None:
    from vattn import tune

    tune.add_arguments(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="also run a small step on every usable backend")
    parser.add_argument("--support-table", action="store_true", help="print docs/support.md instead")


def _doctor(options: argparse.Namespace) -> int:
    from vattn import doctor

    if options.support_table:
        print(doctor.support_table(), end="")
        return 0
    print(doctor.report())
    if not options.check:
        return 0
    rows = doctor.check_backends()
    print("\na prefill of 37 tokens against dense attention in fp32")
    print(doctor.aligned(rows))
    return 0 if all(outcome.startswith("ok") for _, _, outcome in rows) else 1


def _add_explain(parser: argparse.ArgumentParser) -> None:
    from vattn import config, formats

    def number(name: str, default: int | None, text: str, kind: type = int) -> None:
        parser.add_argument(name, type=kind, default=default, metavar="N", help=text)

    def choice(name: str, choices: Sequence[str], default: str, text: str = "") -> None:
        parser.add_argument(name, choices=choices, default=default, help=f"{text} (default: {default})".strip())

    number("--num-heads", 32, "query heads (default: 32)")
    number("--num-kv-heads", None, "KV heads (default: num-heads)")
    number("--head-size", 128, "key width of a head (default: 128)")
    number("--head-size-v", None, "value width of a head (default: head-size)")
    number("--block-size", 16, "tokens per cache block; 0: keys and values without a cache (default: 16)")
    choice("--dtype", tuple(formats.MODEL_DTYPES), "bfloat16")
    choice("--kv-cache-dtype", formats.kv_cache_dtypes(), "auto")
    choice("--kv-scale", ("tensor", "head"), "tensor", "scales of an FP8 cache: one value, or one per KV head")
    choice("--kv-cache-layout", config.KV_CACHE_LAYOUTS, "NHD")
    choice("--query-format", formats.QUERY_FORMATS, "none")
    choice("--query-scale", ("tensor", "head"), "tensor", "scales of an FP8 query")
    choice("--query-load", formats.QUERY_LOADS, "plain", "who rounds an FP8 query: plain, the caller, or the kernel")
    choice("--output-format", tuple(formats.OUTPUT_FORMATS), "none")
    choice("--attn-type", tuple(kind.value for kind in config.AttentionType), "decoder")
    choice("--causality", config.CAUSALITIES, "causal")
    number("--sliding-window", None, "tokens visible to the left, itself included")
    number("--chunk-lookback", None, "chunks before its own that a row sees, instead of the window")
    number("--logits-soft-cap", None, "cap * tanh(score / cap)", float)
    choice("--alibi", config.ALIBI_KINDS, "none")
    choice("--mm-prefix", config.MM_PREFIX_KINDS, "none", "multimodal ranges that see each other both ways")
    for name in ("--sinks", "--tree-bias", "--lse", "--context-parallel", "--batch-invariant"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--backend", default="auto", help="a backend by name (default: auto)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, or sm_90 for a GPU elsewhere (default: cuda or cpu)")


def _device(name: str | None) -> DeviceInfo:
    import torch

    from vattn.backends.base import DeviceInfo
    from vattn.errors import DeviceError

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("sm_") and name[3:].isdigit() and len(name) > 4:
        return DeviceInfo("cuda", (int(name[3:-1]), int(name[-1])), "GPU")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError(f"no usable GPU for device {name!r}", "cpu, or a GPU by its architecture", "--device sm_90")
    if name.startswith("sm"):
        raise DeviceError(f"device {name!r}", "an architecture such as sm_90", "correct it")
    return DeviceInfo.of(name)


def _explain(options: argparse.Namespace) -> int:
    from vattn import formats
    from vattn.backends import selector
    from vattn.config import AttentionConfig
    from vattn.errors import VattnError

    values = {name: value for name, value in vars(options).items() if name not in ("command", "device")}
    values["num_kv_heads"] = options.num_heads if options.num_kv_heads is None else options.num_kv_heads
    values["head_size_v"] = options.head_size if options.head_size_v is None else options.head_size_v
    values["scale"] = max(1, options.head_size) ** -0.5
    if options.query_format == "none":
        values["query_scale"] = "none"
    try:
        values["kv_cache_dtype"] = formats.resolve_kv_cache_dtype(
            options.kv_cache_dtype, formats.MODEL_DTYPES[options.dtype]
        )
        if not formats.KV_FORMATS[values["kv_cache_dtype"]].quantised:
            values["kv_scale"] = "none"
        explanation = selector.explain(AttentionConfig(**values), _device(options.device))
    except (VattnError, RuntimeError) as error:
        print(f"vattn: {error}", file=sys.stderr)
        return 2
    print(explanation)
    return 0 if explanation.chosen else 1


if __name__ == "__main__":
    sys.exit(main())
