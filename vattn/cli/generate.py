"""`python -m vattn generate`: prompts, or a conversation, through a model of transformers."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vattn.cli.checkpoints import SCALES_FILE, add_model_arguments, find_checkpoint, holds_fp8, load_model
from vattn.cli.sampling_options import add_sampling_arguments, given_sampling, sampling_of
from vattn.config.attention import CacheConfig
from vattn.config.files import why_unreadable
from vattn.errors import ConfigError, ScaleError, VattnError
from vattn.generation.chat import Chat, is_conversation
from vattn.generation.generator import Generator
from vattn.generation.prompt_lookup import PromptLookup
from vattn.generation.request import Progress, Request
from vattn.generation.setup import keeps_states
from vattn.layers import QuantConfig
from vattn.quantization.formats import kv_cache_dtypes

Prompt = str | Chat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    add_model_arguments(parser)
    parser.add_argument("--prompt", action="append", default=[], help="a text; may be given several times")
    parser.add_argument(
        "--file", type=Path, help='one JSON object a line: "prompt" or "messages", and any option of Sampling'
    )
    parser.add_argument(
        "--chat", action="store_true",
        help="answer prompts by the model's chat template; without a prompt, talk with the model line by line",
    )  # fmt: skip
    parser.add_argument("--system", help="with --chat: the system message of each conversation")
    add_sampling_arguments(parser)
    parser.add_argument(
        "--dequantise", action="store_true",
        help="an FP8 checkpoint: weights as transformers loads them; default its codes and scales as they are",
    )  # fmt: skip
    parser.add_argument("--kv-cache-dtype", default="auto", choices=kv_cache_dtypes(), metavar="FORMAT")
    parser.add_argument(
        "--kv-scales",
        help=f"a file that `python -m vattn calibrate` wrote, or 'unit'; default {SCALES_FILE} beside the checkpoint",
    )
    parser.add_argument(
        "--rope-length", type=int, help="longest request, for models whose RoPE goes by lengths (longrope, dynamic)"
    )
    parser.add_argument(
        "--memory",
        default=None,
        help="bytes of the cache, such as 2GiB; default 40%% of the free GPU memory, or 256MiB",
    )
    parser.add_argument("--max-num-reqs", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=0, help="draft up to this many tokens a step by prompt lookup")
    parser.add_argument("--hybrid", action="store_true", help="a cache with groups: windows give their blocks back")
    parser.add_argument("--backend", default=None, help="attention backend; default the first that accepts")
    parser.add_argument("--compile", default=None, choices=["layers", "model", "none"])
    parser.add_argument("--json", action="store_true", help="one JSON object an output instead of text")


def main(options: argparse.Namespace) -> int:
    """Run the command; returns 1 if a request failed, else 0."""
    _check(options)
    jobs = _jobs(options)
    given = given_sampling(options)
    generator = make_generator(options)
    # Wrong options are refused before a long run, not by the request that has them.
    default = sampling_of(generator.default_sampling, given)
    if options.chat and not _chat("", None).has_template(generator.tokenizer):
        raise ConfigError(
            f"--chat with --model {options.model}, which has no chat template", "chat models", "leave out --chat"
        )
    if options.chat and not jobs:
        if default.candidates > 1:
            raise ConfigError(f"a conversation with {default.candidates} outputs", "one output", "leave --n out")
        return _converse(generator, default, options)
    samplings = [_sampling(default, changes, where) for _, changes, where in jobs]
    requests: list[Request | VattnError] = []
    for (prompt, _, _), sampling in zip(jobs, samplings, strict=True):
        try:
            requests.append(generator.add(prompt, sampling))
        except VattnError as error:
            requests.append(error)
    (_show_json if options.json else _show_text)(generator, requests)
    outputs = [choice for one in requests if isinstance(one, Request) for choice in one.choices]
    refused = any(isinstance(one, VattnError) for one in requests)
    return 1 if refused or any(output.error is not None for output in outputs) else 0


def make_generator(options: argparse.Namespace) -> Generator:
    """Load the model and make its generator.

    Raises:
        ConfigError: no checkpoint in the folder, one without a tokenizer, or `--dequantise` and nothing in FP8.
        ScaleError, UnsupportedRequestError: an FP8 checkpoint that `load_fp8_linears` refuses.
    """
    folder = find_checkpoint(options.model)
    model, tokenizer = load_model(folder, options.device, options.dtype)
    from vattn.integrations.transformers import enable, load_fp8_linears

    in_fp8 = holds_fp8(folder)
    if options.dequantise and not in_fp8:
        raise ConfigError(
            f"--dequantise with --model {options.model}", "a checkpoint with FP8 weights in safetensors", "leave it out"
        )
    quantised = in_fp8 and not options.dequantise
    if quantised:
        load_fp8_linears(model, folder)
    quant, calibration = _scales(options, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", module="vattn")
        try:
            packed = enable(
                model,
                cache_config=CacheConfig(cache_dtype=options.kv_cache_dtype),
                quant_config=quant,
                calibration=calibration,
                attn_backend=options.backend,
                rope_length=options.rope_length,
            )
        except ScaleError as error:
            if not error.fix.startswith("QuantConfig("):
                raise
            # The same in words of the command line.
            raise ScaleError(
                error.got,
                "--kv-scales with a file of `python -m vattn calibrate`, or 'unit'",
                "--kv-scales unit if 1.0 is meant",
            ) from error
    for warning in caught:
        text = str(warning.message).replace("CacheConfig(cache_dtype='fp8')", "--kv-cache-dtype fp8")
        print(f"warning: {text}", file=sys.stderr)
    max_num_reqs = options.max_num_reqs if keeps_states(packed) else None
    memory = options.memory or _free_memory(options.device)
    packed.allocate(memory=memory, hybrid=options.hybrid, max_num_reqs=max_num_reqs)
    lookup = PromptLookup(num_drafts=options.drafts) if options.drafts else None
    return Generator(packed, tokenizer, max_num_reqs=options.max_num_reqs, speculation=lookup, compile=options.compile)


def _scales(options: argparse.Namespace, folder: Path) -> tuple[QuantConfig | None, str | None]:
    beside = folder / SCALES_FILE
    source = options.kv_scales or (str(beside) if beside.is_file() else None)
    if not options.kv_cache_dtype.startswith(("fp8", "nvfp4")) or options.kv_cache_dtype.endswith("per_token_head"):
        if options.kv_scales:
            raise ConfigError(
                f"--kv-scales with --kv-cache-dtype {options.kv_cache_dtype}", "formats with given scales", "drop it"
            )
        return None, None
    return (QuantConfig("unit", "unit"), None) if source == "unit" else (None, source)


def _free_memory(device: str) -> int:
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.4)
    return 256 << 20


def _check(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    if options.system is not None and not options.chat:
        raise ConfigError("--system without --chat", "--system TEXT with --chat", "add --chat")
    if not options.json and (options.logprobs, options.prompt_logprobs) != (None, None):
        raise ConfigError("--logprobs without --json", "--logprobs with --json, which prints them", "add --json")


def _jobs(options: argparse.Namespace) -> list[tuple[Prompt, dict[str, Any], str]]:
    """Return prompts, each with the options of its line and where it was given."""
    ask: Callable[[str], Prompt] = (lambda text: _chat(text, options.system)) if options.chat else str
    jobs: list[tuple[Prompt, dict[str, Any], str]] = [(ask(prompt), {}, "--prompt") for prompt in options.prompt]
    if options.file is not None:
        try:
            lines = options.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--file {options.file}: {why_unreadable(error)}", "a file of UTF-8 text", "check the path"
            ) from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                jobs.append(_job(line, f"{options.file}:{number}", ask, options.system))
    if not jobs and (not options.chat or options.json or options.file is not None):
        raise ConfigError("nothing to generate", "--prompt TEXT or --file prompts.jsonl", "give at least one prompt")
    return jobs


def _chat(text: str, system: str | None) -> Chat:
    first = [{"role": "system", "content": system}] if system is not None else []
    return Chat([*first, {"role": "user", "content": text}])


def _job(line: str, where: str, ask: Callable[[str], Prompt], system: str | None) -> tuple[Prompt, dict[str, Any], str]:
    try:
        job = json.loads(line)
        if not isinstance(job, dict):
            raise ValueError(f"a line that is no object but {line.strip():.40}")
        if "messages" in job and system is not None:
            raise ValueError("messages with --system, which would be ignored")
        if is_conversation(job.get("messages")) and "prompt" not in job:
            return Chat(job.pop("messages")), job, where
        if "prompt" not in job:
            raise ValueError("neither prompt nor messages")
        prompt = job.pop("prompt")
        if not isinstance(prompt, str):
            raise ValueError("a prompt that is no text")
        return ask(prompt), job, where
    except (ValueError, VattnError) as error:
        raise _wrong_line(where, error) from error


def _sampling(default: Any, changes: Mapping[str, Any], where: str) -> Any:
    try:
        return sampling_of(default, changes)
    except (VattnError, TypeError) as error:
        raise _wrong_line(where, error) from error


def _wrong_line(where: str, error: Exception) -> ConfigError:
    if isinstance(error, VattnError):
        return ConfigError(f"{where}: {error.got}", error.allowed, error.fix)
    why = f"no JSON: {error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
    return ConfigError(f"{where}: {why}", '{"prompt": "...", ...} with options of vattn.Sampling', "correct the line")


def _converse(generator: Generator, sampling: Any, options: argparse.Namespace) -> int:
    """Answer lines of the standard input until it ends; the cache holds the earlier turns."""
    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    print("An empty line ends the conversation, Ctrl-C an answer.", file=sys.stderr)
    while text := _line():
        messages.append({"role": "user", "content": text})
        answer, error = "", None
        try:
            for one in generator.stream([Chat(messages)], sampling):
                answer, error = one.request.text, one.request.error
                print(one.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        print()
        if error is not None:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        messages.append({"role": "assistant", "content": answer})
    return 0


def _line() -> str:
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def _show_text(generator: Generator, requests: Sequence[Request | VattnError]) -> None:
    """Stream a single text as it comes; print several as they end."""
    alone = len(requests) == 1 and isinstance(requests[0], Request) and len(requests[0].choices) == 1
    for index, request in enumerate(requests):
        if isinstance(request, VattnError):
            print(f"[{index}] {type(request).__name__}: {request}", file=sys.stderr)
    for one, ended in _steps(generator):
        if alone:
            print(one.text, end="", flush=True)
        else:
            for request in ended:
                several = f".{request.index}" if len(request.choices) > 1 else ""
                print(f"[{requests.index(request.choices[0])}{several}] {request.text}", flush=True)
        if one.request.error is not None:
            print(f"{type(one.request.error).__name__}: {one.request.error}", file=sys.stderr)
    print(end="\n" if alone else "")
    now = generator.statistics()
    print(
        f"{now.generated_tokens} tokens in {now.seconds:.2f} s, {now.tokens_per_second:.0f} tokens/s; cache of "
        f"{now.num_blocks} blocks, {now.preemptions} preemptions, {now.reused_tokens} prompt tokens reused"
        + (f", {now.accepted_tokens} of {now.drafted_tokens} drafts right" if now.drafted_tokens else ""),
        file=sys.stderr,
    )


def _show_json(generator: Generator, requests: Sequence[Request | VattnError]) -> None:
    for index, request in enumerate(requests):
        if isinstance(request, VattnError):
            print(json.dumps({"index": index, "error": f"{type(request).__name__}: {request}"}), flush=True)
    drafts = generator.scheduler.source is not None
    for _, ended in _steps(generator):
        for request in ended:
            row = {"index": requests.index(request.choices[0]), "text": request.text, "tokens": request.output}
            if len(request.choices) > 1:
                row["choice"] = request.index
            row |= {"reason": request.reason, "prompt_tokens": len(request.prompt), "reused_tokens": request.reused}
            if drafts:
                row |= {"drafted_tokens": request.drafted, "accepted_tokens": request.accepted}
            if request.sampling.logprobs is not None:
                row["logprobs"] = [each._asdict() for each in request.logprobs or ()]
            if request.prompt_logprobs is not None:
                row["prompt_logprobs"] = [each and each._asdict() for each in request.prompt_logprobs]
            if request.error is not None:
                row["error"] = f"{type(request.error).__name__}: {request.error}"
            print(json.dumps(row), flush=True)


def _steps(generator: Generator) -> Iterator[tuple[Progress, tuple[Request, ...]]]:
    """Run to the end; yield each progress with the outputs to show, which come once all of a prompt have ended."""
    shown: set[Request] = set()
    while generator.busy:
        for one in generator.step():
            choices = one.request.choices
            ended: tuple[Request, ...] = ()
            if choices[0] not in shown and all(choice.done for choice in choices):
                shown.add(choices[0])
                ended = tuple(dict.fromkeys((*one.request.best, *(each for each in choices if each.error is not None))))
            yield one, ended
