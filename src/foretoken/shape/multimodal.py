"""Checkpoints that see or hear: their text decoder, as if it were published alone.

One record per family: what the decoder is, under which names its tensors lie, and which others are
left alone. Everything else in the files is an error, as always. Tokens that stand for a picture or
a sound are known by their ids, so that no prompt can hold them. Torch-free.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.fields import Config, eos_ids
from foretoken.shape.safetensors_header import stored_names

_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "model.",
)
"""Where decoders lie: as transformers 5 has them, as most are published, and re-saved alone."""
_TABLE, _HEADS = "embed_tokens.weight", ("lm_head.", "language_model.lm_head.")
DRAFT_HEADS = ("mtp.", "model.mtp_")
"""What the names of tensors begin with that draft, which are not read; ERNIE has the latter."""
_LLAVA = ("vision_tower.", "multi_modal_projector.")
_OUTSIDE = ("model_type", "architectures", "text_config", "tie_word_embeddings")
_EITHER = ("quantization_config", "compression_config", "dtype", "torch_dtype")
"""Null in one part where the other says it."""
PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
    "vision_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
)
"""Fields of config.json with ids that stand for pictures and sounds, or around them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPart:
    """One kind of text_config."""

    family: str
    """The family of ours that runs it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers' class has where config.json says nothing, readers' defaults aside."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """What it does whatever config.json says."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalFamily:
    """A family whose checkpoints hold a decoder of ours beside other networks."""

    model_type: str
    texts: tuple[str, ...]
    """Model types of its text_config, the usual one first."""
    skipped: tuple[str, ...]
    """What the names of its other networks begin with, with or without `model.` before it."""
    may_be_flat: bool = False
    """Whether older files have the decoder's fields at the top, without a text_config."""

    def names(self, stored: Collection[str]) -> dict[str, str]:
        """The decoder's tensors: names as in a model of its own -> as stored.

        Tensors of the other networks are left out; those that belong to neither keep their names.
        """
        prefix = next((one for one in _PREFIXES if one + _TABLE in stored), _PREFIXES[0])
        skipped = (*self.skipped, *(f"model.{one}" for one in self.skipped), *DRAFT_HEADS)
        found: dict[str, str] = {}
        for name in sorted(stored):
            if not name.startswith(skipped):
                plain = _plain_name(name, prefix)
                found[name if plain in found else plain] = name
        return found


def _plain_name(name: str, prefix: str) -> str:
    for start, instead in ((prefix, "model."), *((head, "lm_head.") for head in _HEADS)):
        if name.startswith(start):
            return instead + name.removeprefix(start)
    return name


def find_multimodal(model_type: object) -> MultimodalFamily | None:
    """The record of this name; None: there is none."""
    return _BY_NAME.get(model_type) if isinstance(model_type, str) else None


def text_config(config: Config, folder: Path | None = None) -> dict[str, Any]:
    """config.json of the decoder alone: what the text part says, else the top, else its class.

    Args:
        config: of a family with a record, its kinds checked.
        folder: of the weights, which decide where the two parts contradict each other about a tied
            head; None: such a head is tied.

    Raises:
        UnsupportedModelError: a text part that is not run.
        CheckpointError: there is none.
    """
    outer = _BY_NAME[config["model_type"]]
    inner = config.get("text_config")
    if inner is None:
        if not outer.may_be_flat:
            raise CheckpointError("config.json text_config", None, "an object")
        inner = {}
    kind = inner.get("model_type", outer.texts[0])
    if kind not in outer.texts:
        given = f"{kind} in {outer.model_type}"
        raise UnsupportedModelError("text_config model_type", given, ", ".join(outer.texts))
    part = _TEXTS[kind]
    top = {name: value for name, value in config.items() if name not in _OUTSIDE}
    inner = {name: one for name, one in inner.items() if one is not None or name not in _EITHER}
    found = {**part.defaults, **top, **inner, **part.always, "model_type": part.family}
    tied = _tied(config, inner, folder)
    if tied is not None:
        found["tie_word_embeddings"] = tied
    for name in ("rope_scaling", "rope_parameters"):
        if found.get(name):
            found[name] = _text_positions(found[name])
    return {**found, "eos_token_id": sorted(eos_ids(config) | eos_ids(inner))}


