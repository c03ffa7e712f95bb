"""From a grid of lengths and loads on a live server to its own flags, and their A/B: on a stand-in
that takes llama.cpp's flags and serves the mock as they say."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app

LAW = "--step-ms 4 --row-ms 0.2 --draft-ms 0.2 --alpha 0.8 --alpha-spread 0 --restart-sd 0"
LLAMA_SERVER = """#!{python}
import os, sys
words = sys.argv[1:]
def value(flag, default):
    return words[words.index(flag) + 1] if flag in words else default
length = value("--spec-draft-n-max", "0")
if length != "0":
    assert value("--spec-type", "") == "draft-simple"
    assert value("--spec-draft-model", "") == "b.gguf"
    assert 0.0 <= float(value("--spec-draft-p-min", "0")) <= 1.0
    assert value("--spec-draft-n-min", "0") == "0"
os.execv("{python}", ["{python}", "-m", "tests.mock_server", "--port", value("--port", ""),
                      "--k", length, *"{law}".split()])
"""


def lab(*words: str) -> Any:
    return CliRunner().invoke(app, ["lab", *words])


@pytest.mark.slow
def test_a_grid_becomes_flags_and_the_flags_an_ab(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(LLAMA_SERVER.format(python=sys.executable, law=LAW), "utf-8")
    program.chmod(0o755)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"def f{i}(x):\n", "max_tokens": 64} for i in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    off = f"{shlex.quote(str(program))} -m a.gguf --port {{port}}"
    on = f"{off} --spec-type draft-simple --spec-draft-model b.gguf --spec-draft-n-max {{k}}"
    sizes = ["--workload", str(prompts), "--blocks", "1", "--requests", "6", "--no-page"]
    grid = str(tmp_path / "grid")
    measured = lab("ab", "--baseline", off, "--candidate", on, *sizes, "--out", grid,
                   "--grid", "k=1,4", "--grid", "concurrency=1,4")  # fmt: skip
    assert measured.exit_code in (0, 1, 4), measured.output
    costs = json.loads(lab("decide", grid, "--fit", "--json").stdout)["costs"]
    assert [one["k"] for one in costs["lengths"]] == [1, 4]
    assert costs["base_s"] > 0.001, "a step of 4 ms, more where the machine is busy"
    done = lab("export", "llama.cpp", "--costs", grid, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    told = shlex.split(found["text"].replace("\\\n ", ""))
    assert told[told.index("--spec-draft-n-max") + 1] in ("1", "4"), found
    proof = shlex.split(found["proof"])[2:]
    assert proof[proof.index("--candidate") + 1].count("{port}") == 1
    proven = lab(*proof, *sizes[2:], "--out", str(tmp_path / "proof"))
    assert proven.exit_code in (0, 1, 4), proven.output
    cells = json.loads((tmp_path / "proof" / "grid.json").read_text("utf-8"))["cells"]
    assert [cell["values"]["concurrency"] for cell in cells] == [1, 4]
    assert all(cell["num_steps"] > 0 for cell in cells), "it drafts as it was told"
