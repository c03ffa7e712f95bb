"""`foretoken generate`, `info`, `demo`, `compare` on the packaged models; mistakes; extras."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken import LLM, SamplingParams, __version__
from foretoken.cli.app import app
from foretoken.cli.demo import QUICK, Plan, _passes, installed_methods
from foretoken.config import EngineConfig
from foretoken.engine.wiring import default_speculation
from foretoken.lab.plan.sizes import known_models, load_plan_model
from tests.guards.test_public_face import without_extras
from tests.unit.lab.summaries import ab, write_run

PROMPT = "def add(a, b):\n"


def generate(*arguments: str, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, ["generate", "--max-tokens", "12", *arguments], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM("demo", max_num_seqs=1, batch_invariant=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def test_prompt_argument(expected: str) -> None:
    assert generate(PROMPT, "--batch-invariant", "on") == expected + "\n"


def test_plain_decoding_writes_the_same(expected: str) -> None:
    shown = generate(PROMPT, "--batch-invariant", "on", "--speculative-config", "none")
    assert shown == expected + "\n"


@pytest.mark.parametrize("way", [["--speculative-config", "auto"], []])
def test_auto_writes_the_same(expected: str, way: list[str]) -> None:
    assert generate(PROMPT, "--batch-invariant", "on", *way) == expected + "\n"


def test_where_a_draft_may_change_a_token_nothing_drafts_by_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings: dict[str, Any] = {"model": "demo", "dtype": "float16"}
    assert default_speculation(EngineConfig.from_kwargs(**settings)) is None
    assert "float16" in caplog.text and "--speculative-config auto" in caplog.text
    exact = EngineConfig.from_kwargs(**settings, batch_invariant=True)
    assert default_speculation(exact) == {"method": "auto"}


def test_prompt_from_standard_input(expected: str) -> None:
    assert generate("--batch-invariant", "on", stdin=PROMPT) == expected + "\n"


def test_prompt_from_a_file(tmp_path: Path, expected: str) -> None:
    file = tmp_path / "prompt.py"
    file.write_text(PROMPT)
    shown = generate("--batch-invariant", "on", "--file", str(file))
    assert shown == expected + "\n"


@pytest.mark.slow
def test_a_seed_repeats_a_sample() -> None:
    options = (PROMPT, "--temperature", "1", "--seed", "3")
    assert generate(*options) == generate(*options)


def test_info_says_what_the_model_is() -> None:
    result = CliRunner().invoke(app, ["info", "demo", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["model"] == "demo"
    per_layer = 2 * facts["key_value_heads"] * facts["head_dim"] * 2
    assert facts["dtype"] == "bfloat16" and facts["run_by"] == "Foretoken's own layers"
    assert facts["kv_bytes_per_token"] == facts["layers"] * per_layer
    assert facts["weight_bytes"] == 2 * facts["parameters"]
    assert facts["weights_in_memory_bytes"] == facts["weight_bytes"], "a tied table is there once"


def test_info_knows_smaller_weights_and_keys() -> None:
    options = ["--quantization", "int4", "--kv-cache-dtype", "int8", "--json"]
    result = CliRunner().invoke(app, ["info", "demo", *options])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    per_layer = 2 * facts["key_value_heads"] * (facts["head_dim"] + 4)
    assert facts["kv_bytes_per_token"] == facts["layers"] * per_layer
    assert facts["weights_in_memory_bytes"] < 0.6 * facts["weight_bytes"]
    assert facts["activations"] == "16 bits beside integer weights, 8 as a draft model"


def test_info_of_a_mixture_with_windows(tmp_path: Path) -> None:
    """gpt-oss-120b, by its published config.json alone: what its card says, what steps of more rows
    read, and what a token takes once it has left the window."""
    row = known_models()["openai/gpt-oss-120b"]["config"]
    kinds = row["layer_types"] * (row["num_hidden_layers"] // 2)
    config = {**row, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    result = CliRunner().invoke(app, ["info", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["parameters"] / 1e9 == pytest.approx(116.8, rel=0.005)
    assert facts["active_parameters"] / 1e9 == pytest.approx(5.13, rel=0.01)
    assert (facts["experts"], facts["experts_a_token"]) == (128, 4)
    assert facts["weights_in_memory_bytes"] / 2**30 == pytest.approx(60.8, rel=0.01)
    plan = load_plan_model("gpt-oss-120b", "target")
    dense = 2 * (plan.head_params + plan.dense_params)
    for step in facts["steps"]:
        share = 1 - (1 - 4 / 128) ** step["rows"]
        read = dense + share * plan.expert_params * 4.25 / 8
        assert step["bytes"] == pytest.approx(read, rel=0.01), step
    eight = facts["steps"][4]
    assert eight["bytes"] / facts["steps"][0]["bytes"] == pytest.approx(3.37, abs=0.1)
    assert eight["break_even_tokens"] == pytest.approx(4.04, abs=0.1), "rows multiply too"
    token = 2 * 36 * 2 * 8 * 64
    assert facts["kv_bytes_per_token"] == token
    assert facts["kv_bytes_per_token_before_windows"] == token // 2
    assert facts["kv_bytes_full_context"] == token // 2 * (131072 + 128)


def test_info_knows_processes_that_share_a_model() -> None:
    def facts(*options: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["info", "demo", "--json", *options])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    alone, shared = facts(), facts("--tensor-parallel-size", "2")
    assert alone["processes"] is None and shared["processes"] == 2
    table = 2 * alone["vocabulary"] * alone["hidden_size"]
    assert shared["weights_in_memory_bytes"] >= alone["weights_in_memory_bytes"] + table
    assert shared["weights_of_a_process_bytes"] == shared["weights_in_memory_bytes"] // 2


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
MISSPELT, NOT_BUILT = NGRAM.replace("tokens", "token"), '{"method": "mtp"}'


@pytest.mark.slow
def test_demo_ends_with_one_json_document() -> None:
    result = CliRunner().invoke(app, ["demo", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    [line] = result.stdout.splitlines()
    document = json.loads(line)
    assert document["identical"] is True
    rows = {(row["workload"], row["arm"]) for row in document["results"]}
    assert len(rows) == len(document["results"]) == 3 * len(installed_methods(QUICK))
    for row in document["results"]:
        assert row["identical"], row
        assert row["tokens_per_s"] > 0
        assert row["acceptance_length"] >= 1.0
        if row["arm"] == "draft_model":
            assert len(row["acceptance_by_position"]) == 4
            assert list(row["acceptance_by_position"]) == sorted(
                row["acceptance_by_position"], reverse=True
            )
    assert "All methods wrote the same tokens." in result.stderr
    assert all(name in result.stderr for name in installed_methods(QUICK))
    assert "One prompt, run once." in " ".join(result.stderr.split())


def test_demo_says_how_many_passes_there_were() -> None:
    """Not `repeat 1 of 3` and then `medians over 1 repeats`."""
    plan = Plan()
    assert _passes(3, 6, plan) == "Medians over 6 prompts of medians over 3 passes"
    assert _passes(1, 6, plan) == (
        "Medians over 6 prompts, each run once (no time for 3 within 110 s)"
    )


@pytest.mark.slow
def test_compare_answers_with_table_document_and_exit_code(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\nimport os\n")
    arguments = ["compare", "demo", "--speculative-config", NGRAM, "--prompts", str(prompts)]
    options = ["--repeats", "2", "--max-tokens", "12", "--batch-invariant", "on", "--json"]
    result = CliRunner().invoke(app, arguments + options)
    document = json.loads(result.stdout)
    assert result.exit_code == document["exit_code"]
    assert result.exit_code == 4 and document["verdict"] == "MEASURE MORE", "two prompts are few"
    off, on = document["results"]
    assert (off["arm"], on["arm"]) == ("off", "on")
    assert on["identical"]
    assert on["num_prompts"] == 2
    assert on["num_repeats"] == 2
    assert on["speedup"]["low"] <= on["speedup"]["median"] <= on["speedup"]["high"]
    assert "latency per request" in result.stderr


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"foretoken {__version__}\n"


def test_help_lists_every_subcommand() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in ("generate", "demo", "compare", "info", "train"):
        assert name in result.stdout


def test_info_explains_itself() -> None:
    """No `None`, a tied table counted once, and whether kernels are on."""
    text = run("info", "demo").stdout
    assert "None" not in text and "windows" not in text and "kv per token" in text
    assert text.count("22.0 MB") == 2, text
    assert re.search(r"kernels +│ (on, \w+|off \()", text), text
    document = json.loads(run("info", "demo", "--json").stdout)
    assert document["kernels"].split(",")[0].split(" ")[0] in ("on", "off")


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("info ./no-such-folder", 3, "model no-such-folder config.json"),
        ("info demo --quantization int3", 2, "--quantization int8"),
        ("info demo --kv-cache-dtype int3", 2, "--kv-cache-dtype int8"),
        ("info demo --tensor-parallel-size 5", 2, "'key heads'"),
        ("info demo --costs --tensor-parallel-size 2", 2, "--costs"),
        ("generate x --speculative-config {oops", 2, "--speculative-config {oops"),
        (f"generate x --speculative-config '{MISSPELT}'", 2, "token: num_speculative_tokens"),
        (f"generate x --speculative-config '{NOT_BUILT}'", 2, "mtp 'not yet built'"),
        ("generate x --temperature -1", 2, "temperature -1"),
        ("generate x --temperature nan", 2, "temperature nan"),
        ("generate x --top-p 0", 2, "top_p 0"),
        ("generate x --max-tokens 0", 2, "max_tokens 0"),
        ("generate x --batch-invariant maybe", 2, "--batch-invariant maybe"),
        ("generate x --dtype int3", 2, "dtype int3"),
        ("generate y --file prompts.txt", 2, "PROMPT"),
        ("generate --file nowhere.txt", 2, "--file nowhere.txt"),
        (f"compare demo --speculative-config '{NGRAM}' --prompts nowhere", 2, "--prompts nowhere"),
        ("compare demo --speculative-config none --prompts prompts.txt", 2, "--speculative-config"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_in_one_line(
    command: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("x\n")
    result = run(*shlex.split(command))
    assert result.exit_code == code, result.output
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("foretoken: ") and all(word in line for word in shlex.split(words)), line


OFFLINE = """
from foretoken import LLM, SamplingParams
from foretoken.errors import MissingPackageError

