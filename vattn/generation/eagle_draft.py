"""`EagleDraft`: drafts by a head of EAGLE or EAGLE-3, which continues the target's hidden states."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vattn.cache.allocation import allocate_kv_cache
from vattn.compilation.regions import repeated_layers
from vattn.config.keywords import known_keywords
from vattn.config.other_names import DRAFTS
from vattn.errors import ConfigError
from vattn.generation.draft_model import read_drafts
from vattn.generation.draft_source import DraftSource, ServedModel
from vattn.generation.eagle_head import EagleHead, Weights, read_config
from vattn.generation.eagle_steps import EagleSteps
from vattn.generation.request import Request
from vattn.metadata.token_tree import TokenTree, TreeChoices


class HeadDraft(DraftSource):
    """Drafts by a head that reads the target's hidden states."""

    def start(self, served: ServedModel) -> DraftSource:
        """Return the source that drafts for a generator."""
        watched, target = served.forward, served.blocks.cache
        assert isinstance(watched, WatchedModel)
        head = watched.head
        dtype = watched.states.dtype
        head.kv_cache = allocate_kv_cache(head, num_blocks=target.num_blocks, device=target.device, dtype=dtype)
        return EagleSteps(head, head.kv_cache, self.num_drafts, served, watched.states, self.tree)

    def plan(self, request: Request, most: int) -> list[int]:
        """Refuse: the source that `start` returns has the drafts."""
        raise ConfigError(
            f"{type(self).__name__} without a generator", "Generator(model, speculation=...)", "pass it there"
        )


@known_keywords(DRAFTS)
@dataclass(frozen=True)
class EagleDraft(HeadDraft):
    """Drafts by a head of EAGLE or EAGLE-3: one layer that continues the hidden states of its target.

    Attributes:
        folder: of the checkpoint: `config.json` and `model.safetensors` or `pytorch_model.bin`, as published for the
            target, which is a language model of transformers on vattn.
        num_drafts: most tokens that are drafted for a request, 1 to 64; a step verifies them together. Default 4, or
            the nodes of the tree.
        tree: paths of child indices, as `vattn.TokenTree` has them: node `(0, 1)` is the second likeliest token after
            the likeliest one. Only first children have children. Default: drafts that follow each other.

    Raises:
        ConfigError: no such folder, `num_drafts` out of range or not that of the tree, another tree, or a head that
            vattn does not know.
        MissingPackageError: no transformers, which makes the head's RoPE.

    The output is the same as without drafts, whatever the head is. It has a cache of its own, of as many blocks as the
    target's.

    Example:
        >>> import vattn
        >>> try:
        ...     vattn.EagleDraft("not/a/folder", num_drafts=3)
        ... except vattn.errors.ConfigError as error:
        ...     print(error)
        EagleDraft('not/a/folder'). Allowed: a folder with config.json. Try: download the head first.
    """

    folder: str | os.PathLike[str]
    num_drafts: int = None  # type: ignore[assignment]
    tree: TokenTree | TreeChoices = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        num_drafts, tree = read_drafts(self.num_drafts, self.tree)
        object.__setattr__(self, "num_drafts", num_drafts)
        object.__setattr__(self, "tree", tree)
        read_config(self.folder)

    def watch(self, served: ServedModel, forward: Any, num_tokens: int) -> Any:
        """Return what runs the target and keeps its hidden states, for steps of up to `num_tokens` tokens.

        Raises:
            ConfigError: a target over ranks, with adapters, compiled whole, or not of transformers; another hidden
                size or vocabulary.
        """
        target, model = check_target(served, "an EagleDraft"), cast(Any, served.model)
        folder = Path(self.folder)
        weights, config = Weights(folder), read_config(folder)
        decoder = target.get_decoder()
        embedding, output = target.get_input_embeddings(), target.get_output_embeddings()
        head = EagleHead(weights, config, (embedding, output), served.blocks.block_size)
        _check_head(head, config, model.vocab_size, int(target.config.get_text_config().hidden_size))
        layers = repeated_layers(decoder)
        read = _read_layers(config, len(layers)) if head.is_eagle3 else []
        return WatchedModel(forward, head, [layers[index] for index in read] or decoder, num_tokens)


