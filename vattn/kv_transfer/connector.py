"""`KVConnector`: the protocol of stores for blocks outside the cache, and the content keys of blocks."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

from vattn.config.arguments import read_count
from vattn.config.typed import typed, typed_on_error
from vattn.errors import ConfigError


@typed
@dataclass(frozen=True)
class TransferRequest:
    """Blocks of one request to load or save.

    Attributes:
        request_id: the caller's name of the request.
        keys: content key of each whole block, in order (`block_keys`).
        block_ids: of each in the cache; all different, and not the null block.
    """

    request_id: str
    keys: tuple[str, ...]
    block_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = ""
        try:
            object.__setattr__(self, "keys", tuple(self.keys))
            object.__setattr__(self, "block_ids", tuple(map(operator.index, self.block_ids)))
        except TypeError:
            wrong = f"keys {self.keys!r:.40} and block ids {self.block_ids!r:.40}"
        if wrong or not all(isinstance(key, str) for key in self.keys):
            wrong = wrong or f"keys {self.keys!r:.40}, which are not strings"
        elif len(self.keys) != len(self.block_ids) or not self.keys:
            wrong = f"{len(self.keys)} keys and {len(self.block_ids)} block ids"
        elif len(set(self.block_ids)) != len(self.block_ids):
            wrong = f"a block id twice in {list(self.block_ids)}"
        elif len(set(self.keys)) != len(self.keys):
            wrong = "a key twice"
        elif min(self.block_ids) < 1:
            wrong = f"block id {min(self.block_ids)}; 0 is the null block"
        if wrong:
            raise ConfigError(
                f"transfer of request {self.request_id!r} with {wrong}",
                "one key for each block, all different, block ids from 1 on",
                "pass block_keys(tokens, block_size) and as many blocks of the request's table",
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of the transfer."""
        return len(self.keys)


Pieces: TypeAlias = Tensor | Sequence[Tensor]
"""Pages, uint8 `[blocks, page_bytes]`: one tensor, or several to concatenate."""


class KVConnector(Protocol):
    """A store of pages. A page is one block of one layer as bytes: all of its keys, then all of its values.

    `KVTransfer` calls `wait_for_layer_load`, `save_kv_layer` and `finish` from a thread of the request, in the order of
    the layers, so several requests may call at once; it calls the others from the thread that runs the model, which
    they must not block. An exception fails only the request of the call. When `finish` is called, no copy reads or
    writes the connector's memory for this request any more.
    """

    def attach(self, page_bytes: Mapping[str, int], fingerprint: str) -> None:
        """Receive the layers and the bytes of a page in each.

        Args:
            page_bytes: by layer name, in the model's order.
            fingerprint: hash of everything that gives pages their meaning: the model's weights, adapters, hooks and
                attributes, layers, formats, scales and the caller's namespace. Pages of another one must not be found.
        """

    def find(self, keys: Sequence[str]) -> int:
        """Return how many of the first keys are held, for all layers."""

    def wait_for_layer_load(self, layer_name: str, request: TransferRequest) -> Pieces:
        """Return the pages of a layer, on the host or the cache's device; they must not change until `finish`."""

    def blocks_to_save(self, request: TransferRequest) -> Sequence[int]:
        """Return the indices of a request's blocks that are not held yet; only these are saved."""

    def page_buffer(self, layer_name: str, request: TransferRequest) -> Pieces | None:
        """Return pinned host memory into which pages are copied directly, or `None`."""

    def save_kv_layer(self, layer_name: str, request: TransferRequest, pages: Tensor | None) -> None:
        """Keep the pages of a layer.

        Args:
            pages: uint8 `[blocks, page_bytes]` on the host, valid during the call only; `None`: they are in the
                result of `page_buffer`.
        """

    def finish(self, request: TransferRequest, saved: bool, error: BaseException | None) -> None:
        """End a load (`saved` is False) or a save. After an error, no block of the save may be found."""


