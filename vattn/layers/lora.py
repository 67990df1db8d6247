"""LoRA adapters of linear layers: each row of a step gets the product of its request's adapter.

Weights of all adapters of a product lie in tensors of fixed sizes, and so does the list of a step's rows: adapters come
and go, and steps change, without a recompilation or a new capture.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vattn.config.arguments import read_count
from vattn.errors import ConfigError, RequestError
from vattn.ops.lora_arguments import TILE_ROWS, most_tiles

_numbers = itertools.count()


class Adapter:
    """One loaded adapter.

    Attributes:
        name: as it was loaded.
        slot: its place in the tensors of weights.
        identity: part of the content keys of its requests; earlier adapters of this name have others.
        requests: those that use it; some may have ended.
    """

    def __init__(self, name: str, slot: int) -> None:
        self.name, self.slot, self.identity = name, slot, f"adapter {next(_numbers)}"
        self.requests: weakref.WeakSet[Any] = weakref.WeakSet()


class AdapterRows:
    """The adapter of each row of a step, in tensors that keep their addresses.

    Attributes:
        active: whether any row of the step has an adapter; if not, products add nothing and compiled code has no op.
        rows, tiles: see `vattn.ops.lora_arguments.LoRAArgs`.
        max_num_tokens: rows that there is room for.
    """

    def __init__(self, max_adapters: int, max_num_tokens: int, device: torch.device) -> None:
        self.max_adapters, self.device, self.active = max_adapters, device, False
        self._step: tuple[list[int], list[int]] = [], []
        self.reserve(max_num_tokens)

    def reserve(self, max_num_tokens: int) -> None:
        """Make room for steps of so many rows, in new tensors; captured graphs read the old ones."""
        self.max_num_tokens = max_num_tokens
        self._num_tiles = most_tiles(max_num_tokens, self.max_adapters)
        with torch.inference_mode(False):
            self._lists = torch.zeros(max_num_tokens + 3 * self._num_tiles, dtype=torch.int32, device=self.device)
        self.rows = self._lists[:max_num_tokens]
        self.tiles = self._lists[max_num_tokens:].view(-1, 3)
        self._listed: object = None
        fits = sum(self._step[1]) <= max_num_tokens
        self.write(*(self._step if fits else ((), ())))

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Make products run the op inside the block, over no rows, to compile and capture it."""
        self._lists.zero_()
        self._listed = None
        self.active = True
        try:
            yield
        finally:
            self.write(*self._step)

    @contextmanager
    def step(self, slots: Sequence[int], counts: Sequence[int]) -> Iterator[None]:
        """Note a step as `write` does, for what runs inside the block; the rows of before come back after it."""
        before = self._step
        self.write(slots, counts)
        try:
            yield
        finally:
            self.write(*before)

    def uses(self, slot: int) -> bool:
        """Return whether a row of the step has the adapter of a slot."""
        return slot in self._step[0]

    def write(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Note a step: the slot of each request, -1 for none, and how many rows it has."""
        self._step = list(slots), list(counts)
        self.active = max(slots, default=-1) >= 0
        if not self.active or self._step == self._listed:
            return
        owners = torch.tensor(slots).repeat_interleave(torch.tensor(counts))
        order = owners.argsort(stable=True).int()
        sizes = (owners + 1).bincount(minlength=self.max_adapters + 1).tolist()
        first, tiles = 0, []
        for slot, size in enumerate(sizes, -1):
            if slot >= 0:
                tiles += [(slot, at, min(TILE_ROWS, first + size - at)) for at in range(first, first + size, TILE_ROWS)]
            first += size
        host = torch.zeros(self._lists.shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        host[: order.shape[0]] = order
        begin = self.max_num_tokens
        host[begin : begin + 3 * len(tiles)] = torch.tensor(tiles, dtype=torch.int32).flatten()
        self._lists.copy_(host, non_blocking=True)
        self._listed = self._step


class LoRAProduct:
    """The adapters of one product: of a linear layer, or of several that are merged.

    Args:
        rows: of the steps.
        sizes: output features of each layer.
        in_features, max_rank: of the weights.
        dtype, device: of the weights.

    Attributes:
        a, b, scales: see `vattn.ops.lora_arguments.LoRAArgs`; zeros where an adapter has nothing.
    """

    def __init__(
        self,
        rows: AdapterRows,
        sizes: Sequence[int],
        in_features: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.sizes, self.max_rank, count = rows, list(sizes), max_rank, rows.max_adapters
        self.in_features, self.out_features = in_features, sum(sizes)
        with torch.inference_mode(False):
            self.a = torch.zeros(count, len(sizes) * max_rank, in_features, dtype=dtype, device=device)
            self.b = torch.zeros(count, self.out_features, max_rank, dtype=dtype, device=device)
            self.scales = torch.zeros(count, len(sizes), device=device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a copy of a model with adapters",
            "copies of models without",
            "copy the model before enable_adapters, or after disable(model)",
        )

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the products of the rows' adapters, of an input `[..., K]`, to the output `[..., N]`, and return it."""
        if self.rows.active:
            torch.ops.vattn.add_lora(
                x.reshape(-1, self.in_features), output.view(-1, self.out_features), self.a, self.b, self.scales,
                self.rows.rows, self.rows.tiles, self.sizes,
            )  # fmt: skip
        return output

    @torch.no_grad()
    def put(self, slot: int, part: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Store the weights `[rank, K]` and `[features, rank]` of an adapter for one layer."""
        rank, begin = a.shape[0], sum(self.sizes[:part])
        self.a[slot, part * self.max_rank : part * self.max_rank + rank] = a.to(self.a)
        self.b[slot, begin : begin + self.sizes[part], :rank] = b.to(self.b)
        self.scales[slot, part] = scale

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Forget an adapter."""
        for weights in (self.a, self.b, self.scales):
            weights[slot].zero_()


class Adapters:
    """The adapters of a model: up to a fixed number, by name. Any thread may load and remove them.

    Args:
        rows: of the steps.
        products: of each linear layer, by its name: its product, and its index among the layers of this product.

    Attributes:
        loaded: each adapter by its name.
        lock: is held while adapters come and go, and while a request takes one.
    """

    def __init__(self, rows: AdapterRows, products: Mapping[str, tuple[LoRAProduct, int]]) -> None:
        self.rows, self.products = rows, dict(products)
        self.loaded: dict[str, Adapter] = {}
        self.lock = threading.RLock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.loaded)} of {self.rows.max_adapters}: {', '.join(self.loaded)})"

    def get(self, name: str) -> Adapter:
        """Return a loaded adapter.

        Raises:
            RequestError: no adapter has this name.
        """
        if name not in self.loaded:
            known = ", ".join(map(repr, self.loaded)) or "none is loaded"
            raise RequestError(f"adapter={name!r:.80}", known, "load it first: adapters.load(name, folder)")
        return self.loaded[name]

    def remove(self, name: str) -> None:
        """Forget an adapter; another one may take its place.

        Raises:
            RequestError: no adapter has this name, or requests that have not ended, or `set_rows`, use it.
        """
        with self.lock:
            adapter = self.get(name)
            users = sum(not request.done for request in adapter.requests)
            if users or self.rows.uses(adapter.slot):
                by = f"{users} requests that have not ended" if users else "the rows of set_rows"
                raise RequestError(
                    f"remove({name!r}), an adapter of {by}",
                    "adapters that no request uses",
                    "run the generator to its end, or cancel these requests"
                    if users
                    else "call set_rows([], []) first",
                )
            self._clear(adapter.slot)
            del self.loaded[name]

    def set_rows(self, names: Sequence[str | None], query_lens: Sequence[int]) -> None:
        """Say which adapter each request of the next steps uses, until the next call or the next new generator.

        A generator does so itself, for its own steps alone.

        Args:
            names: of each request's adapter, `None` for the model alone.
            query_lens: the number of its tokens, in the order of the step.

        Raises:
            RequestError: an unknown name.
            ConfigError: more tokens than `reserve` made room for.
        """
        lengths = [read_count("query_lens", count, 0, "pass the step's query_lens") for count in query_lens]
        if len(names) != len(lengths):
            raise ConfigError(f"{len(names)} names for {len(lengths)} requests", "one each", "pass None for the model")
        if sum(lengths) > self.rows.max_num_tokens:
            raise ConfigError(
                f"a step of {sum(lengths)} tokens with adapters",
                f"up to {self.rows.max_num_tokens}",
                "call adapters.rows.reserve(tokens) before graphs are captured",
            )
        self.rows.write([-1 if name is None else self.get(name).slot for name in names], lengths)

    def _add(self, name: str, store: Callable[[int], None]) -> Adapter:
        """Give an adapter a slot, and have its weights stored there.

        Raises:
            ConfigError: a name that is taken or no name, or no slot is left.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter named {name!r:.60}", "a text that is not empty", "load('name', folder)")
        with self.lock:
            if name in self.loaded:
                raise ConfigError(f"an adapter named {name!r} that is loaded", "names not in use", "remove(name) first")
            taken = {adapter.slot for adapter in self.loaded.values()}
            free = [slot for slot in range(self.rows.max_adapters) if slot not in taken]
            if not free:
                raise ConfigError(
                    f"adapter {name!r} beside {len(taken)} others",
                    f"max_adapters={self.rows.max_adapters}",
                    "remove one, or enable_adapters(model, max_adapters=...) with more",
                )
            try:
                store(free[0])
            except BaseException:
                self._clear(free[0])
                raise
            self.loaded[name] = Adapter(name, free[0])
            return self.loaded[name]

    def _clear(self, slot: int) -> None:
        for product in {id(product): product for product, _ in self.products.values()}.values():
            product.clear(slot)
