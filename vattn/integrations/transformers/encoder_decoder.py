"""`enable_encoder_decoder`: put the decoder of an encoder-decoder model, such as Whisper, on vattn.

The encoder runs by transformers' own code once a prompt. Its states become keys and values of cross attention, which
lie in the paged cache beside the tokens' own.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vattn.calibration.fp8_saving import own_config
from vattn.config.arguments import check_switches
from vattn.config.attention import CacheConfig
from vattn.config.keywords import known_keywords
from vattn.config.other_names import ENABLE_ENCODER_DECODER
from vattn.errors import ConfigError, RequestError, UnsupportedRequestError
from vattn.integrations.transformers.attention_interface import (
    NAME,
    PACKED,
    ModelAttention,
    attend,
    no_step,
    register,
)
from vattn.integrations.transformers.attention_notes import MaskCall
from vattn.integrations.transformers.available import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    transformers,
)
from vattn.integrations.transformers.checkpoint_scales import remove_cache_hooks
from vattn.integrations.transformers.checks import check_model, model_dtype
from vattn.integrations.transformers.enabling import disable
from vattn.integrations.transformers.model_layers import install
from vattn.integrations.transformers.packed_model import PackedModel
from vattn.layers import CrossAttention
from vattn.metadata import forward_context as context
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.prompt_inputs import PromptInputs

DECODER = "vattn_decoder"
"""Name of the attention of a decoder's modules in transformers' registry."""

PROBE = "vattn_decoder_probe"

STATES, TOKENS = 7, 4
"""Encoder states and tokens of the run that shows how a decoder attends."""

PROOF = 2.0**-7
"""Relative L2 of logits in fp32: products in TF32 round to 2**-11."""

PROOF_16 = 2.0**-2
"""The same in 16 bits, of the median token: every layer rounds."""

_ENDLESS = 1 << 31


class EncoderDecoderModel(PackedModel):
    """An encoder-decoder model over packed tokens of its decoder, as `vattn.Generator` calls it.

    Attributes:
        max_encoder_len: most encoder states of a prompt.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.max_encoder_len = int(model.config.max_source_positions)
        self.vocab_size = int(model.config.vocab_size)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor | None = None,
        encoder_states: Tensor | None = None,
    ) -> Tensor:
        """Return logits; the step's metadata is that of `vattn.forward_context`.

        Args:
            input_ids, positions, logits_indices: as for other models.
            encoder_states: `[S, H]` of the requests whose encoder states are new in this step, one after the other.

        Returns:
            `[B, vocab_size]`, or `[T, vocab_size]`, in the model's dtype.

        Raises:
            ConfigError, DtypeError, ShapeError, MetadataError: as for other models.
        """
        self.check_step(input_ids, positions, logits_indices)
        model: Any = self.model
        if encoder_states is None:
            # Modules are cross attention if they are given states; the layer drops what is not new.
            encoder_states = torch.zeros(1, model.config.d_model, dtype=self.embedding_dtype, device=input_ids.device)
        rows = model.get_decoder()(
            input_ids=input_ids[None],
            position_ids=positions[None],
            encoder_hidden_states=encoder_states[None],
            use_cache=False,
        ).last_hidden_state[0]
        if logits_indices is not None:
            rows = rows[logits_indices]
        return model.get_output_embeddings()(rows)  # type: ignore[no-any-return]

    @torch.no_grad()
    def read_media(self, encoded: Mapping[str, Any]) -> tuple[list[int], PromptInputs]:
        """Return the ids of the decoder's prompt, and the encoder states.

        Args:
            encoded: `input_features` `[1, ...]` as a processor returns them, and `decoder_input_ids` `[1, n]`; without
                these the decoder begins with its start token.

        Raises:
            RequestError: other inputs, several prompts, or features that the encoder refuses.
        """
        model: Any = self.model
        unknown = sorted(set(encoded) - {"input_features", "decoder_input_ids"})
        if unknown or "input_features" not in encoded:
            raise RequestError(
                f"a prompt with {', '.join(unknown) or 'no input_features'} for {type(model).__name__}",
                "input_features and decoder_input_ids",
                "pass what the processor returned for one recording",
            )
        first = torch.tensor([[model.config.decoder_start_token_id]])
        given = {"input_features": encoded["input_features"], "decoder_input_ids": first, **encoded}
        for key, value in given.items():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if not isinstance(shape, list) or len(shape) < 2 or shape[0] != 1:
                raise RequestError(
                    f"a prompt with {key} of {shape}", "tensors of one prompt, [1, ...]", "pass each prompt alone"
                )
        features = encoded["input_features"].to(model.device, model_dtype(model))
        try:
            states = model.get_encoder()(features).last_hidden_state[0]
        except Exception as error:
            raise RequestError(
                f"input_features that the encoder refuses: {type(error).__name__}: {error}",
                "what the model's own processor returns",
                "check the recording",
            ) from error
        if states.shape[0] > self.max_encoder_len:
            raise RequestError(
                f"a recording of {states.shape[0]} encoder states", f"up to {self.max_encoder_len}", "cut the recording"
            )
        ids = given["decoder_input_ids"][0].tolist()
        wrong = [token for token in ids if token not in range(self.vocab_size or 0)]
        if wrong or given["decoder_input_ids"].is_floating_point():
            most = (self.vocab_size or 0) - 1
            raise RequestError(
                f"token ids {(wrong or ids)[:3]} in a prompt", f"ids from 0 to {most}", "use the model's tokenizer"
            )
        name = hashlib.sha256(states.contiguous().cpu().view(torch.uint8).numpy().tobytes()).digest()
        return ids, PromptInputs(identities=((0, _ENDLESS, name),), encoder_states=states)