params = SamplingParams(temperature=0.0, max_tokens=8)
with LLM("demo", speculative_config={"method": "eagle3", "model": "demo-eagle3"}) as llm:
    for output in llm.generate(["def f("], params):
        print(len(output.outputs[0].token_ids))
    try:
        llm.generate(["x"], SamplingParams(structured_outputs={"regex": "[ab]+"}))
    except MissingPackageError as error:
        print(error)
    print(len(llm.generate(["def f("], params)))
"""
COMMAND = "sys.argv = ['foretoken', *{words!r}]\nfrom foretoken.cli import main\nmain()"


def without_extras_run(*words: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a command line where no extra is installed."""
    done = without_extras(COMMAND.format(words=list(words)), timeout_s=280)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate 'def f(' --max-tokens 4", "lab plan demo"])
def test_commands_that_need_no_extra(command: str) -> None:
    status, output, errors = without_extras_run(*shlex.split(command))
    assert status == 0, errors
    assert output.strip()


@pytest.mark.slow
def test_offline_use_needs_no_extra_and_grammars_name_theirs() -> None:
    done = without_extras(OFFLINE, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "8",
        "structured_outputs needs llguidance, which is not installed: "
        'pip install "foretoken[serve]"',
        "1",
    ]


URL = "http://127.0.0.1:9"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["serve", "demo"], "starlette", "serve"),
        (["lab", "record", URL], "uvicorn", "serve"),
        (["lab", "ab", "--candidate", URL, "--workload", "demo"], "httptools", "serve"),
        (["lab", "decide", "RUN", "--html", "page.html"], "matplotlib", "report"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given[:2]),
)
def test_other_commands_say_what_to_install(
    words: list[str], package: str, extra: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", ab(1.6))
    status, _, errors = without_extras_run(*(str(run) if w == "RUN" else w for w in words))
    assert status == 2, errors
    [line] = errors.strip().splitlines()
    assert line.startswith("foretoken: ")
    assert line.endswith(
        f'needs {package}, which is not installed: pip install "foretoken[{extra}]"'
    )
