"""Drafting heads in GGUF files: the network of the folder that they were made of, and nothing else.

The guarded bugs: query and key rows left in llama.cpp's order, layers that are one off, ids taken
for offsets, and a head that is read as far as it fits.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from torch import nn

from foretoken import LLM, SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.config.published import head_method
from foretoken.errors import ConfigError, ForetokenError, NotYetError, UnsupportedModelError
from foretoken.kernels.library import find_library
from foretoken.proposers.heads.base import DraftHead
from foretoken.proposers.heads.dflash.network import DFlash
from foretoken.proposers.heads.dspark import DSpark
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.folder import method_of, read_head
from foretoken.proposers.heads.linears import HeadLinears
from foretoken.shape import ModelShape
from foretoken.shape.gguf import forget_gguf
from foretoken.testing import write_tiny_llama
from tests.e2e.heads import HIDDEN, write_head
from tests.golden import gguf_heads
from tests.golden.gguf_files import finish
from tests.golden.gguf_heads import stored_name, write_gguf_head

Kind = gguf.GGMLQuantizationType
KINDS: dict[str, type[DraftHead]] = {"eagle3": Eagle3, "dflash": DFlash, "dspark": DSpark}
NAMES = ("eagle3", "dflash", "dflash reduced", "dspark")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf heads")
    write_tiny_llama(folder / "target", seed=1)
    for name in NAMES:
        write_head(folder / name, name, folder / "target")
    return folder


def load(path: Path, target: Path) -> nn.Module:
    found = read_head(path)
    return KINDS[method_of(found)].read(found, ModelShape.from_config(target))


def write(root: Path, name: str, path: Path, kind: Kind | None = None, **changes: Any) -> Path:
    forget_gguf()
    return write_gguf_head(root / name, path, kind, target_hidden=HIDDEN, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_the_folder_that_it_was_made_of(name: str, root: Path, tmp_path: Path) -> None:
    path = write(root, name, tmp_path / "head.gguf")
    assert head_method(str(path)) == head_method(str(root / name)) == name.split()[0]
    assert head_method(str(tmp_path)) == name.split()[0], "the only file of its folder"
    found: Any = load(path, root / "target")
    expected: Any = load(root / name, root / "target")
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys() and found.points == expected.points
    for tensor, value in theirs.items():
        assert torch.equal(ours[tensor], value), tensor
    for field in ("views", "block_size", "first_row", "mask_token_id", "draft_vocab_size"):
        assert getattr(found.shape, field, 0) == getattr(expected.shape, field, 0), field


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q5_0, Kind.Q4_1])
@pytest.mark.parametrize("name", ["eagle3", "dspark"])
def test_blocks_are_kept_and_multiplied_out(
    name: str, kind: Kind, root: Path, tmp_path: Path
) -> None:
    """As they lie for kernels, and in bfloat16 for where there are none."""
    path = write(root, name, tmp_path / "head.gguf", kind)
    found = load(path, root / "target").state_dict()
    folder = read_head(path)
    assert {tensor for tensor in found if "_proj.weight" in tensor and "conf" not in tensor} <= set(
        folder.stored
    )  # fmt: skip
    stored = {one.name: one for one in gguf.GGUFReader(path).tensors}
    for tensor in load_file(root / name / "model.safetensors"):
        one = stored[stored_name(tensor)]
        if one.tensor_type != kind or "q_proj" in tensor or "k_proj" in tensor:
            continue  # rows in another order, which the test above has
        floats = torch.tensor(np.asarray(dequantize(one.data, kind), np.float32))
        assert torch.equal(found[tensor], floats.bfloat16()), tensor
        kept = folder.stored[tensor]
        assert not isinstance(kept, torch.Tensor)
        assert torch.equal(kept.dequantized(torch.float32), floats), tensor


@pytest.mark.skipif(find_library() is None, reason="no kernels")
@pytest.mark.parametrize("name", NAMES)
def test_kernels_take_the_blocks(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None where rounding was asked for. Output projections have heads of 16 here, whose order
    would cut a block of 32, and the Markov part of 8 numbers is no block."""
    made: list[str] = []
    call = HeadLinears.__call__

    def noted(self: HeadLinears, weights: Any, *given: Any, **more: Any) -> Any:
        made.append(type(weights).__name__)
        return call(self, weights, *given, **more)

    monkeypatch.setattr(HeadLinears, "__call__", noted)
    path = write(root, name, tmp_path / "head.gguf", Kind.Q5_0)
    config: dict[str, Any] = {"model": str(path), "num_speculative_tokens": 3}
    with LLM(str(root / "target"), speculative_config=config) as llm:
        params = SamplingParams(max_tokens=8, detokenize=False)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    layers = 1 if name == "eagle3" else 2
    assert made.count("Tensor") == layers + (name == "dspark"), made
    assert made.count("BlockWeights") >= 3 * layers + 1, made
    made.clear()
    with LLM(str(root / "target"), speculative_config={**config, "quantization": "int8"}):
        assert set(made) == {"Tensor"}


