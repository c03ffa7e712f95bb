"""Block heads against the packages that train them, `dflash` and `speculators`: what they write we
load, what we export they load, and outputs, logits, Markov terms and judgements are the same. Runs
where the packages are: `make test-speculators`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from foretoken.proposers.heads.dflash.network import BlockHead, DFlash
from foretoken.proposers.heads.dflash.shape import BlockShape, BlockView
from foretoken.proposers.heads.dspark import DSpark, MarkovShape
from foretoken.proposers.heads.parts import HeadShape
from foretoken.shape import RopeShape
from foretoken.training import run_folder
from foretoken.training.heads.export import export_run
from tests.golden import test_dflash as ours
from tests.golden.blocks import BODY, MASK, RANK, REDUCED
from tests.golden.heads import HIDDEN, LAYER, VOCAB, Weights, load_head

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

TARGET = HeadShape(**{**LAYER, "num_hidden_layers": 8})  # type: ignore[arg-type]
ROWS, PLACES = 5, 20
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {**SLIDING, "sliding_window": 6},
    "nothing causal": {**SLIDING, "sliding_window": 6, "is_causal": False},
    "biases and yarn": {"attention_bias": True, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
}


def qwen3(**changes: Any) -> Any:
    from transformers import Qwen3Config

    usual = {"rope_type": "default", "rope_theta": 10000.0}
    body = {key: value for key, value in BODY.items() if key not in ("model_type", "rope_theta")}
    return Qwen3Config(**{**body, "rope_parameters": usual, **changes})


def randomized(net: nn.Module, *left: str) -> None:
    """Weights about as large as trained ones, but for those with some words in their names."""
    torch.manual_seed(3)
    for name, parameter in net.named_parameters():
        if not any(word in name for word in left):
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.25)


def our_outputs(folder: Path, places: int, tokens: list[int]) -> tuple[BlockHead, Tensor]:
    """Outputs of a block behind so many places, as serving computes them over scattered pages."""
    net = load_head(folder, TARGET)
    assert isinstance(net, BlockHead)
    runner = ours.make(net, ours.features_of(PLACES)[:places])
    return net, ours.outputs_of(runner, places, tokens)


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_the_authors_package(name: str, tmp_path: Path) -> None:
    package = pytest.importorskip("dflash.model", reason="pip install dflash")
    dflash = {"mask_token_id": MASK, "target_layer_ids": [0, 3, 5]}
    config = qwen3(**VARIANTS[name], num_target_layers=8, block_size=ROWS, dflash_config=dflash)
    model = package.DFlashDraftModel(config).eval()
    randomized(model)
    model.save_pretrained(tmp_path)
    assert_outputs_alike(model, tmp_path)


def assert_outputs_alike(model: Any, folder: Path) -> None:
    """Of the authors' model, and of ours from `folder`."""
    tokens = [11, *[MASK] * (ROWS - 1)]
    embedded = nn.functional.embedding(torch.tensor([tokens]), ours.table())
    for places in (1, 9, PLACES):
        wanted = model(
            position_ids=torch.arange(places + ROWS)[None],
            noise_embedding=embedded,
            target_hidden=ours.features_of(PLACES)[None, :places],
        )[0]
        _, found = our_outputs(folder, places, tokens)
        torch.testing.assert_close(found @ ours.table().T, wanted @ ours.table().T, **CLOSE)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target, as far as `speculators` reads it."""
    weights = Weights(11)
    weights.tensors["model.embed_tokens.weight"] = ours.table()
    weights.vector("model.norm.weight", HIDDEN)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    config = {**LAYER, "num_hidden_layers": 8, "model_type": "llama"}
    config["architectures"] = ["LlamaForCausalLM"]
    return weights.write(tmp_path_factory.mktemp("verifier"), config)


def theirs(method: str, verifier: Path, reduced: bool, **given: Any) -> Any:
    """The package's own model; windows are longer than the text, at whose edge it trains in another
    way than it is served."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layers = qwen3(**SLIDING, sliding_window=64)
    layers._attn_implementation = "eager"
    of_config, of_model = DFlashSpeculatorConfig, DFlashDraftModel
    if method == "dspark":
        of_config, of_model = DSparkSpeculatorConfig, DSparkDraftModel
    drafts = ROWS if method == "dspark" else ROWS - 1
    config = of_config(
        transformer_layer_config=layers,
        draft_vocab_size=REDUCED if reduced else VOCAB,
        block_size=ROWS,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=[1, 4, 6],
        speculators_config=SpeculatorsConfig(
            algorithm=method,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(verifier)),
        ),
        **given,
    )
    model = of_model(config)
    if reduced:
        ids = torch.arange(REDUCED) * 2 + 1
        known = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        model.load_vocab_mappings(known, ids - torch.arange(REDUCED))
    model.load_verifier_weights()
    randomized(model, "verifier", "embed", *([] if reduced else ["lm_head"]))
    return model.eval()


