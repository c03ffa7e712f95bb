"""Every other dense decoder-only architecture: transformers' modules, our attention and linears.

Modules are made from the config, filled strictly, and then tried: the layers must call plain
causal attention once each, and pieces of a sequence must give what the whole gives, to the bit if
`batch_invariant` is asked for. What does not is refused with a reason, before any request runs.
"""

from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from foretoken.backend import LinearSpec, backend_for
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.kv.features import FINAL, FeatureStore
from foretoken.kv.store import KVStore
from foretoken.layers.embedding import Embedding
from foretoken.models.base import LoadOptions, Model, check_bits
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.tensors import ModelInput, SpanLayout
from foretoken.models.through_transformers.attention import (
    NAME,
    LayerCall,
    PagedAttention,
    register,
)
from foretoken.models.through_transformers.modules import fill, swap_activations
from foretoken.ops.attention import Geometry
from foretoken.ops.linear import Linear, RowProbe
from foretoken.shape import ModelShape

_TRIED_TOKENS = 24
_TRIED_PIECES = ([1] * _TRIED_TOKENS, [7, 1, 1, 9, 6], [3, 2, 5, 13, 1])
_TOLERANCE = 0.2
"""Largest difference, in standard deviations of logits. Rounding stays far below, a state beside
the KV far above."""


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
