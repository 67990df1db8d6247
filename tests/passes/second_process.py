"""Compiles one model with the passes and says what the caches and the report hold; a test and its second process."""

from __future__ import annotations

import json
from typing import Any

import torch
from forms import plain, static
from harness import Attend, inputs_of, step
from queries import PER_TENSOR, Written, inputs
from rope_forms import FORMS, LayerWithRope
from rope_forms import inputs as rope_inputs

import vattn


class Everything(torch.nn.Module):
    """Output quantisation, none, query quantisation, and RoPE with a cache write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(static), Attend(plain)
        self.query, self.rope = Written(PER_TENSOR["divide"]), LayerWithRope(FORMS["FP8 query"])

    def forward(self, rows: list[torch.Tensor], x: torch.Tensor, turned: list[torch.Tensor]) -> tuple[Any, ...]:
        return self.first(*rows), self.second(*rows), *self.query(x), *self.rope(*turned)


def compiled() -> dict[str, Any]:
    """Compile and call the model; returns what the caches counted, the report and sums of the outputs."""
    torch.manual_seed(0)
    model = Everything()
    vattn.enable(rope="always")
    with step(model, [3, 4]):
        outputs = vattn.compile(model)(inputs_of(7), inputs(), rope_inputs(7))
    counters = torch._dynamo.utils.counters
    return {
        "inductor": {k: v for k, v in counters["inductor"].items() if k.startswith("fxgraph_cache")},
        "autograd": {k: v for k, v in counters["aot_autograd"].items() if k.startswith("autograd_cache")},
        "report": vattn.fusion_report().as_dict(),
        "outputs": [t.float().sum().item() for t in outputs],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compiled()))
