"""Asks a region what it computes: runs it on chosen inputs and compares, bit for bit, with the reference quantisers.

The inputs hold FP8 rounding midpoints (there multiplying by a reciprocal and dividing differ), values beyond the range,
rows of zeros, subnormals, outliers, infinities and NaN, at two token counts, under scales that are no power of two.
FP8 casts are run without saturation, as an eager CUDA cast is: a region that needs a cast to saturate needs a clamp.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from vattn import quantization
from vattn.formats import FP8_E4M3_MAX, MODEL_DTYPES, OUTPUT_FORMATS, OutputFormat
from vattn.passes.region import FP8_DTYPES, Refusal, Region, expression, value

PROBE_SCALES = (7 / 512, 0.0137, 233 / 16384, 5 / 16, 157 / 64, 1 / 17, 1 / 29)
"""Static scales under which a region is run. FP8 midpoints times a multiple of 7 are exact in bf16, and a quarter of
them rounds otherwise when multiplied by the reciprocal (3 and 5 show no difference). Scales of eight bits, all that
bf16 has, tell fp32 math from bf16 math; reciprocals of odd numbers tell it from fp64."""

TOKEN_COUNTS = (31, 5)
NO_CLAMP = "no clamp before the cast: beyond the range, casts saturate on one device and give NaN on another"
_SMALL_STEPS = (2.0**-6, 2.0**-12, 2.0**-18, 2.0**-24)
_LARGEST_FINITE_CAST = 464.0
"""A cast that does not saturate makes NaN of everything beyond; up to here it rounds to 448."""


@dataclass(frozen=True)
class Inputs:
    """What a region reads besides the attention output.

    Attributes:
        sizes: nodes that hold a size.
        constants: tensors known at compile time.
        scales: float tensors of one value that are known only when the graph runs.
    """

    sizes: tuple[Node, ...]
    constants: dict[Node, Tensor]
    scales: tuple[Node, ...]


@dataclass(frozen=True)
class Match:
    """What a region was found to compute.

    Attributes:
        output_format: name in `OUTPUT_FORMATS`.
        arithmetic, min_scale: `output_arithmetic` and `output_min_scale` of the config.
        scale: position in `Inputs.scales`, or the constant static scale, or `None` for formats without one.
        codes: positions in the probed nodes that hold the codes.
        block_scales: positions of those that hold the computed scales, and how: `"plain"`, `"transposed"` or
            `"swizzled"`.
    """

    output_format: str
    arithmetic: str
    min_scale: float | None
    scale: int | float | None
    codes: tuple[int, ...]
    block_scales: tuple[tuple[int, str], ...]


@contextmanager
def isolated() -> Iterator[None]:
    """Compute on real CPU tensors, whatever modes, devices or autocast the compiler or the user have switched on."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def find_inputs(nodes: Sequence[Node], output: Node) -> Inputs:
    """Sort what the nodes read from outside.

    Raises:
        Refusal: they read a tensor that is no scale.
    """
    inside = {output, *nodes}
    sizes: list[Node] = []
    constants: dict[Node, Tensor] = {}
    scales: list[Node] = []
    for node in nodes:
        for source in node.all_input_nodes:
            if source in inside or source in sizes or source in constants or source in scales:
                continue
            val = value(source)
            if isinstance(val, (int, torch.SymInt)):
                sizes.append(source)
                continue
            known = constant(source)
            if known is not None:
                constants[source] = known
            elif isinstance(val, Tensor) and val.is_floating_point() and _is_one(val.numel()):
                scales.append(source)
            else:
                shape = tuple(val.shape) if isinstance(val, Tensor) else type(val).__name__
                raise Refusal(f"the region reads {source.name} of shape {shape}, which is no scale", node, near=True)
    return Inputs(tuple(sizes), constants, tuple(scales))


def _is_one(count: Any) -> bool:
    return isinstance(count, int) and count == 1


def constant(node: Node, depth: int = 8) -> Tensor | None:
    """Return the value of a node that no input of the graph has a part in, `None` for any other."""
    if node.op == "get_attr":
        owner: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part, None)
        return owner.detach().cpu() if isinstance(owner, Tensor) and owner.numel() <= 4096 else None
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or depth == 0:
        return None
    val = value(node)
    if not isinstance(val, Tensor) or not isinstance(val.numel(), int) or val.numel() > 4096:
        return None
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    env: dict[Node, Any] = {}
    for source in node.all_input_nodes:
        env[source] = constant(source, depth - 1)
        if env[source] is None:
            return None
    return run_node(node, env)


