"""A search starts nothing of which plan and lint say that it does not load."""

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app

BIG = "vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 8192"
DRAFT = "draft_model:meta-llama/Llama-3.1-8B-Instruct"


def dry_run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["lab", "tune", *words, "--workload", "demo", "--dry-run"])
    return result.exit_code, result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "field", "why"),
    [
        ([f"{BIG} -tp 2", "--drafter", DRAFT, "--device", "h100-sxm", "--count", "2"],
         "--drafter", "does not load: 78.6 GB of weights"),
        ([BIG, "--drafter", DRAFT, "--device", "h100-sxm", "--count", "2"],
         "SERVER", "141.1 GB of them the target's own"),
        (["vllm serve Qwen/Qwen2.5-0.5B-Instruct -tp 4"], "SERVER", "14 attention heads"),
        ([f"{BIG} -tp 4", "--drafter", "draft_model:turboderp/Qwama-0.5B-Instruct"],
         "--drafter", "the draft's 14 attention heads"),
        ([f"{BIG} -tp 2 --quantization fp8", "--device", "h100-sxm", "--count", "2", "--drafter",
          '{"model": "meta-llama/Llama-3.2-1B-Instruct", "draft_tensor_parallel_size": 1}'],
         "--drafter", "2 ranks"),
        (["vllm serve meta-llama/Llama-3.1-8B-Instruct", "--drafter",
          "draft_model:Qwen/Qwen3-0.6B"], "--drafter", "different vocabularies"),
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
    words = ("--device", "h100-sxm", "--count", "2", "--drafter", DRAFT, "--drafter", "ngram")
    code, said = dry_run(f"{BIG} -tp 2", *words)
    assert code == 0, said
    assert "not started with draft_model:Llama-3.1-8B-Instruct on 2 x h100-sxm" in said
    assert '"draft_model"' not in said and '"ngram"' in said
    assert "expected, not measured: draft_model" not in said


@pytest.mark.slow
def test_four_bits_load_where_sixteen_do_not() -> None:
    words = ("--device", "h100-sxm", "--drafter", "ngram")
    assert dry_run(BIG, *words)[0] == 2
    assert dry_run(f"{BIG} --quantization awq", *words)[0] == 0
