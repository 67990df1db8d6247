"""The conformance rows and the fuzz of tests/conformance on a CUDA GPU, through the kernels that a user would get.

Most of the time goes into compiling kernels: `pytest -n 12` shares it among processes.
"""

from __future__ import annotations

import pytest
import torch

from tests.conformance.requests import Size
from tests.conformance.test_conformance import (  # noqa: F401  collected here, with the device below
    backend,
    test_a_query_with_strides_of_its_own,
    test_attention,
    test_attention_with_a_plan,
    test_cache_update,
    test_cache_update_of_stored_values,
    test_requests_that_share_blocks,
)
from tests.conformance.test_reject_or_correct import (  # noqa: F401
    check_fuzz,
    fuzz_examples,
    test_bad_input_is_refused_and_nothing_is_written,
    test_most_drawn_requests_are_accepted_with_every_listed_pair,
)

pytestmark = pytest.mark.gpu

PARTS = 12


@pytest.fixture
def device() -> str:
    """The GPU, where the imported tests run here."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return "cuda"


@pytest.mark.parametrize("part", range(PARTS))
def test_refused_or_equal_to_the_reference(backend: str, part: int, device: str) -> None:  # noqa: F811
    """`VATTN_FUZZ_EXAMPLES` are shared among the parts; sequences span many blocks and tiles."""
    examples = fuzz_examples(240 if backend == "TORCH_SDPA" else 144)
    check_fuzz(backend, device, max(1, examples // PARTS), Size(seq_len=700, reqs=8, wide_heads=0.3), part)
