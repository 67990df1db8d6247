"""Find, load and describe the checkpoint that a command's `--model` names; nothing is downloaded."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from vattn.config.device import DeviceInfo
from vattn.errors import ConfigError, MissingPackageError
from vattn.quantization.formats import MODEL_DTYPES

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


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options that choose a model."""
    parser.add_argument(
        "--model", type=str, default=str(DEMO_MODEL),
        help="folder of a checkpoint, or the name of a model that `hf download` has fetched; default the demo model",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=list(MODEL_DTYPES), help="default that of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def find_checkpoint(model: str | Path) -> Path:
    """Return the folder of a checkpoint that is a folder, or a model of the hub in the local cache.

    Raises:
        ConfigError: neither.
        MissingPackageError: the name of a model without transformers.
    """
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder
    if folder == DEMO_MODEL:
        raise ConfigError(
            f"no folder {folder}",
            "a folder with config.json and safetensors",
            "run this from a clone of the repository (a wheel carries no model), or pass --model DIR",
        )
    name = str(model)
    if folder.exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        raise ConfigError(f"--model {name}", "a folder with config.json and safetensors", "check the path")
    _transformers()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(
            f"--model {name}, which is no folder with config.json and not among the downloaded models of the hub",
            "a folder, or a downloaded model",
            f"run `hf download {name}` first",
        ) from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            "a command that loads a model, without transformers",
            "transformers >= 5",
            "pip install 'vattn[transformers]'",
        ) from error
    return transformers


def load_model(model: str | Path, device: str, dtype: str | None) -> tuple[Any, Any]:
    """Return a checkpoint's model in eval mode and its tokenizer."""
    DeviceInfo.of(device)  # raises vattn's own error for a missing device, before anything is read
    folder, transformers = find_checkpoint(model), _transformers()
    kind = "auto" if dtype is None else MODEL_DTYPES[dtype]
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind, local_files_only=True)
    except Exception as error:
        # Torn files, weights of other shapes and missing packages each raise another class.
        raise ConfigError(f"--model {folder}: {error}", "a causal language model", "check the checkpoint") from error
    return loaded.eval().requires_grad_(False).to(device), _tokenizer(transformers, folder, loaded.config.vocab_size)


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


def holds_fp8(folder: Path) -> bool:
    """Return whether a checkpoint has weights in FP8."""
    from vattn.integrations.transformers.checkpoint import Checkpoint

    if not any(folder.glob("*.safetensors")):
        return False
    checkpoint = Checkpoint(folder)
    weights = (name for name in checkpoint if name.endswith(".weight")) if checkpoint.quantization else ()
    return any(checkpoint.dtype(name).startswith("F8_") for name in weights)
