"""Broken checkpoints are refused with the name of what is wrong. The guarded bug: a model that
loads and answers nonsense because a tensor was missing, left over, cut short or misread."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretoken.checkpoint import find_model
from foretoken.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from foretoken.kv.features import FINAL
from foretoken.models import LoadOptions, Model, load_model, through_transformers
from foretoken.models.through_transformers import LayerCall, PagedAttention
from foretoken.shape import ModelShape
from foretoken.testing import write_tiny_llama
from tests.golden.families import BY_TRANSFORMERS, write_checkpoint
from tests.golden.scenario import forward, open_runner

UP = "model.layers.1.mlp.up_proj.weight"


def load(folder: Path) -> Model:
    options = LoadOptions(
        dtype=torch.float32, device=torch.device("cpu"), batch_invariant=False, page_size=16
    )
    return load_model(folder, options)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def shard(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, folder / file)
    where = {name: file for file, chosen in parts.items() for name in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", tie_word_embeddings=True)


def test_whole_checkpoint_loads(folder: Path) -> None:
    assert load(folder).shape.num_hidden_layers == 2


Change = Callable[[dict[str, Tensor]], dict[str, Tensor | None]]


def put(tensors: dict[str, Tensor], change: Change) -> None:
    """Set what `change` gives; None: remove it."""
    for name, tensor in change(tensors).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: {UP: None}, UP),
        (
            lambda tensors: {"model.layers.7.extra": torch.ones(3)},
            r"unused.*model\.layers\.7\.extra",
        ),
        (lambda tensors: {UP: tensors[UP].T.contiguous()}, r"up_proj.*\[64, 96\].*\[96, 64\]"),
        (lambda tensors: {UP: tensors[UP].to(torch.int8)}, r"up_proj.*int8"),
    ],
    ids=["missing", "unused", "misshapen", "integers"],
)
def test_wrong_tensors(folder: Path, change: Change, said: str) -> None:
    edit(folder, lambda tensors: put(tensors, change))
    with pytest.raises(CheckpointError, match=said):
        load(folder)


def test_fewer_layers_in_config_than_on_disk(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\."):
        load(folder)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999, None])
def test_truncated_file_or_corrupt_header(folder: Path, keep: float | None) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    corrupt = content[:10] + b"\xff" * 20 + content[30:]
    path.write_bytes(corrupt if keep is None else content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_derived_buffers_of_old_checkpoints_are_tolerated(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    load(folder)


def test_a_tied_head_may_be_stored(folder: Path) -> None:
    def tie(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(folder, tie)
    load(folder)


def test_untied_head_must_be_there(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(folder)


def test_shards_load(folder: Path) -> None:
    expected = load(folder).embedding.floats()
    shard(folder)
    assert torch.equal(load(folder).embedding.floats(), expected)


def test_a_tensor_of_two_shards(folder: Path) -> None:
    """The index says which counts; where it names neither, nothing does."""
    expected = load(folder).embedding.floats()
    where = shard(folder)
    name = "model.embed_tokens.weight"
    [other] = {"a.safetensors", "b.safetensors"} - {where[name]}
    held = load_file(folder / other)
    save_file({**held, name: torch.zeros_like(expected)}, folder / other)
    assert torch.equal(load(folder).embedding.floats(), expected)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {k: v for k, v in where.items() if k != name}}))
    with pytest.raises(CheckpointError, match="tensor stored twice"):
        load(folder)


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        load(folder)


def test_broken_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(folder)


def pickled(folder: Path, *, zipped: bool = True, **extra: object) -> Path:
    content = {**load_file(folder / "model.safetensors"), **extra}
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_load(folder: Path, zipped: bool) -> None:
    expected = load(folder).embedding.floats().clone()
    pickled(folder, zipped=zipped)
    assert torch.equal(load(folder).embedding.floats(), expected)


def test_pickled_shards_load(folder: Path) -> None:
    expected = load(folder).embedding.floats().clone()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        torch.save({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert torch.equal(load(folder).embedding.floats(), expected)


class Dangerous:
    """Runs code where a pickle is loaded without care."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return Path.mkdir, (Path("made by a pickle"),)  # type: ignore[return-value]


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_pickled_weights_does_not_run(
    folder: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    pickled(folder, zipped=zipped, extra=Dangerous())
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*tensors only"):
        load(folder)
    assert not (folder / "made by a pickle").exists()


def test_other_things_in_pickled_weights(folder: Path) -> None:
    pickled(folder, optimizer={"lr": 1.0})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*optimizer"):
        load(folder)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_truncated_pickled_weights(folder: Path, keep: float) -> None:
    path = pickled(folder)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(folder)


def test_gguf_files_are_named_themselves(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="a GGUF file that is there"):
        find_model(str(tmp_path / "missing.gguf"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert find_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf, b\.gguf"):
        find_model(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"complete GGUF"):
        ModelShape.from_config(tmp_path / "a.gguf")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"llama"'])
def test_config_is_no_json_object(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelShape.from_config(folder)


@pytest.mark.parametrize("value", [None, "many", [3], -1, 0])
def test_config_number_is_wrong(folder: Path, value: object) -> None:
    edit_config(folder, hidden_size=value)
    with pytest.raises(CheckpointError, match=r"config\.json|hidden_size"):
        ModelShape.from_config(folder)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model_type": "no such type"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "phimoe", "num_local_experts": 8}, "experts"),
        ({"model_type": "gemma3", "vision_config": {}}, "text_config"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bamba", "layer_types": ["mamba"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2]}}, "rope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "softcapping"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"dtype": "int8", "torch_dtype": "int8"}, "dtype"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_what_would_run_wrongly_is_refused(
    folder: Path, changes: dict[str, Any], name: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=name):
        ModelShape.from_config(folder)


def test_biases_in_config_but_not_on_disk(folder: Path) -> None:
    edit_config(folder, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        load(folder)


def test_unused_window_settings_are_fine(folder: Path) -> None:
    """Qwen configs carry a window that is switched off."""
    edit_config(folder, model_type="qwen3", use_sliding_window=False, sliding_window=4096)
    assert ModelShape.from_config(folder).windows == (None, None)


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [
        (None, None, ()),
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, [2, 7], (2, 7)),
        (None, 7, (7,)),
    ],
)
def test_eos_ids(
    folder: Path, config_ids: object, generation_ids: object, expected: tuple[int, ...]
) -> None:
    edit_config(folder, eos_token_id=config_ids)
    if generation_ids is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_ids}))
    assert ModelShape.from_config(folder).eos_token_ids == expected


