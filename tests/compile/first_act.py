"""Compile the toy model as the first thing a process does, and print what happened as JSON."""

from __future__ import annotations

import hashlib
import json

import torch

import vattn
from tests.compile.toy_models import make_builder, make_model, make_step


def main() -> None:
    model = make_model(1)
    target = vattn.compile(model)
    builder = make_builder(model)
    outputs = []
    for query_lens in ([3, 4], [1] * 5, [64]):
        ids, step = make_step(builder, query_lens)
        with torch.no_grad(), vattn.forward_context(step):
            outputs.append(target(ids))
    counters = torch._dynamo.utils.counters
    print(
        json.dumps(
            {
                "graphs": counters["stats"]["unique_graphs"],
                "breaks": sum(counters["graph_break"].values()),
                "inductor": dict(counters["inductor"]),
                "autograd": dict(counters["aot_autograd"]),
                "outputs": hashlib.sha256(b"".join(o.numpy().tobytes() for o in outputs)).hexdigest(),
            }
        )
    )


main()
