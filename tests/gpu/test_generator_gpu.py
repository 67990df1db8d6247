"""transformers models and the generator on a GPU: every family, compiled layers, captured decodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vattn
from tests.support import relative_l2

pytest.importorskip("transformers")

from tests.hf_families import FAMILIES, make_model
from vattn.integrations.transformers import enable

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(3, 44)), [7, 5, 90], list(range(50, 70)), [9], list(range(3, 40)), [11, 12] * 9]


@pytest.fixture(autouse=True)
def cuda() -> Any:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    """fp32: sums in another order, and products of the model that a GPU may take in TF32 nowhere."""
    model = make_model(name).cuda()
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0]
    packed = enable(model, num_blocks=17)
    builder = vattn.AttentionMetadataBuilder(4, 64, max_seq_len=128, device="cuda", layers=packed)
    got = []
    for start, end in ((0, 30), (30, 31), (31, 41)):
        step = builder.build([end - start, 2], [end, 2], [list(range(1, 9)), [9]])
        rows = torch.cat((ids[0, start:end], ids[0, :2]))
        with torch.no_grad(), vattn.forward_context(step):
            got.append(packed(rows, step.positions)[: end - start])
    assert relative_l2(torch.cat(got).cpu(), expected.cpu()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_generator_gives_the_same_tokens(dtype: torch.dtype) -> None:
    """Where texts part, the two best logits are a near tie of that dtype."""
    model = make_model("llama", head_dim=64).to("cuda", dtype)
    alone = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(16):
                ids.append(int(model(input_ids=torch.tensor([ids], device="cuda")).logits[0, -1].argmax()))
            alone.append(ids[len(prompt) :])
    packed = enable(model, num_blocks=64)
    generator = vattn.Generator(packed, max_num_reqs=4, token_budget=32, max_seq_len=128)
    assert generator.graphs is not None and generator.graphs.report.reason is None
    sampling = vattn.Sampling(16, stop_token_ids=())
    done = generator.generate(PROMPTS, sampling) + generator.generate(PROMPTS, sampling)
    assert sum(request.reused for request in done) > 0
    generator.scheduler.pool.check()
    assert generator.scheduler.pool.num_used == 0
    from vattn.integrations.transformers import disable

    disable(packed)
    for request, want in zip(done, alone * 2, strict=True):
        if request.output == want:
            continue
        at = next(i for i, (a, b) in enumerate(zip(request.output, want, strict=True)) if a != b)
        ids = torch.tensor([request.prompt + want[:at]], device="cuda")
        with torch.no_grad():
            best = model(input_ids=ids).logits[0, -1].float().topk(2).values
        assert best[0] - best[1] < (1e-3 if dtype == torch.float32 else 0.1) * best[0].abs()


def test_samples_repeat_and_failures_stay_alone() -> None:
    model = make_model("llama").cuda()
    packed = enable(model, num_blocks=64)
    generator = vattn.Generator(packed, max_num_reqs=4, token_budget=64, max_seq_len=128, compile="none")
    wanted = [vattn.Sampling(10, temperature=1.5, top_p=0.9, seed=seed, stop_token_ids=()) for seed in (1, 2, 1)]
    first, second, third = generator.generate([PROMPTS[1]] * 3, wanted)
    assert first.output == third.output != second.output
    with torch.no_grad():
        model.model.embed_tokens.weight[91] = torch.nan
    poisoned, fine = generator.generate([[5, 91], [5, 6]], vattn.Sampling(4, stop_token_ids=()))
    assert (poisoned.state, fine.state) == ("failed", "finished")