def run_node(node: Node, env: dict[Node, Any]) -> Any:
    """Run one node on CPU."""
    args: Any = torch.fx.map_arg(node.args, env.__getitem__)
    kwargs = dict(torch.fx.map_arg(node.kwargs, env.__getitem__))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    if node.target is torch.ops.prims.convert_element_type.default and args[1] in FP8_DTYPES:
        return unsaturated_cast(args[0], args[1])
    if node.target is torch.ops.prims.device_put.default:
        return args[0]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def unsaturated_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to FP8 as eager CUDA does: NaN beyond the range."""
    if dtype is not torch.float8_e4m3fn or not x.is_floating_point():
        return x.to(dtype)
    wide = x.float()
    return torch.where(wide.abs() > _LARGEST_FINITE_CAST, torch.nan, wide).to(dtype)


def set_sizes(sizes: Sequence[Node], output: Node, tokens: int) -> dict[Node, Any]:
    """Return the value of every size when the graph runs on `tokens` tokens."""
    return {node: size_at(value(node), output, tokens) for node in sizes}


def size_at(size: Any, output: Node, tokens: int) -> int:
    """Return a size when the graph runs on `tokens` tokens, which is the first size of `output`.

    Raises:
        Refusal: it depends on something else too.
    """
    symbol, found = expression(value(output).shape[0]), expression(size)
    if symbol.is_Symbol:
        found = found.subs(symbol, tokens)
    if not found.is_Integer:
        raise Refusal(f"the region depends on the size {size}, which varies with no token count", output)
    return int(found)


def run(nodes: Sequence[Node], output: Node, inputs: Inputs, x: Tensor, scale: float) -> dict[Node, Any]:
    """Run a region on one attention output `[T, H, V]` and one scale; returns the value of every node."""
    env: dict[Node, Any] = {output: x, **inputs.constants, **set_sizes(inputs.sizes, output, x.shape[0])}
    for node in inputs.scales:
        env[node] = torch.full(tuple(value(node).shape), scale, dtype=value(node).dtype)
    for node in nodes:
        env[node] = env[node.args[0]][node.args[1]] if node.target is operator.getitem else run_node(node, env)  # type: ignore[index]
    return env


def probe_values(columns: int, scale: float) -> Tensor:
    """Return fp32 rows `[R, columns]` that tell quantisers apart."""
    rng = torch.Generator().manual_seed(1)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat(((codes[1:] + codes[:-1]) / 2, codes))
    ties = torch.cat((ties, -ties, torch.tensor([449.0, 463.0, 465.0, 480.0, 1000.0, -460.0, -1e4])))
    static = _rows(ties * scale, columns)
    ramp = torch.exp2(torch.arange(columns).div(16, rounding_mode="floor") % 17 - 8.0)
    noise = torch.randn(6, columns, generator=rng)
    dynamic = []
    for step in (7 / 512, 1.0, 7 / 16, 1.7e-3, *_SMALL_STEPS):
        # A maximum of 448 steps in every group makes each of these ties a tie under the group's own scale.
        rows = _rows(ties[ties.abs() <= 448][torch.randperm(501, generator=rng)] * step, columns)
        rows[:, ::16] = 448 * step
        # Small maxima, exactly at a power of two, show what is added to them.
        dynamic.append(rows[:1] if step in _SMALL_STEPS else rows[:2])
    tiny = torch.stack([torch.full((columns,), size) for size in (0.0, 1e-39, 1e-12, 3e-8, 2e-5)])
    tiny[1:, ::3] = 0
    outlier, infinite, nan = noise[5].clone(), noise[5].clone(), noise[5].clone()
    outlier[columns // 3], infinite[columns // 2], nan[columns // 5] = 3e4, torch.inf, torch.nan
    special = torch.stack((outlier, -outlier, infinite, nan))
    scaled = torch.stack((noise[0], noise[1] * 200 * scale, noise[2] * ramp, noise[3] * ramp.flip(0), noise[4] * 1e-3))
    return torch.cat((tiny[:1], scaled, *dynamic, special, tiny[1:], static))


def _rows(values: Tensor, columns: int) -> Tensor:
    rows = -(-values.numel() // columns)
    return values.repeat(-(-rows * columns // values.numel()))[: rows * columns].view(rows, columns)


def probe_outputs(output: Node, config_dtype: str, scale: float) -> Iterator[Tensor]:
    """Yield attention outputs `[T, H, V]` in the model dtype, at two token counts where the graph leaves them open."""
    tokens, heads, width = value(output).shape
    rows = probe_values(int(heads) * int(width), scale).to(MODEL_DTYPES[config_dtype])
    counts = (tokens,) if isinstance(tokens, int) else TOKEN_COUNTS
    for count in counts:
        needed = -(-len(rows) // count) if count == counts[0] else 1
        filled = rows.repeat(-(-needed * count // len(rows)), 1)
        for part in range(needed):
            yield filled[part * count : (part + 1) * count].view(count, int(heads), int(width))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same elements in order, bit for bit but for NaN, in whatever shapes."""
    if a.numel() != b.numel() or a.dtype != b.dtype:
        return False
    a, b = a.reshape(-1), b.reshape(-1)
    if a.is_floating_point():
        nan_a, nan_b = a.float().isnan(), b.float().isnan()
        if not torch.equal(nan_a, nan_b):
            return False
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        return bool(((a.view(integer) == b.view(integer)) | nan_a).all())
    return torch.equal(a, b)


