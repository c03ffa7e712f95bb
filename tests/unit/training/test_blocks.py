"""Training of heads that fill in blocks: what is guessed is what serving computes, drafts are
judged by what becomes of them, runs go on, files are what serving reads."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams
from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.heads.dflash.network import BlockHead
from foretoken.proposers.heads.dflash.runner import BlockRunner
from foretoken.proposers.heads.dflash.shape import BlockPass
from foretoken.proposers.heads.dspark import DSpark
from foretoken.proposers.heads.folder import method_of, read_head
from foretoken.proposers.heads.paged_head import PagedContext
from foretoken.testing import write_tiny_llama
from foretoken.training import run_folder
from foretoken.training.heads.dflash import BlockGuesser, block_points
from foretoken.training.heads.export import export_run
from foretoken.training.heads.kind import FreshHead, fresh_head
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.heads.task import divergence_loss, token_loss
from foretoken.training.loop import Trainer
from foretoken.training.losses import Head, distance
from foretoken.training.optimizer import Optimizer
from foretoken.training.runs import build_job, prepare_data, train
from foretoken.training.schedule import Stage
from foretoken.training.settings import HeadSettings, Settings, read_settings
from tests.unit.training import tiny
from tests.unit.training.own_runs import silent, write_config

METHODS = ("dflash", "dspark")
VOCAB, HIDDEN, LENGTH, DEPTH, FEW, MASK = 50, 24, 23, 4, 20, 49
PAGE, TABLE = 4, [5, 2, 7, 0, 1, 8, 3]


def target_parts(layers: int = 8) -> TargetParts:
    generator = torch.Generator().manual_seed(1)
    return TargetParts(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=6,
        max_positions=64,
        norm_eps=1e-5,
        rope_theta=10000.0,
        embedding_VD=torch.randn(VOCAB, HIDDEN, generator=generator),
        head_VD=torch.randn(VOCAB, HIDDEN, generator=generator),
    )


def settings_of(method: str, **changes: Any) -> Settings:
    head: dict[str, Any] = {
        "kind": method, "depth": DEPTH, "inner_size": 16, "num_layers": 2, "mask_token_id": MASK,
        "markov_rank": 6, "block_share": 0.3, **changes,
    }  # fmt: skip
    stages = (Stage(until=1.0, length=16),)
    return Settings(
        name="t", shape=tiny.SHAPE, stages=stages, head=HeadSettings(**head), batch_tokens=96
    )


def fresh(method: str, **changes: Any) -> FreshHead:
    torch.manual_seed(3)
    found = fresh_head(target_parts(), settings_of(method, **changes), torch.arange(VOCAB) * 7 % 50)
    with torch.no_grad():
        for parameter in found.net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return found


def captured(rows: int = 2, part: int = 0) -> Captured:
    generator = torch.Generator().manual_seed(2)
    count = len(block_points(target_parts()))
    return Captured(
        tokens_BT=torch.randint(VOCAB - 1, (rows, LENGTH), generator=generator),
        features_BTF=torch.randn(rows, LENGTH, count * HIDDEN, generator=generator),
        final_BTD=torch.randn(rows, LENGTH, HIDDEN, generator=generator),
        part=part,
    )


def served(net: BlockHead, given: Captured, row: int, slot: int) -> BlockRunner:
    """What serves the network, with the features of a row in its store."""
    store = FeatureStore(
        [FINAL], given.features_BTF.shape[-1], 64, dtype=torch.float32, device=torch.device("cpu")
    )
    slots = [TABLE[i // PAGE] * PAGE + i % PAGE for i in range(slot + 1)]
    store.write(FINAL, torch.tensor(slots), given.features_BTF[row, : slot + 1])
    head_VD = target_parts().head_VD
    context = PagedContext(
        features=FeatureView(store, [FINAL]),
        target_logits=lambda x: x @ head_VD.T,
        vocab_size=VOCAB,
        num_pages=16,
        page_size=PAGE,
    )
    return BlockRunner(net, context)


@pytest.mark.parametrize("few", [None, FEW])
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_training_blocks_are_serving_blocks(method: str, few: int | None) -> None:
    """Logits and judgements of every draft, of blocks at drawn slots and at all of them."""
    head, given = fresh(method, draft_vocab_size=few), captured()
    assert isinstance(head.net, BlockHead)
    some = list(head.guesser.guesses(given, DEPTH))
    head.net.eval()
    for row, slot in ((0, 0), (1, 9), (1, LENGTH - DEPTH - 2)):
        every = list(head.guesser.guesses(given, DEPTH))
        text = given.tokens_BT[row].tolist()
        runner = served(fresh(method, draft_vocab_size=few).net, given, row, slot)  # type: ignore[arg-type]
        first, size = runner.net.shape.first_row, runner.net.shape.block_size
        context = [SpanLayout(start=0, num_tokens=slot + 1, page_table=TABLE)]
        blocks = [SpanLayout(start=slot + 1, num_tokens=size, page_table=TABLE)]
        tokens = [text[slot + 1], *[MASK] * (size - 1)]
        outputs = runner.run(BlockPass(context, blocks, tokens))[first:]
        before = torch.tensor(text[slot + 1 : slot + 1 + DEPTH])
        wanted = runner.net.after(runner.own_logits(outputs), outputs, before)
        sure = runner.net.sure(outputs, before)
        for depth, guess in enumerate(every):
            found = guess.logits(slot + 1)[row, slot]
            torch.testing.assert_close(found, wanted[depth], rtol=1e-4, atol=1e-4)
            assert (guess.sure_BT is None) == (sure is None) == (method == "dflash")
            if guess.sure_BT is not None and sure is not None:
                torch.testing.assert_close(guess.sure_BT[row, slot].sigmoid(), sure[depth])
    for drawn, guess in zip(some, every, strict=True):
        assert drawn.slots_N is not None and guess.slots_N is None
        assert len(drawn.slots_N) == round(0.3 * (LENGTH - 1 - DEPTH))
        torch.testing.assert_close(drawn.states_BTD, guess.states_BTD[:, drawn.slots_N])


@torch.no_grad()
def test_blocks_see_nothing_of_what_comes() -> None:
    """Later tokens and features, and those of the row's other blocks, change no guess of a slot."""
    head, given, slot = fresh("dflash"), captured(), 8
    head.net.eval()
    tokens, features = given.tokens_BT.clone(), given.features_BTF.clone()
    tokens[:, slot + 2 :] = 3
    features[:, slot + 1 :] = 0.5
    other = replace(given, tokens_BT=tokens, features_BTF=features)
    pairs = zip(head.guesser.guesses(given, DEPTH), head.guesser.guesses(other, DEPTH), strict=True)
    for one, two in pairs:
        assert torch.equal(one.states_BTD[:, slot], two.states_BTD[:, slot])
        assert not torch.allclose(one.states_BTD[:, slot + 1], two.states_BTD[:, slot + 1])


