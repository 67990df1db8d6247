"""Speculative decoding by prompt lookup: the tokens of plain greedy decoding, in fewer steps, with no second model.

    python examples/18_prompt_lookup.py [FOLDER]

Wherever the last tokens have occurred before in a request, what followed them is guessed to follow again. One step of
the model verifies all guesses of all requests; the right ones count, and the wrong ones cost nothing but their rows.
Needs the extra `transformers`; without a folder it takes the repository's model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import vattn
from vattn.cli.checkpoints import load_model
from vattn.integrations.transformers import enable

PROMPTS = [
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items",
    "for key in first:\n    print(key, first[key])\nfor key in second:\n    print(",
    "    self.assertEqual(first, 1)\n    self.assertEqual(second, 2)\n    self.assertEqual(",
]


def main(folder: Path) -> None:
    """Generate twice, and compare tokens and steps."""
    model, tokenizer = load_model(folder, "cuda" if torch.cuda.is_available() else "cpu", None)
    packed = enable(model, memory="64MiB")
    sampling = vattn.Sampling(max_new_tokens=96, stop_token_ids=())
    steps, outputs = [], []
    for speculation in (None, vattn.PromptLookup(num_drafts=6)):
        generator = vattn.Generator(packed, tokenizer, speculation=speculation, reuse_prefixes=False)
        outputs.append([request.output for request in generator.generate(PROMPTS, sampling)])
        steps.append(generator.statistics().steps)
    now = generator.statistics()
    for number, (plain, guessed) in enumerate(zip(*outputs, strict=True)):
        print(f"request {number}: equal to greedy decoding: {plain == guessed}; {tokenizer.decode(guessed)[:40]!r}")
    print(f"{now.accepted_tokens} of {now.drafted_tokens} guesses were right, {now.accepted_per_step:.2f} in a step")
    print(f"{steps[0]} steps without guesses, {steps[1]} with: {steps[0] / steps[1]:.2f}x fewer")


if __name__ == "__main__":
    default = Path(__file__).parent / "demo_model"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
