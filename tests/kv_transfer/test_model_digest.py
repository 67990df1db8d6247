"""A digest names a model by its content, in every process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.hf_families import make_model
from vattn.cache import model_identity
from vattn.cache.model_identity import ModelIdentity
from vattn.integrations.transformers import enable


def digest(model: Any = None) -> str:
    return ModelIdentity(enable(make_model("llama"), num_blocks=4) if model is None else model).digest()


@pytest.mark.long
def test_equal_models_of_other_processes_have_one_digest() -> None:
    program = "from tests.kv_transfer.test_model_digest import digest; print(digest())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == digest() == digest()


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def named(x: Any) -> Any:
    return x


def test_other_values_have_other_digests() -> None:
    zeros, closures = torch.zeros(3, 5), [lambda x, n=n: x + n for n in (1, 2)]
    values = [
        1, 1.0, "1", b"1", True, None, [1], (1,), {1: 1}, {"1": 1}, [1, 1], [[1], 1], {1}, torch.float16, named, len,
        *closures, zeros, zeros.T, zeros.half(), zeros.double(), -zeros, zeros + 1, zeros[:2], zeros.to_sparse(),
        nn.Linear(1, 1), Holder(1), slice(1), object(), object(),
    ]  # fmt: skip
    flipped = [zeros.clone() for _ in range(15)]
    for place, tensor in enumerate(flipped):
        tensor.view(-1)[place] = 1
    models = [Holder(value) for value in values + flipped]
    digests = [digest(model) for model in models]
    same = [values[i] for i, one in enumerate(digests[: len(values)]) if digests.count(one) > 1]
    assert len(set(digests)) == len(digests), same
    assert digests[:-1] == [digest(model) for model in models[:-1]], "read again"


def test_hashes_of_a_device_tell_every_byte_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_identity, "_CHUNK", 64)
    data = torch.zeros(64 + 21, dtype=torch.uint8)
    seen = {model_identity.device_hash(data)}
    for place in range(85):
        for value in (1, 128):
            data[place] = value
            seen.add(model_identity.device_hash(data))
        data[place] = 0
    assert len(seen) == 171
    words = torch.randn(512).view(torch.uint8)
    assert model_identity.device_hash(words) != model_identity.device_hash(words.view(-1, 8).flip(0).flatten())
