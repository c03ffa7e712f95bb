"""What `foretoken lab` and `foretoken train` answer to mistakes: a line that says what to type."""

import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from foretoken import LLM
from foretoken.cli.app import app
from foretoken.errors import CheckpointError, ConfigError
from foretoken.lab.records.run_files import write_json
from foretoken.training.llama import read_llama
from tests.mock_server.generator import MockLaw
from tests.mock_server.server import MockServer, mock_running
from tests.unit.lab.summaries import ab

ARMS = "--baseline http://127.0.0.1:9 --candidate http://127.0.0.1:9 --workload prompts.txt"
FORCED = "--baseline http://a --candidate 'x {port} {rate}' --workload prompts.txt"
ONE = "lab ab --candidate http://127.0.0.1:9 --workload prompts.txt"
CONFIG = """
target = "demo"
max_steps = 1
[data]
prompts = "prompts.txt"
held_out = 2
answer_tokens = 4
[head]
kind = "eagle"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, workloads, policies and configs, most of them wrong."""
    root = tmp_path_factory.mktemp("mistakes")
    files: dict[str, str] = {
        "prompts.txt": "one\ntwo\nthree\n",
        "empty.txt": "",
        "broken.jsonl": '{"prompt": "a"}\n{"pro',
        "chat.json": '[{"conversations": [{"from": "gpt", "value": "x"}]}]',
        "list.yaml": "- 1\n",
        "bad.yaml": "a: [1\n",
        "policy.yaml": "ruls: {}\n",
        "number.yaml": "rules: 5\n",
        "other.json": "{}",
        "model/config.json": "{cut",
        "unfinished/requests.jsonl": "{}\n",
        "resumed/config.json": "{cut",
        "resumed/requests.jsonl": "{}\n",
        "eagle.toml": CONFIG,
        "untargeted.toml": CONFIG.replace('target = "demo"', ""),
        "misspelled.toml": CONFIG.replace("max_steps", "max_step"),
        "headless.toml": 'target = "demo"\n',
        "broken.toml": "a = [",
        "few.toml": CONFIG.replace("prompts.txt", "empty.txt"),
        "odd.toml": CONFIG.replace("eagle", "draft") + "[shape]\nheads = 5\n",
        "row.toml": CONFIG + '[[stages]]\nuntil = 1.0\nlength = 512\nrows = "txt"\n',
        "torn/step-0000001.pt": "PK",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "binary.toml").write_bytes(b"\xff\xfe")
    write_json(root / "good/summary.json", ab())
    summary = json.loads((root / "good/summary.json").read_text())
    write_json(root / "old/summary.json", {**summary, "schema": 99})
    write_json(root / "newer/summary.json", {**summary, "gain": 1})
    (root / "cut").mkdir()
    (root / "cut/summary.json").write_text((root / "good/summary.json").read_text()[:300])
    (root / "foreign").mkdir()
    torch.save({"a": 1}, root / "foreign/step-0000001.pt")
    return root


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def answer(command: str, exit_code: int) -> str:
    """The last line on stderr; an error of ours is one line, and no mistake ends in a traceback."""
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == exit_code, (result.output, result.exception)
    last: str = result.stderr.strip().splitlines()[-1]
    assert last.startswith(("foretoken: ", "Error: ")), result.stderr
    return last


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ab --workload prompts.txt", "--candidate: got None; allowed: a URL such as http://"),
        ("ab --candidate http://127.0.0.1:9", "--workload: got None; allowed: a file of prompts"),
        ("ab --candidate u --wrkload x", "--workload"),
        ("ab --candidate 127.0.0.1:9 --workload prompts.txt", "a URL such as http://127.0.0.1:8000"),
        ("ab --candidate http://[::1 --workload prompts.txt", "a URL such as http://127.0.0.1"),
        ("ab --candidate 'x {port} \"' --workload prompts.txt --out x1", "in a shell first"),
        ("ab --candidate {} --workload prompts.txt", "one of the two: a URL"),
        ("ab --candidate http://a --workload nowhere.txt", "--workload: got 'nowhere.txt'"),
        ("ab --candidate http://a --workload empty.txt", "at least one request"),
        ("ab --candidate http://a --workload broken.jsonl --strict", "line 2.*without --strict"),
        ("ab --candidate http://a --workload chat.json", "no turn of a human"),
        ("ab list.yaml", "CONFIG: got 'list.yaml'; allowed: .*keys and values"),
        ("ab bad.yaml", r"CONFIG bad\.yaml: got .*; allowed: YAML"),
        (f"ab {ARMS} --set candidate.name=off", "another than baseline.name"),
        (f"ab {ARMS} --out resumed", "--out: got 'resumed'; .*--resume, which goes on"),
        (f"ab {ARMS} --out resumed --resume", "another --out"),
        (f"ab {ARMS} --grid k", "--grid: got 'k'; allowed: .*k=1,3,5"),
        (f"ab {ARMS} --grid k=1", "--grid k: .*{k} in the candidate's command"),
        (f"ab {ARMS} --grid lod.rate=1", "--grid lod.rate: .*did you mean 'load'"),
        (f"ab {ARMS} --force-acceptance 0.5",
         "--candidate: got 'http://127.0.0.1:9'; allowed: .*{rate}"),
        (f"ab {FORCED} --force-acceptance 2", "--force-acceptance: .*from 0 to 1"),
        (f"ab {FORCED} --force-acceptance 0 --set speedup.least=2", "--set: .*gets no verdict"),
        (f"ab {ARMS} --minutes 5 --blocks 3", "--minutes: got 5.0; allowed: none beside --blocks"),
        ("ab --candidate http://a --workload prompts.txt --grid temperature=0,1",
         "--baseline: got None; allowed: a second server"),
        ("audit http://a --baseline http://b --out prompts.txt",
         "--out: got 'prompts.txt'; allowed: a folder"),
        ("decide", "RUNS: got None; .*`foretoken lab ab --out FOLDER`"),
        ("decide nowhere", "RUNS: got 'nowhere'; .*`foretoken lab ab --out FOLDER`"),
        ("decide unfinished", "to its end with --resume"),
        ("decide cut", "RUNS: got 'cut/summary.json'; allowed: a whole summary"),
        ("decide old", "schema 99.*this version of Foretoken"),
        ("decide newer", "did you mean 'gains'.*another version"),
        ("decide good --policy nowhere", "--policy: got 'nowhere'"),
        ("decide good --policy policy.yaml", "ruls: .*did you mean 'rules'"),
        ("decide good --policy number.yaml", "rules: got 5; allowed: .*a mapping"),
        ("decide good --set speedup.weight=mst", "did you mean 'must'"),
        ("decide good --html .", "--html: got '.'; allowed: a place to write to"),
        ("decide good --fit", "RUN: got 'good'; allowed: a folder with requests.jsonl"),
        ("decide good --k none", "--k: got 'none'; allowed: whole numbers above 0"),
        ("plan", "TARGET: got None; .*`foretoken lab plan qwen3-8b`"),
        ("plan demo -k 900", "-k: got 900; allowed: an integer from 0 to 128"),
        ("plan demo --method draft_model", "--draft: got None; .*another method"),
        ("plan demo --device h100-sxn", "--device: .*did you mean 'h100-sxm'"),
        ("plan demo --bandwidth-gb-s -3", "--bandwidth-gb-s: got -3.0; allowed: a number >= 0"),
        ("plan demo --config bad.yaml", "--config bad.yaml: "),
        ("lint nowhere.sh", "INPUTS: got 'nowhere.sh'; .*in one pair of quotes"),
        ("lint empty.txt", "INPUTS: got 'empty.txt'; .*vllm serve MODEL"),
        ("record http://a --out good", "--out: got 'good'; allowed: a file to append to"),
        ("record http://a --port 99999", "--port: .*or 0 for any"),
    ],
)  # fmt: skip
def test_mistakes_in_the_lab(command: str, words: str) -> None:
    code = 5 if "--out x1" in command else 2
    assert _holds(answer(f"lab {command}", code), words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--load open:3", "--load: got 'open:3'; .*such as closed:8"),
        ("--load closed:inf", "--load: .*numbers above 0"),
        ("--load closed:1.5", "--load: .*such as closed:8"),
        ("--slo ttf=1", "--slo: .*did you mean 'ttft'"),
        ("--slo ttft", "--slo: got 'ttft'; allowed: .*ttft=0.2"),
        ("--temperatures hot", "--temperatures: got 'hot'; allowed: numbers between commas"),
        ("--temperatures=-1", "temperatures: .*numbers >= 0"),
        ("--max-tokens 0", "--max-tokens"),
        ("--set load", "--set: got 'load'; allowed: KEY=VALUE"),
        ("--set load.kind=open --set load.kind.x=1", "--set load.kind.x: .*below kind"),
        ("--set load.concurency=8", "did you mean 'concurrency'"),
        ("--set candidate.api_key_env=NO_KEY --out x2", "api_key_env: .*export NO_KEY=KEY"),
        ("--set workload.category=x", "workload.category: .*no request has a class"),
        ("--load trace --out x3", "another --load: closed:8"),
    ],
)
def test_mistakes_in_the_options_of_a_measurement(option: str, words: str, mock: str) -> None:
    assert _holds(answer(f"lab ab --candidate {mock} --workload prompts.txt {option}", 2), words)


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    with mock_running(MockServer(MockLaw(step_s=0.002, prefill_s=0.001, seed=1))) as url:
        yield url


