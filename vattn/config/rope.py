"""The request of one layer's rotary position embedding: frozen, hashable, encoded as one string.

`RopeConfig` travels with `vattn::rope_kv_cache_update` as `rope.encode()`, beside the string of the `AttentionConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vattn.config import encoding
from vattn.config.encoding import check
from vattn.quantization.formats import OUTPUT_DIVISIONS

ROPE_STYLES = ("neox", "interleaved")
"""Which columns are rotated together: i and i + rotary_dim / 2 (NeoX, Llama), or 2i and 2i + 1 (GPT-J)."""

ROPE_NORMS = ("none", "rms", "rms_one_plus")
"""RMSNorm of every query and key head before the rotation: none, times the weight, or times 1 + weight (Gemma)."""


@dataclass(frozen=True)
class RopeConfig(encoding.Encoded):
    """Describe what happens to queries and keys before they are quantised and cached.

    Attributes:
        rotary_dim: leading columns of each head that are rotated, even; the others are copied.
        style: `"neox"` or `"interleaved"`, see `ROPE_STYLES`.
        norm: see `ROPE_NORMS`; over the whole head, before the rotation. Weights are optional tensor arguments.
        norm_eps: added to the mean square under the root; default 0, with a norm too.
        round_query: round a query to the model dtype before quantising it, as separate steps would. Compiled code that
            quantises in the rotation kernel does not.
        query_arithmetic: `"divide"` by `q_scale`, or `"multiply"` by it; it is then the reciprocal of the scale.

    Example:
        >>> RopeConfig(rotary_dim=64, style="interleaved").encode()
        'rope1 rotary_dim=64 style=interleaved'
    """

    head = "rope1"

    rotary_dim: int
    style: str = "neox"
    norm: str = "none"
    norm_eps: float = 0.0
    round_query: bool = True
    query_arithmetic: str = "divide"

    def __post_init__(self) -> None:
        encoding.make_canonical(self)
        check(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            f"rotary_dim={self.rotary_dim}",
            "an even number from 2 up",
            "give the number of rotated columns, not of pairs",
        )
        choices = {"style": ROPE_STYLES, "norm": ROPE_NORMS, "query_arithmetic": OUTPUT_DIVISIONS}
        encoding.check_names(self, choices)
        check(
            self.norm_eps >= 0 and (self.norm != "none" or self.norm_eps == 0),
            f"norm_eps={self.norm_eps} with norm={self.norm!r}",
            "a number from 0 up, and 0 without a norm",
            "choose a norm",
        )