def attached_already(connector: object) -> ConfigError:
    """Return the error of a connector that already holds the blocks of another model."""
    return ConfigError(
        f"a {type(connector).__name__} attached to another model, or to one with other weights, adapters or scales",
        "the model of the first attach",
        "make a second connector",
    )


def refuse_copy(of: object) -> NoReturn:
    """Raise for a copy or a pickle of what owns memory and transfers."""
    name = type(of).__name__
    raise ConfigError(f"a copy of a {name}", f"one {name} for its memory", f"make a new one with {name}(...)")


Salt: TypeAlias = str | bytes | int
"""What tells contents of equal tokens apart: a tenant, an image's hash, an adapter of one request."""


@typed_on_error
def block_keys(
    tokens: Sequence[int] | Tensor, block_size: int, salt: Salt = "", *, parent: str | None = None
) -> list[str]:
    """Return a content key for every whole block of a token sequence.

    A key depends on the block's tokens and on all tokens before them, so equal keys mean equal prefixes.

    Args:
        tokens: ids from the beginning of the request.
        block_size: tokens per block; a last block that is not full has no key.
        salt: everything else that the content depends on (images, a tenant) as text, bytes or an integer.
            Salts of different types differ: 1, "1" and b"1" are three.
        parent: key of the block before `tokens`, which includes the salt; default: `tokens` start the request.

    Raises:
        ConfigError: tokens that are not integers, a block size below 1, a salt of another type, a parent that is not a
            key, or both a salt and a parent.

    Example:
        >>> from vattn.kv_transfer import block_keys
        >>> [key[:8] for key in block_keys(range(40), block_size=16)]
        ['f2cdf10c', '9f9eed67']
        >>> block_keys(range(40), 16)[0] == block_keys([*range(16), 99, 98], 16)[0]
        True
        >>> first, second = block_keys(range(40), 16)
        >>> block_keys(range(16, 40), 16, parent=first) == [second]
        True
    """
    block_size = read_count("block_size", block_size, 1, "pass the block size of the cache")
    tokens = _token_ids(tokens)
    before = salt_digest(block_size, salt) if parent is None else _parent_digest(parent, salt)
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        text = ",".join(map(str, tokens[start : start + block_size]))
        before = hashlib.sha256(before + text.encode()).digest()
        keys.append(before.hex())
    return keys


def salt_digest(block_size: int, salt: Salt, name: str = "salt") -> bytes:
    """Return what the first key of a request is made from.

    Raises:
        ConfigError: a salt of another type; the text calls it `name`.
    """
    if isinstance(salt, bool) or not isinstance(salt, (str, bytes, int)):
        raise ConfigError(
            f"{name}={salt!r:.60}", "text, bytes or an integer", "hash an image or a tensor to bytes first"
        )
    # Subclasses, such as enumerations, may print themselves in another way.
    text = (
        int.__format__(salt, "#x")
        if isinstance(salt, int)
        else (str.__repr__(salt) if isinstance(salt, str) else bytes.__repr__(salt))
    )
    return hashlib.sha256(f"vattn {block_size} {text}".encode()).digest()


def _parent_digest(parent: str, salt: Salt) -> bytes:
    if not isinstance(parent, str) or re.fullmatch("[0-9a-f]{64}", parent) is None:
        raise ConfigError(f"parent={parent!r:.60}", "a key of block_keys, or None", "pass the last key")
    if salt != "":
        raise ConfigError(f"salt={salt!r:.60} with a parent", "one of them, since keys include their salt", "drop salt")
    return bytes.fromhex(parent)


def _token_ids(tokens: Sequence[int] | Tensor) -> list[int]:
    """Return token ids as ints; floats are refused, since rounding would change the content."""
    try:
        if isinstance(tokens, Tensor) and (tokens.is_meta or tokens.dtype == torch.bool):
            raise TypeError("no ids")
        values = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        if bool in set(map(type, values)):
            raise TypeError("no ids")
        return list(map(operator.index, values))
    except TypeError as error:
        raise ConfigError(f"tokens {tokens!r:.60}", "a flat sequence of ints", "pass token ids") from error