@torch.no_grad()
def test_each_part_of_a_run_has_slots_of_its_own() -> None:
    head = fresh("dflash")
    drawn = [
        next(head.guesser.guesses(captured(part=part), DEPTH)).slots_N.tolist()  # type: ignore[union-attr]
        for part in (0, 0, 1, 2)
    ]
    assert drawn[0] == drawn[1] and drawn[1] != drawn[2] != drawn[3]


def test_overlaps_are_chances_of_acceptance() -> None:
    """Of a reduced vocabulary too, where what the target gives to other tokens is lost."""
    torch.manual_seed(4)
    ids = torch.tensor([1, 4, 5, 11])
    wanted = Head(torch.randn(9, 6), torch.randn(13, 6))
    mine, whole = Head(torch.randn(9, 6), torch.randn(4, 6)), torch.randn(13, 6)
    target = (wanted.hidden @ wanted.weight.T).softmax(-1)
    draft = torch.zeros(9, 13).index_copy_(1, ids, (mine.hidden @ mine.weight.T).softmax(-1))
    found = distance(mine, wanted, 0.5, ids_V=ids)
    torch.testing.assert_close(found.overlap, torch.minimum(target, draft).sum(-1))
    over_four = distance(mine, Head(wanted.hidden, wanted.weight[ids]), 0.5)
    torch.testing.assert_close(found.loss, over_four.loss)
    draft = (mine.hidden @ whole.T).softmax(-1)
    found = distance(Head(mine.hidden, whole), wanted, 0.5)
    torch.testing.assert_close(found.overlap, torch.minimum(target, draft).sum(-1))


