"""What a step must have in common with the CUDA graph that will replay it."""

from __future__ import annotations

from vattn.errors import GraphContractError
from vattn.metadata.attention_metadata import CaptureKey
from vattn.metadata.step import Step


def refuse_contradiction(captured: CaptureKey, came: CaptureKey) -> None:
    """Raise GraphContractError, naming every difference, if a step cannot replay a capture."""
    if captured != came:
        raise GraphContractError(
            "the step contradicts the captured graph: " + "; ".join(captured.differences(came)),
            "the sizes, optional tensors and buffers of the capture",
            "build the step with the builder and the capture_key of the capture, or capture this kind of step too",
        )


def refuse_overflow(step: Step, key: CaptureKey) -> None:
    """Refuse a step that is larger than a capture in any size."""
    captured = dict(key.optional)
    sizes = [
        ("requests", step.query_lens.shape[0], key.num_reqs),
        ("tokens", step.positions.shape[0], key.num_tokens),
    ]
    if step.cross is not None and "cross_slot_mapping" in captured:
        sizes.append(("encoder states", step.cross.num_rows, captured["cross_slot_mapping"][0]))
    if "logits_indices" in captured:
        kept = step.query_lens if step.num_logits is None else step.num_logits
        sizes.append(("kept tokens", int(kept.sum()), captured["logits_indices"][0]))
    for name, count, limit in sizes:
        if count > limit:
            raise GraphContractError(
                f"a step of {count} {name} for a graph captured with {limit}",
                f"at most {limit} {name}",
                "replay a larger graph, or run this step without one",
            )
