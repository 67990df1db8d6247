"""`python -m examples.demo`: a small trained model, compiled, answers prompts on the paged cache, and says how well."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import vattn
from vattn.cache.allocation import KVCacheAllocation
from vattn.calibration.plant_outliers import plant_outliers
from vattn.config.attention import CacheConfig
from vattn.errors import ConfigError, DeviceError, UnsupportedRequestError, VattnError
from vattn.generation import Generator, Request, Sampling
from vattn.layers import QuantConfig, clip_rates, observe_clipping
from vattn.quantization.formats import MODEL_DTYPES, dtype_name

from . import quality, report
from .checkpoint import build_llama, read_checkpoint
from .model import AttentionOptions, Llama, LlamaConfig

DEFAULT_MODEL = Path(__file__).parents[1] / "demo_model"

PROMPTS = (
    "def ",
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self",
    'def read_lines(path):\n    """Return the lines of a text file."""\n    with open(path',
    "class TestQueue(unittest.TestCase):\n    def test_put(self):\n        q = Queue()\n        self.",
)
"""Beside the beginning of the held-out text, which is longer than one step's token budget."""

BLOCK_SIZE = 16
MAX_NUM_REQS = 4
TOKEN_BUDGET = 256
GRAPH_SIZES = (4, 2)

CACHES: dict[str, tuple[CacheConfig, QuantConfig]] = {
    "auto": (CacheConfig(BLOCK_SIZE), QuantConfig()),
    "fp8, unit scales": (CacheConfig(BLOCK_SIZE, "fp8"), QuantConfig(k_scale="unit", v_scale="unit")),
    "fp8, calibrated": (CacheConfig(BLOCK_SIZE, "fp8", calculate_kv_scales=True), QuantConfig()),
}

OUTLIERS = {"key_exponent": 12, "value_exponent": 12}
"""Planted channels are 4096 times as large: far past 448, the most that e4m3 stores, and still so that a scale made for
them leaves the other channels above e4m3's smallest values."""


@dataclass(frozen=True)
class Setting:
    """The options of the command line, read and checked."""

    folder: Path
    config: LlamaConfig
    tensors: dict[str, Tensor]
    heldout: bytes
    prompts: list[bytes]
    device: torch.device
    dtype: torch.dtype
    backend: str | None
    max_new_tokens: int
    temperature: float


