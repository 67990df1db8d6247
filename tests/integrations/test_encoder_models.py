"""Encoders of transformers with their attention swapped for ours: same weights, packed inputs, equal outputs.

Theirs runs every text alone, by its own eager attention; ours runs all of them in one call.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vattn
from tests.layers.encoder_support import packed_step
from tests.support import relative_l2

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
"""Relative L2 in fp32. What is seen is 1e-6 (another order of sums); texts that see each other give 1e-1."""

TEXTS = [13, 1, 30, 4, 22]
VOCAB = 61


def randomised(model: nn.Module, seed: int) -> Any:
    """Give a model weights with which attention is far from uniform, and norms that are not 1."""
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        wide = parameter.dim() > 1
        drawn = torch.randn(parameter.shape, generator=rng)
        is_norm = "norm" in name.lower() and name.endswith("weight") and not wide
        size = 1.6 * parameter[0].numel() ** -0.5 if wide else 0.1
        parameter.data = 1 + 0.2 * drawn if is_norm else size * drawn
    return model.eval().requires_grad_(False)


def swapped(model: nn.Module, kind: str, make: Callable[[Any, str], nn.Module]) -> Any:
    """Return a copy of a model in which every module of a class has been replaced."""
    ours = copy.deepcopy(model)
    found = [(name, module) for name, module in ours.named_modules() if type(module).__name__ == kind]
    assert found
    for name, module in found:
        parent, _, child = name.rpartition(".")
        setattr(ours.get_submodule(parent), child, make(module, name))
    return ours


class Swapped(nn.Module):
    """A module of transformers whose attention is a layer of vattn: `call` takes both, and what theirs is given."""

    def __init__(self, theirs: Any, attn: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.theirs, self.attn, self.call = theirs, attn, call

    def forward(self, *inputs: Any, **given: Any) -> Any:
        """Return what theirs returns."""
        return self.call(self.theirs, self.attn, *inputs, **given)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to the two halves of `[T, H, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def bert(theirs: Any, attn: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Packed `BertSelfAttention`: one row of all texts."""
    x = hidden_states.squeeze(0)
    return attn(theirs.query(x), theirs.key(x), theirs.value(x))[None], None


