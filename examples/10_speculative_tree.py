"""Speculative decoding without a draft model: continuations looked up in the prompt form a tree that one step verifies.

Wherever the last tokens have occurred before, what followed them may follow again. The looked-up branches are merged
into a tree; one step of the model checks all of them, and the branch that it would have chosen itself is kept. The
text is that of plain greedy decoding, in fewer steps.
"""

from pathlib import Path

import torch
from demo.checkpoint import build_llama, read_checkpoint
from torch import Tensor

import vattn

FOLDER = Path(__file__).parent / "demo_model"
MAX_SEQ_LEN, BLOCK_SIZE, MAX_NODES, NEW_TOKENS = 320, 16, 20, 64

PROMPTS = [
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items",
    "for key in first:\n    print(key, first[key])\nfor key in second:\n    print(",
    "    self.assertEqual(first, 1)\n    self.assertEqual(second, 2)\n    self.assertEqual(",
]


def look_up(tokens: list[int], longest: int = 6, branches: int = 4, ngram: int = 4) -> list[list[int]]:
    """Return what followed earlier occurrences of the last tokens: of the longest n-gram first, the latest first."""
    found: list[list[int]] = []
    for size in range(ngram, 1, -1):
        tail = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tail:
                continuation = tokens[start + size : start + size + longest]
                if continuation not in found:
                    found.append(continuation)
                if len(found) == branches:
                    return found
    return found


class Decoder:
    """The demo's model and its cache; every request has blocks for the longest text."""

    def __init__(self, num_reqs: int) -> None:
        self.model = build_llama(*read_checkpoint(FOLDER))
        width = MAX_SEQ_LEN // BLOCK_SIZE
        vattn.allocate_kv_cache(self.model, num_blocks=1 + num_reqs * width)
        self.tables = [list(range(1 + row * width, 1 + (row + 1) * width)) for row in range(num_reqs)]
        self.builder = vattn.TreeAttentionMetadataBuilder(
            num_reqs, num_reqs * 128, MAX_SEQ_LEN, BLOCK_SIZE, layers=self.model, max_tree_nodes=MAX_NODES
        )
        self.steps = 0

    def slots(self, row: int, places: list[int]) -> list[int]:
        return [self.tables[row][place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]

    @torch.no_grad()
    def choose(self, rows: list[int], new: list[list[int]], cached: list[int], trees: list) -> list[list[int]]:
        """Run one step; return the token that the model chooses after each new one, per request."""
        counts = [len(tokens) for tokens in new]
        lengths = [count + behind for count, behind in zip(counts, cached, strict=True)]
        step = self.builder.build(counts, lengths, [self.tables[row] for row in rows], trees=trees)
        ids = torch.tensor([token for tokens in new for token in tokens])
        with vattn.forward_context(step):
            # In a tree the positions count by depth.
            logits: Tensor = self.model(ids, step.positions)
        self.steps += 1
        return [part.tolist() for part in logits.argmax(-1).split(counts)]

    def generate(self, prompts: list[list[int]], speculate: bool) -> list[list[int]]:
        """Continue every prompt greedily by NEW_TOKENS tokens."""
        texts, cached = [list(prompt) for prompt in prompts], [0] * len(prompts)
        ends = [len(prompt) + NEW_TOKENS for prompt in prompts]
        while unfinished := [row for row in range(len(texts)) if len(texts[row]) < ends[row]]:
            new, trees = [], []
            for row in unfinished:
                # A prompt is prefilled first, with requests that decode; then one token waits, and drafts follow it.
                branches = look_up(texts[row]) if speculate and cached[row] else []
                tree, drafts = vattn.TokenTree.merge(branches, MAX_NODES) if branches else (None, [])
                new.append(texts[row][cached[row] :] + drafts)
                trees.append(tree)
            chosen = self.choose(unfinished, new, [cached[row] for row in unfinished], trees)
            source, target = [], []
            for row, tokens, tree, picks in zip(unfinished, new, trees, chosen, strict=True):
                path = [] if tree is None else tree.accepted(tokens[1:], picks)
                # The accepted drafts lie among the others: bring their keys and values after the root.
                source += self.slots(row, [cached[row] + place for place in path])
                target += self.slots(row, [cached[row] + 1 + depth for depth in range(len(path))])
                last = picks[path[-1] if path else 0] if tree is not None else picks[-1]
                cached[row] += len(tokens) if tree is None else 1 + len(path)
                texts[row] = (texts[row] + [tokens[place] for place in path] + [last])[: ends[row]]
            vattn.move_slots(self.model, torch.tensor(source).long(), torch.tensor(target).long())
        return texts


def main() -> None:
    prompts = [[0, *prompt.encode()] for prompt in PROMPTS]
    plain, speculative = Decoder(len(prompts)), Decoder(len(prompts))
    expected = plain.generate(prompts, speculate=False)
    texts = speculative.generate(prompts, speculate=True)
    for number, (text, want) in enumerate(zip(texts, expected, strict=True)):
        print(
            f"request {number}: equal to greedy decoding: {text == want}; {bytes(text[1:]).decode('latin-1')[-40:]!r}"
        )
        assert text == want
    share = plain.steps / speculative.steps
    print(f"{plain.steps} steps of one token a request, {speculative.steps} with trees: {share:.2f}x fewer")


if __name__ == "__main__":
    main()
