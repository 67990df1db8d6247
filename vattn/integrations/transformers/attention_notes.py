"""What a model does when it attends: the calls of its attention and the masks that it requests, as notes of one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vattn.errors import UnsupportedRequestError
from vattn.integrations.transformers.available import CACHE_ARGUMENTS

SAME = 2.0**-6
"""What attention gives every token while notes are taken."""

_CONSTANTS = {"scaling": None, "sliding_window": None, "softcap": None}
"""Arguments of attention that become arguments of our layer."""

NO_MEANING = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "dropout",
        "position_embeddings",
        *CACHE_ARGUMENTS,
        "past_key_value",
    }
)
"""Arguments that attention is passed and has no use for; dropout is 0 in eval mode."""


@dataclass
class MaskCall:
    """The mask that a model requested: its rule, and its window."""

    rule: Callable[..., Any]
    local_size: int | None
    ndim = 0

    def to(self, dtype: torch.dtype) -> MaskCall:
        """Return itself: some models convert their mask."""
        return self

    def __getitem__(self, index: Any) -> MaskCall:
        raise unsupported(
            "attention that reads or changes its mask itself, as sparse attention with an indexer does (DeepSeek V3.2, "
            "GLM-DSA): the keys of the indexer have no cache here"
        )

    def window(self) -> int | None:
        """Return the causal window, `None` for all earlier tokens.

        Raises:
            UnsupportedRequestError: another rule than these.
        """
        size = self.local_size
        near = 40 if size is None else 2 * size + 3
        rows = torch.tensor([0, 1, 2, 7, near // 2 - 1, near // 2, near // 2 + 1, near])
        zero, q, k = torch.tensor(0), rows[:, None], rows[None, :]
        try:
            seen = torch.as_tensor(self.rule(zero, zero, q, k))
        except IndexError as error:
            raise UnsupportedRequestError(
                "a mask that reads the tokens of the step",
                "causal masks and causal windows",
                "run the text model alone",
            ) from error
        expected = k <= q
        if size is not None:
            expected &= k > q - size
        if not torch.equal(seen.bool().broadcast_to(expected.shape), expected):
            raise UnsupportedRequestError(
                f"a mask by {getattr(self.rule, '__qualname__', self.rule)}",
                "causal masks and causal windows",
                "keep this model on transformers' own attention",
            )
        return size

    def shows_later_tokens(self) -> bool:
        """Return whether the first token sees the second one."""
        zero, one = torch.tensor(0), torch.tensor(1)
        try:
            return bool(torch.as_tensor(self.rule(zero, zero, zero, one)).any())
        except IndexError:
            return False

    def window_both_ways(self) -> int | None:
        """Return W of a mask by which tokens i and j see each other if `|i - j| < W`, `None` for all tokens.

        Raises:
            UnsupportedRequestError: another rule than these.
        """
        near = 40 if self.local_size is None else 2 * self.local_size + 3
        zero, places = torch.tensor(0), torch.arange(near)
        seen = torch.as_tensor(self.rule(zero, zero, zero, places)).bool().broadcast_to(places.shape)
        window = None if bool(seen.all()) else int(seen.int().argmin())
        rows = torch.tensor([0, 1, 2, 7, near // 2 - 1, near // 2, near - 1])
        found = torch.as_tensor(self.rule(zero, zero, rows[:, None], places)).bool()
        expected = (rows[:, None] - places).abs() < (near if window is None else window)
        if not torch.equal(found.broadcast_to(expected.shape), expected):
            raise UnsupportedRequestError(
                f"a mask by {getattr(self.rule, '__qualname__', self.rule)}",
                "all tokens of a text, causal masks, and windows of either",
                "keep this model on transformers' own attention",
            )
        return window


@dataclass
class AttentionCall:
    """How a model calls one attention module.

    Attributes:
        module: the attention module.
        num_heads, num_kv_heads, head_size, head_size_v, scale: as in `vattn.Attention`.
        window, soft_cap, sinks, alibi_slopes: `None` for none.
        causal: whether a token sees only itself and earlier ones.
        queries: the queries of the run, `[1, heads, T, head_size]`.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    causal: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    queries: Tensor | None = None

    def expected_options(self) -> dict[str, Any]:
        """Return the arguments that each later call must repeat."""
        return {name: self.options[name] for name in _CONSTANTS if name in self.options}


class Notes:
    """The attention calls and masks of one run."""

    def __init__(self, replaced: bool, pools: bool) -> None:
        self.calls: dict[nn.Module, AttentionCall] = {}
        self.replaced, self.pools = replaced, pools

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Note a call and return the same for all tokens, `[1, T, heads, head_size_v]`.

        Not zeros: quantisers without a floor divide a row by its largest value.
        """
        name = type(module).__name__
        if module in self.calls:
            raise unsupported(f"{name} attends twice in a step")
        if not isinstance(attention_mask, MaskCall):
            raise unsupported(f"{name} got a mask of its own ({type(attention_mask).__name__})")
        if key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2]:
            raise unsupported(f"{name} attends to {key.shape[2]} keys from {query.shape[2]} tokens")
        causal = not (self.pools and attention_mask.shows_later_tokens())
        window = attention_mask.window() if causal else attention_mask.window_both_ways()
        # Windows of both ways count otherwise in each family; the mask has the last word.
        if causal and options.get("sliding_window") not in (None, window):
            raise unsupported(
                f"{name} has sliding_window={options['sliding_window']} under a mask with "
                f"{'no window' if window is None else f'a window of {window}'}"
            )
        sinks, scale = options.get("s_aux"), options.get("scaling")
        known = {*_CONSTANTS, *NO_MEANING, "s_aux", "is_causal"}
        odd = {k: v for k, v in options.items() if k not in known and v is not None and not isinstance(v, (bool, str))}
        if odd or (causal and options.get("is_causal") is False):
            raise unsupported(f"{name} passes {', '.join(odd) or 'is_causal=False'} to attention")
        self.calls[module] = AttentionCall(
            module,
            query.shape[1],
            key.shape[1],
            query.shape[3],
            value.shape[3],
            query.shape[3] ** -0.5 if scale is None else float(scale),
            window,
            options.get("softcap"),
            sinks,
            causal=causal,
            options=options,
            queries=query.detach().clone(),
        )
        return query.new_full((1, query.shape[2], query.shape[1], value.shape[3]), SAME), None

    def mask(
        self,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> MaskCall:
        """Note which mask was requested; modules with a replaced forward use none of the model's own."""
        if attention_mask is not None and not self.replaced:
            raise unsupported("a padding mask that the model makes itself")
        return MaskCall(mask_function, local_size)


def unsupported(got: str) -> UnsupportedRequestError:
    """Return the error of a model that attends in a way which vattn cannot express."""
    return UnsupportedRequestError(
        got,
        "models whose tokens meet in attention alone, full or in a window: causal, or both ways in enable_pooling",
        "keep this model on transformers' own attention",
    )
