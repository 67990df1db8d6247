"""A vision tower whose attention runs in FP8: scales from the last images first, then from a file.

Images of different sizes are packed into one row. Weights and images are random, so the errors that are printed are
those of FP8 on normally distributed values; on a real tower, measure with real images.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import vattn

HEADS, SIZE, LAYERS = 4, 72, 3
HIDDEN = HEADS * SIZE
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """One layer: attention over the patches of each image, and an MLP."""

    def __init__(self, index: int, quant: vattn.EncoderFP8Config | None) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.attn = vattn.MMEncoderAttention(HEADS, SIZE, prefix=f"visual.blocks.{index}", quant_config=quant)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor, starts: Tensor, longest: Tensor) -> Tensor:
        # Three views of one projection: nothing is copied on the way to the kernel.
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(self.attn(query, key, value, starts, longest))
        return x + self.mlp(self.mlp_norm(x))


class Tower(nn.Module):
    """Patches `[1, tokens, hidden]` of all images in, features of the same shape out."""

    def __init__(self, quant: vattn.EncoderFP8Config | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, quant) for index in range(LAYERS))

    def forward(self, patches: Tensor, starts: Tensor, longest: Tensor) -> Tensor:
        for block in self.blocks:
            patches = block(patches, starts, longest)
        return patches


def make_tower(weights: dict[str, Tensor], quant: vattn.EncoderFP8Config | None) -> Tower:
    tower = Tower(quant)
    tower.load_state_dict(weights, strict=False)  # scales come from the file or the last images
    return tower.eval().requires_grad_(False).to(DEVICE, torch.bfloat16)


def random_images(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the patches of three images, where each starts, and how long the longest is."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(16, 100, (3,), generator=rng)
    patches = torch.randn(1, int(lengths.sum()), HIDDEN, generator=rng)
    starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return patches.to(DEVICE, torch.bfloat16), starts.to(DEVICE), lengths.max().to(DEVICE)


def error(tower: Tower, reference: Tower, seed: int) -> float:
    """Return how far a tower is from another, relative to what the layers of the other add to the patches."""
    images = random_images(seed)
    got, expected = (model(*images).float() for model in (tower, reference))
    return ((got - expected).norm() / (expected - images[0].float()).norm()).item()


def main() -> None:
    torch.manual_seed(0)
    weights = Tower().state_dict()
    plain = make_tower(weights, None)

    dynamic = make_tower(weights, vattn.EncoderFP8Config(dynamic=True))
    print(dynamic.blocks[0].attn)
    print(f"dynamic scales, first images: differs from bf16 by {error(dynamic, plain, seed=100):.1%}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.json"
        try:
            vattn.save_encoder_scales(dynamic, path)
        except vattn.errors.ScaleError as refusal:
            print(f"too early to save: {refusal}")
        for seed in range(15):
            dynamic(*random_images(seed))
        vattn.save_encoder_scales(dynamic, path, margin=1.25)
        print("saved:", vattn.read_encoder_scales(path)["visual.blocks.0"])
        static = make_tower(weights, vattn.EncoderFP8Config(scale_path=path))

    print(static.blocks[0].attn)
    for seed in (200, 201):
        distance = error(static, plain, seed)
        print(f"static scales, new images: differs from bf16 by {distance:.1%}")
        assert distance < 0.05


if __name__ == "__main__":
    main()
