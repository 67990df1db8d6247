"""`ModelIdentity`: notice whatever changes what a model computes, and name a model by its content."""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import os
import pathlib
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from vattn.cache.layout import CACHE_BUFFERS

_COMPILED = ("_compiled_call_impl", "_is_torch_compile")
"""Attributes that a module has once it is compiled, which changes no output."""

_BOOKKEEPING = frozenset(vars(nn.Module())) | {*_COMPILED, "_is_hf_initialized", "generation_config"}
"""Attributes of modules that are read by themselves, or decide no output."""

_WRITTEN = {*CACHE_BUFFERS, "index_cache", "kv_transfer_token", "clip_counts", "topk_indices", "scales_ready"}
"""Buffers of vattn's layers that steps write."""

_CALCULATED = {"k_scale", "v_scale", "q_scale"}
"""Scales: a layer that calculates them writes them in every step."""

_VALUES = (
    type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, pathlib.PurePath,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
"""What `repr` tells apart, in other processes too."""

_COPIED = (dict, list, set, deque)
_LONGEST = 10_000
"""Entries of a container beyond which it is not looked into: vocabularies are long, switches are not."""

_LIBRARIES = {"torch", "vattn", "transformers", "accelerate", "peft"}
"""Their functions are not looked into: no global of theirs switches one model."""

_OPAQUE = {"torch", "vattn", "numpy", *sys.stdlib_module_names} - {"types", "argparse"}
"""Objects of their classes are not looked into."""

_PLAIN = {Tensor, nn.Parameter}
_VERSION_OF, _TRAINING_OF = attrgetter("_version"), attrgetter("training")
_PROCESS = os.urandom(16).hex()

_CHUNK = 2**25
"""Bytes of a tensor that are hashed at once; a multiple of 8."""

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Multipliers of a mixer of 64-bit words."""


class ModelIdentity:
    """Notice changes of weights, buffers, hooks, submodules, classes and attributes anywhere in a model.

    Adapters are made of these: whatever switches, adds, merges or disables them is noticed, from any library. Followed
    is all that modules and hooks refer to: lists, dicts, objects, closures, and the globals that they name. Objects of
    torch, vattn and the standard library count as one value each. Not noticed: values written through `.data` or in
    inference mode, and what a model reads from files or clocks.

    Args:
        model: is kept alive.

    Attributes:
        changes: how many `look` found.
        moves: how many of them were more than new values in the same tensors.
        changed: where the last one was; "" before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.changes, self.moves, self.changed = model, 0, 0, ""
        self._save()

    def look(self) -> int:
        """Count a change since the last look, and return `changes`. Does not wait for the device."""
        tensors = self._unmoved()
        if tensors is None or self._versions_of(tensors) != self._versions:
            self.changes += 1
            self.moves += tensors is None
            self.changed = self._where()
            self._save()
        return self.changes

    def digest(self) -> str:
        """Return a hash of the model: equal for equal weights, hooks and attributes, in any process. Reads all tensors.

        What has no name that other processes know makes it a digest of this process alone.
        """
        total = hashlib.sha256()
        for path, value, children in _reachable(self.model):
            leaves = [f"{name}={_text(child)}" for name, child in children if not _followed(child)]
            total.update(f"{path} {_text(value)} {leaves}\n".encode(errors="surrogatepass"))
        return total.hexdigest()

    def _save(self) -> None:
        """Remember the present state."""
        found = list(_reachable(self.model))
        modules = [value for _, value, _ in found if isinstance(value, nn.Module)]
        self._modules, self._classes = modules, {cast(Any, type(module)) for module in modules}
        # vattn's layers note more about themselves while they run.
        self._attributes = [vars(module) for module in modules if not _of_vattn(module)]
        self._tensor_dicts = [each for module in modules for each in (module._parameters, module._buffers)]
        copied = [(path, value) for path, value, _ in found if isinstance(value, _COPIED)]
        reads = [(path, read) for path, value, _ in found if (read := _read(value)) is not None]
        self._paths = [path for path, _ in (*copied, *reads)]
        self._containers, self._reads = [value for _, value in copied], [read for _, read in reads]
        # Views of dicts, which show what the dicts hold later too.
        self._views = [view for _, value, _ in found for view in _views(value)]
        self._holders = [holder for _, value, children in found for holder in _holders(value, children)]
        copies = [container.copy() for container in self._containers]
        self._before, self._before_kinds = [*copies, *self._values()], self._kinds()
        self._lengths, self._before_sizes = [*map(len, self._attributes)], self._sizes()
        tensors = self._tensors()
        self._refs = [*map(weakref.ref, tensors)]
        self._plain = all(map(_is_plain, tensors))
        self._addresses, self._versions = self._addresses_of(tensors), self._versions_of(tensors)

    def _values(self) -> list[Any]:
        return [read(owner) for read, owner in self._reads]

    def _kinds(self) -> list[Any]:
        forwards = [each.forward for each in self._classes]
        modules = self._modules
        return [*map(_TRAINING_OF, modules), *forwards, *map(type, modules), *map(len, self._tensor_dicts)]

    def _sizes(self) -> list[int]:
        """Return how many attributes each module has, but for those of compiling it."""
        first, second = _COMPILED
        return [len(each) - (first in each) - (second in each) for each in self._attributes]

    def _tensors(self) -> list[Tensor]:
        held = chain.from_iterable(read(owner) for read, owner in self._holders)
        return [tensor for tensor in chain(chain.from_iterable(self._views), held) if tensor is not None]

    def _addresses_of(self, tensors: list[Tensor]) -> list[int]:
        # A function of Python for each tensor takes longer than all else.
        return [*map(Tensor.data_ptr if self._plain else _address, tensors)]

    def _versions_of(self, tensors: list[Tensor]) -> list[int]:
        return [*map(_VERSION_OF if self._plain else _version, tensors)]

    def _unmoved(self) -> list[Tensor] | None:
        """Return all tensors if nothing but their values may have changed."""
        try:
            if [*self._containers, *self._values()] != self._before or self._kinds() != self._before_kinds:
                return None
            if [*map(len, self._attributes)] != self._lengths and self._sizes() != self._before_sizes:
                return None
            tensors = self._tensors()
            same = len(tensors) == len(self._refs) and all(map(is_, tensors, [ref() for ref in self._refs]))
            return tensors if same and self._addresses_of(tensors) == self._addresses else None
        except Exception:
            # What cannot be compared, or is not there any more.
            return None

    def _where(self) -> str:
        """Return the first place that is not as before."""
        lives = [*((_itself, container) for container in self._containers), *self._reads]
        for path, before, (read, owner) in zip(self._paths, self._before, lives, strict=True):
            try:
                if read(owner) != before:
                    return path
            except Exception:
                return path
        return "weights, buffers or submodules"


def renewals(model: Any) -> list[Callable[[], None]]:
    """Return what brings up to date what parts of a model derive from its weights; to call before each step."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [cast(Any, module).renew for module in modules if hasattr(type(module), "renew")]


def _reachable(model: nn.Module) -> Iterator[tuple[str, Any, list[tuple[str, Any]]]]:
    """Yield what a model refers to and what may change, each once: where it is, itself, and what it refers to."""
    queue: deque[tuple[str, Any]] = deque([("model", model)])
    queue += [(name, getattr(all_modules, name)) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")]
    seen: dict[int, Any] = {}
    while queue:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        children = _children(value)
        yield path, value, children
        queue.extend((f"{path}.{name}" if name else path, child) for name, child in children if _followed(child))


def _followed(value: Any) -> bool:
    """Return whether a value is looked into."""
    if isinstance(value, (*_VALUES, Tensor, type, types.ModuleType, weakref.ref)):
        return False
    if isinstance(value, (*_COPIED, tuple, frozenset)):
        return len(value) <= _LONGEST
    if isinstance(value, types.FunctionType):
        return _root(value.__globals__.get("__name__")) not in _LIBRARIES
    if isinstance(value, (nn.Module, functools.partial, types.MethodType, types.CellType)):
        return True
    return _root(type(value).__module__) not in _OPAQUE and (hasattr(value, "__dict__") or bool(_slots(value)))


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return what an object refers to, by name."""
    if isinstance(value, nn.Module):
        names = ["_modules", "_forward_hooks", "_forward_pre_hooks", *_own_names(value)]
        tensors = [*value._parameters.items(), *((name, value._buffers[name]) for name in _buffers(value))]
        return [*((name.removeprefix("_modules"), vars(value)[name]) for name in names), *tensors]
    if isinstance(value, dict):
        return [(name if isinstance(name, str) else _text(name), child) for name, child in value.items()]
    if isinstance(value, (set, frozenset)):
        return [("", child) for child in sorted(value, key=_text)]
    if isinstance(value, (list, tuple, deque)):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, types.CellType):
        try:
            return [("", value.cell_contents)]
        except ValueError:
            return []
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, functools.partial):
        return [("function", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        used = [(name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__]
        return [*cells, *used, ("defaults", value.__defaults__), ("defaults", value.__kwdefaults__)]
    return [("", getattr(value, "__dict__", None)), *((name, getattr(value, name, None)) for name in _slots(value))]


def _read(value: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return what reads the values of an object that may change and that no container holds."""
    if isinstance(value, nn.Module):
        names = _own_names(value)
        # A tuple, whatever the names are: tuples compare their items by identity first.
        return (itemgetter(names[0], *names), vars(value)) if names else None
    holds = isinstance(value, (types.CellType, types.FunctionType)) or bool(_slots(value))
    return (_child_values, value) if holds else None


def _holders(value: Any, children: list[tuple[str, Any]]) -> list[tuple[Callable[[Any], Any], Any]]:
    """Return what reads the tensors that an object refers to."""
    if not isinstance(value, nn.Module):
        return [(_child_tensors, value)] if any(isinstance(child, Tensor) for _, child in children) else []
    buffers, own = _buffers(value), [name for name in _own_names(value) if isinstance(vars(value)[name], Tensor)]
    some = buffers and len(buffers) < len(value._buffers)
    parts = ((buffers if some else (), value._buffers), (own, vars(value)))
    return [(itemgetter(names[0], *names), owner) for names, owner in parts if names]


def _views(value: Any) -> list[Any]:
    """Return views of the dicts of tensors of a module, of which all count."""
    if not isinstance(value, nn.Module):
        return []
    whole = len(_buffers(value)) == len(value._buffers)
    return [each.values() for each in (value._parameters, value._buffers if whole else {}) if each]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_inference()


def _itself(value: Any) -> Any:
    return value


def _child_values(value: Any) -> list[Any]:
    return [child for _, child in _children(value)]


def _child_tensors(value: Any) -> list[Tensor]:
    return [child for _, child in _children(value) if isinstance(child, Tensor)]


def _own_names(module: nn.Module) -> list[str]:
    """Return the attributes of a module that may decide its output."""
    kind = type(module)
    # Sizes of torch's own modules; private ones of vattn's layers hold what follows from the others.
    constants = getattr(kind, "__constants__", ()) if _root(kind.__module__) == "torch" else ()
    public = _of_vattn(module)
    names = [name for name in vars(module) if name not in _BOOKKEEPING and name not in constants]
    return [name for name in names if not (public and name.startswith("_"))]


def _buffers(module: Any) -> list[str]:
    """Return the buffers of a module that steps do not write."""
    if not _of_vattn(module):
        return list(module._buffers)
    written = _WRITTEN | (_CALCULATED if getattr(module, "calculate_kv_scales", False) else set())
    if getattr(module, "kv_sharing_target_layer_name", None) is not None:
        # Those of the other layer, which may calculate them.
        written = written | {"k_scale", "v_scale"}
    return [name for name in module._buffers if name not in written]


def _of_vattn(module: nn.Module) -> bool:
    return any(_root(kind.__module__) == "vattn" for kind in type(module).__mro__)


def _slots(value: Any) -> list[str]:
    if isinstance(value, (*_COPIED, tuple, frozenset, functools.partial, types.MethodType)):
        return []
    listed = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    return [name for names in listed for name in ([names] if isinstance(names, str) else names) if name[:2] != "__"]


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Sparse tensors, and classes of tensors that wrap others.
        return 0


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _text(value: Any) -> str:
    """Return what tells a value from others in every process, without what is looked into."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Tensor):
        return _tensor_text(value)
    if isinstance(value, _VALUES):
        return f"{kind} {value!r}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        code = getattr(value, "__code__", None)
        body = "" if code is None else f"{code.co_code.hex()} {[c for c in code.co_consts if isinstance(c, _VALUES)]}"
        return f"{value.__module__}.{value.__qualname__} {body}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, weakref.ref) or _followed(value) or _root(type(value).__module__) in ("torch", "vattn"):
        return kind
    shown = repr(value) if _root(type(value).__module__) in _OPAQUE - {"numpy"} else " at 0x"
    return f"{kind} {id(value)} of {_PROCESS}" if " at 0x" in shown else f"{kind} {shown}"


def _tensor_text(tensor: Tensor) -> str:
    """Return the dtype, shape and a hash of the values of a tensor."""
    kind, data = f"{tensor.dtype} {tuple(tensor.shape)}", tensor.detach()
    if type(data) is not Tensor or data.layout != torch.strided or data.is_meta:
        return f"{kind} {id(tensor)} of {_PROCESS}"
    data = data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        memory = (ctypes.c_char * data.shape[0]).from_address(data.data_ptr()) if data.shape[0] else b""
        return f"{kind} {hashlib.sha256(memory).hexdigest()}"
    return f"{kind} {device_hash(data)}"


def device_hash(data: Tensor) -> int:
    """Return a 64-bit hash of uint8 `[n]`, computed where it is: a sum of mixed words, each with its place."""
    total = 0
    for start in range(0, data.shape[0], _CHUNK):
        piece = data[start : start + _CHUNK]
        words = nn.functional.pad(piece, (0, -piece.shape[0] % 8)).view(torch.int64)
        words = words + torch.arange(start, start + words.shape[0] * 8, 8, device=data.device) * _ODD[0]
        for shift, odd in zip((32, 29, 32), _ODD, strict=True):
            words = (words ^ (words >> shift)) * odd
        total += int((words ^ (words >> 31)).sum())
    return total % 2**64
