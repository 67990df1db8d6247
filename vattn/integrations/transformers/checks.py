"""What is refused: models and options that `enable` does not take, and inputs of a step over packed tokens."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from vattn.config.device import check_default_device
from vattn.errors import ConfigError, DtypeError, MetadataError, ShapeError
from vattn.integrations.transformers.available import transformers
from vattn.layers import QuantConfig
from vattn.quantization.formats import MODEL_DTYPES, dtype_name

_INTEGERS = (torch.int32, torch.int64)


def model_dtype(model: Any) -> torch.dtype:
    """Return the dtype of a model's activations: its first parameter may be FP8 codes in a stage of a pipeline."""
    dtypes = [parameter.dtype for parameter in model.parameters()]
    found: torch.dtype = next((dtype for dtype in dtypes if dtype in MODEL_DTYPES.values()), model.dtype)
    return found


def check_model(model: Any, call: str = "enable", kind: str = "AutoModelForCausalLM") -> None:
    """Refuse what is no whole model in eval mode that is not on vattn yet.

    Args:
        model: as it was given.
        call: the function that it was given to.
        kind: the class of transformers that loads its models; `"AutoModelForCausalLM"` to take causal models only.
    """
    check_default_device()
    if isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            f"{call}({str(model)!r:.80}), a name or a folder",
            "a model of transformers",
            f"load it first: {call}(transformers.{kind}.from_pretrained(folder).eval())",
        )
    if not isinstance(model, transformers.PreTrainedModel):
        inside = model.named_modules() if isinstance(model, nn.Module) else ()
        path = next((name for name, part in inside if isinstance(part, transformers.PreTrainedModel)), None)
        if path is not None:
            raise ConfigError(
                f"{call}() of {type(model).__name__}, a module around a model of transformers",
                "the model itself",
                f"{call}(model.{path}); adapters in its layers stay where they are",
            )
        raise ConfigError(
            f"{call}() of {type(model).__name__}", "a model of transformers", "use vattn.Attention in your own models"
        )
    if model.training:
        raise ConfigError(f"{call}() of a model in training mode", "a model in eval mode", "call model.eval() first")
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise ConfigError(
            f"{call}() of a model in which {empty!r} has no values (device meta), as after offloading",
            "a model with all weights on its device",
            "load it whole, with device_map=None or one device",
        )
    if "_vattn_before" in model.__dict__:
        raise ConfigError(f"{call}() of a model that is on vattn", "a model that is not", "call disable(model) first")
    if model.dtype not in MODEL_DTYPES.values() and model.dtype.itemsize > 1:
        raise ConfigError(f"{call}() of a model in {model.dtype}", ", ".join(MODEL_DTYPES), "call model.float() first")
    if kind == "AutoModelForCausalLM" and not has_head(model):
        raise ConfigError(
            f"{call}() of {type(model).__name__}",
            "a causal language model with its head",
            "load it with transformers.AutoModelForCausalLM; enable_pooling of vattn.integrations.transformers.pooling "
            "takes models that give embeddings or scores",
        )


def has_head(model: Any) -> bool:
    """Return whether a model of transformers is a causal language model with its head."""
    generates = callable(getattr(model, "prepare_inputs_for_generation", None))
    return generates and model.get_output_embeddings() is not None


def check_quant_config(quant_config: object) -> None:
    """Refuse what is no `QuantConfig`, and quantised outputs, which the model's own projection would get.

    Raises:
        ConfigError: either.
    """
    if quant_config is not None and not isinstance(quant_config, QuantConfig):
        raise ConfigError(f"quant_config={quant_config!r}", "vattn.QuantConfig(...)", "QuantConfig(k_scale=...)")
    if isinstance(quant_config, QuantConfig) and quant_config.output_format != "none":
        raise ConfigError(
            f"QuantConfig(output_format={quant_config.output_format!r}) for a model of transformers",
            "outputs in the model's dtype, which its own projection takes",
            "vattn.quantise_linears(model, ...) and vattn.enable(): the passes quantise outputs",
        )


def check_inputs(input_ids: Any, positions: Any, logits_indices: Any, model: Any = None) -> None:
    """Refuse inputs by what the host knows of them: values of tensors on another device are not read.

    Args:
        model: that of transformers, which knows its ids.

    Raises:
        DtypeError: no tensors of integers.
        ShapeError: other than one dimension, or other numbers of ids and positions.
        MetadataError: ids that the model does not know, or rows that the step does not have; on the CPU alone, and not
            in compiled code.
    """
    _check_line("input_ids", input_ids, "T", "concatenate the requests of a step, without a batch dimension")
    _check_line("positions", positions, "T", "pass the positions of the step's metadata")
    if logits_indices is not None:
        _check_line("logits_indices", logits_indices, "B", "pass the rows of the step that go through the head")
    if positions.shape[0] != input_ids.shape[0]:
        raise ShapeError(
            f"{positions.shape[0]} positions for {input_ids.shape[0]} tokens",
            "as many",
            "pass the positions of the metadata that was built for these tokens",
        )
    if not _readable(input_ids):
        return
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embedding, "num_embeddings", None)
    if isinstance(vocabulary, int):
        fix = "encode the text with the model's own tokenizer; rows of padding hold any valid id"
        _check_values("input_ids", input_ids, vocabulary, "the model's vocabulary", fix)
    if logits_indices is not None and _readable(logits_indices):
        fix = "count rows from the first of the step: query_start_loc[1:] - 1 for the last one of each request"
        _check_values("logits_indices", logits_indices, input_ids.shape[0], "the rows of the step", fix)


def check_types(token_type_ids: Any, input_ids: Tensor, count: int) -> None:
    """Refuse types of tokens as `check_inputs` refuses ids; a model has `count` types."""
    _check_line("token_type_ids", token_type_ids, "T", "pass one for each token")
    if token_type_ids.shape != input_ids.shape:
        raise ShapeError(
            f"{token_type_ids.shape[0]} token_type_ids for {input_ids.shape[0]} tokens", "as many", "pass one each"
        )
    if _readable(token_type_ids):
        _check_values("token_type_ids", token_type_ids, count, "the model's types", "use the model's own tokenizer")


def _check_line(name: str, given: Any, rows: str, fix: str) -> None:
    if not isinstance(given, Tensor):
        raise DtypeError(f"{name} of type {type(given).__name__}", f"an int64 tensor [{rows}]", fix)
    if given.dtype not in _INTEGERS:
        raise DtypeError(f"{name} of {dtype_name(given.dtype)}", "int64 (int32 too)", fix)
    if given.ndim != 1:
        raise ShapeError(f"{name} of shape {list(given.shape)}", f"[{rows}]", fix)


def _readable(given: Tensor) -> bool:
    """Whether values can be read without waiting for a device; tensors of other classes may have none, in traces."""
    return type(given) is Tensor and given.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_values(name: str, given: Tensor, end: int, what: str, fix: str) -> None:
    """Refuse values from `end` on, and negative ones, which would count from there backwards."""
    if not given.numel():
        return
    lowest, highest = (int(value) for value in torch.aminmax(given))
    if lowest < 0 or highest >= end:
        wrong = lowest if lowest < 0 else highest
        raise MetadataError(f"{name} with {wrong}", f"0 to {end - 1}, {what}", fix)
