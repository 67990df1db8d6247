"""One class per kind of mistake.

Every message says what came, what is allowed and what to do about it. Each class also derives from the built-in
exception that a Python user would expect (`ValueError` for values, `TypeError` for dtypes and unknown names, ...),
so that code which catches the built-in keeps working.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


class VattnError(Exception):
    """Base of every error that vattn raises.

    Args:
        got: what was asked for or what arrived, with its values.
        allowed: what would have been accepted.
        fix: one thing to do next.
    """

    # The arguments are kept by Exception, and the text is made in __str__: that way Dynamo can trace an error, and
    # its report of one that is raised in compiled code shows them.
    if TYPE_CHECKING:

        def __init__(self, got: str, allowed: str = "", fix: str = "", /) -> None: ...

    @property
    def got(self) -> str:
        """What was asked for or what arrived."""
        return str(self.args[0]) if self.args else ""

    @property
    def allowed(self) -> str:
        """What would have been accepted; may be empty."""
        return str(self.args[1]) if len(self.args) > 1 else ""

    @property
    def fix(self) -> str:
        """One thing to do next; may be empty."""
        return str(self.args[2]) if len(self.args) > 2 else ""

    def __str__(self) -> str:
        # Layers are named by their prefix, which is "" where nobody gave one.
        text = self._text()
        return text.replace("layer ''", "layer (no prefix given)")

    def _text(self) -> str:
        text = self.got if self.got.endswith("\n") else self.got.rstrip(".") + ". "
        for title, part in (("Allowed", self.allowed), ("Try", self.fix)):
            if part:
                text += f"{title}: {part.rstrip('.')}. "
        return text.rstrip()


class ConfigError(VattnError, ValueError):
    """A layer, cache or builder was described by values that contradict each other or are out of range."""


class UnknownOptionError(VattnError, TypeError):
    """An option name that vattn does not know; nothing is ever ignored."""


class UnsupportedRequestError(VattnError, NotImplementedError):
    """No backend, or not the one that was asked for, can run the request. The text lists each backend's reasons."""


class ShapeError(VattnError, ValueError):
    """A tensor has the wrong shape."""


class DtypeError(VattnError, TypeError):
    """A tensor has the wrong dtype."""


class DeviceError(VattnError, ValueError):
    """Tensors live on different devices, or on one that cannot run the request."""


class StrideError(VattnError, ValueError):
    """A tensor's strides or alignment cannot be used as they are."""


class ScaleError(VattnError, ValueError):
    """Quantisation scales are missing, of the wrong shape or not positive."""


class CacheNotBoundError(VattnError, RuntimeError):
    """A layer ran with metadata before a KV cache was bound to it."""


class CacheError(VattnError, ValueError):
    """A KV cache of the wrong size, layout, format or device was bound, swapped or copied."""


class OutOfBlocksError(VattnError, RuntimeError):
    """The block pool has fewer free blocks than were asked for."""


class BlockError(VattnError, ValueError):
    """A block id that is out of range, not allocated or freed twice."""


class MetadataError(VattnError, ValueError):
    """Lengths, offsets, block tables or slots of one step contradict each other or the builder's capacity."""


class GraphContractError(VattnError, RuntimeError):
    """A step contradicts what a captured CUDA graph has baked in."""


class RecompilationError(VattnError, RuntimeError):
    """Compiled code got more different constants than `torch.compile` compiles one function for."""


class RankError(VattnError, RuntimeError):
    """Ranks of a process group that contradict each other, or one that does not come."""


class GradientError(VattnError, RuntimeError):
    """An op without a backward was called with gradients enabled on an input that requires them."""


class MissingPackageError(VattnError, ImportError):
    """An optional package that the request needs is not installed or too old."""


class TransferError(VattnError, RuntimeError):
    """Blocks could not be loaded from, or saved to, where a connector keeps them. One request fails, no other."""


class RequestError(VattnError, ValueError):
    """One request of a generator cannot be served. Only that request fails; the others go on."""


class QueueFullError(VattnError, RuntimeError):
    """A generator's queue has no room for another request now."""


class SignatureError(VattnError, TypeError):
    """A function was decorated that lacks a parameter which the decorator needs."""


class FusionError(VattnError, RuntimeError):
    """Strict fusion was asked for and an attention node is not fused. The text says which, why and where."""
