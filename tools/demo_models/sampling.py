"""Text from a training model: many rows at once, one token a step, with key-value caches.

Owns generation for distillation data and for measurements; serving has its own engine.
Invariant: greedy tokens equal the argmax of the model's full forward pass.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.training.llama import Block, KeyValue, Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to pick tokens: temperature 0 is greedy."""

    new_tokens: int
    temperature: float = 0.0


def _decode_block(block: Block, x_B1D: Tensor, cache: KeyValue, at: int, model: Llama) -> Tensor:
    query, key, value = block.project(x_B1D, model.rope(at, 1))
    cache.key[:, :, at : at + 1] = key
    cache.value[:, :, at : at + 1] = value
    grouped = query.unflatten(1, (block.shape.kv_heads, -1)).squeeze(3)  # [B, kv_heads, group, d]
    mixed = F.scaled_dot_product_attention(
        grouped, cache.key[:, :, : at + 1], cache.value[:, :, : at + 1]
    )
    return block.finish(x_B1D, mixed.flatten(1, 2).unsqueeze(2))


def _grown(cache: KeyValue, length: int) -> KeyValue:
    room = length - cache.key.shape[2]
    return KeyValue(F.pad(cache.key, (0, 0, 0, room)), F.pad(cache.value, (0, 0, 0, room)))


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
    length = prompts_BT.shape[1] + how.new_tokens
    first = model(prompts_BT)
    caches = [_grown(cache, length) for cache in first.caches]
    table = model.embed.weight.float()  # narrower logits have ties
    tokens = [pick(first.hidden[:, -1].float() @ table.T, how.temperature, generator)]
    for at in range(prompts_BT.shape[1], length - 1):
        hidden = model.embed(tokens[-1])[:, None]
        for block, cache in zip(model.blocks, caches, strict=True):
            assert isinstance(block, Block), type(block)
            hidden = _decode_block(block, hidden, cache, at, model)
        logits = model.norm(hidden)[:, 0].float() @ table.T
        tokens.append(pick(logits, how.temperature, generator))
    return torch.cat((prompts_BT, torch.stack(tokens, dim=1)), dim=1)
