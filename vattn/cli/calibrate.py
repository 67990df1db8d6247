"""`python -m vattn calibrate`: run a model on a text and write the scales that FP8 caches and linear layers need."""

from __future__ import annotations

import argparse
from pathlib import Path

from vattn.calibration.calibrate import KINDS, calibrate
from vattn.calibration.result_files import check_output
from vattn.cli.checkpoints import SCALES_FILE, add_model_arguments, find_checkpoint, load_model
from vattn.cli.texts import read_text, split_text
from vattn.config.attention import CacheConfig
from vattn.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options."""
    add_model_arguments(parser)
    parser.add_argument("--text", type=Path, required=True, help="sample text, such as the model will meet")
    parser.add_argument("--max-bytes", type=int, default=1 << 20, help="how much of the text is read")
    parser.add_argument("--length", type=int, default=2048, help="tokens of one request")
    parser.add_argument(
        "--linears", action="store_true", help="inputs of linear layers too, for `vattn.quantise_linears`"
    )
    parser.add_argument(
        "--rope-length", type=int, help="longest request, for models whose RoPE goes by lengths (longrope, dynamic)"
    )
    parser.add_argument("--out", type=Path, help=f"default {SCALES_FILE} beside the checkpoint, where others find it")


def main(options: argparse.Namespace) -> int:
    """Run the command and return 0."""
    for name in ("max_bytes", "length"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}", "at least 1", "raise it")
    folder = find_checkpoint(options.model)
    out = options.out or folder / SCALES_FILE
    check_output("--out", out, replaced=True)
    model, tokenizer = load_model(folder, options.device, options.dtype)
    ids = tokenizer.encode(read_text(options.text, options.max_bytes))
    # Without the token to predict, which a calibration does not use.
    texts = [text[:-1] for text in split_text(ids, f"text {options.text}", options.length)]
    from vattn.integrations.transformers import enable

    blocks = 1 + -(-options.length // CacheConfig().block_size)
    packed = enable(model, num_blocks=blocks, rope_length=options.rope_length)
    seen = calibrate(packed, [[text] for text in texts], linears=options.linears, progress=True)
    seen.save(out)
    print(f"{seen.tokens} tokens of {options.text}, {len(seen.layers)} layers. Largest magnitudes:")
    for kind in KINDS:
        largest = {name: max(values[kind]) for name, values in seen.layers.items()}
        layer = max(largest, key=lambda name: largest[name])
        print(f"  {kind:<7} {largest[layer]:.4g} in {layer}")
    if seen.inputs:
        name = max(seen.inputs, key=lambda name: seen.inputs[name])
        print(f"  {'inputs':<7} {seen.inputs[name]:.4g} of {name}")
    print(f"Wrote {out}")
    return 0
