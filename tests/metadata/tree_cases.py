"""Trees, batches of them, and what dense attention on each linearised branch says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import vattn
from vattn.metadata.token_tree import TokenTree

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
SCALE = SIZE**-0.5

SIX = TokenTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)))
TWENTY = TokenTree.of(
    "[(0,), (1,), (2,), (3,), (0,0), (0,1), (0,2), (1,0), (1,1), (2,0), (3,0), (0,0,0), (0,0,1), (0,1,0), (1,0,0),"
    " (0,0,0,0), (0,0,0,1), (0,0,1,0), (1,0,0,0), (0,0,0,0,0)]"
)
TREES = {"chain": TokenTree.chain(4), "six": SIX, "twenty": TWENTY}


@st.composite
def random_trees(draw: Any, max_nodes: int = 12) -> TokenTree:
    """Draw any tree: every node hangs below one of those before it."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, max_nodes))):
        parent = paths[draw(st.integers(0, len(paths) - 1))]
        paths.append((*parent, sum(len(p) == len(parent) + 1 and p[:-1] == parent for p in paths)))
    return TokenTree(tuple(sorted(paths[1:], key=lambda path: (len(path), path))))


def leaves(tree: TokenTree) -> list[int]:
    """Rows that are nobody's parent."""
    return [row for row in range(tree.size) if row not in tree.parents]


def rows_to(tree: TokenTree, row: int) -> list[int]:
    """Rows from the root to a row, found by comparing paths."""
    path = ((), *tree.paths)[row]
    return [other for other, start in enumerate(((), *tree.paths)) if path[: len(start)] == start]


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention `[q, H, D]` of the last q of some tokens, in fp32."""
    query, key, value = (part.float().transpose(0, 1) for part in (query, key, value))
    groups = HEADS // KV_HEADS
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    later = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
    scores = (query @ key.transpose(1, 2) * SCALE).masked_fill(
        later.triu(key.shape[1] - query.shape[1] + 1), -torch.inf
    )
    return (scores.softmax(-1) @ value).transpose(0, 1)


class TreeBatch:
    """Requests with cached contexts, some of which verify trees.

    Args:
        requests: pairs (context, tree), or (context, number of new tokens) for a causal request.
        capacity: for the builder; default what fits.
        **options: for the layer.
    """

    def __init__(
        self,
        requests: Sequence[tuple[int, TokenTree | int]],
        backend: str | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.requests = list(requests)
        self.counts = [tree if isinstance(tree, int) else tree.size for _, tree in requests]
        self.lengths = [context + count for (context, _), count in zip(requests, self.counts, strict=True)]
        rng = torch.Generator().manual_seed(seed)

        def random(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, SIZE, generator=rng).to(dtype).to(device)

        self.queries = [random(count, HEADS) for count in self.counts]
        self.keys, self.values = ([random(length, KV_HEADS) for length in self.lengths] for _ in range(2))
        needed = [-(-length // BLOCK) for length in self.lengths]
        ids = torch.randperm(sum(needed), generator=rng) + 1
        self.tables = [part.tolist() for part in ids.split(needed)]
        self.layer = vattn.Attention(HEADS, SIZE, SCALE, KV_HEADS, attn_backend=backend, **options)
        self.layer.to(device)
        self.cache = vattn.allocate_kv_cache(self.layer, num_blocks=sum(needed) + 2, dtype=dtype, device=device)
        self.cache.kv_caches[0].view(torch.uint8).fill_(0xFF)
        for row, (context, _) in enumerate(requests):
            self._store(row, context)

    def _store(self, row: int, context: int) -> None:
        place = torch.arange(context)
        slots = torch.tensor(self.tables[row])[place // BLOCK] * BLOCK + place % BLOCK
        key, value = self.keys[row][:context], self.values[row][:context]
        scales = {"k_scale": self.layer.k_scale, "v_scale": self.layer.v_scale}
        vattn.update_kv_cache(key, value, self.layer.kv_cache, slots.to(key.device), self.layer.config, **scales)

    def builder(self, **options: Any) -> vattn.TreeAttentionMetadataBuilder:
        """Return a builder with room for the batch."""
        sizes = [tree.size - 1 for _, tree in self.requests if isinstance(tree, TokenTree)]
        capacity = {"max_tree_nodes": max([1, *sizes]), "layers": self.layer, "device": self.cache.device, **options}
        return vattn.TreeAttentionMetadataBuilder(
            max(2, len(self.requests)), sum(self.counts) + 3, max(self.lengths) + BLOCK, BLOCK, **capacity
        )

    def trees(self) -> list[TokenTree | None]:
        """Return what `build(trees=...)` gets."""
        return [tree if isinstance(tree, TokenTree) else None for _, tree in self.requests]

    def step(self, **options: Any) -> vattn.AttentionMetadata:
        """Return the metadata of the batch's step."""
        return self.builder().build(self.counts, self.lengths, self.tables, trees=self.trees(), **options)

    def inputs(self) -> list[Tensor]:
        """Return query, key and value of the new tokens, of two dimensions."""
        news = [
            torch.cat([part[len(part) - count :] for part, count in zip(parts, self.counts, strict=True)])
            for parts in (self.queries, self.keys, self.values)
        ]
        return [part.flatten(1) for part in news]

    def run(self, step: vattn.AttentionMetadata | None = None) -> list[Tensor]:
        """Return the output `[q, H, D]` of every request."""
        step = self.step() if step is None else step
        with torch.no_grad():
            out = self.layer(*self.inputs(), metadata=step)
        return list(out.unflatten(1, (HEADS, SIZE))[: sum(self.counts)].split(self.counts))

    def expected(self, row: int, rows: Sequence[int]) -> Tensor:
        """Return dense attention of some rows of a request, one behind the other after its context."""
        context = self.requests[row][0]
        where = torch.tensor([*range(context), *(context + r for r in rows)], device=self.cache.device)
        return dense(self.queries[row][list(rows)], self.keys[row][where], self.values[row][where])

    def check(self, outputs: Sequence[Tensor], tolerance: float) -> None:
        """Compare every branch with attention on the branch alone, and causal requests with causal attention."""
        for row, (_, tree) in enumerate(self.requests):
            branches = [list(range(tree))] if isinstance(tree, int) else [rows_to(tree, leaf) for leaf in leaves(tree)]
            for rows in branches:
                want, got = self.expected(row, rows), outputs[row][rows].float()
                error = float((got - want).norm() / want.norm())
                assert error <= tolerance, f"request {row}, rows {rows}: {error:.2e}"
