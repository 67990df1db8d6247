"""`compile`: `torch.compile` for models that run packed tokens through paged attention.

It marks the first dimension of every tensor argument, and of the step's metadata, as dynamic: one graph serves all
token counts and batch sizes from 2 up, and one more serves a single token. Errors of `vattn.errors` that occur while
compiling are raised as such, from torch's own.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vattn import errors
from vattn.backends import dispatch
from vattn.cache.model_identity import renewals
from vattn.config.arguments import check_switches
from vattn.errors import ConfigError, FusionError, RecompilationError, UnknownOptionError, VattnError
from vattn.metadata import forward_context as context
from vattn.metadata.attention_metadata import AttentionMetadata, mark_once
from vattn.ops import fusion_notes
from vattn.ops.schemas import keep_out_of_dynamo

Target = TypeVar("Target", bound=Callable[..., Any])


def mark_dynamic(*values: Any, num_tokens: int = 0) -> None:
    """Mark the first dimension of every tensor in nested containers and metadata; parameters are left alone.

    Args:
        *values: tensors, metadata, and lists, tuples and dicts of them.
        num_tokens: of the step, if there is one: `[1, num_tokens, ...]`, as transformers has packed tokens, varies in
            its second dimension.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.dim() and not isinstance(value, nn.Parameter):
                packed = value.dim() > 1 and value.shape[0] == 1 < num_tokens == value.shape[1]
                mark_once(value, *([0, 1] if packed else [0]))
        elif isinstance(value, AttentionMetadata):
            value.mark_dynamic()
        elif isinstance(value, (list, tuple)):
            mark_dynamic(*value, num_tokens=num_tokens)
        elif isinstance(value, dict):
            mark_dynamic(*value.values(), num_tokens=num_tokens)


def _mark_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return  # Inlined into a larger graph; the caller marks its inputs.
    # Not `current_step`: the layers refuse a thread without a step, and a call may need none.
    step = getattr(context.in_thread, "step", None)
    mark_dynamic(*args, *kwargs.values(), num_tokens=0 if step is None else step.slot_mapping.shape[0])
    if step is not None:
        step.mark_dynamic()


def compile(target: Target, *, fullgraph: bool = True, **options: Any) -> Target:
    """Compile a model or function as `torch.compile` does, with varying batch sizes and no graph break allowed.

    Args:
        target: a module, compiled whole, or a function.
        fullgraph: raise on a graph break; the default, unlike `torch.compile`'s.
        **options: of `torch.compile`: `mode`, `backend`, `options`, `dynamic`.

    Returns:
        What `torch.compile` returns. The first dimension of its tensor arguments may vary from call to call.

    Raises:
        ConfigError: nothing that can be called, or `mode` and `options` together.
        UnknownOptionError: an option of `vattn.backend` for another backend.
        FusionError: when it is called, with strict passes among its options that see no attention of the first call, or
            none that fuses.
        RecompilationError: when it is called, with more different constants than `torch.compile` compiles it for.
        VattnError: when it is called and compiling finds a mistake; `torch.compile` raises an error of its own there,
            which has this one's text in it and is its cause here.

    Example:
        >>> import torch, vattn
        >>> double = vattn.compile(lambda x: x * 2, backend="eager")
        >>> [double(torch.ones(n)).sum().item() for n in (2, 7, 64)]
        [4.0, 14.0, 128.0]
    """
    check_switches(fullgraph=fullgraph)
    if not callable(target) or isinstance(target, type):
        raise ConfigError(f"compile with {type(target).__name__}", "a module or a function", "pass the model")
    check_options("vattn.compile", options)
    compiled: Any = torch.compile(target, fullgraph=fullgraph, **options)
    if isinstance(compiled, nn.Module):
        due = renewals(compiled)

        def prepare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for renew in due:
                renew()
            _mark_call(args, kwargs)

        # A hook of the wrapper, outside of what is compiled: compiled code looks at no weights.
        compiled.register_forward_pre_hook(prepare, with_kwargs=True)
        compiled.forward = strict_first_call(_with_own_errors(compiled.forward), options)
        return compiled  # type: ignore[return-value]
    return strict_first_call(marking(compiled), options)


