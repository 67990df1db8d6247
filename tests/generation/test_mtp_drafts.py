"""Layers for multi-token prediction (MTP) as drafts: the tokens of plain generation, the drafts of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import vattn
from vattn import errors

pytest.importorskip("transformers")

import transformers
from transformers.modeling_layers import MtpModel

from tests.generation.generator_support import PROMPTS, check_empty, make_generator, one_by_one
from tests.generation.test_eagle import spy
from tests.generation.test_generator_graphs import Replay, stand_in
from tests.integrations.hf_families import BASE, LATENT, ROUTED_EXPERTS, make_model
from vattn.integrations.transformers import enable

pytestmark = pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="the reference needs transformers 5.24")

KINDS: dict[str, dict[str, Any]] = {
    "glm4_moe": {**BASE, **ROUTED_EXPERTS, "n_shared_experts": 1, "head_dim": 16, "num_mtp_layers": 1},
    "deepseek_v3": {**BASE, **LATENT, **ROUTED_EXPERTS, "num_mtp_layers": 1},
}
SAMPLING = vattn.Sampling(max_new_tokens=14, stop_token_ids=())


def make(kind: str) -> tuple[Any, Any]:
    """Return a target and its MTP layer, of random weights."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**KINDS[kind])
    target = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    mtp = MtpModel(target, 1).eval()
    for parameter in (*target.parameters(), *mtp.layers.parameters()):
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.2)
    return target.requires_grad_(False), mtp.requires_grad_(False)


def drafts_of(mtp: Any, states: torch.Tensor, ids: list[int], count: int) -> list[int]:
    """Return the drafts of transformers' layer, of the target's states of all tokens but the last, without a cache."""
    from transformers.cache_utils import MtpCache

    given, found = list(ids), list[int]()
    for _ in range(count):
        places = torch.arange(1, len(given))[None]
        cache = MtpCache(config=mtp.config)
        rows = mtp.forward_layer(0, states[None], places, cache, input_ids=torch.tensor([given[1:]]))
        token = int(mtp._project_to_logits(rows[0, -1]).argmax())
        found, given, states = [*found, token], [*given, token], torch.cat((states, rows[0, -1:]))
    return found


@pytest.mark.parametrize("sizes", [(), (1, 3, 4)], ids=["direct", "captured"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_transformers(kind: str, sizes: Any) -> None:
    target, mtp = make(kind)
    plain, own = [one_by_one(target, prompt, 14) for prompt in PROMPTS], copy.deepcopy(target)
    reference = copy.deepcopy(mtp)
    packed = enable(target, num_blocks=64)
    draft = vattn.MtpDraft(2, model=mtp)
    generator = make_generator(packed, speculation=draft, graph_sizes=sizes, token_budget=23)
    if sizes:
        stand_in(generator)
        for runner in generator.scheduler.source._runners:  # type: ignore[union-attr]
            for key in runner._entries:
                runner._entries[key].graph = Replay(runner, key, [])
    noted = spy(generator)
    done = generator.generate(PROMPTS, SAMPLING)
    assert [request.output for request in done] == plain
    states = {}
    with torch.no_grad():
        for request in done:
            ids = torch.tensor([request.prompt + request.output])
            states[request] = own.model(ids, use_cache=False).last_hidden_state[0]
        for request, ids, drafts in noted:
            assert drafts == drafts_of(reference, states[request][: len(ids) - 1], ids, len(drafts))
    assert len(noted) > 60
    check_empty(generator)


def test_the_layer_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies beside the target's layers, under the number after theirs, which transformers knows of published ones."""
    from safetensors.torch import load_file, save_file

    target, mtp = make("glm4_moe")
    monkeypatch.setattr(type(target), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    target.save_pretrained(tmp_path)
    own = {f"model.layers.2.{n.removeprefix('mtp_block.')}": t for n, t in mtp.layers[0].state_dict().items()}
    own = {name.replace("post_norm", "shared_head.norm"): each for name, each in own.items()}
    save_file({**load_file(tmp_path / "model.safetensors"), **own}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    generator = make_generator(enable(loaded, num_blocks=64), speculation=vattn.MtpDraft())
    source: Any = generator.scheduler.source
    torch.testing.assert_close(source.model.layers[0].eh_proj.weight, mtp.layers[0].eh_proj.weight)
    assert generator.generate(PROMPTS[1:2], SAMPLING)[0].output == one_by_one(target, PROMPTS[1], 14)


def test_refused() -> None:
    with pytest.raises(errors.ConfigError, match="no MTP layer was loaded"):
        make_generator(enable(make_model("llama"), num_blocks=16), speculation=vattn.MtpDraft())
    target, mtp = make("glm4_moe")
    with pytest.raises(errors.ConfigError, match="as the MTP layer of LlamaForCausalLM"):
        make_generator(enable(make_model("llama"), num_blocks=16), speculation=vattn.MtpDraft(model=mtp))
    with pytest.raises(errors.ConfigError, match="as the MTP layer of Glm4Moe"):
        make_generator(enable(target, num_blocks=16), speculation=vattn.MtpDraft(model=object()))
