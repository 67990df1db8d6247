"""Switch the passes on: `enable()`, `backend` or `options()`. All give Inductor the same pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from vattn.config.typed import typed
from vattn.errors import ConfigError, FusionError, UnknownOptionError
from vattn.ops.fusion_notes import set_strict
from vattn.quantization.formats import OUTPUT_FORMATS

SLOT = "post_grad_custom_pre_pass"
_OPTIONS = ("strict", "output_formats", "rope")


def _inner(current: Any) -> tuple[Callable[..., None], ...]:
    """Return the passes in a slot, without vattn's, to run before vattn's.

    Raises:
        ConfigError: something in the slot is not a pass.
    """
    from vattn.passes.pipeline import FusionPass

    entries = () if current is None else tuple(current) if isinstance(current, (list, tuple)) else (current,)
    found: list[Callable[..., None]] = []
    for entry in entries:
        if isinstance(entry, FusionPass):
            found.extend(entry.inner)
        elif callable(entry):
            found.append(entry)
        else:
            raise ConfigError(
                f"Inductor's {SLOT} holds {entry!r}",
                "None, a pass (callable with a graph), or a list of passes",
                f"set torch._inductor.config.{SLOT} = None",
            )
    return tuple(found)


def _new_pass(
    current: Any,
    strict: bool = False,
    output_formats: Sequence[str] | None = None,
    rope: str = "auto",
    *,
    for_all: bool = False,
) -> Any:
    from vattn.passes.pipeline import FusionPass
    from vattn.passes.rope_kv_cache.find import check_choice

    names = OUTPUT_FORMATS if output_formats is None else output_formats
    if isinstance(names, str) or not isinstance(names, Collection) or not all(map(OUTPUT_FORMATS.__contains__, names)):
        raise ConfigError(
            f"output_formats={output_formats!r}", f"a sequence of {', '.join(OUTPUT_FORMATS)}", "check the spelling"
        )
    if not isinstance(strict, bool):
        raise ConfigError(f"strict={strict!r}", "True or False", "strict=True raises on what is not fused")
    return FusionPass(strict, tuple(names), _inner(current), check_choice(rope), for_all)


def enable(
    *, strict: bool = False, output_formats: Sequence[str] | None = None, rope: str = "auto"
) -> AbstractContextManager[object]:
    """Switch the passes on for everything that this thread compiles from now on, with any `mode` of `torch.compile`.

    A pass that is already in Inductor's configuration keeps running, before vattn's. Other threads have their own
    configuration: call `enable()` there, or compile with `backend=vattn.backend`.

    Args:
        strict: raise `vattn.errors.FusionError` when an attention node is not fused, or when attention that this thread
            compiles runs without the passes having seen it.
        output_formats: output formats that may be used; default all.
        rope: whether RoPE before a layer, the query's quantisation and the cache write become one op: `"auto"` where
            it pays on the device, `"always"` or `"never"`. With `"always"`, `strict` requires it.

    Returns:
        A context manager; use it to switch the passes off again at the end of a block.

    Raises:
        ConfigError: an unknown format or choice, or something in Inductor's configuration that is not a pass.

    Example:
        >>> import vattn
        >>> with vattn.enable(strict=True):
        ...     pass  # compile and call the model here
    """
    from torch._inductor import config

    current = getattr(config, SLOT)
    new = _new_pass(current, strict, output_formats, rope, for_all=True)
    new.replaced = getattr(current, "replaced", ()) or (current,)
    setattr(config, SLOT, new)
    restore = ExitStack()
    restore.callback(setattr, config, SLOT, current)
    restore.callback(set_strict, set_strict(strict))
    return restore


def enabled() -> bool:
    """Return whether `enable()` has put the passes into Inductor's configuration."""
    from torch._inductor import config

    from vattn.passes.pipeline import FusionPass

    return isinstance(getattr(config, SLOT), FusionPass)


def disable() -> None:
    """Undo every `enable()` of this thread: Inductor's slot holds what it held before the first one.

    A pass that others have put into the slot since stays there. Compiled code stays as it is.
    """
    from torch._inductor import config

    set_strict(False)
    for before in getattr(getattr(config, SLOT), "replaced", ()):
        setattr(config, SLOT, before)


@typed
def options(
    base: Any = None,
    *,
    mode: str | None = None,
    strict: bool = False,
    output_formats: Sequence[str] | None = None,
    rope: str = "auto",
) -> dict[str, Any]:
    """Return options for `torch.compile(model, options=...)` with the passes in them.

    Args:
        base: a dict of your own Inductor options; a pass among them keeps running.
        mode: a mode of `torch.compile`, which refuses `mode` and `options` together.
        strict: raise `vattn.errors.FusionError` when a graph has no attention node, or one that is not fused.
        output_formats, rope: as in `enable`.

    Raises:
        ConfigError: an unknown mode or format, options that are not a dict, or something in the slot of the pass that
            is not a pass.

    Example:
        >>> import torch, vattn
        >>> double = torch.compile(lambda x: x * 2, options=vattn.options({"max_autotune": False}))
    """
    from torch._inductor import config

    if base is not None and not isinstance(base, Mapping):
        raise ConfigError(f"options {base!r}", "a dict of Inductor's options", "name a mode as mode=...")
    merged = {**_mode_options(mode), **(base or {})}
    merged[SLOT] = _new_pass(merged.get(SLOT, getattr(config, SLOT)), strict, output_formats, rope)
    return merged


def _mode_options(mode: str | None) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    check_mode(mode)
    return {} if mode in (None, "default") else dict(list_mode_options(mode))


def check_mode(mode: str | None) -> None:
    """Refuse a mode that `torch.compile` does not have."""
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode not in (None, "default") and mode not in known:
        raise ConfigError(f"mode={mode!r}", ", ".join(known), "choose one of these names")


def check_inductor_options(names: Iterable[str], also: str = "") -> None:
    """Refuse names that are not options of Inductor; `also` is what else is allowed, for the text."""
    from torch._inductor import config

    known = config.get_config_copy()
    for name in names:
        if str(name).replace("-", "_") not in known:
            raise UnknownOptionError(f"option {name!r}", f"{also}Inductor's", "check the spelling")


def backend(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile a graph with Inductor and the passes: `torch.compile(model, backend=vattn.backend)`.

    `options` of `torch.compile` may hold `"vattn.strict"`, `"vattn.output_formats"` and `"vattn.rope"` besides
    Inductor's own.

    Raises:
        ConfigError: an unknown mode or format.
        UnknownOptionError: an unknown option.
        FusionError: `"vattn.strict"`, and the graph has no attention node, or one that is not fused.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.exc import InductorError

    given = dict(options or {})
    ours = {name: given.pop(f"vattn.{name}") for name in _OPTIONS if f"vattn.{name}" in given}
    check_inductor_options(given, also=", ".join(f"vattn.{option}" for option in _OPTIONS) + " and ")
    given = {name.replace("-", "_"): value for name, value in given.items()}
    merged = {**_mode_options(mode), **given}
    merged[SLOT] = _new_pass(merged.get(SLOT, getattr(config, SLOT)), **ours)
    try:
        return compile_fx(graph, inputs, config_patches=merged)  # type: ignore[arg-type]
    except InductorError as error:  # Without its cache of graphs, Inductor wraps every error.
        if isinstance(error.inner_exception, FusionError):
            raise error.inner_exception from None
        raise