def check_options(of: str, options: dict[str, Any]) -> None:
    """Refuse options that `torch.compile` would, with what vattn has for them."""
    mode, inner, backend = options.get("mode"), options.get("options"), options.get("backend", "inductor")
    # The list imports every backend.
    if backend != "inductor" and not callable(backend):
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise UnknownOptionError(f"{of} with backend={backend!r}", ", ".join(known), "leave backend out")
    if mode is not None and inner is not None:
        raise ConfigError(
            f"{of} with mode={mode!r} and options", "one of the two", f"options=vattn.options(mode={mode!r})"
        )
    ours = [name for name in inner or () if str(name).startswith("vattn.")]
    if ours and backend == "inductor":
        raise UnknownOptionError(
            f"{of} with option {ours[0]!r} for Inductor",
            "vattn.strict, vattn.output_formats and vattn.rope, with backend=vattn.backend",
            "options=vattn.options(strict=...), or backend=vattn.backend",
        )
    if backend == "inductor":
        # Where the passes are, what torch has of Inductor is imported.
        from vattn.passes.entry import check_inductor_options, check_mode

        check_mode(mode)
        check_inductor_options(inner or ())


def marking(compiled: Any) -> Any:
    """Wrap compiled code: each call marks what varies in it, and errors of `vattn.errors` come out of torch's."""
    run = _with_own_errors(compiled)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        _mark_call(args, kwargs)
        return run(*args, **kwargs)

    return call


def _with_own_errors(compiled: Any) -> Any:
    """Wrap compiled code: errors of `vattn.errors` come out of torch's."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            limit = torch._dynamo.config.recompile_limit
            raise RecompilationError(
                "one more call that differs in what is compiled in, such as a number, a dtype or how many dimensions",
                f"code compiled {limit} times, torch._dynamo.config.recompile_limit",
                "pass what changes from call to call as values of a tensor; TORCH_LOGS=recompiles names it",
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            own = None if isinstance(error, VattnError) else own_error(error)
            if own is None:
                raise
            raise own from error

    return call


def strict_first_call(run: Any, options: dict[str, Any]) -> Any:
    """Wrap compiled code whose options ask for strict passes: its first call fails if they have seen no attention.

    A `torch.compile` around the wrapper gets a graph break here: if it inlined the code, these options would be lost.
    """
    given = dict(options.get("options") or {})
    if not (given.get("vattn.strict") or getattr(given.get("post_grad_custom_pre_pass"), "strict", False)):
        return run
    counts, checked = fusion_notes.counts, False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        before = fusion_notes.set_strict(True)
        if not checked:
            dispatch.read_notes_again()
            count = counts["attention"]
        try:
            result = run(*args, **kwargs)
        finally:
            fusion_notes.set_strict(before)
        if not checked and counts["attention"] == count:
            raise FusionError(
                "strict fusion: the first call ran no attention that the passes have seen",
                "a call that Dynamo and Inductor compile, of a model with attention, in a forward_context",
                "switch on what torch.compiler.set_stance or TORCHDYNAMO_DISABLE switched off",
            )
        checked = True
        return result

    functools.update_wrapper(call, run, updated=())
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "vattn: compiled with strict passes, which another torch.compile around it drops; give it their options instead"
    )
    return keep_out_of_dynamo(call)


def own_error(error: BaseException) -> VattnError | None:
    """Return the error of `vattn.errors` that caused an error of torch, `None` if there is none."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if isinstance(found, VattnError):
            return type(found)(found.got, found.allowed, found.fix)
        if isinstance(found, BaseException) and found not in seen:
            seen.append(found)
            waiting += [found.__cause__, found.__context__, getattr(found, "inner_exception", None)]
    return next(filter(None, map(_from_text, map(str, seen))), None)


def _from_text(text: str) -> VattnError | None:
    """Read a `VattnError` out of the report of an exception that Dynamo has only traced."""
    for name, arguments in re.findall(r"raised exception (\w+)\((.*)\)$", text, re.MULTILINE):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, VattnError):
            try:
                values = ast.literal_eval(f"({_as_literals(arguments)},)")
            except (ValueError, SyntaxError):
                values = (arguments,)
            return kind(*(values[0] if isinstance(values[0], tuple) else values))
    return None


def _as_literals(arguments: str) -> str:
    """Return arguments of an exception as Python literals; before torch 2.13 they are shown as Dynamo's variables."""
    string = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
    text = re.sub(rf"ConstantVariable\(\w+: ({string}|[^()]*)\)", r"\1", arguments)
    text = re.sub(r"\b(?!StringFormat)\w+Variable\([^()]*\)", "'(...)'", text)

    def joined(match: re.Match[str]) -> str:
        return repr("".join(map(str, ast.literal_eval(match[1]))))

    return re.sub(rf"StringFormatVariable\((?:{string}), (\[.*?\]), {{}}\)", joined, text)
