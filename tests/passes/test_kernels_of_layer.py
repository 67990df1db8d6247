"""Which kernels a benchmark says that a layer has."""

from __future__ import annotations

import pytest

from benchmarks.kernels import Kernel, kernels_of_layer

MARKS = ("decode_kernel", "decode_cluster_kernel")


@pytest.mark.parametrize("attention", MARKS)
def test_from_one_attention_kernel_to_the_next(attention: str) -> None:
    names = ["gather", *[attention, "product", "norm"] * 3, attention, "product", "last_norm"]
    kernels = [Kernel(name, float(index), float(index)) for index, name in enumerate(names)]
    found = kernels_of_layer(kernels, MARKS, 4)
    # Medians over the layers between two attention kernels, whose kernels are at 1, 4 and 7 and behind.
    assert [(kernel.name, kernel.us) for kernel in found] == [(attention, 4.0), ("product", 5.0), ("norm", 6.0)]


def test_another_number_of_attention_kernels_is_told() -> None:
    with pytest.raises(ValueError, match="0 kernels named decode_kernel or decode_cluster_kernel in 4 layers"):
        kernels_of_layer([Kernel("product", 1.0, 0.0)], MARKS, 4)
