"""`python -m vattn kv-report`: what every KV cache format costs and saves, on a model and a text of the user's."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vattn.cache.stored_rows import decode_stored, encode_stored
from vattn.calibration.calibrate import Calibration, calibrate
from vattn.calibration.plant_outliers import plant_outliers
from vattn.calibration.result_files import check_output, check_picture, figures, write_picture
from vattn.calibration.step_runner import StepRunner, cached_layers
from vattn.cli.checkpoints import add_model_arguments, find_checkpoint, load_model
from vattn.cli.texts import read_text, split_text
from vattn.config.arguments import parse_bytes
from vattn.config.attention import CacheConfig
from vattn.config.files import write_whole
from vattn.errors import ConfigError, VattnError
from vattn.layers import QuantConfig
from vattn.layers.base.paged_attention import CachedAttention
from vattn.quantization.formats import KV_FORMATS, dtype_name, kv_cache_dtypes, resolve_kv_cache_dtype

WINDOW, CHUNK = 1024, 128
"""Tokens of one request at most, and of one step: most keys and values are read back from the cache."""


@dataclass(frozen=True)
class Row:
    """One format on one model.

    Attributes:
        weights: "as they are", or how they were changed.
        cache: canonical name of the format.
        scales: "none", "in the cache", "unit", "calibrated" or "calibrated per head".
        bytes_per_token: over all layers, what the codes and their scales take.
        max_tokens: how many tokens the given memory holds.
        bits_per_byte: of the text.
        over_plain: relative to the cache in the model's dtype.
        error: standard error of `over_plain`, from the differences token by token.
        top1: share of tokens with the same likeliest next token as with the plain cache.
        worst: largest difference of a logit.
        key_error: relative squared error of the stored keys, in the layer where it is largest.
        refused: why the format cannot run, otherwise "".
    """

    weights: str
    cache: str
    scales: str
    bytes_per_token: float = math.nan
    max_tokens: int = 0
    bits_per_byte: float = math.nan
    over_plain: float = math.nan
    error: float = math.nan
    top1: float = math.nan
    worst: float = math.nan
    key_error: float = math.nan
    refused: str = ""

    @property
    def noise(self) -> bool:
        """Whether the difference is within two standard errors, where chance alone would put it 19 times in 20."""
        return not self.refused and self.over_plain != 0 and not abs(self.over_plain) > 2 * self.error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    add_model_arguments(parser)
    parser.add_argument("--text", type=Path, help="text to measure on; default heldout.txt beside the model")
    parser.add_argument("--calibration-text", type=Path, help="text for scales; default the first quarter of the text")
    parser.add_argument(
        "--margin", type=float,
        help="calibrated scales, of FP8 and NVFP4 caches, are made for values so many times as large as any seen "
        "(default 1.25): codes with an exponent lose nothing by that, values beyond the largest code are cut",
    )  # fmt: skip
    parser.add_argument(
        "--rope-length", type=int,
        help=f"for models whose RoPE goes by lengths (longrope, dynamic): frequencies of that length, for requests of "
        f"{WINDOW} tokens or of as many",
    )  # fmt: skip
    parser.add_argument(
        "--max-bytes", type=int, default=4096,
        help="how much of the text is measured (default 4096); four times as much halves the standard errors",
    )  # fmt: skip
    parser.add_argument(
        "--formats", nargs="+", metavar="FORMAT", help="default every format, each with all of its kinds of scales"
    )
    parser.add_argument("--memory", default="16GiB", help="cache memory for the column of tokens")
    parser.add_argument(
        "--outliers", type=int, nargs="?", const=12, metavar="N",
        help="measure a variant too in which a few key and value channels are 2^N times as large (default N: 12)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="bits added over bytes per token, as an image (needs matplotlib)")


def main(options: argparse.Namespace) -> int:
    """Run the command and return 0."""
    rows = list(measure(options))
    print(table(rows, options.memory))
    if options.json:
        write_whole(options.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot, _subject(options))
    return 0


def _subject(options: argparse.Namespace) -> str:
    text = options.text.name if options.text else "heldout.txt"
    return f"vattn kv-report: {Path(options.model).name} on up to {options.max_bytes:,} bytes of {text}"


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield one row per variant of the weights, format and source of scales; progress goes to stderr.

    Raises:
        ConfigError: a text or model that cannot be used, an unknown format, a number out of range, or a file of results
            that could not be written.
        MissingPackageError: a plot without matplotlib.
    """
    if options.max_bytes < 2:
        raise ConfigError(f"--max-bytes {options.max_bytes}", "at least 2", "ask for as much as the text has")
    if options.outliers is not None and not 1 <= options.outliers <= 24:
        raise ConfigError(f"--outliers {options.outliers}", "an exponent of two from 1 to 24", "leave the number out")
    length = options.rope_length
    if length is not None and length < 1:
        raise ConfigError(f"--rope-length {length}", "at least 1", "give the length that the model is meant for")
    check_output("--json", options.json)
    check_output("--plot", options.plot)
    if options.plot:
        check_picture(options.plot, f"--plot {options.plot}", "--plot out.png")
    memory = parse_bytes(options.memory)
    formats = _formats(options.formats)
    margin = _margin(options.margin, formats)
    model, tokenizer = load_model(options.model, options.device, options.dtype)
    plain = dtype_name(model.dtype)
    path = options.text or find_checkpoint(options.model) / "heldout.txt"
    text = read_text(path, options.max_bytes)
    most = min(WINDOW, length or WINDOW)
    windows = split_text(tokenizer.encode(text), f"text {path}", most)
    sample, what = text[: len(text) // 4], f"the first quarter of text {path}, which scales are calibrated on"
    if options.calibration_text:
        sample = read_text(options.calibration_text, options.max_bytes)
        what = f"calibration text {options.calibration_text}"
    samples = [window[:-1] for window in split_text(tokenizer.encode(sample), what, most)]
    variants = ["as they are", *([f"with outliers x {1 << options.outliers}"] if options.outliers else [])]
    kinds = [(plain, "none"), *((name, scales) for name in formats for scales in _sources(name))]
    done, total = 0, len(variants) * len(kinds)
    print(
        f"measuring {total} caches on {len(text.encode()):,} bytes of {path}, each by a run of the model over them; "
        "--formats and --max-bytes make it less",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    for weights in variants:
        if weights != "as they are":
            _plant(model, options.outliers)
        subject = _Subject(model, windows, len(text.encode()), memory, weights, length)
        subject.calibrate(samples, margin)
        for name, scales in kinds:
            done += 1
            print(f"[{done}/{total}] weights {weights}, {name}, scales {scales}", file=sys.stderr, flush=True)
            yield subject.row(name, scales)


class _Subject:
    """One model and text, measured with one format after the other."""

    def __init__(
        self, model: Any, windows: list[list[int]], num_bytes: int, memory: int, weights: str, rope_length: int | None
    ) -> None:
        self.model, self.windows, self.num_bytes, self.memory, self.weights = model, windows, num_bytes, memory, weights
        self.rope_length = rope_length
        self.blocks = 1 + -(-WINDOW // CacheConfig().block_size)
        self.plain: list[Tensor] = []
        self.plain_nats: Tensor | None = None
        self.calibration: Calibration | None = None

    def calibrate(self, windows: list[list[int]], margin: float) -> None:
        from vattn.integrations.transformers import disable, enable

        seen = calibrate(enable(self.model, num_blocks=self.blocks, rope_length=self.rope_length), [windows])
        disable(self.model)
        roomy = {
            layer: {kind: [margin * value for value in values] for kind, values in kinds.items()}
            for layer, kinds in seen.layers.items()
        }
        self.calibration = replace(seen, layers=roomy)

    def row(self, name: str, scales: str) -> Row:
        from vattn.integrations.transformers import disable, enable

        config = CacheConfig(cache_dtype=name)
        try:
            # `calibrate` has proven the model, which a proof runs in its own dtype whatever the cache is.
            packed = enable(
                self.model, cache_config=config, num_blocks=self.blocks, rope_length=self.rope_length, prove=False,
                **self._scales(scales),
            )  # fmt: skip
        except VattnError as error:
            return Row(self.weights, name, scales, refused=str(error).splitlines()[0])
        try:
            with _key_errors(packed) as errors:
                nats, top1, worst = self._run(packed)
        finally:
            disable(self.model)
        cache = packed.kv_cache
        assert cache is not None
        per_token = cache.bytes_per_block / cache.block_size
        bits = float(nats.sum()) / math.log(2) / self.num_bytes
        if self.plain_nats is None:
            self.plain_nats = nats
        over, spread = relative_change(nats, self.plain_nats)
        return Row(
            self.weights, name, scales, per_token, int(self.memory / per_token), bits, over, spread, top1, worst,
            max(float(lost / total) for lost, total in errors.values()),
        )  # fmt: skip

    def _scales(self, scales: str) -> dict[str, Any]:
        given: dict[str, dict[str, Any]] = {
            "unit": {"quant_config": QuantConfig("unit", "unit")},
            "calibrated": {"calibration": self.calibration},
            "calibrated per head": {"calibration": self.calibration, "scales_per_head": True},
        }
        return given.get(scales, {})

    def _run(self, packed: Any) -> tuple[Tensor, float, float]:
        """Return nats of each token, share of equal likeliest tokens, and the largest difference of a logit."""
        runner, first = StepRunner(packed, CHUNK), not self.plain
        nats: list[Tensor] = []
        same, worst = 0, 0.0
        for index, window in enumerate(self.windows):
            logits = torch.cat(list(runner.logits(window[:-1])))
            targets = torch.tensor(window[1:], device=logits.device)
            nats.append(torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none").cpu())
            if first:
                self.plain.append(logits.cpu())
            plain = self.plain[index].to(logits.device)
            same += int((plain.argmax(-1) == logits.argmax(-1)).sum())
            worst = max(worst, float((plain.float() - logits.float()).abs().max()))
        each = torch.cat(nats)
        return each, same / len(each), worst


@contextmanager
def _key_errors(model: Any) -> Iterator[dict[str, Tensor]]:
    """Add up the squared errors of the keys that layers store, and the squares of the keys: `[2]` by prefix."""
    seen: dict[str, Tensor] = {}

    def note(prefix: str, layer: CachedAttention, args: tuple[Tensor, ...]) -> None:
        rows, config = args[1].view(len(args[1]), -1, layer.head_size), layer.config
        assert config is not None
        scale = layer.k_scale if KV_FORMATS[config.kv_cache_dtype].quantised else None
        read = decode_stored(encode_stored(rows, config, False, scale), config, False, scale)
        lost, total = (read - rows.float()).double().square().sum(), rows.double().square().sum()
        seen[prefix] = seen.get(prefix, 0) + torch.stack((lost, total))

    with ExitStack() as hooks:
        for prefix, layer in cached_layers(model).items():
            hooks.enter_context(layer.register_forward_pre_hook(functools.partial(note, prefix)))
        yield seen


def relative_change(nats: Tensor, plain: Tensor) -> tuple[float, float]:
    """Return by how much a text costs more than before, relatively, and the standard error of that.

    The same tokens are compared, so the spread of their differences counts, not that of the text. They are taken as
    independent.

    Args:
        nats, plain: `[n]`, of each token with and without the change.

    Returns:
        The change, and its standard error; NaN for a single token.

    Example:
        >>> relative_change(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.5, 2.5]))
        (0.2, 0.1)
    """
    more, before = (nats - plain).double(), float(plain.double().sum())
    error = float(more.std()) * math.sqrt(len(more)) if len(more) > 1 else math.nan
    return float(more.sum()) / before, error / before


def _sources(name: str) -> list[str]:
    fmt = KV_FORMATS[name]
    if fmt.quantised:
        return ["unit", "calibrated", "calibrated per head"]
    return ["in the cache" if fmt.packed else "none"]


def _formats(names: list[str] | None) -> list[str]:
    """Return canonical names of formats that change what is stored, each once; aliases are understood."""
    known = [name for name, fmt in KV_FORMATS.items() if fmt.quantised or fmt.packed]
    found = {name: resolve_kv_cache_dtype(name, torch.bfloat16) for name in names or known if name in kv_cache_dtypes()}
    for name in names or ():
        if found.get(name) not in known:
            fix = "separate names by spaces, without commas" if "," in name else "choose among them"
            raise ConfigError(f"--formats {name}", ", ".join(known), fix)
    return list(dict.fromkeys(found.values()))


def _margin(given: float | None, formats: list[str]) -> float:
    """Return the margin of calibrated scales; refuse one that no format has a use for."""
    if given is None:
        return 1.25
    if not 1 <= given < 1e6:
        raise ConfigError(f"--margin {given}", "a number from 1 to a million", "take 1 for no margin")
    if not any(KV_FORMATS[name].quantised for name in formats):
        calibrated = [name for name, fmt in KV_FORMATS.items() if fmt.quantised]
        raise ConfigError(
            f"--margin {given} with --formats {' '.join(formats)}", ", ".join(calibrated), "leave --margin out"
        )
    return given


def _plant(model: Any, exponent: int) -> None:
    """Make a few key and value channels of every head `2^exponent` times as large; the function stays the same."""
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    try:
        planted = plant_outliers(state, head_size, key_exponent=exponent, value_exponent=exponent)
    except KeyError as error:
        raise ConfigError(
            f"--outliers for a model without {error}", "models with q_proj, k_proj, v_proj and o_proj", "leave it out"
        ) from error
    model.load_state_dict(planted)


def table(rows: list[Row], memory: str) -> str:
    """Return the rows as a Markdown table, and below it how far the differences can be trusted."""
    lines = [
        f"| weights | cache | scales | bytes a token | tokens in {memory} | bits per byte | to plain | standard error "
        "| same top-1 | worst logit | key error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.refused:
            lines.append(f"| {row.weights} | {row.cache} | {row.scales} | {row.refused} | | | | | | | |")
            continue
        lines.append(
            f"| {row.weights} | {row.cache} | {row.scales} | {row.bytes_per_token:.0f} | {row.max_tokens:,} | "
            f"{row.bits_per_byte:.4f} | {row.over_plain:+.2%}{' *' if row.noise else ''} | {row.error:.2%} | "
            f"{row.top1:.2%} | {row.worst:.3f} | {row.key_error:.2%} |"
        )
    lines += ["", "Key error: relative squared error of the stored keys in the worst layer."]
    if any(row.noise for row in rows):
        lines += ["", "\\* within two standard errors: chance may make such a difference. Measure a longer text."]
    return "\n".join(lines)


def plot(rows: list[Row], path: Path, subject: str) -> None:
    """Draw what formats add to the bits per byte, a line for each and a panel for each variant of the weights.

    The axis is linear within 0.1 % and logarithmic beyond.

    Raises:
        MissingPackageError: matplotlib is missing.
    """
    variants = list(dict.fromkeys(row.weights for row in rows))
    kept = [row for row in rows if not row.refused and row.error > 0]
    kept.sort(key=lambda row: -row.bytes_per_token)
    lines = list(dict.fromkeys((row.cache, row.scales, round(row.bytes_per_token)) for row in kept))
    figure = figures()(figsize=(4 + 4 * len(variants), 2 + 0.25 * len(lines)), layout="constrained")
    panels = figure.subplots(1, len(variants), squeeze=False, sharey=True)[0]
    for panel, weights in zip(panels, variants, strict=True):
        shown = [row for row in kept if row.weights == weights]
        heights = [lines.index((row.cache, row.scales, round(row.bytes_per_token))) for row in shown]
        changes, errors = ([100 * getattr(row, name) for row in shown] for name in ("over_plain", "error"))
        panel.errorbar(changes, heights, xerr=errors, fmt="o", markersize=5, capsize=2)
        panel.axvline(0, color="grey", linewidth=0.8)
        panel.set_xscale("symlog", linthresh=0.1)
        panel.grid(True, axis="y", alpha=0.2)
        panel.set(title=f"weights {weights}", xlabel="change of the bits per byte, %")
    names = [cache if scales in ("none", "in the cache") else f"{cache}, {scales}" for cache, scales, _ in lines]
    panels[0].set_yticks(
        range(len(lines)), [f"{name}: {size} B" for name, (_, _, size) in zip(names, lines, strict=True)]
    )
    panels[0].set_ylim(len(lines) - 0.5, -0.5)
    panels[0].set_ylabel("format, scales and bytes a token of the cache")
    figure.suptitle(f"{subject}\nchange against a cache in {rows[0].cache}, with bars of one standard error")
    write_picture(figure, path, dpi=120)
