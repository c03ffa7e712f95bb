"""Every other dense decoder-only architecture: transformers' modules, our attention and linears.

Modules are made from the config, filled strictly, and then tried: the layers must call plain
causal attention once each, and pieces of a sequence must give what the whole gives, to the bit if
`batch_invariant` is asked for. What does not is refused with a reason, before any request runs.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from foretoken.backend import LinearSpec, backend_for
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.kv.features import FINAL, FeatureStore
from foretoken.kv.store import KVStore, write
from foretoken.layers.embedding import Embedding
from foretoken.models.base import LoadOptions, Model, check_bits
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.tensors import ModelInput, SpanLayout
from foretoken.ops.activation import Activation, gelu_tanh, silu
from foretoken.ops.attention import Geometry, SpanWindow
from foretoken.ops.attention.base import Attend, Attention
from foretoken.ops.linear import Linear, RowProbe
from foretoken.ops.quantize_kv import quantize_kv
from foretoken.shape import ModelShape

_TRIED_TOKENS = 24
_TRIED_PIECES = ([1] * _TRIED_TOKENS, [7, 1, 1, 9, 6], [3, 2, 5, 13, 1])
_TOLERANCE = 0.2
"""Largest difference, in standard deviations of logits. Rounding stays far below, a state beside
the KV far above."""
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
NAME = "foretoken"
_HARMLESS = ("position_ids", "cache_position")
"""Tensors that attention functions are given and that do not change causal attention."""


class LayerCall(NamedTuple):
    """How a layer calls attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    scale: float


@dataclass(frozen=True, slots=True)
class _Step:
    attends: tuple[Attend, ...]
    slots_T: Tensor | slice
    store: KVStore


class PagedAttention:
    """What the attention modules of one model share. Not thread-safe, as the model is not.

    transformers finds a function by its registered name; the function finds its model's
    `PagedAttention` on the calling module. At load that notes how each layer calls (heads, window,
    soft cap, scale) and refuses what causal attention over pages is not; in a step it writes keys
    and values and attends.
    """

    def __init__(self, model_type: str) -> None:
        self._model_type = model_type
        self.calls: dict[int, LayerCall] = {}
        """By layer, as noted."""
        self._kinds: tuple[Attention, ...] = ()
        self._kind_of: dict[int, int] = {}
        self._step: _Step | None = None

    def attach(self, model: nn.Module) -> None:
        """Let every module of the model find this."""
        for module in model.modules():
            module.foretoken_attention = self  # type: ignore[assignment]

    def serve(self, kinds: Mapping[LayerCall, Attention]) -> None:
        """From now on compute, with one attention per way of calling."""
        order = list(kinds)
        self._kinds = tuple(kinds.values())
        self._kind_of = {layer: order.index(call) for layer, call in self.calls.items()}

    def begin(self, spans: list[SpanWindow], slots_T: Tensor | slice, store: KVStore) -> None:
        """Plan a step."""
        attends = tuple(attention.plan(spans) for attention in self._kinds)
        self._step = _Step(attends, slots_T, store)

    def end(self) -> None:
        """Forget the step."""
        self._step = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, T, h], k and v [1, K, T, h] -> [1, T, H, h]."""
        step = self._step
        assert step is not None, "attention outside of a step"
        heads, tokens, size = q.shape[1:]
        key_heads = k.shape[1]
        kv_TKh, layer_SKh = torch.cat([k[0], v[0]]).transpose(0, 1), step.store.layers[layer]
        write(layer_SKh, step.slots_T, quantize_kv(kv_TKh, layer_SKh.dtype))
        q_KGTh = q[0].unflatten(0, (key_heads, heads // key_heads))
        q_THh = q_KGTh.permute(2, 1, 0, 3).reshape(tokens, heads, size).contiguous()
        out_TD = step.attends[self._kind_of[layer]](q_THh, layer_SKh)
        out_TGKh = out_TD.view(tokens, heads // key_heads, key_heads, size)
        return out_TGKh.transpose(1, 2).reshape(1, tokens, heads, size)

    @property
    def noting(self) -> bool:
        """Whether calls are noted instead of computed."""
        return not self._kinds

    def note(self, layer: int, call: LayerCall, others: Mapping[str, Any]) -> None:
        """Note a layer's call. Raises UnsupportedModelError: it asks for more than a window, a soft
        cap and a scale."""
        tensors = [name for name, value in others.items() if isinstance(value, Tensor)]
        unknown = sorted(set(tensors) - set(_HARMLESS))
        if unknown:
            self._refuse(f"attention with {', '.join(unknown)}")
        if layer in self.calls:
            self._refuse(f"attention that is called twice in layer {layer}")
        self.calls[layer] = call

    def _refuse(self, what: str) -> None:
        allowed = "causal attention with at most a window and a soft cap"
        raise UnsupportedModelError("model_type", f"{self._model_type} ({what})", allowed)

    def check(self, module: nn.Module, mask: Tensor | None, k: Tensor, v: Tensor) -> None:
        """The call is causal attention of a layer with keys and values of one size. Raises
        UnsupportedModelError: it is not."""
        if mask is not None:
            self._refuse("a mask of its own")
        if not getattr(module, "is_causal", True):
            self._refuse("attention that is not causal")
        if k.shape != v.shape:
            self._refuse(f"keys of {k.shape[-1]} and values of {v.shape[-1]} numbers")
        if not isinstance(getattr(module, "layer_idx", None), int):
            self._refuse("attention without a layer")


def register() -> None:
    """Make the name known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface; see `PagedAttention.attend` for the shapes."""
    paged: PagedAttention = module.foretoken_attention  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    if not paged.noting:
        return paged.attend(layer, query, key, value), None
    mask = args[0] if args else kwargs.pop("attention_mask", None)
    paged.check(module, mask, key, value)
    scale = kwargs.pop("scaling", None)
    call = LayerCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        window=kwargs.pop("sliding_window", None),
        softcap=kwargs.pop("softcap", None),
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
    )
    paged.note(layer, call, kwargs)
    return query.transpose(1, 2), None


class SwappedLinear(nn.Module):
    """A linear layer of ours where transformers expects a module."""

    def __init__(self, linear: Linear, num_outputs: int) -> None:
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
        super().__init__()
        self._activate = activate

    def forward(self, x: Tensor) -> Tensor:
        """The activation of x, in its shape and type."""
        return self._activate(x)


def fill(model: Any, checkpoint: Checkpoint, make_linear: MakeLinear) -> None:
    """Load every parameter of `model` (on meta), strictly, and swap its linear layers, of which
    GPT-2's Conv1D, stored transposed, is one.

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


