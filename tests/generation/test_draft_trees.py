"""Trees of drafts in the generator: the tokens of plain generation, whichever branches are right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

import vattn
from vattn import errors

pytest.importorskip("transformers")

from tests.generation.eagle_checkpoints import Head
from tests.generation.generator_support import PROMPTS, check_empty, make_generator
from tests.generation.test_draft_models import noisy
from tests.generation.test_generator_graphs import Replay, stand_in
from tests.integrations.hf_families import make_model
from vattn.generation import DraftSource, Request
from vattn.integrations.transformers import PackedModel, disable, enable

LONG = vattn.Sampling(max_new_tokens=40, stop_token_ids=())


class Branches(DraftSource):
    """Draft a tree in which the tokens of one path, or of its beginning, are right, and all others wrong.

    Args:
        texts: by prompt, what the model generates.
    """

    tree = vattn.TokenTree.of([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0)])
    num_drafts = 9

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self.texts, self.right, self.random = texts, 0, random.Random(3)

    def plan(self, request: Request, most: int) -> list[int]:
        """Return the tree's tokens; none now and then."""
        known = self.texts[tuple(request.prompt)][len(request.output) :]
        row = self.random.randrange(-1, self.tree.size)
        if row < 0:
            return []
        path = self.tree.branch(row)
        # The tree may go on after the request's last token, which is no draft.
        self.right += min(len(path), len(known)) - 1
        known += [0] * self.tree.depth
        right = [known[depth - 1] for depth in self.tree.depths[1:]]
        return [token if node in path else (token + node) % 97 for node, token in enumerate(right, 1)]


def poisoned(num_blocks: int = 64) -> PackedModel:
    """Return a model with a cache in which what was not written is NaN."""
    packed = enable(make_model("llama"), prove=False)
    for cache in packed.allocate(num_blocks=num_blocks).kv_caches:
        cache[1:].fill_(torch.nan)
    return packed


def by_prompt(outputs: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): output for prompt, output in zip(PROMPTS, outputs, strict=True)}


@pytest.mark.parametrize("sizes", [(), (2, 4)], ids=["direct", "captured"])
def test_any_branch(long_expected: list[list[int]], sizes: Any) -> None:
    """With prompts beside trees, preemptions, and prefixes of accepted tokens that are found again."""
    source = Branches(by_prompt(long_expected))
    generator = make_generator(poisoned(13), token_budget=43, speculation=source, graph_sizes=sizes)
    replays = stand_in(generator) if sizes else []
    done = generator.generate(PROMPTS, LONG)
    assert [request.output for request in done] == long_expected
    now = generator.statistics()
    # Some drafts find no blocks.
    assert source.right > now.accepted_tokens > 40 and now.preemptions > 0
    assert now.drafted_tokens == 9 * now.drafted_steps
    assert not sizes or {(2, 20), (4, 40)} <= set(replays)
    longer = [request.prompt + request.output[:30] for request in done]
    source.texts = {tuple(text): tokens[30:] for text, tokens in zip(longer, long_expected, strict=True)}
    again = generator.generate(longer, vattn.Sampling(10, stop_token_ids=()))
    assert [request.output for request in again] == [tokens[30:] for tokens in long_expected]
    assert sum(request.reused for request in again) > 40
    check_empty(generator)


def test_sampled_tokens_are_those_without_drafts() -> None:
    """A node's draw depends on its depth; log-probabilities are those of the accepted path."""
    sampling = vattn.Sampling(30, 0.7, seed=3, logprobs=1, stop_token_ids=())
    plain = make_generator(poisoned()).generate(PROMPTS, sampling)
    source = Branches(by_prompt([request.output for request in plain]))
    done = make_generator(poisoned(), speculation=source).generate(PROMPTS, sampling)
    assert [request.output for request in done] == [request.output for request in plain]
    for one, other in zip(done, plain, strict=True):
        assert [each.rank for each in one.logprobs or ()] == [each.rank for each in other.logprobs or ()]
    assert sum(request.accepted for request in done) == source.right > 40


