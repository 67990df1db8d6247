"""What one step's batch looks like: `AttentionMetadata`, the key of what a graph capture bakes in, and `check`.

Compiled code reads tensors only. The integers are for people and for the host; a test asserts that nothing compiled
reads one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vattn.config.arguments import read_count
from vattn.config.dcp import DCPShard
from vattn.errors import GraphContractError, MetadataError
from vattn.metadata.checks import check_block_table, check_seq_lens, check_slots, check_tree_ids
from vattn.metadata.halves import HostLengths, half_of
from vattn.metadata.lineage import BuiltStep, is_rewritten, rewritten
from vattn.metadata.step import Step
from vattn.ops.index_dtypes import INDEX_DTYPES

if TYPE_CHECKING:
    from typing_extensions import Self


class CaptureKey(NamedTuple):
    """Everything about a step's metadata that a CUDA-graph capture bakes in; lengths and tables are not among it.

    Attributes:
        num_reqs, num_tokens: padded sizes.
        table_width: columns of the block table.
        causal: `"layer"` (each layer's own rule), `"bidirectional"` or `"per_request"` (a tensor of flags).
        optional: names and shapes of the optional tensors that are present.
        plans: names and shapes of the schedules.
        buffers: addresses of all tensors, in the order of the fields.
    """

    num_reqs: int
    num_tokens: int
    table_width: int
    causal: str
    optional: tuple[tuple[str, tuple[int, ...]], ...]
    plans: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[int, ...]

    def differences(self, other: CaptureKey) -> list[str]:
        """Return one line per field in which `other` contradicts this key, e.g. `"num_reqs 4, captured 8"`."""
        found = []
        for name, captured, given in zip(self._fields, self, other, strict=True):
            if captured != given:
                found.append("buffers moved" if name == "buffers" else f"{name} {given!r}, captured {captured!r}")
        return found


def refuse_contradiction(captured: CaptureKey, step_key: CaptureKey) -> None:
    """Raise GraphContractError, naming every difference, if a step cannot replay a capture."""
    if captured != step_key:
        raise GraphContractError(
            "the step contradicts the captured graph: " + "; ".join(captured.differences(step_key)),
            "the sizes, optional tensors and buffers of the capture",
            "build the step with the builder and the capture_key of the capture, or capture this kind of step too",
        )


def refuse_overflow(step: Step, key: CaptureKey) -> None:
    """Refuse a step that is larger than a capture in any size."""
    captured = dict(key.optional)
    sizes = {"requests": (step.query_lens.shape[0], key.num_reqs), "tokens": (step.positions.shape[0], key.num_tokens)}
    if step.cross is not None and "cross_slot_mapping" in captured:
        sizes["encoder states"] = step.cross.num_rows, captured["cross_slot_mapping"][0]
    if "logits_indices" in captured:
        kept = step.query_lens if step.num_logits is None else step.num_logits
        sizes["kept tokens"] = int(kept.sum()), captured["logits_indices"][0]
    for name, (count, limit) in sizes.items():
        if count > limit:
            raise GraphContractError(
                f"a step of {count} {name} for a graph captured with {limit}",
                f"at most {limit} {name}",
                "replay a larger graph, or run this step without one",
            )


@dataclass(eq=False)
class AttentionMetadata:
    """Describe the requests of one step: the five tensors, optional mask tensors, and host integers.

    Padding: padded requests have query length 0 and `seq_lens` 0; padded tokens have slot -1; their output is zero.

    Builders that copy make the dtypes below. In other metadata, lengths, offsets, block tables and slots may each be
    int32 or int64: layers convert them on the device, compiled code once a step, eager layers each for itself.

    Attributes:
        query_start_loc: int32 `[B + 1]`, where each request's new tokens start; padded requests repeat the last value.
        seq_lens: int32 `[B]`, cached plus new tokens.
        block_table: int32 `[B, W]`; entries past a request's last block may hold garbage. W is 0 in a step of layers
            without a cache, which has no slots either.
        slot_mapping: int64 `[T]`, `block * block_size + offset` of every new token; -1 writes nothing.
        positions: int64 `[T]`, `seq_len - query_len + i`, or what `build(positions=...)` was given; 0 for padding.
        causal: `True` (each layer's own rule), `False` (bidirectional), or int32 `[B]` flags, nonzero = causal.
        tree_bias: fp32 `[trees, n, n]` added to scores of query row r and new key c.
        tree_id: int32 `[B]`, which bias a request uses, -1 = none.
        mm_ranges: int32 `[B, R, 2]`, inclusive absolute positions that see each other both ways; start >= end = unused.
        encoder_seq_lens: int32 `[B]`, encoder states of each request, 0 for none: the keys of cross attention.
        cross_block_table: int32 `[B, Wc]`, the blocks that hold them; entries past the last may hold garbage.
        cross_slot_mapping: int64 `[E]`, the slot of every encoder state that this step writes: the states of the
            requests that ran their encoder, one request after the other; -1 writes nothing. `None`: no encoder ran.
        encoder_start_loc: int32 `[B + 1]`, where each request's states start among those E rows; a request that did not
            run its encoder has none. `None`: no encoder ran.
        logits_indices: int64 `[N]`, the rows that layers with `fast_prefill` go on with (`vattn.kept_rows`): the last
            ones of each request, then any as padding. `None`: all rows.
        logits_start_loc: int32 `[B + 1]`, where each request's kept rows start.
        prefix_lens: int32 `[2]`, the length of the prefix that all requests share, and 0. `None`: it is not attended
            apart.
        prefix_start_loc: int32 `[3]`, the rows of the step as one request's, and a request without rows.
        suffix_lens, suffix_block_table: int32 `[B]` and `[B, W]`, lengths and blocks of each request after the prefix.
        local_seq_lens: int32 `[B]`, how many of each request's tokens this rank holds, under context parallelism:
            table and slots count these only (slots of other ranks' tokens are -1), everything else the whole request.
        state_slots: int32 `[B]`, where layers that keep a state for each request have it; 0 for padded requests.
        whole_blocks, whole_rows, whole_table: int64 `[N]`, int64 `[M]` and int32 `[B, W]`, in steps with prompts of
            latent attention under context parallelism: the blocks that each rank sends, the gathered rows in
            the order of tokens, and their block table.
        plans: schedules by `Backend.plan_key`, filled once a step; a layer without one plans for itself. Beside the
            schedule of a backend that plans on the host, under `host_plan_key`, int64 on the CPU.
        num_reqs, num_actual_tokens: real requests and tokens, without the builder's padding.
        max_query_len, max_seq_len: over the real requests.
        max_position: the largest position of the step; -1: unknown. Eager latent layers compare RoPE tables with it.
        num_prefills, num_prefill_tokens, num_decodes, num_decode_tokens: the split; a decode has one new token (or up
            to the builder's `decode_threshold`) and some cached ones.
        block_size: tokens per block that tables and slots count in; 0: unknown. Eager layers compare it with theirs.
        dcp_shard: which share of the tokens that is; eager layers compare it with theirs.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    positions: Tensor | None = None
    causal: bool | Tensor = True
    tree_bias: Tensor | None = None
    tree_id: Tensor | None = None
    mm_ranges: Tensor | None = None
    encoder_seq_lens: Tensor | None = None
    cross_block_table: Tensor | None = None
    cross_slot_mapping: Tensor | None = None
    encoder_start_loc: Tensor | None = None
    logits_indices: Tensor | None = None
    logits_start_loc: Tensor | None = None
    prefix_lens: Tensor | None = None
    prefix_start_loc: Tensor | None = None
    suffix_lens: Tensor | None = None
    suffix_block_table: Tensor | None = None
    local_seq_lens: Tensor | None = None
    state_slots: Tensor | None = None
    whole_blocks: Tensor | None = None
    whole_rows: Tensor | None = None
    whole_table: Tensor | None = None
    plans: dict[str, Tensor] = field(default_factory=dict)
    num_reqs: int = 0
    num_actual_tokens: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0
    max_position: int = -1
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    block_size: int = 0
    dcp_shard: DCPShard | None = None
    _built: BuiltStep | None = field(default=None, repr=False)
    """Which step of its builder this is; `None` for tensors that no builder rewrites."""
    _lengths: HostLengths | None = field(default=None, repr=False)

    @property
    def decode_metadata(self) -> Self | None:
        """The decodes of a step in which they come first, `None` if there are none.

        Views of the same tensors and new offsets, without schedules; a half with all requests is the step itself. Take
        it once a step, inside of a CUDA graph that replays it. Where requests of one half read blocks that the other
        half writes in this step, run that one first.

        Raises:
            MetadataError: prefills before decodes, kept rows, an encoder that runs in this step, or no lengths on the
                host.
        """
        return self._half(decodes=True)

    @property
    def prefill_metadata(self) -> Self | None:
        """The prefills, and the padding after them; as `decode_metadata`."""
        return self._half(decodes=False)

    @property
    def has_cached_tokens(self) -> bool:
        """Whether a request has more tokens than new ones, as far as the host knows: never waits for a device."""
        if self._lengths is not None:
            return not torch.equal(self._lengths.query_lens, self._lengths.seq_lens)
        if self.seq_lens.device.type == "cpu":
            return bool((self.query_start_loc.diff() != self.seq_lens).any())
        return self.max_seq_len > self.max_query_len

    def _half(self, decodes: bool) -> Self | None:
        step_of(self, "decode_metadata" if decodes else "prefill_metadata")
        return half_of(self, decodes)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are present by name; schedules as `plans.<key>`."""
        found = {}
        for name in TENSOR_FIELDS:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                found[name] = value
        for key, plan in self.plans.items():
            found[f"plans.{key}"] = plan
        return found

    def capture_key(self) -> CaptureKey:
        """Return what a CUDA graph captured with this metadata bakes in. Host work only, no sync."""
        flags = self.causal
        kind = "per_request" if isinstance(flags, Tensor) else ("layer" if flags else "bidirectional")
        extras = ((name, getattr(self, name)) for name in _OPTIONAL_FIELDS)
        return CaptureKey(
            num_reqs=self.seq_lens.shape[0],
            num_tokens=self.slot_mapping.shape[0],
            table_width=self.block_table.shape[1],
            causal=kind,
            optional=tuple((name, tuple(value.shape)) for name, value in extras if value is not None),
            plans=tuple((name, tuple(plan.shape)) for name, plan in self.plans.items()),
            buffers=tuple(tensor.data_ptr() for tensor in self.tensors().values()),
        )

    def mark_dynamic(self) -> None:
        """Tell Dynamo, where it is loaded, that batch sizes vary, so that no size of this step is compiled in."""
        if "torch._dynamo" not in sys.modules:
            return
        for name, tensor in self.tensors().items():
            mark_once(tensor, *_VARYING.get(name, (0,)))

    def check(self, block_size: int, num_blocks: int | None = None) -> None:
        """Test what only a device sync can tell; for tests and debugging.

        Args:
            block_size: tokens per cache block.
            num_blocks: blocks of the cache; `None` leaves the upper bound of block ids and slots untested.

        Raises:
            MetadataError: offsets fall, a length is shorter than its query, a used block id or a slot is out of range,
                two tokens share a slot, a padding row has a slot, a tree id names no tree, or the builder has written
                another step over this one.
        """
        step_of(self, "check()")
        block_size = read_count("block_size", block_size, 1, "pass that of the cache", MetadataError)
        if num_blocks is not None:
            num_blocks = read_count("num_blocks", num_blocks, 1, "pass that of the cache, or None", MetadataError)
        host = {name: tensor.cpu() for name, tensor in self.tensors().items() if not name.startswith("plans.")}
        _check_shapes(host)
        _check_lengths(host["query_start_loc"].long(), host["seq_lens"].long(), self.num_actual_tokens)
        if host["block_table"].shape[1] or bool((host["slot_mapping"] >= 0).any()):
            held = host.get("local_seq_lens", host["seq_lens"]).long()
            check_block_table(host["block_table"], held, block_size, num_blocks)
        check_slots(host["slot_mapping"], block_size, num_blocks)
        real = int(host["query_start_loc"][-1])
        if bool((host["slot_mapping"][real:] >= 0).any()):
            raise MetadataError(
                f"padding row {real + int((host['slot_mapping'][real:] >= 0).nonzero()[0])} has a slot",
                "slot -1 for every row from query_start_loc[-1] on",
                "pad slot_mapping with -1",
            )
        if "tree_id" in host:
            trees = host["tree_bias"].shape[0] if "tree_bias" in host else 0
            check_tree_ids(host["tree_id"], trees)
        if "encoder_seq_lens" in host and "cross_block_table" in host:
            check_block_table(host["cross_block_table"], host["encoder_seq_lens"].long(), block_size, num_blocks)
        if "cross_slot_mapping" in host:
            check_slots(host["cross_slot_mapping"], block_size, num_blocks, "cross_slot_mapping")
        if "logits_indices" in host and "logits_start_loc" in host:
            _check_logits(host["query_start_loc"].long(), host["logits_start_loc"].long(), host["logits_indices"])


_NAMES = tuple(each.name for each in fields(AttentionMetadata))

TENSOR_FIELDS = _NAMES[: _NAMES.index("plans")]
"""Fields of `AttentionMetadata` that hold a tensor, or may."""

_OPTIONAL_FIELDS = tuple(name for name in TENSOR_FIELDS[4:] if name != "causal")

_DTYPES = {
    "slot_mapping": torch.int64,
    "positions": torch.int64,
    "tree_bias": torch.float32,
    "cross_slot_mapping": torch.int64,
    "logits_indices": torch.int64,
    "whole_blocks": torch.int64,
    "whole_rows": torch.int64,
}

_VARYING = {"tree_bias": (0, 1, 2), "whole_table": (0, 1)}
"""Dimensions that vary from step to step, where it is not just the first one."""

_ANY_INDEX = (
    "query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions", "encoder_seq_lens", "cross_block_table",
    "cross_slot_mapping", "encoder_start_loc",
)  # fmt: skip
"""Fields that may be int32 or int64."""

_PAIRS = (
    ("tree_bias", "tree_id"),
    ("encoder_seq_lens", "cross_block_table"),
    ("logits_indices", "logits_start_loc"),
    ("prefix_lens", "prefix_start_loc"),
    ("prefix_lens", "suffix_lens"),
    ("prefix_lens", "suffix_block_table"),
)
"""Fields that are given together or not at all."""

_OWN_ROWS = ("tree_bias", "cross_slot_mapping", "logits_indices")
"""Fields of which no other gives the number of rows."""


def mark_once(tensor: Tensor, *dims: int) -> None:
    """Tell Dynamo that sizes of a tensor vary, once per tensor.

    Every layer marks the same tensors of a step, and asking Dynamo takes a tenth of the time of marking.
    """
    if not set(dims) <= getattr(tensor, "_dynamo_weak_dynamic_indices", set()):
        torch._dynamo.maybe_mark_dynamic(tensor, list(dims))


def step_of(metadata: object, where: str) -> AttentionMetadata:
    """Return the metadata of a step that `where` takes.

    Raises:
        MetadataError: something else, or a step over which its builder has written another one.
    """
    if not isinstance(metadata, AttentionMetadata):
        raise MetadataError(
            f"{where} got metadata of type {type(metadata).__name__}",
            "AttentionMetadata",
            "pass what builder.build returned, or its .common where it has one",
        )
    if is_rewritten(metadata):
        raise rewritten(metadata, where)
    return metadata


def _check_shapes(host: dict[str, Tensor]) -> None:
    num_reqs, num_tokens = host["seq_lens"].shape[0], host["slot_mapping"].shape[0]
    for pair in _PAIRS:
        missing = [name for name in pair if name not in host]
        if len(missing) == 1:
            raise MetadataError(f"only one of {pair[0]} and {pair[1]}", "both or neither", f"give {missing[0]} too")
    offsets = dict.fromkeys(("query_start_loc", "logits_start_loc", "encoder_start_loc"), num_reqs + 1)
    first = {**offsets, "slot_mapping": num_tokens, "positions": num_tokens, "prefix_lens": 2, "prefix_start_loc": 3}
    dims = {"block_table": 2, "tree_bias": 3, "mm_ranges": 3, "cross_block_table": 2, "suffix_block_table": 2}
    for name, tensor in host.items():
        dtype = tensor.dtype if name in _ANY_INDEX and tensor.dtype in INDEX_DTYPES else _DTYPES.get(name, torch.int32)
        rows = tensor.shape[0] if name in _OWN_ROWS else first.get(name, num_reqs)
        if tensor.dtype != dtype or tensor.dim() != dims.get(name, 1) or tensor.shape[0] != rows:
            raise MetadataError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}",
                f"{dtype} of {dims.get(name, 1)} dimensions, {rows} rows",
                "make the metadata with AttentionMetadataBuilder",
            )


def _check_lengths(starts: Tensor, seq_lens: Tensor, num_actual_tokens: int) -> None:
    query_lens = starts.diff()
    if int(starts[0]) != 0 or bool((query_lens < 0).any()):
        raise MetadataError(
            f"query_start_loc {starts.tolist()}",
            "offsets that start at 0 and never fall",
            "pass cumulative query lengths",
        )
    if num_actual_tokens and int(starts[-1]) > num_actual_tokens:
        raise MetadataError(
            f"query_start_loc ends at {int(starts[-1])} with num_actual_tokens={num_actual_tokens}",
            "at most as many tokens",
            "set both from the query lengths",
        )
    check_seq_lens(query_lens, seq_lens)


def _check_logits(starts: Tensor, kept: Tensor, indices: Tensor) -> None:
    """Raise MetadataError where the kept rows are not the last ones of their requests."""
    counts = kept.diff()
    if int(kept[0]) != 0 or bool(((counts < 0) | (counts > starts.diff())).any()) or int(kept[-1]) > indices.shape[0]:
        raise MetadataError(
            f"logits_start_loc {kept.tolist()} for {indices.shape[0]} rows",
            "offsets that start at 0, never fall, and keep no more rows than a request has",
            "use build(num_logits=...)",
        )
    ends = torch.repeat_interleave(starts[1:] - kept[1:], counts)
    if not torch.equal(indices[: int(kept[-1])], ends + torch.arange(int(kept[-1]), device="cpu")):
        raise MetadataError(
            f"logits_indices {indices[: int(kept[-1])].tolist()} with requests that end before rows "
            f"{starts[1:].tolist()}",
            "the last rows of each request: a query that leaves out later rows sits at a wrong position",
            "keep every row from the first needed one to the end of its request",
        )


def with_sinks(seq_lens: Tensor, sink_len: int) -> Tensor:
    """Return lengths that count sink tokens in front of every request; a request of length 0 stays empty."""
    return torch.add(seq_lens, seq_lens.clamp(0, 1), alpha=sink_len) if sink_len else seq_lens


def sink_plan_key(backend_key: str, sink_len: int) -> str:
    """Return the key in `AttentionMetadata.plans` of a kind of layer: its backend's, apart for lengths with sinks."""
    return f"{backend_key} sink_len={sink_len}" if sink_len else backend_key


def host_plan_key(key: str) -> str:
    """Return the key in `AttentionMetadata.plans` of the host's half of the schedule that `key` names."""
    return f"{key} (host)"
