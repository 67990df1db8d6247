"""`TokenTree`: drafts that branch, in the order of their rows in a step, and which of them each one sees.

Row 0 is the root: the last accepted token, which the cache does not hold yet. Rows 1 to n are the nodes, sorted by
depth and then by path. A row sees everything that is cached, its ancestors, the root and itself.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vattn.config.arguments import read_count
from vattn.config.typed import typed
from vattn.errors import ConfigError

Path = tuple[int, ...]
TreeChoices = str | Sequence[Sequence[int]] | None
"""Root-relative paths, a string that spells them, or `None` for a chain of one node."""


@dataclass(frozen=True)
class TokenTree:
    """A tree of draft tokens after the last accepted one.

    Args:
        paths: one path of child indices per node, from the root: `(0,)` is the root's first child, `(0, 1)` the second
            child of that. Sorted by length, then by path; every parent and every earlier sibling is there too.

    Attributes:
        size: rows in a step, the root's included: nodes + 1.
        depth: longest path.

    Raises:
        ConfigError: paths that are not sorted, name a node twice, or leave out a parent or an earlier sibling.

    Equal trees are equal and hash alike.

    Example:
        >>> tree = TokenTree(((0,), (1,), (0, 0), (1, 0)))
        >>> tree.size, tree.depths, tree.parents
        (5, (0, 1, 1, 2, 2), (-1, 0, 0, 1, 2))
        >>> (tree.bias() == 0).int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [1, 0, 1, 0, 0],
                [1, 1, 0, 1, 0],
                [1, 0, 1, 0, 1]], dtype=torch.int32)
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        _check_paths(self.paths)

    @staticmethod
    def of(choices: TreeChoices | TokenTree) -> TokenTree:
        """Return the tree that `tree_choices` names: paths, their Python literal in a string, or `None`: `[(0,)]`.

        Raises:
            ConfigError: not a sequence of paths, or no tree.
        """
        if isinstance(choices, TokenTree):
            return choices
        if choices is None:
            return TokenTree(((0,),))
        try:
            read = ast.literal_eval(choices) if isinstance(choices, str) else choices
            paths = tuple(tuple(path) for path in read)
        except (TypeError, ValueError, SyntaxError) as error:
            raise _no_tree(choices) from error
        return TokenTree(paths)

    @staticmethod
    @typed
    def chain(length: int) -> TokenTree:
        """Return a tree without branches: its mask is causal."""
        return TokenTree(tuple((0,) * depth for depth in range(1, length + 1)))

    @staticmethod
    @typed
    def merge(branches: Sequence[Sequence[int]], max_nodes: int | None = None) -> tuple[TokenTree, list[int]]:
        """Return the tree of some continuations, equal beginnings once, and the token of every node in its order.

        Args:
            branches: token ids that may follow the root, the likeliest continuation first.
            max_nodes: leave out what would exceed this many nodes, the end of the last branches first.

        Raises:
            ConfigError: no branch has a token.

        Example:
            >>> tree, tokens = TokenTree.merge([[7, 8, 9], [7, 5]])
            >>> tree.paths, tokens
            (((0,), (0, 0), (0, 1), (0, 0, 0)), [7, 8, 5, 9])
        """
        nodes: dict[Path, int] = {}
        children: dict[Path, dict[int, Path]] = {(): {}}
        for branch in branches:
            at: Path = ()
            for token in branch:
                below = children[at]
                if token not in below:
                    if max_nodes is not None and len(nodes) >= max_nodes:
                        break
                    below[token] = (*at, len(below))
                    nodes[below[token]], children[below[token]] = token, {}
                at = below[token]
        order = sorted(nodes, key=lambda path: (len(path), path))
        return TokenTree(tuple(order)), [nodes[path] for path in order]

    @property
    def size(self) -> int:
        """Rows in a step, the root's included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        return len(self.paths[-1])

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every row; the root's is 0. A row's position for RoPE is that of the root plus its depth."""
        return (0, *(len(path) for path in self.paths))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Row of every row's parent; -1 for the root."""
        rows = {(): 0, **{path: row for row, path in enumerate(self.paths, 1)}}
        return (-1, *(rows[path[:-1]] for path in self.paths))

    @property
    def is_chain(self) -> bool:
        """Whether the tree has no branches, so that its mask is the causal one."""
        return self.depth == len(self.paths)

    @typed
    def num_nodes(self, depth: int) -> int:
        """Return how many nodes are at this depth or above it, the root not counted."""
        return sum(len(path) <= read_count("depth", depth, 0, "count from the root, 0") for path in self.paths)

    def bias(self) -> Tensor:
        """Return fp32 `[size, size]` on the CPU: 0 where the row sees the column, -inf elsewhere."""
        seen = torch.eye(self.size, dtype=torch.bool, device="cpu")
        for row, parent in enumerate(self.parents[1:], 1):
            seen[row] |= seen[parent]
        return torch.full(seen.shape, -torch.inf, device="cpu").masked_fill_(seen, 0)

    @typed
    def branch(self, row: int) -> list[int]:
        """Return the rows from the root to a row, both included."""
        rows = [read_count("row", row, 0, "count from the root, 0")]
        while rows[-1]:
            rows.append(self.parents[rows[-1]])
        return rows[::-1]

    @typed
    def accepted(self, drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
        """Return the rows of the drafts that are what the model itself chose, from the root's child on.

        Args:
            drafts: token of every node, in the tree's order.
            chosen: the token that the model chooses after each row, the root's first.

        Raises:
            ConfigError: not one draft per node and one choice per row.

        The new tokens are the tokens of the returned rows, and then `chosen[last row]` (`chosen[0]` if there is none).

        Example:
            >>> tree, drafts = TokenTree.merge([[7, 8, 9], [7, 5]])
            >>> tree.accepted(drafts, chosen=[7, 5, 0, 3, 0])  # after the root 7, after 7 its child 5, then 3
            [1, 3]
        """
        counts = tuple(len(tokens) if hasattr(tokens, "__len__") else None for tokens in (drafts, chosen))
        if counts != (self.size - 1, self.size):
            raise ConfigError(
                f"{counts[0]} drafts and {counts[1]} choices for a tree of {self.size - 1} nodes",
                f"{self.size - 1} drafts and {self.size} choices",
                "give one draft per node, and what the model chooses after every row",
            )
        rows: list[int] = []
        at = 0
        for row, parent in enumerate(self.parents):
            # A node comes after its parent, so one pass follows the path to its end.
            if parent == at and row and drafts[row - 1] == chosen[at]:
                rows.append(row)
                at = row
        return rows


def _no_tree(choices: object) -> ConfigError:
    return ConfigError(
        f"tree_choices={choices!r:.80}",
        "a list of paths of child indices, sorted by length and then by path",
        "write [(0,), (1,), (0, 0)] for two first tokens, the first of which has a second",
    )


def _check_paths(paths: tuple[Path, ...]) -> None:
    if not isinstance(paths, tuple) or not paths:
        raise _no_tree(paths)
    before: Path = ()
    known: set[Path] = {()}
    for path in paths:
        if not isinstance(path, tuple) or not path or not all(type(step) is int and step >= 0 for step in path):
            raise _no_tree(paths)
        if (len(path), path) <= (len(before), before):
            raise ConfigError(
                f"tree path {path} after {before}",
                "paths sorted by length and then by path, each once",
                "sort them: sorted(set(paths), key=lambda path: (len(path), path))",
            )
        for needed in (path[:-1], (*path[:-1], path[-1] - 1)):
            if needed not in known and needed[-1:] != (-1,):
                raise ConfigError(
                    f"tree path {path} without {needed}",
                    "every parent, and child indices that count from 0 without gaps",
                    "add the missing node, or renumber the children",
                )
        known.add(path)
        before = path


def _prepare_tree_attn_bias(
    sorted_tree_choices: Sequence[Sequence[int]],
    depth_counts: Sequence[int],
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the bias `[n + 1, n + 1]` of a tree, under the name that its users know.

    Args:
        sorted_tree_choices: paths as for `TokenTree`.
        depth_counts: number of nodes at depth 1, 2, ...
        dtype, device: of the result.

    Raises:
        ConfigError: no tree, or counts that are not its own.
    """
    tree = TokenTree.of(sorted_tree_choices)
    counts = [tree.depths.count(depth) for depth in range(1, tree.depth + 1)]
    if list(depth_counts) != counts:
        raise ConfigError(f"depth_counts={list(depth_counts)}", f"{counts} for this tree", "count the paths by length")
    return tree.bias().to(device=device, dtype=dtype)
