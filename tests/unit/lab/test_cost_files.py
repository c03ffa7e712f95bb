"""What engines are told of a cost model, read back as each engine's own source reads it."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.cli.lab.tune_view import TuneOrder, show_costs
from foretoken.errors import ConfigError
from foretoken.lab.launch.cost_files import ToldCosts, tell_costs
from foretoken.lab.launch.engines import DraftingSetup, Unsaid
from foretoken.lab.launch.launch import LaunchPart
from foretoken.lab.launch.read import read_source
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine
from foretoken.lab.records.run_files import LineWriter
from tests.unit.lab.costs import (
    BASE_S,
    DRAFT_S,
    LENGTHS,
    OFF,
    ONCE_S,
    REQUEST_S,
    ROW_S,
    a_model,
    a_run,
    law_s,
    write_grid,
)

COSTS = a_model()
EAGLE3 = DraftingSetup("eagle3", "org/head")
DSPARK = DraftingSetup("dspark", "org/block")
DRAFT = DraftingSetup("draft_model", "org/draft")
NGRAM = DraftingSetup("ngram")


def told(engine: str, drafting: DraftingSetup, folder: str = "out") -> ToldCosts:
    return tell_costs(engine, drafting, COSTS, Path(folder))


def words(found: ToldCosts) -> list[str]:
    return [word for part in found.told if isinstance(part, LaunchPart) for word in part.words]


def value(found: ToldCosts, flag: str) -> str:
    own = words(found)
    return own[own.index(flag) + 1]


def vllm_lookup(schedule: list[list[int]], most_running: int, most: int) -> list[int]:
    """Length by batch size, as vllm/v1/spec_decode/dynamic/utils.py makes it: ranges from 1 on that
    do not overlap, the last carried on."""
    dense, end = [0] * (most_running + 1), 0
    for first, last, k in schedule:
        assert 0 < first <= last and first == end + 1 and k >= 0
        end = last
        for batch in range(first, min(last, most_running) + 1):
            dense[batch] = min(k, most)
    return dense


def test_vllm_s_schedule() -> None:
    found = told("vllm", DRAFT)
    config = json.loads(value(found, "--speculative-config"))
    assert config["num_speculative_tokens"] == 5
    dense = vllm_lookup(config["num_speculative_tokens_per_batch_size"], 64, 5)
    assert [dense[batch] for batch in (1, 2, 3, 16, 17, 64)] == [5, 5, 3, 3, 1, 1]
    said = {one.name: one.why for one in found.told if isinstance(one, Unsaid)}
    assert "PROFILE_CONTEXT_LEN=320" in said["enable_adaptive_verification"]
    assert "more than 24 requests" in said["costs"] and not found.files
    assert "enable_adaptive_verification" not in str(told("vllm", NGRAM)), "it has no chances"


def sglang_steps(text: str, batch: int) -> list[int]:
    """The candidates of a batch, as sglang/srt/speculative/adaptive_spec_params.py finds them: the
    largest key that is no larger."""
    tiers = {int(key): own for key, own in json.loads(text).items() if key.isdigit()}
    assert tiers
    for own in tiers.values():
        steps = own["candidate_steps"]
        assert isinstance(steps, list) and steps
        assert all(isinstance(one, int) and one >= 0 for one in steps)
    return list(tiers[max(key for key in tiers if key <= batch)]["candidate_steps"])


def test_sglang_s_adaptive_file() -> None:
    found = told("sglang", EAGLE3)
    text = found.files["sglang-adaptive.json"]
    assert [sglang_steps(text, batch) for batch in (1, 3, 16, 17, 500)] == [
        [1, 3, 5], [1, 3], [1, 3], [1], [1],
    ]  # fmt: skip
    assert value(found, "--speculative-adaptive-config") == "out/sglang-adaptive.json"
    every = {step for batch in (1, 3, 17) for step in sglang_steps(text, batch)}
    assert int(value(found, "--speculative-num-steps")) in every, "it is refused otherwise"
    assert value(found, "--speculative-num-draft-tokens") == "6"
    assert value(found, "--speculative-eagle-topk") == "1"
    dropped = tell_costs("sglang", EAGLE3, a_model(scale=2.0), Path("out"))
    assert sglang_steps(dropped.files["sglang-adaptive.json"], 24) == [0]


def test_sglang_drafts_equally_far_with_others() -> None:
    found = told("sglang", NGRAM)
    assert not found.files and value(found, "--speculative-num-draft-tokens") == "4"
    assert any("one length" in one.why for one in found.told if isinstance(one, Unsaid))


def line(at: float, xs: list[int], ys: list[float]) -> float:
    assert xs == sorted(set(xs)) and len(xs) == len(ys)
    return float(np.interp(at, xs, ys))


def test_sglang_s_cost_table_of_dspark() -> None:
    """SpsAdditiveCostTable.step_time: requests + budget rows, the whole block drafted."""
    found = told("sglang", DSPARK)
    assert "SGLANG_RAGGED_VERIFY_MODE=compact" in words(found)
    assert value(found, "--speculative-dspark-block-size") == "5"
    [(name, text)] = found.files.items()
    assert value(found, "--speculative-dspark-sps-table-path") == f"out/{name}"
    table = json.loads(text)
    keys = {"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}
    assert table.keys() == keys and table["bias_seconds"] > 0
    for batch, verified in ((1, 5), (8, 3), (24, 1), (200, 5)):
        time_s = table["bias_seconds"] + line(batch, table["bs_probes"], table["alpha_seconds"])
        time_s += line(batch * (1 + verified), table["m_probes"], table["theta_seconds"])
        drafting_s = law_s(0, 5) - law_s(0, verified)
        assert time_s == pytest.approx(law_s(batch, verified) + drafting_s)


def test_tensorrt_llm_s_schedule() -> None:
    found = told("tensorrt-llm", EAGLE3)
    assert value(found, "--config") == "out/tensorrt-llm.yaml"
    config = yaml.safe_load(found.files["tensorrt-llm.yaml"])["speculative_config"]
    assert (config["decoding_type"], config["speculative_model"]) == ("Eagle3", "org/head")
    schedule = config["draft_len_schedule"]
    # validate_draft_len_schedule_and_sort: the smallest key has the longest length.
    assert schedule[min(schedule)] == config["max_draft_len"] == max(schedule.values())
    assert all(batch >= 1 and k >= 0 for batch, k in schedule.items())

    def length(batch: int) -> int:
        return next((schedule[last] for last in sorted(schedule) if batch <= last), 0)

    assert [length(batch) for batch in (1, 2, 3, 16, 17, 5000)] == [5, 5, 3, 3, 1, 0]


DSPARK_KEYS = {
    "decoding_type", "speculative_model", "max_draft_len", "enable_confidence_scheduling",
    "confidence_cost_table_path", "confidence_min_predicted_gain",
}  # fmt: skip
"""Of those that TensorRT-LLM's DSparkDecodingConfig has in 1.4.0rc4; it refuses all others."""
SCHEMA_2 = {"cost_tables", "engine_fingerprint", "engine_fingerprint_sha256", "measurements",
            "schema_version"}  # fmt: skip


