"""Steps of a model with adapters: notes the adapter of each row, and chooses graphs with or without adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vattn.generation.capture import GraphSizes, capture
from vattn.generation.model_steps import Graphs, ModelSteps, Outcome, Ran, StepInputs
from vattn.layers.lora import AdapterRows
from vattn.metadata.builder import AttentionMetadataBuilder


class AdapterSteps(ModelSteps):
    """Run the steps of a model with adapters.

    Args:
        forward, builder: see `ModelSteps`.
        graphs: for steps in which no request has an adapter.
        adapter_graphs: for the others.
        rows: which adapter each row has.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        builder: AttentionMetadataBuilder,
        graphs: Graphs,
        adapter_graphs: Graphs,
        rows: AdapterRows,
    ) -> None:
        super().__init__(forward, builder, graphs)
        self._graphs, self._adapter_graphs, self._rows_of_adapters = graphs, adapter_graphs, rows
        self._last: tuple[Sequence[int], Sequence[int]] = (), ()

    @classmethod
    def capture(
        cls,
        forward: Callable[..., Tensor],
        builder: AttentionMetadataBuilder,
        graphs: Graphs,
        sizes: GraphSizes,
        rows: AdapterRows,
    ) -> AdapterSteps:
        """Capture graphs with adapters, in the memory of `graphs`."""
        with rows.activated():
            more = capture(forward, builder, sizes, memory_of=graphs)
        return cls(forward, builder, graphs, more, rows)

    @torch.inference_mode()
    def run(self, step: StepInputs, before: Ran | None, begin: torch.cuda.Event | None = None) -> Outcome:
        """Run a step; see `ModelSteps`. A step that continues another has the same adapters."""
        if step.new_blocks is None:
            self._last = step.adapters, step.counts
        with self._rows_of_adapters.step(*self._last):
            self.graphs = self._adapter_graphs if self._rows_of_adapters.active else self._graphs
            return super().run(step, before, begin)