class ModelCrossAttention(CrossAttention):
    """`CrossAttention` of one module of a transformers model."""

    head_size_v: int


def attend_decoder(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Run the layer of a decoder's module; transformers' attention interface."""
    layer: Any = module._modules.get(NAME)
    if not isinstance(layer, ModelCrossAttention):
        return attend(module, query, key, value, attention_mask, **options)
    step = context.current_step()
    if step is None:
        raise no_step()
    rows = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
    new = step.cross_slot_mapping is not None  # type: ignore[union-attr]
    out = layer(rows[0], rows[1] if new else None, rows[2] if new else None)
    return out.view(1, rows[0].shape[0], -1, layer.head_size_v), None


@known_keywords(ENABLE_ENCODER_DECODER)
def enable_encoder_decoder(
    model: Any,
    *,
    cache_config: CacheConfig | None = None,
    attn_backend: str | None = None,
    batch_invariant: bool = False,
    num_blocks: int | None = None,
    memory: int | str | None = None,
) -> EncoderDecoderModel:
    """Put the decoder of an encoder-decoder model on vattn, in place; its encoder stays as it is.

    Args:
        model: such as `WhisperForConditionalGeneration`, in eval mode, on its device.
        cache_config, attn_backend, batch_invariant: as for `vattn.Attention`; keys and values in the model's dtype.
        num_blocks, memory: allocate the paged cache too; see `vattn.allocate_kv_cache`.

    Returns:
        What `vattn.Generator` takes. Its prompts are what a processor returned, with `decoder_input_ids`.

    Raises:
        ConfigError: no such model, or one in training mode.
        UnsupportedRequestError: a decoder without `position_ids`, with a bias or a mask that vattn does not know, or
            with other results on vattn.

    Example:
        >>> import torch, transformers, vattn
        >>> from vattn.integrations.transformers.encoder_decoder import enable_encoder_decoder
        >>> config = transformers.WhisperConfig(
        ...     vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=32,
        ...     decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2, max_source_positions=20,
        ...     max_target_positions=40, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ...     suppress_tokens=None, begin_suppress_tokens=None)
        >>> model = transformers.WhisperForConditionalGeneration(config).eval()
        >>> generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=16), max_num_reqs=4)
        >>> prompt = {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": torch.tensor([[1, 5]])}
        >>> sampling = vattn.Sampling(max_new_tokens=4, stop_token_ids=())
        >>> len(generator.generate([prompt], sampling)[0].output)
        4
    """
    check_model(model, pools=True)
    check_switches(batch_invariant=batch_invariant)
    if cache_config is not None and not isinstance(cache_config, CacheConfig):
        raise ConfigError(f"cache_config={cache_config!r}", "vattn.CacheConfig(...)", "leave it out")
    if cache_config is not None and cache_config.cache_dtype != "auto":
        raise ConfigError(f"cache_dtype={cache_config.cache_dtype!r} for an encoder-decoder", "'auto'", "leave it out")
    _check_decoder(model)
    own_config(model)
    model.__dict__["_vattn_before"] = model.config._attn_implementation, remove_cache_hooks(model), []
    try:
        _give_encoder_its_config(model)
        layers = _layers(model, cache_config, attn_backend, batch_invariant)
        modules = {name: module for name, module in model.named_modules() if name in layers}
        requests = _proof_requests(model)
        expected = [_own_logits(model, *request) for request in requests]
        register()
        ALL_ATTENTION_FUNCTIONS.register(DECODER, attend_decoder)
        ALL_MASK_ATTENTION_FUNCTIONS.register(DECODER, ALL_MASK_ATTENTION_FUNCTIONS[PACKED])
        model.config._attn_implementation_internal = DECODER
        install(modules, layers)
        packed = EncoderDecoderModel(model)
        _prove(packed, requests, expected)
        if num_blocks is not None or memory is not None:
            packed.allocate(num_blocks=num_blocks, memory=memory)
    except BaseException:
        disable(model)
        raise
    return packed


def _check_decoder(model: Any) -> None:
    decoder = model.get_decoder() if getattr(model.config, "is_encoder_decoder", False) else None
    if decoder is None or model.get_output_embeddings() is None:
        raise ConfigError(
            f"enable_encoder_decoder() of {type(model).__name__}",
            "an encoder-decoder model with its head",
            "enable(model) takes causal language models",
        )
    taken = inspect.signature(decoder.forward).parameters
    missing = [name for name in ("position_ids", "encoder_hidden_states") if name not in taken]
    if missing or not hasattr(model.config, "max_source_positions"):
        raise _unsupported(f"{type(decoder).__name__}.forward takes no {' and no '.join(missing or ['fixed input'])}")


def _give_encoder_its_config(model: Any) -> None:
    """Give the encoder's modules a configuration of their own, so that they keep their attention."""
    encoder = model.get_encoder()
    own = copy.copy(encoder.config)
    undo = model.__dict__.setdefault("_vattn_parts", [])
    for module in encoder.modules():
        before = module.__dict__.get("config")
        if before is not None:
            module.config = own
            undo.append(lambda module=module, before=before: setattr(module, "config", before))


def _layers(model: Any, cache: CacheConfig | None, backend: str | None, invariant: bool) -> dict[str, nn.Module]:
    """Run the decoder once and return a layer for each of its attention modules."""
    names = {module: name for name, module in model.named_modules()}
    layers: dict[str, nn.Module] = {}

    def note(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        scale, crosses = options.get("scaling"), key.shape[2] == STATES
        odd = [name for name, given in options.items() if isinstance(given, Tensor)]
        if odd or (not crosses and not isinstance(attention_mask, MaskCall)) or names[module] in layers:
            raise _unsupported(f"{type(module).__name__} attends with {', '.join(odd) or 'a mask of its own'}")
        window = None if crosses else attention_mask.window()
        common: dict[str, Any] = {
            "cache_config": cache, "prefix": names[module], "attn_backend": backend, "head_size_v": value.shape[3],
            "batch_invariant": invariant, "logits_soft_cap": options.get("softcap"),
        }  # fmt: skip
        sizes = query.shape[1], query.shape[3], query.shape[3] ** -0.5 if scale is None else float(scale), key.shape[1]
        if crosses:
            layers[names[module]] = ModelCrossAttention(*sizes, **common)
        else:
            own = ModelAttention(*sizes, per_layer_sliding_window=window, **common)
            own._expected = {"scaling": scale}
            layers[names[module]] = own
        return query.new_full((1, query.shape[2], query.shape[1], value.shape[3]), 2.0**-6), None

    def mask(mask_function: Any, local_size: int | None = None, **options: Any) -> MaskCall:
        return MaskCall(mask_function, local_size)

    before, device = model.config._attn_implementation, model.device
    ALL_ATTENTION_FUNCTIONS.register(PROBE, note)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, mask)
    model.config._attn_implementation_internal = PROBE
    try:
        with torch.no_grad():
            model.get_decoder()(
                input_ids=torch.zeros(1, TOKENS, dtype=torch.int64, device=device),
                position_ids=torch.arange(TOKENS, device=device)[None],
                encoder_hidden_states=torch.zeros(
                    1, STATES, model.config.d_model, dtype=model_dtype(model), device=device
                ),
                use_cache=False,
            )
    finally:
        model.config._attn_implementation_internal = before
    if len(layers) != 2 * model.config.decoder_layers:
        raise _unsupported(f"{len(layers)} attention modules in {model.config.decoder_layers} layers")
    return layers


def _proof_requests(model: Any) -> list[tuple[Tensor, list[int]]]:
    """Return encoder states and tokens of two short requests."""
    rng = torch.Generator().manual_seed(0)
    ids = [int(token) for token in torch.randint(model.config.vocab_size, (8,), generator=rng)]
    states = [torch.randn(count, model.config.d_model, generator=rng) for count in (19, 5)]
    return [(each.to(model.device, model_dtype(model)), ids[: 5 - index]) for index, each in enumerate(states)]


def _own_logits(model: Any, states: Tensor, ids: list[int]) -> Tensor:
    outputs = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states[None])
    with torch.no_grad():
        tokens = torch.tensor([ids], device=model.device)
        return model(encoder_outputs=outputs, decoder_input_ids=tokens, use_cache=False).logits[0]  # type: ignore[no-any-return]


