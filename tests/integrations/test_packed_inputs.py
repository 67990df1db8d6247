"""What a model over packed tokens refuses about its inputs, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from vattn.errors import DtypeError, MetadataError, ShapeError

pytest.importorskip("transformers")

from tests.integrations.hf_families import make_model
from vattn.integrations.transformers import enable

IDS = torch.arange(5)

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a batch of one": ({"input_ids": IDS[None]}, ShapeError, r"input_ids of shape \[1, 5\]"),
    "values": ({"input_ids": IDS.float()}, DtypeError, "input_ids of float32"),
    "a list": ({"input_ids": [0, 1, 2, 3, 4]}, DtypeError, "input_ids of type list"),
    "other positions": ({"positions": IDS[:4]}, ShapeError, "4 positions for 5 tokens"),
    "no positions": ({"positions": None}, DtypeError, "positions of type NoneType"),
    "a mask for rows": ({"logits_indices": IDS > 3}, DtypeError, "logits_indices of bool"),
    "a number for rows": ({"logits_indices": 1}, DtypeError, "logits_indices of type int"),
    "rows in two dimensions": ({"logits_indices": IDS[None]}, ShapeError, "logits_indices of shape"),
    "a row from the end": ({"logits_indices": torch.tensor([4, -1])}, MetadataError, "logits_indices with -1.*0 to 4"),
    "a row too many": ({"logits_indices": torch.tensor([2, 5])}, MetadataError, "logits_indices with 5.*0 to 4"),
    "an unknown token": ({"input_ids": IDS * 1000}, MetadataError, "input_ids with 4000.*vocabulary"),
    "a negative token": ({"input_ids": IDS - 1}, MetadataError, "input_ids with -1.*vocabulary"),
}


def test_inputs_by_type_shape_and_dtype() -> None:
    """Refused calls leave the cache as it was; ids and rows in int32 are as good as in int64."""
    packed = enable(make_model("llama"), num_blocks=4)
    step = vattn.AttentionMetadataBuilder(4, 16, max_seq_len=64, layers=packed).build([3, 2], [3, 2], [[1], [2]])
    assert packed.kv_cache is not None
    caches = packed.kv_cache.kv_caches
    before = [cache.clone() for cache in caches]
    with torch.no_grad(), vattn.forward_context(step):
        for inputs, error, text in WRONG.values():
            with pytest.raises(error, match=text):
                packed(**{"input_ids": IDS, "positions": step.positions, **inputs})
        for cache, was in zip(caches, before, strict=True):
            assert torch.equal(cache.view(torch.uint8), was.view(torch.uint8))
        logits = packed(IDS, step.positions)
        rows = packed(IDS.int(), step.positions.int(), torch.tensor([4, 2], dtype=torch.int32))
    assert torch.allclose(rows, logits[[4, 2]], atol=1e-6)


def test_compiled_models_refuse_too() -> None:
    packed = enable(make_model("llama"), num_blocks=4)
    step = vattn.AttentionMetadataBuilder(4, 16, max_seq_len=64, layers=packed).build([3, 2], [3, 2], [[1], [2]])
    with torch.no_grad(), vattn.forward_context(step), pytest.raises(Exception, match="4 positions for 5 tokens"):
        torch.compile(packed, backend="eager", fullgraph=True)(IDS, step.positions[:4])


def test_compiled_layers_name_the_step_where_its_rows_are_others() -> None:
    from tests.layers.layer_support import make_inputs, make_layer, make_step

    layer = make_layer()
    with torch.no_grad(), vattn.forward_context(make_step()), pytest.raises(Exception, match="build the step for the"):
        torch.compile(layer, backend="eager", fullgraph=True)(*make_inputs(7))
