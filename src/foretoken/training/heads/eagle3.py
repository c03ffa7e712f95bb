"""Training of EAGLE-3 heads by the training-time test: each depth goes on from the head's output.

Source: Li et al. 2025 (arXiv 2503.01840); the files are those of the `speculators` library, and of
the authors' repository in the format `eagle`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.layers.embedding import Embedding
from foretoken.proposers.heads.eagle3.layers import Eagle3Shape
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.training.heads.eagle import recur
from foretoken.training.heads.guesses import Guess, Guesser, rotary_of
from foretoken.training.heads.kind import (
    FreshHead,
    HeadKind,
    Layout,
    drafted_ids,
    proposing,
    usual_vocabulary,
    usual_width,
    with_both_ways,
)
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.settings import HeadSettings, Settings

SPECULATORS_VERSION = "0.3.0"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Guesser(Guesser):
    """One pass over all slots a depth, as drafting goes on from its own states."""

    def __init__(self, net: Eagle3) -> None:
        """Train `net`, whose embedding must be in place."""
        self.net = net
        layer = net.shape.layer
        self._rotary = rotary_of(layer, net.fc.weight.device)
        whole = net.shape.draft_vocab_size == layer.vocab_size
        self._ids = None if whole else net.target_ids

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """Guess over the head's own vocabulary."""
        net = self.net
        for hidden in recur(net, self._rotary, captured, depth):
            normed = hidden if net.shape.norm_output else net.norm(hidden)
            yield Guess(states_BTD=normed, weight_VD=net.lm_head.weight, ids_V=self._ids)


def default_points(target: TargetParts) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 reads: the published default. Raises ConfigError: the target
    has too few layers."""
    layers = target.layers
    points = (2, layers // 2, layers - 3)
    if len(set(points)) < 3 or min(points) < 0:
        allowed = "7 layers or more for eagle3 and peagle; an eagle, mlp or medusa head needs fewer"
        raise ConfigError("config.target", f"a model of {layers} layers", allowed)
    return points


def eagle3_net(
    target: TargetParts, head: HeadSettings, frequent_ids: Tensor, *, parallel: bool
) -> Eagle3:
    """A network that begins with the target's embedding, last norm and rows of its output head."""
    count = head.draft_vocab_size or target.vocab_size
    net = Eagle3(
        Eagle3Shape(
            layer=target.layer_shape(head.inner_size, head.num_layers if parallel else 1),
            draft_vocab_size=count,
            target_hidden_size=target.hidden_size,
            parallel=parallel,
            anchored=parallel and head.anchored,
            mask_depths=max(1, head.depth - 1) if parallel and head.anchored else 1,
        )
    )
    ids = frequent_ids[:count].sort().values
    with torch.no_grad():
        net.d2t.copy_(ids - torch.arange(count))
        net.lm_head.weight.copy_(target.head_VD[ids])
        if target.norm_D is not None:
            net.norm.weight.copy_(target.norm_D)
    net.use_embedding(Embedding(target.embedding_VD))
    net.to(target.embedding_VD.device)
    return net


def speculators_config(shape: Mapping[str, Any], verifier: str) -> dict[str, Any]:
    """The config.json of a head of this shape in the `speculators` format."""
    layer = shape["layer"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": shape["draft_vocab_size"],
        "target_hidden_size": shape["target_hidden_size"],
        **{name: shape[name] for name in NORMS},
        "transformer_layer_config": {"model_type": "llama", "hidden_act": "silu", **layer},
        "speculators_config": proposing("eagle3", 5, verifier),
    }


def _fresh(target: TargetParts, settings: Settings, frequent_ids: Tensor) -> FreshHead:
    net = eagle3_net(target, settings.of_head, frequent_ids, parallel=False)
    return FreshHead(net, Eagle3Guesser(net), default_points(target))


def _layout(state: Mapping[str, Any], verifier: str, form: str | None) -> Layout:
    shape, tensors = state["shape"], state["model"]
    if form == "eagle":
        return _authors_layout(shape, tensors)
    own = with_both_ways(tensors, shape["layer"]["vocab_size"])
    return Layout(own, speculators_config(shape, verifier))


def _authors_layout(shape: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Layout:
    """EAGLE-3 as its authors publish it: one plain layer, both directions of the vocabulary."""
    layer = shape["layer"]
    variants = [name for name in NORMS if shape[name]]
    if variants or layer["num_hidden_layers"] > 1:
        given = ", ".join(variants) or f"{layer['num_hidden_layers']} layers"
        raise ConfigError("--format", f"eagle, of a head with {given}", "own, speculators")
    named = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        **layer,
        "bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": shape["draft_vocab_size"],
        "target_hidden_size": shape["target_hidden_size"],
    }
    return Layout({**named, "t2d": drafted_ids(tensors["d2t"], layer["vocab_size"])}, config)


def _usual(target: TargetParts) -> dict[str, Any]:
    return {
        "depth": 5,
        "inner_size": usual_width(target),
        "draft_vocab_size": usual_vocabulary(target),
    }


KIND = HeadKind(fresh=_fresh, layout=_layout, points=default_points, may_embed=True, usual=_usual)
