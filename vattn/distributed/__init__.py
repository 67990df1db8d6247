"""Decode context parallelism: the KV cache of one layer is sharded by token over the ranks of a process group.

`vattn.config.dcp` maps tokens to ranks, `group` holds the ranks, `combine` combines their results.
"""

from vattn.config.dcp import DCPShard
from vattn.distributed.group import COMBINES, ContextParallel

__all__ = ["COMBINES", "ContextParallel", "DCPShard"]
