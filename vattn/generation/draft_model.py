"""`DraftModel`: drafts by a smaller model, on a paged cache of its own in which it uses the target's block ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from vattn.cache.allocation import KVCacheAllocation, allocate_kv_cache
from vattn.config.arguments import read_count
from vattn.config.keywords import known_keywords
from vattn.config.other_names import DRAFTS
from vattn.errors import ConfigError
from vattn.generation.draft_source import DraftSource, ServedModel
from vattn.generation.draft_steps import DraftSteps
from vattn.generation.request import Request
from vattn.generation.setup import check_vocabulary, find_cache, keeps_states, longest_encoder, longest_request
from vattn.metadata.token_tree import TokenTree, TreeChoices

MOST_DRAFTS = 64
"""Each is a step of the draft model in one graph."""


@known_keywords(DRAFTS)
@dataclass(frozen=True, eq=False)
class DraftModel(DraftSource):
    """Drafts by a smaller model with the same vocabulary, the likeliest token each time.

    Attributes:
        model: what `vattn.integrations.transformers.enable` returned for it, or any model that a generator takes. One
            without a cache gets one of as many blocks as the target's; a cache of its own has the target's block size
            and at least as many blocks. It belongs to the newest generator.
        num_drafts: most tokens that are drafted for a request, 1 to 64; a step verifies them together. Default 4, or
            the nodes of the tree.
        tree: paths of child indices, as `vattn.TokenTree` has them: node `(0, 1)` is the second likeliest token after
            the likeliest one. Only first children have children. Default: drafts that follow each other.

    Raises:
        ConfigError: no model, `num_drafts` out of range or not that of the tree, or another tree.

    Both models compute the same tokens in blocks of the same ids, so one scheduler reuses and frees blocks for both.
    The output is the same as without drafts, whatever the draft model is.

    Example:
        >>> import torch, transformers, vattn
        >>> from vattn.integrations.transformers import enable
        >>> def llama(layers):
        ...     config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
        ...         num_hidden_layers=layers, num_attention_heads=2)
        ...     return transformers.LlamaForCausalLM(config).eval()
        >>> target, draft = enable(llama(2), num_blocks=8), enable(llama(1))
        >>> generator = vattn.Generator(target, max_num_reqs=2, speculation=vattn.DraftModel(draft, num_drafts=3))
        >>> done = generator.generate([[1, 2, 3]], vattn.Sampling(max_new_tokens=5, stop_token_ids=()))
        >>> len(done[0].output), draft.kv_cache.num_blocks
        (5, 8)
    """

    model: Any
    num_drafts: int = None  # type: ignore[assignment]
    tree: TokenTree | TreeChoices = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        num_drafts, tree = read_drafts(self.num_drafts, self.tree)
        object.__setattr__(self, "num_drafts", num_drafts)
        object.__setattr__(self, "tree", tree)
        if not isinstance(self.model, nn.Module):
            raise ConfigError(
                f"DraftModel({self.model!r:.60})",
                "a model on vattn",
                "DraftModel(enable(small)), num_drafts by keyword",
            )

    def start(self, served: ServedModel) -> DraftSource:
        """Return the source that drafts for a generator.

        Raises:
            ConfigError: another vocabulary, device or block size, fewer blocks, states, groups of layers, cross
                attention, or a target that is sharded over ranks.
        """
        model, target = self.model, served.blocks.cache
        if served.sharded:
            raise ConfigError(
                "a DraftModel for a model with group=", "models on one device", "leave group or drafts out"
            )
        if longest_encoder(served.model) or longest_encoder(model):
            raise ConfigError(
                "a DraftModel with an encoder-decoder model",
                "decoders: a draft model sees no encoder states",
                "speculation=vattn.PromptLookup()",
            )
        parts = {id(part) for part in served.model.modules()}
        if any(id(part) in parts for part in model.modules()):
            raise ConfigError(
                "a draft model that has layers of the target",
                "another model",
                "load it by a from_pretrained of its own",
            )
        if getattr(model, "kv_cache", None) is None and hasattr(model, "generate") and hasattr(model, "config"):
            raise ConfigError(
                f"DraftModel of {type(model).__name__}, a model of transformers that is not on vattn",
                "what enable(model) returned",
                "DraftModel(enable(small))",
            )
        check_vocabulary(served.model, model)
        if keeps_states(model):
            raise ConfigError(
                "a draft model that keeps a state for each request",
                "models whose layers all attend, since states cannot go back before a wrong draft",
                "take another draft model",
            )
        longest_request(model, served.max_seq_len, served.max_seq_len)
        if getattr(model, "kv_cache", None) is None:
            _allocate(model, target)
        cache = find_cache(model, None)
        _check_cache(cache, target)
        return DraftSteps(model, cache, self.num_drafts, served, tree=self.tree)  # type: ignore[arg-type]

    def plan(self, request: Request, most: int) -> list[int]:
        """Refuse: the source that `start` returns has the drafts."""
        raise ConfigError("a DraftModel without a generator", "Generator(model, speculation=...)", "pass it there")


def read_drafts(num_drafts: Any, tree: Any, default: int = 4) -> tuple[int, TokenTree | None]:
    """Return how many tokens are drafted, and how they branch; `None`: not at all.

    Raises:
        ConfigError: no number of drafts, no tree, or one of another number or with other parents than first children.
    """
    read = None if tree is None else TokenTree.of(tree)
    nodes = default if read is None else read.size - 1
    if read is not None and (num_drafts not in (None, nodes) or any(any(path[:-1]) for path in read.paths)):
        raise ConfigError(
            f"tree={tree!r:.80} with num_drafts={num_drafts}",
            f"a tree in which only first children have children, and its {nodes} nodes for num_drafts",
            "leave num_drafts out, and take [(0,), (1,), (0, 0), (0, 1)] for two tokens after each first one",
        )
    count = nodes if num_drafts is None else num_drafts
    if read_count("num_drafts", count, 1, "pass num_drafts=4") > MOST_DRAFTS:
        raise ConfigError(
            f"num_drafts={count}", f"1 to {MOST_DRAFTS}", "pass num_drafts=4: few drafts in a row are right"
        )
    return count, None if read is None or read.is_chain else read


def _allocate(model: Any, target: KVCacheAllocation) -> None:
    """Allocate as many blocks as the target has."""
    if hasattr(model, "allocate"):
        model.allocate(num_blocks=target.num_blocks, device=target.device)
    else:
        model.kv_cache = allocate_kv_cache(model, num_blocks=target.num_blocks, device=target.device)


def _check_cache(cache: KVCacheAllocation, target: KVCacheAllocation) -> None:
    """Refuse a cache in which the target's block ids mean something else."""
    again = "leave the draft model without a cache: enable(small) without num_blocks and memory"
    if cache.device != target.device:
        raise ConfigError(
            f"a draft model on {cache.device} for a target on {target.device}", "one device", "move one of them"
        )
    if cache.groups:
        raise ConfigError("a draft model with hybrid=True", "a cache without groups of layers", again)
    if cache.block_size != target.block_size:
        raise ConfigError(
            f"a draft model with blocks of {cache.block_size} tokens, and a target with {target.block_size}",
            "one block size",
            f"enable(small, cache_config=vattn.CacheConfig(block_size={target.block_size}))",
        )
    if cache.num_blocks < target.num_blocks:
        raise ConfigError(
            f"a draft model with {cache.num_blocks} blocks for a target with {target.num_blocks}",
            f"at least {target.num_blocks} blocks",
            again,
        )
    if cache.reserved_blocks > target.reserved_blocks:
        raise ConfigError(
            "a draft model with static sinks, which reserve blocks",
            "as many reserved blocks as the target",
            "take another",
        )
