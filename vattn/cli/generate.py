"""`python -m vattn generate`: prompts from the command line or a file through a model of transformers."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vattn.config.attention import CacheConfig
from vattn.config.device import DeviceInfo
from vattn.errors import ConfigError, MissingPackageError, ScaleError, VattnError
from vattn.generation.generator import Generator
from vattn.generation.prompt_lookup import PromptLookup
from vattn.generation.request import Request
from vattn.generation.sampling import Sampling
from vattn.generation.setup import keeps_states
from vattn.layers import QuantConfig
from vattn.passes.entry import options as fusing_options
from vattn.quantization.formats import MODEL_DTYPES, kv_cache_dtypes

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
SCALES_FILE = "vattn_scales.json"
_VOCABULARIES = ("tokenizer.*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken.json")
"""Files that some tokenizer, of whatever class, is made of."""


class ByteTokenizer:
    """Tokens are bytes, byte 0 before each text: for models with a vocabulary of 256 and no tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return byte 0 and the text's bytes."""
        return [0, *text.encode()]

    def decode(self, ids: list[int]) -> str:
        """Return the text of bytes; what is no character becomes U+FFFD."""
        return bytes(ids).decode(errors="replace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="folder of a checkpoint; default the demo model")
    parser.add_argument("--prompt", action="append", default=[], help="a text; may be given several times")
    parser.add_argument("--file", type=Path, help='one JSON object a line, {"prompt": ...} and any option of Sampling')
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], help="end a text where this appears")
    parser.add_argument(
        "--dequantise", action="store_true",
        help="an FP8 checkpoint: weights as transformers loads them; default its codes and scales as they are",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=list(MODEL_DTYPES), help="default that of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=kv_cache_dtypes(), metavar="FORMAT")
    parser.add_argument(
        "--kv-scales", help=f"file of vattn.calibrate, or 'unit'; default {SCALES_FILE} beside the checkpoint"
    )
    parser.add_argument(
        "--rope-length", type=int, help="longest request, for models whose RoPE goes by lengths (longrope, dynamic)"
    )
    parser.add_argument("--memory", default=None, help="bytes of the cache, such as 2GiB; default 40%% of what is free")
    parser.add_argument("--max-num-reqs", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=0, help="guess up to this many tokens a step by prompt lookup")
    parser.add_argument("--hybrid", action="store_true", help="a cache with groups: windows give their blocks back")
    parser.add_argument("--backend", default=None, help="attention backend; default the first that accepts")
    parser.add_argument("--compile", default=None, choices=["layers", "model", "none"])
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")


def main(options: argparse.Namespace) -> int:
    """Run the command; returns 1 if a request failed, else 0."""
    jobs = _jobs(options)
    generator = make_generator(options)
    requests = [_add(generator, prompt, sampling) for prompt, sampling in jobs]
    (_show_json if options.json else _show_text)(generator, requests)
    failed = [request for request in requests if isinstance(request, VattnError) or request.error is not None]
    return 1 if failed else 0


def make_generator(options: argparse.Namespace) -> Generator:
    """Load the model and make its generator.

    Raises:
        ConfigError: no checkpoint in the folder, one without a tokenizer, or `--dequantise` and nothing in FP8.
        ScaleError, UnsupportedRequestError: an FP8 checkpoint that `load_fp8_linears` refuses.
    """
    model, tokenizer = load_model(options.model, options.device, options.dtype)
    from vattn.integrations.transformers import enable, load_fp8_linears

    holds_fp8 = _holds_fp8(options.model)
    if options.dequantise and not holds_fp8:
        raise ConfigError(
            f"--dequantise with --model {options.model}", "a checkpoint with FP8 weights in safetensors", "leave it out"
        )
    quantised = holds_fp8 and not options.dequantise
    if quantised:
        load_fp8_linears(model, options.model)
    quant, calibration = _scales(options)
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
                error.got, "--kv-scales with a file of vattn.calibrate, or 'unit'", "--kv-scales unit if 1.0 is meant"
            ) from error
    for warning in caught:
        text = str(warning.message).replace("CacheConfig(cache_dtype='fp8')", "--kv-cache-dtype fp8")
        print(f"warning: {text}", file=sys.stderr)
    max_num_reqs = options.max_num_reqs if keeps_states(packed) else None
    memory = options.memory or _free_memory(options.device)
    packed.allocate(memory=memory, hybrid=options.hybrid, max_num_reqs=max_num_reqs)
    lookup = PromptLookup(num_drafts=options.drafts) if options.drafts else None
    how = options.compile or ("layers" if torch.device(options.device).type == "cuda" else "none")
    return Generator(
        packed,
        tokenizer,
        max_num_reqs=options.max_num_reqs,
        speculation=lookup,
        compile=options.compile,
        # Fuses what quantises the inputs of FP8 layers.
        compile_options={"options": fusing_options()} if quantised and how != "none" else None,
    )