@pytest.mark.slow
def test_a_server_that_is_not_there(mock: str) -> None:
    """The folder that a try without a server leaves is no run: the next may use it."""
    dead = answer(f"{ONE} --out tried", 5)
    assert _holds(dead, "127.0.0.1:9.*start the server first, or give another URL")
    again = f"lab ab --candidate {mock} --workload prompts.txt --out tried --blocks 1 --requests 1"
    assert CliRunner().invoke(app, shlex.split(again)).exit_code == 0
    assert _holds(answer(again, 2), "--out: got 'tried'; .*--resume")
    other = f"lab ab --candidate {mock} --workload prompts.txt --set candidate.model=mok --out x4"
    assert _holds(answer(other, 2), "model: got 'mok'; .*did you mean 'mock'")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("eagle nowhere.toml", "CONFIG: got 'nowhere.toml'; .*docs/training.md"),
        ("eagle broken.toml", "CONFIG: got 'broken.toml'; allowed: a valid TOML file"),
        ("eagle binary.toml", "CONFIG: got 'binary.toml'; allowed: a valid TOML file"),
        ("eagle headless.toml", r"CONFIG: .*\[head\] and \[data\]"),
        ("eagle misspelled.toml", "config.max_step: .*did you mean 'max_steps'"),
        ("eagle untargeted.toml", "config.target: got None; .*--target"),
        ("medusa eagle.toml", "this one is for `foretoken train eagle eagle.toml`"),
        ("draft odd.toml", "shape.heads: got 5; allowed: a divisor"),
        ("eagle row.toml", "stages.rows: .*did you mean 'text'"),
        ("eagle few.toml", "data.prompts: got 'empty.txt with 0 prompts'; .*data.held_out"),
        ("eagle eagle.toml --export vlm", "--export: .*did you mean 'vllm'"),
        ("eagle eagle.toml --out prompts.txt", "--out: got 'prompts.txt'; allowed: a folder"),
        ("export nowhere to", "RUN: got 'nowhere'; .*as `foretoken train` writes"),
        ("export torn to", "torn/step-0000001.pt: .*delete it to go on"),
        ("export foreign to", "RUN: got 'foreign'; .*as `foretoken train` writes"),
        ("eval demo demo-draft --out nowhere/x", "--out: got 'nowhere/x'; allowed: a file"),
        ("eval demo demo-draft --prompts empty.txt", "--prompts: got 'empty.txt'"),
        ("eval demo demo-draft --max-tokens 1", "--max-tokens: got 1; allowed: an integer >= 2"),
        ("eval demo demo-draft --temperature=-1", "--temperature: "),
    ],
)
def test_mistakes_in_training(command: str, words: str) -> None:
    assert _holds(answer(f"train {command}", 2), words)


def test_a_start_that_training_did_not_write() -> None:
    with pytest.raises(CheckpointError, match="`foretoken train export` wrote"):
        read_llama(Path("model"))


def _holds(said: str, words: str) -> bool:
    """Whether an answer has the words; one that has not is shown."""
    assert re.search(words, said), said
    return True


@pytest.mark.parametrize(
    "line",
    ["generate x", "serve demo --port 0 --speculative-config none",
     "lab ab --candidate http://127.0.0.1:9 --workload demo --dry-run"],
)  # fmt: skip
def test_a_machine_without_a_temporary_folder(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is full, or all of it is read-only: PyTorch cannot even be used."""
    missing = str(tmp_path / "missing")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [missing])
    monkeypatch.setenv("TMPDIR", missing)
    monkeypatch.setattr("foretoken.engine.logs.show_logs", lambda *_: None)
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"foretoken: TMPDIR: got {missing!r}; allowed: a folder that")
    with pytest.raises(ConfigError, match="TMPDIR"):
        LLM("demo")
