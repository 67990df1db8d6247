"""`XFormersMetadata`: layers take it, and its mask is that of the leading decodes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest
import torch

import vattn
from tests.backends.test_xformers import Mask, install_stand_in
from tests.layers.layer_support import make_inputs, make_layer
from vattn.backends import xformers
from vattn.errors import MissingPackageError

TABLES = [[3], [1, 2], [4, 5]]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a stand-in where xFormers would be."""
    install_stand_in(monkeypatch)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.35" if name == "xformers" else real(name))
    xformers._bias_template.cache_clear()
    yield
    xformers._bias_template.cache_clear()


@pytest.fixture
def builder(package: None) -> vattn.XFormersMetadataBuilder:
    return vattn.XFormersMetadataBuilder(4, 24, 64, 64)


def test_the_mask_holds_the_leading_decodes(builder: vattn.XFormersMetadataBuilder) -> None:
    step = builder.build([1, 1, 5], [9, 64, 12], [[3], [1], [4]])
    bias = step.attn_bias
    assert isinstance(bias, Mask)
    assert (bias.k_seqinfo.seqlen.tolist(), bias.block_tables.tolist()) == ([9, 64], [[3], [1]])
    assert (bias.page_size, bias.q_seqinfo.seqstart.tolist()) == (64, [0, 1, 2])
    assert step.attn_bias is bias
    assert bias.k_seqinfo.seqlen.data_ptr() == step.seq_lens.data_ptr(), "no copy, so a graph may hold it"
    assert (step.num_decodes, step.num_prefills, step.max_query_len) == (2, 1, 5)


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([3, 1], [3, 9]), ([1, 2], [1, 7]), ([], [])])
def test_no_mask_without_leading_decodes(
    query_lens: list[int], seq_lens: list[int], builder: vattn.XFormersMetadataBuilder
) -> None:
    assert builder.build(query_lens, seq_lens, [[1], [2]][: len(query_lens)]).attn_bias is None


def test_all_requests_are_leading_decodes_after_an_advance(builder: vattn.XFormersMetadataBuilder) -> None:
    """The first request of the built step has no cached tokens yet, so that step has no mask."""
    first = builder.build([1, 1], [1, 9], [[3], [1]])
    assert first.attn_bias is None
    step = builder.advance(first, [])
    assert isinstance(step, vattn.XFormersMetadata) and isinstance(step.attn_bias, Mask)
    assert step.attn_bias.k_seqinfo.seqlen.tolist() == [2, 10]
    with pytest.raises(vattn.errors.MetadataError, match="over which its step"):
        builder.advance(first, [])


def test_layers_take_it_like_any_other(package: None) -> None:
    outputs = []
    for kind in (vattn.AttentionMetadataBuilder, vattn.XFormersMetadataBuilder):
        layer = make_layer()
        step = kind(3, 24, 32, 8, layers=layer).build([3, 2], [3, 2], [[3], [1]])
        with torch.no_grad(), vattn.forward_context(step):
            outputs.append(layer(*make_inputs(5)))
    assert torch.equal(*outputs)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    with pytest.raises(MissingPackageError, match=r"vattn\[xformers\]"):
        vattn.XFormersMetadataBuilder(4, 24, 64)
