"""Blocks are found again by requests of the same model and the same salt alone."""

from __future__ import annotations

import random
import time
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import vattn
from tests.generation.generator_support import GREEDY, PROMPTS, check_empty, make_generator
from tests.integrations.hf_families import make_model
from vattn import errors
from vattn.cache.model_identity import ModelIdentity
from vattn.integrations.transformers import enable

PROMPT, SHORT = PROMPTS[:1], vattn.Sampling(max_new_tokens=3, stop_token_ids=())
SCALE = {"of the hook": 1.0}


class Slots:
    __slots__ = ("active",)

    def __init__(self, active: str) -> None:
        self.active = active


class TwoAdapters(nn.Module):
    """A projection with two low-rank adapters, as users write them; each switch decides by itself."""

    def __init__(self, base: nn.Module, shared: types.SimpleNamespace, slots: Slots) -> None:
        super().__init__()
        self.base, self.shared, self.slots = base, shared, slots
        self.active_adapter, self.enabled, self.listed, self.scaling = "a", True, ["a"], {"a": 1.0, "b": 1.0}
        size = base.weight.shape
        self.down = nn.ParameterDict({name: nn.Parameter(torch.randn(2, size[1])) for name in "ab"})
        self.up = nn.ParameterDict({name: nn.Parameter(torch.randn(size[0], 2)) for name in "ab"})
        self.steering = torch.zeros(size[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x) + self.steering
        if self.enabled:
            for name in {self.active_adapter, self.listed[0], self.shared.active, self.slots.active}:
                out = out + x @ self.down[name].T @ self.up[name].T * self.scaling[name]
        return out


def adapted() -> tuple[Any, Any]:
    """Return a model with adapters in its first layer, and the same on vattn."""
    model = make_model("llama")
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.self_attn.k_proj = TwoAdapters(layer.self_attn.k_proj, types.SimpleNamespace(active="a"), Slots("a"))
    return model, enable(model.eval(), num_blocks=64)


def projection(model: Any) -> Any:
    return model.model.layers[0].self_attn.k_proj


def closure_hook() -> tuple[Callable[..., Any], Callable[[], None]]:
    """Return a hook with state of its own, and what changes it."""
    factor = 1.0

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * factor

    def change() -> None:
        nonlocal factor
        factor = 1.5

    return hook, change


def hook_by_global(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * SCALE["of the hook"]


def louder(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 1.5


class Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.5


def replace_forward(model: Any) -> None:
    part = projection(model).base
    part.forward = lambda x: nn.functional.linear(x, part.weight) * 1.5


def replace_weight(model: Any) -> None:
    part = projection(model).base
    part.weight = nn.Parameter(part.weight.detach() * 1.5)


def merge(model: Any) -> None:
    part = projection(model)
    part.base.weight.data += part.up["a"].data @ part.down["a"].data
    model.model.layers[0].self_attn.k_proj = part.base


HOOK, CHANGE_HOOK = closure_hook()
HANDLES: list[Any] = []


def hook_all(model: Any) -> None:
    target = model.model.embed_tokens
    hook = lambda module, args, out: out * 1.5 if module is target else None  # noqa: E731
    HANDLES.append(nn.modules.module.register_module_forward_hook(hook))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda model: setattr(projection(model), "active_adapter", "b"),
    "disabled": lambda model: setattr(projection(model), "enabled", False),
    "enabled": lambda model: setattr(projection(model), "enabled", True),
    "in a list": lambda model: projection(model).listed.__setitem__(0, "b"),
    "in a dict": lambda model: projection(model).scaling.update(b=0.5),
    "in an object": lambda model: setattr(projection(model).shared, "active", "b"),
    "in slots": lambda model: setattr(projection(model).slots, "active", "b"),
    "a tensor attribute": lambda model: projection(model).steering.add_(1),
    "another tensor attribute": lambda model: setattr(projection(model), "steering", torch.ones(())),
    "an equal tensor attribute": lambda model: setattr(projection(model), "steering", torch.ones(())),
    "the tensor attribute": lambda model: projection(model).steering.add_(1),
    "values of a parameter": lambda model: projection(model).base.weight.mul_(1.5),
    "a parameter": replace_weight,
    "a forward of its own": replace_forward,
    "another class": lambda model: setattr(projection(model).base, "__class__", Louder),
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
    "a hook": lambda model: HANDLES.append(model.model.embed_tokens.register_forward_hook(HOOK)),
    "what a hook's closure holds": lambda model: CHANGE_HOOK(),
    "a hook removed": lambda model: HANDLES.pop().remove(),
    "a hook by a global": lambda model: HANDLES.append(model.model.norm.register_forward_hook(hook_by_global)),
    "the global": lambda model: SCALE.update({"of the hook": 1.5}),
    "a pre-hook": lambda model: projection(model).base.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,)),
    "a hook of all modules": hook_all,
    "the hook of all modules removed": lambda model: HANDLES.pop().remove(),
    "merged": merge,
}


