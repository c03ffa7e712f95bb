"""Random block heads (DFlash, DSpark) in their published layouts, and the same networks in float64
from the equations of the papers, written without a line of the package."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.golden.heads import (
    HEADS,
    HIDDEN,
    KV,
    LAYER,
    SIZE,
    VOCAB,
    Array,
    Weights,
    rms,
    silu,
    turned,
)

TAPS, REDUCED, RANK, MASK = 3, 20, 6, 60
LAYERS = 2
BODY: dict[str, Any] = {**LAYER, "num_hidden_layers": LAYERS, "model_type": "qwen3"}


def block_weights(seed: int, *, taps: int = TAPS, bias: bool = False) -> Weights:
    weights = Weights(seed)
    weights.matrix("fc.weight", HIDDEN, taps * HIDDEN)
    weights.vector("hidden_norm.weight", HIDDEN)
    weights.vector("norm.weight", HIDDEN)
    for i in range(LAYERS):
        prefix = f"layers.{i}."
        weights.layer(prefix, HIDDEN)
        weights.vector(prefix + "input_layernorm.weight", HIDDEN)
        weights.vector(prefix + "self_attn.q_norm.weight", SIZE)
        weights.vector(prefix + "self_attn.k_norm.weight", SIZE)
        for name, rows in (("q", HEADS * SIZE), ("k", KV * SIZE), ("v", KV * SIZE), ("o", HIDDEN)):
            if bias:
                weights.vector(f"{prefix}self_attn.{name}_proj.bias", rows)
    return weights


def with_markov(weights: Weights, drafts: int, kind: str, *, by_token: bool = True) -> Weights:
    weights.matrix("markov_head.markov_w1.weight", VOCAB, RANK)
    weights.matrix("markov_head.markov_w2.weight", drafts, RANK)
    if kind == "gated":
        weights.matrix("markov_head.gate_proj.weight", RANK, HIDDEN + RANK)
        weights.vector("markov_head.gate_proj.bias", RANK)
    weights.matrix("confidence_head.proj.weight", 1, HIDDEN + RANK * by_token)
    weights.vector("confidence_head.proj.bias", 1)
    return weights


@dataclass(frozen=True)
class View:
    """What rows of a block see in a layer."""

    window: int | None = None
    causal: bool = False


def _map(w: Weights, name: str, x: Array) -> Array:
    made: Array = x @ w[name + ".weight"].T
    return made + w[name + ".bias"] if name + ".bias" in w.tensors else made


def _attention(w: Weights, prefix: str, x: Array, context: Array, start: int, view: View) -> Array:
    """Rows [R, D] at start, start + 1, ... over the context before them and one another."""
    rows, places = np.arange(start, start + len(x)), np.arange(start + len(x))
    both = np.concatenate((context, x))
    q = _map(w, prefix + "q_proj", x).reshape(len(x), HEADS, SIZE)
    k = _map(w, prefix + "k_proj", both).reshape(len(both), KV, SIZE)
    v = _map(w, prefix + "v_proj", both).reshape(len(both), KV, SIZE)
    q = turned(rms(q, w[prefix + "q_norm.weight"]), rows.astype(float))
    k = turned(rms(k, w[prefix + "k_norm.weight"]), places.astype(float))
    seen = np.ones((len(rows), len(places)), dtype=bool)
    if view.causal:
        seen &= places <= rows[:, None]
    if view.window is not None:
        seen &= np.abs(rows[:, None] - places) < view.window
    mixed = np.zeros((len(x), HEADS, SIZE))
    for head in range(HEADS):
        scores = q[:, head] @ k[:, head // (HEADS // KV)].T / SIZE**0.5
        weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        weights /= weights.sum(-1, keepdims=True)
        mixed[:, head] = weights @ v[:, head // (HEADS // KV)]
    return _map(w, prefix + "o_proj", mixed.reshape(len(x), -1))


def block_outputs(w: Weights, features: Array, embedded: Array, views: Sequence[View]) -> Array:
    """Outputs after the last norm of the rows of a block behind as many places as there are
    features."""
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = embedded
    for i, view in enumerate(views):
        prefix = f"layers.{i}."
        normed = rms(x, w[prefix + "input_layernorm.weight"])
        x = x + _attention(w, prefix + "self_attn.", normed, context, len(features), view)
        normed = rms(x, w[prefix + "post_attention_layernorm.weight"])
        gate = silu(_map(w, prefix + "mlp.gate_proj", normed))
        x = x + _map(w, prefix + "mlp.down_proj", gate * _map(w, prefix + "mlp.up_proj", normed))
    return rms(x, w["norm.weight"])


def sigmoid(x: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-x))
    return found


def markov_term(w: Weights, outputs: Array, previous: Sequence[int]) -> Array:
    """What tokens before rows add to the logits of these."""
    short = w["markov_head.markov_w1.weight"][list(previous)]
    if "markov_head.gate_proj.weight" in w.tensors:
        gate = _map(w, "markov_head.gate_proj", np.concatenate((outputs, short), -1))
        short = short * sigmoid(gate)
    added: Array = short @ w["markov_head.markov_w2.weight"].T
    return added


def confidence(w: Weights, outputs: Array, previous: Sequence[int]) -> Array:
    x = outputs
    if w["confidence_head.proj.weight"].shape[1] > HIDDEN:
        short = w["markov_head.markov_w1.weight"][list(previous)]
        x = np.concatenate((x, short), -1)
    return sigmoid(_map(w, "confidence_head.proj", x)[:, 0])