@pytest.mark.slow
def test_a_judgement_learns_what_becomes_of_drafts() -> None:
    """Of guesses that are right by half, it ends at their overlap; nothing else moves for it."""
    head, given = fresh("dspark", draft_vocab_size=FEW), captured()
    assert isinstance(head.net, DSpark) and head.net.confidence_head is not None
    judge, settings = head.net.confidence_head, settings_of("dspark").head
    assert settings is not None
    target_head_VD = target_parts().head_VD
    optimizer = torch.optim.Adam(judge.parameters(), lr=0.03)
    losses = []
    for _ in range(200):
        loss = divergence_loss(head.guesser, given, settings, target_head_VD, 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    errors, spread = [], []
    for depth, guess in enumerate(head.guesser.guesses(given, DEPTH)):
        states, slots = guess.within(LENGTH - 1 - depth)
        wanted = Head(given.final_BTD[:, 1 + depth :][:, slots].flatten(0, 1), target_head_VD)
        mine = Head(states.flatten(0, 1), guess.weight_VD)
        assert guess.added is not None
        added = Head(guess.added.hidden.flatten(0, 1), guess.added.weight)
        overlap = distance(mine, wanted, 0.5, added=added, ids_V=guess.ids_V).overlap
        assert guess.sure_BT is not None
        errors.append((guess.sure_BT.flatten().sigmoid() - overlap).abs().mean())
        spread.append(overlap.std())
    assert sum(errors) < 0.6 * sum(spread), (errors, spread)


def test_the_authors_loss_falls() -> None:
    """The cross entropy of the rows' own tokens, over a vocabulary that lacks some."""
    head, given = fresh("dflash", draft_vocab_size=FEW), captured()
    settings = settings_of("dflash").head
    assert settings is not None
    optimizer = torch.optim.Adam(head.net.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        loss = token_loss(head.guesser, given, settings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


def test_hidden_matrices_alone_are_trained_as_such() -> None:
    """Short embeddings, what they add to logits and the judgement are AdamW's."""
    head = fresh("dspark", draft_vocab_size=FEW)
    optimizer = Optimizer(head.net, settings_of("dspark"))
    hidden = {id(matrix) for matrix in optimizer._matrices}
    names = {name for name, p in head.net.named_parameters() if id(p) in hidden}
    assert "fc.weight" in names and "layers.1.self_attn.q_proj.weight" in names
    assert not [name for name in names if name.startswith(("markov", "confidence", "lm_head"))]


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 7, 8, 24, 36])
def test_layers_that_are_read_differ(layers: int) -> None:
    points = block_points(target_parts(layers))
    assert len(set(points)) == len(points) and max(points) < layers
    if layers == 36:
        assert points == (2, 10, 18, 26, 34), "the published default"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("own"), seed=2, num_hidden_layers=6)


