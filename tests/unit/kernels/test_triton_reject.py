"""Drafts weighed by Triton's kernels, in the interpreter, against PyTorch's rules."""

import pytest

from tests.unit.kernels.triton_harness import GPU, runs, tensor_cores, triton_kernels
from tests.unit.test_native_rejection import chains_are_decided

pytestmark = [runs, pytest.mark.usefixtures("tensor_cores")]
__all__ = ["tensor_cores"]


@pytest.mark.skipif(GPU, reason="the samplers of these cases are on a CPU")
@pytest.mark.parametrize("name", ["standard", "block"])
def test_chains_are_decided_as_by_the_rules(name: str) -> None:
    chains_are_decided(name, 5, triton_kernels())
