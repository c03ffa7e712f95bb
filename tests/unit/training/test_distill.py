"""Distillation's loss has the right gradient and brings a draft closer to its target."""

from dataclasses import replace

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.training.acceptance import GreedyRun, measure, repeated_ngrams, tokens_per_step
from foretoken.training.distill import begin_with, first_draft
from foretoken.training.distill_loss import Head, distillation_loss, mixed_divergence
from foretoken.training.model import Llama, LlamaShape
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


def test_distillation_brings_the_draft_closer() -> None:
    torch.manual_seed(0)
    target = Llama(tiny.SHAPE)
    torch.nn.init.normal_(target.embed.weight, std=0.3)
    target.requires_grad_(False)
    settings = tiny.tiny_settings(shape=LlamaShape(**{**tiny.SHAPE.as_dict(), "layers": 1}))
    draft = first_draft(target, settings)
    assert torch.equal(draft.embed.weight, target.embed.weight)
    ours, theirs = draft.state_dict(), target.state_dict()
    assert torch.equal(ours["blocks.0.qkv.weight"], theirs["blocks.1.qkv.weight"])
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        tokens = torch.randint(0, 64, (8, 16))
        wanted = Head(target(tokens).hidden.flatten(0, 1), target.embed.weight)
        mine = Head(draft(tokens).hidden.flatten(0, 1), draft.embed.weight)
        loss = distillation_loss(mine, wanted, 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10]), losses


def test_a_draft_of_another_width_is_refused() -> None:
    shape = LlamaShape(**{**tiny.SHAPE.as_dict(), "hidden_size": 16})
    with pytest.raises(ConfigError, match=r"shape\.hidden_size"):
        first_draft(Llama(tiny.SHAPE), tiny.tiny_settings(shape=shape))


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


def test_tokens_per_step() -> None:
    agree = torch.tensor([[True] * 6, [False] * 6])
    assert tokens_per_step(agree, 5) == pytest.approx(12 / 7)
    assert tokens_per_step(agree[1:], 5) == 1.0
    assert tokens_per_step(agree[:1], 2) == 3.0


def test_a_target_agrees_with_itself() -> None:
    torch.manual_seed(0)
    target = Llama(tiny.SHAPE)
    tokens = torch.randint(0, 64, (2, 24))
    with torch.inference_mode():
        logits = target.logits(target(tokens[:, :-1]).hidden)
    tokens = torch.cat((tokens[:, :8], logits[:, 7:].argmax(-1)), dim=1)
    with torch.inference_mode():
        logits = target.logits(target(tokens[:, :-1]).hidden)[:, 7:]
    run = GreedyRun(tokens=tokens, prompt_tokens=8, logits=logits)
    found = measure(target, run)
    assert found.overlap == pytest.approx(1.0, abs=1e-5)
    assert 0 < found.agreement <= 1


def test_repeated_ngrams() -> None:
    assert repeated_ngrams(torch.arange(20)[None]) == 0
    assert repeated_ngrams(torch.zeros(1, 20, dtype=torch.int64)) == pytest.approx(16 / 17)