def reused(generator: vattn.Generator) -> list[int]:
    """Return how many tokens of the same prompt two requests after each other reused, which must agree."""
    first, second = (generator.generate(PROMPT, SHORT)[0] for _ in range(2))
    assert first.output == second.output
    return [first.reused, second.reused]


def test_no_block_of_another_model_is_found() -> None:
    model, packed = adapted()
    generator = make_generator(packed)
    assert reused(generator) == [0, 32] and reused(generator) == [32, 32]
    found = {}
    try:
        with torch.no_grad():
            for name, change in CHANGES.items():
                change(model)
                found[name] = reused(generator)
    finally:
        SCALE["of the hook"] = 1.0
        for handle in HANDLES:
            handle.remove()
    assert found == {name: [0, 32] for name in CHANGES}
    check_empty(generator)


def test_adapters_of_peft() -> None:
    peft = pytest.importorskip("peft")
    model = make_model("llama")
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    adapters = peft.get_peft_model(model, config, adapter_name="a")
    adapters.add_adapter("b", config)
    generator = make_generator(enable(model.eval(), num_blocks=64))
    assert reused(generator) == [0, 32]
    adapters.set_adapter("b")
    assert reused(generator) == [0, 32]
    with adapters.disable_adapter():
        assert reused(generator) == [0, 32]
    assert reused(generator) == [0, 32]
    adapters.base_model.merge_adapter()
    assert reused(generator) == [0, 32]
    adapters.base_model.unmerge_adapter()
    assert reused(generator) == [0, 32]
    adapters.delete_adapter("b")
    assert reused(generator) == [0, 32]


def test_adapters_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    # transformers 5.24 asks for a PEFT that is not released.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)
    model = make_model("llama")
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    for name in "ab":
        model.add_adapter(config, name)
    generator = make_generator(enable(model.eval(), num_blocks=64))
    for change in (lambda: None, lambda: model.set_adapter("a"), model.disable_adapters, model.enable_adapters):
        change()
        assert reused(generator) == [0, 32]


def test_equal_values_are_no_change() -> None:
    part = TwoAdapters(nn.Linear(2, 2), types.SimpleNamespace(active="a"), Slots("a"))
    identity = ModelIdentity(part)
    part.active_adapter, part.scaling, part.listed = "".join(["a"]), dict(part.scaling), list(part.listed)
    part.shared.active = part.slots.active = "".join(["a"])
    assert identity.look() == 0, identity.changed


def test_a_look_counts_changes_and_those_that_move_tensors() -> None:
    layer = nn.Linear(2, 2)
    identity = ModelIdentity(layer)
    assert (identity.look(), identity.moves, identity.changed) == (0, 0, "")
    with torch.no_grad():
        layer.weight.mul_(2)
    assert (identity.look(), identity.moves) == (1, 0)
    layer.weight.data = torch.zeros(2, 2)
    assert (identity.look(), identity.moves) == (2, 1)
    layer.note = SCALE
    assert (identity.look(), identity.moves) == (3, 2)
    layer.note = {"of the hook": 2.0}
    assert (identity.look(), identity.changed) == (4, "model")


