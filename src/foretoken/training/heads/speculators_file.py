"""What files of the `speculators` library have in common, whichever head is in them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def proposing(algorithm: str, drafts: int, verifier: str) -> dict[str, Any]:
    """The part of config.json that says how many tokens the head drafts, and for which model."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": drafts,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
    }


def with_both_ways(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """`t2d`, which target ids can be drafted, beside `d2t`; neither where all can be.

    The `speculators` package does not load a reduced vocabulary without both.
    """
    offsets = tensors.get("d2t")
    if offsets is None or len(offsets) == vocab_size:
        return {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    return {**tensors, "t2d": drafted_ids(offsets, vocab_size)}


def drafted_ids(offsets: Tensor, vocab_size: int) -> Tensor:
    """Which target ids can be drafted, bool [V], by the offsets `d2t`."""
    drafted_V = torch.zeros(vocab_size, dtype=torch.bool)
    drafted_V[offsets + torch.arange(len(offsets))] = True
    return drafted_V
