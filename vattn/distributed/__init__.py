"""Decode context parallelism: the KV cache of one layer striped over the ranks of a process group.

`vattn.config.dcp` says which token lies where, `group` who takes part, `combine` how results meet.
"""

from vattn.config.dcp import Stripe
from vattn.distributed.group import COMBINES, ContextParallel

__all__ = ["COMBINES", "ContextParallel", "Stripe"]
