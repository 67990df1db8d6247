"""`MtpDraft`: drafts by the layer for multi-token prediction that a model was trained with."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.config.attention import CacheConfig
from vattn.config.keywords import known_keywords
from vattn.config.other_names import DRAFTS
from vattn.errors import ConfigError
from vattn.generation.draft_model import read_drafts
from vattn.generation.draft_source import ServedModel
from vattn.generation.eagle_draft import HeadDraft, WatchedModel, check_target
from vattn.metadata.token_tree import TokenTree, TreeChoices


@known_keywords(DRAFTS)
@dataclass(frozen=True, eq=False)
class MtpDraft(HeadDraft):
    """Drafts by the first layer for multi-token prediction (MTP) of the target, as DeepSeek V3 and GLM 4.5 have it.

    Attributes:
        num_drafts: most tokens that are drafted for a request, 1 to 64; a step verifies them together. The layer is
            trained for the first; it reads its own output for later ones. Default 1, or the nodes of the tree.
        tree: as in `EagleDraft`.
        model: transformers' `MtpModel` of the target; `None` loads it from where the target was loaded from.

    Raises:
        ConfigError: `num_drafts` out of range or not that of the tree, or another tree.

    The output is the same as without drafts. The layer has a cache of its own, of as many blocks as the target's.

    Example:
        >>> import vattn
        >>> vattn.MtpDraft(num_drafts=2).num_drafts
        2
    """

    num_drafts: int = None  # type: ignore[assignment]
    tree: TokenTree | TreeChoices = None  # type: ignore[assignment]
    model: Any = None

    def __post_init__(self) -> None:
        num_drafts, tree = read_drafts(self.num_drafts, self.tree, 1)
        object.__setattr__(self, "num_drafts", num_drafts)
        object.__setattr__(self, "tree", tree)

    def watch(self, served: ServedModel, forward: Any, num_tokens: int) -> Any:
        """Return what runs the target and keeps its hidden states, for steps of up to `num_tokens` tokens.

        Raises:
            ConfigError: a target over ranks, with adapters, compiled whole, or without an MTP layer that vattn runs.
        """
        target = check_target(served, "an MtpDraft")
        given = _load(target) if self.model is None else self.model
        return WatchedModel(forward, MtpHead(given, target, served.blocks.block_size), target.get_decoder(), num_tokens)


class MtpHead(nn.Module):
    """A draft model of one MTP layer, which reads the target's last hidden states; see `EagleHead`.

    Args:
        mtp: transformers' `MtpModel`.
        target: the model that `enable` was called with.
        block_size: of the target's cache.
    """

    kv_cache: KVCacheAllocation

    def __init__(self, mtp: Any, target: Any, block_size: int) -> None:
        super().__init__()
        last: Any = target.get_decoder().layers[-1]
        found = {name: part._modules["vattn"] for name, part in last.named_modules() if "vattn" in part._modules}
        layers: Any = getattr(mtp, "layers", ())
        if len(found) != 1 or not len(layers) or type(getattr(layers[0], "mtp_block", None)) is not type(last):
            raise ConfigError(
                f"{type(mtp).__name__} as the MTP layer of {type(target).__name__}",
                "transformers' MtpModel of the target, whose last layer attends once",
                "MtpModel.from_pretrained(model), or leave model out",
            )
        ((name, like),) = found.items()
        _check_layer(mtp, target, like)
        self._mtp = (mtp,)
        self.layers, self.width = nn.ModuleList([layers[0]]), target.config.get_text_config().hidden_size
        attention = layers[0].mtp_block.get_submodule(name)
        attention.config._attn_implementation = target.config._attn_implementation
        attention._modules.pop("vattn", None)
        attention.add_module("vattn", _layer_like(like, block_size, next(attention.parameters()).device))
        taken = inspect.signature(type(layers[0]).forward).parameters
        self._no_cache = {"cache" if "cache" in taken else "past_key_values": None}
        self.eval()

    def read(self, states: Tensor) -> Tensor:
        """Return what the head keeps of the target's hidden states."""
        return states

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits `[N, vocab_size]` and hidden states `[N, hidden_size]` of some rows, as `EagleHead` does."""
        (mtp,) = self._mtp
        embeds, own = mtp.embed_tokens(ids)[None], positions[None] + 1
        angles = None if mtp.rotary_emb is None else mtp.rotary_emb(embeds, position_ids=own)
        found = self.layers[0](
            embeds,
            states[None],
            position_embeddings=angles,
            attention_mask=None,
            position_ids=own,
            **self._no_cache,
        )
        if mtp.use_shared_post_norm:
            found = mtp.shared_post_norm(found)
        states = found[0].index_select(0, rows)
        return mtp._project_to_logits(states), states


def _check_layer(mtp: Any, target: Any, like: Any) -> None:
    wrong = {
        "attention by another interface": target.config._attn_implementation != "vattn_packed",
        "RoPE by kind of layer": getattr(mtp, "has_per_layer_rope", False),
        "a window": like._request.get("sliding_window") is not None,
        "ALiBi or sinks": like.alibi_slopes is not None or like.sinks is not None,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ConfigError(
                f"an MtpDraft for {type(target).__name__}, with {what}",
                "models whose last layer attends to all tokens",
                "speculation=vattn.PromptLookup()",
            )


def _layer_like(like: Any, block_size: int, device: torch.device) -> nn.Module:
    """Return an attention layer as the target's last one, with a cache of its own."""
    made: nn.Module = type(like)(
        like.num_heads,
        like.head_size,
        like.scale,
        like.num_kv_heads,
        logits_soft_cap=like._request.get("logits_soft_cap"),
        head_size_v=like.head_size_v,
        cache_config=CacheConfig(block_size=block_size),
        prefix="mtp.attn",
        # The default may be one that plans on the host, between drafts.
        attn_backend="TRITON_ATTN" if device.type == "cuda" else None,
    )
    made._expected = dict(like._expected)  # type: ignore[assignment]
    return made.to(device)


def _load(target: Any) -> Any:
    """Return transformers' `MtpModel` of a target, from where that was loaded from."""
    try:
        from transformers.modeling_layers import MtpModel

        device = next(target.get_decoder().layers[-1].parameters()).device
        return MtpModel.from_pretrained(target, device_map={"": device})
    except Exception as error:
        raise ConfigError(
            f"an MtpDraft for {type(target).__name__}, of which no MTP layer was loaded: {type(error).__name__}: "
            f"{error!s:.200}",
            "a model whose config has num_mtp_layers and whose checkpoint has their weights",
            "MtpDraft(model=...) with a transformers.modeling_layers.MtpModel",
        ) from error
