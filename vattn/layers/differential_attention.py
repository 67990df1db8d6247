"""`DifferentialAttention`: the difference of two softmax attentions over one paged KV cache (arXiv 2410.05258).

Heads 0 and 1, 2 and 3, ... are pairs. With `V` the concatenated values of a pair of KV heads, `[keys, 2 D]`, a pair of
query heads gives

    subln(softmax(Q_even K_even^T) V - lambda * softmax(Q_odd K_odd^T) V) * (1 - lambda_init)
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

which are two calls of `vattn::attention` with values twice as wide, read from an ordinary cache by pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vattn.backends import selector
from vattn.cache.memory import CacheMemory
from vattn.config.attention import AttentionConfig
from vattn.config.device import DeviceInfo
from vattn.errors import ConfigError, ShapeError, StrideError
from vattn.layers.attention import Attention
from vattn.layers.base.arguments import StepKind, step_configs
from vattn.layers.base.buffers import own_tensor
from vattn.layers.base.step import LayerResult, LayerStep
from vattn.layers.base.two_parts import CascadeOps, Part
from vattn.metadata.lineage import called
from vattn.ops.arguments import AttentionArgs
from vattn.quantization.codecs import encode_query, quantise_output

_LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def differential_lambda_init(depth: int) -> float:
    """Return the paper's `lambda_init` of a layer, `0.8 - 0.6 exp(-0.3 depth)`; `depth` counts layers from 0.

    Example:
        >>> import vattn
        >>> round(vattn.differential_lambda_init(0), 3), round(vattn.differential_lambda_init(10), 3)
        (0.2, 0.77)
    """
    if type(depth) is not int or depth < 0:
        raise ConfigError(f"depth={depth!r}", "an int from 0 up", "pass the index of the layer")
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


class DifferentialAttention(Attention):
    """Attend by the difference of two softmax maps, through a paged KV cache.

    Args:
        num_heads, head_size, scale: query heads (even), key width of one head, factor of the scores.
        num_kv_heads: KV heads, even and a divisor of `num_heads`; default `num_heads`.
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: vectors of `head_size` entries. A parameter is kept
            as the layer's; anything else is copied as fp32.
        lambda_init: constant part of lambda, `vattn.differential_lambda_init(depth)` in the paper.
        subln: module that normalises the last dimension of `[T, num_heads / 2, 2 * head_size]`; default
            `nn.RMSNorm(2 * head_size, eps=1e-5)`.
        prefix, **arguments: as for `Attention`; not `head_size_v`. Slopes and sinks are one per query head;
            `quant_config.output_format` quantises what the layer returns. Any backend with pairs of heads runs it;
            `"DIFFERENTIAL_FLASH_ATTN"` is the first of them on the device.

    A dict with these names can be passed as `**differential_flash_attention_config`.

    Raises:
        ConfigError: an odd head count, lambdas that are no numbers, or a cache without pairs (HND, packed formats).
        ShapeError: a lambda of another length.

    Every call computes lambda on the device from the current vectors, so reloaded weights take effect at once, in
    captured graphs too.

    Example:
        >>> import torch, vattn
        >>> lambdas = {name: torch.zeros(16) for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}
        >>> layer = vattn.DifferentialAttention(4, 16, 0.25, num_kv_heads=2, lambda_init=0.2, **lambdas)
        >>> _ = vattn.allocate_kv_cache(layer, num_blocks=4, dtype=torch.float32)
        >>> builder = vattn.AttentionMetadataBuilder(max_num_reqs=2, max_num_tokens=8, max_seq_len=32, block_size=16)
        >>> step = builder.build(query_lens=[3], seq_lens=[3], block_tables=[[1]])
        >>> with torch.no_grad():
        ...     layer(*(torch.randn(3, heads * 16) for heads in (4, 2, 2)), metadata=step).shape
        torch.Size([3, 64])
    """

    takes_exact_prefill = False
    takes_context_parallel = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *,
        lambda_q1: Tensor | Sequence[float],
        lambda_k1: Tensor | Sequence[float],
        lambda_q2: Tensor | Sequence[float],
        lambda_k2: Tensor | Sequence[float],
        lambda_init: float,
        subln: nn.Module | None = None,
        prefix: str = "",
        **arguments: Any,
    ) -> None:
        _check_even(prefix, num_heads, num_heads if num_kv_heads is None else num_kv_heads)
        # Named here, so that Python refuses another width of values: they are as wide as a pair of keys.
        super().__init__(num_heads, head_size, scale, num_kv_heads, head_size_v=head_size, prefix=prefix, **arguments)
        vectors = dict(zip(_LAMBDAS, (lambda_q1, lambda_k1, lambda_q2, lambda_k2), strict=True))
        self._register_lambdas(vectors, lambda_init)
        if subln is not None and not isinstance(subln, nn.Module):
            raise ConfigError(f"subln of type {type(subln).__name__}", "a module or None", "pass nn.RMSNorm(...)")
        self.subln = nn.RMSNorm(2 * head_size, eps=1e-5) if subln is None else subln
        self._odd_ops: dict[StepKind, str] = {}
        half_of(self._request_config(torch.bfloat16), "even")

    def _register_lambdas(self, vectors: dict[str, Any], lambda_init: float) -> None:
        if isinstance(lambda_init, bool) or not isinstance(lambda_init, (int, float)) or not 0 <= lambda_init < 1:
            raise ConfigError(
                f"lambda_init={lambda_init!r}", "a number from 0 to below 1", "vattn.differential_lambda_init(depth)"
            )
        self.lambda_init = float(lambda_init)
        # Buffers made in inference mode could not be loaded outside of it.
        with torch.inference_mode(False):
            for name, vector in vectors.items():
                kept = vector if isinstance(vector, nn.Parameter) else own_tensor(name, vector)
                if tuple(kept.shape) != (self.head_size,):
                    raise ShapeError(
                        f"{name} has shape {tuple(kept.shape)} in layer {self.prefix!r}",
                        f"({self.head_size},), one entry per column of a head",
                        "check head_size: the width of one head, half that of a pair",
                    )
                if isinstance(kept, nn.Parameter):
                    self.register_parameter(name, kept)
                else:
                    self.register_buffer(name, kept)

    def lambda_full(self) -> Tensor:
        """Return lambda as fp32 `[]`, from the current vectors."""
        q1, k1, q2, k2 = (getattr(self, name).detach().float() for name in _LAMBDAS)
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.lambda_init

    def _choose_backend(
        self, config: AttentionConfig, device: torch.device | str, memory: CacheMemory | None = None
    ) -> str:
        half = half_of(config, "even")
        name = selector.choose(half, device, self.prefix, memory).runs_on(half, DeviceInfo.of(device))
        return selector.choose(half.replace(backend=name), device, self.prefix, memory).name

    def _check_cache(self, key_cache: Tensor, value_cache: Tensor | None) -> None:
        if isinstance(value_cache, Tensor) and value_cache.dim() == 4 and value_cache.stride(2) != self.head_size:
            raise StrideError(
                f"values with heads {value_cache.stride(2)} elements apart in {called(self)}",
                f"{self.head_size}: the values of a pair of heads are read as one row",
                "keep the heads of a token together",
            )

    def _finish_binding(self, config: AttentionConfig, device: DeviceInfo) -> None:
        self._update_op = config.encode()
        self._ops, self._refused = step_configs(half_of(config, "even"), device)
        why = dict.fromkeys((*self._ops, *self._refused), "differential attention: both halves would need both parts")
        self._cascade_ops = CascadeOps({}, "", why, 0, "build the step without shared_prefix_len")
        self._odd_ops, _ = step_configs(half_of(config, "odd"), device)
        # Plans are only made for layers with one kind of heads.
        self._plan_key = ""

    def _parts(
        self, args: AttentionArgs, step: LayerStep, key: Tensor | None, value: Tensor | None
    ) -> tuple[AttentionArgs, AttentionArgs]:
        return self._half(args, 0, args.config), self._half(args, 1, self._odd_ops[step.kind()])

    def _half(self, args: AttentionArgs, index: int, op_config: str) -> AttentionArgs:
        """Return the arguments of one half; its output is `[T, num_heads / 2, 2 * head_size]` in the model dtype."""
        query = args.query[:, index::2]
        return args._replace(
            query=query,
            output=query.new_empty(query.shape[0], query.shape[1], 2 * self.head_size),
            output_block_scale=None,
            output_scale=None,
            q_scale=_every_second(args.q_scale, index),
            k_scale=_every_second(args.k_scale, index),
            alibi_slopes=_every_second(args.alibi_slopes, index),
            sinks=_every_second(args.sinks, index),
            # The values of a pair are one row; the scale of its second half is applied after the call.
            v_scale=_every_second(args.v_scale, 0),
            config=op_config,
        )

    def _attend(self, query: Tensor, parts: tuple[Part, ...], result: LayerResult) -> None:
        for part in parts:
            if part.q_scale is not None:
                part = part._replace(query=encode_query(part.query, part.q_scale, self.num_kv_heads // 2))
            torch.ops.vattn.attention(*part)
        first, second = (part.output for part in parts)
        difference = (first.float() - self.lambda_full() * second.float()) * self._value_factors(first)
        normed = self.subln(difference.to(first.dtype)) * (1 - self.lambda_init)
        # A norm with a bias gives padding rows values.
        rows = torch.arange(first.shape[0], device=first.device)
        normed = torch.where((rows < parts[0].query_start_loc[-1])[:, None, None], normed, 0).to(first.dtype)
        rounded = normed.reshape(first.shape[0], self.num_heads, self.head_size)
        fmt = self.quant_config.output_format
        quantise_output(rounded, fmt, result.output, result.block_scale, self.output_scale)

    def _value_factors(self, half: Tensor) -> Tensor | float:
        """Return the factors of a half's columns: the second value of a pair may have another scale than the first."""
        if self.v_scale is None or self.v_scale.numel() == 1:
            return 1.0
        ratio = self.v_scale[1::2] / self.v_scale[0::2]
        per_head = ratio.repeat_interleave(half.shape[1] // ratio.shape[0])[:, None]
        return torch.cat((torch.ones_like(per_head), per_head), dim=1).repeat_interleave(self.head_size, dim=1)

    def _learned(self) -> tuple[Tensor | None, ...]:
        return (*(getattr(self, name) for name in _LAMBDAS), *self.subln.parameters())

    def extra_repr(self) -> str:
        """Show the request, `lambda_init` and the chosen backend."""
        return f"{super().extra_repr()}, lambda_init={self.lambda_init:.4g}"


def half_of(config: AttentionConfig, pairs: str) -> AttentionConfig:
    """Return the config of the even or odd heads of a request; its output is not quantised."""
    return config.replace(
        num_heads=config.num_heads // 2,
        num_kv_heads=config.num_kv_heads // 2,
        head_size_v=2 * config.head_size,
        head_pairs=pairs,
        output_format="none",
    )


def _every_second(values: Tensor | None, index: int) -> Tensor | None:
    """Return every second entry of values per head; a single value or `None` is returned as it is."""
    return values if values is None or values.numel() == 1 else values[index::2].contiguous()


def _check_even(prefix: str, num_heads: int, num_kv_heads: int) -> None:
    for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if type(count) is not int or count < 2 or count % 2:
            raise ConfigError(
                f"{name}={count!r} in layer {prefix!r} of differential attention",
                "an even number from 2 up, since heads are pairs",
                "check the head counts of the model (after tensor-parallel splitting)",
            )
