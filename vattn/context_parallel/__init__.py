"""Decode context parallelism: the KV cache of one layer striped over the ranks of a process group.

`vattn.context_parallel.stripe` says which token lies where, `group` who takes part, `combine` how results meet.
"""

from vattn.context_parallel.group import COMBINES, ContextParallel
from vattn.context_parallel.stripe import Stripe

__all__ = ["COMBINES", "ContextParallel", "Stripe"]
