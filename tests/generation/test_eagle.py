"""Heads of EAGLE and EAGLE-3 in the generator: the tokens of plain generation, and the drafts of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

import vattn
from vattn import errors

pytest.importorskip("transformers")

from tests.generation.eagle_checkpoints import READ, Head
from tests.generation.generator_support import (
    PROMPTS,
    Faulty,
    check_empty,
    make_generator,
    one_by_one,
    run_to_end,
    run_with_cancels,
)
from tests.generation.test_generator_graphs import Replay, stand_in
from tests.integrations.hf_families import make_model
from vattn.generation.eagle_draft import _read_layers
from vattn.integrations.transformers import enable

Noted = list[tuple[Any, list[int], list[int]]]
"""Requests, their tokens before the drafts, and the drafts."""

LONG = vattn.Sampling(max_new_tokens=40, stop_token_ids=())


def make_target() -> Any:
    """Return the target of the heads."""
    return make_model("llama", num_hidden_layers=5)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """40 tokens for each of `PROMPTS`."""
    model = make_target()
    return [one_by_one(model, prompt, 40) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def head(request: Any, plain: list[list[int]]) -> Head:
    """A head that is fitted to some of the outputs: as many as its least squares can follow."""
    texts = [prompt + output for prompt, output in zip(PROMPTS, plain, strict=True)]
    return Head(make_target(), request.param == "eagle3", texts[: 4 if request.param == "eagle3" else 2])


@pytest.fixture(scope="module")
def folder(head: Head, tmp_path_factory: Any) -> Path:
    """The head's checkpoint."""
    return head.write(tmp_path_factory.mktemp("head"))


def make(folder: Path, sizes: Any = (), **options: Any) -> tuple[vattn.Generator, Noted]:
    """Return a generator, and the list to which its source adds what it drafts.

    What was not written in the head's cache is NaN.
    """
    packed = enable(make_target(), num_blocks=options.pop("num_blocks", 64), prove=False)
    generator = make_generator(packed, speculation=vattn.EagleDraft(folder, 3), graph_sizes=sizes, **options)
    if sizes:
        stand_in(generator)
        for runner in generator.scheduler.source._runners:
            for key in runner._entries:
                runner._entries[key].graph = Replay(runner, key, [])
    return generator, spy(generator)


def spy(generator: vattn.Generator) -> Noted:
    """Poison the head's cache, and note each draft."""
    source: Any = generator.scheduler.source
    cache = source.model.kv_cache.kv_caches[0]
    (cache if cache.is_floating_point() else cache.view(torch.float32)).fill_(torch.nan)
    noted: Noted = []
    launch = source.launch

    def launching(batch: Any, begin: Any) -> Any:
        found = launch(batch, begin)
        flat = iter(found.tokens.tolist() if found is not None else [])
        for request, drafts in zip(batch.requests, batch.drafts, strict=False):
            if drafts:
                noted.append((request, request.prompt + request.output, [next(flat) for _ in drafts]))
        assert next(flat, None) is None
        return found

    source.launch = launching
    return noted


def check_drafts(head: Head, noted: Noted) -> None:
    """Assert that the drafts follow the papers."""
    assert noted
    states: dict[Any, torch.Tensor] = {}
    for request, ids, drafts in noted:
        if request not in states:
            found = head.states(request.prompt + request.output)
            states[request] = linear(found, head.tensors["fc.weight"]) if head.eagle3 else found
        assert drafts == head.drafts(states[request][: len(ids) - 1], ids, len(drafts))


def test_the_logits_are_those_of_the_paper(head: Head, folder: Path) -> None:
    """Two requests, the first in two chunks; fp32 sums in another order differ by 1e-6 of logits of up to 20."""
    generator, _ = make(folder)
    model: Any = generator.scheduler.source.model  # type: ignore[union-attr]
    builder = vattn.AttentionMetadataBuilder(2, 64, max_seq_len=64, layers=model)
    texts = [PROMPTS[0], PROMPTS[2]]
    states = [model.read(head.states(text)[:-1]) for text in texts]
    found: list[list[torch.Tensor]] = [[], []]
    for counts, ends in (((17, 3), (17, 3)), ((23, 16), (40, 19))):
        step = builder.build(counts, ends, [[3, 1, 2], [4, 5, 0]])
        spans = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        ids = torch.tensor([token for text, span in zip(texts, spans, strict=True) for token in text[1:][span]])
        given = torch.cat([each[span] for each, span in zip(states, spans, strict=True)])
        with torch.no_grad(), vattn.forward_context(step):
            logits, _ = model(ids, step.positions, torch.arange(len(ids)), given)
        for index, each in enumerate(logits.split(counts)):
            found[index].append(each)
    for text, each in zip(texts, found, strict=True):
        torch.testing.assert_close(torch.cat(each), head.logits(head.rows(text)), atol=1e-4, rtol=1e-4)


