"""Fills modules of transformers from a checkpoint, strictly, and swaps ours in for some of them.

Modules are made on PyTorch's meta device, without memory. Linear layers (GPT-2's Conv1D is one,
stored transposed) become ours; activations whose bits depend on the number of rows do too.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import UnsupportedModelError
from foretoken.models.checkpoint import Checkpoint
from foretoken.ops.activation import Activation, gelu_tanh, silu
from foretoken.ops.linear import Linear

MakeLinear = Callable[[Tensor, Tensor | None], Linear]
_MASK_BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
"""What old checkpoints store beside weights: causal masks and frequencies."""
_ACTIVATIONS: dict[str, Activation] = {
    "SiLU": silu,
    "SiLUActivation": silu,
    "GELUTanh": gelu_tanh,
    "PytorchGELUTanh": gelu_tanh,
}
"""By class name; the others of transformers were found to keep their bits."""


class SwappedLinear(nn.Module):
    """A linear layer of ours where transformers expects a module."""

    def __init__(self, linear: Linear, num_outputs: int) -> None:
        """Wrap `linear`."""
        super().__init__()
        self._linear = linear
        self._num_outputs = num_outputs

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        y_TN = self._linear(x.reshape(-1, x.shape[-1]))
        return y_TN.view(*x.shape[:-1], self._num_outputs)


class SwappedActivation(nn.Module):
    """An activation of ours where transformers expects a module."""

    def __init__(self, activate: Activation) -> None:
        """Wrap `activate`."""
        super().__init__()
        self._activate = activate

    def forward(self, x: Tensor) -> Tensor:
        """The activation of x, in its shape and type."""
        return self._activate(x)


def fill(model: Any, checkpoint: Checkpoint, make_linear: MakeLinear) -> None:
    """Load every parameter of `model` (on meta) and swap its linear layers.

    Args:
        model: transformers' causal language model.
        checkpoint: where tensors come from; nothing may be left over.
        make_linear: from weights [N, K] and a bias to a layer.

    Raises:
        CheckpointError: tensors are missing, unused or misshapen.
        UnsupportedModelError: a buffer that transformers does not compute from the config.
    """
    source = _Source(model, checkpoint)
    _fill_buffers(model, checkpoint, source)
    for name, module in list(model.named_modules()):
        if _is_linear(module):
            _swap_linear(model, name, source, make_linear)
        else:
            for key, parameter in list(module.named_parameters(recurse=False)):
                full = f"{name}.{key}" if name else key
                loaded = nn.Parameter(source.take(full, parameter), requires_grad=False)
                setattr(module, key, loaded)
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    for name in checkpoint.names():
        if any(pattern.search(name) for pattern in (_MASK_BUFFERS, *ignored)):
            checkpoint.ignore(name)
    checkpoint.finish()


def swap_activations(model: nn.Module) -> None:
    """Replace the activations whose bits depend on how many rows there are."""
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            activate = _ACTIVATIONS.get(type(child).__name__)
            if activate is not None:
                setattr(module, key, SwappedActivation(activate))


class _Source:
    """Tensors by the names of the model's parameters; tied ones are read once."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored = _stored_names(model, checkpoint.names())
        self._loaded: list[tuple[Tensor, Tensor]] = []

    def take(self, name: str, parameter: Tensor) -> Tensor:
        """The tensor for `parameter`."""
        name = self._stored.get(name, name)
        for known, loaded in self._loaded:
            if known is parameter:
                self._checkpoint.ignore(name)
                return loaded
        loaded = self._checkpoint.keep(name, parameter.shape)  # no file stays mapped
        self._loaded.append((parameter, loaded))
        return loaded


def _stored_names(model: Any, names: list[str]) -> dict[str, str]:
    """From the model's names to the checkpoint's: transformers has renamed some since, and the
    base model's name may be missing in front."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError as error:
        given = model.config.model_type
        raise UnsupportedModelError("model_type", given, "with transformers 5 or newer") from error
    steps = [s for s in get_model_conversion_mapping(model) if isinstance(s, WeightRenaming)]
    place = (model.base_model_prefix, model.state_dict())
    return {rename_source_key(name, steps, [], *place)[0]: name for name in names}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _swap_linear(model: nn.Module, name: str, source: _Source, make_linear: MakeLinear) -> None:
    module = model.get_submodule(name)
    weight = source.take(f"{name}.weight", module.weight)  # type: ignore[arg-type]
    if not isinstance(module, nn.Linear):
        weight = weight.T.contiguous()
    bias = module.bias
    loaded = source.take(f"{name}.bias", bias) if isinstance(bias, Tensor) else None
    parent, _, key = name.rpartition(".")
    swapped = SwappedLinear(make_linear(weight, loaded), weight.shape[0])
    setattr(model.get_submodule(parent), key, swapped)


def _fill_buffers(model: Any, checkpoint: Checkpoint, source: _Source) -> None:
    """Persistent buffers are stored; the others follow from the config, and transformers computes
    them where it initializes weights. Done over different old contents, it must give the same."""
    for name, module in list(model.named_modules()):
        computed = {}
        for key, buffer in module.named_buffers(recurse=False):
            if key in module._non_persistent_buffers_set:
                computed[key] = buffer
            else:
                module._buffers[key] = source.take(f"{name}.{key}", buffer)
        if not computed:
            continue
        results = []
        for old in (0, 1):
            for key, buffer in computed.items():
                module._buffers[key] = torch.full_like(buffer, old, device=checkpoint.device)
            model._init_weights(module)
            results.append([module._buffers[key] for key in computed])
        for key, first, second in zip(computed, *results, strict=True):
            if not torch.equal(first, second):
                allowed = "buffers that transformers computes from the config"
                raise UnsupportedModelError("buffer", f"{name}.{key}", allowed)
