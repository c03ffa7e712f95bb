"""The published formats of heads: names of tensors and contents of config.json.

Knows no run and no file. A head has a format of its own, which our loaders read and `own` names;
`speculators`, `vllm` and `eagle` ask for one by name, where its kind has it.

Sources: the EAGLE, EAGLE-3, Medusa and IBM accelerator repositories, the `speculators` library, and
vLLM's loaders of them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.config.methods import ANCHORED
from foretoken.errors import ConfigError

SPECULATORS_VERSION = "0.3.0"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OWN = "own"
FORMS = {
    "lm": (),
    "draft": ("vllm",),
    "parallel": ("vllm",),
    "eagle": ("vllm", "eagle"),
    "eagle3": ("speculators", "vllm", "eagle"),
    "peagle": ("speculators", "vllm"),
    "mlp": (),
    "medusa": (),
}
"""The formats that each kind of run can be written in beside its own."""


class Layout(NamedTuple):
    """What a folder will hold."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]


def require_form(kind: str, form: str | None) -> None:
    """Raise ConfigError for a kind that has no such format; None is a kind's own, too."""
    allowed = (OWN, *FORMS.get(kind, ()))
    if form is not None and form not in allowed:
        raise ConfigError("export", form, f"for {kind}: {', '.join(allowed)}")


def layout_of(state: dict[str, Any], verifier: str, form: str | None = None) -> Layout:
    """A head's checkpoint in a published format.

    Args:
        state: of a run of a head, but parallel.
        verifier: name or path of the target, for the file's own record.
        form: one of the kind's FORMS, or None for its own.

    Raises:
        ConfigError: the kind has no such format, or this head is a variant that it cannot hold.
    """
    kind, shape, tensors = state["kind"], state["shape"], state["model"]
    require_form(kind, form)
    if kind == "mlp":
        named = {"speculator." + name: tensor for name, tensor in tensors.items()}
        return Layout(named, _mlp_config(shape))
    if kind == "medusa":
        return Layout(tensors, _medusa_config(shape, verifier))
    if kind == "eagle":
        return Layout(tensors, _eagle_config(shape, tensors, form))
    if form == "eagle":
        return _eagle3_of_eagle(shape, tensors)
    own = _with_both_ways(tensors, shape["layer"]["vocab_size"])
    if kind == "eagle3":
        return Layout(own, _eagle3_config(shape, verifier))
    assert kind == "peagle", kind
    if shape["anchored"] and form not in (None, OWN):
        raise ConfigError("export", form, "none: anchored P-EAGLE is a variant of our own")
    return Layout(own, _peagle_config(state["head"], shape, verifier))


def _with_both_ways(tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """`t2d`, which target ids can be drafted, beside `d2t`; neither where all can be.

    The `speculators` package does not load a reduced vocabulary without both.
    """
    offsets = tensors["d2t"]
    if len(offsets) == vocab_size:
        return {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    return {**tensors, "t2d": _drafted(offsets, vocab_size)}


def _drafted(offsets: Tensor, vocab_size: int) -> Tensor:
    """Which target ids can be drafted, bool [V]."""
    drafted_V = torch.zeros(vocab_size, dtype=torch.bool)
    drafted_V[offsets + torch.arange(len(offsets))] = True
    return drafted_V


def _mlp_config(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "n_candidates": 1,
        "top_k_tokens_per_head": [1] * shape["n_predict"],
        **shape,
    }


def _medusa_config(shape: dict[str, Any], verifier: str) -> dict[str, Any]:
    return {
        "base_model_name_or_path": verifier,
        "medusa_num_heads": shape["medusa_num_heads"],
        "medusa_num_layers": shape["medusa_num_layers"],
        "medusa_share_head": shape["share_head"],
        "hidden_size": shape["hidden_size"],
        "vocab_size": shape["vocab_size"],
    }


def _eagle_config(
    shape: dict[str, Any], tensors: dict[str, Tensor], form: str | None
) -> dict[str, Any]:
    layer = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    bias = "fc.bias" in tensors
    if bias and form == "vllm":
        raise ConfigError("export", form, "eagle: vLLM has no place for the bias of this head")
    return {**layer, **shape, "bias": bias}


def _eagle3_of_eagle(shape: dict[str, Any], tensors: dict[str, Tensor]) -> Layout:
    """EAGLE-3 as its authors publish it: one plain layer, both directions of the vocabulary."""
    layer = shape["layer"]
    variants = [name for name in NORMS if shape[name]]
    if variants or layer["num_hidden_layers"] > 1:
        given = ", ".join(variants) or f"{layer['num_hidden_layers']} layers"
        raise ConfigError("export", f"eagle, of a head with {given}", "speculators")
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
    return Layout({**named, "t2d": _drafted(tensors["d2t"], layer["vocab_size"])}, config)


def _peagle_config(head: dict[str, Any], shape: dict[str, Any], verifier: str) -> dict[str, Any]:
    config = _eagle3_config(shape, verifier)
    if shape["anchored"]:
        config["speculators_config"]["algorithm"] = ANCHORED
        return {**config, "architectures": ["PEagleAnchored"], "speculators_model_type": ANCHORED}
    config["speculators_config"]["algorithm"] = "peagle"
    return {
        **config,
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": head["mask_token_id"],
    }


def _eagle3_config(shape: dict[str, Any], verifier: str) -> dict[str, Any]:
    layer = shape["layer"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": shape["draft_vocab_size"],
        "target_hidden_size": shape["target_hidden_size"],
        **{name: shape[name] for name in NORMS},
        "transformer_layer_config": {"model_type": "llama", "hidden_act": "silu", **layer},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
    }