# What transformers would run, but not as we promise, is refused by name before any request. The
# guarded bugs: a state beside keys and values, attention that sees the future, a mask that is
# dropped, a tensor that is ignored, and a promise about bits that a module does not keep.
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def options(*, batch_invariant: bool = False) -> LoadOptions:
    return LoadOptions(
        dtype=torch.float32,
        device=torch.device("cpu"),
        batch_invariant=batch_invariant,
        page_size=16,
    )


def edit_them(foreign: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(foreign / "model.safetensors")
    change(tensors)
    save_file(tensors, foreign / "model.safetensors", {"format": "pt"})


def write(foreign: Path, config: Any) -> None:
    make: Any = transformers.AutoModelForCausalLM.from_config
    make(config).save_pretrained(foreign)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (transformers.BertConfig(**SIZES, intermediate_size=48), "not causal"),
        (transformers.BloomConfig(**SIZES, n_head=4, n_layer=2), "no other attention"),
        (transformers.FalconConfig(**SIZES), "no other attention"),
        (
            transformers.PhiConfig(
                **SIZES,
                intermediate_size=48,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "rope_type.*dynamic",
        ),
        (transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2), "attention"),
        (
            transformers.PhimoeConfig(
                **SIZES, intermediate_size=48, num_key_value_heads=2, num_local_experts=4
            ),
            "experts",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_refused(config: Any, named: str, tmp_path: Path) -> None:
    write(tmp_path, config)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=named):
        load_model(tmp_path, options())


class Caller(nn.Module):
    """An attention module of layer 0."""

    def __init__(self, *, is_causal: bool = True, layer_idx: int | None = 0) -> None:
        super().__init__()
        self.is_causal, self.layer_idx = is_causal, layer_idx


@pytest.mark.parametrize(
    ("module", "mask", "values", "named"),
    [
        (Caller(is_causal=False), None, 8, "not causal"),
        (Caller(), torch.zeros(1, 1, 3, 3), 8, "mask"),
        (Caller(), None, 6, "values of 6"),
        (Caller(layer_idx=None), None, 8, "without a layer"),
    ],
)
def test_calls_that_are_not_ours_to_answer(
    module: nn.Module, mask: Tensor | None, values: int, named: str
) -> None:
    k, v = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, values)
    with pytest.raises(UnsupportedModelError, match=named):
        PagedAttention("some type").check(module, mask, k, v)


