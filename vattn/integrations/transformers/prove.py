"""Prove that a model computes on vattn what it computes by itself, before `enable` accepts it.

Two requests of a few tokens run by themselves, with transformers' attention and positions; what goes into every
attention module and comes out of it is kept, and so are the logits. Then they run on vattn over a cache full of NaN, or
of large values for libraries that spread NaN, in two steps: two prefills, and a step in which a chunk continues one
request and the other one decodes. There every attention module gets the input that it got before, and gives what it
gave, so that differences do not grow from layer to layer and a bound holds for models of any depth, in 16 bits too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from vattn.backends.mla.registry import mla_backends
from vattn.backends.selector import get_backend
from vattn.cache.allocation import allocate_kv_cache
from vattn.compilation.compile_ahead import is_busy, is_compiling_ahead, start_inductor
from vattn.compilation.warmup import compile_steps
from vattn.errors import UnsupportedRequestError, VattnError
from vattn.integrations.transformers.attention_interface import NAME
from vattn.integrations.transformers.available import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
from vattn.integrations.transformers.checks import model_dtype
from vattn.integrations.transformers.observe import ordinary_tokens, set_attention, token_rows, uncompiled
from vattn.integrations.transformers.packed_model import PackedModel
from vattn.layers.fp8_linear import exact_inputs
from vattn.metadata.attention_metadata import AttentionMetadata
from vattn.metadata.builder import AttentionMetadataBuilder
from vattn.metadata.forward_context import forward_context

OWN = "vattn_own"
"""Name of eager attention in fp32 among those of transformers."""

LONGEST, SHORT = 21, 4
"""Tokens of the two requests; the longer one has more than a block of 16, or as many as the model takes."""

BOUNDS = {torch.float32: 2.0**-7}
"""Relative L2 of what one attention module gives a request in a step: products in TF32 round to 2**-11."""

BOUND_16 = 2.0**-4
"""The same in 16 bits: roundings to 2**-9 of scores, probabilities, heads and their projection."""

LOGITS_BOUND_16 = 2.0**-2
"""Of the logits in 16 bits, the median token: each layer outside of attention rounds, and may choose other experts."""


NAN, LARGE = 255, 67
"""Bytes that make NaN in every dtype of a model, and finite values of 3 to 200, for libraries that spread NaN."""


def compile_for_proof(layers: Sequence[Any], model: Any, block_size: int) -> None:
    """Have the kernels compiled that `Proof.check` will launch, while the model runs by itself; one layer a kind."""
    if not is_compiling_ahead():
        return
    with suppress(Exception):  # `check` raises it.
        device = next(model.parameters()).device
        parts = nn.ModuleList(layers).to(device)
        allocate_kv_cache(parts, num_blocks=4, device=device, dtype=model_dtype(model))
        builder = AttentionMetadataBuilder(2, LONGEST + SHORT, LONGEST, block_size, layers=parts)
        compile_steps(parts, builder, [(2, sum(end - start for start, end in step)) for step in _steps(LONGEST)])
    if is_busy():
        # While kernels are compiled there is time for it.
        start_inductor()


def _steps(length: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return first and end token of both requests in each step, for a longer request of `length` tokens."""
    cut = length * 3 // 7
    return [((0, cut), (0, SHORT - 1)), ((cut, length), (SHORT - 1, SHORT))]


