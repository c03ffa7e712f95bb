"""Head networks against the equations in float64, from random files in each published format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from foretoken.config.published import head_method
from foretoken.errors import CheckpointError, ConfigError, NotYetError, UnsupportedModelError
from foretoken.kv.features import FINAL
from foretoken.layers.embedding import Embedding
from foretoken.proposers.heads.base import DraftHead
from foretoken.proposers.heads.chain_head import ChainRunner
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.folder import read_head
from foretoken.proposers.heads.medusa import Medusa
from foretoken.proposers.heads.mlp import MLPSpeculator
from foretoken.proposers.heads.parts import HeadShape
from tests.golden import heads as ref
from tests.golden import paged_runner
from tests.golden.heads import HIDDEN, KV, LAYER, SIZE, VOCAB, Weights, load_head

TARGET = HeadShape(**{**LAYER, "num_hidden_layers": 8})  # type: ignore[arg-type]
TOLERANCE = 2e-5


def _load(folder: Path) -> DraftHead:
    return load_head(folder, TARGET)


def _close(found: torch.Tensor, wanted: ref.Array) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found.detach().double().numpy() - wanted).max() < TOLERANCE


def _mlp(seed: int, stages: int, *, tied: bool, inner: int = 40) -> Weights:
    weights = Weights(seed)
    for i in range(1 if tied else stages):
        weights.matrix(f"speculator.emb.{i}.weight", VOCAB, inner)
        weights.matrix(f"speculator.head.{i}.weight", VOCAB, inner)
        weights.vector(f"speculator.ln.{i}.weight", inner)
        weights.vector(f"speculator.ln.{i}.bias", inner)
    for i in range(2 if tied else stages):
        weights.matrix(f"speculator.proj.{i}.weight", inner, HIDDEN if i == 0 else inner)
    return weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
def test_mlp_speculator(tmp_path: Path, tied: bool, scale_input: bool) -> None:
    """The recurrence of arXiv 2404.19124, tied and untied, with and without scale_input."""
    stages, inner = 3, 40
    weights = _mlp(1, stages, tied=tied, inner=inner)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "emb_dim": HIDDEN, "inner_dim": inner, "n_predict": stages, "vocab_size": VOCAB,
        "tie_weights": tied, "scale_input": scale_input,
    }  # fmt: skip
    net = _load(weights.write(tmp_path, config))
    assert isinstance(net, MLPSpeculator) and net.points == (FINAL,)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(5, HIDDEN, generator=generator)
    tokens = torch.randint(VOCAB, (stages, 5), generator=generator)
    state, wanted = net.start(hidden), hidden.double().numpy()
    if scale_input:
        wanted = ref.rms(wanted, 1.0, 1e-6) / 2**0.5
    w_s = 0.5 ** (0.5 / stages)
    ratio = ((1 - w_s**2) * inner / 2) ** 0.5 / w_s
    for i in range(stages):
        own, own_proj = (0, min(i, 1)) if tied else (i, i)
        mixed = wanted @ weights[f"speculator.proj.{own_proj}.weight"].T
        mixed = mixed + ratio * weights[f"speculator.emb.{own}.weight"][tokens[i].numpy()]
        scale, shift = (weights[f"speculator.ln.{own}.{part}"] for part in ("weight", "bias"))
        z = torch.from_numpy(ref.rms(mixed, scale, 1e-6) + shift)
        wanted = torch.nn.functional.gelu(z).numpy()
        state = net.advance(i, state, tokens[i])
        _close(net.logits(i, state), wanted @ weights[f"speculator.head.{own}.weight"].T)


def test_tied_copies_must_agree(tmp_path: Path) -> None:
    """Files that store tied tensors once per stage are read; unequal copies are refused."""
    weights = _mlp(1, 3, tied=True)
    config = {"n_predict": 3, "emb_dim": HIDDEN, "inner_dim": 40, "vocab_size": VOCAB}
    for i in (1, 2):
        copy = weights.tensors["speculator.head.0.weight"].clone()
        weights.tensors[f"speculator.head.{i}.weight"] = copy
    _load(weights.write(tmp_path / "equal", {**config, "tie_weights": True}))
    weights.tensors["speculator.head.2.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"head\.2\.weight.*copy of head\.0"):
        _load(weights.write(tmp_path / "unequal", {**config, "tie_weights": True}))


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa(tmp_path: Path, file: str) -> None:
    """Two residual layers per head, in the published names."""
    weights, count = Weights(3), 3
    for k in range(count):
        for i in range(2):
            weights.matrix(f"{k}.{i}.linear.weight", HIDDEN, HIDDEN)
            weights.vector(f"{k}.{i}.linear.bias", HIDDEN)
        weights.matrix(f"{k}.2.weight", VOCAB, HIDDEN)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
    net = _load(weights.write(tmp_path, config, file))
    assert isinstance(net, Medusa) and net.shape.medusa_num_heads == count
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(4))
    found = net.logits(net.states(hidden, count))
    for k in range(count):
        z = hidden.double().numpy()
        for i in range(2):
            bias = weights[f"{k}.{i}.linear.bias"]
            z = z + ref.silu(z @ weights[f"{k}.{i}.linear.weight"].T + bias)
        _close(found[:, k], z @ weights[f"{k}.2.weight"].T)


def _features(count: int, width: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def _tokens(count: int, seed: int = 8) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


def _embedding() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


def _chunked(runner: ChainRunner, features: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Outputs of slots fed as a prompt in pieces through scattered pages."""
    return paged_runner.feed(runner, features, tokens, [5, 1, 9, 2])


