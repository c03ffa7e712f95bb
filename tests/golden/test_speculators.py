"""Heads against the `speculators` package: what we export it loads, what it writes we load, and
the logits are the same. Runs where the package is: `make test-speculators`."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from foretoken.layers.embedding import Embedding
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.heads.eagle3.layers import Eagle3Shape
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.parts import HeadShape
from foretoken.training import run_folder
from foretoken.training.heads.export import export_run
from tests.golden import paged_runner
from tests.golden.heads import HIDDEN, LAYER, VOCAB, Weights, load_head

pytest.importorskip("speculators", reason="make test-speculators has it in a place of its own")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

DRAFTS, SLOTS, DEPTH, MASK = 20, 17, 3, 7
SHAPE = Eagle3Shape(
    layer=HeadShape(**LAYER),  # type: ignore[arg-type]
    draft_vocab_size=DRAFTS,
    target_hidden_size=HIDDEN,
)
VARIANTS = {
    "plain": SHAPE,
    "residual normed": replace(SHAPE, norm_before_residual=True),
    "one norm before fc": replace(SHAPE, norm_before_fc=True),
    "a norm per feature": replace(SHAPE, fc_norm=True),
    "output normed": replace(SHAPE, norm_output=True),
    "two layers": replace(SHAPE, layer=replace(SHAPE.layer, num_hidden_layers=2)),
    "all tokens": replace(SHAPE, draft_vocab_size=VOCAB),
    "parallel": replace(SHAPE, parallel=True),
}
FROM_VERIFIER = {"verifier_norm.weight", "verifier_lm_head.weight"}
"""What training needs. (Version 0.9.0 leaves an embedding that is not in the file as it finds it in
memory, unless it finds a NaN there.)"""


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target, as far as the package reads it."""
    weights = Weights(11)
    weights.matrix("model.embed_tokens.weight", VOCAB, HIDDEN)
    weights.vector("model.norm.weight", HIDDEN)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    config = {**LAYER, "num_hidden_layers": 8, "model_type": "llama"}
    config["architectures"] = ["LlamaForCausalLM"]
    return weights.write(tmp_path_factory.mktemp("verifier"), config)


def randomized(net: nn.Module) -> None:
    """Weights about as large as trained ones."""
    torch.manual_seed(3)
    for name, parameter in net.named_parameters():
        if "verifier" not in name and "embed" not in name:
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)


def offsets(drafts: int) -> Tensor:
    """`d2t`: every second token can be drafted, if not all."""
    ids = torch.arange(drafts)
    return ids + 1 if drafts < VOCAB else 0 * ids


def ours(shape: Eagle3Shape, verifier: Path) -> Eagle3:
    net = Eagle3(shape)
    randomized(net)
    net.d2t.copy_(offsets(shape.draft_vocab_size))
    table_VD = load_file(verifier / "model.safetensors")["model.embed_tokens.weight"]
    net.use_embedding(Embedding(table_VD))
    return net.eval()


def theirs(shape: Eagle3Shape, verifier: Path) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    of_config, of_model = Eagle3SpeculatorConfig, Eagle3DraftModel
    flags = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}
    given = {name: getattr(shape, name) for name in flags}
    if shape.parallel:
        of_config, of_model = PEagleSpeculatorConfig, PEagleDraftModel
        given["mask_token_id"] = MASK
    config = of_config(
        transformer_layer_config=LlamaConfig(**asdict(shape.layer)),
        draft_vocab_size=shape.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=[1, 4, 6],
        speculators_config=SpeculatorsConfig(
            algorithm="peagle" if shape.parallel else "eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(verifier)),
        ),
        **given,
    )
    model = of_model(config)
    d2t = offsets(shape.draft_vocab_size)
    ids = torch.arange(len(d2t)) + d2t
    model.load_vocab_mappings(torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True), d2t)
    model.load_verifier_weights()
    randomized(model)
    return model.eval()