def test_older_words_are_read(root: Path, tmp_path: Path) -> None:
    """Before they were one for both architectures: of EAGLE-3's layers, and of the mask."""
    path = write(
        root, "eagle3", tmp_path / "old.gguf", without=("target_layers",), extract_layers=[1, 0]
    )
    found: Any = load(path, root / "target")
    assert found.points == (1, 0)


def test_the_norm_before_fc_has_its_place(root: Path, tmp_path: Path) -> None:
    """`enc.output_norm` is before fc in EAGLE-3 and after it in DFlash."""
    folder = tmp_path / "head"
    folder.mkdir()
    tensors = load_file(root / "eagle3" / "model.safetensors")
    tensors["input_norm.weight"] = torch.rand(2 * HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((root / "eagle3" / "config.json").read_bytes())
    found: Any = load(write_gguf_head(folder, tmp_path / "h.gguf", target_hidden=HIDDEN),
                      root / "target")  # fmt: skip
    assert torch.equal(found.input_norm.weight, tensors["input_norm.weight"])


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layers": ("eagle3", {"without": ("target_layers",)},
                  "eagle3.target_layers: got None; allowed: a list of the target"),
    "layers of texts": ("eagle3", {"target_layers": ["a"]},
                        "eagle3.target_layers: got a list of 1"),
    "one layer": ("dflash", {"target_layers": 3}, "dflash.target_layers: got 3"),
    "layers that are not there": ("eagle3", {"target_layers": [0, 9]},
                                  r"eagle_aux_hidden_state_layer_ids: got \[0, 9\]"),
    "three of two": ("eagle3", {"target_layers": [0, 1, 1]},
                     "fc.weight: got 128 columns; allowed: 3 target layers of 64, 192 columns"),
    "no fc": ("dflash", {"without": ("fc.weight",)},
              "missing tensor: got fc.weight; allowed: all that a dflash head"),
    "no head of its own": ("eagle3", {"without": ("output.weight",)},
                           "missing tensor: got output.weight"),
    "no gate": ("dflash", {"without": ("blk.1.ffn_gate.weight",)},
                "missing tensor: got blk.1.ffn_gate.weight"),
    "more layers than there are": (
        "dflash", {"block_count": 3, "attention__sliding_window_pattern": True},
        "missing tensor: got blk.2.attn_q_norm.weight; .* a dflash head of 3 layers has"),
    "layers without end": (
        "dflash", {"block_count": 4_000_000_000, "attention__sliding_window_pattern": True},
        "dflash.block_count: got 4000000000; allowed: 1 to 10000"),
    "no layers at all": ("dflash", {"without": ("block_count",)}, "dflash.block_count: got None"),
    "no block": ("dflash", {"without": ("block_size",)}, "block_size: got None"),
    "another width": ("eagle3", {"embedding_length": 32}, "tensor shape"),
    "part of a head turned": ("eagle3", {"rope__dimension_count": 8},
                              "rope.dimension_count: got 0.51 of a head"),
    "stretched positions": ("eagle3", {"rope__scaling__type": "linear",
                                       "rope__scaling__factor": 2.0},
                            "rope_scaling: got .*linear.*; allowed: default"),
    "positions of another kind": ("eagle3", {"rope__scaling__type": "dynamic"},
                                  "rope.scaling.type: got dynamic"),
    "windows without a pattern": (
        "dflash", {"without": ("attention.sliding_window_pattern",)},
        "sliding_window_pattern: got None; allowed: a list of 2"),
    "heads for each layer": ("dflash", {"attention__head_count": [4, 2]},
                             "attention.head_count: got 4, 2, ...; allowed: the same"),
    "values of another size": ("dflash", {"attention__value_length": 8}, "value_length: got 8"),
    "scaled logits": ("dflash", {"logit_scale": 2.0}, "dflash.logit_scale: got 2.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_heads_are_explained(case: str, root: Path, tmp_path: Path) -> None:
    name, changes, said = WRONG[case]
    path = write(root, name, tmp_path / "wrong.gguf", **changes)
    with pytest.raises(ForetokenError) as error:
        LLM(str(root / "target"), speculative_config={"model": str(path)})
    message = str(error.value).replace("'", "")
    assert re.search(f"wrong.gguf: .*{said}", message) and "; allowed: " in message, message


def test_a_head_of_another_target(root: Path, tmp_path: Path) -> None:
    path = write(root, "eagle3", tmp_path / "head.gguf")
    wide = write_tiny_llama(tmp_path / "wide", hidden_size=128)
    said = r"head.gguf: .*got 'hidden_size 64'; allowed: a head of this target, .* 128"
    with pytest.raises(ConfigError, match=said):
        LLM(str(wide), speculative_config={"model": str(path)})


def test_vocabularies_must_be_the_targets(root: Path, tmp_path: Path) -> None:
    few = write_tiny_llama(tmp_path / "few", vocab_size=30)
    path = write(root, "eagle3", tmp_path / "ids.gguf")
    with pytest.raises(ForetokenError, match=r"ids.gguf: d2t: got 'ids 3 to 81'; .*below 30"):
        LLM(str(few), speculative_config={"model": str(path)})
    path = write(root, "dspark", tmp_path / "table.gguf")
    more = write_tiny_llama(tmp_path / "more", vocab_size=120)
    with pytest.raises(ForetokenError, match=r"table.gguf: .*vocab_size 97.* is 120"):
        LLM(str(more), speculative_config={"model": str(path)})


def test_a_head_is_no_model(root: Path, tmp_path: Path) -> None:
    path = write(root, "dflash", tmp_path / "head.gguf")
    said = r"dflash, a drafting head for another model'; allowed: .*\{\"model\": \"head.gguf\"\}"
    with pytest.raises(UnsupportedModelError, match=said):
        ModelShape.from_config(path)
    with pytest.raises(UnsupportedModelError, match=said):
        LLM(str(path))


def test_a_model_is_no_head(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((5, 8), np.float32))
    finish(writer)
    config = {"method": "eagle3", "model": str(path)}
    with pytest.raises(UnsupportedModelError, match=r"model.gguf: .*got 'llama'; allowed: a head"):
        LLM(str(root / "target"), speculative_config=config)


def test_the_method_is_told_from_the_file(root: Path, tmp_path: Path) -> None:
    path = write(root, "dspark", tmp_path / "head.gguf")
    found = SpeculativeConfig.from_dict({"model": str(path)})
    assert [one.method for one in found.drafters] == ["dspark"]
    with pytest.raises(ConfigError, match=r"got 'eagle3'; allowed: dspark, which .*head.gguf is"):
        LLM(str(root / "target"), speculative_config={"method": "eagle3", "model": str(path)})


def test_dflash2_is_named(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_bytes((root / "dflash" / "config.json").read_bytes())
    tensors = load_file(root / "dflash" / "model.safetensors")
    save_file({**tensors, "fc2.weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gguf_heads.TOPS, "fc2", "selector_hidden")
        path = write_gguf_head(folder, tmp_path / "two.gguf", target_hidden=HIDDEN)
    with pytest.raises(NotYetError, match="dflash2"):
        LLM(str(root / "target"), speculative_config={"model": str(path)})
