"""Small random models that take images, and prompts as their processors return them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 16,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


def _qwen2_5_vl() -> Any:
    return transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, **_rope(2, 3, 3)},
        vision_config={**QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN_TOKENS,
    )


def _qwen3_vl() -> Any:
    return transformers.Qwen3VLConfig(
        text_config={**TEXT, **_rope(4, 2, 2)},
        vision_config={**QWEN, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **QWEN_TOKENS,
    )


def _gemma3() -> Any:
    return transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 9, "num_hidden_layers": 6},
        vision_config={**VISION, "image_size": 24, "patch_size": 4},
        mm_tokens_per_image=9,
        image_token_index=90,
    )


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(**VISION, image_size=12, patch_size=4)
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=vision, image_token_index=90
    )


def _pixtral() -> Any:
    vision = transformers.PixtralVisionConfig(**VISION, image_size=32, patch_size=4)
    return transformers.LlavaConfig(
        text_config=transformers.MistralConfig(**TEXT, sliding_window=7),
        vision_config=vision,
        image_token_index=90,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def _mistral3() -> Any:
    vision = transformers.PixtralVisionConfig(**VISION, image_size=32, patch_size=4)
    return transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**TEXT, sliding_window=None),
        vision_config=vision,
        image_token_index=90,
        vision_feature_layer=-1,
    )


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen2_5_vl": (_qwen2_5_vl, "positions in three dimensions"),
    "qwen3_vl": (_qwen3_vl, "positions in three dimensions, images added in several layers"),
    "gemma3": (_gemma3, "images that see themselves both ways, windows"),
    "llava": (_llava, "CLIP and Llama"),
    "pixtral": (_pixtral, "Pixtral's vision tower and Mistral, images of any size, a window"),
    "mistral3": (_mistral3, "merged patches of images of any size"),
}


def make(name: str) -> Any:
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(MODELS[name][0](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.requires_grad_(False)


def prompt(name: str, before: list[int], after: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a prompt with an image between two texts."""
    rng = torch.Generator().manual_seed(seed)
    more: dict[str, torch.Tensor] = {}
    if name.startswith("qwen"):
        count = 6
        more["pixel_values"] = torch.randn(4 * 6, 3 * 2 * 4 * 4, generator=rng)
        more["image_grid_thw"] = torch.tensor([[1, 4, 6]])
    elif name in ("pixtral", "mistral3"):
        count = 15 if name == "pixtral" else 6
        height, width = (12, 20) if name == "pixtral" else (16, 24)
        more["pixel_values"] = torch.randn(1, 3, height, width, generator=rng)
        more["image_sizes"] = torch.tensor([[height, width]])
    else:
        count, size = 9, 24 if name == "gemma3" else 12
        more["pixel_values"] = torch.randn(1, 3, size, size, generator=rng)
    kinds = [0] * len(before) + [1] * count + [0] * len(after)
    if name.startswith("qwen"):
        more["mm_token_type_ids"] = torch.tensor([kinds])
    if name == "gemma3":
        more["token_type_ids"] = torch.tensor([kinds])
    ids = torch.tensor([[*before, *[90] * count, *after]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def table() -> str:
    """Return the models as the documentation shows them."""
    rows = [f"| `{name}` | {special} |" for name, (_, special) in MODELS.items()]
    return "\n".join(["| model | what is special about it |", "|---|---|", *rows])
