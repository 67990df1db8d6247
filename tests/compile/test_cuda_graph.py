"""CUDAGraphRunner without a GPU: padding, static inputs, the contract and its errors.."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vattn
from vattn.errors import ConfigError, GraphContractError, MetadataError, UnsupportedRequestError

WIDTH, BLOCK = 32, 8


class Model(nn.Module):
    """One attention layer that also returns one row per request."""

    def __init__(self) -> None:
        super().__init__()
        cache = vattn.CacheConfig(block_size=BLOCK)
        self.attn = vattn.Attention(2, 16, 0.25, cache_config=cache)

    def forward(self, x: Tensor, positions: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        y = self.attn(x + positions[:, None] / 100, x, x)
        return y, y[last]


def make_inputs(step: vattn.AttentionMetadata) -> list[Tensor]:
    tokens, reqs = step.slot_mapping.shape[0], step.seq_lens.shape[0]
    assert step.positions is not None
    return [torch.zeros(tokens, WIDTH), step.positions, torch.zeros(reqs, dtype=torch.int64)]


def make_runner(**changes: object) -> tuple[Model, vattn.CUDAGraphRunner]:
    torch.manual_seed(0)
    model = Model()
    vattn.allocate_kv_cache(model, num_blocks=32, dtype=torch.float32)
    builder = vattn.AttentionMetadataBuilder(8, 32, 64, BLOCK, layers=model, max_mm_ranges=1)
    options: dict[str, object] = {"batch_sizes": [1, 4, 8], **changes}
    return model, vattn.CUDAGraphRunner(model, builder=builder, make_inputs=make_inputs, **options)  # type: ignore[arg-type]


def fill(model: Model) -> None:
    model.attn.kv_cache.normal_(generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_reqs", range(1, 9))
def test_padded_step_equals_unpadded(num_reqs: int) -> None:
    model, runner = make_runner()
    seq_lens = [1 + 5 * i for i in range(num_reqs)]
    tables = [[i, i + 8, i + 16, i + 24, 8][:5] for i in range(num_reqs)]
    x, last = torch.randn(num_reqs, WIDTH), torch.arange(num_reqs)
    fill(model)
    step = runner.build([1] * num_reqs, seq_lens, tables)
    assert step.slot_mapping.shape[0] == next(size for size in (2, 4, 8) if size >= num_reqs)
    got = runner(x, step.positions[:num_reqs], last, metadata=step)
    cache = model.attn.kv_cache.clone()

    fill(model)
    builder = vattn.AttentionMetadataBuilder(8, 32, 64, BLOCK)
    plain = builder.build([1] * num_reqs, seq_lens, tables)
    with vattn.forward_context(plain), torch.no_grad():
        want = model(x, plain.positions, last)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # other batch shapes may sum in another order
    assert torch.equal(cache, model.attn.kv_cache)


def test_capture_leaves_the_cache_alone() -> None:
    model = Model()
    vattn.allocate_kv_cache(model, num_blocks=32, dtype=torch.float32)
    fill(model)
    before = model.attn.kv_cache.clone()
    builder = vattn.AttentionMetadataBuilder(8, 32, 64, BLOCK, layers=model)
    vattn.CUDAGraphRunner(model, [8, 2], builder, make_inputs)
    assert torch.equal(before, model.attn.kv_cache)


def test_says_why_there_are_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="vattn"):
        _, runner = make_runner()
    assert runner.report.reason == "device cpu"
    assert str(runner.report) == "no CUDA graphs: device cpu; batch sizes 8, 4, 1 run the function directly"
    assert str(runner.report) in [record.message for record in caplog.records]


def test_padding_rows_of_inputs_are_zero_and_stale_rows_never_show() -> None:
    model, runner = make_runner(batch_sizes=[4])
    x = torch.full((4, WIDTH), float("nan"))
    tables = [[1], [2], [3], [4]]
    step = runner.build([1] * 4, [1] * 4, tables)
    runner(x, step.positions, torch.arange(4), metadata=step)
    model.attn.kv_cache.zero_()
    step = runner.build([1], [1], tables[:1])
    output, row = runner(torch.ones(1, WIDTH), step.positions, torch.zeros(1, dtype=torch.int64), metadata=step)
    assert output.shape == row.shape == (1, WIDTH) and bool(output.isfinite().all())


def test_one_request_of_one_token_is_padded_to_two_tokens() -> None:
    """One token would compile a graph of its own, and two rows for one request miss the decode kernels."""
    _, runner = make_runner(batch_sizes=[1, 2, 4])
    assert [(cost.batch_size, cost.num_tokens) for cost in runner.report.costs] == [(4, 4), (2, 2)]
    step = runner.build([1], [1], [[0]])
    assert step.slot_mapping.tolist() == [0, -1]
    outputs = runner(torch.ones(1, WIDTH), step.positions, torch.zeros(1, dtype=torch.int64), metadata=step)
    assert [output.shape[0] for output in outputs] == [1, 1]


def test_step_beyond_the_captures_is_refused() -> None:
    _, runner = make_runner(batch_sizes=[2, 4])
    assert runner.key_for(5, 5) is None
    with pytest.raises(GraphContractError, match="a step of 5 requests and 5 tokens"):
        runner.build([1] * 5, [1] * 5, [[i] for i in range(5)])
    with pytest.raises(GraphContractError, match="1 requests and 7 tokens"):
        runner.build([7], [7], [[0]])
    with pytest.raises(MetadataError, match="block 32"):
        runner.build([1], [1], [[32]])


def contradiction(runner: vattn.CUDAGraphRunner, kind: str) -> vattn.AttentionMetadata:
    builder = runner.builder
    arguments = ([1], [1], [[0]])
    if kind == "sizes":
        return builder.build(*arguments, num_reqs_padded=3, num_tokens_padded=3)
    if kind == "causal":
        return builder.build(*arguments, num_reqs_padded=4, num_tokens_padded=4, causal=[1])
    if kind == "optional":
        return builder.build(*arguments, num_reqs_padded=4, num_tokens_padded=4, mm_ranges=[[(0, 1)]])
    other = vattn.AttentionMetadataBuilder(8, 32, 64, BLOCK)
    return other.build(*arguments, num_reqs_padded=4, num_tokens_padded=4)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("sizes", "num_reqs 3, captured 4"),
        ("causal", "causal 'per_request', captured 'layer'"),
        ("optional", "mm_ranges"),
        ("buffers", "buffers moved"),
    ],
)
def test_metadata_that_contradicts_the_capture(kind: str, text: str) -> None:
    _, runner = make_runner(batch_sizes=[4, 8])
    step = contradiction(runner, kind)
    with pytest.raises(GraphContractError) as caught:
        runner(*make_inputs(step), metadata=step)
    assert text in str(caught.value)


def test_inputs_that_contradict_the_capture() -> None:
    _, runner = make_runner(batch_sizes=[4])
    step = runner.build([1], [1], [[0]])
    good = make_inputs(step)
    with pytest.raises(GraphContractError, match="2 inputs"):
        runner(*good[:2], metadata=step)
    for index, wrong in [(0, torch.zeros(4, WIDTH + 1)), (0, torch.zeros(5, WIDTH)), (2, torch.zeros(2))]:
        with pytest.raises(GraphContractError, match=f"input {index} is"):
            runner(*good[:index], wrong, *good[index + 1 :], metadata=step)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_new_cache_contradicts_the_capture(by_hand: bool) -> None:
    model, runner = make_runner(batch_sizes=[4])
    step = runner.build([1], [1], [[0]])
    kept = model.attn.kv_cache  # keeps its address from being given out again
    if by_hand:
        model.attn.kv_cache = kept.clone()
    else:
        vattn.allocate_kv_cache(model, num_blocks=32, dtype=torch.float32)
    assert kept is not model.attn.kv_cache
    with pytest.raises(GraphContractError, match="bound again"):
        runner(*make_inputs(step), metadata=step)


def test_rows_that_cannot_be_told_apart() -> None:
    _, runner = make_runner(batch_sizes=[4])
    step = runner.build([3, 0], [3, 1], [[0], [1]])  # 2 requests and 3 tokens, padded to 4 and 4
    with pytest.raises(GraphContractError, match="output_rows"):
        runner(*make_inputs(step), metadata=step)
    _, runner = make_runner(batch_sizes=[4], output_rows="tokens")
    step = runner.build([3, 0], [3, 1], [[0], [1]])
    assert runner(*make_inputs(step), metadata=step)[0].shape == (3, WIDTH)


def test_step_options_and_tokens_per_request() -> None:
    _, runner = make_runner(batch_sizes=[4], tokens_per_request=3, step_options=lambda n: {"causal": [1] * n})
    step = runner.build([3, 2], [9, 2], [[0, 1], [2]], causal=[1, 0])
    assert step.slot_mapping.shape[0] == 12
    output, rows = runner(torch.ones(5, WIDTH), step.positions, torch.tensor([2, 4]), metadata=step)
    assert output.shape[0] == 5 and rows.shape[0] == 2


@pytest.mark.parametrize("sizes", [[], [0], [9], [1.5], [True], [(2, 2.0)]])
def test_bad_batch_sizes(sizes: list[object]) -> None:
    with pytest.raises(ConfigError, match="batch_sizes"):
        make_runner(batch_sizes=sizes)
    with pytest.raises(ConfigError, match="tokens_per_request=0"):
        make_runner(tokens_per_request=0)


def test_a_backend_that_cannot_be_captured_is_refused() -> None:
    _, runner = make_runner()
    with pytest.raises(UnsupportedRequestError, match=r"TORCH_SDPA cannot be captured.*cuda_graphs='never'"):
        runner._refuse_backends()  # what the constructor does on CUDA
