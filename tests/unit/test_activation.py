"""Activations: right, and the same bits wherever threads divide the rows."""

import pytest
import torch
import torch.nn.functional as F

from foretoken.ops.activation import ACTIVATIONS, Activation, gelu_tanh, silu


def test_values() -> None:
    x = torch.tensor([-200.0, -3.0, -0.5, 0.0, 0.5, 3.0, 200.0])
    torch.testing.assert_close(silu(x), F.silu(x), rtol=1e-6, atol=1e-7)


def test_gelu_values() -> None:
    x = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([-300.0, 300.0])])
    expected = F.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(gelu_tanh(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activate", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [520, 1040])
def test_bits_do_not_depend_on_rows(width: int, dtype: torch.dtype, activate: Activation) -> None:
    """Two threads cut 33 rows in the middle of a row; plain float32 silu fails here."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    both = torch.randn(133, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.cat([activate(row[:, :width]) for row in both.split(1)])
    for count in (2, 33, 77, 133):
        assert torch.equal(activate(both[:count, :width]), rows[:count])
    torch.set_num_threads(before)