@pytest.mark.parametrize("back", [False, True])
def test_a_request_that_runs_during_a_change_shares_nothing_of_later_steps(back: bool) -> None:
    """Switching back before the next request would leave no trace, unless each step looked."""
    model, packed = adapted()
    generator = make_generator(packed)
    first = generator.add(PROMPT[0], vattn.Sampling(max_new_tokens=40, stop_token_ids=()))
    for _ in range(3):
        generator.step()
    projection(model).active_adapter = "b"
    for _ in range(20):
        generator.step()
    if back:
        projection(model).active_adapter = "a"
    while not first.done:
        generator.step()
    second = generator.generate([first.prompt + first.output], GREEDY)[0]
    assert second.reused == 0
    alone = make_generator(packed, reuse_prefixes=False).generate([second.prompt], GREEDY)[0]
    assert second.output == alone.output


def test_salts_keep_requests_apart(packed: Any) -> None:
    generator = make_generator(packed)
    salts = ["", "tenant", b"tenant", 1, "1", b"1", -1, 2**20000]
    first = generator.generate(PROMPT * len(salts), GREEDY, cache_salt=salts)
    assert [request.reused for request in first] == [0] * len(salts)
    again = [generator.generate(PROMPT, GREEDY, cache_salt=salt)[0] for salt in salts]
    assert [request.reused for request in again] == [32] * len(salts)
    assert {tuple(request.output) for request in first + again} == {tuple(first[0].output)}
    list(generator.stream(PROMPT, GREEDY, cache_salt="streamed"))
    request = generator.add(PROMPT[0], GREEDY, cache_salt="streamed")
    while not request.done:
        generator.step()
    assert request.reused == 32 and request.cache_salt == "streamed"
    check_empty(generator)


@pytest.mark.parametrize("salt", [True, None, 1.5, torch.zeros(1), bytearray(b"a"), [["a"]], ["a", "b"], [None]])
def test_other_salts_are_refused_before_anything_runs(packed: Any, salt: Any) -> None:
    generator = make_generator(packed)
    for call in (generator.generate, generator.stream):
        with pytest.raises(errors.ConfigError, match="cache_salt"):
            call(PROMPT, GREEDY, cache_salt=salt)
    with pytest.raises(errors.ConfigError, match="cache_salt="):
        generator.add(PROMPT[0], GREEDY, cache_salt=salt)
    assert not generator.busy


@pytest.mark.long
def test_a_minute_of_switches_tenants_and_cancels() -> None:
    """Results equal isolated runs of the adapter, and no request reuses blocks of another tenant or adapter."""
    model, packed = adapted()
    part, draw = projection(model), random.Random(7)
    expected = {}
    for adapter in "ab":
        part.active_adapter = part.listed[0] = part.shared.active = part.slots.active = adapter
        alone = make_generator(packed, reuse_prefixes=False)
        expected |= {(adapter, place): alone.generate([p], GREEDY)[0].output for place, p in enumerate(PROMPTS)}
    assert expected["a", 0] != expected["b", 0]
    generator = make_generator(packed)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    compared = shared = switches = 0
    begin = time.monotonic()
    while time.monotonic() < begin + 60:
        if draw.random() < 0.5:
            adapter, switches = draw.choice("ab"), switches + 1
            seen = set() if adapter != part.active_adapter else seen
            part.active_adapter = part.listed[0] = part.shared.active = part.slots.active = adapter
        adapter, requests = part.active_adapter, []
        for _ in range(draw.randint(1, 6)):
            place, tenant = draw.randrange(len(PROMPTS)), draw.choice(["x", "y", str(draw.random())])
            requests.append((place, tenant, generator.add(PROMPTS[place], GREEDY, cache_salt=tenant)))
        spoiled = draw.random() < 0.3
        for _ in range(draw.randint(0, 8)):
            generator.step()
            if draw.random() < 0.1:
                generator.cancel(draw.choice(requests)[2])
        if spoiled:
            part.active_adapter = "b" if adapter == "a" else "a"
            for _ in range(3):
                generator.step()
            for _, _, request in requests:
                generator.cancel(request)
            part.active_adapter = adapter
        while generator.busy:
            generator.step()
        begun = Counter((tenant, tuple(PROMPTS[place][:16])) for place, tenant, _ in requests)
        for place, tenant, request in requests:
            key = tenant, tuple(PROMPTS[place][:16])
            assert not request.reused or key in seen or begun[key] > 1
            if request.state == "finished":
                assert request.output == expected[adapter, place]
                compared, shared = compared + 1, shared + (request.reused > 0)
        seen |= set(begun)
        check_empty(generator)
    assert compared > 20 and shared and switches
