"""`Turn`: one step of a generator at a time, and what its requests were before it, for a step that was interrupted.

Ctrl-C can come between any two operations of the host: while a request moves from one list to another, or while a block
is counted. What such a step has left is not looked at: its requests become what they were, and wait with all their
tokens to be computed again.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from operator import attrgetter
from threading import current_thread
from types import CodeType, FrameType
from typing import Any
from weakref import ref

from vattn.generation.detokenizer import TextStream
from vattn.generation.request import Request
from vattn.generation.scheduler import Scheduler


class _Hold:
    """Which thread has a turn, and whether for a moment.

    Attributes:
        heirs: who goes on where the thread has died with it: nobody, or one.
    """

    __slots__ = ("brief", "heirs", "thread")

    def __init__(self, brief: bool) -> None:
        self.thread, self.brief = current_thread(), brief
        self.heirs: dict[str, _Hold] = {}

    def is_dead(self) -> bool:
        """Whether the thread can give nothing back."""
        return not self.thread.is_alive() or self.thread.ident not in sys._current_frames()


class Turn:
    """The right to change the requests of a scheduler.

    Args:
        owner: whose steps they are.
        holding: the code of its methods that run while it has the turn.
        scheduler: of the requests.
        tokenizer: of their texts, `None` without texts.

    Attributes:
        torn: whether a step runs, or was interrupted.
        started_over: whether steps on their way are to be forgotten; whoever does so sets it to False.
    """

    def __init__(self, owner: Any, holding: tuple[CodeType, ...], scheduler: Scheduler, tokenizer: Any) -> None:
        self._owner, self._holding, self._scheduler, self._tokenizer = ref(owner), holding, scheduler, tokenizer
        # A dict, since a lock that was taken may not be noted as such when the interruption comes.
        self._holder: dict[str, _Hold] = {}
        self._known: list[Request] = []
        self._lengths: list[int] = []
        self.torn = self.started_over = False

    def take(self, brief: bool) -> bool:
        """Take the turn; return whether that worked: not inside of a step, nor while another thread runs one.

        Args:
            brief: no step is run. Another thread waits for such a turn, for a second at most: it may never end.

        A thread that died in a step has left it like an interruption: whoever comes next starts over.
        """
        mine, last = _Hold(brief), time.monotonic() + 1
        while (held := self._holder.setdefault("turn", mine)) is not mine:
            # Of all that come behind a dead thread, one inherits from it; and another one, should that die in turn.
            while held is not mine and held.is_dead():
                held = held.heirs.setdefault("turn", mine)
            if held.thread is mine.thread:
                # Inherited, or ours by a call below in the stack, or by one whose end was interrupted.
                if held is not mine and self._inside():
                    return False
                self._holder["turn"] = mine
            elif not held.brief or time.monotonic() > last:
                return False
            else:
                time.sleep(0)
        if self.torn:
            self._start_over()
        scheduler = self._scheduler
        # Those that have run and wait again are the first that wait.
        self._known = [*scheduler.running, *islice(scheduler.waiting, scheduler.max_num_reqs)]
        self._lengths = list(map(len, map(_OUTPUT, self._known)))
        self.torn = True
        return True

    def give(self, whole: bool) -> None:
        """Give the turn back; `whole` says that nothing was left half done."""
        self.torn = not whole
        self._holder.pop("turn", None)

    def _inside(self) -> bool:
        """Whether the owner's method that takes the turn was called in a step, or while requests are cancelled.

        What a processor calls is, and what a signal handler does, whatever it interrupts.
        """
        owner = self._owner()
        frame: FrameType | None = sys._getframe(4)
        while frame is not None:
            if frame.f_code in self._holding and frame.f_locals.get("self") is owner:
                return True
            frame = frame.f_back
        return False

    def _start_over(self) -> None:
        """Let all requests that have not ended wait as they were before the step that was interrupted."""
        self.started_over = True
        for request, length in zip(self._known, self._lengths, strict=True):
            if not request.done:
                del request.output[length:]
        for request in self._scheduler.start_over(self._known):
            if self._tokenizer is not None:
                request.stream = TextStream(self._tokenizer, request.sampling.stop_strings)
                if request.output:
                    request.stream.push(request.output)
                request.text = request.stream.text


_OUTPUT = attrgetter("output")
