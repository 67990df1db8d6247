"""Compiles one model with the passes and prints what the caches and the report say; run twice by a test."""

from __future__ import annotations

import json
import sys

import torch
from forms import plain, static
from harness import Attend, inputs_of, step
from queries import PER_TENSOR, Written, inputs
from rope_forms import FORMS, LayerWithRope
from rope_forms import inputs as rope_inputs

import vattn


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(static), Attend(plain)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.first(*inputs), self.second(*inputs)


def main() -> None:
    strict = sys.argv[1] == "strict"
    vattn.enable(strict=strict)
    if sys.argv[1] == "query":
        with torch.no_grad():
            outputs = vattn.compile(Written(PER_TENSOR["divide"]))(inputs())
    elif sys.argv[1] == "rope":
        with_rope = LayerWithRope(FORMS["FP8 query"])
        with step(with_rope, [3, 4]):
            outputs = vattn.compile(with_rope, options=vattn.options(rope="always"))(*rope_inputs(7))
    else:
        model = Attend(static) if strict else Two()
        with step(model, [3, 4]):
            outputs = vattn.compile(model)(*inputs_of(7))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    counters = torch._dynamo.utils.counters
    said = {
        "inductor": {k: v for k, v in counters["inductor"].items() if k.startswith("fxgraph_cache")},
        "autograd": {k: v for k, v in counters["aot_autograd"].items() if k.startswith("autograd_cache")},
        "report": vattn.fusion_report().as_dict(),
        "outputs": [t.float().sum().item() for t in outputs],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