@pytest.mark.parametrize("non_causal", [False, True])
@pytest.mark.parametrize(
    ("method", "reduced", "given"),
    [
        ("dflash", False, {}),
        ("dflash", True, {}),
        ("dspark", True, {"markov_rank": RANK, "markov_head_type": "vanilla"}),
        ("dspark", False, {"markov_rank": RANK, "markov_head_type": "gated"}),
    ],
)
@torch.inference_mode()
def test_speculators(
    method: str,
    reduced: bool,
    given: dict[str, Any],
    non_causal: bool,
    verifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the package writes; at three anchors of a text."""
    pytest.importorskip("speculators", reason="make test-speculators has it in a place of its own")
    model = theirs(method, verifier, reduced, sliding_window_non_causal=non_causal, **given)
    model.save_pretrained(str(tmp_path))
    assert_blocks_alike(model, tmp_path, reduced, monkeypatch)


@torch.inference_mode()
def assert_blocks_alike(
    model: Any, folder: Path, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks as its training runs them, and as we serve them from `folder`."""
    anchors = torch.tensor([4, 9, 13])
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors",
        lambda *_, **__: (anchors, torch.ones(3, dtype=torch.bool)),
    )
    text = torch.randint(VOCAB - 1, (1, PLACES), generator=torch.Generator().manual_seed(3))
    outputs, logits, *_ = model._backbone_forward(
        ours.features_of(PLACES)[None],
        text,
        torch.ones(1, PLACES),
        torch.zeros(1, PLACES, HIDDEN),
        torch.zeros(1, PLACES, dtype=torch.long),
        max_anchors=3,
    )
    for i, anchor in enumerate(anchors.tolist()):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        net, found = our_outputs(folder, anchor, [int(text[0, anchor]), *[MASK] * (ROWS - 1)])
        own = net.logits(found) if reduced else model.lm_head(found)
        wanted, previous = logits[0, rows], text[0, anchor : anchor + ROWS]
        if hasattr(model, "markov_head"):
            states = outputs[0, rows]
            wanted = (
                wanted
                + model.markov_head.block_bias(
                    prev_token_ids=previous[None], hidden_states=states[None]
                )[0]
            )
            shorts = model.markov_head.prev_embeddings(previous)
            judged = model.confidence_head(torch.cat((states, shorts), dim=-1)).sigmoid()
            sure = net.sure(found, previous)
            assert sure is not None
            torch.testing.assert_close(sure, judged, **CLOSE)
        assert wanted.std() > 0.1
        torch.testing.assert_close(net.after(own, found, previous), wanted, **CLOSE)


def exported(method: str, reduced: bool, verifier: Path, folder: Path, form: str) -> BlockHead:
    first_row = 1 if method == "dflash" else 0
    shape = BlockShape(
        layer=HeadShape(**{**LAYER, "num_hidden_layers": 2}),  # type: ignore[arg-type]
        rope=RopeShape(theta=10000.0, rotary_dim=8),
        views=(BlockView(), BlockView()),
        block_size=ROWS,
        first_row=first_row,
        mask_token_id=MASK,
        target_hidden_size=HIDDEN,
        target_layers=8,
        points=(1, 4, 6),
        draft_vocab_size=REDUCED if reduced else VOCAB,
        own_head=reduced,
    )
    markov = MarkovShape(rank=RANK, judges=True, judges_by_token=True)
    net = DFlash(shape) if method == "dflash" else DSpark(shape, markov)
    randomized(net)
    if reduced:
        net.d2t.copy_(torch.arange(REDUCED) + 1)
    run = folder / "run"
    run.mkdir()
    state = {"kind": method, "model": net.state_dict(), "shape": asdict(shape), "head": {}}
    run_folder.save(run, 1, state)
    export_run(run, folder, verifier=str(verifier), dtype=torch.float32, form=form)
    return net


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_speculators_loads_what_we_export(
    method: str, reduced: bool, verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of the file is used, none is missing but those that the target has."""
    pytest.importorskip("speculators", reason="make test-speculators has it in a place of its own")
    from speculators import SpeculatorModel
    from speculators.models.attention import create_float_mask

    net = exported(method, reduced, verifier, tmp_path, "speculators")
    model: Any = SpeculatorModel.from_pretrained(str(tmp_path))
    stored, known = load_file(tmp_path / "model.safetensors"), model.state_dict()
    lent = {"verifier_norm.weight", "verifier_lm_head.weight", "embed_tokens.weight"}
    lent |= set() if reduced else {"lm_head.weight"}
    assert set(stored) <= set(known) and set(known) - set(stored) <= lent
    assert all(torch.equal(known[name], tensor) for name, tensor in stored.items())
    assert tuple(model.target_layer_ids) == net.points and model.block_size == ROWS
    assert model.config.sample_from_anchor == (method == "dspark")
    # Its flexible attention takes whole blocks only.
    model._attn_impl, model._create_mask_fn = "eager", create_float_mask
    model.config.transformer_layer_config._attn_implementation = "eager"
    model.load_verifier_weights()
    assert_blocks_alike(model.eval(), tmp_path, reduced, monkeypatch)


@torch.inference_mode()
def test_the_authors_package_loads_what_we_export(verifier: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("dflash.model", reason="pip install dflash")
    net = exported("dflash", False, verifier, tmp_path, "sglang")
    model, told = package.DFlashDraftModel.from_pretrained(str(tmp_path), output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.block_size, model.mask_token_id) == (ROWS, MASK)
    assert [one + 1 for one in model.target_layer_ids] == list(net.points)
    assert_outputs_alike(model.eval(), tmp_path)
