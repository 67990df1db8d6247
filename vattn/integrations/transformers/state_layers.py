"""Layers of transformers models that keep a state for each request: Mamba, linear attention, short convolutions.

Their modules stay as they are. For each kind of rows in a step (decodes, and prompts of equal length) a module runs
once on a batch, with a cache of transformers that holds the states of these requests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils

from vattn.cache.state_cache import StateSpec
from vattn.errors import CacheNotBoundError, UnsupportedRequestError
from vattn.integrations.transformers.attention_interface import NAME, no_step
from vattn.integrations.transformers.available import cache_argument, transformers
from vattn.integrations.transformers.state_rows import RowGroup

_KEPT: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
"""What transformers keeps for such a layer; older versions have none that all models share."""


class ModelStates(nn.Module):
    """The states of one module of a transformers model, for all requests.

    Args:
        kept: what transformers' own cache kept for the module after a run of one request.
        cache_name: the argument with which the module gets its cache.
        token_by_token: the module continues a request by one token at a time only.

    Attributes:
        num_state_slots: requests that have a state at once; 0 before states are bound.
    """

    def __init__(self, kept: Any, cache_name: str, token_by_token: bool) -> None:
        super().__init__()
        self.cache_name, self.num_state_slots, self.token_by_token = cache_name, 0, token_by_token
        self._kernel_sizes = dict(kept.conv_kernel_size)
        self._places = [
            (name, index)
            for name in ("conv_states", "recurrent_states")
            for index, state in getattr(kept, name).items()
            if state is not None
        ]
        self._specs = tuple(
            StateSpec(tuple(state.shape[1:]), state.dtype)
            for name, index in self._places
            for state in [getattr(kept, name)[index]]
        )
        self._tensors: tuple[Tensor, ...] = ()

    def get_state_specs(self) -> tuple[StateSpec, ...]:
        """Return the tensors that the layer keeps for a request."""
        return self._specs

    def bind_states(self, tensors: tuple[Tensor, ...], /) -> None:
        """Take one tensor `[num_slots + 2, *shape]` for each of them."""
        self._tensors, self.num_state_slots = tensors, tensors[0].shape[0] - 2

    def drop_states(self) -> None:
        """Forget the bound tensors."""
        self._tensors, self.num_state_slots = (), 0

    def load(self, group: RowGroup) -> _OneLayerCache:
        """Return a cache of transformers with the states of some requests; zeros for those that begin."""
        layer: Any = cache_utils.LinearAttentionLayer(len(self._kernel_sizes))
        layer.conv_kernel_size = dict(self._kernel_sizes)
        for (name, index), tensor in zip(self._places, self._tensors, strict=True):
            getattr(layer, name)[index] = tensor.index_select(0, group.read)
            getattr(layer, f"is_{name}_initialized")[index] = True
        layer.has_previous_state = dict.fromkeys(self._kernel_sizes, group.continues)
        layer.dtype, layer.device = self._tensors[0].dtype, self._tensors[0].device
        return _OneLayerCache(layer)

    def store(self, cache: _OneLayerCache, group: RowGroup) -> None:
        """Keep the states that the module left in a cache."""
        for (name, index), tensor in zip(self._places, self._tensors, strict=True):
            tensor.index_copy_(0, group.write, getattr(cache.layer, name)[index])


class _Everywhere(list[Any]):
    """One layer of a cache under every index."""

    def __init__(self, layer: Any) -> None:
        super().__init__([layer])

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)

    def __len__(self) -> int:
        return 2**31


class _OneLayerCache(transformers.Cache):
    """A cache of transformers for a module, whatever index it has."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layers=_Everywhere(layer))
        self.layer = layer


