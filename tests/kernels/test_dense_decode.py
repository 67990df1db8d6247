"""Single rows over dense keys, against attention in fp64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from vattn.kernels.triton.attention import dense_decode


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return `[B, 1, heads, D_v]` in fp64."""
    group, length = query.shape[1] // key.shape[1], key.shape[2]
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    place = torch.arange(length, device=query.device)
    seen = place >= first.long().view(-1, 1).clamp(min=0 if window is None else max(0, length - window))
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        extra = sinks.double().view(1, -1, 1, 1).expand(query.shape[0], -1, 1, 1)
        scores = torch.cat([scores, extra], dim=3)
    weights = scores.softmax(dim=3)[..., :length].nan_to_num(0.0)
    return (weights @ values.masked_fill(~seen[:, None, :, None], 0.0)).transpose(1, 2)


CASES = [
    (3, 8, 2, 64, 64, 77, None, None, False),
    (1, 4, 4, 80, 48, 300, None, None, False),
    (2, 24, 2, 128, 128, 211, 90, 30.0, True),
    (2, 3, 1, 16, 16, 1, None, None, True),
]


def check(case: tuple[object, ...], dtype: torch.dtype, device: str, error: float) -> None:
    batch, heads, kv_heads, width, width_v, length, window, cap, with_sinks = case
    random = torch.Generator().manual_seed(4)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    # A cache has room after the keys, in which lies anything.
    query = randn(batch, 1, heads, width).transpose(1, 2)
    key, value = (torch.full((batch, kv_heads, length + 9, each), torch.nan, dtype=dtype) for each in (width, width_v))
    key, value = (each.to(device)[:, :, :length] for each in (key, value))
    key.copy_(randn(*key.shape))
    value.copy_(randn(*value.shape))
    first = torch.tensor([0, length // 2, length], dtype=torch.int32)[:batch].to(device)
    if batch == 1:
        first = first.view(1, 1, 1, 1).expand(1, 2, 1, length)
    else:
        for row, begin in enumerate(first.tolist()):
            key[row, :, :begin], value[row, :, :begin] = torch.nan, torch.nan
    sinks = randn(heads) if with_sinks else None
    rest = first.reshape(-1)[:batch], 0.11, window, cap, sinks
    run = dense_decode.try_decode if device == "cuda" else dense_decode.decode
    for _ in range(3):
        found = run(query, key, value, first, *rest[1:])
        expected = reference(query, key.nan_to_num(0.0), value, *rest)
        assert found.shape == (batch, 1, heads, width_v)
        assert float((found.double() - expected).abs().max()) < error


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("splits", [1, 5])
def test_rows_see_their_keys(monkeypatch: pytest.MonkeyPatch, case: tuple[object, ...], splits: int) -> None:
    """In fp32: sums of few hundred terms. Programs that share a head leave their counter at 0 for the next launch."""
    monkeypatch.setattr(dense_decode, "_scratch", {})
    monkeypatch.setattr(dense_decode, "TILE", 16)
    monkeypatch.setattr(dense_decode, "_cut", lambda keys, *_: (-(-keys // (-(-keys // splits))), -(-keys // splits)))
    check(case, torch.float32, "cpu", 1e-5)
    for _, counters in dense_decode._scratch.values():
        assert not counters.any()


def test_a_launch_passes_what_the_first_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """By position, with addresses instead of tensors."""
    names, calls = dense_decode.dense_decode_kernel.arg_names, list[dict[str, object]]()

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, stream: calls.append(dict(zip(names, args, strict=True)))

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def run(*args: object, num_warps: int, num_stages: int, **options: object) -> Compiled:
                given = dict(zip(names, args, strict=False)) | options
                calls.append(
                    {name: getattr(each, "data_ptr", lambda each=each: each)() for name, each in given.items()}
                )
                return Compiled()

            return run

    monkeypatch.setattr(dense_decode, "dense_decode_kernel", Kernel())
    monkeypatch.setattr(dense_decode, "JITFunction", Kernel)
    monkeypatch.setattr(dense_decode, "_stream", lambda device: 0)
    monkeypatch.setattr(dense_decode, "_is_ready", lambda *tensors: True)
    monkeypatch.setattr(dense_decode, "_fits", lambda *tensors: True)
    monkeypatch.setattr(dense_decode, "_launchers", {})
    monkeypatch.setattr(dense_decode, "_calls", {})
    query, key, value = (torch.zeros(2, heads, length, 32) for heads, length in ((4, 1), (2, 40), (2, 40)))
    first = torch.zeros(2, dtype=torch.int32)
    for _ in range(3):
        dense_decode.try_decode(query, key, value, first, 0.3, 9, 20.0, torch.zeros(4))
    for name in ("output", "sinks"):
        assert all(isinstance(call.pop(name), int) for call in calls)
    assert calls[0] == calls[1] == calls[2] and len(calls[0]) == len(names) - 2
    # Another layout, scale or cap, and a tensor elsewhere, are not taken for the last one.
    for other in (
        (query, key[:, :, :39], value[:, :, :39], first, 0.3, 9, 20.0),
        (query, key, value, first, 0.2, 9, None),
    ):
        dense_decode.try_decode(*other, torch.zeros(4))
    assert calls[3]["num_keys"] == 39 and calls[4]["scale"] == 0.2 * dense_decode.LOG2E.value


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 0.03), (torch.float16, 4e-3)])
@pytest.mark.parametrize("case", [*CASES, (1, 32, 8, 128, 128, 5000, None, None, False)], ids=str)
def test_rows_see_their_keys_on_a_gpu(case: tuple[object, ...], dtype: torch.dtype, error: float) -> None:
    """Results and weights are rounded to the dtype: a few of its last bits of numbers up to 4."""
    check(case, dtype, "cuda", error)


@pytest.mark.gpu
def test_what_it_takes() -> None:
    def made(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    query, key, first = made(1, 8, 1, 64), made(1, 2, 40, 64), made(1, dtype=torch.int32)
    assert dense_decode.accepts(query, key, key, first)
    assert not dense_decode.accepts(query, key, key, first.cpu())
    assert not dense_decode.accepts(query.float(), key.float(), key.float(), first)
    assert not dense_decode.accepts(query, key[..., 1:], key[..., 1:], first)
    assert not dense_decode.accepts(query.cpu(), key.cpu(), key.cpu(), first.cpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.add_(0)
        assert not dense_decode.accepts(query, key, key, first), "a counter is of a stream, which a replay may leave"
