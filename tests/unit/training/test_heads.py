"""Training of heads: what is guessed is what serving computes, files are what serving reads."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.heads.chain_head import ChainRunner
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.compiled import compile_eagle3
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.paged_head import PagedContext
from foretoken.training import run_folder
from foretoken.training.heads.export import export_run
from foretoken.training.heads.guesses import DepthAttention, Guess, rotary_of
from foretoken.training.heads.kind import fresh_head
from foretoken.training.heads.pard import ParallelGuesser
from foretoken.training.heads.target import Captured
from foretoken.training.heads.task import divergence_loss, guess_quality
from foretoken.training.llama import Llama
from foretoken.training.optimizer import Optimizer
from foretoken.training.schedule import Stage
from foretoken.training.settings import HeadSettings, LlamaShape, Settings
from tests.golden.heads import load_head
from tools.demo_models.heads import capture, parts_of

SHAPE = LlamaShape(
    vocab_size=50, hidden_size=24, layers=8, heads=4, kv_heads=2, ffn_size=32, max_positions=64
)
DEPTH, ROWS, LENGTH = 3, 2, 15
KINDS = (
    "eagle", "eagle3", "peagle", "peagle_anchored", "dflash", "dspark", "mlp", "medusa", "parallel",
)  # fmt: skip


def _settings(kind: str) -> Settings:
    head = HeadSettings(
        kind=kind.removesuffix("_anchored"), depth=DEPTH, inner_size=16, mask_token_id=1,
        anchored=kind.endswith("anchored"),
    )  # fmt: skip
    return Settings(
        name="t", shape=replace(SHAPE, layers=1), stages=(Stage(until=1.0, length=8),), head=head
    )


def _target() -> Llama:
    torch.manual_seed(0)
    target = Llama(SHAPE)
    with torch.no_grad():
        target.embed_tokens.weight.normal_(std=0.5)
    return target.eval().requires_grad_(False)


def _captured(target: Llama, points: tuple[int, ...]) -> Captured:
    tokens = torch.randint(2, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return capture(target, tokens, points)


def _head(kind: str, target: Llama) -> tuple[Any, Any, tuple[int, ...]]:
    torch.manual_seed(3)
    fresh = fresh_head(parts_of(target), _settings(kind), torch.arange(50))
    with torch.no_grad():
        for parameter in fresh.net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return fresh.net, fresh.guesser, fresh.points


def _trained(kind: str) -> tuple[Llama, Any, Any, Captured]:
    """A target, a head's network and its guesser, and what it reads of the target."""
    target = _target()
    net, guesser, points = _head(kind, target)
    return target, net, guesser, _captured(target, points)


def _save(folder: Path, kind: str, net: Any) -> None:
    """A run's checkpoint in `folder`/run and its export, in float32, in `folder`/head."""
    state = {
        "kind": kind.removesuffix("_anchored"),
        "model": net.state_dict(),
        "shape": asdict(net.shape),
        "head": asdict(_settings(kind).head),  # type: ignore[arg-type]
    }
    (folder / "run").mkdir()
    run_folder.save(folder / "run", 1, state)
    export_run(folder / "run", folder / "head", verifier="demo", dtype=torch.float32)


