"""What can be trained and exported, what ships, and what it is worth."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner, Result

import foretoken
from foretoken.cli.app import app
from foretoken.config import method_registry
from foretoken.config.method_registry import DraftingMethod, register_method
from foretoken.errors import ConfigError
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.layers import Eagle3Shape
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.folder import method_of, read_head
from foretoken.proposers.heads.parts import HeadShape
from foretoken.testing import write_tiny_llama
from foretoken.text.packaged import PATH, Kind, packaged_texts
from foretoken.training.evaluation import (
    Accepted,
    DecodingStep,
    EvalPlan,
    accepted,
    expected_speedups,
    measure_worth,
    open_pair,
)
from foretoken.training.heads import mlp
from foretoken.training.heads.kind import HeadKind, Layout, find_kind, require_form
from foretoken.training.llama import read_exported
from foretoken.training.runs import train
from foretoken.training.trained_kinds import Trained, trained_kinds
from foretoken.types import CompletionOutput, RequestMetrics
from tests.e2e.heads import write_head
from tests.unit.training.own_runs import silent, write_config
from tools.python_text.stdlib import HELD_OUT

KIND = mlp.KIND
"""What the record below names: this module trains toys, as MLP speculators are trained."""

TOY = DraftingMethod(
    name="toy",
    summary="a method of a package of its own",
    source="this test",
    drafts_with="head",
    extras=(Trained(kind="toy", command="toy", summary="a toy", code=__name__),),
)


@pytest.mark.parametrize("word", trained_kinds())
def test_every_record_names_a_module_that_trains(word: str) -> None:
    assert isinstance(find_kind(word), HeadKind)


def test_a_kind_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is read; it learns, is measured and written."""
    monkeypatch.setattr(method_registry, "_table", dict(method_registry._table))
    target = write_tiny_llama(tmp_path / "target", seed=2)
    with pytest.raises(ConfigError, match=r"head\.kind: got 'toy'"):
        train(write_config(tmp_path, "toy", steps=2), tmp_path / "run", target, silent)
    register_method(TOY)
    config = write_config(tmp_path, "toy", steps=2)
    done = train(config, tmp_path / "run", target, silent, kind="toy", export="own")
    assert done.step == 2 and "depth_3" in done.history[-1]
    assert method_of(read_head(tmp_path / "run" / "export")) == "mlp", "written as MLPs are"


def test_a_registered_kind_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_registry, "_table", dict(method_registry._table))
    assert said("toy").exit_code == 2 and "No such command 'toy'" in said("toy").output
    register_method(TOY)
    assert "Train a toy." in said("toy", "--help").output
    assert "Train a toy." in said("--help").output


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("parallel", "pard, which train parallel"),
        ("ngram", "ngram has no weights"),
        ("mtp", "the record of mtp names no training"),
    ],
)
def test_a_method_without_a_command_says_why(word: str, instead: str) -> None:
    result = said(word)
    assert result.exit_code == 2 and f"got '{word}'; allowed: " in result.output
    assert instead in result.output


def said(*words: str) -> Result:
    return CliRunner().invoke(app, ["train", *words])


