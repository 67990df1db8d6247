"""Which step of its builder some metadata describes, and whether a later one has been written over it."""

from __future__ import annotations


class BuiltStep:
    """One step among those that a builder wrote into the same tensors; copies and parts of its metadata hold it too.

    Compiled code reads `rewritten` alone, which is `None` in every step that may run: the numbers recompile nothing.

    Attributes:
        number: which step of its builder, from 1.
        rewritten: what errors call a step over which another one was written; `None` for the newest. No numbers:
            Dynamo would take those for sizes that vary, and could not print them.
    """

    __slots__ = ("_steps", "number", "rewritten")

    def __init__(self, steps: BuiltSteps, number: int) -> None:
        self._steps, self.number = steps, number
        self.rewritten: str | None = None

    def follow(self) -> BuiltStep:
        """Return the step that is about to be written over the newest one of the same builder."""
        return self._steps.begin()


class BuiltSteps:
    """The steps of one builder, of which its tensors hold the newest alone."""

    __slots__ = ("_newest",)

    def __init__(self) -> None:
        self._newest = BuiltStep(self, 0)

    def begin(self) -> BuiltStep:
        """Return the step that is about to be written; the one before is rewritten from now on."""
        before, number = self._newest, self._newest.number + 1
        before.rewritten = f"step {before.number} of a builder, over which its step {number} has been written"
        self._newest = BuiltStep(self, number)
        return self._newest
