"""A model that transformers loaded as one stage of a pipeline: `distributed_config=DistributedConfig(pp_size=N)`.

transformers gives each rank its layers, and a forward that waits for the device at every stage and broadcasts the
shapes of logits. `use_stage` puts another in its place, and `StageModel` is what a generator runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from vattn.distributed.stage import Stage
from vattn.errors import UnsupportedRequestError
from vattn.integrations.transformers.available import transformers
from vattn.integrations.transformers.checks import model_dtype
from vattn.layers.weight_parts import Undo


def stage_of(model: Any) -> Stage | None:
    """Return the stage that a model on vattn is, `None` for a whole model."""
    found: Stage | None = model.__dict__.get("_vattn_stage")
    return found


def num_own_layers(model: Any) -> int:
    """Return how many layers a model has on this rank."""
    loaded, count = getattr(model, "_pp_stage", None), int(model.config.get_text_config().num_hidden_layers)
    if loaded is None:
        return count
    start, end = loaded.layer_range_for_rank(loaded.pp_rank, count)
    return int(end - start)


def use_stage(model: Any) -> Undo:
    """Replace the forward of a stage; every rank calls it. Whole models stay as they are.

    Raises:
        UnsupportedRequestError: stages without a layer.
    """
    loaded, config = getattr(model, "_pp_stage", None), model.config.get_text_config()
    if loaded is None:
        return []
    if config.num_hidden_layers < loaded.pp_size:
        raise UnsupportedRequestError(
            f"{config.num_hidden_layers} layers in a pipeline of {loaded.pp_size} ranks",
            "a layer at least on each rank",
            "take fewer ranks",
        )
    device = next(model.parameters()).device
    stage = Stage(loaded.pp_group, config.hidden_size, config.vocab_size, model_dtype(model), device)
    before = model.forward
    model.__dict__["_vattn_stage"] = stage

    @functools.wraps(before)
    def forward(input_ids: Tensor, logits_to_keep: Any = None, **options: Any) -> Any:
        num_tokens, hidden = input_ids.shape[1], None
        if not stage.is_first:
            hidden = stage.hidden_states(num_tokens)
            stage.receive(hidden).wait()
        keep = {} if logits_to_keep is None else {"logits_to_keep": logits_to_keep}
        out = run_stage(model, stage, input_ids, hidden, **keep, **options)
        if not stage.is_last:
            stage.send(out).wait()
            rows = logits_to_keep.shape[0] if isinstance(logits_to_keep, Tensor) else num_tokens
            out = stage.logits(rows)
        logits = stage.share_logits(out)[None]
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    def restore() -> None:
        model.forward = before
        del model.__dict__["_vattn_stage"]

    model.forward = forward
    return [restore]


def run_stage(model: Any, stage: Stage, input_ids: Tensor, hidden: Tensor | None, **options: Any) -> Tensor:
    """Return the logits `[B, vocab_size]` of the last stage, or the hidden states `[T, hidden_size]` of another.

    Args:
        input_ids: `[1, T]`; read by the first stage.
        hidden: `[T, hidden_size]`, from the stage before.
        options: of the model's forward.
    """
    inputs = {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden[None]}
    if stage.is_last:
        logits: Tensor = type(model).forward(model, **inputs, **options).logits[0]
        return logits
    options.pop("logits_to_keep", None)
    out: Tensor = getattr(model, model.base_model_prefix)(**inputs, **options).last_hidden_state[0]
    return out


class StageModel(nn.Module):
    """What a generator runs on one rank of a pipeline; it sends and receives the hidden states itself.

    Args:
        packed: the `PackedModel`.
        capacity: most tokens of a step.

    Attributes:
        hidden: `[capacity, hidden_size]`, from the stage before; graphs read it.
        start: where the step's tokens begin there.
    """

    def __init__(self, packed: Any, capacity: int) -> None:
        super().__init__()
        self.packed, self.start = packed, 0
        self.stage: Stage = packed.stage
        # Not an inference tensor: layers would be compiled once more for it.
        with torch.inference_mode(False):
            self.hidden = self.stage.hidden_states(0 if self.stage.is_first else capacity)

    def forward(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor) -> Tensor:
        """Return logits `[B, vocab_size]` on the last rank, hidden states `[T, hidden_size]` on the others."""
        if not torch.compiler.is_compiling():
            self.packed.renew()
        hidden = None
        if not self.stage.is_first:
            hidden = self.hidden[self.start : self.start + input_ids.shape[0]]
        options = self.packed.model_options(positions, logits_indices)
        return run_stage(self.packed.model, self.stage, input_ids[None], hidden, **options)