def tensorrt_llm_step_ms(text: str) -> Callable[[int, int], float]:
    """Time of a step by verified tokens and requests, as TensorRT-LLM's load_runtime_sps_cost_table
    and SpsCostTable take the file: one object; any field of schema 2 would make it a table of whole
    steps with a fingerprint. Lines between points, level beyond their ends."""
    table = json.loads(text)
    assert isinstance(table, dict) and not table.keys() & SCHEMA_2
    tokens, batches = (list(map(int, table[key])) for key in ("token_counts", "batch_sizes"))
    steps, overheads = (
        list(map(float, table[key])) for key in ("step_time_ms", "batch_overhead_ms")
    )
    fixed, gain = (float(table[key]) for key in ("fixed_overhead_ms", "minimum_predicted_gain"))
    assert len(tokens) == len(steps) and len(batches) == len(overheads)
    for points in (tokens, batches):
        assert all(after > before for before, after in pairwise(points))
    assert all(math.isfinite(one) for one in [*steps, *overheads, fixed, gain])
    assert min(steps) > 0 <= min([*overheads, fixed, gain])
    assert len(set(steps)) > 1, "a level line is taken for none, and nothing is trimmed"
    assert table["_meta"]["lookup"] == "interp", "it is warned of otherwise"

    def step_ms(num_tokens: int, num_requests: int) -> float:
        own = fixed + np.interp(num_requests, batches, overheads)
        return float(np.interp(num_tokens, tokens, steps) + own)

    return step_ms


def test_tensorrt_llm_s_table_of_dspark() -> None:
    block = told("tensorrt-llm", DSPARK)
    config = yaml.safe_load(block.files["tensorrt-llm.yaml"])["speculative_config"]
    assert config.keys() == DSPARK_KEYS
    assert config["enable_confidence_scheduling"] is True and config["max_draft_len"] == 5
    text = block.files[Path(config["confidence_cost_table_path"]).name]
    step_ms = tensorrt_llm_step_ms(text)
    assert json.loads(text)["minimum_predicted_gain"] == config["confidence_min_predicted_gain"]
    for batch, verified in ((1, 5), (8, 3), (24, 1), (1000, 5)):
        drafting_s = law_s(0, 5) - law_s(0, verified)
        expected = 1000 * (law_s(batch, verified) + drafting_s)
        assert step_ms(batch * (1 + verified), batch) == pytest.approx(expected)
    said = {one.name: one.why for one in block.told if isinstance(one, Unsaid)}
    assert "schema 2" in said["confidence_cost_table_path"]
    assert "block size" in said["max_draft_len"]


