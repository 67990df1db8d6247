"""Where the scripts beside this one find the package's timers."""

from vattn.cli.bench.timing import REPLAYS, TARGET_MS, Timer, interleave

__all__ = ["REPLAYS", "TARGET_MS", "Timer", "interleave"]
