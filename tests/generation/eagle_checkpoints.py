"""Small heads in the layout of EAGLE and EAGLE-3, and what they compute, written from the papers without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

CONFIG = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
}  # fmt: skip
READ = [1, 2, 4]
"""The layers of a target of five of which the EAGLE-3 head reads the inputs."""


class Head:
    """A head: its checkpoint, and its logits for a whole sequence.

    Args:
        target: a Llama of transformers, with five layers for EAGLE-3.
        eagle3: the layout.
        texts: sequences of the target; the head is fitted to them, so that some of its drafts are right.
    """

    def __init__(self, target: Any, eagle3: bool, texts: list[list[int]]) -> None:
        self.target, self.eagle3, self.config = target, eagle3, dict(CONFIG)
        random = torch.Generator().manual_seed(7)

        def draw(rows: int, columns: int, scale: float) -> Tensor:
            return torch.randn(rows, columns, generator=random) * scale

        layer, wide = ("midlayer.", 128) if eagle3 else ("layers.0.", 64)
        shapes = {"self_attn.q_proj": (128, wide), "self_attn.k_proj": (64, wide), "self_attn.v_proj": (64, wide)}
        shapes |= {"self_attn.o_proj": (64, 128), "mlp.gate_proj": (80, 64), "mlp.up_proj": (80, 64)}
        self.tensors = {f"{layer}{name}.weight": draw(*shape, 0.1) for name, shape in shapes.items()}
        self.tensors[f"{layer}mlp.down_proj.weight"] = draw(64, 80, 0.1)
        norms = ["post_attention_layernorm", *(("input_layernorm", "hidden_norm") if eagle3 else ())]
        self.tensors |= {f"{layer}{name}.weight": 1 + draw(1, 64, 0.1)[0] for name in norms}
        self._weight = {name.removeprefix(layer): tensor for name, tensor in self.tensors.items()}
        embedding = target.get_input_embeddings().weight
        if eagle3:
            known = sorted({token for text in texts for token in text} | set(range(20)))
            self.ids = torch.tensor(known)
            self.config |= {"draft_vocab_size": len(known)}
            self.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [index - 1 for index in READ]}
            self.tensors |= {"fc.weight": draw(64, 192, 0.05), "norm.weight": 1 + draw(1, 64, 0.1)[0]}
            self.tensors |= {"d2t": self.ids - torch.arange(len(known)), "t2d": torch.zeros(97, dtype=torch.bool)}
            self.tensors["t2d"][self.ids] = True
            self.tensors["lm_head.weight"] = draw(len(known), 64, 0.1)
            rows = [(self.rows(text)[:-1], torch.tensor(text[2:])) for text in texts]
            wanted = torch.eye(97)[torch.cat([each for _, each in rows])][:, self.ids]
            normed = self._norm(torch.cat([each for each, _ in rows]), self.tensors["norm.weight"])
            self.tensors["lm_head.weight"] = torch.linalg.lstsq(normed, wanted).solution.T.contiguous()
            return
        self.ids = torch.arange(97)
        self.tensors |= {"embed_tokens.weight": embedding.clone(), "fc.bias": draw(1, 64, 0.01)[0]}
        for name in (f"{layer}self_attn.o_proj.weight", f"{layer}mlp.down_proj.weight"):
            self.tensors[name].mul_(0.2)
        states = [self.states(text) for text in texts]
        given = torch.cat(
            [torch.cat((embedding[torch.tensor(t[1:])], s[:-1]), -1) for t, s in zip(texts, states, strict=True)]
        )
        wanted = torch.cat([each[1:] for each in states])
        self.tensors["fc.weight"] = torch.linalg.lstsq(given, wanted).solution.T.contiguous()

    def write(self, folder: Path, **config: Any) -> Path:
        """Write the checkpoint: both kinds of files are published."""
        from safetensors.torch import save_file

        (folder / "config.json").write_text(json.dumps({**self.config, **config}))
        if self.eagle3:
            save_file(self.tensors, folder / "model.safetensors")
        else:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        return folder

    def states(self, ids: list[int]) -> Tensor:
        """Return the target's hidden states that the head reads, `[len(ids), 64 or 192]`."""
        with torch.no_grad():
            out = self.target.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        if self.eagle3:
            return torch.cat([out.hidden_states[index][0] for index in READ], -1)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def rows(self, ids: list[int]) -> Tensor:
        """Return the head's hidden states of a whole sequence, `[len(ids) - 1, 64]`."""
        states = self.states(ids)[:-1]
        return self.layer(linear(states, self.tensors["fc.weight"]) if self.eagle3 else states, ids[1:])

    def layer(self, states: Tensor, ids: list[int]) -> Tensor:
        """Return the next hidden states, of states and the tokens after them."""
        weight, count = self._weight, len(ids)
        embeds = self.target.get_input_embeddings().weight[torch.tensor(ids)]
        if self.eagle3:
            normed = self._norm(states, weight["hidden_norm.weight"])
            given = torch.cat((self._norm(embeds, weight["input_layernorm.weight"]), normed), -1)
        else:
            given = states = linear(torch.cat((embeds, states), -1), self.tensors["fc.weight"], self.tensors["fc.bias"])
        query, key, value = (
            linear(given, weight[f"self_attn.{name}_proj.weight"]).view(count, -1, 32) for name in "qkv"
        )
        angles = torch.arange(count)[:, None] / 500.0 ** (torch.arange(0, 32, 2) / 32)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        query, key = (self._rotate(each, turn) for each in (query, key))
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / 32**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(count, 128)
        states = states + linear(attended, weight["self_attn.o_proj.weight"])
        rows = self._norm(states, weight["post_attention_layernorm.weight"])
        gate, up = (linear(rows, weight[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return states + linear(silu(gate) * up, weight["mlp.down_proj.weight"])

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden states over the ids that the head drafts."""
        if not self.eagle3:
            return linear(rows, self.target.lm_head.weight)
        return linear(self._norm(rows, self.tensors["norm.weight"]), self.tensors["lm_head.weight"])

    def drafts(self, states: Tensor, ids: list[int], count: int) -> list[int]:
        """Return the drafts after `ids`, of `states` of all but the last token, combined for EAGLE-3."""
        return self.tree_drafts(states, ids, [1] * count)

    def tree_drafts(self, states: Tensor, ids: list[int], widths: list[int]) -> list[int]:
        """Return the likeliest drafts of each depth, which follow the likeliest one before."""
        ids, found = list(ids), list[int]()
        for width in widths:
            last = self.layer(states, ids[1:])[-1:]
            best = self.ids[self.logits(last)[0].topk(width).indices].tolist()
            found += best
            states, ids = torch.cat((states, last)), [*ids, best[0]]
        return found

    @staticmethod
    def _rotate(heads: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.complex(*heads.chunk(2, -1)) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    @staticmethod
    def _norm(rows: Tensor, weight: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
