"""What transformers would run, but not as we promise, is refused by name before any request.

The guarded bugs: a state beside keys and values, attention that sees the future, a mask that is
dropped, a tensor that is ignored, and a promise about bits that a module does not keep.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.kv.features import FINAL
from foretoken.models import LoadOptions, load_model
from foretoken.models.through_transformers import modules
from foretoken.models.through_transformers.attention import LayerCall, PagedAttention
from foretoken.shape import ModelShape
from tests.golden.families import BY_TRANSFORMERS, write_checkpoint
from tests.golden.scenario import forward, open_runner

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


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write(folder: Path, config: Any) -> None:
    make: Any = transformers.AutoModelForCausalLM.from_config
    make(config).save_pretrained(folder)


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
            transformers.MixtralConfig(
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
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, *BY_TRANSFORMERS["gpt2"])
    return tmp_path


def test_missing_tensor(folder: Path) -> None:
    def remove(tensors: dict[str, Tensor]) -> None:
        del tensors["transformer.h.1.mlp.c_fc.bias"]

    edit(folder, remove)
    with pytest.raises(CheckpointError, match=r"missing.*h\.1\.mlp\.c_fc\.bias"):
        load_model(folder, options())


def test_unused_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"transformer.h.5.extra": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"unused.*h\.5\.extra"):
        load_model(folder, options())


def test_misshapen_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"transformer.ln_f.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"ln_f\.weight"):
        load_model(folder, options())


def test_names_without_the_base_model_and_old_masks(folder: Path) -> None:
    """As OpenAI's own GPT-2 files are."""

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    expected = load_model(folder, options()).embedding.floats()
    edit(folder, rename)
    assert torch.equal(load_model(folder, options()).embedding.floats(), expected)


def test_heads_that_the_config_does_not_say(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_key_value_heads": 2}))
    with pytest.raises(CheckpointError, match="heads"):
        load_model(folder, options())


def test_a_module_that_breaks_the_promise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to itself, PyTorch's float32 silu makes bits depend on the number of rows; if this
    machine's does not, a layer that looks at all rows at least must be found."""
    write_checkpoint(tmp_path, *BY_TRANSFORMERS["granite"])

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.silu(x) * (1 + 1e-6 * x.shape[-2])

    monkeypatch.setattr(modules, "SwappedActivation", lambda activate: Looks())
    with pytest.raises(UnsupportedModelError, match="batch_invariant"):
        load_model(tmp_path, options(batch_invariant=True))


def test_a_state_beside_keys_and_values_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, *BY_TRANSFORMERS["granite"])

    class Shifts(nn.Module):
        """Mixes in the token before, but only within a call."""

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.silu(x + x.roll(1, -2))

    monkeypatch.setattr(modules, "SwappedActivation", lambda activate: Shifts())
    with pytest.raises(UnsupportedModelError, match="more than tokens before"):
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


def test_parameters_are_counted_from_the_files(folder: Path) -> None:
    shape = ModelShape.from_config(folder)
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert shape.parameter_count() == stored
    assert shape.kv_bytes_per_token(4) == 2 * 2 * 48 * 4
