"""Several ranks run one generator: rank 0 plans the steps and chooses tokens, the others run the model with it."""

from __future__ import annotations

import hashlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from vattn.config.arguments import check_seconds
from vattn.distributed.leader import Leader
from vattn.distributed.stage import Stage
from vattn.errors import ConfigError
from vattn.generation.model_steps import Graphs, ModelSteps, Outcome, Ran, StepInputs
from vattn.layers.weight_parts import distributed_tensor, part_of, ranks_of
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


T = TypeVar("T")

_PART = 1 << 24
"""Elements of a weight that are summed at once."""


class RankSteps(ModelSteps):
    """Steps of a model over the ranks of a group: rank 0 runs each step with all others.

    Args:
        forward, builder, graphs: see `ModelSteps`, of this rank.
        leader: of the ranks.
    """

    def __init__(
        self, forward: Callable[..., Tensor], builder: AttentionMetadataBuilder, graphs: Graphs, leader: Leader
    ) -> None:
        super().__init__(forward, builder, graphs)
        self._leader, self._progress = leader, Progress()
        leader.watch(self._progress.stuck)
        # Also at the end of the process: the others would wait forever.
        self.end = weakref.finalize(self, leader.end)

    def check(self) -> None:
        """Refuse requests and steps on another rank than 0, and after a step in which a rank failed."""
        self._leader.check()
        if self._leader.rank:
            raise ConfigError(
                f"a request or a step on rank {self._leader.rank} of {self._leader.world_size}",
                "requests and steps on rank 0 of the group",
                "call generator.follow() on all other ranks",
            )
        if not self.end.alive:
            raise ConfigError("a step after close()", "steps before it", "make a new generator on every rank")

    @torch.inference_mode()
    def run(self, step: StepInputs, before: Ran | None, begin: torch.cuda.Event | None = None) -> Outcome:
        """Run a step on every rank; see `ModelSteps`."""
        tokens = before.tokens if before is not None and step.continues else None
        try:
            self._leader.send(pickle.dumps((step, 0 if tokens is None else tokens.shape[0])))
            with self._progress.step(self.device):
                if tokens is not None:
                    self.share_tokens(tokens)
                return self.compute(step, before, begin)
        except BaseException as error:
            failure = self._leader.report(error)
            # Ranks are in different steps after an interrupt too, but the interrupt itself is what the caller sees.
            if not isinstance(error, Exception):
                raise
            raise failure from error

    def read(self, wait: Callable[[], T]) -> T:
        """Return what `wait` returns, unless a rank has failed: a step with aborted collectives may give anything."""
        try:
            found = wait()
        except Exception as error:
            raise self._leader.report(error) from error
        self._leader.check()
        return found

    def compute(self, step: StepInputs, before: Ran | None, begin: torch.cuda.Event | None = None) -> Outcome:
        """Run this rank's part of a step; see `ModelSteps.run`."""
        return super().run(step, before, begin)

    def share_tokens(self, tokens: Tensor) -> None:
        """Give every rank the tokens of rank 0 that the host has not read yet, in place."""
        self._leader.broadcast(tokens)

    @torch.inference_mode()
    def follow(self) -> None:
        """Run the steps that rank 0 runs, until it closes its generator.

        Raises:
            ConfigError: this is rank 0.
            RankError: a rank failed.
        """
        self._leader.check()
        if not self._leader.rank:
            raise ConfigError("follow() on rank 0", "the other ranks of the group", "generate or step on rank 0")
        before: Ran | None = None
        try:
            while message := self._leader.receive():
                step, count = pickle.loads(message)
                with self._progress.step(self.device):
                    if before is not None and count:
                        before.tokens = torch.zeros(count, dtype=torch.int64, device=self.device)
                        self.share_tokens(before.tokens)
                    _, metadata, graphs = self.compute(step, before)
                before = Ran(torch.empty(0), metadata, graphs)
        except BaseException as error:
            failure = self._leader.report(error)
            if not isinstance(error, Exception):
                raise
            raise failure from error