def tensorrt_llm_budget(survival: list[list[float]], step_ms: Callable[[int, int], float]) -> int:
    """How many drafts it verifies: of all numbers the one with the most tokens for its time, the
    likeliest drafts first."""
    likeliest = sorted((one for row in survival for one in row), reverse=True)
    num = len(survival)
    worth = [
        (num + sum(likeliest[:count])) / step_ms(num + count, num)
        for count in range(1 + len(likeliest))
    ]
    return int(np.argmax(worth))


def test_what_tensorrt_llm_makes_of_the_table() -> None:
    """Its argmax is that of the law behind the measurements, at every load."""
    block = told("tensorrt-llm", DSPARK)
    step_ms = tensorrt_llm_step_ms(block.files["tensorrt-llm-dspark-costs.json"])

    def by_law(tokens: int, batch: int) -> float:
        return 1000 * (BASE_S + REQUEST_S * batch + ROW_S * tokens + ONCE_S + 5 * DRAFT_S)

    budgets = []
    for batch in (1, 4, 16, 64):
        survival = [[0.8**place for place in range(1, 6)] for _ in range(batch)]
        budgets.append(tensorrt_llm_budget(survival, step_ms))
        assert budgets[-1] == tensorrt_llm_budget(survival, by_law)
    assert budgets[0] == 5 and budgets[-1] < 5 * 64, "all alone, fewer under load"


def test_llama_cpp_s_length_and_chance() -> None:
    found = words(told("llama.cpp", DraftingSetup("draft_model", "b.gguf")))
    assert shlex.join(found) == (
        "--spec-type draft-simple --spec-draft-n-max 3 --spec-draft-model b.gguf "
        "--spec-draft-n-min 0 --spec-draft-p-min 0.35"
    )
    assert "--spec-draft-p-min" not in words(told("llama.cpp", NGRAM))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "tensorrt-llm"])
def test_where_nothing_pays_it_is_left_off(engine: str) -> None:
    found = tell_costs(engine, EAGLE3, a_model(scale=12.0), Path("out"))
    assert not words(found) and not found.files
    assert any(one.name == "speculation" for one in found.told if isinstance(one, Unsaid))


def test_what_cannot_be_said_is_an_error() -> None:
    with pytest.raises(ConfigError, match="drafts"):
        tell_costs("vllm", None, COSTS, Path("out"))
    with pytest.raises(ConfigError, match="another"):
        told("tensorrt-llm", DraftingSetup("mlp", "org/heads"))


def run(*given: str | Path) -> Any:
    return CliRunner().invoke(app, ["lab", *map(str, given)])


def test_from_a_grid_to_decide_and_export(tmp_path: Path) -> None:
    grid, out = write_grid(tmp_path / "grid", loads=(1, 8)), tmp_path / "out"
    decided = run("decide", grid, "--fit")
    assert "Speed-up by length" in decided.stdout and "each row 0.500 ms" in decided.stdout
    document = json.loads(run("decide", grid, "--fit", "--json").stdout)
    assert document["costs"]["row_s"] == pytest.approx(0.0005)
    found = json.loads(run("export", "llama.cpp", "--costs", grid, "--json").stdout)
    text = " ".join(shlex.split(found["text"].replace("\\\n ", "")))
    assert text.startswith("llama-server -m a.gguf --port {port} --parallel 24 ")
    assert "--spec-draft-n-max 3" in text and "--spec-draft-n-max 1" not in text
    assert shlex.split(found["proof"])[4:8] == [
        "prompts.txt", "--baseline", OFF, "--candidate",
    ]  # fmt: skip
    assert found["proof"].endswith("--grid concurrency=1,8")
    other = run("export", "sglang", '{"method": "eagle3", "model": "h"}', "--costs", grid,
                "--out", out)  # fmt: skip
    assert other.exit_code == 0, other.output
    written = out / "sglang-adaptive.json"
    assert f"--speculative-adaptive-config {written}" in other.stdout
    assert sglang_steps(written.read_text("utf-8"), 1) == [1, 3, 5]
    assert other.stdout.splitlines()[-1].startswith("# to prove it: foretoken lab ab --workload")