def modern_bert(theirs: Any, attn: Any, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Any:
    """Packed `ModernBertAttention`: windows in some layers, rotary positions from the step."""
    cos, sin = (t.squeeze(0)[:, None] for t in position_embeddings)
    query, key, value = theirs.Wqkv(hidden_states.squeeze(0)).unflatten(1, (3, -1, cos.shape[-1])).unbind(1)
    return theirs.Wo(attn(rotated(query, cos, sin), rotated(key, cos, sin), value))[None], None


def siglip(theirs: Any, attn: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """`SiglipAttention` over a batch of images of one size."""
    rows = (projection(hidden_states) for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    return theirs.out_proj(attn(*rows)), None


def qwen(theirs: Any, attn: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Any, **_: Any) -> Any:
    """`VisionAttention` of Qwen2-VL: images of any sizes in one row, separated by offsets."""
    cos, sin = (t[:, None] for t in position_embeddings)
    query, key, value = theirs.qkv(hidden_states).unflatten(1, (3, -1, cos.shape[-1])).unbind(1)
    rows = (t[None] for t in (rotated(query, cos, sin), rotated(key, cos, sin), value))
    starts = cu_seqlens.int()
    return theirs.proj(attn(*rows, starts, starts.diff().max()).flatten(2).squeeze(0))


def compare_texts(theirs: Any, ours: Any) -> None:
    texts = [torch.randint(VOCAB, (length,)) for length in TEXTS]
    expected = torch.cat([theirs(text[None]).last_hidden_state[0] for text in texts])
    step = packed_step(TEXTS)
    ids, positions = torch.cat(texts)[None], step.positions[None].clone()
    with vattn.forward_context(step):
        got = ours(ids, position_ids=positions).last_hidden_state[0]
    assert relative_l2(got, expected) < TOLERANCE
    with vattn.forward_context(packed_step([sum(TEXTS[:2]), *TEXTS[2:]])):
        mixed = ours(ids, position_ids=positions).last_hidden_state[0]
    assert relative_l2(mixed, expected) > 1e-2, "two texts seen as one must be noticed"


CASES = pytest.mark.parametrize(
    ("seed", "backend"),
    [(0, "TORCH_SDPA"), (1, "TORCH_SDPA"), pytest.param(3, "TRITON_ATTN", marks=pytest.mark.slow)],
)
"""Two seeds on torch, one on the interpreted kernels."""

TEXT: dict[str, Any] = {"vocab_size": VOCAB, "intermediate_size": 72, "attn_implementation": "eager"}


@CASES
def test_bert(seed: int, backend: str) -> None:
    heads, size = random.Random(seed).choice([(4, 16), (3, 24), (1, 64), (2, 40)])
    shape = {"hidden_size": heads * size, "num_hidden_layers": 2, "num_attention_heads": heads}
    config = transformers.BertConfig(**shape, **TEXT, max_position_embeddings=64)
    theirs = randomised(transformers.BertModel(config, add_pooling_layer=False), seed)

    def make(module: Any, name: str) -> nn.Module:
        attn = vattn.EncoderOnlyAttention(heads, size, size**-0.5, prefix=name, attn_backend=backend)
        return Swapped(module, attn, bert)

    compare_texts(theirs, swapped(theirs, "BertSelfAttention", make))


@CASES
def test_modern_bert(seed: int, backend: str) -> None:
    """Full attention in every third layer, windows in the others."""
    rng = random.Random(seed)
    heads, size = rng.choice([(4, 16), (3, 24), (2, 32)])
    shape = {"hidden_size": heads * size, "num_hidden_layers": 4, "num_attention_heads": heads}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(
        **shape, **TEXT, **tokens, local_attention=rng.choice([2, 6, 10]), global_attn_every_n_layers=3
    )
    theirs = randomised(transformers.ModernBertModel(config), seed)

    def make(module: Any, name: str) -> nn.Module:
        window = module.sliding_window
        attn = vattn.EncoderOnlyAttention(
            heads, size, size**-0.5, per_layer_sliding_window=window, prefix=name, attn_backend=backend
        )
        return Swapped(module, attn, modern_bert)

    ours = swapped(theirs, "ModernBertAttention", make)
    windows = {layer.attn.attn.sliding_window for layer in ours.layers}
    assert windows == {None, config.sliding_window + 1}
    compare_texts(theirs, ours)


def swap_vision(theirs: Any, kind: str, call: Callable[..., Any], backend: str) -> Any:
    def make(module: Any, name: str) -> nn.Module:
        attn = vattn.MMEncoderAttention(module.num_heads, module.head_dim, prefix=name, attn_backend=backend)
        return Swapped(module, attn, call)

    return swapped(theirs, kind, make)


@CASES
def test_siglip(seed: int, backend: str) -> None:
    heads, size = random.Random(seed).choice([(2, 72), (4, 24), (2, 64)])
    shape = {"hidden_size": heads * size, "num_hidden_layers": 2, "num_attention_heads": heads, "intermediate_size": 96}
    config = transformers.SiglipVisionConfig(**shape, image_size=30, patch_size=6, attn_implementation="eager")
    theirs = randomised(transformers.SiglipVisionModel(config), seed)
    ours, images = swap_vision(theirs, "SiglipAttention", siglip, backend), torch.randn(3, 3, 30, 30)
    got, expected = (model(images).last_hidden_state for model in (ours, theirs))
    assert got.shape == (3, 25, heads * size)
    assert relative_l2(got, expected) < TOLERANCE


@CASES
def test_qwen2_vl_vision_tower(seed: int, backend: str) -> None:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    heads, size = random.Random(seed).choice([(2, 80), (3, 40), (4, 16)])
    shape = {"depth": 2, "embed_dim": heads * size, "hidden_size": 48, "num_heads": heads, "mlp_ratio": 2}
    config = Qwen2VLVisionConfig(**shape, patch_size=4, attn_implementation="eager")
    theirs = randomised(Qwen2VisionTransformerPretrainedModel(config), seed)
    ours = swap_vision(theirs, "VisionAttention", qwen, backend)
    grids = torch.tensor([[1, 4, 6], [2, 2, 4], [1, 2, 2], [1, 8, 4]])  # the second is a clip of two frames
    patches = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4)
    got, expected = (model(patches, grid_thw=grids) for model in (ours, theirs))
    for name in ("last_hidden_state", "pooler_output"):
        assert relative_l2(getattr(got, name), getattr(expected, name)) < TOLERANCE
