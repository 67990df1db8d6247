"""Rows that kernels of other libraries do not know: padding, and queries longer than their sequence."""

from __future__ import annotations

import torch

from tests.support import make_config
from vattn.backends.external_rows import valid_rows, zero_invalid_rows

STARTS = torch.tensor([0, 0, 1, 6, 9, 9, 11], dtype=torch.int32)
LENGTHS = torch.tensor([7, 26, 5, 1, 0, 0], dtype=torch.int32)


def valid(**options) -> list[int]:
    changes = {name: options.pop(name) for name in ("causality", "attn_type") if name in options}
    rows = valid_rows(STARTS, LENGTHS, 14, make_config(**changes), **options)
    assert rows.shape == (14, 1)
    return rows[:, 0].nonzero()[:, 0].tolist()


def test_rows_before_a_sequence_and_padding_are_invalid() -> None:
    # One decode, a whole prefill of 5, three rows over one key, two rows over none, then padding.
    assert valid() == [0, 1, 2, 3, 4, 5, 8]
    assert valid(causality="bidirectional") == [0, 1, 2, 3, 4, 5, 8]


def test_what_the_kernel_hides_needs_no_lookup() -> None:
    everything = list(range(11))
    assert valid(hidden_by_kernel=True) == everything
    assert valid(hidden_by_kernel=True, causality="bidirectional") == [0, 1, 2, 3, 4, 5, 8]
    assert valid(causality="bidirectional", attn_type="encoder_decoder") == everything


def test_invalid_rows_are_zero_and_their_lse_is_minus_infinity() -> None:
    output, lse = torch.full((3, 2, 4), torch.nan), torch.full((3, 2), torch.nan)
    output[1] = 2.0
    found = torch.tensor([[torch.inf, torch.nan], [1.0, 2.0], [-torch.inf, 5.0]])
    zero_invalid_rows(output, lse, found, torch.tensor([[False], [True], [False]]))
    assert output[1].eq(2).all()
    assert not output[[0, 2]].any()
    assert lse.tolist() == [[-torch.inf] * 2, [1.0, 2.0], [-torch.inf] * 2]
    zero_invalid_rows(output, None, found, torch.ones(3, 2, dtype=torch.bool))
