"""What is tried on a server and how it is told: each engine in its own words, nothing started that
does not load; launches.yaml has the commands word by word.
"""

import json
import math
import shlex

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.launch.engines import DraftingSetup
from foretoken.lab.tune.real import LEAST_TOKENS, fitting, time_to_ask
from foretoken.lab.tune.server_command import ServerCommand, offered, settings_of
from foretoken.lab.tune.settings import OFF, Setting

DRAFTERS = {
    one.name: one
    for one in (
        DraftingSetup("ngram"),
        DraftingSetup("draft_model", "org/small-1b"),
        DraftingSetup("eagle3", "org/head"),
        DraftingSetup("mtp"),
    )
}
LOADS = (1, 8, 64)


def line(text: str, setting: Setting, port: str | None = None) -> str:
    return ServerCommand.parse(text).line(setting, DRAFTERS, LOADS, port)


def test_what_the_command_drafts_with_is_taken_out_and_tried() -> None:
    config = (
        '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 4, '
        '"draft_tensor_parallel_size": 1}'
    )
    text = f"vllm serve org/model --speculative-config '{config}' \\\n --tensor-parallel-size 4"
    command = ServerCommand.parse(text)
    assert command.given == DraftingSetup(
        "eagle3", "org/head", {"draft_tensor_parallel_size": 1}, num_drafts=4
    )
    drafters = offered(command, ())
    assert list(drafters) == ["eagle3:head", "ngram"]
    told = shlex.split(command.line(Setting("eagle3:head", (2,)), drafters, LOADS, "{port}"))
    assert told[3:5] == ["--tensor-parallel-size", "4"]
    assert json.loads(told[6])["draft_tensor_parallel_size"] == 1
    assert told[-2:] == ["--port", "{port}"]


def test_old_flags_of_speculation_go_too() -> None:
    for flags in (
        "--speculative-model org/x --num-speculative-tokens 5",
        "--speculative_config '{}'",
        "--speculative-config={}",
        "-sc '{}'",
        "--spec-method ngram --spec-tokens 3",
        "--speculative-config.method ngram",
    ):
        assert line(f"vllm serve m {flags} --seed 1", OFF) == "vllm serve m --seed 1"


def test_foretoken_decides_as_far_as_its_command_says() -> None:
    config = '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 8}'
    given = f"foretoken serve org/m --speculative-config '{config}'"
    assert line(given, Setting("auto")) == given


def test_a_command_with_k_is_tuned_whatever_it_starts() -> None:
    text = "./serve.sh --drafts {k} --port {port}"
    command = ServerCommand.parse(text)
    assert command.line(OFF, {}, LOADS, "{port}") == "./serve.sh --drafts 0 --port {port}"
    assert settings_of(command, (), (1, 3)) == (Setting("k", (1,)), Setting("k", (3,)))
    assert command.line(Setting("k", (3,)), {}, LOADS) == "./serve.sh --drafts 3 --port {port}"
    with pytest.raises(ConfigError, match="none beside a command"):
        offered(command, ["ngram"])


def test_a_packaged_model_brings_its_drafters() -> None:
    command = ServerCommand.parse("foretoken serve demo")
    drafters = offered(command, ())
    assert "ngram" in drafters
    assert any(one.model for one in drafters.values())
    names = [setting.name for setting in settings_of(command, tuple(drafters), (1, 3))]
    assert names[0] == "auto"
    assert len(names) == 1 + 2 * len(drafters)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://127.0.0.1:8000", "starts the server anew"),
        ("sleep 5", "{k} for the draft length"),
        ("vllm serve 'x", "No closing quotation"),
        ("docker run -p 8000:8000 vllm/vllm-openai --model m", "docker run -p {port}:8000"),
        ("trtllm-serve m", "vllm serve MODEL"),
    ],
)
def test_what_cannot_be_tuned_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("{", r"\{").replace("}", r"\}")):
        ServerCommand.parse(text)


