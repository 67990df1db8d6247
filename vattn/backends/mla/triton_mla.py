"""TRITON_MLA: latent attention in Triton kernels, on CUDA and in Triton's interpreter.

Every row is absorbed. Nothing is read from the device and grids come from shapes, so any call can be captured in a CUDA
graph.
"""

from __future__ import annotations

from typing import Any

import torch

from vattn.backends.base import Package
from vattn.backends.mla.base import MLABackend, MLACapabilities, TritonMLAUpdate
from vattn.cache.memory import CacheMemory
from vattn.config.device import BLOCK_SIZES, DeviceInfo, Sizes
from vattn.config.mla import WEIGHT_FORMATS, MLAConfig
from vattn.ops.arguments import PlanArgs
from vattn.ops.arguments_mla import MLAAttentionArgs
from vattn.quantization.formats import MODEL_DTYPES, OUTPUT_FORMATS, QUERY_FORMATS
from vattn.quantization.mla_formats import MLA_FORMATS


class TritonMLABackend(TritonMLAUpdate, MLABackend):
    """Run latent attention in the latent space, in a few launches."""

    name = "TRITON_MLA"
    capabilities = MLACapabilities(
        devices=("cuda", "interpreter"),
        dtypes=tuple(MODEL_DTYPES),
        kv_cache_dtypes=tuple(MLA_FORMATS),
        query_formats=QUERY_FORMATS,
        output_formats=tuple(OUTPUT_FORMATS),
        attn_types=("decoder",),
        head_sizes=Sizes(1, 2, 640),
        block_sizes=BLOCK_SIZES,
        features=frozenset({"lse", "sparse", "context_parallel"}),
        # FP8 is decoded and encoded in software where the hardware has none.
        minimum_capability=(8, 0),
        package=Package(module="triton", distribution="triton", minimum=(3, 6), extra="triton"),
        latent_sizes=Sizes(1, 1, 512),
        rope_sizes=Sizes(1, 1, 128),
        weight_formats=WEIGHT_FORMATS,
        output_variants=True,
        cuda_graphs="full",
    )

    def general_steps(self, config: Any, device: DeviceInfo, memory: CacheMemory | None = None) -> list[str]:
        """Say which steps run on the general kernels on Hopper, which has faster ones."""
        from vattn.kernels import mla_route
        from vattn.kernels.hopper import availability

        if device.type != "cuda" or device.capability != availability.CAPABILITY:
            return []
        return availability.missed_steps(mla_route.missed(config, device, memory))

    def plan_shape(self, config: Any, num_tokens: int, num_reqs: int, table_width: int) -> tuple[int, ...]:
        """Return the shape of a step's plan: what a layer and the GPU have of schedule and row tiles."""
        from vattn.kernels import mla_route

        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        return mla_route.plan_shape(config, num_tokens, num_reqs, device)

    def plan_key(self, config: Any) -> str:
        from vattn.kernels import mla_route

        return f"{self.name} {mla_route.plan_key(config)}"

    def plan(self, args: PlanArgs, config: Any) -> None:
        from vattn.kernels import mla_route

        mla_route.plan(args, config)

    def scratch_bytes(self, config: MLAConfig, num_tokens: int, workspace_tokens: int | None) -> int:
        """Return the bytes of rows in the latent space, of the workspace, and of sums that go from chunk to chunk."""
        from vattn.ops.reference.mla_absorb import DEFAULT_WORKSPACE_BYTES, elements_per_token

        row = elements_per_token(config) * MODEL_DTYPES[config.dtype].itemsize
        tokens = workspace_tokens or max(DEFAULT_WORKSPACE_BYTES // row, config.block_size)
        sums = 4 * num_tokens * config.num_heads * (config.v_head_dim + 2)
        return super().scratch_bytes(config, num_tokens, None) + tokens * row + sums

    def mla_attention(self, args: MLAAttentionArgs, config: MLAConfig) -> None:
        from vattn.kernels.mla_route import attend

        if config.context_parallel:
            from vattn.kernels.triton.attention.dcp_rows import latent_rows

            args, config = latent_rows(args, config)
        attend(args, config)