def config_of(folder: Path, method: str, steps: int, *keys: str, more: str = "") -> Path:
    """A config for blocks on the tiny target, with further keys of its head."""
    path = write_config(folder, method, steps=steps, more=more)
    lines = ["depth = 3", "num_layers = 2", "mask_token_id = 1", "markov_rank = 8", *keys]
    path.write_text(path.read_text().replace("depth = 3", "\n".join(lines)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "form", "few"),
    [
        ("dflash", "own", 40),
        ("dflash", "sglang", None),
        ("dspark", "vllm", None),
        ("dspark", "speculators", 40),
        ("dspark", "sglang", None),
    ],
)
def test_from_prompts_to_drafts(
    method: str, form: str, few: int | None, target: Path, tmp_path: Path
) -> None:
    """The loss falls, the file is read, drafts change no greedy token, in int8 too."""
    keys = [] if few is None else [f"draft_vocab_size = {few}"]
    run = tmp_path / "run"
    done = train(config_of(tmp_path, method, 40, *keys), run, target, silent, export=form)
    assert {"tokens_a_step", "depth_1", "depth_3"} <= set(done.history[-1])
    assert done.history[-1]["loss"] < 0.9 * done.history[0]["loss"], done.history
    head = read_head(run / "export")
    assert method_of(head) == method
    names, config = set(head.tensors), head.config
    assert ("speculators_model_type" in config) == (form != "sglang")
    assert {"d2t", "t2d", "lm_head.weight"} & names == (
        set() if few is None else {"d2t", "t2d", "lm_head.weight"}
    )
    assert "embed_tokens.weight" not in names
    texts = []
    drafter = {"model": str(run / "export"), "num_speculative_tokens": 3}
    wanted = [
        SamplingParams(max_tokens=24, temperature=t, seed=5, detokenize=False, ignore_eos=True)
        for t in (0.0, 0.9)
    ]
    for speculative in (None, drafter, {**drafter, "quantization": "int8"}):
        with LLM(
            str(target), dtype="float32", batch_invariant=True, speculative_config=speculative
        ) as llm:
            prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
            found = llm.generate(prompts, wanted, use_tqdm=False)
        texts.append([one.outputs[0].token_ids for one in found])
        metrics = found[0].outputs[0].metrics
        assert metrics is not None and bool(sum(metrics.drafted_per_step)) == bool(speculative)
    assert texts[0][0] == texts[1][0] == texts[2][0]
    assert all(len(text) == 24 for both in texts for text in both)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_as_a_whole_one(method: str, target: Path, tmp_path: Path) -> None:
    """Steps after the last checkpoint are lost and done again: to the bit."""
    settings = replace(
        read_settings(config_of(tmp_path, method, 6)), target=str(target), checkpoint_minutes=60.0
    )
    folder = tmp_path / "run"
    prepare_data(settings, folder, silent)
    whole = Trainer(build_job(settings, folder), settings, tmp_path / "whole")
    for _ in range(6):
        whole.step()
    killed = Trainer(build_job(settings, folder), settings, folder)
    for step in range(5):
        killed.step()
        if step == 2:
            killed.save()
    again = Trainer(build_job(settings, folder), settings, folder)
    assert again.progress.step == 3
    for _ in range(3):
        again.step()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name


@pytest.mark.slow
def test_states_on_disk_give_the_same_losses(target: Path, tmp_path: Path) -> None:
    losses: list[dict[str, float]] = []
    for tables in ("", "\n[states]\nshard_megabytes = 1\n"):
        path = config_of(tmp_path, "dspark", 3)
        path.write_text(path.read_text() + tables)
        done = train(path, tmp_path / f"run{len(losses)}", target, silent)
        losses.append(done.history[-1])
    assert all(losses[0][key] == losses[1][key] for key in losses[0] if key != "minutes")


def test_a_checkpoint_of_another_size_is_refused(target: Path, tmp_path: Path) -> None:
    """Also where the sizes of blocks are the same."""
    train(config_of(tmp_path, "dspark", 1), tmp_path / "run", target, silent)
    path = config_of(tmp_path, "dspark", 2)
    path.write_text(path.read_text().replace("markov_rank = 8", "markov_rank = 9"))
    with pytest.raises(ConfigError, match=r"markov_w1.*allowed: the sizes of this config"):
        train(path, tmp_path / "run", target, silent)


def save_run(folder: Path, method: str, **changes: Any) -> None:
    head = fresh(method, **changes)
    assert isinstance(head.net, BlockHead)
    state = {
        "kind": method,
        "model": head.net.state_dict(),
        "shape": asdict(head.net.shape),
        "head": asdict(settings_of(method, **changes).head),  # type: ignore[arg-type]
    }
    folder.mkdir()
    run_folder.save(folder, 1, state)


