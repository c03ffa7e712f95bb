"""Distillation's loss has the right gradient and brings a draft closer to its target."""

from dataclasses import replace

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.training.heads.draft import begin_with
from foretoken.training.llama import Llama
from foretoken.training.losses import mixed_divergence
from tests.unit.training import tiny


@pytest.mark.parametrize("tv_share", [0.0, 0.5, 1.0])
def test_gradient(tv_share: float) -> None:
    torch.manual_seed(0)
    draft = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    target = torch.randn(5, 11, dtype=torch.float64)
    p, q = target.softmax(-1), draft.softmax(-1)
    plain = (1 - tv_share) * (p * (p / q).log()).sum() + tv_share * 0.5 * (p - q).abs().sum()
    (expected,) = torch.autograd.grad(plain, draft)
    found = mixed_divergence(draft.detach(), target, tv_share)
    torch.testing.assert_close(found.loss, plain.detach())
    torch.testing.assert_close(found.gradient, expected)


def test_a_deeper_draft_begins_as_the_shallower_one() -> None:
    torch.manual_seed(0)
    shape = replace(tiny.SHAPE, layers=1)
    shallow, deep = Llama(shape), Llama(replace(shape, layers=3))
    begin_with(deep, shallow)
    tokens = torch.randint(2, 50, (2, 9))
    torch.testing.assert_close(deep(tokens).hidden, shallow(tokens).hidden)
    assert all(weight.any() for name, weight in deep.named_parameters() if "qkv" in name)
    with pytest.raises(ConfigError, match=r"head\.start.*fewer layers"):
        begin_with(shallow, deep)
