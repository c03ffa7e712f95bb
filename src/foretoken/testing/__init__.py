"""Doubles for tests of Foretoken and of code built on it: tiny checkpoints, adversarial drafters.

Shipped with the package so that a new proposer can be put through the same checks as ours.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.runtime.batch import Span

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_tiny_llama(folder: Path, *, seed: int = 0, scale: float = 3.0, **changes: Any) -> Path:
    """Write a random Llama checkpoint (float32, no tokenizer) and return its folder.

    Args:
        folder: made if it is not there.
        seed: of the weights.
        scale: of the output embedding: larger gives sharper distributions.
        changes: fields of config.json other than TINY's.
    """
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY, **changes}
    config.setdefault("torch_dtype", "float32")
    generator = torch.Generator().manual_seed(seed)

    def random_matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).div_(columns**0.5)

    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors = {
        "model.embed_tokens.weight": random_matrix(config["vocab_size"], hidden) * scale,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "self_attn.q_proj.weight"] = random_matrix(queries, hidden)
        tensors[prefix + "self_attn.k_proj.weight"] = random_matrix(keys, hidden)
        tensors[prefix + "self_attn.v_proj.weight"] = random_matrix(keys, hidden)
        tensors[prefix + "self_attn.o_proj.weight"] = random_matrix(hidden, queries)
        tensors[prefix + "mlp.gate_proj.weight"] = random_matrix(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = random_matrix(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = random_matrix(hidden, inner)
        tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random_matrix(config["vocab_size"], hidden) * scale
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


class JunkProposer(Proposer):
    """Drafts random tokens of random number: must change no output bit."""

    name = "junk"

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        """Draw tokens below `vocab_size`."""
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, context: Context) -> Draft:
        """0 to draft_budget random tokens per span."""
        draw = self._random
        ids = tuple(
            tuple(draw.randrange(self._vocab_size) for _ in range(draw.randint(0, s.draft_budget)))
            for s in context.spans
        )
        return Draft(ids=ids, drafter=self.name)

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


class ReplayProposer(Proposer):
    """Drafts from known outputs, wrong with a given probability: sometimes-agreeing drafts."""

    name = "replay"

    def __init__(
        self, outputs: dict[str, list[int]], vocab_size: int, *, wrong: float = 0.0, seed: int = 0
    ) -> None:
        """Know the plain output of each request id; spoil each drafted token by chance."""
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._wrong = wrong
        self._random = random.Random(seed)

    def propose(self, context: Context) -> Draft:
        """The next known tokens of each span."""
        return Draft(
            ids=tuple(
                self._draft(s.sequence.request.request_id, s.sequence.num_output, s.draft_budget)
                for s in context.spans
            ),
            drafter=self.name,
        )

    def release(self, request_id: str) -> None:
        """Nothing is kept."""

    def _draft(self, request_id: str, at: int, count: int) -> tuple[int, ...]:
        known = self._outputs.get(request_id, [])[at : at + count]
        draw = self._random
        return tuple(
            draw.randrange(self._vocab_size) if draw.random() < self._wrong else token
            for token in known
        )


class TreeProposer(Proposer):
    """Drafts random trees that may hide known outputs: must change no output bit.

    Without known outputs every branch is junk; with them, one branch of each tree begins with
    the right tokens, at a random place among its siblings.
    """

    name = "trees"

    def __init__(
        self, vocab_size: int, *, outputs: dict[str, list[int]] | None = None, seed: int = 0
    ) -> None:
        """Know the plain output of some request ids; the rest is drawn below `vocab_size`."""
        self._vocab_size = vocab_size
        self._outputs = outputs or {}
        self._random = random.Random(seed)

    def propose(self, context: Context) -> Draft:
        """A tree of 0 to draft_budget nodes per span."""
        trees = [self._tree(span) for span in context.spans]
        return Draft(
            ids=tuple(ids for ids, _ in trees),
            parents=tuple(parents for _, parents in trees),
            drafter=self.name,
        )

    def release(self, request_id: str) -> None:
        """Nothing is kept."""

    def _tree(self, span: Span) -> tuple[tuple[int, ...], tuple[int, ...]]:
        draw, sequence = self._random, span.sequence
        known = self._outputs.get(sequence.request.request_id, [])[sequence.num_output :]
        ids: list[int] = []
        parents: list[int] = []
        right, depth = -1, 0
        for node in range(draw.randint(0, span.draft_budget)):
            if depth < len(known) and draw.random() < 0.4:
                parents.append(right)
                ids.append(known[depth])
                right, depth = node, depth + 1
            else:
                parents.append(draw.randint(-1, node - 1))
                ids.append(draw.randrange(self._vocab_size))
        return tuple(ids), tuple(parents)