class Proof:
    """What a model computes by itself for two short requests, to be compared with what it computes on vattn.

    Args:
        model: one of transformers that is not on vattn yet.
        modules: its attention modules by name, in the order of calls.
        longest: the longest request that it takes, `None` for any.
        first_position: as in `PackedModel`.
    """

    def __init__(
        self, model: Any, modules: dict[str, nn.Module], longest: int | None = None, first_position: int = 0
    ) -> None:
        self.model, self.modules = model, modules
        trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limits = [longest, trained - first_position if isinstance(trained, int) else None]
        length = max(SHORT, min([LONGEST, *(limit for limit in limits if limit is not None)]))
        tokens = ordinary_tokens(model, length + SHORT)
        self.requests = [tokens[:length], tokens[length:]]
        self.inputs: dict[str, list[Tensor]] = {name: [] for name in modules}
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in modules}
        device = next(model.parameters()).device
        options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        with _alone(model), _own_attention(model, modules), self._hooked(self._keep_input, self._keep_output):
            self.logits = [
                token_rows(model(input_ids=torch.tensor([request], device=device), **options))
                for request in self.requests
            ]

    def check(self, packed: PackedModel, block_size: int) -> None:
        """Run the requests on vattn and compare.

        Args:
            packed: the model on vattn, with layers in its own dtype; they have a cache afterwards, `packed` has none.
            block_size: of those layers.

        Raises:
            UnsupportedRequestError: something differs; the text says what.
        """
        short = -(-SHORT // block_size)
        num_blocks = 1 + short + -(-LONGEST // block_size)
        allocation, packed.kv_cache = packed.allocate(num_blocks=num_blocks, max_num_reqs=self._most_reqs()), None
        slots = None if allocation.states is None else [2, 1]
        for tensors in {} if allocation.states is None else allocation.states.layers.values():
            for tensor in tensors:
                tensor[:-1] = torch.nan
        for module in self.modules.values():
            layer: Any = module._modules[NAME]
            if not hasattr(layer, "kv_cache"):
                continue
            name = layer.config.backend
            backend: Any = mla_backends().get(name) or get_backend(name)
            layer.kv_cache.view(torch.uint8).fill_(NAN if backend.capabilities.garbage_safe else LARGE)
        length = len(self.requests[0])
        builder = AttentionMetadataBuilder(2, length + SHORT, length, layers=packed)
        blocks = list(range(1, num_blocks))
        tables = [blocks[: short - 1 : -1], blocks[:short]]
        for parts in _steps(length):
            step = builder.build(
                [end - start for start, end in parts], [end for _, end in parts], tables, state_slots=slots
            )
            self._run(packed, step, parts)

    def check_without_cache(self, packed: nn.Module) -> None:
        """Run both requests in one step on vattn, in which nothing is cached, and compare.

        Raises:
            UnsupportedRequestError: something differs; the text says what.
        """
        lengths = [len(request) for request in self.requests]
        device = next(self.model.parameters()).device
        step = AttentionMetadataBuilder(2, sum(lengths), max(lengths), device=device).build(lengths)
        self._run(packed, step, tuple((0, length) for length in lengths))

    def _run(self, packed: nn.Module, step: AttentionMetadata, parts: tuple[tuple[int, int], ...]) -> None:
        """Run the given tokens of each request as a step, and compare."""
        self._parts = parts
        ids = [
            token for request, (start, end) in zip(self.requests, parts, strict=True) for token in request[start:end]
        ]
        positions = step.positions
        assert positions is not None
        with _alone(self.model), forward_context(step), self._hooked(self._same_input, self._same_output):
            rows = packed(torch.tensor(ids, device=positions.device), positions)
        self.check_rows(rows, self._rows(self.logits))

    def _most_reqs(self) -> int | None:
        """Return the number of requests for models with states."""
        return 2 if any(hasattr(module._modules[NAME], "bind_states") for module in self.modules.values()) else None

    @contextmanager
    def _hooked(self, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
        handles = []
        try:
            for name, module in self.modules.items():
                handles.append(
                    module.register_forward_pre_hook(
                        lambda module, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
                    )
                )
                handles.append(module.register_forward_hook(lambda module, args, out, name=name: after(name, out)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep_input(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs[name].append(_input(args, kwargs)[0].clone())

    def _keep_output(self, name: str, out: Any) -> None:
        self.outputs[name].append(_output(out)[0].clone())

    def _same_input(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        expected = self._rows(self.inputs[name])
        if name == next(iter(self.modules)):
            self._compare("what goes into", name, expected, _input(args, kwargs)[0])
        own = expected[None]
        return ((own, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": own})

    def _same_output(self, name: str, out: Any) -> Any:
        expected = self._rows(self.outputs[name])
        self._compare("what comes out of", name, expected, _output(out)[0])
        own = expected[None]
        return (own, *out[1:]) if isinstance(out, tuple) else own

    def _rows(self, requests: list[Tensor]) -> Tensor:
        """Return the rows of the step that runs."""
        return torch.cat([rows[start:end] for rows, (start, end) in zip(requests, self._parts, strict=True)])

    def _compare(self, what: str, name: str, expected: Tensor, given: Tensor) -> None:
        bound = BOUNDS.get(model_dtype(self.model), BOUND_16)
        sizes = [end - start for start, end in self._parts]
        for part, want, got in zip(self._parts, expected.float().split(sizes), given.float().split(sizes), strict=True):
            error = float((got - want).norm() / want.norm().clamp(min=1e-30))
            if not error <= bound:
                raise self._refused(f"{what} attention layer {name!r} differs by {error:.1e}, relative", part, bound)

    def check_rows(self, given: Tensor, expected: Tensor, what: str = "logits") -> None:
        """Compare rows that the model gave with those that it gives on vattn.

        Raises:
            UnsupportedRequestError: they differ.
        """
        expected = expected.float()
        errors = (given.float() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
        bound = BOUNDS.get(model_dtype(self.model), LOGITS_BOUND_16)
        error = float(errors.median() if bound == LOGITS_BOUND_16 else errors.max())
        if not error <= bound:
            raise self._refused(f"the {what} differ by {error:.1e}, relative", self._parts[0], bound)

    def _refused(self, what: str, part: tuple[int, int], bound: float) -> UnsupportedRequestError:
        return UnsupportedRequestError(
            f"{type(self.model).__name__}, which computes other results on vattn than by itself: {what}, in tokens "
            f"{part[0]} to {part[1] - 1} of a request",
            f"differences up to {bound:.1e} in {str(model_dtype(self.model)).removeprefix('torch.')}",
            "keep this model on transformers' own attention; enable(model, prove=False) leaves this comparison out",
        )


@contextmanager
def _alone(model: Any) -> Iterator[None]:
    """Run a model as it is written, without gradients and without scales over all tokens of a step."""
    try:
        with torch.no_grad(), uncompiled(), exact_inputs(model):
            yield
    except VattnError:
        raise
    except Exception as error:
        raise UnsupportedRequestError(
            f"{type(model).__name__}, which fails on a few tokens: {type(error).__name__}: {error}",
            "models that run with token ids alone",
            "keep this model on transformers' own attention; enable(model, prove=False) leaves this run out",
        ) from error


@contextmanager
def _own_attention(model: Any, modules: dict[str, nn.Module]) -> Iterator[None]:
    """Let eager attention be right inside the block.

    In 16 bits it rounds scores, by more than 1 where they are large, so it gets fp32. That of Falcon is SDPA: its eager
    attention rounds too, and adds the bias of ALiBi twice.
    """
    before, falcon = model.config._attn_implementation, model.config.model_type == "falcon"
    exact = model_dtype(model) == torch.float32 or any(_eager(module) is None for module in modules.values())
    if before != "eager" or (exact and not falcon):
        yield
        return
    ALL_ATTENTION_FUNCTIONS.register(OWN, _eager_in_fp32)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OWN, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        set_attention(model, "sdpa" if falcon else OWN)
        yield
    finally:
        set_attention(model, before)


def _eager_in_fp32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Run the eager attention of a module's own file; transformers' attention interface."""
    eager: Any = _eager(module)
    mask = None if attention_mask is None else attention_mask.float()
    out, _ = eager(module, query.float(), key.float(), value.float(), mask, **options)
    return out.to(query.dtype), None


def _eager(module: nn.Module) -> Callable[..., Any] | None:
    found = (getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None) for cls in type(module).__mro__)
    return next((function for function in found if function is not None), None)


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _output(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out