@pytest.mark.parametrize(
    ("text", "said"), [("egle3:x", "eagle3"), ("{nope", "METHOD:MODEL"), ('{"model": 1', "JSON")]
)
def test_drafters_are_named_by_their_methods(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DraftingSetup.parse(text)


@pytest.mark.parametrize(
    ("flags", "name", "told"),
    [
        (
            "--spec-type draft-simple --spec-draft-n-max 4 --spec-draft-device none -md d/b.gguf",
            "draft_model:b.gguf",
            "--spec-type draft-simple --spec-draft-n-max 2 --spec-draft-model d/b.gguf "
            "--spec-draft-device none",
        ),
        (
            "--model-draft=b.gguf --draft-max 8 --no-spec-draft-backend-sampling",
            "draft_model:b.gguf",
            "--spec-type draft-simple --spec-draft-n-max 2 --spec-draft-model b.gguf "
            "--no-spec-draft-backend-sampling",
        ),
        (
            "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 9",
            "ngram",
            "--spec-type ngram-simple --spec-ngram-simple-size-m 2 --spec-ngram-simple-size-n 4",
        ),
    ],
)
def test_what_llama_cpp_drafts_with_is_tried(flags: str, name: str, told: str) -> None:
    command = ServerCommand.parse(f"llama-server -m a.gguf {flags} -np 4")
    drafters = offered(command, ())
    assert list(drafters) == list(dict.fromkeys([name, "ngram"]))
    assert command.line(OFF, drafters, LOADS) == "llama-server -m a.gguf -np 4"
    assert command.line(Setting(name, (2,)), drafters, LOADS).endswith(f" -np 4 {told}")


def test_what_sglang_drafts_with_is_tried() -> None:
    text = "sglang serve --model-path m --speculative-algorithm EAGLE3 "
    text += "--speculative-draft-model-path org/head --speculative-num-steps 3"
    assert list(offered(ServerCommand.parse(text), ())) == ["eagle3:head", "ngram"]
    assert ServerCommand.parse("sglang serve --model-path m").given is None


def test_llama_cpp_refuses_what_it_has_no_word_for() -> None:
    drafters = {"medusa": DraftingSetup("medusa")}
    with pytest.raises(ConfigError, match=r"llama\.cpp"):
        ServerCommand.parse("llama-server -m a").line(Setting("medusa", (3,)), drafters, LOADS)


def dry_run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["lab", "tune", *words, "--workload", "demo", "--dry-run"])
    return result.exit_code, result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "field", "why"),
    [
        (["vllm serve Qwen/Qwen2.5-0.5B-Instruct -tp 4"], "SERVER", "14 attention heads"),
        (["vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4", "--drafter",
          "draft_model:turboderp/Qwama-0.5B-Instruct"],
         "--drafter", "the draft's 14 attention heads"),
        (["vllm serve meta-llama/Llama-3.1-8B-Instruct", "--drafter",
          "draft_model:Qwen/Qwen3-0.6B"], "--drafter", "different vocabularies"),
        (["vllm serve m", "--device", "h100-sxm"], "--device", "`foretoken lab plan MODEL"),
        (["vllm serve m", "--count", "2"], "--count", "`foretoken lab plan MODEL"),
    ],
)  # fmt: skip
def test_what_does_not_load_is_refused_before_the_first_start(
    words: list[str], field: str, why: str
) -> None:
    code, said = dry_run(*words)
    assert code == 2 and said.startswith(f"foretoken: {field}: "), said
    assert why in said and "settings against" not in said


@pytest.mark.slow
def test_one_drafter_that_does_not_load_is_left_out() -> None:
    words = ("--drafter", "draft_model:Qwen/Qwen3-0.6B", "--drafter", "ngram")
    code, said = dry_run("vllm serve meta-llama/Llama-3.1-8B-Instruct", *words)
    assert code == 0, said
    assert "not started with draft_model:Qwen3-0.6B: " in said
    assert '"draft_model"' not in said and '"ngram"' in said


SIZES = ((1, 8), (8, 16))


def test_answers_are_cut_where_whole_ones_leave_no_time() -> None:
    assert fitting(60.0, 256, SIZES, (0.003,)) == 0, "a fast server is asked for whole answers"
    # 8 answers one by one and 16 four by four.
    assert fitting(60.0, 256, SIZES, (0.1,)) == int(60.0 / (0.1 * 8 + 0.1 * 16 / 4))
    stood_still = fitting(60.0, 256, SIZES, (40.0, 0.1))
    assert stood_still == fitting(60.0, 256, SIZES, (0.1,)), "one standstill does not cut all"
    assert fitting(1.0, 256, SIZES, (0.1,)) == LEAST_TOKENS
    assert fitting(1.0, LEAST_TOKENS, SIZES, (0.1,)) == 0
    assert fitting(1.0, 256, SIZES, (math.nan,)) == 0, (
        "nothing is known of a server that was silent"
    )


def test_a_slow_start_leaves_some_time_to_ask() -> None:
    assert time_to_ask(1600.0, 60.0) == 40.0
    assert time_to_ask(1600.0, 99.0) == 40.0
    assert time_to_ask(1600.0, 10.0) == 90.0