Quantise = Callable[[Tensor, float], tuple[Tensor, "Tensor | None"]]


@dataclass(frozen=True)
class Quantiser:
    """One way to quantise that an attention op has: a format in its plain layout, its arithmetic and its floor."""

    fmt: OutputFormat
    arithmetic: str = "divide"
    min_scale: float | None = None

    def __call__(self, rows: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """Return codes of rows `[T, N]` and the computed scales, if any."""
        static = torch.tensor([scale], dtype=torch.float32) if self.fmt.static_scale else None
        return quantization.quantise_rows(rows, self.fmt, static, self.arithmetic, self.min_scale)


@dataclass(frozen=True)
class Sample:
    """One run of a region: the rows that went in, the scale, and the value of every node."""

    rows: Tensor
    scale: float
    values: dict[Node, Any]


def samples(region: Region, nodes: list[Node], inputs: Inputs, dtype: str) -> list[Sample]:
    """Run a region on all probe inputs."""
    made = []
    for scale in PROBE_SCALES if inputs.scales else (PROBE_SCALES[0], *_constant_scales(nodes, inputs)[:3]):
        exact = min((float(torch.tensor(scale).to(value(node).dtype)) for node in inputs.scales), default=scale)
        for x in probe_outputs(region.output, dtype, exact):
            env = run(nodes, region.output, inputs, x, exact)
            made.append(Sample(x.reshape(x.shape[0], -1), exact, env))
    return made


def candidates(
    columns: int, names: Sequence[str], quantised: Node, numbers: Sequence[float], dtype: str
) -> Iterator[Quantiser]:
    """Yield what could have made the quantised tensor of rows of so many columns, the op's defaults first.

    Args:
        numbers: constants of the region; one of them may be the floor under the scale, or under the maximum.
    """
    container = value(quantised).dtype
    floors: dict[float | None, None] = {None: None, 0.0: None}
    for number in numbers:
        rounded = torch.tensor(number).to(MODEL_DTYPES[dtype]).float()
        for least in (torch.tensor(number), torch.tensor(number) / FP8_E4M3_MAX, rounded / FP8_E4M3_MAX, rounded):
            if 0 < float(least) < 1:
                floors[float(least)] = None
    for arithmetic in ("divide", "multiply") if container == torch.float8_e4m3fn else ("divide",):
        for name in names:
            fmt = OUTPUT_FORMATS[name]
            fits = fmt.group_size <= 0 or columns % fmt.group_size == 0
            if fmt.container == container and fits and not fmt.column_major and not fmt.swizzled:
                for floor in [None] if fmt.static_scale else floors:
                    yield Quantiser(fmt, arithmetic, floor)


def classify(
    region: Region, quantised: Node, nodes: list[Node], inputs: Inputs, dtype: str, names: Sequence[str]
) -> Match:
    """Find out in which format the region writes `quantised`.

    Args:
        nodes: the part of the region to run, `quantised` included.
        names: formats that may be used.

    Raises:
        Refusal: in none that there is.
    """
    if len(inputs.scales) > 1:
        listed = ", ".join(node.name for node in inputs.scales)
        raise Refusal(f"the region reads more than one unknown value ({listed})", quantised, near=True)
    runs = samples(region, nodes, inputs, dtype)
    columns = runs[0].rows.shape[1]
    constants: list[float] = [] if inputs.scales else _constant_scales(nodes, inputs)
    found: Match | None = None
    for way in candidates(columns, names, quantised, constants, dtype):
        if inputs.scales and not way.fmt.static_scale:
            continue
        for constant in constants if way.fmt.static_scale and constants else [None]:
            wanted = _equal_throughout(way, quantised, runs, constant)
            if wanted is None:
                continue
            static = (0 if inputs.scales else constant) if way.fmt.static_scale else None
            codes = tuple(i for i, node in enumerate(nodes) if _equal_nodes(node, quantised, runs))
            scales = _scale_nodes(nodes, runs, wanted)
            # Floors that differ by little give the same codes; the right one gives the same scales too.
            if found is None or (scales and not found.block_scales):
                found = Match(way.fmt.name, way.arithmetic, way.min_scale, static, codes, scales)
            if scales or way.fmt.static_scale:
                return found
    if found is not None:
        return found
    raise Refusal(_explain(quantised, runs, columns, constants or [None]), quantised, near=True)


def _equal_nodes(node: Node, other: Node, runs: list[Sample]) -> bool:
    values = [(run.values[node], run.values[other]) for run in runs]
    return all(isinstance(a, Tensor) and a.dtype == b.dtype and same_bits(a, b) for a, b in values)


def _scale_nodes(nodes: list[Node], runs: list[Sample], wanted: Sequence[Tensor | None]) -> tuple[tuple[int, str], ...]:
    """Return which nodes hold the computed scales, and how."""
    scales = [tensor for tensor in wanted if tensor is not None]
    if len(scales) != len(runs):
        return ()
    layouts = {"plain": scales, "transposed": [tensor.t() for tensor in scales]}
    if scales[0].dtype == torch.float8_e4m3fn:
        layouts["swizzled"] = [quantization.swizzle_block_scales(tensor) for tensor in scales]
    found = []
    for index, node in enumerate(nodes):
        for layout, expected in layouts.items():
            if all(_holds(run.values[node], tensor) for run, tensor in zip(runs, expected, strict=True)):
                found.append((index, layout))
                break
    return tuple(found)


def _holds(got: Any, scales: Tensor) -> bool:
    if not isinstance(got, Tensor) or got.numel() != scales.numel():
        return False
    if got.dtype == torch.uint8:
        scales = scales.contiguous().view(torch.uint8)
    return same_bits(got, scales)


def _equal_throughout(
    quantise: Quantise, quantised: Node, runs: list[Sample], constant: float | None
) -> list[Tensor | None] | None:
    """Return the computed scales of every run if a quantiser gives the region's codes in all of them, else `None`."""
    wanted = []
    for sample in runs:
        codes, scales = quantise(sample.rows, sample.scale if constant is None else constant)
        if not same_bits(codes, sample.values[quantised]):
            return None
        wanted.append(scales)
    return wanted


def _constant_scales(nodes: Sequence[Node], inputs: Inputs) -> list[float]:
    """Return static scales that a region without an unknown value could have been written with."""
    found: dict[float, None] = {1.0: None}
    for tensor in inputs.constants.values():
        if tensor.numel() == 1 and tensor.is_floating_point():
            found[float(tensor)] = None
    for node in nodes:
        for argument in node.args:
            if isinstance(argument, float) and 0 < argument < float("inf"):
                found[float(torch.tensor(argument))] = None
    return list(found)


def _explain(quantised: Node, runs: list[Sample], columns: int, constants: Sequence[float | None]) -> str:
    """Say which unsupported quantiser a region is, if it is a well-known one."""
    for reason, quantise in _unsupported(columns).items():
        if any(_equal_throughout(quantise, quantised, runs, constant) is not None for constant in constants):
            return reason
    finite = [s for s in runs if bool(s.rows.isfinite().all())]
    if finite and any(not bool(s.values[quantised].float().isfinite().all()) for s in finite):
        return "finite values become NaN: clamp to +-448 before the cast"
    return "its values are those of no supported format"


def _unsupported(columns: int) -> dict[str, Quantise]:
    """Return well-known quantisers that no output format is, by the reason to give."""

    def clamped(x: Tensor) -> Tensor:
        return x.clamp(-FP8_E4M3_MAX, FP8_E4M3_MAX).to(torch.float8_e4m3fn)

    def unclamped(rows: Tensor, scale: float) -> tuple[Tensor, None]:
        return unsaturated_cast(rows.float() / torch.tensor(scale), torch.float8_e4m3fn), None

    def unclamped_product(rows: Tensor, scale: float) -> tuple[Tensor, None]:
        return unsaturated_cast(rows.float() * torch.tensor(scale), torch.float8_e4m3fn), None

    def per_tensor(rows: Tensor, scale: float) -> tuple[Tensor, None]:
        largest = rows.float().abs().amax().clamp(min=quantization.MIN_ABSMAX) / FP8_E4M3_MAX
        return clamped(rows.float() / largest), None

    return {
        NO_CLAMP: unclamped,
        f"{NO_CLAMP} (with multiplication)": unclamped_product,
        "one dynamic scale for the whole tensor is no supported format; use one per token": per_tensor,
    }
