"""Time one verification of a tree of drafts on one GPU beside plain decodes of the same requests.

    python -m benchmarks.attention.tree_step --json out.json

Beside them: as many tokens in a row under the causal mask, which is what the tree's mask costs, and xFormers' decode
where the package is found. Results are checked against each other first: branches against TORCH_SDPA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import vattn
from benchmarks.harness import add_row, machine, parser_of, time_in_turn
from vattn.backends import selector
from vattn.metadata.token_tree import TokenTree

HEADS, KV_HEADS, WIDTH, BLOCK = 32, 8, 128, 64
CELLS = ((1, 1024), (32, 2048), (8, 2048), (1, 8192))
SIX = TokenTree.merge([[1, 2], [1, 3], [4, 5], [4, 6]])[0]
TWENTY = TokenTree.merge([[row, *range(9, 13)] for row in range(4)])[0]
COLUMNS = {
    "decode, TRITON_ATTN": ("TRITON_ATTN", None, 1),
    "decode, XFORMERS": ("XFORMERS", None, 1),
    "tree of 6": ("TREE_ATTN", SIX, SIX.size),
    "7 in a row": ("TRITON_ATTN", None, SIX.size),
    "tree of 20": ("TREE_ATTN", TWENTY, TWENTY.size),
    "21 in a row": ("TRITON_ATTN", None, TWENTY.size),
}


def config_of(backend: str, tree: TokenTree | None) -> vattn.AttentionConfig:
    """Return a layer of Llama-3-8B's shape."""
    return vattn.AttentionConfig(
        HEADS, KV_HEADS, WIDTH, WIDTH, WIDTH**-0.5, "bfloat16", "bfloat16", BLOCK, tree_bias=tree is not None,
        backend=backend,
    )  # fmt: skip


class Cell:
    """Requests of one context length, and the calls that are timed over them."""

    def __init__(self, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        width = -(-(context + TWENTY.size) // BLOCK)
        self.tables = [[1 + row * width + column for column in range(width)] for row in range(batch)]
        shape = vattn.kv_cache_shape(config_of("TRITON_ATTN", None), 1 + batch * width)
        copies = max(1, min(8, (300 << 20) // (2 * torch.Size(shape).numel())))
        self.caches = [torch.randn(shape, device="cuda").bfloat16() for _ in range(copies)]
        self.query = torch.randn(batch * TWENTY.size, HEADS, WIDTH, device="cuda").bfloat16()

    def step(self, config: vattn.AttentionConfig, tree: TokenTree | None, count: int) -> vattn.AttentionMetadata:
        builder = vattn.TreeAttentionMetadataBuilder(
            self.batch, max(2, self.batch * count), len(self.tables[0]) * BLOCK, BLOCK, "cuda", layers=[config],
            max_tree_nodes=20, max_trees=1,
        )  # fmt: skip
        lengths = [self.context + count] * self.batch
        return builder.build([count] * self.batch, lengths, self.tables, trees=[tree] * self.batch)

    def attend(self, config: vattn.AttentionConfig, step: vattn.AttentionMetadata, cache: Tensor, count: int) -> Tensor:
        return vattn.paged_attention(self.query[: self.batch * count], cache, step, config).output

    def check(self, backend: str, tree: TokenTree | None, count: int) -> float:
        """Return the relative L2 distance from TORCH_SDPA."""
        ours, theirs = (
            self.attend(config, self.step(config, tree, count), self.caches[0], count).float()
            for config in (config_of(backend, tree), config_of("TORCH_SDPA", tree))
        )
        return float((ours - theirs).norm() / theirs.norm())

    def calls(self, backend: str, tree: TokenTree | None, count: int) -> list[Callable[[], Tensor]]:
        config = config_of(backend, tree)
        step = self.step(config, tree, count)
        return [lambda cache=cache: self.attend(config, step, cache, count) for cache in self.caches]


def measure(batch: int, context: int, columns: dict[str, Any]) -> dict[str, Any]:
    """Check and time one cell."""
    cell = Cell(batch, context)
    errors = {name: cell.check(*column) for name, column in columns.items()}
    wrong = {name: error for name, error in errors.items() if not error < 1e-2}
    if wrong:
        raise SystemExit(f"wrong results at {batch} x {context}: {wrong}")
    times, _ = time_in_turn({name: cell.calls(*column) for name, column in columns.items()})
    return {"batch": batch, "context": context, "microseconds": times, "error": max(errors.values())}


def main() -> None:
    """Measure every cell and print one line each."""
    options = parser_of(__doc__).parse_args()
    torch.manual_seed(0)
    columns = {name: c for name, c in COLUMNS.items() if selector.get_backend(c[0]).problem() is None}
    result = machine()
    for batch, context in CELLS:
        with torch.no_grad():
            add_row(result, measure(batch, context, columns), options.json)


if __name__ == "__main__":
    main()