def test_captured_steps_have_plain_tokens_and_the_drafts_of_the_paper(
    head: Head, folder: Path, plain: list[list[int]]
) -> None:
    generator, noted = make(folder, [1, 3, 4], token_budget=23)
    done = generator.generate(PROMPTS, LONG)
    assert [request.output for request in done] == plain
    check_drafts(head, noted)
    now = generator.statistics()
    assert now.drafted_tokens == sum(len(drafts) for _, _, drafts in noted) > 300
    assert (
        30 < now.accepted_tokens < 0.9 * now.drafted_tokens
        and sum(request.accepted for request in done) == now.accepted_tokens
    )
    check_empty(generator)


def test_the_heads_cache_follows(head: Head, folder: Path, plain: list[list[int]]) -> None:
    """Chunks, prefixes, preemptions, cancels and requests that end leave what the next drafts read."""
    generator, noted = make(folder, token_budget=21, num_blocks=11)
    run_with_cancels(generator, plain, turns=2)
    now = generator.statistics()
    assert now.preemptions > 0 and now.reused_tokens > 0
    check_drafts(head, noted)
    check_empty(generator)


def test_prompts_that_share_blocks(head: Head, folder: Path) -> None:
    """A block's last row depends on the token after it: the last block that is found is computed again."""
    generator, noted = make(folder, token_budget=128)
    prompt = list(range(5, 55))
    one, short = vattn.Sampling(1, stop_token_ids=()), vattn.Sampling(9, stop_token_ids=())
    generator.generate([prompt], one)
    others = [prompt, prompt[:32] + [3, 9], prompt + [1], prompt + [1]]
    done = [generator.add(each, short) for each in others]
    generator.step()
    assert all(request.output for request in done), "none waits for a block that is known"
    run_to_end(generator)
    assert [request.reused for request in done] == [32, 16, 32, 32]
    model = make_target()
    assert [request.output for request in done] == [one_by_one(model, request.prompt, 9) for request in done]
    check_drafts(head, noted)