def test_what_is_left_off_needs_no_proof(tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "grid", scale=12.0, loads=(1, 8))
    found = run("export", "llama.cpp", "--costs", grid)
    assert "# speculation: no length that was measured pays" in found.stdout
    assert "--spec-" not in found.stdout and "to prove it" not in found.stdout


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "tensorrt-llm"])
def test_commands_of_any_engine_become_those_of_any(engine: str, tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "grid", loads=(1, 8))
    for command in (
        'vllm serve org/m --port 8001 --speculative-config \'{"method": "eagle3", "model": "h"}\'',
        "sglang serve --model-path org/m --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path h --speculative-num-steps 2 --speculative-attention-mode x",
        "foretoken serve org/m --spec-method eagle3 --spec-model h --port 8001",
    ):
        done = run("export", engine, command, "--costs", grid, "--out", tmp_path, "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert ("attention-mode" in found["text"]) == (
            engine == "sglang" and "attention-mode" in command
        ), "its own words stay"
        source = read_source(found["text"])
        assert [one.engine for one in source.launches] == [engine]
        assert "h" in found["text"] or "h" in str(found["files"])
        errors = [f for f in lint(source, Machine()).findings if f.level == "error"]
        assert not errors, (found["text"], errors)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("openvino", "foretoken serve demo", "--costs", "GRID"), "tensorrt-llm"),
        (("tensorrt-llm", "foretoken serve demo"), "--costs RUN"),
        (("vllm",), "a speculative config"),
        (("vllm", "--costs", "NOWHERE"), "lab ab --out FOLDER"),
        (("vllm", "vllm serve m", "--costs", "GRID"), "drafts"),
        (("llama.cpp", "--costs", "ONE"), "two loads"),
    ],
)
def test_mistakes_say_what_would_do(given: tuple[str, ...], said: str, tmp_path: Path) -> None:
    places = {
        "GRID": write_grid(tmp_path / "grid", loads=(1, 8)),
        "ONE": write_grid(tmp_path / "one", loads=(8,)),
        "NOWHERE": tmp_path / "nowhere",
    }
    result = run("export", *(places.get(word, word) for word in given))
    assert isinstance(result.exception, ConfigError | SystemExit), result.output
    assert said in f"{result.output}{result.exception}"


def an_order(out: Path, loads: tuple[int, ...]) -> TuneOrder:
    return TuneOrder(
        server="", workload="prompts.txt", loads=loads, named=(), lengths=(1, 3, 5),
        max_tokens=None, minutes=1.0, out=out, resume=False, as_json=False,
    )  # fmt: skip


def test_tensorrt_llm_is_told_the_rest_in_its_own_words(tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "grid", loads=(1, 8))
    command = "foretoken serve org/m --spec-method eagle3 --spec-model h --max-num-seqs 32"
    command += " --kv-cache-dtype int8 --port 8001"
    found = run("export", "tensorrt-llm", command, "--costs", grid, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    text = " ".join(line for line in found.stdout.splitlines() if not line.startswith("#"))
    assert shlex.split(text.replace("\\", "")) == [
        "trtllm-serve", "org/m", "--max_batch_size", "32", "--port", "8001",
        "--config", str(tmp_path / "out" / "tensorrt-llm.yaml"),
    ]  # fmt: skip
    assert "# kv_cache_dtype: an option that is not carried over to TensorRT-LLM" in found.stdout


def test_tune_ends_with_the_files_of_its_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it measured at two loads, of the drafter that was proven."""
    with LineWriter(tmp_path / "requests.jsonl") as writer:
        for k in (0, *LENGTHS):
            for turn, batch in enumerate((1, 8)):
                for record in a_run(k, batch):
                    arm = f"eagle3:head k={k}" if k else "off"
                    writer.write(replace(record, arm=arm, block=record.block + 10 * turn))
                    other = replace(record, arm=f"ngram k={k or 1}", block=10 * turn)
                    writer.write(other)
    off = "sglang serve --model-path m --port 30000"
    on = f"{off} --speculative-algorithm EAGLE3 --speculative-draft-model-path head"
    show_costs("sglang", "eagle3:head k=5", on, off, an_order(tmp_path, (1, 8)))
    said = capsys.readouterr().err
    assert sglang_steps((tmp_path / "sglang-adaptive.json").read_text("utf-8"), 1) == [1, 3, 5]
    assert "sglang-adaptive.json" in said and "--speculative-num-steps 5" in said
    assert "to prove it: foretoken lab ab --workload prompts.txt" in said
    (tmp_path / "requests.jsonl").unlink()
    with LineWriter(tmp_path / "requests.jsonl") as writer:
        for k in (0, 5):
            for record in a_run(k, 4):
                writer.write(replace(record, arm=f"eagle3:head k={k}" if k else "off"))
    show_costs("sglang", "eagle3:head k=5", on, off, an_order(tmp_path, (4,)))
    assert "two loads" in capsys.readouterr().err