def test_eagle(tmp_path: Path) -> None:
    """EAGLE-1 and -2: fc over (embedding, feature), a layer without input norm, target's head."""
    weights = Weights(5)
    weights.matrix("fc.weight", HIDDEN, 2 * HIDDEN)
    weights.vector("fc.bias", HIDDEN)
    weights.layer("layers.0.", HIDDEN)
    weights.matrix("embed_tokens.weight", VOCAB, HIDDEN)
    net = _load(weights.write(tmp_path, {**LAYER, "bias": True}, "pytorch_model.bin"))
    assert isinstance(net, Eagle) and net.points == (FINAL,)
    net.use_embedding(Embedding(_embedding()))
    features, tokens = _features(17, HIDDEN), _tokens(17)
    outputs = _chunked(paged_runner.make(net, features), features, tokens)
    joined = np.concatenate((_embedding().double().numpy()[tokens], features.double()), -1)
    x = joined @ weights["fc.weight"].T + weights["fc.bias"]
    _close(outputs, ref.layer(weights, "layers.0.", x, x, np.arange(17.0)))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
}


def _eagle3(seed: int, reduced: int, prefix: str) -> Weights:
    weights = Weights(seed)
    weights.matrix("fc.weight", HIDDEN, 3 * HIDDEN)
    weights.layer(prefix, 2 * HIDDEN)
    weights.vector(prefix + "input_layernorm.weight", HIDDEN)
    weights.vector(prefix + "hidden_norm.weight", HIDDEN)
    weights.vector("norm.weight", HIDDEN)
    weights.matrix("lm_head.weight", reduced, HIDDEN)
    ids = torch.arange(reduced) * 2 + 1
    weights.tensors["d2t"] = ids - torch.arange(reduced)
    weights.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return weights


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("style", ["eagle", "speculators"])
def test_eagle3(tmp_path: Path, variant: str, style: str) -> None:
    """EAGLE-3 in both file styles, with the norm variants and a reduced vocabulary."""
    reduced, flags = 20, VARIANTS[variant]
    prefix = "midlayer." if style == "eagle" else "layers.0."
    weights = _eagle3(6, reduced, prefix)
    config: dict[str, Any] = {**LAYER, **flags, "draft_vocab_size": reduced}
    if style == "speculators":
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": LAYER,
            "draft_vocab_size": reduced,
            "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
            **flags,
        }
    net = _load(weights.write(tmp_path, config))
    assert net.points == ((1, 4, 6) if style == "speculators" else (2, 4, 5))
    assert isinstance(net, Eagle3)
    net.use_embedding(Embedding(_embedding()))
    features, tokens = _features(17, 3 * HIDDEN), _tokens(17)
    runner = paged_runner.make(net, features)
    outputs = _chunked(runner, features, tokens)
    g = features.double().numpy() @ weights["fc.weight"].T
    normed = ref.rms(g, weights[prefix + "hidden_norm.weight"])
    embedded = _embedding().double().numpy()[tokens]
    embedded = ref.rms(embedded, weights[prefix + "input_layernorm.weight"])
    residual = normed if flags.get("norm_before_residual") else g
    joined = np.concatenate((embedded, normed), -1)
    x = ref.layer(weights, prefix, joined, residual, np.arange(17.0))
    last = ref.rms(x, weights["norm.weight"])
    _close(outputs, last if flags.get("norm_output") else x)
    logits = runner.logits(outputs)
    assert torch.isinf(logits[:, ::2]).all()
    _close(logits[:, 1 : 2 * reduced : 2], last @ weights["lm_head.weight"].T)


def _without(name: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        del weights.tensors[name]

    return change


def _absolute_ids(weights: Weights) -> None:
    weights.tensors["d2t"].fill_(60)


def _with(name: str, shape: tuple[int, ...]) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights.tensors[name] = torch.zeros(shape)

    return change


@pytest.mark.parametrize(
    ("change", "config", "error", "message"),
    [
        (_without("norm.weight"), {}, CheckpointError, r"missing tensors.*norm\.weight"),
        (_with("extra.weight", (2,)), {}, CheckpointError, r"unused tensors.*extra\.weight"),
        (
            _with("midlayer.mlp.up_proj.weight", (3, HIDDEN)),
            {},
            CheckpointError,
            r"tensor shape.*up_proj",
        ),
        (_with("fc.weight", (HIDDEN, 100)), {}, ConfigError, "fc over 100"),
        (
            lambda w: None,
            {"eagle_aux_hidden_state_layer_ids": [1, 4, 99]},
            ConfigError,
            "different layers of the target's 8",
        ),
        (_absolute_ids, {}, CheckpointError, "ascending ids below 61"),
        (lambda w: None, {"speculators_model_type": "dflash2"}, NotYetError, "dflash2"),
    ],
)
def test_wrong_heads_are_explained(
    tmp_path: Path,
    change: Callable[[Weights], None],
    config: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    """Each mistake names the tensor or the field."""
    weights = _eagle3(6, 20, "midlayer.")
    change(weights)
    folder = weights.write(tmp_path, {**LAYER, **config})
    with pytest.raises(error, match=message):
        _load(folder)


def test_other_folders(tmp_path: Path) -> None:
    """No weights, a truncated file, a folder that is no head."""
    (tmp_path / "config.json").write_text(json.dumps(LAYER))
    with pytest.raises(CheckpointError, match="weights"):
        read_head(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(CheckpointError, match="complete file"):
        read_head(tmp_path)
    weights = Weights(1)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    with pytest.raises(UnsupportedModelError, match="eagle3"):
        _load(weights.write(tmp_path / "lm", {"architectures": ["LlamaForCausalLM"]}))


def test_feature_sizes_are_the_targets() -> None:
    """KV heads and head size of the reference are what the layer config says."""
    assert (LAYER["num_key_value_heads"], LAYER["head_dim"]) == (KV, SIZE)


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
