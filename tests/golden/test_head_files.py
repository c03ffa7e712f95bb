"""Files of heads: names of other engines, shards, and which method a folder is for."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from foretoken.config.published import head_method
from foretoken.errors import CheckpointError
from foretoken.proposers.heads.folder import read_head
from foretoken.proposers.heads.medusa import Medusa
from foretoken.proposers.heads.parts import HeadShape
from tests.golden import heads as ref
from tests.golden.heads import HIDDEN, LAYER, VOCAB, Weights, load_head

TARGET = HeadShape(**{**LAYER, "num_hidden_layers": 8})  # type: ignore[arg-type]


def test_medusa_under_vllms_names(tmp_path: Path) -> None:
    """`blocks.K.layers.L` and `lm_heads.K`, in two shards with an index."""
    weights, files = Weights(3), dict[str, str]()
    for k in range(2):
        weights.matrix(f"blocks.{k}.layers.0.weight", HIDDEN, HIDDEN)
        weights.vector(f"blocks.{k}.layers.0.bias", HIDDEN)
        weights.matrix(f"lm_heads.{k}.weight", VOCAB, HIDDEN)
    tmp_path.joinpath("config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    for k in range(2):
        part = {name: t for name, t in weights.tensors.items() if f"s.{k}." in name}
        save_file(part, tmp_path / f"shard-{k}.safetensors")
        files |= dict.fromkeys(part, f"shard-{k}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    net = load_head(tmp_path, TARGET)
    assert isinstance(net, Medusa) and net.shape.medusa_num_layers == 1
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(4))
    z = hidden.double().numpy()
    z = z + ref.silu(z @ weights["blocks.1.layers.0.weight"].T + weights["blocks.1.layers.0.bias"])
    found = net.logits(net.states(hidden, 2))[:, 1].detach().double().numpy()
    assert np.abs(found - z @ weights["lm_heads.1.weight"].T).max() < 2e-5
    (tmp_path / "shard-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing shard.*shard-1"):
        read_head(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_eagle_folders_are_known_by_their_tensors(tmp_path: Path, file: str) -> None:
    """Their config.json is a Llama's; names are looked at, nothing is loaded."""
    weights = Weights(5)
    weights.matrix("fc.weight", HIDDEN, 2 * HIDDEN)
    assert head_method(str(weights.write(tmp_path / "eagle", LAYER, file))) == "eagle"
    weights.tensors["d2t"] = torch.zeros(3, dtype=torch.int64)
    assert head_method(str(weights.write(tmp_path / "eagle3", LAYER, file))) == "eagle3"
    model = Weights(5)
    model.matrix("model.layers.0.mlp.fc.weight", HIDDEN, HIDDEN)
    assert head_method(str(model.write(tmp_path / "model", LAYER, file))) is None
    (tmp_path / "model" / file).write_bytes(b"broken")
    assert head_method(str(tmp_path / "model")) is None