class WatchedModel(nn.Module):
    """Run the target, and keep of each step what its head reads.

    Args:
        forward: runs the target.
        head: of the target.
        parts: the layers, of which the inputs are read; or the decoder, of which the output is.
        num_tokens: most tokens of a step.

    Attributes:
        states: `[num_tokens, hidden_size]` of the last step, in the order of its tokens.
    """

    def __init__(self, forward: nn.Module, head: Any, parts: list[nn.Module] | nn.Module, num_tokens: int):
        super().__init__()
        self.run = forward
        # No parts of this module: graphs of the target hold neither the head's layer nor anything a second time.
        self._head, self._parts = (head,), (parts,)
        like = next(head.parameters())
        self.states = torch.zeros(num_tokens, head.width, dtype=like.dtype, device=like.device)

    @property
    def head(self) -> Any:
        """The head that reads the states."""
        return self._head[0]

    def forward(self, *inputs: Any) -> Tensor:
        """Return the target's logits."""
        found: list[Tensor] = []
        hooks = [*self._hooks(found.append)]
        try:
            logits: Tensor = self.run(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
        states = self.head.read(torch.cat(found, -1)[0])
        self.states[: states.shape[0]].copy_(states)
        return logits

    def _hooks(self, keep: Callable[[Tensor], None]) -> Any:
        """Yield hooks that are there while the target runs: between steps it is as it was."""
        (parts,) = self._parts
        if isinstance(parts, nn.Module):
            yield parts.register_forward_hook(lambda _module, _inputs, output: keep(output[0]))
            return
        for part in parts:
            yield part.register_forward_pre_hook(
                lambda _module, inputs, named: keep(inputs[0] if inputs else named["hidden_states"]), with_kwargs=True
            )


def check_target(served: ServedModel, source: str) -> Any:
    """Return the model of transformers that a generator serves; refuse one of which a head cannot read the states."""
    target, model = getattr(served.model, "wrapped", None), served.model
    wrong = {
        "a model with group=": served.sharded,
        "a model with adapters": getattr(model, "adapters", None) is not None,
        "compile='model'": served.compile == "model",
        f"{type(model).__name__}, which shows no hidden states": not hasattr(target, "get_decoder"),
        "an encoder-decoder model": getattr(model, "max_encoder_len", 0) > 0,
    }
    for name, is_so in wrong.items():
        if is_so:
            raise ConfigError(
                f"{source} for {name}",
                "a language model of transformers that enable() returned, on one device, without adapters, with "
                "compile='layers' or 'none'",
                "leave one of them out",
            )
    return target


def _read_layers(config: Any, count: int) -> list[int]:
    """Return the layers of the target of which EAGLE-3 reads the inputs: named in its config, or the paper's three."""
    name = "eagle_aux_hidden_state_layer_ids"
    outputs, inputs = (getattr(config, "eagle_config", None) or {}).get(name), getattr(config, name, None)
    for given in (outputs, inputs):
        if given is not None and not (isinstance(given, list) and all(type(index) is int for index in given)):
            raise ConfigError(f"a head with {name}={given!r:.60}", "a list of layers", "take another head")
    # In `eagle_config` layers are named by their outputs, at the top of the config by their inputs.
    kinds = [[index + 1 for index in outputs or ()], [*(inputs or ())]]
    if all(kinds) and kinds[0] != kinds[1]:
        raise ConfigError(
            f"an EAGLE-3 head with {name}={inputs} and {outputs} in eagle_config",
            "the same layers in both; eagle_config has one less for each, since it names their outputs",
            "take one out of the head's config.json",
        )
    found = kinds[0] or kinds[1] or [2, count // 2, count - 3]
    if len(found) != 3 or not all(0 <= index < count for index in found):
        raise ConfigError(
            f"an EAGLE-3 head that reads before layers {found} of a target with {count} layers",
            f"three of 0 to {count - 1}",
            "take the head of this target",
        )
    return found


def _check_head(head: EagleHead, config: Any, vocab_size: int, hidden_size: int) -> None:
    """Refuse the head of another target."""
    width, drafts = (3 if head.is_eagle3 else 2) * hidden_size, getattr(head.lm_head, "out_features", vocab_size)
    if head.fc.in_features != width or (not head.is_eagle3 and head.fc.out_features != hidden_size):
        raise ConfigError(
            f"a head with fc of {head.fc.in_features} columns and {head.fc.out_features} rows for a target with "
            f"hidden_size={hidden_size}",
            f"{width} columns",
            "take the head of this target",
        )
    offsets = torch.zeros(drafts, dtype=torch.int64) if head.d2t is None else head.d2t.cpu()
    ids = offsets + torch.arange(offsets.shape[0])
    fits = offsets.shape[0] == drafts and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    tokens: Any = head.embed_tokens
    if config.vocab_size != vocab_size or not fits or tokens.weight.shape[0] < vocab_size:
        raise ConfigError(
            f"a head for {config.vocab_size} token ids, with {tokens.weight.shape[0]} in embed_tokens, of which it "
            f"drafts {drafts}, for a target with {vocab_size}",
            "the target's vocabulary, and d2t for a smaller one",
            "take the head of this target",
        )