def test_sampled_tokens_are_those_without_drafts(folder: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_k": 3}, {"logit_bias": {5: 4.0}}, {"frequency_penalty": 1.0}]
    samplings = [vattn.Sampling(30, 0.7, seed=3, stop_token_ids=(), **changes) for changes in kinds]
    plain = make_generator(enable(make_target(), num_blocks=64)).generate([PROMPTS[0]] * 4, samplings)
    generator, _ = make(folder)
    done = generator.generate([PROMPTS[0]] * 4, samplings)
    assert [request.output for request in done] == [request.output for request in plain]
    assert [request.drafted > 0 for request in done] == [True, True, True, False]


def test_more_requests_than_a_step_holds(head: Head, folder: Path, plain: list[list[int]]) -> None:
    """A request that a step left out has no drafts in the next one."""
    generator, noted = make(folder, token_budget=3)
    # Of the first prompts two drafts are as likely up to rounding.
    done = generator.generate(PROMPTS[2:4], LONG)
    assert [request.output for request in done] == plain[2:4]
    check_drafts(head, noted)


def test_targets_with_groups_of_layers(tmp_path: Path) -> None:
    target = make_model("gemma2", num_hidden_layers=5)
    texts = [prompt + one_by_one(target, prompt, 20) for prompt in PROMPTS[:3]]
    head = Head(target, True, texts)
    packed = enable(make_model("gemma2", num_hidden_layers=5))
    packed.allocate(num_blocks=64, hybrid=True, max_seq_len=128)
    generator = make_generator(packed, token_budget=23, speculation=vattn.EagleDraft(head.write(tmp_path), 3))
    noted = spy(generator)
    done = generator.generate(PROMPTS[:3], vattn.Sampling(20, stop_token_ids=()))
    assert [request.prompt + request.output for request in done] == texts
    check_drafts(head, noted)


def test_a_failed_step_starts_over(head: Head, folder: Path, plain: list[list[int]]) -> None:
    generator, noted = make(folder)
    watched: Any = generator._runner.steps.forward
    faulty = Faulty(watched.run)
    faulty.bad, watched.run = -1, faulty
    requests = [generator.add(prompt, LONG) for prompt in PROMPTS[:3]]
    faulty.raise_in = 7
    with pytest.raises(ZeroDivisionError):
        while generator.busy:
            generator.step()
    while generator.busy:
        generator.step()
    assert [request.output for request in requests] == plain[:3]
    check_drafts(head, noted)
    check_empty(generator)


def test_layers_that_eagle_3_reads() -> None:
    class Config:
        eagle_config: Any = None
        eagle_aux_hidden_state_layer_ids: Any = None

    assert _read_layers(Config(), 32) == [2, 16, 29]
    Config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert _read_layers(Config(), 5) == READ
    with pytest.raises(errors.ConfigError, match="a target with 4 layers"):
        _read_layers(Config(), 4)
    # At the top of a config the list names inputs.
    Config.eagle_aux_hidden_state_layer_ids = READ
    assert _read_layers(Config(), 5) == READ
    Config.eagle_aux_hidden_state_layer_ids = [0, 1, 3]
    with pytest.raises(errors.ConfigError, match="the same layers in both"):
        _read_layers(Config(), 5)
    Config.eagle_config = None
    assert _read_layers(Config(), 5) == [0, 1, 3]


def test_refused(head: Head, folder: Path, tmp_path: Path) -> None:
    packed = enable(make_target(), num_blocks=16, prove=False)

    def refused(model: Any = packed, at: Path = folder, **options: Any) -> str:
        with pytest.raises(errors.ConfigError) as caught:
            make_generator(model, speculation=vattn.EagleDraft(at), **options)
        return str(caught.value)

    def changed(name: str, tensors: dict[str, Any] = {}, without: str = "", **config: Any) -> Path:  # noqa: B006
        other = Head.__new__(Head)
        other.config, other.eagle3 = head.config, head.eagle3
        other.tensors = {key: value for key, value in {**head.tensors, **tensors}.items() if key != without}
        (tmp_path / name).mkdir()
        return other.write(tmp_path / name, **config)

    layer = "midlayer." if head.eagle3 else "layers.0."
    assert "without layers.0.mlp.up_proj.weight" in refused(at=changed("a", without=f"{layer}mlp.up_proj.weight"))
    assert "with layers.1.x" in refused(at=changed("b", {"layers.1.x": torch.ones(1)}))
    assert "for 98 token ids" in refused(at=changed("c", vocab_size=98))
    assert "with 50 in embed_tokens" in refused(at=changed("g", {"embed_tokens.weight": torch.ones(50, 64)}))
    assert "up_proj.weight of shape [80, 63] in place of [80, 64]" in refused(
        at=changed("h", {f"{layer}mlp.up_proj.weight": torch.ones(80, 63)})
    )
    assert "hidden_act='gelu'" in refused(at=changed("i", hidden_act="gelu"))
    assert "config.json, which cannot be read: " in refused(at=changed("j", rope_scaling={"rope_type": "linear"}))
    name = "model.safetensors" if head.eagle3 else "pytorch_model.bin"
    (changed("k") / name).write_bytes(b"cut")
    assert f"{name}, which cannot be read" in refused(at=tmp_path / "k")
    for wrong in (None, 5):
        with pytest.raises(errors.ConfigError, match="a folder with"):
            vattn.EagleDraft(wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.UnknownOptionError, match="write num_drafts=3"):
        vattn.EagleDraft(folder, num_speculative_tokens=3)  # type: ignore[call-arg]
    assert "RoPE of type 'dynamic'" in refused(at=changed("d", rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    assert "norm_before_residual" in refused(at=changed("e", norm_before_residual=True))
    assert "hidden_size=32" in refused(enable(make_model("llama", num_hidden_layers=5, hidden_size=32), num_blocks=16))
    assert "compile='model'" in refused(compile="model")
    with pytest.raises(errors.ConfigError, match=r"a folder with config\.json"):
        vattn.EagleDraft(tmp_path / "nowhere")
    with pytest.raises(errors.ConfigError, match="num_drafts"):
        vattn.EagleDraft(folder, 0)
    assert "Faulty, which shows no hidden states" in refused(Faulty(packed).eval())
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "config.json").write_text((folder / "config.json").read_text())
    assert "without weights" in refused(at=tmp_path / "f")
    generator = make_generator(packed)
    assert generator.generate([[1, 2]], vattn.Sampling(2, stop_token_ids=()))[0].reason == "length"
