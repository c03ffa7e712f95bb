"""Distillation's loss has the right gradient and brings a draft closer to its target."""

from dataclasses import replace

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.training.heads.draft import begin_with
from foretoken.training.llama import Llama
from foretoken.training.losses import Head, distance, mixed_divergence
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


def test_added_logits_have_the_right_gradients() -> None:
    """Rows and matrices of both products, where a frozen matrix gets none."""
    torch.manual_seed(1)
    rows, matrix = torch.randn(5, 6, requires_grad=True), torch.randn(11, 6)
    more_rows, more = (torch.randn(count, 2, requires_grad=True) for count in (5, 11))
    wanted = Head(torch.randn(5, 6), torch.randn(11, 6))
    found = distance(Head(rows, matrix), wanted, 0.5, added=Head(more_rows, more)).loss
    trained = (rows, more_rows, more)
    gradients = torch.autograd.grad(found, trained)
    p, q = (
        (wanted.hidden @ wanted.weight.T).softmax(-1),
        (rows @ matrix.T + more_rows @ more.T).softmax(-1),
    )
    plain = (0.5 * (p * (p / q).log()).sum(-1) + 0.25 * (p - q).abs().sum(-1)).mean()
    torch.testing.assert_close(found, plain)
    for mine, theirs in zip(gradients, torch.autograd.grad(plain, trained), strict=True):
        torch.testing.assert_close(mine, theirs)


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