def inputs() -> tuple[Tensor, list[int]]:
    """Features of slots and the token after each."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(SLOTS, 3 * HIDDEN, generator=generator)
    return features, torch.randint(VOCAB, (SLOTS,), generator=generator).tolist()


def attend_eagerly(model: Any) -> None:
    """Its flexible attention takes whole blocks only."""
    from speculators.models.attention import create_float_mask

    model._attn_impl, model._create_mask_fn = "eager", create_float_mask
    model.config.transformer_layer_config._attn_implementation = "eager"


@torch.inference_mode()
def their_logits(model: Any, anchor: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Over the head's own ids, at `anchor` and after each further token of the text, [DEPTH, N]."""
    features, tokens = inputs()
    found: list[Tensor] = []
    attend_eagerly(model)
    hook = model.lm_head.register_forward_hook(lambda _, __, out: found.append(out[0]))
    slots = {
        "hidden_states": features[None],
        "input_ids": torch.tensor(tokens)[None],
        "document_ids": torch.zeros(1, SLOTS, dtype=torch.int64),
    }
    if not hasattr(model, "mask_hidden"):
        model(**slots, ttt_steps=DEPTH)
        hook.remove()
        return torch.stack([logits[anchor] for logits in found])
    places = torch.cat((torch.arange(SLOTS), torch.full((DEPTH - 1,), anchor)))
    depths = torch.tensor([*[0] * SLOTS, *range(1, DEPTH)])
    monkeypatch.setattr(
        "speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: (places, depths)
    )
    monkeypatch.setattr("speculators.models.peagle.core.compute_metrics", lambda **_: (None, {}))
    model(**slots, verifier_last_hidden_states=torch.zeros(1, SLOTS, HIDDEN), num_depths=DEPTH)
    hook.remove()
    return found[-1][[anchor, *range(SLOTS, SLOTS + DEPTH - 1)]]


@torch.inference_mode()
def our_logits(net: Eagle3, anchor: int) -> Tensor:
    """The same, as serving computes it over paged keys and values."""
    features, tokens = inputs()
    runner = paged_runner.make(net, features)

    def run(start: int, fed: Sequence[int], hidden_TD: Tensor) -> Tensor:
        layout = SpanLayout(start=start, num_tokens=len(fed), page_table=paged_runner.TABLE)
        return runner.forward([layout], fed, hidden_TD)

    known = SpanLayout(start=0, num_tokens=anchor + 1, page_table=paged_runner.TABLE)
    mixed_TD, fed = runner.mixed_features([known]), tokens[: anchor + 1]
    if net.shape.parallel:
        hidden_TD = torch.cat((mixed_TD, runner.mix(net.mask_features(DEPTH - 1))))
        outputs_KD = run(0, [*fed, *[MASK] * (DEPTH - 1)], hidden_TD)[anchor:]
    else:
        outputs = [run(0, fed, mixed_TD)[-1:]]
        for depth in range(1, DEPTH):
            at = anchor + depth
            outputs.append(run(at, [tokens[at]], outputs[-1]))
        outputs_KD = torch.cat(outputs)
    return runner.logits(outputs_KD)[:, net.target_ids]


def assert_alike(model: Any, net: Eagle3, monkeypatch: pytest.MonkeyPatch) -> None:
    for anchor in (3, 11):
        wanted = their_logits(model, anchor, monkeypatch)
        assert wanted.shape == (DEPTH, net.shape.draft_vocab_size) and wanted.std() > 0.1
        torch.testing.assert_close(our_logits(net, anchor), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_package_loads_what_we_export(
    variant: str, verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of the file is used, none is missing but those that the target has."""
    from speculators import SpeculatorModel

    shape = VARIANTS[variant]
    net, folder = ours(shape, verifier), tmp_path / "head"
    state = {
        "kind": "peagle" if shape.parallel else "eagle3",
        "model": net.state_dict(),
        "shape": asdict(shape),
        "head": {"mask_token_id": MASK},
    }
    (tmp_path / "run").mkdir()
    run_folder.save(tmp_path / "run", 1, state)
    export_run(
        tmp_path / "run", folder, verifier=str(verifier), dtype=torch.float32, embedding=True
    )
    model: Any = SpeculatorModel.from_pretrained(str(folder))
    stored, known = load_file(folder / "model.safetensors"), model.state_dict()
    assert set(stored) <= set(known) and set(known) - set(stored) <= FROM_VERIFIER
    assert all(torch.equal(known[name], tensor) for name, tensor in stored.items())
    assert model.target_layer_ids == [2, 4, 5]
    assert_alike(model.eval(), net, monkeypatch)


@pytest.mark.parametrize("variant", VARIANTS)
def test_we_load_what_the_package_writes(
    variant: str, verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for any published head: strictly, with the layers and the variant of its config."""
    shape = VARIANTS[variant]
    model = theirs(shape, verifier)
    model.save_pretrained(str(tmp_path))
    head = load_head(tmp_path, replace(SHAPE.layer, num_hidden_layers=8))
    assert isinstance(head, Eagle3) and head.points == (1, 4, 6)
    assert head.shape == replace(shape, own_embedding=True)
    assert head.mask_token_id == (MASK if shape.parallel else None)
    assert_alike(model, head.eval(), monkeypatch)