def placeholders(config: Config) -> tuple[tuple[str, int], ...]:
    """Fields and ids of the tokens that stand for something else than text."""
    named = ((name, config.get(name)) for name in PLACEHOLDERS)
    return tuple((name, found) for name, found in named if isinstance(found, int))


def _tied(top: Config, inner: Config, folder: Path | None) -> bool | None:
    """Whether head and table are one; None: nothing says so."""
    each = (part.get("tie_word_embeddings") for part in (inner, top))
    said = [bool(one) for one in each if one is not None]
    if len(set(said)) < 2:
        return said[0] if said else None
    stored = stored_names(folder) if folder is not None else ()
    return not any(name.startswith(_HEADS) for name in stored)


def _text_positions(rope: Config) -> dict[str, Any]:
    """Text has the same number for time, height and width, so it is turned as without them."""
    return {
        name: "default" if value == "mrope" and name in ("type", "rope_type") else value
        for name, value in rope.items()
        if name not in ("mrope_section", "mrope_interleaved")
    }


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip
"""The fields that numbers of a part are for, in their order."""


def _part(family: str, *sizes: int, **others: Any) -> DecoderPart:
    return DecoderPart(family=family, defaults={**dict(zip(_SIZES, sizes, strict=True)), **others})


_QWEN2_VL = _part(
    "qwen2", 152064, 8192, 29568, 80, 64, 8, 32768,
    rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=4096, max_window_layers=80,
)  # fmt: skip
_TEXTS: dict[str, DecoderPart] = {
    "gemma3_text": _part(
        "gemma3_text", 262208, 2304, 9216, 26, 8, 4, 131072, rms_norm_eps=1e-6, sliding_window=4096
    ),
    "mistral": _part(
        "mistral", 32000, 4096, 14336, 32, 32, 8, 131072, rms_norm_eps=1e-6, sliding_window=4096
    ),
    "ministral3": _part("ministral3", 131072, 4096, 14336, 34, 32, 8, 262144),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": _part(
        "qwen3", 151936, 4096, 22016, 32, 32, 32, 128000, rms_norm_eps=1e-6, rope_theta=500000.0
    ),
    "gemma4_text": _part(
        "gemma4_text", 262144, 2304, 9216, 30, 8, 4, 131072, hidden_size_per_layer_input=256
    ),
    "qwen3_vl_moe_text": replace(
        _part(
            "qwen3_moe", 151936, 2048, 5632, 24, 16, 16, 128000,
            rms_norm_eps=1e-6, rope_theta=500000.0, moe_intermediate_size=1408,
            num_experts_per_tok=4,
        ),
        always={"norm_topk_prob": True},
    ),
}  # fmt: skip
_BY_NAME: dict[str, MultimodalFamily] = {
    one.model_type: one
    for one in (
        MultimodalFamily(  # Gemma Team 2025, arXiv 2503.19786.
            model_type="gemma3", texts=("gemma3_text",), skipped=_LLAVA
        ),
        MultimodalFamily(
            model_type="gemma4",
            texts=("gemma4_text",),
            skipped=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
        ),
        MultimodalFamily(model_type="mistral3", texts=("mistral", "ministral3"), skipped=_LLAVA),
        MultimodalFamily(  # Wang et al. 2024, arXiv 2409.12191.
            model_type="qwen2_vl", texts=("qwen2_vl_text",), skipped=("visual.",), may_be_flat=True
        ),
        MultimodalFamily(  # Bai et al. 2025, arXiv 2502.13923.
            model_type="qwen2_5_vl",
            texts=("qwen2_5_vl_text",),
            skipped=("visual.",),
            may_be_flat=True,
        ),
        MultimodalFamily(model_type="qwen3_vl", texts=("qwen3_vl_text",), skipped=("visual.",)),
        MultimodalFamily(
            model_type="qwen3_vl_moe", texts=("qwen3_vl_moe_text",), skipped=("visual.",)
        ),
    )
}
