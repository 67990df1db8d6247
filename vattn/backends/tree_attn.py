"""TREE_ATTN: verify trees of draft tokens along with prefills and plain decodes, in the kernels of TRITON_ATTN.

`vattn.TreeAttentionMetadataBuilder` makes the steps: a bias per tree and an id per request, -1 for the causal mask. The
op is the same `vattn::attention`, so fusion, quantised outputs, graphs and TORCH_SDPA on a CPU take the same metadata.
"""

from __future__ import annotations

from dataclasses import replace

from vattn.backends.triton_attn import TritonAttentionBackend
from vattn.config.attention import AttentionConfig


class TreeAttentionBackend(TritonAttentionBackend):
    """Run decoder attention with requests that may be trees of drafts."""

    name = "TREE_ATTN"
    # A tree is in a paged cache, after a causal context.
    capabilities = replace(
        TritonAttentionBackend.capabilities,
        attn_types=("decoder",),
        features=TritonAttentionBackend.capabilities.features - {"bidirectional", "causal_flags", "contiguous_kv"},
    )

    def notes(self, config: AttentionConfig) -> list[str]:
        """Say what windows and ALiBi count where there are trees."""
        used = (("window", config.sliding_window is not None), ("ALiBi", config.alibi != "none"))
        names = " and ".join(name for name, present in used if present)
        if not (config.tree_bias and names):
            return super().notes(config)
        note = f"{names} by place in the cache, where drafts lie in the tree's order, not by depth"
        return [note, *super().notes(config)]