def test_captured_states_are_the_targets() -> None:
    """The last point is the normed output; others are the stream before a layer."""
    target = _target()
    captured = _captured(target, (0, 2, FINAL))
    embedded, _, final = captured.features_BTF.chunk(3, dim=-1)
    assert torch.equal(embedded, target.embed_tokens(captured.tokens_BT))
    assert torch.equal(final, captured.final_BTD)
    assert torch.allclose(final, target.hidden(captured.tokens_BT), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_learns(kind: str) -> None:
    """Some steps on one batch lower the loss; the target gets no gradient."""
    target, net, guesser, captured = _trained(kind)
    settings = _settings(kind).head
    assert settings is not None
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    losses = []
    for _ in range(12):
        loss = divergence_loss(guesser, captured, settings, target.embed_tokens.weight, 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    assert all(parameter.grad is None for parameter in target.parameters())


def test_an_oracle_has_full_length() -> None:
    """A guesser that knows the target's own best tokens is right at every depth."""
    target = _target()

    class Oracle(ParallelGuesser):
        def guesses(self, captured, depth):  # type: ignore[no-untyped-def]
            for step in range(depth):
                ahead = captured.final_BTD[:, 1 + step :]
                padded = torch.cat((ahead, ahead[:, -1:].expand(-1, 1 + step, -1)), dim=1)
                yield Guess(states_BTD=padded, weight_VD=target.embed_tokens.weight)

    captured = _captured(target, (FINAL,))
    found = guess_quality(Oracle(target, 1), captured, DEPTH, target.logits)
    assert found.agreement == (1.0, 1.0, 1.0) and found.length == DEPTH + 1.0


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_training_steps_are_serving_steps(kind: str) -> None:
    """At every depth: outputs of the training-time test equal those over paged KV."""
    target, net, guesser, captured = _trained(kind)
    assert isinstance(net, Eagle | Eagle3)
    trained = [g.states_BTD for g in guesser.guesses(captured, DEPTH)]
    page, row, slot = 4, 1, 9
    tokens = captured.tokens_BT[row].tolist()
    store = FeatureStore(
        [FINAL], captured.features_BTF.shape[-1], 64, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    table = [5, 2, 7, 0, 1]
    slots = torch.tensor([table[i // page] * page + i % page for i in range(LENGTH)])
    store.write(FINAL, slots, captured.features_BTF[row])
    context = PagedContext(
        features=FeatureView(store, [FINAL]),
        target_logits=target.logits,
        vocab_size=50,
        num_pages=16,
        page_size=page,
    )
    runner = ChainRunner(net, context, compile_eagle3 if isinstance(net, Eagle3) else None)
    with torch.no_grad():
        layouts = [SpanLayout(start=0, num_tokens=slot + 1, page_table=table)]
        hidden = runner.mixed_features(layouts)
        output = runner.forward(layouts, tokens[1 : slot + 2], hidden)[-1:]
        for depth in range(DEPTH):
            wanted = trained[depth][row, slot]
            found = net.norm(output) if isinstance(net, Eagle3) else output
            assert torch.allclose(found[0], wanted, atol=1e-5), depth
            layouts = [SpanLayout(start=slot + 1 + depth, num_tokens=1, page_table=table)]
            output = runner.forward(layouts, [tokens[slot + 2 + depth]], output)


def test_parallel_training_is_one_pass_with_masks() -> None:
    """PARD's guesses at a position are those of the plain model on the prefix and masks."""
    _, net, guesser, captured = _trained("parallel")
    net.eval()
    guesses = list(guesser.guesses(captured, DEPTH))
    row, slot = 0, 6
    prefix = captured.tokens_BT[row, 1 : slot + 2].tolist()
    net.set_attn_implementation("sdpa")  # from here on plain, causal attention
    states = net.hidden(torch.tensor([[*prefix, 1, 1]]))[0]
    for depth in range(DEPTH):
        assert torch.allclose(states[slot + depth], guesses[depth].states_BTD[row, slot], atol=1e-5)


@pytest.mark.parametrize("kind", ["peagle", "peagle_anchored"])
def test_peagle_training_is_one_pass_with_masks(kind: str) -> None:
    """P-EAGLE's guesses at a slot are those of one causal pass over true slots and masks."""
    _, net, guesser, captured = _trained(kind)
    net.eval()
    guesses = list(guesser.guesses(captured, DEPTH))
    row, slot = 0, 6
    true = net.mix(captured.features_BTF[row, : slot + 1])
    masks, known = net.masks(DEPTH - 1), captured.tokens_BT[row, 1 : slot + 2].tolist()
    masks = masks + true[-1] if net.shape.anchored else masks
    fill = known[-1] if net.shape.anchored else 1
    tokens = torch.tensor([*known, fill, fill])
    rotation = rotary_of(net.shape.layer, torch.device("cpu")).at(torch.arange(len(tokens)))
    attends = [DepthAttention() for _ in net.layers]
    output = net(tokens[None], torch.cat((true, masks))[None], rotation, attends)
    states = net.norm(output)[0]
    for depth in range(DEPTH):
        assert torch.allclose(states[slot + depth], guesses[depth].states_BTD[row, slot], atol=1e-5)


@pytest.mark.parametrize("kind", ["peagle", "parallel"])
def test_slots_are_dropped_in_training_only(kind: str) -> None:
    """Each depth keeps anchors of the one before, and what they give does not change."""
    _, net, guesser, captured = _trained(kind)
    whole = list(guesser.guesses(captured, DEPTH))
    assert [len(g.slots_N) for g in whole[1:]] == [round(LENGTH * 0.7), round(LENGTH * 0.49)]
    assert set(whole[2].slots_N.tolist()) < set(whole[1].slots_N.tolist())
    net.eval()
    for kept, full in zip(whole, guesser.guesses(captured, DEPTH), strict=True):
        slots = slice(None) if kept.slots_N is None else kept.slots_N
        assert torch.allclose(kept.states_BTD, full.states_BTD[:, slots], atol=1e-5)
        states, below = kept.within(9)
        assert torch.allclose(states, full.states_BTD[:, below], atol=1e-5)
        assert states.shape[1] == len(torch.arange(LENGTH)[slots][torch.arange(LENGTH)[slots] < 9])


def test_peagle_begins_with_an_eagle3_head(tmp_path: Path) -> None:
    """Depth 0 of a deeper head is that of the EAGLE-3 head it began with."""
    target, net, guesser, captured = _trained("eagle3")
    _save(tmp_path, "eagle3", net)
    settings = _settings("peagle")
    assert settings.head is not None
    deeper = replace(settings.head, num_layers=3, start=str(tmp_path / "head"))
    parts = parts_of(target)
    fresh = fresh_head(parts, replace(settings, head=deeper), torch.arange(50))
    wanted = next(guesser.guesses(captured, 1))
    found = next(fresh.guesser.guesses(captured, 1))
    assert torch.allclose(found.states_BTD, wanted.states_BTD, atol=1e-6)
    other = replace(deeper, inner_size=20)
    with pytest.raises(ConfigError, match=r"head\.start"):
        fresh_head(parts, replace(settings, head=other), torch.arange(50))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("peagle", "parallel")])
def test_a_head_begins_with_one_of_its_kind(tmp_path: Path, kind: str) -> None:
    """Every weight is that of the head it began with, and no other kind or size is taken."""
    target = _target()
    net = _head(kind, target)[0]
    _save(tmp_path, kind, net)
    parts, settings = parts_of(target), _settings(kind)
    assert settings.head is not None
    begun = replace(settings.head, start=str(tmp_path / "head"))
    torch.manual_seed(5)
    fresh = fresh_head(parts, replace(settings, head=begun), torch.arange(50))
    for name, tensor in net.state_dict().items():
        assert torch.equal(fresh.net.state_dict()[name], tensor), name
    other = _settings("medusa" if kind != "medusa" else "mlp")
    assert other.head is not None
    for wrong in (
        replace(settings, head=replace(begun, inner_size=20)),
        replace(other, head=replace(other.head, start=begun.start)),
    ):
        with pytest.raises(ConfigError, match=r"head\.start"):
            fresh_head(parts, wrong, torch.arange(50))


def test_every_parameter_is_trained() -> None:
    """The learned mask, which is no matrix, too."""
    net = _head("peagle", _target())[0]
    assert isinstance(net, Eagle3)
    settings = replace(_settings("peagle"), warmup_steps=1)
    optimizer = Optimizer(net, settings)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(1.0)
    assert all(not torch.equal(p, before[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "parallel"])
def test_exported_heads_are_read_back(tmp_path: Path, kind: str) -> None:
    """Every tensor survives the round through the published format."""
    target = _target()
    net, _, points = _head(kind, target)
    _save(tmp_path, kind, net)
    facts = replace(parts_of(target).layer_shape(32), num_hidden_layers=8)
    loaded = load_head(tmp_path / "head", facts)
    assert loaded.method == ("eagle3" if "peagle" in kind else kind) and loaded.points == points
    assert loaded.parallel == ("peagle" in kind)
    assert getattr(loaded, "mask_token_id", None) == (1 if kind == "peagle" else None)
    for name, tensor in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_wrong_settings_name_the_field() -> None:
    """Unknown kinds and numbers out of range."""
    with pytest.raises(ConfigError, match=r"head\.kind.*peagle, mlp"):
        HeadSettings(kind="transformer")
    with pytest.raises(ConfigError, match=r"head\.depth"):
        HeadSettings(kind="mlp", depth=0)
    with pytest.raises(ConfigError, match="RUN: "):
        export_run(Path("nowhere"), Path("out"), verifier="demo")


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_an_export_may_bring_the_embedding(kind: str, tmp_path: Path) -> None:
    """As the speculators package wants it; the head computes the same."""
    target = _target()
    net, _, __ = _head(kind, target)
    _save(tmp_path, kind, net)
    weights = {"model.embed_tokens.weight": target.embed_tokens.weight.clone()}
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    save_file(weights, tmp_path / "target" / "model.safetensors")
    verifier = str(tmp_path / "target")
    export_run(
        tmp_path / "run", tmp_path / "whole", verifier=verifier, dtype=torch.float32, embedding=True
    )
    facts = parts_of(target).layer_shape(16, SHAPE.layers)
    lent, own = (load_head(tmp_path / n, facts) for n in ("head", "whole"))
    assert isinstance(own, Eagle3) and torch.equal(
        own.embed_tokens.weight, target.embed_tokens.weight
    )
    assert isinstance(lent, Eagle3) and not lent.shape.own_embedding
    (tmp_path / "other").mkdir()
    _save(tmp_path / "other", "medusa", _head("medusa", target)[0])
    with pytest.raises(ConfigError, match="embedding"):
        export_run(tmp_path / "other" / "run", tmp_path / "x", verifier=verifier, embedding=True)
