"""Linears of a head that serve are the trained ones, up to rounding."""

import pytest
import torch
from torch import nn

from foretoken.proposers.heads.linears import HeadLinears, serve_linears
from foretoken.quant import round_weights, scheme_of


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


@pytest.mark.parametrize("name", ["int8", "int4"])
@torch.inference_mode()
def test_rounded_weights_are_those_of_the_scheme(name: str) -> None:
    """But logits are never made of fewer than 8 bits."""
    torch.manual_seed(0)
    body, top = nn.Linear(64, 32), nn.Linear(32, 40, bias=False)
    net = nn.Sequential(body, top)
    inner = round_weights(body.weight, scheme_of(name)).dequantized(torch.float32)
    last = round_weights(top.weight, scheme_of("int8")).dequantized(torch.float32)
    x = torch.randn(3, 64)
    expected = (x @ inner.T + body.bias) @ last.T
    serve_linears(net, [top], HeadLinears(name))
    torch.testing.assert_close(net(x), expected, atol=1e-3, rtol=1e-3)
