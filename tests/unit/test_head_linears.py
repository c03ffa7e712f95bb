"""Linears of a head that serve are the trained ones, up to rounding."""

import pytest
import torch
from torch import nn

from foretoken.proposers.head_linears import serve_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_every_linear_is_exchanged(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ModuleList([nn.Linear(32, 40, bias=False)])).to(dtype)
    first, rest = net[0], net[1]
    assert isinstance(rest, nn.ModuleList)
    x = torch.randn(2, 3, 64, dtype=dtype)
    middle = first(x)
    expected = rest[0](middle)
    serve_linears(net)
    assert not any(isinstance(module, nn.Linear) for module in net.modules())
    found = rest[0](net[0](x))
    assert found.shape == (2, 3, 40) and found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