@pytest.mark.parametrize("eagle3", [False, True])
def test_heads_draft_the_likeliest_siblings(long_expected: list[list[int]], tmp_path: Path, eagle3: bool) -> None:
    changes = {"num_hidden_layers": 5} if eagle3 else {}
    target = make_model("llama", **changes)
    plain = long_expected
    if eagle3:
        plain = [r.output for r in make_generator(enable(target, num_blocks=64)).generate(PROMPTS, LONG)]
        target = make_model("llama", **changes)
    head = Head(target, eagle3, [prompt + output for prompt, output in zip(PROMPTS, plain, strict=True)][:3])
    draft = vattn.EagleDraft(head.write(tmp_path), tree=[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])
    assert draft.num_drafts == 6
    packed = enable(make_model("llama", **changes), num_blocks=64, prove=False)
    generator = make_generator(packed, token_budget=31, speculation=draft, graph_sizes=[2, 4])
    stand_in(generator)
    source: Any = generator.scheduler.source
    source.model.kv_cache.kv_caches[0].fill_(torch.nan)
    for runner in source._runners:
        for key in runner._entries:
            runner._entries[key].graph = Replay(runner, key, [])
    noted: list[tuple[Request, list[int], list[int]]] = []
    accept = generator._right

    def right(batch: Any, drafts: list[int], chosen: list[int]) -> list[int]:
        request = next(r for r, each in zip(batch.requests, batch.drafts, strict=False) if each is drafts)
        if drafts:
            noted.append((request, request.prompt + request.output, drafts))
        return accept(batch, drafts, chosen)

    generator._right = right  # type: ignore[method-assign]
    done = generator.generate(PROMPTS, LONG)
    assert [request.output for request in done] == plain
    states = {request: head.states(request.prompt + request.output) for request in done}
    branched = 0
    for request, ids, drafts in noted:
        found = states[request][: len(ids) - 1]
        found = linear(found, head.tensors["fc.weight"]) if eagle3 else found
        assert drafts == head.tree_drafts(found, ids, [3, 2, 1])
        follows = (request.prompt + request.output)[len(ids)]
        branched += follows in drafts[1:3]
    assert branched > 5, "the second likeliest token is right at times"
    check_empty(generator)


@pytest.mark.parametrize("sizes", [(), (2, 4)], ids=["direct", "captured"])
def test_a_model_drafts_its_likeliest_siblings(long_expected: list[list[int]], sizes: Any) -> None:
    """Where a second likeliest token was right, the draft model computes it again in place of the likeliest one."""
    small = noisy(noise=0.04)
    draft = vattn.DraftModel(small, tree=[(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])
    generator = make_generator(poisoned(), token_budget=31, speculation=draft, graph_sizes=sizes)
    source: Any = generator.scheduler.source
    for cache in small.kv_cache.kv_caches:
        cache[1:].fill_(torch.nan)
    if sizes:
        stand_in(generator)
        for runner in source._runners:
            for key in runner._entries:
                runner._entries[key].graph = Replay(runner, key, [])
    noted, accept = list[tuple[list[int], list[int], list[int]]](), generator._right

    def right(batch: Any, drafts: list[int], chosen: list[int]) -> list[int]:
        request = next(r for r, each in zip(batch.requests, batch.drafts, strict=False) if each is drafts)
        path = accept(batch, drafts, chosen)
        if drafts:
            noted.append((request.prompt + request.output, drafts, path))
        return path

    generator._right = right  # type: ignore[method-assign]
    done = generator.generate(PROMPTS, LONG)
    assert [request.output for request in done] == long_expected
    disable(small)
    for ids, drafts, _ in noted:
        given, expected = list(ids), list[int]()
        for width in (3, 2, 1):
            with torch.no_grad():
                logits = small.model(input_ids=torch.tensor([given])).logits[0, -1]
            expected += logits.topk(width).indices.tolist()
            given.append(expected[-width])
        assert drafts == expected
    assert sum(path in ([2], [3], [1, 5]) for *_, path in noted) > 5, "a second or third one is right at times"
    check_empty(generator)


def test_refused(tmp_path: Path) -> None:
    def refused(packed: PackedModel, **options: Any) -> str:
        with pytest.raises(errors.ConfigError) as caught:
            make_generator(packed, speculation=Branches({}), **options)
        return str(caught.value)

    windows = enable(make_model("mistral"), num_blocks=16, prove=False)
    assert "windows or ALiBi" in refused(windows)
    grouped = enable(make_model("gemma2"), prove=False)
    grouped.allocate(num_blocks=64, hybrid=True, max_seq_len=64)
    assert "hybrid=True" in refused(grouped)
    # XFORMERS takes no trees and runs only on a GPU, so a layer here gives its reason.
    without = enable(make_model("llama"), num_blocks=16, prove=False)
    layer: Any = next(each for each in without.modules() if hasattr(each, "why_no_trees"))
    layer._refused[("causal", True, False)] = "backend XFORMERS cannot run this attention: tree_bias"
    assert "XFORMERS cannot run this attention: tree_bias" in refused(without)

    class Few(Branches):
        def plan(self, request: Request, most: int) -> list[int]:
            return [1, 2]

    generator = make_generator(poisoned(), speculation=Few({}))
    generator.add([1, 2], LONG)
    with pytest.raises(errors.ConfigError, match="one for each node"):
        while generator.busy:
            generator.step()
    head = Head(make_model("llama"), False, [PROMPTS[0]]).write(tmp_path)
    with pytest.raises(errors.ConfigError, match="only first children"):
        vattn.EagleDraft(head, tree=[(0,), (1,), (1, 0)])
    with pytest.raises(errors.ConfigError, match="num_drafts=3"):
        vattn.EagleDraft(head, 3, tree=[(0,), (1,)])
    assert vattn.EagleDraft(head, tree=[(0,), (0, 0)]).tree is None
