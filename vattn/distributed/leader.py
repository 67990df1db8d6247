"""Rank 0 of a group sends messages to the other ranks through the store of their process group.

Each wait on a store has a timeout of its own, and it can be read while a collective hangs. A rank that fails writes its
error there, so that the others can name it; a thread of each rank looks for it, and says that the rank is alive.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vattn.distributed.rendezvous import first_line, meet, reaching_the_store, store_of_ranks
from vattn.errors import RankError, VattnError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KEPT = 64
"""Messages that stay in the store. No rank is as many steps late: ranks wait for each other in each step."""

_LOOK = timedelta(seconds=1)
"""How long a rank waits for a message before it looks for failures of others."""

_GRACE = 5.0
"""Seconds that a failed rank waits for the reports of the others; ranks without one have ended or hang.

A rank that waits for a failed one in a collective aborts it in half that time.
"""

_SILENT = 60.0
"""Most seconds without a sign of life after which a rank has ended. Compilers may keep its threads from running."""

_LEAST_SILENT = 5.0
"""Fewest such seconds: ranks give a sign each second."""


class Leader:
    """Messages from rank 0 of a group to its other ranks, in order.

    Args:
        group: of any backend.
        facts: what must be equal on all ranks: values with a faithful `repr`.
        timeout: seconds to wait for all ranks here; a rank without a sign of life for as long has ended.
        call: what every rank calls to make this, for errors.
        others: more groups, in which steps run collectives.

    Attributes:
        rank, world_size: this rank in the group, and how many there are.
        end_watch: ends the thread; no sign of life is given after it.

    Raises:
        RankError: ranks have other facts, or one did not answer.
    """

    def __init__(
        self,
        group: ProcessGroup,
        facts: Mapping[str, object],
        timeout: float,
        call: str,
        others: Iterable[ProcessGroup] = (),
    ) -> None:
        from torch import distributed

        self._group, self._source, self._timeout = group, distributed.get_global_rank(group, 0), timeout
        self.rank, self.world_size = group.rank(), group.size()
        self._key, self._count = meet(group, facts, timeout, call), 0
        self._store = store_of_ranks()
        # A connection of its own: one that waits for a key answers nothing else.
        self._store_of_watch = self._store.clone()
        self._error: RankError | None = None
        self._groups = {id(each): each for each in (group, *others)}.values()
        self._stuck: Callable[[], bool] = _never
        # What each rank's last sign of life was, and when it came; when a failure was seen.
        self._signs: dict[int, tuple[bytes, float]] = {}
        self._seen: float | None = None
        over = threading.Event()
        thread = threading.Thread(target=_watch, args=(weakref.ref(self), over), name="vattn ranks", daemon=True)
        thread.start()
        # Also at the end of the process: a thread that comes back from the store after Python's end aborts it.
        self.end_watch = weakref.finalize(self, _end_watch, thread, over)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wait at the end of the block for all ranks; a rank that fails inside ends it on all ranks.

        Raises:
            RankError: another rank failed, or did not come to the end within the timeout.
        """
        self._stuck = _always
        try:
            yield
            self._await_ready()
        except BaseException as error:
            failure = self.report(error)
            # An error of vattn on this rank says what is wrong.
            if isinstance(error, VattnError) or not isinstance(error, Exception):
                raise
            raise failure from error
        finally:
            self._stuck = _never

    def watch(self, stuck: Callable[[], bool]) -> None:
        """Abort the collectives of this rank if another one has failed, and `stuck` says that this one is in a step.

        NCCL would wait until its own timeout. What an aborted step computed is not used: `check` raises then.
        """
        self._stuck = stuck

    def look(self) -> bool:
        """Give a sign of life, and look for failures of other ranks; return whether to look again."""
        try:
            if self._store_of_watch.check([f"{self._key}/ended"]):
                return False
            self._store_of_watch.set(f"{self._key}/alive/{self.rank}", repr(time.monotonic()))
            failed = self._first_failure(self._store_of_watch) or self._find_silent()
        except RuntimeError as error:
            failed = f"rank {self.rank} of {self.world_size} cannot reach the store: {first_line(error)}"
        if not failed:
            return True
        self._seen = self._seen or time.monotonic()
        if time.monotonic() - self._seen < _GRACE / 2:
            return True
        if self._error is None:
            self._error = _failure(failed)
            with contextlib.suppress(RuntimeError):
                self._store_of_watch.set(f"{self._key}/failed/{self.rank}", failed)
        if not self._stuck():
            return True
        for group in self._groups:
            # Gloo cannot; it ends when the failed rank closes its connections.
            with contextlib.suppress(RuntimeError):
                group.abort()
        return False

    def _first_failure(self, store: Any) -> str:
        """Return what the first failed rank said, "" if none has failed."""
        key = f"{self._key}/failed"
        return str(store.get(key).decode()) if store.check([key]) else ""

    def _find_silent(self) -> str:
        """Return which rank gave no sign of life for long, "" for none."""
        longest = min(_SILENT, max(self._timeout, _LEAST_SILENT))
        for rank in range(self.world_size):
            key, now = f"{self._key}/alive/{rank}", time.monotonic()
            if not self._store_of_watch.check([key]):
                continue
            sign = self._store_of_watch.get(key)
            last, since = self._signs.get(rank, (b"", now))
            self._signs[rank] = (sign, now) if sign != last else (last, since)
            if sign == last and now - since > longest:
                text = f"rank {rank} of {self.world_size} ended, or gave no sign of life for {longest:g} s"
                return str(self._store_of_watch.compare_set(f"{self._key}/failed", "", text).decode())
        return ""

    def _await_ready(self) -> None:
        with reaching_the_store(self._group):
            self._store.set(f"{self._key}/ready/{self.rank}", "")
            end = time.monotonic() + self._timeout
            for rank in range(self.world_size):
                while not self._arrived(f"{self._key}/ready/{rank}"):
                    self._raise_failure()
                    if time.monotonic() > end:
                        late = f"rank {rank} of {self.world_size} is not ready"
                        late += f" {self._timeout:g} s after rank {self.rank}"
                        self._store.compare_set(f"{self._key}/failed", "", late)
                        fix = "raise group_timeout, or look at that rank's output"
                        raise RankError(late, "all ranks in this time", fix)
            # A rank may have given up waiting for this one.
            self._raise_failure()

    def _raise_failure(self) -> None:
        if failed := self._first_failure(self._store):
            raise _failure(failed)

    def check(self) -> None:
        """Raise the error of an earlier failure: ranks are in different steps since."""
        if self._error is not None:
            raise self._error

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks."""
        with reaching_the_store(self._group):
            self._store.set(f"{self._key}/step/{self._count}", message)
            if self._count >= _KEPT:
                self._store.delete_key(f"{self._key}/step/{self._count - _KEPT}")
        self._count += 1

    def end(self) -> None:
        """Send an empty message from rank 0, if the others can still be reached."""
        if self.rank == 0:
            with contextlib.suppress(RankError), reaching_the_store(self._group):
                self.send(b"")
                self._store.set(f"{self._key}/ended", "")

    def receive(self) -> bytes:
        """Wait for the next message, however long that takes.

        Raises:
            RankError: another rank failed, or the store is out of reach.
        """
        key = f"{self._key}/step/{self._count}"
        with reaching_the_store(self._group):
            while not self._arrived(key):
                self._raise_failure()
            self._count += 1
            message: bytes = self._store.get(key)
            return message

    def _arrived(self, key: str) -> bool:
        try:
            self._store.wait([key], _LOOK)
        except RuntimeError:
            # A store out of reach raises again.
            return bool(self._store.check([key]))
        return True

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast a tensor from rank 0, in place."""
        from torch import distributed

        distributed.broadcast(tensor, src=self._source, group=self._group)

    def report(self, error: BaseException) -> RankError:
        """Report that this rank failed in a step, and return an error that names the first rank that failed.

        Ranks are in different steps then, so nothing more can be sent.
        """
        if self._error is None:
            own = f"rank {self.rank} of {self.world_size} failed with {type(error).__name__}: {first_line(error)}"
            try:
                with reaching_the_store(self._group):
                    self._error = self._write(own, error)
            except RankError as unreachable:
                self._error = RankError(unreachable.got, unreachable.allowed, f"{own}; {unreachable.fix}")
        return self._error

    def _write(self, own: str, error: BaseException) -> RankError:
        self._store.set(f"{self._key}/failed/{self.rank}", own)
        if isinstance(error, RankError):
            return error
        first = self._store.compare_set(f"{self._key}/failed", "", own).decode()
        silent, end = self._silent(), time.monotonic() + _GRACE
        while silent and time.monotonic() < end:
            time.sleep(0.05)
            silent = self._silent()
        if silent and first == own:
            return _failure(f"rank {', '.join(map(str, silent))} of {self.world_size} ended in a step, or hangs; {own}")
        return _failure(first)

    def _silent(self) -> list[int]:
        ranks = range(self.world_size)
        return [rank for rank in ranks if not self._store.check([f"{self._key}/failed/{rank}"])]


def _watch(reference: weakref.ref[Leader], over: threading.Event) -> None:
    """Look for failures until the leader is gone."""
    while (leader := reference()) is not None and leader.look():
        del leader
        if over.wait(_LOOK.total_seconds()):
            return


def _end_watch(thread: threading.Thread, over: threading.Event) -> None:
    over.set()
    if thread is not threading.current_thread():
        # A store that is out of reach may keep it longer.
        thread.join(_GRACE)


def _never() -> bool:
    return False


def _always() -> bool:
    return True


def _failure(got: str) -> RankError:
    return RankError(
        got, "steps that every rank of the group can run", "start all ranks again; that rank's output says more"
    )
