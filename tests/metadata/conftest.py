"""Backends with schedules that a test can predict: one that plans on the device, one on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vattn.backends import selector
from vattn.backends.torch_sdpa.backend import TorchSDPABackend


class Planned(TorchSDPABackend):
    """A backend with the step's lengths as its schedule, row by row."""

    name = "PLANNED"

    def plan_shape(self, config, num_tokens, num_reqs, table_width):
        return num_tokens + 1, num_reqs

    def plan(self, args, config) -> None:
        args.schedule.copy_(args.seq_lens.expand_as(args.schedule))


class PlannedOnHost(Planned):
    name = "PLANNED_ON_HOST"

    def host_plan_size(self, config) -> int:
        return 2

    def plan_on_host(self, args, config) -> None:
        args.host_plan.fill_(1)


@pytest.fixture(scope="module")
def planned_backends() -> Iterator[None]:
    selector.backend_names()
    added = {backend.name: backend for backend in (Planned(), PlannedOnHost())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selector, "_BACKENDS", {**selector._BACKENDS, **added})
        yield
    selector.forget_decisions()
