"""Any target that our engine runs, as training sees it: it answers, and shows its hidden states.

Owns the engine and a small KV store of its own for reading rows. Invariant: hidden states come
from the same feature store that heads read when they serve.
"""

from pathlib import Path

import torch
from torch import Tensor

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.errors import UnsupportedModelError
from foretoken.kv.features import FINAL, FeatureView
from foretoken.kv.store import KVStore
from foretoken.models.tensors import SpanLayout
from foretoken.runtime.runner import Runner
from foretoken.shape.families import family_names
from foretoken.training.heads.target import Captured, TargetParts


class LoadedTarget:
    """One loaded target."""

    def __init__(self, folder: Path) -> None:
        """Load the target in `folder`. Raises ModelError: it is missing, broken, or not of a family
        of our own; UnsupportedModelError: its logits are not a matrix times its hidden states."""
        config = EngineConfig.from_kwargs(model=str(folder), enable_prefix_caching=False)
        self.engine = build_engine(config)
        model = self.engine.parts.runner.model
        shape = model.shape
        if shape.rope is None:
            raise UnsupportedModelError("config.target", shape.model_type, family_names())
        if shape.logit_softcap is not None:
            given = f"a model with final_logit_softcapping {shape.logit_softcap}"
            allowed = "one without it: heads draft from logits that are not capped"
            raise UnsupportedModelError("config.target", given, allowed)
        embedding = model.embedding
        identity = torch.eye(shape.hidden_size, dtype=embedding.dtype, device=embedding.device)
        with torch.no_grad():
            head_VD = model.logits(identity).T.contiguous()
        self.parts = TargetParts(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            layers=shape.num_hidden_layers,
            heads=shape.num_attention_heads,
            kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            max_positions=shape.max_position_embeddings,
            norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope.theta,
            embedding_VD=embedding.floats().detach().float().clone(),
            head_VD=head_VD.float(),
        )
        self._readers: dict[tuple[tuple[int, ...], int], Runner] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The type of its hidden states."""
        return self.engine.parts.runner.model.embedding.dtype

    @property
    def max_length(self) -> int:
        """Most tokens of a row."""
        return self.engine.parts.config.max_model_len

    def capture(self, tokens_BT: Tensor, points: tuple[int, ...]) -> Captured:
        """Read rows and keep the hidden states at `points`, float32; one row at a time."""
        kept = tuple(dict.fromkeys((*points, FINAL)))
        length = tokens_BT.shape[1]
        reader = self._reader(kept, length)
        assert reader.features is not None, "kept since the reader was made"
        pages = -(-length // reader.page_size)
        layout = SpanLayout(start=0, num_tokens=length, page_table=list(range(pages)))
        features, final = [], []
        for row in tokens_BT.tolist():
            reader.forward([layout], [row], [length - 1])
            view = FeatureView(reader.features, points)
            features.append(view.read(slice(0, length)).float().clone())
            last = FeatureView(reader.features, (FINAL,))
            final.append(last.read(slice(0, length)).float().clone())
        return Captured(
            tokens_BT=tokens_BT.to(features[0].device),
            features_BTF=torch.stack(features),
            final_BTD=torch.stack(final),
        )

    def _reader(self, points: tuple[int, ...], length: int) -> Runner:
        found = self._readers.get((points, length))
        if found is None:
            own = self.engine.parts.runner
            like = own.model.embedding
            store = KVStore(
                own.model.shape,
                num_pages=-(-length // own.page_size),
                page_size=own.page_size,
                dtype=like.dtype,
                device=like.device,
            )
            found = self._readers[points, length] = Runner(own.model, store, points)
        return found
