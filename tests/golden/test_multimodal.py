"""The text decoders of checkpoints that see, against transformers' own classes.

The guarded bugs: a prefix that is not known, a part of the tower taken for the decoder, a misspelt
tensor that passes, a field of the wrong part of config.json.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken import LLM
from foretoken.errors import CheckpointError, PromptError
from foretoken.shape import ModelShape
from tests.golden.families import BASE, MINISTRAL3, VOCAB, expected_logits
from tests.golden.scenario import forward, open_runner
from tests.golden.test_transformers import LENGTH, assert_all_cuts_agree, assert_close

LLAVA_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
TOWER = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14, **LLAVA_TOWER}
MROPE = {"rope_type": "default", "mrope_section": [1, 2, 3], "rope_theta": 5000.0}
QWEN_TOWER = {"depth": 1, "num_heads": 2}
IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {**GEMMA, "model_type": "gemma3_text"},
        TOWER,
        {"mm_tokens_per_image": 4, "image_token_index": 60},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        {**TOWER, "head_dim": 8, "model_type": "pixtral"},
        {"image_token_index": 60, "tie_word_embeddings": False},
    ),
    "mistral3 ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL3},
        {**TOWER, "head_dim": 8, "model_type": "pixtral"},
        {"image_token_index": 60},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"rope_parameters": MROPE},
        {**QWEN_TOWER, "embed_dim": 16, "hidden_size": 48},
        IDS,
    ),
    "qwen2_5_vl tied": (
        "Qwen2_5_VL",
        {"rope_parameters": MROPE},
        {**QWEN_TOWER, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 48},
        {**IDS, "tie_word_embeddings": True},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 12},
        {
            **QWEN_TOWER,
            "hidden_size": 16,
            "intermediate_size": 16,
            "out_hidden_size": 48,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
        IDS,
    ),
}


def write_multimodal(folder: Path, case: str) -> Any:
    """Save a random model with its tower, and return it."""
    import transformers

    torch.manual_seed(3)
    name, text, tower, fields = CASES[case]
    config = getattr(transformers, f"{name}Config")(
        text_config={**BASE, **text}, vision_config=tower, **fields
    )
    made: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    model = made._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def renamed(folder: Path, new_name: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(path).items()}, path)


def plain(name: str) -> str:
    """As a text model of its own has it."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if "lm_head" in name else name


def published(name: str) -> str:
    """As before transformers 5."""
    name = plain(name)
    if name.startswith(("model.layers", "model.embed", "model.norm", "lm_head")):
        return f"language_model.{name}"
    return name.removeprefix("model.")


def newer(name: str) -> str:
    """As transformers 5 names its modules."""
    name = plain(name)
    if name.startswith(("model.layers", "model.embed", "model.norm")):
        return "model.language_model." + name.removeprefix("model.")
    return name if name.startswith(("lm_head", "model.")) else f"model.{name}"


PREFIXES = {"published": published, "newer": newer, "plain": plain}


@pytest.mark.parametrize("case", CASES)
def test_logits_agree(case: str, tmp_path: Path) -> None:
    model = write_multimodal(tmp_path, case)
    shape = ModelShape.from_config(tmp_path)
    assert shape.is_own and shape.inside == case.split()[0]
    assert_all_cuts_agree(open_runner(tmp_path), model, case, (LENGTH, 9, 23))


@pytest.mark.parametrize("style", PREFIXES)
@pytest.mark.parametrize("case", CASES)
def test_every_prefix_is_read_and_a_misspelt_name_is_not(
    case: str, style: str, tmp_path: Path
) -> None:
    model = write_multimodal(tmp_path, case)
    renamed(tmp_path, PREFIXES[style])
    ids = list(range(30))
    found = forward(open_runner(tmp_path), [(ids, 0, 30, list(range(8)))])
    assert_close(found, expected_logits(model, ids))
    renamed(tmp_path, lambda name: name.replace("layers.1.self_attn.q_proj", "layers.1.attn.q"))
    with pytest.raises(CheckpointError, match=r"q_proj|attn\.q"):
        open_runner(tmp_path)


def test_tensors_of_no_known_network_are_an_error(tmp_path: Path) -> None:
    write_multimodal(tmp_path, "gemma3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "mtp.fc.weight": torch.zeros(2)}, path)
    open_runner(tmp_path)
    save_file({**tensors, "vision_towel.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"vision_towel\.weight"):
        open_runner(tmp_path)


def test_sparse_and_flat_configs(tmp_path: Path) -> None:
    """Fields at the top, as Qwen published them; a text part that leaves out what is usual."""
    write_multimodal(tmp_path, "qwen2_5_vl tied")
    nested = ModelShape.from_config(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    positions = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": positions.pop("rope_theta")}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": positions["mrope_section"]}
    file.write_text(json.dumps(flat))
    assert ModelShape.from_config(tmp_path) == nested


def test_contradictions_about_the_head(tmp_path: Path) -> None:
    """The files decide where one part says that head and table are one and the other does not."""
    write_multimodal(tmp_path, "mistral3")
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "tie_word_embeddings": True}
    file.write_text(json.dumps(config))
    assert not ModelShape.from_config(tmp_path).tie_word_embeddings
    path = tmp_path / "model.safetensors"
    kept = {name: one for name, one in load_file(path).items() if "lm_head" not in name}
    save_file(kept, path)
    assert ModelShape.from_config(tmp_path).tie_word_embeddings
    open_runner(tmp_path)


def test_placeholders_in_a_prompt(tmp_path: Path) -> None:
    write_multimodal(tmp_path, "qwen3_vl")
    with LLM(str(tmp_path), dtype="float32", max_model_len=40) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, VOCAB - 1]}], use_tqdm=False)
        for name, token in IDS.items():
            with pytest.raises(PromptError, match=f"{token}, the {name}"):
                llm.generate([{"prompt_token_ids": [1, token]}], use_tqdm=False)
