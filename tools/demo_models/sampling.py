"""Text from a training model: many rows at once, one token a step, with key-value caches.

Owns generation for distillation data and for measurements; serving has its own engine.
Invariant: greedy tokens equal the argmax of the model's full forward pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from foretoken.training.llama import Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to pick tokens: temperature 0 is greedy."""

    new_tokens: int
    temperature: float = 0.0


def pick(logits_BV: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Token ids [B] from logits [B, V]."""
    if temperature == 0.0:
        return logits_BV.argmax(dim=-1)
    probs = torch.softmax(logits_BV.float() / temperature, dim=-1)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


@torch.inference_mode()
def generate(
    model: Llama, prompts_BT: Tensor, how: Sampling, generator: torch.Generator | None = None
) -> Tensor:
    """Prompts [B, T] followed by `how.new_tokens` tokens, [B, T + new]; no stop at </s>."""
    table = model.embed_tokens.weight.float()  # narrower logits have ties
    cache, rows = DynamicCache(), [prompts_BT]
    for _ in range(how.new_tokens):
        hidden = model(rows[-1], None, None, cache, use_cache=True).last_hidden_state
        logits = hidden[:, -1].float() @ table.T
        rows.append(pick(logits, how.temperature, generator)[:, None])
    return torch.cat(rows, dim=1)
