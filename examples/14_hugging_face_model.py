"""A Hugging Face model on vattn: calibrate an FP8 cache, serve several prompts at once, stream their text.

    python examples/14_hugging_face_model.py [FOLDER]

Needs the extra `transformers`; without a folder it takes the repository's model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import vattn
from vattn.cli.checkpoints import load_model
from vattn.integrations.transformers import disable, enable

PROMPTS = ["def add(a, b):\n    ", "import os\nimport ", "class Stack:\n    def __init__(self"]
TEXT = "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def test_put(self):\n        queue = Queue(3)\n"


def main(folder: Path) -> None:
    """Run it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(folder, device, None)

    seen = vattn.calibrate(enable(model, memory="64MiB"), [[tokenizer.encode(TEXT)]])
    print(vattn.audit(enable_again(model), [tokenizer.encode(PROMPTS[0])], "fp8", seen))
    disable(model)

    packed = enable(model, cache_config=vattn.CacheConfig(cache_dtype="fp8"), calibration=seen, memory="64MiB")
    generator = vattn.Generator(packed, tokenizer, max_num_reqs=4)
    texts = {}
    for part in generator.stream(PROMPTS, vattn.Sampling(max_new_tokens=32, stop_strings=("\n\n",))):
        texts[part.request] = part.request.text
    for prompt, text in zip(PROMPTS, texts.values(), strict=True):
        print("-" * 40, prompt + text, sep="\n")
    now = generator.statistics()
    print("-" * 40, f"{now.generated_tokens} tokens in {now.steps} steps", sep="\n")


def enable_again(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model on a fresh plain cache."""
    disable(model)
    return enable(model, memory="64MiB")


if __name__ == "__main__":
    default = Path(__file__).parent / "demo_model"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