def load_model(folder: Path, device: str, dtype: str | None) -> tuple[Any, Any]:
    """Return a local checkpoint's model in eval mode and its tokenizer; nothing is downloaded."""
    DeviceInfo.of(device)  # raises vattn's own error for a missing device, before anything is read
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            "python -m vattn generate without transformers", "transformers >= 5", "pip install 'vattn[transformers]'"
        ) from error
    if folder == DEMO_MODEL and not folder.is_dir():
        raise ConfigError(
            f"no folder {folder}",
            "a folder with config.json and safetensors",
            "run this from a clone of the repository (a wheel carries no model), or pass --model DIR",
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {folder}", "a folder with config.json and safetensors", "check the path")
    kind = "auto" if dtype is None else MODEL_DTYPES[dtype]
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind, local_files_only=True)
    except Exception as error:
        # Torn files, weights of other shapes, packages that are missing: each has a class of its own.
        raise ConfigError(f"--model {folder}: {error}", "a causal language model", "check the checkpoint") from error
    return model.eval().requires_grad_(False).to(device), _tokenizer(transformers, folder, model.config.vocab_size)


def _tokenizer(transformers: Any, folder: Path, vocabulary: int) -> Any:
    if vocabulary == 256 and not list(folder.glob("tokenizer*")):
        return ByteTokenizer()
    missing = f"--model {folder} without a tokenizer"
    fix = "copy its files into the folder, as save_pretrained writes them"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{missing}: {error}", "its files with the checkpoint, such as tokenizer.json", fix
        ) from error
    # Without any file, some classes begin with a vocabulary of their special tokens, and every text is empty.
    files = sorted(set((getattr(tokenizer, "vocab_files_names", None) or {}).values()))
    if files and not any(next(folder.glob(pattern), None) for pattern in (*files, *_VOCABULARIES)):
        what = f"{missing}: {type(tokenizer).__name__} finds none of its files there"
        raise ConfigError(what, f"one of {', '.join(files)} with the checkpoint", fix)
    return tokenizer


def _holds_fp8(folder: Path) -> bool:
    """Return whether a checkpoint has weights in FP8."""
    from vattn.integrations.transformers.checkpoint import Checkpoint

    if not any(folder.glob("*.safetensors")):
        return False
    checkpoint = Checkpoint(folder)
    weights = (name for name in checkpoint if name.endswith(".weight")) if checkpoint.quantization else ()
    return any(checkpoint.dtype(name).startswith("F8_") for name in weights)


def _scales(options: argparse.Namespace) -> tuple[QuantConfig | None, str | None]:
    beside = options.model / SCALES_FILE
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


def _jobs(options: argparse.Namespace) -> list[tuple[str, Sampling]]:
    """Return prompts, each with its sampling."""
    common = Sampling(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_k=options.top_k,
        top_p=options.top_p, seed=options.seed, stop_strings=tuple(options.stop),
    )  # fmt: skip
    jobs = [(prompt, common) for prompt in options.prompt]
    if options.file is not None:
        try:
            lines = options.file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file {options.file}: {error}", "a file of UTF-8 text", "check the path") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                jobs.append(_job(line, f"{options.file}:{number}", common))
    if not jobs:
        raise ConfigError("nothing to generate", "--prompt TEXT or --file prompts.jsonl", "give at least one prompt")
    return jobs


def _job(line: str, where: str, common: Sampling) -> tuple[str, Sampling]:
    try:
        job = json.loads(line)
        if not isinstance(job, dict):
            raise TypeError(f"a line that holds {type(job).__name__}, no object")
        prompt = job.pop("prompt")
        if not isinstance(prompt, str):
            raise TypeError("prompt is no text")
        return prompt, replace(common, **job)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: {type(error).__name__}: {error}",
            '{"prompt": "...", ...} with options of vattn.Sampling',
            "fix it",
        ) from error


def _add(generator: Generator, prompt: str, sampling: Sampling) -> Request | VattnError:
    try:
        return generator.add(prompt, sampling)
    except VattnError as error:
        return error


def _show_text(generator: Generator, requests: list[Request | VattnError]) -> None:
    """Stream a single text as it comes; print several as they end."""
    alone = len(requests) == 1
    for index, request in enumerate(requests):
        if isinstance(request, VattnError):
            print(f"[{index}] {type(request).__name__}: {request}", file=sys.stderr)
    while generator.busy:
        for one in generator.step():
            if alone:
                print(one.text, end="", flush=True)
            elif one.request.done:
                print(f"[{requests.index(one.request)}] {one.request.text}", flush=True)
            if one.request.error is not None:
                print(f"{type(one.request.error).__name__}: {one.request.error}", file=sys.stderr)
    print(end="\n" if alone else "")
    now = generator.statistics()
    print(
        f"{now.generated_tokens} tokens in {now.seconds:.2f} s, {now.tokens_per_second:.0f} tokens/s; cache of "
        f"{now.num_blocks} blocks, {now.preemptions} preemptions, {now.reused_tokens} prompt tokens reused"
        + (f", {now.accepted_tokens} of {now.drafted_tokens} guesses right" if now.drafted_tokens else ""),
        file=sys.stderr,
    )


def _show_json(generator: Generator, requests: list[Request | VattnError]) -> None:
    for index, request in enumerate(requests):
        if isinstance(request, VattnError):
            print(json.dumps({"index": index, "error": f"{type(request).__name__}: {request}"}), flush=True)
    while generator.busy:
        for one in generator.step():
            request = one.request
            if not request.done:
                continue
            row = {"index": requests.index(request), "text": request.text, "tokens": request.output}
            row |= {"reason": request.reason, "prompt_tokens": len(request.prompt), "reused_tokens": request.reused}
            if generator.scheduler.lookup is not None:
                row |= {"drafted_tokens": request.drafted, "accepted_tokens": request.accepted}
            if request.error is not None:
                row["error"] = f"{type(request.error).__name__}: {request.error}"
            print(json.dumps(row), flush=True)