PACKAGED = Path(foretoken.__file__).parent / "packaged"
LIMITS = {"demo": 22_000_000, "demo-draft": 4_000_000}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_packaged_model_is_a_plain_llama(name: str) -> None:
    folder = PACKAGED / name
    assert (folder / "model.safetensors").stat().st_size <= LIMITS[name]
    assert "Held out" in (folder / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mine = read_exported(folder)
    (prompt,) = packaged_texts("code", 1)
    tokens = tokenizer(prompt.text, return_tensors="pt")["input_ids"][:, :48]
    assert tokens[0, 0] == tokenizer.bos_token_id == 0
    with torch.inference_mode():
        logits = mine.logits(mine.hidden(tokens))
        assert (theirs(tokens).logits - logits).abs().max() < 1e-3
        nats = F.cross_entropy(logits[0, :-1], tokens[0, 1:]).item()
    assert nats < 5.5, "no better than a table of word counts"


def test_draft_and_target_fit() -> None:
    target, draft = (json.loads((PACKAGED / n / "config.json").read_text()) for n in LIMITS)
    assert (PACKAGED / "demo" / "tokenizer.json").read_bytes() == (
        PACKAGED / "demo-draft" / "tokenizer.json"
    ).read_bytes()
    assert target["vocab_size"] == draft["vocab_size"] == 8000
    assert target["max_position_embeddings"] == draft["max_position_embeddings"] >= 2048
    assert target["num_hidden_layers"] >= 8 * draft["num_hidden_layers"]


def test_packaged_prompts_are_of_held_out_modules_and_texts_of_none() -> None:
    modules = {
        kind: {name.removeprefix("edit ").split(" ")[-1].split(":")[0] for name, _ in found}
        for kind, found in ((kind, packaged_texts(kind)) for kind in get_args(Kind))
    }
    assert modules["code"] | modules["edit"] <= set(HELD_OUT)
    assert modules["text"] and not modules["text"] & set(HELD_OUT)
    assert [len(packaged_texts(kind)) for kind in get_args(Kind)] == [200, 48, 128]
    assert [one.text for one in packaged_texts("code", 2)] == [
        one.text for one in packaged_texts("code")[:2]
    ]
    with pytest.raises(ConfigError, match="count: got 201; allowed: at most 200"):
        packaged_texts("code", 201)
    assert "Python Software Foundation" in PATH.with_suffix(".LICENSE").read_text("utf-8")


def _output(drafted: tuple[int, ...], kept: tuple[int, ...]) -> CompletionOutput:
    metrics = RequestMetrics(
        queued_s=0, first_token_s=0, finished_s=1, num_preemptions=0, num_cached_tokens=0,
        drafted_per_step=drafted, accepted_per_step=kept,
    )  # fmt: skip
    return CompletionOutput(index=0, text="", token_ids=(), metrics=metrics)


def test_acceptance_leaves_out_what_was_not_drafted() -> None:
    """Steps without drafts do not count; a short draft says nothing about later positions."""
    found = accepted([_output((3, 0, 3), (3, 0, 1)), _output((1, 3), (1, 0))])
    assert found.num_verifications == 4
    assert found.by_position == pytest.approx((3 / 4, 1 / 3, 1 / 3))
    assert found.lengths == pytest.approx((1.75, 1.75 + 1 / 3, 1.75 + 2 / 3))


def test_nothing_drafted_is_length_one() -> None:
    assert accepted([_output((0,), (0,))]).lengths == (1.0,)


def test_speedups_follow_from_acceptance_and_cost() -> None:
    costs = [
        DecodingStep(drafts=k, total_s=s, drafting_s=0, verifying_s=0)
        for k, s in enumerate((2.0, 2.5, 4.0))
    ]
    acceptance = Accepted(by_position=(0.5, 0.5), lengths=(1.5, 2.0), num_verifications=9)
    assert expected_speedups(acceptance, costs) == pytest.approx({1: 1.2, 2: 1.0})


@pytest.mark.parametrize("name", ["draft", "mlp"])
def test_a_pair_is_measured(name: str, tmp_path: Path) -> None:
    """The target as its own draft is always right; a random head is not; costs of every k."""
    target = write_tiny_llama(tmp_path / "target", seed=1)
    drafter = target if name == "draft" else write_head(tmp_path / name, name, target)
    plan = EvalPlan(temperatures=(0.0, 1.0), max_tokens=20, cost_repeats=1)
    engine = open_pair(str(target), str(drafter), None if name == "draft" else name, plan)
    worth = measure_worth(engine, [[5, 6, 7], [9, 8]], plan)
    most = 8 if name == "draft" else 3
    assert [cost.drafts for cost in worth.costs][:2] == [0, 1] and len(worth.costs) <= most + 1
    greedy = worth.acceptance["0"]
    assert len(greedy.by_position) == most
    if name == "draft":
        assert greedy.by_position == (1.0,) * 8 and greedy.lengths[-1] == 9.0
    else:
        assert greedy.by_position[-1] < 1.0
    assert set(asdict(worth)) == {"acceptance", "costs", "speedups"}
    assert all(cost.total_s > cost.drafting_s >= 0 for cost in worth.costs)


def test_plans_are_checked() -> None:
    with pytest.raises(ConfigError, match="--temperature"):
        EvalPlan(temperatures=())
    with pytest.raises(ConfigError, match="--max-tokens"):
        EvalPlan(max_tokens=1)


LAYER = HeadShape(
    vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=6, max_position_embeddings=64,
    rms_norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip
SHAPE = Eagle3Shape(layer=LAYER, draft_vocab_size=20, target_hidden_size=24)


def layout_of(state: dict[str, Any], form: str | None = None) -> Layout:
    layout = find_kind(state["kind"]).layout
    assert layout is not None
    return layout(state, "t", form)


@pytest.mark.parametrize("form", ["speculators", "vllm", "eagle"])
def test_an_eagle3_run_is_exported_as_asked(form: str, tmp_path: Path) -> None:
    """Trained, written and read back: the same network whatever the format."""
    target = write_tiny_llama(tmp_path / "target", seed=2, num_hidden_layers=8)
    config = write_config(tmp_path, "eagle3", steps=2)
    config.write_text(config.read_text().replace("depth = 3", "depth = 3\ndraft_vocab_size = 40"))
    train(config, tmp_path / "run", target, silent, export=form)
    folder = tmp_path / "run" / "export"
    head = read_head(folder)
    assert method_of(head) == "eagle3"
    known = json.loads((folder / "config.json").read_text())
    names = set(load_file(folder / "model.safetensors"))
    assert {"d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"} <= names
    assert ("embed_tokens.weight" in names) == (form == "speculators")
    assert ("midlayer.self_attn.q_proj.weight" in names) == (form == "eagle")
    if form == "eagle":
        assert (
            known["architectures"] == ["LlamaForCausalLMEagle3"] and known["draft_vocab_size"] == 40
        )
    else:
        assert known["speculators_config"]["verifier"]["name_or_path"] == str(target)
    shape = json.loads((target / "config.json").read_text())
    facts = replace(
        LAYER, vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], num_hidden_layers=8
    )
    loaded = Eagle3.read(head, facts)
    assert loaded.points == (2, 4, 5)
    ids = loaded.target_ids
    stored = load_file(folder / "model.safetensors")["t2d"]
    assert stored.nonzero().flatten().tolist() == ids.tolist() and len(ids) == 40


@pytest.mark.parametrize("kind", trained_kinds())
def test_a_format_that_a_kind_has_not_is_refused(kind: str) -> None:
    for form in ("own", "speculators", "vllm", "sglang", "eagle", "gguf"):
        if form in ("own", *trained_kinds()[kind].formats):
            require_form(kind, form)
        else:
            with pytest.raises(ConfigError, match=f"--format: .*for {kind}"):
                require_form(kind, form)


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_every_kind_can_be_exported_at_the_end_of_its_run(kind: str, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target", seed=2)
    train(write_config(tmp_path, kind, steps=2), tmp_path / "run", target, silent, export="own")
    assert method_of(read_head(tmp_path / "run" / "export")) == kind


def test_a_format_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="export"):
        train(write_config(tmp_path, "mlp"), tmp_path / "run", tmp_path, silent, export="eagle")
    assert not (tmp_path / "run").exists()


def test_variants_that_a_format_cannot_hold_are_refused() -> None:
    """EAGLE-3's own has one plain layer; vLLM's EAGLE no bias; anchored masks are ours alone."""
    for changes in ({"fc_norm": True}, {"layer": replace(LAYER, num_hidden_layers=2)}):
        shape = replace(SHAPE, **changes)
        state = {"kind": "eagle3", "model": Eagle3(shape).state_dict(), "shape": asdict(shape)}
        with pytest.raises(ConfigError, match=r"fc_norm|2 layers"):
            layout_of(state, "eagle")
    shape = replace(SHAPE, parallel=True, anchored=True, mask_depths=2)
    state = {"kind": "peagle", "model": Eagle3(shape).state_dict(), "shape": asdict(shape)}
    with pytest.raises(ConfigError, match="anchored"):
        layout_of({**state, "head": {}}, "vllm")
    assert layout_of({**state, "head": {}}, "own").tensors
    for bias in (True, False):
        net = Eagle(LAYER, fc_bias=bias)
        state = {"kind": "eagle", "model": net.state_dict(), "shape": asdict(LAYER)}
        assert layout_of(state).config["bias"] is bias
        if bias:
            with pytest.raises(ConfigError, match="bias"):
                layout_of(state, "vllm")
        else:
            assert "fc.bias" not in layout_of(state, "vllm").tensors
    whole = replace(SHAPE, draft_vocab_size=50)
    state = {"kind": "eagle3", "model": Eagle3(whole).state_dict(), "shape": asdict(whole)}
    assert torch.all(layout_of(state, "eagle").tensors["t2d"])
