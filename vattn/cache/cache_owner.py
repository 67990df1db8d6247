"""Whose a paged cache is: of those that keep tokens of their own in it, the newest alone may go on."""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor

_OWNERS: WeakValueDictionary[int, object] = WeakValueDictionary()
"""By where a storage lies. Who is gone owns nothing, and nobody before it does again."""


def take_cache(storage: Tensor, owner: object) -> None:
    """Make a storage an object's, which will write to blocks of its choice; whoever had it has it no more."""
    _OWNERS[storage.data_ptr()] = owner


def owns_cache(storage: Tensor, owner: object) -> bool:
    """Return whether nobody has taken a storage since an object did."""
    return _OWNERS.get(storage.data_ptr()) is owner
