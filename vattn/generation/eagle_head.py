"""`EagleHead`: one decoder layer that continues the hidden states of a target, read from a checkpoint of EAGLE."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation
from vattn.config.attention import CacheConfig
from vattn.errors import ConfigError, MissingPackageError
from vattn.layers.attention import Attention


class Weights:
    """The weights of a checkpoint by the names that EAGLE-3 and EAGLE have for the same thing; each is taken once.

    Args:
        folder: has `model.safetensors` or `pytorch_model.bin`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = _read(folder)
        self.is_eagle3 = any("midlayer." in name for name in found)
        self._left = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
            for name, tensor in found.items()
            if not name.endswith("inv_freq")
        }

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Tensor | None:
        """Return a weight, `None` if the checkpoint has none of this name."""
        return self._left.pop(name, None)

    def need(self, name: str, *shape: int | None) -> Tensor:
        """Return a weight; refuse a checkpoint without it, or with one of another shape, `None` for any size."""
        found = self.take(name)
        if found is None:
            raise self._refuse(f"without {name}")
        if found.ndim != len(shape) or any(
            want not in (None, size) for want, size in zip(shape, found.shape, strict=True)
        ):
            raise self._refuse(f"with {name} of shape {[*found.shape]} in place of {[*shape]}".replace("None", "any"))
        return found

    def linear(self, name: str, rows: int | None = None, columns: int | None = None) -> nn.Linear:
        """Return a linear layer."""
        weight, bias = self.need(f"{name}.weight", rows, columns), self.take(f"{name}.bias")
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def norm(self, name: str, eps: float, size: int) -> nn.RMSNorm:
        """Return an RMS norm."""
        weight = self.need(f"{name}.weight", size)
        layer = nn.RMSNorm(weight.shape[0], eps, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer

    def end(self) -> None:
        """Refuse a checkpoint with weights that were not taken."""
        if self._left:
            raise self._refuse(f"with {min(self._left)}")

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(
            f"a checkpoint {what} in {self.folder}",
            "fc, one Llama layer ('layers.0.' or 'midlayer.'), norm, lm_head, embed_tokens, d2t and t2d",
            "take a checkpoint in the layout of EAGLE or EAGLE-3",
        )


def _read(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors").is_file():
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise MissingPackageError("model.safetensors", "safetensors", "pip install safetensors") from error
        return _readable(load_file, folder / "model.safetensors")
    if (folder / "pytorch_model.bin").is_file():
        load = partial(torch.load, map_location="cpu", weights_only=True)
        return _readable(load, folder / "pytorch_model.bin")
    raise ConfigError(
        f"{folder} without weights", "a folder with model.safetensors or pytorch_model.bin", "pass the folder of a head"
    )


def _readable(read: Callable[[Path], Any], path: Path) -> Any:
    """Return what a file holds; refuse one that cannot be read."""
    try:
        return read(path)
    except Exception as error:
        raise ConfigError(
            f"{path}, which cannot be read: {type(error).__name__}: {error}", "a head's file", "download it again"
        ) from error


def read_config(folder: Any) -> Any:
    """Return the configuration of a head as transformers' `LlamaConfig`.

    Raises:
        ConfigError: no folder of a checkpoint, or a head with another RoPE, activation or residual.
        MissingPackageError: no transformers.
    """
    path = Path(folder) / "config.json" if isinstance(folder, (str, os.PathLike)) else None
    if path is None or not path.is_file():
        got = folder if path is None else str(folder)
        raise ConfigError(f"EagleDraft({got!r:.60})", "a folder with config.json", "download the head first")
    try:
        from transformers import LlamaConfig
    except ImportError as error:
        raise MissingPackageError("EagleDraft", "transformers", "pip install transformers") from error
    config = _readable(lambda path: LlamaConfig.from_dict(json.loads(path.read_text())), path)
    rope = config.rope_parameters.get("rope_type", "default")
    wrong = {
        f"RoPE of type {rope!r}": rope not in ("default", "linear", "llama3", "yarn"),
        f"hidden_act={config.hidden_act!r}": config.hidden_act != "silu",
        "norm_before_residual": getattr(config, "norm_before_residual", False),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ConfigError(f"a head with {what} in {folder}", "heads as EAGLE publishes them", "take another head")
    return config


class EagleLayer(nn.Module):
    """A Llama layer without a norm of its input (EAGLE), or one that attends from embeddings too (EAGLE-3)."""

    def __init__(self, weights: Weights, config: Any, hidden_size: int, block_size: int, device: torch.device) -> None:
        super().__init__()
        name, eps, size = "layers.0.", config.rms_norm_eps, config.head_dim
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        width = hidden_size * (2 if weights.is_eagle3 else 1)
        if weights.is_eagle3:
            self.input_layernorm = weights.norm(name + "input_layernorm", eps, hidden_size)
            self.hidden_norm = weights.norm(name + "hidden_norm", eps, hidden_size)
        self.is_eagle3 = weights.is_eagle3
        self.q_proj = weights.linear(name + "self_attn.q_proj", queries, width)
        self.k_proj, self.v_proj = (weights.linear(f"{name}self_attn.{each}_proj", keys, width) for each in "kv")
        self.o_proj = weights.linear(name + "self_attn.o_proj", hidden_size, queries)
        self.post_attention_layernorm = weights.norm(name + "post_attention_layernorm", eps, hidden_size)
        self.gate_proj = weights.linear(name + "mlp.gate_proj", None, hidden_size)
        inner = self.gate_proj.out_features
        self.up_proj = weights.linear(name + "mlp.up_proj", inner, hidden_size)
        self.down_proj = weights.linear(name + "mlp.down_proj", hidden_size, inner)
        self.attn = Attention(
            config.num_attention_heads,
            size,
            size**-0.5,
            config.num_key_value_heads,
            cache_config=CacheConfig(block_size=block_size),
            prefix="eagle.attn",
            # The default may be one that plans on the host, between drafts.
            attn_backend="TRITON_ATTN" if device.type == "cuda" else None,
        )

    def forward(self, states: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the next hidden states, `[T, hidden_size]`.

        Args:
            states, embeds: `[T, hidden_size]`; only EAGLE-3 reads `embeds`.
            cos, sin: `[T, head_size]`.
        """
        rows = torch.cat((self.input_layernorm(embeds), self.hidden_norm(states)), -1) if self.is_eagle3 else states
        query, key = (_rotate(each(rows), cos, sin) for each in (self.q_proj, self.k_proj))
        states = states + self.o_proj(self.attn(query, key, self.v_proj(rows)))
        rows = self.post_attention_layernorm(states)
        return states + self.down_proj(nn.functional.silu(self.gate_proj(rows)) * self.up_proj(rows))


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head."""
    heads = rows.view(rows.shape[0], -1, cos.shape[-1])
    first, second = heads.chunk(2, -1)
    rotated = heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    return rotated.view(rows.shape)


class EagleHead(nn.Module):
    """A draft model of one layer, which reads hidden states of its target.

    A row is a token, at the position of the token before it, and what the target has computed at that position.

    Args:
        weights: of the checkpoint.
        config: of the checkpoint, see `read_config`.
        target: embedding and head of the target, for a checkpoint without its own.
        block_size: of the target's cache.

    Attributes:
        width: hidden size.
        d2t: int64 `[draft_vocab_size]`, to be added to the id of a draft; `None` for the target's ids.
        kv_cache: of its layer.
    """

    d2t: Tensor | None
    kv_cache: KVCacheAllocation

    def __init__(self, weights: Weights, config: Any, target: tuple[nn.Module, nn.Module], block_size: int) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        super().__init__()
        embedding: Any = target[0]
        like = {"device": embedding.weight.device, "dtype": embedding.weight.dtype}
        self.is_eagle3 = weights.is_eagle3
        self.fc = weights.linear("fc")
        self.width = hidden = self.fc.out_features
        eps = config.rms_norm_eps
        self.layers = nn.ModuleList([EagleLayer(weights, config, hidden, block_size, like["device"])])
        self.norm = weights.norm("norm", eps, hidden) if weights.is_eagle3 else nn.Identity()
        has_head, has_tokens = ("lm_head.weight" in weights, "embed_tokens.weight" in weights)
        self.lm_head: nn.Module = weights.linear("lm_head", None, hidden) if has_head else nn.Identity()
        own = weights.need("embed_tokens.weight", None, hidden) if has_tokens else None
        d2t, _ = (weights.take(name) for name in ("d2t", "t2d"))
        weights.end()
        self.to(**like)
        # Its frequencies stay fp32.
        try:
            self.rotary = LlamaRotaryEmbedding(config).to(like["device"])
        except Exception as error:
            raise ConfigError(
                f"a head with rope_parameters={config.rope_parameters}", "RoPE that transformers makes", "complete them"
            ) from error
        if isinstance(self.lm_head, nn.Identity):
            self.lm_head = target[1]
        own = embedding.weight if own is None else own.to(**like)
        same = torch.equal(own, embedding.weight)
        self.embed_tokens = embedding if same else nn.Embedding.from_pretrained(own)
        self.register_buffer("d2t", None if d2t is None else d2t.to(like["device"], torch.int64))

    def read(self, states: Tensor) -> Tensor:
        """Return what the head keeps of the target's hidden states, `[T, hidden_size]`, given `[T, width]`."""
        return self.fc(states) if self.is_eagle3 else states  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, positions: Tensor, rows: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits `[N, draft_vocab_size]` and hidden states `[N, hidden_size]` of some rows.

        Args:
            ids, positions: int64 `[T]`, each token and the position before it.
            rows: int64 `[N]`.
            states: `[T, hidden_size]` at these positions: of `read`, or of an earlier call.
        """
        embeds = self.embed_tokens(ids)
        cos, sin = self.rotary(embeds, positions[None])
        if not self.is_eagle3:
            states = self.fc(torch.cat((embeds, states), -1))
        states = self.layers[0](states, embeds, cos[0], sin[0]).index_select(0, rows)
        return self.lm_head(self.norm(states)), states
