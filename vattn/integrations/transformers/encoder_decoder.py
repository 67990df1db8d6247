"""`enable_encoder_decoder`: put the decoder of an encoder-decoder model, such as BART or Whisper, on vattn.

The encoder runs by transformers' own code once a prompt. Its states become keys and values of cross attention, which
lie in the paged cache beside the tokens' own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vattn.calibration.fp8_saving import own_config
from vattn.config.arguments import check_switches, read_count
from vattn.config.attention import CacheConfig
from vattn.config.keywords import known_keywords
from vattn.config.other_names import ENABLE_ENCODER_DECODER
from vattn.errors import ConfigError, MetadataError, RequestError
from vattn.integrations.transformers.attention_interface import register
from vattn.integrations.transformers.checkpoint_scales import remove_cache_hooks
from vattn.integrations.transformers.checks import check_model, model_dtype
from vattn.integrations.transformers.decoder_layers import (
    DECODER,
    encoder_outputs,
    register_decoder,
    set_decoder_attention,
    states_width,
    watch_decoder,
)
from vattn.integrations.transformers.decoder_positions import PositionTable
from vattn.integrations.transformers.decoder_proof import DecoderProof
from vattn.integrations.transformers.enabling import disable
from vattn.integrations.transformers.model_layers import install
from vattn.integrations.transformers.packed_model import PackedModel
from vattn.metadata import forward_context as context
from vattn.metadata.prompt_inputs import PromptInputs

_ENDLESS = 1 << 31

_LONGEST = 4096
"""Most encoder states of a prompt where a configuration does not say: about 100 seconds of sound in Moonshine."""


class HeadRows:
    """Lets the head of a model compute the rows of a step that need logits, and no others.

    Attributes:
        rows: int64 `[B]`; `None` for all.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None

    def keep(self, head: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the rows of the head's input `[1, T, H]`; a hook before its forward."""
        return inputs if self.rows is None else (inputs[0][:, self.rows],)


class EncoderDecoderModel(PackedModel):
    """An encoder-decoder model over packed tokens of its decoder, as `vattn.Generator` calls it.

    Attributes:
        max_encoder_len: most encoder states of a prompt.
        max_positions: most tokens of the decoder, where they have a table of positions; else `None`.
        input_name: what the encoder takes: `input_ids`, `input_features` or `input_values`.
        taken_options: options of a generation config that `read_media` follows.
    """

    taken_options = ("forced_bos_token_id",)

    def __init__(self, model: Any, table: PositionTable | None, head: HeadRows, max_encoder_len: int) -> None:
        super().__init__(model)
        self.max_encoder_len = max_encoder_len
        self.vocab_size: int = _vocab_size(model)
        self.input_name: str = model.main_input_name
        self._width = states_width(model)
        self._table, self._head = table, head
        self.padding_token = None if table is None else table.padding
        self.max_positions = None if table is None else table.length

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
            encoder_states = torch.zeros(1, self._width, dtype=self.embedding_dtype, device=input_ids.device)
        # Without a mask, transformers looks for one in positions, which waits for the device.
        options = {"decoder_attention_mask": torch.ones_like(input_ids)[None]}
        if self._table is None:
            options["decoder_position_ids"] = positions[None]
        else:
            self._table.set(input_ids, positions)
        self._head.rows = logits_indices
        try:
            logits: Tensor = model(
                encoder_outputs=encoder_outputs(encoder_states),
                decoder_input_ids=input_ids[None],
                use_cache=False,
                **options,
            ).logits[0]
        finally:
            self._head.rows = None
            if self._table is not None:
                self._table.set(None, None)
        return logits

    def check_step(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor | None) -> None:
        """Refuse a step; see `forward`."""
        super().check_step(input_ids, positions, logits_indices)
        step = None if torch.compiler.is_compiling() else context.current_step()
        if step is not None and self.max_positions is not None and step.max_seq_len > self.max_positions:
            raise MetadataError(
                f"a request of {step.max_seq_len} tokens for a model with a table of {self.max_positions} positions",
                f"requests of up to {self.max_positions} tokens",
                "end the request earlier",
            )

    def embedding_owner(self) -> Any:
        """Return the decoder, of which steps have tokens."""
        model: Any = self.model
        return model.get_decoder()

    @torch.no_grad()
    def read_media(self, encoded: Mapping[str, Any]) -> tuple[list[int], PromptInputs]:
        """Return the ids of the decoder's prompt, and the encoder states.

        Args:
            encoded: what the encoder takes: `input_ids`, a list, or `input_features` or `input_values` `[1, ...]` as
                a processor returns them; and `decoder_input_ids`, a list. Without these the decoder begins with its
                start token. The forced first token of the generation config follows a single one.

        Raises:
            RequestError: other inputs, several prompts, padding, or inputs that the encoder refuses.
        """
        kind, name = type(self.model).__name__, self.input_name
        unknown = sorted(set(encoded) - {name, "decoder_input_ids", "attention_mask"})
        if unknown or name not in encoded:
            got = f"a prompt without {name}" if name not in encoded else f"a prompt with {', '.join(unknown)}"
            source = "tokenizer" if name == "input_ids" else "processor"
            raise RequestError(
                f"{got} for {kind}",
                f"{name} and decoder_input_ids",
                f"pass what the {source} returned for one prompt, and decoder_input_ids",
            )
        mask = encoded.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise RequestError(f"{name} with padding", "no padding", "call the processor for each prompt alone")
        given = encoded[name]
        inputs = self._read_ids(given) if name == "input_ids" else self._read_sound(given)
        model: Any = self.model
        try:
            states = model.get_encoder()(inputs).last_hidden_state[0]
        except Exception as error:
            raise RequestError(
                f"{name} that the encoder refuses: {type(error).__name__}: {error}",
                "what the model's own processor returns",
                "check the prompt",
            ) from error
        if not 0 < states.shape[0] <= self.max_encoder_len:
            raise RequestError(
                f"a prompt of {states.shape[0]} encoder states",
                f"1 to {self.max_encoder_len}",
                "shorten it, or pass max_encoder_len= to enable_encoder_decoder",
            )
        ids = self._first_ids(encoded.get("decoder_input_ids"))
        digest = hashlib.sha256(states.contiguous().cpu().view(torch.uint8).numpy().tobytes()).digest()
        return ids, PromptInputs(identities=((0, _ENDLESS, digest),), encoder_states=states)

    def _read_ids(self, ids: Sequence[int]) -> Tensor:
        """Return the encoder's token ids `[1, S]`."""
        model: Any = self.model
        size = model.get_encoder().get_input_embeddings().weight.shape[0]
        wrong = [token for token in ids if not 0 <= token < size]
        if wrong or not 0 < len(ids) <= self.max_encoder_len:
            raise RequestError(
                f"token id {wrong[0]} in a prompt" if wrong else f"a prompt of {len(ids)} tokens",
                f"ids from 0 to {size - 1}" if wrong else f"1 to {self.max_encoder_len}",
                "encode it with the model's tokenizer"
                if wrong
                else "cut it, or call the tokenizer with truncation=True",
            )
        return torch.tensor([[*ids]], device=model.device)

    def _read_sound(self, given: Any) -> Tensor:
        """Return features `[1, ...]` in the model's dtype."""
        shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        if not isinstance(shape, list) or len(shape) < 2 or shape[0] != 1 or given.is_meta:
            where = " on meta" if isinstance(given, Tensor) and given.is_meta else ""
            raise RequestError(
                f"a prompt with {self.input_name} of {shape}{where}",
                "tensors of one prompt, [1, ...]",
                "pass each alone",
            )
        return given.to(self.model.device, model_dtype(self.model))  # type: ignore[no-any-return]

    def _first_ids(self, given: Sequence[int] | None) -> list[int]:
        """Return the decoder's prompt: as it is given, or its start token; with the forced token after a single one."""
        own, config = getattr(self.model, "generation_config", None), self.model.config
        names = ("decoder_start_token_id", "bos_token_id")
        found = [getattr(each, name, None) for name in names for each in (own, config)]
        start: Any = next((one for one in found if one is not None), None)
        if given is None and start is None:
            raise RequestError(
                "a prompt without decoder_input_ids for a model without a start token",
                "decoder_input_ids",
                "pass them, or set model.generation_config.decoder_start_token_id",
            )
        ids = [*given] if given is not None else [start if isinstance(start, int) else start[0]]
        forced = getattr(own, "forced_bos_token_id", None)
        if len(ids) == 1 and forced is not None:
            ids.append(forced)
        return ids


@known_keywords(ENABLE_ENCODER_DECODER)
@torch.inference_mode(False)
def enable_encoder_decoder(
    model: Any,
    *,
    cache_config: CacheConfig | None = None,
    attn_backend: str | None = None,
    batch_invariant: bool = False,
    max_encoder_len: int | None = None,
    num_blocks: int | None = None,
    memory: int | str | None = None,
) -> EncoderDecoderModel:
    """Put the decoder of an encoder-decoder model on vattn, in place; its encoder stays as it is.

    Args:
        model: such as `BartForConditionalGeneration` or `WhisperForConditionalGeneration`, in eval mode, on its
            device.
        cache_config, attn_backend, batch_invariant: as for `vattn.Attention`; keys and values in the model's dtype.
        max_encoder_len: most encoder states of a prompt: tokens of a text. Default: what the model was made for, or
            4096 where it does not say.
        num_blocks, memory: allocate the paged cache too; see `vattn.allocate_kv_cache`.

    Returns:
        What `vattn.Generator` takes. Its prompts go to the encoder: texts, token ids, or what a tokenizer or a
        processor returned, with `decoder_input_ids`.

    Raises:
        ConfigError: no such model, or one in training mode; a `max_encoder_len` beyond what the model was made for.
        UnsupportedRequestError: a decoder that neither takes `position_ids` nor looks positions up in a table, with a
            bias or a mask that vattn does not know, or with other results on vattn.

    Example:
        >>> import torch, transformers, vattn
        >>> from vattn.integrations.transformers.encoder_decoder import enable_encoder_decoder
        >>> config = transformers.BartConfig(
        ...     vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        ...     encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=40)
        >>> model = transformers.BartForConditionalGeneration(config).eval()
        >>> generator = vattn.Generator(enable_encoder_decoder(model, num_blocks=16), max_num_reqs=4)
        >>> sampling = vattn.Sampling(max_new_tokens=4, stop_token_ids=())
        >>> len(generator.generate([[5, 6, 7]], sampling)[0].output)
        4
    """
    check_model(model, "enable_encoder_decoder", "AutoModelForSeq2SeqLM")
    check_switches(batch_invariant=batch_invariant)
    if cache_config is not None and not isinstance(cache_config, CacheConfig):
        raise ConfigError(f"cache_config={cache_config!r}", "vattn.CacheConfig(...)", "leave it out")
    if cache_config is not None and cache_config.cache_dtype != "auto":
        raise ConfigError(f"cache_dtype={cache_config.cache_dtype!r} for an encoder-decoder", "'auto'", "leave it out")
    has_encoder = getattr(model.config, "is_encoder_decoder", False) and model.get_decoder() is not None
    if not has_encoder or model.get_output_embeddings() is None:
        raise ConfigError(
            f"enable_encoder_decoder() of {type(model).__name__}",
            "an encoder-decoder model with its head",
            "enable(model) takes causal language models",
        )
    longest = _longest_input(model, max_encoder_len)
    own_config(model)
    model.__dict__["_vattn_before"] = model.config._attn_implementation, remove_cache_hooks(model), []
    try:
        undo = _give_encoder_its_config(model)
        seen = watch_decoder(model, _vocab_size(model))
        layers = seen.layers(cache_config, attn_backend, batch_invariant)
        proof = DecoderProof(model, _vocab_size(model))
        register()
        register_decoder()
        undo += set_decoder_attention(model, DECODER)
        install(seen.modules, layers)
        if seen.table is not None:
            seen.table.replace()
            undo.append(seen.table.restore)
        head = HeadRows()
        undo.append(model.get_output_embeddings().register_forward_pre_hook(head.keep).remove)
        packed = EncoderDecoderModel(model, seen.table, head, longest)
        proof.check(packed)
        if num_blocks is not None or memory is not None:
            packed.allocate(num_blocks=num_blocks, memory=memory)
    except BaseException:
        disable(model)
        raise
    return packed


def _vocab_size(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _longest_input(model: Any, requested: int | None) -> int:
    """Return the most encoder states of a prompt."""
    config, names = model.config, ["max_source_positions"]
    if model.main_input_name == "input_ids":
        names.append("max_position_embeddings")
    known = next((found for name in names if isinstance(found := getattr(config, name, None), int)), None)
    if requested is None:
        return known or _LONGEST
    read_count("max_encoder_len", requested, 1, "leave max_encoder_len out for its default")
    if known is not None and requested > known:
        raise ConfigError(
            f"max_encoder_len={requested} for a model that was made for {known}",
            f"up to {known}",
            "leave max_encoder_len out",
        )
    return requested


def _give_encoder_its_config(model: Any) -> list[Any]:
    """Give the encoder's modules a configuration of their own, so that they keep their attention.

    Returns what undoes it, a list that `disable` reads.
    """
    encoder = model.get_encoder()
    own = copy.copy(encoder.config)
    undo: list[Any] = model.__dict__.setdefault("_vattn_parts", [])
    for module in encoder.modules():
        before = module.__dict__.get("config")
        if before is not None:
            module.config = own
            undo.append(lambda module=module, before=before: setattr(module, "config", before))
    return undo