@torch.compiler.disable
def run_with_states(module: nn.Module, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """Run a module with states on the packed tokens of a step; its `forward` while the model is on vattn.

    Args:
        module: the module; its `ModelStates` is its submodule `vattn`.
        hidden_states: `[1, T, hidden_size]`.
        *args, **options: what the model passes besides, its cache among them.

    Returns:
        `[1, T, hidden_size]`, zeros in rows of padding.

    Raises:
        MetadataError: outside of a step.
        CacheNotBoundError: no states are allocated.
    """
    states: Any = module._modules[NAME]
    cache = options.get(states.cache_name)
    groups: tuple[RowGroup, ...] | None = getattr(cache, "groups", None)
    if groups is None:
        raise no_step()
    if not states.num_state_slots:
        raise CacheNotBoundError(
            f"{type(module).__name__} without a cache of states",
            "a model whose cache is allocated",
            "call packed.allocate(memory=...), or enable(model, memory=...)",
        )
    forward = functools.partial(type(module).forward, module)
    out: Tensor | None = None
    for group in groups:
        own = states.load(group)
        given = group.take(hidden_states)
        pieces = given.split(1, 1) if group.continues and states.token_by_token else (given,)
        parts = [forward(piece, *args, **{**options, states.cache_name: own}) for piece in pieces]
        part = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        states.store(own, group)
        if group.rows is None:
            return part.view(1, -1, part.shape[-1])
        if out is None:
            out = part.new_zeros(1, hidden_states.shape[1], part.shape[-1])
        out[0].index_copy_(0, group.rows, part.flatten(0, 1))
    assert out is not None
    return out


class _Recorder(transformers.DynamicCache):
    """transformers' own cache, which notes which modules keep a state in it, and which layers keys and values."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.callers: list[nn.Module] = []
        self.rows: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.found: dict[nn.Module, int] = {}
        self.attending: set[int] = set()

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Tensor:
        self.found.setdefault(self.callers[-1], layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **options)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Tensor:
        self.found.setdefault(self.callers[-1], layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **options)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        self.attending.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **options)


class StateModules:
    """The modules of a model that keep a state for each request.

    Args:
        model: one of transformers that is not on vattn yet, and has such modules.
        run: runs the model on a few tokens with a cache.

    Attributes:
        states: by the name of the module, in the order of calls.
        num_attending: layers that keep keys and values.
    """

    def __init__(self, model: Any, run: Callable[[Any], Any]) -> None:
        self.model = model
        self.states: dict[str, ModelStates] = {}
        recorder = _Recorder(model.config)
        with _noting_callers(model, recorder):
            run(recorder)
        names = {module: name for name, module in model.named_modules()}
        layers: Any = recorder.layers
        for module, index in recorder.found.items():
            name = cache_argument(type(module).forward)
            try:
                alone = not _continues(module, name, *recorder.rows[module])
            except Exception as error:
                raise UnsupportedRequestError(
                    f"{type(model).__name__}: {type(module).__name__} fails on one state: {error!r:.80}",
                    "one module with one state for each layer",
                    "keep this model on transformers' own attention",
                ) from error
            self.states[names[module]] = ModelStates(layers[index], name, alone)
        self.num_attending = len(recorder.attending)
        if len(set(recorder.found.values())) != len(recorder.found):
            raise UnsupportedRequestError(
                f"{type(model).__name__}, in which several modules keep states under one index",
                "one module with a state for each layer",
                "keep this model on transformers' own attention",
            )

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by their name."""
        return {name: self.model.get_submodule(name) for name in self.states}

    @contextmanager
    def replaced_by(self, forward: Any) -> Iterator[None]:
        """Let the modules run another function inside the block."""
        try:
            for module in self.modules.values():
                module.forward = functools.partial(forward, module)
            yield
        finally:
            for module in self.modules.values():
                module.__dict__.pop("forward", None)

    def install(self) -> None:
        """Put the modules on states of vattn, which are not bound yet."""
        for name, module in self.modules.items():
            module._modules.pop(NAME, None)
            self.states[name].drop_states()
            module.add_module(NAME, self.states[name])
            module.forward = functools.partial(run_with_states, module)


def restore_states(model: nn.Module) -> None:
    """Give every module with states its own forward back."""
    for module in model.modules():
        if isinstance(module._modules.get(NAME), ModelStates):
            module.__dict__.pop("forward", None)


def has_states(model: Any) -> bool:
    """Return whether transformers' own cache for a model has layers with states."""
    if not _KEPT:
        return False
    return any(isinstance(layer, _KEPT) for layer in transformers.DynamicCache(config=model.config).layers)


@contextmanager
def _noting_callers(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Keep the modules that got the cache and run, the innermost last."""

    def begin(module: nn.Module, args: Any, options: dict[str, Any]) -> None:
        recorder.callers.append(module)

    def end(module: nn.Module, args: Any, options: dict[str, Any], out: Any) -> None:
        recorder.callers.remove(module)
        if module in recorder.found:
            recorder.rows[module] = args[0] if args else options["hidden_states"], out

    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    takers = [module for module in layers if cache_argument(type(module).forward)]
    handles = [module.register_forward_pre_hook(begin, with_kwargs=True) for module in takers]
    handles += [module.register_forward_hook(end, with_kwargs=True) for module in takers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _continues(module: nn.Module, cache_name: str, given: Tensor, out: Tensor) -> bool:
    """Return whether a module continues a request by several tokens: one token and the others give what all give."""
    cache = _OneLayerCache(cache_utils.LinearAttentionLayer())
    parts = [module(hidden_states=rows, **{cache_name: cache}) for rows in (given[:, :1], given[:, 1:])]
    difference = (torch.cat(parts, 1).float() - out.float()).norm()
    return bool(difference <= 2.0**-6 * out.float().norm())