def test_files_say_what_others_would_guess(tmp_path: Path) -> None:
    """How blocks are laid out, which layers are read, and that nothing in them is causal."""
    for method in METHODS:
        save_run(tmp_path / method, method)
        for form in ("own", "sglang"):
            folder = tmp_path / f"{method}-{form}"
            export_run(tmp_path / method, folder, verifier="some/target", form=form)
    own, flat = (
        {m: json.loads((tmp_path / f"{m}-{form}" / "config.json").read_text()) for m in METHODS}
        for form in ("own", "sglang")
    )
    for method, rows, drafts in (("dflash", DEPTH + 1, DEPTH), ("dspark", DEPTH, DEPTH)):
        said = own[method]
        assert said["block_size"] == flat[method]["block_size"] == rows
        assert said["sample_from_anchor"] == (method == "dspark")
        assert said["sliding_window_non_causal"] is True
        assert said["aux_hidden_state_layer_ids"] == [2, 3, 4, 5, 6]
        proposed = said["speculators_config"]["proposal_methods"][0]
        assert proposed["speculative_tokens"] == drafts
        assert said["speculators_config"]["verifier"]["name_or_path"] == "some/target"
        layers = said["transformer_layer_config"]
        assert layers["layer_types"] == flat[method]["layer_types"] == ["full_attention"] * 2
        assert flat[method]["num_target_layers"] == 8
    assert flat["dflash"]["architectures"] == ["DFlashDraftModel"]
    assert flat["dflash"]["dflash_config"] == {
        "mask_token_id": MASK,
        "target_layer_ids": [1, 2, 3, 4, 5],
    }
    assert flat["dspark"]["architectures"] == ["Qwen3DSparkModel"]
    assert flat["dspark"]["target_layer_ids"] == [1, 2, 3, 4, 5]
    for said in (own["dspark"], flat["dspark"]):
        assert (said["markov_rank"], said["markov_head_type"]) == (6, "vanilla")
        assert said["enable_confidence_head"] and said["confidence_head_with_markov"]
    stored = load_file(tmp_path / "dspark-own" / "model.safetensors")
    assert "markov_head.markov_w2.weight" in stored and "confidence_head.proj.bias" in stored


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    few = {"draft_vocab_size": FEW}
    save_run(tmp_path / "run", "dflash", **few)
    with pytest.raises(ConfigError, match=r"--format: got 'sglang, of a head that drafts 20 of 50"):
        export_run(tmp_path / "run", tmp_path / "to", verifier="t", form="sglang")
    with pytest.raises(ConfigError, match="embedding"):
        export_run(tmp_path / "run", tmp_path / "to", verifier="t", embedding=True)
    parts, ids = target_parts(), torch.arange(VOCAB)
    with pytest.raises(ConfigError, match=r"head\.mask_token_id"):
        fresh_head(parts, settings_of("dflash", mask_token_id=VOCAB), ids)
    for method, stage, field in (
        ("dflash", Stage(until=1.0, length=4), r"stages\.length.*at least 6"),
        ("dspark", Stage(until=1.0, length=16, loss="tokens"), r"stages\.loss.*judge"),
    ):
        with pytest.raises(ConfigError, match=field):
            fresh_head(parts, replace(settings_of(method), stages=(stage,)), ids)
    shortest = replace(settings_of("dflash"), stages=(Stage(until=1.0, length=DEPTH + 2),))
    guesser = fresh_head(parts, shortest, ids).guesser
    assert isinstance(guesser, BlockGuesser)
    given = captured()
    cut = replace(
        given,
        tokens_BT=given.tokens_BT[:, : DEPTH + 2],
        features_BTF=given.features_BTF[:, : DEPTH + 2],
        final_BTD=given.final_BTD[:, : DEPTH + 2],
    )
    assert shortest.head is not None
    assert divergence_loss(guesser, cut, shortest.head, parts.head_VD, 0.5).isfinite()


@pytest.mark.parametrize("method", METHODS)
def test_the_commands_say_what_they_train(method: str) -> None:
    said = CliRunner().invoke(app, ["train", method, "--help"])
    assert said.exit_code == 0 and "head" in said.output and "--export" in said.output