@pytest.mark.parametrize("extra", ["s_aux", "position_bias"])
def test_tensors_that_attention_would_drop(extra: str) -> None:
    call = LayerCall(4, 2, 8, None, None, 0.5)
    with pytest.raises(UnsupportedModelError, match=extra):
        PagedAttention("some type").note(0, call, {extra: torch.zeros(4), "dropout": 0.0})


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, *BY_TRANSFORMERS["gpt2"])
    return tmp_path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: {"transformer.h.1.mlp.c_fc.bias": None}, r"missing.*h\.1\.mlp\.c_fc\.bias"),
        (lambda _: {"transformer.h.5.extra": torch.ones(3)}, r"unused.*h\.5\.extra"),
        (lambda _: {"transformer.ln_f.weight": torch.ones(3)}, r"ln_f\.weight"),
    ],
    ids=["missing", "unused", "misshapen"],
)
def test_wrong_tensors_of_transformers(foreign: Path, change: Change, said: str) -> None:
    edit_them(foreign, lambda tensors: put(tensors, change))
    with pytest.raises(CheckpointError, match=said):
        load_model(foreign, options())


def test_names_without_the_base_model_and_old_masks(foreign: Path) -> None:
    """As OpenAI's own GPT-2 files are."""

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    expected = load_model(foreign, options()).embedding.floats()
    edit_them(foreign, rename)
    assert torch.equal(load_model(foreign, options()).embedding.floats(), expected)


def test_heads_that_the_config_does_not_say(foreign: Path) -> None:
    path = foreign / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_key_value_heads": 2}))
    with pytest.raises(CheckpointError, match="heads"):
        load_model(foreign, options())


class Looks(nn.Module):
    """Left to itself, PyTorch's float32 silu makes bits depend on the number of rows; if this
    machine's does not, a layer that looks at all rows at least must be found."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * (1 + 1e-6 * x.shape[-2])


class Shifts(nn.Module):
    """Mixes in the token before, but only within a call: a state beside keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x + x.roll(1, -2))


@pytest.mark.parametrize(
    ("module", "said"), [(Looks, "batch_invariant"), (Shifts, "more than tokens before")]
)
def test_a_module_that_breaks_the_promise_is_found(
    module: type[nn.Module], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, *BY_TRANSFORMERS["granite"])
    monkeypatch.setattr(through_transformers, "SwappedActivation", lambda activate: module())
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(tmp_path, options(batch_invariant=True))


def test_features_are_the_hidden_states(tmp_path: Path) -> None:
    """What feature-conditioned drafters read: the stream before a layer, and after the norm."""
    model = write_checkpoint(tmp_path, *BY_TRANSFORMERS["granite"])
    runner = open_runner(tmp_path, points=(1, FINAL))
    ids = list(range(20))
    forward(runner, [(ids, 0, 20, list(range(5)))])
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[1][0], states[-1][0]], dim=-1)
    assert runner.features is not None
    torch.testing.assert_close(runner.features.slots_SF[:20], expected, rtol=1e-4, atol=1e-4)


def test_parameters_are_counted_from_the_files(foreign: Path) -> None:
    shape = ModelShape.from_config(foreign)
    stored = sum(tensor.numel() for tensor in load_file(foreign / "model.safetensors").values())
    assert shape.parameter_count() == stored
    assert shape.kv_bytes_per_token(4) == 2 * 2 * 48 * 4
