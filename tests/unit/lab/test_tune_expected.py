"""Candidates of a search come from a plan where the model and its device are known."""

from collections import Counter

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.lint.fit import Machine
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings
from foretoken.lab.tune.candidates import Expectation, expect, offered, settings_of
from foretoken.lab.tune.search import Search, SearchState, stand
from foretoken.lab.tune.server_command import ServerCommand
from foretoken.lab.tune.settings import OFF, Question, Setting
from foretoken.lab.tune.visits import LoadSeen, Visit

LOADS, LENGTHS = (1, 8, 64), (1, 2, 3, 5, 8)
MODEL = "meta-llama/Llama-3.1-70B-Instruct"
DRAFTS = ("draft_model:meta-llama/Llama-3.2-1B-Instruct", "draft_model:Qwen/Qwen2.5-0.5B-Instruct")


def hoped(text: str, *named: str, device: str = "h100-sxm") -> Expectation:
    command = ServerCommand.parse(text)
    return expect(
        command, offered(command, named), Machine(device=device, count=4),
        loads=LOADS, lengths=LENGTHS, may_add=not named,
    )  # fmt: skip


def test_gains_and_order_are_the_plans() -> None:
    found = hoped(f"vllm serve {MODEL} --tensor-parallel-size 4", "ngram", DRAFTS[0])
    settings = {"target": MODEL, "count": 4, "workload": "mixed", "context": 4096}
    plan = build_plan(
        PlanSettings.from_mapping(
            {**settings, "draft": DRAFTS[0].partition(":")[2], "method": "draft_model"}
        )
    )
    name = "draft_model:Llama-3.2-1B-Instruct"
    assert list(found.drafters) == [name, "ngram"], "what promises most comes first"
    gains = {(drafter, length): own for drafter, length, own in found.gains}
    for place, load in enumerate(LOADS):
        planned = plan.prediction.at(load)
        assert gains[name, 3][place] == pytest.approx(planned.gain(3).middle)
        assert planned.best_k in found.best[name]
    assert set(found.best[name]) - set(LENGTHS), "a length that nobody would have tried"


def test_what_needs_nothing_is_added_and_what_promises_more_is_named() -> None:
    command = ServerCommand.parse(f"vllm serve {MODEL} -tp 4")
    assert list(offered(command, ())) == ["ngram"]
    found = hoped(f"vllm serve {MODEL} -tp 4")
    assert set(found.drafters) == {"ngram", "suffix"}
    [more] = found.said
    assert more.startswith("dspark promises more") and "--drafter dspark:MODEL" in more
    assert set(hoped(f"vllm serve {MODEL} -tp 4", "ngram").drafters) == {"ngram"}


def test_unknown_models_and_devices() -> None:
    found = hoped("vllm serve org/nobody-knows")
    assert found.gains == () and list(found.drafters) == ["ngram"]
    assert "org/nobody-knows" in found.said[0]
    found = hoped(f"vllm serve {MODEL} -tp 4", "draft_model:org/nobody", "ngram")
    assert {name for name, *_ in found.gains} == {"ngram"}
    assert "nothing is expected of draft_model:nobody" in found.said[0]
    with pytest.raises(ConfigError, match="h100-sxn"):
        hoped(f"vllm serve {MODEL}", device="h100-sxn")


def test_a_search_starts_with_what_promises_most() -> None:
    command = ServerCommand.parse(f"vllm serve {MODEL} -tp 4")
    found = hoped(f"vllm serve {MODEL} -tp 4", "ngram", *DRAFTS)
    settings = settings_of(command, tuple(found.drafters), LENGTHS, found.best)
    assert Setting("draft_model:Llama-3.2-1B-Instruct", (4,)) in settings

    def begins(expected: tuple[tuple[str, int, tuple[float, ...]], ...]) -> SearchState:
        question = Question(loads=LOADS, settings=settings, schedule="falling", expected=expected)
        seen = tuple(LoadSeen(load=n, pace_s=0.02, requests=16, seconds=8.0) for n in LOADS)
        plain = Visit(setting=OFF, turn=0, start_s=40.0, seconds=64.0, loads=seen)
        return stand(Search(question=question, budget_s=3600.0), [plain])

    told, blank = begins(found.gains), begins(())
    assert told.chosen.is_off and blank.chosen.is_off, "only what was started may be chosen"
    assert told.missing > blank.missing, "what is promised is what is missing"
    shares = Counter(setting.drafter for setting in told.kept)
    [(most, own)] = shares.most_common(1)
    assert most == "draft_model:Llama-3.2-1B-Instruct" and own > len(told.kept) / 2, shares
    assert len(set(Counter(setting.drafter for setting in blank.kept).values())) == 1


@pytest.mark.slow
def test_the_command_says_what_it_expects() -> None:
    arguments = [f"vllm serve {MODEL} -tp 4", "--workload", "demo", "--dry-run", "--loads", "1,64"]
    plain = CliRunner().invoke(app, ["lab", "tune", *arguments])
    assert plain.exit_code == 0 and "expected" not in plain.output
    told = CliRunner().invoke(app, ["lab", "tune", *arguments, "--device", "h100", "--count", "4"])
    assert told.exit_code == 0, told.output
    assert "expected, not measured: suffix" in told.output and "dspark promises more" in told.output
    assert told.output.count("num_speculative_tokens") > plain.output.count("num_spec")
