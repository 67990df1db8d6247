"""`KVTransfer`: run a connector's loads and saves around the layers of a model."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vattn.cache.allocation import KVCacheAllocation, find_layers
from vattn.cache.model_identity import ModelIdentity
from vattn.cache.specs import CrossAttentionSpec
from vattn.config.arguments import check_seconds
from vattn.config.typed import typed, typed_on_error
from vattn.errors import BlockError, CacheError, ConfigError, TransferError
from vattn.kv_transfer.connector import KVConnector, TransferRequest, refuse_copy
from vattn.kv_transfer.jobs import Job, LoadJob, SaveJob
from vattn.kv_transfer.pages import page_bytes
from vattn.ops import kv_transfer_points
from vattn.ops.kv_transfer_points import TransferPoint

logger = logging.getLogger("vattn")
_METHODS = tuple(name for name in vars(KVConnector) if not name.startswith("_"))


@dataclass
class TransferStep:
    """The transfers of one step.

    Attributes:
        loads, saves: jobs of this step, by request; a save of nothing new has none.
        failed: by request, why its load failed; complete when the step has ended. Its blocks and its output hold
            garbage; the other requests of the step are not affected.
    """

    loads: dict[str, LoadJob] = field(default_factory=dict)
    saves: dict[str, SaveJob] = field(default_factory=dict)
    failed: dict[str, BaseException] = field(default_factory=dict)


class KVTransfer:
    """Connect the KV caches of a model to a store of blocks.

    Args:
        model: its attention layers load before they read their cache and save after they wrote it. Blocks are found by
            models of equal weights, adapters, hooks and attributes alone, also in other processes: pass all that
            computes keys and values.
        allocation: what `vattn.allocate_kv_cache(model, ...)` returned, without groups.
        connector: stores the pages.
        timeout: seconds to wait for one layer of one request before that request fails.
        namespace: what else tells this model's blocks from others in the same store, such as code that reads files.

    Attributes:
        page_bytes: bytes of one block, by layer.
        fingerprint: the one passed to the connector.

    Raises:
        CacheError: a cache in groups, cross attention, context parallelism, or layers whose scales are not calculated
            yet.
        ConfigError: the caches have a connector already, a timeout that is not positive, or arguments of other types.

    Loading and saving overlap with the computation: on CUDA copies run on their own streams, and each layer waits
    for its own pages only. Each request in transfer takes device memory for the pages of four layers at most; a model
    that is more than four layers ahead of the copies of a save waits for them. The blocks of a load must be the
    request's own until the step has ended; the blocks of a save may be freed when the step's forward has returned.

    It stays attached, and keeps the caches alive, until `detach()`. After a change of the model its transfers fail and
    `find` returns 0: detach it, and make another one with another connector.

    Compile: the hooks are ops (`vattn::kv_transfer_wait`, `vattn::kv_transfer_save`) over the cache, without graph
    break; attaching or detaching recompiles. `mode="reduce-overhead"` runs them between its CUDA graphs; a full capture
    (`CUDAGraphRunner`) raises GraphContractError.

    Example:
        >>> import torch, vattn
        >>> from vattn.kv_transfer import HostMemoryConnector, KVTransfer, block_keys
        >>> layer = vattn.Attention(num_heads=2, head_size=16, scale=0.25)
        >>> cache = vattn.allocate_kv_cache(layer, num_blocks=8, dtype=torch.float32)
        >>> transfer = KVTransfer(layer, cache, HostMemoryConnector(memory="1MiB"))
        >>> keys = block_keys(range(32), block_size=16)
        >>> transfer.offload("a", keys, [3, 5])
        >>> transfer.find(keys)
        2
        >>> transfer.reload("b", keys, [1, 2])
        >>> bool((layer.kv_cache[:, [1, 2]] == layer.kv_cache[:, [3, 5]]).all())
        True
        >>> transfer.detach()
    """

    @typed_on_error
    def __init__(
        self,
        model: nn.Module,
        allocation: KVCacheAllocation,
        connector: KVConnector,
        *,
        timeout: float = 30.0,
        namespace: str = "",
    ) -> None:
        check_seconds("timeout", timeout, "leave it out for 30")
        missing = [name for name in _METHODS if not callable(getattr(connector, name, None))]
        if missing or isinstance(connector, type):
            raise ConfigError(
                f"connector {connector!r} " + (f"without {', '.join(missing)}" if missing else "is a class"),
                "an object with the methods of KVConnector",
                "HostMemoryConnector('1GiB')",
            )
        if len(allocation.groups) > 1:
            raise CacheError(
                f"KV transfer for a cache of {len(allocation.groups)} groups",
                "a cache in which one block id means one block of every layer",
                "allocate_kv_cache(model, ...) without hybrid=True",
            )
        if allocation.states is not None:
            raise CacheError(
                "KV transfer for a model that keeps a state for each request",
                "models in which keys and values are all that is kept of a prefix",
                "run this model without KV transfer",
            )
        self.connector, self.timeout, self.num_blocks = connector, timeout, allocation.num_blocks
        self._first_block = allocation.reserved_blocks
        modules: dict[str, Any] = dict(find_layers(model))
        owners = [entry for entry in allocation.layers if entry.shared_with is None]
        for entry in owners:
            if isinstance(entry.spec, CrossAttentionSpec):
                raise CacheError(
                    f"KV transfer for a model with cross attention, layer {entry.name!r}",
                    "layers that keep a request's tokens in the same blocks; encoder states have other blocks",
                    "run its encoder again instead",
                )
            if modules[entry.name].kv_cache is not entry.storage:
                raise CacheError(
                    f"layer {entry.name!r} is bound to another storage than the allocation's",
                    "the model's current allocation",
                    "pass the result of the last allocate_kv_cache",
                )
            if getattr(modules[entry.name], "context_parallel", None) is not None:
                raise CacheError(
                    f"KV transfer for layer {entry.name!r}, which keeps one rank's tokens only",
                    "layers without context parallelism: the keys of blocks do not tell ranks apart",
                    "recompute prompts instead",
                )
        self._modules = [modules[entry.name] for entry in owners]
        self._identity = ModelIdentity(model)
        self.fingerprint = _fingerprint(allocation, modules, namespace, self._identity)
        self.page_bytes = {entry.name: page_bytes(entry.storage) for entry in owners}
        device = allocation.device
        # Loads and saves overlap: the link to the host is full duplex.
        self._streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        with torch.inference_mode(False):
            self.points = [
                TransferPoint(
                    entry.name,
                    entry.storage,
                    *_views(module, entry.storage),
                    torch.zeros(1, dtype=torch.int64, device=device),
                    self,
                )
                for entry, module in zip(owners, self._modules, strict=True)
            ]
        self._current: TransferStep | None = None
        self._saving: list[SaveJob] = []
        kv_transfer_points.register(self.points)
        try:
            connector.attach(self.page_bytes, self.fingerprint)
        except BaseException:
            kv_transfer_points.unregister(self.points)
            raise
        for module, point in zip(self._modules, self.points, strict=True):
            module.register_buffer("kv_transfer_token", point.token, persistent=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_copy(self)

    def find(self, keys: Sequence[str]) -> int:
        """Return how many of the first keys the connector holds; 0, with a warning in the log, if it raises.

        It is 0 as well after a change of the model.
        """
        try:
            if (changed := self._changed()) is not None:
                raise changed
            return int(self.connector.find(keys))
        except Exception as error:
            logger.warning("%r cannot list its blocks: %s: %s", self.connector, type(error).__name__, error)
            return 0

    @contextmanager
    def step(
        self, loads: Sequence[TransferRequest] = (), saves: Sequence[TransferRequest] = ()
    ) -> Iterator[TransferStep]:
        """Transfer while the block runs the model once.

        Args:
            loads: done before each layer reads its cache.
            saves: begin after each layer wrote its cache and end later: see `wait_for_saves`.

        Raises:
            BlockError: a block that is out of range, or loaded twice; nothing was started.
            ConfigError: a request twice, or a step inside another.
        """
        self._check_step(loads, saves)
        step = TransferStep({request.request_id: LoadJob(*self._arguments(request, 0)) for request in loads})
        changed = self._changed() if loads or saves else None
        if changed is not None:
            for load in step.loads.values():
                load.fail(changed)
        for request in saves:
            self._add_save(step, request, changed)
        self._saving = [job for job in self._saving if not job.finished or job.error is not None]
        self._saving += step.saves.values()
        jobs: list[Job] = [*step.loads.values(), *step.saves.values()]
        for job in jobs:
            job.start()
        self._current = step
        try:
            yield step
        except BaseException as error:
            for job in jobs:
                job.fail(error)
            raise
        finally:
            self._current = None
            self._end(step, jobs)

    def _changed(self) -> TransferError | None:
        """Return the error of all transfers after a change of the model."""
        if not self._identity.look():
            return None
        return TransferError(
            f"the model has changed since the KVTransfer was made, last in {self._identity.changed}",
            "weights, adapters, hooks and attributes as they were",
            "detach it, and make a KVTransfer with another connector",
        )

    def _add_save(self, step: TransferStep, request: TransferRequest, changed: TransferError | None) -> None:
        """Make a job that saves the blocks that the connector does not hold; none if it holds all."""
        error: Exception | None = None
        try:
            if changed is not None:
                raise changed
            places = list(self.connector.blocks_to_save(request))
            if not places:
                return
            keys = tuple(request.keys[place] for place in places)
            block_ids = tuple(request.block_ids[place] for place in places)
            request = TransferRequest(request.request_id, keys, block_ids)
        except Exception as raised:
            # Only this request fails.
            error = raised
        job = step.saves[request.request_id] = SaveJob(*self._arguments(request, 1))
        if error is not None:
            job.fail(error)

    def _end(self, step: TransferStep, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.layers_left and job.error is None:
                job.fail(
                    TransferError(
                        f"request {job.request.request_id!r}: the step ended without layer "
                        + ", ".join(sorted(job.layers_left)),
                        "a step that runs every layer of the model once",
                        "run the model inside `with transfer.step(...)`",
                    )
                )
        for load in step.loads.values():
            if load.error is None:
                load.join(self.timeout)
        for save in step.saves.values():
            save.release()
        step.failed = {name: job.error for name, job in step.loads.items() if job.error is not None}

    def before_layer(self, point: TransferPoint) -> None:
        """Load the pages of a layer; the op `vattn::kv_transfer_wait` calls it."""
        if self._current is not None:
            for load in self._current.loads.values():
                if load.error is None:
                    load.deliver(point)

    def after_layer(self, point: TransferPoint) -> None:
        """Save the pages of a layer; the op `vattn::kv_transfer_save` calls it."""
        if self._current is not None:
            for save in self._current.saves.values():
                save.collect(point)

    @typed
    def cancel(self, request_id: str) -> bool:
        """Stop the transfers of a request, also during a step; return whether there were any.

        A cancelled save is not found later. A cancelled load leaves garbage in the request's blocks.
        """
        step = self._current
        jobs: list[Job] = [job for job in self._saving if job.request.request_id == request_id and not job.finished]
        if step is not None and request_id in step.loads:
            jobs.append(step.loads[request_id])
        for job in jobs:
            job.fail(TransferError(f"request {request_id!r} was cancelled"))
        return bool(jobs)

    def wait_for_saves(self, timeout: float | None = None) -> dict[str, BaseException]:
        """Wait until all saves so far have ended, and return why some failed, by request.

        Args:
            timeout: seconds for each; default: of the transfer. A save that takes longer fails.
        """
        failed = {}
        for job in self._saving:
            if not job.join(self.timeout if timeout is None else timeout):
                job.fail(
                    TransferError(f"saving request {job.request.request_id!r} took too long", "", "raise timeout=")
                )
            if job.error is not None:
                failed[job.request.request_id] = job.error
        self._saving = []
        return failed

    @typed
    def offload(self, request_id: str, keys: Sequence[str], block_ids: Sequence[int]) -> None:
        """Save blocks now, without running the model, and wait until they are stored.

        Raises:
            TransferError: the connector failed; the cause is attached.
            BlockError, ConfigError: blocks or keys that cannot be saved.
        """
        with self.step(saves=[TransferRequest(request_id, keys, block_ids)]):  # type: ignore[arg-type]
            for point in self.points:
                self.after_layer(point)
        self._raise("saving", request_id, self.wait_for_saves().get(request_id))

    def reload(self, request_id: str, keys: Sequence[str], block_ids: Sequence[int]) -> None:
        """Load blocks now, without running the model; the current stream sees them.

        Raises:
            TransferError: the connector failed; the cause is attached, and the blocks hold garbage.
            BlockError, ConfigError: blocks or keys that cannot be loaded.
        """
        with self.step(loads=[TransferRequest(request_id, keys, block_ids)]) as step:  # type: ignore[arg-type]
            for point in self.points:
                self.before_layer(point)
        self._raise("loading", request_id, step.failed.get(request_id))

    def detach(self) -> None:
        """Wait for saves (failed ones are logged), remove the hooks from the layers and release the caches."""
        for request_id, error in self.wait_for_saves().items():
            logger.warning("saving request %r failed: %s: %s", request_id, type(error).__name__, error)
        kv_transfer_points.unregister(self.points)
        for module, point in zip(self._modules, self.points, strict=True):
            if module.kv_transfer_token is point.token:
                module.kv_transfer_token = None

    def _raise(self, doing: str, request_id: str, error: BaseException | None) -> None:
        if isinstance(error, TransferError):
            raise error
        if error is not None:
            raise TransferError(
                f"{doing} request {request_id!r} failed: {type(error).__name__}: {error}",
                "",
                "compute the request without the connector",
            ) from error

    def _arguments(
        self, request: TransferRequest, stream: int
    ) -> tuple[KVConnector, TransferRequest, list[TransferPoint], Tensor, torch.cuda.Stream | None, float]:
        block_ids = torch.tensor(request.block_ids, dtype=torch.int64)
        copies = self._streams[stream]
        if copies is not None:
            block_ids = block_ids.pin_memory().to(self.points[0].kv_cache.device, non_blocking=True)
        return self.connector, request, self.points, block_ids, copies, self.timeout

    def _check_step(self, loads: Sequence[TransferRequest], saves: Sequence[TransferRequest]) -> None:
        if self._current is not None:
            raise ConfigError("a transfer step inside another", "one at a time", "end the first step")
        for requests in (loads, saves):
            if not isinstance(requests, Sequence) or not all(isinstance(r, TransferRequest) for r in requests):
                raise ConfigError(
                    f"transfers {requests!r:.60}", "a sequence of TransferRequest", "pass [TransferRequest(...)]"
                )
            twice = [name for name, count in Counter(r.request_id for r in requests).items() if count > 1]
            if twice:
                raise ConfigError(f"request {twice[0]!r} twice in one step", "each once", "join its blocks")
        usable = range(self._first_block, self.num_blocks)
        wrong = [(r, b) for r in (*loads, *saves) for b in r.block_ids if b not in usable]
        if wrong:
            request, block = wrong[0]
            raise BlockError(
                f"request {request.request_id!r}: block {block}",
                f"{usable.start} to {usable.stop - 1}; block 0 and blocks of sinks belong to no request",
                "check its block table",
            )
        shared = [block for block, count in Counter(b for r in loads for b in r.block_ids).items() if count > 1]
        if shared:
            raise BlockError(f"block {shared[0]} loaded for two requests", "each block once", "load it once, then fork")


def _views(module: Any, storage: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what a layer passes to ops of its cache."""
    return module.cache_views() if hasattr(module, "cache_views") else (storage, None)


def _fingerprint(
    allocation: KVCacheAllocation, modules: dict[str, Any], namespace: str, identity: ModelIdentity
) -> str:
    """Return a hash of the model, of layers, formats, scales and the caller's namespace."""
    parts = [namespace, identity.digest()]
    for entry in allocation.layers:
        if entry.shared_with is not None:
            continue
        parts.append(f"{entry.name} {sorted(dataclasses.asdict(entry.spec).items())} {type(entry.spec).__name__}")
        module = modules[entry.name]
        ready = getattr(module, "scales_ready", None)
        if ready is not None and not bool(ready.all()):
            raise CacheError(
                f"layer {entry.name!r} has not calculated its scales yet",
                "fixed scales, which decide what stored bytes mean",
                "run a first step before making the KVTransfer",
            )
        for name in ("k_scale", "v_scale"):
            scale = getattr(module, name, None)
            parts.append("none" if scale is None else ",".join(map(float.hex, scale.double().flatten().tolist())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