class _Given(nn.Module):
    """Stands in for the base model when only the head is wanted: gives back what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import (
            BaseModelOutputWithPastAndCrossAttentions as Output,
        )

        return Output(last_hidden_state=kwargs["inputs_embeds"])


@final
class TransformersModel(Model):
    """A causal language model whose layers transformers runs."""

    def __init__(self, shape: ModelShape, causal: Any, paged: PagedAttention) -> None:
        """Take over `causal`, filled and attached to `paged`."""
        self.shape = shape
        self.embedding = Embedding(causal.get_input_embeddings().weight)
        self.head = None
        self._base = causal.get_decoder()
        [path] = [name for name, module in causal.named_modules() if module is self._base]
        parent, _, key = path.rpartition(".")
        setattr(causal.get_submodule(parent), key, _Given())
        self._head = causal
        self._paged = paged

    def hidden(
        self, inputs: ModelInput, store: KVStore, features: FeatureStore | None = None
    ) -> Tensor:
        """Run a step: hidden states after the last norm, [T, D]."""
        spans = [layout.window for layout in inputs.spans]
        self._paged.begin(spans, inputs.slots_T, store)
        try:
            out = self._base(
                input_ids=inputs.tokens_T[None],
                position_ids=inputs.positions_T[None],
                use_cache=False,
                output_hidden_states=features is not None,
            )
        finally:
            self._paged.end()
        last: Tensor = out.last_hidden_state[0]
        if features is not None:
            for layer in range(self.shape.num_hidden_layers):
                features.write(layer, inputs.slots_T, out.hidden_states[layer][0])
            features.write(FINAL, inputs.slots_T, last)
        return last

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 logits [R, V]: the head and what the architecture does to its output."""
        logits: Tensor = self._head(inputs_embeds=hidden_RD[None], use_cache=False).logits
        return logits[0].float()


