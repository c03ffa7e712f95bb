"""The network of a head as a model of its own, as far as its target makes it large.

Its record says how deep it is; how wide follows from the target. Published heads of mixtures have
no experts, so only layers that come in the target's own checkpoint are like the target's. Knows no
devices.
"""

from dataclasses import replace

from foretoken.config.methods import DraftingMethod
from foretoken.lab.plan.sizes import PlanModel


def head_of(target: PlanModel, method: DraftingMethod) -> PlanModel:
    """The layers of a head for this target, and the output head that it shares.

    Args:
        target: what it drafts for.
        method: asserts that it drafts with a head that can be planned.
    """
    assert method.drafts_with == "head" and method.plan is not None, method.name
    layers, count = target.num_layers, method.plan.layers
    dense, experts = target.dense_params // layers, target.expert_params // layers
    if target.num_experts and method.own_file:
        dense, experts = _dense_layer(target), 0
    words = method.plan.head_vocabulary or target.vocab_size
    per_layer = (target.kv_elements + target.window_elements) // layers
    return replace(
        target,
        vocab_size=min(words, target.vocab_size),
        num_layers=count,
        dense_params=count * dense,
        expert_params=count * experts,
        num_experts=target.num_experts if experts else 0,
        kv_elements=count * per_layer if method.own_kv else 0,
        window_elements=0,
        full_layers=count,
        window_layers=0,
    )


def stage_of(target: PlanModel, method: DraftingMethod) -> PlanModel:
    """One stage of a head without keys and values: a square matrix and an output head."""
    return replace(
        head_of(target, method), dense_params=target.hidden_size**2, expert_params=0,
        num_experts=0, full_layers=0,
    )  # fmt: skip


def _dense_layer(target: PlanModel) -> int:
    """Weights of a layer with the target's attention and an MLP as wide as its dense ones."""
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    return target.hidden_size * (2 * queries + 2 * keys + 3 * target.intermediate_size)
