"""`MMEncoderAttention`: the attention of vision towers and other multimodal encoders, many images in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from vattn.config.attention import AttentionConfig, AttentionType
from vattn.config.keywords import known_keywords
from vattn.config.other_names import LAYER
from vattn.config.typed import typed_on_error
from vattn.errors import DtypeError, MetadataError, ShapeError
from vattn.layers.base.scales import make_scale
from vattn.layers.base.step import not_strided
from vattn.layers.base.varlen import varlen_arguments
from vattn.layers.encoder.cu_seqlens import check_offsets
from vattn.layers.encoder.fp8_scales import HISTORY_STEPS, EncoderFP8Config, largest_value, record_amax, scales_of_layer
from vattn.layers.encoder.varlen_attention import VarlenAttention
from vattn.ops.index_dtypes import INDEX_DTYPES
from vattn.quantization.codecs import encode_kv, encode_query
from vattn.quantization.formats import OUTPUT_FORMATS, dtype_name

_FP8 = "fp8_e4m3"


@known_keywords(LAYER)
class MMEncoderAttention(VarlenAttention):
    """Attend the tokens of each image (or frame, or clip) to all tokens of the same image.

    Args:
        num_heads, head_size: query heads, width of one head.
        scale: factor of the scores; default `head_size ** -0.5`.
        num_kv_heads: KV heads, a divisor of `num_heads`; default `num_heads`.
        prefix: name of the layer in its model, such as `"visual.blocks.3.attn"`; the key of its scales in a file.
        attn_backend: name of a backend, never replaced by another; default: the first that accepts on the device.
        quant_config: attend on FP8 queries, keys and values, one scale each. The output stays in the model dtype.

    Raises:
        ConfigError, ScaleError: what the values, or the scale file, decide. What dtype and device decide is refused by
            the call, before anything is written.

    State: fp32 buffers, saved in the state dict; they keep their dtype under `model.to(dtype)`. Static FP8: `q_scale`,
    `k_scale`, `v_scale`. Dynamic FP8: `amax_history` `[16, 3]` and `amax_steps`, how many steps it has counted, so that
    a loaded model continues where the saved one stopped. Forward changes these two and nothing else.

    Compile: one graph for equal layers; offsets are a tensor, so that neither the number of images nor their lengths
    recompile (pass `max_seqlen` as a tensor, or always the same int). No sync, no loop over images on CUDA.

    CUDA graphs: the whole layer captures, the dynamic history included. Pad offsets with `vattn.pad_cu_seqlens` and
    tokens with `padded=True` to replay one graph for smaller batches.

    Example:
        >>> import torch, vattn
        >>> layer = vattn.MMEncoderAttention(num_heads=4, head_size=16)
        >>> images = [torch.randn(2, 9, 4 * 16) for _ in range(3)]
        >>> layer(*images).shape
        torch.Size([2, 9, 64])
        >>> offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> packed = [torch.randn(1, 12, 4, 16) for _ in range(3)]
        >>> layer(*packed, cu_seqlens=offsets, max_seqlen=7).shape
        torch.Size([1, 12, 4, 16])
    """

    amax_history: Tensor | None
    amax_steps: Tensor | None
    alibi_slopes = sinks = output_scale = None

    @typed_on_error
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
        *,
        attn_backend: str | None = None,
        quant_config: EncoderFP8Config | None = None,
    ) -> None:
        super().__init__()
        self._set_sizes(num_heads, head_size, num_kv_heads, None, prefix, attn_backend)
        self.quant_config = quant_config
        # Buffers made in inference mode could not be changed outside of it.
        with torch.inference_mode(False):
            self._register_fp8(quant_config)
        fp8 = "none" if quant_config is None else "tensor"
        self._set_request(
            _default_scale(head_size) if scale is None else scale,
            "auto" if quant_config is None else _FP8,
            attn_type=AttentionType.ENCODER.value,
            kv_scale=fp8,
            query_format="none" if quant_config is None else _FP8,
            query_scale=fp8,
        )
        # Among keys of another length a row of the query has no position.
        crossing = {"attn_type": AttentionType.ENCODER_DECODER.value}
        self._cross_ops = {
            name: AttentionConfig.parse(text).replace(**crossing).encode() for name, text in self._ops.items()
        }

    def _register_fp8(self, quant: EncoderFP8Config | None) -> None:
        scales: dict[str, Tensor | None] = dict.fromkeys(("q_scale", "k_scale", "v_scale"))
        if quant is not None and quant.scale_path is not None:
            for name, scale in scales_of_layer(quant.scale_path, self.prefix).items():
                scales[f"{name}_scale"] = make_scale(f"{name}_scale", scale, (1,))
        for name, buffer in scales.items():
            self.register_buffer(name, buffer)
        dynamic = quant is not None and quant.dynamic
        history, steps = torch.zeros(HISTORY_STEPS, 3, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
        self.register_buffer("amax_history", history if dynamic else None)
        self.register_buffer("amax_steps", steps if dynamic else None)

    def reset_amax_history(self) -> None:
        """Forget the steps that dynamic scales come from, such as a warm-up on made-up images."""
        if self.amax_history is not None and self.amax_steps is not None:
            self.amax_history.zero_()
            self.amax_steps.zero_()

    @typed_on_error
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        *,
        cu_seqlens_k: Tensor | None = None,
        padded: bool = False,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: `[b, s, num_heads * head_size]` or `[b, s, num_heads, head_size]`. Views of one interleaved
                projection are read in place, as long as b and s have one common stride.
            key, value: `[b, s_k, ...]`, same with KV heads; s_k may differ from s. Every row of the query sees all keys
                of its sequence; without any it is zero.
            cu_seqlens: int32 or int64 `[sequences + 1]`, where each sequence starts in the b * s rows, and where the
                last one ends. Default: each of the b rows is one sequence. Equal neighbours make an empty sequence.
            max_seqlen: no sequence of the query is longer; with `cu_seqlens` and only with it. A CUDA tensor is not
                read.
            cu_seqlens_k: the same for the b * s_k rows of the keys; default `cu_seqlens`, for as many keys as queries.
            padded: offsets may end before the rows: those after it are padding, may hold anything and come out zero.

        Returns:
            The output, in the query's dtype and number of dimensions.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that contradict the layer or each other.
            MetadataError: one of `cu_seqlens` and `max_seqlen` alone; offsets on the CPU that fall or do not end with
                the rows (compiled code and CUDA leave that to `vattn.check_cu_seqlens`; nothing outside the tensors is
                read).
            UnsupportedRequestError: no backend, or not the requested one, runs the layer on this device.
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, Tensor):
                got = None if tensor is None else type(tensor).__name__
                allowed = "a tensor [b, s, columns] or [b, s, heads, head_size]"
                raise ShapeError(f"{name} is {got} in layer {self.prefix!r}", allowed, f"pass {name} as a tensor")
        op_config = self._op_config(query.dtype)
        for name, tensor, heads in (("query", query, self.num_heads), ("key", key, self.num_kv_heads)):
            if tensor.dim() not in (3, 4):
                raise self._shape_error(name, tensor, heads)
        (batch, tokens), keys = query.shape[:2], key.shape[1]
        packed = [
            self._rows("query", query, self.num_heads, batch, tokens),
            self._rows("key", key, self.num_kv_heads, batch, keys),
            self._rows("value", value, self.num_kv_heads, batch, keys),
        ]
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dtype != query.dtype:
                raise DtypeError(
                    f"{name} is {dtype_name(tensor.dtype)} in layer {self.prefix!r}",
                    f"{dtype_name(query.dtype)}, the query's dtype",
                    f"convert {name}",
                )
        starts, kv_starts = self._starts(query, key, cu_seqlens, max_seqlen, cu_seqlens_k, padded)
        if cu_seqlens_k is not None or keys != tokens:
            op_config = self._cross_ops[dtype_name(query.dtype)]
        output, _ = OUTPUT_FORMATS["none"].allocate(packed[0], self.head_size, query.dtype)
        if self.quant_config is None:
            args = varlen_arguments(self, packed, (starts, kv_starts), output, None, (None, None, None), op_config)
        else:
            args = self._fp8_arguments(packed, (starts, kv_starts), output, cu_seqlens is not None, op_config)
        torch.ops.vattn.varlen_attention(*args)
        shape = (batch, tokens, self.num_heads, self.head_size)
        return output.view(shape) if query.dim() == 4 else output.view(shape).flatten(2)

    def _rows(self, name: str, tensor: Tensor, heads: int, batch: int, tokens: int) -> Tensor:
        """Return a view `[b * s, heads, head_size]`."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise not_strided(name, tensor)
        wide = tensor.dim() == 3 and tensor.shape[2] == heads * self.head_size
        split = tensor.dim() == 4 and tensor.shape[2] == heads and tensor.shape[3] == self.head_size
        if not (wide or split) or tensor.shape[0] != batch or tensor.shape[1] != tokens:
            raise self._shape_error(name, tensor, heads, f"{batch}, {tokens}")
        if wide:
            tensor = tensor.view(batch, tokens, heads, self.head_size)
        return tensor.flatten(0, 1)

    def _shape_error(self, name: str, tensor: Tensor, heads: int, rows: str = "b, s") -> ShapeError:
        return ShapeError(
            f"{name} has shape {tuple(tensor.shape)} in layer {self.prefix!r}",
            f"[{rows}, {heads * self.head_size}] or [{rows}, {heads}, {self.head_size}]",
            "reshape it, or check the head counts of the layer",
        )

    def _starts(
        self,
        query: Tensor,
        key: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | Tensor | None,
        cu_seqlens_k: Tensor | None,
        padded: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return where each sequence of queries, and of keys, starts and the last one ends, on the query's device."""
        (batch, tokens), keys = query.shape[:2], key.shape[1]
        needs_offsets = padded or cu_seqlens_k is not None
        if (cu_seqlens is None) != (max_seqlen is None) or (needs_offsets and cu_seqlens is None):
            names = {
                "cu_seqlens": cu_seqlens is not None,
                "max_seqlen": max_seqlen is not None,
                "cu_seqlens_k": cu_seqlens_k is not None,
                "padded": padded,
            }
            raise MetadataError(
                f"layer {self.prefix!r} got {' and '.join(name for name, given in names.items() if given)} alone",
                "cu_seqlens and max_seqlen, or neither; cu_seqlens_k and padded only with them",
                "pass the offsets of the sequences and the longest length",
            )
        if cu_seqlens is None:
            return _row_starts(batch, tokens, keys, query.device)
        self._check_types(cu_seqlens, max_seqlen, cu_seqlens_k, padded)
        if cu_seqlens_k is None and keys != tokens:
            raise ShapeError(
                f"{keys} keys in each of {batch} rows for {tokens} queries, with cu_seqlens in layer {self.prefix!r}",
                "as many keys as queries, or offsets of their own",
                "pass cu_seqlens_k, the offsets of the keys",
            )
        size = cu_seqlens.numel()
        self._check_offsets("cu_seqlens", cu_seqlens, size, batch * tokens, max_seqlen, padded)
        if cu_seqlens_k is None:
            return cu_seqlens, cu_seqlens
        self._check_offsets("cu_seqlens_k", cu_seqlens_k, size, batch * keys, None, padded)
        return cu_seqlens, cu_seqlens_k

    def _check_offsets(
        self, name: str, offsets: Tensor, size: int, rows: int, longest: int | Tensor | None, padded: bool
    ) -> None:
        """Refuse offsets of another size or, on the CPU, with values that do not go with the rows."""
        if offsets.dim() != 1 or offsets.shape[0] < 2 or offsets.shape[0] != size:
            raise ShapeError(
                f"{name} of shape {tuple(offsets.shape)} in layer {self.prefix!r}",
                "[sequences + 1] with one or more sequences, the same number for queries and keys",
                "pass cumulative lengths",
            )
        if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            check_offsets(name, offsets, rows, longest, padded)

    def _check_types(
        self, cu_seqlens: Tensor, max_seqlen: int | Tensor | None, cu_seqlens_k: Tensor | None, padded: bool
    ) -> None:
        """Refuse offsets and lengths of other types; a float or a text would be rounded or read as true in silence."""
        for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
            optional = name == "cu_seqlens_k" and offsets is None
            if not optional and (not isinstance(offsets, Tensor) or offsets.dtype not in INDEX_DTYPES):
                got = dtype_name(offsets.dtype) if isinstance(offsets, Tensor) else type(offsets).__name__
                raise DtypeError(
                    f"{name} is {got} in layer {self.prefix!r}",
                    "an int32 or int64 tensor",
                    "make the offsets with dtype=torch.int32, once for all layers",
                )
        if isinstance(max_seqlen, Tensor):
            right = max_seqlen.numel() == 1 and max_seqlen.dtype in INDEX_DTYPES
        else:
            right = isinstance(max_seqlen, (int, torch.SymInt)) and not isinstance(max_seqlen, bool)
        if not right or not isinstance(padded, bool):
            raise DtypeError(
                f"max_seqlen={max_seqlen!r} and padded={padded!r} in layer {self.prefix!r}",
                "an int or an integer tensor of one value; True or False",
                "pass the longest length, or more",
            )

    def _fp8_arguments(
        self, packed: list[Tensor], starts: tuple[Tensor, Tensor], output: Tensor, masked: bool, op_config: str
    ) -> tuple[object, ...]:
        """Return the op's arguments with q, k and v in FP8; record what dynamic scales are made of.

        Args:
            starts: of queries and of keys.
            masked: rows after the last of `starts` are padding.
        """
        if self.amax_history is None or self.amax_steps is None:
            assert self.q_scale is not None and self.k_scale is not None and self.v_scale is not None
            scales = (self.q_scale, self.k_scale, self.v_scale)
        else:
            if not torch.compiler.is_compiling():
                codes = [torch.empty_like(tensor, dtype=torch.float8_e4m3fn) for tensor in packed]
                scale = self.amax_history[0, :1]
                args = varlen_arguments(self, codes, starts, output, None, (scale, scale, scale), op_config)
                self._check_call(args, packed)
            ends = (starts[0][-1], starts[1][-1], starts[1][-1]) if masked else (None, None, None)
            amax = [largest_value(tensor, end) for tensor, end in zip(packed, ends, strict=True)]
            scales = record_amax(self.amax_history, self.amax_steps, torch.stack(amax))
        query = encode_query(packed[0], scales[0], self.num_kv_heads)
        key, value = encode_kv(packed[1], _FP8, scales[1]), encode_kv(packed[2], _FP8, scales[2])
        return varlen_arguments(self, (query, key, value), starts, output, None, scales, op_config)

    def extra_repr(self) -> str:
        """Show the request."""
        quant = self.quant_config
        fp8 = "" if quant is None else f", fp8={'dynamic' if quant.dynamic else 'static'}"
        return f"{self._sizes_repr()}{fp8}, {self._backend_repr()}"


def _default_scale(head_size: int) -> float:
    """Return `head_size ** -0.5`; 1 for what is no head size, which the config refuses by its name."""
    return head_size**-0.5 if isinstance(head_size, int) and head_size > 0 else 1.0


def _row_starts(batch: int, tokens: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the offsets of queries and of keys where each row of a batch is one sequence."""
    if batch == 0:
        starts = torch.zeros(2, dtype=torch.int32, device=device)
        return starts, starts
    row = torch.arange(batch + 1, dtype=torch.int32, device=device)
    starts = row * tokens
    return starts, starts if keys == tokens else row * keys
