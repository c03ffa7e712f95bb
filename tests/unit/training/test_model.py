"""The training model is LlamaForCausalLM, and its fast paths equal the plain ones."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from foretoken.training.llama import Llama, blocked_attention
from foretoken.training.llama_folder import export, read_exported
from foretoken.training.losses import head_loss
from tests.unit.training import tiny


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(1)
    return Llama(tiny.SHAPE).eval()


def test_export_agrees_with_transformers(model: Llama, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    export(model, tmp_path, tmp_path / "out", torch.float32)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.randint(0, 64, (2, 40))
    with torch.inference_mode():
        mine = model.logits(model(tokens).hidden)
        assert (theirs(tokens).logits - mine).abs().max() < 1e-4
        back = read_exported(tmp_path / "out")
        assert torch.equal(back.logits(back(tokens).hidden), mine)


def test_blocked_attention(model: Llama) -> None:
    query, key, value = torch.randn(3, 6, 300, 16).unbind(0)
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(blocked_attention(query, key, value), plain)


def test_chunked_head_loss_and_gradients() -> None:
    torch.manual_seed(2)
    hidden = torch.randn(1100, 8, requires_grad=True)
    weight = torch.randn(30, 8, requires_grad=True)
    targets = torch.randint(-1, 30, (1100,))
    plain = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-1)
    expected = torch.autograd.grad(plain, (hidden, weight))
    loss = head_loss(hidden, weight, targets)
    torch.testing.assert_close(loss, plain)
    for mine, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
