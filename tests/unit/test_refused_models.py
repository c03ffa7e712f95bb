"""Models that are not run are refused by what their config or file says, before anything is loaded.

The guarded bug: `foretoken info` shows the memory of a model that no engine would take.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import UnsupportedModelError
from foretoken.shape import ModelShape
from foretoken.shape.gguf import forget_gguf
from foretoken.shape.transformers_config import _takes_attention
from tests.marks import slow

REFUSED = {
    "gemma3n_text": "several residual streams",
    "lfm2": "convolutions",
    "gemma4_text": "embeddings per layer",
    "bloom": "no other attention than their own",
    "falcon": "no other attention than their own",
    "mpt": "no other attention than their own",
    "stablelm": "no other attention than their own",
    "xglm": "no other attention than their own",
    "mamba": "Mamba layers",
    "t5": "an encoder-decoder",
}
ARCHITECTURES = ("bloom", "falcon", "gemma3n", "lfm2", "gemma4", "clip", "mamba", "no-such")


def config_of(kind: str, folder: Path) -> Path:
    """A folder with the config that transformers has for a kind of model."""
    AutoConfig.for_model(kind).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_configs(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        ModelShape.from_config(config_of(kind, tmp_path))
    found = error.value
    assert found.field == "model_type" and REFUSED[kind] in str(found.given), found
    assert "llama, mistral" in found.allowed


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, name)
    writer.add_tensor("token_embd.weight", np.zeros((5, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    forget_gguf()
    with pytest.raises(UnsupportedModelError) as error:
        ModelShape.from_config(path)
    found = error.value
    assert found.field == "model.gguf: general.architecture" and name in str(found.given), found
    assert ("the file of the language model" if name == "clip" else "llama, ") in found.allowed


def test_info_says_so(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["info", str(config_of("bloom", tmp_path))])
    assert found.exit_code == 3 and "bloom, whose modules know no other" in found.stderr


def _agrees(kind: str) -> bool:
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        made: Any = classes[type(AutoConfig.for_model(kind))]
    except (ImportError, KeyError):
        return True
    found: Any = made if isinstance(made, type) else made[0]
    return bool(found._supports_attention_backend) == _takes_attention(kind)


@pytest.mark.parametrize(
    "kinds",
    [("bloom", "gpt2", "cohere2", "granite"), slow(("falcon", "mpt", "gpt_neox", "opt", "phi"))],
)
def test_the_source_says_what_the_class_does(kinds: tuple[str, ...]) -> None:
    assert all(map(_agrees, kinds))