class Progress:
    """Whether a rank is in a step, on the host or on the device."""

    def __init__(self) -> None:
        self._in_step = False
        self._launched: torch.cuda.Event | None = None

    @contextmanager
    def step(self, device: torch.device) -> Iterator[None]:
        """Note the step that the block launches."""
        self._in_step = True
        try:
            yield
        finally:
            if device.type == "cuda":
                # A step that failed may have launched collectives too. Nothing more is known of a broken device.
                with suppress(RuntimeError):
                    self._launched = torch.cuda.Event()
                    self._launched.record()
            self._in_step = False

    def stuck(self) -> bool:
        """Return whether the step is not over."""
        return self._in_step or (self._launched is not None and not self._launched.query())


def join_ranks(
    model: nn.Module, group: ProcessGroup | None, timeout: float, options: Mapping[str, object]
) -> Leader | None:
    """Meet the other ranks of a group; return who leads them, `None` without a group.

    Args:
        model: as it is loaded on this rank.
        group: `None` for a model on one device.
        timeout: seconds to wait for all ranks.
        options: of the generator; equal on all ranks.

    Raises:
        ConfigError: a sharded model without a group, or no group of this rank.
        RankError: ranks differ in versions, model, options or weights, or one did not answer.
    """
    check_seconds("group_timeout", timeout, "leave it out for 300")
    stage: Stage | None = getattr(model, "stage", None)
    if group is None:
        if stage is not None or ranks_of(model) is not None:
            raise ConfigError(
                "a generator of a model that is sharded over ranks, without their group",
                "group=, on every rank",
                "Generator(model, group=torch.distributed.group.WORLD), and generator.follow() on all ranks but 0",
            )
        return None
    from torch import distributed

    if not isinstance(group, distributed.ProcessGroup):
        raise ConfigError(
            f"group of type {type(group).__name__}",
            "a process group that this rank is in",
            "group=torch.distributed.group.WORLD after torch.distributed.init_process_group",
        )
    if stage is not None and (group.size() != stage.size or group.rank() != stage.rank or ranks_of(model) is not None):
        raise ConfigError(
            f"stage {stage.rank} of {stage.size} of a pipeline on rank {group.rank()} of a group of {group.size()}"
            + ("" if ranks_of(model) is None else ", with sharded weights"),
            "the group of the pipeline's ranks in its order, and whole weights in each stage",
            "load the model with DistributedConfig(pp_size=N) alone on N ranks",
        )
    kind = "in a pipeline" if stage is not None else "sharded" if ranks_of(model) else "whole"
    facts = {
        "torch": torch.__version__,
        "vattn": __version__,
        "model": f"{type(getattr(model, 'model', model)).__name__}, {kind}",
        **options,
        "weights that every rank holds": _digest(model) if stage is None else "none",
    }
    more = [each for each in (ranks_of(model), None if stage is None else stage.group) if each is not None]
    return Leader(group, facts, timeout, "Generator(model, group=...)", more)


def _digest(model: nn.Module) -> str:
    """Return a digest of names, shapes and dtypes of all weights, and of the values of those that are on every rank.

    DTensors and parts of weights differ between ranks. A model without either may be sharded by hand, so no values of
    it count.
    """
    kind, sharded, digest = distributed_tensor(), ranks_of(model) is not None, hashlib.sha256()
    parts = {name for name, module in model.named_modules() if part_of(module) is not None}
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        own = isinstance(weight, kind) or name.rpartition(".")[0] in parts
        if sharded and not own and weight.numel():
            # In parts: all of an embedding in fp64 may be more than the device has free.
            for values in map(Tensor.double, weight.detach().flatten().split(_PART)):
                digest.update(repr([float(values.sum()), float(values.square().sum())]).encode())
    return digest.hexdigest()[:16]