@torch.no_grad()
def _prove(packed: EncoderDecoderModel, requests: list[tuple[Tensor, list[int]]], expected: list[Tensor]) -> None:
    """Run both requests in a step without their last token, and in one with it; refuse other logits."""
    cache, packed.kv_cache = packed.allocate(num_blocks=16), None
    for each in cache.kv_caches:
        each.view(torch.uint8).fill_(67)
    size = cache.block_size
    builder = AttentionMetadataBuilder(2, 16, 16, layers=packed, max_encoder_len=32)
    lengths = [states.shape[0] for states, _ in requests]
    cross, start = [], 3
    for length in lengths:
        cross.append(list(range(start, start + -(-length // size))))
        start += -(-length // size)
    found: list[list[Tensor]] = [[], []]
    for parts in ([ids[:-1] for _, ids in requests], [ids[-1:] for _, ids in requests]):
        new = len(parts[0]) > 1
        ends = [len(ids) - new for _, ids in requests]
        step = builder.build(
            [len(part) for part in parts], ends, [[1], [2]],
            encoder_lens=lengths, new_encoder=[new, new], cross_block_tables=cross,
        )  # fmt: skip
        states = torch.cat([states for states, _ in requests]) if new else None
        ids = torch.tensor([token for part in parts for token in part], device=cache.device)
        with context.forward_context(step):
            assert step.positions is not None
            rows = packed(ids, step.positions[: len(ids)], None, states)
        for logits, each in zip(found, rows.split([len(part) for part in parts]), strict=True):
            logits.append(each)
    for logits, wanted in zip(found, expected, strict=True):
        errors = (torch.cat(logits) - wanted).float().norm(dim=1) / wanted.float().norm(dim=1).clamp(min=1e-30)
        exact = model_dtype(packed.model) == torch.float32
        error, bound = (float(errors.max()), PROOF) if exact else (float(errors.median()), PROOF_16)
        if not error <= bound:
            raise UnsupportedRequestError(
                f"{type(packed.model).__name__}, which computes other logits on vattn than by itself ({error:.1e})",
                f"differences up to {bound:.1e}, relative",
                "keep this model on transformers' own attention",
            )


def _unsupported(got: str) -> UnsupportedRequestError:
    return UnsupportedRequestError(
        got,
        "decoders whose tokens meet in causal attention, and the encoder states in cross attention without a bias",
        "keep this model on transformers' own attention",
    )