@dataclass
class Results:
    """Everything that the demo found out, for `--json`."""

    model: dict[str, Any] = field(default_factory=dict)
    backend: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, Any] = field(default_factory=dict)
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    continuations: list[dict[str, str]] = field(default_factory=list)
    bits_per_byte: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status: 0, or 2 with one line on stderr for what a user can set right."""
    options = _parser().parse_args(argv)
    # Matrices this small gain little from many threads, and threads that share busy cores stall one another.
    torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // 2), 4))
    try:
        run(read_setting(options), quick=options.quick, json_file=options.json)
    except VattnError as error:
        print(f"vattn demo: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vattn demo", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, metavar="DIR", help="a byte-level Llama folder")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=tuple(MODEL_DTYPES), help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--backend", help="an attention backend by name, never replaced by another (default: auto)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="per prompt (default: 128; 16 with --quick)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=r"one prompt a line, \n and \t within it")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, and 4 KB of the held-out text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")
    return parser


def read_setting(options: argparse.Namespace) -> Setting:
    """Read the model, the texts and the rest of the command line.

    Raises:
        ConfigError: a file is missing or damaged, or an option is out of range.
        DeviceError: the device is not there.
    """
    folder: Path = options.model
    if not folder.is_dir():
        raise ConfigError(
            f"no folder {folder}",
            "a folder with config.json, model.safetensors and heldout.txt",
            "run the demo from a clone of the repository (a wheel carries no model), or pass --model DIR",
        )
    config, tensors = read_checkpoint(folder)
    if config.vocab_size != 256:
        raise ConfigError(
            f"{folder} has a vocabulary of {config.vocab_size}", "256: one token a byte", "leave --model out"
        )
    heldout = _read_bytes(folder / "heldout.txt")
    device = _device(options.device)
    dtype = MODEL_DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    new = options.max_new_tokens if options.max_new_tokens is not None else (16 if options.quick else 128)
    if options.prompts is None:
        prompts = [prompt.encode() for prompt in PROMPTS] + [heldout[:600]]
    else:
        prompts = _read_prompts(options.prompts)
    longest = 1 + max(map(len, prompts)) + new
    if new < 1 or longest > config.max_positions or not 0 <= options.temperature < float("inf"):
        raise ConfigError(
            f"--max-new-tokens {new} at --temperature {options.temperature} after a prompt of {longest - new} bytes",
            f"1 or more, {config.max_positions} bytes together, and a temperature >= 0",
            "request fewer tokens or shorten the prompt",
        )
    if options.quick:
        heldout = heldout[:4096]
    return Setting(folder, config, tensors, heldout, prompts, device, dtype, options.backend, new, options.temperature)


def _read_bytes(file: Path) -> bytes:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error})", "a readable file", "restore it") from error
    if not data.strip():
        raise ConfigError(f"{file} is empty", "some text", "restore it")
    return data


def _read_prompts(file: Path) -> list[bytes]:
    lines = [line for line in _read_bytes(file).splitlines() if line.strip()]
    return [line.replace(b"\\n", b"\n").replace(b"\\t", b"\t") for line in lines]


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise DeviceError(f"--device {name}", "cpu, cuda or cuda:N", "leave --device out") from error
    there = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    if not there:
        raise DeviceError(f"--device {name}, which is not here", "cpu, or cuda with a GPU", "leave --device out")
    return device


def run(setting: Setting, *, quick: bool = False, json_file: Path | None = None) -> Results:
    """Run every part of the demo, print what it finds and return it."""
    start, results = time.perf_counter(), Results()
    model, cache = _build(setting, setting.tensors, CACHES["auto"], _pool_blocks(setting))
    _introduce(setting, model, cache, results)
    _compare_speed(setting, model, cache, results)
    del model, cache
    _compare_caches(setting, results)
    results.seconds = time.perf_counter() - start
    print(f"\nwhole demo: {results.seconds:.0f} s")
    if json_file is not None:
        json_file.write_text(json.dumps(vars(results), indent=2) + "\n")
    return results


def _build(
    setting: Setting, tensors: dict[str, Tensor], kind: tuple[CacheConfig, QuantConfig], num_blocks: int
) -> tuple[Llama, KVCacheAllocation]:
    options = AttentionOptions(*kind, setting.backend)
    model = build_llama(setting.config, tensors, options, dtype=setting.dtype, device=setting.device)
    return model, vattn.allocate_kv_cache(model, num_blocks=num_blocks)


def _max_seq_len(setting: Setting) -> int:
    return 1 + max(map(len, setting.prompts)) + setting.max_new_tokens


def _pool_blocks(setting: Setting) -> int:
    return 1 + MAX_NUM_REQS * -(-_max_seq_len(setting) // BLOCK_SIZE)


def _introduce(setting: Setting, model: Llama, cache: KVCacheAllocation, results: Results) -> None:
    config = setting.config
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"model  : {count / 1e6:.1f} million parameters, {config.num_layers} layers, {config.num_heads} query heads "
        f"and {config.num_kv_heads} KV heads of {config.head_size}; a token is a byte"
    )
    print(f"device : {setting.device}, {dtype_name(setting.dtype)}, torch {torch.__version__}", end="")
    print(f", {torch.get_num_threads()} thread(s)" if setting.device.type == "cpu" else "")
    print(cache)
    layers = (module for module in model.modules() if isinstance(module, vattn.Attention))
    (chosen,) = {layer.config for layer in layers if layer.config is not None}
    explanation = vattn.explain(chosen.replace(backend=setting.backend or "auto"), setting.device)
    print(report.heading("Attention backend"))
    print(explanation)
    results.model = {"parameters": count, "dtype": dtype_name(setting.dtype), "device": str(setting.device)}
    results.backend = {"chosen": explanation.chosen, "refusals": explanation.refusals, "request": chosen.encode()}


def _compare_speed(setting: Setting, model: Llama, cache: KVCacheAllocation, results: Results) -> None:
    """Generate eagerly, compile, capture, generate again."""
    print(report.heading("Generation: continuous batching on the paged cache"))
    eager, eager_speed = _generate(setting, _generator(setting, model, cache), "eager   ")
    results.tokens_per_second["eager"] = eager_speed
    forward, why_not = _compile(setting, model, cache, results)
    generator, why_no_graphs = _capture(setting, model, cache, forward)
    if generator.graphs is not None:
        why_no_graphs = str(generator.graphs.report)
        costs = [vars(cost) for cost in generator.graphs.report.costs]
        results.graphs = {"captured": generator.graphs.report.reason is None, "costs": costs}
    results.graphs["report"] = why_no_graphs
    compiled, compiled_speed = eager, eager_speed
    if forward is not None:
        compiled, compiled_speed = _generate(setting, generator, "compiled")
        results.tokens_per_second["compiled"] = compiled_speed
    for prompt, request in zip(setting.prompts, compiled, strict=True):
        print(f"\n  prompt of {len(prompt)} bytes:")
        print(report.quoted(prompt, bytes(request.output)))
        results.continuations.append(
            {"prompt": prompt.decode("latin-1"), "output": bytes(request.output).decode("latin-1")}
        )
    same = sum(a.output == b.output for a, b in zip(eager, compiled, strict=True))
    print(f"\neager    : {eager_speed:.0f} tokens/s, prompts included in the time")
    if forward is None:
        print(f"compiled : not compiled: {why_not}")
    else:
        print(f"compiled : {compiled_speed:.0f} tokens/s ({compiled_speed / eager_speed:.2f} x), {why_not}")
        why = "" if same == len(eager) else "; rounding decides close calls, and the rest of a text follows"
        print(f"texts    : {same} of {len(eager)} equal, eager against compiled{why}")
    print(f"graphs   : {why_no_graphs}")


def _samplings(setting: Setting) -> list[Sampling]:
    return [
        Sampling(setting.max_new_tokens, setting.temperature, seed=i, stop_token_ids=(0,))
        for i in range(len(setting.prompts))
    ]


def _generator(
    setting: Setting,
    model: Llama,
    cache: KVCacheAllocation,
    forward: Callable[..., Tensor] | None = None,
    graph_sizes: Sequence[int] = (),
) -> Generator:
    return Generator(
        model if forward is None else cast("nn.Module", forward),
        cache=cache,
        reuse_prefixes=False,
        compile="none",
        max_num_reqs=MAX_NUM_REQS,
        token_budget=TOKEN_BUDGET,
        max_seq_len=_max_seq_len(setting),
        graph_sizes=graph_sizes,
    )


def _generate(setting: Setting, generator: Generator, label: str) -> tuple[list[Request], float]:
    """Run the prompts to their end; returns them and tokens per second."""
    # What is set up on first use is no part of the speed.
    generator.generate([[0] * 5], Sampling(4, stop_token_ids=()))
    requests = [
        generator.add([0, *prompt], sampling)
        for prompt, sampling in zip(setting.prompts, _samplings(setting), strict=True)
    ]
    with report.Progress(label, setting.max_new_tokens * len(requests), "tokens") as bar:
        while generator.busy:
            generator.step()
            bar.update(sum(len(request.output) for request in requests))
        seconds = bar.seconds
    return requests, sum(len(request.output) for request in requests) / seconds


def _compile(
    setting: Setting, model: Llama, cache: KVCacheAllocation, results: Results
) -> tuple[Callable[..., Tensor] | None, str]:
    """Return the compiled model and what it took; without a compiler on the machine `None` and the reason."""
    before, forward = _graph_count(), vattn.compile(model)
    try:
        with report.Progress("compiling", total=1, unit="models") as bar:
            _generator(setting, model, cache, forward).generate([[0] * 5], Sampling(2, stop_token_ids=()))
            bar.update(1)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        reason = str(error.inner_exception).strip().splitlines()[0]
        results.compile = {"error": reason}
        return None, f"{type(error.inner_exception).__name__}: {reason}"
    seconds, graphs = bar.seconds, _graph_count() - before
    results.compile = {"seconds": seconds, "graphs": graphs}
    return forward, f"fullgraph in {seconds:.1f} s, {graphs} graph{'' if graphs == 1 else 's'} for prefill and decode"


def _graph_count() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _capture(
    setting: Setting, model: Llama, cache: KVCacheAllocation, forward: Callable[..., Tensor] | None
) -> tuple[Generator, str]:
    try:
        return _generator(setting, model, cache, forward, GRAPH_SIZES), ""
    except UnsupportedRequestError as error:
        return _generator(setting, model, cache, forward), f"no CUDA graphs: {error}"


def _compare_caches(setting: Setting, results: Results) -> None:
    """Print bits per byte for every cache format, with the weights as they are and with outliers planted."""
    text, length = setting.heldout, len(setting.heldout)
    print(report.heading(f"Bits per byte of the held-out text ({length} bytes, blocks of {quality.CONTEXT}, eager)"))
    planted = plant_outliers(setting.tensors, setting.config.head_size, **OUTLIERS)
    weights = {"plain": setting.tensors, "outliers planted": planted}
    rows = []
    steps = quality.num_steps(length)
    with report.Progress("measuring", len(weights) * len(CACHES) * steps, "steps") as bar:
        for name, tensors in weights.items():
            baseline = float("nan")
            for cache_name, kind in CACHES.items():
                row = _measure(setting, tensors, kind, text, bar)
                row = {"weights": name, "cache": cache_name, **row}
                baseline = row.get("bits_per_byte", baseline) if cache_name == "auto" else baseline
                results.bits_per_byte.append(row)
                rows.append(_row(row, baseline))
    header = ["weights", "cache", "bits/byte", "to auto", "keys clipped", "values clipped", ""]
    print(report.table(header, rows, left=2))
    print(
        f"\noutliers planted: in every KV head 4 key and 2 value channels times 2**{OUTLIERS['key_exponent']}, and the "
        "weights that meet them\ndivided by as much: the same function, so `auto` must not change"
        + (" (but float16 cannot hold the small weights)." if setting.dtype == torch.float16 else ".")
        + "\nfp8 is e4m3, one scale per layer for keys and one for values; calibrated: from the first real tokens, on"
        "\nthe device. Eager, because compiling a format takes longer than measuring it."
    )


def _measure(
    setting: Setting,
    tensors: dict[str, Tensor],
    kind: tuple[CacheConfig, QuantConfig],
    text: bytes,
    bar: report.Progress,
) -> dict[str, Any]:
    blocks = quality.blocks_needed(BLOCK_SIZE)
    try:
        model, cache = _build(setting, tensors, kind, blocks)
    except UnsupportedRequestError as error:
        return {"refused": str(error)}
    with observe_clipping(model):
        bits = quality.bits_per_byte(model, cache, text, progress=bar.advance)
    rates = list(clip_rates(model).values())
    found: dict[str, Any] = {"bits_per_byte": bits}
    if rates:
        for part in ("key", "value"):
            found[f"{part}s_clipped"] = sum(rate[part] for rate in rates) / len(rates)
    return found


def _row(row: dict[str, Any], baseline: float) -> list[str]:
    cells = [row["weights"], row["cache"]]
    if "refused" in row:
        return cells + ["-"] * 4 + [row["refused"].splitlines()[0]]
    bits = row["bits_per_byte"]
    clipped = [f"{row[part]:.2%}" if part in row else "-" for part in ("keys_clipped", "values_clipped")]
    return [*cells, f"{bits:.4f}", f"{bits / baseline - 1:+.2%}" if row["cache"] != "auto" else "", *clipped, ""]
