"""`ContextParallel`: the ranks that share one KV cache, and the check that they agree."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vattn.config.arguments import check_seconds, read_count
from vattn.config.dcp import MAX_PERIOD, DCPShard
from vattn.distributed.rendezvous import confirm, meet, refuse
from vattn.errors import ConfigError, RankError, UnknownOptionError, VattnError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

COMBINES = ("reduce_scatter", "all_to_all")
"""How partial results are combined: log-sum-exps are gathered and rescaled outputs summed, or each rank gets all parts
of its own heads."""

FACTS = 12
"""Most facts that one check compares; every check exchanges as many numbers, so that no two can be mixed up."""

_REFUSED = -1
"""What a rank sends instead of hashes, which are positive, if it refuses its arguments."""

_missed: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
"""Groups in which a rank did not answer, and what was compared then: messages may still arrive in them."""


@dataclass(frozen=True)
class ContextParallel:
    """Share the KV caches of a model among the ranks of a process group.

    Make it with `ContextParallel.of`, on every rank, and give it to the layers and to the metadata builder.

    Attributes:
        rank, world_size: this rank and how many there are.
        interleave: neighbouring tokens that lie on one rank.
        combine: `"reduce_scatter"` or `"all_to_all"` (`COMBINES`).
        group_name: name of the process group; `""`: none, so that steps can be built and nothing be attended.
        check_group_name: name of the group in which ranks compare what they are about to do; `""`: they do not.
        timeout: seconds that a check waits for the other ranks.

    Example:
        >>> from vattn.distributed import ContextParallel
        >>> parallel = ContextParallel(rank=1, world_size=2, interleave=16)
        >>> parallel.dcp_shard.count(40)
        16
    """

    rank: int
    world_size: int
    interleave: int = 1
    combine: str = "reduce_scatter"
    group_name: str = ""
    check_group_name: str = field(default="", compare=False)
    timeout: float = field(default=30.0, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("world_size", 1), ("interleave", 1)):
            read_count(name, getattr(self, name), least, "use ContextParallel.of(group)")
        if self.rank >= self.world_size or self.world_size * self.interleave > MAX_PERIOD:
            raise ConfigError(
                f"rank={self.rank}, world_size={self.world_size}, interleave={self.interleave}",
                f"rank < world_size, and world_size * interleave up to {MAX_PERIOD}",
                "use ContextParallel.of(group) and an interleave of 1, or of the block size",
            )
        check_seconds("timeout", self.timeout, "leave it out for 30")
        if self.combine not in COMBINES:
            raise UnknownOptionError(f"combine={self.combine!r}", ", ".join(COMBINES), "choose one of these names")

    @staticmethod
    def of(
        group: ProcessGroup | None = None,
        *,
        interleave: int = 1,
        combine: str = "reduce_scatter",
        check: bool = True,
        timeout: float = 30.0,
    ) -> ContextParallel:
        """Describe this rank of a process group; every rank of the group must call it.

        Args:
            group: any backend; default: all ranks.
            interleave, combine: see the class; equal on all ranks.
            check: let ranks compare every step they build, by their hosts: an exchange of hashes over gloo. Without it
                ranks that disagree hang or compute nonsense. These arguments are compared in any case.
            timeout: seconds that a check waits.

        Raises:
            ConfigError: no process group, this rank is not in it, or an argument is none.
            RankError: ranks have different arguments, one did not answer, or their group could not be made.
                All ranks may call it again.
        """
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                "context parallelism without a process group",
                "torch.distributed with an initialised process group",
                "call torch.distributed.init_process_group first",
            )
        group = distributed.group.WORLD if group is None else group
        if not isinstance(group, distributed.ProcessGroup):
            raise ConfigError(
                f"a process group of type {type(group).__name__} (what new_group gives to ranks outside of it)",
                "a group that this rank is in",
                "make the layers on the ranks of the group alone",
            )
        ranks = distributed.get_process_group_ranks(group)
        try:
            parallel = ContextParallel(
                distributed.get_rank(group), len(ranks), interleave, combine, group.group_name, timeout=timeout
            )
            if not isinstance(check, bool):
                raise ConfigError(f"check={check!r:.60}", "True or False", "change check")
        except VattnError:
            refuse(group)
            raise
        key = meet(group, {"interleave": interleave, "combine": combine, "check": check}, timeout)
        if check:
            parallel = dataclasses.replace(parallel, check_group_name=_group_of_checks(group, ranks, key, timeout))
        return parallel

    @property
    def dcp_shard(self) -> DCPShard:
        """This rank's share of the tokens of every request."""
        return DCPShard(self.rank, self.world_size, self.interleave)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Compare some facts with the other ranks; every rank must call it with facts of the same names.

        Nothing happens without a check group.

        Args:
            facts: at most `FACTS - 1` values with a faithful `repr`, or host tensors.

        Raises:
            RankError: another rank has other facts, refused (`refuse`), or did not answer within the timeout, now or
                before: nothing can be compared after that.
        """
        if not self.check_group_name:
            return
        all_of_them = self._exchange([_hash(tuple(facts)), *(_hash(fact) for fact in facts.values())], ", ".join(facts))
        refused = [str(rank) for rank, theirs in enumerate(all_of_them) if theirs[0] == _REFUSED]
        if refused:
            raise RankError(
                f"rank {', '.join(refused)} refused what rank {self.rank} accepts",
                "arguments that are right, and equal, on all ranks of a context-parallel group",
                "its own error says why; nothing was changed, and all ranks may go on",
            )
        names = ("what is compared", *facts)
        differing = [
            f"{name} of rank {rank}"
            for rank, theirs in enumerate(all_of_them)
            for name, here, there in zip(names, all_of_them[0].tolist(), theirs.tolist(), strict=False)
            if here != there
        ]
        if differing:
            raise RankError(
                f"ranks disagree: {', '.join(differing[:8])} differ from rank 0's",
                "equal values on all ranks of a context-parallel group",
                "give every rank the same requests, lengths and block tables, and equal layers",
            )

    def refuse(self) -> None:
        """Tell the other ranks, which are about to `agree`, that this one refuses its arguments.

        Nothing happens without a check group, or if the others do not answer: this rank has its own error.
        """
        if self.check_group_name:
            with contextlib.suppress(RankError):
                self._exchange([_REFUSED], "an error of this rank")

    def _exchange(self, numbers: list[int], about: str) -> list[Tensor]:
        """Return `[FACTS]` numbers of every rank, this one's among them."""
        from torch import distributed
        from torch.distributed.distributed_c10d import _resolve_process_group

        group: ProcessGroup = _resolve_process_group(self.check_group_name)  # type: ignore[arg-type, unused-ignore]
        if group in _missed:
            raise RankError(
                f"rank {self.rank} of {self.world_size} compares nothing any more: another rank did not answer about "
                f"{_missed[group]}",
                "ranks that answer in every step",
                "call ContextParallel.of on every rank again, and make the builder or the model with its result",
            )
        mine = torch.tensor(numbers + [0] * (FACTS - len(numbers)), dtype=torch.int64, device="cpu")
        all_of_them = [torch.empty_like(mine) for _ in range(self.world_size)]
        begin = time.monotonic()
        try:
            distributed.all_gather(all_of_them, mine, group=group)
        except Exception as error:
            _missed[group] = about
            waited = time.monotonic() - begin
            got = f"got no answer of all others about {about} within {self.timeout:g} s"
            if waited < 0.9 * self.timeout:
                got = f"lost another rank {waited:.1f} s into the check of {about}"
            raise RankError(
                f"rank {self.rank} of {self.world_size} {got}",
                "every rank at the same step",
                f"look for an error on another rank; the group says: {str(error).splitlines()[0]:.160}",
            ) from error
        return all_of_them


def _group_of_checks(group: ProcessGroup, ranks: list[int], key: str, timeout: float) -> str:
    """Make a gloo group of the ranks; return its name.

    A group of its own, so that a check that times out leaves the user's group as it is.

    Raises:
        RankError: this rank or another could not make it.
    """
    from torch import distributed
    from torch.distributed.distributed_c10d import _world

    name, failure, groups = "", None, len(_world.pg_names)
    options: Any = {"timeout": timedelta(seconds=timeout), "backend": "gloo", "use_local_synchronization": True}
    try:
        name = distributed.new_group(ranks, **options).group_name
    except Exception as error:
        failure = error
        if len(_world.pg_names) == groups:
            # Torch names a group by how many a rank has: if only some ranks made it, no later names would be equal.
            # An error here would repeat the one below.
            with contextlib.suppress(Exception):
                distributed.new_group([distributed.get_rank()], **options)
    confirm(group, key, failure, timeout)
    return name


def _hash(fact: object) -> int:
    """Return a hash of 63 bits, the same in every process."""
    if isinstance(fact, torch.Tensor):
        data = f"{fact.dtype}{tuple(fact.shape)}".encode() + fact.contiguous().numpy().tobytes()
    else:
        data = repr(fact).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1
