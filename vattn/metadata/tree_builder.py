"""`TreeAttentionMetadataBuilder`: steps in which some requests verify a tree of drafts, others prefill or decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vattn.backends.tree_attn import TreeAttentionBackend
from vattn.config.arguments import read_count
from vattn.errors import ConfigError, MetadataError
from vattn.metadata.attention_metadata import AttentionMetadata, CaptureKey, step_of
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.inputs import Lengths, Tables, check_count, read_integers
from vattn.metadata.token_order import reorder_batch
from vattn.metadata.token_tree import TokenTree, TreeChoices


class TreeAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Make `AttentionMetadata` for steps that may verify trees of drafts.

    Args:
        max_num_reqs, max_num_tokens, *capacity: with `max_seq_len`, `block_size` and `device` as for
            `AttentionMetadataBuilder`.
        tree_choices: the tree that `tree_attn_bias` and `build_for_drafting` are about; a `TokenTree`, sorted
            root-relative paths, a string that spells them, or `None`: a chain of one draft.
        max_tree_nodes: nodes of the largest tree of any step; default: as many as in `tree_choices`.
        max_trees: different trees of one step; default `max_num_reqs`.
        **options: as for `AttentionMetadataBuilder`. `decode_threshold` is the size of the tree by default.

    Attributes:
        tree: the tree of `tree_choices`.
        tree_attn_bias: fp32 `[n + 1, n + 1]` on the device, 0 where a row sees a column and -inf elsewhere; row 0 is
            the root, the last accepted token.

    Raises:
        ConfigError: no tree, or one that does not fit into `max_num_tokens` or `max_tree_nodes`.

    A tree's request has one row for the root and one per node, in the tree's order; they are written to the cache like
    any new tokens, so a step costs `tree.size` slots, and `vattn.move_slots` brings the accepted ones together.
    `positions` count by depth. Every other request of the step gets the causal mask, however many tokens it has.

    Windows and ALiBi count places in the cache: the node in row r is r places after the root, whatever its depth.

    Example:
        >>> import vattn
        >>> builder = vattn.TreeAttentionMetadataBuilder(4, 16, max_seq_len=64, tree_choices=[(0,), (1,), (0, 0)])
        >>> step = builder.build([4, 1, 3], [9, 7, 8], [[1], [2], [3]], trees=[builder.tree, None, None])
        >>> step.tree_id.tolist(), step.positions.tolist()
        ([0, -1, -1], [5, 6, 6, 7, 6, 5, 6, 7])
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_num_tokens: int,
        *capacity: Any,
        tree_choices: TreeChoices | TokenTree = None,
        max_tree_nodes: int | None = None,
        max_trees: int | None = None,
        **options: Any,
    ) -> None:
        self.tree = TokenTree.of(tree_choices)
        fix = "leave it out, or give the builder the largest of any step"
        max_num_tokens = read_count("max_num_tokens", max_num_tokens, 1, fix)
        nodes = self.tree.size - 1
        if max_tree_nodes is not None:
            nodes = read_count("max_tree_nodes", max_tree_nodes, 1, fix)
        if nodes < self.tree.size - 1 or self.tree.size > max_num_tokens:
            raise ConfigError(
                f"tree_choices of {self.tree.size - 1} nodes with max_tree_nodes={max_tree_nodes} and "
                f"max_num_tokens={max_num_tokens}",
                "a tree that fits into both, its root included in the tokens",
                "give the builder a smaller tree or larger capacities",
            )
        max_num_reqs = read_count("max_num_reqs", max_num_reqs, 1, fix)
        max_trees = max_num_reqs if max_trees is None else read_count("max_trees", max_trees, 1, fix)
        options.setdefault("decode_threshold", self.tree.size)
        super().__init__(
            max_num_reqs, max_num_tokens, *capacity, max_trees=max_trees, max_tree_size=nodes + 1, **options
        )
        with torch.inference_mode(False):
            self.tree_attn_bias = self.tree.bias().to(self.device)
            # Row r of a draft step is node r + 1. A query of fewer rows uses the first of them: one bias does for all.
            self._draft_bias = self.tree_attn_bias[1:, 1:].contiguous().unsqueeze(0)
            self._draft_ids = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device)

    def build(
        self,
        query_lens: Lengths,
        seq_lens: Lengths | None = None,
        block_tables: Tables | None = None,
        *,
        trees: Sequence[TreeChoices | TokenTree] | None = None,
        capture_key: CaptureKey | None = None,
        **options: Any,
    ) -> AttentionMetadata:
        """Check a step, copy it into the buffers and return views of them.

        Args:
            query_lens, seq_lens, block_tables, capture_key: as for `AttentionMetadataBuilder.build`.
            trees: per request the tree that it verifies, `None` for a causal one. Left out: no request verifies a tree
                with branches.
            **options: as for `AttentionMetadataBuilder.build`. `tree_bias` and `tree_id` may be given in the place of
                `trees`; `positions` replaces those by depth.

        Raises:
            MetadataError: a tree for a request with other than `tree.size` new tokens, trees beyond the capacity, a
                step that leaves open which of its requests verify the builder's tree, and as for
                `AttentionMetadataBuilder.build`; no buffer was touched.
            ConfigError: what is given for a tree is none.
            GraphContractError: the step contradicts `capture_key`; no buffer was touched.

        A step without branches has no `tree_bias`, unless `capture_key` has one: its layers run the kernels for causal
        attention. All steps with trees have a bias of one shape, so they share a graph.
        """
        given = {name for name in ("tree_bias", "tree_id") if options.get(name) is not None}
        captured = capture_key is not None and "tree_bias" in dict(capture_key.optional)
        if given and trees is not None:
            raise MetadataError(f"trees and {sorted(given)}", "one of the two", "leave tree_bias and tree_id out")
        if not given:
            queries = read_integers("query_lens", query_lens)
            lengths = queries if seq_lens is None else read_integers("seq_lens", seq_lens)
            check_count("seq_lens", lengths.shape[0], queries.shape[0])
            options |= self._tree_options(queries.tolist(), lengths.tolist(), trees, captured, options)
        return super().build(query_lens, seq_lens, block_tables, capture_key=capture_key, **options)

    def _refuse_tensors(self) -> None:
        raise MetadataError(
            "build_from_tensors() of a builder with trees",
            "build(trees=...) with lengths on the host",
            "call build(), or take AttentionMetadataBuilder for steps without trees",
        )

    def _tree_options(
        self,
        queries: list[int],
        lengths: list[int],
        trees: Sequence[TreeChoices | TokenTree] | None,
        captured: bool,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the arguments of the plain builder that express a step's trees."""
        if trees is None:
            self._refuse_open_question(queries, lengths)
            trees = [None] * len(queries)
        elif isinstance(trees, (str, TokenTree)) or not isinstance(trees, Sequence):
            raise MetadataError(f"trees={trees!r:.60}", "one tree or None per request", "pass a list")
        check_count("trees", len(trees), len(queries))
        read = [None if tree is None else TokenTree.of(tree) for tree in trees]
        for row, (tree, count) in enumerate(zip(read, queries, strict=True)):
            if tree is not None and tree.size != count:
                raise MetadataError(
                    f"request {row}: {count} new tokens and a tree of {tree.size - 1} nodes and its root",
                    f"{tree.size} new tokens for this tree",
                    "pass the root and one token per node, or None for a causal request",
                )
        branching = list(dict.fromkeys(tree for tree in read if tree is not None and not tree.is_chain))
        found: dict[str, Any] = {}
        if branching or captured:
            ids = {tree: index for index, tree in enumerate(branching)}
            found["tree_bias"] = self._stacked(branching)
            found["tree_id"] = [ids.get(tree, -1) if tree is not None else -1 for tree in read]
        if branching and options.get("positions") is None:
            found["positions"] = _positions(queries, lengths, read)
        return found

    def _refuse_open_question(self, queries: list[int], lengths: list[int]) -> None:
        """Refuse to guess whether a request with as many new tokens as the builder's tree verifies it."""
        if self.tree.is_chain:
            return
        for row, (count, length) in enumerate(zip(queries, lengths, strict=True)):
            if count == self.tree.size and length > count:
                raise MetadataError(
                    f"request {row}: {count} new tokens after cached ones, as many as the builder's tree and its root",
                    "trees=[...], a tree or None per request, in such a step",
                    "say trees=[builder.tree, ...] if it verifies the tree, trees=[None, ...] if it extends a prompt",
                )

    def _stacked(self, trees: Sequence[TokenTree]) -> Tensor:
        """Return the biases of some trees in the shape that all steps have."""
        if len(trees) > self._limits.trees:
            raise MetadataError(
                f"{len(trees)} different trees in a step",
                f"at most {self._limits.trees}",
                "give the builder max_trees=",
            )
        size = self._limits.tree_size
        # What lies beyond a tree is never read: its request has no more rows.
        stacked = torch.zeros(self._limits.trees, size, size, device="cpu")
        for index, tree in enumerate(trees):
            if tree.size > size:
                raise MetadataError(
                    f"a tree of {tree.size - 1} nodes", f"at most {size - 1} nodes", "give the builder max_tree_nodes="
                )
            stacked[index, : tree.size, : tree.size] = tree.bias()
        return stacked

    def build_for_drafting(self, common_metadata: AttentionMetadata, draft_index: int) -> AttentionMetadata:
        """Return a draft model's step over the first levels of the builder's tree.

        Args:
            common_metadata: the step as `build` of this builder makes it without trees: every request has at most as
                many new tokens as the tree has nodes at depths 1 to `draft_index`, in the tree's order and without the
                root, which is cached.
            draft_index: 0: the draft model reads accepted tokens, causally. i > 0: it computes the first i levels.

        Returns:
            Metadata of the same tensors with the mask of the level. `positions` are those of `common_metadata`; pass
            `build(positions=...)` the ones by depth.

        Raises:
            MetadataError: a level that the tree has not, more new tokens than it has nodes, or metadata elsewhere.

        Changes nothing, so calls may nest and fail. Allocates nothing, so a draft step captures as a CUDA graph.

        Example:
            >>> import vattn
            >>> builder = vattn.TreeAttentionMetadataBuilder(2, 8, max_seq_len=32, tree_choices=[(0,), (1,), (0, 0)])
            >>> step = builder.build([2, 2], [7, 9], [[1], [2]], positions=[5, 5, 7, 7])
            >>> drafts = builder.build_for_drafting(step, draft_index=1)
            >>> drafts.tree_bias[0, :2, :2].tolist()
            [[0.0, -inf], [-inf, 0.0]]
        """
        step_of(common_metadata, "build_for_drafting()")
        if type(draft_index) is not int or not 0 <= draft_index <= self.tree.depth:
            raise MetadataError(
                f"draft_index={draft_index!r}", f"0 to {self.tree.depth}, the levels of the tree", "pass a level"
            )
        num_reqs = common_metadata.seq_lens.shape[0]
        if common_metadata.seq_lens.device != self._draft_ids.device or num_reqs > self.max_num_reqs:
            raise MetadataError(
                f"metadata of {num_reqs} requests on {common_metadata.seq_lens.device}",
                f"up to {self.max_num_reqs} requests on {self._draft_ids.device}",
                "make it with this builder",
            )
        if draft_index == 0:
            return replace(common_metadata, tree_bias=None, tree_id=None)
        nodes = self.tree.num_nodes(draft_index)
        if common_metadata.max_query_len > nodes:
            raise MetadataError(
                f"a draft step of up to {common_metadata.max_query_len} new tokens per request at draft_index "
                f"{draft_index}",
                f"at most {nodes}, the nodes down to that level",
                "pass one token per node, without the root",
            )
        return replace(common_metadata, tree_bias=self._draft_bias, tree_id=self._draft_ids[:num_reqs].data)

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """Bring decodes and trees of a batch to its front, and prompts to its end.

        A decode has cached tokens and at most `decode_threshold` new ones; a request with more extends its prompt; one
        without cached tokens is a prompt. Requests at a place of their kind stay there, the others of a kind
        keep their order. Steps of this builder need none: it is for code that relies on one, and for
        `decode_metadata` and `prefill_metadata`.

        Args:
            input_batch: has `req_ids` and `num_computed_tokens_cpu`, ids and cached tokens in the batch's order, and
                `swap_states(i, j)`, which exchanges two requests.
            scheduler_output: has `num_scheduled_tokens`, the new tokens of each request by id.

        Returns:
            Whether anything was exchanged.
        """
        return reorder_batch(input_batch, scheduler_output, self.decode_threshold)


def _positions(queries: list[int], lengths: list[int], trees: Sequence[TokenTree | None]) -> list[int]:
    """Return the position of every new token: by depth in a tree, by place elsewhere."""
    positions: list[int] = []
    for count, length, tree in zip(queries, lengths, trees, strict=True):
        root = length - count
        positions += [root + depth for depth in (range(count) if tree is None else tree.depths)]
    return positions


TreeAttentionBackend.builder = TreeAttentionMetadataBuilder