def load_with_transformers(
    folder: Path, shape: ModelShape, options: LoadOptions
) -> TransformersModel:
    """Load the checkpoint in `folder`, whose family has no record.

    Raises:
        UnsupportedModelError: not causal attention over pages, or bits that depend on the batch.
        CheckpointError: tensors are missing, unused, misshapen or unreadable.
    """
    paged = PagedAttention(shape.model_type)
    causal = _on_meta(folder, shape)
    backend, probe = backend_for(options.device), RowProbe() if options.batch_invariant else None

    fixed: set[int] = set()

    def linear(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
        made = backend.linear(
            LinearSpec(
                weights=weight_NK,
                dtype=options.dtype,
                bias_N=bias_N,
                quantization=options.quantization,
                x_bits=options.x_bits,
                probe=probe,
            )
        )
        fixed.add(made.fixed_bits)
        return made

    with Checkpoint(folder, dtype=options.dtype, device=options.device) as checkpoint:
        fill(causal, checkpoint, linear)
    check_bits(options, fixed)
    if options.batch_invariant:
        swap_activations(causal)
    paged.attach(causal)
    _note(causal, paged, shape, options)
    model = TransformersModel(shape, causal, paged)
    _Trial(model, options).check()
    return model


def _on_meta(folder: Path, shape: ModelShape) -> Any:
    """The architecture without memory, set to call our attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    mapping: Any = AutoModelForCausalLM._model_mapping
    model_class = mapping[type(config)]
    if not model_class._supports_attention_backend:
        allowed = "architectures of transformers that take other attention functions"
        raise UnsupportedModelError("model_type", shape.model_type, allowed)
    with torch.device("meta"):
        causal = model_class._from_config(config, attn_implementation=NAME, dtype=torch.float32)
    causal.tie_weights()
    return causal.eval()


def _note(causal: Any, paged: PagedAttention, shape: ModelShape, options: LoadOptions) -> None:
    """Have every layer call attention once, and choose one for each way of calling."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=options.device)
    causal(input_ids=ids, position_ids=ids, use_cache=False)
    called = sorted(paged.calls)
    if called != list(range(shape.num_hidden_layers)):
        given = f"{shape.model_type}, {len(called)} of {shape.num_hidden_layers} layers"
        raise UnsupportedModelError("layers with attention", given, "all of them")
    sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    backend, kinds = backend_for(options.device), {}
    for call in dict.fromkeys(paged.calls.values()):
        found = (call.num_heads, call.num_kv_heads, call.head_dim)
        if found != sizes:
            raise CheckpointError("heads, key heads and their size", found, f"{sizes}, in config")
        geometry = _geometry(call, options)
        kinds[call] = backend.attention(geometry, batch_invariant=options.batch_invariant)
    paged.serve(kinds)


def _geometry(call: LayerCall, options: LoadOptions) -> Geometry:
    return Geometry(
        **call._asdict(),
        page_size=options.page_size,
        dtype=options.dtype,
        device=options.device,
        kv_store_dtype=options.kv_store_dtype,
    )


class _Trial:
    """Runs a random sequence whole and in pieces, before any request does."""

    def __init__(self, model: TransformersModel, options: LoadOptions) -> None:
        self._model, self._options = model, options
        limit = min(_TRIED_TOKENS, model.shape.max_position_embeddings)
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(model.shape.vocab_size, (limit,), generator=generator)
        num_pages = -(-limit // options.page_size)
        self._pages = list(range(num_pages))
        self._store = KVStore(
            model.shape,
            num_pages=num_pages,
            page_size=options.page_size,
            dtype=options.kv_store_dtype or options.dtype,
            device=options.device,
        )

    def check(self) -> None:
        """Compare."""
        whole = self._logits([len(self._ids)])
        kind = self._model.shape.model_type
        for pieces in _TRIED_PIECES:
            found = self._logits(pieces)
            error = (found - whole).abs().max().item() / whole.std().item()
            if not error < _TOLERANCE:
                given = f"{kind} (a token's result depends on more than tokens before it)"
                allowed = "architectures whose only state is keys and values"
                raise UnsupportedModelError("model_type", given, allowed)
            if self._options.batch_invariant and not torch.equal(found, whole):
                allowed = f"False for {kind}: its modules' results depend on the number of rows"
                raise UnsupportedModelError("batch_invariant", True, allowed)

    def _logits(self, pieces: list[int]) -> Tensor:
        rows, at = [], 0
        for piece in pieces:
            stop = min(at + piece, len(self._ids))
            if stop > at:
                hidden = self._model.hidden(self._inputs(at, stop), self._store)
                rows.append(self._model.logits(hidden))
            at = stop
        return torch.cat(rows)

    def _inputs(self, start: int, stop: int) -> ModelInput:
        device = self._options.device
        positions = torch.arange(start, stop, device=device)
        layout = SpanLayout(start=start, num_tokens=stop - start, page_table=self._pages)
        return ModelInput(
            tokens_T=self._ids[start:stop].to(device),
            positions_T=positions,
            slots_T=slice(start, stop),
            spans=(layout,),
            rows_R=None,
        )
