"""One class per kind of mistake.

Every message says what was got, what is allowed and what to do. Each class also derives from the built-in exception
that a Python user expects (`ValueError` for values, `TypeError` for dtypes and unknown names), so code that catches the
built-in keeps working.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


class VattnError(Exception):
    """Base of every error that vattn raises.

    Args:
        got: what was requested or passed, with its values.
        allowed: what is accepted.
        fix: one thing to do next.
    """

    # Exception keeps the arguments and __str__ makes the text: Dynamo can trace that, and its report of an error in
    # compiled code shows the arguments.
    if TYPE_CHECKING:

        def __init__(self, got: str, allowed: str = "", fix: str = "", /) -> None: ...

    @property
    def got(self) -> str:
        """What was requested or passed."""
        return str(self.args[0]) if self.args else ""

    @property
    def allowed(self) -> str:
        """What is accepted; may be empty."""
        return str(self.args[1]) if len(self.args) > 1 else ""

    @property
    def fix(self) -> str:
        """One thing to do next; may be empty."""
        return str(self.args[2]) if len(self.args) > 2 else ""

    def __str__(self) -> str:
        text = self.got if self.got.endswith("\n") else self.got.rstrip(".") + ". "
        for title, part in (("Allowed", self.allowed), ("Try", self.fix)):
            if part:
                text += f"{title}: {part.rstrip('.')}. "
        # Messages name a layer by its prefix, which is "" by default.
        return text.rstrip().replace("layer ''", "layer (no prefix given)")


class ConfigError(VattnError, ValueError):
    """Values for a layer, cache or builder contradict each other or are out of range."""


class UnknownOptionError(VattnError, TypeError):
    """vattn does not know an option name; it never ignores one."""


class ArgumentError(ConfigError, TypeError):
    """An argument has another type than the function takes."""


class MissingAttributeError(ConfigError, AttributeError):
    """An object has no such attribute; `hasattr` and `getattr` with a default take it for a missing one."""


class UnsupportedRequestError(VattnError, NotImplementedError):
    """No backend, or not the requested one, can run the request. The text has the nearest backend's reasons."""


class ShapeError(VattnError, ValueError):
    """A tensor has the wrong shape."""


class DtypeError(VattnError, TypeError):
    """A tensor has the wrong dtype."""


class DeviceError(VattnError, ValueError):
    """Tensors are on different devices, or on one that cannot run the request."""


class StrideError(VattnError, ValueError):
    """A tensor's strides or alignment cannot be used as they are."""


class ScaleError(VattnError, ValueError):
    """Quantisation scales are missing, of the wrong shape or not positive."""


class CacheNotBoundError(VattnError, RuntimeError):
    """A layer ran with metadata before a KV cache was bound to it."""


class CacheError(VattnError, ValueError):
    """A KV cache of the wrong size, layout, format or device was bound, swapped or copied."""


class OutOfBlocksError(VattnError, RuntimeError):
    """The block pool has fewer free blocks than requested."""


class BlockError(VattnError, ValueError):
    """A block id is out of range, not allocated or freed twice."""


class MetadataError(VattnError, ValueError):
    """Lengths, offsets, block tables or slots of one step contradict each other or the builder's capacity."""


class GraphContractError(VattnError, RuntimeError):
    """A step contradicts the fixed sizes of a captured CUDA graph."""


class RecompilationError(VattnError, RuntimeError):
    """Compiled code got more different constants than `torch.compile` compiles one function for."""


class RankError(VattnError, RuntimeError):
    """Ranks of a process group disagree, or one does not answer."""


class GradientError(VattnError, RuntimeError):
    """An op without a backward was called with gradients enabled on an input that requires them."""


class MissingPackageError(VattnError, ImportError):
    """An optional package that the request needs is not installed or too old."""


class TransferError(VattnError, RuntimeError):
    """A connector could not load or save blocks. Only that request fails."""


class RequestError(VattnError, ValueError):
    """A generator cannot serve a request. Only that request fails."""


class QueueFullError(VattnError, RuntimeError):
    """A generator's queue has no room for another request now."""


class SignatureError(VattnError, TypeError):
    """A decorated function lacks a parameter that the decorator needs."""


class FusionError(VattnError, RuntimeError):
    """Strict fusion was requested and an attention node is not fused. The text says which, why and where."""
