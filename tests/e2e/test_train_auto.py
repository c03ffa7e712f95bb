"""`foretoken train auto` on a tiny target: from prompts to a measured drafter, and after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams
from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.testing import write_tiny_llama
from foretoken.training.auto import timetable
from foretoken.training.auto.run import DRAFTER, FILE, REPORT, TRAINED, Assignment, AutoRun
from tests.unit.training.own_runs import silent, write_prompts

pytestmark = pytest.mark.slow
HOURS = 0.004


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, so that every kind of head competes; no tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("auto"), seed=2, num_hidden_layers=8)


def parts(out: Path) -> list[str]:
    lines = (out / FILE).read_text().splitlines()
    return [part for line in lines if (part := json.loads(line)["part"]) != "beat"]


class Counting:
    """A clock that goes on by being read, so that nothing here depends on how fast a machine is."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        self.at += 0.02
        return self.at


def test_from_prompts_to_a_drafter_that_is_measured(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several compete; the drafter that the report names drafts, and changes no token."""
    monkeypatch.setattr(timetable, "LEAST_STEPS", 0)
    monkeypatch.setattr(timetable, "JUDGING_SHARE", 1e9)
    prompts, out = write_prompts(tmp_path, count=40), tmp_path / "run"
    asked = Assignment(target=str(target), prompts=str(prompts), hours=HOURS, out=out)
    outcome = AutoRun(asked, silent, Counting()).run()
    report = json.loads((out / REPORT).read_text())
    assert {"off", "ngram", TRAINED} <= set(report["judgement"]["paces"])
    assert outcome.steps > 0 and (out / DRAFTER / "config.json").is_file()
    done = parts(out)
    assert done[:4] == ["begun", "rates", "timetable", "data"] and done[-2:] == ["winner", "worth"]
    assert {"judged 0", "judged 1"} <= set(done) and len(report["ranking"]) == 7
    assert report["kind"] == report["ranking"][0][0]
    params = SamplingParams(max_tokens=24, temperature=0.0, detokenize=False, ignore_eos=True)
    texts = []
    for speculative in (None, report["config"]):
        with LLM(
            str(target), dtype="float32", batch_invariant=True, speculative_config=speculative
        ) as llm:
            [found] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
            texts.append(found.outputs[0].token_ids)
    assert texts[0] == texts[1]
    command = ["train", "auto", str(target), str(prompts), "--hours", str(HOURS)]
    said = CliRunner().invoke(app, [*command, "--out", str(out), "--json"])
    assert said.exit_code in (0, 1, 6), said.output
    assert json.loads(said.stdout) == report and parts(out) == done


def test_a_killed_run_goes_on(target: Path, tmp_path: Path) -> None:
    """kill -9 after each of some parts; no part is done twice."""
    prompts, out = write_prompts(tmp_path, count=40), tmp_path / "run"
    command = [sys.executable, "-m", "foretoken", "train", "auto", str(target), str(prompts)]
    for part in ("rates", "data"):
        process = subprocess.Popen(
            [*command, "--hours", str(2 * HOURS), "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(os.environ),
        )
        try:
            deadline = time.monotonic() + 120
            while not ((out / FILE).exists() and part in parts(out)):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    asked = Assignment(target=str(target), prompts=str(prompts), hours=2 * HOURS, out=out)
    outcome = AutoRun(asked, silent).run()
    done = parts(out)
    assert len(done) == len(set(done)) and done[-1] == "worth"
    assert outcome.folder.is_dir() and outcome.steps > 0


def test_a_folder_of_another_run_is_refused(target: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, count=40)
    (tmp_path / FILE).write_text(
        json.dumps({"part": "begun", "at": 0, "found": {"target": "t", "prompts": "p"}}) + "\n"
    )
    asked = Assignment(target=str(target), prompts=str(prompts), hours=1.0, out=tmp_path)
    with pytest.raises(ConfigError, match="--out"):
        AutoRun(asked, silent)


def test_too_few_prompts_are_refused(target: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, count=5)
    asked = Assignment(target=str(target), prompts=str(prompts), hours=1.0, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="5 different prompts"):
        AutoRun(asked, silent).run()
